// The CUDA kernels that multiply 8-bit codes by 8-bit codes, and the step before them that makes codes of activations:
//
//   A (f32, f16, bf16) ──prepare──▶ codes, scales, zeros, sums (ActMap, in the workspace) ──linear──▶ D
//   A (codes), a_scale, a_zero ─────────────────────────────────────────────────────────────linear──▶ D
#pragma once

#include <span>

#include "kernels/cuda/scaled_task.hpp"
#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

/// The rows. In every build, as those of kernels().
std::span<const Kernel> scaled_kernels();

/// What a launcher gets of a step's arguments. Codes that come without the sums that the weight's zero points need have acts.sums in
/// args.scratch: nobody has filled them yet.
ScaledTask scaled_task(const StepArgs& args);

/// Predicted microseconds of sm_90's kernels: `tokens` × 64·`blocks` outputs a pass of a CTA, `split` of which share it along K.
double scaled_sm90_cost_us(int tokens, int blocks, int split, const GpuInfo& gpu, const Problem& problem);

}  // namespace nibble::cuda
