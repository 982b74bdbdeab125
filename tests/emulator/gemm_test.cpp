// The sm_90 GEMM of weights in gpu_n64k128 and 16-bit activations, and its convolutions, on the emulated GPU: the launcher and the kernels
// as they are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "emulator/conv_layer.hpp"
#include "emulator/expert_rows.hpp"
#include "emulator/float_layer.hpp"
#include "emulator/memory.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm90/gemm/gemm.cu"
#include "kernels/cuda/sm90/gemm/gemm_bf16.cu"
#include "kernels/cuda/sm90/gemm/gemm_bf16_float_codes.cu"
#include "kernels/cuda/sm90/gemm/gemm_experts_bf16.cu"
#include "kernels/cuda/sm90/gemm/gemm_experts_f16.cu"
#include "kernels/cuda/sm90/gemm/gemm_f16.cu"
#include "kernels/cuda/sm90/gemm/gemm_f16_float_codes.cu"
#include "kernels/cuda/sm90/gemm/gemm_patches_f16.cu"
#include "kernels/cuda/sm90/gemm/gemm_planar_f16.cu"

namespace nibble::cuda {

// Kernels that no test needs.
GemmKernel gemm_sm90_patches_bf16(int, const RecordFormat&) { return nullptr; }
GemmKernel gemm_sm90_patches_f16_float_codes(int, const RecordFormat&) { return nullptr; }
GemmKernel gemm_sm90_planar_bf16(int, const RecordFormat&) { return nullptr; }

namespace {

using emulator::TileWeight;

/// Up to 32 tokens the sums of common weights are scaled, and not the weights.
emulator::Multiplied multiplied(const TileWeight& w, DType act, int tokens, int row, int channel) {
  if (w.kind <= ZeroKind::integer && gpu_tile::span(w.group) == gpu_tile::kChannels && tokens <= 32)
    return {w.value(row, channel), 0};
  return emulator::rounded_weight(w, act, row, channel);
}

// ---- layers

struct Case {
  emulator::FloatCase layer;
  int tokens, depth, split;  // GemmConfig
};

std::string name(const Case& c) {
  return fmt::format("{}_{}_depth{}{}", emulator::name(c.layer), c.tokens, c.depth,
                     c.split == kStreamK ? "_streamk" : fmt::format("_split{}", c.split));
}

class EmulatedGemm : public testing::TestWithParam<Case> {};

TEST_P(EmulatedGemm, GivesTheSumsOfTheLayer) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  const emulator::FloatLayer layer(c.layer);
  std::vector<std::uint16_t> gathered(
      static_cast<std::size_t>(gathered_rows(c.layer.m, c.layer.k, c.layer.act_order || c.layer.prescale) *
                               gathered_pitch(c.layer.k)) +
      128);
  emulator::StreamKMemory scratch(c.tokens);
  LinearTask task = layer.task();
  task.scratch = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(gathered.data()) + 255) / 256 * 256);
  task.scratch_end = scratch.end();
  const emulator::NextMemory next;
  task.next = next.weight();
  layer.expect_sums(
      task,
      [&](const LinearTask& t) { return linear_gemm_sm90(t, {.tokens = c.tokens, .split = c.split, .depth = c.depth}, nullptr); },
      [&](int n, int k) { return multiplied(layer.weight, layer.a_dtype, c.tokens, n, k); });
  next.expect_asked(c.tokens == 16);
}

