// Convolutions of weights in gpu_n64k128 and 16-bit activations by sm_80's GEMM (conv.cu), on the emulated GPU: the launcher and the
// kernels as they are.
#include <gtest/gtest.h>

#include "emulator/conv_layer.hpp"
#include "emulator/float_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/conv.cu"

namespace nibble::cuda {
namespace {

struct Case {
  emulator::ConvShape shape;
  int group;
  bool prescaled = false;
};

class EmulatedConvSm80 : public testing::TestWithParam<Case> {};

TEST_P(EmulatedConvSm80, GivesTheSumsOfTheLayer) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  const emulator::FloatConv conv(c.shape, c.group, c.prescaled);
  ConvTask task = conv.task();
  const auto scratch = conv.scratch(task);
  c.shape.expect_sums(
      task, [](const ConvTask& t) { return conv_gemm_sm80(t, nullptr); }, [&](std::size_t i) { return conv.act_f16(i); },
      [&](int n, int k) { return emulator::rounded_weight(conv.weight, DType::f16, n, k).value; }, 0x1p-20);
}

// Records that are parts of several of the filter's elements, strides, dilations, tiles that end in another image.
constexpr Case kCases[] = {
    {{2, 9, 7, 24, 72, 3, 1, 1, 1, false}, 32},       {{1, 12, 11, 64, 136, 3, 2, 1, 1, true}, 64},
    {{3, 10, 10, 128, 64, 3, 1, 2, 2, false}, 128},   {{1, 9, 9, 8, 200, 5, 2, 2, 1, true}, 128},
    {{2, 9, 7, 24, 72, 3, 1, 1, 1, false}, 32, true},
};
INSTANTIATE_TEST_SUITE_P(Sm80, EmulatedConvSm80, testing::ValuesIn(kCases));

}  // namespace
}  // namespace nibble::cuda
