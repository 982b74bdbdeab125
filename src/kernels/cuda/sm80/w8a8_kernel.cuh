// 8-bit codes times 8-bit codes with mma.sync: s8 as it is; e4m3 as f16, which holds it exactly.
//
//   Dᵀ[N,M] = Ŵ[N,K] · Âᵀ[K,M]      weights are the 16-row operand, tokens the 8 columns
//
//   CTA   = R rows × T tokens, all of K; warps side by side along both
//   stage = a record's part of R rows | T tokens × 128 channels, chunks of 16 bytes swizzled as records are
//   ring  = asynchronous copies, all but one stage ahead; the weights of the first ones are requested before the previous kernel has ended
//   step  = 32 channels: ldmatrix of 16 rows and of 16 tokens ──▶ one mma of integers, or two of f16
//   end   = sums through shared memory, where Dᵀ becomes D; zero points, scales, epilogue (w8a8_scales.cuh)
//
// A lane's word holds four neighbouring channels of a row. The f16 instruction wants two pairs of them, at k and at k + 8 of its 16; which
// channels those are does not matter as long as both operands agree. So a word's codes 0 and 2 are one pair, 1 and 3 the other, without
// shuffles.
//
// Every sum is one warp's, in the order of the channels, whatever R and T are. With few tiles S CTAs divide K of each, as in gemm_kernel.cuh, and
// their sums are added in that order: a row's bits depend neither on M nor on the other rows, those of integers neither on S.
//
// In a convolution (PatchCopier) tokens are output pixels. A thread copies 16 channels of a pixel of the image, or writes zeros, as in
// gemm_kernel.cuh. Of experts (kExperts) token blocks are tiles of their rows, as there, too.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/patch_corners.cuh"
#include "kernels/cuda/device/ring_stages.cuh"
#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/device/split_k.cuh"
#include "kernels/cuda/steps/w8a8_scales.cuh"
#include "kernels/cuda/tasks/w8a8.hpp"

namespace nibble::cuda {
namespace {

using gpu_w8::kChannels;
using gpu_w8::kChunk;
constexpr int kChunks = kChannels / kChunk;  // of a row
constexpr int kStepChannels = 32;
constexpr int kFragmentRows = 16, kTileTokens = 8;

/// Integers; floats whose scales come at the end; floats whose scales come with every record.
enum class Mode { integers, floats, grouped };

/// kRows × kTokens of a CTA, by kWarpsN × kWarpsM warps.
template <int kRows_, int kTokens_, int kWarpsN_, int kWarpsM_, int kStages_>
struct Shape {
  static constexpr int kRows = kRows_, kTokens = kTokens_, kWarpsN = kWarpsN_, kStages = kStages_;
  static constexpr int kThreads = 32 * kWarpsN_ * kWarpsM_;
  static constexpr int kFragments = kRows / kWarpsN_ / kFragmentRows;  // of a warp
  static constexpr int kTiles = kTokens / kWarpsM_ / kTileTokens;
  static constexpr int kWeightBytes = kRows * kChannels, kStageBytes = kWeightBytes + kTokens * kChannels;
  static constexpr int kSumPitch = kRows + 4;  // ≡ 4 mod 32: a warp's 8 rows × 4 token pairs lie in 32 different banks
  /// Shared memory of a ring of so many stages, or of the sums, which take its place.
  static constexpr int smem(int stages) { return std::max(stages * kStageBytes, kTokens * kSumPitch * 4); }
  /// The same of the architecture that a kernel is compiled for: a constant, as kRingStages is.
  static inline const int kSmem =
      std::max((ptx::copies_at_once() ? kStagesOfCopiesAtOnce : kStages) * kStageBytes, kTokens* kSumPitch * 4);
  static_assert(kTiles % 2 == 0 && kFragments > 0 && kRows % 32 == 0);
};
/// Shared memory of a CTA of the shape on the current device.
template <class S>
cudaError_t shared_of_device(int& bytes) {
  int stages = 0;
  if (const cudaError_t e = ring_stages_of_device(S::kStages, stages)) return e;
  return bytes = S::smem(stages), cudaSuccess;
}
/// Few tokens need many CTAs and bytes in flight, many tokens reuse of operands. All shapes fit into 99 KiB, all but the last into the 64 KiB of
/// compute capability 7.5.
using Few = Shape<32, 16, 2, 1, 8>;
using Some = Shape<64, 64, 2, 2, 4>;
using Many = Shape<128, 128, 4, 2, 3>;

struct Params {
  W8A8Task task;
  int token_blocks;
  bool vector_codes;                          // rows of codes begin at multiples of 16 bytes
  Patches patches;                            // of a convolution: codes are images [B,H,W,C], pixels acts.pitch apart
  std::int64_t image_stride, channel_stride;  // of D, whose pixels are side by side; 0: its channels are
  SplitK split;                               // neither of a convolution nor of experts
};

// ---- operands

/// Products of operands from halves() are smaller by this factor.
constexpr float kHalvesUnit = 0x1p16f;
/// Four e4m3 codes as f16 times 2⁻⁸: codes 0 and 2, codes 1 and 3. Exponents are biased by 15 there and 7 here; subnormals need no special
/// case; 0x7f, the only NaN, is converted to a NaN.
__device__ __forceinline__ uint2 halves(std::uint32_t codes) {
  const auto pair = [](std::uint32_t high) {  // codes in the upper bytes of both halves
    const std::uint32_t magnitude = high & 0x7f007f00u;
    const std::uint32_t nan = (magnitude + 0x01000100u) & 0x80008000u;
    return (high & 0x80008000u) | (magnitude >> 1) | (nan >> 1);
  };
  return {pair(codes << 8), pair(codes)};
}

/// Waits until all but the latest `kPending` requested stages are complete, for all threads.
template <int kPending>
__device__ __forceinline__ void wait_for_stage() {
  ptx::async_copy_wait<kPending>();
  __syncthreads();
}

// ---- activations into a stage

/// Rows of a matrix. Past K and M codes are 0.
template <class S>
struct RowCopier {
  static constexpr bool kPatches = false;
  const Params& p;
  std::uint32_t base;
  int first_token, end_token;

