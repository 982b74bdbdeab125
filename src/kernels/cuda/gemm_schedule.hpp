// Which rows and tokens a cluster multiplies, and when: plain arithmetic, the same on the host, where it is tested, and in kernels.
//
//   D is cut into row blocks of 64 and token tiles; a unit is one of each. Units are dealt as evenly as units can be,
//
//     unit = token tile · row blocks + row block        cluster c: a run of U/C units, rounded up or down
//
//   and a cluster takes its own in passes of up to `most` neighbouring row blocks of one token tile: 57344 rows on 132 CTAs are 6 or 7
//   blocks each, taken as 4 and 3 (97 % of the time all are busy), where tiles of 256 rows would take two rounds (85 %).
//
// Every element's sum is one CTA's work from its first channel to its last, or its cluster's: dealing does not show in the bits.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace nibble::cuda {

/// Multiplying warpgroups of a CTA, each with a row block: four, or as many as have registers for their sums. Products of codes need
/// registers twice: for the integers of a fold, and for the sums of folds.
NIBBLE_HOST_DEVICE constexpr int gemm_groups(int tokens, bool codes = false) {
  if (codes) return tokens <= 32 ? 4 : tokens == 64 ? 3 : 2;
  return tokens <= 64 ? 4 : tokens == 128 ? 3 : 2;
}

/// The same of codes on both sides, whose operands are in shared memory. Sums of groups need registers more than once.
NIBBLE_HOST_DEVICE constexpr int scaled_groups(int tokens, bool grouped = false) {
  if (grouped) return tokens >= 64 ? 2 : 4;
  return tokens == 256 ? 2 : tokens == 128 ? 3 : 4;
}
/// Tokens are taken in bands of so many, where there are two bands or more (Deal::banded): passes side by side then share what they read.
/// With K = 8192, 8 or 16 MiB of activations stay in L2 while the weights go by once for each band.
constexpr int kBandTokens = 1024;

NIBBLE_HOST_DEVICE constexpr bool takes_bands(int token_tiles, int tokens) { return token_tiles * tokens >= 2 * kBandTokens; }

struct Pass {
  int token_tile = 0, block = 0, blocks = 0;  // row blocks [block, block + blocks)
};

struct Deal {
  int row_blocks = 1, token_tiles = 1;
  int clusters = 1;
  int most = 4;  // row blocks of a pass

  NIBBLE_HOST_DEVICE constexpr int units() const { return row_blocks * token_tiles; }
  /// The first units % clusters clusters have one more.
  NIBBLE_HOST_DEVICE constexpr int first_unit(int cluster) const {
    const int share = units() / clusters, more = units() % clusters;
    return cluster * share + (cluster < more ? cluster : more);
  }
  /// The pass that starts at `unit` of a cluster that ends before `end`: as many blocks as its siblings in this token tile.
  NIBBLE_HOST_DEVICE constexpr Pass pass(int unit, int end) const {
    const int tile = unit / row_blocks, block = unit % row_blocks;
    const int left = end - unit < row_blocks - block ? end - unit : row_blocks - block;
    const int passes = (left + most - 1) / most;
    return {tile, block, (left + passes - 1) / passes};
  }
  /// Not dealt but numbered, so that passes that run together share what they read: bands of up to `high` token tiles, row tile by row
  /// tile.
  NIBBLE_HOST_DEVICE constexpr int row_tiles() const { return (row_blocks + most - 1) / most; }
  NIBBLE_HOST_DEVICE constexpr Pass banded(int index, int high) const {
    const int band = index / (high * row_tiles()), first = band * high, rest = index - first * row_tiles();
    const int height = token_tiles - first < high ? token_tiles - first : high;
    const int block = rest / height * most;
    return {first + rest % height, block, row_blocks - block < most ? row_blocks - block : most};
  }
};

/// How `ctas` CTAs, of which `split` share a pass along K, take what `deal` has, in tiles of `tokens` tokens. Sets its clusters; the token
/// tiles of a band where passes are numbered, 0 where units are dealt.
constexpr int deal_out(Deal& deal, int tokens, int split, int ctas) {
  const int passes = deal.row_tiles() * deal.token_tiles;
  const bool bands = takes_bands(deal.token_tiles, tokens);
  const int work = bands ? passes : deal.units();
  deal.clusters = split > 1 ? passes : work < ctas ? work : ctas;  // those that share take a pass each
  return split > 1 ? 1 : bands ? kBandTokens / tokens : 0;
}

}  // namespace nibble::cuda
