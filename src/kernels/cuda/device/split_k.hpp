// Device memory in which CTAs that divide K of a tile among them, without a cluster, exchange their sums (split_k.cuh).
//
//   sums      [tile][rank][token of the tile][row of the tile]   f32 or s32
//   arrivals  [tile]                                             the ticket, plus how many ranks have stored their sums
//
// The memory is not cleared before a launch. A ticket is unique to a launch, so that old contents do not match it; and the last rank to
// arrive sets the counter to 0, so that the next run of a CUDA graph, which has the same ticket, begins anew.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device/ticket.hpp"
#include "kernels/cuda/tasks/split_k.hpp"

namespace nibble::cuda {

struct SplitK {
  std::byte* sums = nullptr;
  std::uint64_t* arrivals = nullptr;
  std::uint64_t ticket = 0;  // its lowest byte is 0: room to count
  int ranks = 1;             // CTAs that divide K of a tile; 1: it is not divided, and there is no memory
};

/// The memory in the split_k_bytes before `end`, which is aligned to 256.
inline SplitK split_k(void* end, int ranks, std::int64_t tiles, int rows, int tokens) {
  if (ranks == 1) return {};
  auto* const sums = static_cast<std::byte*>(end) - split_k_bytes(ranks, tiles, rows, tokens);
  return {.sums = sums,
          .arrivals = reinterpret_cast<std::uint64_t*>(sums + split_k_sum_bytes(ranks, tiles, rows, tokens)),
          .ticket = next_ticket() & ~std::uint64_t{0xff},
          .ranks = ranks};
}

}  // namespace nibble::cuda
