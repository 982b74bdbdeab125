// The sm_90 GEMM of weights in gpu_n64k128 and activations that are s8 codes (wna8.hpp), on the emulated GPU: the kernels as they are.
// Their launcher is gemm_test.cpp's.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "emulator/conv_layer.hpp"
#include "emulator/fixed_point_layer.hpp"
#include "emulator/memory.hpp"
#include "emulator/wna8_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm90/gemm/gemm_experts_s8.cu"
#include "kernels/cuda/sm90/gemm/gemm_patches_s8.cu"
#include "kernels/cuda/sm90/gemm/gemm_s8.cu"
#include "kernels/cuda/sm90/gemm/gemm_s8_offsets.cu"
#include "kernels/cuda/sm90/gemm/gemm_s8_plain.cu"
#include "kernels/cuda/sm90/gemm/gemm_s8_zeros.cu"
#include "kernels/cuda/tasks/conv.hpp"
#include "kernels/cuda/tasks/wna8.hpp"

namespace nibble::cuda {
namespace {

struct Case : emulator::Wna8Case {
  int tokens, depth, split;  // GemmConfig
};

std::string name(const Case& c) {
  return fmt::format("{}_{}_depth{}{}", emulator::name(c), c.tokens, c.depth,
                     c.split == kStreamK ? "_streamk" : fmt::format("_split{}", c.split));
}

class EmulatedWna8 : public testing::TestWithParam<Case> {};

TEST_P(EmulatedWna8, GivesTheSumsOfTheLayer) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  emulator::StreamKMemory scratch(c.tokens);
  const emulator::Wna8Layer layer(c);
  Wna8Task task = layer.task();
  task.scratch_end = scratch.end();
  layer.expect_sums(task, [&](const Wna8Task& t) {
    return linear_wna8_sm90(t, {.tokens = c.tokens, .split = c.split, .depth = c.depth}, nullptr);
  });
}

// Rows, tokens and channels with tails, and more records than a ring has stages.
constexpr Case kCases[] = {
    {{4, 128, false, false, false, 3, 72, 1936}, 16, 2, 1},
    {{4, 128, true, false, false, 30, 200, 1424}, 32, 1, kStreamK},
    {{4, 128, false, false, false, 70, 200, 896}, 64, 1, 1},
    {{4, 128, false, false, false, 150, 320, 1152}, 128, 1, kStreamK},
    {{4, 128, false, false, false, 10, 200, 1424}, 16, 2, 2},
    {{4, 128, true, false, true, 70, 264, 896}, 64, 1, 4},
    {{4, 128, true, true, false, 130, 136, 640}, 128, 1, 1},
    {{4, 32, true, false, false, 40, 264, 416}, 64, 1, 1},
    {{4, 64, false, true, false, 20, 100, 400}, 16, 4, 1},
    {{4, 128, false, false, true, 70, 200, 896}, 64, 1, kStreamK},
    {{4, 128, true, false, true, 130, 136, 640}, 128, 1, 1},
    {{4, 128, true, true, true, 20, 72, 1040}, 16, 2, 1},
    {{4, 96, true, false, false, 20, 72, 672}, 32, 1, 1},
    {{4, 192, true, false, true, 70, 100, 1000}, 64, 1, kStreamK},
    {{4, 32, false, false, true, 40, 100, 416}, 32, 1, 1},
    {{8, 128, true, false, true, 150, 200, 640}, 128, 1, kStreamK},
    {{8, 128, false, false, false, 140, 72, 784}, 128, 1, 1},
    {{8, 128, true, true, false, 33, 256, 640}, 64, 1, kStreamK},
    {{4, 128, false, false, true, 3, 72, 1936, true}, 16, 2, 1},
    {{4, 128, true, false, false, 30, 200, 1424, true}, 32, 1, kStreamK},
    {{4, 128, true, false, false, 70, 264, 900, true}, 64, 1, 4},
    {{4, 128, false, false, false, 130, 136, 640, true}, 128, 1, 1},
    {{8, 128, true, false, true, 150, 200, 610, true}, 128, 1, kStreamK},
    {{4, 32, true, false, false, 40, 264, 410, true}, 64, 1, 1},
    {{4, 96, false, false, false, 20, 72, 700, true}, 16, 4, 1},
    {{8, 64, true, false, true, 140, 72, 330, true}, 128, 1, 2},
};

INSTANTIATE_TEST_SUITE_P(Wna8, EmulatedWna8, testing::ValuesIn(kCases), [](const auto& info) { return name(info.param); });

// ---- rows of experts

class EmulatedWna8Experts : public testing::TestWithParam<Case> {};

TEST_P(EmulatedWna8Experts, GiveTheSumsOfTheirRows) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  const emulator::Wna8Layer layer(c, true);
  emulator::expect_sums_of_experts(layer, c.tokens, [&](const Wna8Task& task) {
    return linear_wna8_sm90(task, {.tokens = c.tokens, .split = c.split, .depth = c.depth}, nullptr);
  });
}

