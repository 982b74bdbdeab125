// The sm_80 GEMM of weights in gpu_n64k128 and 16-bit activations (gemm_kernel.cuh), on the emulated GPU: the
// launchers and the kernels as they are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "emulator/expert_rows.hpp"
#include "emulator/float_layer.hpp"
#include "emulator/split_memory.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/gemm.cu"
#include "kernels/cuda/sm80/gemm_experts.cu"

namespace nibble::cuda {
namespace {

class EmulatedGemmSm80 : public testing::TestWithParam<emulator::FloatCase> {};

TEST_P(EmulatedGemmSm80, GivesTheSumsOfTheLayer) {
  emulator::use_shared_memory(shared);
  const emulator::FloatLayer layer(GetParam());
  layer.expect_sums(
      layer.task(), [](const LinearTask& task) { return linear_gemm_sm80(task, 1, nullptr); },
      [&](int n, int k) { return emulator::rounded_weight(layer.weight, layer.a_dtype, n, k); });
}

TEST_P(EmulatedGemmSm80, GivesThemWithCtasThatDivideK) {
  emulator::use_shared_memory(shared);
  const emulator::FloatLayer layer(GetParam());
  const gpu_tile::Geometry& weight = layer.task().weight.geometry;
  for (const int split : emulator::splits_for(layer.m))
    layer.expect_split_sums(
        gemm_sm80_bytes(layer.m, weight.n, std::min(split, weight.records())),
        [&](const LinearTask& task) { return linear_gemm_sm80(task, split, nullptr); },
        [&](int n, int k) { return emulator::rounded_weight(layer.weight, layer.a_dtype, n, k); });
}

TEST(EmulatedGemmSm80, RefusesASplitThatCountersDoNotHold) {
  const emulator::FloatLayer layer({DType::f16, Codes::u4, 128, ZeroKind::none, 4, 72, 256});
  for (const int split : {0, 256}) EXPECT_EQ(linear_gemm_sm80(layer.task(), split, nullptr), cudaErrorInvalidValue);
}

TEST(GemmSm80, LaunchesHaveSumsThatStayInL2) {
  EXPECT_EQ(split_k_tokens(4096, 1), std::numeric_limits<int>::max());
  EXPECT_EQ(split_k_tokens(4096, 4), 256);
  EXPECT_EQ(split_k_tokens(28672, 8), 64);
  for (const std::int64_t n : {64, 1000, 4096, 28672})
    for (const int ranks : {2, 4, 8}) {
      std::size_t before = 0;
      for (std::int64_t m = 1; m <= 2048; m += 31) {
        EXPECT_GE(gemm_sm80_bytes(m, n, ranks), before) << "N=" << n << " M=" << m;
        before = gemm_sm80_bytes(m, n, ranks);
      }
      EXPECT_EQ(gemm_sm80_bytes(1 << 20, n, ranks), gemm_sm80_bytes(split_k_tokens(n, ranks), n, ranks));
    }
}

// Tiles of every shape; few multiprocessors choose the one with the fewest cycles.
constexpr emulator::FloatCase kCases[] = {
    {DType::f16, Codes::u4, 128, ZeroKind::none, 17, 72, 1424},
    {DType::bf16, Codes::u4, 128, ZeroKind::integer, 40, 200, 640},
    {DType::f16, Codes::u4, 128, ZeroKind::none, 70, 328, 528},
    {DType::f16, Codes::u4, 128, ZeroKind::integer, 130, 520, 384},
    {DType::f16, Codes::u4, 32, ZeroKind::integer, 33, 72, 416},
    {DType::bf16, Codes::u4, 64, ZeroKind::offset, 20, 100, 640},
    {DType::f16, Codes::u4, 1024, ZeroKind::integer, 40, 72, 1024},
    {DType::f16, Codes::u8, 128, ZeroKind::integer, 33, 136, 784},
    {DType::bf16, Codes::u8, 128, ZeroKind::none, 64, 72, 530},
    {DType::f16, Codes::u4, 128, ZeroKind::integer, 20, 72, 640, true},
    {DType::f16, Codes::u4, 96, ZeroKind::integer, 18, 72, 672},
    {DType::bf16, Codes::u4, 192, ZeroKind::none, 40, 72, 960},
    {DType::f16, Codes::u4, 128, ZeroKind::integer, 20, 72, 640, false, true},
    {DType::bf16, Codes::u4, 128, ZeroKind::none, 18, 72, 532, true, true},
    {DType::f16, Codes::e4m3, 128, ZeroKind::none, 20, 136, 640},
    {DType::bf16, Codes::e2m1, 32, ZeroKind::none, 70, 72, 416},
};
INSTANTIATE_TEST_SUITE_P(Sm80, EmulatedGemmSm80, testing::ValuesIn(kCases),
                         [](const auto& info) { return emulator::name(info.param); });

// ---- rows of experts

class EmulatedGemmSm80Experts : public testing::TestWithParam<emulator::ExpertCase> {};

TEST_P(EmulatedGemmSm80Experts, GivesTheSumsOfEachExpert) {
  const emulator::ExpertCase& c = GetParam();
  const int needed = gemm_sm80_least_shared(c.tokens, emulator::FloatLayer(c.layer).task().weight.geometry.record_bytes());
  if (needed > emulator::most_shared_bytes()) GTEST_SKIP() << needed << " bytes of shared memory, which the row refuses";
  emulator::use_shared_memory(shared);
  emulator::expect_sums_of_experts(
      c, [&](const LinearTask& task) { return linear_gemm_sm80_experts(task, c.tokens, nullptr); },
      [&](const emulator::TileWeight& weight, int row, int k) {
        return emulator::rounded_weight(weight, c.layer.a_dtype, row, k);
      });
}

// Experts without rows, with one, with less than a tile and more; every kind of weight; K and N with tails.
const emulator::ExpertCase kExpertCases[] = {
    {{DType::bf16, Codes::u4, 128, ZeroKind::none, 0, 200, 1424}, 16, {3, 0, 20, 1, 0, 40}},
    {{DType::f16, Codes::u4, 128, ZeroKind::integer, 0, 72, 896}, 16, {1, 1, 0, 1}},
    {{DType::bf16, Codes::u4, 32, ZeroKind::none, 0, 264, 416}, 64, {70, 2, 0, 64, 5}},
    {{DType::f16, Codes::u4, 128, ZeroKind::none, 0, 320, 640}, 64, {0, 150, 128, 9}},
    {{DType::bf16, Codes::u8, 128, ZeroKind::none, 0, 72, 272}, 64, {5, 66}},
    {{DType::f16, Codes::u8, 128, ZeroKind::integer, 0, 136, 784}, 16, {5, 17}},
    {{DType::bf16, Codes::e4m3, 128, ZeroKind::none, 0, 136, 384}, 64, {1, 130, 2}},
    {{DType::bf16, Codes::e2m1, 32, ZeroKind::none, 0, 136, 416}, 16, {2, 17, 0, 3}},
    {{DType::bf16, Codes::u4, 64, ZeroKind::offset, 0, 100, 640}, 16, {18, 2}},
    {{DType::f16, Codes::u4, 1024, ZeroKind::none, 0, 72, 1024}, 64, {7, 2}},  // a scale per channel
    {{DType::f16, Codes::u4, 128, ZeroKind::none, 0, 72, 256}, 16, {0, 0}},    // no rows at all
};
INSTANTIATE_TEST_SUITE_P(Sm80, EmulatedGemmSm80Experts, testing::ValuesIn(kExpertCases),
                         [](const auto& info) { return fmt::format("{}_{}", emulator::name(info.param), info.index); });

TEST(EmulatedGemmSm80Experts, TakeTilesOfTheirRowsOnly) {
  const emulator::FloatLayer layer({DType::f16, Codes::u4, 128, ZeroKind::none, 4, 72, 256});
  LinearTask task = layer.task();
  EXPECT_EQ(linear_gemm_sm80_experts(task, 16, nullptr), cudaErrorInvalidValue);  // no tiles
  const ExpertTile tile{};
  task.experts.tiles = &tile;
  EXPECT_EQ(linear_gemm_sm80_experts(task, 32, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace nibble::cuda
