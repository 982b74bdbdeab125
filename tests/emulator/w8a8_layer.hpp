// A layer of 8-bit codes on both sides, its weight in gpu_w8n64k128, for tests of kernels that take such.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emulator/packed_codes.hpp"
#include "emulator/two_experts.hpp"
#include "kernels/cuda/device/wgmma8.cuh"
#include "kernels/cuda/tasks/w8a8_task.hpp"
#include "layouts/gpu_w8.hpp"
#include "nibble/plan.hpp"
#include "nibble/types.hpp"

namespace nibble::emulator {

enum class Codes { s8, e4m3, groups };
enum Extra : unsigned {
  kBias = 1,
  kResidual = 2,
  kZeros = 4,
  kChannelScales = 8,  // of groups: the weight has a scale per channel, not per block
  kRelu = 16,          // after the bias, of which every seventh is NaN
  kSumBias = 32,       // of integers, before their scales
};

struct W8A8Case {
  Codes codes;
  int m, n, k;
  DType out = DType::bf16;  // s32: the sums; u8: with a scale per channel and a zero point in memory, from 5 on
  unsigned extra = 0;
  int narrow = -1;  // records whose e4m3 products are summed with 13 bits (wgmma8.cuh); 0: all; −1: none

  bool integers() const { return codes == Codes::s8; }
  bool grouped() const { return codes == Codes::groups; }
  bool has(Extra e) const { return (extra & e) != 0; }
};

inline std::string name(const W8A8Case& c) {
  const char* const codes[] = {"s8", "e4m3", "e4m3_groups"};
  return fmt::format("{}_m{}_n{}_k{}_{}_{}", codes[static_cast<int>(c.codes)], c.m, c.n, c.k, nibble::name(c.out), c.extra);
}

/// Codes and scales of a layer, and the expected D.
struct W8A8Layer {
  explicit W8A8Layer(const W8A8Case& c) : c(c), records((c.k + 127) / 128), pitch((c.k + 15) / 16 * 16) {
    std::mt19937 random(static_cast<unsigned>(c.m * 31 + c.n * 7 + c.k));
    const auto code = [&] {
      for (;;) {
        const auto byte = static_cast<std::uint8_t>(random());
        if (c.integers() || (byte & 0x7f) < 0x60) return byte;  // up to 16: sums of a few thousand
      }
    };
    const auto scale = [&] { return 0.001f * static_cast<float>(1 + random() % 100); };
    acts.resize(static_cast<std::size_t>(c.m * pitch));
    weight.resize(static_cast<std::size_t>(c.n * c.k));
    for (auto& byte : acts) byte = code();
    for (auto& byte : weight) byte = code();
    act_scales.resize(static_cast<std::size_t>(c.grouped() ? records * scale_group() : c.m));
    for (float& s : act_scales) s = scale();
    geometry = {.n = c.n,
                .k = c.k,
                .integers = c.integers(),
                .has_zeros = false,
                .block_rows = c.grouped() && !c.has(kChannelScales) ? 128 : 0};
    for (int i = 0; i < c.m; ++i) act_zeros.push_back(c.has(kZeros) ? static_cast<std::int32_t>(random() % 200) - 100 : 0);
    for (int i = 0; i < c.n; ++i) bias.push_back(static_cast<float>(random() % 100) - 50);
    for (int i = 2; i < c.n && c.has(kRelu); i += 7) bias[static_cast<std::size_t>(i)] = std::numeric_limits<float>::quiet_NaN();
    for (int i = 0; i < c.m * c.n; ++i) residual.push_back(static_cast<float>(random() % 100) - 50);
    for (int i = 0; i < c.n; ++i) {
      sum_bias.push_back(c.has(kSumBias) ? static_cast<std::int32_t>(random() % 2000000) - 1000000 : 0);
      out_scales.push_back(10.0f + static_cast<float>(random() % 1000));
    }
    pack(scale);
  }

