// A row of activations in registers, or a part of one, becomes codes: what quantize_acts.cu loads, and norm_rows.cu normalizes.
//
// A range is two integers, each a maximum of bits of floats: compared as signed numbers they are ordered from 0 up, as unsigned numbers
// from −0 down, and NaN and infinity are above all others in each half. So no test for them is needed. For offsets a range need not
// contain 0: the bits of negative numbers are turned around then, and one maximum is of these integers, the other of their complements.
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/cuda/steps/act_vectors.cuh"
#include "kernels/cuda/tasks/wna8_task.hpp"
#include "kernels/cuda/weights/float_codes.cuh"

namespace nibble::cuda {

using act_rule::Rule;

constexpr int kMaxThreads = 1024;  // of a CTA: the maximum, for long rows
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr std::uint32_t kSignBit = 0x80000000u;

/// What a kernel writes beside codes: their sums; the terms of folds; those with float offsets. Or, in their place, f16 numbers. Or codes alone, in
/// each of the rows that QuantizeTask::row_of names.
enum class QuantizeOutput { sums, terms, offset_terms, halves, copies };
/// Whether it writes terms.
template <QuantizeOutput kOutput>
constexpr bool kIsOnline = kOutput == QuantizeOutput::terms || kOutput == QuantizeOutput::offset_terms;

struct QuantizeParams {
  QuantizeTask task;
  ActSource source;
  Rule known;
  int k, columns;
  int group_lanes;  // that share a scale, a power of two; 0: the team does
  int group_shift;  // log₂ of a group's channels
  bool vector_stores;
  bool pairs;  // activations are 16-bit floats, and ranges are taken before conversion
  bool whole;  // rows are whole vectors in order, without prescale, all read and written at once
};

/// Assumptions on the usual activations, known at compile time.
template <bool kWhole>
__device__ __forceinline__ QuantizeParams known_of(const QuantizeParams& given) {
  QuantizeParams p = given;
  p.whole = kWhole;
  if (!kWhole) return p;
  p.source.perm = nullptr;
  p.source.prescale = nullptr;
  p.source.vector_loads = p.vector_stores = p.pairs = true;
  p.source.k = p.columns = p.k = given.k / kEach * kEach;
  return p;
}

// ---- ranges

/// The bits of a float as an integer of the same order, and back.
__device__ __forceinline__ std::int32_t turned(std::int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

struct Range {
  std::int32_t high = 0;  // the bits of the largest activation, or of 0
  std::uint32_t low = 0;  // of the least, if it has a sign

  /// Of no activation, not even of 0.
  __device__ static Range nothing() { return {static_cast<std::int32_t>(kSignBit), 0}; }
  /// From `bottom` to `top`, for offsets: ordered bits, and a complement of such. A top that is NaN is above all others.
  __device__ static Range of(float bottom, float top) {
    return {turned(__float_as_int(top)), static_cast<std::uint32_t>(turned(__float_as_int(bottom))) ^ ~kSignBit};
  }
  __device__ float top() const { return __int_as_float(turned(high)); }
  __device__ float bottom() const { return __int_as_float(turned(static_cast<std::int32_t>(low ^ ~kSignBit))); }
  __device__ bool empty() const { return high < static_cast<std::int32_t>(low ^ ~kSignBit); }

  __device__ void take(float x) {
    high = max(high, __float_as_int(x));
    low = max(low, __float_as_uint(x));
  }
  __device__ void take(const Range& other) {
    high = max(high, other.high);
    low = max(low, other.low);
  }
  /// The bits of the largest |x|.
  __device__ std::uint32_t largest() const {
    const auto above = static_cast<std::uint32_t>(high);
    return low >= kSignBit ? max(above, low - kSignBit) : above;
  }
};

__device__ inline Rule symmetric_rule(const QuantizeTask& t, std::uint32_t largest) {
  return rule_of_largest(largest, t.limit, t.codes_type == DType::e4m3 ? act_rule::kE4m3Max : 127.0f);
}
/// Of no activations, those past K, scale and offset are 0.
__device__ inline Rule offset_rule(const QuantizeTask& t, const Range& range) {
  if (range.empty()) return {.scale = 0.0f, .inverse = 0.0f};
  const auto within = [&t](float x) { return fminf(fmaxf(x, -t.limit), t.limit); };
  const float top = range.top();
  return act_rule::with_offset(within(range.bottom()), top == top ? within(top) : top);
}
template <bool kOffsets = false>
__device__ Rule rule_of(const QuantizeTask& t, const Range& range) {
  if (kOffsets) return offset_rule(t, range);
  if (!t.zero_points || range.largest() >= kInfinityBits) return symmetric_rule(t, range.largest());
  const float low = range.low >= kSignBit ? __uint_as_float(range.low) : 0.0f;
  return act_rule::asymmetric(fmaxf(low, -t.limit), fminf(__int_as_float(range.high), t.limit));
}

__device__ inline Range warp_range(Range range) {
#if __CUDA_ARCH__ >= 800
  return {__reduce_max_sync(kAllLanes, range.high), __reduce_max_sync(kAllLanes, range.low)};
#else
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    range.take({__shfl_xor_sync(kAllLanes, range.high, step), __shfl_xor_sync(kAllLanes, range.low, step)});
  return range;
#endif
}
__device__ inline std::int32_t warp_sum(std::int32_t sum) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, sum);
#else
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return sum;
#endif
}

