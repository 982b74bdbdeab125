// Conformance of convolutions: every kernel of Op::conv × random geometry × layouts × schemes × epilogues, against the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "conv_rows.hpp"
#include "epilogue/epilogue.hpp"
#include "kernels/reference/conv.hpp"
#include "linear_rows.hpp"
#include "plan/host_run.hpp"
#include "quantize/act_rule.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

class OfConv : public ::testing::TestWithParam<const Kernel*> {
 protected:
  void SetUp() override {
    if (const Status here = runs_there(*GetParam(), {}); !here.ok()) GTEST_SKIP() << here.message();
  }
};

class ConvConformance : public OfConv {};
class ConvW8A8Conformance : public OfConv {};
class ConvInvariance : public OfConv {};
/// An A of s8 codes with a zero point may as well be one of u8 codes, of which kernels see nothing.
void may_come_as_u8(ConvSpec& spec, std::uint64_t seed) {
  if (spec.a_dtype == DType::s8 && spec.act_scheme.zero == ZeroKind::integer && seed % 2 == 0) spec.a_dtype = DType::u8;
}

/// Activations unquantized, or quantized per patch, per tensor and in blocks of a pixel: every scheme that the kernel takes.
std::vector<ConvSpec> ways(const Kernel& kernel, const ConvGeometry& g, std::uint64_t seed) {
  std::vector<ActScheme> acts{{},
                              {DType::s8, GroupShape::channel()},
                              {DType::s8, GroupShape::tensor(), ZeroKind::integer},
                              {DType::s8, GroupShape::channel(), ZeroKind::integer},
                              {DType::s8, GroupShape::channel(), ZeroKind::offset},
                              {DType::e4m3, GroupShape::channel()},
                              {DType::e4m3, GroupShape::tensor()}};
  if (g.group_inputs() % 8 == 0) acts.push_back({DType::s8, GroupShape::group(8)});
  if (g.group_inputs() % 3 == 0) acts.push_back({DType::s8, GroupShape::group(3), ZeroKind::offset});
  if (g.group_inputs() % 16 == 0) acts.push_back({DType::s8, GroupShape::group(16)});
  if (g.group_inputs() % 32 == 0)
    for (ZeroKind zero : {ZeroKind::integer, ZeroKind::offset}) acts.push_back({DType::s8, GroupShape::group(32), zero});
  if (g.group_inputs() % 64 == 0) acts.push_back({DType::s8, GroupShape::group(64)});
  if (g.group_inputs() % 128 == 0) {
    acts.push_back({DType::s8, GroupShape::group(128)});
    acts.push_back({DType::s8, GroupShape::group(128), ZeroKind::integer});
  }
  std::vector<ConvSpec> list;
  for (const ActScheme& act : acts) {
    ConvSpec spec{.geometry = g, .act_scheme = act};
    spec.a_dtype = kernel.form == ActForm::bf16x3k32                          ? DType::f32
                   : kernel.form == ActForm::bf16x2k32 || kernel.act == "f16" ? DType::f16
                   : kernel.act.starts_with("bf16")                           ? DType::bf16
                                                    : std::array{DType::f32, DType::f16, DType::bf16}[seed % 3];
    list.push_back(spec);
    if (act.group == GroupShape::tensor()) {
      spec.a_dtype = act.codes;
      list.push_back(spec);
    }
  }
  return list;
}

