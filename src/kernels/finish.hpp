// A gated linear unit (EpilogueSpec::glu) multiplies channels j and N/2 + j of x. The kernels have both in one thread, because a weight for
// a glu is packed with these rows side by side:
//
//   rows of W        0  1  2  …  N/2−1 | N/2  N/2+1  …  N−1
//   packed rows      0  N/2  1  N/2+1  2  N/2+2  …
//
// A weight with scales for blocks of several rows cannot be packed so, because a block would have rows of both halves. There, and on the GPU
// for more than a few tokens, whose kernels have faster stores for D as it is, the product goes through the workspace, and a last step,
// Op::finish, applies the whole epilogue:
//
//   A, W ──linear──▶ sums [M,N] ──finish──▶ D [M,N/2]        f16 or bf16 where D is that, without scales; else f32
//
// So it does on the GPU for experts that have biases, with a glu or without, so that kernels of products need not know whose bias is whose.
#pragma once

#include "kernels/kernel.hpp"

namespace nibble {

/// Whether a weight of that scheme is packed in pairs of rows for that epilogue.
bool pairs_rows(const EpilogueSpec& epilogue, const WeightScheme& scheme);
/// A weight with its rows in pairs, but for its bias.
QuantTensor with_paired_rows(const QuantTensor& q);
/// The inverse: puts the rows of codes, scales and zeros back.
void unpair_rows(QuantTensor& q);

/// Whether a last step finishes the product of problem.m tokens: of a glu, or of experts with biases.
bool needs_finish(const Problem& problem);
/// The problem of the product before it.
Problem product_of(const Problem& problem);
/// The problem of the last step.
Problem finishing(const Problem& problem);
/// The sums between the two, which lie at `data`.
TensorView sums_view(const Problem& problem, std::byte* data);
/// Their bytes.
std::size_t sums_bytes(const Problem& problem);

}  // namespace nibble