/// The threads of a team, whole warps of a CTA. All threads of the CTA must reach its barriers.
struct Team {
  int first_warp, warps;
  int thread;  // in the team

  __device__ Team()
      : first_warp(static_cast<int>(threadIdx.y * blockDim.x) / 32),
        warps(static_cast<int>(blockDim.x) / 32),
        thread(static_cast<int>(threadIdx.x)) {}

  __device__ Range reduce(Range range, Range (&shared)[kMaxWarps]) const {
    range = warp_range(range);
    if (warps == 1) return range;
    if (thread % 32 == 0) shared[first_warp + thread / 32] = range;
    __syncthreads();
    const int lane = thread % 32;
    return warp_range(lane < warps ? shared[first_warp + lane] : Range::nothing());
  }
  /// The sum is thread 0's.
  __device__ std::int32_t reduce(std::int32_t sum, std::int32_t (&shared)[kMaxWarps]) const {
    sum = warp_sum(sum);
    if (warps == 1) return sum;
    if (thread % 32 == 0) shared[first_warp + thread / 32] = sum;
    __syncthreads();
    const int lane = thread % 32;
    return thread < 32 ? warp_sum(lane < warps ? shared[first_warp + lane] : 0) : 0;
  }
};

// ---- vectors

/// The range of 16-bit floats, two at a time: the largest bits as signed and as unsigned numbers.
struct Pairs {
  std::uint32_t high = 0, low = 0;

  template <DType kType>
  __device__ void take(const Raw<kType>& raw) {
#pragma unroll
    for (std::uint32_t word : raw.word) high = __vmaxs2(high, word), low = __vmaxu2(low, word);
  }
  template <DType kType>
  __device__ Range range() const {
    const std::uint32_t top = max(high & 0xffff, high >> 16), bottom = max(low & 0xffff, low >> 16);
    const std::uint32_t least = __float_as_uint(half_of(bottom, 0, kType)) | kSignBit;  // conversion loses the sign of a NaN
    return {__float_as_int(half_of(top, 0, kType)), bottom >> 15 != 0 ? least : 0};
  }
};

template <bool kOffsets = false, DType kType>
__device__ __forceinline__ Range range_of(const Raw<kType>& raw, const QuantizeParams& p, int channel) {
  float x[kEach];
  unpack(x, raw, p.source, channel);
  if constexpr (kOffsets) {
    const int count = p.k - channel;
    if (count <= 0) return Range::nothing();
    float bottom = x[0], top = x[0], spoiled = 0.0f;  // by an infinity or a NaN
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (p.whole || i < count) bottom = fminf(bottom, x[i]), top = fmaxf(top, x[i]), spoiled = fmaf(x[i], 0.0f, spoiled);
    return Range::of(bottom, spoiled == 0.0f ? top : act_rule::kNan);
  }
  Range range;
#pragma unroll
  for (int i = 0; i < kEach; ++i) range.take(x[i]);
  return range;
}

