// The comparator that verification rests on, and the errors that it allows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "kernels/kernel.hpp"
#include "kernels/reference/oracle.hpp"
#include "nibble/nibble.hpp"
#include "plan/act_model.hpp"
#include "plan/compare.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using testing::random_weight;

const WeightScheme kAwq{DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16};

/// The bound of a layer is that of the requested accumulation; only tensor cores of sm_90 have a choice.
TEST(Gpu, TheBoundFollowsTheAccumulation) {
  const WeightScheme per_channel{DType::e4m3, ZeroKind::none, GroupShape::channel(), DType::f32};
  const ActScheme per_token{DType::e4m3, GroupShape::channel()}, groups{DType::e4m3, GroupShape::group(128)};
  const auto channels = [&](std::string_view kernel, const ActScheme& quantize, Accumulation accumulation) {
    return act_model(*find_kernel(kernel), DType::bf16, quantize, per_channel, accumulation).fp8_group;
  };
  for (const Kernel& kernel : kernel_table()) {
    if (kernel.op != Op::linear || kernel.act != "e4m3" || kernel.backend != Backend::cuda) continue;
    const bool sm90 = kernel.isa == Isa::sm90;
    EXPECT_EQ(channels(kernel.name, per_token, Accumulation::fast), sm90 ? 0 : -1) << kernel.name;
    EXPECT_EQ(channels(kernel.name, per_token, Accumulation::precise), sm90 ? 512 : -1) << kernel.name;
    for (Accumulation accumulation : {Accumulation::fast, Accumulation::precise})
      EXPECT_EQ(channels(kernel.name, groups, accumulation), sm90 ? 128 : -1) << kernel.name;
  }

  const Kernel& kernel = *find_kernel("linear_any_e4m3_any__cuda_sm90_wgmma_m256n128");
  const QuantTensor q = random_weight(per_channel, 1, 8192, 1);
  const std::vector<float> a(8192, 1.0f);
  const std::int64_t column = 0;
  const auto bound = [&](Accumulation accumulation) {
    return reference::linear(reference::arrays_of(q), ConstTensorView(a.data(), {1, 8192}), {}, {}, {&column, 1},
                             act_model(kernel, DType::f32, per_token, per_channel, accumulation))
        .front()
        .bound;
  };
  EXPECT_LT(bound(Accumulation::precise), 0.7 * bound(Accumulation::fast));
}

/// The error that quantizing activations adds: less with finer scales, nothing where codes hold the activations exactly.
TEST(ActErrors, FollowTheScales) {
  const QuantTensor q = random_weight(kAwq, 48, 512, 1, {.bias = true});
  const ActScheme modes[] = {{DType::s8},
                             {DType::s8, GroupShape::channel(), ZeroKind::integer},
                             {DType::s8, GroupShape::group(32)},
                             {DType::s8, GroupShape::group(32), ZeroKind::integer},
                             {DType::s8, GroupShape::group(48)},
                             {}};
  const auto plain = activation_errors(q, modes), outliers = activation_errors(q, modes, {.outliers = 100});
  ASSERT_TRUE(plain.ok() && outliers.ok());
  const auto error = [&](std::size_t mode) { return (*plain)[mode].relative_l2; };
  EXPECT_GT(error(0), error(1));
  EXPECT_GT(error(1), error(2));
  EXPECT_GT(error(2), error(3));
  EXPECT_NEAR((*plain)[0].sqnr_db, -20 * std::log10(error(0)), 1e-9);
  EXPECT_THAT((*plain)[4].possible.message(), HasSubstr("do not line up"));
  EXPECT_EQ(error(5), 0) << "nothing is quantized";
  EXPECT_GT((*outliers)[0].relative_l2, 3 * (*outliers)[3].relative_l2);

  std::vector<float> inputs(2 * 512);
  for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] = static_cast<float>(static_cast<int>(i % 255) - 127);
  const auto exact = activation_errors(q, {modes, 1}, {.inputs = ConstTensorView(inputs.data(), {2, 512})});
  ASSERT_TRUE(exact.ok());
  EXPECT_LT((*exact)[0].relative_l2, 1e-6);
  EXPECT_THAT(activation_errors(q, modes, {.inputs = ConstTensorView(inputs.data(), {4, 256})}).status().message(),
              HasSubstr("[tokens,512]"));
}

