// Convolutions of weights in gpu_n64k128 and codes by sm_80's kernel (conv_wna8.cu), with the quantizers in front, on the emulated GPU: the
// launcher and the kernels as they are.
#include <gtest/gtest.h>

#include "emulator/conv_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/conv_wna8.cu"

namespace nibble::cuda {
namespace {

struct Case {
  emulator::ConvShape shape;
  int group;  // of weights and activations
  bool prescaled = false;

  int fold() const { return group >= gpu_tile::kChannels ? gpu_tile::kChannels : 32; }
};

class EmulatedConvWna8Sm80 : public testing::TestWithParam<Case> {};

TEST_P(EmulatedConvWna8Sm80, GivesTheSumsOfTheLayer) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  emulator::FloatConv conv(c.shape, c.group);
  conv.be_exact_codes(c.group, false, c.prescaled);
  ConvTask task = conv.task();
  task.fold = c.fold();
  task.online = {.type = DType::f16, .group = c.group};
  const Wna8ImageMap map = wna8_image_map(task.fold, c.shape.images * c.shape.height * c.shape.width, c.shape.channels, 0);
  std::vector<float4> scratch(map.bytes / sizeof(float4));
  task.scratch = scratch.data();
  c.shape.expect_sums(
      task, [](const ConvTask& t) { return conv_wna8_sm80(t, nullptr); }, [&](std::size_t i) { return conv.act(i); },
      [&](int n, int k) { return conv.weight.value(n, k); }, 0x1p-19);
}

TEST_P(EmulatedConvWna8Sm80, MultipliesF32AsFixedPoint) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  emulator::FloatConv conv(c.shape, c.group, c.prescaled);
  for (const bool channels_first : {false, true})
    conv.expect_f32_sums(channels_first, c.fold(), [](const ConvTask& task) { return conv_wna8_sm80(task, nullptr); });
}

// Folds of 128 and of 32 channels, strides, dilations, tiles that end in another image.
constexpr Case kCases[] = {
    {{2, 9, 7, 128, 72, 3, 1, 1, 1, false}, 128},
    {{1, 12, 11, 64, 136, 3, 2, 1, 1, true}, 64},
    {{1, 10, 10, 192, 64, 3, 1, 2, 2, false}, 32, true},
    {{2, 8, 9, 256, 72, 1, 1, 0, 1, true}, 128},
};
INSTANTIATE_TEST_SUITE_P(Sm80, EmulatedConvWna8Sm80, testing::ValuesIn(kCases));

}  // namespace
}  // namespace nibble::cuda
