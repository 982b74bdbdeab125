// Convolutions of 8-bit codes on both sides by sm_80's GEMM (conv_w8a8.cu), on the emulated GPU: the launcher and the kernels as they
// are.
#include <gtest/gtest.h>

#include "emulator/conv_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/conv_w8a8.cu"

namespace nibble::cuda {

namespace {

class EmulatedConvW8a8Sm80 : public testing::TestWithParam<emulator::ConvShape> {};

TEST_P(EmulatedConvW8a8Sm80, GivesTheSumsOfTheLayer) {
  emulator::use_shared_memory(shared);
  for (const DType type : {DType::s8, DType::e4m3}) {
    const emulator::CodesConv conv(GetParam(), type);
    conv.expect_sums(conv.task(), [](const ConvTask& task) { return conv_w8a8_sm80(task, nullptr); });
  }
}

// Channels of which several of the filter's elements are a record, strides, dilations, tiles that end in another image.
constexpr emulator::ConvShape kConvs[] = {
    {2, 9, 7, 16, 72, 3, 1, 1, 1, false},
    {1, 12, 11, 64, 136, 3, 2, 1, 1, true},
    {3, 10, 10, 48, 64, 3, 1, 2, 2, false},
    {1, 17, 16, 128, 264, 1, 1, 0, 1, true},
};
INSTANTIATE_TEST_SUITE_P(Sm80, EmulatedConvW8a8Sm80, testing::ValuesIn(kConvs));

}  // namespace
}  // namespace nibble::cuda
