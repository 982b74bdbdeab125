// Sorting up to 32 pairs of tokens and experts by expert: one warp, a lane a pair, which counts the pairs that go before its own. Every lane
// of the warp calls each function.
#pragma once

#include <cstdint>

#include "kernels/cuda/tasks/experts_task.hpp"

namespace nibble::cuda {

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
__device__ inline SortedPair sort_few(int expert) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  SortedPair own{expert, 0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int other = __shfl_sync(0xffffffffu, expert, j);
    if (other < 0) continue;
    ++own.all;
    own.row += other < expert || (other == expert && j < lane);
    own.rank += other == expert && j < lane;
    own.count += other == expert;
  }
  return own;
}

/// Calls store(number, tile) for the tiles, of up to `rows` rows, of the expert whose first pair is the lane's. Returns how many tiles there
/// are in all.
template <class Store>
__device__ int for_each_tile(const SortedPair& own, int rows, Store store) {
  const int tiles = own.expert >= 0 && own.rank == 0 ? (own.count + rows - 1) / rows : 0;
  int first = 0, total = 0;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int others = __shfl_sync(0xffffffffu, tiles, j), other = __shfl_sync(0xffffffffu, own.expert, j);
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
    if (lane == 0) *product.count = total;
  }
}

}  // namespace nibble::cuda