template <bool kOffsets = false, DType kType, int V>
__device__ __forceinline__ Range range_of(const Raw<kType> (&raw)[V], const QuantizeParams& p, int first, int step) {
  if constexpr (kOffsets) {
    Range range = Range::nothing();
#pragma unroll
    for (int i = 0; i < V; ++i) range.take(range_of<true>(raw[i], p, first + i * step));
    return range;
  }
  if (kType != DType::f32 && p.pairs) {
    Pairs pairs;
#pragma unroll
    for (int i = 0; i < V; ++i) pairs.take(raw[i]);
    return pairs.range<kType>();
  }
  Range range;
#pragma unroll
  for (int i = 0; i < V; ++i) range.take(range_of(raw[i], p, first + i * step));
  return range;
}
/// The bits of the largest |x| of a vector: of f32, or of 16-bit floats before conversion.
template <DType kType>
__device__ __forceinline__ std::uint32_t largest_of(const Raw<kType>& raw, const QuantizeParams& p, int channel) {
  if (kType == DType::f32 || !p.pairs) return range_of(raw, p, channel).largest();
  std::uint32_t largest = 0;
#pragma unroll
  for (std::uint32_t word : raw.word) largest = __vmaxu2(largest, word & 0x7fff7fff);
  return max(largest & 0xffff, largest >> 16);
}
template <DType kType>
__device__ std::uint32_t wide(std::uint32_t largest, const QuantizeParams& p) {
  return kType == DType::f32 || !p.pairs ? largest : __float_as_uint(half_of(largest, 0, kType));
}

// ---- codes

/// The codes of a vector. The inverse is 0 where the range is 0 or NaN; all codes are 0 then.
__device__ __forceinline__ uint2 encode(const float (&x)[kEach], const Rule& rule, bool e4m3) {
  std::uint32_t word[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* v = x + 4 * half;
    if (e4m3) {
      const auto pair = [&](int i) -> std::uint32_t {
        const float2 scaled{act_rule::multiply(v[i], rule.inverse), act_rule::multiply(v[i + 1], rule.inverse)};
        return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
      };
      word[half] = rule.inverse == 0.0f ? 0 : __byte_perm(pair(0), pair(2), 0x5410);
    } else {
      word[half] = encode_four_s8(v, rule);
    }
  }
  return {word[0], word[1]};
}

/// The codes of a vector: the rule's, or those that are given.
template <bool kOffsets = false, DType kType>
__device__ __forceinline__ uint2 codes_of(const Raw<kType>& raw, const QuantizeParams& p, int channel, const Rule& rule,
                                          bool e4m3) {
  if constexpr (kType == DType::s8) {
    return {raw.word[0], raw.word[1]};
  } else {
    float x[kEach];
    unpack(x, raw, p.source, channel);
#pragma unroll
    for (int i = 0; kOffsets && i < kEach; ++i) x[i] -= rule.low;
    return encode(x, rule, e4m3);
  }
}

/// Codes of channels past K are `past`, of which there are four in a word.
__device__ __forceinline__ uint2 only(uint2 codes, int count, std::uint32_t past = 0) {
  if (count >= kEach) return codes;
  const std::uint64_t mask = (std::uint64_t{1} << (8 * max(count, 0))) - 1;
  const auto low = static_cast<std::uint32_t>(mask), high = static_cast<std::uint32_t>(mask >> 32);
  return {(codes.x & low) | (past & ~low), (codes.y & high) | (past & ~high)};
}

__device__ __forceinline__ void store(uint2 codes, const QuantizeParams& p, std::int64_t row, int channel) {
  std::uint8_t* const to = static_cast<std::uint8_t*>(p.task.codes) + row * p.task.pitch + channel;
  if (p.whole || (p.vector_stores && channel + kEach <= p.columns)) {
    *reinterpret_cast<uint2*>(to) = codes;
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kEach && channel + i < p.columns; ++i)
    to[i] = static_cast<std::uint8_t>((i < 4 ? codes.x : codes.y) >> i % 4 * 8);
}

/// Quantizes and stores a vector; the sum of its codes, or, of halves, 0.
template <bool kHalves, DType kType>
__device__ __forceinline__ std::int32_t finish(const Raw<kType>& raw, const QuantizeParams& p, std::int64_t row, int channel,
                                               const Rule& rule) {
  if (channel >= p.columns) return 0;
  uint2 codes = codes_of(raw, p, channel, rule, p.task.codes_type == DType::e4m3);
  if (!p.whole) codes = only(codes, p.k - channel);
  if constexpr (kHalves) {
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.task.halves) + row * p.task.pitch + channel) = halves_of(codes);
    return 0;
  }
  store(codes, p, row, channel);
  return sum_of(codes);
}

