// Which rows of a grouped product go through which expert, in device memory: a kernel's token tile t is tiles[t].
//
//   rows of A and D, sorted by expert     │ expert 0 │ expert 2                  │ expert 3 │  (expert 1 has none)
//   tiles of up to n rows                 ├─ tile 0 ─┼─ tile 1 ─┼─ tile 2 ─┼ 3 ─┼─ tile 4 ─┤  nothing is padded
#pragma once

#include <cstdint>

namespace nibble::cuda {

/// Rows [first, first + rows) of A and D, which are all of one expert.
struct ExpertTile {
  int expert = 0, first = 0, rows = 0;
};

/// How many tiles there are, and how many passes CTAs have drawn (sm90/gemm/expert_passes.cuh): between kernels none.
struct TileCount {
  int tiles = 0;
  unsigned drawn = 0;
};

struct SortTask;

/// The experts of a product. Expert e's records begin e · weight_pitch bytes behind the first one's. A product has no bias: the last step adds
/// biases (finish.hpp).
struct ExpertTiles {
  const ExpertTile* tiles = nullptr;  // device memory
  TileCount* count = nullptr;         // device memory
  int most = 0;                       // tiles, at most: known to the host
  std::int64_t weight_pitch = 0;
  const std::int32_t* source = nullptr;  // [M], device memory: row r of A is row source[r] / divisor in memory; null: row r
  int divisor = 1;                       // only for Kernel::fetches_rows
  const std::int32_t* row_of =
      nullptr;  // [M], device memory: the inverse of `source`, −1 where no row has that source; null: not known
  const SortTask* sort =
      nullptr;  // host memory: of up to kFewPairs pairs, which the kernel sorts first; only for products that fetch rows themselves
  const float* scale2 = nullptr;            // [E], device memory: what sums of each expert are multiplied by; null: nothing
  const std::int32_t* expert_of = nullptr;  // [M], device memory: of each row of A; −1: none. For the last step
  std::int64_t bias_pitch = 0;              // bytes between biases of experts. For the last step
};

/// Rows of a tile of experts, of sm_80's kernels: those for many rows an expert, and for few.
struct ExpertRows {
  int few, many;
};
constexpr ExpertRows kSm80ExpertRows{.few = 16, .many = 64};

}  // namespace nibble::cuda