constexpr Case kExpertCases[] = {
    {{4, 128, false, false, true, 37, 72, 1936}, 16, 2, 1},    {{4, 128, true, false, false, 130, 136, 640}, 64, 1, 1},
    {{4, 32, false, false, false, 40, 264, 416}, 16, 1, 1},    {{4, 64, true, false, true, 150, 100, 400}, 64, 1, 1},
    {{4, 128, false, false, false, 170, 200, 896}, 128, 1, 1}, {{4, 128, true, false, true, 201, 72, 1040}, 128, 1, 1},
    {{4, 96, true, false, true, 140, 72, 700}, 128, 1, 1},     {{4, 128, false, false, true, 1, 72, 530}, 16, 4, 1},
};
INSTANTIATE_TEST_SUITE_P(Wna8, EmulatedWna8Experts, testing::ValuesIn(kExpertCases),
                         [](const auto& info) { return name(info.param); });

TEST(EmulatedWna8Experts, ShareNoRecordsAndHaveNoZeroPoints) {
  const emulator::Wna8Layer layer({4, 128, false, false, true, 4, 72, 256}, true);
  Wna8Task task = layer.task();
  const ExpertTile tile{};
  task.experts.tiles = &tile;
  EXPECT_EQ(linear_wna8_sm90(task, {.tokens = 16, .split = 2, .depth = 1}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(linear_wna8_sm90(task, {.tokens = 32, .split = 1, .depth = 1}, nullptr), cudaErrorInvalidValue);  // no such kernel
  task.zero = ZeroKind::integer;
  EXPECT_EQ(linear_wna8_sm90(task, {.tokens = 16, .split = 1, .depth = 1}, nullptr), cudaErrorInvalidValue);
}

TEST(EmulatedWna8, MultipliesFloatsAsThreeBytes) {
  struct Layer {
    emulator::FixedPointCase layer;
    GemmConfig config;
  };
  const Layer layers[] = {{{4, 128, ZeroKind::none, 4, 72, 1000}, {.tokens = 16, .split = 2, .depth = 2}},
                          {{4, 128, ZeroKind::integer, 21, 200, 640}, {.tokens = 64, .split = 1, .depth = 1}},
                          {{4, 32, ZeroKind::integer, 9, 136, 416}, {.tokens = 32, .split = 1, .depth = 1}},
                          {{4, 128, ZeroKind::offset, 7, 67, 400}, {.tokens = 64, .split = 2, .depth = 1}},
                          {{8, 256, ZeroKind::integer, 60, 200, 512}, {.tokens = 128, .split = kStreamK, .depth = 1}}};
  emulator::use_shared_memory(shared);
  for (const Layer& l : layers) {
    emulator::StreamKMemory scratch(l.config.tokens);
    emulator::expect_f32_product(l.layer, [&](Wna8Task task) {
      task.scratch_end = scratch.end();
      return linear_wna8_sm90(task, l.config, nullptr);
    });
  }
}

// ---- convolutions, with the quantizer in front

struct ConvCase {
  emulator::ConvShape shape;
  int group;  // of weights and activations
  bool act_zeros;
  int split;
  bool prescaled = false;
};

class EmulatedWna8Conv : public testing::TestWithParam<ConvCase> {};

TEST_P(EmulatedWna8Conv, GivesTheSumsOfTheLayer) {
  const ConvCase& c = GetParam();
  emulator::use_shared_memory(shared);
  emulator::FloatConv conv(c.shape, c.group);
  conv.be_exact_codes(c.group, c.act_zeros, c.prescaled);
  ConvTask task = conv.task();
  task.fold = c.group >= gpu_tile::kChannels ? gpu_tile::kChannels : 32;
  task.online = {.type = DType::f16, .zero_points = c.act_zeros, .group = c.group};
  const Wna8ImageMap map = wna8_image_map(task.fold, c.shape.images * c.shape.height * c.shape.width, c.shape.channels, 0);
  std::vector<float4> codes(map.bytes / sizeof(float4));
  task.scratch = codes.data();
  emulator::StreamKMemory scratch(64);
  task.scratch_end = scratch.end();
  c.shape.expect_sums(
      task, [&](const ConvTask& t) { return conv_wna8_sm90(t, {.tokens = 64, .split = c.split}, nullptr); },
      [&](std::size_t i) { return conv.act(i); }, [&](int n, int k) { return conv.weight.value(n, k); }, 0x1p-19);
}

/// A that comes as codes with one scale and zero point, channels last and first. Padding is 0, whatever code that has.
TEST_P(EmulatedWna8Conv, TakesCodesThatAreGiven) {
  const ConvCase& c = GetParam();
  emulator::use_shared_memory(shared);
  emulator::FloatConv conv(c.shape, c.group);
  const emulator::ConvShape& s = c.shape;
  const int pixels = s.height * s.width;
  const float scale = 0.37f;
  const std::int32_t zero = c.act_zeros ? -90 : 0;
  for (const bool channels_first : {false, true}) {
    std::vector<float4> memory(s.inputs() / sizeof(float4) + 1);  // aligned
    auto* const codes = reinterpret_cast<std::int8_t*>(memory.data());
    for (std::size_t i = 0; i < s.inputs(); ++i) codes[i] = static_cast<std::int8_t>(conv.random());
    ConvTask task = conv.task();
    task.a_dtype = DType::s8;
    task.x = codes;
    if (channels_first) task.a = {pixels * s.channels, 1, pixels};
    task.fold = c.group >= gpu_tile::kChannels ? gpu_tile::kChannels : 32;
    task.online = {.type = DType::s8, .zero_points = c.act_zeros};
    task.online.given.scales = &scale;
    if (c.act_zeros) task.online.given.zeros = &zero;
    const std::int64_t all = s.images * pixels;
    const Wna8ImageMap map = wna8_image_map(task.fold, all, s.channels, channels_first ? all * s.channels : 0);
    std::vector<float4> workspace(map.bytes / sizeof(float4));
    task.scratch = workspace.data();
    emulator::StreamKMemory scratch(64);
    task.scratch_end = scratch.end();
    const auto act = [&](std::size_t i) {  // number i with channels last
      const auto channel = static_cast<int>(i) % s.channels, pixel = static_cast<int>(i) / s.channels;
      const auto at = pixel / pixels * task.a.image + pixel % pixels * task.a.pixel + channel * task.a.channel;
      return static_cast<double>(scale) * (codes[at] - zero);
    };
    s.expect_sums(
        task, [&](const ConvTask& t) { return conv_wna8_sm90(t, {.tokens = 64, .split = c.split}, nullptr); }, act,
        [&](int n, int k) { return conv.weight.value(n, k); }, 0x1p-19);
  }
}

/// f32 activations as the bytes of fixed-point numbers, channels last and first.
TEST_P(EmulatedWna8Conv, MultipliesF32AsFixedPoint) {
  const ConvCase& c = GetParam();
  if (c.act_zeros && !c.prescaled) GTEST_SKIP() << "a case of quantized activations";
  emulator::use_shared_memory(shared);
  emulator::FloatConv conv(c.shape, c.group, c.prescaled);
  for (const bool channels_first : {false, true})
    conv.expect_f32_sums(channels_first, c.group >= gpu_tile::kChannels ? gpu_tile::kChannels : 32, [&](ConvTask task) {
      emulator::StreamKMemory scratch(64);
      task.scratch_end = scratch.end();
      return conv_wna8_sm90(task, {.tokens = 64, .split = c.split}, nullptr);
    });
}

// Folds of 128 and of 32 channels, boxes of 128 and of 64.
constexpr ConvCase kConvs[] = {
    {{2, 9, 7, 128, 72, 3, 1, 1, 1, false}, 128, false, 1},        {{1, 12, 11, 64, 136, 3, 2, 1, 1, true}, 64, false, 1},
    {{1, 10, 10, 192, 64, 3, 1, 2, 2, false}, 32, true, kStreamK}, {{2, 8, 9, 256, 72, 1, 1, 0, 1, true}, 128, true, 1},
    {{2, 9, 7, 128, 72, 3, 1, 1, 1, false}, 64, true, 1, true},    {{2, 9, 7, 64, 72, 3, 1, 1, 1, true}, 32, false, 4},
    {{2, 9, 7, 128, 72, 3, 1, 1, 1, true}, 128, false, kStreamK},
};
INSTANTIATE_TEST_SUITE_P(Wna8, EmulatedWna8Conv, testing::ValuesIn(kConvs));

}  // namespace
}  // namespace nibble::cuda
