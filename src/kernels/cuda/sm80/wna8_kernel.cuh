// Products with online quantized activations (wna8.hpp) without wgmma: mma.sync of signed bytes.
//
//   Dᵀ[N,M] = W[N,K] · Âᵀ[K,M]       weights are the 16-row A operand of m16n8k32, tokens its 8 columns
//
//   CTA   = 64 rows × T tokens × all of K; 4 warps, each 16 rows and all tokens; T = 16 for few tokens, else 64
//   stage = codes of T tokens × 128 channels | their terms | a record; a ring of three, filled with cp.async by all threads
//
//   a record: 16-byte vectors of weights, 3 instructions for 8 of them │ 4 steps of T/8 products │ the fold, 3 instructions a sum
//             folds of 16 channels: 4 steps of T/8 times two halves of a product (m16n8k16), and the fold of each
//
// The warps of a CTA share nothing along K. With few tiles S CTAs divide K of each, as in gemm_kernel.cuh: four warps alone on an SM
// take three times as long for a record as one of several CTAs. Every T sums in the same order, which depends on K and S only: a row's bits depend
// neither on M nor on the other rows.
//
// Of experts (kExperts, compiled separately) token blocks are tiles of their rows, as in gemm_kernel.cuh.
//
// In a convolution (kPatches, compiled separately) tokens are output pixels, T = 64. A thread copies 16 channels of a pixel's codes, or writes
// zeros, as in gemm_kernel.cuh, and of one token the terms of 64 or 128 channels of a pixel. Images of f32 are three planes of images of
// codes, which the weight's records are multiplied by one after the other, as in gemm_stages.cuh of sm_90.
#pragma once

#include <algorithm>
#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/patch_corners.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/ring_stages.cuh"
#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/device/split_k.cuh"
#include "kernels/cuda/tasks/wna8.hpp"
#include "kernels/cuda/weights/code_fragment.cuh"

namespace nibble::cuda {
namespace {

constexpr int kWarps = gpu_tile::kFragments;  // of 16 rows
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = 3;
constexpr int kFew = 16, kMany = 64;            // tokens of a CTA
constexpr int kRowBytes = gpu_tile::kChannels;  // of a token's codes in a stage
constexpr int kChunk = 16;                      // bytes
constexpr int kChunks = kRowBytes / kChunk;
/// Floats between tokens of the sums: ≡ 4 mod 32 puts a fragment's 8 rows × 4 token pairs into 32 different banks.
constexpr int kSumPitch = gpu_tile::kRows + 4;

struct Params {
  const std::uint8_t* records;
  RecordFormat format;
  const std::uint8_t* codes;
  std::int64_t pitch;
  const std::uint8_t* terms;
  const float* token_scales;  // null: they are in the terms
  std::int64_t term_pitch;
  epilogue::Element epilogue;
  int m, n, k;
  int tile_records;
  int token_blocks;
  int stage_bytes;
  ExpertTiles experts;                        // of rows of experts, whose tiles are the token blocks
  SplitK split;                               // not of experts
  Patches patches;                            // of a convolution: codes are images [B,H,W,C], pixels `pitch` bytes apart
  int planes, plane_pixels;                   // of such images; tile_records is the number of records of all planes
  std::int64_t pixel_terms;                   // bytes of a pixel's terms
  std::int64_t image_stride, channel_stride;  // of D, whose pixels are side by side; 0: its channels are
};

/// token_terms: bytes of a token in a record.
constexpr int stage_bytes(int tokens, bool experts, int token_terms, int record_bytes) {
  const int bytes = tokens * kRowBytes + term_tokens(tokens, experts) * token_terms + record_bytes;
  return (bytes + 127) / 128 * 128;  // the swizzle's address bits are the address's
}

/// Bytes of a pixel's terms that are copied at a time: those of two folds of 32 channels, or of one of 128 and 8 unused ones.
constexpr int kTermBox = 16;

/// Codes and terms of patches into a stage, of one thread: a chunk of every kStep-th token's channels, and a box of terms of one token.
template <int kTokens, int kBoxes>
class PatchCopier {
 public:
  /// `table`: the corners of the CTA's tokens.
  __device__ PatchCopier(const Params& p, std::uint32_t table, int first_row, int first_token)
      : p_(p), step_(patch_channel(p.patches, gpu_tile::kChannels)), table_(table) {
    const int group = first_row / p.patches.group_outputs, thread = static_cast<int>(threadIdx.x);
    codes_ = p.codes + group * p.patches.channels;
    terms_ = p.terms + group * p.patches.channels / (kBoxes == 1 ? gpu_tile::kChannels : kTermChannels) * kTermBox;
    restart();
    if (thread < kTokens) store_corner(table + thread * kCornerBytes, p.patches, first_token + thread, p.m);
    __syncthreads();
  }
  /// Records in their order, of all planes.
  __device__ void request(std::uint32_t stage) {
    const int plane = plane_ * p_.plane_pixels;
#pragma unroll
    for (int i = 0; i < kTokens / kStep; ++i) {
      const int token = this->token() + i * kStep,
                pixel = pixel_under(p_.patches, load_corner(table_ + token * kCornerBytes), at_);
      const std::uint8_t* const from = codes_ + (std::int64_t{max(pixel, 0)} + plane) * p_.pitch + at_.c;
      ptx::async_copy16(stage + token * kRowBytes + (chunk() ^ token % 8) * kChunk, from, pixel >= 0 ? kChunk : 0);
    }
    if (box() < kBoxes) {
      const int token = static_cast<int>(threadIdx.x) % kTokens;
      const int pixel = pixel_under(p_.patches, load_corner(table_ + token * kCornerBytes), of_terms_);
      const std::uint8_t* const from = terms_ + (std::int64_t{max(pixel, 0)} + plane) * p_.pixel_terms +
                                       of_terms_.c / (kBoxes == 1 ? gpu_tile::kChannels : kTermChannels) * kTermBox;
      ptx::async_copy16(stage + kTokens * kRowBytes + (box() * kTokens + token) * kTermBox, from, pixel >= 0 ? kTermBox : 0);
    }
    advance(at_, p_.patches, step_);
    advance(of_terms_, p_.patches, step_);
    if (++record_ == p_.tile_records / p_.planes) ++plane_, restart();
  }

