// A packed weight as plain bytes: a header, and the bytes that its kernels read.
//
//   std::string block = *packed_header(weight);                     // and after it weight.bytes()
//   auto again = packed_from_bytes(block, bytes, Backend::cpu, owner);  // in another process, or on another machine
//
// The header has everything but the bytes: 8 bytes "NIBBLE01", its own size as a little-endian integer of 8 bytes, and JSON, filled up
// with spaces to a multiple of kPackedAlignment, so that the bytes may follow it. docs/howto/pack.md describes the JSON, which is that of
// files of packed weights.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "nibble/device.hpp"
#include "nibble/plan.hpp"
#include "nibble/status.hpp"

namespace nibble {

/// The size of a header is a multiple of it, in bytes; packed bytes in device memory begin at a multiple.
inline constexpr std::size_t kPackedAlignment = 256;
/// The bytes of a header that packed_header_size() reads.
inline constexpr std::size_t kPackedPrefix = 16;

/// The header of a weight: layout, scheme, sizes, specification, bias, pre-scale and act-order.
Result<std::string> packed_header(const PackedWeight& weight);

/// The size of a header that begins with `prefix`, of kPackedPrefix bytes or more. Errors: corrupt_data when it is none.
Result<std::size_t> packed_header_size(std::string_view prefix);

/// The layout that a header names, whether this build has it or not. Errors: corrupt_data when it is no header.
Result<std::string> packed_layout(std::string_view header);

/// The weight of a header. It reads `bytes`, in host memory (Backend::cpu, at a multiple of 64) or on the current GPU (Backend::cuda, at a
/// multiple of kPackedAlignment), where they are, as long as `owner`, which is not null, lives; they must not change.
/// Errors: corrupt_data when the header contradicts itself or the bytes are too few or too many; unsupported for another version of the
/// header, for a layout that this build does not have in that version, or that is not for that memory; invalid_argument for misaligned
/// bytes.
Result<PackedWeight> packed_from_bytes(std::string_view header, std::span<const std::byte> bytes, Backend memory,
                                       std::shared_ptr<void> owner);

}  // namespace nibble
