// The CUDA kernels that multiply 8-bit codes by 8-bit codes, and the step before them that quantizes activations:
//
//   A (f32, f16, bf16) ──prepare──▶ codes, scales, zeros, sums (ActMap, in the workspace) ──linear──▶ D
//   A (codes), a_scale, a_zero ─────────────────────────────────────────────────────────────linear──▶ D
#pragma once

#include <algorithm>
#include <span>

#include "kernels/cuda/table/wgmma_cost.hpp"
#include "kernels/cuda/tasks/gemm_schedule.hpp"
#include "kernels/cuda/tasks/w8a8_task.hpp"
#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

/// The rows. They are in every build, as kernels() promises.
std::span<const Kernel> scaled_kernels();

/// The task of a step. If codes are given without the sums that the weight's zero points need, acts.sums points into args.scratch and is
/// not filled yet.
ScaledTask scaled_task(const StepArgs& args);

/// Whether activations have scales per group of channels, or the weight per block.
bool has_groups(const Problem& problem);
/// Microseconds to move codes, weight and result once.
double codes_moved_us(const GpuInfo& gpu, const Problem& problem);

/// Warpgroups that share K where tokens are few: two are better than four.
constexpr int scaled_sm90_depth(int tokens, int blocks) { return tokens <= 32 && blocks <= 2 ? 2 : 1; }

/// The same kernel with partial sums of tensor cores added in f32: an estimate.
constexpr WgmmaCost precise(WgmmaCost cost) {
  const float extra = cost.tokens > 128 ? 1.08f : 1.03f;
  cost.step_us *= extra, cost.block_us *= extra;
  return cost;
}

/// Predicted microseconds of sm_90's kernels: kTokens × 64·kBlocks outputs a pass of a CTA, kSplit of which share it along K.
template <int kTokens, int kBlocks, int kSplit>
double scaled_sm90_cost_us(DType codes, const GpuInfo& gpu, const Problem& problem) {
  constexpr int kRows = kBlocks * gpu_w8::kRows;
  static constexpr WgmmaCost kS8 = wgmma_cost(WgmmaFamily::s8, kTokens, kRows, kSplit);
  static constexpr WgmmaCost kE4m3 = wgmma_cost(WgmmaFamily::e4m3, kTokens, kRows, kSplit);
  static constexpr WgmmaCost kPrecise = precise(kE4m3);
  // Some tiles of 256 tokens refuse groups and need no cost.
  static constexpr WgmmaCost kGroups =
      wgmma_cost(kTokens > 128 && kBlocks != 2 ? WgmmaFamily::e4m3 : WgmmaFamily::e4m3_groups, kTokens, kRows, kSplit);
  const bool groups = has_groups(problem);
  const int depth = scaled_sm90_depth(kTokens, kBlocks), blocks = std::min(kBlocks, scaled_groups(kTokens, groups) / depth);
  return wgmma_cost_us(codes == DType::s8                              ? kS8
                       : groups                                        ? kGroups
                       : problem.accumulation == Accumulation::precise ? kPrecise
                                                                       : kE4m3,
                       {.blocks = blocks, .depth = depth}, gpu, problem, codes_moved_us(gpu, problem));
}

}  // namespace nibble::cuda
