// Normalizing activations on the CPU (kernels/norm.hpp): a task is a token.
#include "kernels/norm.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.hpp"
#include "kernels/cpu/families.hpp"

namespace nibble::cpu {
namespace {

constexpr std::int64_t kBlock = 256;  // channels that are worked on at a time, on the stack: a run allocates nothing
using Block = std::array<float, kBlock>;

/// `count` elements of a row of floats from element `first` on, as f32.
void load(const void* row, DType type, std::int64_t first, std::int64_t count, Block& to) {
  const auto loop = [&](const auto* p) {
    for (std::int64_t i = 0; i < count; ++i) to[static_cast<std::size_t>(i)] = to_f32(p[first + i]);
  };
  if (type == DType::f32) loop(static_cast<const float*>(row));
  if (type == DType::f16) loop(static_cast<const f16*>(row));
  if (type == DType::bf16) loop(static_cast<const bf16*>(row));
}

void store(const Block& x, void* row, DType type, std::int64_t first, std::int64_t count) {
  const auto loop = [&](auto* p, auto convert) {
    for (std::int64_t i = 0; i < count; ++i) p[first + i] = convert(x[static_cast<std::size_t>(i)]);
  };
  if (type == DType::f32) loop(static_cast<float*>(row), [](float v) { return v; });
  if (type == DType::f16) loop(static_cast<f16*>(row), to_f16);
  if (type == DType::bf16) loop(static_cast<bf16*>(row), to_bf16);
}

const void* row_of(const void* data, DType type, std::int64_t row, std::int64_t stride) {
  return static_cast<const std::byte*>(data) + row * stride * bits(type) / 8;
}
void* row_of(void* data, DType type, std::int64_t row, std::int64_t stride) {
  return static_cast<std::byte*>(data) + row * stride * bits(type) / 8;
}

float rounded(float x, DType type) {
  return type == DType::f16 ? to_f32(to_f16(x)) : type == DType::bf16 ? to_f32(to_bf16(x)) : x;
}

/// x of a token, which is read once for each sum over it and once for the result.
class Row {
 public:
  /// Stores the sum where there is a place for it, which may be that of an operand: from then on x is read from there.
  Row(const NormTask& t, std::int64_t m) : t_(t), a_(row_of(t.a, t.type, m, t.a_stride)) {
    if (t.add == nullptr) return;
    add_ = row_of(t.add, t.add_type, m, t.add_stride);
    if (t.sum == nullptr) return;
    void* const sum = row_of(t.sum, t.type, m, t.sum_stride);
    for_each([&](std::int64_t first, std::int64_t count, const Block& x) { store(x, sum, t.type, first, count); });
    a_ = sum;
    add_ = nullptr;
  }

  /// f(first channel, count, x of these channels).
  template <class F>
  void for_each(F f) const {
    Block x, more;
    for (std::int64_t first = 0; first < t_.k; first += kBlock) {
      const std::int64_t count = std::min(kBlock, t_.k - first);
      load(a_, t_.type, first, count, x);
      if (add_ != nullptr) {
        load(add_, t_.add_type, first, count, more);
        for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) x[i] = rounded(x[i] + more[i], t_.type);
      }
      f(first, count, x);
    }
  }

  /// Σ f(x) in parts, which are added in a fixed order: the bits do not depend on the compiler's vectors.
  template <class F>
  double sum_of(F f) const {
    std::array<double, 8> parts{};
    for_each([&](std::int64_t, std::int64_t count, const Block& x) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) parts[i % parts.size()] += f(static_cast<double>(x[i]));
    });
    double sum = 0;
    for (const double part : parts) sum += part;
    return sum;
  }

 private:
  const NormTask& t_;
  const void* a_;
  const void* add_ = nullptr;
};

void normalize(const NormTask& t, std::int64_t m) {
  const Row row(t, m);
  const auto k = static_cast<double>(t.k);
  const double mean = t.spec.kind == Norm::layer ? row.sum_of([](double v) { return v; }) / k : 0.0;
  const double squares = row.sum_of([mean](double v) { return (v - mean) * (v - mean); }) / k;
  const auto scale = static_cast<float>(1.0 / std::sqrt(squares + static_cast<double>(t.spec.eps)));
  const auto center = static_cast<float>(mean);
  void* const to = row_of(t.y, t.type, m, t.y_stride);
  row.for_each([&](std::int64_t first, std::int64_t count, const Block& x) {
    Block y, factor;
    load(t.weight, t.weight_type, first, count, factor);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
      y[i] = (x[i] - center) * scale * (factor[i] + t.spec.weight_offset);
    if (t.bias != nullptr) {
      load(t.bias, t.bias_type, first, count, factor);
      for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) y[i] += factor[i];
    }
    store(y, to, t.type, first, count);
  });
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
