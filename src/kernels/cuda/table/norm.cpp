// Normalizing activations on the GPU (kernels/norm.hpp).
#include "kernels/norm.hpp"

#include <array>

#include "core/error.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/tasks/norm_limits.hpp"

namespace nibble::cuda {
namespace {

Status accepts(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_form(self, p));
  if (p.k <= kNormChannels) return {};
  return error(StatusCode::unsupported, "K={}: normalizes at most {} channels, which a CTA keeps in registers", p.k,
               kNormChannels);
}

double cost_us(const Kernel&, const Problem& p) {
  constexpr double kShare = 0.7;  // of the bandwidth
  const double bytes = 4.0 * static_cast<double>(p.m) * static_cast<double>(p.k) * bits(p.a_dtype) / 8;
  return kLaunchUs + 1e-3 * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
}

Status run(const Kernel&, const StepArgs& args) { return launch_norm_rows(norm_task(args), args.stream); }

constexpr std::array kKernels{
    Kernel{.backend = Backend::cuda,
           .isa = Isa::simt,
           .op = Op::prepare,
           .out = name(ActForm::normalized),
           .act = "any",
           .weight = "none",
           .layout = "",
           .tile = {},
           .summary = "RMSNorm or LayerNorm of the activations, with the residual stream added before it; every GPU",
           .form = ActForm::normalized,
           .accepts = accepts,
           .cost_us = cost_us,
           .workspace = normalized_bytes,
           .run = run}};

}  // namespace

std::span<const Kernel> norm_kernels() { return kKernels; }

}  // namespace nibble::cuda
