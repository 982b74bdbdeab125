// Convolutions as layers: what holds whatever kernel runs, the oracle itself, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "conv_rows.hpp"
#include "kernels/reference/conv.hpp"
#include "plan/host_run.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

/// Tiles of every size, of one group and of several, for which random geometry is too small: compared bit by bit with the direct kernel,
/// which other tests compare with the definition.
TEST(Conv, LargeLayersOfCodesHaveTheBitsOfTheDirectKernel) {
  if (const Status here = runs_here(Isa::simt); !here.ok()) GTEST_SKIP() << here.message();
  const Extent three{3, 3};
  const Padding same{1, 1, 1, 1};
  const ConvGeometry layers[] = {
      {.in_channels = 16, .out_channels = 300, .height = 48, .width = 47, .filter = three, .padding = same},
      {.in_channels = 96, .out_channels = 256, .height = 56, .width = 57, .filter = three, .padding = same, .groups = 2},
      {.in_channels = 144, .out_channels = 192, .height = 60, .width = 61, .filter = three, .padding = {2, 0, 0, 1}, .groups = 3},
      {.in_channels = 128, .out_channels = 200, .height = 33, .width = 47, .filter = three, .stride = {2, 1}, .padding = same},
      {.in_channels = 320, .out_channels = 72, .height = 7, .width = 7, .filter = three, .padding = same}};
  int compared = 0;
  for (const ConvGeometry& g : layers)
    for (const WeightScheme& scheme : {WeightScheme{DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32},
                                       WeightScheme{DType::u8, ZeroKind::integer, GroupShape::channel(), DType::f32}})
      for (ZeroKind zero : {ZeroKind::none, ZeroKind::integer})
        for (DType act : {DType::s8, DType::f16}) {
          ConvCase c{.spec = {.geometry = g, .act_scheme = {DType::s8, GroupShape::tensor(), zero}}, .batch = 2};
          c.spec.a_dtype = act;
          c.spec.input = act == DType::s8 ? ImageLayout::nhwc : ImageLayout::nchw;
          c.spec.batch_max = c.batch;
          c.spec.epilogue = {.bias = true, .activation = Activation::relu, .out = DType::f16};
          QuantTensor q = conv_weight(scheme, g, 3, true);
          q.static_acts = {0.013f, zero == ZeroKind::none ? 0 : 21};
          Images a(act, c.spec.input, c.batch, g.in_channels, g.height, g.width);
          a.fill_random(5);
          const Operands args{.bias = ConstTensorView(q.bias.bytes.data(), q.bias.dtype, {q.n})};
          for (ImageLayout layout : {ImageLayout::nchw, ImageLayout::nhwc}) {
            c.spec.output = layout;
            SCOPED_TRACE(describe(g) + scheme_name(q, c.spec.act_scheme) + " act " + std::string(name(act)) + " to " +
                         std::string(name(layout)));
            const Tensor expected = run_conv(q, c, a, args, "conv_any_s8_any__cuda_simt_direct");
            ASSERT_FALSE(HasFailure());
            for (const Kernel* kernel : conv_kernels()) {
              if (kernel->backend != Backend::cuda || kernel->variant == "direct" || kernel->act != "s8" ||
                  !runs_here(kernel->isa).ok() || !takes(*kernel, q.scheme, c.spec))
                continue;
              const Tensor d = run_conv(q, c, a, args, kernel->name);
              ASSERT_FALSE(HasFailure()) << kernel->name;
              ASSERT_EQ(d.bytes, expected.bytes) << kernel->name;
              ++compared;
            }
          }
        }
  if (compared == 0) GTEST_SKIP() << "this GPU has the direct kernel alone";
}

