// FP8 as kernels make it of floats.
#pragma once

#include <cstdint>

enum __nv_saturation_t { __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3 };
/// Defined by the test that needs it.
std::uint16_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t, __nv_fp8_interpretation_t);
