// Round-to-nearest quantization: error bounds, degenerate groups, clipping, determinism.
#include "nibble/quantize.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "scheme_parts.hpp"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using testing::SchemeParts;

/// Standard normal by Box and Muller, from an engine whose output the standard fixes.
std::vector<float> gaussian(std::int64_t count, std::uint32_t seed = 1) {
  std::mt19937 engine(seed);
  auto uniform = [&] { return (static_cast<double>(engine()) + 0.5) * 0x1p-32; };
  std::vector<float> w(count);
  for (float& x : w) x = static_cast<float>(std::sqrt(-2 * std::log(uniform())) * std::cos(2 * M_PI * uniform()));
  return w;
}

/// Every seventh weight is twice as wide, roughly the tails of real layers.
std::vector<float> heavy_tailed(std::int64_t count) {
  std::vector<float> w = gaussian(count, 7);
  for (std::size_t i = 0; i < w.size(); i += 7) w[i] *= 2;
  return w;
}

QuantTensor quantized(const std::vector<float>& w, std::int64_t n, const SchemeParts& spec, Executor* executor = nullptr) {
  auto q = quantize({w.data(), {n, static_cast<std::int64_t>(w.size()) / n}}, spec, executor);
  EXPECT_TRUE(q.ok()) << q.status().message();
  return q.ok() ? *std::move(q) : QuantTensor{};
}

QuantError error_of(const std::vector<float>& w, const QuantTensor& q, Executor* executor = nullptr) {
  auto e = quantization_error({w.data(), {q.n, q.k}}, q, executor);
  EXPECT_TRUE(e.ok()) << e.status().message();
  return e.ok() ? *e : QuantError{};
}

std::string failure(const std::vector<float>& w, std::int64_t n, const SchemeParts& spec) {
  auto q = quantize({w.data(), {n, static_cast<std::int64_t>(w.size()) / n}}, spec);
  EXPECT_FALSE(q.ok());
  if (q.ok()) return "";
  EXPECT_TRUE(q.status().code() == StatusCode::invalid_argument || q.status().code() == StatusCode::unsupported);
  return q.status().message();
}

/// The relative spacing of a scale type: rounding a scale changes it by at most this times one half.
double spacing(DType scale) { return scale == DType::f16 ? 0x1p-10 : scale == DType::bf16 ? 0x1p-7 : 0x1p-23; }

// With an exact scale no weight is further than s/2 from its code: the symmetric range [−top/2, top/2]·s is that wide by
// construction, and the asymmetric one moves by at most s/2 when its zero is rounded. A scale rounded down by a relative
// spacing/2 leaves the ends short by at most top·spacing/2 more. f32 arithmetic adds a few 2^-23 of the range, top·s.
TEST(Quantize, ErrorWithinHalfAStep) {
  const std::int64_t n = 6, k = 96;
  const std::vector<float> w = gaussian(n * k);
  for (int bits = 2; bits <= 8; ++bits)
    for (std::int32_t group : {0, 96, 32, 6, 1})
      for (DType scale : {DType::f32, DType::f16, DType::bf16})
        for (bool symmetric : {true, false}) {
          SCOPED_TRACE(::testing::Message() << bits << " bits, group " << group << ", " << name(scale) << ", sym " << symmetric);
          const QuantTensor q = quantized(w, n, {bits, group, symmetric, scale});
          ASSERT_TRUE(q.validate().ok()) << q.validate().message();
          EXPECT_EQ(nibble::bits(q.scheme.codes), bits);
          EXPECT_EQ(q.scheme.zero, symmetric ? ZeroKind::none : ZeroKind::integer);
          const double top = (1 << bits) - 1;
          for (std::int64_t row = 0; row < n; ++row)
            for (std::int64_t col = 0; col < k; ++col) {
              const double s = q.scales.at(row * q.groups() + (group == 0 ? 0 : col / group));
              const double bound = s * (0.5 + top * (spacing(scale) / 2 + 4 * 0x1p-23));
              ASSERT_LE(std::abs(static_cast<double>(w[row * k + col]) - q.value(row, col)), bound) << row << "," << col;
            }
        }
}

