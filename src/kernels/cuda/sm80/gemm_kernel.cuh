// GEMM without wgmma, for more tokens than decode takes: mma.sync with the weights in registers.
//
//   Dᵀ[N,M] = W[N,K] · xᵀ[K,M]       weights are the 16-row A operand of m16n8k16, tokens its 8 columns
//
//   CTA    = 64, 128 or 256 rows × 32 or 64 tokens × all of K; 8 warps, 4 along the rows × 2 along K
//   stage  = x of 128 channels | a record for each 64 rows; a ring of them, filled with cp.async by all threads
//
//                   a stage: 128 channels
//                  ┌───────────┬───────────┐
//      rows of   0 │  warp 0   │  warp 4   │      a warp's part: 16F rows × 64 channels × all tokens, F = 1, 2 or 4, in two
//               16F│  warp 1   │  warp 5   │      halves of 32 channels with two products (k16) each
//               32F│  warp 2   │  warp 6   │
//               48F│  warp 3   │  warp 7   │      no two warps of a CTA decode the same codes
//                  └───────────┴───────────┘
//
//   a half, columns of x in two buffers:
//
//     load b1 │ codes → weights · b0 │ load b0 of the next half │ codes → weights · b1, next codes, after a stage next constants
//                                    └ after a stage: wait until the next one is complete, then this one may be filled again
//
//   2 partial sums along K → shared memory → reduced, epilogue, store
//
// Eight weights of a lane cost 13 instructions (weight_fragment.cuh); with 64 tokens 8 matrix instructions of 6.3 cycles each use
// them: with 64 rows a warp, all instructions together fill 70 % of the issue slots while the tensor cores are busy. With 16 rows ldmatrix
// is the bound, because each warp loads all tokens for them. Smaller shapes are for layers and batches that would otherwise leave SMs
// without a CTA: the launcher takes the shape with the fewest cycles, waves × cycles of a CTA.
//
// With few tiles S CTAs divide K of each (split_k.cuh): rank r has the records [r·R/S, (r+1)·R/S). S is a number of the launch, not of the kernel.
//
// Every shape sums in the same order, which depends on K and S only: a row's bits depend neither on M nor on the other rows.
//
// In a convolution (kPatches, compiled separately) tokens are output pixels. A thread copies 8 channels of a pixel of the image, 16 bytes,
// or writes zeros: for padding, and for channels past the last.
//
//   a thread   chunk t mod 16 of a record's 16, always      ──▶ a channel and an element of the filter (PatchChannel), one walk
//              tokens t/16, t/16 + 16, ...                  ──▶ where the filter begins for them: a table in shared memory, because no
//                                                               registers are free
//   an address (h₀ + kh·dilation, w₀ + kw·dilation) of the token's image, if it is inside
//
// Of experts (kExperts, compiled separately) the token blocks of the grid are the tiles of expert_tiles.hpp, as many as there can be. A CTA past
// the last one ends at once; the others multiply their rows of A by the weight of their expert.
#pragma once

#include <algorithm>
#include <limits>
#include <span>
#include <type_traits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/gather.cuh"
#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/patch_corners.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/ring_stages.cuh"
#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/device/split_k.cuh"
#include "kernels/cuda/tasks/gemm.hpp"
#include "kernels/cuda/tasks/gemm_sm80.hpp"
#include "kernels/cuda/weights/weight_fragment.cuh"

