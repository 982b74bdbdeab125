// What a kernel asks for in L2 on behalf of the call after it (Operands::next), once it has requested its own weight. Kernels for up to 16
// tokens do: those for more are bound by their products, and memory has time for weights anyway.
//
//   layer 1   ──requests──▶│ reads, multiplies, stores │                        memory is idle at the end of a call, and
//   layer 2's weight       │──── into L2 ────▶         │ other kernels │        while kernels run that read little
//   layer 2                                                            │ reads L2
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace nibble::cuda {

/// Pieces of a weight, evenly spaced over all of it: where they are not all of it, every CTA of the next call has the same share of them,
/// and none waits longer than the others.
struct NextWeight {
  /// Enough to keep memory busy with few instructions, and few enough for every CTA to have some of a small layer.
  static constexpr int kPieceBytes = 4096;
  /// Of a call: about what an H200 reads while a call ends and the next one begins. The first records of the next call wait behind more.
  static constexpr std::int64_t kMostBytes = std::int64_t{8} << 20;

  const std::byte* bytes = nullptr;
  std::uint32_t stride = 0;  // bytes between pieces, a multiple of 16
  std::uint32_t pieces = 0;
};

/// `bytes` is aligned to 16. The rest of a weight that is no multiple of a piece is left out.
inline NextWeight next_weight(const std::byte* bytes, std::int64_t size) {
  const std::int64_t pieces = std::min(size, NextWeight::kMostBytes) / NextWeight::kPieceBytes;
  if (pieces == 0) return {};
  return {bytes, static_cast<std::uint32_t>(size / pieces / 16 * 16), static_cast<std::uint32_t>(pieces)};
}

}  // namespace nibble::cuda