// Rows, tokens and channels with tails, and more records than a ring has stages; every distribution of passes, every kind of weight.
constexpr auto kNone = ZeroKind::none, kInteger = ZeroKind::integer, kReal = ZeroKind::real, kOffset = ZeroKind::offset;
constexpr Case kCases[] = {
    {{DType::f16, Codes::u4, 128, kNone, 3, 72, 1936}, 16, 2, 1},
    {{DType::bf16, Codes::u4, 128, kInteger, 30, 200, 1424}, 32, 1, kStreamK},
    {{DType::f16, Codes::u4, 128, kInteger, 70, 200, 896}, 64, 1, 1},
    {{DType::bf16, Codes::u4, 128, kNone, 150, 320, 1152}, 128, 1, kStreamK},
    {{DType::f16, Codes::u4, 128, kNone, 300, 200, 640}, 256, 1, 1},
    {{DType::f16, Codes::u4, 128, kNone, 2100, 136, 256}, 256, 1, 1},
    {{DType::f16, Codes::u4, 128, kInteger, 10, 200, 1424}, 16, 2, 2},
    {{DType::bf16, Codes::u4, 128, kNone, 70, 264, 896}, 64, 1, 4},
    {{DType::f16, Codes::u4, 32, kNone, 40, 264, 416}, 64, 1, 1},
    {{DType::f16, Codes::u4, 96, kNone, 20, 136, 672}, 32, 2, 1},
    {{DType::bf16, Codes::u4, 192, kInteger, 70, 72, 1000}, 128, 1, kStreamK},
    // A pass of three row blocks that a cluster shares: a rank owns units of two of them, and few tokens of each exist.
    {{DType::f16, Codes::u4, 128, kInteger, 129, 200, 896}, 128, 1, 2},
    {{DType::bf16, Codes::u4, 128, kNone, 10, 200, 1424}, 128, 1, 4},
    {{DType::f16, Codes::u4, 64, kInteger, 130, 136, 640}, 128, 1, 1},
    {{DType::bf16, Codes::u4, 32, kInteger, 20, 100, 400}, 16, 4, 1},
    {{DType::f16, Codes::u4, 128, kOffset, 40, 72, 528}, 32, 1, 1},
    {{DType::f16, Codes::u4, 16, kOffset, 70, 136, 672}, 64, 1, 1},
    {{DType::f16, Codes::u4, 64, kOffset, 10, 72, 416}, 16, 2, 1},
    {{DType::f16, Codes::u8, 32, kOffset, 300, 72, 272}, 256, 1, 1},
    {{DType::f16, Codes::u4, 96, kOffset, 130, 136, 672}, 128, 1, 1},
    {{DType::f16, Codes::u4, 64, kReal, 40, 136, 672}, 32, 1, 1},
    {{DType::f16, Codes::u4, 128, kReal, 70, 200, 640}, 64, 1, kStreamK},
    {{DType::f16, Codes::u4, 1024, kReal, 10, 72, 1024}, 16, 2, 1},
    {{DType::f16, Codes::u4, 32, kReal, 300, 72, 272}, 256, 1, 1},
    {{DType::bf16, Codes::u4, 64, kReal, 140, 72, 400}, 128, 1, 1},
    {{DType::bf16, Codes::u4, 64, kOffset, 140, 72, 400}, 128, 1, 1},
    {{DType::f16, Codes::u4, 1024, kInteger, 70, 72, 1024}, 64, 1, 1},
    {{DType::f16, Codes::u8, 128, kInteger, 140, 72, 784}, 128, 1, 1},
    {{DType::bf16, Codes::u8, 128, kNone, 33, 256, 640}, 64, 1, kStreamK},
    {{DType::f16, Codes::u4, 16, kNone, 10, 136, 672}, 16, 2, 1},
    {{DType::f16, Codes::u4, 16, kInteger, 40, 72, 416}, 32, 1, 1},
    {{DType::bf16, Codes::u4, 48, kInteger, 70, 136, 672}, 64, 1, 1},
    {{DType::f16, Codes::u8, 16, kInteger, 140, 72, 400}, 128, 1, 1},
    {{DType::bf16, Codes::u8, 16, kNone, 300, 72, 272}, 256, 1, 1},
    {{DType::f16, Codes::u4, 8, kInteger, 10, 136, 672}, 16, 2, 1},
    {{DType::bf16, Codes::u4, 24, kNone, 70, 72, 480}, 64, 1, kStreamK},
    {{DType::f16, Codes::u8, 40, kInteger, 140, 72, 400}, 128, 1, 1},
    {{DType::bf16, Codes::u8, 8, kNone, 300, 72, 272}, 256, 1, 1},
    {{DType::f16, Codes::u4, 128, kInteger, 20, 72, 640, true}, 16, 1, 1},
    {{DType::bf16, Codes::u4, 128, kInteger, 40, 72, 656, false, true}, 64, 1, 1},
    {{DType::f16, Codes::u4, 128, kNone, 20, 72, 524, true, true}, 32, 1, 1},
    {{DType::f16, Codes::u4, 128, kNone, 5, 72, 530}, 16, 1, 1},
    {{DType::f16, Codes::e4m3, 128, kNone, 10, 136, 672}, 16, 2, 1},
    {{DType::bf16, Codes::e4m3, 128, kNone, 70, 72, 416}, 64, 1, 1},
    {{DType::f16, Codes::e4m3, 1024, kNone, 140, 72, 400}, 128, 1, 1},
    {{DType::bf16, Codes::e4m3, 32, kNone, 20, 72, 416}, 32, 1, 1},
    {{DType::f16, Codes::e2m1, 16, kNone, 70, 136, 672}, 64, 1, 1},
    {{DType::bf16, Codes::e2m1, 32, kNone, 10, 136, 416}, 16, 1, 1},
    {{DType::f16, Codes::e2m1, 64, kNone, 140, 72, 416}, 128, 1, 1},
    {{DType::f16, Codes::e2m1, 128, kNone, 300, 72, 272}, 256, 1, 1},
};
INSTANTIATE_TEST_SUITE_P(Gemm, EmulatedGemm, testing::ValuesIn(kCases), [](const auto& info) { return name(info.param); });

