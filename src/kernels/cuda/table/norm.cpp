// Normalizing activations on the GPU (kernels/norm.hpp).
#include "kernels/cuda/table/norm.hpp"

#include <array>
#include <bit>

#include "core/error.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/tasks/norm_limits.hpp"
#include "kernels/norm.hpp"

namespace nibble::cuda {
namespace {

Status accepts(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_form(self, p));
  if (p.k <= kNormChannels) return {};
  return error(StatusCode::unsupported, "K={}: normalizes at most {} channels, which a CTA keeps in registers", p.k,
               kNormChannels);
}

constexpr double kShare = 0.7;  // of the bandwidth

double cost_us(const Kernel&, const Problem& p) {
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

Status accepts_norm_codes(const Problem& p) {
  if (p.k > kNormCodesChannels)
    return error(StatusCode::unsupported, "K={}: normalizes and quantizes at most {} channels, which a CTA keeps in registers",
                 p.k, kNormCodesChannels);
  if (p.permutes_k) return error(StatusCode::unsupported, "quantizes channels in order, the packed weight has another one");
  if (p.act_scheme.zero == ZeroKind::offset)
    return error(StatusCode::unsupported, "normalizes and quantizes with zero points that are integers, not with float offsets");
  if (const std::int64_t k = p.act_scheme.group.k;
      k != 0 && (k < 32 || k > 256 || !std::has_single_bit(static_cast<std::uint64_t>(k))))
    return error(StatusCode::unsupported,
                 "normalizes and quantizes with a scale per token, tensor, or 32, 64, 128 or 256 channels, not per {}", k);
  return {};
}

double norm_codes_cost_us(const Problem& p) {
  const double bytes = static_cast<double>(p.m) * static_cast<double>(p.k) * (3.0 * bits(p.a_dtype) / 8 + 1);
  return kLaunchUs + 1e-3 * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
}

}  // namespace nibble::cuda