  __device__ RowCopier(const Params& p, std::uint32_t base, int, int first_token, int end_token)
      : p(p), base(base), first_token(first_token), end_token(end_token) {}
  __device__ void request(int record, int stage) const {
    const QuantizedActs& a = p.task.acts;
    const int thread = static_cast<int>(threadIdx.x), k = static_cast<int>(p.task.weight.geometry.k);
#pragma unroll
    for (int i = 0; i < S::kTokens * kChunks / S::kThreads; ++i) {
      const int token = (thread + i * S::kThreads) / kChunks, chunk = (thread + i * S::kThreads) % kChunks;
      const int m = first_token + token, channel = record * kChannels + chunk * kChunk;
      const int count = m < end_token ? min(max(k - channel, 0), kChunk) : 0;
      const std::uint8_t* from = static_cast<const std::uint8_t*>(a.codes) + (count > 0 ? m * a.pitch + channel : 0);
      const std::uint32_t to = base + stage * S::kStageBytes + S::kWeightBytes + token * kChannels + (chunk ^ token % 8) * kChunk;
      if (p.vector_codes) {
        ptx::async_copy16(to, from, count);
      } else {
        std::uint32_t word[4] = {};
#pragma unroll
        for (int j = 0; j < kChunk; ++j)
          if (j < count) word[j / 4] |= std::uint32_t{__ldcg(from + j)} << j % 4 * 8;
        ptx::store_shared16(to, {word[0], word[1], word[2], word[3]});
      }
    }
  }
};

/// Patches of images: a thread's chunk is the same in every record, so that it walks along the patch without divisions.
template <class S>
class PatchCopier {
 public:
  static constexpr bool kPatches = true;

  /// All corners are in shared memory when it returns.
  __device__ PatchCopier(const Params& p, std::uint32_t base, int group, int first_token, int)
      : p_(p),
        at_(patch_channel(p.patches, chunk() * kChunk)),
        step_(patch_channel(p.patches, kChannels)),
        codes_(static_cast<const std::uint8_t*>(p.task.acts.codes) + group * p.patches.channels),
        corners_(base + S::kSmem + token() * kCornerBytes),
        to_(base + S::kWeightBytes + token() * kChannels + (chunk() ^ token() % 8) * kChunk) {
    static_assert(S::kTokens <= S::kThreads && S::kThreads % kChunks == 0 && kStep % 8 == 0);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < S::kTokens) store_corner(base + S::kSmem + thread * kCornerBytes, p.patches, first_token + thread, p.task.m);
    __syncthreads();
  }
  /// Records in their order.
  __device__ void request(int, int stage) {
    const std::uint32_t to = to_ + stage * S::kStageBytes;
#pragma unroll
    for (int i = 0; i < S::kTokens / kStep; ++i) {
      const int pixel = pixel_under(p_.patches, load_corner(corners_ + i * kStep * kCornerBytes), at_);
      ptx::async_copy16(to + i * kStep * kChannels, codes_ + (max(pixel, 0) * p_.task.acts.pitch + at_.c),
                        pixel >= 0 ? kChunk : 0);
    }
    advance(at_, p_.patches, step_);
  }

