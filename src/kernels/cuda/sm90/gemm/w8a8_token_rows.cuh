// The 8-bit GEMM with tokens as the 64-row operand: passes of many tokens.
//
// Both operands have the same form, 64 rows of 128 swizzled bytes, so they can be exchanged; the rest of a stage stays as it is:
//
//   D[M,N] = Â[M,K] · Ŵᵀ[K,N]      a warpgroup has 64 of the pass's tokens, of 256 twice 64, and all of its rows, 64 or 128
//
// A lane then has two tokens and many rows. Of groups of channels it scales its sums by four numbers, where one with two rows and many
// tokens needs as many numbers as half of its sums. And a warp's sums are neighbours in D: no other warp takes part in their store.
#pragma once

#include "kernels/cuda/device/stream_k.cuh"
#include "kernels/cuda/device/wgmma8.cuh"
#include "kernels/cuda/sm90/gemm/w8a8_token_store.cuh"

namespace nibble::cuda {
namespace {

template <class T>
struct W8A8TokenRows : W8A8TokenStore<T> {
  using Base = W8A8TokenStore<T>;
  using Base::act, Base::records, Base::kRows, Base::stage_records, Base::kGroups, Base::kTokens, Base::kGroupTokens,
      Base::kPartTokens, Base::kParts, Base::kBlockSums, Base::kPartSums, Base::kUnitSums;
  using Base::Base, Base::p, Base::shared, Base::base, Base::cluster, Base::warpgroup, Base::lane, Base::warp, Base::full,
      Base::release;
  using typename Base::Sum, typename Base::Sums;
  using Code = typename T::Code;

  __device__ static int active() { return kGroups; }
  __device__ void prepare(unsigned producer) const { Base::prepare(producer, active()); }
  __device__ void produce(unsigned producer) const { Base::produce(producer, kGroups); }

  // ---- products

