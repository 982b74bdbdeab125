// f32 arithmetic on the codes of gpu_n64k128, without tensor cores and without a barrier in the main loop.
//
//   CTA   = F fragments (16·F rows) × T tokens, all of K          one token: F = 1, and 4096 rows are 256 CTAs, enough for any
//                                                                 GPU; more: F = 2, T = 4, 16 products for each load of x
//   warp  = records w, w + W, w + 2W, ... of the CTA's row tile          a pipeline of its own: no warp waits for another
//     codes   global → registers, 16 bytes a lane, up to a record ahead
//     slots   global → registers a record ahead → the warp's shared memory, as f32
//     x       global → registers → the warp's shared memory, as f32, in the order in which lanes read it
//     sums    lane 4g+t holds of each 16 channels 2t 2t+1 2t+8 2t+9, of rows g and g+8: a float4 of x serves 8·F weights
//   end   = sum over t by shuffles, over the warps through shared memory in order; epilogue
//
// Per 8 weights of 4 bits: one shift, 8 masks, 8 subtractions (fused with the shift to unit weight), 8·T products. T = 8 would
// halve the share of unpacking once more, from a third, but 64 sums and what feeds them do not fit into 128 registers.
//
// A weight is (u − z) exactly, or the number that a float code is, and the scale multiplies the sum of a group. Where the zero is no integer (offset, real), the weight is
// computed in f32 first: Σu·x and z·Σx as separate sums would lose accuracy by cancellation. So it is where a slot has 8 or 16 channels:
// a sum of so few products is no longer cheaper to scale than they are.
//
// Which records a warp gets, and so the order of every sum, depends on K only. F and T, which depend on M, change no bit.
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/tasks/linear_simt.hpp"

#include <algorithm>
#include <limits>

#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/device/opaque.cuh"
#include "kernels/cuda/weights/float_codes.cuh"

namespace nibble::cuda {
namespace {

using gpu_tile::kChannels;
using gpu_tile::kFragmentRows;
using gpu_tile::kFragments;

/// The most warps that split K: with 4096 channels each has two records, and both are in flight at once.
constexpr int kMaxWarps = 16;
constexpr int kQuarters = 4;  // of a record: 32 channels, which have one slot, or several short ones
constexpr std::uint32_t kAllLanes = 0xffffffffu;

struct Params {
  const std::uint8_t* records;
  const void* x;
  std::int64_t x_stride;
  const std::int32_t* perm;
  const float* prescale;
  int m, n, k;
  int tile_records, record_bytes;
  int slots, slots_offset, slot_bytes, zeros_offset;
  int token_blocks;
  int warp_floats;  // of a warp's shared memory: x, slots
  DType a_dtype, scale_type, zero_type;
  ZeroKind zero;
  float zero_base;
  bool in_vectors;      // x: four channels are one aligned load, without permutation or prescale
  ExpertTiles experts;  // without tiles: of one weight, whose token blocks have T rows of A
  epilogue::Element epilogue;
};

/// The tile that a token block of T rows is of.
template <int T>
__device__ __forceinline__ ExpertTile tile_of(const Params& p, int token_block) {
  return p.experts.tiles[token_block / (kSimtExpertRows / T)];
}
/// The rows of A of a token block, and their weight. Past the last tile it has no rows.
struct Block {
  int first, end;  // rows of A; what is past the end is zero
  const std::uint8_t* records;
};
template <int T>
__device__ __forceinline__ Block block_of(const Params& p, int token_block) {
  if (p.experts.tiles == nullptr) return {token_block * T, p.m, p.records};
  constexpr int kBlocks = kSimtExpertRows / T;  // of a tile
  if (token_block / kBlocks >= __ldcg(&p.experts.count->tiles)) return {0, 0, p.records};
  const ExpertTile rows = tile_of<T>(p, token_block);
  return {rows.first + token_block % kBlocks * T, rows.first + rows.rows, p.records + rows.expert * p.experts.weight_pitch};
}
/// Whether row t of a block exists. The first always does, so that blocks of one need not keep their end.
template <int T>
__device__ __forceinline__ bool exists(int token, int t, int end) {
  return T == 1 || token + t < end;
}

// --- x: a lane has channels 4·lane … +3 of a record --------------------------------------------------------------------------
//
// In shared memory, float4 number 4·block + t of a token holds channels 2t 2t+1 2t+8 2t+9 of the block: the lane writes two
// halves of two neighbours. Channels past K and tokens past M are zero.

/// The position of the lane's first two channels; the other two are 4 floats further.
__device__ __forceinline__ float* first_pair(float* x, int lane) {
  const int block = lane / 4, pair = lane % 4 * 2;
  return x + (block * 4 + pair % 4) * 4 + pair / 4 * 2;
}

/// A record's x in flight, in aligned vectors.
template <int T>
struct Activations {
  uint4 raw[T];  // as stored, so that nothing waits for the load before store(); of 16-bit types two words

