// Sorting up to 32 pairs of tokens and experts by expert: one warp, a lane a pair, which counts the pairs that go before its own. Every lane
// of the warp calls each function. The loops are short and not unrolled: code runs once, so fetching it takes longer than running it.
#pragma once

#include <cstdint>

#include "kernels/cuda/tasks/experts_task.hpp"

namespace nibble::cuda {

constexpr unsigned kWholeWarp = ~0u;  // the lanes of it

/// The expert that `ids` has `at` elements behind the first one; −1: none.
__device__ inline int expert_at(const SortTask& task, std::int64_t at) {
  const int id = __ldcg(task.ids + at);
  return id >= 0 && id < task.experts ? id : -1;
}
__device__ inline int expert_of_pair(const SortTask& task, int pair) {
  return expert_at(task, pair / task.top_k * task.token_stride + pair % task.top_k * task.choice_stride);
}

/// What a lane knows of its pair.
struct SortedPair {
  int expert;       // −1: none
  int row;          // where it goes
  int rank, count;  // among the pairs of its expert, and how many these are
  int all;          // pairs that have an expert
};
/// Bit by bit from the highest on: the pairs that had equal bits so far and have a 0 where this one has a 1 go before it.
__device__ inline SortedPair sort_few(int expert) {
  const unsigned before = (1u << threadIdx.x % 32) - 1, valid = __ballot_sync(kWholeWarp, expert >= 0);
  unsigned equal = valid;
  int less = 0;
#pragma unroll 1
  for (int bit = kMostExperts / 2; bit != 0; bit /= 2) {
    const bool one = (expert & bit) != 0;
    const unsigned ones = __ballot_sync(kWholeWarp, one);
    if (one) less += __popc(equal & ~ones);
    equal &= one ? ones : ~ones;
  }
  const int rank = __popc(equal & before);
  return {expert, less + rank, rank, __popc(equal), __popc(valid)};
}

/// Calls store(number, tile) for the tiles, of up to `rows` rows, of the expert whose first pair is the lane's. Returns how many tiles there
/// are in all.
template <class Store>
__device__ int for_each_tile(const SortedPair& own, int rows, Store store) {
  const bool heads = own.expert >= 0 && own.rank == 0;
  const int tiles = heads ? (own.count + rows - 1) / rows : 0;
  int first = 0, total = 0;
#pragma unroll 1
  for (unsigned left = __ballot_sync(kWholeWarp, heads); left != 0; left &= left - 1) {
    const int j = __ffs(static_cast<int>(left)) - 1;
    const int others = __shfl_sync(kWholeWarp, tiles, j), other = __shfl_sync(kWholeWarp, own.expert, j);
    total += others;
    if (other < own.expert) first += others;
  }
  for (int t = 0; t < tiles; ++t) store(first + t, ExpertTile{own.expert, own.row + t * rows, min(rows, own.count - t * rows)});
  return total;
}

/// Writes all that the task asks for.
__device__ inline void write_sorted(const SortTask& task, const SortedPair& own) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (own.expert >= 0) {
    task.pair_of[own.row] = lane;
    task.expert_of[own.row] = own.expert;
  }
  if (lane < task.rows) task.row_of[lane] = own.expert >= 0 ? own.row : -1;
  if (lane >= own.all && lane < task.rows) task.pair_of[lane] = 0, task.expert_of[lane] = -1;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const SortTask::Tiles& product = task.products[i];
    if (product.rows == 0) continue;
    const int total = for_each_tile(own, product.rows, [&](int t, const ExpertTile& tile) { product.tiles[t] = tile; });
    if (lane == 0) *product.count = {total, 0};
  }
}

}  // namespace nibble::cuda
