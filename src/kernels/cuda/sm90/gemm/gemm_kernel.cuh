// D[M,N] = epilogue(x[M,K] · Wᵀ) on Hopper for more tokens than decode takes: wgmma with the weights in registers.
//
//   Dᵀ[N,M] = W[N,K] · xᵀ[K,M]       weights are the 64-row A operand, out of registers; n tokens its B operand, out of shared memory
//
//   CTA    = multiplying warpgroups (four, three for n = 128, two for n = 256) ◀──ring of stages── producer warps
//   stage  = n tokens × 128 channels (two TMA boxes of 64 channels, 128-byte swizzle) | a record for each row block of the pass
//   pass   = a row block of 64 for each warpgroup × n tokens × all of K, or a part of it (gemm_schedule.hpp)
//
//   With `depth` d > 1 (small layers, few tokens) d warpgroups share a row block: warpgroup g takes records g mod d, g mod d + d, ... A
//   stage then has d records of a row block, and their activations. Their sums are reduced in shared memory, in the order of the
//   warpgroups.
//
//   A warpgroup takes 64 channels (4 × k16) of its row block at a time:
//
//     codes → weights in registers │ 4 wgmma, asynchronous │ codes → weights ...          52 instructions and more │ 4·n/2 cycles
//
//   While the tensor cores work for one warpgroup the others decode codes into weights. Four are enough to keep the tensor cores busy for
//   n ≥ 64, and memory busy for smaller n.
//
//   Activations may be s8 codes (wna8.hpp). Weights are then signed bytes in registers, three instructions for eight of them, and tensor
//   cores sum integers. The sum of a fold of 128 channels (32, where fewer share a scale) is scaled at its end:
//
//     codes → bytes │ 4 wgmma of k32 │ s_a·s_w·dot onto the sums, 3 instructions each        the others multiply meanwhile
//
// A cluster of S CTAs can share a pass along K: rank r has records [r·R/S, (r+1)·R/S). Each then sends its sums of a unit of 64 rows × 8
// tokens to the rank that owns the unit, through distributed shared memory, and the owner adds them in the order of the ranks. The ring
// serves as the inbox: its last stage has been read by then. S and d come from the kernel's row in the table, never from M. With stream-K
// CTAs share a pass wherever a CTA's run of records ends, through device memory (stream_k.cuh).
//
// Weights do not depend on the previous kernel: the ring is filled with them before that kernel has ended (programmatic dependent launch).
#pragma once

#include <cuda.h>

#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/device/half_out.cuh"
#include "kernels/cuda/device/passes.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/ring.cuh"
#include "kernels/cuda/device/stream_k.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/device/wgmma8.cuh"
#include "kernels/cuda/sm90/gemm/gemm.hpp"
#include "kernels/cuda/weights/code_fragment.cuh"
#include "kernels/cuda/weights/weight_fragment.cuh"

namespace nibble::cuda {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kAllConsumers = 8;  // a named barrier; 1 … 4 are a warpgroup's
/// Registers of a thread. A CTA has all of an SM's, divided evenly at launch; the producers' warpgroup then gives most of its share away.
NIBBLE_HOST_DEVICE constexpr int producer_registers(GemmShape shape) { return shape.codes && shape.tokens == 128 ? 32 : 56; }
NIBBLE_HOST_DEVICE constexpr int consumer_registers(GemmShape shape) {
  const int share = 65536 / shape.threads() / 8 * 8, all = (share + (share - producer_registers(shape)) / shape.groups()) / 8 * 8;
  return all > 240 ? 240 : all;
}
constexpr int kWeightProducers = 2;  // warps
constexpr int kUnitTokens = 8;       // of a unit of sums: four a lane
/// Floats between tokens of the staging buffer: 68 ≡ 4 mod 32 puts a warp's 8 rows × 4 token pairs into 32 different banks.
constexpr int kStagePitch = gpu_tile::kRows + 4;
constexpr int kStagingBytes = kRoundUnits * kUnitTokens * kStagePitch * 4;  // of a warpgroup
static_assert(2 * kHalfRoundBytes <= kStagingBytes);
constexpr int kBoxBytesOfToken = 128;  // of a TMA box: the width of the swizzle

/// Orders the computation of v before this point and its uses after it: if an operand register is written between a wgmma_fence and the
/// products that follow, ptxas serialises the products.
__device__ inline void pin(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory"); }
__device__ inline void pin(std::uint32_t (&v)[4]) { asm volatile("" : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3])::"memory"); }

/// The kind of a fold's terms, of activations that are codes (wna8.hpp): with a scale, without one, with a zero point.
enum class ActTerms { scaled, plain, zeros };

