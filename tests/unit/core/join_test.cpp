// Joined weights: the D of the parts side by side.
#include "nibble/join.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "nibble/nibble.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using testing::random_weight;

const WeightScheme kGroups{DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16};

/// W of the parts one below the other is W of the joined weight, and their bias alike.
TEST(Join, KeepsEveryNumber) {
  for (const WeightScheme& scheme : testing::all_schemes()) {
    const std::int64_t n = scheme.group.n > 1 ? scheme.group.n : 3;
    std::vector<QuantTensor> parts;
    for (std::uint64_t i = 0; i < 3; ++i)
      parts.push_back(random_weight(scheme, n * static_cast<std::int64_t>(i + 1), 64, 1 + i, {.bias = i != 1}));
    const auto all = join(parts);
    ASSERT_TRUE(all.ok()) << scheme.name() << ": " << all.status().message();
    ASSERT_EQ(all->n, 6 * n);
    std::int64_t row = 0;
    for (const QuantTensor& part : parts)
      for (std::int64_t i = 0; i < part.n; ++i, ++row) {
        ASSERT_EQ(all->bias.at(row), part.bias.empty() ? 0.0f : part.bias.at(i));
        for (std::int64_t k = 0; k < part.k; ++k) ASSERT_EQ(all->value(row, k), part.value(i, k)) << scheme.name();
      }
  }
}

TEST(Join, OfOneIsThatOne) {
  const QuantTensor q = random_weight({DType::s8, ZeroKind::none, GroupShape::tensor(), DType::f32}, 4, 8, 1);
  const auto all = join({&q, 1});
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(*all, q);
}

TEST(Join, RefusesWhatCannotBeOneLayer) {
  const QuantTensor a = random_weight(kGroups, 8, 64, 1);
  EXPECT_THAT(std::string(join({}).status().message()), HasSubstr("no weights"));
  const auto refused = [&](const std::function<void(QuantTensor&)>& change, const char* why) {
    QuantTensor b = random_weight(kGroups, 8, 64, 2);
    change(b);
    const QuantTensor parts[] = {a, b};
    const auto all = join(parts);
    ASSERT_FALSE(all.ok()) << why;
    EXPECT_EQ(all.status().code(), StatusCode::invalid_argument);
    EXPECT_THAT(std::string(all.status().message()), HasSubstr(why));
  };
  refused([](QuantTensor& b) { b = random_weight(kGroups, 8, 96, 2); }, "K is 64 and 96");
  refused(
      [](QuantTensor& b) {
        b = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16}, 8, 64, 2);
      },
      "the scheme is u4zg32 and u4b8g32");
  refused(
      [](QuantTensor& b) {
        b = random_weight({DType::u4, ZeroKind::integer, GroupShape::group(32), DType::bf16}, 8, 64, 2);
      },
      "scales are f16 and bf16");
  refused([](QuantTensor& b) { b.scale2 = 0.5f; }, "scale2 differs");
  refused([](QuantTensor& b) { b.static_acts = StaticActs{0.5f, 0}; }, "static_acts differ");
  refused([](QuantTensor& b) { b.act_limit = 2.0f; }, "act_limit differs");
  refused([](QuantTensor& b) { b = random_weight(kGroups, 8, 64, 2, {.act_order = true}); }, "g_idx differs");
  refused([](QuantTensor& b) { b = random_weight(kGroups, 8, 64, 2, {.prescale = true}); }, "prescale differs");
  refused([](QuantTensor& b) { b.codes.pop_back(); }, "codes holds");
  const WeightScheme blocks{DType::e4m3, ZeroKind::none, GroupShape::block(128, 128), DType::f32};
  const QuantTensor parts[] = {random_weight(blocks, 64, 128, 1), random_weight(blocks, 64, 128, 2)};
  EXPECT_THAT(std::string(join(parts).status().message()), HasSubstr("64 rows end inside a block of 128"));
}

}  // namespace
}  // namespace nibble
