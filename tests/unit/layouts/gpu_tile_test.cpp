// The GPU layout's index maths and packing; needs no GPU.
#include "layouts/gpu_tile.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "layouts/layout.hpp"
#include "nibble/plan.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using testing::random_weight;

TEST(GpuTile, EveryCodeHasItsOwnPlace) {
  for (int bits : {4, 8}) {
    std::vector<int> used(static_cast<std::size_t>(gpu_tile::Geometry{.bits = bits}.code_bytes()), 0);
    const int mask = (1 << bits) - 1;
    for (int row = 0; row < gpu_tile::kRows; ++row)
      for (int channel = 0; channel < gpu_tile::kChannels; ++channel) {
        const auto [byte, shift] = gpu_tile::place(bits, row, channel);
        int& place = used.at(static_cast<std::size_t>(byte));
        EXPECT_EQ(place & mask << shift, 0) << bits << " bits, row " << row << ", channel " << channel;
        place |= mask << shift;
      }
    EXPECT_TRUE(std::ranges::all_of(used, [](int byte) { return byte == 0xff; }));
  }
}

TEST(GpuTile, EveryRowHasItsOwnSlotPosition) {
  std::set<int> used;
  for (int row = 0; row < gpu_tile::kRows; ++row) used.insert(gpu_tile::slot_position(row));
  EXPECT_EQ(used.size(), static_cast<std::size_t>(gpu_tile::kRows));
  EXPECT_EQ(*used.rbegin(), gpu_tile::kRows - 1);
}

// The drawing, read back: what a lane gets when it masks a word as the kernels do.
TEST(GpuTile, WordsAreFragmentsOfTheMatrixInstruction) {
  for (int lane = 0; lane < gpu_tile::kLanes; ++lane)
    for (int a = 0; a < 4; ++a)
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * 2 + lane / 4 + 8 * (a % 2);                        // fragment 2
        const int channel = 64 + 16 * 3 + 2 * (lane % 4) + 8 * (a / 2) + half;  // the fourth of the second 64
        const auto four = gpu_tile::place(4, row, channel);
        const int word = gpu_tile::vector_offset(1, 2, lane) + 4 * 3;
        EXPECT_EQ((four.byte - word) * 8 + four.shift, 4 * a + 16 * half);
        const auto eight = gpu_tile::place(8, row, channel);
        EXPECT_EQ(eight.byte, gpu_tile::vector_offset(3, 2, lane) + 8 + 2 * a + half);
      }
}

// As kernels take words for bytes (kernels/cuda/weights/code_fragment.cuh): byte j of lane t's is channel interleaved(4t + j).
TEST(GpuTile, WordsAreBytesOfInterleavedChannels) {
  std::set<int> channels;
  for (int position = 0; position < 16; ++position) {
    const int channel = gpu_tile::interleaved(position), t = position / 4, j = position % 4;
    channels.insert(channel);
    for (int row : {16 * 3 + 5, 16 * 3 + 5 + 8}) {
      const int lane = 5 * 4 + t, upper = row % 16 / 8;
      const auto four = gpu_tile::place(4, row, 64 + 32 + channel);  // the third word of the second 64
      EXPECT_EQ(four.byte, gpu_tile::vector_offset(1, 3, lane) + 4 * 2 + j);
      EXPECT_EQ(four.shift, 4 * upper);
      const auto eight = gpu_tile::place(8, row, 64 + 32 + 16 + channel);  // the second pair of words of the fourth 32
      const int selector = (upper == 0 ? 0x5140 : 0x7362) >> (4 * j) & 7;  // of PRMT: bytes of the pair
      EXPECT_EQ(eight.byte, gpu_tile::vector_offset(3, 3, lane) + 8 + selector);
    }
  }
  EXPECT_EQ(channels.size(), 16u);
}

TEST(GpuTile, RoundTrip) {
  int held = 0;
  for (const WeightScheme& scheme : testing::all_schemes())
    for (auto [n, k] : {std::pair{64, 128}, {130, 480}, {63, 1000}})
      for (bool act_order : {false, true}) {
        const QuantTensor q = random_weight(scheme, n, k, 7, {.act_order = act_order});
        if (!refusal(kGpuTileLayout, q.scheme, q.zeros.dtype, q.k).empty()) continue;
        ++held;
        const auto packed = pack(q, {.layout = std::string(kGpuTileLayout.name)});
        ASSERT_TRUE(packed.ok()) << packed.status().message();
        const auto back = unpack(*packed);
        ASSERT_TRUE(back.ok());
        EXPECT_EQ(*back, q) << scheme.name() << " " << n << "×" << k;
      }
  EXPECT_GT(held, 100);
}

TEST(GpuTile, RecordsAreWholeCopies) {
  for (const WeightScheme& scheme : testing::all_schemes()) {
    const QuantTensor q = random_weight(scheme, 3, 1280, 7);
    if (!gpu_tile::refusal(scheme, q.zeros.dtype, q.k).empty()) continue;
    EXPECT_EQ(gpu_tile::geometry(scheme, q.zeros.dtype, q.n, q.k).record_bytes() % 16, 0) << scheme.name();
  }
}

TEST(GpuTile, RefusalsSayWhy) {
  EXPECT_EQ(gpu_tile::refusal({.group = GroupShape::group(12)}, DType::none, 4096),
            "groups of 12 channels are not a multiple of 8");
  EXPECT_EQ(
      gpu_tile::refusal({.codes = DType::e3m2}, DType::none, 4096),
      "takes codes that are integers of up to 8 bits, e2m1, e4m3 or e5m2, not e3m2: quantize to such codes, or run on the CPU");
  EXPECT_EQ(gpu_tile::refusal({.codes = DType::e4m3, .zero = ZeroKind::offset}, DType::f16, 4096),
            "zeros beside codes of type e4m3");
  EXPECT_EQ(gpu_tile::refusal({.scale = DType::e5m2}, DType::none, 4096),
            "scales of type e5m2 are not f32, f16, bf16, e4m3 or e8m0");
  EXPECT_EQ(gpu_tile::refusal({}, DType::none, 4096), "");
}

}  // namespace
}  // namespace nibble
