// Layouts of the CPU: what is packed comes back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "layouts/layout.hpp"
#include "layouts/tile.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using testing::random_weight;

TEST(Layouts, RoundTripOfEverySchemeAndAwkwardShapes) {
  std::uint64_t seed = 0;
  std::map<const Layout*, int> held;
  for (const Layout* layout : layout_table())
    for (const WeightScheme& scheme : testing::all_schemes())
      for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {16, 32}, {33, 129}, {31, 64}, {65, 7}}) {
        ++seed;
        const QuantTensor q =
            random_weight(scheme, n, k, seed, {.act_order = seed % 2 == 0, .prescale = seed % 3 == 0, .bias = seed % 5 == 0});
        if (const std::string reason = refusal(*layout, q.scheme, q.zeros.dtype, q.k); !reason.empty()) {
          const Status status = pack(q, {.layout = std::string(layout->name)}).status();
          EXPECT_EQ(status.code(), StatusCode::unsupported);
          EXPECT_THAT(status.message(), HasSubstr(reason));
          continue;
        }
        ++held[layout];
        const auto packed = pack(q, {.layout = std::string(layout->name)});
        ASSERT_TRUE(packed.ok()) << packed.status().message();
        EXPECT_EQ(packed->layout(), layout->name);
        const auto back = unpack(*packed);
        ASSERT_TRUE(back.ok());
        EXPECT_TRUE(*back == q) << layout->name << " " << scheme.name() << " [" << n << "," << k << "]";
      }
  for (const Layout* layout : layout_table()) EXPECT_GT(held[layout], 50) << layout->name;
}

/// The planes of every code width tile its bits, and every (plane, row, channel) has a distinct place.
TEST(Layouts, BitPlanesAreAPartition) {
  for (int bits = 1; bits <= 8; ++bits)
    for (int rows : {16, 32}) {
      const tile::Planes planes = tile::planes(bits);
      int shift = 0;
      std::int64_t bytes = 0;
      for (int p = 0; p < planes.count; ++p) {
        const auto [width, at] = planes.plane[static_cast<std::size_t>(p)];
        EXPECT_EQ(at, shift);
        shift += width;
        std::set<std::pair<int, int>> places;
        for (int r = 0; r < rows; ++r)
          for (int j = 0; j < tile::kOctet; ++j) {
            const tile::BitPlace place = tile::place(rows, width, r, j);
            EXPECT_LT(place.byte, rows * width);
            EXPECT_LE(place.shift + width, 8);
            EXPECT_TRUE(places.insert({place.byte, place.shift}).second);
          }
        bytes += rows * width;
      }
      EXPECT_EQ(shift, bits);
      EXPECT_EQ(bytes, rows * bits);
    }
}

}  // namespace
}  // namespace nibble
