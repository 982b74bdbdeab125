// Zero points and scales of w8a8_task.hpp: applied to the sums of outputs before the epilogue, in kernels that store by tokens.
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

/// What the sums of a token need: its scale, zero point, and the sum of its codes, which is number `sum_row`.
struct TokenTerms {
  float scale = 1.0f;
  std::uint32_t zero = 0, codes = 0;

  __device__ TokenTerms(const W8A8Task& t, std::int64_t m, std::int64_t sum_row) {
    if (!is_grouped(t)) scale = act_scale(t.acts, m, 0);
    if (!t.weight.geometry.integers) return;
    zero = static_cast<std::uint32_t>(t.acts.zeros == nullptr ? t.acts.zero : t.acts.zeros[m * t.acts.zero_row]);
    if (t.weight.geometry.has_zeros) codes = static_cast<std::uint32_t>(t.acts.sums[sum_row]);
  }
};
/// The same of an output channel: its scale, zero point, the sum of its codes less K times that, and sum_bias.
struct ChannelTerms {
  float scale = 1.0f;
  std::uint32_t zero = 0, sum = 0, bias = 0;

  ChannelTerms() = default;
  __device__ ChannelTerms(const W8A8Task& t, std::int64_t n) : ChannelTerms(t, t.weight, n) {}
  /// Of a weight in the place of t's: an expert's.
  __device__ ChannelTerms(const W8A8Task& t, const W8A8Weight& weight, std::int64_t n) {
    if (!is_grouped(t)) scale = weight_scale(weight, n, 0);
    if (!weight.geometry.integers) return;
    if (weight.geometry.has_zeros) zero = static_cast<std::uint32_t>(weight.zeros()[n]);
    if (t.acts.zeros != nullptr || t.acts.zero != 0)
      sum = static_cast<std::uint32_t>(weight.sums()[n]) - static_cast<std::uint32_t>(weight.geometry.k) * zero;
    if (t.epilogue.sum_bias != nullptr) bias = static_cast<std::uint32_t>(t.epilogue.sum_bias[n]);
  }
};

/// A sum of products less zero points, and scaled: what the epilogue takes. `raw`: D is of s32.
__device__ inline float scaled_sum(const TokenTerms& token, const ChannelTerms& channel, bool raw, std::int32_t dot) {
  const auto sum = static_cast<std::int32_t>(static_cast<std::uint32_t>(dot) - token.zero * channel.sum -
                                             channel.zero * token.codes + channel.bias);
  if (raw) return __int_as_float(sum);
  return __fmul_rn(__fmul_rn(static_cast<float>(sum), token.scale), channel.scale);
}
/// Of floats; where scales are grouped, it is scaled already, and those here are 1.
__device__ inline float scaled_sum(const TokenTerms& token, const ChannelTerms& channel, bool, float sum) {
  return __fmul_rn(__fmul_rn(sum, token.scale), channel.scale);
}
/// A record's part of an e4m3 sum: the product of the scales is rounded, then the multiply-add.
__device__ inline float add_w8a8(float part, float s_a, float s_w, float sum) { return fmaf(part, __fmul_rn(s_a, s_w), sum); }

#endif

}  // namespace nibble::cuda
