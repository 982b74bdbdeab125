// Decode with online quantized activations on Hopper: the ring of decode_ring.cuh, whose CTAs read float activations, quantize their slice
// of K themselves, and multiply integers. There is no separate quantizer: at one to eight tokens that costs a launch, and reading its
// codes back.
//
//   multiplying warps, once      A (f32, f16, bf16) ──load──▶ range of a block ──rule──▶ codes, Σ codes ──▶ shared memory
//   then, record by record       weights as signed bytes · codes ──m16n8k32──▶ s32 ──fold──▶ f32, as wna8.hpp defines it
//
// Every CTA quantizes its own slice: (tokens × K/S) codes, repeated by the CTAs of all row tiles. That is cheap for few tokens (a token of
// 8192 channels is one vector of 32 channels a thread), waits for nothing but A, and weights fill the ring meanwhile.
//
// The phases of a multiplying warp:
//   1  warm up    quantize zeros and multiply one dummy record: fetches the instructions before the previous kernel has ended
//   2  quantize   chunks of 8 records (wna8_slice.hpp), two at a time in flight; a range, a rule and codes, and the terms of folds
//     2a          a scale per token: first the largest |x| of the slice, by warps, then of the cluster, whose CTAs send each other theirs.
//                 What fits the registers (16384 channels a token at one token, 2048 at eight) is not read again for its codes
//   3  multiply   every eighth record of each row tile, as in decode.cu
//
// Integers of a fold are exact. Folds are added in f32 in the order of K within a warp, warps in their order, CTAs of a cluster in theirs: a
// row's bits depend on S, neither on M nor on the other rows. Codes are act_rule.hpp's, bit for bit.
//
// The kernel table has rows for launches of 1 and of 8 tokens: a matrix instruction has 8 columns. More tokens use the GEMM's tiles of 16.
#include <algorithm>
#include <limits>

#include "kernels/cuda/sm90/decode/decode_ring.cuh"
#include "kernels/cuda/steps/act_vectors.cuh"
#include "kernels/cuda/tasks/wna8.hpp"
#include "kernels/cuda/tasks/wna8_slice.hpp"
#include "kernels/cuda/weights/code_fragment.cuh"

namespace nibble::cuda {

/// Signed bytes as code_fragment.cuh makes them, in the words of unpack.cuh: operand = unit · (u + offset).
struct SignedCodes {};
template <Codes kCodes>
struct Operand<SignedCodes, kCodes> {
  static constexpr int kBits = gpu_tile::bits(kCodes);
  __device__ static constexpr float unit(int) { return 1.0f / kCodeUnit<kBits>; }
  static constexpr float kOffset = -kCodeBase<kBits>;
};

namespace {

constexpr float kReach = 127.0f;  // of codes without a zero point

struct Acts {
  ActSource source;  // its row 0 is the launch's first token
  int m;
  DType type;
  bool plain;      // whole, aligned vectors, in order, without prescale
  int group;       // channels that share a scale; 0: all
  bool known;      // `rule` is given and holds for all tokens
  bool saturates;  // a code may lie beyond ±127: the rule is known, or magnitudes are limited
  act_rule::Rule rule;
  float limit;
  int terms, tops;  // where they begin in a token's row
};

__device__ __forceinline__ std::uint32_t warp_max(std::uint32_t bits) { return __reduce_max_sync(kAllLanes, bits); }

__device__ __forceinline__ float lanes_top(float top, int distance) {
  return ptx::max_magnitude(top, __shfl_xor_sync(kAllLanes, top, distance));
}

/// Eight codes of a vector.
__device__ __forceinline__ uint2 encode(const float (&x)[kEach], float inverse, bool saturates) {
  std::uint32_t code[kEach];
  if (saturates) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) code[i] = act_rule::s8_bits<true>(x[i], inverse);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) code[i] = act_rule::s8_bits<false>(x[i], inverse);
  }
  const auto word = [&](int i) {
    return __byte_perm(__byte_perm(code[i], code[i + 1], 0x0040), __byte_perm(code[i + 2], code[i + 3], 0x0040), 0x5410);
  };
  return {word(0), word(4)};
}