  __device__ __forceinline__ void load(const Params& p, int record, int token, int end, int lane) {
    const int first = record * kChannels + lane * 4, bytes = p.a_dtype == DType::f32 ? 4 : 2;
    const auto* from = static_cast<const std::uint8_t*>(p.x) + (token * p.x_stride + first) * bytes;
#pragma unroll
    for (int t = 0; t < T; ++t, from += p.x_stride * bytes) {
      raw[t] = make_uint4(0, 0, 0, 0);
      if (!exists<T>(token, t, end) || first >= p.k) continue;
      if (p.a_dtype == DType::f32) {
        raw[t] = __ldg(reinterpret_cast<const uint4*>(from));
      } else {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
        raw[t].x = v.x, raw[t].y = v.y;
      }
    }
  }

  __device__ __forceinline__ void store(const Params& p, float* x, int lane) const {
    float* const to = first_pair(x, lane);
#pragma unroll
    for (int t = 0; t < T; ++t) {
      float4 v =
          make_float4(__uint_as_float(raw[t].x), __uint_as_float(raw[t].y), __uint_as_float(raw[t].z), __uint_as_float(raw[t].w));
      if (p.a_dtype != DType::f32)
        v = make_float4(half_of(raw[t].x, 0, p.a_dtype), half_of(raw[t].x, 1, p.a_dtype), half_of(raw[t].y, 0, p.a_dtype),
                        half_of(raw[t].y, 1, p.a_dtype));
      *reinterpret_cast<float2*>(to + t * kChannels) = make_float2(v.x, v.y);
      *reinterpret_cast<float2*>(to + t * kChannels + 4) = make_float2(v.z, v.w);
    }
  }
};

/// The same, element by element: permuted, prescaled or unaligned.
template <int T>
__device__ __forceinline__ void gather_activations(const Params& p, int record, int token, int end, float* x, int lane) {
  float* const to = first_pair(x, lane);
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int k = record * kChannels + lane * 4 + i;
    const int channel = k >= p.k ? 0 : p.perm != nullptr ? __ldg(p.perm + k) : k;
    const float factor = p.prescale != nullptr ? __ldg(p.prescale + channel) : 1.0f;
    std::int64_t at = token * p.x_stride + channel;
#pragma unroll
    for (int t = 0; t < T; ++t, at += p.x_stride)
      to[t * kChannels + i / 2 * 4 + i % 2] =
          exists<T>(token, t, end) && k < p.k ? load_float(p.x, at, p.a_dtype) * factor : 0.0f;
  }
}

// --- slots: scales and zeros of a group --------------------------------------------------------------------------------------

/// Two neighbours of a column of a slot: rows g and g+8 of a fragment.
__device__ __forceinline__ uint2 load_pair(const std::uint8_t* column, int position, DType type) {
  if (type == DType::f32) return __ldg(reinterpret_cast<const uint2*>(column + position * 4));
  return make_uint2(__ldg(reinterpret_cast<const std::uint32_t*>(column + position * 2)), 0);
}
__device__ __forceinline__ float2 as_floats(uint2 raw, DType type) {
  if (type == DType::f32) return make_float2(__uint_as_float(raw.x), __uint_as_float(raw.y));
  return make_float2(half_of(raw.x, 0, type), half_of(raw.x, 1, type));
}

/// How the scales of a record are applied.
enum class Scaling {
  sums,          // to the sum of a group
  weights,       // to each weight: the zero is no integer
  short_groups,  // to each weight: slots have 8 or 16 channels, zeros are of any kind
};

/// Up to four of a record's slots in flight: lane 4g+t loads one of them, of rows g and g+8.
template <int F, Scaling kScaling>
struct Slots {
  /// Zeros that are no integers, which take a register more, are never applied to sums.
  static constexpr bool kWideZeros = kScaling != Scaling::sums;
  uint2 scales[F], zeros[F];

