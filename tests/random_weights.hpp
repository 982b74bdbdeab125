// Random QuantTensors of any scheme, for tests.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/random.hpp"
#include "nibble/tensor.hpp"

namespace nibble::testing {

struct RandomWeight {
  bool act_order = false;
  bool prescale = false;
  bool bias = false;
  Extent filter = {};  // of a convolution
  bool exact = false;  // power-of-two scales and zero offsets: with small integer activations every sum is exact in f32
};

/// The type of zeros that random_weight() gives a scheme.
inline DType zero_type(const WeightScheme& scheme) {
  if (scheme.zero == ZeroKind::none) return DType::none;
  if (scheme.zero != ZeroKind::integer) return DType::f32;
  return info(scheme.codes).kind == DTypeKind::sint ? DType::s8 : DType::u8;
}

inline QuantTensor random_weight(const WeightScheme& scheme, std::int64_t n, std::int64_t k, std::uint64_t seed,
                                 const RandomWeight& with = {}) {
  QuantTensor q;
  q.scheme = scheme;
  q.n = n;
  q.k = k;
  q.filter = with.filter;
  q.codes.resize(static_cast<std::size_t>(n * k * code_bytes(scheme.codes)));
  const int width = std::min(bits(scheme.codes), 8);
  if (scheme.is_dense()) {
    Tensor floats(scheme.codes, {n, k});
    for (std::int64_t i = 0; i < n * k; ++i) {
      const auto at = static_cast<std::uint64_t>(i);
      floats.set(i, with.exact ? 0.5f * static_cast<float>(random_bits(seed, at) % 15) - 3.5f : 0.02f * random_normal(seed, at));
    }
    std::memcpy(q.codes.data(), floats.bytes.data(), q.codes.size());
  }
  for (std::size_t i = 0; !scheme.is_dense() && i < q.codes.size(); ++i) {
    auto code = static_cast<std::uint8_t>(random_bits(seed, i) & ((1u << width) - 1));
    if (code_value(scheme.codes, code) != code_value(scheme.codes, code)) code = 0;  // no NaN codes
    q.codes[i] = code;
  }
  const std::vector<std::int64_t> shape{scheme.group.rows(n), q.groups()};
  if (!scheme.is_dense()) q.scales = Tensor(scheme.scale, shape);
  for (std::int64_t i = 0; i < q.scales.numel(); ++i) {
    const auto r = static_cast<float>(random_uniform(seed + 1, static_cast<std::uint64_t>(i)));
    if (bits(scheme.scale) == 8) {  // e4m3 and e8m0 are too coarse to round to: any code of medium magnitude
      const bool e4m3 = scheme.scale == DType::e4m3;
      const float code = with.exact ? (e4m3 ? 0x30 : 126) : e4m3 ? 0x18 + 0x10 * r : 119 + 6 * r;
      q.scales.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(code);
    } else {
      q.scales.set(i, with.exact ? 0.5f : 0.01f * (0.5f + r));
    }
  }
  if (scheme.zero != ZeroKind::none) {
    q.zeros = Tensor(zero_type(scheme), shape);
    for (std::int64_t i = 0; i < q.zeros.numel(); ++i) {
      const auto r = static_cast<float>(random_uniform(seed + 2, static_cast<std::uint64_t>(i)));
      if (scheme.zero == ZeroKind::offset)
        q.zeros.set(i, with.exact ? -1.0f : 0.1f * (r - 0.5f));
      else if (scheme.zero == ZeroKind::real)
        q.zeros.set(i, with.exact ? 3.0f : r * static_cast<float>(1 << width));
      else
        q.zeros.set(i, static_cast<float>(static_cast<int>(r * static_cast<float>((1 << width) - 1)) -
                                          (q.zeros.dtype == DType::s8 ? 128 : 0)));
    }
  }
  if (with.act_order && scheme.group.n == 1 && scheme.group.k != 0) {  // a random permutation of k / group
    q.g_idx.resize(static_cast<std::size_t>(k));
    for (std::int64_t i = 0; i < k; ++i) q.g_idx[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i / scheme.group.k);
    for (std::int64_t i = k - 1; i > 0; --i)
      std::swap(q.g_idx[static_cast<std::size_t>(i)],
                q.g_idx[static_cast<std::size_t>(random_bits(seed + 3, static_cast<std::uint64_t>(i)) %
                                                 static_cast<std::uint64_t>(i + 1))]);
  }
  if (with.prescale) {
    q.prescale = Tensor(DType::f16, {k});
    for (std::int64_t i = 0; i < k; ++i)
      q.prescale.set(i, with.exact ? 2.0f : 0.5f + static_cast<float>(random_uniform(seed + 4, static_cast<std::uint64_t>(i))));
  }
  if (with.bias) {
    q.bias = Tensor(DType::f16, {n});
    for (std::int64_t i = 0; i < n; ++i) q.bias.set(i, random_normal(seed + 5, static_cast<std::uint64_t>(i)));
  }
  return q;
}

/// Weights of one scale per output channel or for all, for which integer kernels are exact (docs/accuracy.md).
inline std::vector<WeightScheme> whole_row_schemes() {
  std::vector<WeightScheme> list;
  for (GroupShape group : {GroupShape::tensor(), GroupShape::channel()}) {
    list.push_back({DType::s8, ZeroKind::none, group, DType::f32});
    list.push_back({DType::s8, ZeroKind::integer, group, DType::f32});
  }
  list.push_back({DType::u8b128, ZeroKind::none, GroupShape::channel(), DType::f16});
  list.push_back({DType::u8, ZeroKind::integer, GroupShape::channel(), DType::bf16});
  list.push_back({DType::u4b8, ZeroKind::none, GroupShape::channel(), DType::f32});
  list.push_back({DType::u4, ZeroKind::integer, GroupShape::channel(), DType::f16});
  return list;
}

/// Every kind of scheme the formats can give, and a few more: all code types, zero kinds, group shapes and scale types.
inline std::vector<WeightScheme> all_schemes() {
  std::vector<WeightScheme> list;
  const auto add = [&](DType codes, ZeroKind zero, GroupShape group, DType scale) {
    list.push_back({codes, zero, group, scale});
  };
  for (DType codes : {DType::u2, DType::u3, DType::u4, DType::u5, DType::u6, DType::u7, DType::u8})
    add(codes, ZeroKind::integer, GroupShape::group(32), DType::f16);
  for (DType codes : {DType::u2b2, DType::u3b4, DType::u4b8, DType::u5b16, DType::u6b32, DType::u7b64, DType::u8b128, DType::s8})
    add(codes, ZeroKind::none, GroupShape::group(32), DType::bf16);
  for (GroupShape group : {GroupShape::tensor(), GroupShape::channel(), GroupShape::group(64), GroupShape::group(128),
                           GroupShape::group(10), GroupShape::block(16, 64)})
    for (DType codes : {DType::u4b8, DType::s8}) add(codes, ZeroKind::none, group, DType::f32);
  for (ZeroKind zero : {ZeroKind::integer, ZeroKind::offset, ZeroKind::real})
    for (GroupShape group : {GroupShape::channel(), GroupShape::group(128)})
      for (DType codes : {DType::u4, DType::u8}) add(codes, zero, group, DType::f16);
  for (int group : {8, 16, 24, 48, 96}) add(DType::u4b8, ZeroKind::none, GroupShape::group(group), DType::f16);
  for (int group : {8, 16}) add(DType::u4, ZeroKind::offset, GroupShape::group(group), DType::f16);
  add(DType::u4, ZeroKind::integer, GroupShape::group(8), DType::bf16);
  add(DType::u8, ZeroKind::integer, GroupShape::group(16), DType::f16);
  add(DType::s8, ZeroKind::none, GroupShape::group(16), DType::f32);
  add(DType::u4, ZeroKind::integer, GroupShape::group(192), DType::f16);
  add(DType::s8, ZeroKind::integer, GroupShape::channel(), DType::f32);
  add(DType::s8, ZeroKind::integer, GroupShape::tensor(), DType::f32);
  add(DType::u8b128, ZeroKind::none, GroupShape::channel(), DType::f16);
  add(DType::e4m3, ZeroKind::none, GroupShape::tensor(), DType::f32);
  add(DType::e4m3, ZeroKind::none, GroupShape::channel(), DType::bf16);
  add(DType::e4m3, ZeroKind::none, GroupShape::block(128, 128), DType::f32);
  add(DType::e5m2, ZeroKind::none, GroupShape::channel(), DType::bf16);
  add(DType::e2m1, ZeroKind::none, GroupShape::group(16), DType::e4m3);
  add(DType::e2m1, ZeroKind::none, GroupShape::group(32), DType::e8m0);
  add(DType::e4m3, ZeroKind::none, GroupShape::group(32), DType::bf16);
  add(DType::e2m1, ZeroKind::none, GroupShape::group(128), DType::f16);
  for (DType floats : {DType::f32, DType::f16, DType::bf16}) list.push_back(WeightScheme::dense(floats));
  return list;
}

}  // namespace nibble::testing
