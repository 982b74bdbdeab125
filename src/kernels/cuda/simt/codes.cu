// int8 activations times the integer codes of gpu_n64k128 by dp4a, without tensor cores and without a barrier in the main loop: every
// group of the weight, every block of activations, zero points and offsets of both sides.
//
//   CTA   = F fragments (16·F rows) × T tokens, all of K       one token: F = 1, so that few rows are many CTAs; more: F = 2, T = 4,
//                                                              16 of whose sums, and as many products, leave no register for more
//   warp  = records w, w + W, w + 2W, ... of the CTA's rows            a pipeline of its own: no warp waits for another
//     weights global → registers, 16 bytes a lane, a vector ahead or two
//     q       global → registers → the warp's shared memory, in the order of the codes of a lane
//     terms   scale and zero point of a token in each quarter of a record, and of a row in each slot: global → shared memory, as f32
//   end   = sum over the lanes of a row by shuffles, over the warps through shared memory in order; epilogue
//
// A record in a lane. Lane 4g+t has of each block of 16 channels those numbered 2t 2t+8 2t+1 2t+9, of rows g and g+8 of a fragment. They are
// the bytes of one word per row, two operations away from the packed codes (signed_codes); q is put in the same order when it is written
// to shared memory, and a word of q serves 2·F words of weights:
//
//   channels   0               32              64              96             128       of a record: 4 quarters of 2 blocks
//              ├── quarter 0 ──┼── quarter 1 ──┼── quarter 2 ──┼── quarter 3 ──┤
//   folds      ├───────────────────────────────┼───────────────────────────────┤         here of 64 channels: their end scales the sums
//   pieces     ├─────────┼─────┼───┼───────────┼ ...                                     blocks of 20 channels end anywhere
//
// A fold is a run of channels that share all their scales: 128, 64 or 32. Where 32 does not divide blocks and groups, pieces take their
// place: they end where a block, a slot or a quarter does, and what a piece does not have of a word of q is masked.
//
// What a fold adds to D, with c the signed code, z the rest of the weight's zero point, n the channels, and all sums over the fold:
//
//   v = Σ q·c − z·Σ q        y = Σ c − z·n        integers below 2²⁴, so exact as f32, if z is one
//   s_w·s_a·v                            activations without zero points
//   s_w·s_a·(v − z_a·y)                  with zero points z_a: exact up to the scales
//   s_w·(s_a·v + o_a·y)                  with offsets o_a
//   + o_w·Σ x                            where the weight has offsets, and x is what q stands for
//
// All of them are linear in the codes, so each lane scales the sums of its own channels, and only f32 sums meet at the end. Where a row and
// a token have one scale each there is no fold (kWhole): a lane's integers grow over all of K, meet in 64 bits, and are scaled once.
//
// Which records a warp gets, and so the order of every sum, depends on K only. F and T, which depend on M, change no bit.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <type_traits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/steps/code_rows.cuh"
#include "kernels/cuda/tasks/codes.hpp"

