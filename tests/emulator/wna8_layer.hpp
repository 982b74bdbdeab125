// A layer of activations that are s8 codes (wna8.hpp) and a weight in gpu_n64k128, for tests of kernels that take such.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emulator/tile_weight.hpp"
#include "emulator/two_experts.hpp"
#include "kernels/cuda/tasks/wna8_task.hpp"

namespace nibble::emulator {

struct Wna8Case {
  int bits, group;  // of the weight
  bool weight_zeros, act_zeros;
  bool per_token;  // a scale of activations for all of K, which is not in the terms
  int m, n, k;
  bool act_offsets = false;  // floats, in the place of zero points

  ZeroKind act_zero() const { return act_offsets ? ZeroKind::offset : act_zeros ? ZeroKind::integer : ZeroKind::none; }
  int fold() const {
    const int span = gpu_tile::span(group);
    return span == gpu_tile::kChannels ? span : std::min(span, 32);
  }
};

inline std::string name(const Wna8Case& c) {
  return fmt::format("u{}g{}{}{}{}{}_m{}_n{}_k{}", c.bits, c.group, c.weight_zeros ? "_zeros" : "",
                     c.act_zeros ? "_act_zeros" : "", c.act_offsets ? "_act_offsets" : "", c.per_token ? "_per_token" : "", c.m,
                     c.n, c.k);
}

struct Wna8Layer {
  explicit Wna8Layer(const Wna8Case& c, bool experts = false)
      : c(c),
        map(cuda::wna8_map(c.fold(), c.act_offsets ? ZeroKind::offset : ZeroKind::none, c.m, c.k, experts)),
        random(static_cast<unsigned>(c.m * 31 + c.n * 7 + c.k)),
        weight(c.n, c.k, gpu_tile::integers(c.bits), c.group, c.weight_zeros ? ZeroKind::integer : ZeroKind::none, random),
        acts(map.bytes) {
    const auto below = [&](int count) { return static_cast<int>(random() % static_cast<unsigned>(count)); };
    for (int m = 0; m < c.m; ++m)
      for (int k = 0; k < c.k; ++k) values.push_back(below(256) - 128);
    for (int i = 0; i < c.m * folds(); ++i) {
      const bool same = c.per_token && i % folds() != 0;  // as in the previous fold
      act_scales.push_back(same ? act_scales.back() : 0.001f * static_cast<float>(1 + below(100)));
      zeros.push_back(same ? zeros.back() : c.act_zeros ? below(256) - 128 : 0);
      offsets.push_back(same ? offsets.back() : c.act_offsets ? 0.05f * static_cast<float>(below(100) - 30) : 0.0f);
    }
    write_acts();
  }

  int folds() const { return static_cast<int>(map.folds); }
  std::size_t fold_of(int m, int k) const { return static_cast<std::size_t>(m * folds() + k / c.fold()); }
  std::size_t value_of(int m, int k) const { return static_cast<std::size_t>(m * c.k + k); }

  /// D[m,n], and the bound on its rounding.
  std::pair<double, double> expected(int m, int n) const {
    double sum = 0, magnitude = 0;
    for (int k = 0; k < c.k; ++k) {
      const std::size_t fold = fold_of(m, k);
      const double product = static_cast<double>(act_scales[fold]) * (values[value_of(m, k)] - zeros[fold]) * weight.value(n, k);
      const double shifted = static_cast<double>(offsets[fold]) * weight.value(n, k);
      sum += product + shifted, magnitude += std::abs(product) + std::abs(shifted);
    }
    return {sum, magnitude * 0x1p-19 + std::abs(sum) * 0x1p-7};
  }