/// kKnown: what is known of a record at compile time. Folds have 128 channels where everything is, else 32.
template <Known kKnown, int kBits>
struct Wna8Decode {
  using Params = RingParams<Acts>;
  static constexpr int kTiles = 1;
  static constexpr bool kQuantizes = true;
  static constexpr int kFolds = kKnown == Known::nothing ? gpu_tile::kChannels / kStepChannels : 1;  // of a record

  // ---- quantize

  /// The rule of whole tokens: the largest |x| of this warp's chunks → of the token's warps → of the cluster.
  __device__ static __forceinline__ act_rule::Rule token_rule(const Params& p, const Slice& piece, int token, float top) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tokens = 1 << token_shift(p.x.m);
    std::uint32_t bits = warp_max(__float_as_uint(top));
    if (lane == 0) ptx::store_shared4(piece.parts + warp * 4, bits);
    ptx::named_barrier(1, kMultipliers);
    bits = warp_max(lane < kDecodeWarps && lane % tokens == token ? ptx::load_shared4(piece.parts + lane * 4) : 0u);
    if (p.split > 1) {
      const std::uint32_t tops = piece.x + min(token, p.x.m - 1) * p.x_pitch + p.x.tops;
      if (threadIdx.x == 0) ptx::barrier_arrive_expect(piece.x_full, p.split * p.x.m * 8);
      if (warp < p.x.m && lane < p.split)  // the first of a token's warps
        ptx::send(ptx::map_to_rank(tops + piece.rank * 8, lane), {__uint_as_float(bits), 0.0f},
                  ptx::map_to_rank(piece.x_full, lane));
      ptx::barrier_wait_cluster(piece.x_full, 0);
      bits = warp_max(lane < p.split ? ptx::load_shared4(tops + lane * 8) : 0u);
    }
    return rule_of_largest(bits, p.x.limit, kReach);
  }

  /// The rules of a lane's vectors, one for all or, with kFolds > 1, one each: scales of 32 to 256 channels. All lanes of a warp come here.
  __device__ static __forceinline__ void block_rules(act_rule::Rule (&rule)[kFolds], float (&top)[kLaneVectors], const Acts& x) {
    const int lane = threadIdx.x % 32;
    if constexpr (kFolds == 1) {
      float all = ptx::max_magnitude(ptx::max_magnitude(top[0], top[1]), ptx::max_magnitude(top[2], top[3]));
      all = lanes_top(lanes_top(all, 1), 2);
      if (x.group > gpu_tile::kChannels) all = lanes_top(all, 4);
      rule[0] = rule_of_largest(__float_as_uint(all), x.limit, kReach);
    } else {
#pragma unroll
      for (int v = 0; v < kLaneVectors; ++v) top[v] = lanes_top(lanes_top(top[v], 1), 2);
#pragma unroll
      for (int apart = 1; apart < kLaneVectors; apart *= 2)  // 64 channels are v and v ^ 1, 128 all
        if (x.group > kStepChannels * apart) {
#pragma unroll
          for (int v = 0; v < kLaneVectors; ++v)
            if ((v & apart) == 0) top[v] = top[v ^ apart] = ptx::max_magnitude(top[v], top[v ^ apart]);
        }
      if (x.group > gpu_tile::kChannels) {
#pragma unroll
        for (int v = 0; v < kLaneVectors; ++v) top[v] = lanes_top(top[v], 4);
      }
      // Each of four lanes makes the rule of one vector: a division is as much as quantizing a few.
      const int share = lane % 4;
      const float mine = share < 2 ? share == 0 ? top[0] : top[1] : share == 2 ? top[2] : top[3];
      const act_rule::Rule own = rule_of_largest(__float_as_uint(mine), x.limit, kReach);
#pragma unroll
      for (int v = 0; v < kLaneVectors; ++v)
        rule[v] = {__shfl_sync(kAllLanes, own.scale, lane / 4 * 4 + v), __shfl_sync(kAllLanes, own.inverse, lane / 4 * 4 + v), 0};
    }
  }

  /// Σ codes of the lanes of a fold, by lanes 4g … 4g+3 → the terms of that fold, by the lane that `writes`.
  __device__ static __forceinline__ void write_terms(std::int32_t sum, float scale, std::uint32_t at, bool writes) {
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    if (writes)
      ptx::store_shared8(at, {__float_as_uint(scale), __float_as_uint(act_rule::multiply(scale, static_cast<float>(sum)))});
  }

  /// Phase 2. Two passes where a token has one scale that is not known yet: its largest |x|, then codes. Not kPlain: permuted channels, a
  /// prescale, unaligned rows, or half a vector at the end of K; then a vector is read each time it is used.
  template <DType kType, bool kPlain>
  __device__ static __forceinline__ void quantize_as(const Params& p, const Slice& piece, bool warm_up) {
    // Chunks in flight: 16 KB of f16 or 32 KB of f32 a CTA each. Registers hold two of f16 beside one rule, but not beside four.
    constexpr int kBuffers = kPlain && kType != DType::f32 && kFolds == 1 ? 2 : 1;
    constexpr int kUnrolled = kPlain ? kLaneVectors : 1;
    const Acts& x = p.x;
    int thread = threadIdx.x;
    // Keeps values derived from it out of registers during the loop over row tiles, which contains this.
    asm volatile("" : "+r"(thread));
    const int warp = thread / 32, lane = thread % 32;
    const int shift = token_shift(x.m), token = warp & ((1 << shift) - 1), step = kDecodeWarps >> shift;
    const Seen seen = seen_records(piece.first, piece.records, x.group);
    ActSource source = x.source;
    source.k = warm_up ? 0 : min(source.k, seen.end * gpu_tile::kChannels);
    if (kPlain) {
      source.k &= -kEach;  // it is a multiple already: tells the compiler, which then omits the remainder
      source.perm = nullptr, source.prescale = nullptr, source.vector_loads = true;
    }
    const int mine = warp >> shift;                                            // the first of this warp's chunks
    const int chunks = token >= x.m ? 0 : warm_up ? mine + 1 : seen.chunks();  // where they end
    const std::uint32_t row = piece.x + token * p.x_pitch;
    const bool needs_range = !x.known && x.group == 0 && !warm_up;
    const bool kept = kPlain && mine + kBuffers * step >= chunks;  // in registers, all of them
    act_rule::Rule whole = x.rule;
    float whole_top = 0.0f;
    Raw<kType> raw[kBuffers][kLaneVectors] = {};

#pragma unroll 1
    for (int pass = needs_range ? 0 : 1; pass < 2; ++pass) {
      const bool finds_range = pass == 0, loads = kPlain && (finds_range || !needs_range || !kept);
#pragma unroll 1
      for (int first_chunk = mine - kBuffers * step; first_chunk < chunks; first_chunk += kBuffers * step) {
#pragma unroll
        for (int i = 0; i < kBuffers; ++i) {
          const int chunk = first_chunk + i * step, next = chunk + kBuffers * step;
          const auto channel_of = [&](int which, int v) {
            return (seen.first + which * kChunkRecords) * gpu_tile::kChannels + vector_channel(lane, v);
          };
          if (first_chunk >= mine && chunk < chunks) {
            const auto values = [&](float(&to)[kEach], int v) {
              const int channel = channel_of(chunk, v);
              if constexpr (kPlain) {
                raw[i][v].keep_raw();  // 32 floats would take too many registers until their range is known
                unpack(to, raw[i][v], source, channel);
              } else {
                Raw<kType> one[1];
                load(one, source, token, [=](int) { return channel; });
                unpack(to, one[0], source, channel);
              }
            };
            act_rule::Rule rule[kFolds];
#pragma unroll
            for (int fold = 0; fold < kFolds; ++fold) rule[fold] = whole;
            if (finds_range || (!x.known && x.group != 0)) {
              float top[kLaneVectors] = {};
#pragma unroll(kUnrolled)
              for (int v = 0; v < kLaneVectors; ++v) {
                float value[kEach], most = 0.0f;
                values(value, v);
#pragma unroll
                for (int j = 0; j < kEach; ++j) most = ptx::max_magnitude(most, value[j]);
                whole_top = ptx::max_magnitude(whole_top, most);
#pragma unroll
                for (int j = 0; j < kLaneVectors; ++j) top[j] = j == v ? most : top[j];
              }
              if (!finds_range) block_rules(rule, top, x);
            }
            if (!finds_range) {
              const int record = seen.first + chunk * kChunkRecords + lane / 4 - piece.first;
              const bool stored = record >= 0 && record < piece.records;  // lanes of other records only take part in shuffles
              const std::uint32_t codes_at = row + record * gpu_tile::kChannels, terms_at = row + x.terms + record * kFolds * 8;
              std::int32_t sum = 0;
#pragma unroll(kUnrolled)
              for (int v = 0; v < kLaneVectors; ++v) {
                act_rule::Rule own = rule[0];
#pragma unroll
                for (int fold = 1; fold < kFolds; ++fold) own = fold == v ? rule[fold] : own;
                float value[kEach];
                values(value, v);
                const uint2 codes = encode(value, own.inverse, x.saturates);
                const uint2 interleaved = interleave(codes);
                if (stored) ptx::store_shared8(codes_at + vector_channel(lane, v) % gpu_tile::kChannels, interleaved);
                sum += sum_of(codes);
                if (kFolds > 1) {
                  write_terms(sum, own.scale, terms_at + vector_fold(lane, v) * 8, stored && lane % 4 == 0);
                  sum = 0;
                }
              }
              if (kFolds == 1) write_terms(sum, rule[0].scale, terms_at, stored && lane % 4 == 0);
            }
          }
          if (loads && next < chunks) load(raw[i], source, token, [&](int v) { return channel_of(next, v); });
        }
      }
      if (finds_range) whole = token_rule(p, piece, token, whole_top);
    }
    if (!warm_up) ptx::named_barrier(1, kMultipliers);
  }

  template <bool kPlain>
  __device__ static __forceinline__ void quantize_type(const Params& p, const Slice& piece, bool warm_up) {
    if (p.x.type == DType::f16)
      quantize_as<DType::f16, kPlain>(p, piece, warm_up);
    else if (p.x.type == DType::bf16)
      quantize_as<DType::bf16, kPlain>(p, piece, warm_up);
    else
      quantize_as<DType::f32, kPlain>(p, piece, warm_up);
  }
  __device__ static __forceinline__ void quantize(const Params& p, const Slice& piece, bool warm_up) {
    if (p.x.plain)
      quantize_type<true>(p, piece, warm_up);
    else
      quantize_type<false>(p, piece, warm_up);
  }

  __device__ static constexpr bool has_factors(const Params&) { return false; }  // quantizing multiplies by them
  __device__ static void request_factors(const Params&, int, int, std::uint32_t, std::uint32_t) {}
  __device__ static constexpr bool requests(const Params&) { return false; }
  __device__ static void request(const Params&, int, int, std::uint32_t, std::uint32_t, int) {}
  __device__ static __forceinline__ void fetch(const Params& p, const Slice&, std::uint32_t) {
    ptx::wait_for_predecessors();
    if (p.split > 1) ptx::cluster_wait();  // before the first word to another CTA
  }

  __device__ static __forceinline__ void fetch_steps(const Params&, std::uint32_t, float*, int) {}
  __device__ static __forceinline__ void restore_range(const Params&, const TokenRange*, Sums<1>&) {}

  // ---- multiply

  /// The addresses that lane 4g + t reads: 0 is its ldmatrix row, codes of token g; 1 and 2 are the terms of tokens 2t and 2t + 1. Tokens
  /// past M repeat the last one.
  static constexpr int kPlaces = 3;
  __device__ static __forceinline__ std::uint32_t place(const Params& p, std::uint32_t x, int lane, int i) {
    const int token = i == 0 ? lane % 8 : lane % 4 * 2 + i - 1;
    return x + min(token, p.x.m - 1) * p.x_pitch + (i == 0 ? lane / 8 * 16 : p.x.terms);
  }
  __device__ static constexpr int record_bytes(int i) { return i == 0 ? gpu_tile::kChannels : kFolds * 8; }

  /// 64 rows × 128 channels × 8 tokens: four instructions of 32 channels a fragment, and one or four folds of their sums.
  __device__ static __forceinline__ void multiply(const RecordFormat& format, std::uint32_t record,
                                                  const std::uint32_t (&x)[kPlaces], Sums<1>& acc) {
    constexpr int kSteps = gpu_tile::kChannels / kStepChannels, kFoldSteps = kSteps / kFolds;
    constexpr int kVectorSteps = gpu_tile::step_channels(kBits) / kStepChannels;  // of a lane's 16 bytes
    constexpr int kHalves = 2;                                                    // ldmatrix loads 64 channels
    constexpr int kUnrolled = kFolds == 1 ? kHalves : 1;  // folds of 32 have no registers for both at once
    const int lane = threadIdx.x % 32;
    const std::uint32_t lane_codes = record + gpu_tile::vector_offset(0, 0, lane);
    std::uint32_t slot = record + format.slots_offset;
    uint4 codes[gpu_tile::kFragments];
#pragma unroll
    for (int f = 0; f < gpu_tile::kFragments; ++f) codes[f] = ptx::load_shared16(lane_codes + gpu_tile::vector_offset(0, f, 0));
    std::uint32_t b[kUnrolled][4];  // chunks 0 and 1 are a step's, 2 and 3 the next one's
#pragma unroll
    for (int half = 0; half < kUnrolled; ++half) ptx::load_matrices(b[half], x[0] + half * 2 * kStepChannels);
    std::int32_t dot[gpu_tile::kFragments][4];
#pragma unroll(kUnrolled)
    for (int half = 0; half < kHalves; ++half) {
      if (kUnrolled == 1 && half != 0) ptx::load_matrices(b[0], x[0] + 2 * kStepChannels);
#pragma unroll
      for (int i = 0; i < kSteps / kHalves; ++i) {
        const int step = half * (kSteps / kHalves) + i;
#pragma unroll
        for (int f = 0; f < gpu_tile::kFragments; ++f) {
          if (step % kFoldSteps == 0) {
#pragma unroll
            for (int j = 0; j < 4; ++j) dot[f][j] = 0;
          }
          std::uint32_t a[4];
          signed_codes<kBits>(a, codes[f], i);
          if (i % kVectorSteps == kVectorSteps - 1 && step + 1 < kSteps)
            codes[f] = ptx::load_shared16(lane_codes + gpu_tile::vector_offset((step + 1) / kVectorSteps, f, 0));
          mma_s8(dot[f], a, b[half % kUnrolled][i * 2], b[half % kUnrolled][i * 2 + 1]);
        }
        if (step % kFoldSteps != kFoldSteps - 1) continue;
        const uint2 even = ptx::load_shared8(x[1] + step / kFoldSteps * 8), odd = ptx::load_shared8(x[2] + step / kFoldSteps * 8);
        const Rows scale = load_floats(slot, lane,
                                       kKnown == Known::f16_scales    ? DType::f16
                                       : kKnown == Known::bf16_scales ? DType::bf16
                                                                      : format.scale_type);
        const Rows shift = shift_of<kKnown, SignedCodes, gpu_tile::integers(kBits)>(format, slot, lane, scale);
#pragma unroll
        for (int f = 0; f < gpu_tile::kFragments; ++f)
          add_fold<ConstantsPath::any>(acc[f][0], dot[f], {even.x, odd.x, even.y, odd.y},
                                       {{scale.v[2 * f], scale.v[2 * f + 1]}, {shift.v[2 * f], shift.v[2 * f + 1]}});
        if (((step + 1) * kStepChannels & (format.span - 1)) == 0) slot += format.slot_bytes;  // the group's last fold
      }
    }
  }
  __device__ static __forceinline__ float2 sum(const float* part, int m, int token, int row) {
    return sum_parts<SignedCodes, gpu_tile::integers(kBits)>(part, m, token, row);
  }
};