namespace nibble::cuda {
namespace {

constexpr int kRowWarps = 4;
constexpr int kWarps = 2 * kRowWarps;  // two along K
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpChannels = gpu_tile::kChannels / 2;          // of a record
constexpr int kHalfChannels = 2 * gpu_tile::kFragmentChannels;  // of a half
constexpr int kXPitch = gpu_tile::kChannels * 2;                // bytes between tokens of a stage
constexpr int kXChunks = kXPitch / 16;
constexpr int kXStep = kThreads / kXChunks;    // tokens that all threads copy at a time
constexpr int kMinStages = 2, kMaxStages = 8;  // 8 stages of the smallest shape: 34 KB of weights in flight on every SM
/// Token tiles whose activations should stay in L2 while all rows are multiplied: 16 MB at K = 8192.
constexpr int kRasterTokens = 16;

struct Params {
  const std::uint8_t* records;
  const std::uint16_t* x;
  std::int64_t x_stride;
  GatherRule rule;
  RecordFormat format;
  epilogue::Element epilogue;
  int m, n, k;
  int tiles, tile_records;
  int row_blocks, token_blocks;  // of the grid
  int stages, stage_bytes;
  bool scale_after;                           // operands are u − z, sums are multiplied by the scale
  Patches patches;                            // of a convolution: x are images [B,H,W,C], pixels x_stride apart
  std::int64_t image_stride, channel_stride;  // of D, whose pixels are side by side; 0: its channels are
  ExpertTiles experts;                        // of rows of experts, whose tiles are the token blocks
  SplitK split;                               // neither of a convolution nor of experts
};

/// The tokens of a CTA: rows [first, end) of A and D, and where their weight begins behind that of the first expert.
struct Tokens {
  int first, end;
  std::int64_t weight;
};

/// A CTA's shape: 64 rows for each fragment of a warp.
template <int kFragments_, int kTokens_>
struct Shape {
  static constexpr int kFragments = kFragments_, kTokens = kTokens_;
  static constexpr int kRows = kRowWarps * kFragments * gpu_tile::kFragmentRows;
  static constexpr int kTiles = kRows / gpu_tile::kRows;
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kXBytes = kTokens * kXPitch;
  /// Floats between tokens of the sums: ≡ 4 mod 32 puts a fragment's 8 rows × 4 token pairs into 32 different banks.
  static constexpr int kSumPitch = kRows + 4;
  static constexpr int kSumBytes = kTokens * kSumPitch * 4;
  static constexpr int kCtas = kFragments == 1 ? 2 : 1;  // that share an SM, as registers allow
};

/// Waits for all copy groups but the latest `pending`.
__device__ inline void wait_for_all_but(int pending) {
  switch (pending) {
    case 0: return ptx::async_copy_wait<0>();
    case 1: return ptx::async_copy_wait<1>();
    case 2: return ptx::async_copy_wait<2>();
    case 3: return ptx::async_copy_wait<3>();
    case 4: return ptx::async_copy_wait<4>();
    case 5: return ptx::async_copy_wait<5>();
    case 6: return ptx::async_copy_wait<6>();
    default: return ptx::async_copy_wait<kMaxStages - 1>();
  }
}

/// A thread's share of the activations of a stage: 8 channels of every kXStep-th token.
template <class S>
struct Share {
  static constexpr int kCopies = S::kTokens / kXStep;
  int token, chunk;
  __device__ Share() : token(static_cast<int>(threadIdx.x) / kXChunks), chunk(static_cast<int>(threadIdx.x) % kXChunks) {}
  /// The place of the first of them in a stage; the next are kXStep · kXPitch apart.
  __device__ std::uint32_t place() const { return token * kXPitch + (chunk ^ token % 8) * 16; }
};

/// Rows of a matrix.
template <class S>
class RowCopier {
 public:
  __device__ RowCopier(const Params& p, std::uint32_t, int, const Tokens& tokens, int first_record) {
    const Share<S> share;
    tokens_ = tokens.end - tokens.first - share.token;
    channel_ = first_record * gpu_tile::kChannels + share.chunk * 8;
    x_ = p.x + (tokens.first + share.token) * p.x_stride;
    to_ = share.place();
  }
  __device__ void request(const Params& p, std::uint32_t stage) const {
    if (p.rule.copies_rows())
      copy(p, stage + to_);
    else
      change(p, stage + to_);
  }
  __device__ void advance(const Params&) { channel_ += gpu_tile::kChannels; }

 private:
  static constexpr int kCopies = Share<S>::kCopies;