namespace nibble::cuda {
namespace {

using gpu_tile::kChannels;
using gpu_tile::kFragmentChannels;
using gpu_tile::kFragmentRows;
using gpu_tile::kFragments;

/// The most warps that split K: with 4096 channels each has two records.
constexpr int kMaxWarps = 16;
constexpr int kQuarter = 32;  // channels
constexpr int kQuarters = kChannels / kQuarter;
constexpr std::uint32_t kAllLanes = 0xffffffffu;
constexpr std::int32_t kOnes = 0x01010101;
/// Words of a token in shared memory: those of a record, and two more, so that the rows of four tokens begin in different banks.
constexpr int kTokenWords = kChannels / 4 + 2;

/// What codes are multiplied by: 4 bits are moved to the upper half of a byte, which takes no operation that sign extension would.
template <int kBits>
constexpr int kUnit = kBits == 4 ? 16 : 1;

struct Params {
  CodesTask task;
  int n, k;
  int tile_records, record_bytes;
  int row_blocks, token_blocks;  // of a group
  int fold;                      // channels
  int warp_bytes;                // of shared memory
  float zero_base;               // what a signed code less this, and less the zero point, stands for
  bool weight_zeros, act_zeros;  // whether sums of q, and of codes, are subtracted or added
  bool by_quarters;              // whether a quarter has one scale of activations
  bool vectors;
};

// --- weights -----------------------------------------------------------------------------------------------------------------

/// The words of a block, of rows g and g+8: channels 2t 2t+8 2t+1 2t+9 as signed bytes, less half their range, times kUnit. Of 8 bits a
/// lane has two words of a block, of 4 bits one.
template <int kBits>
__device__ __forceinline__ void signed_codes(std::uint32_t (&rows)[2], std::uint32_t word0, std::uint32_t word1) {
  constexpr std::uint32_t kHalf = 0x80808080u, kUpper = 0xf0f0f0f0u;
  if constexpr (kBits == 4) {
    rows[0] = (word0 << 4 & kUpper) ^ kHalf;
    rows[1] = (word0 & kUpper) ^ kHalf;
  } else {
    rows[0] = __byte_perm(word0, word1, 0x5140) ^ kHalf;
    rows[1] = __byte_perm(word0, word1, 0x7362) ^ kHalf;
  }
}

/// The scales and zeros (or offsets) of rows g and g+8 in a slot. Zeros are what is left to subtract from a signed code, times kUnit;
/// scales are divided by it.
struct SlotTerms {
  float scale[2], zero[2];
};
template <int kBits>
__device__ __forceinline__ SlotTerms slot_terms(const Params& p, const std::uint8_t* record, int slot, int row) {
  const DeviceWeight& w = p.task.weight;
  const gpu_tile::Geometry& geo = w.geometry;
  const std::uint8_t *const scales = record + geo.scale_offset(slot), *const zeros = record + geo.zero_offset(slot);
  SlotTerms terms;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = gpu_tile::slot_position(row + 8 * r);
    terms.scale[r] = load_float(scales, at, w.scale_type) * (1.0f / kUnit<kBits>);
    switch (w.zero) {
      case ZeroKind::none: terms.zero[r] = p.zero_base * kUnit<kBits>; break;
      case ZeroKind::integer: terms.zero[r] = (p.zero_base + static_cast<float>(zeros[at])) * kUnit<kBits>; break;
      case ZeroKind::real: terms.zero[r] = (p.zero_base + load_float(zeros, at, w.zero_type)) * kUnit<kBits>; break;
      case ZeroKind::offset: terms.zero[r] = load_float(zeros, at, w.zero_type); break;
    }
  }
  return terms;
}

// --- activations -------------------------------------------------------------------------------------------------------------

/// Scale, and zero point or offset, of a token at a channel.
__device__ __forceinline__ float2 act_terms(const Params& p, std::int64_t row, int channel) {
  const QuantizedActs& a = p.task.acts;
  const std::int64_t block = a.group == 0 ? 0 : channel / a.group;
  float2 terms{a.scale, static_cast<float>(a.zero)};
  if (a.scales != nullptr) terms.x = __ldcg(a.scales + row * a.scale_row + block * a.scale_group);
  if (a.zeros != nullptr) terms.y = static_cast<float>(__ldcg(a.zeros + row * a.zero_row + block * a.zero_group));
  if (a.offsets != nullptr) terms.y = __ldcg(a.offsets + row * a.zero_row + block * a.zero_group);
  return terms;
}

/// The bytes of lane t's word of a block that are of channels [low, high) of the block.
__device__ __forceinline__ std::uint32_t bytes_within(int t, int low, int high) {
  std::uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int channel = gpu_tile::interleaved(4 * t + i);
    if (channel >= low && channel < high) mask |= 0xffu << 8 * i;
  }
  return mask;
}

/// A warp's shared memory: q of a record, and its terms.
template <int F, int T>
struct WarpMemory {
  std::uint32_t codes[T][kTokenWords];  // of each quarter, lane t's words of both blocks side by side
  float2 terms[kQuarters][T];
  SlotTerms slots[kChannels / gpu_tile::kShortestSpan][F][8];  // as many as a record has
};
template <int F, int T>
constexpr int memory_bytes(int slots) {
  using Memory = WarpMemory<F, T>;
  return static_cast<int>(offsetof(Memory, slots)) + slots * F * 8 * static_cast<int>(sizeof(SlotTerms));
}