/// The same for products with gpu_n64k128: codes in the order of gpu_tile::interleaved, exchanged between neighbours, and the terms of a
/// fold. Codes past K are the zero point, or with offsets 0, and contribute 0. All lanes of a warp must call this.
template <bool kOffsets, DType kType>
__device__ __forceinline__ void finish_wna8(const Raw<kType>& raw, const QuantizeParams& p, std::int64_t row, int channel,
                                            const Rule& rule, bool exists) {
  const QuantizeTask& t = p.task;
  const std::uint32_t past = kOffsets ? 0 : (static_cast<std::uint32_t>(rule.zero) & 0xffu) * 0x01010101u;
  uint2 codes = codes_of<kOffsets>(raw, p, channel, rule, false);
  if (!p.whole) codes = only(codes, p.k - channel, past);
  std::int32_t sum = sum_of(codes);
  const int fold_lanes = t.fold / kEach;
  for (int lanes = fold_lanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);

  const uint2 interleaved = interleave(codes);
  if (!exists || channel >= p.columns) return;
  store(interleaved, p, row, channel);
  if (static_cast<int>(threadIdx.x) % fold_lanes != 0) return;
  if constexpr (kOffsets) {
    const auto channels = static_cast<float>(min(max(p.k - channel, 0), t.fold));
    float* const to = static_cast<float*>(t.terms) + 3 * (channel / t.fold * t.term_fold + row * t.term_row) - 2 * (row & 1);
    to[0] = rule.scale, to[2] = rule.offset;
    to[4] = fmaf(channels, rule.offset, act_rule::multiply(rule.scale, static_cast<float>(sum)));
    return;
  }
  const float scale = t.token_scales != nullptr ? 1.0f : rule.scale;
  const float second =
      t.zero_points ? __uint_as_float(zero_term(sum - t.fold * rule.zero, rule.zero)) : scale * static_cast<float>(sum);
  const std::int64_t at = channel / t.fold * t.term_fold + row * t.term_row;
  if (t.term_pairs) {
    float* const to = static_cast<float*>(t.terms) + 2 * at - (row & 1);
    to[0] = scale, to[2] = second;
  } else {
    static_cast<float2*>(t.terms)[at] = {scale, second};
  }
  if (t.token_scales != nullptr && channel == 0) t.token_scales[row] = rule.scale;
}

/// The scale and zero point, or offset, of given codes from that channel on; 0 of groups past K, as of those made here.
__device__ __forceinline__ Rule given_rule(const QuantizeParams& p, std::int64_t row, int channel) {
  const QuantizedActs& given = p.task.given;
  const int group = p.group_lanes == 0 ? 0 : channel >> p.group_shift;
  if (group << p.group_shift >= p.k) return {.scale = 0.0f};
  Rule rule{.scale = given.scale, .zero = given.zero};
  if (given.scales != nullptr) rule.scale = __ldcg(given.scales + row * given.scale_row + group * given.scale_group);
  if (given.zeros != nullptr) rule.zero = __ldcg(given.zeros + row * given.zero_row + group * given.zero_group);
  if (given.offsets != nullptr) rule.offset = __ldcg(given.offsets + row * given.zero_row + group * given.zero_group);
  return rule;
}

__device__ inline void store_rule(const QuantizeTask& t, std::int64_t row, std::int64_t group, const Rule& rule) {
  if (t.scales != nullptr) t.scales[row * t.scale_row + group * t.scale_group] = rule.scale;
  if (t.zeros != nullptr) t.zeros[row * t.zero_row + group * t.zero_group] = rule.zero;
}

/// Calls use(row) for the row, or for copies for each row whose place in memory is that one.
template <QuantizeOutput kOutput, class Use>
__device__ __forceinline__ void for_each_row(const QuantizeTask& t, std::int64_t row, Use use) {
  if constexpr (kOutput != QuantizeOutput::copies) {
    use(row);
  } else {
    const std::int32_t* const rows = t.row_of + row * t.divisor;
#pragma unroll 4
    for (int i = 0; i < t.divisor; ++i)
      if (const std::int32_t to = __ldcg(rows + i); to >= 0) use(to);
  }
}

// ---- rows in registers

/// The least number of lanes of a group, among which V rules are divided: V of many rows, and of few.
constexpr int kLeastGroupLanes = 4, kFewestGroupLanes = 2;

