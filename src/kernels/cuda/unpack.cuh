// Codes → the A operand of m16n8k16: exact integers u − z in f16 or bf16. The scale goes on the f32 sums afterwards.
//
// A code is put into the mantissa of a number whose unit in the last place is 1 (f16: 1024 + u, bf16: 128 + u), and the number
// minus (1024 + z) is exact. An f16 has room for a second code 4 bits higher: 1024 + 16u, and one fused multiply-add by 1/16 with
// −(64 + z) is exact too and saves the shift. 8-bit codes do not fit into a bf16's mantissa: they go through f32, where
// 2²³ + u − (2²³ + z) is exact, and have at most 8 significant bits afterwards.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace nibble::cuda {

/// (a & mask) | magic in one instruction: nvcc does not always find it.
template <std::uint32_t kMask, std::uint32_t kMagic>
__device__ inline std::uint32_t masked_or(std::uint32_t a) {
  std::uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "n"(kMask), "r"(kMagic));
  return r;
}
template <class To, class From>
__device__ inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return reinterpret_cast<const To&>(from);
}

/// Unpacks one fragment's codes of 16 channels. `Constant` is what is subtracted, ready for use: set() once per group.
template <class Act, int kBits>
struct Unpack;

template <>
struct Unpack<__half, 4> {
  __half2 low, high;  // of rows g and g+8
  __device__ void set(float z_low, float z_high) {
    low = __float2half2_rn(1024.0f + z_low);
    high = __float2half2_rn(-64.0f - z_high);
  }
  __device__ void operator()(std::uint32_t (&a)[4], std::uint32_t word) const {
    const __half2 sixteenth = __float2half2_rn(0.0625f);
    const std::uint32_t upper = word >> 8;
    a[0] = bits_of<std::uint32_t>(__hsub2(bits_of<__half2>(masked_or<0x000f000fu, 0x64006400u>(word)), low));
    a[1] = bits_of<std::uint32_t>(__hfma2(bits_of<__half2>(masked_or<0x00f000f0u, 0x64006400u>(word)), sixteenth, high));
    a[2] = bits_of<std::uint32_t>(__hsub2(bits_of<__half2>(masked_or<0x000f000fu, 0x64006400u>(upper)), low));
    a[3] = bits_of<std::uint32_t>(__hfma2(bits_of<__half2>(masked_or<0x00f000f0u, 0x64006400u>(upper)), sixteenth, high));
  }
};

template <>
struct Unpack<__nv_bfloat16, 4> {
  __nv_bfloat162 low, high;
  __device__ void set(float z_low, float z_high) {
    low = __float2bfloat162_rn(128.0f + z_low);
    high = __float2bfloat162_rn(128.0f + z_high);
  }
  __device__ void operator()(std::uint32_t (&a)[4], std::uint32_t word) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = bits_of<std::uint32_t>(
          __hsub2(bits_of<__nv_bfloat162>(masked_or<0x000f000fu, 0x43004300u>(word >> (4 * i))), i % 2 ? high : low));
  }
};

template <>
struct Unpack<__half, 8> {
  __half2 low, high;
  __device__ void set(float z_low, float z_high) {
    low = __float2half2_rn(1024.0f + z_low);
    high = __float2half2_rn(1024.0f + z_high);
  }
  __device__ void operator()(std::uint32_t (&a)[4], std::uint32_t word0, std::uint32_t word1) const {
    const std::uint32_t magic = 0x64646464u;
    a[0] = bits_of<std::uint32_t>(__hsub2(bits_of<__half2>(__byte_perm(word0, magic, 0x4140)), low));
    a[1] = bits_of<std::uint32_t>(__hsub2(bits_of<__half2>(__byte_perm(word0, magic, 0x4342)), high));
    a[2] = bits_of<std::uint32_t>(__hsub2(bits_of<__half2>(__byte_perm(word1, magic, 0x4140)), low));
    a[3] = bits_of<std::uint32_t>(__hsub2(bits_of<__half2>(__byte_perm(word1, magic, 0x4342)), high));
  }
};

template <>
struct Unpack<__nv_bfloat16, 8> {
  float low, high;
  __device__ void set(float z_low, float z_high) {
    low = 8388608.0f + z_low;
    high = 8388608.0f + z_high;
  }
  template <int kFirst>
  __device__ static std::uint32_t pair(std::uint32_t word, float z) {
    const float a = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + kFirst)) - z;
    const float b = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7441 + kFirst)) - z;
    return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
  }
  __device__ void operator()(std::uint32_t (&a)[4], std::uint32_t word0, std::uint32_t word1) const {
    a[0] = pair<0>(word0, low);
    a[1] = pair<2>(word0, high);
    a[2] = pair<0>(word1, low);
    a[3] = pair<2>(word1, high);
  }
};

/// Unpacks the codes of 16 channels number kIndex of a lane's 16-byte vector.
template <int kIndex, class Act>
__device__ inline void unpack(const Unpack<Act, 4>& u, std::uint32_t (&a)[4], const uint4& v) {
  u(a, kIndex == 0 ? v.x : kIndex == 1 ? v.y : kIndex == 2 ? v.z : v.w);
}
template <int kIndex, class Act>
__device__ inline void unpack(const Unpack<Act, 8>& u, std::uint32_t (&a)[4], const uint4& v) {
  if constexpr (kIndex % 2 == 0)
    u(a, v.x, v.y);
  else
    u(a, v.z, v.w);
}

}  // namespace nibble::cuda
