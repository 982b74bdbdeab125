// A layer of 16-bit activations and a weight in gpu_n64k128, for tests of kernels that take such.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "emulator/split_memory.hpp"
#include "emulator/tile_weight.hpp"
#include "kernels/cuda/tasks/linear_task.hpp"
#include "nibble/types.hpp"

namespace nibble::emulator {

inline std::uint16_t to_half(DType type, float x) { return type == DType::f16 ? to_f16(x).bits : to_bf16(x).bits; }
inline float from_half(DType type, std::uint16_t bits) { return type == DType::f16 ? to_f32(f16{bits}) : to_f32(bf16{bits}); }
inline float rounded(DType type, float x) { return from_half(type, to_half(type, x)); }
/// The bound on rounding, relative to a number.
inline double half_step(DType type) { return type == DType::f16 ? 0x1p-11 : 0x1p-8; }

/// W as a kernel multiplies it, and the further rounding of its products, relative to them.
struct Multiplied {
  double value, spread;
};

/// The W of kernels that multiply weights: rounded to the type of activations, except rows of one scale, whose sums are scaled.
inline Multiplied rounded_weight(const TileWeight& w, DType a_dtype, int row, int channel) {
  constexpr float kUp = 64.0f;  // f16's weights are as many times as large, out of reach of subnormals
  if (w.kind == ZeroKind::offset && a_dtype != DType::f16) return {w.value(row, channel), half_step(a_dtype) * 4};
  if (w.kind == ZeroKind::offset)
    return {static_cast<double>(rounded(a_dtype, kUp * static_cast<float>(w.value(row, channel))) / kUp), 0};
  if (w.kind == ZeroKind::real) return {w.value(row, channel), half_step(a_dtype) * 2};
  if (w.group >= w.k) return {w.value(row, channel), 0};
  const float scale = a_dtype == DType::f16 ? kUp * w.scale(row, channel) : rounded(a_dtype, w.scale(row, channel));
  const float value = rounded(a_dtype, w.number(row, channel) * scale);
  return {static_cast<double>(a_dtype == DType::f16 ? value / kUp : value), 0};
}

struct FloatCase {
  DType a_dtype;
  gpu_tile::Codes codes;  // of the weight
  int group;
  ZeroKind zeros;
  int m, n, k;
  bool act_order = false, prescale = false;
};

inline std::string name(const FloatCase& c) {
  const char* const zeros[] = {"", "_zeros", "_offsets", "_float_zeros"};
  const char* const codes[] = {"u4", "u8", "e2m1", "e4m3", "e5m2"};
  return fmt::format("{}_{}g{}{}_m{}_n{}_k{}{}", nibble::name(c.a_dtype), codes[static_cast<int>(c.codes)], c.group,
                     zeros[static_cast<int>(c.zeros)], c.m, c.n, c.k, c.act_order ? "_act_order" : "") +
         (c.prescale ? "_prescale" : "");
}

struct FloatLayer {
  DType a_dtype;
  int m, pitch;
  std::mt19937 random;
  TileWeight weight;
  std::vector<std::uint16_t> x;
  std::vector<std::int32_t> order;  // position k of the weight is channel order[k]
  std::vector<float> prescale;      // by channel; none: empty
  bool scales_tokens;               // D has a scale per token, and so no plain epilogue

