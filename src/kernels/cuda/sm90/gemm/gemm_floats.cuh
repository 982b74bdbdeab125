// The products of 16-bit activations: weights become 16-bit floats in registers.
//
//   codes → weights in registers │ 4 wgmma, asynchronous │ codes → weights ...          52 instructions and more │ 4·n/2 cycles
//
// A warpgroup takes 64 channels (4 × k16) of its row block at a time. While the tensor cores work for one warpgroup the others decode codes
// into weights. Four are enough to keep the tensor cores busy for n ≥ 64, and memory busy for smaller n.
#pragma once

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/sm90/gemm/gemm_stages.cuh"

namespace nibble::cuda {
namespace {

template <class T>
struct FloatProducts : GemmStages<T> {
  using Base = GemmStages<T>;
  using Base::Base, Base::p, Base::lane, Base::warp, Base::act, Base::records, Base::full, Base::release;
  using Base::depth, Base::k_index, Base::row_group, Base::kGroups;
  using Act = typename T::Act;
  using Sums = typename T::Sums;
  static constexpr ConstantsPath kPath = T::kPath;
  static constexpr int kBits = T::kBits;
  static constexpr bool kAny = kPath == ConstantsPath::any;
  static constexpr int kSetChannels = channels_of_set(kPath);
  static constexpr bool kFine = kSetChannels != 0;  // constants change within a record
  using Raw = std::conditional_t<kAny, AnyConstants, RawConstants>;

  __device__ __forceinline__ Raw load_constants(std::uint32_t slot, int position) const {
    if constexpr (kAny)
      return load_any<T::kWeight>(p.format, slot, position);
    else
      return load_raw<kPath>(p.format, slot, position);
  }
  __device__ __forceinline__ void make(RowConstants& constants, const Raw& raw) const {
    if constexpr (kAny)
      make_constants<Act, T::kWeight>(constants, p.format, raw, p.scale_after);
    else
      make_constants<kPath, Act, T::kWeight>(constants, p.format, raw, p.scale_after);
  }

  /// For up to 32 tokens a record's sums are scaled (n/2 instructions), not its weights (32 instructions).
  static constexpr bool kScalesSums =
      T::kTokens <= 32 &&
      (kPath == ConstantsPath::fixed_zeros || kPath == ConstantsPath::integer_zeros || kPath == ConstantsPath::float_codes);
  /// Whether a record's products complete before those of the next begin: required where sums are scaled, faster for 256 tokens and for 8-bit
  /// codes × 64, and necessary where registers do not suffice for two records. A warpgroup that does not wait holds two stages of the ring,
  /// which the launcher makes sure of.
  static constexpr bool kCompletes = kScalesSums || T::kTokens == 256 || (kBits == 8 && T::kTokens <= 64) || kFine;