using Kernel = const Launchable<RingParams<Acts>>*;

template <int kBits>
Kernel kernel_for(Known known) {
  if (known == Known::f16_scales) return &kLaunchable<decode_ring_kernel<Wna8Decode<Known::f16_scales, kBits>>>;
  if (known == Known::bf16_scales) return &kLaunchable<decode_ring_kernel<Wna8Decode<Known::bf16_scales, kBits>>>;
  return &kLaunchable<decode_ring_kernel<Wna8Decode<Known::nothing, kBits>>>;
}

}  // namespace

cudaError_t linear_wna8_decode_sm90(const Wna8DecodeTask& task, const DecodeConfig& config, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  const QuantizeTask& acts = task.acts;
  const RecordFormat format = record_format(task.weight);
  const Known known = task.fold == gpu_tile::kChannels ? known_of(format) : Known::nothing;
  const bool block = acts.group == 32 || acts.group == 64 || acts.group == 128 || acts.group == 256;
  if (acts.m < 1 || geo.n < 1 || geo.k < 1 || acts.k != geo.k || config.tokens < 1 || config.tokens > 8 || acts.zero_points ||
      acts.zero != 0 || acts.codes_type != DType::s8 || (acts.group != 0 && !block) ||
      (task.fold == gpu_tile::kChannels ? known == Known::nothing || (block && acts.group < task.fold)
                                        : task.fold != kStepChannels))
    return cudaErrorInvalidValue;

  const int folds = gpu_tile::kChannels / task.fold;
  RingParams<Acts> p = ring_params<Acts>(task, folds, config);
  const TokenRow row = token_row(longest_slice(geo, config.split), folds);
  p.x = {.source = act_source(acts),
         .m = 0,  // set below
         .type = acts.type,
         .plain = acts.perm == nullptr && acts.prescale == nullptr && geo.k % kEach == 0 && act_source(acts).vector_loads,
         .group = static_cast<int>(acts.group),
         .known = acts.known,
         .saturates = acts.known || acts.limit < std::numeric_limits<float>::infinity(),
         .rule = acts.known ? act_rule::known(acts.scale, 0) : act_rule::Rule{},
         .limit = acts.limit,
         .terms = row.terms,
         .tops = row.tops};
  const Kernel kernel = geo.bits == 4 ? kernel_for<4>(known) : kernel_for<8>(known);
  for (int done = 0; done < acts.m; done += config.tokens) {
    p.first_token = done;
    p.x.m = static_cast<int>(std::min<std::int64_t>(config.tokens, acts.m - done));
    if (const cudaError_t e = launch_ring(*kernel, p, config, stream)) return e;
    p.x.source.a =
        static_cast<const std::uint8_t*>(p.x.source.a) +
        config.tokens * acts.a_stride * (acts.type == DType::f32 ? 4 : 2);  // vector_loads stays true: strides keep the alignment
  }
  return cudaSuccess;
}

}  // namespace nibble::cuda
