// The products of codes on both sides, and what becomes of their sums: scales, zero points.
#pragma once

#include "kernels/cuda/device/wgmma8.cuh"
#include "kernels/cuda/sm90/gemm/consume.cuh"
#include "kernels/cuda/sm90/gemm/w8a8_stages.cuh"

namespace nibble::cuda {
namespace {

template <class T>
struct W8A8Products : W8A8Stages<T> {
  using Base = W8A8Stages<T>;
  using Base::act, Base::records, Base::stage_records, Base::depth, Base::k_index, Base::row_group, Base::kUnits;
  using Base::Base, Base::p, Base::shared, Base::base, Base::warpgroup, Base::lane, Base::warp, Base::full, Base::release;
  using Code = typename T::Code;
  using Sum = typename T::Sum;
  using Sums = Sum[T::kTokens / 2];  // of a lane
  static constexpr bool kUnrollsStore = true;
  static constexpr int kTokens = T::kTokens;
  static constexpr bool kGrouped = T::kGrouped, kPatches = T::kPatches, kIntegers = std::is_same_v<Sum, std::int32_t>;

  __device__ void consume(const Pass& pass, Cursor& from) const { consume_pass(*this, pass, from); }
  __device__ int active() const { return stage_records(); }  // warpgroups
  __device__ void prepare(unsigned producer) const { Base::prepare(producer, active()); }
  __device__ void produce(unsigned producer) const { Base::produce(producer, 0); }

  /// Activations of 32 channels, number i of a record whose activations begin at `low`.
  __device__ std::uint64_t columns(std::uint32_t low, int i) const {
    if constexpr (!kPatches) return wgmma_operand(low + 2 * i);
    return wgmma_operand(low + code_columns(i, p.box_channels, kTokens),
                         p.box_channels == kPatchChannels ? kWgmmaRows64 : kWgmmaRows128);
  }

