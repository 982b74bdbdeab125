// The sm_90 GEMM of weights in gpu_n64k128 and 16-bit activations, and its convolutions, on the emulated GPU: the launcher and the kernels
// as they are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>

#include "emulator/conv_patches.hpp"
#include "emulator/float_layer.hpp"
#include "emulator/memory.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/gemm_sm90.cu"
#include "kernels/cuda/gemm_sm90_bf16.cu"
#include "kernels/cuda/gemm_sm90_f16.cu"
#include "kernels/cuda/gemm_sm90_patches_f16.cu"

namespace nibble::cuda {

// What no test asks for.
GemmKernel gemm_sm90_patches_bf16(int, const RecordFormat&, int) { return nullptr; }
cudaError_t channels_last(const ConvTask&, void*, cudaStream_t) { return cudaErrorNotSupported; }

namespace {

using emulator::TileWeight;
using emulator::TileZeros;

using emulator::from_half;
using emulator::to_half;

/// Up to 32 tokens the sums of common weights are scaled, and not the weights.
emulator::Multiplied multiplied(const TileWeight& w, DType act, int tokens, int row, int channel) {
  if (w.kind != TileZeros::offset && w.group >= gpu_tile::kChannels && tokens <= 32) return {w.value(row, channel), 0};
  return emulator::rounded_weight(w, act, row, channel);
}

// ---- layers

struct Case {
  DType act;
  int bits, group;
  TileZeros zeros;
  int m, n, k;
  int tokens, depth, split;  // GemmConfig
  bool act_order = false;
};

std::string name(const Case& c) {
  const char* const zeros[] = {"", "_zeros", "_offsets"};
  return fmt::format("{}_u{}g{}{}_m{}_n{}_k{}_{}_depth{}{}{}", nibble::name(c.act), c.bits, c.group,
                     zeros[static_cast<int>(c.zeros)], c.m, c.n, c.k, c.tokens, c.depth,
                     c.split == kStreamK ? "_streamk" : fmt::format("_split{}", c.split), c.act_order ? "_act_order" : "");
}

class EmulatedGemm : public testing::TestWithParam<Case> {};

TEST_P(EmulatedGemm, GivesTheSumsOfTheLayer) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  const emulator::FloatLayer layer(c.act, c.m, c.n, c.k, c.bits, c.group, c.zeros, c.act_order);
  std::vector<std::uint16_t> gathered(static_cast<std::size_t>(gathered_rows(c.m, c.k, c.act_order) * gathered_pitch(c.k)) + 128);
  emulator::StreamKMemory scratch(c.tokens);
  LinearTask task = layer.task();
  task.scratch = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(gathered.data()) + 255) / 256 * 256);
  task.scratch_end = scratch.end();
  layer.expect_sums(
      task,
      [&](const LinearTask& t) { return linear_gemm_sm90(t, {.tokens = c.tokens, .split = c.split, .depth = c.depth}, nullptr); },
      [&](int n, int k) { return multiplied(layer.weight, c.act, c.tokens, n, k); });
}

// Rows, tokens and channels with tails, and more records than a ring has stages; every way to deal passes, every kind of weight.
constexpr auto kNone = TileZeros::none, kInteger = TileZeros::integer, kOffset = TileZeros::offset;
constexpr Case kCases[] = {
    {DType::f16, 4, 128, kNone, 3, 72, 1936, 16, 2, 1},          {DType::bf16, 4, 128, kInteger, 30, 200, 1424, 32, 1, kStreamK},
    {DType::f16, 4, 128, kInteger, 70, 200, 896, 64, 1, 1},      {DType::bf16, 4, 128, kNone, 150, 320, 1152, 128, 1, kStreamK},
    {DType::f16, 4, 128, kNone, 300, 200, 640, 256, 1, 1},       {DType::f16, 4, 128, kNone, 2100, 136, 256, 256, 1, 1},
    {DType::f16, 4, 128, kInteger, 10, 200, 1424, 16, 2, 2},     {DType::bf16, 4, 128, kNone, 70, 264, 896, 64, 1, 4},
    {DType::f16, 4, 32, kNone, 40, 264, 416, 64, 1, 1},          {DType::f16, 4, 64, kInteger, 130, 136, 640, 128, 1, 1},
    {DType::bf16, 4, 32, kInteger, 20, 100, 400, 16, 4, 1},      {DType::f16, 4, 128, kOffset, 40, 72, 528, 32, 1, 1},
    {DType::f16, 4, 1024, kInteger, 70, 72, 1024, 64, 1, 1},     {DType::f16, 8, 128, kInteger, 140, 72, 784, 128, 1, 1},
    {DType::bf16, 8, 128, kNone, 33, 256, 640, 64, 1, kStreamK}, {DType::f16, 4, 128, kInteger, 20, 72, 640, 16, 1, 1, true},
    {DType::f16, 4, 128, kNone, 5, 72, 530, 16, 1, 1},
};
INSTANTIATE_TEST_SUITE_P(Gemm, EmulatedGemm, testing::ValuesIn(kCases), [](const auto& info) { return name(info.param); });