  __device__ void copy(const Params& p, std::uint32_t to) const {
    const int bytes = min(max(p.k - channel_, 0), 8) * 2;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      ptx::async_copy16(to + i * kXStep * kXPitch, x_ + (i * kXStep * p.x_stride + channel_), i * kXStep < tokens_ ? bytes : 0);
  }

  __device__ void change(const Params& p, std::uint32_t to) const {
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i)
      ptx::store_shared16(to + i * kXStep * kXPitch,
                          i * kXStep < tokens_ ? gather(p.rule, x_ + i * kXStep * p.x_stride, channel_) : uint4{});
  }

  const std::uint16_t* x_;  // of the first of this thread's tokens
  std::uint32_t to_;
  int tokens_;  // from the first of them to the last of all
  int channel_;
};

/// Patches of images.
template <class S>
class PatchCopier {
 public:
  /// `table`: the corners of the CTA's tokens.
  __device__ PatchCopier(const Params& p, std::uint32_t table, int first_row, const Tokens& tokens, int) {
    const Share<S> share;
    const Patches& patches = p.patches;
    at_ = patch_channel(patches, share.chunk * 8);
    step_ = patch_channel(patches, gpu_tile::kChannels);
    at_table_ = table + share.token * kCornerBytes;
    to_ = share.place();
    x_ = p.x + first_row / patches.group_outputs * patches.channels;  // of the group
    const int token = static_cast<int>(threadIdx.x);
    if (token < S::kTokens) store_corner(table + token * kCornerBytes, patches, tokens.first + token, p.m);
    __syncthreads();
  }
  __device__ void request(const Params& p, std::uint32_t stage) const {
    const Patches& patches = p.patches;
#pragma unroll
    for (int i = 0; i < Share<S>::kCopies; ++i) {
      const int pixel = pixel_under(patches, load_corner(at_table_ + i * kXStep * kCornerBytes), at_);
      ptx::async_copy16(stage + to_ + i * kXStep * kXPitch, x_ + (max(pixel, 0) * p.x_stride + at_.c), pixel >= 0 ? 16 : 0);
    }
  }
  __device__ void advance(const Params& p) { cuda::advance(at_, p.patches, step_); }

 private:
  const std::uint16_t* x_;
  PatchChannel at_, step_;
  std::uint32_t at_table_, to_;
};

/// Copies records and their activations into the ring: one thread's share.
template <class S, Codes kCodes, class Activations>
class Copier {
 public:
  __device__ Copier(const Params& p, std::uint32_t table, int first_tile, const Tokens& tokens, const RecordRun& run)
      : has_record_(first_tile + part() < p.tiles),
        record_(p.records + tokens.weight + (std::int64_t{first_tile + part()} * p.tile_records + run.first) * p.format.bytes +
                byte()),
        record_to_(S::kXBytes + part() * p.format.bytes + byte()),
        activations_(p, table, first_tile * gpu_tile::kRows, tokens, run.first),
        left_(run.count) {}

  /// The next record, into the stage at `to`; nothing when there is none.
  __device__ void request(const Params& p, std::uint32_t to) {
    if (left_ > 0) {
      copy_record(p.format, to + record_to_);
      activations_.request(p, to);
      --left_;
      record_ += p.format.bytes;
      activations_.advance(p);
    }
    ptx::async_copy_commit();
  }

 private:
  static constexpr int kPartThreads = kThreads / S::kTiles;  // that copy a record
  /// The record of the stage that this thread copies, and where its part begins.
  __device__ static int part() { return static_cast<int>(threadIdx.x) / kPartThreads; }
  __device__ static int byte() { return static_cast<int>(threadIdx.x) % kPartThreads * 16; }
  static constexpr int kCodeBytes = gpu_tile::kRows * gpu_tile::kChannels * gpu_tile::bits(kCodes) / 8;

