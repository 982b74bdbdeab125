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
#include "kernels/cuda/sm90/gemm/reduce.cuh"
#include "kernels/cuda/sm90/gemm/w8a8_token_store.cuh"

namespace nibble::cuda {
namespace {

/// The scales of a pass's two row blocks, record by record. A lane keeps those of one of 32 records, and the next 32 are on their way meanwhile:
/// they come from memory, and a read of each record would be waited for at every cache line.
struct RecordScales {
  const float* at[2];
  int count, lane;
  float now[2] = {1.0f, 1.0f}, next[2] = {1.0f, 1.0f};

  __device__ RecordScales(const float* first, const float* second, const Pass& pass, int of_lane)
      : at{first, second == nullptr ? first : second}, count(pass.records()), lane(of_lane) {
    if (first == nullptr) return;
    at[0] += pass.first;
    at[1] += pass.first;
    ask(0);
  }
  __device__ __forceinline__ void ask(int first) {
    if (at[0] == nullptr || first + lane >= count) return;
    next[0] = __ldg(at[0] + first + lane);
    next[1] = __ldg(at[1] + first + lane);
  }
  /// Of record r; to be called for all in order.
  __device__ __forceinline__ void get(int r, float (&scales)[2]) {
    if (r % 32 == 0) {
      now[0] = next[0];
      now[1] = next[1];
      ask(r + 32);
    }
    scales[0] = __shfl_sync(~0u, now[0], r % 32);
    scales[1] = __shfl_sync(~0u, now[1], r % 32);
  }
};

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
  /// The same of groups: the products of 64 tokens and a record are scaled and added in f32. Where a warpgroup has 64 tokens, registers suffice
  /// for the products of two records, and those of one are scaled while tensor cores compute the other's. Of twice 64, tensor cores compute the
  /// other warpgroup's meanwhile.
  template <int kBlocks, class LookAhead>
  __device__ __forceinline__ void multiply_groups(const Pass& pass, Cursor& from, Sums& acc, LookAhead look_ahead) const {
    using Product = Wgmma8<Code, kBlocks * gpu_w8::kRows>;
    struct Products {
      Sum dot[kBlocks * kBlockSums];
      float of_token[2], of_block[2];  // scales: of tokens g and g + 8, of row blocks
      std::uint32_t read;
      int stage;
    };
    const int count = pass.records();
    const std::uint32_t tokens = tokens_low();
    RecordScales of_blocks(this->block_scales(pass, pass.block),
                           kBlocks == 1 ? nullptr : this->block_scales(pass, pass.block + 1), pass, lane);
    bool is_here = ptx::barrier_is_past(full(from.stage), from.parity);
    /// Starts the products of a part of record r, which is the next.
    const auto start = [&](Products& of, int part, int r) {
      if (part == 0 && !is_here) ptx::barrier_wait(full(from.stage), from.parity);
      const std::uint32_t a = tokens + (from.stage * kTokens + part * kPartTokens) * (gpu_w8::kChannels / 16);
      const std::uint32_t b = rows_low(from.stage);
      wgmma_fence();
      if constexpr (kParts == 1)
        Product::begin(of.dot, a, wgmma_operand(b));
      else  // there are no other registers
        Product::renew(of.dot, a, wgmma_operand(b));
#pragma unroll
      for (int i = 1; i < 4; ++i) Product::add(of.dot, a + 2 * i, wgmma_operand(b + 2 * i));
      wgmma_commit();
      const auto* scales = reinterpret_cast<const float*>(shared + (this->scales_of(from.stage, 0) - base));
      const float* of_tokens = scales + warpgroup * kGroupTokens + part * kPartTokens + warp * 16 + lane / 4;
      of.of_token[0] = of_tokens[0];
      of.of_token[1] = of_tokens[8];
      of.read = (part == 0 ? 0 : of.read) | __float_as_uint(of.of_token[0]) | __float_as_uint(of.of_token[1]);
      of.stage = from.stage;
      if (part == 0) of_blocks.get(r, of.of_block);
      if (part != kParts - 1) return;
      from.advance(p.stages);
      is_here = ptx::barrier_is_past(full(from.stage), from.parity);
    };
    /// Adds products that are complete.
    const auto finish = [&](const Products& of, int part) {
      if (part == kParts - 1) release(of.stage, of.read);
      float scale[kBlocks][2];
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) scale[i / 2][i % 2] = __fmul_rn(of.of_token[i % 2], of.of_block[i / 2]);
#pragma unroll
      for (int i = 0; i < kBlocks * kBlockSums; ++i) {
        float& sum = acc[part * kPartSums + i];
        sum = fmaf(of.dot[i], scale[i / kBlockSums][i % kUnitSums / 2], sum);
      }
    };
    Products even = {};
    if constexpr (kParts == 1) {
      Products odd = {};
      start(even, 0, 0);
      int r = 1;
#pragma unroll 1
      for (; r + 1 < count; r += 2) {
        start(odd, 0, r);
        wgmma_wait<1>();
        finish(even, 0);
        start(even, 0, r + 1);
        wgmma_wait<1>();
        finish(odd, 0);
      }
      if (r < count) {
        start(odd, 0, r);
        wgmma_wait<1>();
        finish(even, 0);
        look_ahead();
        wgmma_wait<0>();
        finish(odd, 0);
      } else {
        look_ahead();
        wgmma_wait<0>();
        finish(even, 0);
      }
    } else {
#pragma unroll 1
      for (int r = 0; r < count; ++r)
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          start(even, part, r);
          if (part == kParts - 1 && r + 1 == count) look_ahead();
          wgmma_wait<0>();
          finish(even, part);
        }
    }
  }

  // ---- a pass

  static constexpr bool kLooksAhead = true;
  template <class LookAhead>
  __device__ __forceinline__ void consume(const Pass& pass, Cursor& from, LookAhead look_ahead) const {
    if (T::kHalfTiles && warpgroup * kGroupTokens >= pass.tile.rows) {
      look_ahead();
      return this->skip(pass.records(), from);
    }
    Sums acc = {};
    if constexpr (T::kGrouped) {
      if (pass.blocks == 1)
        multiply_groups<1>(pass, from, acc, look_ahead);
      else
        multiply_groups<2>(pass, from, acc, look_ahead);
      if (!reduce(pass, acc)) return;
      this->finish_groups(pass, acc);
      this->store_tokens(pass, this->tokens_of(pass), acc);
    } else {
      const auto tokens = this->tokens_of(pass);
      const auto terms = this->load_terms(pass, tokens);
      multiply(pass, from, acc, look_ahead);
      if (!reduce(pass, acc)) return;
      this->finish(pass, tokens, terms, acc);
      this->store_tokens(pass, tokens, acc);
    }
  }
  /// Adds the sums of the other CTAs that share the pass. False: another stores these.
  __device__ __forceinline__ bool reduce(const Pass& pass, Sums& acc) const {
    if (p.schedule.split > 1) return reduce_cluster(acc);
    if (p.schedule.split != kStreamK) return true;
    const Parts<Sum, kParts * kPartSums / kUnitSums> parts{p.parts, 4 * kGroups, 4 * warpgroup + warp, lane};
    if (pass.end < p.schedule.records) {
      parts.store(cluster, kGroups, acc);
      return false;
    }
    if (pass.first > 0) parts.add(p.schedule, cluster, pass.first, acc);
    return true;
  }
  /// A warp's tokens belong to a rank: warps 0 and 1 of each warpgroup to the first of two, one warp to each of four. Their sums go to a box for
  /// each rank in the owner's ring, 16 bytes a lane at a time, and are added in the order of the ranks.
  __device__ __forceinline__ bool reduce_cluster(Sums& acc) const {
    constexpr int kFours = kBlockSums / kUnitSums;
    const int split = p.schedule.split, own_warps = 4 / split, owner = warp / own_warps;
    const int box_fours = kParts * p.blocks * kFours, box = (warpgroup * own_warps + warp % own_warps) * split;
    /// Calls use(address of a lane's 16 bytes in that rank's box, its sums) for all of a warp's.
    const auto for_box = [&](std::uint32_t inbox, int rank, auto use) {
      std::uint32_t at = inbox + ((box + rank) * box_fours * 32 + opaque(lane)) * 16;
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int block = 0; block < Base::kBlocks; ++block) {
          if (block >= p.blocks) continue;
#pragma unroll
          for (int i = 0; i < kFours; ++i, at += 32 * 16)
            use(at, reinterpret_cast<Four<Sum>&>(acc[(part * Base::kBlocks + block) * kBlockSums + i * kUnitSums]));
        }
    };
    Base::meet_cluster();  // all rings have been read and become inboxes
    for_box(ptx::map_to_rank(base, owner), this->rank,
            [](std::uint32_t at, const Four<Sum>& sums) { ptx::store_remote16(at, reinterpret_cast<const float4&>(sums)); });
    Base::meet_cluster();  // all sums have arrived
    if (owner != this->rank) return false;
    const auto boxed = [](std::uint32_t at) {
      const uint4 sums = ptx::load_shared16(at);
      return reinterpret_cast<const Four<Sum>&>(sums);
    };
    for_box(base, 0, [&](std::uint32_t at, Four<Sum>& sums) { sums = boxed(at); });
#pragma unroll 1
    for (int r = 1; r < split; ++r) for_box(base, r, [&](std::uint32_t at, Four<Sum>& sums) { sums += boxed(at); });
    return true;
  }
};

}  // namespace
}  // namespace nibble::cuda
