// The sm_90 GEMM of weights in gpu_n64k128 and 16-bit activations, and its convolutions, on the emulated GPU: the launcher and the kernels
// as they are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "emulator/conv_patches.hpp"
#include "emulator/memory.hpp"
#include "emulator/tile_weight.hpp"

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

std::uint16_t to_half(DType type, float x) { return type == DType::f16 ? to_f16(x).bits : to_bf16(x).bits; }
float from_half(DType type, std::uint16_t bits) { return type == DType::f16 ? to_f32(f16{bits}) : to_f32(bf16{bits}); }
float rounded(DType type, float x) { return from_half(type, to_half(type, x)); }
/// What D's rounding may be of a number.
double half_step(DType type) { return type == DType::f16 ? 0x1p-11 : 0x1p-8; }

/// W as kernels multiply it, and what else its rounding may be, both in parts of W's own. Up to 32 tokens sums are scaled, and with one
/// group a row; else weights are, and rounded.
struct Multiplied {
  double value, spread;
};
Multiplied multiplied(const TileWeight& w, DType act, int tokens, int row, int channel) {
  if (w.kind == TileZeros::offset) return {w.value(row, channel), half_step(act) * 4};
  const bool common = w.group >= gpu_tile::kChannels;
  if (w.group >= w.k || (common && tokens <= 32)) return {w.value(row, channel), 0};
  constexpr float kUp = 64.0f;  // f16's weights are as many times as large, out of reach of subnormals
  const float scale = act == DType::f16 ? kUp * w.scale(row, channel) : rounded(act, w.scale(row, channel));
  const float value = rounded(act, static_cast<float>(w.integer(row, channel)) * scale);
  return {static_cast<double>(act == DType::f16 ? value / kUp : value), 0};
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
  std::mt19937 random(static_cast<unsigned>(c.m * 31 + c.n * 7 + c.k));
  const TileWeight w(c.n, c.k, c.bits, c.group, c.zeros, random);
  const int pitch = c.k + 8;
  std::vector<std::uint16_t> x(static_cast<std::size_t>(c.m * pitch));
  for (auto& v : x) v = to_half(c.act, static_cast<float>(static_cast<int>(random() % 129) - 64) / 16);
  std::vector<std::int32_t> order(static_cast<std::size_t>(c.k));
  std::iota(order.begin(), order.end(), 0);
  if (c.act_order) std::shuffle(order.begin(), order.end(), random);

  std::vector<std::uint16_t> d(static_cast<std::size_t>(c.m * c.n) + 16, 0xa5a5);
  std::vector<std::uint16_t> gathered(static_cast<std::size_t>(gathered_rows(c.m, c.k, c.act_order) * gathered_pitch(c.k)) + 128);
  emulator::StreamKMemory scratch(c.tokens);
  LinearTask task;
  task.weight = w.device();
  if (c.act_order) task.weight.perm = order.data();
  task.m = c.m;
  task.act = c.act;
  task.x = x.data();
  task.x_stride = pitch;
  task.scratch = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(gathered.data()) + 255) / 256 * 256);
  task.scratch_end = scratch.end();
  task.epilogue.out = c.act;
  task.epilogue.d = d.data();
  task.epilogue.d_stride = c.n;
  ASSERT_EQ(linear_gemm_sm90(task, {.tokens = c.tokens, .split = c.split, .depth = c.depth}, nullptr), cudaSuccess);

  int wrong = 0;
  for (int n = 0; n < c.n; ++n) {
    std::vector<Multiplied> row;
    for (int k = 0; k < c.k; ++k) row.push_back(multiplied(w, c.act, c.tokens, n, k));
    for (int m = 0; m < c.m; ++m) {
      double sum = 0, off = 0;
      for (int k = 0; k < c.k; ++k) {
        const auto at = static_cast<std::size_t>(m * pitch + order[static_cast<std::size_t>(k)]);
        const double act = static_cast<double>(from_half(c.act, x[at])), product = row[static_cast<std::size_t>(k)].value * act;
        sum += product, off += std::abs(product) * (0x1p-20 + row[static_cast<std::size_t>(k)].spread);
      }
      const double got = static_cast<double>(from_half(c.act, d[static_cast<std::size_t>(m * c.n + n)]));
      off += std::abs(sum) * half_step(c.act) * 1.01 + 1e-6;
      if (std::abs(got - sum) <= off) continue;  // false of a NaN
      if (++wrong <= 5) ADD_FAILURE() << "D[" << m << "," << n << "] is " << got << ", expected " << sum << " ± " << off;
    }
  }
  EXPECT_EQ(wrong, 0);
  for (std::size_t i = static_cast<std::size_t>(c.m * c.n); i < d.size(); ++i) ASSERT_EQ(d[i], 0xa5a5) << "written past D";
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
