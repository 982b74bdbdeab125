// Scalar types, schemes and the canonical tensor.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/row_decoder.hpp"
#include "nibble/scheme.hpp"
#include "nibble/tensor.hpp"
#include "nibble/types.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using ::testing::HasSubstr;

TEST(Types, EveryNameParsesBack) {
  for (int i = 1; i <= static_cast<int>(DType::c64); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(name(dtype)), dtype) << name(dtype);
  }
  EXPECT_FALSE(parse_dtype("none"));
  EXPECT_FALSE(parse_dtype("u4b9"));
}

TEST(Types, CodeValues) {
  EXPECT_EQ(code_value(DType::u4b8, 0), -8);
  EXPECT_EQ(code_value(DType::u8b128, 255), 127);
  EXPECT_EQ(code_value(DType::s8, 0x80), -128);
  EXPECT_EQ(code_value(DType::e4m3, 0x7e), 448);
  EXPECT_EQ(code_value(DType::e4m3, 0x01), 0x1p-9f);
  EXPECT_TRUE(std::isnan(code_value(DType::e4m3, 0xff)));
  EXPECT_EQ(code_value(DType::e5m2, 0x7b), 57344);
  EXPECT_EQ(code_value(DType::e5m2, 0xfc), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(code_value(DType::e8m0, 0), 0x1p-127f);
  EXPECT_EQ(code_value(DType::e2m1, 0x7), 6);
  EXPECT_EQ(code_value(DType::e2m1, 0x9), -0.5f);
  EXPECT_EQ(code_value(DType::e2m3, 0x1f), 7.5f);
  EXPECT_EQ(code_value(DType::e3m2, 0x1f), 28);
}

TEST(Types, HalfRoundTripsEveryValue) {
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    const f16 h{static_cast<std::uint16_t>(i)};
    const bf16 b{static_cast<std::uint16_t>(i)};
    if (std::isnan(to_f32(h))) {
      EXPECT_TRUE(std::isnan(to_f32(to_f16(to_f32(h)))));
    } else {
      EXPECT_EQ(to_f16(to_f32(h)).bits, h.bits);
    }
    if (!std::isnan(to_f32(b))) {
      EXPECT_EQ(to_bf16(to_f32(b)).bits, b.bits);
    }
  }
  EXPECT_TRUE(std::isnan(to_f32(to_bf16(std::numeric_limits<float>::quiet_NaN()))));
}

