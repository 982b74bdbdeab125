// A layer of activations that are s8 codes in rows, with scales, zero points or offsets per token or block, and a weight in gpu_n64k128 of
// any group, for tests of kernels that take such.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emulator/tile_weight.hpp"
#include "kernels/cuda/tasks/codes_task.hpp"

namespace nibble::emulator {

struct CodesCase {
  int bits, group;     // of the weight; K and more: a scale per channel
  ZeroKind zeros;      // of the weight
  int block;           // of activations; 0: a scale per token
  ZeroKind act_zeros;  // of activations: none, integer or offset
  int m, n, k;
  bool act_order = false;
  bool whole = false;  // exact over all of K

  int blocks() const { return block == 0 ? 1 : (k + block - 1) / block; }
};

inline std::string name(const CodesCase& c) {
  const char* const zeros[] = {"", "_zeros", "_offsets", "_real"};
  return fmt::format("u{}g{}{}_a{}{}_m{}_n{}_k{}{}{}", c.bits, c.group, zeros[static_cast<int>(c.zeros)], c.block,
                     zeros[static_cast<int>(c.act_zeros)], c.m, c.n, c.k, c.act_order ? "_act_order" : "",
                     c.whole ? "_whole" : "");
}

struct CodesLayer {
  CodesCase c;
  int pitch;
  std::mt19937 random;
  TileWeight weight;
  std::vector<std::int8_t> codes;  // [m][pitch], in the caller's order
  std::vector<float> scales, offsets;
  std::vector<std::int32_t> zeros, order;

  explicit CodesLayer(const CodesCase& c)
      : c(c),
        pitch((c.k + 15) / 16 * 16 + (c.m % 2 == 0 ? 0 : 3)),
        random(static_cast<unsigned>(c.m * 31 + c.n * 7 + c.k)),
        weight(c.n, c.k, gpu_tile::integers(c.bits), c.group, c.zeros, random),
        codes(static_cast<std::size_t>(c.m * pitch)),
        order(static_cast<std::size_t>(c.k)) {
    for (auto& code : codes) code = static_cast<std::int8_t>(random());
    for (int i = 0; i < c.m * c.blocks(); ++i) {
      scales.push_back(0.001f * static_cast<float>(1 + random() % 100));
      zeros.push_back(static_cast<std::int32_t>(random() % 256) - 128);
      offsets.push_back(0.01f * static_cast<float>(random() % 500) - 2.5f);
    }
    std::iota(order.begin(), order.end(), 0);
    if (c.act_order) std::shuffle(order.begin(), order.end(), random);
  }
  std::size_t block_of(int m, int k) const { return static_cast<std::size_t>(m * c.blocks() + (c.block == 0 ? 0 : k / c.block)); }
  int code(int m, int k) const { return codes[static_cast<std::size_t>(m * pitch + order[static_cast<std::size_t>(k)])]; }
  /// What the code stands for, and the size of the parts that add up to it.
  std::pair<double, double> act(int m, int k) const {
    const std::size_t at = block_of(m, k);
    const double scale = static_cast<double>(scales[at]), offset = static_cast<double>(offsets[at]);
    if (c.act_zeros == ZeroKind::offset) return {scale * code(m, k) + offset, std::abs(scale * code(m, k)) + std::abs(offset)};
    const double value = scale * (code(m, k) - (c.act_zeros == ZeroKind::integer ? zeros[at] : 0));
    return {value, std::abs(value)};
  }
  /// D[m,n], and the bound on the rounding of f32 sums.
  std::pair<double, double> expected(int m, int n) const {
    double sum = 0, magnitude = 0;
    for (int k = 0; k < c.k; ++k) {
      const auto [x, size] = act(m, k);
      sum += x * weight.value(n, k);
      magnitude += size * (std::abs(weight.value(n, k)) + (1 << c.bits) * static_cast<double>(weight.scale(n, k)));
    }
    return {sum, magnitude * 0x1p-20};
  }
  /// Σ (q − z_a)·(u − z_w), exactly.
  std::int64_t integer(int m, int n) const {
    std::int64_t sum = 0;
    for (int k = 0; k < c.k; ++k)
      sum += std::int64_t{code(m, k) - (c.act_zeros == ZeroKind::integer ? zeros[block_of(m, k)] : 0)} *
             static_cast<std::int64_t>(weight.number(n, k));
    return sum;
  }

  /// The task without D.
  cuda::CodesTask task() const {
    cuda::CodesTask task;
    task.weight = weight.device();
    if (c.act_order) task.weight.perm = order.data();
    task.acts = {.codes = codes.data(), .pitch = pitch, .scales = scales.data(), .scale_row = c.blocks(), .group = c.block};
    if (c.block != 0) task.acts.scale_group = 1;
    if (c.act_zeros == ZeroKind::integer) task.acts.zeros = zeros.data();
    if (c.act_zeros == ZeroKind::offset) task.acts.offsets = offsets.data();
    task.acts.zero_row = c.blocks(), task.acts.zero_group = task.acts.scale_group;
    task.m = c.m;
    task.whole = c.whole;
    return task;
  }
  /// Has `launch` compute D, as f32 and where sums are exact as s32 too, and compares it with the expected result.
  template <class Launch>
  void expect_sums(Launch launch) const {
    const std::size_t count = static_cast<std::size_t>(c.m * c.n);
    std::vector<float> d(count + 8, 0.5f);
    std::vector<std::int32_t> bias;
    for (int n = 0; n < c.n; ++n) bias.push_back(c.whole ? 1000 * n - 40000 : 0);
    cuda::CodesTask task = this->task();
    task.epilogue.d = d.data();
    task.epilogue.d_stride = c.n;
    for (const bool raw : {false, true}) {
      if (raw && !c.whole) break;
      task.epilogue.out = raw ? DType::s32 : DType::f32;
      task.epilogue.sum_bias = raw ? bias.data() : nullptr;
      ASSERT_EQ(launch(task), cudaSuccess);
      int wrong = 0;
      for (int m = 0; m < c.m; ++m)
        for (int n = 0; n < c.n; ++n) {
          const float got = d[static_cast<std::size_t>(m * c.n + n)];
          const auto [want, off] = expected(m, n);
          const auto exact = integer(m, n);
          const bool right = raw ? std::bit_cast<std::int32_t>(got) == exact + bias[static_cast<std::size_t>(n)]
                             : c.whole
                                 ? got == static_cast<float>(exact) * scales[static_cast<std::size_t>(m)] * weight.scale(n, 0)
                                 : std::abs(static_cast<double>(got) - want) <= off;
          if (!right && ++wrong <= 5)
            ADD_FAILURE() << "D[" << m << "," << n << "] is " << got << ", expected " << want << " ± " << off;
        }
      EXPECT_EQ(wrong, 0);
      for (std::size_t i = count; i < d.size(); ++i) ASSERT_EQ(d[i], 0.5f) << "written past D";
    }
  }
};

}  // namespace nibble::emulator
