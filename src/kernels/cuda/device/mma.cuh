// D[16,8] += A[16,16] · B[16,8] in one warp: 16-bit operands, f32 sums. Compute capability 7.5 has the products of f16 and of s8 in parts, and
// none of bf16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/mma_parts.cuh"
#include "kernels/cuda/device/ptx.cuh"

namespace nibble::cuda {

/// Whether there are products of such numbers. Kernels of other numbers are empty, and no row of the kernel table runs them.
template <class Act>
constexpr bool kHasProducts = !ptx::kIsTuring || std::is_same_v<Act, __half>;

template <class Act>
__device__ inline void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);

template <>
__device__ inline void mma<__half>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if constexpr (ptx::kIsTuring)
    mma_f16_of_parts(d, a, b0, b1);
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma<__nv_bfloat16>(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if constexpr (kHasProducts<__nv_bfloat16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two ones.
template <class Act>
constexpr std::uint32_t kOnes = 0x3c003c00u;
template <>
constexpr std::uint32_t kOnes<__nv_bfloat16> = 0x3f803f80u;

/// m16n8k32 of s8: exact, modulo 2³².
__device__ __forceinline__ void mma_s8(std::int32_t (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if constexpr (ptx::kIsTuring)
    mma_s8_of_parts(d, a, b0, b1);
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// m16n8k16 of s8: half of the above, with the first or the last two registers of its A operand.
__device__ __forceinline__ void mma_s8_half(std::int32_t (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
  if constexpr (ptx::kIsTuring)
    mma_s8_half_of_parts(d, a0, a1, b);
  else
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

}  // namespace nibble::cuda
