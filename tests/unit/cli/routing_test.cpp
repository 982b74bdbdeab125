// The routings of `nibble bench --moe`: how tokens fall on experts.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "bench/moe.hpp"

namespace nibble::cli {
namespace {

constexpr MoeShape kShape{.experts = 16, .top_k = 2};
constexpr std::int64_t kTokens = 20000;

/// How many of the tokens have each expert, from the most popular one.
std::vector<double> shares(Routing routing, std::uint64_t seed) {
  std::vector<double> counts(static_cast<std::size_t>(kShape.experts));
  for (const std::int32_t id : routed(routing, kShape, kTokens, seed)) counts[static_cast<std::size_t>(id)] += 1.0 / kTokens;
  std::ranges::sort(counts, std::greater());
  return counts;
}

TEST(Routing, GivesATokenDifferentExperts) {
  for (const std::string& routing : routing_names()) {
    const auto ids = routed(parse_routing(routing), kShape, 500, 1);
    ASSERT_EQ(ids.size(), 1000u);
    for (std::size_t i = 0; i < ids.size(); i += 2) {
      EXPECT_NE(ids[i], ids[i + 1]) << routing;
      for (const std::int32_t id : {ids[i], ids[i + 1]}) EXPECT_TRUE(id >= 0 && id < kShape.experts) << routing << id;
    }
    EXPECT_EQ(ids, routed(parse_routing(routing), kShape, 500, 1)) << "the same for a seed";
    EXPECT_NE(ids, routed(parse_routing(routing), kShape, 500, 2));
  }
  const MoeShape all{.experts = 5, .top_k = 5};
  const auto ids = routed(Routing::zipf, all, 1, 1);
  EXPECT_EQ(std::set(ids.begin(), ids.end()).size(), 5u);
}

TEST(Routing, HasItsDistribution) {
  for (const double share : shares(Routing::uniform, 3)) EXPECT_NEAR(share, 2.0 / 16, 0.01);
  const auto zipf = shares(Routing::zipf, 3), hot = shares(Routing::hot, 3), empty = shares(Routing::empty, 3);
  EXPECT_GT(zipf[0], 0.45);
  EXPECT_NEAR(zipf[3] / zipf[15], 4, 0.8) << "of draws without repetition, whose rare ones are as 1/i";
  EXPECT_NEAR(hot[0], 0.77, 0.02) << "16/31 of the first draws, and of the second draws 16/30 of the others";
  EXPECT_NEAR(hot[15], hot[1], 0.02);
  EXPECT_NEAR(empty[0], 2.0 / 15, 0.01);
  EXPECT_EQ(empty[15], 0);
  EXPECT_GT(empty[14], 0.12);
}

/// The experts that many tokens have are others in another call, which finds them in memory.
TEST(Routing, ChangesThePopularExperts) {
  std::set<std::int32_t> most;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    std::vector<int> counts(static_cast<std::size_t>(kShape.experts));
    for (const std::int32_t id : routed(Routing::hot, kShape, 200, seed)) ++counts[static_cast<std::size_t>(id)];
    most.insert(static_cast<std::int32_t>(std::ranges::max_element(counts) - counts.begin()));
  }
  EXPECT_GE(most.size(), 4u);
}

}  // namespace
}  // namespace nibble::cli
