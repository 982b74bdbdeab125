// The 8-bit GEMM with tokens as the 64-row operand: groups of channels, 128 or 256 tokens, which are bound by the scaling of sums.
//
// A lane with two tokens and many rows scales its sums by four numbers; one with two rows and many tokens needs as many numbers as half of
// its sums. Both operands have the same form, 64 rows of 128 swizzled bytes, so they are exchanged; the rest of a stage stays as it is:
//
//   D[M,N] = Â[M,K] · Ŵᵀ[K,N]      a warpgroup has half of the pass's tokens, 64 at a time, and all of its rows, 64 or 128
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
  using Base::act, Base::records, Base::stage_records, Base::kGroups, Base::kUnits;
  using Base::Base, Base::p, Base::shared, Base::base, Base::cluster, Base::warpgroup, Base::lane, Base::warp, Base::full,
      Base::release;
  using Code = typename T::Code;
  using Sum = typename T::Sum;
  using Sums = Sum[T::kTokens / 2];  // of a lane
  static constexpr int kTokens = T::kTokens;
  /// A warpgroup's tokens, and the tokens of one operand.
  static constexpr int kGroupTokens = kTokens / kGroups, kPartTokens = 64, kParts = kGroupTokens / kPartTokens;

  __device__ static int active() { return kGroups; }
  __device__ void prepare(unsigned producer) const { Base::prepare(producer, active()); }
  __device__ void produce(unsigned producer) const { Base::produce(producer, kGroups); }

  static constexpr int kBlockSums = gpu_w8::kRows / 2;  // of 64 tokens × 64 rows, of a lane
  /// Adds the products of the warpgroup's tokens and the pass's rows, 64 tokens at a time.
  template <int kBlocks>
  __device__ __forceinline__ void multiply_tokens(int count, Cursor& from, Sums& acc) const {
    constexpr int kRows = kBlocks * gpu_w8::kRows, kUnitSums = 4;
    const std::uint32_t tokens = wgmma_operand_low(act(0)) + warpgroup * (T::kActBytes / kGroups / 16);
    const std::uint32_t weights = wgmma_operand_low(records(0));
    Sum dot[kBlocks * kBlockSums] = {};
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
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
        for (int i = 0; i < 2 * kBlocks; ++i) scale[i / 2][i % 2] = __fmul_rn(of_tokens[i % 2 * 8], scales[kTokens + i / 2]);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kBlocks * kBlockSums; ++i) {
          float& sum = acc[part * (2 * kBlockSums) + i];
          sum = fmaf(dot[i], scale[i / kBlockSums][i % kUnitSums / 2], sum);
        }
      }
      release(from.stage);
      from.advance(p.stages);
    }
  }

  /// A warp has 16 tokens of 64 and all of the pass's rows, so that its store needs no other warp.
  __device__ void store_tokens(const Pass& pass, const Sums& acc) const {
    const int first = pass.token_tile * kTokens + warpgroup * kGroupTokens + warp * 16;
    const auto store = [&](int index, const Sum(&sums)[kBlockSums], auto half) {
      const int token = first + index / 2 * kPartTokens, block = pass.block + index % 2;
      if (index % 2 >= pass.blocks || token >= p.m) return;
      if constexpr (decltype(half)::value)
        store_half_tokens(token, block * gpu_w8::kRows, sums);
      else
        store_float_tokens(token, block * gpu_w8::kRows, sums);
    };
    const auto take = [&](Sum(&sums)[kBlockSums], int index) {
#pragma unroll
      for (int i = 0; i < kBlockSums; ++i) sums[i] = acc[index * kBlockSums + i];
    };
    if (p.half == HalfOut::channels) {
#pragma unroll
      for (int index = 0; index < 2 * kParts; ++index) {
        Sum sums[kBlockSums];
        take(sums, index);
        store(index, sums, std::true_type());
      }
    } else {
      // A run-time loop, for a single copy of the code; registers are indexed at compile time.
#pragma unroll 1
      for (int index = 0; index < 2 * kParts; ++index) {
        Sum sums[kBlockSums];
        take(sums, 0);
#pragma unroll
        for (int i = 1; i < 2 * kParts; ++i)
          if (i == index) take(sums, i);
        store(index, sums, std::false_type());
      }
    }
  }
  /// The factors of the sums of rows 2t and 2t + 1 of a unit.
  __device__ float2 row_scales(int row) const {
    if (p.weight.geometry.block_rows != 0) return {1.0f, 1.0f};
    return *reinterpret_cast<const float2*>(p.weight.scales() + row);
  }
  /// 16 tokens × 64 rows as 16-bit floats: token t is 128 bytes in shared memory, chunk c of 8 rows at c ^ (t mod 8).
  __device__ void store_half_tokens(int token, int row, const Sum (&sums)[kBlockSums]) const {
    const epilogue::Element& e = p.epilogue;
    const int n = static_cast<int>(p.weight.geometry.n), lane = opaque(this->lane);
    const std::uint32_t staging = base + p.map.staging + warpgroup * kStagingBytes + warp * (16 * gpu_w8::kRows * 2);
#pragma unroll
    for (int unit = 0; unit < kBlockSums / 4; ++unit) {
      const Sum* v = sums + 4 * unit;
      const int channel = row + unit * 8 + lane % 4 * 2;
      const float2 scale = row_scales(channel);
      float2 bias{-0.0f, -0.0f};  // adding −0 changes no number
      if (e.bias.data != nullptr && channel < n) bias = {e.bias.at(channel), e.bias.at(channel + 1)};
      const auto finish = [&](float a, float b) {
        return float2{__fadd_rn(__fmul_rn(a, scale.x), bias.x), __fadd_rn(__fmul_rn(b, scale.y), bias.y)};
      };
      const float2 low = finish(v[0], v[1]), high = finish(v[2], v[3]);
      const std::uint32_t to = staging + lane % 16 * (gpu_w8::kRows * 2) + (unit ^ lane % 8) * 16;
      if (e.out == DType::f16) {
        const __half2 a = __float22half2_rn(low), b = __float22half2_rn(high);
        ptx::store_matrices<false>(to, reinterpret_cast<const std::uint32_t&>(a), reinterpret_cast<const std::uint32_t&>(b));
      } else {
        const __nv_bfloat162 a = __float22bfloat162_rn(low), b = __float22bfloat162_rn(high);
        ptx::store_matrices<false>(to, reinterpret_cast<const std::uint32_t&>(a), reinterpret_cast<const std::uint32_t&>(b));
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const int t = i + lane / 8, chunk = lane % 8;
      if (token + t >= p.m || row + chunk * 8 >= n) continue;
      const uint4 v = ptx::load_shared16(staging + t * (gpu_w8::kRows * 2) + (chunk ^ t % 8) * 16);
      auto* const to = static_cast<std::uint16_t*>(e.d) + (p.first_row + token + t) * e.d_stride + row + chunk * 8;
      *reinterpret_cast<uint4*>(to) = v;
    }
    __syncwarp();  // before the buffer is written again
  }
  /// The same through the whole epilogue, 8 tokens at a time: g, then g + 8.
  __device__ void store_float_tokens(int token, int row, const Sum (&sums)[kBlockSums]) const {
    float* const staging =
        reinterpret_cast<float*>(shared + p.map.staging + warpgroup * kStagingBytes) + warp * (8 * kStagePitch);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int unit = 0; unit < kBlockSums / 4; ++unit) {
        const int column = unit * 8 + lane % 4 * 2;
        const float2 scale = row_scales(row + column);
        const Sum* v = sums + 4 * unit + 2 * half;
        *reinterpret_cast<float2*>(staging + lane / 4 * kStagePitch + column) = {__fmul_rn(v[0], scale.x),
                                                                                 __fmul_rn(v[1], scale.y)};
      }
      __syncwarp();
#pragma unroll 1
      for (int t = lane / 8; t < 8; t += 4)
        if (token + half * 8 + t < p.m)
          store_rows(p.epilogue, p.first_row + token + half * 8 + t, row + lane % 8 * 8, static_cast<int>(p.weight.geometry.n),
                     staging + t * kStagePitch + lane % 8 * 8);
      __syncwarp();
    }
  }
  __device__ __forceinline__ void consume(const Pass& pass, Cursor& from) const {
    Sums acc = {};
    if (pass.blocks == 1)
      multiply_tokens<1>(pass.records(), from, acc);
    else
      multiply_tokens<2>(pass.records(), from, acc);
    if (p.schedule.split == kStreamK) {
      const Parts<Sum, kUnits> parts{p.parts, 4 * kGroups, 4 * warpgroup + warp, lane};
      if (pass.end < p.schedule.records) return parts.store(cluster, kGroups, acc);
      if (pass.first > 0) parts.add(p.schedule, cluster, pass.first, acc);
    }
    store_tokens(pass, acc);
  }
};

}  // namespace
}  // namespace nibble::cuda