  /// The task without scratch memory and D.
  cuda::Wna8Task task() const {
    return {.weight = weight.device(),
            .m = c.m,
            .codes = acts.data(),
            .pitch = map.pitch,
            .terms = acts.data() + map.terms,
            .term_pitch = map.term_pitch,
            .fold = c.fold(),
            .zero = c.act_zero(),
            .token_scales = has_token_scales() ? reinterpret_cast<const float*>(acts.data() + map.scales) : nullptr};
  }
  /// Has `launch` compute D of `task`, and compares it with the expected result.
  template <class Launch>
  void expect_sums(cuda::Wna8Task task, Launch launch) const {
    std::vector<std::uint16_t> d(static_cast<std::size_t>(c.m * c.n) + 16, 0xa5a5);
    task.epilogue.out = DType::bf16;
    task.epilogue.d = d.data();
    task.epilogue.d_stride = c.n;
    ASSERT_EQ(launch(task), cudaSuccess);
    int wrong = 0;
    for (int m = 0; m < c.m; ++m)
      for (int n = 0; n < c.n; ++n) {
        const float got = to_f32(bf16{d[static_cast<std::size_t>(m * c.n + n)]});
        const auto [want, off] = expected(m, n);
        if (std::abs(static_cast<double>(got) - want) <= off) continue;  // false for a NaN
        if (++wrong <= 5) ADD_FAILURE() << "D[" << m << "," << n << "] is " << got << ", expected " << want << " ± " << off;
      }
    EXPECT_EQ(wrong, 0);
    for (std::size_t i = static_cast<std::size_t>(c.m * c.n); i < d.size(); ++i) ASSERT_EQ(d[i], 0xa5a5) << "written past D";
  }

  Wna8Case c;
  cuda::Wna8Map map;
  std::mt19937 random;
  TileWeight weight;
  std::vector<int> values, zeros;
  std::vector<float> act_scales, offsets;
  std::vector<std::uint8_t> acts;

 private:
  bool has_token_scales() const { return c.per_token && !c.act_offsets; }
  void write_acts() {
    for (int m = 0; m < c.m; ++m)
      for (int k = 0; k < map.pitch; ++k) {
        const int channel = k / 16 * 16 + gpu_tile::interleaved(k % 16);
        const int value = channel < c.k ? values[value_of(m, channel)] : zeros[fold_of(m, channel)];
        acts[static_cast<std::size_t>(m * map.pitch + k)] = static_cast<std::uint8_t>(value);
      }
    for (int m = 0; m < c.m; ++m)
      for (int fold = 0; fold < folds(); ++fold) {
        const std::size_t at = static_cast<std::size_t>(m * folds() + fold);
        int sum = 0, channels = 0;
        for (int k = fold * c.fold(); k < std::min(c.k, (fold + 1) * c.fold()); ++k, ++channels)
          sum += values[value_of(m, k)] - zeros[at];
        const float scale = has_token_scales() ? 1.0f : act_scales[at];
        std::vector<float> terms{scale, scale * static_cast<float>(sum)};
        if (c.act_zeros) terms[1] = std::bit_cast<float>(cuda::zero_term(sum, zeros[at]));
        if (c.act_offsets) terms = {scale, offsets[at], terms[1] + static_cast<float>(channels) * offsets[at]};
        std::uint8_t* const to =
            acts.data() + map.terms + static_cast<std::size_t>(fold * map.term_pitch + m / 2 * 2) * 4 * terms.size() + m % 2 * 4;
        for (std::size_t i = 0; i < terms.size(); ++i) std::memcpy(to + 8 * i, &terms[i], 4);
        if (has_token_scales()) std::memcpy(acts.data() + map.scales + static_cast<std::size_t>(m) * 4, &act_scales[at], 4);
      }
  }
};

/// Rows of experts, in tiles of up to `tokens`, which begin at even and odd rows: the layer's weight is that of experts 1 and 2, between which its
/// rows change; expert 0 is none of it. Their scale2 makes up for the epilogue's acc_scale.
template <class Launch>
void expect_sums_of_experts(const Wna8Layer& layer, int tokens, Launch launch) {
  cuda::Wna8Task task = layer.task();
  const std::vector<std::uint8_t>& records = layer.weight.records;
  const std::size_t pitch = (records.size() + 255) / 256 * 256;
  std::vector<std::uint8_t> memory(3 * pitch, 0x35);
  for (const std::size_t e : {1, 2}) std::memcpy(memory.data() + e * pitch, records.data(), records.size());
  TwoExperts experts_of_rows(layer.c.m, tokens);
  const float scale2[] = {3.0f, 2.0f, 2.0f};
  task.weight.records = memory.data();
  task.epilogue.acc_scale = 0.5f;
  task.experts = experts_of_rows.of(pitch, scale2);
  layer.expect_sums(task, launch);
}

}  // namespace nibble::emulator
