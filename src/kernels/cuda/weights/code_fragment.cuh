// Codes → the A operand of m16n8k32 or wgmma m64k32 of signed bytes, for activations that are s8 codes. Exact: nothing is rounded.
//
//   a lane's 4-byte word of gpu_n64k128 (gpu_tile.hpp) has channels 2t, 2t+8, 2t+1, 2t+9 of 16, row g in its lower nibbles and row
//   g+8 in its upper ones:
//
//     (word << 4 ^ 0x80808080) & 0xf0f0f0f0        four bytes 16·(u − 8) of row g: one register of the operand
//     (word      ^ 0x80808080) & 0xf0f0f0f0        of row g+8: another
//
//   The operand has channels 4t … 4t+3 there. The order of channels does not matter as long as both sides agree: activations are
//   quantized into the order of the words (gpu_tile::interleaved). Bytes of 8-bit codes are taken in the same order, by PRMT, and their
//   upper bits flipped: u − 128.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/tasks/wna8_task.hpp"
#include "kernels/cuda/weights/weight_fragment.cuh"

namespace nibble::cuda {

constexpr int kStepChannels = 32;  // of a matrix instruction

/// The offset of a stored code, and the unit of the operand.
template <int kBits>
constexpr float kCodeBase = kBits == 4 ? 8.0f : 128.0f;
template <int kBits>
constexpr float kCodeUnit = kBits == 4 ? 1.0f / 16 : 1.0f;

/// (a ^ 0x80808080) & 0xf0f0f0f0
__device__ inline std::uint32_t upper_nibbles(std::uint32_t a) { return ptx::lop3<0x28>(a, 0x80808080u, 0xf0f0f0f0u); }

/// 32 channels, number `step` of a record, from the vector that holds them.
template <int kBits>
__device__ __forceinline__ void signed_codes(std::uint32_t (&a)[4], const uint4& v, int step) {
  if constexpr (kBits == 4) {
    const std::uint32_t low = step % 2 == 0 ? v.x : v.z, high = step % 2 == 0 ? v.y : v.w;  // of 16 channels each
    a[0] = upper_nibbles(low << 4);
    a[1] = upper_nibbles(low);
    a[2] = upper_nibbles(high << 4);
    a[3] = upper_nibbles(high);
  } else {
    a[0] = __byte_perm(v.x, v.y, 0x5140) ^ 0x80808080u;
    a[1] = __byte_perm(v.x, v.y, 0x7362) ^ 0x80808080u;
    a[2] = __byte_perm(v.z, v.w, 0x5140) ^ 0x80808080u;
    a[3] = __byte_perm(v.z, v.w, 0x7362) ^ 0x80808080u;
  }
}

/// e2m1 codes in place of 4-bit integers: all values are halves of −12 … 12.
constexpr float kE2m1Unit = 0.5f;

/// Twice the values of the four codes in the lower half of `codes`, as signed bytes. A code selects its magnitude, and with a sign bit the
/// sign of that byte, which is 0: of these two words each byte has the magnitude in one.
__device__ __forceinline__ std::uint32_t twice_e2m1(std::uint32_t codes) {
  constexpr std::uint32_t kLow = 0x03020100u, kHigh = 0x0c080604u, kSigns = 0x80808080u;
  const std::uint32_t positive = ptx::permute_signed(kLow, kHigh, codes);
  const std::uint32_t negative = ptx::permute_signed(kLow, kHigh, codes ^ 0x8888u);
  return ((positive | kSigns) - negative) ^ kSigns;  // the sign bits keep differences from borrowing
}
/// signed_codes of e2m1: the same order, in kE2m1Unit.
__device__ __forceinline__ void signed_e2m1(std::uint32_t (&a)[4], const uint4& v, int step) {
  const std::uint32_t words[2] = {step % 2 == 0 ? v.x : v.z, step % 2 == 0 ? v.y : v.w};  // of 16 channels each
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t low = twice_e2m1(words[i]), high = twice_e2m1(words[i] >> 16);
    a[2 * i] = __byte_perm(low, high, 0x6420);
    a[2 * i + 1] = __byte_perm(low, high, 0x7531);
  }
}

