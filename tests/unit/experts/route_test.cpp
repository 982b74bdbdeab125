// The rules of routers, against their definitions written out.
#include "nibble/route.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "nibble/nibble.hpp"

namespace nibble {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Routed {
  Status status;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

Routed routed(const std::vector<float>& logits, std::int64_t tokens, const RouteSpec& spec, const std::vector<float>& bias = {}) {
  const auto experts = std::ssize(logits) / tokens;
  Routed r;
  r.ids.assign(static_cast<std::size_t>(tokens * spec.top_k), -7);
  r.weights.assign(r.ids.size(), NAN);
  r.status = route(ConstTensorView(logits.data(), {tokens, experts}),
                   bias.empty() ? ConstTensorView() : ConstTensorView(bias.data(), {experts}), spec,
                   TensorView(r.ids.data(), {tokens, spec.top_k}), TensorView(r.weights.data(), {tokens, spec.top_k}));
  return r;
}

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

TEST(Route, SoftmaxOverTheChosenIsSoftmaxOverAllNormalized) {
  const Routed r = routed({1, 3, 2, 0, /**/ 5, 5, -1, 5}, 2, {.top_k = 2});
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  EXPECT_THAT(r.ids, ElementsAre(1, 2, /**/ 0, 1)) << "of equals the lower number";
  EXPECT_NEAR(r.weights[0], std::exp(1.0) / (std::exp(1.0) + 1), 1e-6);
  EXPECT_NEAR(r.weights[1], 1 / (std::exp(1.0) + 1), 1e-6);
  EXPECT_FLOAT_EQ(r.weights[2], 0.5f);
}

TEST(Route, WithoutNormalizationWeightsAreScores) {
  const Routed r = routed({1, 3, 2, 0}, 1, {.top_k = 2, .normalize = false, .scale = 2.0f});
  const double sum = std::exp(1) + std::exp(3) + std::exp(2) + std::exp(0);
  EXPECT_NEAR(r.weights[0], 2 * std::exp(3) / sum, 1e-6);
  EXPECT_NEAR(r.weights[1], 2 * std::exp(2) / sum, 1e-6);
}

TEST(Route, TheBiasChoosesAndDoesNotWeigh) {
  const Routed r = routed({0, 1, 2, 3}, 1, {.top_k = 2, .score = RouteScore::sigmoid}, {5, 0, 0, 0});
  EXPECT_THAT(r.ids, ElementsAre(0, 3));
  EXPECT_NEAR(r.weights[0], sigmoid(0) / (sigmoid(0) + sigmoid(3)), 1e-6);
}

/// Such as a bias that rules experts in and out.
TEST(Route, InfinitiesOfBothSignsInAGroupHaveAnOrder) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  std::vector<float> logits(64, 1.0f), bias(64, 0.0f);  // 32 groups of two
  for (const std::size_t e : {6u, 40u, 62u}) bias[e] = inf, bias[e + 1] = -inf;
  const Routed r = routed(logits, 1, {.top_k = 3, .score = RouteScore::sigmoid, .groups = 32, .top_groups = 3}, bias);
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  EXPECT_THAT(r.ids, ElementsAre(6, 40, 62));
}

TEST(Route, ExpertsOutsideTheBestGroupsAreNoChoice) {
  // Sums of the two best: 0.9 + 0.1 of logits is beaten by two of medium score.
  const Routed r = routed({9, -9, -9, /**/ 2, 2, -9, /**/ 1, 1, 1, /**/ 3, -9, -9}, 1,
                          {.top_k = 3, .score = RouteScore::sigmoid, .groups = 4, .top_groups = 2});
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  EXPECT_THAT(r.ids, ElementsAre(3, 4, 6));
}

TEST(Route, TakesLogitsThatAreNoNumbers) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_THAT(routed({NAN, 0, 1, -kInf}, 1, {.top_k = 2}).ids, ElementsAre(2, 1));
  EXPECT_THAT(routed({NAN, 0, kInf, 1}, 1, {.top_k = 1}).weights, ElementsAre(1.0f));
  const Routed none = routed({NAN, NAN, -kInf, NAN}, 1, {.top_k = 2});
  EXPECT_THAT(none.ids, ElementsAre(0, 1));
  EXPECT_THAT(none.weights, ElementsAre(0.5f, 0.5f));
}

TEST(Route, RefusesWhatCannotBe) {
  EXPECT_THAT(routed({1, 2, 3, 4}, 1, {.top_k = 5}).status.message(), HasSubstr("top_k=5 is outside [1, 4]"));
  EXPECT_THAT(routed({1, 2, 3, 4}, 1, {.groups = 3}).status.message(), HasSubstr("groups=3"));
  EXPECT_THAT(routed({1, 2, 3, 4}, 1, {.top_k = 3, .groups = 2}).status.message(), HasSubstr("top_k=3 is outside [1, 2]"));
  const std::vector<float> logits{1, 2};
  EXPECT_THAT(route(ConstTensorView(logits.data(), {2}), {}, {}, {}, {}).message(), HasSubstr("got f32 [2]"));
  EXPECT_THAT(routed({1, 2, 3, 4}, 1, {.scale = NAN}).status.message(), HasSubstr("scale=nan"));
}

}  // namespace
}  // namespace nibble