template <int kBits, bool kWhole, int F, int T>
__device__ __forceinline__ void fill(const Params& p, WarpMemory<F, T>& to, const std::uint8_t* record, int fragment, int number,
                                     std::int64_t row, int tokens, int lane) {
  constexpr int kBlocks = kChannels / kFragmentChannels;
  const int first = number * kChannels;
#pragma unroll
  for (int i = lane; i < T * kBlocks; i += 32) {
    const int token = i / kBlocks, block = i % kBlocks, channel = first + block * kFragmentChannels;
    uint4 v{};
    if (token < tokens) v = load_codes(p.task.acts, row + token * p.task.groups, channel, p.k, p.vectors, p.task.weight.perm);
    std::uint32_t* const words = &to.codes[token][block / 2 * 8 + block % 2];
    words[0] = __byte_perm(v.x, v.z, 0x5140), words[2] = __byte_perm(v.x, v.z, 0x7362);
    words[4] = __byte_perm(v.y, v.w, 0x5140), words[6] = __byte_perm(v.y, v.w, 0x7362);
  }
  if constexpr (kWhole) return;
  if (p.by_quarters)
    for (int i = lane; i < kQuarters * T; i += 32) {
      const int token = min(i % T, tokens - 1), channel = min(first + i / T * kQuarter, p.k - 1);
      to.terms[i / T][i % T] = act_terms(p, row + token * p.task.groups, channel);
    }
  for (int i = lane; i < p.task.weight.geometry.slots() * F * 8; i += 32)
    to.slots[i / 8 / F][i / 8 % F][i % 8] =
        slot_terms<kBits>(p, record, i / 8 / F, (fragment + i / 8 % F) * kFragmentRows + i % 8);
}

// --- sums --------------------------------------------------------------------------------------------------------------------

/// 1.5·2²³ as an f32, whose unit in the last place is 1: integers of 22 bits that are added to these bits are the number's distance from
/// it. That is an addition where a conversion takes four times as long.
constexpr std::int32_t kMagicSum = 0x4b400000;
constexpr float kMagicValue = 12582912.0f;

template <int kBits, bool kWhole, int F, int T>
struct Sums {
  std::int32_t products[F][2][T];   // Σ q·c of the lane's channels: of a fold, from kMagicSum on, or of all of K
  std::int32_t of_rows[F][2] = {};  // Σ c
  std::int32_t of_tokens[T] = {};   // Σ q
  std::int32_t channels = 0;
  float scaled[kWhole ? 1 : F][2][kWhole ? 1 : T] = {};

  __device__ __forceinline__ Sums() { start(); }
  __device__ __forceinline__ void start() {
#pragma unroll
    for (int f = 0; f < F; ++f)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int t = 0; t < T; ++t) products[f][r][t] = kWhole ? 0 : kMagicSum;
  }

  /// Two blocks of codes, `from` the lane's first words of q. `mask`: the bytes of both words that count.
  template <bool kMasked>
  __device__ __forceinline__ void add(const Params& p, const std::uint32_t (&codes)[2][F][2], const std::uint32_t* from,
                                      uint2 mask) {
    const std::int32_t ones[2] = {static_cast<std::int32_t>(mask.x & kOnes), static_cast<std::int32_t>(mask.y & kOnes)};
    if (p.act_zeros) {
      channels = __dp4a(ones[0], kOnes, __dp4a(ones[1], kOnes, channels));
#pragma unroll
      for (int f = 0; f < F; ++f)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          of_rows[f][r] = __dp4a(static_cast<std::int32_t>(codes[0][f][r]), ones[0],
                                 __dp4a(static_cast<std::int32_t>(codes[1][f][r]), ones[1], of_rows[f][r]));
    }
#pragma unroll
    for (int t = 0; t < T; ++t) {
      uint2 v = *reinterpret_cast<const uint2*>(from + t * kTokenWords);
      if (kMasked) v.x &= mask.x, v.y &= mask.y;
      const auto x = static_cast<std::int32_t>(v.x), y = static_cast<std::int32_t>(v.y);
      if (p.weight_zeros) of_tokens[t] = __dp4a(x, kOnes, __dp4a(y, kOnes, of_tokens[t]));
#pragma unroll
      for (int f = 0; f < F; ++f)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          products[f][r][t] = __dp4a(x, static_cast<std::int32_t>(codes[0][f][r]),
                                     __dp4a(y, static_cast<std::int32_t>(codes[1][f][r]), products[f][r][t]));
    }
  }

  /// The end of a fold or piece: scales its sums and begins anew. `slots`: of row g of each fragment.
  __device__ __forceinline__ void fold(const Params& p, const SlotTerms (*slots)[8], const float2* terms, int g) {
    const bool row_offsets = p.task.weight.zero == ZeroKind::offset, act_offsets = p.task.acts.offsets != nullptr;
    const auto count = static_cast<float>(channels);
    SlotTerms slot[F];
    float zero[F][2], y[F][2];
#pragma unroll
    for (int f = 0; f < F; ++f) {
      slot[f] = slots[f][g];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        zero[f][r] = row_offsets ? p.zero_base * kUnit<kBits> : slot[f].zero[r];
        y[f][r] = fmaf(-zero[f][r], count, static_cast<float>(of_rows[f][r]));
        of_rows[f][r] = 0;
      }
    }
    channels = 0;
