// Codes of 4 bits in the forms that other programs keep them in, and groups that all elements of a filter share.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "core/row_decoder.hpp"
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

/// TensorRT-LLM's steps, one after the other, of signed codes [K][N]: rows that make room for a matrix instruction, columns in memory
/// order, columns of 64 rows side by side, places of codes in a register.
struct Trtllm {
  int bits;
  std::vector<int> rows;
  int columns;
  std::vector<int> places;

  std::vector<std::uint8_t> pack(const std::vector<std::vector<int>>& source) const {
    const std::size_t k = source.size(), n = source[0].size();
    std::vector<int> all(n * k);
    for (std::size_t c = 0; c < n; ++c)
      for (std::size_t i = 0; i < k; ++i) {
        const std::size_t row =
            rows.empty() ? i : i / rows.size() * rows.size() + static_cast<std::size_t>(rows[i % rows.size()]);
        const auto side = static_cast<std::size_t>(columns);
        const std::size_t at = side == 1 ? c * k + i : c / side * side * k + side * (i / 64 * 64) + 64 * (c % side) + i % 64;
        all[at] = source[row][c] + (places.empty() ? 0 : 1 << (bits - 1));
      }
    std::vector<int> placed = all;
    for (std::size_t i = 0; !places.empty() && i < all.size(); ++i)
      placed[i] = all[i / places.size() * places.size() + static_cast<std::size_t>(places[i % places.size()])];
    std::vector<std::uint8_t> bytes(n * k * static_cast<std::size_t>(bits) / 8);
    for (std::size_t i = 0; i < placed.size(); ++i) {
      const auto code = static_cast<std::uint8_t>(placed[i] & ((1 << bits) - 1));
      if (bits == 8)
        bytes[i] = code;
      else
        bytes[i / 2] = static_cast<std::uint8_t>(bytes[i / 2] | code << (i % 2 * 4));
    }
    return bytes;
  }
};

const std::vector<int> kRows4{0, 1, 8,  9,  16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27,
                              4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31};
const std::vector<int> kPlaces4{0, 2, 4, 6, 1, 3, 5, 7};

