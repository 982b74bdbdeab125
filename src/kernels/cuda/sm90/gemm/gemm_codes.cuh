// The products of activations that are s8 codes (wna8.hpp): weights become signed bytes in registers, three instructions for eight of them,
// and tensor cores sum integers. The sum of a fold of 128 channels (32, where fewer share a scale) is scaled at its end:
//
//   codes → bytes │ 4 wgmma of k32 │ s_a·s_w·dot onto the sums, 3 instructions each        the others multiply meanwhile
#pragma once

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/wgmma8.cuh"
#include "kernels/cuda/sm90/gemm/gemm_stages.cuh"

namespace nibble::cuda {
namespace {

template <class T>
struct CodeProducts : GemmStages<T> {
  using Base = GemmStages<T>;
  using Base::Base, Base::p, Base::lane, Base::warp, Base::act, Base::records, Base::terms, Base::full, Base::release;
  using Base::depth, Base::k_index, Base::row_group, Base::kGroups, Base::kUnits;
  using Sums = typename T::Sums;
  static constexpr ConstantsPath kPath = T::kPath;
  static constexpr int kBits = T::kBits, kFolds = T::kFolds, kTokens = T::kTokens;
  static constexpr bool kSumsCodes = T::kSumsCodes, kOffsets = T::kOffsets, kPatches = T::kPatches;

