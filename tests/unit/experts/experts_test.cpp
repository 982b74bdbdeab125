// Layers of experts and grouped products on the CPU: values, forms of rows, bits for any number of threads, errors.
#include "nibble/experts.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <numeric>
#include <thread>
#include <vector>

#include "expert_layer.hpp"
#include "experts/shares.hpp"
#include "nibble/nibble.hpp"
#include "quantize/act_rule.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using testing::random_weight;

using testing::distance;
using testing::Layer;
using testing::random_floats;
using testing::Sizes;
using testing::weights_of;

TEST(Moe, IsItsDefinition) {
  for (const char* scheme : {"u4zg32", "u4b8c", "s8c", "u4og32", "e4m3c"}) {
    const Layer layer(scheme);
    EXPECT_LT(distance(layer.run(), layer.expected()), 1e-5) << scheme;
  }
  for (const char* scheme : {"s8r_u4zg32", "s8r_s8c", "s8g32_u4b8g32"}) {
    const Layer layer(scheme);
    EXPECT_LT(distance(layer.run(), layer.expected()), 2e-2) << scheme;
  }
}

TEST(Moe, GivesTheSameBitsForAnyThreadsAndLoads) {
  for (const Sizes& s : {Sizes{}, Sizes{.experts = 40, .tokens = 50, .top_k = 4}, Sizes{.tokens = 1, .top_k = 6}})
    for (const bool hot : {false, true}) {
      const Layer layer("u4zg32", s, hot);
      for (const int planned : {1, 2, 16}) {  // a plan's choice of kernels depends on it, its results do not
        const auto one = make_executor(1);
        const std::vector<float> wanted = layer.run(one.get(), {.threads = planned});
        EXPECT_LT(distance(wanted, layer.expected()), 1e-5);
        for (const int threads : {2, 3, 8}) {
          const auto pool = make_executor(threads);
          EXPECT_EQ(layer.run(pool.get(), {.threads = planned}), wanted) << threads << " of " << planned;
        }
      }
    }
}

/// Four threads by its own account, of which one comes, or one after the other, the last first.
class InTurn final : public Executor {
 public:
  explicit InTurn(bool others_come) : others_come_(others_come) {}
  int threads() const override { return 4; }

 protected:
  void run(std::int64_t count, LoopBody body) override {
    for (std::int64_t i = count - 1; i >= 0; --i) others_come_ ? std::jthread([&] { body(i); }).join() : body(i);
  }

 private:
  bool others_come_;
};

TEST(Moe, WaitsForNoThreadThatHasNotCome) {
  for (const Sizes& s : {Sizes{}, Sizes{.experts = 40, .tokens = 50, .top_k = 4}, Sizes{.tokens = 1, .top_k = 2}})
    for (const bool hot : {false, true}) {
      const Layer layer("u4zg32", s, hot);
      const auto one = make_executor(1);
      const std::vector<float> wanted = layer.run(one.get(), {.threads = 4});
      for (const bool others_come : {false, true}) {
        InTurn executor(others_come);
        EXPECT_EQ(layer.run(&executor, {.threads = 4}), wanted) << s.tokens << hot << others_come;
      }
    }
}

TEST(Team, ALoopEndsForAllWithItsLastIteration) {
  experts::Team team;
  std::atomic<int> first = 0, second = 0;
  const auto member = [&] {
    experts::TeamMember own(team, 2);
    own.parallel_for(7, [&](std::int64_t i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(i == 5 ? 30 : 5));
      ++first;
    });
    EXPECT_EQ(first, 7);
    own.parallel_for(3, [&](std::int64_t) { ++second; });
    EXPECT_EQ(second, 3);
  };
  {
    const std::jthread other(member);
    member();
  }
  member();  // finds nothing left to do
}

// Of experts that have many rows each, and fewer experts than threads: iterations of every loop are divided.
TEST(Moe, ThreadsShareAnExpert) {
  const Layer layer("u4zg32", {.experts = 3, .tokens = 40, .top_k = 2, .k = 256, .hidden = 320, .n = 288});
  const auto one = make_executor(1), many = make_executor(16);
  const std::vector<float> wanted = layer.run(one.get(), {.threads = 16});
  EXPECT_LT(distance(wanted, layer.expected()), 1e-5);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(layer.run(many.get(), {.threads = 16}), wanted);
}