  float act(int m, int k) const { return value(acts[static_cast<std::size_t>(m * pitch + k)]); }
  float row(int n, int k) const { return value(weight[static_cast<std::size_t>(n * c.k + k)]); }
  float value(std::uint8_t byte) const {
    return c.integers() ? static_cast<float>(static_cast<std::int8_t>(byte)) : cuda::kE4m3Values[byte];
  }
  /// The distance of groups of scales: a multiple of 4, which bulk copies need, in some layers.
  int scale_group() const { return c.m % 4 == 2 ? c.m : (c.m + 3) / 4 * 4; }
  float act_scale(int m, int record) const {
    return act_scales[static_cast<std::size_t>(c.grouped() ? record * scale_group() + m : m)];
  }
  float weight_scale(int n, int record) const {
    const int at = geometry.block_rows == 0 ? n : n / geometry.block_rows * records + record;
    return weight_scales[static_cast<std::size_t>(at)];
  }
  /// D[m,n], and the bound on its rounding.
  std::pair<double, double> expected(int m, int n) const {
    double sum = 0, magnitude = 0, dropped = 0, part = 0, largest = 0;
    const bool raw = c.out == DType::s32;
    const auto scale_of = [&](int r) {
      return raw ? 1.0 : static_cast<double>(act_scale(m, r)) * static_cast<double>(weight_scale(n, r));
    };
    const auto add = [&](double x) { sum += x, magnitude += std::abs(x); };
    if (c.has(kSumBias)) add(sum_bias[static_cast<std::size_t>(n)] * scale_of(0));
    for (int r = 0; r < records; ++r) {
      const double scale = scale_of(r);
      if (c.narrow > 0 && r % c.narrow == 0) part = 0;
      for (int k = r * 128; k < std::min(c.k, r * 128 + 128); ++k) {
        const double product = scale *
                               static_cast<double>(act(m, k) - static_cast<float>(act_zeros[static_cast<std::size_t>(m)])) *
                               static_cast<double>(row(n, k));
        largest = std::max({k % 32 == 0 ? 0.0 : largest, std::abs(part), std::abs(product)});
        sum += product, part += product, magnitude += std::abs(product);
        if (c.narrow >= 0 && (k % 32 == 31 || k + 1 == c.k)) dropped += 8 * 0x1p-13 * largest;
      }
    }
    if (raw) return {sum, 0};
    if (c.has(kBias)) add(static_cast<double>(bias[static_cast<std::size_t>(n)]));
    if (c.has(kRelu) && sum < 0) sum = 0;
    if (c.has(kResidual)) add(static_cast<double>(residual[static_cast<std::size_t>(m * c.n + n)]));
    if (c.out == DType::u8) {
      const double code = sum / static_cast<double>(out_scales[static_cast<std::size_t>(n)]) + out_zero;
      return {std::clamp(code, 5.0, 255.0), 0.501};
    }
    if (c.out == DType::s8) return {std::clamp(sum / kOutScale + 3, -127.0, 100.0), 0.501};
    const double of_output = c.out == DType::f32 ? 0 : c.out == DType::f16 ? 0x1p-10 : 0x1p-7;
    return {sum, dropped + magnitude * 0x1p-20 + std::abs(sum) * of_output};
  }