  /// Of the record that begins `to_record` bytes behind `from`.
  __device__ __forceinline__ void load(const Params& p, const std::uint8_t* from, int to_record, int fragment, int lane,
                                       int number) {
    const std::uint8_t* slot = from + (to_record + p.slots_offset + number * p.slot_bytes);
#pragma unroll
    for (int f = 0; f < F; ++f) {
      const int position = gpu_tile::slot_position((fragment + f) * kFragmentRows + lane / 4);
      scales[f] = load_pair(slot, position, p.scale_type);
      if (p.zero == ZeroKind::integer)
        zeros[f].x = __ldg(reinterpret_cast<const std::uint16_t*>(slot + p.zeros_offset + position));
      else if (kWideZeros && p.zero != ZeroKind::none)
        zeros[f] = load_pair(slot + p.zeros_offset, position, p.zero_type);
    }
  }

  /// Writes to shared memory: [slot][fragment][g] of scales of rows g, g+8, zeros of rows g, g+8; integer zeros with their base.
  __device__ __forceinline__ void store(const Params& p, float4* to, int lane, int number) const {
    if (number >= p.slots) return;
#pragma unroll
    for (int f = 0; f < F; ++f) {
      const float2 s = as_floats(scales[f], p.scale_type);
      float2 z = make_float2(p.zero_base, p.zero_base);
      if (p.zero == ZeroKind::integer)
        z.x += static_cast<float>(zeros[f].x & 0xff), z.y += static_cast<float>(zeros[f].x >> 8);
      else if (kWideZeros && p.zero != ZeroKind::none)
        z = as_floats(zeros[f], p.zero_type);
      to[(number * F + f) * 8 + lane / 4] = make_float4(s.x, s.y, z.x, z.y);
    }
  }
};
/// Shared memory of one slot.
NIBBLE_HOST_DEVICE constexpr int slot_floats(int fragments) { return fragments * kFragmentRows * 2; }

/// A group of the lane's rows g and g+8 of each fragment.
template <int F, Scaling kScaling>
struct Group {
  float scale[F][2];
  float zero[F][2];    // what is subtracted from a code, exactly
  float real[F][2];    // subtracted next, of scaled weights
  float offset[F][2];  // added after scaling, of scaled weights