TEST(Moe, ATokenDoesNotDependOnTheOthers) {
  const Sizes s{.experts = 5, .tokens = 12, .top_k = 2};
  Layer all("u4zg32", s);
  const auto packed = pack_experts(all.gate_ups, all.gate_up_spec);
  const PlanOptions forced{.kernel = std::string(Plan::linear((*packed)[0], all.gate_up_spec)->kernel())};
  const std::vector<float> together = all.run(nullptr, forced);
  for (std::int64_t t = 0; t < s.tokens; t += 5) {
    Layer alone = all;
    alone.s.tokens = 1;
    const auto row = [t](auto& of, std::int64_t columns) { of = {of.begin() + t * columns, of.begin() + (t + 1) * columns}; };
    row(alone.x, s.k), row(alone.router, s.top_k), row(alone.residual, s.n), row(alone.ids, s.top_k);
    const std::vector<float> d = alone.run(nullptr, forced);
    EXPECT_TRUE(std::equal(d.begin(), d.end(), together.begin() + t * s.n)) << t;
  }
}

TEST(Moe, TokensMayHaveFewerExperts) {
  Layer layer;
  for (std::size_t i = 0; i < layer.ids.size(); i += 2) layer.ids[i] = -1;
  EXPECT_LT(distance(layer.run(), layer.expected()), 1e-5);
  std::ranges::fill(layer.ids, -1);
  EXPECT_EQ(layer.run(), layer.residual);
}

TEST(Moe, RefusesWhatDoesNotFitAndWritesNothing) {
  const Layer layer;
  const Sizes& s = layer.s;
  const auto gate_up = pack_experts(layer.gate_ups, layer.gate_up_spec), down = pack_experts(layer.downs, layer.down_spec);
  ASSERT_TRUE(gate_up.ok() && down.ok());
  const auto plan = MoePlan::make(*gate_up, *down, {.tokens_max = s.tokens, .top_k = s.top_k, .residual = true});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<float> d(static_cast<std::size_t>(s.tokens * s.n), 7.0f);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto message = [&](const MoeOperands& operands, std::size_t bytes) {
    const Status status = plan->run(*gate_up, *down, ConstTensorView(layer.x.data(), {s.tokens, s.k}), operands,
                                    TensorView(d.data(), {s.tokens, s.n}), std::span(workspace).first(bytes));
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(std::ranges::count(d, 7.0f), std::ssize(d));
    return status.message();
  };
  std::vector<std::int32_t> ids = layer.ids;
  MoeOperands operands = layer.operands();
  operands.ids = ConstTensorView(ids.data(), {s.tokens, s.top_k});
  ids[4] = 6;
  EXPECT_THAT(message(operands, workspace.size()), HasSubstr("ids[1,1]=6 is outside [-1, 5]"));
  ids[4] = ids[3];
  EXPECT_THAT(message(operands, workspace.size()), HasSubstr("ids[1,0] and ids[1,1] are both"));
  EXPECT_THAT(message(layer.operands(), workspace.size() - 1), HasSubstr("workspace"));
  operands = layer.operands();
  operands.weights = {};
  EXPECT_THAT(message(operands, workspace.size()), HasSubstr("weights must be f32 [9,3]"));
  operands = layer.operands();
  operands.residual = {};
  EXPECT_THAT(message(operands, workspace.size()), HasSubstr("residual"));

  EXPECT_THAT(MoePlan::make(*gate_up, *down, {.top_k = 7}).status().message(), HasSubstr("top_k=7, of 6 experts"));
  EXPECT_THAT(MoePlan::make(*down, *down, {}).status().message(), HasSubstr("write 80 channels, 6 experts of down read 64"));
  LinearSpec halves = layer.down_spec;
  halves.a_dtype = DType::f16;
  const auto of_halves = pack_experts(layer.downs, halves);
  ASSERT_TRUE(of_halves.ok());
  EXPECT_THAT(MoePlan::make(*gate_up, *of_halves, {}).status().message(), HasSubstr("writes f32, down takes f16"));
}

