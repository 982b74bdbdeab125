// The epilogue of sums in memory (epilogue_rows.cu) on the emulated GPU, bit for bit as on the host.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "emulator/float_layer.hpp"

#include "kernels/cuda/steps/epilogue_rows.cu"

namespace nibble::cuda {
namespace {

class EmulatedEpilogueRows : public testing::TestWithParam<int> {};

TEST_P(EmulatedEpilogueRows, GivesTheBitsOfTheHost) {
  const int m = 5, n = GetParam(), stride = n + 3, d_stride = n + 1;
  std::mt19937 random(static_cast<unsigned>(n));
  const auto number = [&] { return (static_cast<float>(random() % 4001) - 2000) / 300; };
  std::vector<float> sums(static_cast<std::size_t>(m * stride)), scales, bias, residual;
  for (float& sum : sums) sum = number();
  for (int i = 0; i < n; ++i) scales.push_back(number()), bias.push_back(number());
  for (int i = 0; i < m * n; ++i) residual.push_back(number());
  std::vector<std::uint16_t> d(static_cast<std::size_t>(m * d_stride), 0xa5a5);
  epilogue::Element e;
  e.acc_scale = 0.7f;
  e.col_scale = scales.data();
  e.bias = {bias.data()};
  e.activation = Activation::relu;
  e.residual = {residual.data(), DType::f32, n};
  e.out = DType::f16;
  e.d = d.data(), e.d_stride = d_stride;
  ASSERT_EQ(epilogue_rows(e, {.data = sums.data(), .stride = stride}, m, n, nullptr), cudaSuccess);
  for (int row = 0; row < m; ++row) {
    for (int i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      float v = sums[static_cast<std::size_t>(row * stride + i)] * e.acc_scale;
      v = std::max(v * scales[at] + bias[at], 0.0f) + residual[static_cast<std::size_t>(row * n + i)];
      ASSERT_EQ(d[static_cast<std::size_t>(row * d_stride + i)], emulator::to_half(DType::f16, v)) << row << " " << i;
    }
    ASSERT_EQ(d[static_cast<std::size_t>(row * d_stride + n)], 0xa5a5) << "written past a row";
  }
}

TEST_P(EmulatedEpilogueRows, HasEveryActivation) {
  const int m = 3, n = GetParam();
  std::vector<float> sums(static_cast<std::size_t>(m * n));
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = (static_cast<float>(i * 37 % 4001) - 2000) / 300;
  for (Activation activation : kActivations) {
    std::vector<float> d(sums.size()), expected(sums.size());
    epilogue::Element e;
    e.activation = activation;
    e.clamp_low = -2.5f, e.clamp_high = 3.0f, e.negative_slope = -0.3f;
    e.d = d.data(), e.d_stride = n;
    ASSERT_EQ(epilogue_rows(e, {.data = sums.data(), .stride = n}, m, n, nullptr), cudaSuccess);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      expected[i] = sums[i];
      epilogue::with_activation(e, [&](auto function) { expected[i] = function(expected[i]); });
    }
    ASSERT_EQ(d, expected) << name(activation);
  }
}

TEST_P(EmulatedEpilogueRows, AddsThreeRowsInTheirOrder) {
  const int m = 4, n = GetParam();
  for (const int stride : {(n + 7) / 8 * 8, n + 1}) {  // with and without loads of 16 bytes
    std::mt19937 random(static_cast<unsigned>(n));
    std::vector<float4> memory(static_cast<std::size_t>(3 * m * stride) / 4 + 1);
    float* const sums = &memory[0].x;
    for (int i = 0; i < 3 * m * stride; ++i) sums[i] = static_cast<float>(random()) - 0x1p31f;
    std::vector<float> d(static_cast<std::size_t>(m * n));
    epilogue::Element e;
    e.acc_scale = 0.3f;
    e.d = d.data(), e.d_stride = n;
    ASSERT_EQ(epilogue_rows(e, {.data = sums, .stride = stride, .each = 3}, m, n, nullptr), cudaSuccess);
    for (int row = 0; row < m; ++row)
      for (int i = 0; i < n; ++i) {
        const float* const from = sums + 3 * row * stride + i;
        const float sum = from[0] + from[stride];
        ASSERT_EQ(d[static_cast<std::size_t>(row * n + i)], (sum + from[2 * stride]) * 0.3f) << row << " " << i;
      }
    ASSERT_EQ(epilogue_rows(e, {.data = sums, .stride = stride, .each = 2}, m, n, nullptr), cudaErrorInvalidValue);
  }
}

/// Each row as its expert alone would finish it; rows of none stay as they are.
TEST_P(EmulatedEpilogueRows, GivesRowsTheBiasOfTheirExpert) {
  const int m = 6, n = GetParam(), pitch = n + 3;
  const std::vector<std::int32_t> expert_of = {1, 0, -1, 2, 1, -1};
  std::mt19937 random(static_cast<unsigned>(n));
  const auto numbers = [&](int count) {
    std::vector<float> v(static_cast<std::size_t>(count));
    for (float& x : v) x = (static_cast<float>(random() % 4001) - 2000) / 300;
    return v;
  };
  const std::vector<float> sums = numbers(m * n);
  std::vector<std::uint16_t> bias;
  for (const float x : numbers(3 * pitch)) bias.push_back(emulator::to_half(DType::bf16, x));
  for (const bool glu : {false, true}) {
    if (glu && n % 2 != 0) continue;
    const int width = glu ? n / 2 : n;
    std::vector<float> d(static_cast<std::size_t>(m * width), -7.0f), expected = d;
    epilogue::Element e;
    e.acc_scale = 0.7f;
    e.activation = Activation::silu;
    e.glu_half = glu ? n / 2 : 0;
    e.d = d.data(), e.d_stride = width;
    e.bias = {bias.data(), DType::bf16};
    const StoredSums rows{.data = sums.data(), .stride = n, .expert_of = expert_of.data(), .bias_pitch = 2 * pitch};
    ASSERT_EQ(epilogue_rows(e, rows, m, n, nullptr), cudaSuccess);
    for (int row = 0; row < m; ++row) {
      const int expert = expert_of[static_cast<std::size_t>(row)];
      if (expert < 0) continue;
      e.d = expected.data() + row * width;
      e.bias.data = bias.data() + expert * pitch;
      ASSERT_EQ(epilogue_rows(e, {.data = sums.data() + row * n, .stride = n}, 1, n, nullptr), cudaSuccess);
    }
    EXPECT_EQ(d, expected) << glu;
  }
}

/// The kernel of a glu alone, against the one of every epilogue, which a D with a row length of its own asks for.
TEST(EmulatedGluRows, GivesTheSameGluByBothKernels) {
  const int m = 5, n = 2100 / 16 * 16, half = n / 2;
  const std::vector<std::int32_t> expert_of = {1, -1, 0, 1, 0};
  std::mt19937 random(3);
  const auto halves = [&](DType type, int count) {
    std::vector<uint4> memory(static_cast<std::size_t>(count) / 8 + 1);
    auto* const v = reinterpret_cast<std::uint16_t*>(memory.data());
    for (int i = 0; i < count; ++i)
      v[i] = i % 7 == 0 ? 0x8000 : emulator::to_half(type, (static_cast<float>(random() % 4001) - 2000) / 300);  // −0, too
    return memory;
  };
  for (const DType type : {DType::f16, DType::bf16})
    for (const Activation activation : {Activation::silu, Activation::gelu_tanh, Activation::none})
      for (int i = 0; i < 16; ++i) {
        const bool apart = i & 1, biased = i & 2, of_experts = i & 4, limited = i & 8;
        const std::vector<uint4> sums = halves(type, m * n), bias = halves(DType::bf16, 2 * n);
        StoredSums rows{.data = sums.data(), .type = type, .stride = n, .halves = apart};
        if (of_experts) rows.expert_of = expert_of.data(), rows.bias_pitch = 2 * n;
        epilogue::Element e;
        e.activation = activation;
        e.glu_half = half;
        if (limited) e.glu_limits = {5.0f, 1.0f};
        if (biased) e.bias = {bias.data(), DType::bf16};
        e.out = type;
        const auto finished = [&](int stride) {
          std::vector<uint4> memory(static_cast<std::size_t>(m * stride) / 8 + 1);
          e.d = memory.data(), e.d_stride = stride;
          EXPECT_EQ(epilogue_rows(e, rows, m, n, nullptr), cudaSuccess);
          std::vector<std::uint16_t> d;
          for (int row = 0; row < m; ++row)
            for (int j = 0; j < half; ++j) d.push_back(reinterpret_cast<const std::uint16_t*>(memory.data())[row * stride + j]);
          return d;
        };
        ASSERT_EQ(finished(half), finished(half + 1)) << name(type) << " " << name(activation) << " " << i;
      }
}

INSTANTIATE_TEST_SUITE_P(Steps, EmulatedEpilogueRows, testing::Values(1, 100, 1024, 2500));

}  // namespace
}  // namespace nibble::cuda
