// The last step of a glu (finish.hpp).
#include "kernels/finish.hpp"

#include <array>

#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/tasks/expert_tiles.hpp"

namespace nibble::cuda {
namespace {

double cost_us(const Kernel&, const Problem& p) {
  constexpr double kShare = 0.7;  // of the bandwidth
  const double bytes = static_cast<double>(p.m) * static_cast<double>(p.n) * bits(p.epilogue.out) / 8 * 1.5;
  return kLaunchUs + 1e-3 * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
}

Status run(const Kernel&, const StepArgs& args) {
  StoredSums sums{.data = args.a.data,
                  .type = args.a.dtype,
                  .stride = args.a.stride(0),
                  .halves = args.epilogue->glu && !args.weight->paired};
  if (args.experts != nullptr) sums.expert_of = args.experts->expert_of, sums.bias_pitch = args.experts->bias_pitch;
  return launch_epilogue_rows(epilogue::element(*args.epilogue, args.operands, args.d, 1.0f), sums, args.d.dim(0),
                              static_cast<int>(args.weight->n), args.stream);
}

constexpr std::array kKernels{Kernel{.backend = Backend::cuda,
                                     .isa = Isa::simt,
                                     .op = Op::finish,
                                     .out = "any",
                                     .act = "any",
                                     .weight = "none",
                                     .layout = "",
                                     .tile = {},
                                     .summary = "the epilogue of sums in memory: a glu of more than a few tokens, or of a weight "
                                                "with scales for blocks of rows; every GPU",
                                     .accepts = accepts_common,
                                     .cost_us = cost_us,
                                     .run = run}};

}  // namespace

std::span<const Kernel> finish_kernels() { return kKernels; }

}  // namespace nibble::cuda
