// Where the filter of a convolution begins for each token of a CTA: a Corner in 16 bytes of shared memory, for kernels whose threads copy
// patches themselves (gemm_kernel.cuh, w8a8_kernel.cuh).
#pragma once

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/tasks/patches.hpp"

namespace nibble::cuda {

constexpr int kCornerBytes = 16;

/// The corner of token `token` of `tokens`; past the last token it is outside of every image.
__device__ inline void store_corner(std::uint32_t to, const Patches& p, int token, int tokens) {
  constexpr int kNowhere = -(1 << 30);
  const Corner from = corner(p, min(token, tokens - 1));
  const int h = token < tokens ? from.h : kNowhere;
  ptx::store_shared16(
      to, {static_cast<std::uint32_t>(from.image), static_cast<std::uint32_t>(h), static_cast<std::uint32_t>(from.w), 0});
}
__device__ inline Corner load_corner(std::uint32_t from) {
  const uint4 v = ptx::load_shared16(from);
  return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z)};
}

}  // namespace nibble::cuda