  __device__ std::uint32_t tokens_low() const { return wgmma_operand_low(act(0)) + warpgroup * (T::kActBytes / kGroups / 16); }
  __device__ std::uint32_t rows_low(int stage) const {
    return wgmma_operand_low(records(0)) + stage * stage_records() * (gpu_w8::kRecordBytes / 16);
  }
  /// Adds the products of the warpgroup's tokens and 128 rows, over all channels of the pass, in tensor cores. Rows that the pass lacks are
  /// what a stage holds; they are not stored.
  template <class LookAhead>
  __device__ __forceinline__ void multiply(const Pass& pass, Cursor& from, Sums& acc, LookAhead look_ahead) const {
    const std::uint32_t tokens = tokens_low();
    int previous = -1;  // the stage whose products may be running
#pragma unroll 1
    for (int left = pass.records(); left > 0; --left) {
      ptx::barrier_wait(full(from.stage), from.parity);
      const std::uint32_t a = tokens + from.stage * (T::kActBytes / 16), b = rows_low(from.stage);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          Wgmma8<Code, kRows>::add(reinterpret_cast<Sum(&)[kPartSums]>(acc[part * kPartSums]),
                                   a + part * (kPartTokens * gpu_w8::kChannels / 16) + 2 * i, wgmma_operand(b + 2 * i));
      wgmma_commit();
      wgmma_wait<1>();
      if (previous >= 0) release(previous);
      previous = from.stage;
      from.advance(p.stages);
    }
    look_ahead();
    wgmma_wait_for(acc);
    if (previous >= 0) release(previous);
  }
  /// The same of groups: the products of 64 tokens and a record are scaled and added in f32.
  template <int kBlocks, class LookAhead>
  __device__ __forceinline__ void multiply_groups(const Pass& pass, Cursor& from, Sums& acc, LookAhead look_ahead) const {
    const int count = pass.records();
    constexpr int kPassRows = kBlocks * gpu_w8::kRows;
    const std::uint32_t tokens = tokens_low();
    const float* scales_of_blocks = this->block_scales(pass, pass.block);
    const int other = kBlocks == 1 || scales_of_blocks == nullptr
                          ? 0
                          : static_cast<int>(this->block_scales(pass, pass.block + 1) - scales_of_blocks);
    if (scales_of_blocks != nullptr) scales_of_blocks += pass.first;
    float of_blocks[2] = {1.0f, 1.0f};
    // Asked while the products of the record before run: whether a record has arrived, and the scales of its row blocks, seven of eight from
    // L1. Behind them it would delay the next products by a tenth of their time.
    bool is_here = false;
    const auto ask_for_record = [&](int r) {
      is_here = ptx::barrier_is_past(full(from.stage), from.parity);
      if (scales_of_blocks == nullptr) return;
      of_blocks[0] = __ldg(scales_of_blocks + r);
      of_blocks[1] = __ldg(scales_of_blocks + r + other);
    };
    Sum dot[kBlocks * kBlockSums] = {};
    ask_for_record(0);
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      const int stage = from.stage;
      if (!is_here) ptx::barrier_wait(full(stage), from.parity);
      const std::uint32_t b = rows_low(stage);
      const auto* scales = reinterpret_cast<const float*>(shared + (this->scales_of(stage, 0) - base));
      std::uint32_t read = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const std::uint32_t a = tokens + (stage * kTokens + part * kPartTokens) * (gpu_w8::kChannels / 16);
        wgmma_fence();
        Wgmma8<Code, kPassRows>::renew(dot, a, wgmma_operand(b));
#pragma unroll
        for (int i = 1; i < 4; ++i) Wgmma8<Code, kPassRows>::add(dot, a + 2 * i, wgmma_operand(b + 2 * i));
        wgmma_commit();
        const float* of_tokens = scales + warpgroup * kGroupTokens + part * kPartTokens + warp * 16 + lane / 4;
        const float of_token[2] = {of_tokens[0], of_tokens[8]};
        read |= __float_as_uint(of_token[0]) | __float_as_uint(of_token[1]);
        float scale[kBlocks][2];  // of row blocks, of tokens g and g + 8
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) scale[i / 2][i % 2] = __fmul_rn(of_token[i % 2], of_blocks[i / 2]);
        if (part == kParts - 1) {
          from.advance(p.stages);
          if (r + 1 < count)
            ask_for_record(r + 1);
          else
            look_ahead();
        }
        wgmma_wait<0>();
        if (part == kParts - 1) release(stage, read);
#pragma unroll
        for (int i = 0; i < kBlocks * kBlockSums; ++i) {
          float& sum = acc[part * kPartSums + i];
          sum = fmaf(dot[i], scale[i / kBlockSums][i % kUnitSums / 2], sum);
        }
      }
    }
  }

  // ---- a pass

  static constexpr bool kLooksAhead = true;
  template <class LookAhead>
  __device__ __forceinline__ void consume(const Pass& pass, Cursor& from, LookAhead look_ahead) const {
    Sums acc = {};
    if constexpr (T::kGrouped) {
      if (pass.blocks == 1)
        multiply_groups<1>(pass, from, acc, look_ahead);
      else
        multiply_groups<2>(pass, from, acc, look_ahead);
      if (!reduce(pass, acc)) return;
      this->finish_groups(pass, acc);
    } else {
      const auto terms = this->load_terms(pass);
      multiply(pass, from, acc, look_ahead);
      if (!reduce(pass, acc)) return;
      this->finish(pass, terms, acc);
    }
    this->store_tokens(pass, acc);
  }
  /// Stream-K: adds the sums that others have stored for this pass; or stores these for another, and is false.
  __device__ __forceinline__ bool reduce(const Pass& pass, Sums& acc) const {
    if (p.schedule.split != kStreamK) return true;
    const Parts<Sum, kParts * kPartSums / kUnitSums> parts{p.parts, 4 * kGroups, 4 * warpgroup + warp, lane};
    if (pass.end < p.schedule.records) {
      parts.store(cluster, kGroups, acc);
      return false;
    }
    if (pass.first > 0) parts.add(p.schedule, cluster, pass.first, acc);
    return true;
  }
};

}  // namespace
}  // namespace nibble::cuda
