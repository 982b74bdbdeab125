// Codes → the A operand of m16n8k16, in as few instructions as the bits allow. Nothing is subtracted and nothing is rounded here:
//
//   operand = unit · (u + offset)       u the stored code; unit and offset known at compile time
//
// so that Σ W·x of a group is s·(Σ operand·x / unit − (z + offset)·Σx). Σx costs one more product per 16 channels, with a matrix
// of ones; subtracting z from every weight would cost four instructions per eight of them.
//
//   f16, 4 and 8 bits   a code in the low bits of a half *is* a number: the subnormal u·2⁻²⁴, which the tensor cores multiply
//                       exactly and at full speed. Rows g+8 keep their code 4 bits higher and are 16 times as large: no shift.
//   bf16, 4 bits        products of bf16 subnormals would underflow f32; the code goes into the mantissa of 128:
//                       128 + u. The sums are about 30 times as large as with u − z and so is their rounding, still in f32.
//   bf16, 8 bits        does not fit into a mantissa of 7 bits: through f32, where 2²³ + u − (2²³ + 128) is exact, to u − 128.
//   f16, float codes    placed (float_codes.cuh): their value times a power of two, the unit
//   bf16, float codes   their value: placed ones would be so small that products underflow f32
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/weights/float_codes.cuh"

namespace nibble::cuda {

/// (a & mask) | magic
template <std::uint32_t kMask>
__device__ inline std::uint32_t masked_or(std::uint32_t a, std::uint32_t magic) {
  return ptx::lop3<0xea>(a, kMask, magic);
}

/// unit(0) of rows g, unit(1) of rows g+8 of a fragment.
template <class Act, Codes kCodes>
struct Operand;

template <>
struct Operand<__half, Codes::u4> {
  __device__ static constexpr float unit(int upper) { return upper != 0 ? 0x1p-20f : 0x1p-24f; }
  static constexpr float kOffset = 0.0f;
  __device__ static void unpack(std::uint32_t (&a)[4], std::uint32_t word, std::uint32_t) {
    const std::uint32_t upper = word >> 8;
    a[0] = word & 0x000f000fu;
    a[1] = word & 0x00f000f0u;
    a[2] = upper & 0x000f000fu;
    a[3] = upper & 0x00f000f0u;
  }
};

template <>
struct Operand<__nv_bfloat16, Codes::u4> {
  __device__ static constexpr float unit(int) { return 1.0f; }
  static constexpr float kOffset = 128.0f;
  __device__ static void unpack(std::uint32_t (&a)[4], std::uint32_t word, std::uint32_t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = masked_or<0x000f000fu>(word >> (4 * i), 0x43004300u);
  }
};

template <>
struct Operand<__half, Codes::u8> {
  __device__ static constexpr float unit(int) { return 0x1p-24f; }
  static constexpr float kOffset = 0.0f;
  __device__ static void unpack(std::uint32_t (&a)[4], std::uint32_t word0, std::uint32_t word1) {
    a[0] = __byte_perm(word0, 0, 0x4140);
    a[1] = __byte_perm(word0, 0, 0x4342);
    a[2] = __byte_perm(word1, 0, 0x4140);
    a[3] = __byte_perm(word1, 0, 0x4342);
  }
};

template <>
struct Operand<__nv_bfloat16, Codes::u8> {
  __device__ static constexpr float unit(int) { return 1.0f; }
  static constexpr float kOffset = -128.0f;
  template <int kFirst>
  __device__ static std::uint32_t pair(std::uint32_t word) {
    const float a = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + kFirst)) - (0x1p23f + 128.0f);
    const float b = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441 + kFirst)) - (0x1p23f + 128.0f);
    return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
  }
  __device__ static void unpack(std::uint32_t (&a)[4], std::uint32_t word0, std::uint32_t word1) {
    a[0] = pair<0>(word0);
    a[1] = pair<2>(word0);
    a[2] = pair<0>(word1);
    a[3] = pair<2>(word1);
  }
};

/// The four registers of a lane's word or words, each with two codes at the tops of its halves.
template <Codes kCodes>
__device__ __forceinline__ void spread_tops(std::uint32_t (&a)[4], std::uint32_t word0, std::uint32_t word1) {
  if constexpr (gpu_tile::bits(kCodes) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = word0 << (12 - 4 * i);
  } else {
    a[0] = __byte_perm(word0, 0, 0x1404);
    a[1] = __byte_perm(word0, 0, 0x3424);
    a[2] = __byte_perm(word1, 0, 0x1404);
    a[3] = __byte_perm(word1, 0, 0x3424);
  }
}

template <Codes kCodes>
requires(gpu_tile::are_floats(kCodes)) struct Operand<__half, kCodes> {
  __device__ static constexpr float unit(int) { return placed_unit<__half, kCodes>(); }
  static constexpr float kOffset = 0.0f;
  __device__ static void unpack(std::uint32_t (&a)[4], std::uint32_t word0, std::uint32_t word1) {
    spread_tops<kCodes>(a, word0, word1);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = placed<__half, kCodes>(a[i]);
  }
};
template <Codes kCodes>
requires(gpu_tile::are_floats(kCodes)) struct Operand<__nv_bfloat16, kCodes> {
  __device__ static constexpr float unit(int) { return 1.0f; }
  static constexpr float kOffset = 0.0f;
  __device__ static void unpack(std::uint32_t (&a)[4], std::uint32_t word0, std::uint32_t word1) {
    spread_tops<kCodes>(a, word0, word1);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = values<__nv_bfloat16, kCodes>(placed<__nv_bfloat16, kCodes>(a[i]));
  }
};

/// Unpacks the 16 channels number `index` of a lane's 16-byte vector; index is a constant once unrolled.
template <class Act, Codes kCodes>
__device__ __forceinline__ void unpack(std::uint32_t (&a)[4], const uint4& v, int index) {
  if constexpr (gpu_tile::bits(kCodes) == 4)
    Operand<Act, kCodes>::unpack(a, index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w, 0);
  else
    Operand<Act, kCodes>::unpack(a, index == 0 ? v.x : v.z, index == 0 ? v.y : v.w);
}

}  // namespace nibble::cuda