#pragma unroll
    for (int t = 0; t < T; ++t) {
      const float2 act = terms[t];
      const auto sum = static_cast<float>(of_tokens[t]);
      of_tokens[t] = 0;
      const float x = act_offsets ? fmaf(act.y, count, act.x * sum) : act.x * fmaf(-act.y, count, sum);
#pragma unroll
      for (int f = 0; f < F; ++f)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float v = __int_as_float(products[f][r][t]) - kMagicValue;
          if (p.weight_zeros) v = fmaf(-zero[f][r], sum, v);
          if (!p.act_zeros)
            v *= act.x;
          else if (act_offsets)
            v = fmaf(act.y, y[f][r], v * act.x);
          else
            v = fmaf(-act.y, y[f][r], v) * act.x;
          scaled[f][r][t] = fmaf(v, slot[f].scale[r], scaled[f][r][t]);
          if (row_offsets) scaled[f][r][t] = fmaf(x, slot[f].zero[r], scaled[f][r][t]);
        }
    }
    start();
  }

  /// Σ (q − z_a)·(c − z) of all of the lane's channels, times kUnit.
  __device__ __forceinline__ std::int64_t exact(int f, int r, int t, std::int32_t zero, std::int32_t act_zero) const {
    const std::int64_t less = std::int64_t{of_rows[f][r]} - std::int64_t{zero} * channels;
    return products[f][r][t] - std::int64_t{zero} * of_tokens[t] - std::int64_t{act_zero} * less;
  }
};

// --- the kernel --------------------------------------------------------------------------------------------------------------

/// Vectors of codes requested ahead: with few tokens bytes in flight are the limit; with many, registers for sums.
template <int T, bool kPieces>
constexpr int kInFlight = T == 1 && !kPieces ? 2 : 1;

template <int kBits, bool kWhole, bool kPieces, int F, int T>
struct Product {
  static constexpr int kAhead = kInFlight<T, kPieces>;
  static constexpr int kSteps = kChannels / gpu_tile::step_channels(kBits), kQuartersAStep = kQuarters / kSteps;
  Sums<kBits, kWhole, F, T> sums;
  uint4 vectors[kAhead][F];

  /// `record`: where the lane's first vector of it lies.
  __device__ __forceinline__ void request(const std::uint8_t* record, int step) {
#pragma unroll
    for (int f = 0; f < F; ++f)
      vectors[step % kAhead][f] = __ldg(reinterpret_cast<const uint4*>(record + gpu_tile::vector_offset(step, f, 0)));
  }

  /// Multiplies record `number`; meanwhile requests vectors of the warp's next one, `to_next` bytes on, if there is one.
  __device__ __forceinline__ void multiply(const Params& p, WarpMemory<F, T>& memory, const std::uint8_t* record, int number,
                                           int to_next, bool more, std::int64_t row, int tokens, int lane) {
    const int first = number * kChannels;
#pragma unroll kAhead
    for (int step = 0; step < kSteps; ++step) {
      uint4 now[F];
#pragma unroll
      for (int f = 0; f < F; ++f) now[f] = vectors[step % kAhead][f];
      const int then = step + kAhead;
      if (then < kSteps)
        request(record, then);
      else if (more)
        request(record + to_next, then - kSteps);
#pragma unroll 1
      for (int i = 0; i < kQuartersAStep; ++i) {
        const int quarter = step * kQuartersAStep + i;
        if (first + quarter * kQuarter >= p.k) break;
        std::uint32_t codes[2][F][2];
#pragma unroll
        for (int f = 0; f < F; ++f) {
          if constexpr (kBits == 4) {
            signed_codes<4>(codes[0][f], now[f].x, 0);
            signed_codes<4>(codes[1][f], now[f].y, 0);
            now[f].x = now[f].z, now[f].y = now[f].w;  // the next quarter's codes move up
          } else {
            signed_codes<8>(codes[0][f], now[f].x, now[f].y);
            signed_codes<8>(codes[1][f], now[f].z, now[f].w);
          }
        }
        const std::uint32_t* const from = &memory.codes[0][quarter * 8 + lane % 4 * 2];
        if constexpr (kPieces)
          add_pieces(p, memory, codes, from, first, quarter, row, tokens, lane);
        else
          add_quarter(p, memory, codes, from, first, quarter, lane);
      }
    }
  }

