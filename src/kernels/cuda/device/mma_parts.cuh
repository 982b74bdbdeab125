// The matrix products of mma.cuh from the smaller ones of compute capability 7.5. Operands lie in the same registers: a lane 4g + t has
//
//                    A: row g   row g + 8      B: column g        D: columns 2t and 2t + 1 of row g │ of row g + 8
//   first half of K      a[0]    a[1]             b0                 d[0] d[1]                       │ d[2] d[3]
//   second half          a[2]    a[3]             b1
//
// so that a product is one of each half of K, and of s8 one of each half of the rows, too.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/ptx.cuh"

namespace nibble::cuda {

/// D[16,8] += A[16,16] · B[16,8] of f16.
__device__ __forceinline__ void mma_f16_of_parts(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  ptx::mma_m16n8k8(d, a[0], a[1], b0);
  ptx::mma_m16n8k8(d, a[2], a[3], b1);
}

/// D[16,8] += A[16,16] · B[16,8] of s8.
__device__ __forceinline__ void mma_s8_half_of_parts(std::int32_t (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
  ptx::mma_m8n8k16(d[0], d[1], a0, b);
  ptx::mma_m8n8k16(d[2], d[3], a1, b);
}

/// D[16,8] += A[16,32] · B[32,8] of s8.
__device__ __forceinline__ void mma_s8_of_parts(std::int32_t (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                std::uint32_t b1) {
  mma_s8_half_of_parts(d, a[0], a[1], b0);
  mma_s8_half_of_parts(d, a[2], a[3], b1);
}

}  // namespace nibble::cuda