  __device__ __forceinline__ void take(const Params& p, const float4* slot, int lane) {
#pragma unroll
    for (int f = 0; f < F; ++f) {
      const float4 v = slot[f * 8 + lane / 4];
      scale[f][0] = v.x, scale[f][1] = v.y;
      if constexpr (kScaling != Scaling::sums) {
        const bool is_offset = p.zero == ZeroKind::offset;
        // An integer zero is stored with its base.
        const float base = kScaling == Scaling::short_groups && p.zero != ZeroKind::real ? p.zero_base : 0.0f;
        zero[f][0] = zero[f][1] = p.zero_base;
        real[f][0] = is_offset ? 0.0f : v.z - base, real[f][1] = is_offset ? 0.0f : v.w - base;
        offset[f][0] = is_offset ? v.z : 0.0f, offset[f][1] = is_offset ? v.w : 0.0f;
      } else {
        zero[f][0] = v.z, zero[f][1] = v.w;
      }
    }
  }
};

// --- codes -------------------------------------------------------------------------------------------------------------------

/// u − z, exactly: 2²³ + u·2^shift, scaled to a unit of 1, minus 2^(23−shift) + z, in one fused operation.
template <int kShift>
__device__ __forceinline__ float less_zero(std::uint32_t magic, float zero) {
  constexpr float kUnit = 1.0f / (1 << kShift);
  return fmaf(__uint_as_float(magic), kUnit, -(kMagic * kUnit + zero));
}

/// The 8 weights of a lane's word(s): [row g, row g+8][channels 2t 2t+1 2t+8 2t+9], less z.
template <Codes kCodes>
__device__ __forceinline__ void unpack(float (&w)[2][4], std::uint32_t word0, std::uint32_t word1, float, float) {
  static_assert(gpu_tile::are_floats(kCodes));  // they have no zeros
  constexpr int kBits = gpu_tile::bits(kCodes);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int half = i % 2, a = i / 2;
    w[a % 2][a / 2 * 2 + half] = float_value<kCodes>((kBits == 4 || a < 2 ? word0 : word1) >> code_shift(kBits, a, half));
  }
}
template <>
__device__ __forceinline__ void unpack<Codes::u4>(float (&w)[2][4], std::uint32_t word, std::uint32_t, float z0, float z1) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t v = word >> (16 * half);
    w[0][half] = less_zero<0>((v & 0x000fu) | kMagicBits, z0);
    w[1][half] = less_zero<4>((v & 0x00f0u) | kMagicBits, z1);
    w[0][2 + half] = less_zero<8>((v & 0x0f00u) | kMagicBits, z0);
    w[1][2 + half] = less_zero<12>((v & 0xf000u) | kMagicBits, z1);
  }
}
template <>
__device__ __forceinline__ void unpack<Codes::u8>(float (&w)[2][4], std::uint32_t word0, std::uint32_t word1, float z0,
                                                  float z1) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int half = i % 2, a = i / 2;
    w[a % 2][a / 2 * 2 + half] =
        less_zero<0>(__byte_perm(a < 2 ? word0 : word1, kMagicBits, 0x7440 + a % 2 * 2 + half), a % 2 != 0 ? z1 : z0);
  }
}

// --- the kernel --------------------------------------------------------------------------------------------------------------

/// Codes of a record: vectors of 16 bytes a lane and fragment.
template <int kBits>
inline constexpr int kSteps = kChannels / gpu_tile::step_channels(kBits);

/// With few tokens bytes in flight are the limit; with many, registers for sums.
template <int T>
inline constexpr bool kFew = T == 1;
/// Steps of codes requested ahead.
template <int T>
inline constexpr int kAhead = kFew<T> ? 2 : 1;

template <Codes kCodes, Scaling kScaling, int F, int T>
struct Sums {
  static constexpr int kBits = gpu_tile::bits(kCodes);
  float acc[F][2][T] = {};
  uint4 codes[kAhead<T>][F];

  /// `record`: where the lane's first vector of it lies.
  __device__ __forceinline__ void request(const std::uint8_t* record, int step) {
#pragma unroll
    for (int f = 0; f < F; ++f)
      codes[step % kAhead<T>][f] = __ldg(reinterpret_cast<const uint4*>(record + gpu_tile::vector_offset(step, f, 0)));
  }