struct Largest {
  std::uint32_t bits;
  __device__ void take(Largest other) { bits = max(bits, other.bits); }
};

/// V values of each lane become one: lane l gets value l mod V of all lanes of its group. While a lane has several values it exchanges
/// half of them with its neighbour, so that 4 values among 16 lanes take 5 shuffles, not 16.
template <class Value, int V, class Shuffle>
__device__ __forceinline__ Value share_out(Value (&values)[V], int group_lanes, Shuffle from) {
  static_assert((V & (V - 1)) == 0);
  const int lane = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int bit = 1, left = V; left > 1; bit *= 2, left /= 2) {
    const bool odd = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < left / 2; ++i) {
      const Value even_one = values[2 * i], odd_one = values[2 * i + 1];
      values[i] = odd ? odd_one : even_one;
      values[i].take(from(odd ? even_one : odd_one, bit));
    }
  }
  for (int lanes = V; lanes < group_lanes; lanes *= 2) values[0].take(from(values[0], lanes));
  return values[0];
}

/// V of a thread: few rows are fastest with many threads; with many rows a thread has 64 bytes in flight.
constexpr int kFewVectors = 1;
template <DType kType>
constexpr int kManyVectors = kType == DType::f32 ? 2 : 4;
/// For CTAs of whole rows: three of them leave 40 registers a thread, and so 96 KiB of an SM in flight. Longer rows use twice the vectors
/// of a thread: two CTAs of up to 64 KiB share an SM then, and one reads while the other reduces its range.
constexpr int kWholeThreads = 512;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 750 || __CUDA_ARCH__ >= 1200)
constexpr int kWholeCtas = 2;  // 7.5: an SM has 1024 threads; 12.0: a division would spill some of 40 registers
#else
constexpr int kWholeCtas = 3;
#endif
template <DType kType>
constexpr int kLongVectors = 2 * kManyVectors<kType>;
template <DType kType, int V, bool kWhole>
constexpr int kRowThreads = !kWhole || V == kLongVectors<kType> ? kMaxThreads : kWholeThreads;
/// Codes for copies stay in registers, of which a third CTA would leave too few.
template <DType kType, int V, QuantizeOutput kOutput, bool kWhole>
constexpr int kRowCtas = kRowThreads<kType, V, kWhole> != kWholeThreads || kIsOnline<kOutput> ? 1
                         : kOutput == QuantizeOutput::copies                                  ? 2
                                                                                              : kWholeCtas;

