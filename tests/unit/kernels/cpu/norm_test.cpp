// Normalizing on the CPU: every instruction set gives the bits of a plain loop, and a step that also prepares gives those of two steps.
#include "kernels/cpu/prepare/norm.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>

#include "core/random.hpp"
#include "kernels/cpu/prepare/prepare.hpp"
#include "kernels/norm.hpp"
#include "layouts/layout.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"

namespace nibble::cpu {
namespace {

constexpr std::byte kUnwritten{0xa5};

Tensor gaussian(DType type, std::vector<std::int64_t> shape, std::uint64_t seed) {
  Tensor t(type, std::move(shape));
  for (std::int64_t i = 0; i < t.numel(); ++i) t.set(i, 0.2f + random_normal(seed, static_cast<std::uint64_t>(i)));
  return t;
}

/// A layer's activations and what normalizes them.
struct Layer {
  NormSpec spec;
  Tensor a, add, weight, bias, sum, y;

  Layer(const NormSpec& norm, DType type, DType other, std::int64_t m, std::int64_t k)
      : spec(norm),
        a(gaussian(type, {m, k}, 1)),
        add(gaussian(other, {m, k}, 2)),
        weight(gaussian(other, {k}, 3)),
        bias(gaussian(type, {k}, 4)),
        sum(type, {m, k}),
        y(type, {m, k}) {}

