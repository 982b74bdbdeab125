// The sm_90 GEMM of 8-bit codes on the emulated GPU: the launcher and the kernels as they are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "emulator/conv_layer.hpp"
#include "emulator/memory.hpp"
#include "emulator/w8a8_layer.hpp"
#include "kernels/kernel.hpp"
#include "quantize/act_rule.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm90/gemm/w8a8.cu"
#include "kernels/cuda/sm90/gemm/w8a8_e4m3.cu"
#include "kernels/cuda/sm90/gemm/w8a8_e4m3_grouped.cu"
#include "kernels/cuda/sm90/gemm/w8a8_e4m3_precise.cu"
#include "kernels/cuda/sm90/gemm/w8a8_experts.cu"
#include "kernels/cuda/sm90/gemm/w8a8_floats.cu"
#include "kernels/cuda/sm90/gemm/w8a8_patches_e4m3.cu"
#include "kernels/cuda/sm90/gemm/w8a8_patches_s8.cu"
#include "kernels/cuda/sm90/gemm/w8a8_s8.cu"

namespace nibble::cuda {
namespace {

using emulator::Codes;
using emulator::kBias;
using emulator::kChannelScales;
using emulator::kRelu;
using emulator::kResidual;
using emulator::kSumBias;
using emulator::kZeros;

struct Case {
  Codes codes;
  int m, n, k;
  int tokens, blocks, depth, split;  // W8A8Config
  DType out = DType::bf16;
  unsigned extra = 0;
  int together = 0;  // W8A8Task::together
};

std::string name(const Case& c) {
  return fmt::format("{}{}_{}x{}_depth{}{}", emulator::name({c.codes, c.m, c.n, c.k, c.out, c.extra}),
                     c.together == 0 ? "" : fmt::format("_together{}", c.together), c.tokens, gpu_w8::kRows * c.blocks, c.depth,
                     c.split == kStreamK ? "_streamk" : fmt::format("_split{}", c.split));
}

class Emulated : public testing::TestWithParam<Case> {};

TEST_P(Emulated, GivesTheSumsOfTheLayer) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  emulator::StreamKMemory scratch(c.tokens);
  const int narrow = c.codes == Codes::s8 ? -1 : c.codes == Codes::groups ? 1 : c.together;
  const emulator::W8A8Layer layer({c.codes, c.m, c.n, c.k, c.out, c.extra, narrow});
  W8A8Task task = layer.task();
  task.together = c.together;
  task.scratch_end = scratch.end();
  const emulator::NextMemory next;
  task.next = next.weight();
  const W8A8Config config{.tokens = c.tokens, .blocks = c.blocks, .depth = c.depth, .split = c.split};
  layer.expect_sums(task, [&](const W8A8Task& t) { return linear_w8a8_sm90(t, config, nullptr); });
  next.expect_asked(c.tokens == 16);
}

class EmulatedExperts : public testing::TestWithParam<Case> {};

TEST_P(EmulatedExperts, GiveTheSumsOfTheirRows) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  const emulator::W8A8Layer layer({c.codes, c.m, c.n, c.k, c.out, c.extra,
                                   c.codes == Codes::s8       ? -1
                                   : c.codes == Codes::groups ? 1
                                                              : 0});
  const W8A8Config config{.tokens = c.tokens, .blocks = c.blocks, .depth = c.depth, .split = 1};
  emulator::expect_sums_of_experts(layer, c.tokens, [&](const W8A8Task& t) { return linear_w8a8_sm90(t, config, nullptr); });
}