  /// Adds the products of the warpgroup's row block and its share of the pass's records. A fold's sums are exact integers; scaled, they are
  /// added in f32:
  ///
  ///   acc += s_a·s_w · Σ a·(u − base)  +  s_a·Σa · (o − s_w·(z − base))         base: 8 or 128, which makes u a signed operand
  ///
  /// With zero points of activations a stands for a − z_a in both, with offsets s_a·a for x̂ = s_a·a + o_a. The second part is present
  /// where zeros are not the base.
  ///
  /// A part is all tokens where a row has only a scale; else at most 64, or 32 where the constants of a fold take more registers. Integer
  /// and f32 sums of more tokens would leave no registers for a third warpgroup, and products of other warpgroups are what overlaps with a
  /// fold. Products with operands in registers block their own warpgroup, so that a second set of integers gains nothing. Parts in which a
  /// tile of experts has no rows are left out.
  __device__ __forceinline__ void multiply(const Pass& pass, Cursor& from, Sums& acc) const {
    const int count = pass.records(), columns = this->columns(pass);
    constexpr int kSteps = gpu_tile::kChannels / kStepChannels, kFoldSteps = kSteps / kFolds;
    constexpr int kVectors = gpu_tile::kChannels / gpu_tile::step_channels(kBits);  // 16 bytes of a lane each
    constexpr int kFoldVectors = kVectors < kFolds ? 1 : kVectors / kFolds;         // of a fold, or that have a fold in them
    constexpr int kPartTokens = T::kExperts && kTokens == 128                                          ? 64
                                : kTokens < 64 || (kPath == ConstantsPath::fixed_zeros && !kSumsCodes) ? kTokens
                                : kFolds > 1 || (kSumsCodes && kTokens == 64)                          ? 32
                                                                                                       : 64,
                  kPartSums = kPartTokens / 2;
    using Part = std::int32_t[kPartSums];
    using Bytes = std::uint32_t[kFoldSteps][4];
    struct Fold {
      int stage, index;      // of the ring, and of the record
      std::int32_t sums[2];  // of the weight's codes
    };
    const int stages = p.stages, span_shift = 31 - __clz(p.format.span);
    const int stage_bytes = kGroups * p.format.bytes, slots = p.format.slots_offset;
    const std::uint32_t first = records(0) + (row_group() * depth() + k_index()) * p.format.bytes;
    const std::uint32_t first_codes = first + gpu_tile::vector_offset(0, warp, lane);
    const std::uint32_t first_operand = wgmma_operand_low(act(0) + k_index() * T::kActBytes),
                        stage_operand = depth() * (T::kActBytes / 16);
    const std::uint32_t lane_terms = k_index() * T::kTermBytes + lane % 4 * 2 * kTermPitch;  // two tokens'
    const int first_token = first_of_pair(pass);

    int r = k_index(), index = 0;  // of the next fold
    const auto fetch = [&](Fold& fold, Bytes& bytes) {
      if (index == 0) ptx::barrier_wait(full(from.stage), from.parity);
      fold.stage = from.stage, fold.index = index;
      uint4 codes[kFoldVectors];
#pragma unroll
      for (int v = 0; v < kFoldVectors; ++v)
        codes[v] = ptx::load_shared16(first_codes + from.stage * stage_bytes +
                                      gpu_tile::vector_offset(index * kVectors / kFolds + v, 0, 0));
      fold.sums[0] = fold.sums[1] = 0;
      if (kOffsets) {
        constexpr int kFold = gpu_tile::kChannels / kFolds;
        const int end = (pass.first + r) * gpu_tile::kChannels + (index + 1) * kFold;
        fold.sums[0] = fold.sums[1] = sum_past_k(end, kFold, p.k);
      }
#pragma unroll
      for (int i = 0; i < kFoldSteps; ++i) {
        signed_codes<kBits>(bytes[i], codes[i * kFoldVectors / kFoldSteps], index * kFoldSteps + i);
        if (kSumsCodes) add_codes(fold.sums, bytes[i]);
        pin(bytes[i]);
      }
      if (kSumsCodes) share_sums(fold.sums);
      if (++index < kFolds) return;
      index = 0;
      from.advance(stages);
      r += depth();
    };
    const auto multiply = [&](Part& dot, const Bytes& bytes, const Fold& fold, int part) {
      const std::uint32_t operand = first_operand + fold.stage * stage_operand + part_columns(part * kPartTokens);
      wgmma_fence();
      WgmmaS8<kPartTokens>::begin(dot, bytes[0], code_operand(operand, fold.index * kFoldSteps));
#pragma unroll
      for (int i = 1; i < kFoldSteps; ++i)
        WgmmaS8<kPartTokens>::add(dot, bytes[i], code_operand(operand, fold.index * kFoldSteps + i));
      wgmma_commit();
    };
    const auto row_terms_of = [&](const Fold& fold) {
      const std::uint32_t slot = first + fold.stage * stage_bytes + slots;
      const int position = row_pair_position(warp, kTokens == 128 ? opaque(lane) : lane);  // 128 leave no register for it
      if constexpr (kFolds == 1)
        return row_terms<kPath, kBits>(p.format, load_raw<kPath>(p.format, slot, position));
      else
        return load_row_terms<kBits>(p.format, slot + (fold.index * kStepChannels >> span_shift) * p.format.slot_bytes, position);
    };
    const auto bits = [](float x) { return __float_as_uint(x); };
    // Returns bits of what it read.
    const auto add = [&](const Part& dot, const Fold& fold, int part, const RowTerms& rows) {
      std::uint32_t read = 0;
      if (kTokens == kPartTokens) {  // else a part before this one has used them
        read = bits(rows.scale[0]) | bits(rows.scale[1]);
        if (kPath != ConstantsPath::fixed_zeros) read |= bits(rows.shift[0]) | bits(rows.shift[1]);
      }
      const int in_record = kPatches ? fold.index / 2 * kTokens * 16 + fold.index % 2 * 8 : fold.index * T::kFoldBytes;
      const std::uint32_t at = terms(fold.stage) + lane_terms + in_record + part * kPartTokens * kTermPitch;
#pragma unroll
      for (int j = 0; j < kPartTokens / kUnitTokens; ++j) {
        float* const to = acc + part * kPartSums + 4 * j;
        const std::uint32_t from = at + j * kUnitTokens * kTermPitch;
        if constexpr (kOffsets) {
          const OffsetTerms of_tokens = load_offset_terms<kPath>(from);
          read |= of_tokens.scales.x | of_tokens.offsets.x | of_tokens.sums.x;
          add_fold_offsets<kPath>(to, dot + 4 * j, of_tokens, rows, fold.sums);
        } else {
          constexpr bool kPlain = T::kTerms == ActTerms::plain;  // scales are 1, and not used
          constexpr bool kReads = !kPlain || kPath != ConstantsPath::fixed_zeros;
          uint4 of_tokens{};
          if constexpr (kReads) {
            of_tokens = token_terms(from, first_token);
            read |= kPlain ? of_tokens.z : of_tokens.x;
            if (kPatches || T::kExperts) read |= kPlain ? of_tokens.w : of_tokens.y;
          }
          if constexpr (kSumsCodes)
            add_fold_zeros<kPath>(to, dot + 4 * j, of_tokens, rows, fold.sums);
          else
            add_fold<kPath, kPlain>(to, dot + 4 * j, of_tokens, rows);
        }
      }
      return read;
    };
    if (r >= count) {
      // the last stage has no record for this warpgroup
    } else
      do {
        Part dot;
        Bytes bytes;
        Fold now;
        fetch(now, bytes);
        RowTerms rows;
        std::uint32_t read;
#pragma unroll
        for (int part = 0; part < kTokens / kPartTokens; ++part) {
          if (T::kExperts && part * kPartTokens >= columns) break;
          multiply(dot, bytes, now, part);
          if (part == 0) rows = row_terms_of(now);  // while the first products run
          wgmma_wait<0>();
          read = add(dot, now, part, rows);  // those of the part before are used when its integers are overwritten
        }
        if (now.index == kFolds - 1) release(now.stage, read);
      } while (r < count);
    this->pass_on_rest(r, count, from);
    scale(pass, acc);
  }
  /// Applies per-token scales that the group sums leave out. Entries past M are never stored.
  __device__ void scale(const Pass& pass, Sums& acc) const {
    if constexpr (T::kExperts) return scale_rows(pass, acc);
    if (p.token_scales == nullptr) return;
    const float* const from = p.token_scales + pass.token_tile * kTokens + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const float2 scale = __ldcg(reinterpret_cast<const float2*>(from + j * kUnitTokens));
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[4 * j + i] = __fmul_rn(acc[4 * j + i], i % 2 == 0 ? scale.x : scale.y);
    }
  }
  /// The same of rows of an expert, which begin anywhere, and its scale2.
  __device__ void scale_rows(const Pass& pass, Sums& acc) const {
    if (p.token_scales == nullptr && p.experts.scale2 == nullptr) return;
    const float scale2 = p.experts.scale2 == nullptr ? 1.0f : __ldg(p.experts.scale2 + pass.tile.expert);
    const int first = this->tokens_of(pass).first() + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kUnits; ++j)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const float own = p.token_scales == nullptr ? 1.0f : __ldcg(p.token_scales + first + j * kUnitTokens + odd);
        const float scale = __fmul_rn(own, scale2);
        acc[4 * j + odd] = __fmul_rn(acc[4 * j + odd], scale);
        acc[4 * j + 2 + odd] = __fmul_rn(acc[4 * j + 2 + odd], scale);
      }
  }
  /// The row of A that a pass's tokens begin with, of which terms need to know only whether it is odd.
  __device__ int first_of_pair(const Pass& pass) const {
    if constexpr (T::kExperts)
      return this->tokens_of(pass).first();
    else
      return 0;
  }
  /// Tokens [token, …) of a box, in units of 16 bytes.
  __device__ int part_columns(int token) const { return token * (kPatches ? p.box_channels : kBoxBytesOfToken) / 16; }
  /// Channels [32·i, …) of a record of codes.
  __device__ __forceinline__ std::uint64_t code_operand(std::uint32_t operand, int i) const {
    if constexpr (!kPatches) return wgmma_operand(operand + i * (kStepChannels / 16));
    return wgmma_operand(operand + code_columns(i, p.box_channels, kTokens),
                         p.box_channels == kPatchChannels ? kWgmmaRows64 : kWgmmaRows128);
  }
  /// Bytes between tokens' terms. Both scales of a lane's two tokens and both other terms are 16 bytes, contiguous or, for pixels, two
  /// pieces of eight: a weight without zeros reads only the scales, in one load.
  static constexpr int kTermPitch = kPatches ? 16 : token_term_bytes(kOffsets);
  __device__ __forceinline__ static uint4 token_terms(std::uint32_t at, int first_token) {
    if constexpr (T::kExperts) return load_terms_from(at, first_token);
    if constexpr (!kPatches) return ptx::load_shared16(at);
    const uint2 even = ptx::load_shared8(at), odd = ptx::load_shared8(at + kTermPitch);
    return {even.x, odd.x, even.y, odd.y};
  }
};

}  // namespace
}  // namespace nibble::cuda
