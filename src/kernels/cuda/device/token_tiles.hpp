// Activations as the wgmma kernels read them: a box for each token tile.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/tensor_map.hpp"

namespace nibble::cuda {

/// Describes [m,k] as tiles of `tokens` rows, and the last tile by a box of its own, of the tokens that there are. TMA would fill rows
/// beyond M with zeros, but a tile with 32 or more of them was measured to take up to twice as long as a full one. Of experts, whose tiles
/// begin at any row, that box has `part` rows instead, for tiles that have fewer than `tokens`.
template <class Params>
bool describe_token_tiles(Params& p, DType type, const void* x, std::int64_t pitch, int m, std::int64_t k, int tokens,
                          int part = 0) {
  p.last_tokens = part != 0 ? part : (m - 1) % tokens + 1;
  return describe_rows(p.x, type, x, pitch, m, k, tokens) && describe_rows(p.last_x, type, x, pitch, m, k, p.last_tokens);
}

}  // namespace nibble::cuda