// An offset is the smallest weight of its group, rounded: codes reach from it to the largest weight, wherever 0 is.
TEST(Quantize, OffsetsCoverTheRangeOfTheirGroup) {
  const std::int64_t n = 6, k = 96;
  std::vector<float> w = gaussian(n * k);
  for (std::size_t i = 0; i < w.size() / 2; ++i) w[i] += 7.0f;
  std::fill_n(w.begin(), 32, 3.3f);  // a group without a range
  for (int bits = 2; bits <= 8; ++bits)
    for (DType scale : {DType::f32, DType::f16, DType::bf16})
      for (bool search : {false, true}) {
        const std::array<DType, 7> codes{DType::u2, DType::u3, DType::u4, DType::u5, DType::u6, DType::u7, DType::u8};
        const WeightScheme scheme{codes[static_cast<std::size_t>(bits - 2)], ZeroKind::offset, GroupShape::group(32), scale};
        SCOPED_TRACE(scheme.name());
        const auto q = quantize(ConstTensorView(w.data(), {n, k}), {.scheme = scheme, .clip_search = search});
        ASSERT_TRUE(q.ok()) << q.status().message();
        ASSERT_TRUE(q->validate().ok()) << q->validate().message();
        EXPECT_EQ(q->zeros.dtype, scale);
        const double top = (1 << bits) - 1;
        for (std::int64_t i = 0; i < n * k && !search; ++i) {
          const double s = q->scales.at(i / 32), o = std::abs(q->zeros.at(i / 32));
          const double bound = (i < 32 ? 0 : s) * (0.5 + top * spacing(scale)) + (spacing(scale) + 4 * 0x1p-23) * o;
          ASSERT_LE(std::abs(static_cast<double>(w[static_cast<std::size_t>(i)]) - q->value(i / k, i % k)), bound) << i;
        }
        const double with_zero = error_of(w, quantized(w, n, {bits, 32, false, scale})).relative_l2;
        EXPECT_LT(error_of(w, *q).relative_l2, (bits < 8 ? 0.9 : 1.5) * with_zero + spacing(scale));
      }
}

// All elements of a filter at the channels of a group have one range: that of the same weights side by side in one group.
TEST(Quantize, GroupsOfImagesAreThoseOfWeightsSideBySide) {
  const std::int64_t n = 5, channels = 24, elements = 6, size = 8, k = channels * elements;
  const std::vector<float> w = gaussian(n * k);  // [Co,C,2,3]
  std::vector<float> together;
  for (std::int64_t row = 0; row < n; ++row)
    for (std::int64_t g = 0; g < channels / size; ++g)
      for (std::int64_t e = 0; e < elements; ++e)
        for (std::int64_t c = g * size; c < (g + 1) * size; ++c)
          together.push_back(w[static_cast<std::size_t>((row * channels + c) * elements + e)]);
  for (const char* name : {"u4oci8", "u4zci8", "u4b8ci8", "s8ci8", "e4m3ci8"})
    for (const bool search : {false, true}) {
      if (search && name == std::string_view("e4m3ci8")) continue;
      QuantizeSpec spec{Scheme::parse(name)->weight, search};
      const auto q = quantize_conv({w.data(), {n, channels, 2, 3}}, spec);
      ASSERT_TRUE(q.ok()) << q.status().message();
      ASSERT_TRUE(q->validate().ok()) << q->validate().message();
      EXPECT_EQ(q->scheme.name(), name);
      EXPECT_EQ(q->filter, (Extent{2, 3}));
      spec.scheme.group = GroupShape::group(static_cast<std::int32_t>(size * elements));
      const auto plain = quantize({together.data(), {n, k}}, spec);
      ASSERT_TRUE(plain.ok());
      EXPECT_EQ(q->scales, plain->scales);
      EXPECT_EQ(q->zeros, plain->zeros);
      for (std::int64_t i = 0; i < n * k; ++i) {
        const std::int64_t c = i % channels, e = i % k / channels;
        const std::int64_t at = i / k * k + (c / size * elements + e) * size + c % size;
        ASSERT_EQ(q->codes[static_cast<std::size_t>(i)], plain->codes[static_cast<std::size_t>(at)]) << name << " " << i;
      }
    }
}