 private:
  __device__ __forceinline__ void add_quarter(const Params& p, const WarpMemory<F, T>& memory,
                                              const std::uint32_t (&codes)[2][F][2], const std::uint32_t* from, int first,
                                              int quarter, int lane) {
    sums.template add<false>(p, codes, from, {0xffffffffu, 0xffffffffu});
    if constexpr (!kWhole) {
      const int end = (quarter + 1) * kQuarter;
      if (end % p.fold != 0 && first + end < p.k) return;
      sums.fold(p, memory.slots[quarter * kQuarter / p.task.weight.geometry.span], memory.terms[quarter], lane / 4);
    }
  }

  __device__ __forceinline__ void add_pieces(const Params& p, WarpMemory<F, T>& memory, const std::uint32_t (&codes)[2][F][2],
                                             const std::uint32_t* from, int first, int quarter, std::int64_t row, int tokens,
                                             int lane) {
    const int begin = first + quarter * kQuarter, last = min(begin + kQuarter, p.k);
    const int span = p.task.weight.geometry.span, block = p.task.acts.group;
#pragma unroll 1
    for (int at = begin, end = last; at < last; at = end) {
      end = last;
      if constexpr (!kWhole) {
        end = min(end, (at / span + 1) * span);
        if (block != 0) end = min(end, (at / block + 1) * block);
      }
      const uint2 mask{bytes_within(lane % 4, at - begin, end - begin),
                       bytes_within(lane % 4, at - begin - kFragmentChannels, end - begin - kFragmentChannels)};
      sums.template add<true>(p, codes, from, mask);
      if constexpr (!kWhole) {
        if (!p.by_quarters) {
          __syncwarp();  // all lanes have used the terms of the last piece
          if (lane < T) memory.terms[quarter][lane] = act_terms(p, row + min(lane, tokens - 1) * p.task.groups, at);
          __syncwarp();
        }
        sums.fold(p, memory.slots[(at - first) / span], memory.terms[quarter], lane / 4);
      }
    }
  }
};

