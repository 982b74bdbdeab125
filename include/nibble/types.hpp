// Scalar types: what one element of a tensor, or one quantized code, means.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>

namespace nibble {

/// Every element type a checkpoint can hold and every code type a scheme can name.
///
/// Quantized codes of up to 8 bits live one per byte in a QuantTensor. A biased type `uXbB` stores the unsigned code u and
/// means the value u − B (u4b8: 0…15 means −8…7).
// clang-format off
enum class DType : std::uint8_t {
  none,
  // IEEE and brain floating point
  f64, f32, f16, bf16,
  // 8-bit and narrower floating point (OCP names)
  e4m3, e5m2, e4m3fnuz, e5m2fnuz, e8m0, e3m2, e2m3, e2m1,
  // integers
  boolean, s8, s16, s32, s64, u8, u16, u32, u64,
  // sub-byte unsigned codes, and their biased forms
  u2, u3, u4, u5, u6, u7,
  u2b2, u3b4, u4b8, u5b16, u6b32, u7b64, u8b128,
  // complex
  c64,
};
// clang-format on

/// How the bits of a DType are read.
enum class DTypeKind : std::uint8_t { none, floating, sint, uint, biased, other };

/// The properties of a DType.
struct DTypeInfo {
  DType dtype;            // the type described
  std::string_view name;  // the token used in scheme and kernel names: "bf16", "u4b8"
  std::uint8_t bits;      // of an element
  DTypeKind kind;         // how they are read
  std::int16_t bias;      // subtracted from the unsigned code; biased types only
};

/// The table row of `dtype`.
const DTypeInfo& info(DType dtype);
/// "bf16".
inline std::string_view name(DType dtype) { return info(dtype).name; }
/// Bits of an element.
inline int bits(DType dtype) { return info(dtype).bits; }
/// The number subtracted from the unsigned bits of an integer code to get its value: 8 for u4b8; 128 for s8, because packed layouts
/// store s8 + 128.
inline int code_bias(DType dtype) { return dtype == DType::s8 ? 128 : info(dtype).bias; }
/// "u4b8" → DType::u4b8; nothing for an unknown token.
std::optional<DType> parse_dtype(std::string_view token);

/// Bytes of `count` packed elements, rounded up to a whole byte (sub-byte types are dense).
inline std::uint64_t storage_bytes(DType dtype, std::uint64_t count) {
  return (count * static_cast<std::uint64_t>(bits(dtype)) + 7) / 8;
}

/// True for the types activations, outputs, dequantized and dense weights can have: f32, f16, bf16.
constexpr bool is_compute_float(DType t) { return t == DType::f32 || t == DType::f16 || t == DType::bf16; }

/// Bytes of one element of QuantTensor::codes: 1 for codes of up to 8 bits, 2 or 4 for the floats of dense weights.
inline int code_bytes(DType codes) { return bits(codes) <= 8 ? 1 : bits(codes) / 8; }

/// The value of one quantized code (its low `bits(dtype)` bits): u4b8 code 15 → 7, e4m3 0x7e → 448. NaN where the type says so.
float code_value(DType dtype, std::uint8_t code);

/// IEEE binary16 as storage; arithmetic is done in f32. Conversions round to nearest even and keep NaN.
struct f16 {
  std::uint16_t bits = 0;  // sign, 5 of the exponent, 10 of the fraction
};
/// bfloat16, as f16.
struct bf16 {
  std::uint16_t bits = 0;  // the upper half of an f32
};

/// Itself.
constexpr float to_f32(float x) { return x; }

/// Exact.
constexpr float to_f32(bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

/// Exact.
constexpr float to_f32(f16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(x.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return std::bit_cast<float>(sign | 0x70000000u | magnitude);  // inf, NaN
  // Reading the half's exponent field as a float's is off by a factor of 2^112 (biases 15 and 127), subnormals included.
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f));
}

/// Rounded to nearest even; NaN stays NaN.
constexpr bf16 to_bf16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};  // quiet NaN
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

/// Rounded to nearest even; NaN stays NaN, 65520 and more are infinite.
constexpr f16 to_f16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  const std::uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};   // NaN
  if (a >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // ≥ 65520 rounds to infinity
  if (a < 0x38800000u) {  // subnormal half: adding 0.5 puts the rounded result into the low bits
    const float shifted = std::bit_cast<float>(a) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u))};
  }
  return {static_cast<std::uint16_t>(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13))};
}

}  // namespace nibble