/// kPatches: tokens are output pixels of a convolution.
template <class Act, int kBits, ConstantsPath kPath, int kTokens, bool kPatches, ActTerms kTerms>
struct Gemm {
  static constexpr bool kCodes = std::is_same_v<Act, std::int8_t>;
  static constexpr bool kActZeros = kTerms == ActTerms::zeros;
  static constexpr int kFolds = !kCodes ? 0 : kPath == ConstantsPath::any ? gpu_tile::kChannels / 32 : 1;  // of a record
  static constexpr GemmShape kShape{kTokens, kCodes, kFolds, kPatches};
  static constexpr int kBoxBytes = kTokens * kBoxBytesOfToken;
  static constexpr int kBoxChannels = kBoxBytesOfToken / static_cast<int>(sizeof(Act));
  static constexpr int kBoxes = gpu_tile::kChannels / kBoxChannels;  // of a record
  static constexpr int kActBytes = kBoxes * kBoxBytes;               // of a record
  static constexpr int kTermBytes = kShape.term_bytes();             // of a record
  static constexpr int kUnits = kTokens / kUnitTokens;               // of a row block
  static constexpr int kGroups = kShape.groups();
  using Sums = float[kTokens / 2];  // of a lane
  /// The sums that are staged in shared memory at once.
  static constexpr bool kMayShare = kTokens <= kRoundUnits * kUnitTokens;
  /// For up to 32 tokens a record's sums are scaled (n/2 instructions), not its weights (32 instructions).
  static constexpr bool kScalesSums =
      kTokens <= 32 && (kPath == ConstantsPath::fixed_zeros || kPath == ConstantsPath::integer_zeros);
  /// Whether a record's products complete before those of the next begin: required where sums are scaled, faster for n = 256, and
  /// necessary where registers do not suffice for two records.
  static constexpr bool kCompletes = kScalesSums || kTokens == 256 || kBits == 8 || kPath == ConstantsPath::fine_groups ||
                                     kPath == ConstantsPath::any || (kPath == ConstantsPath::integer_zeros && kTokens == 128);
  static constexpr int kBuffers = kPath == ConstantsPath::any ? 1 : 2;  // of fragments: one is filled, one multiplied
  /// Warps that release a stage: all where each reads terms from it, else one, because a warpgroup's products end together.
  static constexpr int kReleasing = kCodes ? 4 : 1;

  const GemmParams& p;
  std::uint8_t* shared;
  std::uint32_t base;
  int rank, cluster, warpgroup, lane, warp;  // warp: of the warpgroup

  /// Warpgroups that share a row block along K; this warpgroup's row block; its place among them, and so its first record in a stage.
  __device__ int depth() const { return kMayShare ? p.depth : 1; }
  __device__ int row_group() const { return kMayShare ? warpgroup / p.depth : warpgroup; }
  __device__ int k_index() const { return kMayShare ? warpgroup % p.depth : 0; }
  __device__ std::uint32_t full(int stage) const { return base + p.map.barriers + 8 * stage; }
  __device__ std::uint32_t empty(int stage) const { return base + p.map.barriers + 8 * (p.stages + stage); }
  __device__ std::uint32_t act(int stage) const { return base + stage * depth() * kActBytes; }
  __device__ std::uint32_t terms(int stage) const { return base + p.map.terms + stage * depth() * kTermBytes; }
  /// A stage's records: all of row block 0, then of row block 1, ...
  __device__ std::uint32_t records(int stage) const { return base + p.map.records + stage * kGroups * p.format.bytes; }

  /// The last token tile has a box of the tokens that there are; the rest of its stage is never stored.
  __device__ bool is_last(const Pass& pass) const { return !kPatches && pass.token_tile == p.schedule.token_tiles - 1; }
  __device__ int act_bytes(const Pass& pass) const {
    return is_last(pass) ? kBoxes * p.last_tokens * kBoxBytesOfToken : kActBytes;
  }

  // ---- producers: one thread in each of three warps, because issuing a copy takes time. Two copy the records of alternate row blocks, one
  // activations. All wait for the same empty stages. The first two announce bytes, also when they have none to copy: a stage that were full
  // without one of them could be reused before it looked, twice in the worst case, which looks to a late warp as if it were not yet empty.

