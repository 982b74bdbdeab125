// Activation functions against their definitions in double precision, at special values, and with parameters that are refused.
#include "epilogue/activation.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>

namespace nibble {
namespace {

using testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kPi = 3.14159265358979323846;

float apply(const EpilogueSpec& spec, float x) {
  epilogue::with_activation(spec, [&x](auto function) { x = function(x); });
  return x;
}
float apply(Activation activation, float x) { return apply(EpilogueSpec{.activation = activation}, x); }

double exact(const EpilogueSpec& spec, double x) {
  switch (spec.activation) {
    case Activation::none: return x;
    case Activation::relu: return x > 0 ? x : 0;
    case Activation::clamp: return std::fmin(std::fmax(x, spec.clamp_low), spec.clamp_high);
    case Activation::gelu_erf: return x * std::erfc(-x / std::sqrt(2.0)) / 2;
    case Activation::gelu_tanh: return x / (1 + std::exp(-2 * std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x)));
    case Activation::silu: return x / (1 + std::exp(-x));
    case Activation::sigmoid: return 1 / (1 + std::exp(-x));
    case Activation::tanh: return 1 - 2 / (1 + std::exp(2 * x));
    case Activation::hardswish: return x <= -3 ? 0 : x >= 3 ? x : x * (x + 3) / 6;
    case Activation::leaky_relu: return x > 0 ? x : x * spec.negative_slope;
    case Activation::quick_gelu: return x / (1 + std::exp(-1.702 * x));
  }
  return kNaN;
}

TEST(Activation, IsItsDefinition) {
  for (Activation activation : kActivations)
    for (float slope : {0.01f, 0.0f, -2.5f, 40.0f}) {
      const EpilogueSpec spec{.activation = activation, .clamp_low = -0.25f, .clamp_high = 1.5f, .negative_slope = slope};
      for (int i = -40000; i <= 40000; ++i) {
        const float x = static_cast<float>(i) / (i % 3 == 0 ? 300.0f : i % 3 == 1 ? 10000.0f : 1e8f);
        const double y = exact(spec, x);
        const double error = activation == Activation::sigmoid      ? 8 * 0x1p-24 * y + 0x1p-126
                             : activation == Activation::leaky_relu ? 0x1p-24 * std::abs(y)
                                                                    : 8 * 0x1p-24 * std::abs(x);
        ASSERT_NEAR(apply(spec, x), y, error) << name(activation) << " of " << x;
      }
    }
}

TEST(Activation, SpecialValues) {
  const float largest = std::numeric_limits<float>::max();
  struct Case {
    Activation activation;
    float below, above;  // of −∞ and ∞; of the lowest and the largest number too, as far as they are finite
  };
  for (const Case& c : {Case{Activation::none, -kInfinity, kInfinity},
                        {Activation::relu, 0, kInfinity},
                        {Activation::clamp, 0, 6},
                        {Activation::gelu_erf, kNaN, kInfinity},
                        {Activation::gelu_tanh, kNaN, kInfinity},
                        {Activation::silu, kNaN, kInfinity},
                        {Activation::sigmoid, 0, 1},
                        {Activation::tanh, -1, 1},
                        {Activation::hardswish, kNaN, kInfinity},
                        {Activation::leaky_relu, -kInfinity, kInfinity},
                        {Activation::quick_gelu, kNaN, kInfinity}}) {
    const auto expect = [&](float x, float y) {
      const float got = apply(c.activation, x);
      EXPECT_TRUE(std::isnan(y) ? std::isnan(got) : got == y) << name(c.activation) << " of " << x << " is " << got;
    };
    expect(kNaN, kNaN);
    expect(-kInfinity, c.below);
    expect(kInfinity, c.above);
    const float below = std::isinf(c.below) ? (c.activation == Activation::none ? -largest : -largest * 0.01f) : c.below;
    expect(-largest, std::isnan(c.below) ? 0.0f : below);
    expect(largest, std::isinf(c.above) ? largest : c.above);
    expect(0.0f, c.activation == Activation::sigmoid ? 0.5f : 0.0f);
    EXPECT_EQ(std::signbit(apply(c.activation, -0.0f)), c.activation != Activation::sigmoid) << name(c.activation);
  }
}

TEST(Activation, HasAName) {
  std::set<std::string> names;
  for (Activation activation : kActivations) {
    EXPECT_EQ(parse_activation(name(activation)), activation);
    names.emplace(name(activation));
  }
  EXPECT_EQ(names.size(), kActivations.size());
  EXPECT_FALSE(names.contains("unknown"));
  for (const char* token : {"unknown", "", "Silu", "relu7"}) EXPECT_FALSE(parse_activation(token)) << token;
}

// relu6 is a name of clamp, whose bounds are 0 and 6 unless others are given.
TEST(Activation, Relu6IsClamp) {
  const auto activation = parse_activation("relu6");
  ASSERT_EQ(activation, Activation::clamp);
  for (float x : {-kInfinity, -1.0f, 0.0f, 2.5f, 6.0f, 7.0f, kInfinity})
    EXPECT_EQ(apply(*activation, x), std::fmin(std::fmax(x, 0.0f), 6.0f)) << x;
}

TEST(Activation, RefusesParametersThatAreNone) {
  for (float slope : {kNaN, kInfinity, -kInfinity}) {
    const EpilogueSpec spec{.activation = Activation::leaky_relu, .negative_slope = slope};
    EXPECT_EQ(spec.validate().code(), StatusCode::invalid_argument);
    EXPECT_THAT(spec.validate().message(), HasSubstr("negative_slope=")) << slope;
    EXPECT_THAT(spec.validate().message(), HasSubstr("must be finite")) << slope;
    EXPECT_TRUE((EpilogueSpec{.activation = Activation::relu, .negative_slope = slope}).validate().ok());  // not read
  }
  for (float slope : {0.0f, -3.0f, 1e38f})
    EXPECT_TRUE((EpilogueSpec{.activation = Activation::leaky_relu, .negative_slope = slope}).validate().ok());
  EXPECT_THAT((EpilogueSpec{.activation = Activation::clamp, .clamp_low = kNaN}).validate().message(), HasSubstr("is empty"));
}

}  // namespace
}  // namespace nibble
