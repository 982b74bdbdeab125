// The generic CPU algorithm over the tile layouts (layouts/tile.hpp), compiled once per instruction set.
//
// One task is a block of R output channels × up to kTileM·kTilesPerBlock tokens:
//
//   for each group of the row block's records                    (scales and zeros become floats once)
//     for each chunk of kChunk input channels
//       unpack  codes → bytes  [kChunk][R]                        in L1
//       decode  bytes → f32    [kChunk][R]                        in L1; the only place that knows what codes mean
//       for each tile of kTileM tokens: acc[kTileM][R] += A'[kTileM] ⊗ panel     registers over the chunk
//   epilogue, row by row
//
// With a single token, codes of 4 and 8 bits skip bytes and panel: unpack, decode and multiply happen in registers.
//
// Weights are read once per block of tokens; a chunk is decoded once and used by every token of the block. Every output is
// accumulated in the order of k alone, so a result does not depend on M, on the tile or on the number of threads.
#pragma once

#include <array>
#include <cstdint>

#include "epilogue/epilogue.hpp"
#include "kernels/kernel.hpp"
#include "layouts/tile.hpp"

namespace nibble::cpu {

/// How the codes of one weight become floats, worked out once per run.
struct Decoder {
  tile::Geometry geometry;
  DType scale_type;
  DType zero_type;
  ZeroKind zero;
  bool integer_codes;  // the value is code − bias; else table[code]
  std::uint8_t flip;   // 0x80 turns the two's complement byte of s8 into code + 128
  float bias;          // of integer codes
  bool has_scale2;
  float scale2;
  bool multiplies_unpacked;      // see multiplies_unpacked(); and no second-level scale
  std::array<float, 256> table;  // values of float codes

  explicit Decoder(const PackedWeightData& packed, int rows);
};

/// Schemes whose codes can be multiplied straight from registers when there is one token.
inline bool multiplies_unpacked(const WeightScheme& scheme) {
  const bool integer_zero = scheme.zero == ZeroKind::none || scheme.zero == ZeroKind::integer;
  const int width = bits(scheme.codes);
  return integer_zero && info(scheme.codes).kind != DTypeKind::floating && (width == 4 || width == 8);
}

struct LinearTask {
  const Decoder* decoder;
  const std::byte* weight;
  const float* activations;  // prepared for tile.m (prepare.hpp)
  std::int64_t m;
  const EpilogueSpec* epilogue;
  const EpilogueArgs* operands;
  const TensorView* d;
};

/// What one instruction set offers.
struct TileIsa {
  int rows;    // R of the layout
  int tile_m;  // tokens per register tile
  int tokens;  // tokens per task
  /// D[m_begin … m_begin+tokens) of row block `block`.
  void (*linear)(const LinearTask& task, std::int64_t block, std::int64_t m_begin);
  /// W of `count` input channels of a record from its k-th on: panel[count][R].
  void (*decode)(const Decoder& decoder, const std::byte* record, std::int64_t k, int count, float* panel);
};

/// Input channels decoded at a time: 64 × 32 floats are 8 KiB, so that panel and accumulators share a 32 KiB L1.
constexpr int kChunk = 64;

extern const TileIsa kBaselineTile;
#if defined(__x86_64__)
extern const TileIsa kAvx2Tile;
extern const TileIsa kAvx512Tile;
#endif

}  // namespace nibble::cpu