/// The kind of a fold's terms (wna8.hpp): with a scale, without one, with a zero point, with a float offset.
enum class ActTerms { scaled, plain, zeros, offsets };

/// The factors of a fold's integer sums and of the sums of activations, for rows g and g+8.
struct RowTerms {
  float scale[2];
  float shift[2];
};

/// Scales a fold's integer sums of rows g, g, g+8, g+8 and tokens 2t, 2t+1, 2t, 2t+1 and adds them to `to`. `terms`: s_a of both tokens,
/// then s_a·Σa; kPlain: s_a is 1.
template <ConstantsPath kPath, bool kPlain = false>
__device__ __forceinline__ void add_fold(float* to, const std::int32_t* dot, const uint4& terms, const RowTerms& rows) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scale = __uint_as_float(i % 2 == 0 ? terms.x : terms.y), sum = __uint_as_float(i % 2 == 0 ? terms.z : terms.w);
    to[i] = fmaf(static_cast<float>(dot[i]), kPlain ? rows.scale[i / 2] : __fmul_rn(scale, rows.scale[i / 2]), to[i]);
    if (kPath != ConstantsPath::fixed_zeros) to[i] = fmaf(sum, rows.shift[i / 2], to[i]);
  }
}

/// The terms of two neighbouring tokens of which the first may be the second of a pair: rows of an expert begin at any `first`. `at`: the pair
/// that has it.
__device__ __forceinline__ uint4 load_terms_from(std::uint32_t at, int first) {
  const std::uint32_t low = at + first % 2 * 4, high = low + (first % 2 == 0 ? 4 : 12);
  return {ptx::load_shared4(low), ptx::load_shared4(high), ptx::load_shared4(low + 8), ptx::load_shared4(high + 8)};
}

// ---- activations with zero points:  Σ (a − z)·u = Σ a·u − z·Σ u
// with offsets:                         Σ (s·a + o)·u = s·Σ a·u + o·Σ u

/// Adds a lane's part of 32 channels of rows g and g+8, an operand of signed_codes.
__device__ __forceinline__ void add_codes(std::int32_t (&sums)[2], const std::uint32_t (&a)[4]) {
  constexpr std::int32_t kEachOne = 0x01010101;
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i % 2] = __dp4a(static_cast<std::int32_t>(a[i]), kEachOne, sums[i % 2]);
}
/// The same of 16 channels: the first or the last two registers.
__device__ __forceinline__ void add_half_of_codes(std::int32_t (&sums)[2], std::uint32_t a0, std::uint32_t a1) {
  constexpr std::int32_t kEachOne = 0x01010101;
  sums[0] = __dp4a(static_cast<std::int32_t>(a0), kEachOne, sums[0]);
  sums[1] = __dp4a(static_cast<std::int32_t>(a1), kEachOne, sums[1]);
}
/// Reduces over the four lanes of a row; each gets the whole sum.
__device__ __forceinline__ void share_sums(std::int32_t (&sums)[2]) {
#pragma unroll
  for (std::int32_t& sum : sums) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
  }
}
/// add_fold with zero_terms in place of s_a·Σa, and with the sums of u of both rows.
template <ConstantsPath kPath>
__device__ __forceinline__ void add_fold_zeros(float* to, const std::int32_t* dot, const uint4& terms, const RowTerms& rows,
                                               const std::int32_t (&sums)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scale = __uint_as_float(i % 2 == 0 ? terms.x : terms.y);
    const std::uint32_t term = i % 2 == 0 ? terms.z : terms.w;
    const std::int32_t centred = dot[i] - term_zero(term) * sums[i / 2];
    to[i] = fmaf(static_cast<float>(centred), __fmul_rn(scale, rows.scale[i / 2]), to[i]);
    if (kPath != ConstantsPath::fixed_zeros)
      to[i] = fmaf(__fmul_rn(scale, static_cast<float>(term_sum(term))), rows.shift[i / 2], to[i]);
  }
}

/// What a lane's sum of u begins with in a fold of `channels` that ends before channel `end`, so that those past K add up to 0: an operand
/// has −128 there, and four lanes share a row. Zero points need it not, because codes of A past K are the zero point.
__device__ inline std::int32_t sum_past_k(int end, int channels, int k) { return 128 / 4 * min(max(end - k, 0), channels); }

