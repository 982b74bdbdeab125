// The sm_80 GEMM of weights in gpu_n64k128 and activations that are s8 codes (wna8_kernel.cuh), on the emulated GPU: the launcher and the
// kernels as they are.
#include <gtest/gtest.h>

#include "emulator/fixed_point_layer.hpp"
#include "emulator/split_memory.hpp"
#include "emulator/wna8_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/wna8.cu"
#include "kernels/cuda/sm80/wna8_experts.cu"
#include "kernels/cuda/sm80/wna8_floats.cu"
#include "kernels/cuda/sm80/wna8_halves.cu"

namespace nibble::cuda {
namespace {

class EmulatedWna8Sm80 : public testing::TestWithParam<emulator::Wna8Case> {};

TEST_P(EmulatedWna8Sm80, GivesTheSumsOfTheLayer) {
  emulator::use_shared_memory(shared);
  const emulator::Wna8Layer layer(GetParam());
  layer.expect_sums(layer.task(), [](const Wna8Task& task) { return linear_wna8_sm80(task, 1, nullptr); });
}

void expect_sums_of_parts(const emulator::Wna8Layer& layer) {
  const int records = layer.task().weight.geometry.records();
  for (const int split : emulator::splits_for(layer.c.m))
    emulator::expect_twice(
        layer.task(), wna8_sm80_bytes(layer.c.m, layer.c.n, std::min(split, records)),
        static_cast<std::size_t>(2 * layer.c.m * layer.c.n),
        [&](const Wna8Task& task) { return wna8_sm80_launcher(task)(task, split, nullptr); },
        [&](const Wna8Task& task, auto noting) { layer.expect_sums(task, noting); });
}

TEST_P(EmulatedWna8Sm80, GivesThemWithCtasThatDivideK) {
  emulator::use_shared_memory(shared);
  expect_sums_of_parts(emulator::Wna8Layer(GetParam()));
}

constexpr emulator::Wna8Case kCases[] = {
    {4, 128, false, false, false, 3, 72, 1936},      {4, 128, true, false, false, 30, 200, 1424},
    {4, 128, true, true, false, 130, 136, 640},      {4, 32, true, false, false, 40, 136, 416},
    {4, 64, false, true, false, 20, 100, 400},       {4, 128, false, false, true, 70, 200, 896},
    {4, 128, true, true, true, 20, 72, 1040},        {8, 128, true, false, true, 90, 72, 640},
    {4, 96, true, false, false, 20, 72, 672},        {4, 192, false, false, true, 30, 72, 960},
    {4, 128, false, false, true, 3, 72, 1940, true}, {4, 128, true, false, false, 130, 136, 640, true},
    {8, 128, true, false, true, 90, 72, 610, true},  {4, 32, true, false, false, 40, 136, 410, true},
    {8, 64, false, false, false, 10, 72, 330, true},
};
INSTANTIATE_TEST_SUITE_P(Sm80, EmulatedWna8Sm80, testing::ValuesIn(kCases),
                         [](const auto& info) { return emulator::name(info.param); });

// ---- folds of 16 channels

class EmulatedWna8Sm80Halves : public testing::TestWithParam<emulator::Wna8Case> {};

TEST_P(EmulatedWna8Sm80Halves, GiveTheSumsOfTheLayer) {
  emulator::use_shared_memory(shared);
  const emulator::Wna8Layer layer(GetParam());
  ASSERT_EQ(layer.c.fold(), 16);
  layer.expect_sums(layer.task(), [](const Wna8Task& task) { return linear_wna8_sm80_halves(task, 1, nullptr); });
}

TEST_P(EmulatedWna8Sm80Halves, GiveThemWithCtasThatDivideK) {
  emulator::use_shared_memory(shared);
  expect_sums_of_parts(emulator::Wna8Layer(GetParam()));
}

constexpr emulator::Wna8Case kHalves[] = {
    {4, 16, false, false, false, 3, 72, 1936},       {4, 16, true, false, false, 70, 136, 416},
    {4, 48, true, true, false, 30, 72, 672},         {4, 16, false, false, true, 20, 200, 400},
    {8, 16, true, false, true, 90, 72, 330},         {8, 80, false, true, false, 10, 100, 400},
    {4, 16, true, false, false, 40, 136, 410, true}, {8, 48, false, false, true, 10, 72, 330, true},
};
INSTANTIATE_TEST_SUITE_P(Sm80, EmulatedWna8Sm80Halves, testing::ValuesIn(kHalves),
                         [](const auto& info) { return emulator::name(info.param); });

TEST(EmulatedWna8Sm80Halves, TakeFoldsOfHalfAStep) {
  emulator::use_shared_memory(shared);
  const emulator::Wna8Layer steps({4, 32, false, false, false, 3, 72, 256}), eighths({4, 8, false, false, false, 3, 72, 256});
  EXPECT_EQ(linear_wna8_sm80_halves(steps.task(), 1, nullptr), cudaErrorInvalidValue);
  Wna8Task task = eighths.task();
  task.fold = 16;
  EXPECT_EQ(linear_wna8_sm80_halves(task, 1, nullptr), cudaErrorInvalidValue);
}

// ---- rows of experts

struct ExpertCase {
  emulator::Wna8Case layer;
  int tokens;
};

class EmulatedWna8Sm80Experts : public testing::TestWithParam<ExpertCase> {};

TEST_P(EmulatedWna8Sm80Experts, GiveTheSumsOfTheirRows) {
  const emulator::Wna8Case& layer = GetParam().layer;
  const int tokens = GetParam().tokens;
  emulator::use_shared_memory(shared);
  emulator::expect_sums_of_experts(emulator::Wna8Layer(layer, true), tokens,
                                   [&](const Wna8Task& task) { return linear_wna8_sm80_experts(task, tokens, nullptr); });
}

constexpr ExpertCase kExpertCases[] = {
    {{4, 128, false, false, true, 37, 72, 1936}, 16},  {{4, 128, true, false, false, 130, 136, 640}, 64},
    {{4, 32, false, false, false, 40, 136, 416}, 16},  {{4, 64, true, false, true, 90, 100, 400}, 64},
    {{4, 128, false, false, false, 9, 200, 896}, 16},  {{4, 128, true, false, true, 71, 72, 1040}, 64},
    {{4, 128, false, false, false, 128, 72, 640}, 64}, {{4, 128, true, false, true, 21, 72, 610}, 16},
    {{4, 96, false, false, true, 20, 72, 416}, 16},
};
INSTANTIATE_TEST_SUITE_P(Sm80, EmulatedWna8Sm80Experts, testing::ValuesIn(kExpertCases), [](const auto& info) {
  return fmt::format("{}_{}", emulator::name(info.param.layer), info.param.tokens);
});

TEST(EmulatedWna8Sm80Experts, TakeTilesOfTheirRowsAndNoZeroPoints) {
  const emulator::Wna8Layer layer({4, 128, false, false, true, 4, 72, 256});
  Wna8Task task = layer.task();
  EXPECT_EQ(linear_wna8_sm80_experts(task, 16, nullptr), cudaErrorInvalidValue);  // no tiles
  const ExpertTile tile{};
  task.experts.tiles = &tile;
  EXPECT_EQ(linear_wna8_sm80_experts(task, 32, nullptr), cudaErrorInvalidValue);
  task.zero = ZeroKind::integer;
  EXPECT_EQ(linear_wna8_sm80_experts(task, 16, nullptr), cudaErrorInvalidValue);
}

/// All codes at all places of a word, −0 included.
TEST(EmulatedWna8Sm80, TwiceAnE2m1CodeIsAByte) {
  for (std::uint32_t code = 0; code < 16; ++code)
    for (int place = 0; place < 4; ++place) {
      const std::uint32_t others = 0x5b2du & ~(0xfu << 4 * place), bytes = twice_e2m1(0xfedc0000u | others | code << 4 * place);
      const auto got = static_cast<std::int8_t>(bytes >> 8 * place);
      EXPECT_EQ(static_cast<float>(got), 2 * code_value(DType::e2m1, static_cast<std::uint8_t>(code))) << code << " at " << place;
    }
}

TEST(EmulatedWna8Sm80, MultipliesFloatsAsThreeBytes) {
  constexpr emulator::FixedPointCase kLayers[] = {
      {4, 128, ZeroKind::none, 5, 72, 1000},      {4, 128, ZeroKind::integer, 30, 100, 640},
      {4, 32, ZeroKind::integer, 9, 136, 416},    {4, 16, ZeroKind::integer, 9, 136, 416},
      {4, 128, ZeroKind::offset, 7, 67, 400},     {8, 256, ZeroKind::integer, 25, 72, 512},
      {4, 32, ZeroKind::none, 5, 72, 1000, true}, {4, 16, ZeroKind::none, 30, 100, 416, true},
      {4, 128, ZeroKind::none, 25, 72, 512, true}};
  emulator::use_shared_memory(shared);
  for (const emulator::FixedPointCase& c : kLayers)
    emulator::expect_f32_product(c, [](const Wna8Task& task) { return wna8_sm80_launcher(task)(task, 1, nullptr); });
}

}  // namespace
}  // namespace nibble::cuda
