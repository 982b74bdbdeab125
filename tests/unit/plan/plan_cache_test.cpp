// The cache of plans: which calls share a plan, for which M, and from several threads.
#include "nibble/plan_cache.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <limits>
#include <thread>
#include <vector>

#include "nibble/nibble.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using testing::random_weight;

PackedWeight weight_of(const char* scheme, std::int64_t n, std::int64_t k, std::uint64_t seed,
                       const testing::RandomWeight& with = {}) {
  auto weight = pack(random_weight(Scheme::parse(scheme)->weight, n, k, seed, with));
  EXPECT_TRUE(weight.ok()) << weight.status().message();
  return *std::move(weight);
}

Status run(const Plan& plan, const PackedWeight& weight, std::int64_t m) {
  const std::vector<float> a(static_cast<std::size_t>(m * weight.k()), 1.0f);
  std::vector<float> d(static_cast<std::size_t>(m * weight.n()));
  std::vector<std::byte> workspace(plan.workspace_bytes());
  const auto one = make_executor(1);
  return plan.run(weight, ConstTensorView(a.data(), {m, weight.k()}), TensorView(d.data(), {m, weight.n()}), {}, workspace,
                  one.get());
}

TEST(PlanCache, RisingMTakesALogarithmicNumberOfPlans) {
  const PackedWeight weight = weight_of("u4zg32", 32, 64, 1);
  PlanCache plans;
  for (std::int64_t m = 1; m <= 100; ++m) {
    const auto plan = plans.linear(weight, {.m_max = m});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_TRUE(run(*plan, weight, m).ok()) << m;
  }
  EXPECT_EQ(plans.statistics().misses, 8u);  // 1, 2, 4, … 128
  EXPECT_EQ(plans.statistics().hits, 92u);
  EXPECT_EQ(plans.statistics().size, 1u);
  const auto plan = plans.linear(weight, {.m_max = 1});
  ASSERT_TRUE(plan.ok());
  EXPECT_TRUE(run(*plan, weight, 128).ok()) << "the plan for 128 serves 1";
  EXPECT_EQ(plans.statistics().misses, 8u);
}

TEST(PlanCache, WeightsShareAPlanUnlessItDependsOnWhatDiffers) {
  PlanCache plans;
  const auto made = [&](const PackedWeight& weight, const LinearSpec& spec = {}, const PlanOptions& options = {}) {
    const std::uint64_t before = plans.statistics().misses;
    const auto plan = plans.linear(weight, spec, options);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_TRUE(plan.ok() && (spec != LinearSpec{} || run(*plan, weight, 1).ok()));
    return plans.statistics().misses - before;
  };
  EXPECT_EQ(made(weight_of("u4zg32", 32, 64, 1)), 1u);
  EXPECT_EQ(made(weight_of("u4zg32", 32, 64, 2)), 0u);
  EXPECT_EQ(made(weight_of("u4zg32", 32, 64, 3, {.bias = true})), 0u);
  EXPECT_EQ(made(weight_of("u4zg32", 64, 64, 1)), 1u);
  EXPECT_EQ(made(weight_of("u4zg32", 32, 128, 1)), 1u);
  EXPECT_EQ(made(weight_of("u4zg64", 32, 64, 1)), 1u);
  EXPECT_EQ(made(weight_of("u4zg32", 32, 64, 1, {.act_order = true})), 1u);
  EXPECT_EQ(made(weight_of("u4zg32", 32, 64, 1, {.prescale = true})), 1u);
  const auto as_given =
      pack(random_weight(Scheme::parse("u4zg32")->weight, 32, 64, 1), {.kernel = "linear_any_any_any__ref_baseline"});
  ASSERT_TRUE(as_given.ok());
  EXPECT_EQ(made(*as_given), 1u) << as_given->layout();

  const PackedWeight weight = weight_of("u4zg32", 32, 64, 1);
  EXPECT_EQ(made(weight), 0u);
  for (const LinearSpec& spec :
       {LinearSpec{.a_dtype = DType::bf16}, LinearSpec{.epilogue = {.out = DType::f16}},
        LinearSpec{.epilogue = {.activation = Activation::silu}}, LinearSpec{.act_scheme = {DType::s8, GroupShape::channel()}}}) {
    EXPECT_EQ(made(weight, spec), 1u);
    EXPECT_EQ(made(weight, spec), 0u);
  }
  const Roofline machine{.threads = 2, .read_gbytes_per_s = 20, .f32_gflops = 100, .bf16_gflops = 200, .int8_gops = 400};
  Roofline faster = machine;
  faster.int8_gops = 500;
  for (const PlanOptions& options : {PlanOptions{.allow_reference = false}, PlanOptions{.threads = 3},
                                     PlanOptions{.machine = machine}, PlanOptions{.machine = faster}}) {
    EXPECT_EQ(made(weight, {}, options), 1u);
    EXPECT_EQ(made(weight, {}, options), 0u);
  }
  EXPECT_EQ(made(*as_given, {}, {.kernel = "linear_any_any_any__ref_baseline"}), 1u);
}

