// The products of f32 activations: pairs of f16, x = (high + low)·2^e (steps/pair_acts.cu), both of which each fragment of weights multiplies.
//
//   x, in memory and in a stage   high parts of 64 channels │ their low parts │ the next 64 …      boxes of the same tokens
//
//   codes → u − z in registers │ 2 · 4 wgmma, asynchronous │ codes → u − z ...                     36 instructions and more │ 8·n/2 cycles
//   sums of a group → × its scale, added in f32                                                   n/2 instructions
//
// Of up to 32 tokens one wgmma multiplies both parts, as twice as many tokens, and reads the weights from registers once: a box of high
// parts and that of their low parts lie one behind the other. Their sums are added when they are scaled.
//
// Weights would not be exact in f16, so that operands are u − z, or the value of a float, and sums are scaled. A group's sums begin anew, in
// registers of their own: what tensor cores truncate stays small. A warpgroup needs twice the registers for that, and there are fewer
// (pair_groups). While it scales sums the others multiply.
#pragma once

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/sm90/gemm/gemm_stages.cuh"

namespace nibble::cuda {
namespace {

template <class T>
struct PairProducts : GemmStages<T> {
  using Base = GemmStages<T>;
  using Base::Base, Base::p, Base::lane, Base::warp, Base::act, Base::records, Base::full, Base::release;
  using Base::depth, Base::k_index, Base::row_group, Base::kGroups;
  using Act = typename T::Act;
  using Sums = typename T::Sums;
  static constexpr int kBits = T::kBits;
  static constexpr int kSetChannels = channels_of_set(T::kPath);
  static constexpr bool kFine = kSetChannels != 0;  // a step is a group, or a part of one
  /// Channels whose products are issued together.
  static constexpr int kStep = kFine ? kSetChannels : 64;
  static constexpr int kSteps = gpu_tile::kChannels / kStep;  // of a record
  static constexpr int kFragments = kStep / gpu_tile::kFragmentChannels;
  static constexpr bool kTogether = T::kTokens <= 32;  // one wgmma multiplies both parts
  static constexpr int kParts = kTogether ? 1 : 2, kColumns = T::kTokens * 2 / kParts;

  /// The scales of rows g and g+8 of the group at `slot`; its zeros become constants.
  __device__ __forceinline__ float2 begin_group(RowConstants& constants, std::uint32_t slot, int position) const {
    using Numbers = Raised<Act, T::kWeight>;
    if constexpr (!gpu_tile::are_floats(T::kWeight)) {
      const bool own = p.format.zero == ZeroKind::integer;
      const std::uint32_t zeros = own ? ptx::load_shared2(slot + p.format.zeros_offset + position) : 0u;
      // 2²³ | z is the float 2²³ + z; what is added is exact too.
      const float z0 = __uint_as_float(__byte_perm(zeros, 0x4b000000u, 0x7440));
      const float z1 = __uint_as_float(__byte_perm(zeros, 0x4b000000u, 0x7441));
      twice<Act>(constants.minus, (0x1p23f - Numbers::kMagic - p.format.zero_base) - z0,
                 (0x1p23f - Numbers::kMagicUpper - p.format.zero_base) - z1);
    }
    return load_row_pair(slot, position, p.format.scale_type);
  }