  std::int64_t m() const { return a.shape[0]; }
  std::int64_t k() const { return a.shape[1]; }
  NormTask task() {
    return {.spec = spec,
            .type = a.dtype,
            .m = m(),
            .k = k(),
            .a = a.bytes.data(),
            .a_stride = k(),
            .add = spec.add ? add.bytes.data() : nullptr,
            .add_type = add.dtype,
            .add_stride = k(),
            .sum = spec.add ? sum.bytes.data() : nullptr,
            .sum_stride = k(),
            .weight = weight.bytes.data(),
            .weight_type = weight.dtype,
            .bias = spec.bias ? bias.bytes.data() : nullptr,
            .bias_type = bias.dtype,
            .y = y.bytes.data(),
            .y_stride = k()};
  }
};

/// Token m as it is defined: sums in double, in eight parts; each float operation rounded by itself.
void expect_definition(const Layer& l, std::int64_t m) {
  const std::int64_t k = l.k();
  Tensor x(l.a.dtype, {k}), y(l.a.dtype, {k});
  for (std::int64_t i = 0; i < k; ++i) x.set(i, l.spec.add ? l.a.at(m * k + i) + l.add.at(m * k + i) : l.a.at(m * k + i));
  const auto sum_of = [&](auto f) {
    std::array<double, 8> parts{};
    for (std::int64_t i = 0; i < k; ++i) parts[static_cast<std::size_t>(i % 8)] += f(static_cast<double>(x.at(i)));
    double sum = 0;
    for (const double part : parts) sum += part;
    return sum;
  };
  const auto count = static_cast<double>(k);
  const double mean = l.spec.kind == Norm::layer ? sum_of([](double v) { return v; }) / count : 0.0;
  const double variance = sum_of([mean](double v) { return (v - mean) * (v - mean); }) / count;
  const auto scale = static_cast<float>(1.0 / std::sqrt(variance + static_cast<double>(l.spec.eps)));
  for (std::int64_t i = 0; i < k; ++i) {
    const float scaled = (x.at(i) - static_cast<float>(mean)) * scale * (l.weight.at(i) + l.spec.weight_offset);
    y.set(i, l.spec.bias ? scaled + l.bias.at(i) : scaled);
    ASSERT_EQ(l.y.at(m * k + i), y.at(i)) << "token " << m << ", channel " << i;
    if (l.spec.add) {
      ASSERT_EQ(l.sum.at(m * k + i), x.at(i)) << "token " << m << ", channel " << i;
    }
  }
}

constexpr NormSpec kSpecs[] = {{.kind = Norm::rms},
                               {.kind = Norm::rms, .eps = 0.1f, .weight_offset = 1.0f, .add = true},
                               {.kind = Norm::layer, .bias = true, .add = true},
                               {.kind = Norm::layer}};
constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};

TEST(Normalize, EveryInstructionSetHasTheBitsOfTheDefinition) {
  for (const Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
    if (!runs_here(isa).ok()) continue;
    for (const NormSpec& spec : kSpecs)
      for (const DType type : kTypes)
        for (const DType other : kTypes)
          for (const std::int64_t k : {1, 7, 8, 31, 255, 256, 257, 1000}) {
            SCOPED_TRACE(std::string(name(isa)) + " " + std::string(spec.text()) + " of " + std::string(name(type)) + " and " +
                         std::string(name(other)) + ", K=" + std::to_string(k));
            Layer layer(spec, type, other, 2, k);
            for (std::int64_t m = 0; m < layer.m(); ++m) {
              normalize_row(isa)(layer.task(), m);
              ASSERT_NO_FATAL_FAILURE(expect_definition(layer, m));
            }
          }
  }
}

/// Runs a step of a layer whose activations are quantized as `act` says: what it writes, with what it leaves alone.
std::vector<std::byte> run(const Kernel& step, Layer& layer, const PackedWeight& weight, const ActScheme& act, int tile,
                           Executor& executor, const std::byte* normalized_a = nullptr) {
  Problem problem{.op = Op::prepare, .m = layer.m(), .n = weight.data().n, .k = layer.k(), .scheme = weight.data().scheme};
  problem.a_dtype = layer.a.dtype;
  problem.act_scheme = act;
  std::vector<std::byte> out(step.workspace(step, problem), kUnwritten);
  StepArgs args{.weight = &weight.data(), .a = ConstTensorView(layer.a.bytes.data(), layer.a.dtype, {layer.m(), layer.k()})};
  if (normalized_a != nullptr) {
    args.prepared = const_cast<std::byte*>(normalized_a);
    args = normalized(args);
  }
  args.prepared = out.data();
  args.act_scheme = act;
  args.norm = layer.spec;
  args.operands.norm_weight = ConstTensorView(layer.weight.bytes.data(), layer.weight.dtype, {layer.k()});
  if (layer.spec.bias) args.operands.norm_bias = ConstTensorView(layer.bias.bytes.data(), layer.bias.dtype, {layer.k()});
  if (layer.spec.add) {
    args.operands.norm_add = ConstTensorView(layer.add.bytes.data(), layer.add.dtype, {layer.m(), layer.k()});
    args.operands.norm_sum = TensorView(layer.sum.bytes.data(), layer.sum.dtype, {layer.m(), layer.k()});
  }
  args.prepare_tile = tile;
  args.executor = &executor;
  EXPECT_TRUE(step.run(step, args).ok());
  return out;
}

const Kernel* step_of(Isa isa, ActForm form, bool normalizing) {
  for (const Kernel& kernel : kernel_table())
    if (kernel.backend == Backend::cpu && kernel.op == Op::prepare && kernel.isa == isa && kernel.form == form &&
        normalizes(kernel) == normalizing)
      return &kernel;
  return nullptr;
}

TEST(Normalize, PreparingInOneStepHasTheBitsOfTwo) {
  const auto pool = make_executor(3), alone = make_executor(1);
  int compared = 0;
  for (const Kernel& both : kernel_table()) {
    if (both.backend != Backend::cpu || !normalizes(both) || !runs_here(both.isa).ok()) continue;
    const Kernel *norm = step_of(both.isa, ActForm::normalized, false), *prepare = step_of(both.isa, both.form, false);
    ASSERT_TRUE(norm != nullptr && prepare != nullptr) << both.name;
    const bool int8 = both.form == ActForm::s8 || both.form == ActForm::s8k64;
    for (const char* const text : {"u4b8g32", "s8r_u4zg32", "s8zg32_u4b8g32", "s8r_s8c"}) {
      const Scheme scheme = *Scheme::parse(text);
      if (int8 != (scheme.act.codes == DType::s8)) continue;
      for (const bool act_order : {false, true})
        for (const NormSpec& spec : kSpecs)
          for (const std::int64_t m : {1, 3, 13, 70}) {
            const DType type = bf16_terms(both.form) == 1 ? DType::bf16 : bf16_terms(both.form) == 2 ? DType::f16 : kTypes[m % 3];
            const int tile = in_rows(both.form) ? 32 : 12;
            SCOPED_TRACE(std::string(both.name) + " " + text + " " + std::string(spec.text()) + " M=" + std::to_string(m));
            Layer layer(spec, type, DType::f32, m, 200), same(spec, type, DType::f32, m, 200);
            const auto weight =
                pack(testing::random_weight(scheme.weight, 5, 200, 7, {.act_order = act_order}), {.layout = "plain"});
            ASSERT_TRUE(weight.ok()) << weight.status().message();
            const std::vector<std::byte> y = run(*norm, layer, *weight, scheme.act, tile, *alone);
            const std::vector<std::byte> expected = run(*prepare, layer, *weight, scheme.act, tile, *alone, y.data());
            std::vector<std::byte> got = run(both, same, *weight, scheme.act, tile, *pool);
            ASSERT_GE(got.size(), expected.size());
            got.resize(expected.size());
            ASSERT_EQ(got, expected);
            ASSERT_EQ(same.sum.bytes, layer.sum.bytes);
            ++compared;
          }
    }
  }
  EXPECT_GE(compared, 4 * 2 * 4 * 4);  // the forms of the baseline
}

TEST(Normalize, PlansTellThatAStepDoesBoth) {
  for (const char* const text : {"s8r_u4b8g128", "u4b8g128"}) {
    const Scheme scheme = *Scheme::parse(text);
    const LinearSpec spec{.a_dtype = DType::f16, .m_max = 33, .act_scheme = scheme.act, .norm = {.kind = Norm::rms}};
    const auto explained = explain({.scheme = scheme.weight, .n = 256, .k = 256}, spec);
    ASSERT_TRUE(explained.ok()) << explained.status().message();
    for (const auto& bucket : explained->buckets) {
      ASSERT_EQ(bucket.steps.size(), 2u);
      EXPECT_TRUE(bucket.steps.front().ends_with("_norm")) << bucket.steps.front();
    }
  }
}

}  // namespace
}  // namespace nibble::cpu
