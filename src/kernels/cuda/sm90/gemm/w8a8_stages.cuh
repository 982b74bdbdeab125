// The 8-bit GEMM's traits, and its first role: producers fill the stages of the ring.
//
//   stage  = n tokens × 128 channels, d of them (a TMA box, 128-byte swizzle; of 16-bit floats two, of 64 channels each)
//          | records of 64 rows × 128 channels: all of row block 0, then of row block 1, …
//          | with groups: the scales of its tokens
//
// In a convolution tokens are output pixels. TMA walks over the image (tensor_map.hpp) and copies channels of one element of the filter, 128
// at a time, or 64 where Ci is no multiple of 128. Two boxes of 64 are the halves of a record, 64 bytes a token in each:
//
//                    record, boxes of 128                     record, boxes of 64
//   token t          chunk 0…7, swizzled by t mod 8           chunk 0…3 │ chunk 4…7, each swizzled by t/2 mod 4
//   k32 number i     32·i bytes on                            32·(i mod 2) bytes on in box i/2, n·64 bytes behind the first
#pragma once

#include <cuda.h>

#include <type_traits>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/stream_k.cuh"
#include "kernels/cuda/sm90/gemm/cta.cuh"
#include "kernels/cuda/sm90/gemm/w8a8.hpp"

namespace nibble::cuda {
namespace {

/// What a kernel is compiled for. kGrouped: groups of channels have scales. kPatches: tokens are output pixels of a convolution. kPrecise:
/// partial sums of a few records are added in f32. kTokenRows: tokens are the 64-row operand (w8a8_token_rows.cuh). kExperts: rows of A have
/// weights of their experts. What is not a parameter is the same for all but activations that come as floats (w8a8_float_rows.cuh).
template <class CodeType, int kPassTokens, bool kHasGroups, bool kFromPatches, bool kAddsInFloat, bool kTokenRows = false,
          bool kOfExperts = false>
struct W8A8Traits {
  using Code = CodeType;
  using Sum = typename Code::Sum;
  static constexpr int kTokens = kPassTokens, kGroups = w8a8_groups(kTokens, W8A8Form{kHasGroups, kTokenRows});
  static constexpr bool kGrouped = kHasGroups, kPatches = kFromPatches, kPrecise = kAddsInFloat, kExperts = kOfExperts;
  /// Whether an expert's last tile may have rows for one warpgroup only, which then works alone, on half of the activations.
  static constexpr bool kHalfTiles = kExperts && kTokenRows && kGroups > 1;
  static constexpr bool kReads = kGrouped;            // whether warps read more of a stage than their products do (cta.cuh)
  static constexpr int kRowBlocks = kTokenRowBlocks;  // of a pass at most, where tokens are the 64-row operand
  static constexpr int kBoxes = 1;                    // of a record's activations: 128 bytes of each token
  static constexpr int kActBytes = kBoxes * kTokens * kBoxBytesOfToken;  // of a record
};

template <class T>
struct W8A8Stages : Cta<W8A8Params, T::kTokens, T::kGroups, T::kReads, T::kPatches, T::kExperts> {
  using Base = Cta<W8A8Params, T::kTokens, T::kGroups, T::kReads, T::kPatches, T::kExperts>;
  using Base::Base, Base::p, Base::base, Base::lane, Base::depth, Base::empty, Base::full, Base::is_last;
  /// The producers' warps keep what ptxas needs for the addresses of scales, or for the walk over an image.
  static constexpr int kProducerRegisters = T::kGrouped || T::kPatches ? 40 : 32;
  static constexpr int kBoxChannels = gpu_w8::kChannels / T::kBoxes;

  __device__ int stage_records() const { return p.blocks * depth(); }
  __device__ std::uint32_t act(int stage) const { return base + stage * depth() * T::kActBytes; }
  __device__ std::uint32_t records(int stage) const {
    return base + p.map.records + stage * stage_records() * gpu_w8::kRecordBytes;
  }
  /// Whether the pass has fewer tokens, p.last_tokens, for which last_x is the box.
  __device__ bool is_short(const Pass& pass) const {
    if constexpr (T::kHalfTiles)
      return pass.tile.rows <= p.last_tokens;
    else
      return is_last(pass);
  }
  __device__ int act_bytes(const Pass& pass) const {
    return (is_short(pass) ? p.last_tokens * T::kBoxes * kBoxBytesOfToken : T::kActBytes) + scale_bytes(pass);
  }
  /// Of a record's scales of tokens that are copied with it: multiples of 16.
  __device__ int scale_bytes(const Pass& pass) const {
    if (!T::kGrouped || p.token_scales != TokenScales::rows) return 0;
    return is_last(pass) ? (p.last_tokens * 4 + 15) / 16 * 16 : T::kTokens * 4;
  }