 private:
  static constexpr int kStep = S::kThreads / kChunks;  // tokens that all threads copy at a time
  __device__ static int token() { return static_cast<int>(threadIdx.x) / kChunks; }
  __device__ static int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }

  const Params& p_;
  PatchChannel at_, step_;
  const std::uint8_t* codes_;  // of the group
  std::uint32_t corners_, to_;
};

// ---- the kernel

/// kExperts: rows of A have weights of their experts.
template <class S, Mode kMode, class Activations, bool kExperts>
struct Gemm {
  static constexpr bool kIntegers = kMode == Mode::integers;
  using Sum = std::conditional_t<kIntegers, std::int32_t, float>;
  using Four = std::conditional_t<kIntegers, int4, float4>;
  using Sums = Sum[S::kFragments][S::kTiles][4];

  const Params& p;
  std::uint32_t base;
  RecordRun run;               // of the CTA
  int first_row;               // of the CTA
  int first_token, end_token;  // of the CTA: rows of A and D
  int group;                   // of its rows of the weight
  int expert;                  // whose weight it is
  int warp_row, warp_token;    // of the warp, in the CTA
  int lane;

  __device__ W8A8Weight weight() const {
    W8A8Weight own = p.task.weight;
    if constexpr (kExperts) own.bytes += expert * p.task.experts.weight_pitch;
    return own;
  }

  // ---- copies

