// The same for bf16.
#pragma once

#include "nibble/types.hpp"

struct __nv_bfloat16 {
  nibble::bf16 value;
};
struct alignas(4) __nv_bfloat162 {
  nibble::bf16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {nibble::to_bf16(a), nibble::to_bf16(b)}; }
inline std::uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.value.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {nibble::to_bf16(x)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