  /// acc += this record's weights × x; meanwhile requests codes of the warp's next record, `to_next` bytes on, if there is one.
  __device__ __forceinline__ void multiply(const Params& p, const std::uint8_t* record, int to_next, bool more, int lane,
                                           const float4* slot, const float4* x) {
    constexpr int kQuartersAStep = kQuarters / kSteps<kBits>;
    constexpr bool kSums = kScaling == Scaling::sums, kShort = kScaling == Scaling::short_groups;
    const int last = kShort ? 0 : kQuarters / p.slots - 1;                   // quarter & last: the place in the group
    const int to_upper = p.slots == kChannels / 8 ? slot_floats(F) / 4 : 0;  // from the slot of channels 0 … 7 to that of 8 … 15
    x += lane % 4;
    Group<F, kScaling> group, upper;  // upper: of channels 8 … 15 of a block, where they have a slot of their own
    float dot[F][2][T] = {};
#pragma unroll kAhead < T>
    for (int step = 0; step < kSteps<kBits>; ++step) {
      uint4 now[F];
#pragma unroll
      for (int f = 0; f < F; ++f) now[f] = codes[step % kAhead<T>][f];
      const int then = step + kAhead<T>;
      if (then < kSteps<kBits>)
        request(record, then);
      else if (more)
        request(record + to_next, then - kSteps<kBits>);
#pragma unroll 1
      for (int q = 0; q < kQuartersAStep; ++q) {
        const int quarter = step * kQuartersAStep + q;
        if (!kShort && (quarter & last) == 0) {
          group.take(p, slot, lane);
          slot += slot_floats(F) / 4;
        }
#pragma unroll(kFew <T> ? 2 : 1)       // loading x for a later block would spill sums
        for (int b = 0; b < 2; ++b) {  // blocks of 16 channels
          if constexpr (kShort) {
            group.take(p, slot, lane);
            upper.take(p, slot + to_upper, lane);
            slot += slot_floats(F) / 4 + to_upper;
          }
          float w[F][2][4];
#pragma unroll
          for (int f = 0; f < F; ++f) {
            unpack<kCodes>(w[f], now[f].x, now[f].y, group.zero[f][0], group.zero[f][1]);
            if constexpr (kBits == 4)  // the next block's codes move up
              now[f].x = now[f].y, now[f].y = now[f].z, now[f].z = now[f].w;
            else
              now[f].x = now[f].z, now[f].y = now[f].w;
            if constexpr (!kSums) {
#pragma unroll
              for (int i = 0; i < 8; ++i) {
                const auto& of = kShort && i % 4 >= 2 ? upper : group;
                float& v = w[f][i / 4][i % 4];
                v = fmaf(v - of.real[f][i / 4], of.scale[f][i / 4], of.offset[f][i / 4]);
              }
            }
          }
#pragma unroll
          for (int t = 0; t < T; ++t) {
            const float4 v = x[t * (kChannels / 4) + (quarter * 2 + b) * 4];
#pragma unroll
            for (int f = 0; f < F; ++f)
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                float& sum = kSums ? dot[f][r][t] : acc[f][r][t];
                sum = fmaf(w[f][r][0], v.x, sum);
                sum = fmaf(w[f][r][1], v.y, sum);
                sum = fmaf(w[f][r][2], v.z, sum);
                sum = fmaf(w[f][r][3], v.w, sum);
              }
          }
        }
        if constexpr (kSums) {
          if (((quarter + 1) & last) != 0) continue;
#pragma unroll
          for (int f = 0; f < F; ++f)  // the group ends
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
              for (int t = 0; t < T; ++t) {
                acc[f][r][t] = fmaf(group.scale[f][r], dot[f][r][t], acc[f][r][t]);
                dot[f][r][t] = 0.0f;
              }
        }
      }
    }
  }
};

/// Few tokens: two CTAs an SM, 32 warps whose loads fill the memory pipe. Many: one, with 128 registers a lane for the sums; short groups
/// always, whose constants do not fit into 64.
template <Codes kCodes, Scaling kScaling, int F, int T>
__global__ void __launch_bounds__(32 * kMaxWarps, kFew<T>&& kScaling != Scaling::short_groups ? 2 : 1)
    linear_simt_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) float shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  // Token blocks of the same rows run together: all but one find the codes in L2.
  const int rows = static_cast<int>(blockIdx.x) / p.token_blocks;
  const Block block = block_of<T>(p, static_cast<int>(blockIdx.x) % p.token_blocks);
  const int token = block.first;
  if (token >= block.end) return;
  const int tile = rows * F / kFragments, fragment = rows * F % kFragments;
  const auto mine = [&](int of_lane) { return gpu_tile::vector_offset(0, fragment, of_lane); };
  const std::uint8_t* codes =
      block.records + (static_cast<std::int64_t>(tile) * p.tile_records + warp) * p.record_bytes + mine(lane);
  const int to_next = warps * p.record_bytes;
  constexpr bool kShort = kScaling == Scaling::short_groups;
  const auto my_slot = [&](int of_lane) { return of_lane % (kShort ? kQuarters : p.slots); };
  float* const x = shared + warp * p.warp_floats;
  float4* const slot = reinterpret_cast<float4*>(x + T * kChannels);

  Sums<kCodes, kScaling, F, T> sums;
  Slots<F, kScaling> slots;
  Activations<T> activations;
