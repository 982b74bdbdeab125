// The 8-bit GEMM with tokens as the 64-row operand: groups of channels, 64 tokens or more, which are bound by the scaling of sums.
//
// A lane with two tokens and many rows scales its sums by four numbers; one with two rows and many tokens needs as many numbers as half of
// its sums. Both operands have the same form, 64 rows of 128 swizzled bytes, so they are exchanged; the rest of a stage stays as it is:
//
//   D[M,N] = Â[M,K] · Ŵᵀ[K,N]      a warpgroup has 64 of the pass's tokens, of 256 twice 64, and all of its rows, 64 or 128
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/device/half_out.cuh"
#include "kernels/cuda/device/stream_k.cuh"
#include "kernels/cuda/device/wgmma8.cuh"
#include "kernels/cuda/sm90/gemm/w8a8_stages.cuh"

namespace nibble::cuda {
namespace {

template <class T>
struct W8A8TokenRows : W8A8Stages<T> {
  using Base = W8A8Stages<T>;
  using Base::act, Base::records, Base::stage_records, Base::kGroups;
  using Base::Base, Base::p, Base::shared, Base::base, Base::cluster, Base::warpgroup, Base::lane, Base::warp, Base::full,
      Base::release;
  using Code = typename T::Code;
  using Sum = typename T::Sum;
  static constexpr int kTokens = T::kTokens;
  /// A warpgroup's tokens, and the tokens of one operand.
  static constexpr int kGroupTokens = kTokens / kGroups, kPartTokens = 64, kParts = kGroupTokens / kPartTokens;
  using Sums = Sum[kGroupTokens];  // of a lane: of 128 rows

  __device__ static int active() { return kGroups; }
  __device__ void prepare(unsigned producer) const { Base::prepare(producer, active()); }
  __device__ void produce(unsigned producer) const { Base::produce(producer, kGroups); }

