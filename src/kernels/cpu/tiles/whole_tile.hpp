// Integer products summed over all of K, where there is one scale per token and one per output channel (W8A8): the result is exact
// but for the roundings that docs/accuracy.md names, bit for bit the same on every machine.
//
//   D[m,n] = epilogue( fl( fl( fl(I)·s_a[m] ) · s_w[n] ) [· scale2] )        I = Σ (q_a − z_a)·(q_w − z_w), an integer
//
//   for each group of row blocks, for each chunk of 512 (AMX: 1,024) channels of K, for each row block of the group
//     for each tile of H tokens
//       sums[H][R] += Σ q_a·code                                            s32: loaded into registers before, stored behind
//       after the last chunk: I = sums − bias·Σq_a − z_w·Σq_a − z_a·Σ(q_w − z_w), modulo 2³²; sum_bias; scales, epilogue
//
//                K ──────────────────▶
//               ┌────────┬────────┬─
//   tokens      │ H      │        │       6 KiB (AMX: 32) of a tile, from L2 for every row block
//               ├────────┼────────┼─
//               │ H      │        │
//               └────────┴────────┴─
//   row block   │ chunk  │                16 KiB (32), in L1 while all tokens of the task pass over it; the next chunk is prefetched into L2
//
// Over all of K at once, a tile of tokens and a row block together would exceed L1, and every product would wait for L2. Loading and storing
// the sums of a chunk is a few percent of the instructions (on AMX a fifth of the time). The chunk of the tokens is used by the row blocks of
// a group, whose sums fit in L2: activations that exceed L2 are read from L3 once for some four row blocks. A single tile, for which nothing
// would be reused, goes over all of K; on AMX activations that fit L2 meet one row block after the other. Then the weight is read in one run.
//
// Without work per segment there are no float sums beside the integers, so a tile has twice the tokens of dot_tile.hpp's: a vector of
// codes is loaded, and nibbles are split, once for H dot products. Σ(q_w − z_w) comes with the packed weight (channel_sums). Sums that 32
// bits may not hold (K beyond 32,768; beyond 21,988 with zero points on both sides) are finished in f64, exact up to 2⁵³.
//
// AMX multiplies 32 tokens × 32 channels in tile registers (amx_whole.inl), from rows of 64 channels of K instead of quads.
#pragma once

#include "kernels/cpu/tiles/dot_tile.hpp"

namespace nibble::cpu {

/// The most tokens of a chunk: their sums are on the stack.
constexpr std::int64_t kMaxChunkTokens = 256;

/// Patches of int8 pixels with one scale for all of them, K within one segment: they are multiplied in place, without copying patches. A
/// tile's tokens are consecutive in an output row, so they are evenly spaced.
struct PatchTask {
  const Patches* patches;                             // of tokens of a row
  std::int64_t rows;                                  // of patches->columns tokens, kMaxChunkTokens in all
  std::int64_t pixels;                                // gathered, one after the other
  std::int64_t pixel_bytes;                           // a multiple of an octet
  std::int32_t* pixel_sums;                           // [pixels], scratch
  std::int64_t row_down, pixel_step;                  // pixels from a token to the one below and to the next one
  std::int64_t taps_h, taps_w, tap_down, tap_beside;  // of the filter; pixels from one to the next
  const Decoder* decoder;
  const std::byte* weight;
  const double* channel_sums;    // PackedWeightHeader's
  const std::int32_t* sum_bias;  // of the output channels, null: none
  std::int32_t zero;             // of the activations
  float scale;
  std::int32_t bias;  // of the weight's codes
  std::int64_t tile;  // tokens of a tile
  const Outputs* outputs;
};

/// How the rows of a chunk are divided into tiles of AMX: `count` lines of `length` evenly spaced places for tokens, 16 to a tile
/// register; each row has `pitch` places. Either each row is a line, or all rows are one line, edges included.
struct PixelLines {
  std::int64_t count, length, pitch;
  std::int64_t halves() const { return (length + kRowTokens - 1) / kRowTokens; }
};

/// Chooses the one with fewer unused places; `row_down` and `pixel_step` as in PatchTask.
inline PixelLines pixel_lines(std::int64_t rows, std::int64_t columns, std::int64_t row_down, std::int64_t pixel_step) {
  const PixelLines apart{rows, columns, columns};
  if (row_down % pixel_step != 0) return apart;
  const std::int64_t pitch = row_down / pixel_step;
  const PixelLines together{1, (rows - 1) * pitch + columns, pitch};
  return together.halves() < rows * apart.halves() ? together : apart;
}

struct PatchIsa {
  /// Σ of each pixel; called before the products.
  void (*sum_pixels)(const PatchTask& task);
  /// D of row blocks [block, block_end), kMaxTaskBlocks at most, and all tokens; row blocks up to `block_next` come next.
  void (*multiply)(const PatchTask& task, std::int64_t block, std::int64_t block_end, std::int64_t block_next);
};

#if defined(__x86_64__)
extern const PatchIsa kAmxPatches, kAvx512VnniPatches, kAvx512Patches, kAvx2VnniPatches, kAvx2Patches;
#elif defined(__aarch64__)
extern const PatchIsa kI8mmPatches, kDotprodPatches;
#endif
extern const PatchIsa kBaselinePatches;

#if defined(__x86_64__)
extern const DotIsa kAmxWhole, kAvx512VnniWhole, kAvx512Whole, kAvx2VnniWhole, kAvx2Whole;
#elif defined(__aarch64__)
extern const DotIsa kI8mmWhole, kDotprodWhole;
#endif
extern const DotIsa kBaselineWhole;

}  // namespace nibble::cpu
