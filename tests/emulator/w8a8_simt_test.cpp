// 8-bit codes on both sides on every GPU (w8a8.cu), on the emulated one: the launcher and the kernels as they are.
#include <gtest/gtest.h>

#include "emulator/w8a8_layer.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/simt/w8a8.cu"

namespace nibble::cuda {
namespace {

using emulator::Codes;

class EmulatedW8a8Simt : public testing::TestWithParam<emulator::W8A8Case> {};

TEST_P(EmulatedW8a8Simt, GivesTheSumsOfTheLayer) {
  const emulator::W8A8Layer layer(GetParam());
  layer.expect_sums(layer.task(), [](const W8A8Task& task) { return linear_w8a8_simt(task, nullptr); });
}

TEST(EmulatedW8a8SimtWeights, OfIntegersGiveExactSums) {
  emulator::expect_exact_sums([](const W8A8Task& task) { return linear_w8a8_simt(task, nullptr); });
}

constexpr emulator::W8A8Case kCases[] = {
    {Codes::s8, 3, 72, 1936},
    {Codes::s8, 40, 200, 1040, DType::bf16, emulator::kZeros},
    {Codes::s8, 9, 72, 272, DType::s32, emulator::kZeros | emulator::kSumBias},
    {Codes::s8, 20, 75, 272, DType::u8, emulator::kSumBias},
    {Codes::e4m3, 20, 136, 1040, DType::f16, emulator::kBias},
    {Codes::s8, 9, 72, 144, DType::f32, emulator::kBias | emulator::kRelu},
    {Codes::groups, 50, 136, 528},
    {Codes::groups, 30, 72, 640, DType::f32, emulator::kResidual | emulator::kChannelScales},
};
INSTANTIATE_TEST_SUITE_P(Simt, EmulatedW8a8Simt, testing::ValuesIn(kCases),
                         [](const auto& info) { return emulator::name(info.param); });

}  // namespace
}  // namespace nibble::cuda
