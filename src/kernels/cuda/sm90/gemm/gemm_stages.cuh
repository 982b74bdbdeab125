// The sm_90 GEMM's traits, and its first role: producers fill the stages of the ring.
//
//   stage  = n tokens × 128 channels, d of them (boxes of 128 bytes a token, 128-byte swizzle)
//          | terms of its tokens, of activations that are codes (wna8.hpp)
//          | records: all of row block 0, then of row block 1, …
//
// Of a pointwise convolution of NCHW images, a channel's pixels are side by side in memory, and in shared memory, too (kPlanar): boxes of
// 64 pixels × 64 channels, those of the same channels one after the other. Tokens of an image are rounded up to a multiple of 64, so that no
// box has pixels of two images.
//
// Images of f32 come as the three bytes of fixed-point numbers, in as many planes of images of codes. K is three times as long then:
//
//   records        0 … R−1 │ R … 2R−1   │ 2R … 3R−1         of a pass
//   activations    low     │ middle     │ high              plane of images, with the scales of its bytes
//   weights        0 … R−1 │ 0 … R−1    │ 0 … R−1           the same records
#pragma once

#include <cuda.h>

#include <type_traits>

#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/device/opaque.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/stream_k.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/sm90/gemm/cta.cuh"
#include "kernels/cuda/sm90/gemm/gemm.hpp"
#include "kernels/cuda/weights/code_fragment.cuh"
#include "kernels/cuda/weights/weight_fragment.cuh"

namespace nibble::cuda {
namespace {

constexpr int kWeightProducers = 2;  // warps

/// What a kernel is compiled for. kPatches: tokens are output pixels of a convolution. kExperts: rows of A have weights of their experts.
/// kPairs: an activation is two numbers (gemm_pairs.cuh). kPlanar: patches are pixels, and those of a channel are read side by side.
template <class ActType, Codes kWeightCodes, ConstantsPath kConstants, int kPassTokens, bool kFromPatches, ActTerms kActTerms,
          bool kOfExperts = false, bool kOfPairs = false, bool kOfPlanar = false>
struct GemmTraits {
  using Act = ActType;
  using Sums = float[kPassTokens / 2];  // of a lane
  static constexpr Codes kWeight = kWeightCodes;
  static constexpr int kBits = gpu_tile::bits(kWeight), kTokens = kPassTokens;
  static constexpr ConstantsPath kPath = kConstants;
  static constexpr bool kPatches = kFromPatches, kExperts = kOfExperts, kPairs = kOfPairs, kPlanar = kOfPlanar;
  static constexpr ActTerms kTerms = kActTerms;
  static constexpr bool kCodes = std::is_same_v<Act, std::int8_t>;
  static constexpr bool kOffsets = kTerms == ActTerms::offsets, kSumsCodes = kOffsets || kTerms == ActTerms::zeros;
  static constexpr int kFolds = !kCodes ? 0 : kPath == ConstantsPath::any ? gpu_tile::kChannels / 32 : 1;  // of a record
  static constexpr GemmShape kShape{kTokens, kCodes, kFolds, kPatches, kOffsets, kExperts, kPairs};
  static constexpr int kBoxBytes = kTokens * kBoxBytesOfToken;
  static constexpr int kBoxChannels = kBoxBytesOfToken / static_cast<int>(sizeof(Act));
  static constexpr int kActChannels = gpu_tile::kChannels * (kPairs ? 2 : 1);  // of a record, as columns of x
  static constexpr int kBoxes = kActChannels / kBoxChannels;                   // of a record
  static constexpr int kActBytes = kBoxes * kBoxBytes;                         // of a record
  static constexpr int kTermBytes = kShape.term_bytes();                       // of a record
  static constexpr int kFoldBytes =
      term_tokens(kTokens, kExperts) * token_term_bytes(kOffsets);  // terms of a fold, not of patches
};

template <class T>
struct GemmStages : Cta<GemmParams, T::kTokens, T::kShape.groups(), T::kCodes, T::kPatches, T::kExperts> {
  using Base = Cta<GemmParams, T::kTokens, T::kShape.groups(), T::kCodes, T::kPatches, T::kExperts>;
  using Base::Base, Base::p, Base::base, Base::depth, Base::empty, Base::full, Base::is_last, Base::kGroups;
  static constexpr int kProducerRegisters = T::kCodes && T::kTokens == 128 ? 32 : 56;

  static constexpr bool kPlanes = T::kCodes && T::kPatches;  // whose CTAs have a depth of 1
  static constexpr bool kPlanar = T::kPlanar;

  __device__ std::uint32_t act(int stage) const { return base + stage * depth() * T::kActBytes; }
  __device__ std::uint32_t terms(int stage) const { return base + p.map.terms + stage * depth() * T::kTermBytes; }
  __device__ std::uint32_t records(int stage) const { return base + p.map.records + stage * kGroups * p.format.bytes; }