  // A lane in each of two warps, and a third warp where scales of tokens are scattered. While one record is multiplied they must request the
  // next: of few tokens and rows that is little time, so that what does not change is computed before the loops.

  __device__ void prepare(unsigned producer, int consumers) const {
    if (producer == 0) this->initialise_barriers(gathers() ? 1 + 32 : 1, consumers);  // weights, and a warp that copies scales
    if (producer == 1 && lane < (T::kPatches ? 1 : 2)) ptx::prefetch_tensor_map(lane == 0 ? &p.x : &p.last_x);
    if (T::kGrouped && producer == 2 && p.token_scales == TokenScales::one) fill_scales();
  }
  __device__ void produce(unsigned producer, int storing) const {
    if (producer == 0 && ptx::elected()) {
      produce_weights();
      if (T::kTokens == 16 && !T::kExperts) prefetch(p.next);
    }
    if (producer == 1 && ptx::elected()) produce_activations();
    if constexpr (T::kGrouped)
      if (producer == 2 && gathers()) gather_scales();
    if constexpr (T::kExperts) {
      if (producer == 3 && ptx::elected()) this->expert_passes().draw(this->schedule(), p.experts);
    } else {
      if (producer == 3) set_flags(p.parts, p.schedule, this->cluster, lane, storing);
    }
  }
  __device__ bool gathers() const { return T::kGrouped && p.token_scales == TokenScales::scattered; }
  __device__ int producing_threads() const { return gathers() ? 2 + 32 : 2; }