constexpr Case kExpertCases[] = {
    {Codes::s8, 37, 200, 1936, 16, 4, 1, 1, DType::bf16, kZeros},
    {Codes::s8, 60, 72, 640, 16, 2, 2, 1, DType::f32, kResidual},
    {Codes::s8, 150, 136, 640, 64, 4, 1, 1, DType::f32, kZeros},
    {Codes::e4m3, 170, 200, 384, 128, 3, 1, 1},
    {Codes::e4m3, 20, 72, 1424, 16, 1, 1, 1, DType::f16},
    {Codes::groups, 41, 136, 1024, 16, 4, 1, 1},
    {Codes::groups, 90, 264, 640, 64, 2, 1, 1, DType::f32},
    {Codes::groups, 170, 136, 384, 128, 2, 1, 1, DType::f32, kChannelScales},
    {Codes::groups, 620, 136, 384, 128, 2, 1, 1},  // tiles of one row to 85: a warpgroup has none of the shorter ones
    {Codes::s8, 620, 136, 512, 128, 2, 1, 1, DType::bf16, kZeros},
};
INSTANTIATE_TEST_SUITE_P(W8A8, EmulatedExperts, testing::ValuesIn(kExpertCases),
                         [](const auto& info) { return name(info.param); });

TEST(EmulatedWeights, OfIntegersGiveExactSums) {
  emulator::use_shared_memory(shared);
  const W8A8Config config{.tokens = 16, .blocks = 1, .depth = 2, .split = 2};
  emulator::expect_exact_sums([&](const W8A8Task& task) { return linear_w8a8_sm90(task, config, nullptr); });
}

