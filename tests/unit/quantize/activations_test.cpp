// Quantizing activations to 8-bit codes: the rule, the operator, and the places in a plan's workspace. Needs no GPU.
#include "nibble/quantize.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/random.hpp"
#include "kernels/cuda/tasks/w8a8_task.hpp"
#include "quantize/act_rule.hpp"

namespace nibble {
namespace {

using testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

// ---- e4m3

float e4m3(int code) { return code_value(DType::e4m3, static_cast<std::uint8_t>(code)); }

/// The nearest of all codes, of two equally near ones the even one.
int nearest(float x) {
  int best = 0;
  for (int code = 1; code <= 0x7e; ++code) {
    const double now = std::abs(std::abs(double{x}) - double{e4m3(code)}),
                 before = std::abs(std::abs(double{x}) - double{e4m3(best)});
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return best + (std::signbit(x) ? 0x80 : 0);
}

TEST(ToE4m3, RoundsHalfwayCasesToEven) {
  for (int code = 0; code < 0x7e; ++code) {
    const float low = e4m3(code), high = e4m3(code + 1), middle = (low + high) / 2;  // exact
    EXPECT_EQ(act_rule::to_e4m3(low), code);
    EXPECT_EQ(act_rule::to_e4m3(middle), code % 2 == 0 ? code : code + 1) << middle;
    EXPECT_EQ(act_rule::to_e4m3(std::nextafter(middle, 0.0f)), code) << middle;
    EXPECT_EQ(act_rule::to_e4m3(std::nextafter(middle, 1e9f)), code + 1) << middle;
    for (float x : {low, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)})
      EXPECT_EQ(act_rule::to_e4m3(-x), act_rule::to_e4m3(x) | 0x80) << x;
  }
}

TEST(ToE4m3, IsTheNearestCode) {
  for (std::uint64_t i = 0; i < 4000; ++i) {
    const float x = std::ldexp(random_normal(3, i), static_cast<int>(i % 22) - 12);
    EXPECT_EQ(act_rule::to_e4m3(x), nearest(x)) << x;
  }
}

TEST(ToE4m3, Saturates) {
  for (float x : {448.0f, 448.1f, 464.0f, 465.0f, 1e30f, kInfinity}) {
    EXPECT_EQ(act_rule::to_e4m3(x), 0x7e) << x;
    EXPECT_EQ(act_rule::to_e4m3(-x), 0xfe) << x;
  }
  EXPECT_EQ(act_rule::to_e4m3(kNan), 0x7f);
  EXPECT_EQ(act_rule::to_e4m3(-kNan), 0x7f);
  EXPECT_EQ(act_rule::to_e4m3(-0.0f), 0x80);
  EXPECT_EQ(act_rule::to_e4m3(1e-40f), 0);
}

// ---- ranges

TEST(ActRule, SymmetricReachesTheEnds) {
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const float absmax = std::ldexp(std::abs(random_normal(5, i)) + 0.01f, static_cast<int>(i % 120) - 60);
    const act_rule::Rule s8 = act_rule::symmetric(absmax, 127), fp8 = act_rule::symmetric(absmax, act_rule::kE4m3Max);
    EXPECT_EQ(s8.scale, absmax / 127);
    EXPECT_EQ(act_rule::to_s8(absmax, s8), 127) << absmax;
    EXPECT_EQ(act_rule::to_s8(-absmax, s8), -127) << absmax;
    EXPECT_EQ(act_rule::to_e4m3(-absmax * fp8.inverse), 0xfe) << absmax;
  }
}

TEST(ActRule, AsymmetricKeepsZeroAndReachesTheEnds) {
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const float low = std::min(0.0f, random_normal(7, 2 * i)), high = std::max(0.0f, random_normal(7, 2 * i + 1) + 1);
    const act_rule::Rule rule = act_rule::asymmetric(low, high);
    if (high - low < 1e-6f) continue;
    EXPECT_EQ(act_rule::to_s8(0.0f, rule), rule.zero);
    EXPECT_GE(rule.zero, -128);
    EXPECT_LE(rule.zero, 127);
    EXPECT_LE(act_rule::to_s8(low, rule), -127) << low << " " << high;  // the rounded zero moves both ends by half a step
    EXPECT_GE(act_rule::to_s8(high, rule), 126) << low << " " << high;
  }
}

