// Codes of 4 bits and parameters of convolutions in the forms that other programs keep them in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "nibble/tensor.hpp"

namespace nibble {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Nibbles, LieInEitherOrderAndRowsBeginWithAByte) {
  const std::array<std::uint8_t, 4> bytes{0x21, 0xf3, 0x54, 0x06};
  EXPECT_THAT(unpack_nibbles(bytes, 2, 3, NibbleOrder::low_first).value(), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(unpack_nibbles(bytes, 2, 3, NibbleOrder::high_first).value(), ElementsAre(2, 1, 15, 5, 4, 0));
  EXPECT_THAT(unpack_nibbles(bytes, 1, 8, NibbleOrder::high_first).value(), ElementsAre(2, 1, 15, 3, 5, 4, 0, 6));
}

TEST(Nibbles, RefusesOtherSizes) {
  const std::array<std::uint8_t, 4> bytes{};
  for (const auto& [n, k] : {std::pair{2, 5}, {1, 6}, {3, 3}})
    EXPECT_THAT(unpack_nibbles(bytes, n, k, NibbleOrder::low_first).status().message(), HasSubstr("4 bytes for the codes of"));
  EXPECT_EQ(unpack_nibbles(bytes, 0, 8, NibbleOrder::low_first).status().code(), StatusCode::invalid_argument);
  EXPECT_EQ(unpack_nibbles(bytes, 1, -8, NibbleOrder::low_first).status().code(), StatusCode::invalid_argument);
}

TEST(RepeatForFilter, CopiesTheGroupsOfAnElement) {
  Tensor scales(DType::f32, {2, 2});
  for (std::int64_t i = 0; i < 4; ++i) scales.set(i, static_cast<float>(i + 1));
  const auto all = repeat_for_filter(scales, {1, 3}, 12);
  ASSERT_TRUE(all.ok()) << all.status().message();
  EXPECT_THAT(all->shape, ElementsAre(2, 6));
  EXPECT_THAT(std::vector<float>(all->as<float>(), all->as<float>() + 12), ElementsAre(1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4));
  EXPECT_EQ(repeat_for_filter(scales, {1, 1}, 2).value(), scales);
  for (const Extent& filter : {Extent{0, 3}, {1, 7}, {kMaxSize, kMaxSize}, {-1, -1}})
    EXPECT_THAT(repeat_for_filter(scales, filter, 12).status().message(), HasSubstr("shape [2,2] for all elements of a filter"));
  EXPECT_EQ(repeat_for_filter(Tensor(DType::f32, {4}), {1, 3}, 12).status().code(), StatusCode::invalid_argument);
}

}  // namespace
}  // namespace nibble