TEST(PlanCache, StaticActsCountByWhatPlansAskOfThem) {
  PlanCache plans;
  const auto misses = [&](std::optional<StaticActs> acts) {
    QuantTensor q = random_weight(Scheme::parse("s8c")->weight, 32, 64, 1);
    q.static_acts = acts;
    EXPECT_TRUE(plans.linear(pack(q).value(), LinearSpec{}).ok());
    return plans.statistics().misses;
  };
  EXPECT_EQ(misses({}), 1u);
  EXPECT_EQ(misses(StaticActs{0.5f, 0}), 2u);
  EXPECT_EQ(misses(StaticActs{0.25f, 0}), 2u) << "the scale of another layer";
  EXPECT_EQ(misses(StaticActs{0.5f, 3}), 3u);
}

TEST(PlanCache, ConvolutionsAndWhatTheWeightWasPackedFor) {
  const ConvGeometry g{.in_channels = 8, .out_channels = 16, .height = 6, .width = 6, .filter = {3, 3}};
  QuantTensor q = random_weight(Scheme::parse("s8c")->weight, 16, g.k(), 1);
  q.filter = g.filter;
  const PackedWeight weight = pack(q, ConvSpec{.geometry = g, .batch_max = 3}).value();
  PlanCache plans;
  ASSERT_TRUE(plans.conv(weight).ok());
  ASSERT_TRUE(plans.conv(weight, {.geometry = g, .batch_max = 4}).ok());
  EXPECT_EQ(plans.statistics().hits, 1u);
  EXPECT_EQ(plans.linear(weight).status().message(), Plan::linear(weight).status().message());
  const PackedWeight linear = weight_of("s8c", 16, 64, 1);
  EXPECT_TRUE(plans.linear(linear).ok());
  EXPECT_EQ(plans.conv(linear).status().message(), Plan::conv(linear).status().message());
}

TEST(PlanCache, DropsTheLeastRecentlyUsed) {
  const PackedWeight weight = weight_of("u4zg32", 32, 64, 1);
  PlanCache plans(2);
  const LinearSpec a{}, b{.a_dtype = DType::f16}, c{.a_dtype = DType::bf16};
  for (const LinearSpec& spec : {a, b, a, c}) ASSERT_TRUE(plans.linear(weight, spec).ok());
  EXPECT_EQ(plans.statistics().size, 2u);
  EXPECT_EQ(plans.statistics().misses, 3u);
  ASSERT_TRUE(plans.linear(weight, a).ok());
  EXPECT_EQ(plans.statistics().misses, 3u) << "a was used after b";
  ASSERT_TRUE(plans.linear(weight, b).ok());
  EXPECT_EQ(plans.statistics().misses, 4u);

  const auto plan = plans.linear(weight, b);
  plans.clear();
  EXPECT_EQ(plans.statistics().size, 0u);
  ASSERT_TRUE(plan.ok());
  const PackedWeight other = weight_of("u4zg32", 32, 64, 2);
  EXPECT_TRUE(plans.linear(other, b).ok());
  EXPECT_EQ(plan->kernel(), plans.linear(other, b)->kernel()) << "a copy stays valid";

  PlanCache none(0);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(none.linear(weight, a).ok());
  EXPECT_EQ(none.statistics().misses, 2u);
  EXPECT_EQ(none.statistics().size, 0u);
}

TEST(PlanCache, ErrorsAreThePlansAndAreNotKept) {
  const PackedWeight weight = weight_of("u4zg32", 32, 64, 1);
  PlanCache plans;
  for (int i = 0; i < 2; ++i) {
    const Status failed = plans.linear(weight, {.m_max = 5, .act_scheme = {DType::s8, GroupShape::tensor()}}).status();
    EXPECT_EQ(failed.code(), StatusCode::unsupported) << failed.message();
    EXPECT_EQ(failed.message(),
              Plan::linear(weight, {.m_max = 5, .act_scheme = {DType::s8, GroupShape::tensor()}}).status().message());
  }
  EXPECT_EQ(plans.statistics().misses, 2u);
  EXPECT_EQ(plans.statistics().size, 0u);
  ASSERT_TRUE(plans.linear(weight, {.m_max = 8}).ok());
  for (const std::int64_t m : {std::int64_t{0}, std::int64_t{-1}, kMaxSize + 1, std::numeric_limits<std::int64_t>::max()})
    EXPECT_EQ(plans.linear(weight, {.m_max = m}).status().message(), Plan::linear(weight, {.m_max = m}).status().message());
  EXPECT_EQ(plans.linear(weight, {}, {.kernel = "nope"}).status().code(), StatusCode::not_found);
}

