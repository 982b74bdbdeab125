// One warp times one record: 32 rows × 128 channels of weights, up to 32 tokens. Shared by the decode kernels of all
// architectures.
//
//   acc[32 rows][8T tokens] += s ∘ Σ (u − z)·x        fragment f of the warp: rows 16f … 16f+15; token tile t: tokens 8t … 8t+7
//
// Weights are the 16-row A operand of m16n8k16, tokens its 8 columns: a single token wastes tensor throughput, of which there is
// plenty, and no memory. The group size is a run-time number looked at once per 32 channels; everything inside is unrolled.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode.hpp"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/unpack.cuh"

namespace nibble::cuda {

/// What the main loop needs to know about a record.
struct RecordFormat {
  int span;          // channels that share a slot: 32, 64 or 128
  int slots_offset;  // of slot 0 in a record
  int slot_bytes;
  int zeros_offset;  // in a slot
  Float scale_type;
  Zero zero;
  Float zero_type;
  float zero_base;
};

inline RecordFormat record_format(const DecodeWeight& w) {
  const gpu_tile::Geometry& g = w.geometry;
  return {g.span, g.scale_offset(0), g.slot_bytes(), g.zero_offset(0) - g.scale_offset(0), w.scale_type,
          w.zero, w.zero_type,       w.zero_base};
}

/// Four neighbours of a column of a slot: rows g, g+8, g+16, g+24 of the warp's 32.
struct FourRows {
  float v[4];
};
__device__ inline FourRows load_floats(std::uint32_t column, int position, Float type) {
  FourRows r;
  if (type == Float::f32) {
    const uint4 raw = ptx::load_shared16(column + position * 4);
    r = {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w)};
  } else {
    const uint2 raw = ptx::load_shared8(column + position * 2);
    if (type == Float::f16) {
      const float2 a = __half22float2(bits_of<__half2>(raw.x)), b = __half22float2(bits_of<__half2>(raw.y));
      r = {a.x, a.y, b.x, b.y};
    } else {
      r = {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
           __uint_as_float(raw.y & 0xffff0000u)};
    }
  }
  return r;
}
__device__ inline FourRows load_bytes(std::uint32_t column, int position, float base) {
  const std::uint32_t raw = ptx::load_shared4(column + position);
  return {base + static_cast<float>(raw & 0xff), base + static_cast<float>(raw >> 8 & 0xff),
          base + static_cast<float>(raw >> 16 & 0xff), base + static_cast<float>(raw >> 24)};
}

constexpr int kWarpRows = 32;
constexpr int kWarpFragments = kWarpRows / gpu_tile::kFragmentRows;

/// Sums of one warp: fragment, token tile, the four of the matrix instruction.
template <int kTiles>
using Sums = float[kWarpFragments][kTiles][4];

/// The common case, or all of them: a record that is one group without offsets needs no decisions inside.
enum class Slots { one, any };

template <Slots kSlots, int kTiles, class Act, int kBits>
__device__ __forceinline__ void multiply_slots(const RecordFormat& format, const Unpack<Act, kBits>& fixed, std::uint32_t record,
                                               const std::uint32_t (&x)[kTiles], int half, Sums<kTiles>& acc) {
  constexpr int kSteps = gpu_tile::kChannels / 32;  // ldmatrix brings 32 channels
  constexpr int kVectors = kSteps * kBits / 8;      // of codes: a lane's share of a fragment's record
  constexpr bool kAny = kSlots == Slots::any;
  const int lane = threadIdx.x % 32;
  const int position = half * kWarpRows + lane / 4 * 4;
  const int last = format.span / 32 - 1;  // step & last: the place in the group; a power of two less one
  std::uint32_t slot = record + format.slots_offset;

  // Everything that comes from shared memory is asked for before the first use, as far as registers go.
  constexpr int kVectorsAhead = kTiles == 1 && kBits == 4 ? kVectors : 1;
  uint4 codes[kVectorsAhead][kWarpFragments];
  FourRows scale{}, zero{};
  if (!kAny) {
    scale = load_floats(slot, position, format.scale_type);
    if (format.zero == Zero::integer) zero = load_bytes(slot + format.zeros_offset, position, format.zero_base);
  }

  Unpack<Act, kBits> unpacks[kWarpFragments] = {fixed, fixed};
  if (!kAny && format.zero == Zero::integer) {
#pragma unroll
    for (int f = 0; f < kWarpFragments; ++f) unpacks[f].set(zero.v[2 * f], zero.v[2 * f + 1]);
  }
  Sums<kTiles> dot = {};
  float x_sum[kTiles][4] = {};

  constexpr int kAhead = kTiles == 1   ? kSteps
                         : kTiles == 2 ? 2
                                       : 1;  // steps of activations in registers: 4 a token tile and step
  std::uint32_t b[kAhead][kTiles][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step % kAhead == 0) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
#pragma unroll
        for (int t = 0; t < kTiles; ++t) ptx::load_matrices(b[i][t], x[t] + (step + i) * 32 * 2);
    }
    if (kAny && format.zero == Zero::integer && (step & last) == 0) {
      const FourRows z = load_bytes(slot + format.zeros_offset, position, format.zero_base);
#pragma unroll
      for (int f = 0; f < kWarpFragments; ++f) unpacks[f].set(z.v[2 * f], z.v[2 * f + 1]);
    }

    if (step % (kSteps / kVectors * kVectorsAhead) == 0) {
#pragma unroll
      for (int v = 0; v < kVectorsAhead; ++v)
#pragma unroll
        for (int f = 0; f < kWarpFragments; ++f)
          codes[v][f] =
              ptx::load_shared16(record + gpu_tile::vector_offset(step * kVectors / kSteps + v, half * kWarpFragments + f, lane));
    }
    const auto& now = b[step % kAhead];
    std::uint32_t a[2][kWarpFragments][4];
