// Float multiply-adds over the tile layouts (layouts/tile.hpp), for every scheme.
//
// One task is blocks of R output channels × up to kTileM·kTilesPerBlock tokens. Block by block, or, of one tile of tokens where memory is read
// faster so (ahead.hpp), four that take turns chunk by chunk:
//
//   for each chunk of kChunk input channels                      of one group, whose header is read once, or of several short ones
//     decode  codes → f32 panel [kChunk][R]                       in L1; the only place that knows what codes mean
//     for each tile of kTileM tokens
//       sums[kTileM][R] = A'[kTileM] ⊗ panel                      registers over the chunk
//       acc += scale ∘ sums
//   epilogue, row by row
//
// e4m3 and e2m1 are multiplied as the values of their codes, whose sums are scaled; other weights are W in the panel already, and scale is 1.
// Up to kFew tokens multiply such values as they are decoded, without a panel and to the same bits.
// Weights are read once per block of tokens; a chunk is decoded once and used by every token of the block. Every output is
// accumulated in the order of k alone, so a result does not depend on M, on the tile or on the number of threads.
#pragma once

#include <cstdint>

#include "kernels/cpu/tiles/ahead.hpp"
#include "kernels/cpu/tiles/decoder.hpp"
#include "kernels/cpu/tiles/outputs.hpp"
#include "kernels/kernel.hpp"

namespace nibble::cpu {

struct FloatTask {
  const Decoder* decoder;
  const std::byte* weight;
  const float* activations;  // prepared for tile_m (prepare.hpp)
  std::int64_t m;
  Outputs outputs;
};

/// The loops of one instruction set.
struct FloatIsa {
  int rows;    // R of the layout
  int lanes;   // of a vector register
  int tile_m;  // tokens per register tile
  int tokens;  // tokens per task
  int few;     // so many multiply e4m3 and e2m1 without a panel
  /// D[m_begin … m_begin+tokens) of row blocks [block, block_end).
  void (*linear)(const FloatTask& task, std::int64_t block, std::int64_t block_end, std::int64_t m_begin);
  /// W of `count` input channels of a record from its k-th on (a multiple of 8): panel[count][R].
  void (*decode)(const Decoder& decoder, const std::byte* record, std::int64_t k, int count, float* panel);
};

/// Input channels decoded at a time: 64 × 32 floats are 8 KiB, so that panel and accumulators share a 32 KiB L1.
constexpr int kChunk = 64;

extern const FloatIsa kBaselineFloat;
#if defined(__x86_64__)
extern const FloatIsa kAvx2Float, kAvx512Float, kAvx512Bf16Float;
#endif

}  // namespace nibble::cpu
