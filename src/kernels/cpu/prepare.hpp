// Prepared activations: what the tile kernels read.
//
// A[M,K] of any float type becomes f32, permuted into the packed weight's order of input channels and multiplied by its
// prescale, in tiles of T tokens, so that a kernel reads the T activations of one k as consecutive floats:
//
//   tile t (tokens tT … tT+h−1, h = min(T, M − tT)) starts at float tT·K;   element (token r, channel k) at k·h + r
//
// An f32 row of M = 1 is its own prepared form, unless it has to be permuted or scaled.
#pragma once

#include "kernels/kernel.hpp"

namespace nibble::cpu {

/// Whether a plan needs the prepare step for this problem.
inline bool needs_prepare(const Problem& p) { return p.m > 1 || p.act != DType::f32 || p.reorders_k; }

}  // namespace nibble::cpu