template <int kBits, bool kWhole, bool kPieces, int F, int T>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) codes_kernel(const __grid_constant__ Params p) {
  using Sum = std::conditional_t<kWhole, std::int64_t, float>;
  constexpr int kRows = F * kFragmentRows;
  extern __shared__ __align__(16) std::uint8_t shared[];
  let_successor_start();
  const CodesTask& task = p.task;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32, group = static_cast<int>(blockIdx.y);
  // Token blocks of the same rows run together: all but one find the codes in L2.
  int token = static_cast<int>(blockIdx.x) % p.token_blocks * T, tokens = min(T, task.m - token);
  const auto* weight = static_cast<const std::uint8_t*>(task.weight.records);
  float scale2 = 1.0f;
  if (task.experts.tiles != nullptr) {
    wait_for_predecessor();
    const int tile = token / kSimtExpertRows, in_tile = token % kSimtExpertRows;
    if (tile >= __ldcg(&task.experts.count->tiles)) return;
    const ExpertTile rows = task.experts.tiles[tile];
    if (in_tile >= rows.rows) return;
    token = rows.first + in_tile, tokens = min(T, rows.rows - in_tile);
    weight += rows.expert * task.experts.weight_pitch;
    if (task.experts.scale2 != nullptr) scale2 = task.experts.scale2[rows.expert];
  }
  const int low = group * task.group_outputs, high = min(p.n, low + task.group_outputs);  // the group's rows
  const int rows = low / kRows + static_cast<int>(blockIdx.x) / p.token_blocks;           // which may have some of others
  if (rows * kRows >= high) return;
  const int tile = rows * F / kFragments, fragment = rows * F % kFragments;
  const auto* const records = weight + task.weight.geometry.record(tile, 0);
  const std::uint8_t* record = records + static_cast<std::int64_t>(warp) * p.record_bytes;
  const int mine = gpu_tile::vector_offset(0, fragment, lane), to_next = warps * p.record_bytes;
  const std::int64_t row = std::int64_t{token} * task.groups + group;
  auto& memory = *reinterpret_cast<WarpMemory<F, T>*>(shared + warp * p.warp_bytes);
  wait_for_predecessor();

  Product<kBits, kWhole, kPieces, F, T> product;
#pragma unroll
  for (int step = 0; step < product.kAhead; ++step) product.request(record + mine, step);
  for (int r = warp; r < p.tile_records; r += warps, record += to_next) {
    fill<kBits, kWhole>(p, memory, record, fragment, r, row, tokens, lane);
    __syncwarp();
    product.multiply(p, memory, record + mine, r, to_next, r + warps < p.tile_records, row, tokens, lane);
    __syncwarp();
  }

  // A warp's sums take the place of its codes.
  Sum* const own = reinterpret_cast<Sum*>(&memory);
#pragma unroll
  for (int f = 0; f < F; ++f) {
    SlotTerms zeros{};
    if constexpr (kWhole) zeros = slot_terms<kBits>(p, records, 0, (fragment + f) * kFragmentRows + lane / 4);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int t = 0; t < T; ++t) {
        Sum sum;
        if constexpr (kWhole)
          sum = product.sums.exact(f, r, t, static_cast<std::int32_t>(zeros.zero[r]),
                                   static_cast<std::int32_t>(act_terms(p, row + min(t, tokens - 1) * task.groups, 0).y));
        else
          sum = product.sums.scaled[f][r][t];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (lane % 4 == 0) own[t * kRows + f * kFragmentRows + r * 8 + lane / 4] = sum;
      }
  }
  __syncthreads();
  const auto product_of = [&](int e, int t, int n) -> float {
    Sum sum = reinterpret_cast<const Sum*>(shared)[e];
    for (int w = 1; w < warps; ++w) sum += reinterpret_cast<const Sum*>(shared + w * p.warp_bytes)[e];
    if constexpr (kWhole) {
      sum /= kUnit<kBits>;  // exact
      if (task.epilogue.sum_bias != nullptr) sum += task.epilogue.sum_bias[n];
      const int in_tile = n % gpu_tile::kRows;
      const float scale =
          load_float(records + task.weight.geometry.scale_offset(0), gpu_tile::slot_position(in_tile), task.weight.scale_type);
      return task.epilogue.out == DType::s32
                 ? __int_as_float(static_cast<std::int32_t>(sum))
                 : __fmul_rn(__fmul_rn(static_cast<float>(sum), act_terms(p, row + t * task.groups, 0).x), scale);
    } else {
      return sum;
    }
  };
  const auto value_of = [&](int e, int t, int n) {
    const float value = product_of(e, t, n);
    return task.experts.scale2 == nullptr ? value : __fmul_rn(value, scale2);
  };
  const bool pairs = task.epilogue.glu_half != 0;  // of a matrix: every second thread stores
  for (int e = static_cast<int>(threadIdx.x); e < T * kRows; e += static_cast<int>(blockDim.x)) {
    const int t = e / kRows, n = rows * kRows + e % kRows, m = token + t;
    if (t >= tokens || n < low || n >= high || (pairs && n % 2 != 0)) continue;
    const float value = value_of(e, t, n);
    if (pairs) {
      task.epilogue.store_two(m, n, value, value_of(e + 1, t, n + 1), p.n);
    } else if (task.pixels == 0) {
      task.epilogue.store(m, n, value);
    } else {
      const epilogue::Pixel pixel{(task.first + m) / task.pixels, (task.first + m) % task.pixels};
      task.epilogue.store_at(pixel.image * task.d.image + pixel.pixel * task.d.pixel + n * task.d.channel, pixel, n, value);
    }
  }
}

// --- choice and launch -------------------------------------------------------------------------------------------------------

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// Two fragments for each word of q keep shared memory from being the limit; of pieces the masks and ends are.
constexpr int fragments_for(int tokens, bool pieces) { return tokens >= 4 && !pieces ? 2 : 1; }

