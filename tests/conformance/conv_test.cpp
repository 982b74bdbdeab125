// Conformance of convolutions: every kernel of Op::conv × random geometry × layouts × schemes × epilogues, against the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "epilogue/epilogue.hpp"
#include "kernels/kernel.hpp"
#include "kernels/reference/conv.hpp"
#include "nibble/nibble.hpp"
#include "plan/act_model.hpp"
#include "plan/compare.hpp"
#include "plan/host_run.hpp"
#include "quantize/act_rule.hpp"
#include "random_weights.hpp"
#include "rows.hpp"

namespace nibble {
namespace {

using testing::random_weight;

/// Small numbers from a seed, one after the other.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : seed_(seed) {}
  std::int64_t in(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random_bits(seed_, next_++) % static_cast<std::uint64_t>(high - low + 1));
  }

 private:
  std::uint64_t seed_, next_ = 0;
};

/// Filter 1…7, stride 1…3, dilation 1…3, padding up to the filter's size, odd sizes, groups, depthwise. Kernels for sm_90 need one group,
/// and channels that are a multiple of 64; kernels for sm_80 need channels that are a multiple of 8, or 16 or 64 for codes, and outputs of
/// a group that are a multiple of 64. AMX multiplies patches in place where channels of a group are a multiple of 64.
ConvGeometry random_geometry(std::uint64_t seed, Isa isa = Isa::baseline) {
  for (std::uint64_t attempt = 0;; ++attempt) {
    Dice dice(seed * 1000 + attempt);
    ConvGeometry g;
    const int kind = static_cast<int>(dice.in(0, 5));
    g.groups = kind == 4 ? dice.in(2, 4) : kind == 5 ? dice.in(3, 40) : 1;
    g.in_channels = g.groups * (kind == 5 ? 1 : kind < 2 ? 8 * dice.in(1, 6) : dice.in(1, 40));
    g.out_channels = g.groups * (kind == 5 ? dice.in(1, 2) : dice.in(1, 45));
    g.height = dice.in(1, 13);
    g.width = dice.in(1, 29);
    const std::int64_t largest = kind == 5 || g.group_inputs() < 9 ? 7 : 3;
    g.filter = {dice.in(1, largest), dice.in(1, largest)};
    g.stride = {dice.in(1, 3), dice.in(1, 3)};
    g.dilation = {dice.in(1, 3), dice.in(1, 3)};
    g.padding = {dice.in(0, g.filter.h), dice.in(0, g.filter.h), dice.in(0, g.filter.w), dice.in(0, g.filter.w)};
    if (isa == Isa::amx && (kind < 2 || kind == 4)) {  // patches that are multiplied in place
      g.groups = std::min<std::int64_t>(g.groups, 2);
      g.in_channels = g.groups * 64 * dice.in(1, 2);
      if (g.groups > 1) g.out_channels = g.groups * dice.in(1, 45);
    }
    if (isa == Isa::sm90) {
      g.groups = 1;
      g.in_channels = 64 * dice.in(1, 2);
    }
    if (isa == Isa::sm80) {
      g.groups = std::min<std::int64_t>(g.groups, 2);
      g.in_channels = g.groups * (seed % 5 < 2 ? 8 * dice.in(1, 5) : 64 * dice.in(1, 2));
      if (g.groups > 1) g.out_channels = g.groups * 64;
    }
    if (g.validate().ok()) return g;
  }
}

std::string describe(const ConvGeometry& g) {
  std::string text = "[" + std::to_string(g.in_channels) + "," + std::to_string(g.height) + "," + std::to_string(g.width) +
                     "] -> " + std::to_string(g.out_channels) + " channels, groups " + std::to_string(g.groups) + ", kernel ";
  for (std::int64_t x : {g.filter.h, g.filter.w, g.stride.h, g.stride.w, g.dilation.h, g.dilation.w, g.padding.top,
                         g.padding.bottom, g.padding.left, g.padding.right})
    text += std::to_string(x) + " ";
  return text;
}

