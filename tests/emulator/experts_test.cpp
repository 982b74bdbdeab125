// Sorting rows by expert (experts.cu) on the emulated GPU, as a stable sort in host memory does it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "emulator/gpu.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) int sort_memory[emulator::kSharedBytes / sizeof(int)];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/steps/experts.cu"

namespace nibble::cuda {
namespace {

struct SortCase {
  int tokens, top_k, experts;
  bool transposed = false;  // ids of a choice are side by side
};

class EmulatedSort : public testing::TestWithParam<SortCase> {};

TEST_P(EmulatedSort, IsAStableSort) {
  const SortCase& c = GetParam();
  emulator::use_shared_memory(reinterpret_cast<std::uint8_t*>(sort_memory));
  const int rows = c.tokens * c.top_k;
  std::mt19937 random(static_cast<unsigned>(rows));
  std::vector<std::int32_t> experts_of_pairs, ids(static_cast<std::size_t>(rows));
  for (int pair = 0; pair < rows; ++pair) {
    const int id = static_cast<int>(random() % static_cast<unsigned>(c.experts + 2)) - 1;  // −1 and E are none
    experts_of_pairs.push_back(id >= 0 && id < c.experts ? id : -1);
    const int at = c.transposed ? pair % c.top_k * c.tokens + pair / c.top_k : pair;
    ids[static_cast<std::size_t>(at)] = id;
  }
  const auto room = static_cast<std::size_t>(rows);
  std::vector<std::int32_t> pair_of(room, -7), row_of(room, -7), expert_of(room, -7);
  std::vector<int> run_counts(sort_counts(rows, c.experts), -7);
  std::vector<ExpertTile> tiles[2] = {std::vector<ExpertTile>(room), std::vector<ExpertTile>(room)};
  TileCount counts[2] = {{-7, 7}, {-7, 7}};
  SortTask task{.ids = ids.data(),
                .token_stride = c.transposed ? 1 : c.top_k,
                .choice_stride = c.transposed ? c.tokens : 1,
                .experts = c.experts,
                .rows = rows,
                .top_k = c.top_k,
                .pair_of = pair_of.data(),
                .row_of = row_of.data(),
                .expert_of = expert_of.data(),
                .run_counts = run_counts.data()};
  constexpr int kTileRows[] = {16, 128};
  for (int i = 0; i < 2; ++i) task.products[i] = {kTileRows[i], tiles[i].data(), &counts[i]};
  ASSERT_EQ(sort_rows(task, nullptr), cudaSuccess);

  std::vector<int> sorted;
  for (int pair = 0; pair < rows; ++pair)
    if (experts_of_pairs[static_cast<std::size_t>(pair)] >= 0) sorted.push_back(pair);
  const auto expert = [&](int pair) { return experts_of_pairs[static_cast<std::size_t>(pair)]; };
  std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) { return expert(a) < expert(b); });
  std::vector<std::int32_t> own_rows(room, -1);
  for (std::size_t row = 0; row < room; ++row) {
    const bool exists = row < sorted.size();
    ASSERT_EQ(pair_of[row], exists ? sorted[row] : 0) << row;
    ASSERT_EQ(expert_of[row], exists ? expert(sorted[row]) : -1) << row;
    if (exists) own_rows[static_cast<std::size_t>(sorted[row])] = static_cast<std::int32_t>(row);
  }
  ASSERT_EQ(row_of, own_rows);
  for (int i = 0; i < 2; ++i) {
    std::size_t tile = 0;
    for (int first = 0, end = 0; first < static_cast<int>(sorted.size()); first = end) {
      const int e = expert(sorted[static_cast<std::size_t>(first)]);
      while (end < static_cast<int>(sorted.size()) && expert(sorted[static_cast<std::size_t>(end)]) == e) ++end;
      for (int row = first; row < end; row += kTileRows[i], ++tile) {
        const ExpertTile& found = tiles[i][tile];
        ASSERT_EQ(std::tuple(found.expert, found.first, found.rows), std::tuple(e, row, std::min(kTileRows[i], end - row)))
            << tile;
      }
    }
    ASSERT_EQ(counts[i].tiles, static_cast<int>(tile));
    ASSERT_EQ(counts[i].drawn, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(Experts, EmulatedSort,
                         testing::Values(SortCase{4, 8, 16}, SortCase{5, 7, 3}, SortCase{256, 8, 128},
                                         SortCase{700, 3, 1024, true}, SortCase{2049, 1, 40}, SortCase{1500, 8, 256},
                                         SortCase{9000, 4, 128, true}),
                         [](const auto& info) {
                           const SortCase& c = info.param;
                           return fmt::format("{}x{}_of_{}{}", c.tokens, c.top_k, c.experts, c.transposed ? "_transposed" : "");
                         });

TEST(EmulatedSort, OfManyPairsNeedsRoomForCounts) {
  std::vector<std::int32_t> ids(3000);
  const SortTask task{.ids = ids.data(), .token_stride = 1, .choice_stride = 1, .experts = 4, .rows = 3000};
  EXPECT_EQ(sort_rows(task, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace nibble::cuda
