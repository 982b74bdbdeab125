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
  const std::vector<Pass> seven = passes_of(schedule, 1, 0);
  ASSERT_EQ(seven.size(), 2U);
  EXPECT_EQ(seven[0].blocks, 4);
  EXPECT_EQ(seven[1].blocks, 3);
}

/// 128 row blocks × 3 token tiles are 3 for a CTA. With 44 CTAs for each tile, none has parts of two tiles, which would be two passes.
TEST(GemmSchedule, RunsEndWithTokenTilesWhereTheyStayAsShort) {
  for (int row_blocks : {3, 56, 64, 80, 96, 128, 448})
    for (int token_tiles : {1, 2, 3, 4, 5, 6, 7}) {
      const Schedule schedule = schedule_of(row_blocks, token_tiles, 8, 3, 1, 132);
      int longest = 0;
      std::size_t passes = 0;
      for (int cluster = 0; cluster < schedule.clusters; ++cluster) {
        longest = std::max(longest, schedule.begin(cluster + 1) - schedule.begin(cluster));
        passes = std::max(passes, passes_of(schedule, cluster, 0).size());
      }
      const int units = row_blocks * token_tiles, ctas = std::min(units, 132);
      EXPECT_EQ(longest, (units + ctas - 1) / ctas) << row_blocks << " × " << token_tiles;
      EXPECT_EQ(longest, schedule.longest_run());
      EXPECT_EQ(passes, static_cast<std::size_t>(schedule.most_passes())) << row_blocks << " × " << token_tiles;
    }
  EXPECT_EQ(schedule_of(128, 3, 8, 3, 1, 132).most_passes(), 1);
  EXPECT_EQ(schedule_of(128, 7, 8, 3, 1, 132).clusters, 132);  // 18 CTAs a token tile would have runs of 8, not 7
}

TEST(GemmSchedule, DistributesUnitsBandsOrAPassEach) {
  const Schedule few = schedule_of(128, 7, 64, 3, 1, 132), many = schedule_of(128, 16, 64, 3, 1, 132),
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

TEST(GemmSchedule, EvenPassesHaveAllTheirRowBlocks) {
  for (const int token_tiles : {1, 3, 7, 20}) {  // some of bands, some not
    Schedule schedule{.row_blocks = 65, .token_tiles = token_tiles, .records = 4, .most = 2, .even = true};
    distribute(schedule, kTokens, 132);
    std::set<std::pair<int, int>> taken;
    for (int cluster = 0; cluster < schedule.clusters; ++cluster)
      for (const Pass& pass : passes_of(schedule, cluster, 0)) {
        EXPECT_EQ(pass.blocks, pass.block == 64 ? 1 : 2);
        EXPECT_EQ(pass.records(), 4);
        EXPECT_TRUE(taken.insert({pass.token_tile, pass.block}).second);
      }
    EXPECT_EQ(taken.size(), static_cast<std::size_t>(33 * token_tiles));
  }
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

/// CTAs of different token tiles have the same records of the same rows, so that they read the weights at the same time.
TEST(GemmSchedule, TokenTilesShareTheLineOfRecords) {
  for (int token_tiles : {2, 3, 4}) {
    const Schedule schedule = schedule_of(56, token_tiles, 148, 3, kStreamK, 132);
    ASSERT_EQ(schedule.clusters, 132);
    const int a_tile = 132 / token_tiles;
    for (int cta = 0; cta < a_tile; ++cta) {
      const std::vector<Pass> first = passes_of(schedule, cta, 0);
      for (int tile = 1; tile < token_tiles; ++tile) {
        const std::vector<Pass> same = passes_of(schedule, tile * a_tile + cta, 0);
        ASSERT_EQ(same.size(), first.size());
        for (std::size_t i = 0; i < same.size(); ++i) {
          EXPECT_EQ(same[i].token_tile, tile);
          EXPECT_EQ(same[i].block, first[i].block);
          EXPECT_EQ(same[i].first, first[i].first);
          EXPECT_EQ(same[i].end, first[i].end);
        }
      }
    }
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