std::string scheme_name(const QuantTensor& q, const ActScheme& act) { return Scheme{q.scheme, act}.name(); }

/// An image in memory: dense, or a slice of one with more channels.
struct Images {
  Tensor memory;
  TensorView view;

  Images(DType type, ImageLayout layout, std::int64_t b, std::int64_t c, std::int64_t h, std::int64_t w, std::int64_t more = 0)
      : memory(type, {b * (c + more) * h * w + 1}) {
    if (h * w == 1 && layout == ImageLayout::nchw) more = 0;
    view = TensorView(memory.bytes.data(), type, {b, c, h, w});
    const std::int64_t all = c + more;
    if (layout == ImageLayout::nchw)
      view.strides = {all * h * w, h * w, w, 1};
    else
      view.strides = {all * h * w, 1, w * all, all};
  }
  void fill_random(std::uint64_t seed) {
    for (std::int64_t i = 0; i < memory.numel(); ++i) {
      if (!is_compute_float(memory.dtype))
        memory.bytes[static_cast<std::size_t>(i)] =
            static_cast<std::byte>(random_bits(seed, static_cast<std::uint64_t>(i))) &
            (memory.dtype == DType::e4m3 ? std::byte{0xbf} : std::byte{0xff});  // no NaN, nothing huge
      else
        memory.set(i, random_normal(seed, static_cast<std::uint64_t>(i)));
    }
  }
};

struct Case {
  ConvSpec spec;
  std::int64_t batch = 1;
  std::int64_t more = 0;  // further channels in the memory of A, D, gate and residual
  std::uint64_t seed = 1;
};

struct OperandData {
  Images gate, residual;
  Tensor col_scale, sum_bias, out_scale;
  explicit OperandData(const Case& c)
      : gate(make(c, 1)),
        residual(make(c, 2)),
        col_scale(DType::f32, {c.spec.geometry.out_channels}),
        sum_bias(DType::s32, col_scale.shape),
        out_scale(DType::f32, col_scale.shape) {
    for (std::int64_t i = 0; i < col_scale.numel(); ++i) {
      col_scale.set(i, 1.0f - 0.1f * random_normal(c.seed, static_cast<std::uint64_t>(i)));
      sum_bias.as<std::int32_t>()[i] = static_cast<std::int32_t>((i + 1) * 7919 % 4000) - 2000;
      out_scale.set(i, 0.2f + 0.05f * static_cast<float>(i % 7));
    }
  }
  Operands args(const QuantTensor& q) const {
    Operands args;
    args.col_scale = ConstTensorView(col_scale.bytes.data(), DType::f32, {col_scale.shape[0]});
    if (!q.bias.empty()) args.bias = ConstTensorView(q.bias.bytes.data(), q.bias.dtype, {q.n});
    args.gate = gate.view;
    args.residual = residual.view;
    args.sum_bias = ConstTensorView(sum_bias.bytes.data(), DType::s32, {sum_bias.shape[0]});
    args.out_scale = ConstTensorView(out_scale.bytes.data(), DType::f32, {out_scale.shape[0]});
    return args;
  }

 private:
  static Images make(const Case& c, std::uint64_t salt) {
    const ConvGeometry& g = c.spec.geometry;
    Images images(salt == 1 ? DType::f16 : DType::f32, c.spec.output, c.batch, g.out_channels, g.out_height(), g.out_width(),
                  c.more);
    images.fill_random(c.seed + salt);
    return images;
  }
};