TEST(ActRule, OffsetsReachBothEndsOfAnyRange) {
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const float low = std::ldexp(random_normal(7, 2 * i), static_cast<int>(i % 40) - 20);
    const float high = low + std::ldexp(std::abs(random_normal(7, 2 * i + 1)) + 0.01f, static_cast<int>(i % 7));
    const act_rule::Rule rule = act_rule::with_offset(low, high);
    EXPECT_EQ(rule.scale, (high - low) / 255);
    EXPECT_EQ(act_rule::to_s8(low - rule.low, rule), -128) << low << " " << high;
    EXPECT_EQ(act_rule::to_s8(high - rule.low, rule), 127) << low << " " << high;
    const float rounding = 3e-7f * (std::abs(low) + std::abs(high));
    EXPECT_NEAR(-128 * rule.scale + rule.offset, low, rounding);
    EXPECT_NEAR(127 * rule.scale + rule.offset, high, rounding);
  }
}

TEST(ActRule, RangesThatAreNone) {
  for (float absmax : {0.0f, 1e-40f, 0x1p-114f}) {
    const act_rule::Rule rule = act_rule::symmetric(absmax, 127);
    EXPECT_EQ(rule.scale, 0);
    EXPECT_EQ(act_rule::to_s8(absmax, rule), 0);
    EXPECT_EQ(act_rule::asymmetric(-absmax, 0).scale, 0);
  }
  EXPECT_GT(act_rule::symmetric(0x1p-113f, 127).scale, 0);
  for (float spoilt : {kInfinity, kNan}) {
    EXPECT_TRUE(std::isnan(act_rule::symmetric(spoilt, 127).scale));
    EXPECT_TRUE(std::isnan(act_rule::asymmetric(-1, spoilt).scale));
  }
  EXPECT_TRUE(std::isnan(act_rule::asymmetric(-3e38f, 3e38f).scale)) << "a range beyond f32";
  EXPECT_TRUE(std::isnan(act_rule::with_offset(-3e38f, 3e38f).scale));
  const act_rule::Rule constant = act_rule::with_offset(5.1f, 5.1f);
  EXPECT_EQ(constant.scale, 0);
  EXPECT_EQ(constant.offset, 5.1f);
}

TEST(ActRule, KnownScalesSaturate) {
  const act_rule::Rule rule = act_rule::known(0.5f, 3);
  EXPECT_EQ(act_rule::to_s8(0.0f, rule), 3);
  EXPECT_EQ(act_rule::to_s8(0.75f, rule), 5);  // 1.5 to even
  EXPECT_EQ(act_rule::to_s8(1e30f, rule), 127);
  EXPECT_EQ(act_rule::to_s8(-kInfinity, rule), -128);
  EXPECT_EQ(act_rule::to_s8(kNan, rule), 3);
}

// ---- the operator

/// Outputs with any strides.
struct Quantized {
  ActScheme scheme;
  std::int64_t m, k, groups;
  std::vector<std::uint8_t> codes;
  std::vector<float> scales, offsets;
  std::vector<std::int32_t> zeros, sums;
  ActOutputs out;

  Quantized(const ActScheme& s, std::int64_t rows, std::int64_t channels)
      : scheme(s), m(rows), k(channels), groups(s.group.cols(channels)) {
    codes.assign(static_cast<std::size_t>(m * k), 0xee);
    scales.assign(static_cast<std::size_t>(m * groups), -1.0f);
    zeros.assign(static_cast<std::size_t>(2 * m * groups), -99);
    offsets.assign(zeros.size(), -99.0f);
    sums.assign(static_cast<std::size_t>(m), -99);
    out.codes = TensorView(codes.data(), s.codes, {m, k});
    if (s.group != GroupShape::tensor()) {
      out.scales = s.group.k == 0 ? TensorView(scales.data(), {m}) : TensorView(scales.data(), {m, groups});
      if (s.group.k != 0) out.scales.strides = {1, m};  // columns
      if (s.zero != ZeroKind::none) {
        out.zeros = s.group.k == 0 ? TensorView(zeros.data(), {m}) : TensorView(zeros.data(), {m, groups});
        if (s.zero == ZeroKind::offset) {
          out.zeros.data = offsets.data();
          out.zeros.dtype = DType::f32;
        }
        out.zeros.strides = {2, 2 * m};
      }
    }
    if (s.codes == DType::s8) out.sums = TensorView(sums.data(), {m});
  }
  std::int64_t group(std::int64_t channel) const { return scheme.group.k == 0 ? 0 : channel / scheme.group.k; }
  float scale(std::int64_t row, std::int64_t channel) const { return scales[static_cast<std::size_t>(row + group(channel) * m)]; }
  std::int32_t zero(std::int64_t row, std::int64_t channel) const {
    return zeros[static_cast<std::size_t>(2 * row + group(channel) * 2 * m)];
  }
  float offset(std::int64_t row, std::int64_t channel) const {
    return offsets[static_cast<std::size_t>(2 * row + group(channel) * 2 * m)];
  }
  float value(std::int64_t row, std::int64_t channel) const {
    const float code = code_value(scheme.codes, codes[static_cast<std::size_t>(row * k + channel)]);
    if (scheme.zero == ZeroKind::offset) return code * scale(row, channel) + offset(row, channel);
    return (code - (scheme.zero == ZeroKind::none ? 0.0f : static_cast<float>(zero(row, channel)))) * scale(row, channel);
  }
};