// Rows, tokens and channels with tails, more records than a ring has stages, more passes than there are multiprocessors.
constexpr Case kCases[] = {
    {Codes::s8, 3, 72, 1936, 16, 2, 2, 1},
    {Codes::s8, 17, 200, 1024, 32, 4, 1, 1, DType::bf16, kZeros},
    {Codes::s8, 40, 320, 1152, 64, 4, 1, kStreamK},
    {Codes::s8, 130, 200, 640, 128, 3, 1, 1, DType::f32, kResidual},
    {Codes::s8, 300, 136, 768, 256, 2, 1, 1, DType::bf16, kBias},
    {Codes::s8, 17, 200, 256, 32, 4, 1, 1, DType::f16, kBias | kRelu},
    {Codes::s8, 9, 75, 1936, 16, 2, 2, 1, DType::s32},
    {Codes::s8, 40, 320, 1152, 64, 4, 1, kStreamK, DType::s32, kZeros | kSumBias},
    {Codes::s8, 10, 200, 1424, 16, 2, 1, 4, DType::s32, kZeros | kSumBias},
    {Codes::s8, 300, 136, 768, 256, 2, 1, 1, DType::f16, kSumBias | kBias},
    {Codes::s8, 130, 200, 640, 128, 3, 1, 1, DType::f32, kSumBias | kZeros | kResidual},
    {Codes::s8, 17, 72, 256, 32, 4, 1, 1, DType::u8, kSumBias},
    {Codes::e4m3, 20, 128, 2048, 16, 1, 2, 1, DType::f16},
    {Codes::e4m3, 260, 264, 768, 256, 2, 1, kStreamK},
    {Codes::s8, 10, 200, 1424, 16, 2, 1, 4, DType::bf16, kZeros},
    {Codes::s8, 300, 72, 768, 256, 1, 1, 2},
    {Codes::e4m3, 40, 136, 1152, 64, 1, 1, 4, DType::f32, kResidual},
    {Codes::e4m3, 3, 72, 1936, 16, 2, 2, 1, DType::bf16, 0, 4},
    {Codes::e4m3, 20, 200, 1424, 32, 4, 1, 1, DType::f32, kResidual, 2},
    {Codes::e4m3, 40, 320, 1152, 64, 4, 1, kStreamK, DType::bf16, kBias, 4},
    {Codes::e4m3, 40, 136, 2304, 64, 1, 1, 4, DType::f32, 0, 4},
    {Codes::e4m3, 130, 200, 1408, 128, 3, 1, 1, DType::f16, 0, 4},
    {Codes::s8, 10, 200, 896, 128, 2, 1, 2},
    {Codes::e4m3, 130, 136, 1408, 128, 2, 1, 2, DType::bf16, 0, 1},
    {Codes::e4m3, 300, 136, 912, 256, 2, 1, 1, DType::bf16, kBias, 4},
    {Codes::e4m3, 300, 72, 128, 256, 1, 1, 1, DType::f32, kResidual, 4},
    {Codes::e4m3, 260, 264, 768, 256, 2, 1, kStreamK, DType::bf16, 0, 4},
    {Codes::groups, 130, 136, 640, 128, 2, 1, 2},
    {Codes::groups, 5, 136, 1424, 16, 2, 2, 1},
    {Codes::groups, 40, 72, 1024, 32, 4, 1, kStreamK, DType::bf16, kResidual},
    {Codes::groups, 70, 192, 896, 64, 2, 1, 1, DType::bf16, kBias},
    {Codes::groups, 150, 320, 640, 128, 2, 1, kStreamK},
    {Codes::groups, 130, 72, 1024, 128, 1, 1, 1, DType::f32, kResidual | kChannelScales},
    {Codes::groups, 133, 136, 384, 128, 2, 1, 1, DType::f16},
    {Codes::groups, 100, 136, 256, 64, 2, 1, 1, DType::f16},
    {Codes::groups, 60, 72, 1024, 64, 1, 1, 1, DType::f32, kResidual | kChannelScales},
    {Codes::groups, 60, 192, 1024, 64, 1, 1, 4},
    {Codes::groups, 40, 136, 1152, 64, 2, 1, 2, DType::f16},
    {Codes::groups, 40, 72, 1152, 64, 1, 1, 8},  // four CTAs share K
    {Codes::groups, 60, 72, 1024, 64, 2, 1, 4, DType::f32, kResidual | kChannelScales},
    {Codes::groups, 2100, 136, 256, 128, 2, 1, 1},
    {Codes::groups, 300, 296, 912, 256, 2, 1, 1, DType::bf16, kBias},
    {Codes::groups, 270, 192, 768, 256, 2, 1, kStreamK, DType::f16},
    {Codes::groups, 530, 100, 640, 256, 2, 1, 1, DType::f32, kResidual | kChannelScales},
    {Codes::groups, 2100, 136, 256, 256, 2, 1, 1},
    // tokens as the 64-row operand, of sums over all channels
    {Codes::s8, 130, 136, 640, 128, 2, 1, 1, DType::f16, kBias},
    {Codes::s8, 300, 200, 640, 256, 2, 1, 1, DType::f32, kSumBias | kZeros | kResidual},
    {Codes::s8, 200, 72, 896, 128, 2, 1, 1, DType::bf16, kZeros | kSumBias | kBias},
    {Codes::s8, 150, 75, 400, 128, 2, 1, 1, DType::s32, kZeros | kSumBias},
    {Codes::s8, 150, 200, 640, 128, 2, 1, kStreamK, DType::f16, kBias},
    {Codes::s8, 140, 72, 384, 128, 2, 1, 1, DType::u8, kSumBias},
    {Codes::s8, 390, 392, 640, 256, 2, 1, kStreamK, DType::f16, kZeros},
    {Codes::e4m3, 130, 200, 768, 128, 2, 1, 1, DType::f16, kBias},
    {Codes::e4m3, 600, 264, 384, 256, 2, 1, 1, DType::f32, kResidual},
    // codes of 8 bits, stored 16 at a time
    {Codes::s8, 300, 208, 640, 256, 2, 1, 1, DType::s8, kZeros | kBias},
    {Codes::s8, 290, 208, 640, 128, 2, 1, kStreamK, DType::s8, kSumBias},
    {Codes::s8, 150, 72, 384, 128, 2, 1, 1, DType::s8},
};

INSTANTIATE_TEST_SUITE_P(W8A8, Emulated, testing::ValuesIn(kCases), [](const auto& info) { return name(info.param); });

// ---- activations that come as floats

struct FloatsCase {
  DType type;
  int m, n, k;
  int blocks;
  int zero = 0;  // of the activations
  DType out = DType::s32;
  unsigned extra = 0;
};

