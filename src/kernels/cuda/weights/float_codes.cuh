// 4- and 8-bit floats → 16-bit ones, two at a time. Sign, exponent and mantissa are moved to their places in the wider format, whose
// exponent has another bias: the result is the code's value times a power of two, subnormal codes included, which the wider format holds as
// its own subnormals. Multiplying by the inverse power is exact.
//
//                    e2m1  s eem          e4m3  s eeeemmm        e5m2  s eeeeemm
//     f16   >> 3     s 000ee m000000000   >> 1  s 0eeee mmm0000000      s eeeee mm00000000
//     bf16  >> 6     s 000000ee m000000   >> 4  s 0000eeee mmm0000
//
// An e4m3 NaN would become 480; weights in gpu_n64k128 have none. Activations may (halves_of).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/ptx.cuh"
#include "layouts/gpu_tile.hpp"

namespace nibble::cuda {

using gpu_tile::Codes;

/// Of a placed code, value / placed: the difference of the biases, of which e2m1 has 1, e4m3 7, e5m2 15, f16 15 and bf16 127.
template <class Half, Codes kCodes>
inline constexpr int kPlacedShift = (std::is_same_v<Half, __half> ? 15 : 127) - (kCodes == Codes::e2m1   ? 1
                                                                                 : kCodes == Codes::e4m3 ? 7
                                                                                                         : 15);
/// 2^-kPlacedShift.
template <class Half, Codes kCodes>
__device__ constexpr float placed_unit() {
  float unit = 1.0f;
  for (int i = 0; i < kPlacedShift<Half, kCodes>; ++i) unit /= 2;
  return unit;
}

/// Two codes, at the top of each half of `tops`, whose other bits do not matter, placed.
template <class Half, Codes kCodes>
__device__ __forceinline__ std::uint32_t placed(std::uint32_t tops) {
  constexpr bool kHalf = std::is_same_v<Half, __half>;
  static_assert(kHalf || kCodes != Codes::e5m2, "through f16");
  constexpr std::uint32_t kSigns = 0x80008000u;
  constexpr std::uint32_t kRest = kCodes == Codes::e2m1 ? 0x70007000u : 0x7f007f00u;
  constexpr int kRight = kCodes == Codes::e2m1 ? (kHalf ? 3 : 6) : kCodes == Codes::e4m3 ? (kHalf ? 1 : 4) : 0;
  return ptx::lop3<0xea>(tops, kSigns, (tops & kRest) >> kRight);  // (a & b) | c
}

/// Two placed codes as their values.
template <class Half, Codes kCodes>
__device__ __forceinline__ std::uint32_t values(std::uint32_t placed) {
  if constexpr (kPlacedShift<Half, kCodes> == 0) {
    return placed;
  } else if constexpr (std::is_same_v<Half, __half>) {
    constexpr std::uint32_t kFactor = (15u + kPlacedShift<Half, kCodes>) << 10;
    return ptx::mul_f16x2(placed, kFactor * 0x10001u);
  } else {
    constexpr std::uint32_t kFactor = (127u + kPlacedShift<Half, kCodes>) << 7;
    return ptx::fma_bf16x2(placed, kFactor * 0x10001u, 0x80008000u);
  }
}

/// A code as a number, for kernels that take one at a time.
template <Codes kCodes>
__device__ __forceinline__ float float_value(std::uint32_t code) {
  constexpr int kUp = 16 - gpu_tile::bits(kCodes);
  const std::uint32_t half = values<__half, kCodes>(placed<__half, kCodes>(code << kUp)) & 0xffffu;
  return __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
}
/// Two e4m3 codes as f16 numbers, NaN included.
__device__ __forceinline__ std::uint32_t two_halves_of(std::uint32_t codes) {
  const std::uint32_t tops = (codes & 0xffu) << 8 | (codes & 0xff00u) << 16;
  const std::uint32_t nan = ((tops & 0x7f007f00u) + 0x01000100u) & 0x80008000u;  // the sign bit of each half that is one
  return values<__half, Codes::e4m3>(placed<__half, Codes::e4m3>(tops)) | (nan - (nan >> 15));
}
/// The same of eight.
__device__ __forceinline__ uint4 halves_of(uint2 codes) {
  return {two_halves_of(codes.x), two_halves_of(codes.x >> 16), two_halves_of(codes.y), two_halves_of(codes.y >> 16)};
}

/// The number that a stored code stands for, before zeros: u − base of integers.
__device__ __forceinline__ float code_number(Codes codes, std::uint32_t code, float base) {
  switch (codes) {
    case Codes::e2m1: return float_value<Codes::e2m1>(code);
    case Codes::e4m3: return float_value<Codes::e4m3>(code);
    case Codes::e5m2: return float_value<Codes::e5m2>(code);
    default: return static_cast<float>(code) - base;
  }
}

}  // namespace nibble::cuda
