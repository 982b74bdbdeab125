// Integer products summed over all of K, where there is one scale per token and one per output channel (W8A8): the result is exact
// but for the roundings that docs/accuracy.md names, bit for bit the same on every machine.
//
//   D[m,n] = epilogue( fl( fl( fl(I)·s_a[m] ) · s_w[n] ) [· scale2] )        I = Σ (q_a − z_a)·(q_w − z_w), an integer
//
//   for each tile of H tokens, for each row block of R output channels
//     for each segment of K, of 2¹⁵ channels, so mostly one
//       acc[H][R] = −bias·Σq_a + Σ q_a·code                                 s32 in registers, one instruction per 64 products
//     I = Σ of acc − z_w·Σq_a − z_a·Σ(q_w − z_w)                            in f64, exact up to 2⁵³; without zero points just acc
//     scales, epilogue
//
// With nothing to do per segment there are no float sums beside the integers, so a tile has twice the tokens of dot_tile.hpp's: a
// vector of codes is loaded, and turned into unsigned bytes, once for H dot products. Σ(q_w − z_w) comes from the same tile, run
// over a prepared token of ones once per task: the weights are in L2 for the tokens anyway, and no layout has to carry it.
#pragma once

#include "kernels/cpu/dot_tile.hpp"

namespace nibble::cpu {

#if defined(__x86_64__)
extern const DotIsa kAvx512VnniWhole, kAvx512Whole, kAvx2VnniWhole, kAvx2Whole;
#elif defined(__aarch64__)
extern const DotIsa kI8mmWhole, kDotprodWhole;
#endif
extern const DotIsa kBaselineWhole;

}  // namespace nibble::cpu