// ---- convolutions

struct ConvCase {
  int images, height, width, channels, outputs;
  int kernel, stride, padding, dilation;
  int group, tokens, split;
  bool nchw;  // D's
};

class EmulatedGemmConv : public testing::TestWithParam<ConvCase> {};

TEST_P(EmulatedGemmConv, GivesTheSumsOfTheLayer) {
  const ConvCase& c = GetParam();
  emulator::use_shared_memory(shared);
  const Patches p = emulator::patches(c);
  const int k = c.kernel * c.kernel * c.channels, pixels = p.pixels();
  std::mt19937 random(static_cast<unsigned>(c.channels + c.outputs));
  const TileWeight w(c.outputs, k, 4, c.group, kNone, random);
  std::vector<std::uint16_t> x(static_cast<std::size_t>(c.images * c.height * c.width * c.channels));
  for (auto& v : x) v = to_half(DType::f16, static_cast<float>(static_cast<int>(random() % 129) - 64) / 16);

  std::vector<float> d(static_cast<std::size_t>(c.images * pixels * c.outputs) + 4, 0.5f);
  ConvTask task;
  task.weight = w.device();
  task.patches = p;
  task.images = c.images;
  task.act = DType::f16;
  task.x = x.data();
  task.a = {c.height * c.width * c.channels, c.channels, 1};
  task.d = c.nchw ? ImageStrides{pixels * c.outputs, 1, pixels} : ImageStrides{pixels * c.outputs, c.outputs, 1};
  task.epilogue.d = d.data();
  task.epilogue.d_stride = task.d.pixel;
  emulator::StreamKMemory scratch(c.tokens);
  task.scratch_end = scratch.end();
  ASSERT_EQ(conv_gemm_sm90(task, {.tokens = c.tokens, .split = c.split}, nullptr), cudaSuccess);

  emulator::for_each_sum(
      p, c.images, [&](std::size_t i) { return static_cast<double>(from_half(DType::f16, x[i])); },
      [&](int n, int i) { return multiplied(w, DType::f16, c.tokens, n, i).value; },
      [&](int image, int pixel, int n, const emulator::ConvSum& expected) {
        const auto at = static_cast<std::size_t>(image * task.d.image + pixel * task.d.pixel + n * task.d.channel);
        ASSERT_NEAR(static_cast<double>(d[at]), expected.sum, expected.magnitude * 0x1p-20) << image << " " << pixel << " " << n;
      });
  for (std::size_t i = d.size() - 4; i < d.size(); ++i) ASSERT_EQ(d[i], 0.5f) << "written past D";
}

// Strides, dilations, tiles that begin within an image and end in another.
constexpr ConvCase kConvs[] = {
    {2, 9, 7, 64, 72, 3, 1, 1, 1, 64, 64, 1, false},
    {1, 12, 11, 128, 136, 3, 2, 1, 1, 128, 128, 1, true},
    {3, 10, 10, 192, 64, 3, 1, 2, 2, 64, 256, kStreamK, false},
};
INSTANTIATE_TEST_SUITE_P(Gemm, EmulatedGemmConv, testing::ValuesIn(kConvs));

}  // namespace
}  // namespace nibble::cuda