TEST(Conv, PaddingIsFilledWithACode) {
  const ConvGeometry g{.in_channels = 8, .out_channels = 4, .height = 5, .width = 5, .filter = {3, 3}, .padding = {1, 1, 1, 1}};
  const QuantTensor q = conv_weight({DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, g, 1, false);
  const auto weight = pack(q);
  const auto plan = Plan::conv(
      *weight, {.geometry = g, .a_dtype = DType::s8, .act_scheme = {DType::s8, GroupShape::tensor(), ZeroKind::integer}});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const std::vector<std::int8_t> a(8 * 25, 1);
  std::vector<float> d(4 * 25, 7.0f);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto run = [&](std::int32_t zero) {
    const float scale = 1;
    return plan->run(*weight, ConstTensorView(a.data(), {1, 8, 5, 5}), TensorView(d.data(), {1, 4, 5, 5}),
                     {.a_scale = ConstTensorView(&scale, {1}), .a_zero = ConstTensorView(&zero, {1})}, workspace);
  };
  for (std::int32_t zero : {128, -129}) {
    EXPECT_EQ(run(zero).code(), StatusCode::invalid_argument);
    EXPECT_NE(run(zero).message().find("a_zero=" + std::to_string(zero) + " is outside [-128, 127]"), std::string::npos);
  }
  EXPECT_TRUE(std::ranges::all_of(d, [](float x) { return x == 7.0f; }));
  EXPECT_TRUE(run(127).ok());
  EXPECT_TRUE(run(-128).ok());
}

TEST(Conv, APointwiseOneIsTheLinearLayer) {
  const ConvGeometry g{.in_channels = 64, .out_channels = 40, .height = 5, .width = 7};
  const QuantTensor q = conv_weight(conv_schemes()[0], g, 1, true);
  const auto weight = pack(q);
  ASSERT_TRUE(weight.ok());
  ConvSpec spec{.geometry = g, .batch_max = 2, .epilogue = {.bias = true, .residual = true}};
  spec.input = spec.output = ImageLayout::nhwc;
  const auto plan = Plan::conv(*weight, spec);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->kernel(70).substr(0, 7), "linear_");
  const auto linear = Plan::linear(*weight, {.m_max = 70, .epilogue = spec.epilogue});
  const ConvCase c{.spec = spec, .batch = 2};
  Images a(DType::f32, spec.input, 2, 64, 5, 7, 3), d(DType::f32, spec.output, 2, 40, 5, 7, 1);
  a.fill_random(1);
  const ConvOperands operands(c);
  ASSERT_TRUE(run_on_host(*plan, *weight, a.view, d.view, operands.args({}), nullptr).ok());
  const Tensor rows = reference::pixels(a.view), residual = reference::pixels(operands.residual.view);
  Tensor expected(DType::f32, {70, 40});
  ASSERT_TRUE(run_on_host(*linear, *weight, {rows.bytes.data(), DType::f32, {70, 64}},
                          {expected.bytes.data(), DType::f32, {70, 40}},
                          {.residual = {residual.bytes.data(), DType::f32, {70, 40}}})
                  .ok());
  EXPECT_EQ(reference::pixels(d.view).bytes, expected.bytes);

  spec.input = ImageLayout::nchw;  // pixels are no rows of a matrix
  const auto other = Plan::conv(*weight, spec);
  ASSERT_TRUE(other.ok()) << other.status().message();
  EXPECT_EQ(other->kernel(2).substr(0, 5), "conv_");
}