class Comparator : public ::testing::Test {
 protected:
  Comparator() : d_(DType::f32, {2, 3}), columns_{0, 1, 2} {
    const float values[] = {1.0f, -2.0f, 0.0f, -1e-3f, 5e4f, -7.0f};
    for (std::int64_t i = 0; i < 6; ++i) {
      d_.set(i, values[i]);
      expected_.push_back({values[i], 1e-3});
    }
  }
  Comparison run() { return compare(d_, columns_, expected_); }

  Tensor d_;
  std::vector<std::int64_t> columns_;
  std::vector<reference::Expected> expected_;
};

TEST_F(Comparator, AcceptsEqualityAndErrorsWithinTheBound) {
  EXPECT_EQ(run().failures, 0);
  EXPECT_EQ(run().checked, 6);
  for (std::int64_t i = 0; i < 6; ++i)
    if (i != 4) d_.set(i, static_cast<float>(expected_[static_cast<std::size_t>(i)].value + 0.9e-3));
  EXPECT_EQ(run().failures, 0);
}

TEST_F(Comparator, NoticesErrorsOfBothSignsAtEveryPosition) {
  for (std::int64_t i = 0; i < 6; ++i)
    for (double error : {-1.1e-2, +1.1e-2}) {
      const float good = d_.at(i);
      d_.set(i, static_cast<float>(expected_[static_cast<std::size_t>(i)].value + error));
      const Comparison c = run();
      EXPECT_EQ(c.failures, 1) << i << " " << error;
      EXPECT_EQ(c.worst_m * 3 + c.worst_n, i);
      d_.set(i, good);
    }
}

TEST_F(Comparator, NoticesWrongSignNaNAndInfinity) {
  for (std::int64_t i : {0, 1, 5}) {
    const float good = d_.at(i);
    for (float bad : {-good, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                      -std::numeric_limits<float>::infinity()}) {
      d_.set(i, bad);
      EXPECT_EQ(run().failures, 1) << i << " " << bad;
    }
    d_.set(i, good);
  }
}

TEST_F(Comparator, OverflowToInfinityIsRightOnlyWhenTheTypeOverflows) {
  Tensor half(DType::f16, {1, 1});
  half.set(0, std::numeric_limits<float>::infinity());
  const std::int64_t column[] = {0};
  const std::vector<reference::Expected> big{{70000.0, 1.0}}, small{{60000.0, 1.0}}, negative{{-70000.0, 1.0}};
  EXPECT_EQ(compare(half, column, big).failures, 0);
  EXPECT_EQ(compare(half, column, small).failures, 1);
  EXPECT_EQ(compare(half, column, negative).failures, 1);
}

/// One wrong code in a real-sized layer must not hide in the tolerance.

TEST(Verify, OneWrongCodeInALargeLayerIsFound) {
  const std::int64_t n = 32, k = 4096;
  const QuantTensor good = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(128), DType::f16}, n, k, 3);
  QuantTensor bad = good;
  bad.codes[5 * k + 1234] ^= 4;
  const std::int64_t m = 4;
  Tensor a(DType::f32, {m, k});
  for (std::int64_t i = 0; i < a.numel(); ++i) a.set(i, random_normal(1, static_cast<std::uint64_t>(i)));
  const ConstTensorView a_view(a.as<float>(), {m, k});
  const auto weight = pack(bad);
  const auto plan = Plan::linear(*weight, {.m_max = m});
  std::vector<std::byte> workspace(plan->workspace_bytes());
  Tensor d(DType::f32, {m, n});
  ASSERT_TRUE(plan->run(*weight, a_view, TensorView(d.as<float>(), {m, n}), {}, workspace).ok());
  std::vector<std::int64_t> columns(static_cast<std::size_t>(n));
  std::iota(columns.begin(), columns.end(), 0);
  const Comparison c = compare(d, columns, reference::linear(reference::arrays_of(good), a_view, {}, {}, columns));
  EXPECT_GE(c.failures, 1);
  EXPECT_EQ(c.worst_n, 5);
}

/// x as an f16 or bf16.
double rounded(DType type, double x) {
  const auto f = static_cast<float>(x);
  return type == DType::f16 ? to_f32(to_f16(f)) : to_f32(to_bf16(f));
}

/// W in a kernel that rounds weights to `type`: rounded once, or after rounding scales and the fractional part of an offset.
double rounded_weight(const QuantTensor& q, std::int64_t n, std::int64_t k, DType type, bool rounds_scales) {
  const std::int64_t at = n * q.groups() + k / q.scheme.group.k;
  const double s = q.scales.at(at), code = code_value(q.scheme.codes, q.codes[static_cast<std::size_t>(n * q.k + k)]);
  const double offset = q.scheme.zero == ZeroKind::offset ? q.zeros.at(at) : 0.0;
  if (!rounds_scales) return rounded(type, code * s + offset);
  const double up = type == DType::f16 ? 64.0 : 1.0;
  const double whole = std::nearbyint(-offset / s);
  return rounded(type, (code - whole) * rounded(type, s * up) + rounded(type, (offset + whole * s) * up)) / up;
}