TEST(Trtllm, LaysOutCodesInSteps) {
  const std::vector<int> fp8{0, 1, 2,  3,  16, 17, 18, 19, 4,  5,  6,  7,  20, 21, 22, 23,
                             8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
  const std::vector<int> rows8{0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
  const std::vector<std::pair<TrtllmLayout, Trtllm>> layouts{{TrtllmLayout::interleaved, {4, kRows4, 4, kPlaces4}},
                                                             {TrtllmLayout::interleaved_fp8, {4, fp8, 4, kPlaces4}},
                                                             {TrtllmLayout::transposed, {4, {}, 1, {}}},
                                                             {TrtllmLayout::permuted, {4, kRows4, 1, kPlaces4}},
                                                             {TrtllmLayout::interleaved, {8, rows8, 2, {0, 2, 1, 3}}},
                                                             {TrtllmLayout::transposed, {8, {}, 1, {}}},
                                                             {TrtllmLayout::permuted, {8, rows8, 1, {0, 2, 1, 3}}}};
  std::mt19937 random(7);
  for (const auto& [layout, steps] : layouts) {
    const int n = 8, k = 192, half = 1 << (steps.bits - 1);
    std::vector<std::vector<int>> source(k, std::vector<int>(n));
    for (auto& row : source)
      for (int& code : row) code = static_cast<int>(random() % (2U * static_cast<unsigned>(half))) - half;
    const auto codes = unpack_trtllm(steps.pack(source), n, k, steps.bits, layout);
    ASSERT_TRUE(codes.ok()) << codes.status().message();
    for (std::size_t row = 0; row < n; ++row)
      for (std::size_t i = 0; i < k; ++i) ASSERT_EQ((*codes)[row * k + i], source[i][row] + half) << static_cast<int>(layout);
  }
}

/// The first rows of a column as its tools write them for compute capability 8.0.
TEST(Trtllm, HasTheBytesOfItsTools) {
  constexpr std::array<std::uint8_t, 16> kFirst{0xa1, 0x93, 0x05, 0xfa, 0xbc, 0x4a, 0xf2, 0xaa,
                                                0xc3, 0x9c, 0x3f, 0x5f, 0xe6, 0xe4, 0xa1, 0xd6};
  std::vector<std::uint8_t> bytes(4 * 64 / 2);
  std::ranges::copy(kFirst, bytes.begin());
  const auto codes = unpack_trtllm(bytes, 4, 64, 4, TrtllmLayout::interleaved);
  ASSERT_TRUE(codes.ok()) << codes.status().message();
  const std::array signed_codes{-7, -3, 4, -6, -5, 7, -2, -7, 2, -8, 3, 7, 4, -5, 6, 2};
  for (std::size_t i = 0; i < signed_codes.size(); ++i) EXPECT_EQ((*codes)[i], signed_codes[i] + 8) << i;
}

TEST(Trtllm, RefusesOtherSizes) {
  const std::vector<std::uint8_t> bytes(64 * 4 / 2);
  const auto message = [&](std::int64_t n, std::int64_t k, int bits, TrtllmLayout layout) {
    return unpack_trtllm(bytes, n, k, bits, layout).status().message();
  };
  EXPECT_THAT(message(4, 32, 4, TrtllmLayout::interleaved),
              HasSubstr("W[4,32]: this layout has K in multiples of 64 and N of 4"));
  EXPECT_THAT(message(2, 64, 4, TrtllmLayout::interleaved), HasSubstr("and N of 4"));
  EXPECT_THAT(message(8, 64, 4, TrtllmLayout::permuted),
              HasSubstr("128 bytes for the codes of W[8,64], 4 bits each: that takes 256"));
  EXPECT_THAT(message(3, 3, 4, TrtllmLayout::transposed), HasSubstr("that takes 5"));
  EXPECT_THAT(message(4, 64, 3, TrtllmLayout::permuted), HasSubstr("codes of 3 bits"));
  EXPECT_THAT(message(4, 64, 8, TrtllmLayout::interleaved_fp8), HasSubstr("4 bits there"));
  EXPECT_EQ(unpack_trtllm(bytes, -4, 64, 4, TrtllmLayout::interleaved).status().code(), StatusCode::invalid_argument);
}

/// W[1,12]: a filter of 1×3 on images of 4 channels, in two groups.
QuantTensor filter_of_images() {
  QuantTensor q;
  q.scheme = Scheme::parse("u4oci2", DType::f32)->weight;
  q.n = 1;
  q.k = 12;
  q.filter = {1, 3};
  q.codes.assign(12, 1);
  q.scales = q.zeros = Tensor(DType::f32, {1, 2});
  for (std::int64_t g = 0; g < 2; ++g) q.scales.set(g, static_cast<float>(g + 1)), q.zeros.set(g, 10.0f);
  return q;
}

TEST(GroupsOfImages, AreThoseOfEveryElementOfTheFilter) {
  const QuantTensor q = filter_of_images();
  ASSERT_TRUE(q.validate().ok()) << q.validate().message();
  EXPECT_EQ(q.groups(), 2);
  const RowDecoder decoder(q);
  std::vector<float> row(12);
  decoder.decode(0, row.data());
  for (std::int64_t k = 0; k < 12; ++k) {
    EXPECT_EQ(q.group_of(k), k % 4 / 2) << k;
    EXPECT_EQ(q.value(0, k), k % 4 < 2 ? 11.0f : 12.0f) << k;
    EXPECT_EQ(row[static_cast<std::size_t>(k)], q.value(0, k)) << k;
  }
}

TEST(GroupsOfImages, DivideTheChannelsOfTheImages) {
  QuantTensor q = filter_of_images();
  q.scheme.group.k = 3;
  EXPECT_THAT(q.validate().message(), HasSubstr("u4oci3 groups 3 channels of the images, which have 4 at each of the 1x3"));
  q = filter_of_images();
  q.scales = Tensor(DType::f32, {1, 6});  // a copy for each element
  EXPECT_THAT(q.validate().message(), HasSubstr("scales has shape [1,6]"));
  q = filter_of_images();
  q.g_idx.assign(12, 0);
  EXPECT_THAT(q.validate().message(), HasSubstr("g_idx cannot be combined with u4oci2"));
}

}  // namespace
}  // namespace nibble
