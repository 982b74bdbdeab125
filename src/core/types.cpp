#include "nibble/types.hpp"

#include <array>
#include <cmath>
#include <limits>

namespace nibble {
namespace {

using enum DTypeKind;
// clang-format off
constexpr std::array kTable{
    DTypeInfo{DType::none, "none", 0, none, 0},
    DTypeInfo{DType::f64, "f64", 64, floating, 0},
    DTypeInfo{DType::f32, "f32", 32, floating, 0},
    DTypeInfo{DType::f16, "f16", 16, floating, 0},
    DTypeInfo{DType::bf16, "bf16", 16, floating, 0},
    DTypeInfo{DType::e4m3, "e4m3", 8, floating, 0},
    DTypeInfo{DType::e5m2, "e5m2", 8, floating, 0},
    DTypeInfo{DType::e4m3fnuz, "e4m3fnuz", 8, floating, 0},
    DTypeInfo{DType::e5m2fnuz, "e5m2fnuz", 8, floating, 0},
    DTypeInfo{DType::e8m0, "e8m0", 8, floating, 0},
    DTypeInfo{DType::e3m2, "e3m2", 6, floating, 0},
    DTypeInfo{DType::e2m3, "e2m3", 6, floating, 0},
    DTypeInfo{DType::e2m1, "e2m1", 4, floating, 0},
    DTypeInfo{DType::boolean, "bool", 8, other, 0},
    DTypeInfo{DType::s8, "s8", 8, sint, 0},
    DTypeInfo{DType::s16, "s16", 16, sint, 0},
    DTypeInfo{DType::s32, "s32", 32, sint, 0},
    DTypeInfo{DType::s64, "s64", 64, sint, 0},
    DTypeInfo{DType::u8, "u8", 8, uint, 0},
    DTypeInfo{DType::u16, "u16", 16, uint, 0},
    DTypeInfo{DType::u32, "u32", 32, uint, 0},
    DTypeInfo{DType::u64, "u64", 64, uint, 0},
    DTypeInfo{DType::u2, "u2", 2, uint, 0},
    DTypeInfo{DType::u3, "u3", 3, uint, 0},
    DTypeInfo{DType::u4, "u4", 4, uint, 0},
    DTypeInfo{DType::u5, "u5", 5, uint, 0},
    DTypeInfo{DType::u6, "u6", 6, uint, 0},
    DTypeInfo{DType::u7, "u7", 7, uint, 0},
    DTypeInfo{DType::u2b2, "u2b2", 2, biased, 2},
    DTypeInfo{DType::u3b4, "u3b4", 3, biased, 4},
    DTypeInfo{DType::u4b8, "u4b8", 4, biased, 8},
    DTypeInfo{DType::u5b16, "u5b16", 5, biased, 16},
    DTypeInfo{DType::u6b32, "u6b32", 6, biased, 32},
    DTypeInfo{DType::u7b64, "u7b64", 7, biased, 64},
    DTypeInfo{DType::u8b128, "u8b128", 8, biased, 128},
    DTypeInfo{DType::c64, "c64", 64, other, 0},
};
// clang-format on

constexpr bool table_is_indexed_by_dtype() {
  for (std::size_t i = 0; i < kTable.size(); ++i)
    if (static_cast<std::size_t>(kTable[i].dtype) != i) return false;
  return kTable.size() == static_cast<std::size_t>(DType::c64) + 1;
}
static_assert(table_is_indexed_by_dtype());

/// A small float: sign, `e` exponent bits, `m` mantissa bits, bias; subnormals included, specials handled by the caller.
float decode_minifloat(std::uint32_t code, int e, int m, int bias) {
  const float sign = ((code >> (e + m)) & 1u) != 0 ? -1.0f : 1.0f;
  const int exponent = static_cast<int>((code >> m) & ((1u << e) - 1));
  const float mantissa = static_cast<float>(code & ((1u << m) - 1)) / static_cast<float>(1 << m);
  return exponent == 0 ? sign * std::ldexp(mantissa, 1 - bias) : sign * std::ldexp(1.0f + mantissa, exponent - bias);
}

}  // namespace

const DTypeInfo& info(DType dtype) { return kTable[static_cast<std::size_t>(dtype)]; }

std::optional<DType> parse_dtype(std::string_view token) {
  for (const DTypeInfo& row : kTable)
    if (row.name == token && row.dtype != DType::none) return row.dtype;
  return std::nullopt;
}

float code_value(DType dtype, std::uint8_t code) {
  const DTypeInfo& row = info(dtype);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  switch (row.kind) {
    case uint:
    case biased: return static_cast<float>(static_cast<int>(code) - row.bias);
    case sint: return static_cast<float>(static_cast<std::int8_t>(code));
    default: break;
  }
  switch (dtype) {
    case DType::e4m3: return (code & 0x7f) == 0x7f ? nan : decode_minifloat(code, 4, 3, 7);
    case DType::e5m2:
      if ((code & 0x7c) == 0x7c)
        return (code & 3) != 0 ? nan : std::copysign(std::numeric_limits<float>::infinity(), (code & 0x80) != 0 ? -1.0f : 1.0f);
      return decode_minifloat(code, 5, 2, 15);
    case DType::e4m3fnuz: return code == 0x80 ? nan : decode_minifloat(code, 4, 3, 8);
    case DType::e5m2fnuz: return code == 0x80 ? nan : decode_minifloat(code, 5, 2, 16);
    case DType::e8m0: return code == 0xff ? nan : std::ldexp(1.0f, static_cast<int>(code) - 127);
    case DType::e3m2: return decode_minifloat(code, 3, 2, 3);
    case DType::e2m3: return decode_minifloat(code, 2, 3, 1);
    case DType::e2m1: return decode_minifloat(code, 2, 1, 1);
    default: return nan;
  }
}

}  // namespace nibble