 private:
  static constexpr int kStep = kThreads / kChunks;               // tokens that all threads copy at a time
  static constexpr int kTermChannels = gpu_tile::kChannels / 2;  // of a box, where a record has two
  static_assert(kStep % 8 == 0 && kThreads >= kBoxes * kTokens);
  __device__ static int token() { return static_cast<int>(threadIdx.x) / kChunks; }
  __device__ static int chunk() { return static_cast<int>(threadIdx.x) % kChunks; }
  __device__ static int box() { return static_cast<int>(threadIdx.x) / kTokens; }
  /// At the first record of a plane.
  __device__ void restart() {
    record_ = 0;
    at_ = patch_channel(p_.patches, chunk() * kChunk);
    of_terms_ = patch_channel(p_.patches, box() * kTermChannels);
  }

  const Params& p_;
  PatchChannel at_, of_terms_, step_;
  const std::uint8_t *codes_, *terms_;  // of the group
  std::uint32_t table_;
  int record_ = 0, plane_ = 0;
};

/// The channels of a fold, unless they are fewer.
template <ConstantsPath kPath>
constexpr int kUsualFold = kPath == ConstantsPath::any ? kStepChannels : gpu_tile::kChannels;

/// kExperts: rows of A have weights of their experts. kPatches: tokens are output pixels of a convolution. kFold: channels of a fold, 128, 32 or
/// 16. kCodes: of the weight, integers or e2m1.
template <int kBits, ConstantsPath kPath, int kTokens, ActTerms kTerms, bool kExperts, bool kPatches, int kFold,
          gpu_tile::Codes kCodes>
struct Gemm {
  static constexpr bool kFloats = kCodes == gpu_tile::Codes::e2m1;
  static constexpr int kFolds = gpu_tile::kChannels / kFold;  // of a record
  static constexpr int kSteps = gpu_tile::kChannels / kStepChannels,
                       kVectors = gpu_tile::kChannels / gpu_tile::step_channels(kBits);
  static constexpr int kTiles = kTokens / 8;
  static constexpr bool kOffsets = kTerms == ActTerms::offsets, kSumsCodes = kOffsets || kTerms == ActTerms::zeros;
  static constexpr int kTermBytes = token_term_bytes(kOffsets);  // of a token
  static constexpr int kFoldTerms = term_tokens(kTokens, kExperts) * kTermBytes;
  static constexpr int kBoxes = kFolds == 1 ? 1 : 2;  // of a pixel's terms in a record
  static constexpr int kTermsAt = kTokens * kRowBytes;
  static constexpr int kRecordAt = kTermsAt + (kPatches ? kBoxes * kTokens * kTermBox : kFolds * kFoldTerms);
  static_assert(!(kExperts || kPatches) || !kOffsets);

