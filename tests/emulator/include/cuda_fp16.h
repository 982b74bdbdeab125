// 16-bit floats as kernels name them.
#pragma once

#include "nibble/types.hpp"

struct __half {
  nibble::f16 value;
};
struct alignas(4) __half2 {
  nibble::f16 x, y;
};
inline __half2 __floats2half2_rn(float a, float b) { return {nibble::to_f16(a), nibble::to_f16(b)}; }
inline __half2 __float22half2_rn(float2 v) { return __floats2half2_rn(v.x, v.y); }