/// Packs, plans and runs; D as [B·Oh·Ow, Co]. Memory beside D must not change.
Tensor run(const QuantTensor& q, const Case& c, const Images& a, const Operands& args, std::string_view kernel,
           Executor* executor = nullptr) {
  const ConvGeometry& g = c.spec.geometry;
  const auto weight = pack(q, {.kernel = std::string(kernel)});
  EXPECT_TRUE(weight.ok()) << weight.status().message();
  if (!weight.ok()) return {};
  const auto plan = Plan::conv(*weight, c.spec, {.kernel = std::string(kernel)});
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  if (!plan.ok()) return {};
  EXPECT_EQ(plan->kernel(c.batch), kernel);
  Images d(c.spec.epilogue.out, c.spec.output, c.batch, g.out_channels, g.out_height(), g.out_width(), c.more);
  std::ranges::fill(d.memory.bytes, std::byte{0xb7});
  const Status ran = run_on_host(*plan, *weight, a.view, d.view, args, executor);
  EXPECT_TRUE(ran.ok()) << ran.message();
  const Tensor result = reference::pixels(d.view);
  // Clear D; all other memory must have the old value.
  const std::int64_t width = bits(d.view.dtype) / 8;
  for (std::int64_t b = 0; b < d.view.dim(0); ++b)
    for (std::int64_t n = 0; n < d.view.dim(1); ++n)
      for (std::int64_t h = 0; h < d.view.dim(2); ++h)
        for (std::int64_t w = 0; w < d.view.dim(3); ++w)
          std::memset(d.memory.bytes.data() +
                          (b * d.view.stride(0) + n * d.view.stride(1) + h * d.view.stride(2) + w * d.view.stride(3)) * width,
                      0xb7, static_cast<std::size_t>(width));
  EXPECT_TRUE(std::ranges::all_of(d.memory.bytes, [](std::byte x) { return x == std::byte{0xb7}; })) << "wrote beside D";
  return result;
}

/// Within the bound, element by element.
void expect_within_bound(const QuantTensor& q, const Case& c, const Images& a, const Operands& args, const Tensor& d,
                         const Kernel& kernel) {
  const reference::ActModel model = act_model(kernel, c.spec.a_dtype, c.spec.act_scheme, q.scheme);
  for (std::int64_t group = 0; group < c.spec.geometry.groups; ++group) {
    std::vector<std::int64_t> columns(static_cast<std::size_t>(c.spec.geometry.group_outputs()));
    std::iota(columns.begin(), columns.end(), group * c.spec.geometry.group_outputs());
    const auto expected = reference::conv(reference::arrays_of(q), c.spec, a.view, args, columns, model);
    const Comparison comparison = compare(d, columns, expected);
    ASSERT_EQ(comparison.failures, 0) << "of " << comparison.checked << ", the worst at pixel " << comparison.worst_m
                                      << ", channel " << comparison.worst_n << ": " << comparison.worst_got << ", expected "
                                      << comparison.worst_expected.value << " ± " << comparison.worst_expected.bound;
  }
}

Problem problem_for(const Kernel& kernel, const WeightScheme& scheme, const ConvSpec& spec, bool prescales = false) {
  return {.op = Op::conv,
          .n = spec.geometry.out_channels,
          .k = spec.geometry.k(),
          .scheme = scheme,
          .zero_type = testing::zero_type(scheme),
          .layout = kernel.layout,
          .memory = kernel.backend == Backend::cuda ? Backend::cuda : Backend::cpu,
          .a_dtype = spec.a_dtype,
          .epilogue = spec.epilogue,
          .act_scheme = spec.act_scheme,
          .prescales_k = prescales,
          .geometry = spec.geometry,
          .input = spec.input,
          .output = spec.output};
}

bool takes(const Kernel& kernel, const WeightScheme& scheme, const ConvSpec& spec) {
  const std::int64_t group = scheme.group.k, block = spec.act_scheme.group.k;
  if (block != 0 && group != 0 && group % block != 0 && block % group != 0) return false;  // plans refuse it
  return kernel.accepts(kernel, problem_for(kernel, scheme, spec)).ok();
}
bool takes(const Kernel& kernel, const QuantTensor& q, const ConvSpec& spec) { return takes(kernel, q.scheme, spec); }
/// Images that come as codes are never prescaled.
bool takes_prescale(const Kernel& kernel, const QuantTensor& q, const ConvSpec& spec) {
  return is_compute_float(spec.a_dtype) && kernel.accepts(kernel, problem_for(kernel, q.scheme, spec, true)).ok();
}

