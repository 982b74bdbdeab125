// Loading and quantizing activations in vectors of eight, for all kernels that quantize. Activations may be s8 codes, which stay as they are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/tasks/quantize_task.hpp"
#include "quantize/act_rule.hpp"

namespace nibble::cuda {

constexpr int kEach = 8;  // activations of a vector: 16 bytes of 16-bit floats or 8 bytes of codes in, 8 bytes of codes out
constexpr std::uint32_t kAllLanes = 0xffffffffu;
constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// ---- loads: a vector stays unconverted until it is used, so that all loads of a thread are in flight together

/// A[M,K], and how it may be read.
struct ActSource {
  const void* a = nullptr;
  std::int64_t stride = 0;  // elements between rows
  int k = 0;
  const std::int32_t* perm = nullptr;
  const float* prescale = nullptr;
  bool vector_loads = false, vector_prescale = false;
  const std::int32_t* source = nullptr;  // as QuantizeTask's
  int divisor = 1;

  /// Where row `row` of A lies, which the kernel before may have written.
  __device__ std::int64_t place(std::int64_t row) const { return source == nullptr ? row : __ldcg(source + row) / divisor; }
};

inline bool aligned(const void* p, std::int64_t stride, int bytes) {
  return (reinterpret_cast<std::uintptr_t>(p) | static_cast<std::uintptr_t>(stride)) % static_cast<std::uintptr_t>(bytes) == 0;
}
NIBBLE_HOST_DEVICE constexpr int element_bytes(DType type) { return type == DType::f32 ? 4 : type == DType::s8 ? 1 : 2; }
inline ActSource act_source(const QuantizeTask& task) {
  const int element = element_bytes(task.type);
  return {.a = task.a,
          .stride = task.a_stride,
          .k = static_cast<int>(task.k),
          .perm = task.perm,
          .prescale = task.prescale,
          .vector_loads = aligned(task.a, task.a_stride * element, std::min(16, kEach * element)),
          .vector_prescale = task.perm == nullptr && aligned(task.prescale, 0, 16),
          .source = task.source,
          .divisor = task.divisor};
}

template <DType kType>
struct Raw {
  static constexpr int kWords = kEach * element_bytes(kType) / 4;
  std::uint32_t word[kWords];

  __device__ float at(int i) const {
    if constexpr (kType == DType::f32) return __uint_as_float(word[i]);
    return half_of(word[i / 2], i % 2, kType);
  }
  /// Makes the compiler drop values derived so far: keeping both forms would take twice the registers.
  __device__ void keep_raw() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(word[i]));
  }
};

template <DType kType>
__device__ __forceinline__ const std::uint8_t* address(const ActSource& p, std::int64_t row, int channel) {
  return static_cast<const std::uint8_t*>(p.a) + (row * p.stride + channel) * element_bytes(kType);
}
/// Loads activation i of a vector whose words are 0.
template <DType kType>
__device__ __forceinline__ void load_one(Raw<kType>& raw, int i, const std::uint8_t* from) {
  if constexpr (kType == DType::f32)
    raw.word[i] = __ldcg(reinterpret_cast<const std::uint32_t*>(from));
  else if constexpr (kType == DType::s8)
    raw.word[i / 4] |= std::uint32_t{__ldcg(from)} << i % 4 * 8;
  else
    raw.word[i / 2] |= std::uint32_t{__ldcg(reinterpret_cast<const std::uint16_t*>(from))} << i % 2 * 16;
}
/// Up to 8 activations, one by one; the others are 0.
template <DType kType>
__device__ __forceinline__ void gather(Raw<kType>& raw, const std::uint8_t* from, int count) {
#pragma unroll
  for (int i = 0; i < Raw<kType>::kWords; ++i) raw.word[i] = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (i < count) load_one(raw, i, from + i * element_bytes(kType));
}
/// The same for any order of channels.
template <DType kType>
__device__ __forceinline__ void gather(Raw<kType>& raw, const ActSource& p, std::int64_t row, int channel) {
#pragma unroll
  for (int i = 0; i < Raw<kType>::kWords; ++i) raw.word[i] = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (channel + i < p.k) load_one(raw, i, address<kType>(p, row, __ldg(p.perm + channel + i)));
}
/// 8 activations that are aligned, or zeros.
template <DType kType>
__device__ __forceinline__ void load_whole(Raw<kType>& raw, const std::uint8_t* from, bool exist) {
  if constexpr (kType == DType::s8) {
    const uint2 w = exist ? __ldcg(reinterpret_cast<const uint2*>(from)) : uint2{};
    raw.word[0] = w.x, raw.word[1] = w.y;
  } else {
#pragma unroll
    for (int i = 0; i < Raw<kType>::kWords; i += 4) {
      const uint4 w = exist ? __ldcg(reinterpret_cast<const uint4*>(from) + i / 4) : uint4{};
      raw.word[i] = w.x, raw.word[i + 1] = w.y, raw.word[i + 2] = w.z, raw.word[i + 3] = w.w;
    }
  }
}
/// Vectors of 8 activations of a row, number v from channel_of(v) on; past K they are 0. Loads bypass L1, which may hold stale lines: the
/// previous kernel may have written A after this one started.
template <DType kType, int V, class ChannelOf>
__device__ __forceinline__ void load(Raw<kType> (&raw)[V], const ActSource& p, std::int64_t row, ChannelOf channel_of) {
  if (p.perm != nullptr) {
#pragma unroll 1
    for (int v = 0; v < V; ++v) {
      Raw<kType> one;
      gather(one, p, row, channel_of(v));
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (i == v) raw[i] = one;
    }
    return;
  }
  if (p.vector_loads) {
#pragma unroll
    for (int v = 0; v < V; ++v) load_whole(raw[v], address<kType>(p, row, channel_of(v)), channel_of(v) + kEach <= p.k);
    if (p.k % kEach == 0) return;
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int channel = channel_of(v), count = p.k - channel;
    if (!p.vector_loads || (count > 0 && count < kEach)) gather(raw[v], address<kType>(p, row, channel), count);
  }
}

