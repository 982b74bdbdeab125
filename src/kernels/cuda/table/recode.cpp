// u8 codes of activations as s8: the GPU's row.
#include <array>

#include "core/error.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/recode.hpp"

namespace nibble::cuda {
namespace {

Status accepts(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  return accepts_form(self, p);
}

double cost_us(const Kernel&, const Problem& p) {
  constexpr double kShare = 0.7;  // of the bandwidth
  const double bytes = 2 * static_cast<double>(p.m) * static_cast<double>(p.k);
  return kLaunchUs + 1e-3 * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
}

Status run(const Kernel&, const StepArgs& args) { return launch_recode_acts(recode_task(args), args.stream); }

constexpr std::array kKernels{Kernel{.backend = Backend::cuda,
                                     .isa = Isa::simt,
                                     .op = Op::prepare,
                                     .out = name(ActForm::recoded),
                                     .act = "u8",
                                     .weight = "none",
                                     .layout = "",
                                     .tile = {},
                                     .summary = "u8 codes as s8 codes, 128 less, and their zero points; every GPU",
                                     .form = ActForm::recoded,
                                     .accepts = accepts,
                                     .cost_us = cost_us,
                                     .workspace = recoded_bytes,
                                     .run = run}};

}  // namespace

std::span<const Kernel> recode_kernels() { return kKernels; }

}  // namespace nibble::cuda