std::vector<const Kernel*> conv_kernels(bool (*which)(const Kernel&) = nullptr) {
  std::vector<const Kernel*> list;
  for (const Kernel& kernel : kernel_table())
    if (kernel.op == Op::conv && is_built(kernel) && (which == nullptr || which(kernel))) list.push_back(&kernel);
  return list;
}

class OfConv : public ::testing::TestWithParam<const Kernel*> {
 protected:
  void SetUp() override {
    if (const Status here = runs_here(GetParam()->isa); !here.ok()) GTEST_SKIP() << here.message();
  }
};

class ConvConformance : public OfConv {};
class ConvW8A8Conformance : public OfConv {};
class ConvInvariance : public OfConv {};

ImageLayout layout_of(std::uint64_t bit) { return bit % 2 == 0 ? ImageLayout::nchw : ImageLayout::nhwc; }

/// Groups of image channels that do not divide them are runs of K instead.
QuantTensor conv_weight(WeightScheme scheme, const ConvGeometry& g, std::uint64_t seed, bool bias) {
  if (scheme.group.all_elements) scheme.group.all_elements = g.group_inputs() % scheme.group.k == 0;
  return random_weight(scheme, g.out_channels, g.k(), seed, {.bias = bias, .filter = g.filter});
}

/// A factor for each channel of a group.
Tensor random_prescale(const ConvGeometry& g, std::uint64_t seed) {
  Tensor prescale(DType::f16, {g.k()});
  for (std::int64_t i = 0; i < g.k(); ++i)
    prescale.set(i, 0.5f + static_cast<float>(random_uniform(seed, static_cast<std::uint64_t>(i % g.group_inputs()))));
  return prescale;
}

const std::vector<WeightScheme>& schemes() {
  static const std::vector<WeightScheme> kSchemes{{DType::u4b8, ZeroKind::none, GroupShape::group(8), DType::f16},
                                                  {DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16},
                                                  {DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32},
                                                  {DType::u4, ZeroKind::offset, GroupShape::group(16), DType::f16},
                                                  {DType::u4, ZeroKind::offset, GroupShape::image_channels(8), DType::f16},
                                                  {DType::u8, ZeroKind::integer, GroupShape::channel(), DType::bf16},
                                                  {DType::u4b8, ZeroKind::none, GroupShape::channel(), DType::f16},
                                                  {DType::s8, ZeroKind::none, GroupShape::tensor(), DType::f32},
                                                  {DType::u4b8, ZeroKind::none, GroupShape::group(64), DType::f16},
                                                  {DType::u4, ZeroKind::integer, GroupShape::group(128), DType::bf16},
                                                  {DType::u8, ZeroKind::integer, GroupShape::group(128), DType::f16},
                                                  {DType::u4, ZeroKind::offset, GroupShape::image_channels(32), DType::bf16},
                                                  {DType::e4m3, ZeroKind::none, GroupShape::channel(), DType::f32},
                                                  {DType::e2m1, ZeroKind::none, GroupShape::group(32), DType::e8m0}};
  return kSchemes;
}

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
      {.col_scale = true, .activation = Activation::silu, .gate = true, .residual = true, .out = DType::f32}};
  int compared = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const ConvGeometry g = random_geometry(seed, kernel.isa);
    const QuantTensor plain = conv_weight(schemes()[seed % schemes().size()], g, seed, true);
    for (const ConvSpec& way : ways(kernel, g, seed)) {
      Case c{.spec = way, .batch = 1 + static_cast<std::int64_t>(seed % 3), .more = seed / 16 % 2 == 0 ? 3 : 0, .seed = seed};
      c.spec.input = layout_of(seed / 8);  // every epilogue with every layout
      c.spec.output = layout_of(seed / 4);
      c.spec.batch_max = c.batch;
      c.spec.epilogue = epilogues[seed % epilogues.size()];
      if (!takes(kernel, plain, c.spec)) continue;
      may_come_as_u8(c.spec, seed);
      QuantTensor q = plain;
      if (way.act_scheme.group == GroupShape::tensor()) q.static_acts = {0.02f, way.act_scheme.zero == ZeroKind::none ? 0 : -37};
      if (seed % 5 == 0) q.scale2 = 0.7f;
      if ((seed % 5 == 1 || seed % 5 == 3) && takes_prescale(kernel, q, c.spec)) q.prescale = random_prescale(g, seed);
      SCOPED_TRACE(describe(g) + scheme_name(q, way.act_scheme) + " " + std::string(name(c.spec.input)) + " to " +
                   std::string(name(c.spec.output)) + " act " + std::string(name(c.spec.a_dtype)) +
                   (q.prescale.empty() ? "" : " prescale") + " seed " + std::to_string(seed));
      Images a(c.spec.a_dtype, c.spec.input, c.batch, g.in_channels, g.height, g.width, c.more);
      a.fill_random(seed);
      const OperandData operands(c);
      const Operands args = operands.args(q);
      const Tensor d = run(q, c, a, args, kernel.name);
      if (HasFailure()) return;
      expect_within_bound(q, c, a, args, d, kernel);
      if (HasFatalFailure()) return;
      ++compared;
    }
  }
  EXPECT_GT(compared, 0);
}

