// 16-bit activations eight at a time, for kernels that cannot copy rows as they are: channels are permuted (act-order), multiplied by a
// prescale, or rows are not aligned.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/tasks/linear_task.hpp"

namespace nibble::cuda {

struct GatherRule {
  const std::int32_t* perm;  // position i is channel perm[i]; null: channel i
  const float* prescale;  // [K], by channel: what an activation is multiplied by, rounding the product to its type; null: nothing
  DType type;             // f16 or bf16
  bool vectors;           // rows begin at multiples of 16 bytes
  int k;

  /// Whether kernels multiply rows as they are in memory, and may copy them 16 bytes at a time.
  NIBBLE_HOST_DEVICE bool copies_rows() const { return perm == nullptr && prescale == nullptr && vectors; }
};
inline GatherRule gather_rule(const LinearTask& task) {
  const bool vectors = reinterpret_cast<std::uintptr_t>(task.x) % 16 == 0 && task.x_stride % 8 == 0;
  return {task.weight.perm, task.weight.prescale, task.a_dtype, vectors, static_cast<int>(task.weight.geometry.k)};
}

/// What the activations of eight positions are multiplied by.
struct EightFactors {
  float of[8];
};
/// Those of positions first … first + 7, zeros past K; `first` is a multiple of 8, and the rule has a prescale.
__device__ inline EightFactors load_factors(const GatherRule& rule, int first) {
  EightFactors f{};
  if (rule.perm == nullptr && first + 8 <= rule.k) {
    const auto* const from = reinterpret_cast<const float4*>(rule.prescale + first);
    const float4 low = __ldg(from), high = __ldg(from + 1);
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (first + i < rule.k) f.of[i] = __ldg(rule.prescale + (rule.perm != nullptr ? __ldg(rule.perm + first + i) : first + i));
  return f;
}
/// Eight activations multiplied, each product rounded to their type.
__device__ inline uint4 times(const uint4& x, const EightFactors& f, DType type) {
  std::uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = half_of(word[i], 0, type) * f.of[2 * i], high = half_of(word[i], 1, type) * f.of[2 * i + 1];
    word[i] = type == DType::f16 ? ptx::to_f16x2(low, high) : ptx::to_bf16x2(low, high);
  }
  return {word[0], word[1], word[2], word[3]};
}

/// Positions first … first + 7 of a row as they are in memory, zeros past K; `first` is a multiple of 8.
__device__ inline uint4 load_eight(const GatherRule& rule, const std::uint16_t* row, int first) {
  const bool whole = first + 8 <= rule.k, in_order = rule.perm == nullptr && whole;
  std::uint32_t x[4] = {};
  if (in_order && rule.vectors) {
    const uint4 v = *reinterpret_cast<const uint4*>(row + first);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (first + i < rule.k)
        x[i / 2] |= std::uint32_t{row[rule.perm != nullptr ? __ldg(rule.perm + first + i) : first + i]} << (i % 2 * 16);
  }
  return {x[0], x[1], x[2], x[3]};
}
/// The same, as the rule says.
__device__ inline uint4 gather(const GatherRule& rule, const std::uint16_t* row, int first) {
  const uint4 x = load_eight(rule, row, first);
  return rule.prescale == nullptr ? x : times(x, load_factors(rule, first), rule.type);
}

}  // namespace nibble::cuda