/// The codes of vectors first, first + step, … of a row, which a team has in registers; with their scales, zero points, sums and terms. Of a
/// row that does not exist nothing is written. All threads of the CTA must call this.
template <DType kType, int V, QuantizeOutput kOutput, bool kWhole>
__device__ __forceinline__ void quantize_row(Raw<kType> (&raw)[V], const QuantizeParams& p, const Team& team, std::int64_t row,
                                             bool exists, int first, int step, Range (&ranges)[kMaxWarps],
                                             std::int32_t (&sums)[kMaxWarps]) {
  constexpr bool kOnline = kIsOnline<kOutput>, kOffsets = kOutput == QuantizeOutput::offset_terms;
  const QuantizeTask& t = p.task;
  constexpr int kRules = V == kLongVectors<kType> ? 1 : V;  // one per vector
  // Ranges for zero points of groups take twice the registers: too many where three CTAs share an SM.
  constexpr bool kGroupZeros = kOnline || !kWhole;
  Rule rule[kRules];
  if constexpr (kType == DType::s8) {
#pragma unroll
    for (int i = 0; i < kRules; ++i) rule[i] = given_rule(p, row, first + i * step);
  } else if (t.known) {
#pragma unroll
    for (Rule& r : rule) r = p.known;
  } else if (kRules == V && p.group_lanes != 0) {
    // All lanes of a group get its V ranges, and each makes a rule of one of them: a division is as much as quantizing a vector.
    const int share = team.thread % V;
    Rule own;
    if (kOffsets || (kGroupZeros && t.zero_points)) {
      Range range[V];
#pragma unroll
      for (int i = 0; i < V; ++i) range[i] = range_of<kOffsets>(raw[i], p, first + i * step);
      own = rule_of<kOffsets>(
          t, share_out(range, p.group_lanes, [](Range range, int lanes) {
            return Range{__shfl_xor_sync(kAllLanes, range.high, lanes), __shfl_xor_sync(kAllLanes, range.low, lanes)};
          }));
    } else {
      Largest largest[V];
#pragma unroll
      for (int i = 0; i < V; ++i) largest[i].bits = largest_of(raw[i], p, first + i * step);
      own = symmetric_rule(t, wide<kType>(share_out(largest, p.group_lanes,
                                                    [](Largest largest, int lanes) {
                                                      return Largest{__shfl_xor_sync(kAllLanes, largest.bits, lanes)};
                                                    })
                                              .bits,
                                          p));
    }
    const int at = first + share * step, place = team.thread & (p.group_lanes - 1);
    const int group = at >> p.group_shift;  // it begins before K, even if this lane's vector does not
    if (place == share && group << p.group_shift < p.k && exists)
      for_each_row<kOutput>(t, row, [&](std::int64_t to) { store_rule(t, to, group, own); });
#pragma unroll
    for (int i = 0; i < kRules; ++i) {
      const int from = team.thread % 32 / V * V + i;
      rule[i] = {kOnline ? __shfl_sync(kAllLanes, own.scale, from) : 0.0f, __shfl_sync(kAllLanes, own.inverse, from),
                 !kOffsets && kGroupZeros ? __shfl_sync(kAllLanes, own.zero, from) : 0};
      if (!kOffsets) continue;
      rule[i].low = __shfl_sync(kAllLanes, own.low, from);
      rule[i].zero = rule[i].inverse == 0.0f ? 0 : -128;  // the rest of act_rule::with_offset follows, and takes no registers
      rule[i].offset = rule[i].low + act_rule::multiply(128.0f, rule[i].scale);
    }
  } else {
    const Rule all = rule_of<kOffsets>(t, team.reduce(range_of<kOffsets>(raw, p, first, step), ranges));
    if (team.thread == 0 && exists) for_each_row<kOutput>(t, row, [&](std::int64_t to) { store_rule(t, to, 0, all); });
#pragma unroll
    for (Rule& r : rule) r = all;
  }

  if constexpr (kOutput == QuantizeOutput::copies) {
    uint2 codes[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      raw[i].keep_raw();
      codes[i] = codes_of(raw[i], p, first + i * step, rule[i % kRules], t.codes_type == DType::e4m3);
    }
    if (!exists) return;
    for_each_row<kOutput>(t, row, [&](std::int64_t to) {
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (first + i * step < p.columns) store(codes[i], p, to, first + i * step);
    });
    return;
  }
  std::int32_t sum = 0;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    raw[i].keep_raw();
    if constexpr (kOnline)
      finish_wna8<kOffsets>(raw[i], p, row, first + i * step, rule[i % kRules], exists);
    else if (exists)
      sum += finish<kOutput == QuantizeOutput::halves>(raw[i], p, row, first + i * step, rule[i % kRules]);
  }
  if (t.sums == nullptr) return;
  sum = team.reduce(sum, sums);
  if (team.thread == 0 && exists) t.sums[row * t.sum_row] = sum;
}

/// Whether every group's channels lie in lanes that a warp can divide among itself, or a row has but one.
/// least: lanes of a group.
inline bool lanes_fit(const QuantizeTask& task, int least = kLeastGroupLanes) {
  const bool several = !task.known && task.group != 0 && task.group < task.k;
  return !several || (task.group % (least * kEach) == 0 && task.group <= 32 * kEach &&
                      std::has_single_bit(static_cast<std::uint64_t>(task.group)));
}

inline QuantizeParams params_of(const QuantizeTask& task) {
  QuantizeParams p{};
  p.task = task;
  p.source = act_source(task);
  p.known = act_rule::known(task.scale, task.zero);
  p.k = static_cast<int>(task.k);
  p.columns = static_cast<int>(std::max(task.columns, task.k));
  p.vector_stores = aligned(task.codes, task.pitch, kEach);
  p.pairs = task.type != DType::f32 && task.prescale == nullptr;
  if (!task.known && task.group != 0 && task.group < task.k && lanes_fit(task, kFewestGroupLanes)) {
    p.group_lanes = static_cast<int>(task.group) / kEach;
    p.group_shift = std::countr_zero(static_cast<std::uint64_t>(task.group));
  }
  return p;
}

}  // namespace nibble::cuda
