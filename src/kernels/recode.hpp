// An A of u8 codes as one of s8 codes: 128 less, zero points too, so that they stand for the same numbers. It is the first step of a plan
// for such an A; every other step sees s8 codes, in the workspace:
//
//   A of u8, a_zero ──recode──▶ codes s8, dense: [M, K], rows at multiples of 16 bytes, or [B,C,H,W] in the layout of A
//                               zero points s32, dense, in the shape of a_zero
//
// Scales stay where they are. Zero points of the weight (static_acts) are those of s8 codes already.
#pragma once

#include "kernels/kernel.hpp"
#include "kernels/recode_task.hpp"

namespace nibble {

/// How far codes of A are above the s8 codes that they stand for.
constexpr int code_shift(DType a) { return a == DType::u8 ? 128 : 0; }

/// The problem of the step before a plan for `problem`, whose A comes as u8.
Problem recoding(const Problem& problem);
/// Bytes that it writes.
std::size_t recoded_bytes(const Kernel& self, const Problem& recoding);
/// The arguments of the steps after it, which wrote to args.prepared: A and a_zero lie there.
StepArgs recoded(const StepArgs& args);
/// The work of the step.
RecodeTask recode_task(const StepArgs& args);

}  // namespace nibble
