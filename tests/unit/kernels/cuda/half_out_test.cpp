// Which outputs the wgmma kernels store in whole vectors (half_out.hpp).
#include "kernels/cuda/tasks/half_out.hpp"

#include <gtest/gtest.h>

#include <array>

namespace nibble::cuda {
namespace {

alignas(16) std::array<std::uint16_t, 16> memory;

epilogue::Element plain(std::int64_t stride, std::size_t offset = 0) {
  epilogue::Element e;
  e.out = DType::f16;
  e.d = memory.data() + offset;
  e.d_stride = stride;
  return e;
}

TEST(HalfOut, MatricesInWholeVectors) {
  EXPECT_EQ(half_out(plain(64), 64), HalfOut::channels);
  EXPECT_EQ(half_out(plain(64), 60), HalfOut::no);
  EXPECT_EQ(half_out(plain(68), 64), HalfOut::no);
  EXPECT_EQ(half_out(plain(64, 4), 64), HalfOut::no);
}

TEST(HalfOut, ImagesInEightsOrFours) {
  EXPECT_EQ(half_out(plain(1), 8 * 3136, 3136, 3136), HalfOut::pixels);    // 56×56
  EXPECT_EQ(half_out(plain(1), 8 * 196, 196, 196), HalfOut::pixel_fours);  // 14×14
  EXPECT_EQ(half_out(plain(1, 4), 8 * 3136, 3136, 3136), HalfOut::pixel_fours);
  EXPECT_EQ(half_out(plain(1, 2), 8 * 3136, 3136, 3136), HalfOut::no);
  EXPECT_EQ(half_out(plain(1), 8 * 49, 49, 49), HalfOut::no);  // 7×7
  EXPECT_EQ(half_out(plain(1), 8 * 3136 + 2, 3136, 3136), HalfOut::no);
}

TEST(HalfOut, OnlyTheBiasIsShort) {
  const float one = 1.0f;
  epilogue::Element e = plain(64);
  e.bias.data = &one;
  EXPECT_EQ(half_out(e, 64), HalfOut::channels);
  for (auto spoil :
       {+[](epilogue::Element& x) { x.acc_scale = 2.0f; }, +[](epilogue::Element& x) { x.activation = Activation::relu; },
        +[](epilogue::Element& x) { x.out = DType::f32; }, +[](epilogue::Element& x) { x.out = DType::s8; },
        +[](epilogue::Element& x) { x.gate.data = x.d; }, +[](epilogue::Element& x) { x.residual.data = x.d; },
        +[](epilogue::Element& x) { x.row_scale = static_cast<const float*>(x.bias.data); },
        +[](epilogue::Element& x) { x.col_scale = static_cast<const float*>(x.bias.data); }}) {
    epilogue::Element spoiled = e;
    spoil(spoiled);
    EXPECT_EQ(half_out(spoiled, 64), HalfOut::no);
    EXPECT_EQ(half_out(spoiled, 8 * 3136, 3136, 3136), HalfOut::no);
  }
}

}  // namespace
}  // namespace nibble::cuda