std::vector<float> gaussian(std::int64_t count) {
  std::vector<float> x(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = random_normal(11, i);
  return x;
}

std::vector<ActScheme> dynamic_schemes() {
  return {{DType::s8},
          {DType::s8, GroupShape::channel(), ZeroKind::integer},
          {DType::s8, GroupShape::group(32)},
          {DType::s8, GroupShape::group(32), ZeroKind::integer},
          {DType::s8, GroupShape::group(256), ZeroKind::integer},
          {DType::s8, GroupShape::channel(), ZeroKind::offset},
          {DType::s8, GroupShape::group(32), ZeroKind::offset},
          {DType::s8, GroupShape::group(37), ZeroKind::offset},
          {DType::e4m3},
          {DType::e4m3, GroupShape::group(128)}};
}

TEST(QuantizeActivations, IsWithinHalfAStep) {
  const std::int64_t m = 5, k = 300;  // the last group is short
  const std::vector<float> x = gaussian(m * k);
  for (const ActScheme& scheme : dynamic_schemes()) {
    Quantized q(scheme, m, k);
    const Status status = quantize_activations({x.data(), {m, k}}, scheme, q.out);
    ASSERT_TRUE(status.ok()) << status.message();
    for (std::int64_t row = 0; row < m; ++row) {
      std::int32_t sum = 0;
      for (std::int64_t i = 0; i < k; ++i) {
        const float now = x[static_cast<std::size_t>(row * k + i)];
        const float step = scheme.codes == DType::s8 ? q.scale(row, i) : std::max(0x1p-9f * q.scale(row, i), std::abs(now) / 8);
        EXPECT_LE(std::abs(q.value(row, i) - now), 0.5001f * step) << row << " " << i;
        sum += static_cast<std::int8_t>(q.codes[static_cast<std::size_t>(row * k + i)]);
      }
      if (scheme.codes == DType::s8) {
        EXPECT_EQ(q.sums[static_cast<std::size_t>(row)], sum);
      }
    }
  }
}

TEST(QuantizeActivations, SpoiltRowsSpoilNoOthers) {
  const std::int64_t m = 4, k = 256;
  const std::vector<float> clean = gaussian(m * k);
  std::vector<float> x = clean;
  x[k + 200] = kNan;
  x[2 * k + 3] = -kInfinity;
  for (const ActScheme& scheme : dynamic_schemes()) {
    Quantized expected(scheme, m, k), q(scheme, m, k);
    ASSERT_TRUE(quantize_activations({clean.data(), {m, k}}, scheme, expected.out).ok());
    ASSERT_TRUE(quantize_activations({x.data(), {m, k}}, scheme, q.out).ok());
    for (std::int64_t row = 0; row < m; ++row)
      for (std::int64_t i = 0; i < k; ++i) {
        const std::int64_t width = scheme.group.k == 0 ? k : scheme.group.k;
        const bool spoilt = (row == 1 && i / width == 200 / width) || (row == 2 && i / width == 3 / width);
        const auto at = static_cast<std::size_t>(row * k + i);
        EXPECT_EQ(q.codes[at], spoilt ? 0 : expected.codes[at]);
        EXPECT_EQ(std::isnan(q.scale(row, i)), spoilt);
      }
  }
}

/// Blocks of 8: the codes of a block depend only on its own values.
TEST(QuantizeActivations, ZeroPointsOfOddBlocks) {
  const std::vector<float> blocks[] = {
      {3, 3, 3, 3, 3, 3, 3, 3},             // constant: the range begins at 0
      {-1, -2, -4, -1, -2, -4, -1, -2},     // negative: it ends at 0
      {0, 0, 0, 0, 0, 0, 0, 0},             // nothing
      {1e-35f, -1e-35f, 0, 0, 0, 0, 0, 0},  // too little
      {1, kNan, 1, 1, 1, 1, 1, 1},          // no number
      {1, -kInfinity, 1, 1, 1, 1, 1, 1},
      {-1, 1.55f, 0, 0.01f, -0.01f, 0.5f, 0.25f, -0.5f},  // a step of 0.01
      {255, 0, 1},                                        // the last one is short
  };
  std::vector<float> x;
  for (const std::vector<float>& block : blocks) x.insert(x.end(), block.begin(), block.end());
  const auto k = static_cast<std::int64_t>(x.size());
  Quantized q({DType::s8, GroupShape::group(8), ZeroKind::integer}, 1, k);
  const Status status = quantize_activations({x.data(), {1, k}}, q.scheme, q.out);
  ASSERT_TRUE(status.ok()) << status.message();
  const auto code = [&](std::int64_t i) { return static_cast<std::int8_t>(q.codes[static_cast<std::size_t>(i)]); };
  EXPECT_EQ(q.scale(0, 0), 3.0f / 255);
  EXPECT_EQ(q.zero(0, 0), -128);
  EXPECT_EQ(code(0), 127);
  EXPECT_EQ(q.scale(0, 8), 4.0f / 255);
  EXPECT_EQ(q.zero(0, 8), 127);
  EXPECT_EQ(code(10), -128);
  for (std::int64_t empty : {16, 24}) {
    EXPECT_EQ(q.scale(0, empty), 0);
    EXPECT_EQ(q.zero(0, empty), 0);
    EXPECT_EQ(code(empty), 0);
  }
  for (std::int64_t spoilt : {32, 40}) {
    EXPECT_TRUE(std::isnan(q.scale(0, spoilt)));
    EXPECT_EQ(q.zero(0, spoilt), 0);
    EXPECT_EQ(code(spoilt), 0);
  }
  EXPECT_EQ(q.zero(0, 48), -28);
  EXPECT_EQ(code(48), -128);
  EXPECT_EQ(code(49), 127);
  EXPECT_EQ(code(50), -28) << "0 is a code";
  EXPECT_EQ(q.scale(0, 56), 1);
  EXPECT_EQ(code(56), 127);
  EXPECT_EQ(code(58), -127);
}

/// Blocks of 8 with offsets: a range is the block's own, with 0 or without.
TEST(QuantizeActivations, OffsetsOfOddBlocks) {
  const std::vector<float> blocks[] = {
      {5.1f, 5.1f, 5.1f, 5.1f, 5.1f, 5.1f, 5.1f, 5.1f},  // constant: nothing is lost
      {-1, -2, -4, -1, -2, -4, -1, -2},
      {0, -0.0f, 0, 0, 0, 0, 0, 0},
      {3, kNan, 3, 3, 3, 3, 3, 3},
      {3, -kInfinity, 3, 3, 3, 3, 3, 3},
      {265, 10, 11},  // a step of 1; the last one is short
  };
  std::vector<float> x;
  for (const std::vector<float>& block : blocks) x.insert(x.end(), block.begin(), block.end());
  const auto k = static_cast<std::int64_t>(x.size());
  Quantized q({DType::s8, GroupShape::group(8), ZeroKind::offset}, 1, k);
  const Status status = quantize_activations({x.data(), {1, k}}, q.scheme, q.out);
  ASSERT_TRUE(status.ok()) << status.message();
  const auto code = [&](std::int64_t i) { return static_cast<std::int8_t>(q.codes[static_cast<std::size_t>(i)]); };
  EXPECT_EQ(q.scale(0, 0), 0);
  EXPECT_EQ(q.offset(0, 0), 5.1f);
  EXPECT_EQ(code(0), 0);
  EXPECT_EQ(q.scale(0, 8), 3.0f / 255);
  EXPECT_EQ(q.offset(0, 8), -4 + 128 * (3.0f / 255));
  EXPECT_EQ(code(8), 127);
  EXPECT_EQ(code(10), -128);
  EXPECT_EQ(q.scale(0, 16), 0);
  EXPECT_FALSE(std::signbit(q.offset(0, 16)));
  for (std::int64_t spoilt : {24, 32}) {
    EXPECT_TRUE(std::isnan(q.scale(0, spoilt)));
    EXPECT_EQ(q.offset(0, spoilt), 0);
    EXPECT_EQ(code(spoilt), 0);
  }
  EXPECT_EQ(q.scale(0, 40), 1);
  EXPECT_EQ(q.offset(0, 40), 138);
  EXPECT_EQ(code(40), 127);
  EXPECT_EQ(code(41), -128);
  EXPECT_EQ(code(42), -127);
}

/// Activations in [5, 6]: a range that contains 0 is six times as wide.
TEST(QuantizeActivations, OffsetsAreFinerFarFromZero) {
  const std::int64_t m = 4, k = 256;
  std::vector<float> x(static_cast<std::size_t>(m * k));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = 5.0f + static_cast<float>(random_bits(3, i) % 1000) / 999;
  const auto error = [&](ZeroKind zero) {
    Quantized q({DType::s8, GroupShape::group(32), zero}, m, k);
    EXPECT_TRUE(quantize_activations({x.data(), {m, k}}, q.scheme, q.out).ok());
    double sum = 0;
    for (std::int64_t i = 0; i < m * k; ++i)
      sum += std::pow(double{q.value(i / k, i % k)} - double{x[static_cast<std::size_t>(i)]}, 2);
    return std::sqrt(sum);
  };
  EXPECT_NEAR(error(ZeroKind::integer) / error(ZeroKind::offset), 6.4, 0.6);  // a block spans less than 1
}

TEST(QuantizeActivations, PrescaleAndLimit) {
  const std::vector<float> x{1.0f, -8.0f, 2.0f, 0.5f, 0.0f, 0.0f, 0.0f, 0.0f};
  const std::vector<float> prescale{4.0f, 0.25f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  Quantized q({DType::s8}, 1, 8);
  ActOptions options{.prescale = ConstTensorView(prescale.data(), {8})};
  ASSERT_TRUE(quantize_activations({x.data(), {1, 8}}, q.scheme, q.out, options).ok());
  EXPECT_EQ(q.scales[0], 4.0f / 127);
  EXPECT_EQ(q.codes[0], 127);
  options.limit = 2.0f;
  ASSERT_TRUE(quantize_activations({x.data(), {1, 8}}, q.scheme, q.out, options).ok());
  EXPECT_EQ(q.scales[0], 2.0f / 127);
  EXPECT_EQ(static_cast<std::int8_t>(q.codes[0]), 127);
  EXPECT_EQ(static_cast<std::int8_t>(q.codes[1]), -127);
}

TEST(QuantizeActivations, KnownScales) {
  const std::vector<float> x{0.0f, 0.75f, 1e9f, -kInfinity, kNan, -0.25f, 1.0f, 2.0f};
  Quantized q({DType::s8, GroupShape::tensor(), ZeroKind::integer}, 1, 8);
  ASSERT_TRUE(quantize_activations({x.data(), {1, 8}}, q.scheme, q.out, {.known = StaticActs{0.5f, 3}}).ok());
  const std::vector<int> expected{3, 5, 127, -128, 3, 3, 5, 7};
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(static_cast<std::int8_t>(q.codes[i]), expected[i]) << i;
  Quantized fp8({DType::e4m3, GroupShape::tensor()}, 1, 8);
  ASSERT_TRUE(quantize_activations({x.data(), {1, 8}}, fp8.scheme, fp8.out, {.known = StaticActs{0.5f, 0}}).ok());
  EXPECT_EQ(fp8.codes[2], 0x7e);
  EXPECT_EQ(fp8.codes[3], 0xfe);
  EXPECT_EQ(fp8.codes[4], 0x7f);
  EXPECT_EQ(e4m3(fp8.codes[7]), 4.0f);
}

TEST(QuantizeActivations, RefusesWithTheValues) {
  const std::vector<float> x = gaussian(64);
  const ConstTensorView a(x.data(), {2, 32});
  const auto message = [&](const ActScheme& scheme, auto change, const ActOptions& options = {}) {
    Quantized q(scheme, 2, 32);
    change(q.out);
    const Status status = quantize_activations(a, scheme, q.out, options);
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(q.codes[0], 0xee) << "nothing has been written";
    return status.message();
  };
  const auto nothing = [](ActOutputs&) {};
  EXPECT_THAT(message({DType::u8}, nothing), HasSubstr("u8"));
  EXPECT_THAT(message({DType::s8, GroupShape::block(16, 16)}, nothing), HasSubstr("16"));
  EXPECT_THAT(message({DType::e4m3, GroupShape::channel(), ZeroKind::integer}, nothing), HasSubstr("e4m3"));
  EXPECT_THAT(message({DType::e4m3, GroupShape::channel(), ZeroKind::offset}, nothing), HasSubstr("e4m3"));
  EXPECT_THAT(message({DType::s8, GroupShape::channel(), ZeroKind::real}, nothing), HasSubstr("s8"));
  EXPECT_THAT(message({DType::s8, GroupShape::tensor(), ZeroKind::offset}, nothing, {.known = StaticActs{}}),
              HasSubstr("no float offset"));
  EXPECT_THAT(
      message({DType::s8, GroupShape::channel(), ZeroKind::offset}, [](ActOutputs& out) { out.zeros.dtype = DType::s32; }),
      HasSubstr("zeros must be f32 [2]"));
  EXPECT_THAT(message({DType::s8, GroupShape::tensor()}, nothing), HasSubstr("known"));
  EXPECT_THAT(message({DType::s8, GroupShape::tensor()}, nothing, {.known = StaticActs{1.0f, 5}}), HasSubstr("5"));
  EXPECT_THAT(message({DType::s8, GroupShape::tensor()}, nothing, {.known = StaticActs{-1.0f, 0}}), HasSubstr("-1"));
  EXPECT_THAT(message({DType::s8}, nothing, {.known = StaticActs{}}), HasSubstr("known"));
  EXPECT_THAT(message({DType::s8}, nothing, {.limit = 0.0f}), HasSubstr("limit"));
  EXPECT_THAT(message({DType::s8}, [](ActOutputs& out) { out.codes.strides[0] = 31; }), HasSubstr("31"));
  EXPECT_THAT(message({DType::s8}, [](ActOutputs& out) { out.scales = {}; }), HasSubstr("scales"));
  EXPECT_THAT(message({DType::s8}, [](ActOutputs& out) { out.scales.shape[0] = 3; }), HasSubstr("[3]"));
  EXPECT_THAT(message({DType::s8, GroupShape::channel(), ZeroKind::integer}, [](ActOutputs& out) { out.zeros = {}; }),
              HasSubstr("zeros"));
  EXPECT_THAT(message({DType::s8, GroupShape::group(16), ZeroKind::integer}, [](ActOutputs& out) { out.zeros.shape[1] = 3; }),
              HasSubstr("[2,3]"));
  EXPECT_THAT(message({DType::e4m3}, [](ActOutputs& out) { out.sums = TensorView(out.scales.data, DType::s32, {2}); }),
              HasSubstr("sums"));
}

// ---- the places in a plan's workspace

TEST(ActMap, PartsDoNotOverlap) {
  for (const ActScheme& scheme : {ActScheme{DType::s8}, ActScheme{DType::s8, GroupShape::channel(), ZeroKind::integer},
                                  ActScheme{DType::s8, GroupShape::group(32), ZeroKind::offset},
                                  ActScheme{DType::e4m3, GroupShape::group(128)}, ActScheme{DType::s8, GroupShape::tensor()}})
    for (std::int64_t m : {1, 7, 64, 1000})
      for (std::int64_t k : {1, 128, 300, 4096}) {
        const cuda::ActMap map = cuda::act_map(scheme, m, k);
        const bool known = scheme.group == GroupShape::tensor();
        const auto rows = static_cast<std::size_t>(m);
        EXPECT_EQ(map.pitch % 128, 0);
        EXPECT_GE(map.pitch, k);
        EXPECT_EQ(map.groups, scheme.group.cols(k));
        for (std::size_t at : {map.scales, map.zeros, map.sums, map.bytes}) EXPECT_EQ(at % 256, 0u);
        const std::size_t of_groups = known ? 0 : 4 * rows * static_cast<std::size_t>(map.groups);
        EXPECT_GE(map.scales, rows * static_cast<std::size_t>(map.pitch));
        EXPECT_GE(map.zeros, map.scales + of_groups);
        EXPECT_GE(map.sums, map.zeros + (scheme.zero == ZeroKind::none ? 0 : of_groups));
        EXPECT_GE(map.bytes, map.sums + 4 * rows);
        EXPECT_LE(map.bytes, cuda::act_map(scheme, m + 1, k).bytes) << "never less for a larger M";
      }
}

}  // namespace
}  // namespace nibble
