#include "conv_rows.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/reference/conv.hpp"
#include "plan/act_model.hpp"
#include "plan/compare.hpp"
#include "plan/host_run.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

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

Images beside_d(const ConvCase& c, std::uint64_t salt) {
  const ConvGeometry& g = c.spec.geometry;
  Images images(salt == 1 ? DType::f16 : DType::f32, c.spec.output, c.batch, g.out_channels, g.out_height(), g.out_width(),
                c.more);
  images.fill_random(c.seed + salt);
  return images;
}

Problem problem_for(const Kernel& kernel, const WeightScheme& scheme, const ConvSpec& spec, bool prescales) {
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

}  // namespace

ConvGeometry random_geometry(std::uint64_t seed, Isa isa) {
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
      if (dice.in(0, 1) == 0) {  // pointwise, of NCHW images that TMA can read as they lie
        g.filter = g.stride = g.dilation = {1, 1};
        g.padding = {};
        g.width = 8 * dice.in(1, 4);
      }
    }
    if (isa == Isa::sm80) {
      g.groups = std::min<std::int64_t>(g.groups, 2);
      g.in_channels = g.groups * (seed % 5 < 2 ? 8 * dice.in(1, 5) : 64 * dice.in(1, 2));
      if (g.groups > 1) g.out_channels = g.groups * 64;
    }
    if (g.validate().ok()) return g;
  }
}

ConvGeometry random_geometry(std::uint64_t seed, const Kernel& kernel) {
  if (kernel.backend != Backend::cuda || kernel.linear == nullptr) return random_geometry(seed, kernel.isa);
  for (;; seed += 1000)
    if (const ConvGeometry g = random_geometry(seed); g.groups == 1) return g;
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

ImageLayout layout_of(std::uint64_t bit) { return bit % 2 == 0 ? ImageLayout::nchw : ImageLayout::nhwc; }

Images::Images(DType type, ImageLayout layout, std::int64_t b, std::int64_t c, std::int64_t h, std::int64_t w, std::int64_t more)
    : memory(type, {b * (c + more) * h * w + 1}) {
  if (h * w == 1 && layout == ImageLayout::nchw) more = 0;
  view = TensorView(memory.bytes.data(), type, {b, c, h, w});
  const std::int64_t all = c + more;
  if (layout == ImageLayout::nchw)
    view.strides = {all * h * w, h * w, w, 1};
  else
    view.strides = {all * h * w, 1, w * all, all};
}

void Images::fill_random(std::uint64_t seed) {
  for (std::int64_t i = 0; i < memory.numel(); ++i) {
    if (!is_compute_float(memory.dtype))
      memory.bytes[static_cast<std::size_t>(i)] =
          static_cast<std::byte>(random_bits(seed, static_cast<std::uint64_t>(i))) &
          (memory.dtype == DType::e4m3 ? std::byte{0xbf} : std::byte{0xff});  // no NaN, nothing huge
    else
      memory.set(i, random_normal(seed, static_cast<std::uint64_t>(i)));
  }
}

ConvOperands::ConvOperands(const ConvCase& c)
    : gate(beside_d(c, 1)),
      residual(beside_d(c, 2)),
      col_scale(DType::f32, {c.spec.geometry.out_channels}),
      sum_bias(DType::s32, col_scale.shape),
      out_scale(DType::f32, col_scale.shape) {
  for (std::int64_t i = 0; i < col_scale.numel(); ++i) {
    col_scale.set(i, 1.0f - 0.1f * random_normal(c.seed, static_cast<std::uint64_t>(i)));
    sum_bias.as<std::int32_t>()[i] = static_cast<std::int32_t>((i + 1) * 7919 % 4000) - 2000;
    out_scale.set(i, 0.2f + 0.05f * static_cast<float>(i % 7));
  }
}

Operands ConvOperands::args(const QuantTensor& q) const {
  Operands args;
  args.col_scale = ConstTensorView(col_scale.bytes.data(), DType::f32, {col_scale.shape[0]});
  if (!q.bias.empty()) args.bias = ConstTensorView(q.bias.bytes.data(), q.bias.dtype, {q.n});
  args.gate = gate.view;
  args.residual = residual.view;
  args.sum_bias = ConstTensorView(sum_bias.bytes.data(), DType::s32, {sum_bias.shape[0]});
  args.out_scale = ConstTensorView(out_scale.bytes.data(), DType::f32, {out_scale.shape[0]});
  return args;
}

Tensor run_conv(const QuantTensor& q, const ConvCase& c, const Images& a, const Operands& args, std::string_view kernel,
                Executor* executor) {
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

void expect_within_bound(const QuantTensor& q, const ConvCase& c, const Images& a, const Operands& args, const Tensor& d,
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

bool takes(const Kernel& kernel, const WeightScheme& scheme, const ConvSpec& spec) {
  const std::int64_t group = scheme.group.k, block = spec.act_scheme.group.k;
  if (block != 0 && group != 0 && group % block != 0 && block % group != 0) return false;  // plans refuse it
  if (scheme.is_dense() && spec.act_scheme.codes != DType::none) return false;             // plans refuse it
  return kernel.accepts(kernel, problem_for(kernel, scheme, spec, false)).ok();
}

bool takes_prescale(const Kernel& kernel, const QuantTensor& q, const ConvSpec& spec) {
  return is_compute_float(spec.a_dtype) && kernel.accepts(kernel, problem_for(kernel, q.scheme, spec, true)).ok();
}

std::vector<const Kernel*> conv_kernels(bool (*which)(const Kernel&)) {
  std::vector<const Kernel*> list;
  for (const Kernel& kernel : kernel_table())
    if (kernel.op == Op::conv && is_built(kernel) && (which == nullptr || which(kernel))) list.push_back(&kernel);
  return list;
}

const std::vector<WeightScheme>& conv_schemes() {
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
                                                  {DType::e2m1, ZeroKind::none, GroupShape::group(32), DType::e8m0},
                                                  WeightScheme::dense(DType::f16),
                                                  WeightScheme::dense(DType::bf16),
                                                  WeightScheme::dense(DType::f32)};
  return kSchemes;
}

QuantTensor conv_weight(WeightScheme scheme, const ConvGeometry& g, std::uint64_t seed, bool bias) {
  if (scheme.group.all_elements) scheme.group.all_elements = g.group_inputs() % scheme.group.k == 0;
  return testing::random_weight(scheme, g.out_channels, g.k(), seed, {.bias = bias, .filter = g.filter});
}

Tensor random_prescale(const ConvGeometry& g, std::uint64_t seed) {
  Tensor prescale(DType::f16, {g.k()});
  for (std::int64_t i = 0; i < g.k(); ++i)
    prescale.set(i, 0.5f + static_cast<float>(random_uniform(seed, static_cast<std::uint64_t>(i % g.group_inputs()))));
  return prescale;
}

}  // namespace nibble