  const Params& p;
  std::uint32_t base;
  RecordRun run;               // of the CTA
  int tile;                    // of rows of the weight
  int first_token, end_token;  // rows of A and D
  int expert;                  // whose weight it is
  int warp, lane;

  // Records count from the first of the run.
  __device__ std::uint32_t stage(int record) const { return base + record % kRingStages<kStages> * p.stage_bytes; }
  /// The first token of a stage's terms.
  __device__ int first_term() const { return kExperts ? first_token & ~1 : first_token; }

  // ---- copies

  __device__ void request_weights(int record) const {
    if (record >= run.count) return;
    int records = p.tile_records, of_tile = run.first + record;
    if constexpr (kPatches) records /= p.planes, of_tile %= records;
    const std::uint8_t* from = p.records + (std::int64_t{tile} * records + of_tile) * p.format.bytes;
    if constexpr (kExperts) from += expert * p.experts.weight_pitch;
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x) * kChunk; at < p.format.bytes; at += kThreads * kChunk)
      ptx::async_copy16(stage(record) + kRecordAt + at, from + at, kChunk);
  }
  /// Codes of tokens past the last are 0.
  __device__ void request_acts(int record) const {
    if (record >= run.count) return;
    const std::uint32_t to = stage(record);
    const int of_all = run.first + record;
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < kTokens * kChunks; i += kThreads) {
      const int token = i / kChunks, chunk = i % kChunks, m = first_token + token;
      const std::uint8_t* from = p.codes + (m < end_token ? m * p.pitch + of_all * kRowBytes + chunk * kChunk : 0);
      ptx::async_copy16(to + token * kRowBytes + (chunk ^ token % 8) * kChunk, from, m < end_token ? kChunk : 0);
    }
    constexpr int kTermChunks = kFoldTerms / kChunk;  // of a fold
    for (int i = static_cast<int>(threadIdx.x); i < kFolds * kTermChunks; i += kThreads) {
      const std::int64_t fold = std::int64_t{of_all} * kFolds + i / kTermChunks;
      if (kExperts && i % kTermChunks * 2 >= end_token - first_term()) continue;  // pairs past the last: never stored
      const std::uint8_t* from = p.terms + (fold * p.term_pitch + first_term()) * kTermBytes;
      ptx::async_copy16(to + kTermsAt + i * kChunk, from + i % kTermChunks * kChunk, kChunk);
    }
  }

  // ---- products

  /// The terms of fold `index` of two tokens, `tokens` being the place of the first: both scales, then both others. Pixels' are apart.
  __device__ __forceinline__ uint4 terms_of_two(std::uint32_t tokens, int index) const {
    if constexpr (kExperts) return load_terms_from(tokens + index * kFoldTerms, first_token);
    if constexpr (!kPatches) return ptx::load_shared16(tokens + index * kFoldTerms);
    const std::uint32_t at = tokens + index / 2 * kTokens * kTermBox + index % 2 * 8;
    const uint2 even = ptx::load_shared8(at), odd = ptx::load_shared8(at + kTermBox);
    return {even.x, odd.x, even.y, odd.y};
  }
  __device__ __forceinline__ void fold(float* to, const std::int32_t* dot, std::uint32_t tokens, int index, const RowTerms& rows,
                                       const std::int32_t (&sums)[2]) const {
    if constexpr (kOffsets)
      add_fold_offsets<kPath>(to, dot, load_offset_terms<kPath>(tokens + index * kFoldTerms), rows, sums);
    else if constexpr (kSumsCodes)
      add_fold_zeros<kPath>(to, dot, terms_of_two(tokens, index), rows, sums);
    else
      add_fold<kPath>(to, dot, terms_of_two(tokens, index), rows);
  }
  __device__ __forceinline__ static void decode(std::uint32_t (&a)[4], const uint4& codes, int step) {
    if constexpr (kFloats)
      signed_e2m1(a, codes, step);
    else
      signed_codes<kBits>(a, codes, step);
  }
  /// The factors of the rows of a fold that begins at that channel of a record.
  __device__ __forceinline__ RowTerms load_rows(std::uint32_t slots, int channel, int position) const {
    const std::uint32_t slot = slots + channel / p.format.span * p.format.slot_bytes;
    return kFloats ? load_e2m1_terms(p.format, slot, position) : load_row_terms<kBits>(p.format, slot, position);
  }
  /// Matrix l/8 of ldmatrix: tokens 8·(l/16) on, chunk l/8 mod 2 of the step. b[0] and b[1] are tokens t·8 on, b[2] and b[3] the next 8.
  __device__ __forceinline__ void load_tokens(std::uint32_t (&b)[4], std::uint32_t tokens, int t, int step) const {
    ptx::load_matrices(b, tokens + t * 8 * kRowBytes + ((2 * step + lane / 8 % 2) ^ lane % 8) * kChunk);
  }
  __device__ __forceinline__ void add_record(float (&acc)[kTiles][4], int record) const {
    const std::uint32_t at = stage(record), weights = at + kRecordAt, slots = weights + p.format.slots_offset;
    constexpr int kTermPitch = kPatches ? kTermBox : kTermBytes;  // between tokens
    const std::uint32_t terms = at + kTermsAt + lane % 4 * 2 * kTermPitch;
    const std::uint32_t tokens = at + (lane / 16 * 8 + lane % 8) * kRowBytes;
    const int position = row_pair_position(warp, lane);
    std::int32_t dot[kTiles][4] = {}, sums[2] = {};
    uint4 codes;
#pragma unroll(kFolds == 1 ? kSteps : 1)
    for (int step = 0; step < kSteps; ++step) {
      if (step % (kSteps / kVectors) == 0)
        codes = ptx::load_shared16(weights + gpu_tile::vector_offset(step / (kSteps / kVectors), warp, lane));
      if (kOffsets && step % (kSteps / kFolds) == 0) {
        sums[0] = sums[1] = sum_past_k((run.first + record) * gpu_tile::kChannels + step * kStepChannels + kFold, kFold, p.k);
      }
      std::uint32_t a[4];
      decode(a, codes, step);
      if (kSumsCodes) add_codes(sums, a);
#pragma unroll
      for (int t = 0; t < kTiles; t += 2) {
        std::uint32_t b[4];
        load_tokens(b, tokens, t, step);
        mma_s8(dot[t], a, b[0], b[1]);
        mma_s8(dot[t + 1], a, b[2], b[3]);
      }
      if constexpr (kFolds > 1) {
        const RowTerms rows = load_rows(slots, step * kStepChannels, position);
        if (kSumsCodes) share_sums(sums);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          fold(acc[t], dot[t], terms + t * 8 * kTermPitch, step, rows, sums);
#pragma unroll
          for (int i = 0; i < 4; ++i) dot[t][i] = 0;
        }
        sums[0] = sums[1] = 0;
      }
    }
    if constexpr (kFolds == 1) {
      const RowTerms rows = row_terms<kPath, kBits>(p.format, load_raw<kPath>(p.format, slots, position));
      if (kSumsCodes) share_sums(sums);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) fold(acc[t], dot[t], terms + t * 8 * kTermPitch, 0, rows, sums);
    }
  }

  /// The same where a step has two folds: half a product is a fold, and is added at once.
  __device__ __forceinline__ void add_record_of_halves(float (&acc)[kTiles][4], int record) const {
    const std::uint32_t at = stage(record), weights = at + kRecordAt, slots = weights + p.format.slots_offset;
    const std::uint32_t terms = at + kTermsAt + lane % 4 * 2 * kTermBytes;
    const std::uint32_t tokens = at + (lane / 16 * 8 + lane % 8) * kRowBytes;
    const int position = row_pair_position(warp, lane);
    uint4 codes;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      if (step % (kSteps / kVectors) == 0)
        codes = ptx::load_shared16(weights + gpu_tile::vector_offset(step / (kSteps / kVectors), warp, lane));
      std::uint32_t a[4];
      decode(a, codes, step);
      RowTerms rows[2];
      std::int32_t sums[2][2] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = step * kStepChannels + half * kFold;
        rows[half] = load_rows(slots, channel, position);
        if (kOffsets)
          sums[half][0] = sums[half][1] = sum_past_k((run.first + record) * gpu_tile::kChannels + channel + kFold, kFold, p.k);
        if (!kSumsCodes) continue;
        add_half_of_codes(sums[half], a[2 * half], a[2 * half + 1]);
        share_sums(sums[half]);
      }
