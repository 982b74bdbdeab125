// W from a packed weight (dequantize_packed.cu) on the emulated GPU, bit for bit.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>

#include "emulator/float_layer.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/weights/dequantize_packed.cu"

namespace nibble::cuda {
namespace {

struct Case {
  gpu_tile::Codes codes;
  int group;
  ZeroKind zeros;
  int n, k, padding;  // padding: elements between rows of W
  bool act_order = false;
};

class EmulatedDequantizePacked : public testing::TestWithParam<Case> {
 protected:
  template <class Out>
  void expect_weights(const Case& c, DType type) {
    std::mt19937 random(static_cast<unsigned>(c.n * 7 + c.k));
    const emulator::TileWeight weight(c.n, c.k, c.codes, c.group, c.zeros, random);
    std::vector<std::int32_t> order(static_cast<std::size_t>(c.k));
    std::iota(order.begin(), order.end(), 0);
    if (c.act_order) std::shuffle(order.begin(), order.end(), random);
    DeviceWeight task = weight.device();
    if (c.act_order) task.perm = order.data();
    for (const bool transposed : {false, true}) {
      SCOPED_TRACE(fmt::format("{}{}", nibble::name(type), transposed ? " transposed" : ""));
      const int stride = (transposed ? c.n : c.k) + c.padding;
      std::vector<Out> out(static_cast<std::size_t>((transposed ? c.k : c.n) * stride + 8), Out{0xa5a5}), expected = out;
      for (int n = 0; n < c.n; ++n)
        for (int k = 0; k < c.k; ++k) {
          const auto value = static_cast<float>(weight.value(n, k));
          const int channel = order[static_cast<std::size_t>(k)];
          Out& to = expected[static_cast<std::size_t>(transposed ? channel * stride + n : n * stride + channel)];
          if constexpr (sizeof(Out) == 4)
            to = std::bit_cast<std::uint32_t>(value);
          else
            to = emulator::to_half(type, value);
        }
      ASSERT_EQ(dequantize_packed(task, out.data(), type, stride, transposed, nullptr), cudaSuccess);
      for (std::size_t i = 0; i < out.size(); ++i)
        ASSERT_EQ(out[i], expected[i]) << i / static_cast<std::size_t>(stride) << " " << i;
    }
  }
};

TEST_P(EmulatedDequantizePacked, GivesTheWeight) {
  expect_weights<std::uint16_t>(GetParam(), DType::f16);
  expect_weights<std::uint16_t>(GetParam(), DType::bf16);
  expect_weights<std::uint32_t>(GetParam(), DType::f32);
}

// Rows and channels with tails, more pieces than CTAs, rows of W that are not aligned, channels in another order.
constexpr Case kCases[] = {
    {Codes::u4, 128, ZeroKind::none, 264, 400, 0},         {Codes::u4, 32, ZeroKind::integer, 72, 528, 8},
    {Codes::u4, 64, ZeroKind::offset, 136, 272, 3},        {Codes::u8, 128, ZeroKind::integer, 100, 530, 0},
    {Codes::u4, 128, ZeroKind::integer, 72, 264, 0, true}, {Codes::u8, 64, ZeroKind::offset, 72, 136, 1, true},
    {Codes::u4, 96, ZeroKind::integer, 72, 672, 0},        {Codes::u8, 192, ZeroKind::none, 72, 530, 2, true},
    {Codes::u4, 8, ZeroKind::integer, 72, 400, 0},         {Codes::u4, 16, ZeroKind::offset, 136, 272, 3},
    {Codes::u8, 24, ZeroKind::none, 72, 528, 0, true},     {Codes::u8, 48, ZeroKind::integer, 264, 384, 8},
    {Codes::e2m1, 32, ZeroKind::none, 136, 272, 0},        {Codes::e2m1, 16, ZeroKind::none, 72, 400, 3},
    {Codes::e4m3, 128, ZeroKind::none, 72, 530, 8},        {Codes::e4m3, 1024, ZeroKind::none, 136, 272, 0},
};
INSTANTIATE_TEST_SUITE_P(Weights, EmulatedDequantizePacked, testing::ValuesIn(kCases));

}  // namespace
}  // namespace nibble::cuda