/// W8A8 as docs/accuracy.md defines it, on patches: exact integers, then f32 operations in their order.
Tensor exact_w8a8(const QuantTensor& q, const Case& c, const Images& a, const Operands& args) {
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
    const ConvGeometry g = random_geometry(seed + 500, kernel.isa);
    const auto weights = testing::whole_row_schemes();
    const WeightScheme& scheme = weights[seed % weights.size()];
    for (GroupShape group : {GroupShape::tensor(), GroupShape::channel()})
      for (ZeroKind zero : {ZeroKind::none, ZeroKind::integer})
        for (bool comes_quantized : {false, true}) {
          if (comes_quantized && group != GroupShape::tensor()) continue;
          Case c{.spec = {.geometry = g, .act_scheme = {DType::s8, group, zero}},
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
          if (!takes(kernel, q, c.spec)) continue;
          may_come_as_u8(c.spec, seed);
          if (group == GroupShape::tensor()) q.static_acts = {0.013f, zero == ZeroKind::none ? 0 : 21};
          if (seed % 3 == 0) q.scale2 = 0.7f;
          if (seed % 5 < 2 && takes_prescale(kernel, q, c.spec)) q.prescale = random_prescale(g, seed);
          SCOPED_TRACE(describe(g) + scheme_name(q, c.spec.act_scheme) + " " + std::string(name(c.spec.input)) + " to " +
                       std::string(name(c.spec.output)) + " act " + std::string(name(c.spec.a_dtype)) + " seed " +
                       std::to_string(seed));
          Images a(c.spec.a_dtype, c.spec.input, c.batch, g.in_channels, g.height, g.width, c.more);
          a.fill_random(seed);
          const OperandData operands(c);
          const Operands args = operands.args(q);
          const Tensor d = run(q, c, a, args, kernel.name);
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

/// Zero points that are no codes, without padding: every 32-bit integer is valid.
TEST_P(ConvConformance, ZeroPointsOutsideTheCodes) {
  const Kernel& kernel = *GetParam();
  if (kernel.backend == Backend::cuda) GTEST_SKIP() << "takes zero points of a byte";
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min(), kMost = std::numeric_limits<std::int32_t>::max();
  int compared = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    ConvGeometry g = random_geometry(seed, kernel.isa);
    g.padding = {};
    if (!g.validate().ok()) continue;
    const QuantTensor q = conv_weight(schemes()[seed % schemes().size()], g, seed, true);
    Case c{.spec = {.geometry = g, .a_dtype = DType::s8, .act_scheme = {DType::s8, GroupShape::tensor(), ZeroKind::integer}},
           .batch = 2,
           .seed = seed};
    c.spec.batch_max = c.batch;
    if (!takes(kernel, q, c.spec)) continue;
    Images a(DType::s8, c.spec.input, c.batch, g.in_channels, g.height, g.width);
    a.fill_random(seed);
    for (const std::int32_t zero : {128, -129, -700, 70'000, kLeast, kMost}) {
      SCOPED_TRACE(describe(g) + scheme_name(q, c.spec.act_scheme) + " zero " + std::to_string(zero));
      const float scale = 0.01f;
      const Operands args{.a_scale = ConstTensorView(&scale, {1}), .a_zero = ConstTensorView(&zero, {1})};
      const Tensor d = run(q, c, a, args, kernel.name);
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
      Case c{.spec = way, .batch = 3, .seed = 3};
      c.spec.batch_max = 3;
      for (const WeightScheme& scheme : schemes()) {
        QuantTensor q = conv_weight(scheme, g, 4, false);
        if (!takes(kernel, q, c.spec)) continue;
        if (way.act_scheme.group == GroupShape::tensor())
          q.static_acts = {0.02f, way.act_scheme.zero == ZeroKind::none ? 0 : -37};
        Images a(c.spec.a_dtype, c.spec.input, c.batch, g.in_channels, g.height, g.width);
        a.fill_random(1);
        Tensor first;
        for (int threads : {1, 5})
          for (ImageLayout layout : {ImageLayout::nchw, ImageLayout::nhwc}) {
            c.spec.output = layout;
            auto executor = make_executor(threads);
            const Tensor d = run(q, c, a, {}, kernel.name, executor.get());
            ASSERT_FALSE(HasFailure());
            if (first.empty()) first = d;
            ASSERT_EQ(first.bytes, d.bytes) << threads << " threads, " << name(layout);
          }
        ++compared;
        if (!kernel.batch_invariant) break;
        Case one = c;
        one.batch = one.spec.batch_max = 1;
        Images last = a;
        last.view = TensorView(last.memory.bytes.data() + 2 * a.view.stride(0) * bits(c.spec.a_dtype) / 8, c.spec.a_dtype,
                               {1, g.in_channels, g.height, g.width});
        last.view.strides = a.view.strides;
        const Tensor d = run(q, one, last, {}, kernel.name);
        ASSERT_EQ(std::memcmp(d.bytes.data(), first.bytes.data() + 2 * d.bytes.size(), d.bytes.size()), 0);
        break;
      }
    }
  }
  EXPECT_GT(compared, 0) << "the kernel took no layer";
}

/// For exact products of int8, whose order does not matter; except the reference, which computes in double.
bool multiplies_int8(const Kernel& kernel) {
  if (!runs_here(kernel.isa).ok()) return true;  // cannot be asked here: the test is skipped, with the reason
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

std::string test_name(const ::testing::TestParamInfo<const Kernel*>& info) { return std::string(info.param->name); }

INSTANTIATE_TEST_SUITE_P(Table, ConvConformance, ::testing::ValuesIn(conv_kernels()), test_name);
INSTANTIATE_TEST_SUITE_P(Table, ConvW8A8Conformance, ::testing::ValuesIn(conv_kernels(multiplies_int8)), test_name);
INSTANTIATE_TEST_SUITE_P(Table, ConvInvariance, ::testing::ValuesIn(conv_kernels([](const Kernel& kernel) {
                           return kernel.backend != Backend::reference;
                         })),
                         test_name);

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
          Case c{.spec = {.geometry = g, .act_scheme = {DType::s8, GroupShape::tensor(), zero}}, .batch = 2};
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
            const Tensor expected = run(q, c, a, args, "conv_any_s8_any__cuda_simt_direct");
            ASSERT_FALSE(HasFailure());
            for (const Kernel* kernel : conv_kernels()) {
              if (kernel->backend != Backend::cuda || kernel->variant == "direct" || kernel->act != "s8" ||
                  !runs_here(kernel->isa).ok() || !takes(*kernel, q, c.spec))
                continue;
              const Tensor d = run(q, c, a, args, kernel->name);
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

/// A NaN of the bias is NaN after every activation and bound, and the code 0 in int8.
TEST_P(ConvConformance, NaNGoesThroughEveryEpilogue) {
  const Kernel& kernel = *GetParam();
  int compared = 0;
  for (std::uint64_t seed = 1; seed <= 120 && compared == 0; ++seed) {
    const ConvGeometry g = random_geometry(seed, kernel.isa);
    if (g.group_outputs() < 40 && seed <= 60 && g.groups == 1) continue;  // prefer one with whole vectors of outputs
    QuantTensor q = conv_weight(schemes()[seed % schemes().size()], g, seed, false);
    q.bias = Tensor(DType::f32, {q.n});
    for (std::int64_t i = 0; i < q.n; ++i) q.bias.set(i, i % 3 == 1 ? std::numeric_limits<float>::quiet_NaN() : 0.5f);
    for (const ConvSpec& way : ways(kernel, g, seed)) {
      Case c{.spec = way, .seed = seed};
      c.spec.input = layout_of(seed / 2);
      c.spec.output = layout_of(seed);
      if (!takes(kernel, q, c.spec)) continue;
      if (way.act_scheme.group == GroupShape::tensor()) q.static_acts = {0.02f, way.act_scheme.zero == ZeroKind::none ? 0 : -37};
      Images a(c.spec.a_dtype, c.spec.input, c.batch, g.in_channels, g.height, g.width);
      a.fill_random(seed);
      for (Activation activation : kActivations)
        for (DType out : {DType::f32, DType::f16, DType::s8}) {
          c.spec.epilogue = {.bias = true, .activation = activation, .out = out, .out_scale = 0.05f, .out_zero = -3};
          const Tensor d = run(q, c, a, {}, kernel.name);
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

TEST(Conv, APointwiseOneIsTheLinearLayer) {
  const ConvGeometry g{.in_channels = 64, .out_channels = 40, .height = 5, .width = 7};
  const QuantTensor q = conv_weight(schemes()[0], g, 1, true);
  const auto weight = pack(q);
  ASSERT_TRUE(weight.ok());
  ConvSpec spec{.geometry = g, .batch_max = 2, .epilogue = {.bias = true, .residual = true}};
  spec.input = spec.output = ImageLayout::nhwc;
  const auto plan = Plan::conv(*weight, spec);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->kernel(70).substr(0, 7), "linear_");
  const auto linear = Plan::linear(*weight, {.m_max = 70, .epilogue = spec.epilogue});
  const Case c{.spec = spec, .batch = 2};
  Images a(DType::f32, spec.input, 2, 64, 5, 7, 3), d(DType::f32, spec.output, 2, 40, 5, 7, 1);
  a.fill_random(1);
  const OperandData operands(c);
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
    QuantTensor q = conv_weight(schemes()[seed % 2], g, seed, false);
    if (seed % 3 == 0) q.prescale = random_prescale(g, seed);
    const Case c{.spec = {.geometry = g}, .batch = 2};
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
    QuantTensor q = conv_weight(schemes()[seed % schemes().size()], g, seed, true);
    q.static_acts = {0.02f, 0};
    if (seed % 3 == 1) q.prescale = random_prescale(g, seed);
    for (const ActScheme& act :
         {ActScheme{}, ActScheme{DType::s8, GroupShape::tensor()}, ActScheme{DType::s8, GroupShape::channel()}}) {
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
  QuantTensor q = conv_weight(schemes()[2], g, 1, false);
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
      if (!runs_here(kernel->isa).ok() || !takes(*kernel, q, spec.conv)) continue;
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
  EXPECT_EQ(Plan::conv(*pack(q), {.geometry = g, .a_dtype = DType::s8, .act_scheme = {DType::s8, GroupShape::tensor()}})
                .status()
                .message(),
            "A comes quantized, but the weight has a prescale, which activations are multiplied by first");
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