TEST(PackedExperts, AreWeightsInOneAllocation) {
  const auto weights = weights_of("u4zg32", 4, 48, 64, 9);
  const auto packed = pack_experts(weights, LinearSpec{.m_max = 8});
  ASSERT_TRUE(packed.ok()) << packed.status().message();
  EXPECT_EQ(packed->count(), 4);
  for (std::int64_t e = 0; e < 4; ++e) {
    EXPECT_EQ(*unpack((*packed)[e]), weights[static_cast<std::size_t>(e)]);
    EXPECT_EQ((*packed)[e].bytes().data() - (*packed)[0].bytes().data(),
              e * ((*packed)[1].bytes().data() - (*packed)[0].bytes().data()));
  }
  auto others = weights;
  others[2] = random_weight(Scheme::parse("u4zg32")->weight, 48, 96, 1);
  EXPECT_THAT(pack_experts(others, LinearSpec{}).status().message(),
              HasSubstr("experts 0 and 2 differ: W is [48,64] and [48,96]"));
  others[2] = random_weight(Scheme::parse("u4zg64")->weight, 48, 64, 1);
  EXPECT_THAT(pack_experts(others, LinearSpec{}).status().message(), HasSubstr("the scheme is u4zg32"));
  others[2] = random_weight(Scheme::parse("u4zg32")->weight, 48, 64, 1, {.bias = true});
  EXPECT_THAT(pack_experts(others, LinearSpec{}).status().message(), HasSubstr("the bias is absent and present"));
  EXPECT_THAT(pack_experts(std::span<const QuantTensor>(), LinearSpec{}).status().message(), HasSubstr("experts=0"));
  const auto failing = [](std::int64_t e) -> Result<QuantTensor> {
    if (e == 1) return Status(StatusCode::not_found, "no such tensor");
    return random_weight(Scheme::parse("u4zg32")->weight, 16, 64, 1);
  };
  EXPECT_THAT(pack_experts(3, failing, LinearSpec{}).status().message(), HasSubstr("expert 1: no such tensor"));
}