  static constexpr int kBlockSums = gpu_w8::kRows / 2;  // of 64 tokens × 64 rows, of a lane
  static constexpr int kUnitSums = 4;                   // of 8 rows
  /// Adds the products of the warpgroup's tokens and the pass's rows, 64 tokens at a time.
  template <int kBlocks>
  __device__ __forceinline__ void multiply_tokens(const Pass& pass, Cursor& from, Sums& acc) const {
    const int count = pass.records();
    constexpr int kRows = kBlocks * gpu_w8::kRows;
    const std::uint32_t tokens = wgmma_operand_low(act(0)) + warpgroup * (T::kActBytes / kGroups / 16);
    const std::uint32_t weights = wgmma_operand_low(records(0));
    const float* scales_of_blocks = this->block_scales(pass.block);
    const int other =
        kBlocks == 1 || scales_of_blocks == nullptr ? 0 : static_cast<int>(this->block_scales(pass.block + 1) - scales_of_blocks);
    if (scales_of_blocks != nullptr) scales_of_blocks += pass.first;
    Sum dot[kBlocks * kBlockSums] = {};
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      float of_blocks[2] = {1.0f, 1.0f};  // seven of eight are in L1; they are needed after the products
      if (scales_of_blocks != nullptr) {
        of_blocks[0] = __ldg(scales_of_blocks + r);
        of_blocks[1] = __ldg(scales_of_blocks + r + other);
      }
      ptx::barrier_wait(full(from.stage), from.parity);
      const std::uint32_t b = weights + from.stage * stage_records() * (gpu_w8::kRecordBytes / 16);
      const auto* scales = reinterpret_cast<const float*>(shared + (this->scales_of(from.stage, 0) - base));
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const std::uint32_t a = tokens + (from.stage * kTokens + part * kPartTokens) * (gpu_w8::kChannels / 16);
        wgmma_fence();
        Wgmma8<Code, kRows>::renew(dot, a, wgmma_operand(b));
#pragma unroll
        for (int i = 1; i < 4; ++i) Wgmma8<Code, kRows>::add(dot, a + 2 * i, wgmma_operand(b + 2 * i));
        wgmma_commit();
        const float* of_tokens = scales + warpgroup * kGroupTokens + part * kPartTokens + warp * 16 + lane / 4;
        float scale[kBlocks][2];  // of row blocks, of tokens g and g + 8
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) scale[i / 2][i % 2] = __fmul_rn(of_tokens[i % 2 * 8], of_blocks[i / 2]);
        wgmma_wait<0>();
        if (part == kParts - 1) release(from.stage);
#pragma unroll
        for (int i = 0; i < kBlocks * kBlockSums; ++i) {
          float& sum = acc[part * (2 * kBlockSums) + i];
          sum = fmaf(dot[i], scale[i / kBlockSums][i % kUnitSums / 2], sum);
        }
      }
      from.advance(p.stages);
    }
  }

  /// A warp has 16 tokens of 64 and all of the pass's rows, so that its store needs no other warp. Code that runs once in a pass costs as
  /// much as fetching it: what few epilogues need is apart, and the common one is short and without jumps.
  __device__ void store_tokens(const Pass& pass, Sums& acc) const {
    const bool half = p.half == HalfOut::channels;
    if (p.weight.geometry.block_rows == 0 || (half && p.epilogue.bias.data != nullptr)) apply_row_terms(pass, acc, half);
    if (!half)
      store_float_tokens(pass, acc);
    else if (p.epilogue.out == DType::f16)
      store_half_tokens<__half2>(pass, acc);
    else
      store_half_tokens<__nv_bfloat162>(pass, acc);
  }
  __device__ int first_token(const Pass& pass) const { return pass.token_tile * kTokens + warpgroup * kGroupTokens + warp * 16; }
  __device__ std::uint32_t warp_staging() const {
    return base + p.map.staging + warpgroup * kStagingBytes + warp * (kStagingBytes / 4);
  }
  /// acc = acc · s_w of each row, + its bias. The terms of a warp's rows are put into its staging buffer first.
  __device__ __forceinline__ void apply_row_terms(const Pass& pass, Sums& acc, bool with_bias) const {
    const int lane = opaque(this->lane);
    const std::uint32_t staging = warp_staging();
    const epilogue::Operand& bias = p.epilogue.bias;
#pragma unroll 1
    for (int i = lane; i < pass.blocks * gpu_w8::kRows; i += 32) {
      const int row = pass.block * gpu_w8::kRows + i;
      const float scale = p.weight.geometry.block_rows != 0 ? 1.0f : p.weight.scales()[row];
      const float term =
          with_bias && bias.data != nullptr && row < p.rows() ? bias.at(row) : -0.0f;  // adding −0 changes no number
      ptx::store_shared8(staging + i * 8, {__float_as_uint(scale), __float_as_uint(term)});
    }
    __syncwarp();
#pragma unroll
    for (int unit = 0; unit < 2 * kBlockSums / kUnitSums; ++unit) {
      const uint4 terms = ptx::load_shared16(staging + (unit * 8 + lane % 4 * 2) * 8);
#pragma unroll
      for (int i = 0; i < kUnitSums * kParts; ++i) {
        float& sum = acc[i / kUnitSums * (2 * kBlockSums) + kUnitSums * unit + i % kUnitSums];
        sum = __fadd_rn(__fmul_rn(sum, __uint_as_float(i % 2 == 0 ? terms.x : terms.z)),
                        __uint_as_float(i % 2 == 0 ? terms.y : terms.w));
      }
    }
    __syncwarp();
  }
  /// 16 tokens × 64 rows at a time as 16-bit floats: token t is 128 bytes in shared memory, chunk c of 8 rows at c ^ (t mod 8).
  template <class Pair>
  __device__ __forceinline__ void store_half_tokens(const Pass& pass, const Sums& acc) const {
    const int n = p.rows(), lane = opaque(this->lane), first = first_token(pass), row = pass.block * gpu_w8::kRows;
    const std::uint32_t staging = warp_staging(), to = staging + lane % 16 * (gpu_w8::kRows * 2) + (lane / 16 ^ lane % 8) * 16;
    const int token = lane / 8, chunk = lane % 8;
    const std::uint32_t from = staging + token * (gpu_w8::kRows * 2);
    auto* const d =
        static_cast<std::uint16_t*>(p.epilogue.d) + (p.first_row + first + token) * p.epilogue.d_stride + row + chunk * 8;
#pragma unroll
    for (int index = 0; index < 2 * kParts; ++index) {
      const int part = index / 2 * kPartTokens, block = index % 2;
      if (block >= pass.blocks || first + part >= p.m) continue;
#pragma unroll
      for (int unit = 0; unit < kBlockSums / kUnitSums; unit += 2) {
        const Sum* v = acc + index * kBlockSums + kUnitSums * unit;
        ptx::store_four_matrices(to ^ unit * 16, pair<Pair>(v[0], v[1]), pair<Pair>(v[2], v[3]), pair<Pair>(v[4], v[5]),
                                 pair<Pair>(v[6], v[7]));
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 16; i += 4)
        if (first + part + token + i < p.m && row + block * gpu_w8::kRows + chunk * 8 < n)
          *reinterpret_cast<uint4*>(d + (part + i) * p.epilogue.d_stride + block * gpu_w8::kRows) =
              ptx::load_shared16(from + i * (gpu_w8::kRows * 2) + (chunk ^ (token + i) % 8) * 16);
      __syncwarp();  // before the buffer is written again
    }
  }
  template <class Pair>
  __device__ static std::uint32_t pair(float low, float high) {
    Pair both;
    if constexpr (std::is_same_v<Pair, __half2>)
      both = __floats2half2_rn(low, high);
    else
      both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(both);
  }
  /// The same through the whole epilogue, 8 tokens at a time: g, then g + 8. A run-time loop, for a single copy of the code; registers are
  /// indexed at compile time.
  __device__ void store_float_tokens(const Pass& pass, const Sums& acc) const {
    const int lane = opaque(this->lane);
    float* const staging = reinterpret_cast<float*>(shared + (warp_staging() - base));
#pragma unroll 1
    for (int round = 0; round < 4 * kParts; ++round) {
      const int token = first_token(pass) + round / 4 * kPartTokens + round % 2 * 8, block = round / 2 % 2;
      if (block >= pass.blocks || token >= p.m) continue;
#pragma unroll
      for (int i = 0; i < 4 * kParts; ++i) {
        if (i != round) continue;
#pragma unroll
        for (int unit = 0; unit < kBlockSums / kUnitSums; ++unit) {
          const Sum* v = acc + i / 2 * kBlockSums + kUnitSums * unit + i % 2 * 2;
          *reinterpret_cast<float2*>(staging + lane / 4 * kStagePitch + unit * 8 + lane % 4 * 2) = {v[0], v[1]};
        }
      }
      __syncwarp();
#pragma unroll 1
      for (int t = lane / 8; t < 8; t += 4)
        if (token + t < p.m)
          store_rows(p.epilogue, p.first_row + token + t, (pass.block + block) * gpu_w8::kRows + lane % 8 * 8, p.rows(),
                     staging + t * kStagePitch + lane % 8 * 8);
      __syncwarp();
    }
  }
  __device__ __forceinline__ void consume(const Pass& pass, Cursor& from) const {
    Sums acc = {};
    if (pass.blocks == 1)
      multiply_tokens<1>(pass, from, acc);
    else
      multiply_tokens<2>(pass, from, acc);
    if (p.schedule.split == kStreamK) {
      const Parts<Sum, kGroupTokens / 4> parts{p.parts, 4 * kGroups, 4 * warpgroup + warp, lane};
      if (pass.end < p.schedule.records) return parts.store(cluster, kGroups, acc);
      if (pass.first > 0) parts.add(p.schedule, cluster, pass.first, acc);
    }
    store_tokens(pass, acc);
  }
};

}  // namespace
}  // namespace nibble::cuda