#pragma unroll
  for (int step = 0; step < kAhead<T>; ++step) sums.request(codes, step);
  slots.load(p, codes, -mine(lane), fragment, lane, my_slot(lane));
  if (kFew<T> && p.in_vectors) activations.load(p, warp, token, block.end, lane);

  for (int r = warp; r < p.tile_records; r += warps, codes += to_next) {
    const bool more = r + warps < p.tile_records;
    if (p.in_vectors) {
      if (!kFew<T>) activations.load(p, r, token, block.end, lane);  // other warps hide the latency
      activations.store(p, x, lane);
    } else {
      gather_activations<T>(p, r, token, block.end, x, lane);
    }
    slots.store(p, slot, lane, lane % kQuarters);
    if constexpr (kShort) {  // not ahead: no registers are free
#pragma unroll 1
      for (int number = kQuarters + lane % kQuarters; number < p.slots; number += kQuarters) {
        Slots<F, kScaling> others;
        others.load(p, codes, -mine(lane), fragment, lane, number);
        others.store(p, slot, lane, number);
      }
    }
    __syncwarp();
    const int of_slots = kFew<T> ? lane : opaque(lane);  // no registers are free to keep the places of slots
    if (more) slots.load(p, codes, to_next - mine(of_slots), fragment, of_slots, my_slot(of_slots));
    if (kFew<T> && p.in_vectors && more) activations.load(p, r + warps, token, block.end, lane);
    sums.multiply(p, codes, to_next, more, lane, slot, reinterpret_cast<const float4*>(x));
    __syncwarp();
  }

  // Sum over the four lanes of a row, then over the warps in order. A warp's sums take the place of its x.
  const int cta = opaque(static_cast<int>(blockIdx.x));  // divided once more: no register is free to keep the row tile
  constexpr int kRows = F * kFragmentRows;
  static_assert(kRows <= kChannels);
#pragma unroll
  for (int f = 0; f < F; ++f)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int t = 0; t < T; ++t) {
        float sum = sums.acc[f][r][t];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (lane % 4 == 0) x[t * kRows + f * kFragmentRows + r * 8 + lane / 4] = sum;
      }
  __syncthreads();
  for (int e = 2 * static_cast<int>(threadIdx.x); e < T * kRows; e += 2 * static_cast<int>(blockDim.x)) {
    const int m = token + e / kRows, n = cta / p.token_blocks * kRows + e % kRows;
    if (!exists<T>(token, e / kRows, block.end) || n >= p.n) continue;
    float sum = shared[e], next = shared[e + 1];
    for (int w = 1; w < warps; ++w) sum += shared[w * p.warp_floats + e], next += shared[w * p.warp_floats + e + 1];
    if (p.experts.scale2 != nullptr) {
      const float scale = p.experts.scale2[tile_of<T>(p, cta % p.token_blocks).expert];
      sum = epilogue::multiply(sum, scale), next = epilogue::multiply(next, scale);
    }
    p.epilogue.store_two(m, n, sum, next, p.n);
  }
}

// --- choice and launch -------------------------------------------------------------------------------------------------------

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
bool aligned(const void* p, std::uintptr_t to) { return reinterpret_cast<std::uintptr_t>(p) % to == 0; }

/// From four tokens on arithmetic is the limit; two fragments per float4 of x keep shared memory from being it.
constexpr int fragments_for(int tokens) { return tokens >= 4 ? 2 : 1; }

constexpr int warp_floats(int tokens, int slots) { return tokens * kChannels + slots * slot_floats(fragments_for(tokens)); }

/// The blocks of so many tokens.
int token_blocks(const Params& p, int tokens) {
  return p.experts.tiles == nullptr ? ceil_div(p.m, tokens) : p.experts.most * (kSimtExpertRows / tokens);
}