/// One product in the three forms of rows, against the linear plan of each expert.
TEST(Grouped, EqualsThePlansOfItsExperts) {
  constexpr std::int64_t kExperts = 5, kN = 48, kK = 64;
  const std::vector<std::int32_t> counts{3, 0, 7, 1, 4}, offsets{0, 3, 3, 10, 11, 15};
  const std::int64_t rows = 15, most = 7;
  for (const char* scheme : {"u4zg32", "s8r_s8c", "s8g32_u4b8g32"}) {
    const Scheme parsed = *Scheme::parse(scheme);
    const auto weights = weights_of(parsed.weight.name().c_str(), kExperts, kN, kK, 11, {.bias = true});
    const LinearSpec spec{.m_max = rows,
                          .epilogue = {.row_scale = true, .bias = true, .residual = true, .out = DType::f16},
                          .act_scheme = parsed.act};
    const auto experts = pack_experts(weights, spec);
    ASSERT_TRUE(experts.ok()) << experts.status().message();
    const auto plan = GroupedPlan::make(*experts, spec);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const auto a = random_floats(rows * kK, 12), scale = random_floats(rows, 13), residual = random_floats(rows * kN, 14);
    const auto linear = Plan::linear((*experts)[0], spec);
    std::vector<f16> wanted(static_cast<std::size_t>(rows * kN));
    std::vector<std::byte> scratch(linear->workspace_bytes());
    for (std::size_t e = 0; e < kExperts; ++e) {
      const std::int64_t first = offsets[e], count = counts[e];
      if (count == 0) continue;
      const Operands own{.row_scale = ConstTensorView(scale.data() + first, {count}),
                         .residual = ConstTensorView(residual.data() + first * kN, {count, kN})};
      ASSERT_TRUE(linear
                      ->run((*experts)[static_cast<std::int64_t>(e)], ConstTensorView(a.data() + first * kK, {count, kK}),
                            TensorView(wanted.data() + first * kN, {count, kN}), own, scratch)
                      .ok());
    }
    const Operands operands{.row_scale = ConstTensorView(scale.data(), {rows}),
                            .residual = ConstTensorView(residual.data(), {rows, kN})};
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const auto bits_of = [](const std::vector<f16>& v) {
      std::vector<std::uint16_t> bits;
      for (f16 x : v) bits.push_back(x.bits);
      return bits;
    };
    for (const int threads : {1, 2, 4}) {
      const auto pool = make_executor(threads);
      std::vector<f16> d(wanted.size());
      const ExpertRows sorted{.offsets = ConstTensorView(offsets.data(), {kExperts + 1})};
      Status status = plan->run(*experts, ConstTensorView(a.data(), {rows, kK}), sorted, TensorView(d.data(), {rows, kN}),
                                operands, workspace, pool.get());
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(bits_of(d), bits_of(wanted)) << scheme << " sorted";

      std::vector<std::int32_t> order(static_cast<std::size_t>(rows));  // rows of A in reverse
      std::vector<float> reversed(a.size());
      for (std::int64_t i = 0; i < rows; ++i) {
        order[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(rows - 1 - i);
        std::copy_n(a.begin() + i * kK, kK, reversed.begin() + (rows - 1 - i) * kK);
      }
      std::ranges::fill(d, f16{});
      const ExpertRows indexed{.offsets = sorted.offsets, .rows = ConstTensorView(order.data(), {rows})};
      status = plan->run(*experts, ConstTensorView(reversed.data(), {rows, kK}), indexed, TensorView(d.data(), {rows, kN}),
                         operands, workspace, pool.get());
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(bits_of(d), bits_of(wanted)) << scheme << " indexed";
    }

    // Padded: operands have rows of all matrices, too, of which those past the counts are not read.
    const std::int64_t all = kExperts * most;
    std::vector<float> pa(static_cast<std::size_t>(all * kK), NAN), p_scale(static_cast<std::size_t>(all), NAN),
        p_residual(static_cast<std::size_t>(all * kN), NAN);
    std::vector<f16> pd(static_cast<std::size_t>(all * kN)), pw = pd;
    for (std::size_t e = 0; e < kExperts; ++e) {
      const std::int64_t first = offsets[e], count = counts[e], at = static_cast<std::int64_t>(e) * most;
      std::copy_n(a.begin() + first * kK, count * kK, pa.begin() + at * kK);
      std::copy_n(scale.begin() + first, count, p_scale.begin() + at);
      std::copy_n(residual.begin() + first * kN, count * kN, p_residual.begin() + at * kN);
      std::copy_n(wanted.begin() + first * kN, count * kN, pw.begin() + at * kN);
    }
    const Operands of_all{.row_scale = ConstTensorView(p_scale.data(), {all}),
                          .residual = ConstTensorView(p_residual.data(), {all, kN})};
    const Status status = plan->run(*experts, ConstTensorView(pa.data(), {kExperts, most, kK}),
                                    {.counts = ConstTensorView(counts.data(), {kExperts})},
                                    TensorView(pd.data(), {kExperts, most, kN}), of_all, workspace);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(bits_of(pd), bits_of(pw)) << scheme << " padded";
  }
}

/// Pairs of tokens and experts in the order of tokens: each expert's rows have the bits of its linear plan for them.
TEST(Grouped, TakesIdsOfTokensAndPairs) {
  constexpr std::int64_t kExperts = 5, kN = 48, kK = 64, kTokens = 6, kTopK = 3, kPairs = kTokens * kTopK;
  // Expert 4 has the whole of one token and others', expert 3 one pair, expert 1 none; a token may have one twice.
  const std::vector<std::int32_t> ids{0, 4, 2, 4, -1, 0, 2, 0, 4, 3, 4, 0, -1, -1, -1, 4, 4, 4};
  for (const char* scheme : {"u4zg32", "s8r_s8c", "s8g32_u4b8g32"})
    for (const bool glu : {false, true}) {
      const Scheme parsed = *Scheme::parse(scheme);
      const std::int64_t columns = glu ? kN / 2 : kN;
      const LinearSpec spec{.m_max = kPairs,
                            .epilogue = {.row_scale = true,
                                         .bias = true,
                                         .activation = Activation::silu,
                                         .glu = glu,
                                         .gate = true,
                                         .residual = true,
                                         .out = DType::bf16},
                            .act_scheme = parsed.act};
      const auto experts = pack_experts(weights_of(parsed.weight.name().c_str(), kExperts, kN, kK, 21, {.bias = true}), spec);
      ASSERT_TRUE(experts.ok()) << experts.status().message();
      const auto plan = GroupedPlan::make(*experts, spec);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      const auto linear = Plan::linear((*experts)[0], spec);
      const auto a = random_floats(kTokens * kK, 22), scale = random_floats(kPairs, 23),
                 gate = random_floats(kPairs * columns, 24), residual = random_floats(kPairs * columns, 25);
      std::vector<float> by_pair(static_cast<std::size_t>(kPairs * kK));
      for (std::int64_t i = 0; i < kPairs; ++i) std::copy_n(a.begin() + i / kTopK * kK, kK, by_pair.begin() + i * kK);

      const auto rows_of = [](const std::vector<float>& from, const std::vector<std::int64_t>& which, std::int64_t width) {
        std::vector<float> rows;
        for (const std::int64_t i : which) rows.insert(rows.end(), from.begin() + i * width, from.begin() + (i + 1) * width);
        return rows;
      };
      std::vector<std::uint16_t> wanted(static_cast<std::size_t>(kPairs * columns));
      for (std::int32_t e = 0; e < kExperts; ++e) {
        std::vector<std::int64_t> own;
        for (std::int64_t i = 0; i < kPairs; ++i)
          if (ids[static_cast<std::size_t>(i)] == e) own.push_back(i);
        const std::int64_t count = std::ssize(own);
        if (count == 0) continue;
        const auto x = rows_of(by_pair, own, kK), s = rows_of(scale, own, 1), g = rows_of(gate, own, columns),
                   r = rows_of(residual, own, columns);
        std::vector<std::uint16_t> d(static_cast<std::size_t>(count * columns));
        std::vector<std::byte> scratch(linear->workspace_bytes());
        const Operands operands{.row_scale = ConstTensorView(s.data(), {count}),
                                .gate = ConstTensorView(g.data(), {count, columns}),
                                .residual = ConstTensorView(r.data(), {count, columns})};
        ASSERT_TRUE(linear
                        ->run((*experts)[e], ConstTensorView(x.data(), {count, kK}),
                              TensorView(d.data(), DType::bf16, {count, columns}), operands, scratch)
                        .ok());
        for (std::int64_t i = 0; i < count; ++i)
          std::copy_n(d.begin() + i * columns, columns, wanted.begin() + own[static_cast<std::size_t>(i)] * columns);
      }
      const Operands operands{.row_scale = ConstTensorView(scale.data(), {kPairs}),
                              .gate = ConstTensorView(gate.data(), {kPairs, columns}),
                              .residual = ConstTensorView(residual.data(), {kPairs, columns})};
      for (const int threads : {1, 3}) {
        const auto pool = make_executor(threads);
        std::vector<std::byte> workspace(plan->ids_workspace_bytes() + 1);
        for (const bool pairs : {false, true}) {
          std::vector<std::uint16_t> d(wanted.size(), 0x7fff);
          const ConstTensorView from =
              pairs ? ConstTensorView(by_pair.data(), {kPairs, kK}) : ConstTensorView(a.data(), {kTokens, kK});
          const Status status = plan->run(*experts, from, {.ids = ConstTensorView(ids.data(), {kTokens, kTopK})},
                                          TensorView(d.data(), DType::bf16, {kPairs, columns}), operands,
                                          std::span(workspace).subspan(1), pool.get());
          EXPECT_TRUE(status.ok()) << status.message();
          EXPECT_EQ(d, wanted) << scheme << (pairs ? " of pairs" : " of tokens") << (glu ? ", glu" : "");
        }
      }
    }
}

TEST(Grouped, RefusesIdsThatDoNotFit) {
  const auto experts = pack_experts(weights_of("u4zg32", 3, 16, 64, 1), {.m_max = 8});
  const auto plan = GroupedPlan::make(*experts, {.m_max = 8});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const std::vector<float> a(10 * 64, 1.0f);
  std::vector<float> d(10 * 16, 7.0f);
  std::vector<std::byte> workspace(plan->ids_workspace_bytes());
  const auto refusal = [&](std::vector<std::int32_t> ids, std::int64_t tokens, std::int64_t a_rows, std::int64_t d_rows,
                           std::size_t bytes) {
    const ExpertRows rows{.ids = ConstTensorView(ids.data(), {tokens, std::ssize(ids) / tokens})};
    return plan
        ->run(*experts, ConstTensorView(a.data(), {a_rows, 64}), rows, TensorView(d.data(), {d_rows, 16}), {},
              std::span(workspace).first(bytes))
        .message();
  };
  const std::size_t enough = workspace.size();
  EXPECT_EQ(refusal({0, 1, 2, 2}, 2, 2, 4, enough), "");
  std::ranges::fill(d, 7.0f);
  EXPECT_THAT(refusal({0, 1, 3, 2}, 2, 2, 4, enough), HasSubstr("ids[1,0]=3 is outside [-1, 2]"));
  EXPECT_THAT(refusal({0, 1, 2, -2}, 2, 2, 4, enough), HasSubstr("ids[1,1]=-2 is outside [-1, 2]"));
  EXPECT_THAT(refusal({0, 1, 2, 2}, 2, 3, 4, enough), HasSubstr("got 3 and 4 rows"));
  EXPECT_THAT(refusal({0, 1, 2, 2}, 2, 2, 3, enough), HasSubstr("got 2 and 3 rows"));
  EXPECT_THAT(refusal(std::vector<std::int32_t>(10, 0), 5, 5, 10, enough), HasSubstr("10 rows, the plan takes up to 8"));
  EXPECT_THAT(refusal({0, 1, 2, 2}, 2, 2, 4, enough - 1), HasSubstr("the workspace has"));
  const std::vector<std::int32_t> ids{0, 1}, offsets{0, 1, 2, 2};
  const ExpertRows both{.offsets = ConstTensorView(offsets.data(), {4}), .ids = ConstTensorView(ids.data(), {1, 2})};
  EXPECT_THAT(
      plan->run(*experts, ConstTensorView(a.data(), {2, 64}), both, TensorView(d.data(), {2, 16}), {}, workspace).message(),
      HasSubstr("or ids alone"));
  for (const float each : d) EXPECT_EQ(each, 7.0f);
  const LinearSpec codes{.a_dtype = DType::s8, .m_max = 8, .act_scheme = Scheme::parse("s8r_s8c")->act};
  const auto of_codes = pack_experts(weights_of("s8c", 3, 16, 64, 1), codes);
  const auto plan_of_codes = GroupedPlan::make(*of_codes, codes);
  ASSERT_TRUE(plan_of_codes.ok()) << plan_of_codes.status().message();
  EXPECT_THAT(plan_of_codes
                  ->run(*of_codes, ConstTensorView(a.data(), DType::s8, {1, 64}), {.ids = ConstTensorView(ids.data(), {1, 2})},
                        TensorView(d.data(), {2, 16}), {}, workspace)
                  .message(),
              HasSubstr("ids are for an A of floats, not of s8"));
}

/// Codes come with a scale for each group of a row, padded as well as sorted.
TEST(Grouped, TakesCodesWithScalesOfTheirRows) {
  constexpr std::int64_t kExperts = 3, kN = 48, kK = 256, kMost = 4, kGroups = kK / 128;
  const std::vector<std::int32_t> counts{4, 0, 2}, offsets{0, 4, 4, 6};
  const auto weights = weights_of("e4m3b128x128", kExperts, kN, kK, 3);
  const LinearSpec spec{.a_dtype = DType::e4m3,
                        .m_max = kExperts * kMost,
                        .epilogue = {.out = DType::bf16},
                        .act_scheme = Scheme::parse("e4m3g128_e4m3c")->act};
  const auto experts = pack_experts(weights, spec);
  ASSERT_TRUE(experts.ok()) << experts.status().message();
  const auto plan = GroupedPlan::make(*experts, spec);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const std::int64_t rows = offsets.back();
  const auto floats = random_floats(rows * kK, 4), scale = random_floats(rows * kGroups, 5);
  std::vector<std::uint8_t> codes;
  for (const float x : floats) codes.push_back(static_cast<std::uint8_t>(act_rule::to_e4m3(x)));
  std::vector<std::uint16_t> sorted(static_cast<std::size_t>(rows * kN)), padded(kExperts * kMost * kN, 0x7fc0);
  Status status =
      plan->run(*experts, ConstTensorView(codes.data(), DType::e4m3, {rows, kK}),
                {.offsets = ConstTensorView(offsets.data(), {kExperts + 1})}, TensorView(sorted.data(), DType::bf16, {rows, kN}),
                {.a_scale = ConstTensorView(scale.data(), {rows, kGroups})}, workspace);
  ASSERT_TRUE(status.ok()) << status.message();
  std::vector<float> got;
  std::vector<double> wanted;
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t n = 0; n < kN; ++n) {
      got.push_back(std::bit_cast<float>(std::uint32_t{sorted[static_cast<std::size_t>(row * kN + n)]} << 16));
      double& sum = wanted.emplace_back(0);
      for (std::int64_t k = 0; k < kK; ++k)
        sum += static_cast<double>(code_value(DType::e4m3, codes[static_cast<std::size_t>(row * kK + k)])) *
               static_cast<double>(scale[static_cast<std::size_t>(row * kGroups + k / 128)]) *
               static_cast<double>(weights[row < counts[0] ? 0 : 2].value(n, k));
    }
  EXPECT_LT(distance(got, wanted), 2.3e-3) << "the rounding to bf16, 2^-8 / sqrt(3)";

  std::vector<std::uint8_t> a(kExperts * kMost * kK, 0x7f);  // NaN
  std::vector<float> all_scales(kExperts * kMost * kGroups, NAN);
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const std::int64_t first = offsets[static_cast<std::size_t>(e)], count = counts[static_cast<std::size_t>(e)];
    std::copy_n(codes.begin() + first * kK, count * kK, a.begin() + e * kMost * kK);
    std::copy_n(scale.begin() + first * kGroups, count * kGroups, all_scales.begin() + e * kMost * kGroups);
  }
  const ConstTensorView a_view(a.data(), DType::e4m3, {kExperts, kMost, kK});
  const TensorView d(padded.data(), DType::bf16, {kExperts, kMost, kN});
  const ExpertRows counted{.counts = ConstTensorView(counts.data(), {kExperts})};
  status = plan->run(*experts, a_view, counted, d, {.a_scale = ConstTensorView(scale.data(), {rows, kGroups})}, workspace);
  EXPECT_THAT(status.message(), HasSubstr("a_scale has 6 rows, A has 12"));
  status = plan->run(*experts, a_view, counted, d, {.a_scale = ConstTensorView(all_scales.data(), {kExperts * kMost, kGroups})},
                     workspace);
  ASSERT_TRUE(status.ok()) << status.message();
  for (std::int64_t e = 0; e < kExperts; ++e)
    for (std::int64_t i = 0; i < kMost * kN; ++i) {
      const bool written = i / kN < counts[static_cast<std::size_t>(e)];
      EXPECT_EQ(padded[static_cast<std::size_t>(e * kMost * kN + i)],
                written ? sorted[static_cast<std::size_t>(offsets[static_cast<std::size_t>(e)] * kN + i)] : 0x7fc0)
          << e << " " << i;
    }
}