std::string name(const FloatsCase& c) {
  return fmt::format("{}_{}_n{}", nibble::name(c.type), emulator::name({Codes::s8, c.m, c.n, c.k, c.out, c.extra}),
                     gpu_w8::kRows * c.blocks);
}

/// Numbers of every kind: codes of all values, their halfway cases, what saturates, infinities, NaN and zeros of both signs.
std::vector<std::uint16_t> floats_of_all_kinds(DType type, std::size_t count, float scale) {
  std::mt19937 random(7);
  const auto bits = [type](float x) { return type == DType::f16 ? to_f16(x).bits : to_bf16(x).bits; };
  std::vector<std::uint16_t> floats;
  for (std::size_t i = 0; i < count; ++i) {
    const float halves = static_cast<float>(static_cast<int>(random() % 600) - 300) / 2;
    const unsigned kind = random() % 64;
    floats.push_back(kind == 0 ? static_cast<std::uint16_t>(random()) : bits(kind < 32 ? halves * scale : halves * scale * 0.7f));
  }
  return floats;
}

class EmulatedFloats : public testing::TestWithParam<FloatsCase> {};

TEST_P(EmulatedFloats, GiveTheSumsOfTheirCodes) {
  const FloatsCase& c = GetParam();
  constexpr float kScale = 0.03125f * 1.01f;
  emulator::use_shared_memory(shared);
  emulator::W8A8Layer layer({Codes::s8, c.m, c.n, c.k, c.out, c.extra});
  const std::int64_t stride = (c.k + 7) / 8 * 8 + 16;  // elements: rows lie apart, and what is between them is not read
  const std::vector<std::uint16_t> floats = floats_of_all_kinds(c.type, static_cast<std::size_t>(c.m * stride), kScale);
  const act_rule::Rule rule = act_rule::known(kScale, c.zero);
  for (int m = 0; m < c.m; ++m)
    for (int k = 0; k < c.k; ++k) {
      const std::uint16_t bits = floats[static_cast<std::size_t>(m * stride + k)];
      const float x = c.type == DType::f16 ? to_f32(f16{bits}) : to_f32(bf16{bits});
      layer.acts[static_cast<std::size_t>(m * layer.pitch + k)] = static_cast<std::uint8_t>(act_rule::to_s8(x, rule));
    }
  std::ranges::fill(layer.act_scales, kScale);
  std::ranges::fill(layer.act_zeros, c.zero);
  W8A8Task task = layer.task();
  task.acts = {.scale = kScale, .zero = c.zero};
  const FloatActs acts{floats.data(), c.type, stride};
  layer.expect_sums(task, [&](const W8A8Task& t) { return linear_w8a8_sm90_floats(t, acts, c.blocks, nullptr); });
}

// Tails of rows, tokens and channels, more records than a ring has stages, more passes than there are multiprocessors; every store.
constexpr FloatsCase kFloatsCases[] = {
    {DType::f16, 390, 64, 256, 1},
    {DType::bf16, 130, 72, 648, 2, -7},
    {DType::f16, 70, 200, 40, 1, 90},
    {DType::f16, 1, 75, 1160, 2},
    {DType::f16, 700, 64, 136, 1, 3, DType::f16, kBias},
    {DType::bf16, 260, 136, 328, 2, 0, DType::bf16, kSumBias},
    {DType::bf16, 150, 136, 200, 1, -128, DType::f32, kResidual | kBias},
    {DType::f16, 150, 208, 384, 2, 5, DType::s8, kBias},
    {DType::bf16, 200, 112, 128, 1, 5, DType::s8},
    {DType::f16, 140, 200, 392, 1, 0, DType::u8, kSumBias},
};
INSTANTIATE_TEST_SUITE_P(W8A8, EmulatedFloats, testing::ValuesIn(kFloatsCases),
                         [](const auto& info) { return name(info.param); });

