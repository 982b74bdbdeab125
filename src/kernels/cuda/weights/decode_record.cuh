// One warp times one record: 64 rows × 128 channels of weights, up to 16 tokens. Shared by the decode kernels of all
// architectures.
//
//   acc[64 rows][8T tokens] += s ∘ Σ operand·x + shift ∘ Σx      fragment f: rows 16f … 16f+15; token tile t: tokens 8t … 8t+7
//
// Weights are the 16-row A operand of m16n8k16, tokens its 8 columns: a single token wastes tensor throughput, which is abundant, but no
// bandwidth. Sums are in the operand's units (unpack.cuh) until they are stored.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/gather.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/tasks/decode.hpp"
#include "kernels/cuda/tasks/decode_ring.hpp"
#include "kernels/cuda/weights/record_format.cuh"
#include "kernels/cuda/weights/unpack.cuh"

namespace nibble::cuda {

/// The properties of a record known at compile time: groups of 128 channels or more without float offsets, with 16-bit scales, as nearly
/// all checkpoints have them; or only that groups are of 16 channels; or that slots have 32 or more.
enum class Known { f16_scales, bf16_scales, groups_of_16, nothing };
NIBBLE_HOST_DEVICE constexpr bool knows_constants(Known known) {
  return known == Known::f16_scales || known == Known::bf16_scales;
}

inline Known known_of(const RecordFormat& f) {
  if (f.span == 16) return Known::groups_of_16;
  if (f.span != 128 || f.zero > ZeroKind::integer || f.scale_type == DType::f32 || gpu_tile::are_floats(f.codes))
    return Known::nothing;
  return f.scale_type == DType::f16 ? Known::f16_scales : Known::bf16_scales;
}

/// A lane's rows of a column of a slot: [2f] is row g of fragment f, [2f + 1] row g + 8.
struct Rows {
  float v[2 * gpu_tile::kFragments];
};
__device__ inline Rows load_floats(std::uint32_t column, int lane, DType type) {
  const int position = lane / 4 * 4;  // gpu_tile::slot_position, of rows 0 … 31; 32 more: of rows 32 … 63
  if (type == DType::f32) {
    const uint4 a = ptx::load_shared16(column + position * 4), b = ptx::load_shared16(column + (position + 32) * 4);
    return {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w),
            __uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w)};
  }
  const uint2 a = ptx::load_shared8(column + position * 2), b = ptx::load_shared8(column + (position + 32) * 2);
  Rows r;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t pair = i == 0 ? a.x : i == 1 ? a.y : i == 2 ? b.x : b.y;
    if (type == DType::f16) {
      const float2 v = __half22float2(reinterpret_cast<const __half2&>(pair));
      r.v[2 * i] = v.x, r.v[2 * i + 1] = v.y;
    } else {
      r.v[2 * i] = __uint_as_float(pair << 16), r.v[2 * i + 1] = __uint_as_float(pair & 0xffff0000u);
    }
  }
  return r;
}
/// Integers 0 … 255 as floats.
__device__ inline Rows load_bytes(std::uint32_t column, int lane) {
  const int position = lane / 4 * 4;
  const std::uint32_t raw[2] = {ptx::load_shared4(column + position), ptx::load_shared4(column + position + 32)};
  Rows r;
#pragma unroll
  for (int i = 0; i < 8; ++i) r.v[i] = __uint_as_float(__byte_perm(raw[i / 4], 0x4b000000u, 0x7440 + i % 4)) - 0x1p23f;
  return r;
}

/// Sums of one warp: fragment, token tile, the four of the matrix instruction.
template <int kTiles>
using Sums = float[gpu_tile::kFragments][kTiles][4];

/// The factor of a group's Σx per row: −s·(z + offset), plus the weight's own float offset, if any.
template <Known kKnown, class Act, Codes kCodes>
__device__ __forceinline__ Rows shift_of(const RecordFormat& format, std::uint32_t slot, int lane, const Rows& scale) {
  using Numbers = Operand<Act, kCodes>;
  Rows shift;
  const float base = format.zero_base + Numbers::kOffset;
  if (format.zero == ZeroKind::none || format.zero == ZeroKind::offset) {
#pragma unroll
    for (int i = 0; i < 8; ++i) shift.v[i] = scale.v[i] * (-Numbers::unit(i % 2) * base);
    if (!knows_constants(kKnown) && format.zero == ZeroKind::offset) {
      const Rows o = load_floats(slot + format.zeros_offset, lane, format.zero_type);
#pragma unroll
      for (int i = 0; i < 8; ++i) shift.v[i] = fmaf(o.v[i], Numbers::unit(i % 2), shift.v[i]);
    }
  } else {
    const Rows z = knows_constants(kKnown) || format.zero == ZeroKind::integer
                       ? load_bytes(slot + format.zeros_offset, lane)
                       : load_floats(slot + format.zeros_offset, lane, format.zero_type);
#pragma unroll
    for (int i = 0; i < 8; ++i) shift.v[i] = scale.v[i] * ((z.v[i] + base) * -Numbers::unit(i % 2));
  }
  return shift;
}

