// Zero points and scales of w8a8_task.hpp: applied to the sum of an output before the epilogue, in kernels that hold one sum at a time.
#pragma once

#include "kernels/cuda/tasks/w8a8_task.hpp"
#include "quantize/act_rule.hpp"

namespace nibble::cuda {

/// Whether e4m3 sums are scaled every 128 channels, not once at the end.
NIBBLE_HOST_DEVICE inline bool is_grouped(const W8A8Task& t) { return t.acts.group != 0 || t.weight.geometry.block_rows != 0; }

#if NIBBLE_DEVICE_CODE

/// The rule of activations that have one scale and zero point for all of them.
__device__ inline act_rule::Rule rule_of(const QuantizedActs& acts) {
  return act_rule::known(acts.scales == nullptr ? acts.scale : *acts.scales, acts.zeros == nullptr ? acts.zero : *acts.zeros);
}

/// A token's scale for the channels of a record.
__device__ inline float act_scale(const QuantizedActs& a, std::int64_t m, int record) {
  const std::int64_t group = a.group == 0 ? 0 : record;
  return a.scales == nullptr ? a.scale : a.scales[m * a.scale_row + group * a.scale_group];
}
/// A weight row's scale for the channels of a record.
__device__ inline float weight_scale(const W8A8Weight& w, std::int64_t n, int record) {
  const int rows = w.geometry.block_rows;
  return rows == 0 ? w.scales()[n] : w.scales()[n / rows * w.geometry.records() + record];
}

/// Σ (Â − z_a)·(Ŵ − z_w) from Σ Â·Ŵ, modulo 2³². The sum of the token's codes is number `sum_row`.
__device__ inline std::int32_t without_zeros(const W8A8Task& t, std::int64_t m, std::int64_t n, std::int64_t sum_row,
                                             std::int32_t dot) {
  const auto za = static_cast<std::uint32_t>(t.acts.zeros == nullptr ? t.acts.zero : t.acts.zeros[m * t.acts.zero_row]);
  const std::int32_t* const zeros = t.weight.zeros();
  auto sum = static_cast<std::uint32_t>(dot);
  if (za != 0) sum -= za * static_cast<std::uint32_t>(t.weight.sums()[n]);
  if (zeros != nullptr) {
    const auto zw = static_cast<std::uint32_t>(zeros[n]);
    sum += zw * (static_cast<std::uint32_t>(t.weight.geometry.k) * za - static_cast<std::uint32_t>(t.acts.sums[sum_row]));
  }
  return static_cast<std::int32_t>(sum);
}

/// D[m,n] from the sum of its products, of integers or, already scaled where scales are grouped, of floats.
__device__ inline float scaled_sum(const W8A8Task& t, std::int64_t m, std::int64_t n, std::int64_t sum_row, std::int32_t dot) {
  const auto sum = static_cast<float>(without_zeros(t, m, n, sum_row, dot));
  return __fmul_rn(__fmul_rn(sum, act_scale(t.acts, m, 0)), weight_scale(t.weight, n, 0));
}
__device__ inline float scaled_sum(const W8A8Task& t, std::int64_t m, std::int64_t n, std::int64_t, float sum) {
  return is_grouped(t) ? sum : __fmul_rn(__fmul_rn(sum, act_scale(t.acts, m, 0)), weight_scale(t.weight, n, 0));
}
/// A record's part of an e4m3 sum: the product of the scales is rounded, then the multiply-add.
__device__ inline float add_w8a8(float part, float s_a, float s_w, float sum) { return fmaf(part, __fmul_rn(s_a, s_w), sum); }

#endif

}  // namespace nibble::cuda