  __device__ void request_weights(int record, int stage) const {
    const gpu_w8::Geometry& geo = p.task.weight.geometry;
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < S::kRows * kChunks / S::kThreads; ++i) {
      const int at = (thread + i * S::kThreads) * kChunk, row = first_row + at / kChannels;
      if (row >= geo.padded_rows()) continue;  // these sums are never stored
      const std::byte* from = weight().bytes + geo.record(row / gpu_w8::kRows, record);
      ptx::async_copy16(base + stage * S::kStageBytes + at, from + row % gpu_w8::kRows * kChannels + at % kChannels, kChunk);
    }
  }

  // ---- products

  /// Adds a record's products to the sums.
  __device__ __forceinline__ void multiply(Sums& sums, int stage) const {
    // Of rows: matrix l/8 of ldmatrix is rows 8·(l/8 mod 2) on, chunk l/16. Of tokens: tokens 8·(l/16) on, chunk l/8 mod 2.
    const int row = warp_row + lane % 16, token = warp_token + lane / 16 * 8 + lane % 8;
    const std::uint32_t rows = base + stage * S::kStageBytes + row * kChannels;
    const std::uint32_t tokens = base + stage * S::kStageBytes + S::kWeightBytes + token * kChannels;
#pragma unroll
    for (int step = 0; step < kChannels / kStepChannels; ++step) {
      std::uint32_t a[S::kFragments][4], b[S::kTiles / 2][4];
#pragma unroll
      for (int f = 0; f < S::kFragments; ++f)
        ptx::load_matrices(a[f], rows + f * kFragmentRows * kChannels + ((2 * step + lane / 16) ^ lane % 8) * kChunk);
#pragma unroll
      for (int t = 0; t < S::kTiles / 2; ++t)
        ptx::load_matrices(b[t], tokens + t * 2 * kTileTokens * kChannels + ((2 * step + lane / 8 % 2) ^ lane % 8) * kChunk);
      if constexpr (kIntegers) {
#pragma unroll
        for (int f = 0; f < S::kFragments; ++f)
#pragma unroll
          for (int t = 0; t < S::kTiles; ++t) mma_s8(sums[f][t], a[f], b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {            // chunks of 16 channels
          uint2 low[S::kFragments], high[S::kFragments];  // rows g and g + 8
#pragma unroll
          for (int f = 0; f < S::kFragments; ++f) low[f] = halves(a[f][2 * half]), high[f] = halves(a[f][2 * half + 1]);
#pragma unroll
          for (int t = 0; t < S::kTiles; ++t) {
            const uint2 columns = halves(b[t / 2][t % 2 * 2 + half]);
#pragma unroll
            for (int f = 0; f < S::kFragments; ++f)
              mma<__half>(sums[f][t], {low[f].x, high[f].x, low[f].y, high[f].y}, columns.x, columns.y);
          }
        }
      }
    }
  }

  /// Element i of a lane's four sums.
  __device__ int row_of(int f, int i) const { return warp_row + f * kFragmentRows + lane / 4 + i / 2 * 8; }
  __device__ int token_of(int t, int i) const { return warp_token + t * kTileTokens + lane % 4 * 2 + i % 2; }

  __device__ __forceinline__ void add_grouped(Sums& sums, const Sums& parts, int record) const {
    const W8A8Task& task = p.task;
    float row_scales[S::kFragments][2];
#pragma unroll
    for (int f = 0; f < S::kFragments; ++f)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int n = first_row + row_of(f, 2 * i);
        row_scales[f][i] = n < task.weight.geometry.n ? weight_scale(weight(), n, record) : 0.0f;
      }
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int m = first_token + token_of(t, j);
        const float s_a = m < end_token ? act_scale(task.acts, m, record) : 0.0f;
#pragma unroll
        for (int f = 0; f < S::kFragments; ++f)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            Sum& sum = sums[f][t][2 * i + j];
            sum = add_w8a8(parts[f][t][2 * i + j] * kHalvesUnit, s_a, row_scales[f][i], sum);
          }
      }
  }

  // ---- all of it

  static constexpr bool kSplits = !Activations::kPatches && !kExperts;

  __device__ void multiply_and_store() const {
    const int first = kSplits ? run.first : 0, records = kSplits ? run.count : p.task.weight.geometry.records();
#pragma unroll 1
    for (int s = 0; s < kRingStages<S::kStages> - 1 && s < records; ++s) request_weights(first + s, s);
    Activations activations(p, base, group, first_token, end_token);
    wait_for_predecessor();
#pragma unroll 1
    for (int s = 0; s < kRingStages<S::kStages> - 1; ++s) {
      if (s < records) activations.request(first + s, s);
      ptx::async_copy_commit();
    }

    Sums sums = {};
    int stage = 0;
#pragma unroll 1
    for (int record = 0; record < records; ++record) {
      wait_for_stage<S::kStages - 2>();  // and all threads have read the previous stage, which is filled next
      const int ahead = record + kRingStages<S::kStages> - 1, free_stage = stage == 0 ? kRingStages<S::kStages> - 1 : stage - 1;
      if (ahead < records) {
        request_weights(first + ahead, free_stage);
        activations.request(first + ahead, free_stage);
      }
      ptx::async_copy_commit();
      if constexpr (kMode == Mode::grouped) {
        Sums parts = {};
        multiply(parts, stage);
        add_grouped(sums, parts, first + record);
      } else {
        multiply(sums, stage);
      }
      stage = stage + 1 == kRingStages<S::kStages> ? 0 : stage + 1;
    }

    wait_for_stage<0>();  // the sums take the place of the ring
    extern __shared__ __align__(128) std::uint8_t shared[];
    Sum* const all = reinterpret_cast<Sum*>(shared);
#pragma unroll
    for (int f = 0; f < S::kFragments; ++f)
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          Sum sum = sums[f][t][i];
          if constexpr (kMode == Mode::floats) sum *= kHalvesUnit;
          all[token_of(t, i) * S::kSumPitch + row_of(f, i)] = sum;
        }
    __syncthreads();
    if constexpr (kSplits) {
      const int ranks = p.split.ranks, block = static_cast<int>(blockIdx.x), tokens = min(S::kTokens, end_token - first_token);
      if (ranks > 1 &&
          !add_ranks<S::kThreads, S::kRows, S::kSumPitch, S::kTokens>(p.split, block / ranks, block % ranks, tokens, all))
        return;
    }
    if constexpr (Activations::kPatches)
      if (p.channel_stride != 0) return store_channels(all);
    store_rows_of_tokens(all);
  }

  __device__ bool raw() const { return kIntegers && p.task.epilogue.out == DType::s32; }
  /// A D whose channels are side by side: a thread stores eight of them of some tokens, and loads what they need once.
  __device__ void store_rows_of_tokens(const Sum* all) const {
    constexpr int kEights = S::kRows / 8;  // threads that store a token
    const int row = static_cast<int>(threadIdx.x) % kEights * 8, n = first_row + row;
    const int rows = min(static_cast<int>(p.task.weight.geometry.n) - n, 8);
    ChannelTerms channels[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < rows) channels[i] = ChannelTerms(p.task, weight(), n + i);
    const bool scales = kExperts && p.task.experts.scale2 != nullptr && !raw();
    const float scale2 = scales ? p.task.experts.scale2[expert] : 1.0f;
#pragma unroll 1
    for (int token = static_cast<int>(threadIdx.x) / kEights; token < S::kTokens && first_token + token < end_token;
         token += S::kThreads / kEights) {
      const int m = first_token + token;
      const TokenTerms terms(p.task, m, sum_row(m));
      const Four low = reinterpret_cast<const Four*>(all + token * S::kSumPitch + row)[0];
      const Four high = reinterpret_cast<const Four*>(all + token * S::kSumPitch + row)[1];
      const Sum sums[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = scaled_sum(terms, channels[i], raw(), sums[i]);
      if (scales) {
#pragma unroll
        for (float& value : v) value = __fmul_rn(value, scale2);
      }
      if (p.task.epilogue.glu_half != 0) {
#pragma unroll
        for (int i = 0; i < 8; i += 4)
          if (i < rows) p.task.epilogue.store_products(m, n + i, {v[i], v[i + 1], v[i + 2], v[i + 3]}, p.task.weight.geometry.n);
      } else if (rows == 8) {
        p.task.epilogue.store_eight(m, n, v);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (i < rows) p.task.epilogue.store(m, n + i, v[i]);
      }
    }
  }
  /// In a convolution each group has its own sums of codes.
  __device__ std::int64_t sum_row(int m) const { return Activations::kPatches ? std::int64_t{group} * p.task.m + m : m; }
  /// A D whose pixels are contiguous (NCHW): a warp stores 32 tokens of a row.
  __device__ void store_channels(const Sum* all) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, pixels = p.patches.pixels();
#pragma unroll 1
    for (int token = lane; token < S::kTokens && first_token + token < p.task.m; token += 32) {
      const int m = first_token + token;
      const epilogue::Pixel pixel{m / pixels, m % pixels};
      const std::int64_t at = pixel.image * p.image_stride + pixel.pixel;
      const TokenTerms terms(p.task, m, sum_row(m));
#pragma unroll 1
      for (int row = warp; row < S::kRows; row += S::kThreads / 32) {
        const int n = first_row + row;
        if (n < p.task.weight.geometry.n)
          p.task.epilogue.store_at(at + n * p.channel_stride, pixel, n,
                                   scaled_sum(terms, ChannelTerms(p.task, n), raw(), all[token * S::kSumPitch + row]));
      }
    }
  }
};

