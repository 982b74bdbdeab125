// Rows of two experts in turn, for tests of kernels that take tiles of rows of experts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cuda/tasks/expert_tiles.hpp"

namespace nibble::emulator {

/// m rows in tiles of up to `tokens`, of experts 2 and 1 by turns; expert 0 has none. Behind the tiles stand some that kernels must not read.
struct TwoExperts {
  std::vector<cuda::ExpertTile> tiles;
  cuda::TileCount count;

  TwoExperts(int m, int tokens) {
    for (int first = 0, expert = 2, rows = 1; first < m;
         first += tiles.back().rows, expert = 3 - expert, rows = rows % tokens + 7)
      tiles.push_back({expert, first, std::min({rows, tokens, m - first})});
    count.tiles = static_cast<int>(tiles.size());
    tiles.resize(tiles.size() + 3, {99, 1 << 20, 16});
  }
  /// As kernels take them; weights of experts are `pitch` bytes apart.
  cuda::ExpertTiles of(std::size_t pitch, const float* scale2) {
    return {.tiles = tiles.data(),
            .count = &count,
            .most = static_cast<int>(tiles.size()),
            .weight_pitch = static_cast<std::int64_t>(pitch),
            .scale2 = scale2};
  }
};

}  // namespace nibble::emulator