  /// The task without scratch memory and D.
  cuda::W8A8Task task() const {
    cuda::W8A8Task task;
    task.weight = {packed.data(), geometry};
    task.acts = {.codes = acts.data(), .pitch = pitch, .scales = act_scales.data(), .scale_row = 1};
    if (c.grouped()) task.acts.scale_group = scale_group(), task.acts.group = 128;
    if (c.has(kZeros)) task.acts.zeros = act_zeros.data(), task.acts.zero_row = 1;
    task.m = c.m;
    if (c.has(kBias)) task.epilogue.bias = {.data = bias.data()};
    if (c.has(kRelu)) task.epilogue.activation = Activation::relu;
    if (c.has(kResidual)) task.epilogue.residual = {.data = residual.data(), .stride = c.n};
    if (c.has(kSumBias)) task.epilogue.sum_bias = sum_bias.data();
    if (c.out == DType::u8) {
      task.epilogue.out_scales = out_scales.data();
      task.epilogue.out_scale_each = true;
      task.epilogue.out_zeros = &out_zero;
      task.epilogue.out_range = {5.0f, 255.0f};
    }
    if (c.out == DType::s8) {
      task.epilogue.out_scale = kOutScale;
      task.epilogue.out_zero = 3;
      task.epilogue.out_range = {-127.0f, 100.0f};
    }
    return task;
  }
  /// The D of `task` that `launch` computes.
  template <class Launch>
  std::vector<double> computed(cuda::W8A8Task task, Launch launch) const {
    const std::size_t element = static_cast<std::size_t>(bits(c.out) / 8), count = static_cast<std::size_t>(c.m * c.n);
    std::vector<std::uint8_t> d((count + 16) * element, 0xa5);
    task.epilogue.out = c.out;
    task.epilogue.d = d.data();
    task.epilogue.d_stride = c.n;
    EXPECT_EQ(launch(task), cudaSuccess);
    std::vector<double> values;
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, d.data() + i * element, element);
      values.push_back(c.out == DType::s32   ? std::bit_cast<std::int32_t>(bits)
                       : c.out == DType::u8  ? static_cast<double>(bits)
                       : c.out == DType::s8  ? static_cast<double>(static_cast<std::int8_t>(bits))
                       : c.out == DType::f32 ? static_cast<double>(std::bit_cast<float>(bits))
                       : c.out == DType::f16 ? static_cast<double>(to_f32(f16{static_cast<std::uint16_t>(bits)}))
                                             : static_cast<double>(to_f32(bf16{static_cast<std::uint16_t>(bits)})));
    }
    for (std::size_t i = count * element; i < d.size(); ++i) EXPECT_EQ(d[i], 0xa5) << "written past D";
    return values;
  }
  /// Compares it with the expected result.
  template <class Launch>
  void expect_sums(const cuda::W8A8Task& task, Launch launch) const {
    const std::vector<double> d = computed(task, launch);
    int wrong = 0;
    for (int m = 0; m < c.m; ++m)
      for (int n = 0; n < c.n; ++n) {
        const double got = d[static_cast<std::size_t>(m * c.n + n)];
        const auto [want, off] = expected(m, n);
        if (std::isnan(want) ? std::isnan(got) : std::abs(got - want) <= off) continue;
        if (++wrong <= 5) ADD_FAILURE() << "D[" << m << "," << n << "] is " << got << ", expected " << want << " ± " << off;
      }
    EXPECT_EQ(wrong, 0);
  }
  /// ‖D − exact‖ / ‖exact‖ of what `launch` computes.
  template <class Launch>
  double relative_l2(const cuda::W8A8Task& task, Launch launch) const {
    const std::vector<double> d = computed(task, launch);
    double moved = 0, norm = 0;
    for (int m = 0; m < c.m; ++m)
      for (int n = 0; n < c.n; ++n) {
        const double want = expected(m, n).first, got = d[static_cast<std::size_t>(m * c.n + n)];
        moved += (got - want) * (got - want), norm += want * want;
      }
    return std::sqrt(moved / norm);
  }

  W8A8Case c;
  int records, pitch;
  std::vector<std::uint8_t> acts, weight;
  std::vector<float> act_scales, weight_scales, bias, residual;
  std::vector<std::int32_t> act_zeros, sum_bias;
  std::vector<float> out_scales;
  std::int32_t out_zero = 128;
  static constexpr float kOutScale = 7.3f;  // of a D of s8, all of it
  gpu_w8::Geometry geometry;
  std::vector<std::byte> packed;

 private:
  template <class Scale>
  void pack(const Scale& scale) {
    packed = packed_codes(geometry, weight);
    for (std::int64_t i = 0; i < geometry.scale_count(); ++i) weight_scales.push_back(scale());
    std::memcpy(packed.data() + geometry.scales_offset(), weight_scales.data(), 4 * weight_scales.size());
    if (!c.integers()) return;
    std::vector<std::int32_t> sums(static_cast<std::size_t>(geometry.padded_rows()));
    for (int n = 0; n < c.n; ++n)
      for (int k = 0; k < c.k; ++k) sums[static_cast<std::size_t>(n)] += static_cast<std::int32_t>(row(n, k));
    std::memcpy(packed.data() + geometry.sums_offset(), sums.data(), 4 * sums.size());
  }
};