#pragma unroll
      for (int t = 0; t < kTiles; t += 2) {
        std::uint32_t b[4];
        load_tokens(b, tokens, t, step);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int tile_of_tokens = t + i / 2, half = i % 2;
          std::int32_t dot[4] = {};
          mma_s8_half(dot, a[2 * half], a[2 * half + 1], b[i]);
          fold(acc[tile_of_tokens], dot, terms + tile_of_tokens * 8 * kTermBytes, 2 * step + half, rows[half], sums[half]);
        }
      }
    }
  }

  __device__ void multiply_and_store() const {
    if constexpr (kPatches) {
      PatchCopier<kTokens, kBoxes> copier(p, base + kRingStages<kStages> * p.stage_bytes, tile * gpu_tile::kRows, first_token);
      multiply_and_store([&](int record) {
        if (record < run.count) copier.request(stage(record));
      });
    } else {
      multiply_and_store([&](int record) { request_acts(record); });
    }
  }
  /// request(r): the activations of record r into its stage.
  template <class Request>
  __device__ __forceinline__ void multiply_and_store(Request request) const {
#pragma unroll 1
    for (int r = 0; r < kRingStages<kStages> - 1; ++r) request_weights(r);  // weights do not depend on the previous kernel
    wait_for_predecessor();
#pragma unroll 1
    for (int r = 0; r < kRingStages<kStages> - 1; ++r) {
      request(r);
      ptx::async_copy_commit();  // the first of these groups has the weights of both
    }
    float acc[kTiles][4] = {};
#pragma unroll 1
    for (int record = 0; record < run.count; ++record) {
      ptx::async_copy_wait<kStages - 2>();
      __syncthreads();  // all copies are complete, and all threads have read the previous stage, which is filled next
      request_weights(record + kRingStages<kStages> - 1);
      request(record + kRingStages<kStages> - 1);
      ptx::async_copy_commit();
      if constexpr (kFold < kStepChannels)
        add_record_of_halves(acc, record);
      else
        add_record(acc, record);
    }

    ptx::async_copy_wait<0>();
    __syncthreads();  // the sums take the place of the ring
    extern __shared__ __align__(128) std::uint8_t shared[];
    float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[(t * 8 + lane % 4 * 2 + i % 2) * kSumPitch + warp * gpu_tile::kFragmentRows + lane / 4 + i / 2 * 8] = acc[t][i];
    __syncthreads();
    if constexpr (!kExperts && !kPatches) {
      const int ranks = p.split.ranks, block = static_cast<int>(blockIdx.x), tokens = min(kTokens, end_token - first_token);
      if (ranks > 1 &&
          !add_ranks<kThreads, gpu_tile::kRows, kSumPitch, kTokens>(p.split, block / ranks, block % ranks, tokens, sums))
        return;
    }
    if constexpr (kPatches)
      if (p.channel_stride != 0) return store_channels(sums);
#pragma unroll 1
    for (int token = warp; token < kTokens && first_token + token < end_token; token += kWarps) {  // its 64 rows are a warp's
      float scale = p.token_scales == nullptr ? 1.0f : __ldcg(p.token_scales + first_token + token);
      if (kExperts && p.experts.scale2 != nullptr) scale = __fmul_rn(scale, p.experts.scale2[expert]);
      const int row = 2 * lane;
      const float2 sum = *reinterpret_cast<const float2*>(sums + token * kSumPitch + row);
      p.epilogue.store_two(first_token + token, tile * gpu_tile::kRows + row, __fmul_rn(sum.x, scale), __fmul_rn(sum.y, scale),
                           p.n);
    }
  }
  /// A D whose pixels are contiguous (NCHW): a warp stores 32 tokens of a row.
  __device__ void store_channels(const float* sums) const {
    const int pixels = p.patches.pixels();
#pragma unroll 1
    for (int token = lane; token < kTokens && first_token + token < p.m; token += 32) {
      const int m = first_token + token;
      const epilogue::Pixel pixel{m / pixels, m % pixels};
      const std::int64_t at = pixel.image * p.image_stride + pixel.pixel;
#pragma unroll 1
      for (int row = warp; row < gpu_tile::kRows; row += kWarps) {
        const int n = tile * gpu_tile::kRows + row;
        if (n < p.n) p.epilogue.store_at(at + n * p.channel_stride, pixel, n, sums[token * kSumPitch + row]);
      }
    }
  }
};