TEST(EmulatedW8a8, RefusesFloatsThatItsKernelsDoNotTake) {
  emulator::use_shared_memory(shared);
  const emulator::W8A8Layer layer({Codes::s8, 70, 64, 128, DType::s32});
  const std::vector<std::uint16_t> floats(70 * 136 + 1);
  W8A8Task task = layer.task();
  const auto run = [&](const void* a, std::int64_t stride, int blocks, DType type = DType::f16) {
    return linear_w8a8_sm90_floats(task, {a, type, stride}, blocks, nullptr);
  };
  EXPECT_EQ(run(floats.data(), 136, 1), cudaErrorInvalidValue);  // a scale per token
  task.acts = {.scale = 0.1f};
  EXPECT_EQ(run(floats.data(), 136, 3), cudaErrorInvalidValue);
  EXPECT_EQ(run(floats.data(), 136, 1, DType::f32), cudaErrorInvalidValue);
  EXPECT_EQ(run(floats.data(), 132, 1), cudaErrorInvalidAddressSpace);
  EXPECT_EQ(run(floats.data() + 1, 136, 1), cudaErrorInvalidAddressSpace);
  task.weight.geometry.has_zeros = true;
  EXPECT_EQ(run(floats.data(), 136, 1), cudaErrorInvalidValue);
}

// The emulated tensor cores drop the same bits as those of a GPU: a sum of thousands of channels loses more than sums of 512 at a time.
TEST(EmulatedW8a8, PreciseSumsAreCloser) {
  emulator::use_shared_memory(shared);
  const emulator::W8A8Layer layer({Codes::e4m3, 8, 64, 8192, DType::f32});
  for (const W8A8Config& config : {W8A8Config{.tokens = 16, .blocks = 1, .depth = 2}, W8A8Config{.tokens = 256, .blocks = 1}}) {
    SCOPED_TRACE(config.tokens);
    const auto error = [&](int together) {
      W8A8Task task = layer.task();
      task.together = together;
      return layer.relative_l2(task, [&](const W8A8Task& t) { return linear_w8a8_sm90(t, config, nullptr); });
    };
    const double fast = error(0), precise = error(kPreciseChannels / gpu_w8::kChannels), most = error(1);
    EXPECT_LT(precise, 8e-4);
    EXPECT_LT(most, 0.8 * precise);
    EXPECT_GT(fast, 2 * precise);
  }
}

struct ConvCase {
  emulator::ConvShape shape;
  int tokens, blocks, split;  // W8A8Config
};

class EmulatedConv : public testing::TestWithParam<ConvCase> {};

TEST_P(EmulatedConv, GivesTheSumsOfTheLayer) {
  const ConvCase& c = GetParam();
  emulator::use_shared_memory(shared);
  emulator::StreamKMemory scratch(c.tokens);
  for (const DType type : {DType::s8, DType::e4m3}) {
    const emulator::CodesConv conv(c.shape, type);
    ConvTask task = conv.task();
    task.scratch_end = scratch.end();
    conv.expect_sums(task, [&](const ConvTask& t) {
      return conv_w8a8_sm90(t, {.tokens = c.tokens, .blocks = c.blocks, .split = c.split}, nullptr);
    });
  }
}

// Channels in boxes of 64 and of 128, strides, dilations, tiles that begin within an image and end in another.
constexpr ConvCase kConvs[] = {
    {{2, 9, 7, 64, 72, 3, 1, 1, 1, false}, 64, 4, 1},
    {{1, 12, 11, 128, 136, 3, 2, 1, 1, true}, 128, 2, 1},
    {{3, 10, 10, 192, 64, 3, 1, 2, 2, false}, 256, 1, 1},
    {{2, 8, 9, 128, 200, 1, 1, 0, 1, true}, 128, 3, kStreamK},
};
INSTANTIATE_TEST_SUITE_P(W8A8, EmulatedConv, testing::ValuesIn(kConvs));

}  // namespace
}  // namespace nibble::cuda
