// The first step of a plan with LinearSpec::norm: every other step sees normalized activations, in the workspace:
//
//   A, norm_add ──normalize──▶ norm_sum (the caller's)
//                              y [M,K] of A's type, rows at multiples of 16 bytes
//
// Where a prepare kernel of the variant "norm" normalizes, too, there is no such step, and what it writes has the bits of the two. On the GPU
// y is not stored then; on the CPU a core prepares a few rows of it while they are in its cache.
#pragma once

#include "kernels/kernel.hpp"
#include "kernels/norm_task.hpp"

namespace nibble {

/// Whether a prepare kernel normalizes A itself: the variants "norm". No other step normalizes before it.
inline bool normalizes(const Kernel& kernel) { return kernel.variant == "norm"; }
/// The problem of the step before a plan for `problem`, which normalizes A.
Problem normalizing(const Problem& problem);
/// Bytes that it writes to the workspace.
std::size_t normalized_bytes(const Kernel& self, const Problem& normalizing);
/// Checks the operands of the norm of A[M,K].
Status check_norm_args(const NormSpec& spec, const Operands& args, const ConstTensorView& a);
/// The arguments of the steps after it, which wrote y to args.prepared.
StepArgs normalized(const StepArgs& args);
/// The work of the step; of a kernel that quantizes y itself, y is not stored.
NormTask norm_task(const StepArgs& args);

}  // namespace nibble