TEST_P(ConvConformance, RandomGeometryIsWithinItsBound) {
  const Kernel& kernel = *GetParam();
  const std::vector<EpilogueSpec> epilogues{
      {},
      {.bias = true, .activation = Activation::relu, .out = DType::f16},
      {.bias = true, .activation = Activation::clamp, .out = DType::s8, .out_scale = 0.37f, .out_zero = 5},
      {.col_scale = true, .activation = Activation::silu, .gate = true, .residual = true, .out = DType::f32},
      {.bias = true, .out = DType::bf16}};
  int compared = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const ConvGeometry g = random_geometry(seed, kernel);
    const QuantTensor plain = conv_weight(conv_schemes()[seed % conv_schemes().size()], g, seed, true);
    for (const ConvSpec& way : ways(kernel, g, seed)) {
      ConvCase c{.spec = way, .batch = 1 + static_cast<std::int64_t>(seed % 3), .more = seed / 16 % 2 == 0 ? 3 : 0, .seed = seed};
      c.spec.input = layout_of(seed / 8);  // every epilogue with every layout
      c.spec.output = layout_of(seed / 4);
      c.spec.batch_max = c.batch;
      c.spec.epilogue = epilogues[seed / 3 % epilogues.size()];
      if (!takes(kernel, plain.scheme, c.spec)) continue;
      may_come_as_u8(c.spec, seed);
      QuantTensor q = plain;
      if (way.act_scheme.group == GroupShape::tensor()) q.static_acts = {0.02f, way.act_scheme.zero == ZeroKind::none ? 0 : -37};
      if (seed % 5 == 0 && !q.scheme.is_dense()) q.scale2 = 0.7f;
      if ((seed % 5 == 1 || seed % 5 == 3) && takes_prescale(kernel, q, c.spec)) q.prescale = random_prescale(g, seed);
      SCOPED_TRACE(describe(g) + scheme_name(q, way.act_scheme) + " " + std::string(name(c.spec.input)) + " to " +
                   std::string(name(c.spec.output)) + " act " + std::string(name(c.spec.a_dtype)) +
                   (q.prescale.empty() ? "" : " prescale") + " seed " + std::to_string(seed));
      Images a(c.spec.a_dtype, c.spec.input, c.batch, g.in_channels, g.height, g.width, c.more);
      a.fill_random(seed);
      const ConvOperands operands(c);
      const Operands args = operands.args(q);
      const Tensor d = run_conv(q, c, a, args, kernel.name);
      if (HasFailure()) return;
      expect_within_bound(q, c, a, args, d, kernel);
      if (HasFatalFailure()) return;
      ++compared;
    }
  }
  EXPECT_GT(compared, 0);
}

/// W8A8 as docs/accuracy.md defines it, on patches: exact integers, then f32 operations in their order.
Tensor exact_w8a8(const QuantTensor& q, const ConvCase& c, const Images& a, const Operands& args) {
  const ConvGeometry& g = c.spec.geometry;
  Tensor d(c.spec.epilogue.out, {c.batch * g.out_height() * g.out_width(), q.n});
  const Tensor gate = reference::pixels(args.gate), residual = reference::pixels(args.residual);
  Operands flat = args;
  flat.gate = ConstTensorView(gate.bytes.data(), gate.dtype, {gate.shape[0], gate.shape[1]});
  flat.residual = ConstTensorView(residual.bytes.data(), residual.dtype, {residual.shape[0], residual.shape[1]});
  const bool codes = !is_compute_float(c.spec.a_dtype);
  const std::int32_t above = c.spec.a_dtype == DType::u8 ? 128 : 0;  // the s8 codes that the zero point is for
  for (std::int64_t group = 0; group < g.groups; ++group) {
    const Tensor rows = reference::patches(
        g, a.view, group,
        codes && c.spec.act_scheme.zero != ZeroKind::none ? static_cast<float>(q.static_acts->zero + above) : 0);
    const auto activation = [&](std::int64_t r, std::int64_t i) {
      const float x = rows.at(r * q.k + i);
      return q.prescale.empty() ? x : act_rule::multiply(x, q.prescale.at(i));
    };
    for (std::int64_t r = 0; r < rows.shape[0]; ++r) {
      act_rule::Rule rule;
      if (q.static_acts) {
        rule = act_rule::known(q.static_acts->scale, q.static_acts->zero + above);
      } else {
        float low = 0, high = 0;
        for (std::int64_t i = 0; i < q.k; ++i) {
          low = std::min(low, activation(r, i));
          high = std::max(high, activation(r, i));
        }
        rule = c.spec.act_scheme.zero != ZeroKind::none ? act_rule::asymmetric(low, high)
                                                        : act_rule::symmetric(std::max(-low, high), 127.0f);
      }
      std::vector<float> sums;
      for (std::int64_t n = group * g.group_outputs(); n < (group + 1) * g.group_outputs(); ++n) {
        const std::int64_t at = q.scheme.group.n == 0 ? 0 : n;
        const std::int64_t zero = q.zeros.empty() ? 0 : static_cast<std::int64_t>(q.zeros.at(at));
        std::int64_t sum = 0;
        for (std::int64_t i = 0; i < q.k; ++i) {
          const float x = activation(r, i);
          const std::int64_t code = (codes ? static_cast<std::int64_t>(x) : act_rule::to_s8(x, rule)) - rule.zero;
          sum += code *
                 (static_cast<std::int64_t>(code_value(q.scheme.codes, q.codes[static_cast<std::size_t>(n * q.k + i)])) - zero);
        }
        if (c.spec.epilogue.sum_bias) sum += static_cast<const std::int32_t*>(args.sum_bias.data)[n];
        if (d.dtype == DType::s32) d.as<std::int32_t>()[r * q.n + n] = static_cast<std::int32_t>(sum);
        float y = static_cast<float>(sum);
        y = y * rule.scale;
        y = y * q.scales.at(at);
        if (q.scale2) y = y * *q.scale2;
        sums.push_back(y);
      }
      if (d.dtype == DType::s32) continue;
      epilogue::store_row(c.spec.epilogue, flat, sums.data(), r, group * g.group_outputs(), g.group_outputs(),
                          TensorView(d.bytes.data(), d.dtype, {d.shape[0], d.shape[1]}));
    }
  }
  return d;
}