/// The oracle against a convolution written as its definition.
TEST(Conv, TheOracleIsTheDefinition) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const ConvGeometry g = random_geometry(seed + 100);
    QuantTensor q = conv_weight(conv_schemes()[seed % 2], g, seed, false);
    if (seed % 3 == 0) q.prescale = random_prescale(g, seed);
    const ConvCase c{.spec = {.geometry = g}, .batch = 2};
    Images a(DType::f32, ImageLayout::nchw, 2, g.in_channels, g.height, g.width);
    a.fill_random(seed);
    const auto at = [&](std::int64_t b, std::int64_t ch, std::int64_t h, std::int64_t w) -> double {
      if (h < 0 || h >= g.height || w < 0 || w >= g.width) return 0;
      return a.memory.at(((b * g.in_channels + ch) * g.height + h) * g.width + w);
    };
    for (std::int64_t n : {std::int64_t{0}, g.out_channels - 1}) {
      const std::int64_t column[] = {n};
      const auto expected = reference::conv(reference::arrays_of(q), c.spec, a.view, {}, column);
      std::size_t i = 0;
      for (std::int64_t b = 0; b < 2; ++b)
        for (std::int64_t oh = 0; oh < g.out_height(); ++oh)
          for (std::int64_t ow = 0; ow < g.out_width(); ++ow, ++i) {
            double sum = 0;
            for (std::int64_t ch = 0; ch < g.group_inputs(); ++ch)
              for (std::int64_t kh = 0; kh < g.filter.h; ++kh)
                for (std::int64_t kw = 0; kw < g.filter.w; ++kw)
                  sum += at(b, n / g.group_outputs() * g.group_inputs() + ch, oh * g.stride.h + kh * g.dilation.h - g.padding.top,
                            ow * g.stride.w + kw * g.dilation.w - g.padding.left) *
                         (q.prescale.empty() ? 1.0 : static_cast<double>(q.prescale.at(ch))) *
                         q.value(n, (kh * g.filter.w + kw) * g.group_inputs() + ch);
            ASSERT_NEAR(expected[i].value, sum, 1e-5 + 1e-6 * std::abs(sum)) << describe(g);
          }
      ASSERT_EQ(i, expected.size());
    }
  }
}

TEST(Conv, VerifyTakesEveryKindOfLayer) {
  int failed = 0;
  for (std::uint64_t seed = 1; seed <= 16; ++seed) {
    const ConvGeometry g = random_geometry(seed + 300);
    const ImageLayout layout = layout_of(seed);
    QuantTensor q = conv_weight(conv_schemes()[seed % conv_schemes().size()], g, seed, true);
    q.static_acts = {0.02f, 0};
    if (seed % 3 == 1) q.prescale = random_prescale(g, seed);
    for (const ActScheme& act :
         {ActScheme{}, ActScheme{DType::s8, GroupShape::tensor()}, ActScheme{DType::s8, GroupShape::channel()}}) {
      if (q.scheme.is_dense() && act.codes != DType::none) continue;
      VerifyConvSpec spec{
          .conv = {.geometry = g, .input = layout, .output = layout_of(seed / 2), .batch_max = 2, .act_scheme = act},
          .seed = seed,
          .sample_columns = static_cast<std::int64_t>(seed % 3) * 5};
      spec.conv.epilogue = {.col_scale = true, .bias = true, .gate = seed % 4 == 0, .residual = true, .out = DType::f16};
      const auto report = verify_conv(q, spec);
      ASSERT_TRUE(report.ok()) << describe(g) << report.status().message();
      EXPECT_TRUE(report->passed) << describe(g) << report->failure;
      EXPECT_LE(report->worst_error_over_bound, 1.0);
      EXPECT_GT(report->checked, 0);
      failed += report->passed ? 0 : 1;
    }
  }
  EXPECT_EQ(failed, 0);
  // Images that come as codes, and a kernel by name.
  const ConvGeometry g{.in_channels = 16, .out_channels = 24, .height = 6, .width = 9, .filter = {3, 3}, .padding = {1, 1, 1, 1}};
  VerifyConvSpec spec{
      .conv = {.geometry = g, .a_dtype = DType::s8, .act_scheme = {DType::s8, GroupShape::tensor(), ZeroKind::integer}}};
  QuantTensor q = conv_weight(conv_schemes()[2], g, 1, false);
  const auto codes = verify_conv(q, spec);
  ASSERT_TRUE(codes.ok()) << codes.status().message();
  EXPECT_TRUE(codes->passed) << codes->failure;
  spec.conv.a_dtype = DType::f32, spec.conv.act_scheme = {};
  spec.plan.kernel = "conv_any_any_any__ref_baseline";
  const auto reference = verify_conv(q, spec);
  ASSERT_TRUE(reference.ok()) << reference.status().message();
  EXPECT_EQ(reference->kernel, spec.plan.kernel);
  spec.conv.geometry.filter = {5, 5};
  EXPECT_EQ(verify_conv(q, spec).status().code(), StatusCode::invalid_argument);
}

