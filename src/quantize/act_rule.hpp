// The rule by which activations become 8-bit codes, for host and device: x ≈ (q − zero)·scale. docs/accuracy.md defines the result by
// the operations below, all of them f32 and rounded one by one; the oracle has its own.
//
//   s8, symmetric   scale = absmax / 127        q = rne( x · (127 / absmax) )
//   s8, zero point  scale = (high − low) / 255  q = saturate( rne( x · (255 / (high − low)) ) + zero )   low ≤ 0 ≤ high
//                   zero = rne( −128 − low · (255 / (high − low)) )
//   s8, offset      scale = (high − low) / 255  q = saturate( rne( (x − low) · (255 / (high − low)) ) − 128 )
//                   offset = low + 128 · scale  x ≈ q·scale + offset
//   e4m3            scale = absmax / 448        q = e4m3( x · (448 / absmax) ), to nearest even, saturating
//   static          scale and zero are given    q = saturate( rne( x · (1 / scale) ) + zero ), or e4m3( x · (1 / scale) )
//
// A range below 2⁻¹¹³ counts as zero: all values are 0 then, with an offset all are low. A range with an infinity or a NaN has scale NaN,
// which affects only its token. Static scales have no range: ±infinity saturates, and a NaN becomes the code of 0 in s8, and NaN in e4m3.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/host_device.hpp"

#if NIBBLE_DEVICE_CODE
#include <cuda_fp8.h>
#endif

namespace nibble::act_rule {

constexpr float kLeastRange = 0x1p-113f;
constexpr float kE4m3Max = 448.0f;
constexpr float kLargest = std::numeric_limits<float>::max(), kNan = std::numeric_limits<float>::quiet_NaN();

struct Rule {
  float scale = 1.0f;
  float inverse = 1.0f;  // the factor of activations
  std::int32_t zero = 0;
  float low = 0.0f;     // with an offset: subtracted from activations first
  float offset = 0.0f;  // what the code 0 means
};

NIBBLE_HOST_DEVICE inline float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

NIBBLE_HOST_DEVICE inline float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);  // prevents contraction with the sum that follows
#else
  return a * b;
#endif
}

/// For codes that reach from −reach to reach: 127 of s8, 448 of e4m3. `absmax` is NaN or infinite where an activation is.
NIBBLE_HOST_DEVICE inline Rule symmetric(float absmax, float reach) {
  if (!(absmax <= kLargest)) return {kNan, 0.0f, 0};
  if (absmax < kLeastRange) return {0.0f, 0.0f, 0};
  return {divide(absmax, reach), divide(reach, absmax), 0};
}
/// The rule of s8 with a zero point; low ≤ 0 ≤ high.
NIBBLE_HOST_DEVICE inline Rule asymmetric(float low, float high) {
  const float range = high - low;
  if (!(range <= kLargest)) return {kNan, 0.0f, 0};
  if (range < kLeastRange) return {0.0f, 0.0f, 0};
  const float inverse = divide(255.0f, range);
  return {divide(range, 255.0f), inverse, static_cast<std::int32_t>(std::nearbyint(-128.0f - multiply(low, inverse)))};
}
/// The rule of s8 with an offset, of a range that need not contain 0; low ≤ high.
NIBBLE_HOST_DEVICE inline Rule with_offset(float low, float high) {
  const float range = high - low;
  if (!(range <= kLargest)) return {kNan, 0.0f, 0};
  if (range < kLeastRange) return {0.0f, 0.0f, 0, low, low + 0.0f};  // −0 becomes 0
  const float scale = divide(range, 255.0f);
  return {scale, divide(255.0f, range), -128, low, low + multiply(128.0f, scale)};
}
NIBBLE_HOST_DEVICE inline Rule known(float scale, std::int32_t zero) { return {scale, divide(1.0f, scale), zero}; }

NIBBLE_HOST_DEVICE inline std::int8_t to_s8(float x, const Rule& rule) {
  const float q = std::nearbyint(x * rule.inverse) + static_cast<float>(rule.zero);
  if (q != q) return static_cast<std::int8_t>(rule.zero);
  return static_cast<std::int8_t>(q < -128.0f ? -128.0f : q > 127.0f ? 127.0f : q);
}

/// to_s8 for a rule without a zero point: the lowest byte is the code. Adding 1.5·2²³ leaves the nearest integer, ties to even, in the last
/// bits of a float: an addition instead of a conversion, which a GPU executes four times as fast. If the rule was computed from the
/// largest magnitude, nothing saturates: |x · inverse| is at most 127 plus a rounding error, or all values are NaN and the code does not
/// matter.
template <bool kSaturates>
NIBBLE_HOST_DEVICE inline std::uint32_t s8_bits(float x, float inverse) {
  constexpr float kMagic = 0x1.8p23f;
  float q = multiply(x, inverse);
  if (kSaturates) q = q != q ? 0.0f : q < -128.0f ? -128.0f : q > 127.0f ? 127.0f : q;
#if defined(__CUDA_ARCH__)
  return __float_as_uint(__fadd_rn(q, kMagic));
#else
  return std::bit_cast<std::uint32_t>(q + kMagic);
#endif
}

/// The e4m3 code nearest to x, ties to even; beyond ±448 it is ±448.
NIBBLE_HOST_DEVICE inline std::uint8_t to_e4m3(float x) {
#if defined(__CUDA_ARCH__)
  return static_cast<std::uint8_t>(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
#else
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint8_t>(bits >> 24 & 0x80u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  const float a = std::bit_cast<float>(magnitude);
  if (a >= kE4m3Max) return static_cast<std::uint8_t>(sign | 0x7e);
  if (a < 0x1p-6f) return static_cast<std::uint8_t>(sign | static_cast<std::uint8_t>(std::nearbyint(a * 512.0f)));
  const std::uint32_t rounded = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;  // three bits of fraction remain
  return static_cast<std::uint8_t>(sign | (rounded - ((127 - 7) << 3)));
#endif
}

}  // namespace nibble::act_rule
