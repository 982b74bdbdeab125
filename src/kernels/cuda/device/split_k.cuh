// The sums of CTAs that divide K of a tile among them, added through device memory (split_k.hpp).
//
//   rank 0 ── sums ──┐                 each stores its sums and counts itself as arrived
//   rank 1 ── sums ──┼──▶ memory       all but the last one to arrive are done: no CTA waits for another, in whatever order they start
//   rank 2 ── sums ──┘       │
//                            └──▶ the last one to arrive adds the sums of ranks 0, 1, 2: the same order in every run, the same bits
#pragma once

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/split_k.hpp"

namespace nibble::cuda {

/// Counts a rank as arrived at a tile's counter, which was `expected` a moment before; returns whether it is the last, and then sets the
/// counter back.
__device__ inline bool arrives_last(const SplitK& split, std::uint64_t* arrivals, std::uint64_t expected) {
  for (;;) {
    const bool first = (expected ^ split.ticket) > 0xff;  // not of this launch
    const std::uint64_t next = (first ? split.ticket : expected) + 1;
    const std::uint64_t found = ptx::compare_and_swap(arrivals, expected, next);
    if (found != expected) {
      expected = found;
      continue;
    }
    const bool last = next == split.ticket + static_cast<std::uint64_t>(split.ranks);
    if (last) *arrivals = 0;
    return last;
  }
}

/// Exchanges the sums of a tile: `all`, in shared memory, written before a barrier, four bytes each, kPitch of them a token, of which
/// kRows are sums and the others free. Of kTokens tokens only the first `tokens` exist. True for one rank, whose `all` now has the sums over
/// all of K, visible to all its threads; the others are done. All kThreads threads of the CTA call this.
template <int kThreads, int kRows, int kPitch, int kTokens, class Sum>
__device__ bool add_ranks(const SplitK& split, int tile, int rank, int tokens, Sum* all) {
  static_assert(sizeof(Sum) == 4 && kRows % 4 == 0 && kPitch % 4 == 0 && kPitch > kRows);
  constexpr int kVectors = kRows / 4;                    // of a token
  constexpr int kRank = kTokens * kVectors, kBatch = 4;  // vectors of a rank; ranks loaded at a time, to hide the latency of L2
  const int thread = static_cast<int>(threadIdx.x);
  uint4* const memory = reinterpret_cast<uint4*>(split.sums) + std::int64_t{tile} * split.ranks * kRank;
  std::uint64_t* const arrivals = split.arrivals + tile;
  const std::uint64_t expected = thread == 0 ? __ldcg(arrivals) : 0;  // early: it arrives while sums are stored
  const auto own = [&](int i) { return reinterpret_cast<uint4*>(all + i / kVectors * kPitch + i % kVectors * 4); };
#pragma unroll 1
  for (int i = thread; i < tokens * kVectors; i += kThreads) memory[rank * kRank + i] = *own(i);
  __syncthreads();

  auto* const last = reinterpret_cast<volatile int*>(all + kRows);  // free, and in no thread's vectors
  if (thread == 0) *last = static_cast<int>(arrives_last(split, arrivals, expected));
  __syncthreads();
  if (*last == 0) return false;
#pragma unroll 1
  for (int i = thread; i < tokens * kVectors; i += kThreads) {
    Sum sum[4] = {};
#pragma unroll 1
    for (int first = 0; first < split.ranks; first += kBatch) {
      uint4 more[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (first + j < split.ranks) more[j] = __ldcg(memory + (first + j) * kRank + i);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j >= split.ranks) continue;
        const Sum* const v = reinterpret_cast<const Sum*>(&more[j]);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] += v[k];
      }
    }
    *own(i) = *reinterpret_cast<const uint4*>(sum);
  }
  __syncthreads();
  return true;
}

}  // namespace nibble::cuda
