// The sums of CTAs that divide K (split_k.cuh), on the emulated GPU, which starts CTAs in any order.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <type_traits>
#include <vector>

#include "kernels/cuda/device/split_k.cuh"

namespace nibble::cuda {
namespace {

alignas(1024) std::uint8_t shared[emulator::kSharedBytes];

constexpr int kThreads = 64, kTiles = 3, kRows = 32, kPitch = kRows + 4, kTokens = 8, kExisting = 6;

template <class Sum>
void expect_sums_in_order(int ranks) {
  std::mt19937 random(static_cast<unsigned>(ranks));
  // Floats of many magnitudes: another order is another sum.
  std::vector<Sum> of_ranks(static_cast<std::size_t>(kTiles * ranks * kExisting * kRows));
  for (Sum& v : of_ranks) {
    if constexpr (std::is_same_v<Sum, float>)
      v = static_cast<float>(static_cast<int>(random() % 2001) - 1000) * static_cast<float>(1 << random() % 24) / 1000;
    else
      v = static_cast<Sum>(random());
  }
  const auto at = [&](int tile, int rank, int token, int row) {
    return of_ranks[static_cast<std::size_t>(((tile * ranks + rank) * kExisting + token) * kRows + row)];
  };
  std::vector<Sum> d, expected;
  for (int tile = 0; tile < kTiles; ++tile)
    for (int token = 0; token < kExisting; ++token)
      for (int row = 0; row < kRows; ++row) {
        Sum sum = 0;
        for (int rank = 0; rank < ranks; ++rank)
          if constexpr (std::is_same_v<Sum, float>)
            sum += at(tile, rank, token, row);
          else
            sum = static_cast<Sum>(static_cast<std::uint32_t>(sum) + static_cast<std::uint32_t>(at(tile, rank, token, row)));
        expected.push_back(sum);
      }

  emulator::use_shared_memory(shared);
  const std::size_t bytes = split_k_bytes(ranks, kTiles, kRows, kTokens);
  std::vector<std::uint64_t> memory(bytes / 8 + 64, 0x7fc123457fc12345);  // NaNs, and no counters
  const SplitK split = split_k(reinterpret_cast<std::uint8_t*>(memory.data()) + bytes, ranks, kTiles, kRows, kTokens);
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    emulator::use_seed(seed);
    for (int run = 0; run < 2; ++run) {  // as a graph runs: with the same ticket
      std::multiset<int> finished;
      d.assign(expected.size(), Sum{-1});
      emulator::run(
          {kTiles * ranks}, {kThreads},
          [&] {
            const int tile = static_cast<int>(blockIdx.x) / ranks, rank = static_cast<int>(blockIdx.x) % ranks;
            Sum* const all = reinterpret_cast<Sum*>(shared);
            for (int i = static_cast<int>(threadIdx.x); i < kExisting * kRows; i += kThreads)
              all[i / kRows * kPitch + i % kRows] = at(tile, rank, i / kRows, i % kRows);
            __syncthreads();
            if (!add_ranks<kThreads, kRows, kPitch, kTokens>(split, tile, rank, kExisting, all)) return;
            if (threadIdx.x == 0) finished.insert(tile);
            for (int i = static_cast<int>(threadIdx.x); i < kExisting * kRows; i += kThreads)
              d[static_cast<std::size_t>(tile * kExisting * kRows + i)] = all[i / kRows * kPitch + i % kRows];
          },
          1, kTokens * kPitch * 4);
      ASSERT_EQ(finished, (std::multiset<int>{0, 1, 2})) << "seed " << seed << ", run " << run;
      ASSERT_EQ(std::memcmp(d.data(), expected.data(), d.size() * sizeof(Sum)), 0) << "seed " << seed << ", run " << run;
      for (int tile = 0; tile < kTiles; ++tile) ASSERT_EQ(split.arrivals[tile], 0u) << "not set back";
    }
  }
  for (std::size_t i = bytes / 8; i < memory.size(); ++i) ASSERT_EQ(memory[i], 0x7fc123457fc12345) << "written past the end";
}

TEST(EmulatedSplitK, AddsFloatsInTheOrderOfTheRanks) {
  for (const int ranks : {2, 3, 4, 5, 9}) expect_sums_in_order<float>(ranks);
}
TEST(EmulatedSplitK, AddsIntegersModulo32Bits) {
  for (const int ranks : {2, 7}) expect_sums_in_order<std::int32_t>(ranks);
}

TEST(SplitK, RanksHaveAllRecordsOnce) {
  for (int records = 1; records < 60; ++records)
    for (const int unit : {1, 8})
      for (int ranks = 1; ranks <= (records + unit - 1) / unit; ++ranks) {
        int next = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const RecordRun run = records_of(rank, ranks, records, unit);
          ASSERT_EQ(run.first, next);
          ASSERT_GT(run.count, 0);
          next += run.count;
        }
        ASSERT_EQ(next, records);
      }
}

}  // namespace
}  // namespace nibble::cuda