TEST(Quantize, GroupsOfImagesSayWhereAndWhy) {
  std::vector<float> w(2 * 4 * 6, 1.0f);
  const auto refused = [&](const char* scheme) {
    return std::string(quantize_conv({w.data(), {2, 4, 2, 3}}, scheme).status().message());
  };
  EXPECT_THAT(refused("u4zci3"), HasSubstr("4 channels of the images are not a multiple of the group size 3"));
  w[static_cast<std::size_t>((4 + 2) * 6 + 5)] = NAN;  // [1,2,1,2], the last element of the filter
  EXPECT_EQ(refused("u4zci2"), "w[1,22] is NaN; only finite weights can be quantized");
  w[static_cast<std::size_t>((4 + 2) * 6 + 5)] = 1e7f;
  EXPECT_THAT(refused("u4zci2"), HasSubstr("w[1,2..23] reaches from 1 to 1e+07"));
}

// A code is right when no other is nearer; of two that are as near, the even one is.
TEST(Quantize, E4m3IsTheNearestCode) {
  const std::int64_t n = 20, k = 72;
  std::vector<float> w = gaussian(n * k);
  for (std::int64_t i = 0; i < 8; ++i) w[i] = std::ldexp(448.0f, -static_cast<int>(3 * i));  // down to subnormal codes
  for (const GroupShape group :
       {GroupShape::tensor(), GroupShape::channel(), GroupShape::block(8, 16), GroupShape::block(128, 128)}) {
    const QuantTensor q = quantized(w, n, {.scale = DType::f32, .codes = DType::e4m3, .group = group});
    ASSERT_TRUE(q.validate().ok()) << q.validate().message();
    EXPECT_EQ(q.scheme.name(), (WeightScheme{DType::e4m3, ZeroKind::none, group}.name()));
    std::vector<float> most(static_cast<std::size_t>(q.scales.numel()), 0.0f);
    const auto block = [&](std::int64_t row, std::int64_t col) {
      return (group.n == 0 ? 0 : row / group.n) * q.groups() + (group.k == 0 ? 0 : col / group.k);
    };
    for (std::int64_t i = 0; i < n * k; ++i) most[block(i / k, i % k)] = std::max(most[block(i / k, i % k)], std::fabs(w[i]));
    for (std::size_t i = 0; i < most.size(); ++i) EXPECT_EQ(q.scales.at(static_cast<std::int64_t>(i)), most[i] / 448.0f);
    for (std::int64_t i = 0; i < n * k; ++i) {
      const float x = w[i] / q.scales.at(block(i / k, i % k));
      const float error = std::fabs(code_value(DType::e4m3, q.codes[i]) - x);
      for (int other = 0; other < 256; ++other) {
        const float value = code_value(DType::e4m3, static_cast<std::uint8_t>(other));
        if (std::isnan(value)) continue;
        ASSERT_GE(std::fabs(value - x), error) << i;
        if (std::fabs(value - x) == error && value != code_value(DType::e4m3, q.codes[i])) {
          ASSERT_EQ(q.codes[i] & 1, 0) << i;
        }
      }
    }
  }
  EXPECT_EQ(
      quantized({448, -448, 17, 19, 0x1p-10f, 0}, 1, {.scale = DType::f32, .codes = DType::e4m3, .group = GroupShape::tensor()})
          .codes,
      (std::vector<std::uint8_t>{0x7e, 0xfe, 0x58, 0x5a, 0x00, 0x00}));  // 17 and 19 are ties
}