/// A record whose groups have kSpan channels.
template <Known kKnown, int kSpan, int kTiles, class Act, Codes kCodes>
__device__ __forceinline__ void multiply_groups(const RecordFormat& format, std::uint32_t record,
                                                const std::uint32_t (&x)[kTiles], Sums<kTiles>& acc) {
  constexpr int kSteps = gpu_tile::kChannels / 32;  // ldmatrix loads 32 channels
  constexpr int kVectorProducts = gpu_tile::step_channels(gpu_tile::bits(kCodes)) / gpu_tile::kFragmentChannels;
  const int lane = threadIdx.x % 32;
  const std::uint32_t lane_codes = record + gpu_tile::vector_offset(0, 0, lane);
  std::uint32_t slot = record + format.slots_offset;

  // Shared memory is read well ahead of use: only one other warp hides the latency.
  constexpr int kAhead = !knows_constants(kKnown) && kTiles > 1 ? 1 : kSteps;  // steps of activations in registers
  std::uint32_t b[kAhead][kTiles][4];
  uint4 codes[gpu_tile::kFragments];
  const auto load_x = [&](int step) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) ptx::load_matrices(b[step % kAhead][t], x[t] + step * 32 * 2);
  };
#pragma unroll
  for (int f = 0; f < gpu_tile::kFragments; ++f) codes[f] = ptx::load_shared16(lane_codes + gpu_tile::vector_offset(0, f, 0));
#pragma unroll
  for (int step = 0; step < kAhead; ++step) load_x(step);
  constexpr int kGroup = kSpan / gpu_tile::kFragmentChannels;  // products of a group
  constexpr bool kShifts = !gpu_tile::are_floats(kCodes);      // floats have no zeros
  const std::uint32_t ones[4] = {kOnes<Act>, kOnes<Act>, kOnes<Act>, kOnes<Act>};
  Sums<kTiles> dot;
  float x_sum[kTiles][4];
  Rows scale;
#pragma unroll
  for (int i = 0; i < gpu_tile::kChannels / gpu_tile::kFragmentChannels; ++i) {
    const auto& now = b[i / 2 % kAhead];
    const int low = i % 2 * 2;  // of the two words of b that are these 16 channels
    if (i % kGroup == 0) {
      scale = load_floats(slot, lane,
                          kKnown == Known::f16_scales    ? DType::f16
                          : kKnown == Known::bf16_scales ? DType::bf16
                                                         : format.scale_type);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x_sum[t][j] = 0.0f;
#pragma unroll
          for (int f = 0; f < gpu_tile::kFragments; ++f) dot[f][t][j] = 0.0f;
        }
    }
    if constexpr (kShifts) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mma<Act>(x_sum[t], ones, now[t][low], now[t][low + 1]);
    }
#pragma unroll
    for (int f = 0; f < gpu_tile::kFragments; ++f) {
      std::uint32_t a[4];
      unpack<Act, kCodes>(a, codes[f], i % kVectorProducts);
      if (i % kVectorProducts == kVectorProducts - 1 && i + 1 < gpu_tile::kChannels / gpu_tile::kFragmentChannels)
        codes[f] = ptx::load_shared16(lane_codes + gpu_tile::vector_offset((i + 1) / kVectorProducts, f, 0));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mma<Act>(dot[f][t], a, now[t][low], now[t][low + 1]);
    }
    if (i % 2 == 1 && i / 2 + kAhead < kSteps) load_x(i / 2 + kAhead);
    if (i % kGroup == kGroup - 1) {
      Rows shift;
      if constexpr (kShifts) shift = shift_of<kKnown, Act, kCodes>(format, slot, lane, scale);
#pragma unroll
      for (int f = 0; f < gpu_tile::kFragments; ++f)
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int row = 2 * f + j / 2;
            acc[f][t][j] = fmaf(scale.v[row], dot[f][t][j], acc[f][t][j]);
            if constexpr (kShifts) acc[f][t][j] = fmaf(shift.v[row], x_sum[t][j % 2], acc[f][t][j]);
          }
      slot += format.slot_bytes;
    }
  }
}