template <int kBits, ConstantsPath kPath, int kTokens, ActTerms kTerms, bool kExperts = false, bool kPatches = false,
          int kFold = kUsualFold<kPath>, gpu_tile::Codes kCodes = gpu_tile::integers(kBits)>
__global__ void __launch_bounds__(kThreads, kTokens == kFew ? 4 : 2) wna8_sm80_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  let_successor_start();
  const int ranks = kExperts || kPatches ? 1 : p.split.ranks, rank = static_cast<int>(blockIdx.x) % ranks;
  const int block = static_cast<int>(blockIdx.x) / ranks,
            token_block = block % p.token_blocks;  // those that share weights run together
  ExpertTile rows{0, token_block * kTokens, 0};
  if constexpr (kExperts) {
    // Tiles can be read before the wait: kernels from the one that writes them on let their successors start only then (steps/experts.cu).
    if (token_block >= __ldcg(&p.experts.count->tiles)) return wait_for_predecessor();
    const int* const from = &p.experts.tiles[token_block].expert;
    rows = {__ldcg(from), __ldcg(from + 1), __ldcg(from + 2)};
  }
  const Gemm<kBits, kPath, kTokens, kTerms, kExperts, kPatches, kFold, kCodes> gemm{
      .p = p,
      .base = ptx::shared_address(shared),
      .run = records_of(rank, ranks, p.tile_records),
      .tile = block / p.token_blocks,
      .first_token = rows.first,
      .end_token = kExperts ? rows.first + rows.rows : p.m,
      .expert = rows.expert,
      .warp = static_cast<int>(threadIdx.x) / 32,
      .lane = static_cast<int>(threadIdx.x) % 32};
  gemm.multiply_and_store();
}