/// Rows of experts, in tiles of up to `tokens`: the layer's weight is that of experts 1 and 2, between which its rows change; expert 0 is none
/// of it. Their scale2 makes up for the epilogue's acc_scale.
template <class Launch>
void expect_sums_of_experts(const W8A8Layer& layer, int tokens, Launch launch) {
  cuda::W8A8Task task = layer.task();
  const std::size_t size = layer.packed.size(), pitch = (size + 255) / 256 * 256;
  std::vector<std::byte> memory(3 * pitch + 256, std::byte{0x35});
  std::byte* const experts = memory.data() + (256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256);
  for (const std::size_t e : {1, 2}) std::memcpy(experts + e * pitch, layer.packed.data(), size);
  TwoExperts experts_of_rows(layer.c.m, tokens);
  const float scale2[] = {3.0f, 2.0f, 2.0f};
  task.weight.bytes = experts;
  task.epilogue.acc_scale = 0.5f;
  task.experts = experts_of_rows.of(pitch, scale2);
  layer.expect_sums(task, launch);
}

/// Weights of each type with one scale per output channel, as nibble packs them, and codes with zero points: `launch` computes their exact
/// sums.
template <class Launch>
void expect_exact_sums(Launch launch) {
  constexpr int m = 19, n = 75, k = 272;
  for (const char* const name : {"s8c", "s8zc", "u8b128c", "u8zc", "u4b8c", "u4zc"}) {
    SCOPED_TRACE(name);
    std::mt19937 random(1);
    QuantTensor q;
    q.scheme = Scheme::parse(name)->weight;
    q.n = n, q.k = k;
    for (int i = 0; i < n * k; ++i) q.codes.push_back(static_cast<std::uint8_t>(random() % (1u << bits(q.scheme.codes))));
    q.scales = Tensor(q.scheme.scale, {n, 1});
    if (q.scheme.zero != ZeroKind::none) q.zeros = Tensor(q.scheme.codes == DType::s8 ? DType::s8 : DType::u8, {n, 1});
    for (int row = 0; row < n && !q.zeros.empty(); ++row)
      q.zeros.as<std::uint8_t>()[row] = static_cast<std::uint8_t>(random() % (1u << bits(q.scheme.codes)));
    const auto weight = nibble::pack(q, {.layout = "gpu_w8n64k128"});
    ASSERT_TRUE(weight.ok()) << weight.status().message();
    std::vector<std::int8_t> acts(static_cast<std::size_t>(m * k));
    std::vector<std::int32_t> zeros, sums, d(static_cast<std::size_t>(m * n));
    for (auto& code : acts) code = static_cast<std::int8_t>(random());
    for (int row = 0; row < m; ++row) {
      zeros.push_back(static_cast<std::int32_t>(random() % 256) - 128);
      sums.push_back(std::accumulate(acts.begin() + row * k, acts.begin() + (row + 1) * k, 0));
    }
    cuda::W8A8Task task;
    task.weight = {weight->bytes().data(), gpu_w8::geometry(q.scheme, n, k)};
    task.acts = {.codes = acts.data(), .pitch = k, .zeros = zeros.data(), .zero_row = 1, .sums = sums.data()};
    task.m = m;
    task.epilogue.out = DType::s32;
    task.epilogue.d = d.data();
    task.epilogue.d_stride = n;
    ASSERT_EQ(launch(task), cudaSuccess);
    for (int row = 0; row < m; ++row)
      for (int column = 0; column < n; ++column) {
        const auto zero = q.zeros.empty() ? 0 : static_cast<int>(q.zeros.at(column));
        std::int32_t sum = 0;
        for (int i = 0; i < k; ++i) {
          const auto code = static_cast<int>(code_value(q.scheme.codes, q.codes[static_cast<std::size_t>(column * k + i)]));
          sum += (acts[static_cast<std::size_t>(row * k + i)] - zeros[static_cast<std::size_t>(row)]) * (code - zero);
        }
        ASSERT_EQ(d[static_cast<std::size_t>(row * n + column)], sum) << row << "," << column;
      }
  }
}

}  // namespace nibble::emulator
