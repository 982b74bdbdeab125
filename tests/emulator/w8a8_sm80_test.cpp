// The sm_80 GEMM of 8-bit codes on both sides (w8a8_kernel.cuh) on the emulated GPU: the launcher and the kernels as they are.
#include <gtest/gtest.h>

#include "emulator/split_memory.hpp"
#include "emulator/w8a8_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/w8a8.cu"
#include "kernels/cuda/sm80/w8a8_experts.cu"

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
  layer.expect_sums(layer.task(), [](const W8A8Task& task) { return linear_w8a8_sm80(task, 1, nullptr); });
}

TEST_P(EmulatedW8a8Sm80, GivesThemWithCtasThatDivideK) {
  emulator::use_shared_memory(shared);
  const emulator::W8A8Layer layer(GetParam());
  const gpu_w8::Geometry weight = layer.task().weight.geometry;
  if (!weight.integers) {
    EXPECT_EQ(linear_w8a8_sm80(layer.task(), 2, nullptr), cudaErrorInvalidValue);
    return;
  }
  for (const int split : emulator::splits_for(layer.c.m))
    emulator::expect_twice(
        layer.task(), w8a8_sm80_bytes(split, layer.c.m, weight.n, weight.records()), 0,
        [&](const W8A8Task& task) { return linear_w8a8_sm80(task, split, nullptr); },
        [&](const W8A8Task& task, auto noting) { layer.expect_sums(task, noting); });
}

TEST(EmulatedW8a8Sm80Weights, OfIntegersGiveExactSums) {
  emulator::use_shared_memory(shared);
  emulator::expect_exact_sums([](const W8A8Task& task) { return linear_w8a8_sm80(task, 1, nullptr); });
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

// ---- rows of experts

struct ExpertCase {
  emulator::W8A8Case layer;
  int tokens;
};

class EmulatedW8a8Sm80Experts : public testing::TestWithParam<ExpertCase> {};

TEST_P(EmulatedW8a8Sm80Experts, GiveTheSumsOfTheirRows) {
  const emulator::W8A8Case& layer = GetParam().layer;
  const int tokens = GetParam().tokens;
  emulator::use_shared_memory(shared);
  emulator::expect_sums_of_experts(emulator::W8A8Layer(layer), tokens,
                                   [&](const W8A8Task& task) { return linear_w8a8_sm80_experts(task, tokens, nullptr); });
}

constexpr ExpertCase kExpertCases[] = {
    {{Codes::s8, 37, 200, 1936, DType::bf16, kZeros}, 16},
    {{Codes::s8, 150, 136, 640, DType::f32, kResidual}, 64},
    {{Codes::s8, 9, 75, 270, DType::f16}, 16},
    {{Codes::s8, 70, 75, 272, DType::s32, kZeros | kSumBias}, 64},
    {{Codes::e4m3, 170, 200, 384}, 64},
    {{Codes::e4m3, 20, 72, 1424, DType::f16}, 16},
    {{Codes::groups, 41, 136, 1024}, 16},
    {{Codes::groups, 90, 264, 640, DType::f32}, 64},
    {{Codes::groups, 70, 136, 384, DType::f32, kChannelScales}, 64},
};
INSTANTIATE_TEST_SUITE_P(Sm80, EmulatedW8a8Sm80Experts, testing::ValuesIn(kExpertCases), [](const auto& info) {
  return fmt::format("{}_{}", emulator::name(info.param.layer), info.param.tokens);
});

TEST(EmulatedW8a8Sm80Experts, TakeTilesOfTheirRowsOnly) {
  const emulator::W8A8Layer layer({Codes::s8, 4, 72, 256});
  W8A8Task task = layer.task();
  EXPECT_EQ(linear_w8a8_sm80_experts(task, 16, nullptr), cudaErrorInvalidValue);  // no tiles
  const ExpertTile tile{};
  task.experts.tiles = &tile;
  EXPECT_EQ(linear_w8a8_sm80_experts(task, 32, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace nibble::cuda