/// The bounds of kernels that round weights hold, and still show one wrong code: of bf16 only where no scale is rounded, so that
/// the rounding is known.
TEST(Verify, RoundedWeightsAreWithinTheirBoundAndAWrongCodeIsNot) {
  const std::int64_t m = 4, n = 16, k = 4096, wrong = 5;
  std::vector<std::int64_t> columns(static_cast<std::size_t>(n));
  std::iota(columns.begin(), columns.end(), 0);
  for (DType type : {DType::f16, DType::bf16})
    for (ZeroKind zero : {ZeroKind::none, ZeroKind::offset})
      for (float scale2 : {1.0f, 1e-3f})
        for (bool rounds_scales : {false, true}) {
          const DType codes = zero == ZeroKind::none ? DType::u4b8 : DType::u4;
          const QuantTensor q = random_weight({codes, zero, GroupShape::group(128), DType::f32}, n, k, 3);
          QuantTensor good = q;
          good.scale2 = scale2;
          Tensor a(type, {m, k});
          for (std::int64_t i = 0; i < a.numel(); ++i) a.set(i, random_normal(1, static_cast<std::uint64_t>(i)));
          const ConstTensorView a_view(a.bytes.data(), type, {m, k});
          const auto expected = reference::linear(reference::arrays_of(good), a_view, {}, {}, columns,
                                                  {.dot_factor = 4, .weight_type = type, .rounds_scales = rounds_scales});
          const auto compared = [&](const QuantTensor& weight) {
            Tensor d(DType::f32, {m, n});
            for (std::int64_t row = 0; row < m; ++row)
              for (std::int64_t column = 0; column < n; ++column) {
                double sum = 0;
                for (std::int64_t i = 0; i < k; ++i)
                  sum += a.at(row * k + i) * rounded_weight(weight, column, i, type, rounds_scales);
                d.set(row * n + column, static_cast<float>(sum * scale2));
              }
            return compare(d, columns, expected);
          };
          SCOPED_TRACE(::testing::Message() << name(type) << (zero == ZeroKind::offset ? " offset" : "") << " scale2 " << scale2
                                            << (rounds_scales ? " scales too" : ""));
          const Comparison right = compared(q);
          EXPECT_EQ(right.failures, 0);
          EXPECT_GT(right.worst_ratio, 0.02);  // a loose bound would test nothing
          if (type == DType::bf16 && rounds_scales) continue;
          QuantTensor bad = q;
          bad.codes[static_cast<std::size_t>(wrong * k + 1234)] ^= 4;
          const Comparison c = compared(bad);
          EXPECT_GE(c.failures, 1);
          EXPECT_EQ(c.worst_n, wrong);
        }
}

/// Tiny weights, where f16 has fewer bits or none: the bound has a floor there.
TEST(Verify, RoundedWeightsMayVanishInHalfPrecision) {
  const std::int64_t n = 4, k = 256;
  for (bool rounds_scales : {false, true})
    for (float scale : {1e-6f, 3e-8f, 1e-9f}) {
      QuantTensor q = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f32}, n, k, 3);
      for (std::int64_t i = 0; i < q.scales.numel(); ++i) q.scales.set(i, scale * (1 + 0.01f * static_cast<float>(i)));
      Tensor a(DType::f16, {1, k}), d(DType::f32, {1, n});
      for (std::int64_t i = 0; i < k; ++i) a.set(i, random_normal(1, static_cast<std::uint64_t>(i)));
      for (std::int64_t column = 0; column < n; ++column) {
        double sum = 0;
        for (std::int64_t i = 0; i < k; ++i) sum += a.at(i) * rounded_weight(q, column, i, DType::f16, rounds_scales);
        d.set(column, static_cast<float>(sum));
      }
      const std::int64_t columns[] = {0, 1, 2, 3};
      const auto expected = reference::linear(reference::arrays_of(q), ConstTensorView(a.bytes.data(), DType::f16, {1, k}), {},
                                              {}, columns, {.weight_type = DType::f16, .rounds_scales = rounds_scales});
      EXPECT_EQ(compare(d, columns, expected).failures, 0) << scale;
    }
}

}  // namespace
}  // namespace nibble