/// Every midpoint between neighbouring halves goes to the even one, and a hair beyond it to the nearer one.
TEST(Types, HalfRoundsToNearestEven) {
  for (std::uint32_t i = 0; i < 0x7bff; ++i) {
    const float low = to_f32(f16{static_cast<std::uint16_t>(i)});
    const float high = to_f32(f16{static_cast<std::uint16_t>(i + 1)});
    const float middle = low + (high - low) / 2;
    EXPECT_EQ(to_f16(middle).bits, (i & 1) == 0 ? i : i + 1);
    EXPECT_EQ(to_f16(std::nextafter(middle, high)).bits, i + 1);
    EXPECT_EQ(to_f16(std::nextafter(middle, low)).bits, i);
  }
  EXPECT_EQ(to_f16(65519.99f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_f16(-1e30f).bits, 0xfc00);
}

TEST(Scheme, NamesRoundTrip) {
  for (const WeightScheme& weight : testing::all_schemes()) {
    const auto parsed = Scheme::parse(weight.name(), weight.scale);
    ASSERT_TRUE(parsed.ok()) << weight.name() << ": " << parsed.status().message();
    EXPECT_EQ(parsed->weight, weight);
  }
  for (const char* text :
       {"u4zg128", "u4b8g32", "s8c", "e4m3b128x128", "s8r_s8c", "s8t_s8t", "s8g128_u4zg128", "s8zg128_u4zg128", "s8zg256_s8c",
        "s8og32_u4zg32", "s8or_u4og32", "u4oci32", "s8og32_u4b8ci32", "u4fg64", "u8b128t", "f32", "f16", "bf16"}) {
    const auto parsed = Scheme::parse(text);
    ASSERT_TRUE(parsed.ok()) << text << ": " << parsed.status().message();
    EXPECT_EQ(parsed->name(), text);
  }
}

TEST(Scheme, BadNamesSayWhy) {
  for (const char* text : {"",         "u4",         "x4g128", "u4g0",     "u4g-1",           "u4gx",    "u4b128", "u4zg128x",
                           "f32c",     "s8q_s8c",    "s8r_",   "_s8c",     "u4zg99999999999", "u4ci",    "u4ci0",  "u4i32",
                           "u4ci32x4", "s8ci32_s8c", "f64",    "bf16g128", "s8r_bf16",        "bf16_s8c"}) {
    const auto parsed = Scheme::parse(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_THAT(parsed.status().message(), HasSubstr("for example u4zg128")) << text;
  }
}

TEST(Scheme, DescribesItself) {
  EXPECT_EQ(Scheme::parse("u4zg128")->weight.describe(),
            "4-bit unsigned codes, integer zero points, f16 scales per group of 128");
  EXPECT_EQ(
      Scheme::parse("u4oci32")->weight.describe(),
      "4-bit unsigned codes, float offsets, f16 scales per 32 channels of the images, shared by all elements of the filter");
  EXPECT_EQ(Scheme::parse("bf16")->weight.describe(), "16-bit floats, not quantized");
}

TEST(QuantTensor, DenseCodesAreTheNumbersThemselves) {
  const std::uint16_t halves[] = {0x3c00, 0xc000, 0x0001, 0x7bff};
  QuantTensor q{.scheme = WeightScheme::dense(DType::f16), .n = 2, .k = 2};
  q.codes.resize(sizeof halves);
  std::memcpy(q.codes.data(), halves, sizeof halves);
  ASSERT_TRUE(q.validate().ok()) << q.validate().message();
  EXPECT_EQ(q.value(0, 0), 1.0f);
  EXPECT_EQ(q.value(0, 1), -2.0f);
  EXPECT_EQ(q.value(1, 0), 0x1p-24f);
  EXPECT_EQ(q.value(1, 1), 65504.0f);
  EXPECT_EQ(q.bits_per_weight(), 16);
  const auto refused = [&q](auto change, const char* why) {
    QuantTensor bad = q;
    change(bad);
    EXPECT_THAT(bad.validate().message(), HasSubstr(why));
  };
  refused([](QuantTensor& x) { x.codes.resize(4); }, "codes holds 4 bytes, W[2,2] needs 8");
  refused([](QuantTensor& x) { x.scheme.group = GroupShape::channel(); }, "a dense weight of f16 has no scales");
  refused([](QuantTensor& x) { x.scheme.scale = DType::f16; }, "a dense weight of f16 has no scales");
  refused([](QuantTensor& x) { x.scales = Tensor(DType::f16, {1, 1}); }, "scales are f16, the scheme says none");
  refused([](QuantTensor& x) { x.scale2 = 2.0f; }, "a dense weight has no scale2, this one is 2");
  refused([](QuantTensor& x) { x.g_idx = {0, 0}; }, "g_idx needs a scheme with groups along K, not f16");
}

TEST(QuantTensor, ValueFollowsItsZeroKind) {
  QuantTensor q{
      .scheme = {DType::u4, ZeroKind::integer, GroupShape::group(2), DType::f32}, .n = 1, .k = 4, .codes = {1, 2, 3, 15}};
  q.scales = Tensor(DType::f32, {1, 2});
  q.scales.set(0, 0.5f);
  q.scales.set(1, 2.0f);
  q.zeros = Tensor(DType::u8, {1, 2});
  q.zeros.set(0, 4);
  q.zeros.set(1, 1);
  ASSERT_TRUE(q.validate().ok()) << q.validate().message();
  EXPECT_EQ(q.value(0, 0), -1.5f);
  EXPECT_EQ(q.value(0, 3), 28.0f);
  q.g_idx = {1, 0, 1, 0};
  EXPECT_EQ(q.value(0, 0), 0.0f);
  q.scale2 = 10.0f;
  EXPECT_EQ(q.value(0, 3), 55.0f);
}

TEST(QuantTensor, RowDecoderIsValueBitForBit) {
  for (const WeightScheme& scheme : testing::all_schemes())
    for (bool second_scale : {false, true}) {
      QuantTensor q = testing::random_weight(scheme, 5, 70, 4, {.act_order = true});
      if (second_scale) q.scale2 = 0.3f;
      const RowDecoder decoder(q);
      std::vector<float> row(70);
      for (std::int64_t n = 0; n < q.n; ++n) {
        decoder.decode(n, row.data());
        for (std::int64_t k = 0; k < q.k; ++k) ASSERT_EQ(row[static_cast<std::size_t>(k)], q.value(n, k)) << scheme.name();
      }
    }
}

TEST(QuantTensor, ValidateNamesTheFieldAndTheValues) {
  const WeightScheme scheme{DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16};
  const QuantTensor good = testing::random_weight(scheme, 8, 64, 1, {.act_order = true});
  ASSERT_TRUE(good.validate().ok());
  const auto expect = [&](auto&& damage, std::string_view text) {
    QuantTensor q = good;
    damage(q);
    const Status status = q.validate();
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_THAT(status.message(), HasSubstr(std::string(text)));
  };
  expect([](QuantTensor& q) { q.n = 0; }, "[0,64]");
  expect([](QuantTensor& q) { q.codes.pop_back(); }, "codes holds 511 bytes");
  expect([](QuantTensor& q) { q.codes[65] = 16; }, "code 16 at [1,1] does not fit in 4 bits");
  expect([](QuantTensor& q) { q.scales = Tensor(DType::f16, {8, 3}); }, "scales has shape [8,3], expected [8,2]");
  expect([](QuantTensor& q) { q.scales.dtype = DType::f32; }, "scales are f32");
  expect([](QuantTensor& q) { q.zeros = {}; }, "zeros are none");
  expect([](QuantTensor& q) { q.g_idx[3] = 2; }, "g_idx[3] = 2 is outside [0,2)");
  expect([](QuantTensor& q) { std::ranges::fill(q.g_idx, 0); }, "64 input channels into group 0, which holds 32");
  expect([](QuantTensor& q) { q.bias = Tensor(DType::f16, {7}); }, "bias has shape [7], expected [8]");
  expect([](QuantTensor& q) { q.prescale = Tensor(DType::s8, {64}); }, "prescale is s8");
}

}  // namespace
}  // namespace nibble