/// Every kernel of the machine that takes a dense filter.
TEST(Conv, DenseWeightsAreWithinTheirBound) {
  int checked = 0;
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    const ConvGeometry g = random_geometry(seed + 500);
    const DType type = std::array{DType::bf16, DType::f16, DType::f32}[seed % 3];
    const DType a_dtype = seed % 4 == 0 ? DType::f32 : DType::bf16;
    const QuantTensor q = conv_weight(WeightScheme::dense(type), g, seed, true);
    for (const Kernel* kernel : conv_kernels()) {
      VerifyConvSpec spec{.conv = {.geometry = g,
                                   .input = layout_of(seed),
                                   .output = layout_of(seed / 2),
                                   .a_dtype = a_dtype,
                                   .batch_max = 2,
                                   .epilogue = {.bias = true, .activation = Activation::silu, .out = a_dtype}},
                          .seed = seed};
      if (!runs_here(kernel->isa).ok() || !takes(*kernel, q.scheme, spec.conv)) continue;
      spec.plan.kernel = spec.pack.kernel = kernel->name;
      const auto report = verify_conv(q, spec);
      ASSERT_TRUE(report.ok()) << kernel->name << describe(g) << report.status().message();
      EXPECT_EQ(report->kernel, kernel->name);
      EXPECT_TRUE(report->passed) << kernel->name << describe(g) << report->failure;
      ++checked;
    }
  }
  EXPECT_GT(checked, 24);
}

TEST(Conv, BadGeometrySaysWhatFollowsFromIt) {
  ConvGeometry g{.in_channels = 8, .out_channels = 4, .height = 5, .width = 5, .filter = {3, 3}, .dilation = {3, 1}};
  EXPECT_EQ(g.validate().code(), StatusCode::invalid_argument);
  EXPECT_NE(g.validate().message().find("an output of 0x3: the filter does not fit"), std::string::npos)
      << g.validate().message();
  g.dilation = {};
  EXPECT_TRUE(g.validate().ok());
  for (auto spoil :
       {+[](ConvGeometry& x) { x.groups = 3; }, +[](ConvGeometry& x) { x.stride.w = 0; }, +[](ConvGeometry& x) { x.height = 0; },
        +[](ConvGeometry& x) { x.padding.left = -1; }, +[](ConvGeometry& x) { x.dilation.h = 0; }}) {
    ConvGeometry bad = g;
    spoil(bad);
    EXPECT_EQ(bad.validate().code(), StatusCode::invalid_argument);
  }
}

