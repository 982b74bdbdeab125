// Integer dot products over the tile layouts (layouts/tile.hpp), for activations made of signed bytes: exact and dynamically quantized
// activations use the same loop.
//
//   dynamic  one byte per activation: a ≈ scale · d0                              int8, absmax / 127 per token or per block of K
//   exact    three bytes:             a ≈ scale · (d0 + 2⁸·d1 + 2¹⁶·d2)           24-bit fixed point, scale a power of two per
//                                                                                 block of at most 128 channels
//
// A token with D digits is D virtual rows of bytes; a register tile holds H tokens × R output channels:
//
//   for each segment of K (segments.hpp)
//     for each octet: load R words of codes; split nibbles (4 bits) or halves (8 bits): two quads of channels
//       for each virtual row: acc[H·D][R] += quad of bytes (broadcast) · quads of codes         one instruction per 64 products
//     sum[H][R] += scale_m · s ∘ (digits of acc joined − z ∘ Σa)                                once per segment, in f32
//
// A code's bias (8 for u4b8) costs nothing: acc starts at −bias·Σd, which prepare computes, and stays exact.
//
// The codes are unpacked in registers, again for every H tokens: two shifts and masks per 2·H·D dot products, on ports that the dot
// products leave idle. Nothing is stored until the epilogue. Integer sums are exact, and segments are added in the order of K, so a result
// does not depend on M, H or the number of threads. Where there is one scale per token and one per output channel, there is no work per
// segment at all: whole_tile.hpp.
//
// Activations with zero points: Σ(q_a − z_a)·(c − z) = Σ q_a·c − z_a·Σc − z·Σ(q_a − z_a), an integer of less than 2²⁴ in segments of at
// most 256 channels, so that f32 forms it exactly. In segments of at most 128 the last two terms are one dot product of 16-bit pairs a
// vector (ActDigits::paired): the token's {−Σ(q_a − z_a), −z_a}, which prepare computes, times the weight's {z, Σc}. The first tile of a
// task computes the sums of codes of each segment beside its own products; the other tiles reuse them.
#pragma once

#include <cstdint>

#include "kernels/cpu/tiles/ahead.hpp"
#include "kernels/cpu/tiles/dot_task.hpp"

namespace nibble::cpu {

/// The most row blocks of a task: limits the data kept per row block while the tokens are multiplied.
constexpr std::int64_t kMaxTaskBlocks = 64;
/// Sums of codes that a task keeps on the stack for its later tiles, one per segment and output channel: tasks are made to fit. For a row
/// block that does not fit alone, every tile computes them again.
constexpr std::int64_t kColumnFloats = 16 << 10;

/// The loops of one instruction set for one kind of sums: of three digits, of int8 by segments, of int8 over all of K.
struct DotIsa {
  int rows;   // R of the layout
  int lanes;  // of a vector register
  int tile;   // tokens per register tile
  /// D of row blocks [block, block_end), kMaxTaskBlocks at most, and tokens [m, m_end), of AMX task_tokens at most; m is a multiple of task.tile.
  void (*linear)(const DotTask& task, std::int64_t block, std::int64_t block_end, std::int64_t m, std::int64_t m_end);
  /// Row blocks of one task: as many as fit in half of a core's L2 together, so that they stay there while the tokens are multiplied.
  std::int64_t task_bytes = 512 << 10;
  /// Tokens of one task: enough to amortise reading the row blocks from memory.
  std::int64_t task_tokens = 192;
};

#if defined(__x86_64__)
extern const DotIsa kAmxInt8;
extern const DotIsa kAvx512VnniFixed, kAvx512VnniInt8, kAvx512Fixed, kAvx512Int8;
extern const DotIsa kAvx2VnniFixed, kAvx2VnniInt8, kAvx2Fixed, kAvx2Int8;
#elif defined(__aarch64__)
extern const DotIsa kI8mmFixed, kI8mmInt8, kDotprodFixed, kDotprodInt8;
#endif
extern const DotIsa kBaselineFixed, kBaselineInt8;

}  // namespace nibble::cpu