/// The terms of two tokens with offsets: scales, offsets, and sums of activations, which a weight without zeros does not need.
struct OffsetTerms {
  uint2 scales, offsets, sums;
};
template <ConstantsPath kPath>
__device__ __forceinline__ OffsetTerms load_offset_terms(std::uint32_t at) {
  return {ptx::load_shared8(at), ptx::load_shared8(at + 8),
          kPath == ConstantsPath::fixed_zeros ? uint2{} : ptx::load_shared8(at + 16)};
}
/// add_fold with such terms, and with the sums of u of both rows, which are exact as f32.
template <ConstantsPath kPath>
__device__ __forceinline__ void add_fold_offsets(float* to, const std::int32_t* dot, const OffsetTerms& terms,
                                                 const RowTerms& rows, const std::int32_t (&sums)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto of_token = [i](const uint2& pair) { return __uint_as_float(i % 2 == 0 ? pair.x : pair.y); };
    const float scaled = __fmul_rn(of_token(terms.scales), static_cast<float>(dot[i]));
    to[i] = fmaf(fmaf(of_token(terms.offsets), static_cast<float>(sums[i / 2]), scaled), rows.scale[i / 2], to[i]);
    if (kPath != ConstantsPath::fixed_zeros) to[i] = fmaf(of_token(terms.sums), rows.shift[i / 2], to[i]);
  }
}

/// ConstantsPath::fixed_zeros and ConstantsPath::integer_zeros: groups of 128 channels or more, 16-bit scales.
template <ConstantsPath kPath, int kBits>
__device__ __forceinline__ RowTerms row_terms(const RecordFormat& format, const RawConstants& raw) {
  const float2 scale = scales_of<kPath>(raw, format);
  const float base = format.zero_base - kCodeBase<kBits>;
  RowTerms rows{{scale.x * kCodeUnit<kBits>, scale.y * kCodeUnit<kBits>}, {0.0f, 0.0f}};
  if (kPath == ConstantsPath::integer_zeros) {
    rows.shift[0] = -scale.x * (base + static_cast<float>(raw.zeros & 0xffu));
    rows.shift[1] = -scale.y * (base + static_cast<float>(raw.zeros >> 8));
  }
  return rows;
}
/// The same for any slot.
template <int kBits>
__device__ __forceinline__ RowTerms load_row_terms(const RecordFormat& format, std::uint32_t slot, int position) {
  const float2 scale = load_row_pair(slot, position, format.scale_type);
  const float base = format.zero_base - kCodeBase<kBits>;
  const std::uint32_t zeros = slot + format.zeros_offset;
  float2 z{base, base}, offset{0.0f, 0.0f};
  if (format.zero == ZeroKind::integer) {
    const std::uint32_t raw = ptx::load_shared2(zeros + position);
    z.x += static_cast<float>(raw & 0xffu);
    z.y += static_cast<float>(raw >> 8);
  } else if (format.zero == ZeroKind::real) {
    const float2 v = load_row_pair(zeros, position, format.zero_type);
    z.x += v.x;
    z.y += v.y;
  } else if (format.zero == ZeroKind::offset) {
    offset = load_row_pair(zeros, position, format.zero_type);
  }
  return {{scale.x * kCodeUnit<kBits>, scale.y * kCodeUnit<kBits>},
          {fmaf(-scale.x, z.x, offset.x), fmaf(-scale.y, z.y, offset.y)}};
}

/// The same of e2m1 codes, which have no zeros.
__device__ __forceinline__ RowTerms load_e2m1_terms(const RecordFormat& format, std::uint32_t slot, int position) {
  const float2 scale = load_row_pair(slot, position, format.scale_type);
  return {{scale.x * kE2m1Unit, scale.y * kE2m1Unit}, {0.0f, 0.0f}};
}

/// The path for folds of `fold` channels; the plan has chosen 32 for all but the common weights.
inline ConstantsPath code_constants_path(const RecordFormat& f, int fold) {
  if (fold != gpu_tile::kChannels) return ConstantsPath::any;
  return f.zero == ZeroKind::integer ? ConstantsPath::integer_zeros : ConstantsPath::fixed_zeros;
}

}  // namespace nibble::cuda
