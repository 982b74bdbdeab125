// The rows of sm_90's wgmma families. A family is a row without a tile and a list of tiles; what follows from the tile is filled in here.
#pragma once

#include <span>
#include <vector>

#include "kernels/cuda/tasks/gemm_schedule.hpp"
#include "kernels/kernel.hpp"

namespace nibble::cuda {

/// The summaries of a family's rows by their tile.split.
struct Summaries {
  std::string_view whole, split, stream_k;
};

/// The variant of a row, which names its split: "wgmma", "wgmma2", "wgmma4" or "streamk".
constexpr std::string_view wgmma_variant(int split) {
  return split == kStreamK ? "streamk" : split == 1 ? "wgmma" : split == 2 ? "wgmma2" : "wgmma4";
}

/// Appends a family's rows. Kernel::least_m of a linear layer's tile: more than half of it is full, unless there is no smaller tile. Only
/// integer sums have the same bits wherever stream-K divides them.
inline void append(std::vector<Kernel>& rows, Kernel family, std::span<const Tile> tiles, const Summaries& summaries) {
  for (const Tile& tile : tiles) {
    const bool stream_k = tile.split == kStreamK;
    family.tile = tile;
    family.variant = wgmma_variant(tile.split);
    family.summary = stream_k ? summaries.stream_k : tile.split == 1 ? summaries.whole : summaries.split;
    family.least_m = family.op == Op::linear && tile.m > 16 ? tile.m / 2 + 1 : 1;
    family.batch_invariant = !stream_k || family.sums == Sums::integers;
    rows.push_back(family);
  }
}

}  // namespace nibble::cuda