  static constexpr int kPart = T::kShape.part();
  /// The columns of a pass's products: tokens, of an expert's tile only the parts that have rows.
  __device__ static int columns(const Pass& pass) {
    return kPart == T::kTokens ? T::kTokens : (pass.tile.rows + kPart - 1) / kPart * kPart;
  }
  /// Calls issue(sums) with the sums of so many columns, or of all if there are more: instructions have constant sizes.
  template <int kColumns = 0, class Sum, int kSums, class Issue>
  __device__ __forceinline__ static void for_columns(int columns, Sum (&sums)[kSums], Issue issue) {
    constexpr int kNext = kColumns + kPart;
    if constexpr (kNext < 2 * kSums) {
      if (columns > kNext) return for_columns<kNext>(columns, sums, issue);
      issue(reinterpret_cast<Sum(&)[kNext / 2]>(sums));
    } else {
      issue(sums);
    }
  }
  __device__ int act_bytes(const Pass& pass) const {
    return T::kBoxes * kBoxBytesOfToken * (is_last(pass) ? p.last_tokens : columns(pass));
  }
  __device__ static int active() { return kGroups; }

  // One lane in each of three warps, because issuing a copy takes time. Two copy the records of alternate row blocks, one activations. What
  // does not change is computed before their loops.
  // All wait for the same empty stages. The first two announce bytes, also when they have none to copy: a stage that were full without one
  // of them could be reused before it looked, twice in the worst case, which looks to a late warp as if it were not yet empty.

  __device__ void prepare(unsigned producer) const {
    if (producer == 0) this->initialise_barriers(kWeightProducers, active());
    if (producer == kWeightProducers && this->lane < (T::kPatches ? 1 : 2))
      ptx::prefetch_tensor_map(this->lane == 0 ? &p.x : &p.last_x);
  }
  __device__ void produce(unsigned producer) const {
    if (producer < kWeightProducers && ptx::elected()) {
      produce_weights(producer);
      if (T::kTokens == 16 && !T::kExperts && producer == 0) prefetch(p.next);
    }
    if (producer == kWeightProducers && ptx::elected()) produce_activations();
    if constexpr (T::kExperts) {
      if (producer > kWeightProducers && ptx::elected()) this->expert_passes().draw(this->schedule(), p.experts);
    } else {
      if (producer > kWeightProducers) set_flags(p.parts, p.schedule, this->cluster, this->lane);
    }
  }
  __device__ static int producing_threads() { return kWeightProducers + 1; }