  /// Adds the products of the warpgroup's row block and its share of the pass's records.
  __device__ __forceinline__ void multiply(const Pass& pass, Cursor& from, Sums& acc) const {
    const int count = pass.records(), columns = this->columns(pass);
    constexpr int kHalves = 2;                                                               // of 64 channels, four k16
    constexpr int kProducts = gpu_tile::step_channels(kBits) / gpu_tile::kFragmentChannels;  // k16 of a 16-byte vector
    constexpr int kVectors = 4 / kProducts;                                                  // of a half
    const int position = row_pair_position(warp, lane);
    const int lane_codes = gpu_tile::vector_offset(0, warp, lane);
    const int stages = p.stages;
    const int stage_bytes = kGroups * p.format.bytes, slots = p.format.slots_offset;
    const std::uint32_t first = records(0) + (row_group() * depth() + k_index()) * p.format.bytes;
    const std::uint32_t acts = act(0) + k_index() * T::kActBytes,
                        first_operand = T::kPlanar ? wgmma_planar_low(acts) : wgmma_operand_low(acts),
                        stage_operand = depth() * (T::kActBytes / 16);
    constexpr int kOperandStep = T::kPlanar ? kWgmmaPlanarStep : 32;  // bytes of 16 channels
    constexpr int kBuffers = 2;                                       // of fragments: one is filled, one multiplied
    constexpr int kSets = kFine ? gpu_tile::kChannels / kHalves / kSetChannels : 1;  // of constants, of a half
    const int span_shift = 31 - __clz(p.format.span);
    constexpr bool kSlotASet = kPath == ConstantsPath::groups_of_16 || kPath == ConstantsPath::groups_of_8;
    const auto fine_slot = [&](int set) { return (kSlotASet ? set : set * kSetChannels >> span_shift) * p.format.slot_bytes; };
    constexpr int kSetsOfFragment = kSets > 4 ? kSets / 4 : 1;
    RowConstants constants[kSetsOfFragment];
    if (kPath == ConstantsPath::fixed_zeros || kPath == ConstantsPath::exact_offsets)
      fixed_zeros<Act, T::kWeight>(constants[0], p.format);
    int r = k_index(), previous = -1;  // the stage whose last products may be running
    if (r < count) do {                // at least one record: if ptxas sees a path without a product it does not overlap them
        ptx::barrier_wait(full(from.stage), from.parity);
        const std::uint32_t at = first + from.stage * stage_bytes;
        const std::uint32_t operand = first_operand + from.stage * stage_operand;
        // Shared memory is read at once, except the second half of 8-bit codes, for which there are no registers.
        Raw raw[kSets];
        const auto load_fine = [&](int half) {
#pragma unroll
          for (int i = 0; i < kSets; ++i) raw[i] = load_constants(at + slots + fine_slot(half * kSets + i), position);
        };
        if (kFine)
          load_fine(0);
        else
          raw[0] = load_constants(at + slots, position);
        uint4 codes[kHalves * kVectors];
        const auto load_codes = [&](int half) {
#pragma unroll
          for (int v = half * kVectors; v < (half + 1) * kVectors; ++v)
            codes[v] = ptx::load_shared16(at + lane_codes + gpu_tile::vector_offset(v, 0, 0));
        };
        load_codes(0);
        if (kBits == 4) load_codes(1);
        if (!kFine) make(constants[0], raw[0]);
        std::uint32_t fragment[kBuffers][4][4];
        Sums dot;  // of the record, when sums are scaled instead of weights
        Sums& sums = kScalesSums ? dot : acc;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          auto& a = fragment[half % kBuffers];
          if (kBits == 8 && half == 1) load_codes(1);
#pragma unroll
          for (int v = 0; v < kVectors; ++v) pin(codes[half * kVectors + v]);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (kFine && i * kSets % 4 == 0)
#pragma unroll
              for (int set = 0; set < kSetsOfFragment; ++set) make(constants[set], raw[i * kSets / 4 + set]);
            const uint4& vector = codes[half * kVectors + i / kProducts];
            if (kScalesSums)
              numbers<Act, T::kWeight>(a[i], vector, i % kProducts, constants[0], constants[kSetsOfFragment - 1]);
            else
              weights<Act, T::kWeight>(a[i], vector, i % kProducts, constants[0], constants[kSetsOfFragment - 1]);
          }
          if (kFine && half == 0) load_fine(1);
#pragma unroll
          for (int i = 0; i < 4; ++i) pin(a[i]);
          wgmma_fence();
          this->for_columns(columns, sums, [&](auto& d) {
            using Product = Wgmma<sizeof(d) / sizeof(float) * 2>;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const std::uint64_t x = wgmma_operand(operand + (half * T::kBoxBytes + i * kOperandStep) / 16);
              if (kScalesSums && half == 0 && i == 0)
                Product::template begin<Act, T::kPlanar>(d, a[i], x);
              else
                Product::template add<Act, T::kPlanar>(d, a[i], x);
            }
          });
          wgmma_commit();
          if (kCompletes && half + 1 == kHalves)
            wgmma_wait<0>();
          else
            wgmma_wait<1>();
          if (!kCompletes && half == 0 && previous >= 0) release(previous);
        }
        if (kCompletes) release(from.stage);
        previous = from.stage;
        from.advance(stages);
        if constexpr (kScalesSums) {
          const float2 s = p.scale_after ? float2{1.0f, 1.0f} : scales_of<kPath>(raw[0], p.format);
#pragma unroll
          for (int i = 0; i < T::kTokens / 2; ++i) acc[i] = fmaf(i % 4 < 2 ? s.x : s.y, dot[i], acc[i]);
        }
      } while ((r += depth()) < count);
    wgmma_wait<0>();
    if (!kCompletes) release(previous);
    this->pass_on_rest(r, count, from);
    scale(pass, acc);
  }

  /// Multiplies the sums by the scales that the operands leave out. Scales per channel are the same in all records of a row tile; they are
  /// read from memory again, not kept in registers.
  __device__ void scale(const Pass& pass, Sums& acc) const {
    float low = kScalesSums ? 1.0f : 1.0f / kScaleUp<Act>, high = low;
    if (p.scale_after) {
      const std::uint8_t* scales = p.records + this->weight_offset(pass) +
                                   static_cast<std::int64_t>(pass.block + row_group()) * p.schedule.records * p.format.bytes +
                                   p.format.slots_offset;
      const int position = row_pair_position(warp, lane);
      low = load_float(scales, position, p.format.scale_type);
      high = load_float(scales, position + 1, p.format.scale_type);
    }
    if (T::kExperts && p.experts.scale2 != nullptr) {
      const float scale2 = __ldg(p.experts.scale2 + pass.tile.expert);
      low *= scale2, high *= scale2;
    }
#pragma unroll
    for (int i = 0; i < T::kTokens / 2; ++i) acc[i] *= i % 4 < 2 ? low : high;
  }
};

}  // namespace
}  // namespace nibble::cuda
