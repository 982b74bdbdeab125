// W of the tile layouts (layouts/tile.hpp) as f32, f16 or bf16, for every scheme.
//
// D is written a tile at a time, which is decoded into L1 in the order and the type of D and then copied, whole lines at a time:
//
//   D as [N,K]: R rows × 128 channels       octets → a byte per code, row by row → whole vectors of a row, times its scale
//   D as [K,N]: 32 channels × 512 bytes     octets → whole vectors of a channel, as in the panels of float_tile.hpp
//
// The copy knows the edges of D and act-order. Of a D that caches do not hold, whole lines bypass them: else every line would be read
// before it is written.
#pragma once

#include <cstdint>

#include "kernels/cpu/tiles/decoder.hpp"

namespace nibble::cpu {

struct DequantizeTask {
  const Decoder* decoder;
  const std::byte* weight;
  const std::int32_t* perm;  // channel k is column (or row) perm[k] of D; null: k
  DType type;                // of D
  std::byte* d;
  std::int64_t stride;  // bytes from a row of D to the next
  bool bypass;          // D is larger than caches
};

/// The rows n and channels k of W.
struct DequantizeRange {
  std::int64_t block, block_end;  // n, in row blocks
  std::int64_t k, k_end;          // from a multiple of 8 channels of a group
};

/// The loops of one instruction set.
struct DequantizeIsa {
  int rows;                                                                     // R of the layout
  int lanes;                                                                    // of a vector register
  void (*rows_of_n)(const DequantizeTask& task, const DequantizeRange& range);  // D is [N,K]
  void (*rows_of_k)(const DequantizeTask& task, const DequantizeRange& range);  // D is [K,N]
};

constexpr int kTileChannels = 128;  // of a tile of [N,K]
constexpr int kRowBytes = 512;      // of a row of a tile of [K,N]

extern const DequantizeIsa kBaselineDequantize;
#if defined(__x86_64__)
extern const DequantizeIsa kAvx2Dequantize, kAvx512Dequantize;
#endif

}  // namespace nibble::cpu