// ---- rows of experts

struct GemmExpertCase {
  emulator::ExpertCase experts;
  int depth;
};

class EmulatedGemmExperts : public testing::TestWithParam<GemmExpertCase> {};

TEST_P(EmulatedGemmExperts, GivesTheSumsOfEachExpert) {
  const emulator::ExpertCase& experts = GetParam().experts;
  const int depth = GetParam().depth;
  emulator::use_shared_memory(shared);
  emulator::expect_sums_of_experts(
      experts,
      [&](const LinearTask& task) {
        return linear_gemm_sm90(task, {.tokens = experts.tokens, .split = 1, .depth = depth}, nullptr);
      },
      [&](const TileWeight& weight, int row, int k) {
        return multiplied(weight, experts.layer.a_dtype, experts.tokens, row, k);
      });
}

const GemmExpertCase kExpertCases[] = {
    {{{DType::bf16, Codes::u4, 128, kNone, 0, 200, 1424}, 16, {3, 0, 20, 1, 0, 40}}, 1},
    {{{DType::f16, Codes::u4, 128, kInteger, 0, 72, 896}, 16, {1, 1, 0, 1}}, 2},
    {{{DType::bf16, Codes::u4, 32, kNone, 0, 264, 416}, 64, {70, 2, 0, 64, 5}}, 1},
    {{{DType::f16, Codes::u4, 128, kNone, 0, 320, 640}, 128, {0, 150, 128, 9}}, 1},
    {{{DType::bf16, Codes::u4, 128, kNone, 0, 72, 384}, 128, {32, 33, 64, 65, 96, 97, 225}}, 1},  // each part of a tile
    {{{DType::f16, Codes::u4, 32, kNone, 0, 72, 384}, 64, {16, 17, 32, 33, 48, 49, 113}}, 1},
    {{{DType::bf16, Codes::u8, 128, kNone, 0, 72, 272}, 64, {5, 66}}, 1},
    {{{DType::bf16, Codes::e4m3, 128, kNone, 0, 136, 384}, 128, {1, 130, 2}}, 1},
    {{{DType::bf16, Codes::e2m1, 32, kNone, 0, 136, 416}, 16, {2, 17, 0, 3}}, 1},
    {{{DType::bf16, Codes::e2m1, 16, kNone, 0, 72, 416}, 64, {65, 1}}, 1},
    {{{DType::f16, Codes::u4, 128, kNone, 0, 72, 256}, 64, {700, 900, 0, 800}}, 1},  // bands
    {{{DType::f16, Codes::u4, 1024, kNone, 0, 72, 1024}, 16, {7, 2}}, 1},            // a scale per channel
    {{{DType::f16, Codes::u4, 128, kNone, 0, 72, 256}, 64, {0, 0}}, 1},              // no rows at all
};
INSTANTIATE_TEST_SUITE_P(Gemm, EmulatedGemmExperts, testing::ValuesIn(kExpertCases), [](const auto& info) {
  return fmt::format("{}_depth{}_{}", emulator::name(info.param.experts), info.param.depth, info.index);
});

// ---- convolutions

