// The CUDA kernels that multiply 8-bit codes by 8-bit codes, and the step before them that quantizes activations:
//
//   A (f32, f16, bf16) ──prepare──▶ codes, scales, zeros, sums (ActMap, in the workspace) ──linear──▶ D
//   A (codes), a_scale, a_zero ─────────────────────────────────────────────────────────────linear──▶ D
#pragma once

#include "kernels/cuda/table/wgmma_cost.hpp"
#include "kernels/cuda/tasks/gemm_schedule.hpp"
#include "kernels/cuda/tasks/quantize_task.hpp"
#include "kernels/cuda/tasks/w8a8_task.hpp"
#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

/// A as the caller quantized it, without sums.
QuantizedActs given_acts(const StepArgs& args);

/// The task that makes of A, which is of floats, the codes in args.prepared: code_rows(args).
QuantizeTask rows_to_quantize(const StepArgs& args);

/// The task of a step. If codes are given without the sums that the weight's zero points need, acts.sums points into args.scratch and is
/// not filled yet.
W8A8Task w8a8_task(const StepArgs& args);

/// Its activations, of weights in either layout: prepared, or as the caller has quantized them.
QuantizedActs code_rows(const StepArgs& args);

/// Whether activations have scales per group of channels, or the weight per block.
bool has_groups(const Problem& problem);
/// Microseconds to move codes, weight and result once.
double codes_moved_us(const GpuInfo& gpu, const Problem& problem);

/// Warpgroups that share K where tokens are few: two are better than four.
constexpr int w8a8_sm90_depth(int tokens, int blocks) { return tokens <= 32 && blocks <= 2 ? 2 : 1; }

/// Predicted microseconds of sm_90's kernels.
WgmmaFeatures w8a8_sm90_features(const Tile& tile, DType codes, const GpuInfo& gpu, const Problem& problem);
double w8a8_sm90_cost_us(const Tile& tile, DType codes, const GpuInfo& gpu, const Problem& problem);

}  // namespace nibble::cuda
