// Conversions between floats and FP8.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

enum __nv_saturation_t { __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3 };
/// Defined by the test that needs it.
std::uint16_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t, __nv_fp8_interpretation_t);
using __nv_fp8x2_storage_t = std::uint16_t;
using __half2_raw = __half2;
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t pair, __nv_fp8_interpretation_t) {
  const auto value = [&](int i) { return nibble::code_value(nibble::DType::e4m3, static_cast<std::uint8_t>(pair >> 8 * i)); };
  return __floats2half2_rn(value(0), value(1));
}