  /// Weights are constant: this producer does not wait for the previous kernel (PDL).
  __device__ void produce_weights(int first_block) const {
    const std::uint64_t policy = p.schedule.token_tiles == 1 ? ptx::evict_first() : ptx::evict_last();
    const std::uint64_t tile_bytes = static_cast<std::uint64_t>(p.schedule.records) * p.format.bytes;
    Cursor to{0, 1};  // a stage that was never used counts as empty
    for_each_pass(p.schedule, [&](const Pass& pass) {
      const std::uint8_t* from = p.records + pass.block * tile_bytes + pass.first * p.format.bytes;
      for (int left = pass.records(); left > 0; left -= depth()) {
        ptx::barrier_wait(empty(to.stage), to.parity);
        const int count = min(depth(), left), bytes = count * p.format.bytes;  // consecutive records are one copy
        const int copies = (pass.blocks - first_block + kWeightProducers - 1) / kWeightProducers;
        const int acts = first_block == 0 ? count * (act_bytes(pass) + kTermBytes) : 0;
        ptx::barrier_arrive_expect(full(to.stage), acts + copies * bytes);
#pragma unroll 1
        for (int b = first_block; b < pass.blocks; b += kWeightProducers)
          ptx::bulk_copy(records(to.stage) + b * depth() * p.format.bytes, from + b * tile_bytes, bytes, full(to.stage), policy);
        from += bytes;
        to.advance(p.stages);
      }
    });
  }
  __device__ void produce_activations() const {
    const std::uint64_t policy = ptx::evict_last();
    ptx::wait_for_predecessors();
    Cursor to{0, 1};
    for_each_pass(p.schedule, [&](const Pass& pass) {
      const int end = pass.end * gpu_tile::kChannels;
      PatchWalk walk;
      const int box_channels = kCodes && kPatches ? p.box_channels : kBoxChannels;
      if constexpr (kPatches)
        walk = patch_walk(p.patches, pass.first * gpu_tile::kChannels, box_channels, pass.token_tile * kTokens);
      const CUtensorMap* const x = is_last(pass) ? &p.last_x : &p.x;
      for (int channel = pass.first * gpu_tile::kChannels; channel < end;) {
        ptx::barrier_wait(empty(to.stage), to.parity);
        if constexpr (kCodes && kPatches) {
          request_pixels(to.stage, walk, policy);
          channel += gpu_tile::kChannels;
        } else {
          std::uint32_t at = act(to.stage);
#pragma unroll 1
          for (int box = 0; box < kBoxes * depth() && channel < end; ++box) {
            if constexpr (kPatches)
              ptx::load_patches(at, &p.x, walk.next(p.patches, p.images), full(to.stage), policy);
            else
              ptx::load_box(at, x, channel, pass.token_tile * kTokens, full(to.stage), policy);
            if constexpr (kCodes) {
              const float2* from = p.terms + channel / gpu_tile::kChannels * kFolds * p.term_pitch + pass.token_tile * kTokens;
#pragma unroll 1
              for (int fold = 0; fold < kFolds; ++fold)
                ptx::bulk_copy(terms(to.stage) + (box * kFolds + fold) * kTokens * 8, from + fold * p.term_pitch, kTokens * 8,
                               full(to.stage), policy);
            }
            at += kBoxBytes;
            channel += kBoxChannels;
          }
        }
        to.advance(p.stages);
      }
    });
  }
  /// A record of codes of patches: a box of 128 channels or two of 64, and 16 bytes of a pixel's terms for every 128 channels or, folds
  /// being of 32, for every 64.
  __device__ void request_pixels(int stage, PatchWalk& walk, std::uint64_t policy) const {
    constexpr int kTermChannels = kFolds == 1 ? gpu_tile::kChannels : 2 * kStepChannels;
    std::uint32_t at = act(stage), at_terms = terms(stage);
#pragma unroll 1
    for (int channel = 0; channel < gpu_tile::kChannels; channel += p.box_channels) {
      PatchBox box = walk.next(p.patches, p.images);
      ptx::load_patches(at, &p.x, box, full(stage), policy);
      at += p.box_channels * kTokens;
      box.c = box.c / kTermChannels * 16;
#pragma unroll 1
      for (int i = 0; i < p.box_channels; i += kTermChannels, box.c += 16, at_terms += kTokens * 16)
        ptx::load_patches(at_terms, &p.pixel_terms, box, full(stage), policy);
    }
  }

  // ---- consumers

  __device__ void release(int stage) const {
    if (kCodes) __syncwarp();
    if (warp < kReleasing && lane == 0) ptx::barrier_arrive(empty(stage));
  }