template <class S, Mode kMode, template <class> class Activations, bool kExperts = false>
__global__ void __launch_bounds__(S::kThreads, 1) w8a8_sm80_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  let_successor_start();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int ranks = Activations<S>::kPatches || kExperts ? 1 : p.split.ranks, rank = static_cast<int>(blockIdx.x) % ranks;
  const int block = static_cast<int>(blockIdx.x) / ranks;
  const int first_row = block / p.token_blocks * S::kRows;  // blocks that share weights run together
  const int token_block = block % p.token_blocks;
  ExpertTile tile{0, token_block * S::kTokens, 0};
  if constexpr (kExperts) {
    // Tiles can be read before the wait: kernels from the one that writes them on let their successors start only then (steps/experts.cu).
    if (token_block >= __ldcg(&p.task.experts.count->tiles)) return wait_for_predecessor();
    const int* const from = &p.task.experts.tiles[token_block].expert;
    tile = {__ldcg(from), __ldcg(from + 1), __ldcg(from + 2)};
  }
  const Gemm<S, kMode, Activations<S>, kExperts> gemm{.p = p,
                                                      .base = ptx::shared_address(shared),
                                                      .run = records_of(rank, ranks, p.task.weight.geometry.records()),
                                                      .first_row = first_row,
                                                      .first_token = tile.first,
                                                      .end_token = kExperts ? tile.first + tile.rows : p.task.m,
                                                      .group = Activations<S>::kPatches ? first_row / p.patches.group_outputs : 0,
                                                      .expert = tile.expert,
                                                      .warp_row = warp % S::kWarpsN * S::kFragments * kFragmentRows,
                                                      .warp_token = warp / S::kWarpsN * S::kTiles * kTileTokens,
                                                      .lane = static_cast<int>(threadIdx.x) % 32};
  gemm.multiply_and_store();
}

}  // namespace
}  // namespace nibble::cuda