  /// Weights are constant: this producer does not wait for the previous kernel (PDL).
  __device__ void produce_weights() const {
    const bool once = T::kExperts ? this->schedule().band == 0 : p.schedule.token_tiles == 1;  // then it need not stay in L2
    const std::uint64_t policy = once ? ptx::evict_first() : ptx::evict_last();
    const std::int64_t tile_bytes = std::int64_t{p.schedule.records} * gpu_w8::kRecordBytes;
    const int stages = p.stages, block_bytes = depth() * gpu_w8::kRecordBytes, stage_bytes = p.blocks * block_bytes;
    const std::uint32_t all_full = full(0), all_records = records(0);
    Cursor to{0, 1};  // a stage that was never used counts as empty
    this->for_each_pass([&](const Pass& pass) {
      const std::byte* from =
          p.weight.bytes + this->weight_offset(pass) + pass.block * tile_bytes + std::int64_t{pass.first} * gpu_w8::kRecordBytes;
      const int blocks = pass.blocks, expected = act_bytes(pass) + blocks * gpu_w8::kRecordBytes;  // of a record of each
#pragma unroll 1
      for (int left = pass.records(); left > 0; left -= depth()) {
        const std::uint32_t is_full = all_full + 8 * to.stage, at = all_records + to.stage * stage_bytes;
        ptx::barrier_wait(is_full + 8 * stages, to.parity);                          // is empty
        const int count = min(depth(), left), bytes = count * gpu_w8::kRecordBytes;  // consecutive records are one copy
        ptx::barrier_arrive_expect(is_full, count * expected);
        ptx::bulk_copy(at, from, bytes, is_full, policy);
#pragma unroll 1
        for (int b = 1; b < blocks; ++b) ptx::bulk_copy(at + b * block_bytes, from + b * tile_bytes, bytes, is_full, policy);
        from += bytes;
        to.advance(stages);
      }
    });
  }
  /// Of groups also the scales of tokens that are side by side.
  __device__ void produce_activations() const {
    const std::uint64_t policy = ptx::evict_last();
    const int stages = p.stages;
    const std::uint32_t all_full = full(0);
    Cursor to{0, 1};
    bool waits = true;
    this->for_each_pass([&](const Pass& pass) {
      const auto tokens = this->tokens_of(pass);
      const int first = tokens.first(), end = pass.end, of_scales = scale_bytes(pass);
      PatchWalk walk;
      if constexpr (T::kPatches) walk = patch_walk(p.patches, pass.first * gpu_w8::kChannels, p.box_channels, first);
      const CUtensorMap* const x = is_short(pass) ? &p.last_x : &p.x;
      const float* scales = p.acts.scales + pass.first * p.acts.scale_group + first;
      if (waits) ptx::wait_for_predecessors();  // with everything else done
      waits = false;
#pragma unroll 1
      for (int record = pass.first; record < end;) {
        const std::uint32_t is_full = all_full + 8 * to.stage;
        ptx::barrier_wait(is_full + 8 * stages, to.parity);  // is empty
        std::uint32_t at = act(to.stage);
#pragma unroll 1
        for (int i = 0; i < depth() && record < end; ++i, ++record, at += T::kActBytes) {
          if constexpr (T::kPatches) {
#pragma unroll 1
            for (int channel = 0; channel < gpu_w8::kChannels; channel += p.box_channels)
              ptx::load_patches(at + channel * T::kTokens, &p.x, walk.next(p.patches, p.images), is_full, policy);
          } else {
#pragma unroll
            for (int box = 0; box < T::kBoxes; ++box)
              ptx::load_box(at + box * T::kTokens * kBoxBytesOfToken, x, (record * T::kBoxes + box) * kBoxChannels, first,
                            is_full, policy);
          }
          if (T::kGrouped && of_scales != 0) {
            ptx::bulk_copy(scales_of(to.stage, i), scales, of_scales, is_full, policy);
            scales += p.acts.scale_group;
          }
        }
        to.advance(stages);
      }
    });
  }
  /// A part of the weight of a pass, from that of the first expert.
  template <class Value>
  __device__ const Value* of_pass(const Value* part, const Pass& pass) const {
    if constexpr (T::kExperts)
      return reinterpret_cast<const Value*>(reinterpret_cast<const std::byte*>(part) + this->weight_offset(pass));
    else
      return part;
  }
  __device__ std::uint32_t scales_of(int stage, int index) const {
    return base + p.map.scales + (stage * depth() + index) * T::kTokens * 4;
  }
  /// The scales of row block `block` in all records of a pass's weight; null where rows have one scale each.
  __device__ const float* block_scales(const Pass& pass, int block) const {
    if (p.weight.geometry.block_rows == 0) return nullptr;
    return of_pass(p.weight.scales(), pass) + std::int64_t{block / p.by_scale_blocks} * p.schedule.records;
  }
  /// Writes the scales that are not in memory, once for all passes: nothing overwrites them.
  __device__ void fill_scales() const {
#pragma unroll 1
    for (int at = lane; at < p.stages * depth() * T::kTokens; at += 32)
      ptx::store_shared4(scales_of(0, 0) + 4 * at, __float_as_uint(p.acts.scale));
  }
  /// Copies scattered scales of tokens, the work of a whole warp, 4 bytes at a time. These copies are asynchronous, too, and arrive at the
  /// stage's barrier on completion, so that as many records are in flight as the ring has stages.
  __device__ void gather_scales() const {
    const int stages = p.stages;
    const std::uint32_t all_full = full(0);
    Cursor to{0, 1};
    bool waits = true;
    this->for_each_pass([&](const Pass& pass) {
      const auto range = this->tokens_of(pass);
      const float* at[(T::kTokens + 31) / 32];  // of the lane's tokens
#pragma unroll
      for (int i = 0; i < T::kTokens; i += 32)  // tokens past M are zero and not stored
        at[i / 32] =
            p.acts.scales + pass.first * p.acts.scale_group + min(range.first() + lane + i, range.end() - 1) * p.acts.scale_row;
      if (waits) ptx::wait_for_predecessors();
      waits = false;
#pragma unroll 1
      for (int record = pass.first; record < pass.end;) {
        const std::uint32_t is_full = all_full + 8 * to.stage;
        ptx::barrier_wait(is_full + 8 * stages, to.parity);  // is empty
#pragma unroll 1
        for (int d = 0; d < depth() && record < pass.end; ++d, ++record) {
          const std::uint32_t slot = scales_of(to.stage, d) + 4 * lane;
#pragma unroll
          for (int i = 0; i < T::kTokens; i += 32) {
            if (i + lane < T::kTokens) ptx::async_copy4(slot + 4 * i, at[i / 32]);
            at[i / 32] += p.acts.scale_group;
          }
        }
        ptx::barrier_arrive_after_copies(is_full);
        to.advance(stages);
      }
    });
  }
};

}  // namespace
}  // namespace nibble::cuda
