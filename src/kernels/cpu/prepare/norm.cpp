// Normalizing activations on the CPU (kernels/norm.hpp): a task is a token.
#include "kernels/cpu/prepare/norm.hpp"

#include <array>
#include <cmath>
#include <cstring>

#include "core/error.hpp"
#include "core/target.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/intrinsics.hpp"
#include "kernels/norm.hpp"
#include "layouts/tile.hpp"

namespace nibble::cpu {
namespace {

constexpr std::int64_t kBlock = 256;  // channels that are worked on at a time, on the stack: a run allocates nothing
constexpr int kParts = 8;             // of a sum of doubles: a vector of AVX-512

#define NIBBLE_LOOPS "kernels/cpu/prepare/norm.inl"
#include "kernels/cpu/each_isa.inl"

Status run(const Kernel& self, const StepArgs& args) {
  const NormTask task = norm_task(args);
  const NormalizeRow normalize = normalize_row(self.isa);
  args.executor->parallel_for(task.m, [&](std::int64_t m) { normalize(task, m); });
  return {};
}

Status accepts(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  return accepts_form(self, p);
}

double cost_us(const Kernel& self, const Problem& p) { return normalize_cost_us(self.isa, p); }

constexpr Kernel row(Isa isa) {
  return {.backend = Backend::cpu,
          .isa = isa,
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
          .run = run};
}

constexpr std::array kKernels {
#if defined(__x86_64__)
  row(Isa::avx512), row(Isa::avx2),
#endif
      row(Isa::baseline)
};

}  // namespace

NormalizeRow normalize_row([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return avx512::normalize;
  if (isa == Isa::avx2) return avx2::normalize;
#endif
  return baseline::normalize;
}

double normalize_cost_us(Isa isa, const Problem& p) {
  // Per element and thread, measured on a Sapphire Rapids core: the mean of f32, f16 and bf16 without a sum.
  const double nanoseconds = isa == Isa::avx512 ? 0.35 : isa == Isa::avx2 ? 0.5 : 1.7;
  const double rows = std::ceil(static_cast<double>(p.m) / p.machine.threads);
  return 1e-3 * nanoseconds * rows * static_cast<double>(p.k);
}

std::span<const Kernel> norm_kernels() { return kKernels; }

}  // namespace nibble::cpu