  /// Adds the products of the warpgroup's row block and its share of the pass's records. The products of a record run while those of the
  /// next are issued.
  __device__ __forceinline__ void multiply(const Pass& pass, Cursor& from, Sums& acc) const {
    const int count = pass.records();
    const std::uint32_t weights =
        wgmma_operand_low(records(0)) + (row_group() * depth() + k_index()) * (gpu_w8::kRecordBytes / 16);
    const std::uint32_t tokens = wgmma_operand_low(act(0)) + k_index() * (T::kActBytes / 16);
    const std::uint32_t weight_stage = stage_records() * (gpu_w8::kRecordBytes / 16), token_stage = depth() * (T::kActBytes / 16);
    int r = k_index();
    if constexpr (T::kPrecise) {
      constexpr int kPart = kTokens < 128 ? kTokens : 128, kPartSums = kPart / 2;
      Sum dot[kPartSums] = {};
#pragma unroll 1
      while (r < count) {
        const int first = r, end = min(count, r + p.together * depth());
        Cursor at = from;
#pragma unroll
        for (int part = 0; part < kTokens / kPart; ++part) {
          const bool begins = part == 0, ends = part == kTokens / kPart - 1;
          int previous = -1;  // the stage whose products may be running
          at = from;
#pragma unroll 1
          for (r = first; r < end; r += depth()) {
            if (begins) ptx::barrier_wait(full(at.stage), at.parity);
            const std::uint32_t a = weights + at.stage * weight_stage;
            const std::uint32_t b = tokens + at.stage * token_stage + part * (kPart * gpu_w8::kChannels / 16);
            wgmma_fence();
            Wgmma8<Code, kPart>::add_if(r != first, dot, a, columns(b, 0));
#pragma unroll
            for (int i = 1; i < 4; ++i) Wgmma8<Code, kPart>::add(dot, a + 2 * i, columns(b, i));
            wgmma_commit();
            if (ends) {
              wgmma_wait<1>();
              if (previous >= 0) release(previous);
              previous = at.stage;
            }
            at.advance(p.stages);
          }
          wgmma_wait_for(dot);
          if (ends) release(previous);
#pragma unroll
          for (int i = 0; i < kPartSums; ++i) acc[part * kPartSums + i] += dot[i];
        }
        from = at;
      }
    } else if constexpr (!kGrouped) {
      int previous = -1;  // the stage whose products may be running
#pragma unroll 1
      for (; r < count; r += depth()) {
        ptx::barrier_wait(full(from.stage), from.parity);
        const std::uint32_t a = weights + from.stage * weight_stage, b = tokens + from.stage * token_stage;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) Wgmma8<Code, kTokens>::add(acc, a + 2 * i, columns(b, i));
        wgmma_commit();
        wgmma_wait<1>();
        if (previous >= 0) release(previous);
        previous = from.stage;
        from.advance(p.stages);
      }
      wgmma_wait_for(acc);
      if (previous >= 0) release(previous);
    } else if (r < count) {
      struct Group {
        Sums dot;
        float scale;  // of the row block
        int stage;
      };
      const float* const scales_of_block = this->block_scales(pass, pass.block + row_group());
      const auto begin = [&](Group& group) {
        ptx::barrier_wait(full(from.stage), from.parity);
        const std::uint32_t a = weights + from.stage * weight_stage, b = tokens + from.stage * token_stage;
        wgmma_fence();
        Wgmma8<Code, kTokens>::begin(group.dot, a, columns(b, 0));
#pragma unroll
        for (int i = 1; i < 4; ++i) Wgmma8<Code, kTokens>::add(group.dot, a + 2 * i, columns(b, i));
        wgmma_commit();
        group.scale = scales_of_block == nullptr ? 1.0f : __ldg(scales_of_block + pass.first + r);
        group.stage = from.stage;
        from.advance(p.stages);
        r += depth();
      };
      const auto end = [&](const Group& group) { release(group.stage, add_group(acc, group.dot, group.stage, group.scale)); };
      // Partial sums of two records where registers suffice: one is scaled while the products of the other run.
      Group even, other;
      Group& odd = kTokens <= 64 ? other : even;
      begin(even);
      for (;;) {
        if (r >= count) {
          wgmma_wait<0>();
          end(even);
          break;
        }
        if constexpr (kTokens > 64) {
          wgmma_wait<0>();
          end(even);
          begin(even);
          continue;
        }
        begin(odd);
        wgmma_wait<1>();
        end(even);
        if (r >= count) {
          wgmma_wait<0>();
          end(odd);
          break;
        }
        begin(even);
        wgmma_wait<1>();
        end(odd);
      }
    }
    this->pass_on_rest(r, count, from);
  }
  /// acc += dot · s_a · s_w of a group of 128 channels. Returns bits of what it read.
  __device__ std::uint32_t add_group(Sums& acc, const Sums& dot, int stage, float weight_scale) const {
    const auto* scales = reinterpret_cast<const float*>(shared + (this->scales_of(stage, k_index()) - base)) + lane % 4 * 2;
    std::uint32_t read = 0;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const float2 s = *reinterpret_cast<const float2*>(scales + j * kUnitTokens);
      read |= __float_as_uint(s.x);
      const float low = __fmul_rn(s.x, weight_scale), high = __fmul_rn(s.y, weight_scale);
      acc[4 * j] = fmaf(dot[4 * j], low, acc[4 * j]);
      acc[4 * j + 1] = fmaf(dot[4 * j + 1], high, acc[4 * j + 1]);
      acc[4 * j + 2] = fmaf(dot[4 * j + 2], low, acc[4 * j + 2]);
      acc[4 * j + 3] = fmaf(dot[4 * j + 3], high, acc[4 * j + 3]);
    }
    return read;
  }

  // ---- scales and zero points