TEST_P(ConvW8A8Conformance, IsExact) {
  const Kernel& kernel = *GetParam();
  const std::vector<EpilogueSpec> epilogues{
      {},
      {.bias = true, .activation = Activation::clamp, .out = DType::s8, .out_scale = 0.37f, .out_zero = 5},
      {.bias = true, .out = DType::f16},
      {.col_scale = true, .bias = true, .activation = Activation::relu, .gate = true, .residual = true, .out = DType::bf16},
      {.sum_bias = true, .bias = true, .out = DType::f16},
      {.sum_bias = true, .out = DType::s32},
      {.sum_bias = true, .out = DType::u8, .out_scales = true, .out_low = 2}};
  int compared = 0;
  for (std::uint64_t seed = 1; seed <= 120; ++seed) {
    const ConvGeometry g = random_geometry(seed + 500, kernel);
    const auto weights = testing::whole_row_schemes();
    const WeightScheme& scheme = weights[seed % weights.size()];
    for (GroupShape group : {GroupShape::tensor(), GroupShape::channel()})
      for (ZeroKind zero : {ZeroKind::none, ZeroKind::integer})
        for (bool comes_quantized : {false, true}) {
          if (comes_quantized && group != GroupShape::tensor()) continue;
          ConvCase c{.spec = {.geometry = g, .act_scheme = {DType::s8, group, zero}},
                     .batch = 1 + static_cast<std::int64_t>(seed % 2),
                     .more = seed / 16 % 2 == 0 ? 5 : 0,
                     .seed = seed};
          c.spec.a_dtype = comes_quantized ? DType::s8 : std::array{DType::f32, DType::f16, DType::bf16}[seed % 3];
          c.spec.input = layout_of(seed / 8);
          c.spec.output = layout_of(seed / 4);
          c.spec.batch_max = c.batch;
          c.spec.epilogue = epilogues[seed % epilogues.size()];
          if (c.spec.epilogue.out == DType::s32 && !comes_quantized) c.spec.epilogue = {};
          QuantTensor q = conv_weight(scheme, g, seed, true);
          if (!takes(kernel, q.scheme, c.spec)) continue;
          may_come_as_u8(c.spec, seed);
          if (group == GroupShape::tensor()) q.static_acts = {0.013f, zero == ZeroKind::none ? 0 : 21};
          if (seed % 3 == 0) q.scale2 = 0.7f;
          if (seed % 5 < 2 && takes_prescale(kernel, q, c.spec)) q.prescale = random_prescale(g, seed);
          SCOPED_TRACE(describe(g) + scheme_name(q, c.spec.act_scheme) + " " + std::string(name(c.spec.input)) + " to " +
                       std::string(name(c.spec.output)) + " act " + std::string(name(c.spec.a_dtype)) + " seed " +
                       std::to_string(seed));
          Images a(c.spec.a_dtype, c.spec.input, c.batch, g.in_channels, g.height, g.width, c.more);
          a.fill_random(seed);
          const ConvOperands operands(c);
          const Operands args = operands.args(q);
          const Tensor d = run_conv(q, c, a, args, kernel.name);
          if (HasFailure()) return;
          const Tensor expected = exact_w8a8(q, c, a, args);
          ASSERT_EQ(d.bytes.size(), expected.bytes.size());
          const auto width = static_cast<std::size_t>(bits(d.dtype) / 8);
          for (std::int64_t i = 0; i < d.numel(); ++i) {
            const std::size_t at = static_cast<std::size_t>(i) * width;
            ASSERT_EQ(std::memcmp(d.bytes.data() + at, expected.bytes.data() + at, width), 0)
                << "pixel " << i / q.n << ", channel " << i % q.n << ": " << d.at(i) << " and " << expected.at(i);
          }
          ++compared;
        }
  }
  EXPECT_GT(compared, 0) << "the kernel took no layer";
}

