// The sm_80 GEMM of 8-bit codes on both sides (w8a8_kernel.cuh) on the emulated GPU: the launcher and the kernels as they are.
#include <gtest/gtest.h>

#include "emulator/w8a8_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/w8a8.cu"

namespace nibble::cuda {
namespace {

using emulator::Codes;
using emulator::kBias;
using emulator::kChannelScales;
using emulator::kRelu;
using emulator::kResidual;
using emulator::kSumBias;
using emulator::kZeros;

class EmulatedW8a8Sm80 : public testing::TestWithParam<emulator::W8A8Case> {};

TEST_P(EmulatedW8a8Sm80, GivesTheSumsOfTheLayer) {
  emulator::use_shared_memory(shared);
  const emulator::W8A8Layer layer(GetParam());
  layer.expect_sums(layer.task(), [](const W8A8Task& task) { return linear_w8a8_sm80(task, nullptr); });
}

TEST(EmulatedW8a8Sm80Weights, OfIntegersGiveExactSums) {
  emulator::use_shared_memory(shared);
  emulator::expect_exact_sums([](const W8A8Task& task) { return linear_w8a8_sm80(task, nullptr); });
}

constexpr emulator::W8A8Case kCases[] = {
    {Codes::s8, 3, 72, 1936},
    {Codes::s8, 40, 200, 1040, DType::bf16, kZeros},
    {Codes::s8, 270, 392, 400, DType::f32, kResidual},
    {Codes::s8, 9, 75, 272, DType::s32},
    {Codes::s8, 70, 200, 1040, DType::s32, kZeros | kSumBias},
    {Codes::s8, 70, 200, 400, DType::bf16, kSumBias | kBias},
    {Codes::s8, 40, 136, 272, DType::u8, kZeros | kSumBias},
    {Codes::e4m3, 20, 136, 1040, DType::f16, kBias},
    {Codes::s8, 20, 136, 144, DType::bf16, kBias | kRelu},
    {Codes::e4m3, 150, 264, 272},
    {Codes::groups, 5, 136, 1424},
    {Codes::groups, 70, 192, 896, DType::bf16, kBias},
    {Codes::groups, 30, 72, 640, DType::f32, kResidual | kChannelScales},
};
INSTANTIATE_TEST_SUITE_P(Sm80, EmulatedW8a8Sm80, testing::ValuesIn(kCases),
                         [](const auto& info) { return emulator::name(info.param); });

}  // namespace
}  // namespace nibble::cuda
