// Convolutions without tensor cores (conv.cu of simt) on the emulated GPU: the launcher and the kernels as they are.
#include <gtest/gtest.h>

#include "emulator/conv_layer.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/simt/conv.cu"

namespace nibble::cuda {
namespace {

class EmulatedConvDirect : public testing::TestWithParam<emulator::ConvShape> {};

TEST_P(EmulatedConvDirect, GivesTheSumsOfFloats) {
  const emulator::FloatConv conv(GetParam(), GetParam().channels % 8 == 0 ? 8 : 32, GetParam().images > 1);
  conv.shape.expect_sums(
      conv.task(), [](const ConvTask& task) { return conv_direct(task, nullptr); }, [&](std::size_t i) { return conv.act(i); },
      [&](int n, int k) { return conv.weight.value(n, k); }, 0x1p-20);
}
TEST_P(EmulatedConvDirect, GivesTheSumsOfCodes) {
  const emulator::CodesConv conv(GetParam());
  conv.expect_sums(conv.task(), [](const ConvTask& task) { return conv_direct_s8(task, nullptr); });
}

// Channels and rows with tails, pixels of several images in a CTA, strides, dilations, both layouts of D.
constexpr emulator::ConvShape kConvs[] = {
    {2, 9, 7, 16, 20, 3, 1, 1, 1, false},
    {1, 12, 11, 24, 9, 3, 2, 1, 1, true},
    {3, 10, 10, 5, 8, 3, 1, 2, 2, false},
    {1, 17, 16, 70, 12, 1, 1, 0, 1, true},
};
INSTANTIATE_TEST_SUITE_P(Simt, EmulatedConvDirect, testing::ValuesIn(kConvs));

}  // namespace
}  // namespace nibble::cuda