/// Row blocks of a group, which may begin in the middle of one.
int row_blocks(const Params& p, int rows) {
  const int outputs = p.task.group_outputs;
  return outputs >= p.n ? ceil_div(p.n, rows) : ceil_div(outputs, rows) + (outputs % rows == 0 ? 0 : 1);
}

template <int kBits, bool kWhole, bool kPieces, int T>
cudaError_t launch(Params p, cudaStream_t stream) {
  constexpr int F = fragments_for(T, kPieces), kRows = F * kFragmentRows;
  const int warps = std::min(kMaxWarps, p.tile_records);
  const int sums = T * kRows * (kWhole ? 8 : 4), memory = memory_bytes<F, T>(kWhole ? 0 : p.task.weight.geometry.slots());
  p.warp_bytes = (std::max(sums, memory) + 15) / 16 * 16;
  p.row_blocks = row_blocks(p, kRows);
  p.token_blocks = p.task.experts.tiles == nullptr ? ceil_div(p.task.m, T) : p.task.experts.most * (kSimtExpertRows / T);
  const std::int64_t ctas = std::int64_t{p.row_blocks} * p.token_blocks;
  if constexpr (T > 1) {  // smaller CTAs where these do not fit, or leave most SMs idle
    int device = 0, sms = 0, most = 0;
    if (const cudaError_t e = most_shared(device, most)) return e;
    if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
    if (warps * p.warp_bytes > most || ctas * p.task.groups * 4 < std::int64_t{sms} * 3)
      return launch<kBits, kWhole, kPieces, 1>(p, stream);
  }
  if (ctas > std::numeric_limits<std::int32_t>::max() || p.task.groups > 65535) return cudaErrorInvalidConfiguration;
  const auto& kernel = kLaunchable<codes_kernel<kBits, kWhole, kPieces, F, T>>;
  if (const cudaError_t e = kernel.allow_all_shared()) return e;
  return launch_dependent(kernel.kernel, dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(p.task.groups)),
                          static_cast<unsigned>(warps * 32), warps * p.warp_bytes, stream, p);
}

template <int kBits, bool kWhole, bool kPieces>
cudaError_t launch(const Params& p, cudaStream_t stream) {
  return p.task.m == 1 ? launch<kBits, kWhole, kPieces, 1>(p, stream) : launch<kBits, kWhole, kPieces, 4>(p, stream);
}

template <int kBits>
cudaError_t launch(const Params& p, bool pieces, cudaStream_t stream) {
  if (p.task.whole) return pieces ? launch<kBits, true, true>(p, stream) : launch<kBits, true, false>(p, stream);
  return pieces ? launch<kBits, false, true>(p, stream) : launch<kBits, false, false>(p, stream);
}

}  // namespace

cudaError_t linear_codes_simt(const CodesTask& task, cudaStream_t stream) {
  const DeviceWeight& w = task.weight;
  const gpu_tile::Geometry& geo = w.geometry;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - kChannels;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || geo.n > kMost || geo.k > kMost) return cudaErrorInvalidValue;
  if (task.whole && geo.k > kMostWholeChannels) return cudaErrorInvalidValue;
  Params p{};
  p.task = task;
  p.n = static_cast<int>(geo.n);
  p.k = static_cast<int>(geo.k);
  if (task.group_outputs == 0) p.task.group_outputs = p.n;
  p.tile_records = geo.records();
  p.record_bytes = geo.record_bytes();
  p.zero_base = w.zero_base - static_cast<float>(1 << (geo.bits - 1));
  p.weight_zeros = w.zero != ZeroKind::none || p.zero_base != 0;
  p.act_zeros = task.acts.zeros != nullptr || task.acts.offsets != nullptr || task.acts.zero != 0;
  p.by_quarters = task.acts.group % kQuarter == 0;
  p.vectors = in_code_vectors(task.acts);

  // A slot's channels share the weight's scales. Past K codes of activations are 0, which is not what zero points stand for: a mask leaves
  // these channels out.
  const int run = std::min(gpu_tile::span(task.acts.group), geo.span);
  const bool pieces = (!task.whole && (run < kQuarter || !p.by_quarters)) || (p.act_zeros && p.k % kQuarter != 0);
  p.fold = std::max(run, kQuarter);
  return geo.bits == 4 ? launch<4>(p, pieces, stream) : launch<8>(p, pieces, stream);
}

}  // namespace nibble::cuda