struct ConvCase {
  emulator::ConvShape shape;
  int group, tokens, split;
  bool prescaled = false;
  bool planar = false;  // pointwise, of images in NCHW, which are read as they lie: there is no scratch memory for them
};

class EmulatedGemmConv : public testing::TestWithParam<ConvCase> {
 protected:
  EmulatedGemmConv() : conv_(GetParam().shape, GetParam().group, GetParam().prescaled), scratch_(GetParam().tokens) {
    emulator::use_shared_memory(shared);
    task_ = conv_.task();
    images_ = conv_.scratch(task_);
    task_.scratch_end = scratch_.end();
    if (!GetParam().planar) return;
    const int pixels = GetParam().shape.pixels(), channels = GetParam().shape.channels;
    planar_.resize(conv_.x.size() / 8);
    auto* const x = reinterpret_cast<std::uint16_t*>(planar_.data());
    for (std::size_t i = 0; i < conv_.x.size(); ++i) {
      const int channel = static_cast<int>(i) % channels, pixel = static_cast<int>(i) / channels;
      x[(pixel / pixels * channels + channel) * pixels + pixel % pixels] = conv_.x[i];
    }
    task_.x = x;
    task_.a = {pixels * channels, 1, pixels};
    task_.scratch = nullptr;
  }
  static cudaError_t launch(const ConvTask& task) {
    return conv_gemm_sm90(task, {.tokens = GetParam().tokens, .split = GetParam().split}, nullptr);
  }

  emulator::FloatConv conv_;
  emulator::StreamKMemory scratch_;
  ConvTask task_;
  std::vector<std::uint32_t> images_;
  std::vector<uint4> planar_;  // aligned
};

TEST_P(EmulatedGemmConv, GivesTheSumsOfTheLayer) {
  const ConvCase& c = GetParam();
  c.shape.expect_sums(
      task_, launch, [&](std::size_t i) { return conv_.act_f16(i); },
      [&](int n, int k) { return multiplied(conv_.weight, DType::f16, c.tokens, n, k).value; }, 0x1p-20);
}

TEST_P(EmulatedGemmConv, StoresHalvesWhereItStoresFloats) {
  const emulator::ConvShape& shape = GetParam().shape;
  const auto size = static_cast<std::size_t>(shape.images * shape.pixels() * shape.outputs);
  std::vector<float> floats(size);
  std::vector<uint4> memory(size / 8 + 2);
  auto* const halves = reinterpret_cast<std::uint16_t*>(memory.data());
  std::fill_n(halves, size + 8, std::uint16_t{0xa5a5});
  task_.epilogue.d_stride = task_.d.pixel;
  task_.epilogue.d = floats.data();
  ASSERT_EQ(launch(task_), cudaSuccess);
  task_.epilogue.d = halves;
  task_.epilogue.out = DType::f16;
  ASSERT_EQ(launch(task_), cudaSuccess);
  for (std::size_t i = 0; i < size; ++i) ASSERT_EQ(halves[i], to_f16(floats[i]).bits) << i;
  for (std::size_t i = size; i < size + 8; ++i) ASSERT_EQ(halves[i], 0xa5a5) << "written past D";
}

// Strides, dilations, tiles that begin within an image and end in another.
constexpr ConvCase kConvs[] = {
    {{2, 9, 7, 64, 72, 3, 1, 1, 1, false}, 64, 64, 1},
    {{1, 12, 11, 128, 136, 3, 2, 1, 1, true}, 128, 128, 1},
    {{3, 10, 10, 192, 64, 3, 1, 2, 2, false}, 64, 256, kStreamK},
    {{2, 9, 7, 64, 72, 3, 1, 1, 1, false}, 16, 64, 1},
    {{2, 9, 7, 64, 72, 3, 1, 1, 1, false}, 64, 64, 1, true},
    {{3, 8, 7, 192, 72, 1, 1, 0, 1, true}, 64, 64, 1, false, true},
    {{2, 12, 12, 64, 200, 1, 1, 0, 1, true}, 128, 128, 2, false, true},
    {{3, 8, 15, 320, 64, 1, 1, 0, 1, true}, 64, 256, kStreamK, false, true},
};
INSTANTIATE_TEST_SUITE_P(Gemm, EmulatedGemmConv, testing::ValuesIn(kConvs));

}  // namespace
}  // namespace nibble::cuda