// ---- launch

using Kernel = const Launchable<Params>*;

/// Launches `kernel` for `token_blocks` blocks of `tokens` tokens, with K divided by `ranks` CTAs.
inline cudaError_t launch(Kernel kernel, const Wna8Task& task, int tokens, int token_blocks, cudaStream_t stream, int ranks = 1) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  Params p{};
  p.records = static_cast<const std::uint8_t*>(task.weight.records);
  p.format = record_format(task.weight);
  p.codes = static_cast<const std::uint8_t*>(task.codes);
  p.pitch = task.pitch;
  p.terms = static_cast<const std::uint8_t*>(task.terms);
  p.term_pitch = task.term_pitch;
  p.token_scales = task.token_scales;
  p.epilogue = task.epilogue;
  p.m = task.m;
  p.n = static_cast<int>(geo.n);
  p.k = static_cast<int>(geo.k);
  p.tile_records = geo.records();
  p.token_blocks = token_blocks;
  p.experts = task.experts;
  const int token_terms = gpu_tile::kChannels / task.fold * token_term_bytes(task.zero == ZeroKind::offset);
  p.stage_bytes = stage_bytes(tokens, task.experts.tiles != nullptr, token_terms, p.format.bytes);
  const std::int64_t tiles = std::int64_t{geo.tiles()} * p.token_blocks, ctas = tiles * ranks;
  p.split = split_k(task.scratch_end, ranks, tiles, gpu_tile::kRows, tokens);
  int stages = 0;
  if (const cudaError_t e = ring_stages_of_device(kStages, stages)) return e;
  const int smem = std::max(stages * p.stage_bytes, tokens * kSumPitch * 4);
  if (ctas > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  if (const cudaError_t e = kernel->allow_all_shared()) return e;
  return launch_dependent(kernel->kernel, static_cast<unsigned>(ctas), static_cast<unsigned>(kThreads), smem, stream, p);
}

/// Launches what kernel_for(tokens) is, with K divided by `split` CTAs or as many as there are records: as many tokens at a time as have room for
/// their sums.
template <class KernelFor>
cudaError_t launch_parts(const Wna8Task& task, int split, cudaStream_t stream, KernelFor kernel_for) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || split < 1 || split > kMostSplitRanks) return cudaErrorInvalidValue;
  const int ranks = std::min(split, geo.records()), most = split_k_tokens(geo.n, ranks);
  Wna8Task part = task;
  for (int done = 0; done < task.m; done += part.m) {
    part.m = std::min(most, task.m - done);
    part.codes = static_cast<const std::uint8_t*>(task.codes) + done * task.pitch;
    part.terms = static_cast<const std::uint8_t*>(task.terms) + done * token_term_bytes(task.zero == ZeroKind::offset);
    if (task.token_scales != nullptr) part.token_scales = task.token_scales + done;
    part.epilogue = task.epilogue.from_row(done);
    const int tokens = wna8_sm80_tokens(part.m);
    if (const cudaError_t e = launch(kernel_for(tokens), part, tokens, (part.m + tokens - 1) / tokens, stream, ranks)) return e;
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace nibble::cuda
