// Asking for the weight of the call after this one (next_weight.hpp).
#pragma once

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/tasks/next_weight.hpp"

namespace nibble::cuda {

/// By one thread of every CTA, when it has requested its own records: requests are served in their order.
__device__ inline void prefetch(const NextWeight& next) {
  const std::byte* at = next.bytes + std::size_t{next.stride} * blockIdx.x;
#pragma unroll 1
  for (unsigned i = blockIdx.x; i < next.pieces; i += gridDim.x, at += std::size_t{next.stride} * gridDim.x)
    ptx::prefetch_l2(at, NextWeight::kPieceBytes);
}

}  // namespace nibble::cuda