  /// Adds the products of the warpgroup's row block and its share of the pass's records.
  __device__ __forceinline__ void multiply(const Pass& pass, Cursor& from, Sums& acc) const {
    const int count = pass.records();
    constexpr int kProducts = gpu_tile::step_channels(kBits) / gpu_tile::kFragmentChannels;  // k16 of a 16-byte vector
    constexpr int kVectors = gpu_tile::kChannels / gpu_tile::step_channels(kBits);           // of a record
    constexpr int kStepsOfHalf = kSteps / 2;                                                 // of 64 channels
    const int position = row_pair_position(warp, lane);
    const int lane_codes = gpu_tile::vector_offset(0, warp, lane);
    const int stages = p.stages;
    const int stage_bytes = kGroups * p.format.bytes, slots = p.format.slots_offset;
    const std::uint32_t first = records(0) + (row_group() * depth() + k_index()) * p.format.bytes;
    const std::uint32_t first_operand = wgmma_operand_low(act(0) + k_index() * T::kActBytes),
                        stage_operand = depth() * (T::kActBytes / 16);
    RowConstants constants;
    std::uint32_t fragment[2][kFragments][4];  // one is filled, one multiplied
    float dot[kColumns / 2];                   // of a group whose products may be running, and its scales
    float2 scales;
    const auto add_group = [&] {
      wgmma_wait_for(dot);
#pragma unroll
      for (int i = 0; i < T::kTokens / 2; ++i) {
        float sum = dot[i];
        if constexpr (kTogether) sum += dot[i + T::kTokens / 2];
        acc[i] = fmaf(i % 4 < 2 ? scales.x : scales.y, sum, acc[i]);
      }
    };
    int r = k_index();
    if (r < count) do {  // at least one record: if ptxas sees a path without a product it does not overlap them
        ptx::barrier_wait(full(from.stage), from.parity);
        const std::uint32_t at = first + from.stage * stage_bytes;
        const std::uint32_t operand = first_operand + from.stage * stage_operand;
        uint4 codes[kVectors];
        const auto load_codes = [&](int half) {  // of 8 bits there are registers for one
#pragma unroll
          for (int v = half * kVectors / 2; v < (half + 1) * kVectors / 2; ++v)
            codes[v] = ptx::load_shared16(at + lane_codes + gpu_tile::vector_offset(v, 0, 0));
        };
        load_codes(0);
        if (kBits == 4) load_codes(1);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const int half = step / kStepsOfHalf;
          const bool begins = kFine || step == 0;  // a group
          if (kBits == 8 && step == kStepsOfHalf) load_codes(1);
          if (step % kStepsOfHalf == 0)
#pragma unroll
            for (int v = half * kVectors / 2; v < (half + 1) * kVectors / 2; ++v) pin(codes[v]);
          float2 own{};
          if (begins) {
            const int slot = kFine ? step * kStep / p.format.span * p.format.slot_bytes : 0;
            own = begin_group(constants, at + slots + slot, position);
          }
          auto& a = fragment[step % 2];
#pragma unroll
          for (int i = 0; i < kFragments; ++i) {
            const int k16 = step * kFragments + i;
            numbers<Act, T::kWeight>(a[i], codes[k16 / kProducts], k16 % kProducts, constants, constants);
          }
#pragma unroll
          for (int i = 0; i < kFragments; ++i) pin(a[i]);
          if (begins && step > 0) add_group();
          if (begins) scales = own;
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kFragments; ++i)
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
              const int box = 2 * half + part, k16 = step % kStepsOfHalf * kFragments + i;
              const std::uint64_t x = wgmma_operand(operand + (box * T::kBoxBytes + k16 * 32) / 16);
              if (begins && i == 0 && part == 0)
                Wgmma<kColumns>::template begin<Act>(dot, a[i], x);
              else
                Wgmma<kColumns>::template add<Act>(dot, a[i], x);
            }
          wgmma_commit();
        }
        add_group();
        release(from.stage, __float_as_uint(scales.x));
        from.advance(stages);
      } while ((r += depth()) < count);
    this->pass_on_rest(r, count, from);
    scale(pass, acc);
  }

  /// Sums of tokens past M are never stored.
  __device__ void scale(const Pass& pass, Sums& acc) const {
    const float* const from = p.token_scales + pass.token_tile * T::kTokens + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < T::kTokens / kUnitTokens; ++j) {
      const float2 tokens = __ldcg(reinterpret_cast<const float2*>(from + j * kUnitTokens));
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[4 * j + i] *= i % 2 == 0 ? tokens.x : tokens.y;
    }
  }
};

}  // namespace
}  // namespace nibble::cuda