/// Codes and zero points of which one has a sign: |q − z| is up to 383, so that fewer channels fit than with others. Exact, or refused.
void expect_exact_or_refused(const Kernel& kernel, const ConvGeometry& g) {
  ConvCase c{.spec = {.geometry = g, .a_dtype = DType::s8, .act_scheme = {DType::s8, GroupShape::tensor(), ZeroKind::integer}}};
  QuantTensor q = conv_weight({DType::s8, ZeroKind::integer, GroupShape::channel(), DType::f32}, g, 3, true);
  q.static_acts = {0.013f, 127};
  q.zeros = Tensor(DType::u8, q.zeros.shape);
  std::ranges::fill(q.zeros.bytes, std::byte{255});
  for (std::uint8_t& code : q.codes) code = 0x80 | (code & 1);
  if (!takes(kernel, q.scheme, c.spec)) return;
  const auto weight = pack(q, {.kernel = std::string(kernel.name)});
  if (weight.ok() && !Plan::conv(*weight, c.spec, {.kernel = std::string(kernel.name)}).ok()) return;
  SCOPED_TRACE(describe(g));
  Images a(DType::s8, c.spec.input, c.batch, g.in_channels, g.height, g.width);
  std::ranges::fill(a.memory.bytes, std::byte{0x80});
  const ConvOperands operands(c);
  const Operands args = operands.args(q);
  const Tensor d = run_conv(q, c, a, args, kernel.name);
  if (::testing::Test::HasFailure()) return;
  const Tensor expected = exact_w8a8(q, c, a, args);
  for (std::int64_t i = 0; i < d.numel(); ++i) ASSERT_EQ(d.at(i), expected.at(i)) << "element " << i;
}