  /// Scales and shifts of the sums of a lane's two rows. Rows past N are padding.
  struct Rows {
    float scale[2];
    float2 bias;
    std::int32_t sum[2] = {}, zero[2] = {};
  };
  __device__ Rows rows_of(const Pass& pass, int block) const {
    Rows rows;
    const std::int32_t* zeros = p.weight.zeros();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = block * gpu_w8::kRows + warp * 16 + lane / 4 + 8 * i;
      rows.scale[i] = kGrouped && p.weight.geometry.block_rows != 0 ? 1.0f : this->of_pass(p.weight.scales(), pass)[n];
      if constexpr (T::kExperts)
        if (p.experts.scale2 != nullptr) rows.scale[i] *= __ldg(p.experts.scale2 + pass.tile.expert);
      if (p.zero_points) {
        rows.sum[i] = this->of_pass(p.weight.sums(), pass)[n];
        rows.zero[i] = zeros == nullptr ? 0 : this->of_pass(zeros, pass)[n];
      }
    }
    rows.bias = Store<W8A8Products>{*this, this->p.m}.bias(block);
    return rows;
  }
  /// The same for the pass's tokens, copied to the warpgroup's shared memory. Issued before the products; complete when wait_for_token_terms()
  /// returns.
  __device__ std::uint32_t token_terms() const { return base + p.map.terms + warpgroup * kTokenTerms * 4 * kTokens; }
  __device__ void load_token_terms(const Pass& pass) const {
    const auto take = [&](std::uint32_t to, const void* from, std::uint32_t otherwise) {
      if (from == nullptr)
        ptx::store_shared4(to, otherwise);
      else
        ptx::async_copy4(to, from);
    };
    ptx::async_copy_wait<0>();  // drains the copies issued by a skipped pass
    const auto tokens = this->tokens_of(pass);
#pragma unroll
    for (int i = warp * 32 + lane; i < kTokens; i += kGroupThreads) {
      const std::int64_t row = min(tokens.first() + i, tokens.end() - 1);  // tokens past the last are not stored
      const std::uint32_t to = token_terms() + 4 * i;
      if (!kGrouped)
        take(to, p.acts.scales == nullptr ? nullptr : p.acts.scales + row * p.acts.scale_row, __float_as_uint(p.acts.scale));
      if (!kIntegers || !p.zero_points) continue;
      take(to + 4 * kTokens, p.acts.zeros == nullptr ? nullptr : p.acts.zeros + row * p.acts.zero_row, p.acts.zero);
      take(to + 8 * kTokens, p.acts.sums == nullptr ? nullptr : p.acts.sums + row, 0);
    }
    ptx::async_copy_commit();
  }
  __device__ void wait_for_token_terms() const {
    ptx::async_copy_wait<0>();
    ptx::named_barrier(1 + warpgroup, kGroupThreads);
  }

  /// Takes zero points out of the integers of kCount units, modulo 2³², where the result is exact.
  template <int kCount>
  __device__ void subtract_zeros(Sum* sums, const Rows& rows, int first) const {
    if constexpr (kIntegers)
      if (p.zero_points)
#pragma unroll
        for (int i = 0; i < kCount; ++i) subtract_zeros_of_unit(sums + 4 * i, rows, first + i);
  }
  __device__ void subtract_zeros_of_unit(Sum* sums, const Rows& rows, int unit) const {
    const std::uint32_t terms = token_terms() + (unit * kUnitTokens + lane % 4 * 2) * 4;
    const uint2 zero = ptx::load_shared8(terms + 4 * kTokens), codes = ptx::load_shared8(terms + 8 * kTokens);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i / 2;
      const std::uint32_t zeros = static_cast<std::uint32_t>(p.weight.geometry.k) * rows.zero[row] - rows.sum[row];
      sums[i] +=
          static_cast<std::int32_t>((i % 2 == 0 ? zero.x : zero.y) * zeros - rows.zero[row] * (i % 2 == 0 ? codes.x : codes.y));
    }
  }
  /// Adds sum_bias to the integers of kCount units of a row block. It is loaded here, because during the products there are no registers.
  template <int kCount>
  __device__ void add_sum_bias(Sum* sums, int block) const {
    if constexpr (kIntegers) {
      const std::int32_t* const bias = p.epilogue.sum_bias;
      if (bias == nullptr) return;
      const int n = block * gpu_w8::kRows + warp * 16 + lane / 4;
      const std::int32_t of_rows[2] = {n < p.rows() ? bias[n] : 0, n + 8 < p.rows() ? bias[n + 8] : 0};
#pragma unroll
      for (int i = 0; i < 4 * kCount; ++i) sums[i] += of_rows[i / 2 % 2];
    }
  }
  /// A unit's values of D, less the epilogue. kRaw: D is of s32, and they are its bits.
  template <bool kRaw>
  __device__ float4 finish(const Four<Sum>& sums, const Rows& rows, int unit) const {
    if constexpr (kRaw)
      return {__int_as_float(sums.at[0]), __int_as_float(sums.at[1]), __int_as_float(sums.at[2]), __int_as_float(sums.at[3])};
    uint2 scale{};
    if (!kGrouped) scale = ptx::load_shared8(token_terms() + (unit * kUnitTokens + lane % 4 * 2) * 4);
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = static_cast<float>(sums.at[i]);
      if (!kGrouped) v[i] = __fmul_rn(v[i], __uint_as_float(i % 2 == 0 ? scale.x : scale.y));
      v[i] = __fmul_rn(v[i], rows.scale[i / 2]);
    }
    return {v[0], v[1], v[2], v[3]};
  }
};

}  // namespace
}  // namespace nibble::cuda