  /// Adds the products of the warpgroup's row block and its share of `count` records.
  __device__ __forceinline__ void multiply(int count, Cursor& from, Sums& acc) const {
    constexpr int kHalves = 2;                                                               // of 64 channels, four k16
    constexpr int kProducts = gpu_tile::step_channels(kBits) / gpu_tile::kFragmentChannels;  // k16 of a 16-byte vector
    constexpr int kVectors = 4 / kProducts;                                                  // of a half
    const int position = row_pair_position(warp, lane);
    const int lane_codes = gpu_tile::vector_offset(0, warp, lane);
    const int stages = p.stages;
    const int stage_bytes = kGroups * p.format.bytes, slots = p.format.slots_offset;
    const std::uint32_t first = records(0) + (row_group() * depth() + k_index()) * p.format.bytes;
    const std::uint32_t first_operand = wgmma_operand_low(act(0) + k_index() * kActBytes),
                        stage_operand = depth() * (kActBytes / 16);
    constexpr bool kFine = kPath == ConstantsPath::fine_groups;  // constants change within a record, after 32 channels or 64
    const auto fine_slot = [&](int step) {
      return (p.format.span == 64 ? step / 2 : step) * p.format.slot_bytes;
    };  // of 32 channels
    RowConstants constants;
    if (kPath == ConstantsPath::fixed_zeros) fixed_zeros<Act, kBits>(constants, p.format);
    int r = k_index(), previous = -1;  // the stage whose last products may be running
    if (r < count) do {                // at least one record: if ptxas sees a path without a product it does not overlap them
        ptx::barrier_wait(full(from.stage), from.parity);
        const std::uint32_t at = first + from.stage * stage_bytes;
        const std::uint32_t operand = first_operand + from.stage * stage_operand;
        // Shared memory is read at once, except the second half of 8-bit codes, for which there are no registers.
        RawConstants raw[kFine ? 2 : 1];
        const auto load_fine = [&](int half) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            raw[kFine ? i : 0] = load_raw<kPath>(p.format, at + slots + fine_slot(half * 2 + i), position);
        };
        if (kFine)
          load_fine(0);
        else if (kPath != ConstantsPath::any)
          raw[0] = load_raw<kPath>(p.format, at + slots, position);
        uint4 codes[kHalves * kVectors];
        const auto load_codes = [&](int half) {
#pragma unroll
          for (int v = half * kVectors; v < (half + 1) * kVectors; ++v)
            codes[v] = ptx::load_shared16(at + lane_codes + gpu_tile::vector_offset(v, 0, 0));
        };
        load_codes(0);
        if (kBits == 4) load_codes(1);
        if (!kFine && kPath != ConstantsPath::any) make_constants<kPath, Act, kBits>(constants, p.format, raw[0], p.scale_after);
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
            if (kPath == ConstantsPath::any && i % 2 == 0)  // groups of 32 are two k16
              load_constants<Act, kBits>(constants, p.format,
                                         at + slots + (half * 2 + i / 2) * 32 / p.format.span * p.format.slot_bytes, position,
                                         p.scale_after);
            if (kFine && i % 2 == 0)
              make_constants<kPath, Act, kBits>(constants, p.format, raw[kFine ? i / 2 : 0], p.scale_after);
            const uint4& vector = codes[half * kVectors + i / kProducts];
            if (kScalesSums)
              integers<Act, kBits>(a[i], vector, i % kProducts, constants);
            else
              weights<Act, kBits>(a[i], vector, i % kProducts, constants);
          }
          if (kFine && half == 0) load_fine(1);
#pragma unroll
          for (int i = 0; i < 4; ++i) pin(a[i]);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const std::uint64_t x = wgmma_operand(operand + (half * kBoxBytes + i * 32) / 16);
            if (kScalesSums && half == 0 && i == 0)
              Wgmma<kTokens>::template begin<Act>(sums, a[i], x);
            else
              Wgmma<kTokens>::template add<Act>(sums, a[i], x);
          }
          wgmma_commit();
          if (kBuffers == 1 || (kCompletes && half + 1 == kHalves))
            wgmma_wait<0>();
          else
            wgmma_wait<1>();
          if (!kCompletes && half == 0 && previous >= 0) release(previous);
        }
        if (kCompletes) release(from.stage);
        previous = from.stage;
        from.advance(stages);
        if constexpr (kScalesSums) {
          const float2 s = p.scale_after ? float2{1.0f, 1.0f} : scales_of(raw[0], p.format);
#pragma unroll
          for (int i = 0; i < kTokens / 2; ++i) acc[i] = fmaf(i % 4 < 2 ? s.x : s.y, dot[i], acc[i]);
        }
      } while ((r += depth()) < count);
    wgmma_wait<0>();
    if (!kCompletes) release(previous);
    if (r - k_index() < count) {  // the last stage may have no record for this warpgroup
      pass_on(from.stage, from.parity);
      from.advance(stages);
    }
  }

  /// The same for codes. A fold's sums are exact integers; scaled, they are added in f32:
  ///
  ///   acc += s_a·s_w · Σ a·(u − base)  +  s_a·Σa · (o − s_w·(z − base))         base: 8 or 128, which makes u a signed operand
  ///
  /// With zero points of activations a stands for a − z_a in both. The second part is present where zeros are not the base.
  ///
  /// A part is all tokens where a row has only a scale; else at most 64, or 32 where the constants of a fold take more registers. Integer
  /// and f32 sums of more tokens would leave no registers for a third warpgroup, and products of other warpgroups are what overlaps with a
  /// fold. Products with operands in registers block their own warpgroup, so that a second set of integers gains nothing.
  __device__ __forceinline__ void multiply_codes(int count, Cursor& from, Sums& acc) const {
    constexpr int kSteps = gpu_tile::kChannels / kStepChannels, kFoldSteps = kSteps / kFolds;
    constexpr int kVectors = gpu_tile::kChannels / gpu_tile::step_channels(kBits);  // 16 bytes of a lane each
    constexpr int kFoldVectors = kVectors < kFolds ? 1 : kVectors / kFolds;         // of a fold, or that have a fold in them
    constexpr int kPartTokens = kTokens < 64 || (kPath == ConstantsPath::fixed_zeros && !kActZeros) ? kTokens
                                : kFolds > 1 || (kActZeros && kTokens == 64)                        ? 32
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
    const std::uint32_t first_operand = wgmma_operand_low(act(0) + k_index() * kActBytes),
                        stage_operand = depth() * (kActBytes / 16);
    const std::uint32_t lane_terms = k_index() * kTermBytes + lane % 4 * 2 * kTermPitch;  // two tokens'

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
#pragma unroll
      for (int i = 0; i < kFoldSteps; ++i) {
        signed_codes<kBits>(bytes[i], codes[i * kFoldVectors / kFoldSteps], index * kFoldSteps + i);
        if (kActZeros) add_codes(fold.sums, bytes[i]);
        pin(bytes[i]);
      }
      if (kActZeros) share_sums(fold.sums);
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
      const int position = row_pair_position(warp, lane);
      if constexpr (kFolds == 1)
        return row_terms<kPath, kBits>(p.format, load_raw<kPath>(p.format, slot, position));
      else
        return load_row_terms<kBits>(p.format, slot + (fold.index * kStepChannels >> span_shift) * p.format.slot_bytes, position);
    };
    const auto add = [&](const Part& dot, const Fold& fold, int part, const RowTerms& rows) {
      const int in_record = kPatches ? fold.index / 2 * kTokens * 16 + fold.index % 2 * 8 : fold.index * kTokens * 8;
      const std::uint32_t at = terms(fold.stage) + lane_terms + in_record + part * kPartTokens * kTermPitch;
#pragma unroll
      for (int j = 0; j < kPartTokens / kUnitTokens; ++j) {
        float* const to = acc + part * kPartSums + 4 * j;
        const uint4 t = token_terms(at + j * kUnitTokens * kTermPitch);
        if constexpr (kActZeros)
          add_fold_zeros<kPath>(to, dot + 4 * j, t, rows, fold.sums);
        else
          add_fold<kPath, kTerms == ActTerms::plain>(to, dot + 4 * j, t, rows);
      }
    };
    if (r >= count) {
      // the last stage has no record for this warpgroup
    } else
      do {
        Part dot;
        Bytes bytes;
        Fold now;
        fetch(now, bytes);
        const RowTerms rows = row_terms_of(now);
#pragma unroll
        for (int part = 0; part < kTokens / kPartTokens; ++part) {
          multiply(dot, bytes, now, part);
          wgmma_wait<0>();
          add(dot, now, part, rows);
        }
        if (now.index == kFolds - 1) release(now.stage);
      } while (r < count);
    if (r - k_index() < count) {  // the last stage may have no record for this warpgroup
      pass_on(from.stage, from.parity);
      from.advance(stages);
    }
  }
  /// Applies per-token scales that the group sums leave out. Entries past M are never stored.
  __device__ void scale_tokens(const Pass& pass, Sums& acc) const {
    if (p.token_scales == nullptr) return;
    const float* const from = p.token_scales + pass.token_tile * kTokens + opaque(lane) % 4 * 2;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const float2 scale = __ldcg(reinterpret_cast<const float2*>(from + j * kUnitTokens));
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[4 * j + i] = __fmul_rn(acc[4 * j + i], i % 2 == 0 ? scale.x : scale.y);
    }
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
  static constexpr int kTermPitch = kPatches ? 16 : 8;
  __device__ __forceinline__ static uint4 token_terms(std::uint32_t at) {
    if constexpr (!kPatches) return ptx::load_shared16(at);
    const uint2 even = ptx::load_shared8(at), odd = ptx::load_shared8(at + kTermPitch);
    return {even.x, odd.x, even.y, odd.y};
  }

  /// Reduces the sums of the warpgroups that share a row block, in their order, into the first of them.
  __device__ void sum_turns(Sums& acc) const {
    if constexpr (kMayShare) {
      const auto part = [&](int group) {
        return reinterpret_cast<float4*>(shared + p.map.staging + group * kStagingBytes) + warp * 32 + lane;
      };
      if (k_index() != 0)
#pragma unroll
        for (int i = 0; i < kUnits; ++i)
          part(warpgroup)[i * kGroupThreads] = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
      ptx::named_barrier(kAllConsumers, kGroups * kGroupThreads);
      if (k_index() == 0)
#pragma unroll 1
        for (int t = 1; t < depth(); ++t)
#pragma unroll
          for (int i = 0; i < kUnits; ++i) {
            const float4 more = part(warpgroup + t)[i * kGroupThreads];
            acc[4 * i] += more.x, acc[4 * i + 1] += more.y, acc[4 * i + 2] += more.z, acc[4 * i + 3] += more.w;
          }
      ptx::named_barrier(kAllConsumers, kGroups * kGroupThreads);
    }
  }

  /// Sums of one unit into the warpgroup's staging buffer, as its number `slot`.
  __device__ void stage(int slot, float4 sum) const {
    const int own = kCodes ? opaque(lane) : lane;
    float* to = reinterpret_cast<float*>(shared + p.map.staging + warpgroup * kStagingBytes) +
                (slot * kUnitTokens + own % 4 * 2) * kStagePitch + warp * gpu_tile::kFragmentRows + own / 4;
    to[0] = sum.x;
    to[kStagePitch] = sum.y;
    to[8] = sum.z;
    to[kStagePitch + 8] = sum.w;
  }
  /// Stores staged units `first` … `first + count − 1` of the CTA's pass to D. Eight lanes store a token's 64 rows.
  __device__ void flush(const Pass& pass, int first, int count) const {
    ptx::named_barrier(1 + warpgroup, kGroupThreads);
    const float* from = reinterpret_cast<const float*>(shared + p.map.staging + warpgroup * kStagingBytes);
    if (kPatches && p.channel_stride != 0) {  // NCHW: pixels are contiguous, a warp stores 32 tokens of a row
      const int unit = first + lane / kUnitTokens;
      const int m = pass.token_tile * kTokens + unit % kUnits * kUnitTokens + lane % kUnitTokens, pixels = p.patches.pixels();
      const epilogue::Pixel pixel{m / pixels, m % pixels};
      const std::int64_t at = pixel.image * p.image_stride + pixel.pixel;
#pragma unroll 1
      for (int row = 2 * warp; row < gpu_tile::kRows; row += 8) {
        const int n = (pass.block + unit / kUnits) * gpu_tile::kRows + row;
        if (lane < count * kUnitTokens && m < p.m && n < p.n)
          p.epilogue.store_pair(at + n * p.channel_stride, p.channel_stride, pixel, n,
                                *reinterpret_cast<const float2*>(from + lane * kStagePitch + row), n + 1 < p.n);
      }
    } else {
#pragma unroll 1
      for (int token = warp * 4 + lane / 8; token < count * kUnitTokens; token += 16) {
        const int unit = first + token / kUnitTokens;
        const int m = pass.token_tile * kTokens + unit % kUnits * kUnitTokens + token % kUnitTokens;
        if (m < p.m)
          store_rows(p.epilogue, p.first_row + m, (pass.block + unit / kUnits) * gpu_tile::kRows + lane % 8 * 8, p.n,
                     from + token * kStagePitch + lane % 8 * 8);
      }
    }
    ptx::named_barrier(1 + warpgroup, kGroupThreads);
  }

  /// Multiplies the sums by the scales that the operands leave out. Scales per channel are the same in all records of a row tile; they are
  /// read from memory again, not kept in registers.
  __device__ void scale(const Pass& pass, Sums& acc) const {
    float low = kScalesSums ? 1.0f : 1.0f / kScaleUp<Act>, high = low;
    if (p.scale_after) {
      const std::uint8_t* scales = p.records +
                                   static_cast<std::int64_t>(pass.block + row_group()) * p.schedule.records * p.format.bytes +
                                   p.format.slots_offset;
      const int position = row_pair_position(warp, lane);
      low = load_float(scales, position, p.format.scale_type);
      high = load_float(scales, position + 1, p.format.scale_type);
    }
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[i] *= i % 4 < 2 ? low : high;
  }

  template <bool kPixels>
  __device__ HalfRounds<kPixels> halves() const {
    return {.e = p.epilogue,
            .m = p.m,
            .n = p.n,
            .first_row = p.first_row,
            .pixels = kPixels ? p.patches.pixels() : 1,
            .image_stride = p.image_stride,
            .channel_stride = p.channel_stride,
            .fours = p.half == HalfOut::pixel_fours,
            .buffers = base + p.map.staging + warpgroup * kStagingBytes,
            .barrier = 1 + warpgroup,
            .warp = warp,
            .lane = lane};
  }
  static constexpr int kRound = kUnits < kRoundUnits ? kUnits : kRoundUnits;
  template <bool kPixels>
  __device__ __forceinline__ void store_halves(const Pass& pass, const Sums& acc, float2 bias) const {
    const HalfRounds<kPixels> out = halves<kPixels>();
    const int first_m = pass.token_tile * kTokens;
    // A run-time loop over rounds, for a single copy of flush's code; registers are indexed at compile time.
#pragma unroll 1
    for (int first = 0; first < kUnits && first_m + first * kUnitTokens < p.m; first += kRound) {
#pragma unroll
      for (int unit = 0; unit < kUnits; unit += kRound) {
        if (unit != first) continue;
#pragma unroll
        for (int i = 0; i < kRound; ++i) {
          const float* v = acc + 4 * (unit + i);
          out.stage(first / kRound, i, {v[0], v[1], v[2], v[3]}, bias);
        }
      }
      out.flush(first / kRound, pass.block + row_group(), first_m + first * kUnitTokens, kRound * kUnitTokens);
    }
    ptx::named_barrier(1 + warpgroup, kGroupThreads);  // before the next pass writes into the first buffer
  }
  __device__ void store_own(const Pass& pass, const Sums& acc, float2 bias) const {
    if (p.half == HalfOut::channels) return store_halves<false>(pass, acc, bias);
    if (kPatches && p.half != HalfOut::no) return store_halves<true>(pass, acc, bias);
#pragma unroll 1
    for (int first = 0; first < kUnits; first += kRound) {
#pragma unroll
      for (int unit = 0; unit < kUnits; unit += kRound) {
        if (unit != first) continue;
#pragma unroll
        for (int i = 0; i < kRound; ++i) {
          const float* d = acc + 4 * (unit + i);
          stage(i, {d[0], d[1], d[2], d[3]});
        }
      }
      flush(pass, row_group() * kUnits + first, kRound);
    }
  }

  // Units of a split pass: rank u·S/U owns unit u and has a box for it from every rank, 16 bytes a thread of a warpgroup.
  __device__ int owned_units() const { return kGroups / depth() * kUnits / p.schedule.split; }
  __device__ void send(const Sums& acc) const {
    const int own = owned_units();
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const int unit = row_group() * kUnits + j;
      const std::uint32_t to = base + (((unit % own) * p.schedule.split + rank) * kGroupThreads + warp * 32 + lane) * 16;
      const float* d = acc + 4 * j;
      ptx::store_remote16(ptx::map_to_rank(to, unit / own), {d[0], d[1], d[2], d[3]});
    }
  }
  __device__ void store_received(const Pass& pass) const {
    const int own = owned_units(), share = max(1, own / kGroups), count = min(kRoundUnits, share);
    int round = 0;
#pragma unroll 1
    for (int i = warpgroup * share; i < min(own, (warpgroup + 1) * share); i += kRoundUnits, ++round) {
      const auto received = [&](int slot) {
        const auto* box =
            reinterpret_cast<const float4*>(shared) + (i + slot) * p.schedule.split * kGroupThreads + warp * 32 + lane;
        float4 sum = box[0];
        for (int r = 1; r < p.schedule.split; ++r) {
          const float4 part = box[r * kGroupThreads];
          sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        return sum;
      };
      const int unit = rank * own + i, block = pass.block + unit / kUnits;  // a round is within a row block
      const int first_m = pass.token_tile * kTokens + unit % kUnits * kUnitTokens;
      const auto store = [&](const auto& out) {
        const float2 bias = out.bias(block);
        for (int slot = 0; slot < count; ++slot) out.stage(round, slot, received(slot), bias);
        out.flush(round, block, first_m, count * kUnitTokens);
      };
      if (p.half == HalfOut::channels) {
        store(halves<false>());
      } else if (kPatches && p.half != HalfOut::no) {
        store(halves<true>());
      } else {
        for (int slot = 0; slot < count; ++slot) stage(slot, received(slot));
        flush(pass, unit, count);
      }
    }
  }

  __device__ __forceinline__ void consume_pass(const Pass& pass, Cursor& from) const {
    Sums acc = {};
    const float2 bias = halves<false>().bias(pass.block + row_group());  // in flight during the products
    if (row_group() < pass.blocks) {
      if constexpr (kCodes) {
        multiply_codes(pass.records(), from, acc);
        scale_tokens(pass, acc);
      } else {
        multiply(pass.records(), from, acc);
        scale(pass, acc);
      }
    } else {
      skip(pass.records(), from);
    }
    if (depth() > 1) sum_turns(acc);
    const bool mine = k_index() == 0 && row_group() < pass.blocks;
    if (p.schedule.split > 1) exchange_begins();
    if (!mine) return;
    if (p.schedule.split > 1) return send(acc);
    if (p.schedule.split == kStreamK) {
      const Parts<float, kUnits> parts{p.parts, 4 * kGroups, 4 * warpgroup + warp, lane};
      if (pass.end < p.schedule.records) return parts.store(cluster, pass.blocks, acc);
      if (pass.first > 0) parts.add(p.schedule, cluster, pass.first, acc);
    }
    store_own(pass, acc, bias);
  }
  /// All rings have been read and become inboxes.
  __device__ static void exchange_begins() {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  /// All sums have arrived.
  __device__ static void exchange_ends() {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  /// A pass with fewer row blocks than there are warpgroups.
  __device__ void skip(int count, Cursor& from) const {
    for (int r = 0; r < count; r += depth()) {
      pass_on(from.stage, from.parity);
      from.advance(p.stages);
    }
    ptx::named_barrier(1 + warpgroup, kGroupThreads);  // keeps the other warps of the warpgroup beside the first
  }
  /// Releases a stage unread. Only the warps that release wait: the others may lag, and a barrier that has advanced by two phases looks to
  /// a late thread as if it had not advanced.
  __device__ void pass_on(int stage, std::uint32_t parity) const {
    if (warp >= kReleasing) return;
    ptx::barrier_wait(full(stage), parity);
    __syncwarp();  // all lanes have seen the phase
    release(stage);
  }
  __device__ void consume() const {
    ptx::wait_for_predecessors();  // before operands of the epilogue are read, and D is written
    Cursor from{0, 0};
    for_each_pass(p.schedule, [&](const Pass& pass) { consume_pass(pass, from); });
  }
};

template <class Act, int kBits, ConstantsPath kPath, int kTokens, bool kPatches, ActTerms kTerms>
__global__ void __launch_bounds__(Gemm<Act, kBits, kPath, kTokens, kPatches, kTerms>::kShape.threads(), 1)
    gemm_sm90_kernel(const __grid_constant__ GemmParams p) {
  using This = Gemm<Act, kBits, kPath, kTokens, kPatches, kTerms>;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const bool clustered = p.schedule.split > 1;
  const unsigned warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform over the warp, and known to be to the compiler
  constexpr unsigned kProducerWarp = 4 * This::kGroups;         // the last one: warpgroups begin at multiples of four warps
  This gemm{.p = p,
            .shared = shared,
            .base = ptx::shared_address(shared),
            .rank = cluster_rank(p.schedule),
            .cluster = cluster_index(p.schedule),
            .warpgroup = static_cast<int>(warp / 4),
            .lane = static_cast<int>(threadIdx.x % 32),
            .warp = static_cast<int>(warp % 4)};
  ptx::let_dependents_start();
  if (warp == kProducerWarp && gemm.lane == 0) {
    for (int s = 0; s < p.stages; ++s) {
      ptx::barrier_init(gemm.full(s), kWeightProducers);
      ptx::barrier_init(gemm.empty(s), This::kGroups * This::kReleasing);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (warp >= kProducerWarp) {
    ptx::give_registers<producer_registers(This::kShape)>();
    const unsigned producer = warp - kProducerWarp;
    if (producer < kWeightProducers && gemm.lane == 0) gemm.produce_weights(producer);
    if (producer == kWeightProducers && gemm.lane == 0) gemm.produce_activations();
    if (producer > kWeightProducers) set_flags(p.parts, p.schedule, gemm.cluster, gemm.lane);
    __syncwarp();  // a warp must be converged at a barrier of the cluster
    if (clustered) {
      gemm.exchange_begins();
      gemm.exchange_ends();
    }
  } else {
    ptx::take_registers<consumer_registers(This::kShape)>();
    gemm.consume();
    if (clustered) {
      gemm.exchange_ends();
      gemm.store_received(p.schedule.numbered(gemm.cluster));
    }
  }
}

template <class Act, int kBits, ConstantsPath kPath, bool kPatches, ActTerms kTerms>
GemmKernel kernel_for(int tokens) {
  switch (tokens) {
    case 16:
      if constexpr (!kPatches) return &kLaunchable<gemm_sm90_kernel<Act, kBits, kPath, 16, false, kTerms>>;
      return nullptr;
    case 32:
      if constexpr (!kPatches) return &kLaunchable<gemm_sm90_kernel<Act, kBits, kPath, 32, false, kTerms>>;
      return nullptr;
    case 64: return &kLaunchable<gemm_sm90_kernel<Act, kBits, kPath, 64, kPatches, kTerms>>;
    case 128:
      if constexpr (!kPatches || !std::is_same_v<Act, std::int8_t>)
        return &kLaunchable<gemm_sm90_kernel<Act, kBits, kPath, 128, kPatches, kTerms>>;
      return nullptr;
    case 256:
      if constexpr (!std::is_same_v<Act, std::int8_t>)
        return &kLaunchable<gemm_sm90_kernel<Act, kBits, kPath, 256, kPatches, kTerms>>;
      return nullptr;
    default: return nullptr;
  }
}
template <class Act, int kBits, bool kPatches = false, ActTerms kTerms = ActTerms::scaled>
GemmKernel kernel_for(int tokens, ConstantsPath path) {
  if (path == ConstantsPath::fixed_zeros) return kernel_for<Act, kBits, ConstantsPath::fixed_zeros, kPatches, kTerms>(tokens);
  if (path == ConstantsPath::integer_zeros) return kernel_for<Act, kBits, ConstantsPath::integer_zeros, kPatches, kTerms>(tokens);
  if constexpr (!std::is_same_v<Act, std::int8_t>)
    if (path == ConstantsPath::fine_groups) return kernel_for<Act, kBits, ConstantsPath::fine_groups, kPatches, kTerms>(tokens);
  return kernel_for<Act, kBits, ConstantsPath::any, kPatches, kTerms>(tokens);
}
template <class Act, bool kPatches = false>
GemmKernel kernel_for(int tokens, const RecordFormat& format, int bits) {
  const ConstantsPath path = constants_path(format, std::is_same_v<Act, __half> ? DType::f16 : DType::bf16);
  return bits == 4 ? kernel_for<Act, 4, kPatches>(tokens, path) : kernel_for<Act, 8, kPatches>(tokens, path);
}

}  // namespace
}  // namespace nibble::cuda