TEST(Conv, APrescaleIsOfChannelsAndActOrderIsRefused) {
  const ConvGeometry g{.in_channels = 16, .out_channels = 6, .height = 9, .width = 9, .filter = {3, 2}};
  QuantTensor q = conv_weight({DType::u4b8, ZeroKind::none, GroupShape::group(16), DType::f16}, g, 1, false);
  q.prescale = random_prescale(g, 1);
  EXPECT_TRUE(q.validate().ok()) << q.validate().message();
  EXPECT_EQ(
      Plan::conv(*pack(q), {.geometry = g, .a_dtype = DType::s8, .act_scheme = {DType::s8, GroupShape::tensor()}})
          .status()
          .message(),
      "A comes quantized, but the weight has a prescale, which activations are multiplied by first: pass A as f32, f16 or bf16");
  QuantTensor odd = q;
  odd.prescale.set(16 + 3, 2.0f);
  odd.prescale.set(3, 0.5f);
  EXPECT_EQ(
      odd.validate().message(),
      "prescale is 0.5 for channel 3 under the first element of the filter and 2 under element 1: a channel has one factor");
  // A plan is for weights with a prescale, or for weights without.
  const auto weight = pack(q);
  const auto plan = Plan::conv(*weight, {.geometry = g});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  q.prescale = {};
  Images a(DType::f32, ImageLayout::nchw, 1, 16, 9, 9), d(DType::f32, ImageLayout::nchw, 1, 6, 7, 8);
  EXPECT_EQ(run_on_host(*plan, *pack(q), a.view, d.view, {}).code(), StatusCode::invalid_argument);

  q.g_idx.resize(static_cast<std::size_t>(q.k));
  for (std::int64_t i = 0; i < q.k; ++i) q.g_idx[static_cast<std::size_t>(i)] = static_cast<std::int32_t>((q.k - 1 - i) / 16);
  const auto ordered = explain(describe(q), ConvSpec{.geometry = g});
  EXPECT_EQ(ordered.status().code(), StatusCode::unsupported);
  EXPECT_NE(ordered.status().message().find("has no act-order, and this one has a g_idx: quantize it without"), std::string::npos)
      << ordered.status().message();
}

TEST(Conv, AWeightKeepsItsKernelAndIsCheckedAgainstTheGeometry) {
  Tensor w(DType::f32, {6, 16, 3, 2});
  for (std::int64_t i = 0; i < w.numel(); ++i) w.set(i, random_normal(1, static_cast<std::uint64_t>(i)));
  const auto q =
      quantize_conv({w.bytes.data(), DType::f32, {6, 16, 3, 2}}, QuantizeSpec{Scheme::parse("u8b128g16", DType::f32)->weight});
  ASSERT_TRUE(q.ok()) << q.status().message();
  EXPECT_EQ(q->k, 96);
  EXPECT_EQ(q->filter, (Extent{3, 2}));
  for (std::int64_t c = 0; c < 16; ++c)
    EXPECT_NEAR(q->value(5, (2 * 2 + 1) * 16 + c), w.at(((5 * 16 + c) * 3 + 2) * 2 + 1), 0.03f);
  const auto weight = pack(*q);
  ASSERT_TRUE(weight.ok());
  EXPECT_EQ(weight->filter(), q->filter);
  EXPECT_TRUE(*unpack(*weight) == *q);

  ConvGeometry g{.in_channels = 16, .out_channels = 6, .height = 9, .width = 9, .filter = {3, 2}};
  EXPECT_TRUE(Plan::conv(*weight, {.geometry = g}).ok());
  const auto refused = [&](const ConvSpec& spec) { return Plan::conv(*weight, spec).status().code(); };
  g.filter = {2, 3};
  EXPECT_EQ(refused({.geometry = g}), StatusCode::invalid_argument);
  g.filter = {3, 2};
  EXPECT_EQ(refused({.geometry = g, .epilogue = {.row_scale = true}}), StatusCode::unsupported);
  EXPECT_EQ(refused({.geometry = g, .batch_max = 0}), StatusCode::invalid_argument);
  EXPECT_EQ(refused({.geometry = g, .act_scheme = {DType::s8, GroupShape::group(32)}}), StatusCode::unsupported);
  EXPECT_EQ(refused({.geometry = g, .a_dtype = DType::s8, .act_scheme = {DType::s8}}), StatusCode::unsupported);
  QuantTensor odd = *q;
  odd.filter = {5, 1};
  EXPECT_EQ(odd.validate().code(), StatusCode::invalid_argument);

  const auto plan = Plan::conv(*weight, {.geometry = g});
  Images a(DType::f32, ImageLayout::nchw, 1, 16, 9, 9), d(DType::f32, ImageLayout::nhwc, 1, 6, 7, 8);
  const Status status = run_on_host(*plan, *weight, a.view, d.view, {});
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(status.message().find("is not nchw"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace nibble