TEST(Grouped, RefusesRowsThatDoNotFit) {
  const auto experts = pack_experts(weights_of("u4zg32", 3, 16, 64, 1), LinearSpec{.m_max = 8});
  ASSERT_TRUE(experts.ok());
  const auto plan = GroupedPlan::make(*experts, {.m_max = 8});
  ASSERT_TRUE(plan.ok());
  std::vector<float> a(8 * 64, 1.0f), d(8 * 16, 7.0f);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto message = [&](const ExpertRows& rows, std::int64_t m) {
    const Status status =
        plan->run(*experts, ConstTensorView(a.data(), {m, 64}), rows, TensorView(d.data(), {m, 16}), {}, workspace);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(std::ranges::count(d, 7.0f), std::ssize(d));
    return status.message();
  };
  const std::vector<std::int32_t> falling{0, 4, 3, 8}, short_{0, 1, 2, 7}, from{1, 2, 3, 8}, fine{0, 2, 5, 8},
      rows{0, 1, 2, 3, 4, 5, 6, 8};
  const auto offsets = [](const std::vector<std::int32_t>& v) {
    return ExpertRows{.offsets = ConstTensorView(v.data(), {std::ssize(v)})};
  };
  EXPECT_THAT(message(offsets(falling), 8), HasSubstr("offsets[2]=3"));
  EXPECT_THAT(message(offsets(from), 8), HasSubstr("offsets[0]=1"));
  EXPECT_THAT(message(offsets(short_), 8), HasSubstr("offsets end at 7, A has 8 rows"));
  EXPECT_THAT(message({}, 8), HasSubstr("takes offsets"));
  ExpertRows indexed = offsets(fine);
  indexed.rows = ConstTensorView(rows.data(), {8});
  EXPECT_THAT(message(indexed, 8), HasSubstr("rows[7]=8 is outside [0, 7]"));
  EXPECT_THAT(GroupedPlan::make(*experts, {.epilogue = {.col_scale = true}}).status().message(), HasSubstr("col_scale"));
}