/// The activations of a vector, times the prescale.
template <DType kType>
__device__ __forceinline__ void unpack(float (&x)[kEach], const Raw<kType>& raw, const ActSource& p, int channel) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = raw.at(i);
  if (p.prescale == nullptr) return;
  const float* factors = p.prescale + channel;
  if (p.vector_prescale && channel + kEach <= p.k) {  // and in order
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      const float4 f = __ldg(reinterpret_cast<const float4*>(factors + i));
      x[i] = act_rule::multiply(x[i], f.x), x[i + 1] = act_rule::multiply(x[i + 1], f.y);
      x[i + 2] = act_rule::multiply(x[i + 2], f.z), x[i + 3] = act_rule::multiply(x[i + 3], f.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (channel + i < p.k)
        x[i] = act_rule::multiply(x[i], __ldg(p.perm != nullptr ? p.prescale + __ldg(p.perm + channel + i) : factors + i));
  }
}

// ---- codes

/// act_rule::to_s8 in integers: saturating a sum with the zero point is saturating before it, and a conversion makes 0 of a NaN.
__device__ __forceinline__ std::uint32_t encode_s8(float x, const act_rule::Rule& rule) {
  const int rounded = __float2int_rn(act_rule::multiply(x, rule.inverse));
  return static_cast<std::uint32_t>(min(max(rounded, -128 - rule.zero), 127 - rule.zero) + rule.zero);
}

/// Four codes as the bytes of a word, from the lowest on.
__device__ __forceinline__ std::uint32_t encode_four_s8(const float* x, const act_rule::Rule& rule) {
  const std::uint32_t low = __byte_perm(encode_s8(x[0], rule), encode_s8(x[1], rule), 0x0040);
  const std::uint32_t high = __byte_perm(encode_s8(x[2], rule), encode_s8(x[3], rule), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

/// The rule for a range whose largest magnitude has these bits; `reach` is that of s8 or e4m3, magnitudes saturate at `limit`.
__device__ __forceinline__ act_rule::Rule rule_of_largest(std::uint32_t largest, float limit, float reach) {
  const float absmax = __uint_as_float(largest);
  return act_rule::symmetric(largest < kInfinityBits ? fminf(absmax, limit) : absmax, reach);
}

/// Codes of 16 channels, 0 … 7 an even lane's and 8 … 15 the odd one's after it, in the order of gpu_tile::interleaved: the even lane gets
/// the first half. All lanes of a warp must call this.
__device__ __forceinline__ uint2 interleave(uint2 codes) {
  const bool odd = threadIdx.x % 2 != 0;
  const std::uint32_t others = __shfl_xor_sync(kAllLanes, odd ? codes.x : codes.y, 1);
  const std::uint32_t low = odd ? others : codes.x, high = odd ? codes.y : others;
  return {__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362)};
}

__device__ __forceinline__ std::int32_t sum_of(uint2 codes) {
  constexpr std::int32_t kEachOne = 0x01010101;
  return __dp4a(static_cast<std::int32_t>(codes.x), kEachOne, __dp4a(static_cast<std::int32_t>(codes.y), kEachOne, 0));
}

}  // namespace nibble::cuda