/// More than 32 bits hold.
TEST_P(ConvW8A8Conformance, ZeroPointsOfTheOtherSign) {
  expect_exact_or_refused(*GetParam(), {.in_channels = 22'400, .out_channels = 64, .height = 1, .width = 2});
}

/// More than an f32 holds.
TEST_P(ConvConformance, DepthwiseZeroPointsOfTheOtherSign) {
  const Kernel& kernel = *GetParam();
  if (kernel.variant != "depthwise") GTEST_SKIP() << "adds no integers as floats";
  expect_exact_or_refused(kernel,
                          {.in_channels = 16, .out_channels = 16, .height = 14, .width = 15, .filter = {14, 14}, .groups = 16});
}

/// Zero points that are no codes, without padding: every 32-bit integer is valid.
TEST_P(ConvConformance, ZeroPointsOutsideTheCodes) {
  const Kernel& kernel = *GetParam();
  if (kernel.backend == Backend::cuda) GTEST_SKIP() << "takes zero points of a byte";
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min(), kMost = std::numeric_limits<std::int32_t>::max();
  int compared = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    ConvGeometry g = random_geometry(seed, kernel);
    g.padding = {};
    if (!g.validate().ok()) continue;
    const QuantTensor q = conv_weight(conv_schemes()[seed % conv_schemes().size()], g, seed, true);
    ConvCase c{.spec = {.geometry = g, .a_dtype = DType::s8, .act_scheme = {DType::s8, GroupShape::tensor(), ZeroKind::integer}},
               .batch = 2,
               .seed = seed};
    c.spec.batch_max = c.batch;
    if (!takes(kernel, q.scheme, c.spec)) continue;
    Images a(DType::s8, c.spec.input, c.batch, g.in_channels, g.height, g.width);
    a.fill_random(seed);
    for (const std::int32_t zero : {128, -129, -700, 70'000, kLeast, kMost}) {
      SCOPED_TRACE(describe(g) + scheme_name(q, c.spec.act_scheme) + " zero " + std::to_string(zero));
      const float scale = 0.01f;
      const Operands args{.a_scale = ConstTensorView(&scale, {1}), .a_zero = ConstTensorView(&zero, {1})};
      const Tensor d = run_conv(q, c, a, args, kernel.name);
      if (HasFailure()) return;
      expect_within_bound(q, c, a, args, d, kernel);
      if (HasFatalFailure()) return;
      ++compared;
    }
  }
  if (compared == 0) GTEST_SKIP() << "it does not multiply int8 that has zero points";
}

/// The same bits for any number of threads, in both layouts of the output, and for every batch if the table promises that.
TEST_P(ConvInvariance, DoesNotDependOnThreadsLayoutOrBatch) {
  const Kernel& kernel = *GetParam();
  int compared = 0;
  for (std::int64_t depthwise : {0, 1}) {
    ConvGeometry g{.in_channels = kernel.isa == Isa::sm90 || kernel.isa == Isa::amx ? 64
                                  : kernel.act == "s8i16" || kernel.act == "s8x3"   ? 64
                                  : kernel.isa == Isa::sm80                         ? 48
                                                                                    : 24,
                   .out_channels = 48,
                   .height = 9,
                   .width = 270,
                   .filter = {3, 3},
                   .stride = {2, 1},
                   .padding = {1, 0, 2, 1}};
    if (depthwise == 1) g.groups = g.in_channels = 24;
    for (const ConvSpec& way : ways(kernel, g, 0)) {
      ConvCase c{.spec = way, .batch = 3, .seed = 3};
      c.spec.batch_max = 3;
      for (const WeightScheme& scheme : conv_schemes()) {
        QuantTensor q = conv_weight(scheme, g, 4, false);
        if (!takes(kernel, q.scheme, c.spec)) continue;
        if (way.act_scheme.group == GroupShape::tensor())
          q.static_acts = {0.02f, way.act_scheme.zero == ZeroKind::none ? 0 : -37};
        Images a(c.spec.a_dtype, c.spec.input, c.batch, g.in_channels, g.height, g.width);
        a.fill_random(1);
        Tensor first;
        for (int threads : {1, 5})
          for (ImageLayout layout : {ImageLayout::nchw, ImageLayout::nhwc}) {
            c.spec.output = layout;
            auto executor = make_executor(threads);
            const Tensor d = run_conv(q, c, a, {}, kernel.name, executor.get());
            ASSERT_FALSE(HasFailure());
            if (first.empty()) first = d;
            ASSERT_EQ(first.bytes, d.bytes) << threads << " threads, " << name(layout);
          }
        ++compared;
        if (!kernel.batch_invariant) break;
        ConvCase one = c;
        one.batch = one.spec.batch_max = 1;
        Images last = a;
        last.view = TensorView(last.memory.bytes.data() + 2 * a.view.stride(0) * bits(c.spec.a_dtype) / 8, c.spec.a_dtype,
                               {1, g.in_channels, g.height, g.width});
        last.view.strides = a.view.strides;
        const Tensor d = run_conv(q, one, last, {}, kernel.name);
        ASSERT_EQ(std::memcmp(d.bytes.data(), first.bytes.data() + 2 * d.bytes.size(), d.bytes.size()), 0);
        break;
      }
    }
  }
  EXPECT_GT(compared, 0) << "the kernel took no layer";
}

/// For exact products of int8, whose order does not matter; except the reference, which computes in double.
bool multiplies_int8(const Kernel& kernel) {
  if (!runs_there(kernel, {}).ok()) return true;  // cannot be asked here: the test is skipped, with the reason
  if (kernel.act == "any") return false;
  ConvSpec spec{.geometry = {.in_channels = 128, .out_channels = 64, .height = 9, .width = 9, .filter = {3, 3}},
                .act_scheme = {DType::s8, GroupShape::tensor()}};
  const WeightScheme scheme{DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32};
  for (DType act : {DType::f32, DType::f16, DType::s8}) {
    spec.a_dtype = act;
    if (takes(kernel, scheme, spec)) return true;
  }
  return false;
}

/// A NaN of the bias is NaN after every activation and bound, and the code 0 in int8.
TEST_P(ConvConformance, NaNGoesThroughEveryEpilogue) {
  const Kernel& kernel = *GetParam();
  int compared = 0;
  for (std::uint64_t seed = 1; seed <= 120 && compared == 0; ++seed) {
    const ConvGeometry g = random_geometry(seed, kernel);
    if (g.group_outputs() < 40 && seed <= 60 && g.groups == 1) continue;  // prefer one with whole vectors of outputs
    QuantTensor q = conv_weight(conv_schemes()[seed % conv_schemes().size()], g, seed, false);
    q.bias = Tensor(DType::f32, {q.n});
    for (std::int64_t i = 0; i < q.n; ++i) q.bias.set(i, i % 3 == 1 ? std::numeric_limits<float>::quiet_NaN() : 0.5f);
    for (const ConvSpec& way : ways(kernel, g, seed)) {
      ConvCase c{.spec = way, .seed = seed};
      c.spec.input = layout_of(seed / 2);
      c.spec.output = layout_of(seed);
      if (!takes(kernel, q.scheme, c.spec)) continue;
      if (way.act_scheme.group == GroupShape::tensor()) q.static_acts = {0.02f, way.act_scheme.zero == ZeroKind::none ? 0 : -37};
      Images a(c.spec.a_dtype, c.spec.input, c.batch, g.in_channels, g.height, g.width);
      a.fill_random(seed);
      for (Activation activation : kActivations)
        for (DType out : {DType::f32, DType::f16, DType::s8}) {
          c.spec.epilogue = {.bias = true, .activation = activation, .out = out, .out_scale = 0.05f, .out_zero = -3};
          const Tensor d = run_conv(q, c, a, {}, kernel.name);
          if (HasFailure()) return;
          for (std::int64_t i = 0; i < d.numel(); ++i) {
            const bool is_nan = i % q.n % 3 == 1;
            if (out != DType::s8) {
              ASSERT_EQ(std::isnan(d.at(i)), is_nan) << describe(g) << c.spec.epilogue.name() << " element " << i;
            } else if (is_nan) {
              ASSERT_EQ(d.at(i), 0.0f) << describe(g) << c.spec.epilogue.name() << " element " << i;
            }
          }
          ++compared;
        }
      break;
    }
  }
  EXPECT_GT(compared, 0);
}

/// Chunks of 256 pixels, more row blocks than the loops take at a time, and segments of K that are longer than their panels.
TEST_P(ConvConformance, LargeChunksAreWithinTheirBound) {
  const Kernel& kernel = *GetParam();
  if (kernel.backend != Backend::cpu) GTEST_SKIP() << "a GPU has no chunks";
  const ConvGeometry g{
      .in_channels = 32, .out_channels = 320, .height = 16, .width = 17, .filter = {3, 3}, .padding = {1, 1, 1, 1}};
  int compared = 0;
  for (const auto& [weight, act] : {std::pair("u4b8g32", "s8g32"), std::pair("u4b8g288", "s8r"), std::pair("u3zc", "s8zr"),
                                    std::pair("u3zc", "s8r"), std::pair("s8c", "s8r"), std::pair("u4zg96", "")}) {
    const QuantTensor q = conv_weight(Scheme::parse(weight)->weight, g, 7, true);
    VerifyConvSpec spec{.conv = {.geometry = g, .epilogue = {.bias = true}}, .sample_columns = 48};
    if (*act != 0) spec.conv.act_scheme = Scheme::parse(std::string(act) + "_" + weight)->act;
    if (!takes(kernel, q.scheme, spec.conv)) continue;
    spec.plan.kernel = spec.pack.kernel = kernel.name;
    const auto report = verify_conv(q, spec);
    ASSERT_TRUE(report.ok()) << weight << report.status().message();
    EXPECT_TRUE(report->passed) << act << weight << report->failure;
    ++compared;
  }
  if (compared == 0) GTEST_SKIP() << "it takes none of these";
}

INSTANTIATE_TEST_SUITE_P(Table, ConvConformance, ::testing::ValuesIn(conv_kernels()), test_name);
INSTANTIATE_TEST_SUITE_P(Table, ConvW8A8Conformance, ::testing::ValuesIn(conv_kernels(multiplies_int8)), test_name);
INSTANTIATE_TEST_SUITE_P(Table, ConvInvariance, ::testing::ValuesIn(conv_kernels([](const Kernel& kernel) {
                           return kernel.backend != Backend::reference;
                         })),
                         test_name);

}  // namespace
}  // namespace nibble
