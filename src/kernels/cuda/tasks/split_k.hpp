// K of a tile divided among CTAs that are no cluster, in plain numbers; device/split_k.cuh adds their sums.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/host_device.hpp"

namespace nibble::cuda {

/// A part of K: so many records from `first` on.
struct RecordRun {
  int first, count;
};
/// The records of one of the CTAs, rank r of S: [r·R/S, (r+1)·R/S), in units of `unit` records, which stay together. The last rank has the most.
NIBBLE_HOST_DEVICE constexpr RecordRun records_of(int rank, int ranks, int records, int unit = 1) {
  const int units = (records + unit - 1) / unit;
  const int first = rank * units / ranks * unit, end = (rank + 1) * units / ranks * unit;
  return {first, (end < records ? end : records) - first};
}

constexpr int kMostSplitRanks = 255;  // a byte counts them

/// Bytes of memory in which the sums of `tiles` tiles of rows × tokens meet.
constexpr std::size_t split_k_sum_bytes(int ranks, std::int64_t tiles, int rows, int tokens) {
  const auto bytes = static_cast<std::size_t>(tiles * ranks) * static_cast<std::size_t>(4 * rows * tokens);
  return (bytes + 255) / 256 * 256;
}
constexpr std::size_t split_k_bytes(int ranks, std::int64_t tiles, int rows, int tokens) {
  const auto counters = static_cast<std::size_t>(tiles) * sizeof(std::uint64_t);
  return ranks == 1 ? 0 : split_k_sum_bytes(ranks, tiles, rows, tokens) + (counters + 255) / 256 * 256;
}

/// The most tokens of a launch, a multiple of 64: as many as have sums of 16 MiB, which stay in L2. More take several launches.
constexpr int split_k_tokens(std::int64_t n, int ranks) {
  if (ranks == 1) return std::numeric_limits<int>::max();
  constexpr std::int64_t kBytes = 16 << 20, kTokens = 64;
  return static_cast<int>(std::max(kBytes / (4 * ranks * n) / kTokens, std::int64_t{1}) * kTokens);
}

/// What adding the sums takes, where an SM has `rounds` CTAs one after the other: each stores a tile, an SM so many bytes a microsecond; at
/// the end of the last tile the stores, the count and the loads are latencies of L2 one after the other, and one SM loads the tiles of all ranks.
/// Estimates.
constexpr double add_ranks_us(int ranks, std::int64_t rounds, int rows, int tokens) {
  constexpr double kLatenciesUs = 1.5, kBytesPerUs = 1e5;
  return ranks == 1 ? 0.0 : kLatenciesUs + 4.0 * rows * tokens * static_cast<double>(rounds + ranks) / kBytesPerUs;
}

}  // namespace nibble::cuda
