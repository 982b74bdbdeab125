// The names and numbers of files of packed weights, shared by reading and writing. docs/howto/pack.md has the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include <fmt/format.h>

namespace nibble::packed {

/// Of the container and its metadata: raise it with every change that older libraries would misread. Layouts have versions of their own.
inline constexpr std::string_view kFormatVersion = "1";

// The metadata.
inline constexpr std::string_view kFormatKey = "format", kFormatName = "nibble-packed";
inline constexpr std::string_view kFormatVersionKey = "format_version", kLibraryVersionKey = "library_version";
inline constexpr std::string_view kCheckpointKey = "checkpoint", kModulesKey = "modules";

/// The name of a tensor of a weight: kPacked, or one of kSmallTensors.
inline std::string tensor_name(std::string_view weight, std::string_view key) { return fmt::format("{}.{}", weight, key); }
inline constexpr std::string_view kPacked = "packed";

/// Where packed bytes begin in the file, and what their number is rounded up to.
inline constexpr std::size_t kAlignment = 64;
constexpr std::uint64_t padded(std::uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// The path of a checkpoint, absolute and with a name at its end: "model/" and "./model" become ".../model".
inline std::filesystem::path checkpoint_place(const std::filesystem::path& checkpoint) {
  const std::filesystem::path path = std::filesystem::absolute(checkpoint).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

}  // namespace nibble::packed
