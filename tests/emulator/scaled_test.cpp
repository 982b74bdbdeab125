// The sm_90 GEMM of 8-bit codes on the emulated GPU: the launcher and the kernels as they are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>

#include "emulator/conv_patches.hpp"
#include "emulator/memory.hpp"
#include "emulator/scaled_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/scaled_sm90.cu"
#include "kernels/cuda/scaled_sm90_e4m3.cu"
#include "kernels/cuda/scaled_sm90_e4m3_grouped.cu"
#include "kernels/cuda/scaled_sm90_patches_s8.cu"
#include "kernels/cuda/scaled_sm90_s8.cu"

namespace nibble::cuda {

/// Images that are codes already, and lie as they have to.
cudaError_t code_images(const ConvTask& task, CodeImages& images, cudaStream_t) {
  images = {.x = task.x, .pitch = task.a.pixel, .patches = task.patches};
  return cudaSuccess;
}

namespace {

using emulator::Codes;
using emulator::kBias;
using emulator::kChannelScales;
using emulator::kResidual;
using emulator::kZeros;

struct Case {
  Codes codes;
  int m, n, k;
  int tokens, blocks, depth, split;  // ScaledConfig
  DType out = DType::bf16;
  unsigned extra = 0;
};

std::string name(const Case& c) {
  return fmt::format("{}_{}x{}_depth{}{}", emulator::name({c.codes, c.m, c.n, c.k, c.out, c.extra}), c.tokens,
                     gpu_w8::kRows * c.blocks, c.depth, c.split == kStreamK ? "_streamk" : fmt::format("_split{}", c.split));
}

class Emulated : public testing::TestWithParam<Case> {};

TEST_P(Emulated, GivesTheSumsOfTheLayer) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  emulator::StreamKMemory scratch(c.tokens);
  const emulator::ScaledLayer layer({c.codes, c.m, c.n, c.k, c.out, c.extra});
  ScaledTask task = layer.task();
  task.scratch_end = scratch.end();
  const ScaledConfig config{.tokens = c.tokens, .blocks = c.blocks, .depth = c.depth, .split = c.split};
  layer.expect_sums(task, [&](const ScaledTask& t) { return linear_scaled_sm90(t, config, nullptr); });
}

// Rows, tokens and channels with tails, more records than a ring has stages, more passes than there are multiprocessors.
constexpr Case kCases[] = {
    {Codes::s8, 3, 72, 1936, 16, 2, 2, 1},
    {Codes::s8, 17, 200, 1024, 32, 4, 1, 1, DType::bf16, kZeros},
    {Codes::s8, 40, 320, 1152, 64, 4, 1, kStreamK},
    {Codes::s8, 130, 200, 640, 128, 3, 1, 1, DType::f32, kResidual},
    {Codes::s8, 300, 136, 768, 256, 2, 1, 1, DType::bf16, kBias},
    {Codes::e4m3, 20, 128, 2048, 16, 1, 2, 1, DType::f16},
    {Codes::e4m3, 260, 264, 768, 256, 2, 1, kStreamK},
    {Codes::s8, 10, 200, 1424, 16, 2, 1, 4, DType::bf16, kZeros},
    {Codes::s8, 300, 72, 768, 256, 1, 1, 2},
    {Codes::e4m3, 40, 136, 1152, 64, 1, 1, 4, DType::f32, kResidual},
    {Codes::groups, 130, 136, 640, 128, 2, 1, 2},
    {Codes::groups, 5, 136, 1424, 16, 2, 2, 1},
    {Codes::groups, 40, 72, 1024, 32, 4, 1, kStreamK, DType::bf16, kResidual},
    {Codes::groups, 70, 192, 896, 64, 2, 1, 1, DType::bf16, kBias},
    {Codes::groups, 150, 320, 640, 128, 2, 1, kStreamK},
    {Codes::groups, 130, 72, 1024, 128, 1, 1, 1, DType::f32, kResidual | kChannelScales},
    {Codes::groups, 2100, 136, 256, 128, 2, 1, 1},
    {Codes::groups, 300, 328, 912, 256, 2, 1, 1, DType::bf16, kBias},
    {Codes::groups, 270, 192, 768, 256, 2, 1, kStreamK, DType::f16},
    {Codes::groups, 530, 100, 640, 256, 2, 1, 1, DType::f32, kResidual | kChannelScales},
    {Codes::groups, 2100, 136, 256, 256, 2, 1, 1},
};

struct ConvCase {
  int images, height, width, channels, outputs;
  int kernel, stride, padding, dilation;
  int tokens, blocks, split;  // ScaledConfig
  bool nchw;                  // D's
};

class EmulatedConv : public testing::TestWithParam<ConvCase> {};

/// Sums are integers, which become floats by one rounding, and scales are 1: D is known to the bit.
TEST_P(EmulatedConv, GivesTheSumsOfTheLayer) {
  const ConvCase& c = GetParam();
  emulator::use_shared_memory(shared);
  const Patches p = emulator::patches(c);
  const int k = c.kernel * c.kernel * c.channels, pixels = p.pixels();
  std::mt19937 random(static_cast<unsigned>(c.channels + c.outputs));
  const auto code = [&] { return static_cast<std::int8_t>(random()); };
  std::vector<std::int8_t> x(static_cast<std::size_t>(c.images * c.height * c.width * c.channels)),
      w(static_cast<std::size_t>(c.outputs * k));
  for (auto& byte : x) byte = code();
  for (auto& byte : w) byte = code();
  ConvTask task;
  task.scaled.geometry = {.n = c.outputs, .k = k};
  const gpu_w8::Geometry& geometry = task.scaled.geometry;
  std::vector<std::byte> packed = emulator::packed_codes(geometry, w);
  const std::vector<float> ones(static_cast<std::size_t>(geometry.padded_rows()), 1.0f);
  std::memcpy(packed.data() + geometry.scales_offset(), ones.data(), 4 * ones.size());

  std::vector<float> d(static_cast<std::size_t>(c.images * pixels * c.outputs) + 4, 0.5f);
  task.scaled.bytes = packed.data();
  task.patches = p;
  task.images = c.images;
  task.act = DType::s8;
  task.x = x.data();
  task.a = {c.height * c.width * c.channels, c.channels, 1};
  task.d = c.nchw ? ImageStrides{pixels * c.outputs, 1, pixels} : ImageStrides{pixels * c.outputs, c.outputs, 1};
  task.epilogue.d = d.data();
  task.epilogue.d_stride = task.d.pixel;
  emulator::StreamKMemory scratch(c.tokens);
  task.scratch_end = scratch.end();
  ASSERT_EQ(conv_scaled_sm90(task, {.tokens = c.tokens, .blocks = c.blocks, .split = c.split}, nullptr), cudaSuccess);

  emulator::for_each_sum(
      p, c.images, [&](std::size_t i) { return static_cast<double>(x[i]); },
      [&](int n, int i) { return static_cast<double>(w[static_cast<std::size_t>(n * k + i)]); },
      [&](int image, int pixel, int n, const emulator::ConvSum& expected) {
        const auto at = static_cast<std::size_t>(image * task.d.image + pixel * task.d.pixel + n * task.d.channel);
        ASSERT_EQ(d[at], static_cast<float>(expected.sum)) << image << " " << pixel << " " << n;
      });
  for (std::size_t i = d.size() - 4; i < d.size(); ++i) ASSERT_EQ(d[i], 0.5f) << "written past D";
}

// Channels in boxes of 64 and of 128, strides, dilations, tiles that begin within an image and end in another.
constexpr ConvCase kConvs[] = {
    {2, 9, 7, 64, 72, 3, 1, 1, 1, 64, 4, 1, false},
    {1, 12, 11, 128, 136, 3, 2, 1, 1, 128, 2, 1, true},
    {3, 10, 10, 192, 64, 3, 1, 2, 2, 256, 1, 1, false},
    {2, 8, 9, 128, 200, 1, 1, 0, 1, 128, 3, kStreamK, true},
};
INSTANTIATE_TEST_SUITE_P(Scaled, EmulatedConv, testing::ValuesIn(kConvs));

INSTANTIATE_TEST_SUITE_P(Scaled, Emulated, testing::ValuesIn(kCases), [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace nibble::cuda
