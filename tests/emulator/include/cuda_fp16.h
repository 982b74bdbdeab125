// The names of 16-bit floats in kernels.
#pragma once

#include "nibble/types.hpp"

struct __half {
  nibble::f16 value;
};
struct alignas(4) __half2 {
  nibble::f16 x, y;
};
inline __half2 __floats2half2_rn(float a, float b) { return {nibble::to_f16(a), nibble::to_f16(b)}; }
inline __half __ushort_as_half(std::uint16_t bits) { return {nibble::f16{bits}}; }
inline std::uint16_t __half_as_ushort(__half x) { return x.value.bits; }
inline float __half2float(__half x) { return nibble::to_f32(x.value); }
inline __half __float2half_rn(float x) { return {nibble::to_f16(x)}; }
inline float2 __half22float2(__half2 v) { return {nibble::to_f32(v.x), nibble::to_f32(v.y)}; }
inline __half2 __float22half2_rn(float2 v) { return __floats2half2_rn(v.x, v.y); }
inline __half2 __hsub2(__half2 a, __half2 b) {
  return __floats2half2_rn(nibble::to_f32(a.x) - nibble::to_f32(b.x), nibble::to_f32(a.y) - nibble::to_f32(b.y));
}
