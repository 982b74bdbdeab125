// bf16 dot products over the tile layouts (layouts/tile.hpp), for bf16 activations or FP8 ones as bf16, and integer codes of 4 or 8 bits,
// e4m3, e2m1, or dense bf16, whose octets are multiplied where they lie.
//
// The integers q − z are exact in bf16 (8 bits of significand hold ±256), and so are the values of e4m3 and e2m1; products of two bf16 are
// exact in f32, and the scale of a group, and that of a token's FP8 codes, multiply the accumulator; so only sums are rounded.
//
//   for each segment of K (segments.hpp)
//     decode  codes → panel [pairs of channels][R] of 2 bf16            in L1; shared by every token of the task
//     for each tile of 8 tokens (AArch64: 12)
//       acc[8][R] += pair (broadcast) · panel                            registers over the segment; 32 products an instruction
//       sum[8][R] += s ∘ acc, of FP8 activations s ∘ s_a·acc             in L1
//   epilogue, row by row
//
// AMX (amx_halves.inl) multiplies rows of 32 channels by the same panel, whose pairs are the rows of its second operand. It has products to
// spare: f16 and f32 activations are sums of two and three bf16, which are multiplied one after the other.
// AArch64 (row_pairs.inl) joins two pairs: BFMMLA takes four channels of two tokens and two output channels, 16 products.
//
// The panel pays from about ten tokens on; for fewer, the fixed-point kernels of dot_tile.hpp do less work per weight, if it has integers.
#pragma once

#include <cstdint>

#include "kernels/cpu/tiles/dot_task.hpp"

namespace nibble::cpu {

struct Bf16Isa {
  int rows;    // R of the layout
  int lanes;   // of a vector register
  int tile;    // tokens per register tile
  int tokens;  // tokens per task
  int blocks;  // row blocks that go together
  /// D[m … m+tokens) of row blocks [begin, end).
  void (*linear)(const DotTask& task, std::int64_t begin, std::int64_t end, std::int64_t m);
};

#if defined(__x86_64__)
extern const Bf16Isa kAmxBf16, kAvx512Bf16;
#elif defined(__aarch64__)
extern const Bf16Isa kNeonBf16;
#endif

}  // namespace nibble::cpu