/// `record` and `x[t]` are shared-memory addresses; x[t] is this lane's ldmatrix address in token tile t at the record's first
/// channel.
template <Known kKnown, int kTiles, class Act, Codes kCodes>
__device__ __forceinline__ void multiply_record(const RecordFormat& format, std::uint32_t record,
                                                const std::uint32_t (&x)[kTiles], Sums<kTiles>& acc) {
  if constexpr (kKnown == Known::groups_of_16)
    multiply_groups<kKnown, 16, kTiles, Act, kCodes>(format, record, x, acc);
  else if (kKnown != Known::nothing || format.span == 128)
    multiply_groups<kKnown, 128, kTiles, Act, kCodes>(format, record, x, acc);
  else if (format.span == 64)
    multiply_groups<kKnown, 64, kTiles, Act, kCodes>(format, record, x, acc);
  else
    multiply_groups<kKnown, 32, kTiles, Act, kCodes>(format, record, x, acc);
}

// ---- Partial sums in shared memory: part[warp][token][row], to be added in the order of the warps.

template <int kTiles>
__device__ inline void write_part(float* part, int warp, int tokens, int m, const Sums<kTiles>& acc) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 8 * t + lane % 4 * 2 + i % 2;
      if (token >= tokens) continue;
#pragma unroll
      for (int f = 0; f < gpu_tile::kFragments; ++f)
        part[(warp * m + token) * kPartPitch + f * gpu_tile::kFragmentRows + lane / 4 + i / 2 * 8] = acc[f][t][i];
    }
}

/// The sums of rows `row` and row + 1 (row even) over all warps, in units of the weight. Warps without a record have written zeros.
template <class Act, Codes kCodes>
__device__ __forceinline__ float2 sum_parts(const float* part, int m, int token, int row) {
  using Numbers = Operand<Act, kCodes>;
  float2 v[kDecodeWarps];
#pragma unroll
  for (int j = 0; j < kDecodeWarps; ++j) v[j] = *reinterpret_cast<const float2*>(part + (j * m + token) * kPartPitch + row);
#pragma unroll
  for (int j = 1; j < kDecodeWarps; ++j) v[0].x += v[j].x, v[0].y += v[j].y;
  const float unit = row % gpu_tile::kFragmentRows < 8 ? 1.0f / Numbers::unit(0) : 1.0f / Numbers::unit(1);
  return {v[0].x * unit, v[0].y * unit};
}

// ---- Activations

struct Activations {
  const void* x;
  std::int64_t stride;  // elements between tokens
  int m;
  GatherRule rule;
};
/// m tokens of a task, from `first` on.
inline Activations activations(const LinearTask& task, int first, int m) {
  return {static_cast<const std::uint16_t*>(task.x) + first * task.x_stride, task.x_stride, m, gather_rule(task)};
}

/// Out of line: inlined, it makes the compiler split multiply-adds of decode's loops and allocate other registers, where nothing is
/// gathered either.
__device__ __noinline__ inline uint4 gather_apart(const GatherRule& rule, const std::uint16_t* row, int first) {
  return gather(rule, row, first);
}

/// Copies positions [first, first + channels) of the first m tokens into shared memory, one token every `pitch` bytes, as the rule says.
/// Leaves async copies outstanding: commit, wait for them, then synchronise the threads.
__device__ inline void stage_activations(const Activations& a, int first, int channels, std::uint32_t to, int pitch, int thread,
                                         int threads) {
  const auto* elements = static_cast<const std::uint16_t*>(a.x);
  const bool copies = a.rule.copies_rows();
  const int chunks = channels / 8;
  for (int i = thread; i < a.m * chunks; i += threads) {
    const int token = i / chunks, chunk = i - token * chunks;
    const int channel = first + chunk * 8;
    const std::uint32_t at = to + token * pitch + chunk * 16;
    const std::uint16_t* from = elements + token * a.stride;
    if (copies) {
      const int valid = min(max(a.rule.k - channel, 0), 8);
      ptx::async_copy16(at, from + (valid > 0 ? channel : 0), valid * 2);
    } else {
      ptx::store_shared16(at, gather_apart(a.rule, from, channel));
    }
  }
}

}  // namespace nibble::cuda