  explicit FloatLayer(const FloatCase& c)
      : a_dtype(c.a_dtype),
        m(c.m),
        pitch(c.k + 8),
        random(static_cast<unsigned>(c.m * 31 + c.n * 7 + c.k)),
        weight(c.n, c.k, c.codes, c.group, c.zeros, random, c.zeros > ZeroKind::integer ? c.a_dtype : DType::f16),
        x(static_cast<std::size_t>(m * pitch)),
        order(static_cast<std::size_t>(c.k)),
        scales_tokens((c.m + c.n) % 3 == 0),
        permutes(c.act_order) {
    for (auto& v : x) v = to_half(a_dtype, static_cast<float>(static_cast<int>(random() % 129) - 64) / 16);
    std::iota(order.begin(), order.end(), 0);
    if (permutes) std::shuffle(order.begin(), order.end(), random);
    for (int i = 0; c.prescale && i < c.k; ++i) prescale.push_back(0.01f * static_cast<float>(50 + random() % 100));
  }
  /// An activation as kernels of 16-bit floats multiply it.
  float activation(int token, std::int32_t channel) const {
    const float v = from_half(a_dtype, x[static_cast<std::size_t>(token * pitch + channel)]);
    return prescale.empty() ? v : rounded(a_dtype, v * prescale[static_cast<std::size_t>(channel)]);
  }
  /// Activations that online quantization represents exactly: integers up to ±127, the largest in every `block` channels.
  void make_integers(int block) {
    for (int row = 0; row < m; ++row)
      for (int k = 0; k < weight.k; ++k) {
        const int value = k % block == 0 ? 127 : static_cast<int>(random() % 255) - 127;
        x[static_cast<std::size_t>(row * pitch + k)] = to_half(DType::f16, static_cast<float>(value));
      }
  }

  /// The task without scratch memory and D.
  cuda::LinearTask task() const {
    cuda::LinearTask task;
    task.weight = weight.device();
    if (permutes) task.weight.perm = order.data();
    if (!prescale.empty()) task.weight.prescale = prescale.data();
    task.m = m;
    task.a_dtype = a_dtype;
    task.x = x.data();
    task.x_stride = pitch;
    return task;
  }

  /// Has `launch` compute D of `task`, and compares it with the sums of multiplied(n, k).
  template <class Launch, class Weight>
  void expect_sums(cuda::LinearTask task, Launch launch, Weight multiplied) const {
    const int n = weight.n, k = weight.k;
    std::vector<std::uint16_t> d(static_cast<std::size_t>(m * n) + 16, 0xa5a5);
    task.epilogue.out = a_dtype;
    task.epilogue.d = d.data();
    task.epilogue.d_stride = n;
    std::vector<float> act_scale;
    for (int token = 0; scales_tokens && token < m; ++token) act_scale.push_back(token % 2 == 0 ? 0.5f : 0.125f);
    if (!act_scale.empty()) task.epilogue.act_scale = act_scale.data();
    ASSERT_EQ(launch(task), cudaSuccess);
    int wrong = 0;
    for (int row = 0; row < n; ++row) {
      std::vector<Multiplied> w;
      for (int i = 0; i < k; ++i) w.push_back(multiplied(row, i));
      for (int token = 0; token < m; ++token) {
        double sum = 0, off = 1e-6;
        for (std::size_t i = 0; i < w.size(); ++i) {
          const double v = static_cast<double>(activation(token, order[i]));
          sum += w[i].value * v, off += std::abs(w[i].value * v) * (0x1p-20 + w[i].spread);
        }
        if (!act_scale.empty()) {
          const double scale = static_cast<double>(act_scale[static_cast<std::size_t>(token)]);
          sum *= scale, off *= scale;
        }
        off += std::abs(sum) * half_step(a_dtype) * 1.01;
        const double got = static_cast<double>(from_half(a_dtype, d[static_cast<std::size_t>(token * n + row)]));
        if (std::abs(got - sum) <= off) continue;  // false for a NaN
        if (++wrong <= 5) ADD_FAILURE() << "D[" << token << "," << row << "] is " << got << ", expected " << sum << " ± " << off;
      }
    }
    EXPECT_EQ(wrong, 0);
    for (std::size_t i = static_cast<std::size_t>(m * n); i < d.size(); ++i) ASSERT_EQ(d[i], 0xa5a5) << "written past D";
  }

  /// The same twice in a workspace of `bytes` (expect_twice).
  template <class Launch, class Weight>
  void expect_split_sums(std::size_t bytes, Launch launch, Weight multiplied) const {
    const auto expect = [&](const cuda::LinearTask& task, auto noting) { expect_sums(task, noting, multiplied); };
    expect_twice(task(), bytes, static_cast<std::size_t>(2 * m * weight.n), launch, expect);
  }

 private:
  bool permutes;
};

}  // namespace nibble::emulator
