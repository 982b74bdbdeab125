// Normalizing activations on the CPU (kernels/norm.hpp): a task is a token.
#include "kernels/norm.hpp"

#include <array>
#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "kernels/cpu/families.hpp"

namespace nibble::cpu {
namespace {

/// f(i, element i as f32), i in [0, k).
template <class F>
void for_each(const void* data, DType type, std::int64_t k, F&& f) {
  const auto loop = [&](const auto* p) {
    for (std::int64_t i = 0; i < k; ++i) f(i, to_f32(p[i]));
  };
  if (type == DType::f32) loop(static_cast<const float*>(data));
  if (type == DType::f16) loop(static_cast<const f16*>(data));
  if (type == DType::bf16) loop(static_cast<const bf16*>(data));
}

const void* row_of(const void* data, DType type, std::int64_t row, std::int64_t stride) {
  return static_cast<const std::byte*>(data) + row * stride * bits(type) / 8;
}
void* row_of(void* data, DType type, std::int64_t row, std::int64_t stride) {
  return static_cast<std::byte*>(data) + row * stride * bits(type) / 8;
}

void store(const float* x, std::int64_t k, void* to, DType type) {
  const auto loop = [&](auto* p, auto convert) {
    for (std::int64_t i = 0; i < k; ++i) p[i] = convert(x[i]);
  };
  if (type == DType::f32) loop(static_cast<float*>(to), [](float v) { return v; });
  if (type == DType::f16) loop(static_cast<f16*>(to), to_f16);
  if (type == DType::bf16) loop(static_cast<bf16*>(to), to_bf16);
}

float rounded(float x, DType type) {
  return type == DType::f16 ? to_f32(to_f16(x)) : type == DType::bf16 ? to_f32(to_bf16(x)) : x;
}

/// Σ f(x[i]) in parts, which are added in a fixed order: the bits do not depend on the compiler's vectors.
template <class F>
double sum_of(const std::vector<float>& x, F f) {
  std::array<double, 8> parts{};
  for (std::size_t i = 0; i < x.size(); ++i) parts[i % parts.size()] += f(static_cast<double>(x[i]));
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

void normalize(const NormTask& t, std::int64_t m) {
  std::vector<float> x(static_cast<std::size_t>(t.k));
  for_each(row_of(t.a, t.type, m, t.a_stride), t.type, t.k, [&](std::int64_t i, float v) { x[static_cast<std::size_t>(i)] = v; });
  if (t.add != nullptr) {
    for_each(row_of(t.add, t.add_type, m, t.add_stride), t.add_type, t.k, [&](std::int64_t i, float v) {
      float& sum = x[static_cast<std::size_t>(i)];
      sum = rounded(sum + v, t.type);
    });
    if (t.sum != nullptr) store(x.data(), t.k, row_of(t.sum, t.type, m, t.sum_stride), t.type);
  }
  const auto k = static_cast<double>(t.k);
  const double mean = t.spec.kind == Norm::layer ? sum_of(x, [](double v) { return v; }) / k : 0.0;
  const double squares = sum_of(x, [mean](double v) { return (v - mean) * (v - mean); }) / k;
  const auto scale = static_cast<float>(1.0 / std::sqrt(squares + static_cast<double>(t.spec.eps)));
  const auto center = static_cast<float>(mean);
  for_each(t.weight, t.weight_type, t.k, [&](std::int64_t i, float w) {
    float& y = x[static_cast<std::size_t>(i)];
    y = (y - center) * scale * (w + t.spec.weight_offset);
  });
  if (t.bias != nullptr)
    for_each(t.bias, t.bias_type, t.k, [&](std::int64_t i, float b) { x[static_cast<std::size_t>(i)] += b; });
  store(x.data(), t.k, row_of(t.y, t.type, m, t.y_stride), t.type);
}

Status run(const Kernel&, const StepArgs& args) {
  const NormTask task = norm_task(args);
  args.executor->parallel_for(task.m, [&](std::int64_t m) { normalize(task, m); });
  return {};
}

Status accepts(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  return accepts_form(self, p);
}

double cost_us(const Kernel&, const Problem& p) {
  constexpr double kNanoseconds = 1.5;  // per element and thread: an estimate of conversions and two sums
  const double rows = std::ceil(static_cast<double>(p.m) / p.machine.threads);
  return 1e-3 * kNanoseconds * rows * static_cast<double>(p.k);
}

constexpr std::array kKernels{
    Kernel{.backend = Backend::cpu,
           .isa = Isa::baseline,
           .op = Op::prepare,
           .out = name(ActForm::normalized),
           .act = "any",
           .weight = "none",
           .layout = "",
           .tile = {},
           .summary = "RMSNorm or LayerNorm of the activations, with the residual stream added before it",
           .form = ActForm::normalized,
           .accepts = accepts,
           .cost_us = cost_us,
           .workspace = normalized_bytes,
           .run = run}};

}  // namespace

std::span<const Kernel> norm_kernels() { return kKernels; }

}  // namespace nibble::cpu
