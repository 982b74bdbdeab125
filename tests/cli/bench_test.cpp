// How nibble measures: rounds, peaks and regret. The rest of bench is tested through the command.
#include "bench_core.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace nibble::tools {
namespace {

TEST(Bench, EachRoundIsAnnouncedAndTimed) {
  int rounds = 0, runs[2] = {};
  const std::vector<Contestant> contestants = {{"a", [&](std::size_t i) { EXPECT_EQ(i, static_cast<std::size_t>(runs[0]++)); }},
                                               {"b", [&](std::size_t) { ++runs[1]; }}};
  const auto timings = time_in_turns(contestants, 0, [&] {
    EXPECT_EQ(runs[0], runs[1]);
    ++rounds;
  });
  EXPECT_EQ(rounds, 5);
  ASSERT_EQ(timings.size(), 2u);
  for (const Timing& timing : timings) {
    EXPECT_EQ(timing.samples, 5u);
    EXPECT_EQ(timing.round_us.size(), 5u);
    EXPECT_GE(timing.median_us, *std::min_element(timing.round_us.begin(), timing.round_us.end()));
    EXPECT_LE(timing.median_us, *std::max_element(timing.round_us.begin(), timing.round_us.end()));
  }
}

TEST(Bench, ThePeakFollowsTheWork) {
  Roofline roofline;
  const ActScheme per_token{DType::s8, GroupShape::channel()};
  EXPECT_EQ(peak_for(DType::f32, {}, roofline), Ceiling::f32);
  EXPECT_EQ(peak_for(DType::f16, {}, roofline), Ceiling::f32);
  EXPECT_EQ(peak_for(DType::bf16, {}, roofline), Ceiling::f32);
  EXPECT_EQ(peak_for(DType::bf16, per_token, roofline), Ceiling::int8);
  roofline.bf16_gflops = 1;
  EXPECT_EQ(peak_for(DType::bf16, {}, roofline), Ceiling::bf16);
  EXPECT_EQ(peak_for(DType::f16, {}, roofline), Ceiling::f32);
}

BenchResult result(const std::string& name, std::int64_t m, const std::string& kernel, double us, bool chosen) {
  BenchResult r;
  r.name = name;
  r.m = m;
  r.kernel = kernel;
  r.median_us = us;
  r.chosen = chosen;
  return r;
}

TEST(Bench, RegretIsOfTheChoiceAgainstTheBest) {
  EXPECT_FALSE(regret_of({}));
  const std::vector<BenchResult> results = {result("a", 1, "fast", 100, true),  result("a", 1, "slow", 200, false),
                                            result("a", 16, "fast", 90, false), result("a", 16, "slow", 135, true),
                                            result("b", 1, "fast", 10, false),  result("b", 1, "slow", 11, true),
                                            result("b", 16, "fast", 10, false)};  // the choice was not measured
  const auto regret = regret_of(results);
  ASSERT_TRUE(regret);
  EXPECT_EQ(regret->places, 3u);
  EXPECT_DOUBLE_EQ(regret->worst, 1.5);
  EXPECT_DOUBLE_EQ(regret->median, 1.1);
  EXPECT_EQ(regret->chosen.m, 16);
  EXPECT_EQ(regret->chosen.kernel, "slow");
  EXPECT_EQ(regret->preferred.kernel, "fast");
}

TEST(Roofline, EveryCeilingCanBeProbedAlone) {
  const auto executor = make_executor(2);
  RooflineProbe probe(*executor);
  for (Ceiling ceiling : kAllCeilings) {
    const double value = probe.measure(ceiling, 0.001);
    EXPECT_TRUE(value > 0.01 || (ceiling == Ceiling::bf16 && value == 0)) << name(ceiling);
  }
  Roofline roofline;
  roofline[Ceiling::int8] = 3;
  EXPECT_EQ(roofline.int8_gops, 3);
  EXPECT_EQ(static_cast<const Roofline&>(roofline)[Ceiling::read], 0);
}

}  // namespace
}  // namespace nibble::tools