TEST(PlanCache, PlansForTheMAskedForWhereTheNextPowerOfTwoIsRefused) {
  const PackedWeight weight = weight_of("u4zg32", 96 * 1024, 32, 1);  // 2^29 tokens have more than kMaxElements outputs
  const std::int64_t m = kMaxElements / weight.n();
  PlanCache plans;
  EXPECT_TRUE(plans.linear(weight, {.m_max = m}).ok()) << plans.linear(weight, {.m_max = m}).status().message();
  EXPECT_THAT(plans.linear(weight, {.m_max = m + 1}).status().message(), HasSubstr(std::to_string(m + 1)));
}

TEST(PlanCache, FollowsTheKernelOfTheEnvironment) {
  const auto weight = pack(random_weight(Scheme::parse("u4zg32")->weight, 32, 64, 1));
  ASSERT_TRUE(weight.ok());
  PlanCache plans;
  const auto chosen = plans.linear(*weight, {.m_max = 4});
  ASSERT_TRUE(chosen.ok());
  setenv("NIBBLE_KERNEL", "linear_any_any_any__ref_baseline", 1);
  const Status forced = plans.linear(*weight, {.m_max = 4}).status();  // packed for another layout
  unsetenv("NIBBLE_KERNEL");
  EXPECT_EQ(forced.code(), StatusCode::unsupported) << forced.message();
  EXPECT_EQ(plans.statistics().hits, 0u);
}

/// Runs `body` on threads of its own.
template <class Body>
void on_threads(int count, Body&& body) {
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) threads.emplace_back([&body, t] { body(t); });
  for (std::thread& thread : threads) thread.join();
}

// The thread sanitizer runs these, too (./dev tsan).

TEST(PlanCache, ThreadsThatAskForTheSamePlanMakeOne) {
  constexpr int kThreads = 4, kRounds = 200;
  const PackedWeight weight = weight_of("u4zg32", 32, 64, 1);
  PlanCache plans;
  std::barrier together(kThreads);
  std::atomic<int> failures{0};
  on_threads(kThreads, [&](int) {
    for (int round = 1; round <= kRounds; ++round) {
      together.arrive_and_wait();
      if (!plans.linear(weight, {.m_max = 1 << 20}, {.threads = round})) ++failures;
    }
  });
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(plans.statistics().misses, static_cast<std::uint64_t>(kRounds));
  EXPECT_EQ(plans.statistics().hits, static_cast<std::uint64_t>(kRounds * (kThreads - 1)));
}

TEST(PlanCache, ThreadsWithRisingMGetPlansThatServeThem) {
  constexpr int kThreads = 8, kRounds = 20;
  const PackedWeight weights[] = {weight_of("u4zg32", 32, 64, 1), weight_of("s8c", 32, 64, 2), weight_of("u4b8g64", 16, 64, 3)};
  PlanCache plans;
  std::atomic<int> failures{0};
  on_threads(kThreads, [&](int) {
    for (int m = 1; m <= kRounds; ++m)
      for (const PackedWeight& weight : weights) {
        const auto plan = plans.linear(weight, {.m_max = m});
        if (!plan || !run(*plan, weight, m)) ++failures;
      }
  });
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(plans.statistics().hits + plans.statistics().misses,
            static_cast<std::uint64_t>(kThreads * kRounds) * std::size(weights));
  EXPECT_EQ(plans.statistics().misses, 6 * std::size(weights));  // 1, 2, 4, 8, 16, 32
  EXPECT_EQ(plans.statistics().size, std::size(weights));
}

TEST(PlanCache, ThreadsThatEvictAndFailGoOn) {
  constexpr int kThreads = 6;
  const PackedWeight weight = weight_of("u4zg32", 32, 64, 1);
  PlanCache plans(1);
  std::atomic<int> failures{0};
  on_threads(kThreads, [&](int t) {
    for (int round = 0; round < 10; ++round) {
      if (!plans.linear(weight, {.a_dtype = round % 2 == 0 ? DType::f32 : DType::bf16, .m_max = 4})) ++failures;
      if (plans.linear(weight, {.act_scheme = {DType::s8, GroupShape::tensor()}})) ++failures;
      if (t == 0) plans.clear();
    }
  });
  EXPECT_EQ(failures, 0);
  EXPECT_LE(plans.statistics().size, 1u);
}

}  // namespace
}  // namespace nibble