  __device__ void copy_record(const RecordFormat& format, std::uint32_t to) const {
    if (!has_record_) return;  // rows past the last tile: their sums are never stored
#pragma unroll
    for (int at = 0; at < kCodeBytes; at += kPartThreads * 16) ptx::async_copy16(to + at, record_ + at, 16);
#pragma unroll 1
    for (int at = kCodeBytes; at < format.bytes - static_cast<int>(threadIdx.x) % kPartThreads * 16; at += kPartThreads * 16)
      ptx::async_copy16(to + at, record_ + at, 16);
  }

  bool has_record_;
  const std::uint8_t* record_;
  std::uint32_t record_to_;
  Activations activations_;
  int left_;  // records
};

/// 16 channels of all tokens as B operands: [2·i], [2·i + 1] of token tile i.
template <class S>
using Columns = std::uint32_t[S::kTokenTiles / 2][4];

template <class S>
__device__ __forceinline__ void load_columns(Columns<S>& b, std::uint32_t address) {
#pragma unroll
  for (int i = 0; i < S::kTokenTiles / 2; ++i) ptx::load_matrices(b[i], address + i * 16 * kXPitch);
}

/// A lane's codes of 32 channels of a fragment: [index] of weights() is 0 or 1.
template <int kBits>
__device__ __forceinline__ uint4 load_codes(std::uint32_t address) {
  if constexpr (kBits == 8) return ptx::load_shared16(address);
  const uint2 v = ptx::load_shared8(address);
  return {v.x, v.y, 0, 0};
}

/// Usual records, known at compile time: groups of 128 channels or more, 16-bit scales, no float zeros.
inline bool is_usual(const RecordFormat& f) {
  return f.span == gpu_tile::kChannels && f.scale_type != DType::f32 && f.zero <= ZeroKind::integer;
}
template <bool kUsual>
__device__ inline RecordFormat known(RecordFormat f) {
  if (kUsual) {
    f.span = gpu_tile::kChannels;
    f.scale_type = f.scale_type == DType::f16 ? DType::f16 : DType::bf16;
    f.zero = f.zero == ZeroKind::integer ? ZeroKind::integer : ZeroKind::none;
  }
  return f;
}

template <class S>
using Sums = float[S::kFragments][S::kTokenTiles][4];

/// Adds the products of 16 rows × 16 channels of weights and all tokens.
template <class Act, class S>
__device__ __forceinline__ void multiply(float (&sums)[S::kTokenTiles][4], const std::uint32_t (&a)[4], const Columns<S>& b) {
#pragma unroll
  for (int t = 0; t < S::kTokenTiles; ++t) mma<Act>(sums[t], a, b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
}

/// kPatches: tokens are output pixels of a convolution. kExperts: rows of A have weights of their experts.
template <class S, class Act, Codes kCodes, bool kUsual, bool kPatches, bool kExperts>
__global__ void __launch_bounds__(kThreads, S::kCtas) gemm_sm80_kernel(const __grid_constant__ Params p) {
  // Compute capability 7.5 has 64 KiB of shared memory, where the sums of the largest tile do not fit: no launch takes it.
  constexpr bool kFits = !ptx::kIsTuring || S::kSumBytes <= 64 * 1024;
  if constexpr (!kHasProducts<Act> || !kFits) return;
  extern __shared__ __align__(128) std::uint8_t shared[];
  constexpr int kBits = gpu_tile::bits(kCodes);
  const std::uint32_t base = ptx::shared_address(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row_warp = warp % kRowWarps, part = warp / kRowWarps;  // part: of K
  const RecordFormat format = known<kUsual>(p.format);

  // The ranks of a tile are neighbours, so that tiles end one after the other. Recomputed at the end: no registers are free in between.
  constexpr bool kSplits = !kPatches && !kExperts;
  const auto tile_index = [&] { return static_cast<int>(blockIdx.x) / (kSplits ? p.split.ranks : 1); };
  const auto rank_of_cta = [&] { return static_cast<int>(blockIdx.x) % (kSplits ? p.split.ranks : 1); };
  const auto records = [&] {
    return kSplits ? records_of(rank_of_cta(), p.split.ranks, p.tile_records) : RecordRun{0, p.tile_records};
  };

  // Groups of token tiles, in them row blocks, in them token tiles: CTAs that run at a time share weights.
  const int index = tile_index();
  const int first_of_group = index / (kRasterTokens * p.row_blocks) * kRasterTokens;
  const int width = min(kRasterTokens, p.token_blocks - first_of_group);
  const int in_group = index - first_of_group * p.row_blocks;
  const int token_block = first_of_group + in_group % width;
  const int first_tile = in_group / width * S::kTiles;
  Tokens tokens{token_block * S::kTokens, p.m, 0};
  float scale2 = 1.0f;  // of the expert
  if constexpr (kExperts) {
    if (token_block >= p.experts.count->tiles) return;
    const ExpertTile tile = p.experts.tiles[token_block];
    tokens = {tile.first, tile.first + tile.rows, tile.expert * p.experts.weight_pitch};
    if (p.experts.scale2 != nullptr) scale2 = p.experts.scale2[tile.expert];
  }

  // This lane's places in a stage.
  const int first_fragment = row_warp * S::kFragments;  // of the CTA's
  const std::uint32_t record = S::kXBytes + first_fragment / gpu_tile::kFragments * format.bytes;
  const int fragment = first_fragment % gpu_tile::kFragments;
  const std::uint32_t codes_at =
      record + gpu_tile::vector_offset(part * kWarpChannels / gpu_tile::step_channels(kBits), fragment, lane);
  constexpr int kNextFragment = gpu_tile::vector_offset(0, 1, 0);
  constexpr int kNextHalf = kBits == 4 ? gpu_tile::kVectorBytes / 2 : gpu_tile::vector_offset(1, 0, 0);
  // Matrix l/8 of ldmatrix: tokens 8·(l/16), channels 8·(l/8 mod 2) on; chunk c of token t stands at c ^ (t mod 8).
  const std::uint32_t x_at =
      (lane / 16 * 8 + lane % 8) * kXPitch + part * (kWarpChannels * 2) + ((lane / 8 % 2) ^ (lane % 8)) * 16;
  constexpr std::uint32_t kNextColumns = gpu_tile::kFragmentChannels * 2;  // to be XORed, times the number of the product
  const auto slot_at = [&](int half) {
    return record + format.slots_offset + (part * kWarpChannels + half * kHalfChannels) / format.span * format.slot_bytes;
  };

  Sums<S> sums = {};
  RowConstants constants[S::kFragments];
  uint4 codes[S::kFragments];
  Columns<S> b[2];
  const auto load_group = [&](int f, std::uint32_t slot) {
    const AnyConstants raw = load_any<kCodes>(format, slot, row_pair_position(fragment + f, lane));
    make_constants<Act, kCodes>(constants[f], format, raw, p.scale_after);
  };

  using Activations = std::conditional_t<kPatches, PatchCopier<S>, RowCopier<S>>;
  Copier<S, kCodes, Activations> copier(p, base + p.stages * p.stage_bytes, first_tile, tokens, records());
#pragma unroll 1
  for (int s = 0; s < p.stages; ++s) copier.request(p, base + s * p.stage_bytes);
  wait_for_all_but(p.stages - 1);
  __syncthreads();
  load_columns<S>(b[0], base + x_at);
#pragma unroll
  for (int f = 0; f < S::kFragments; ++f) {
    codes[f] = load_codes<kBits>(base + codes_at + f * kNextFragment);
    load_group(f, base + slot_at(0));
  }

  std::uint32_t now = base;
#pragma unroll 1
  for (int left = records().count; left > 0; --left) {
    std::uint32_t next = now + p.stage_bytes;
    if (next == base + p.stages * p.stage_bytes) next = base;
#pragma unroll(kUsual ? 2 : 1)  // the unusual kernel's constants can be hundreds of instructions
    for (int half = 0; half < 2; ++half) {
      load_columns<S>(b[1], (now + x_at) ^ (2 * half + 1) * kNextColumns);
#pragma unroll
      for (int f = 0; f < S::kFragments; ++f) {
        std::uint32_t a[4];
        weights<Act, kCodes>(a, codes[f], 0, constants[f], constants[f]);
        multiply<Act, S>(sums[f], a, b[0]);
      }

      // Loads from here on are for the next half. After the last record their results are not used.
      if (half == 1) {
        wait_for_all_but(p.stages - 2);
        __syncthreads();  // all copies of the next stage are complete, and all threads have read this one
      }
      const std::uint32_t from = half == 0 ? now : next;
      load_columns<S>(b[0], (from + x_at) ^ (half == 0 ? 2 * kNextColumns : 0));
#pragma unroll
      for (int f = 0; f < S::kFragments; ++f) {
        std::uint32_t a[4];
        weights<Act, kCodes>(a, codes[f], 1, constants[f], constants[f]);
        codes[f] = load_codes<kBits>(from + codes_at + (half == 0 ? kNextHalf : 0) + f * kNextFragment);
        if (half == 1 || format.span == kHalfChannels) load_group(f, from + slot_at(1 - half));
        multiply<Act, S>(sums[f], a, b[1]);
      }
    }
    copier.request(p, now);
    now = next;
  }

  // Reduces the two partial sums of every row and token in shared memory, in the place of the ring, which is no longer needed.
  float2 factors[S::kFragments];  // of rows g and g + 8
#pragma unroll
  for (int f = 0; f < S::kFragments; ++f) {
    constexpr float kUnit = 1.0f / kScaleUp<Act>;
    factors[f] = {kUnit, kUnit};
    if (p.scale_after) {  // every record has the same
      const int stage = (records().count - 1) % p.stages;
      factors[f] =
          load_row_pair(base + stage * p.stage_bytes + slot_at(0), row_pair_position(fragment + f, lane), format.scale_type);
    }
  }
  ptx::async_copy_wait<0>();
  __syncthreads();
  float* const all_sums = reinterpret_cast<float*>(shared);
  float* const lane_sums = all_sums + lane % 4 * 2 * S::kSumPitch + first_fragment * gpu_tile::kFragmentRows + lane / 4;
#pragma unroll
  for (int writer = 1; writer >= 0; --writer) {
    if (part == writer) {
#pragma unroll
      for (int f = 0; f < S::kFragments; ++f)
#pragma unroll
        for (int t = 0; t < S::kTokenTiles; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& sum = lane_sums[(8 * t + i % 2) * S::kSumPitch + f * gpu_tile::kFragmentRows + i / 2 * 8];
            sum = writer == 1 ? sums[f][t][i] : (sums[f][t][i] + sum) * (i / 2 == 0 ? factors[f].x : factors[f].y);
          }
    }
    __syncthreads();
  }

  if constexpr (kSplits) {
    if (p.split.ranks > 1 && !add_ranks<kThreads, S::kRows, S::kSumPitch, S::kTokens>(
                                 p.split, tile_index(), rank_of_cta(), min(tokens.end - tokens.first, S::kTokens), all_sums))
      return;
  }
  if (kPatches && p.channel_stride != 0) {  // channels of an image are apart, pixels side by side: a row's 32 tokens are a warp's
    const int pixels = p.patches.pixels();
#pragma unroll 1
    for (int token = lane; token < S::kTokens && tokens.first + token < p.m; token += 32) {
      const int m = tokens.first + token;
      const epilogue::Pixel pixel{m / pixels, m % pixels};
      const std::int64_t at = pixel.image * p.image_stride + pixel.pixel;
#pragma unroll 1
      for (int row = warp; row < S::kRows; row += kWarps) {
        const int n = first_tile * gpu_tile::kRows + row;
        if (n < p.n) p.epilogue.store_at(at + n * p.channel_stride, pixel, n, all_sums[token * S::kSumPitch + row]);
      }
    }
    return;
  }
  const bool plain = p.epilogue.plain();
  for (int unit = warp; unit < S::kTokens * S::kTiles; unit += kWarps) {  // a token's 64 rows of a tile
    const int token = unit / S::kTiles, row = unit % S::kTiles * gpu_tile::kRows + 2 * lane;
    const int m = tokens.first + token, n = first_tile * gpu_tile::kRows + row;
    if (m >= tokens.end) break;
    float2 sum = *reinterpret_cast<const float2*>(all_sums + token * S::kSumPitch + row);
    if constexpr (kExperts) sum = {__fmul_rn(sum.x, scale2), __fmul_rn(sum.y, scale2)};
    if (plain && n + 1 < p.n) {
      p.epilogue.store_plain(m, n, sum);
    } else {
      p.epilogue.store_two(m, n, sum.x, sum.y, p.n);
    }
  }
}

// ---- launch

using Kernel = const Launchable<Params>*;

struct Variant {
  int tokens, tiles;
  int sum_bytes;
  int ctas;                  // that share an SM
  GemmSm80Shape shape;       // its times are compared among variants only
  Kernel integers[2][2][2];  // [usual][bf16][8 bits]
  Kernel floats[2][2];       // codes that are floats: [bf16][8 bits]
};
template <class S, bool kPatches, bool kExperts = false>
constexpr Variant variant(const GemmSm80Shape& shape) {
  return {S::kTokens,
          S::kTiles,
          S::kSumBytes,
          S::kCtas,
          shape,
          {{{&kLaunchable<gemm_sm80_kernel<S, __half, Codes::u4, false, kPatches, kExperts>>,
             &kLaunchable<gemm_sm80_kernel<S, __half, Codes::u8, false, kPatches, kExperts>>},
            {&kLaunchable<gemm_sm80_kernel<S, __nv_bfloat16, Codes::u4, false, kPatches, kExperts>>,
             &kLaunchable<gemm_sm80_kernel<S, __nv_bfloat16, Codes::u8, false, kPatches, kExperts>>}},
           {{&kLaunchable<gemm_sm80_kernel<S, __half, Codes::u4, true, kPatches, kExperts>>,
             &kLaunchable<gemm_sm80_kernel<S, __half, Codes::u8, true, kPatches, kExperts>>},
            {&kLaunchable<gemm_sm80_kernel<S, __nv_bfloat16, Codes::u4, true, kPatches, kExperts>>,
             &kLaunchable<gemm_sm80_kernel<S, __nv_bfloat16, Codes::u8, true, kPatches, kExperts>>}}},
          {{&kLaunchable<gemm_sm80_kernel<S, __half, Codes::e2m1, false, kPatches, kExperts>>,
            &kLaunchable<gemm_sm80_kernel<S, __half, Codes::e4m3, false, kPatches, kExperts>>},
           {&kLaunchable<gemm_sm80_kernel<S, __nv_bfloat16, Codes::e2m1, false, kPatches, kExperts>>,
            &kLaunchable<gemm_sm80_kernel<S, __nv_bfloat16, Codes::e4m3, false, kPatches, kExperts>>}}};
}

/// By the cycles of an SM for a record, about: of the matrix instructions (6.3 a scheduler) or of ldmatrix, and of the barrier.
template <class S, bool kPatches, bool kExperts = false>
constexpr Variant variant(int cycles) {
  return variant<S, kPatches, kExperts>({S::kRows, S::kTokens, static_cast<double>(cycles), static_cast<double>(cycles)});
}

/// The number of stages that fit; 0 when fewer than kMinStages do.
int stages_in(int bytes, int stage) {
  const int stages = std::min(bytes / stage, kMaxStages);
  return stages < kMinStages ? 0 : stages;
}

int stage_bytes_of(const Params& p, const Variant& v) { return gemm_sm80_stage_bytes(v.tokens, v.tiles, p.format.bytes); }

/// Bytes of the table of a convolution, which follows the ring.
int table_bytes(const Params& p, const Variant& v) { return p.patches.channels == 0 ? 0 : v.tokens * kCornerBytes; }

/// The token blocks of the grid.
std::int64_t token_blocks(const Params& p, const Variant& v) {
  return p.experts.tiles != nullptr ? p.experts.most : (p.m + v.tokens - 1) / v.tokens;
}

/// Fills the parameters that follow from the weight and the epilogue.
Params params(const DeviceWeight& weight, const epilogue::Element& epilogue, int m) {
  const gpu_tile::Geometry& geo = weight.geometry;
  Params p{};
  p.records = static_cast<const std::uint8_t*>(weight.records);
  p.format = record_format(weight);
  p.epilogue = epilogue;
  p.m = m;
  p.n = static_cast<int>(geo.n);
  p.k = static_cast<int>(geo.k);
  p.tiles = geo.tiles();
  p.tile_records = geo.records();
  p.scale_after = weight.per_channel && weight.zero != ZeroKind::offset;
  return p;
}

/// Chooses the fastest shape and the longest ring that fits, and launches. With p.split.ranks sums meet in the memory before scratch_end.
cudaError_t launch(std::span<const Variant> variants, Params& p, DType act, cudaStream_t stream, void* scratch_end = nullptr) {
  int device = 0, most = 0, sms = 0, most_stages = 0;
  if (const cudaError_t e = most_shared(device, most)) return e;
  if (const cudaError_t e = ring_stages_of_device(kMaxStages, most_stages)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
  const Variant* best = nullptr;
  double best_us = 0;
  std::int64_t best_ctas = 0;
  const int ranks = p.split.ranks, records = records_of(ranks - 1, ranks, p.tile_records).count;  // the last rank has the most
  for (const Variant& v : variants) {
    if (p.patches.groups > 1 && p.patches.group_outputs % (v.tiles * gpu_tile::kRows) != 0)
      continue;  // a CTA's rows are of one group
    if (v.sum_bytes > most || stages_in(most - table_bytes(p, v), stage_bytes_of(p, v)) == 0) continue;
    const std::int64_t ctas = std::int64_t{(p.tiles + v.tiles - 1) / v.tiles} * token_blocks(p, v) * ranks;
    const double us = gemm_sm80_us(v.shape, ctas, records, ranks, sms);
    if (best == nullptr || us < best_us) best = &v, best_us = us, best_ctas = ctas;
  }
  if (best == nullptr || best_ctas > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  p.row_blocks = (p.tiles + best->tiles - 1) / best->tiles;
  p.token_blocks = static_cast<int>(token_blocks(p, *best));
  p.split = split_k(scratch_end, ranks, best_ctas / ranks, best->shape.rows, best->tokens);
  p.stage_bytes = stage_bytes_of(p, *best);
  const int table = table_bytes(p, *best);
  p.stages = stages_in(most - table, p.stage_bytes);
  if (best->ctas == 2 && best_ctas > sms) {
    constexpr int kReserved = 1024;  // of shared memory, for each CTA of an SM
    const int stages = stages_in((most + kReserved) / 2 - kReserved - table, p.stage_bytes);
    if (stages > kMinStages) p.stages = stages;
  }
  p.stages = std::min(p.stages, most_stages);
  const int smem = std::max(p.stages * p.stage_bytes + table, best->sum_bytes);
  const bool bf16 = act == DType::bf16, eight = gpu_tile::bits(p.format.codes) == 8;
  const Kernel kernel =
      gpu_tile::are_floats(p.format.codes) ? best->floats[bf16][eight] : best->integers[is_usual(p.format)][bf16][eight];
  if (const cudaError_t e = kernel->allow_all_shared()) return e;
  return launch_after(kernel->kernel, static_cast<unsigned>(best_ctas), kThreads, smem, stream, p);
}

}  // namespace
}  // namespace nibble::cuda