TEST(Quantize, S8IsTheUnsignedCodeLess128) {
  const std::vector<float> w = heavy_tailed(6 * 96);
  for (const std::int32_t group : {0, 32})
    for (const bool symmetric : {true, false})
      for (const bool clip : {true, false}) {
        const SchemeParts spec{.bits = 8, .group_size = group, .symmetric = symmetric, .scale = DType::f32, .clip_search = clip};
        SchemeParts with_sign = spec;
        with_sign.bits = 4;  // has no say
        with_sign.codes = DType::s8;
        const QuantTensor u = quantized(w, 6, spec), s = quantized(w, 6, with_sign);
        ASSERT_TRUE(s.validate().ok()) << s.validate().message();
        EXPECT_EQ(s.scheme.codes, DType::s8);
        EXPECT_EQ(s.scales, u.scales);
        for (std::size_t i = 0; i < w.size(); ++i) ASSERT_EQ(s.codes[i], u.codes[i] ^ 0x80) << i;
        for (std::int64_t i = 0; !symmetric && i < s.zeros.numel(); ++i) EXPECT_EQ(s.zeros.at(i), u.zeros.at(i) - 128);
      }
  const QuantTensor whole = quantized(w, 6, {.scale = DType::f32, .codes = DType::s8, .group = GroupShape::tensor()});
  const float most =
      std::fabs(*std::max_element(w.begin(), w.end(), [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
  EXPECT_EQ(whole.scales.numel(), 1);
  EXPECT_EQ(whole.scales.at(0), most / 127.5f);
}

TEST(Quantize, BlocksAreTheSameForAnyNumberOfThreads) {
  const std::vector<float> w = heavy_tailed(61 * 130);
  const auto one = make_executor(1), four = make_executor(4);
  for (const DType codes : {DType::s8, DType::e4m3, DType::none})
    for (const GroupShape group : {GroupShape::tensor(), GroupShape::channel(), GroupShape::block(4, 128)}) {
      const SchemeParts spec{.scale = DType::bf16, .clip_search = codes != DType::e4m3, .codes = codes, .group = group};
      EXPECT_EQ(quantized(w, 61, spec, one.get()), quantized(w, 61, spec, four.get()));
    }
}

TEST(Quantize, SchemeNames) {
  const std::vector<float> w(128, 1.0f);
  EXPECT_EQ(quantized(w, 1, {}).scheme.name(), "u4b8g128");
  EXPECT_EQ(quantized(w, 1, {.bits = 4, .group_size = 32, .symmetric = false}).scheme.name(), "u4zg32");
  EXPECT_EQ(quantized(w, 1, {.bits = 8, .group_size = 0}).scheme.name(), "u8b128c");
  EXPECT_EQ(quantized(w, 1, {.bits = 3, .group_size = 64}).scheme.name(), "u3b4g64");
}

TEST(Quantize, ExactWhenRepresentable) {
  std::vector<float> symmetric, asymmetric;
  for (int i = 0; i < 64; ++i) symmetric.push_back(0.25f * static_cast<float>(i % 16 - 8));
  for (int i = 0; i < 64; ++i) asymmetric.push_back(0.25f * static_cast<float>(i % 16 - 3));
  // The symmetric scale is max|w| / 7.5, so −8 steps of 0.25 are met exactly by clipping to 15/16 = 30/32 of the range.
  EXPECT_EQ(error_of(symmetric, quantized(symmetric, 1, {.group_size = 64, .clip_search = true})).max_abs, 0);
  const QuantError e = error_of(asymmetric, quantized(asymmetric, 1, {.group_size = 64, .symmetric = false}));
  EXPECT_EQ(e.max_abs, 0);
  EXPECT_EQ(e.relative_l2, 0);
  EXPECT_EQ(e.cosine, 1);
  EXPECT_EQ(e.sqnr_db, std::numeric_limits<double>::infinity());
  // Symmetric 2 bits: ±0.75 with a scale of 0.5 gives levels −1, −0.5, 0, 0.5, and ties go to the even code.
  const std::vector<float> tie = {0.75f, -0.75f, 0.25f, 0.5f};
  const QuantTensor q = quantized(tie, 1, {.bits = 2, .group_size = 4});
  EXPECT_EQ(q.scales.at(0), 0.5f);
  EXPECT_EQ(q.codes, (std::vector<std::uint8_t>{3, 0, 2, 3}));
}

TEST(Quantize, InputTypesAgreeOnCommonValues) {
  std::vector<float> w = gaussian(4 * 64);
  std::vector<bf16> b;
  std::vector<f16> h;
  for (float& x : w) {
    x = to_f32(to_bf16(std::ldexp(std::nearbyint(x * 64), -6)));  // few enough bits for both
    b.push_back(to_bf16(x));
    h.push_back(to_f16(x));
  }
  const QuantTensor q = quantized(w, 4, {.group_size = 32});
  EXPECT_EQ(*quantize({b.data(), {4, 64}}, SchemeParts{.group_size = 32}), q);
  EXPECT_EQ(*quantize({h.data(), {4, 64}}, SchemeParts{.group_size = 32}), q);
}

TEST(Quantize, DenseSchemesRoundToNearestEven) {
  const std::vector<float> w = {1.0f, -0.1f, 1.00390625f, 3.01171875f, 65519.0f, 0x1p-25f, -0.0f, 0x1.8p-24f};
  for (DType type : {DType::f32, DType::f16, DType::bf16}) {
    const auto q = quantize({w.data(), {2, 4}}, name(type));
    ASSERT_TRUE(q.ok()) << q.status().message();
    ASSERT_TRUE(q->validate().ok()) << q->validate().message();
    EXPECT_EQ(q->scheme, WeightScheme::dense(type));
    Tensor rounded(type, {2, 4});
    for (std::int64_t i = 0; i < 8; ++i) {
      rounded.set(i, w[static_cast<std::size_t>(i)]);
      EXPECT_EQ(q->value(i / 4, i % 4), rounded.at(i)) << name(type) << " " << i;
    }
    EXPECT_EQ(quantization_error({w.data(), {2, 4}}, *q)->max_abs == 0, type == DType::f32);
  }
}

TEST(Quantize, DenseSchemesRefuseWhatTheyCannotHold) {
  const auto refused = [](std::vector<float> w, const QuantizeSpec& spec) {
    const Status status = quantize({w.data(), {2, 2}}, spec).status();
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    return std::string(status.message());
  };
  const QuantizeSpec half{WeightScheme::dense(DType::f16)}, brain{WeightScheme::dense(DType::bf16)};
  EXPECT_THAT(refused({1, 2, 65520.0f, 4}, half), HasSubstr("w[1,0] = 65520 is beyond the range of f16; use bf16 or f32"));
  EXPECT_THAT(refused({1, 2, 3, -3.4e38f}, brain), HasSubstr("w[1,1] = -3.4e+38 is beyond the range of bf16; use f32"));
  EXPECT_THAT(refused({1, std::numeric_limits<float>::infinity(), 3, 4}, brain), HasSubstr("w[0,1] is infinite"));
  EXPECT_THAT(refused({1, 2, 3, 4}, {WeightScheme::dense(DType::bf16), true}), HasSubstr("clipping search"));
  EXPECT_THAT(refused({1, 2, 3, 4}, {{DType::bf16, ZeroKind::none, GroupShape::channel(), DType::f32}}),
              HasSubstr("a dense weight of bf16 has no scales"));
}

/// Ties go to even codes, the scale is the least power of two for which 6 is enough, and ends at those of e8m0.
TEST(Quantize, Mxfp4) {
  const QuantizeSpec spec{{DType::e2m1, ZeroKind::none, GroupShape::group(16), DType::e8m0}};
  const std::vector<float> ties{0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5, 6, -0.25f, -0.76f, 0.26f, 1.26f, 4.99f, -6, 0, 5.01f};
  const std::vector<std::uint8_t> codes{0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 1, 3, 6, 15, 0, 7};
  for (const int exponent : {0, 1, -20, 100, -123}) {
    std::vector<float> w = ties;
    for (float& x : w) x = std::ldexp(x, exponent);
    const auto q = quantize({w.data(), {1, 16}}, spec);
    ASSERT_TRUE(q.ok()) << q.status().message();
    ASSERT_TRUE(q->validate().ok()) << q->validate().message();
    EXPECT_EQ(q->codes, codes) << exponent;
    EXPECT_EQ(static_cast<int>(q->scales.bytes[0]), exponent + 127);
    EXPECT_EQ(q->value(0, 7), std::ldexp(6.0f, exponent));
  }
  const auto scale_of = [&](float most) {
    std::vector<float> w(16, most);
    return static_cast<int>(quantize({w.data(), {1, 16}}, spec)->scales.bytes[0]) - 127;
  };
  EXPECT_EQ(scale_of(6), 0);
  EXPECT_EQ(scale_of(std::nextafter(6.0f, 7.0f)), 1);
  EXPECT_EQ(scale_of(3), -1);
  EXPECT_EQ(scale_of(0), 0);
  EXPECT_EQ(scale_of(0x1.8p127f), 125);
  EXPECT_EQ(scale_of(std::numeric_limits<float>::denorm_min()), -127);
  const auto refused = [&](const QuantizeSpec& other) {
    return std::string(quantize({ties.data(), {1, 16}}, other).status().message());
  };
  EXPECT_THAT(refused({spec.scheme, true}), HasSubstr("a clipping search is for integers: how precise e2m1 is"));
  const std::vector<float> most(16, std::numeric_limits<float>::max());  // would become 4 of 2^126, which no float is
  EXPECT_THAT(quantize({most.data(), {1, 16}}, spec).status().message(), HasSubstr("too much for e2m1 codes"));
  EXPECT_THAT(refused({{DType::e2m1, ZeroKind::none, GroupShape::group(16), DType::f16}}), HasSubstr("go together"));
  EXPECT_THAT(refused({{DType::u4b8, ZeroKind::none, GroupShape::group(16), DType::e8m0}}), HasSubstr("go together"));
  EXPECT_THAT(refused({{DType::e2m1, ZeroKind::integer, GroupShape::group(16), DType::e8m0}}), HasSubstr("no zero points"));
}

TEST(Quantize, RowStride) {
  const std::vector<float> w = gaussian(4 * 64);
  ConstTensorView left(w.data(), {4, 32});
  left.strides[0] = 64;
  const auto q = quantize(left, SchemeParts{.group_size = 32});
  ASSERT_TRUE(q.ok());
  const QuantTensor whole = quantized(w, 4, {.group_size = 32});
  for (std::int64_t row = 0; row < 4; ++row)
    for (std::int64_t col = 0; col < 32; ++col) EXPECT_EQ(q->value(row, col), whole.value(row, col));
}

TEST(Quantize, ClipSearchNeverWorse) {
  for (bool symmetric : {true, false})
    for (int bits : {2, 3, 4, 8})
      for (std::int32_t group : {0, 32, 128}) {
        SCOPED_TRACE(::testing::Message() << bits << " bits, group " << group << ", symmetric " << symmetric);
        SchemeParts spec{bits, group, symmetric};
        for (const std::vector<float>& w : {gaussian(8 * 256), heavy_tailed(8 * 256)}) {
          spec.clip_search = false;
          const QuantTensor plain = quantized(w, 8, spec);
          spec.clip_search = true;
          const QuantTensor clipped = quantized(w, 8, spec);
          const std::int64_t size = 256 / plain.groups();
          for (std::int64_t g = 0; g < 8 * plain.groups(); ++g) {  // in every group, not only in sum
            double before = 0, after = 0;
            for (std::int64_t i = g * size; i < (g + 1) * size; ++i) {
              before += std::pow(static_cast<double>(w[i]) - plain.value(i / 256, i % 256), 2);
              after += std::pow(static_cast<double>(w[i]) - clipped.value(i / 256, i % 256), 2);
            }
            EXPECT_LE(after, before * (1 + 1e-12)) << "group " << g;
          }
        }
      }
}

TEST(Quantize, ClipSearchHelpsHeavyTails) {
  const std::vector<float> w = heavy_tailed(64 * 1024);
  for (bool symmetric : {true, false}) {
    const double plain = error_of(w, quantized(w, 64, {.bits = 3, .symmetric = symmetric})).sqnr_db;
    const double clipped = error_of(w, quantized(w, 64, {.bits = 3, .symmetric = symmetric, .clip_search = true})).sqnr_db;
    EXPECT_GT(clipped, plain + 0.5);
  }
}

TEST(Quantize, SameForAnyNumberOfThreads) {
  const std::vector<float> w = heavy_tailed(61 * 128);
  const auto one = make_executor(1), four = make_executor(4);
  for (bool clip : {false, true}) {
    const SchemeParts spec{.group_size = 64, .symmetric = false, .clip_search = clip};
    const QuantTensor a = quantized(w, 61, spec, one.get()), b = quantized(w, 61, spec, four.get());
    EXPECT_EQ(a, b);
    const QuantError ea = error_of(w, a, one.get()), eb = error_of(w, b, four.get());
    EXPECT_EQ(ea.sqnr_db, eb.sqnr_db);
    EXPECT_EQ(ea.cosine, eb.cosine);
    EXPECT_EQ(ea.max_abs, eb.max_abs);
    EXPECT_EQ(ea.relative_l2, eb.relative_l2);
  }
}

TEST(Quantize, DegenerateGroups) {
  for (bool symmetric : {true, false})
    for (bool clip : {true, false})
      for (DType scale : {DType::f32, DType::f16, DType::bf16}) {
        SCOPED_TRACE(::testing::Message() << "symmetric " << symmetric << ", clip " << clip << ", " << name(scale));
        SchemeParts spec{.group_size = 32, .symmetric = symmetric, .scale = scale, .clip_search = clip};
        for (float constant : {0.0f, -0.0f, 1.0f, -3.0f, 1e-9f, -1e-20f, 1e-38f, 4e5f}) {
          SCOPED_TRACE(constant);
          const std::vector<float> w(32, constant);
          const QuantTensor q = quantized(w, 1, spec);
          const float s = q.scales.at(0);
          EXPECT_GT(s, 0);
          EXPECT_TRUE(std::isfinite(s));
          const double slack = 15 * spacing(scale) / 2;
          EXPECT_LE(std::abs(static_cast<double>(q.value(0, 0)) - static_cast<double>(constant)), s * (0.5 + slack));
          EXPECT_TRUE(constant != 0 || q.value(0, 0) == 0);
        }
      }
}

// 1e-7 needs a scale of 1.3e-8, below half the smallest f16: rounding to nearest would give 0. Above, near 1.5·2^-24,
// rounding down would clip a third of the range.
TEST(Quantize, SubnormalScalesAreRoundedUp) {
  EXPECT_EQ(quantized(std::vector<float>(32, 1e-7f), 1, {.group_size = 32}).scales.at(0), 0x1p-24f);
  EXPECT_EQ(quantized(std::vector<float>(32, 7.5f * 0x1.2p-24f), 1, {.group_size = 32}).scales.at(0), 0x1p-23f);
}

TEST(Quantize, RefusesWhatItCannotHold) {
  std::vector<float> w(2 * 64, 1.0f);
  w[64 + 40] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(failure(w, 2, {.group_size = 32}), "w[1,40] is NaN; only finite weights can be quantized");
  w[3] = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(failure(w, 2, {.group_size = 32}), "w[0,3] is infinite; only finite weights can be quantized");
  w.assign(2 * 64, 1.0f);
  w[64 + 33] = -1e6f;
  EXPECT_EQ(failure(w, 2, {.group_size = 32}),
            "w[1,32..63] reaches from -1e+06 to 1, too much for u4b8 codes with a scale of type f16; use bf16 or f32 scales");
  quantized(w, 2, {.group_size = 32, .scale = DType::bf16});
  w[0] = std::numeric_limits<float>::max();
  EXPECT_THAT(failure(w, 2, {.bits = 2, .group_size = 32, .scale = DType::f32}), HasSubstr("scale the weights down"));

  EXPECT_THAT(failure(w, 2, {.group_size = 48}), HasSubstr("K=64 is not a multiple of the group size 48"));
  EXPECT_THAT(failure(w, 2, {.group_size = -1}), HasSubstr("1×-1 weights"));
  EXPECT_THAT(failure(w, 2, {.group_size = 32, .scale = DType::e4m3}), HasSubstr("e4m3"));
  w.assign(2 * 64, 1.0f);
  w[64 + 33] = -INFINITY;
  const SchemeParts fp8{.scale = DType::f16, .codes = DType::e4m3, .group = GroupShape::block(2, 32)};
  EXPECT_EQ(failure(w, 2, fp8), "w[1,33] is infinite; only finite weights can be quantized");
  w[64 + 33] = 1e8f;
  EXPECT_EQ(failure(w, 2, fp8),
            "w[0..1,32..63] reaches from 1 to 1e+08, too much for e4m3 codes with a scale of type f16; use bf16 or f32 scales");
  EXPECT_THAT(failure(w, 2, {.symmetric = false, .codes = DType::e4m3}), HasSubstr("no zero points"));
  EXPECT_THAT(failure(w, 2, {.clip_search = true, .codes = DType::e4m3}), HasSubstr("clipping search"));
  EXPECT_THAT(failure(w, 2, {.codes = DType::e5m2}), HasSubstr("quantizing to e5m2g128"));
  EXPECT_THAT(failure(w, 2, {.codes = DType::s8, .group = GroupShape{0, 32}}), HasSubstr("0×32 weights"));
  EXPECT_THAT(failure(w, 2, {.codes = DType::s8, .group = GroupShape{-1, 0}}), HasSubstr("-1×0 weights"));
  EXPECT_THAT(failure(w, 2, {.codes = DType::s8, .group = GroupShape::group(48)}), HasSubstr("group size 48"));
  EXPECT_FALSE(quantize({w.data(), {128}}, SchemeParts{.group_size = 32}).ok());
  EXPECT_FALSE(quantize({w.data(), {0, 128}}, SchemeParts{.group_size = 32}).ok());
  EXPECT_FALSE(quantize({static_cast<const void*>(w.data()), DType::s8, {2, 64}}, SchemeParts{.group_size = 32}).ok());
}

// Rounding a value spread evenly over a step costs s²/12 on average. Symmetric 4-bit steps are max|w|/7.5, and the mean
// square of the largest of 128 Gaussian magnitudes is 7.9 σ², so the noise is 7.9 / 7.5² / 12 σ²: 19.3 dB.
TEST(Quantize, GaussianSqnr) {
  const std::vector<float> w = gaussian(512 * 1024);
  const QuantTensor q = quantized(w, 512, {});
  double noise = 0, signal = 0;
  for (std::int64_t i = 0; i < q.scales.numel(); ++i) noise += std::pow(static_cast<double>(q.scales.at(i)), 2) / 12 * 128;
  for (float x : w) signal += static_cast<double>(x) * static_cast<double>(x);
  const QuantError e = error_of(w, q);
  EXPECT_NEAR(e.sqnr_db, 10 * std::log10(signal / noise), 0.1);
  EXPECT_NEAR(e.sqnr_db, 19.3, 0.3);
  EXPECT_NEAR(e.relative_l2, std::pow(10, -e.sqnr_db / 20), 1e-12);
  EXPECT_NEAR(e.cosine, std::sqrt(1 - e.relative_l2 * e.relative_l2), 1e-3);
}

TEST(QuantizationError, AllZeroKindsAndActOrder) {
  QuantTensor q;
  q.scheme = {DType::u4, ZeroKind::offset, GroupShape::group(2), DType::f32};
  q.n = 2;
  q.k = 4;
  q.codes = {0, 1, 2, 3, 4, 5, 6, 7};
  q.scales = Tensor(DType::f32, {2, 2});
  q.zeros = Tensor(DType::f32, {2, 2});
  for (int i = 0; i < 4; ++i) {
    q.scales.set(i, static_cast<float>(i + 1));
    q.zeros.set(i, 0.5f * static_cast<float>(i));
  }
  q.g_idx = {1, 0, 1, 0};
  q.scale2 = 2.0f;
  for (ZeroKind zero : {ZeroKind::offset, ZeroKind::real}) {
    q.scheme.zero = zero;
    std::vector<float> w;
    for (std::int64_t i = 0; i < 8; ++i) w.push_back(q.value(i / 4, i % 4));
    EXPECT_EQ(error_of(w, q).max_abs, 0);
    w[5] += 3;
    EXPECT_EQ(error_of(w, q).max_abs, 3);
  }
}

TEST(QuantizationError, PrescaleIsPartOfTheWeight) {
  std::vector<float> w = {1, 2, 3, 4};
  QuantTensor q = quantized(w, 1, {.bits = 8, .group_size = 0, .symmetric = false, .scale = DType::f32});
  q.prescale = Tensor(DType::f32, {4});
  for (std::int64_t k = 0; k < 4; ++k) {
    q.prescale.set(k, 0.5f);
    w[k] = q.value(0, k) * 0.5f;
  }
  EXPECT_EQ(error_of(w, q).max_abs, 0);
}

TEST(QuantizationError, Edges) {
  const std::vector<float> zeros(64, 0.0f), ones(64, 1.0f);
  EXPECT_EQ(error_of(zeros, quantized(zeros, 1, {.group_size = 64})).sqnr_db, std::numeric_limits<double>::infinity());
  const QuantError e = error_of(ones, quantized(zeros, 1, {.group_size = 64}));
  EXPECT_EQ(e.sqnr_db, 0);
  EXPECT_EQ(e.cosine, 0);
  EXPECT_EQ(e.relative_l2, 1);
  const auto mismatch = quantization_error({ones.data(), {2, 32}}, quantized(zeros, 1, {.group_size = 64}));
  ASSERT_FALSE(mismatch.ok());
  EXPECT_EQ(mismatch.status().message(), "w is [2,32], the quantized weight is [1,64]");
}

}  // namespace
}  // namespace nibble