/// Operands that the rows of one expert fit and those of another do not.
TEST(Grouped, RefusesOperandsBeforeAnyExpertRuns) {
  constexpr std::int64_t kExperts = 3, kN = 16, kK = 64, kRows = 7, kMost = 4;
  const auto experts = pack_experts(weights_of("u4zg32", kExperts, kN, kK, 1, {.bias = true}), LinearSpec{.m_max = kRows});
  ASSERT_TRUE(experts.ok());
  const std::vector<std::int32_t> counts{4, 2, 1}, offsets{0, 4, 6, 7};
  std::vector<float> a(kExperts * kMost * kK, 1.0f), d(kExperts * kMost * kN, 7.0f), operand(2 * kRows * kN, 1.0f);
  const auto message = [&](const EpilogueSpec& epilogue, const Operands& operands, bool padded) {
    const auto plan = GroupedPlan::make(*experts, {.m_max = kRows, .epilogue = epilogue});
    EXPECT_TRUE(plan.ok());
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const ConstTensorView a_view =
        padded ? ConstTensorView(a.data(), {kExperts, kMost, kK}) : ConstTensorView(a.data(), {kRows, kK});
    const TensorView d_view = padded ? TensorView(d.data(), {kExperts, kMost, kN}) : TensorView(d.data(), {kRows, kN});
    ExpertRows rows;
    (padded ? rows.counts : rows.offsets) =
        padded ? ConstTensorView(counts.data(), {kExperts}) : ConstTensorView(offsets.data(), {kExperts + 1});
    const Status status = plan->run(*experts, a_view, rows, d_view, operands, workspace);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(std::ranges::count(d, 7.0f), std::ssize(d));
    return status.message();
  };
  const Operands gate{.gate = ConstTensorView(operand.data(), {kMost, kN})};
  EXPECT_THAT(message({.gate = true}, gate, true), HasSubstr("gate must be [12,16]"));
  EXPECT_THAT(message({.gate = true}, gate, false), HasSubstr("gate must be [7,16]"));
  EXPECT_THAT(message({.gate = true}, {}, false), HasSubstr("gate"));
  EXPECT_THAT(message({.row_scale = true}, {.row_scale = ConstTensorView(operand.data(), {1})}, false),
              HasSubstr("of 7 elements"));
  ConstTensorView sparse(operand.data(), {kRows});
  sparse.strides[0] = 2;
  EXPECT_THAT(message({.row_scale = true}, {.row_scale = sparse}, false), HasSubstr("contiguous"));
  EXPECT_THAT(message({.bias = true}, {.bias = ConstTensorView(operand.data(), {kN})}, false),
              HasSubstr("pack experts with their own"));
}

}  // namespace
}  // namespace nibble
