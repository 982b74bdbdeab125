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

Schedule schedule_of(int row_blocks, int token_tiles, int records, int most, int split, int ctas, int tokens = kTokens) {
  Schedule schedule{.row_blocks = row_blocks, .token_tiles = token_tiles, .records = records, .most = most, .split = split};
  distribute(schedule, tokens, ctas);
  return schedule;
}

/// Every pass of a CTA, as kernels take them.
std::vector<Pass> passes_of(const Schedule& schedule, int cluster, int rank) {
  std::vector<Pass> passes;
  int at = schedule.start(cluster);
  for (Pass pass; schedule.next(cluster, rank, at, pass);) passes.push_back(pass);
  return passes;
}

/// Every record of every row block and token tile belongs to one CTA.
void expect_covered(const Schedule& schedule) {
  std::vector<int> taken(static_cast<std::size_t>(schedule.units() * schedule.records));
  for (int cluster = 0; cluster < schedule.clusters; ++cluster)
    for (int rank = 0; rank < std::max(1, schedule.split); ++rank)
      for (const Pass& pass : passes_of(schedule, cluster, rank)) {
        ASSERT_GE(pass.blocks, 1);
        ASSERT_LE(pass.blocks, schedule.most);
        ASSERT_LE(pass.block + pass.blocks, schedule.row_blocks);
        ASSERT_LT(pass.token_tile, schedule.token_tiles);
        ASSERT_LT(pass.first, pass.end);
        ASSERT_LE(pass.end, schedule.records);
        for (int b = 0; b < pass.blocks; ++b)
          for (int r = pass.first; r < pass.end; ++r)
            ++taken[static_cast<std::size_t>(((pass.token_tile * schedule.row_blocks) + pass.block + b) * schedule.records + r)];
      }
  for (int count : taken)
    ASSERT_EQ(count, 1) << schedule.row_blocks << " × " << schedule.token_tiles << " × " << schedule.records << " split "
                        << schedule.split;
}

TEST(GemmSchedule, CoversEveryRecordOnce) {
  for (int row_blocks : {1, 2, 3, 7, 64, 96, 160, 896})
    for (int token_tiles : {1, 2, 5, 19})
      for (int most : {1, 2, 3, 4})
        for (int split : {kStreamK, 1, 2, 4})
          for (int ctas : {1, 66, 132})
            for (int records : {1, 9, 32})
              if (records >= split) expect_covered(schedule_of(row_blocks, token_tiles, records, most, split, ctas));
}

TEST(GemmSchedule, UnitsAreDistributedEvenly) {
  const Schedule schedule = schedule_of(896, 1, 8, 4, 1, 132);
  int fewest = 896, most = 0;
  for (int cluster = 0; cluster < schedule.clusters; ++cluster) {
    const int units = schedule.begin(cluster + 1) - schedule.begin(cluster);
    fewest = std::min(fewest, units), most = std::max(most, units);
  }
  EXPECT_EQ(fewest, 6);
  EXPECT_EQ(most, 7);
  const std::vector<Pass> first = passes_of(schedule, 0, 0);
  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(first[0].blocks, 4);  // of 7: 4 and 3
  EXPECT_EQ(first[1].blocks, 3);
}

TEST(GemmSchedule, DistributesUnitsBandsOrAPassEach) {
  const Schedule few = schedule_of(128, 8, 64, 3, 1, 132), many = schedule_of(128, 16, 64, 3, 1, 132),
                 small = schedule_of(7, 1, 64, 4, 1, 132), split = schedule_of(128, 8, 64, 3, 2, 132);
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
    const Schedule schedule = schedule_of(11, token_tiles, 4, 4, 1, 132);
    ASSERT_EQ(schedule.band, 8);
    std::set<std::pair<int, int>> taken;
    for (int index = 0; index < schedule.passes(); ++index) {
      const Pass pass = schedule.numbered(index);
      EXPECT_EQ(pass.token_tile / 8, index / (8 * schedule.row_tiles));
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
        const Schedule schedule = schedule_of(row_blocks, token_tiles, records, 3, kStreamK, 132);
        struct Left {
          Pass pass;
          bool any = false;
        };
        std::vector<Left> left(static_cast<std::size_t>(schedule.clusters));
        int longest = 0, shortest = 1 << 30;
        for (int cta = 0; cta < schedule.clusters; ++cta) {
          int all = 0;
          bool line = false;
          for (const Pass& pass : passes_of(schedule, cta, 0)) {
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
              missing -= schedule.begin(before + 1) - schedule.begin(before);
            }
          }
          longest = std::max(longest, all), shortest = std::min(shortest, all);
          EXPECT_LE(all, schedule.longest());
          EXPECT_EQ(schedule.left_blocks(cta),
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