#pragma unroll
    for (int f = 0; f < kWarpFragments; ++f) {
      const uint4& v = codes[step * kVectors / kSteps % kVectorsAhead][f];
      if (kBits == 4 && step % 2 == 1) {
        unpack<2>(unpacks[f], a[0][f], v);
        unpack<3>(unpacks[f], a[1][f], v);
      } else {
        unpack<0>(unpacks[f], a[0][f], v);
        unpack<1>(unpacks[f], a[1][f], v);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)  // outside, so that neighbours in the stream do not depend on each other
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int f = 0; f < kWarpFragments; ++f) mma<Act>(dot[f][t], a[i][f], now[t][2 * i], now[t][2 * i + 1]);
    if constexpr (kAny) {
      if (format.zero >= Zero::offset) {  // Σx of the group: a matrix of ones times x
        const std::uint32_t ones[4] = {kOnes<Act>, kOnes<Act>, kOnes<Act>, kOnes<Act>};
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          mma<Act>(x_sum[t], ones, now[t][0], now[t][1]);
          mma<Act>(x_sum[t], ones, now[t][2], now[t][3]);
        }
      }
      if (((step + 1) & last) != 0) continue;
      scale = load_floats(slot, position, format.scale_type);  // the group ends
#pragma unroll
      for (int f = 0; f < kWarpFragments; ++f)
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            acc[f][t][i] = fmaf(scale.v[2 * f + i / 2], dot[f][t][i], acc[f][t][i]);
            dot[f][t][i] = 0.0f;
          }
      if (format.zero >= Zero::offset) {
        FourRows o = load_floats(slot + format.zeros_offset, position, format.zero_type);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (format.zero == Zero::real) o.v[i] *= -scale.v[i];
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int f = 0; f < kWarpFragments; ++f) acc[f][t][i] = fmaf(o.v[2 * f + i / 2], x_sum[t][i], acc[f][t][i]);
            x_sum[t][i] = 0.0f;
          }
      }
      slot += format.slot_bytes;
    }
  }
  if constexpr (!kAny) {
#pragma unroll
    for (int f = 0; f < kWarpFragments; ++f)
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[f][t][i] = fmaf(scale.v[2 * f + i / 2], dot[f][t][i], acc[f][t][i]);
  }
}

/// `record` and `x[t]` are shared-memory addresses; x[t] is this lane's ldmatrix address in token tile t at the record's first
/// channel; `fixed` is set to zero_base. `half` chooses the warp's rows: 32·half … 32·half+31.
template <int kTiles, class Act, int kBits>
__device__ __forceinline__ void multiply_record(const RecordFormat& format, const Unpack<Act, kBits>& fixed, std::uint32_t record,
                                                const std::uint32_t (&x)[kTiles], int half, Sums<kTiles>& acc) {
  if (format.span == gpu_tile::kChannels && format.zero < Zero::offset)
    multiply_slots<Slots::one, kTiles, Act, kBits>(format, fixed, record, x, half, acc);
  else
    multiply_slots<Slots::any, kTiles, Act, kBits>(format, fixed, record, x, half, acc);
}

/// What happens between a sum and memory. To be replaced by the canonical epilogue (epilogue/epilogue.hpp) without the kernels
/// noticing: they only call store().
struct DecodeEpilogue {
  void* d;
  std::int64_t stride;
  const float* bias;
  float scale2;
  Float out;

  __device__ void store(int token, int row, float sum) const {
    const float value = bias != nullptr ? fmaf(sum, scale2, bias[row]) : sum * scale2;
    const std::int64_t at = token * stride + row;
    if (out == Float::f16)
      static_cast<__half*>(d)[at] = __float2half_rn(value);
    else if (out == Float::bf16)
      static_cast<__nv_bfloat16*>(d)[at] = __float2bfloat16_rn(value);
    else
      static_cast<float*>(d)[at] = value;
  }
};

inline DecodeEpilogue decode_epilogue(const DecodeTask& task) {
  return {task.d, task.d_stride, task.bias, task.weight.scale2, task.out};
}

/// Copies x[0 … m)[first … first+channels) into shared memory, one token every `pitch` bytes, zeros past k. Ends with an
/// outstanding async copy group: wait for it, then synchronise the threads.
__device__ inline void stage_activations(const void* x, std::int64_t stride, int m, int k, int first, int channels,
                                         std::uint32_t to, int pitch, int thread, int threads) {
  const auto* bytes = static_cast<const std::uint8_t*>(x);
  const bool vectors = (reinterpret_cast<std::uintptr_t>(x) | static_cast<std::uintptr_t>(stride * 2)) % 16 == 0;
  const int chunks = channels / 8;
  for (int i = thread; i < m * chunks; i += threads) {
    const int token = i / chunks, chunk = i - token * chunks;
    const int channel = first + chunk * 8;
    const std::uint32_t at = to + token * pitch + chunk * 16;
    const int valid = min(max(k - channel, 0), 8);
    const std::uint8_t* from = bytes + (token * stride + (valid > 0 ? channel : 0)) * 2;
    if (vectors) {
      ptx::async_copy16(at, from, valid * 2);
    } else {
      const auto* element = reinterpret_cast<const std::uint16_t*>(from);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const std::uint16_t v = j < valid ? element[j] : std::uint16_t{0};
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(at + 2 * j), "h"(v) : "memory");
      }
    }
  }
  ptx::async_copy_commit();
}

}  // namespace nibble::cuda
