// How passes are dealt to clusters: every unit once, evenly, and no pass across two token tiles.
#include "kernels/cuda/gemm_schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace nibble::cuda {
namespace {

void expect_dealt(const Deal& deal) {
  std::vector<int> taken(static_cast<std::size_t>(deal.units()));
  int fewest = deal.units(), most = 0;
  for (int cluster = 0; cluster < deal.clusters; ++cluster) {
    const int begin = deal.first_unit(cluster), end = deal.first_unit(cluster + 1);
    fewest = std::min(fewest, end - begin);
    most = std::max(most, end - begin);
    for (int unit = begin; unit < end;) {
      const Pass pass = deal.pass(unit, end);
      ASSERT_GE(pass.blocks, 1);
      ASSERT_LE(pass.blocks, deal.most);
      ASSERT_LE(pass.block + pass.blocks, deal.row_blocks);
      for (int b = 0; b < pass.blocks; ++b) {
        const int at = pass.token_tile * deal.row_blocks + pass.block + b;
        ASSERT_EQ(at, unit + b);
        ++taken[static_cast<std::size_t>(at)];
      }
      unit += pass.blocks;
    }
  }
  for (int count : taken) ASSERT_EQ(count, 1);
  EXPECT_LE(most - fewest, 1) << deal.row_blocks << " × " << deal.token_tiles << " to " << deal.clusters;
}

TEST(GemmSchedule, DealsEveryUnitOnceAndEvenly) {
  for (int row_blocks : {1, 2, 3, 7, 64, 96, 160, 896})
    for (int token_tiles : {1, 2, 5, 32})
      for (int most : {1, 2, 3, 4})
        for (int clusters : {1, 2, 66, 132})
          if (clusters <= row_blocks * token_tiles)
            expect_dealt({.row_blocks = row_blocks, .token_tiles = token_tiles, .clusters = clusters, .most = most});
}

TEST(GemmSchedule, SiblingPassesAreOfOneSize) {
  const Deal deal{.row_blocks = 896, .token_tiles = 1, .clusters = 128, .most = 4};
  const Pass first = deal.pass(deal.first_unit(1), deal.first_unit(2));
  EXPECT_EQ(first.blocks, 4);  // of 7: 4 and 3
  EXPECT_EQ(deal.pass(deal.first_unit(1) + 4, deal.first_unit(2)).blocks, 3);
}

TEST(GemmSchedule, NumbersEveryPass) {
  const Deal deal{.row_blocks = 11, .token_tiles = 3, .most = 4};
  ASSERT_EQ(deal.row_tiles(), 3);
  std::vector<int> taken(33);
  for (int index = 0; index < deal.row_tiles() * deal.token_tiles; ++index) {
    const Pass pass = deal.banded(index, 1);
    for (int b = 0; b < pass.blocks; ++b) ++taken[static_cast<std::size_t>(pass.token_tile * 11 + pass.block + b)];
  }
  for (int count : taken) EXPECT_EQ(count, 1);
}

TEST(GemmSchedule, DealsUnitsBandsOrAPassEach) {
  Deal few{.row_blocks = 128, .token_tiles = 8, .most = 3}, many{.row_blocks = 128, .token_tiles = 16, .most = 3},
      small{.row_blocks = 7};
  EXPECT_EQ(deal_out(few, 128, 1, 132), 0);
  EXPECT_EQ(few.clusters, 132);
  EXPECT_EQ(deal_out(small, 128, 1, 132), 0);
  EXPECT_EQ(small.clusters, 7);
  EXPECT_EQ(deal_out(many, 128, 1, 132), 8);  // 2048 tokens are two bands
  EXPECT_EQ(many.clusters, 132);
  EXPECT_EQ(deal_out(few, 128, 2, 132), 1);
  EXPECT_EQ(few.clusters, 43 * 8);
}

TEST(GemmSchedule, BandsHoldEveryPass) {
  for (int token_tiles : {1, 2, 3, 8, 13})
    for (int high : {1, 4, 8}) {
      const Deal deal{.row_blocks = 11, .token_tiles = token_tiles, .most = 4};
      std::vector<int> taken(static_cast<std::size_t>(11 * token_tiles));
      for (int index = 0; index < deal.row_tiles() * deal.token_tiles; ++index) {
        const Pass pass = deal.banded(index, high);
        EXPECT_EQ(pass.token_tile / high, index / (high * deal.row_tiles()));
        for (int b = 0; b < pass.blocks; ++b) ++taken[static_cast<std::size_t>(pass.token_tile * 11 + pass.block + b)];
      }
      for (int count : taken) EXPECT_EQ(count, 1);
    }
}

}  // namespace
}  // namespace nibble::cuda