/// The most tokens of a CTA that fit into shared memory and leave enough CTAs for most SMs.
cudaError_t choose_tokens(const Params& p, int warps, int& tokens) {
  int device = 0, sms = 0, smem = 0;
  if (const cudaError_t e = most_shared(device, smem)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
  const auto ctas = [&] { return std::int64_t{token_blocks(p, tokens)} * ceil_div(p.n, fragments_for(tokens) * kFragmentRows); };
  tokens = p.m > 1 ? 4 : 1;
  if (warps * warp_floats(tokens, p.slots) * 4 > smem || ctas() * 4 < sms * 3) tokens = 1;
  return cudaSuccess;
}

template <Codes kCodes, Scaling kScaling, int T>
cudaError_t launch(Params& p, int warps, cudaStream_t stream) {
  constexpr int F = fragments_for(T);
  p.token_blocks = token_blocks(p, T);
  p.warp_floats = warp_floats(T, p.slots);
  const std::int64_t ctas = static_cast<std::int64_t>(p.token_blocks) * ceil_div(p.n, F * kFragmentRows);
  if (ctas > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  const int smem = warps * p.warp_floats * 4;
  const auto& kernel = kLaunchable<linear_simt_kernel<kCodes, kScaling, F, T>>;
  if (const cudaError_t e = kernel.allow_all_shared()) return e;
  return launch_after(kernel.kernel, static_cast<unsigned>(ctas), static_cast<unsigned>(warps * 32), smem, stream, p);
}

template <Codes kCodes, Scaling kScaling>
cudaError_t launch(Params& p, cudaStream_t stream) {
  const int warps = std::min(kMaxWarps, p.tile_records);
  int tokens = 0;
  if (const cudaError_t e = choose_tokens(p, warps, tokens)) return e;
  switch (tokens) {
    case 1: return launch<kCodes, kScaling, 1>(p, warps, stream);
    default: return launch<kCodes, kScaling, 4>(p, warps, stream);
  }
}

template <Codes kCodes>
cudaError_t launch(Params& p, cudaStream_t stream) {
  if (p.slots > kQuarters) return launch<kCodes, Scaling::short_groups>(p, stream);
  if constexpr (gpu_tile::are_floats(kCodes)) return launch<kCodes, Scaling::sums>(p, stream);
  if (p.zero == ZeroKind::none || p.zero == ZeroKind::integer) return launch<kCodes, Scaling::sums>(p, stream);
  return launch<kCodes, Scaling::weights>(p, stream);
}

}  // namespace

cudaError_t linear_simt(const LinearTask& task, cudaStream_t stream) {
  const DeviceWeight& w = task.weight;
  const gpu_tile::Geometry& geo = w.geometry;
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max() - kChannels;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || geo.n > kMax || geo.k > kMax) return cudaErrorInvalidValue;
  Params p{};
  p.records = static_cast<const std::uint8_t*>(w.records);
  p.x = task.x;
  p.x_stride = task.x_stride;
  p.perm = w.perm;
  p.prescale = w.prescale;
  p.m = task.m;
  p.n = static_cast<int>(geo.n);
  p.k = static_cast<int>(geo.k);
  p.tile_records = geo.records();
  p.record_bytes = geo.record_bytes();
  p.slots = geo.slots();
  p.slots_offset = geo.scale_offset(0);
  p.slot_bytes = geo.slot_bytes();
  p.zeros_offset = geo.zero_offset(0) - geo.scale_offset(0);
  p.a_dtype = task.a_dtype;
  p.scale_type = w.scale_type;
  p.zero_type = w.zero_type;
  p.zero = w.zero;
  p.zero_base = w.zero_base;
  p.in_vectors = w.perm == nullptr && w.prescale == nullptr && geo.k % 4 == 0 && task.x_stride % 4 == 0 &&
                 aligned(task.x, task.a_dtype == DType::f32 ? 16 : 8);
  p.experts = task.experts;
  p.epilogue = task.epilogue;
  switch (w.codes) {
    case Codes::u4: return launch<Codes::u4>(p, stream);
    case Codes::u8: return launch<Codes::u8>(p, stream);
    case Codes::e2m1: return launch<Codes::e2m1>(p, stream);
    case Codes::e4m3: return launch<Codes::e4m3>(p, stream);
    case Codes::e5m2: return launch<Codes::e5m2>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace nibble::cuda
