// The distribution of passes to CTAs: every unit and every record once, evenly, and no pass across two token tiles.
#include "kernels/cuda/tasks/gemm_schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>
#include <vector>

namespace nibble::cuda {
namespace {

constexpr int kTokens = 128;

Deal deal_of(int row_blocks, int token_tiles, int records, int most, int split, int ctas, int tokens = kTokens) {
  Deal deal{.row_blocks = row_blocks, .token_tiles = token_tiles, .records = records, .most = most, .split = split};
  deal_out(deal, tokens, ctas);
  return deal;
}

/// Every pass of a CTA, as kernels take them.
std::vector<Pass> passes_of(const Deal& deal, int cluster, int rank) {
  std::vector<Pass> passes;
  int at = deal.start(cluster);
  for (Pass pass; deal.next(cluster, rank, at, pass);) passes.push_back(pass);
  return passes;
}

/// Every record of every row block and token tile belongs to one CTA.
void expect_covered(const Deal& deal) {
  std::vector<int> taken(static_cast<std::size_t>(deal.units() * deal.records));
  for (int cluster = 0; cluster < deal.clusters; ++cluster)
    for (int rank = 0; rank < std::max(1, deal.split); ++rank)
      for (const Pass& pass : passes_of(deal, cluster, rank)) {
        ASSERT_GE(pass.blocks, 1);
        ASSERT_LE(pass.blocks, deal.most);
        ASSERT_LE(pass.block + pass.blocks, deal.row_blocks);
        ASSERT_LT(pass.token_tile, deal.token_tiles);
        ASSERT_LT(pass.first, pass.end);
        ASSERT_LE(pass.end, deal.records);
        for (int b = 0; b < pass.blocks; ++b)
          for (int r = pass.first; r < pass.end; ++r)
            ++taken[static_cast<std::size_t>(((pass.token_tile * deal.row_blocks) + pass.block + b) * deal.records + r)];
      }
  for (int count : taken)
    ASSERT_EQ(count, 1) << deal.row_blocks << " × " << deal.token_tiles << " × " << deal.records << " split " << deal.split;
}

TEST(GemmSchedule, DealsEveryRecordOnce) {
  for (int row_blocks : {1, 2, 3, 7, 64, 96, 160, 896})
    for (int token_tiles : {1, 2, 5, 19})
      for (int most : {1, 2, 3, 4})
        for (int split : {kStreamK, 1, 2, 4})
          for (int ctas : {1, 66, 132})
            for (int records : {1, 9, 32})
              if (records >= split) expect_covered(deal_of(row_blocks, token_tiles, records, most, split, ctas));
}

TEST(GemmSchedule, UnitsAreDealtEvenly) {
  const Deal deal = deal_of(896, 1, 8, 4, 1, 132);
  int fewest = 896, most = 0;
  for (int cluster = 0; cluster < deal.clusters; ++cluster) {
    const int units = deal.begin(cluster + 1) - deal.begin(cluster);
    fewest = std::min(fewest, units), most = std::max(most, units);
  }
  EXPECT_EQ(fewest, 6);
  EXPECT_EQ(most, 7);
  const std::vector<Pass> first = passes_of(deal, 0, 0);
  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(first[0].blocks, 4);  // of 7: 4 and 3
  EXPECT_EQ(first[1].blocks, 3);
}

TEST(GemmSchedule, DealsUnitsBandsOrAPassEach) {
  const Deal few = deal_of(128, 8, 64, 3, 1, 132), many = deal_of(128, 16, 64, 3, 1, 132), small = deal_of(7, 1, 64, 4, 1, 132),
             split = deal_of(128, 8, 64, 3, 2, 132);
  EXPECT_EQ(few.band, 0);
  EXPECT_EQ(few.clusters, 132);
  EXPECT_EQ(small.band, 0);
  EXPECT_EQ(small.clusters, 7);
  EXPECT_EQ(many.band, 8);  // 2048 tokens are two bands
  EXPECT_EQ(many.clusters, 132);
  EXPECT_EQ(split.band, 1);
  EXPECT_EQ(split.clusters, 43 * 8);
}

TEST(GemmSchedule, BandsAreNumberedOneAfterTheOther) {
  for (int token_tiles : {16, 19, 24}) {
    const Deal deal = deal_of(11, token_tiles, 4, 4, 1, 132);
    ASSERT_EQ(deal.band, 8);
    std::set<std::pair<int, int>> taken;
    for (int index = 0; index < deal.passes(); ++index) {
      const Pass pass = deal.numbered(index);
      EXPECT_EQ(pass.token_tile / 8, index / (8 * deal.row_tiles));
      EXPECT_TRUE(taken.insert({pass.token_tile, pass.block}).second);
    }
  }
}

/// The invariants of stream_k.cuh: a CTA stores at most one partial sum, of the first pass that it multiplies except for whole passes; the
/// records before a finished part belong to the preceding CTAs, in order; and no CTA waits for a later one.
TEST(GemmSchedule, PartsAreFoundWhereTheyWereLeft) {
  for (int row_blocks : {1, 5, 40, 133, 160, 700})
    for (int token_tiles : {1, 3, 17})
      for (int records : {1, 2, 32, 224}) {
        const Deal deal = deal_of(row_blocks, token_tiles, records, 3, kStreamK, 132);
        struct Left {
          Pass pass;
          bool any = false;
        };
        std::vector<Left> left(static_cast<std::size_t>(deal.clusters));
        int longest = 0, shortest = 1 << 30;
        for (int cta = 0; cta < deal.clusters; ++cta) {
          int all = 0;
          bool line = false;
          for (const Pass& pass : passes_of(deal, cta, 0)) {
            all += pass.records();
            if (pass.end < records) {
              EXPECT_FALSE(line) << "it is the first of the line";
              left[static_cast<std::size_t>(cta)] = {pass, true};
            }
            line = line || pass.records() < records;
            if (pass.end < records || pass.first == 0) continue;
            int missing = pass.first, before = cta;
            while (missing > 0) {
              --before;
              const Left& part = left[static_cast<std::size_t>(before)];
              ASSERT_TRUE(before >= 0 && part.any);
              EXPECT_EQ(part.pass.block, pass.block);
              EXPECT_EQ(part.pass.token_tile, pass.token_tile);
              EXPECT_EQ(part.pass.end, missing);
              missing -= deal.begin(before + 1) - deal.begin(before);
            }
          }
          longest = std::max(longest, all), shortest = std::min(shortest, all);
          EXPECT_LE(all, deal.longest());
          EXPECT_EQ(deal.left_blocks(cta),
                    left[static_cast<std::size_t>(cta)].any ? left[static_cast<std::size_t>(cta)].pass.blocks : 0);
        }
        EXPECT_LE(longest - shortest, 1);
      }
}

TEST(GemmSchedule, DividesAsDivisionDoes) {
  constexpr int kMost = std::numeric_limits<int>::max();
  for (int by : {1, 2, 3, 7, 64, 131, 1000, 65535, 65537, 1 << 30, kMost - 1, kMost}) {
    const Divisor divisor(by);
    for (int n : {0, 1, by - 1, by, 65535, 65536, kMost / by * by - 1, kMost / by * by, kMost - 1, kMost})
      EXPECT_EQ(n / divisor, n / by) << n << " / " << by;
  }
}

}  // namespace
}  // namespace nibble::cuda