  /// Weights are constant: this producer does not wait for the previous kernel (PDL).
  __device__ void produce_weights(int first_block) const {
    // Weights that are read once need not stay in L2.
    const bool once = T::kExperts ? this->schedule().band == 0 : p.schedule.token_tiles == 1;
    const std::uint64_t policy = once ? ptx::evict_first() : ptx::evict_last();
    const int record_bytes = p.format.bytes, stages = p.stages, block_bytes = depth() * record_bytes;
    const std::uint64_t tile_bytes = static_cast<std::uint64_t>(kPlanes ? p.plane_records : p.schedule.records) * record_bytes;
    const std::uint32_t all_full = full(0);
    Cursor to{0, 1};  // a stage that was never used counts as empty
    this->for_each_pass([&](const Pass& pass) {
      int record = kPlanes ? pass.first % p.plane_records : pass.first;
      const std::uint8_t* from =
          p.records + this->weight_offset(pass) + (pass.block + first_block) * tile_bytes + record * record_bytes;
      const int copies = (pass.blocks - first_block + kWeightProducers - 1) / kWeightProducers;
      const int expected =
          (first_block == 0 ? act_bytes(pass) + T::kTermBytes : 0) + copies * record_bytes;  // of a record of each
#pragma unroll 1
      for (int left = pass.records(); left > 0; left -= depth()) {
        const std::uint32_t is_full = all_full + 8 * to.stage, at = records(to.stage) + first_block * block_bytes;
        ptx::barrier_wait(is_full + 8 * stages, to.parity);                  // is empty
        const int count = min(depth(), left), bytes = count * record_bytes;  // consecutive records are one copy
        ptx::barrier_arrive_expect(is_full, count * expected);
#pragma unroll 1
        for (int i = 0; i < copies; ++i)
          ptx::bulk_copy(at + i * kWeightProducers * block_bytes, from + i * kWeightProducers * tile_bytes, bytes, is_full,
                         policy);
        from += bytes;
        if (kPlanes && ++record == p.plane_records) record = 0, from -= tile_bytes;
        to.advance(stages);
      }
    });
  }
  __device__ void produce_activations() const {
    const std::uint64_t policy = ptx::evict_last();
    const int stages = p.stages;
    const std::uint32_t all_full = full(0);
    Cursor to{0, 1};
    bool waits = true;
    this->for_each_pass([&](const Pass& pass) {
      const auto tokens = this->tokens_of(pass);
      const int first = tokens.first(), end = pass.end * T::kActChannels;
      PatchWalk walk;
      const int box_channels = T::kCodes && T::kPatches ? p.box_channels : T::kBoxChannels;
      int record = pass.first;  // of the plane
      if constexpr (kPlanes) record %= p.plane_records;
      if constexpr (T::kPatches && !T::kPlanar) walk = patch_walk(p.patches, record * gpu_tile::kChannels, box_channels, first);
      if constexpr (kPlanes) walk.from.image += pass.first / p.plane_records * p.plane_images;
      const int rows = columns(pass), box_rows = rows == T::kTokens ? rows : kPart;
      const CUtensorMap* const x = is_last(pass) || rows != T::kTokens ? &p.last_x : &p.x;
      const int first_term = T::kExperts ? first & ~1 : pass.token_tile * T::kTokens;  // of a pair
      const std::uint8_t* from = p.terms + pass.first * T::kFolds * p.fold_pitch + first_term * token_term_bytes(T::kOffsets);
      if (waits) ptx::wait_for_predecessors();  // with everything else done
      waits = false;
#pragma unroll 1
      for (int channel = pass.first * T::kActChannels; channel < end;) {
        const std::uint32_t is_full = all_full + 8 * to.stage;
        ptx::barrier_wait(is_full + 8 * stages, to.parity);  // is empty
        if constexpr (kPlanes) {
          request_pixels(to.stage, walk, policy);
          channel += gpu_tile::kChannels;
          if (++record == p.plane_records) record = 0, walk.at = {}, walk.from.image += p.plane_images;
        } else {
          std::uint32_t at = act(to.stage), at_terms = terms(to.stage);
#pragma unroll 1
          for (int box = 0; box < T::kBoxes * depth() && channel < end; ++box) {
            if constexpr (T::kPlanar) {
              request_planar(at, channel, first, is_full, policy);
            } else if constexpr (T::kPatches) {
              ptx::load_patches(at, &p.x, walk.next(p.patches, p.images), is_full, policy);
            } else {
#pragma unroll 1
              for (int row = 0; row < rows; row += box_rows)
                ptx::load_box(at + row * kBoxBytesOfToken, x, channel, first + row, is_full, policy);
            }
            if constexpr (T::kCodes) {
#pragma unroll 1
              for (int fold = 0; fold < T::kFolds; ++fold, at_terms += T::kFoldBytes, from += p.fold_pitch)
                ptx::bulk_copy(at_terms, from, T::kFoldBytes, is_full, policy);
            }
            at += T::kBoxBytes;
            channel += T::kBoxChannels;
          }
        }
        to.advance(stages);
      }
    });
  }
  /// 64 channels of the tokens from `first` on, a box for every 64 of them.
  __device__ void request_planar(std::uint32_t at, int channel, int first, std::uint32_t is_full, std::uint64_t policy) const {
    const int image_tokens = p.patches.pixels() + p.unused_tokens;
    int image = first / image_tokens, pixel = first % image_tokens;
#pragma unroll 1
    for (int left = T::kTokens; left > 0; left -= kPlanarPixels, at += kWgmmaPlanarBytes) {
      ptx::load_box(at, &p.x, pixel, channel, image, is_full, policy);
      pixel += kPlanarPixels;
      if (pixel == image_tokens) pixel = 0, ++image;
    }
  }
  /// A record of codes of patches: a box of 128 channels or two of 64, and 16 bytes of a pixel's terms for every 128 channels or, folds
  /// being of 32, for every 64.
  __device__ void request_pixels(int stage, PatchWalk& walk, std::uint64_t policy) const {
    constexpr int kTermChannels = T::kFolds == 1 ? gpu_tile::kChannels : 2 * kStepChannels;
    std::uint32_t at = act(stage), at_terms = terms(stage);
#pragma unroll 1
    for (int channel = 0; channel < gpu_tile::kChannels; channel += p.box_channels) {
      PatchBox box = walk.next(p.patches, p.images);
      ptx::load_patches(at, &p.x, box, full(stage), policy);
      at += p.box_channels * T::kTokens;
      box.c = box.c / kTermChannels * 16;
#pragma unroll 1
      for (int i = 0; i < p.box_channels; i += kTermChannels, box.c += 16, at_terms += T::kTokens * 16)
        ptx::load_patches(at_terms, &p.pixel_terms, box, full(stage), policy);
    }
  }
};

}  // namespace
}  // namespace nibble::cuda
