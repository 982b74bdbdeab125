// D[M,N] = epilogue(Â[M,K] · Ŵᵀ) on Hopper for 8-bit codes on both sides: wgmma with both operands in shared memory.
//
//   Dᵀ[N,M] = Ŵ[N,K] · Âᵀ[K,M]      weights are the 64-row A operand, n tokens the B operand
//
//   CTA   = multiplying warpgroups ◀──ring of stages── producer warps
//   stage = n tokens × 128 channels (a TMA box, 128-byte swizzle) | a record of 64 rows × 128 channels for each row block of the pass
//   pass  = up to `blocks` row blocks, one a warpgroup, × n tokens × all of K (gemm_schedule.hpp)
//
// Records are swizzled offline (gpu_w8.hpp), so that a linear copy makes them operands: a warpgroup multiplies its part of a stage with
// four instructions, without conversions.
//
//                        few tokens                                     many tokens
//   bound by             memory                                         tensor cores, and the epilogue
//   K is shared by       `depth` warpgroups, `split` CTAs of a cluster  not shared
//
// Partial sums along K are reduced as in gemm_kernel.cuh: those of warpgroups in shared memory; those of a cluster through distributed
// shared memory, each unit of 64 rows × 8 tokens by the rank that owns it, in the order of the ranks; those of stream-K through device
// memory (stream_k.cuh).
//
// Then the scales and zero points (w8a8_task.hpp), and the epilogue: units are staged in shared memory, where Dᵀ becomes D.
//
// In a convolution (kPatches, compiled separately) tokens are output pixels. TMA walks over the image (tensor_map.hpp) and copies channels
// of one element of the filter, 128 at a time, or 64 where Ci is no multiple of 128. Two boxes of 64 are the halves of a record, 64 bytes
// a token in each:
//
//                    record, boxes of 128                     record, boxes of 64
//   token t          chunk 0…7, swizzled by t mod 8           chunk 0…3 │ chunk 4…7, each swizzled by t/2 mod 4
//   k32 number i     32·i bytes on                            32·(i mod 2) bytes on in box i/2, n·64 bytes behind the first
//
// Groups of channels with 128 or 256 tokens (kTokenRows) are bound by the scaling of sums. A lane with two tokens and many rows scales its
// sums by four numbers; one with two rows and many tokens needs as many numbers as half of its sums. Both operands have the same form, 64
// rows of 128 swizzled bytes, so they are exchanged; the rest of a stage stays as it is:
//
//   D[M,N] = Â[M,K] · Ŵᵀ[K,N]      a warpgroup has half of the pass's tokens, 64 at a time, and all of its rows, 64 or 128
//
// Tensor cores sum e4m3 products with 13 bits. Precise sums (kPrecise) use them for a few records at a time and add these partial sums in
// f32. With 256 tokens registers hold the partial sums of one half of the tokens beside all f32 sums: the halves read the same stages one
// after the other.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/device/half_out.cuh"
#include "kernels/cuda/device/passes.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/ring.cuh"
#include "kernels/cuda/device/stream_k.cuh"
#include "kernels/cuda/device/wgmma8.cuh"
#include "kernels/cuda/sm90/gemm/w8a8.hpp"

namespace nibble::cuda {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kAllConsumers = 8;  // a named barrier; 1 … 4 are a warpgroup's
/// Registers of a thread. A CTA has all of an SM's, divided evenly at launch; the producers' warpgroup then gives most of its share away:
/// it keeps what ptxas needs for the addresses of scales, or for the walk over an image.
template <bool kGrouped, bool kPatches>
constexpr int kProducerRegisters = kGrouped || kPatches ? 40 : 32;
template <int kTokens, bool kGrouped, bool kPatches>
constexpr int kConsumerRegisters = [] {
  const int share = 65536 / w8a8_threads(kTokens, kGrouped) / 8 * 8;
  const int most = (share + (share - kProducerRegisters<kGrouped, kPatches>) / w8a8_groups(kTokens, kGrouped)) / 8 * 8;
  return most > 240 ? 240 : most;
}();
/// Tokens that have partial sums in tensor cores and sums in f32 at the same time.
template <int kTokens>
constexpr int kPreciseTokens = kTokens < 128 ? kTokens : 128;
constexpr int kUnitTokens = 8;  // of a unit of sums: four a lane

/// Floats between tokens of the staging buffer: 68 ≡ 4 mod 32 puts a warp's 8 rows × 4 token pairs into 32 different banks.
constexpr int kStagePitch = gpu_w8::kRows + 4;
constexpr int kStagingBytes = kRoundUnits * kUnitTokens * kStagePitch * 4;  // of a warpgroup
static_assert(2 * kHalfRoundBytes <= kStagingBytes);

/// Four sums of a unit: rows g, g, g+8, g+8 of the warp's 16 and tokens 2t, 2t+1, 2t, 2t+1, of lane 4g + t.
template <class Sum>
struct alignas(16) Four {
  Sum at[4];
};

/// kPatches: tokens are output pixels of a convolution. kTokenRows: tokens are the 64-row operand. kPrecise: partial sums of a few records
/// are added in f32.
template <class Code, int kTokens, bool kGrouped, bool kPatches, bool kTokenRows, bool kPrecise>
struct W8A8 {
  using Sum = typename Code::Sum;
  using Sums = Sum[kTokens / 2];  // of a lane
  static constexpr bool kIntegers = std::is_same_v<Sum, std::int32_t>;
  static constexpr int kActBytes = kTokens * gpu_w8::kChannels;  // of a record
  static constexpr int kUnits = kTokens / kUnitTokens;           // of a row block
  static constexpr int kRound = kUnits < kRoundUnits ? kUnits : kRoundUnits;
  static constexpr int kGroups = w8a8_groups(kTokens, kGrouped);
  static constexpr int kScaleSlot = w8a8_slot(kTokens);
  /// The sums that are staged in shared memory at once.
  static constexpr bool kMayShare = kTokens <= kRoundUnits * kUnitTokens;
  /// With kTokenRows: a warpgroup's tokens, and the tokens of one operand.
  static constexpr int kGroupTokens = kTokens / kGroups, kPartTokens = 64, kParts = kGroupTokens / kPartTokens;

  const W8A8Params& p;
  std::uint8_t* shared;
  std::uint32_t base;
  int rank, cluster, warpgroup, lane, warp;  // warp: of the warpgroup

  __device__ int depth() const { return kMayShare ? p.depth : 1; }
  __device__ int row_group() const { return kMayShare ? warpgroup / p.depth : warpgroup; }
  __device__ int k_index() const { return kMayShare ? warpgroup % p.depth : 0; }
  __device__ int stage_records() const { return p.blocks * depth(); }
  __device__ int active() const { return kTokenRows ? kGroups : stage_records(); }  // warpgroups
  __device__ std::uint32_t full(int stage) const { return base + p.map.barriers + 8 * stage; }
  __device__ std::uint32_t empty(int stage) const { return base + p.map.barriers + 8 * (p.stages + stage); }
  __device__ std::uint32_t act(int stage) const { return base + stage * depth() * kActBytes; }
  /// A stage's records: all of row block 0, then of row block 1, ...
  __device__ std::uint32_t records(int stage) const {
    return base + p.map.records + stage * stage_records() * gpu_w8::kRecordBytes;
  }

  /// The last token tile has a box of the tokens that there are; the rest of its stage is never stored.
  __device__ bool is_last(const Pass& pass) const { return !kPatches && pass.token_tile == p.schedule.token_tiles - 1; }
  __device__ int act_bytes(const Pass& pass) const { return is_last(pass) ? p.last_tokens * gpu_w8::kChannels : kActBytes; }

  // ---- producers: a thread in each of two warps

  /// Weights are constant: this producer does not wait for the previous kernel (PDL).
  __device__ void produce_weights() const {
    const std::uint64_t policy = p.schedule.token_tiles == 1 ? ptx::evict_first() : ptx::evict_last();
    const std::int64_t tile_bytes = std::int64_t{p.schedule.records} * gpu_w8::kRecordBytes;
    Cursor to{0, 1};  // a stage that was never used counts as empty
    for_each_pass(p.schedule, [&](const Pass& pass) {
      const std::byte* from = p.weight.bytes + pass.block * tile_bytes + std::int64_t{pass.first} * gpu_w8::kRecordBytes;
#pragma unroll 1
      for (int left = pass.records(); left > 0; left -= depth()) {
        ptx::barrier_wait(empty(to.stage), to.parity);
        const int count = min(depth(), left), bytes = count * gpu_w8::kRecordBytes;  // consecutive records are one copy
        ptx::barrier_arrive_expect(full(to.stage), count * act_bytes(pass) + pass.blocks * bytes);
#pragma unroll 1
        for (int b = 0; b < pass.blocks; ++b)
          ptx::bulk_copy(records(to.stage) + b * depth() * gpu_w8::kRecordBytes, from + b * tile_bytes, bytes, full(to.stage),
                         policy);
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
      PatchWalk walk;
      if constexpr (kPatches)
        walk = patch_walk(p.patches, pass.first * gpu_w8::kChannels, p.box_channels, pass.token_tile * kTokens);
      const CUtensorMap* const x = is_last(pass) ? &p.last_x : &p.x;
#pragma unroll 1
      for (int record = pass.first; record < pass.end;) {
        ptx::barrier_wait(empty(to.stage), to.parity);
        std::uint32_t at = act(to.stage);
#pragma unroll 1
        for (int i = 0; i < depth() && record < pass.end; ++i, ++record, at += kActBytes)
          if constexpr (kPatches) {
#pragma unroll 1
            for (int channel = 0; channel < gpu_w8::kChannels; channel += p.box_channels)
              ptx::load_patches(at + channel * kTokens, &p.x, walk.next(p.patches, p.images), full(to.stage), policy);
          } else {
            ptx::load_box(at, x, record * gpu_w8::kChannels, pass.token_tile * kTokens, full(to.stage), policy);
          }
        to.advance(p.stages);
      }
    });
  }
  /// Copies the scales of a record's activations and row blocks: the work of a whole warp, because they are scattered and copied 4 bytes
  /// at a time. The copies are asynchronous and arrive at the stage's barrier on completion, so that as many records are in flight as the
  /// ring has stages.
  __device__ std::uint32_t scales_of(int stage, int index) const {
    return base + p.map.scales + (stage * depth() + index) * kScaleSlot * 4;
  }
  /// Writes the scales that are not in memory, once for all passes: nothing overwrites them.
  __device__ void fill_scales() const {
#pragma unroll 1
    for (int slot = 0; slot < p.stages * depth(); ++slot)
#pragma unroll 1
      for (int at = lane; at < kScaleSlot; at += 32)
        ptx::store_shared4(scales_of(0, slot) + 4 * at, __float_as_uint(at < kTokens ? p.acts.scale : 1.0f));
  }
  __device__ void produce_scales() const {
    const int block_rows = p.weight.geometry.block_rows;
    ptx::wait_for_predecessors();
    Cursor to{0, 1};
    for_each_pass(p.schedule, [&](const Pass& pass) {
      const int first = pass.token_tile * kTokens + lane;
      const float* rows = p.weight.scales();
      if (block_rows != 0) rows += std::int64_t{(pass.block + lane) * gpu_w8::kRows / block_rows} * p.schedule.records;
#pragma unroll 1
      for (int record = pass.first; record < pass.end;) {
        ptx::barrier_wait(empty(to.stage), to.parity);
#pragma unroll 1
        for (int d = 0; d < depth() && record < pass.end; ++d, ++record) {
          const std::uint32_t slot = scales_of(to.stage, d) + 4 * lane;
          if (p.acts.scales != nullptr) {
            const float* tokens = p.acts.scales + record * p.acts.scale_group;
#pragma unroll
            for (int i = 0; i < kTokens; i += 32)  // tokens past M are zero and not stored
              if (i + lane < kTokens) ptx::async_copy4(slot + 4 * i, tokens + min(first + i, p.m - 1) * p.acts.scale_row);
          }
          if (block_rows != 0 && lane < pass.blocks) ptx::async_copy4(slot + 4 * kTokens, rows + record);
        }
        ptx::barrier_arrive_after_copies(full(to.stage));
        to.advance(p.stages);
      }
    });
  }

  // ---- consumers

  /// Where each warp reads scales from a stage, each releases it; else one does, because a warpgroup's products end together.
  static constexpr int kReleasing = kGrouped ? 4 : 1;  // warps
  __device__ void release(int stage) const {
    if (kGrouped) __syncwarp();
    if (warp < kReleasing && lane == 0) ptx::barrier_arrive(empty(stage));
  }

  /// Activations of 32 channels, number i of a record whose activations begin at `low`.
  __device__ std::uint64_t columns(std::uint32_t low, int i) const {
    if constexpr (!kPatches) return wgmma_operand(low + 2 * i);
    return wgmma_operand(low + code_columns(i, p.box_channels, kTokens),
                         p.box_channels == kPatchChannels ? kWgmmaRows64 : kWgmmaRows128);
  }

  /// Adds the products of the warpgroup's row block and its share of `count` records. The products of a record run while those of the next
  /// are issued.
  __device__ __forceinline__ void multiply(int count, Cursor& from, Sums& acc) const {
    const std::uint32_t weights =
        wgmma_operand_low(records(0)) + (row_group() * depth() + k_index()) * (gpu_w8::kRecordBytes / 16);
    const std::uint32_t tokens = wgmma_operand_low(act(0)) + k_index() * (kActBytes / 16);
    const std::uint32_t weight_stage = stage_records() * (gpu_w8::kRecordBytes / 16), token_stage = depth() * (kActBytes / 16);
    int r = k_index();
    if constexpr (kPrecise) {
      constexpr int kPart = kPreciseTokens<kTokens>, kPartSums = kPart / 2;
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
        int stage;
      };
      const auto begin = [&](Group& group) {
        ptx::barrier_wait(full(from.stage), from.parity);
        const std::uint32_t a = weights + from.stage * weight_stage, b = tokens + from.stage * token_stage;
        wgmma_fence();
        Wgmma8<Code, kTokens>::begin(group.dot, a, columns(b, 0));
#pragma unroll
        for (int i = 1; i < 4; ++i) Wgmma8<Code, kTokens>::add(group.dot, a + 2 * i, columns(b, i));
        wgmma_commit();
        group.stage = from.stage;
        from.advance(p.stages);
        r += depth();
      };
      const auto end = [&](const Group& group) {
        add_group(acc, group.dot, group.stage);
        release(group.stage);
      };
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
    if (r - k_index() < count) {  // the last stage may have no record for this warpgroup
      pass_on(from.stage, from.parity);
      from.advance(p.stages);
    }
  }
  /// acc += dot · s_a · s_w of a group of 128 channels.
  __device__ void add_group(Sums& acc, const Sums& dot, int stage) const {
    const auto* scales = reinterpret_cast<const float*>(shared + (scales_of(stage, k_index()) - base));
    const float weight_scale = scales[kTokens + row_group()];
    scales += lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const float2 s = *reinterpret_cast<const float2*>(scales + j * kUnitTokens);
      const float low = __fmul_rn(s.x, weight_scale), high = __fmul_rn(s.y, weight_scale);
      acc[4 * j] = fmaf(dot[4 * j], low, acc[4 * j]);
      acc[4 * j + 1] = fmaf(dot[4 * j + 1], high, acc[4 * j + 1]);
      acc[4 * j + 2] = fmaf(dot[4 * j + 2], low, acc[4 * j + 2]);
      acc[4 * j + 3] = fmaf(dot[4 * j + 3], high, acc[4 * j + 3]);
    }
  }

  // ---- consumers whose rows are tokens (kTokenRows)

  static constexpr int kBlockSums = gpu_w8::kRows / 2;  // of 64 tokens × 64 rows, of a lane
  /// Adds the products of the warpgroup's tokens and the pass's rows, 64 tokens at a time.
  template <int kBlocks>
  __device__ __forceinline__ void multiply_tokens(int count, Cursor& from, Sums& acc) const {
    constexpr int kRows = kBlocks * gpu_w8::kRows, kUnitSums = 4;
    const std::uint32_t tokens = wgmma_operand_low(act(0)) + warpgroup * (kActBytes / kGroups / 16);
    const std::uint32_t weights = wgmma_operand_low(records(0));
    Sum dot[kBlocks * kBlockSums] = {};
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      ptx::barrier_wait(full(from.stage), from.parity);
      const std::uint32_t b = weights + from.stage * stage_records() * (gpu_w8::kRecordBytes / 16);
      const auto* scales = reinterpret_cast<const float*>(shared + (scales_of(from.stage, 0) - base));
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
  __device__ __forceinline__ void consume_tokens(const Pass& pass, Cursor& from) const {
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

  /// Reduces the sums of the warpgroups that share a row block, in their order, into the first of them.
  __device__ void sum_turns(Sums& acc) const {
    if constexpr (kMayShare) {
      const auto part = [&](int group) {
        return reinterpret_cast<Four<Sum>*>(shared + p.map.staging + group * kStagingBytes) + warp * 32 + lane;
      };
      if (k_index() != 0)
#pragma unroll
        for (int i = 0; i < kUnits; ++i)
          part(warpgroup)[i * kGroupThreads] = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
      ptx::named_barrier(kAllConsumers, active() * kGroupThreads);
      if (k_index() == 0)
#pragma unroll 1
        for (int t = 1; t < depth(); ++t)
#pragma unroll
          for (int i = 0; i < kUnits; ++i) {
            const Four<Sum> more = part(warpgroup + t)[i * kGroupThreads];
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[4 * i + j] += more.at[j];
          }
      ptx::named_barrier(kAllConsumers, active() * kGroupThreads);
    }
  }

  // ---- scales and zero points

  /// Scales and shifts of the sums of a lane's two rows. Rows past N are padding.
  struct Rows {
    float scale[2];
    float2 bias;
    std::int32_t sum[2] = {}, zero[2] = {};
  };
  __device__ Rows rows_of(int block) const {
    Rows rows;
    const std::int32_t* zeros = p.weight.zeros();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = block * gpu_w8::kRows + warp * 16 + lane / 4 + 8 * i;
      rows.scale[i] = kGrouped && p.weight.geometry.block_rows != 0 ? 1.0f : p.weight.scales()[n];
      if (p.zero_points) {
        rows.sum[i] = p.weight.sums()[n];
        rows.zero[i] = zeros == nullptr ? 0 : zeros[n];
      }
    }
    rows.bias = halves<false>().bias(block);
    return rows;
  }
  /// The same for the pass's tokens, copied to the warpgroup's shared memory. Issued before the products; complete when tokens_arrived()
  /// returns.
  __device__ std::uint32_t token_terms() const { return base + p.map.tokens + warpgroup * 3 * 4 * kTokens; }
  __device__ void ask_for_tokens(const Pass& pass) const {
    const auto take = [&](std::uint32_t to, const void* from, std::uint32_t otherwise) {
      if (from == nullptr)
        ptx::store_shared4(to, otherwise);
      else
        ptx::async_copy4(to, from);
    };
    ptx::async_copy_wait<0>();  // drains the copies issued by a skipped pass
#pragma unroll
    for (int i = warp * 32 + lane; i < kTokens; i += kGroupThreads) {
      const std::int64_t row = min(pass.token_tile * kTokens + i, p.m - 1);  // tokens past M are not stored
      const std::uint32_t to = token_terms() + 4 * i;
      if (!kGrouped)
        take(to, p.acts.scales == nullptr ? nullptr : p.acts.scales + row * p.acts.scale_row, __float_as_uint(p.acts.scale));
      if (!kIntegers || !p.zero_points) continue;
      take(to + 4 * kTokens, p.acts.zeros == nullptr ? nullptr : p.acts.zeros + row * p.acts.zero_row, p.acts.zero);
      take(to + 8 * kTokens, p.acts.sums == nullptr ? nullptr : p.acts.sums + row, 0);
    }
    ptx::async_copy_commit();
  }
  __device__ void tokens_arrived() const {
    ptx::async_copy_wait<0>();
    ptx::named_barrier(1 + warpgroup, kGroupThreads);
  }

  /// Takes zero points out of the integers of kCount units, modulo 2³², where the result is exact.
  template <int kCount>
  __device__ void shift(Sum (&sums)[4 * kCount], const Rows& rows, int first) const {
    if constexpr (kIntegers)
      if (p.zero_points)
#pragma unroll
        for (int i = 0; i < kCount; ++i) shift_unit(sums + 4 * i, rows, first + i);
  }
  __device__ void shift_unit(Sum* sums, const Rows& rows, int unit) const {
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
  __device__ float4 scaled(const Four<Sum>& sums, const Rows& rows, int unit) const {
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

  // ---- Dᵀ becomes D

  __device__ std::uint8_t* staging() const { return shared + p.map.staging + warpgroup * kStagingBytes; }
  /// One unit of the general kind, as number `slot` of the round.
  __device__ void stage(int slot, float4 v) const {
    float* to = reinterpret_cast<float*>(staging()) + (slot * kUnitTokens + lane % 4 * 2) * kStagePitch + warp * 16 + lane / 4;
    to[0] = v.x;
    to[kStagePitch] = v.y;
    to[8] = v.z;
    to[kStagePitch + 8] = v.w;
  }
  __device__ void flush(int block, int first_m, int tokens) const {
    ptx::named_barrier(1 + warpgroup, kGroupThreads);
    const float* from = reinterpret_cast<const float*>(staging());
    if (kPatches && p.channel_stride != 0) {  // NCHW: pixels are contiguous, a warp stores 32 tokens of a row
      const int m = first_m + lane, pixels = p.patches.pixels();
      const epilogue::Pixel pixel{m / pixels, m % pixels};
      const std::int64_t at = pixel.image * p.image_stride + pixel.pixel;
#pragma unroll 1
      for (int row = warp; row < gpu_w8::kRows; row += 4) {
        const int n = block * gpu_w8::kRows + row;
        if (lane < tokens && m < p.m && n < p.weight.geometry.n)
          p.epilogue.store_at(at + n * p.channel_stride, pixel, n, from[lane * kStagePitch + row]);
      }
    } else {
#pragma unroll 1
      for (int i = warp * 4 + lane / 8; i < tokens; i += 16)  // eight lanes store a token's 64 rows
        if (first_m + i < p.m)
          store_rows(p.epilogue, p.first_row + first_m + i, block * gpu_w8::kRows + lane % 8 * 8,
                     static_cast<int>(p.weight.geometry.n), from + i * kStagePitch + lane % 8 * 8);
    }
    ptx::named_barrier(1 + warpgroup, kGroupThreads);
  }
  template <bool kPixels>
  __device__ HalfRounds<kPixels> halves() const {
    return {.e = p.epilogue,
            .m = p.m,
            .n = static_cast<int>(p.weight.geometry.n),
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

  __device__ int token_of(const Pass& pass, int unit) const { return pass.token_tile * kTokens + unit * kUnitTokens; }
  __device__ static Four<Sum> unit_of(const Sums& acc, int unit) {
    return {acc[4 * unit], acc[4 * unit + 1], acc[4 * unit + 2], acc[4 * unit + 3]};
  }

  /// Stores a round of kCount units of one row block to D.
  template <HalfOut kHalf, int kCount>
  __device__ __forceinline__ void store_round(const Pass& pass, int block, int first, int round, Four<Sum> (&sums)[kCount],
                                              const Rows& rows) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float4 v = scaled(sums[i], rows, first + i);
      if constexpr (kHalf == HalfOut::no)
        stage(i, v);
      else
        halves<kHalf == HalfOut::pixels>().stage(round, i, v, rows.bias);
    }
    if constexpr (kHalf == HalfOut::no)
      flush(block, token_of(pass, first), kCount * kUnitTokens);
    else
      halves<kHalf == HalfOut::pixels>().flush(round, block, token_of(pass, first), kCount * kUnitTokens);
  }
  /// Calls `use` with the kind of rounds that D needs.
  template <class Use>
  __device__ __forceinline__ void with_half(Use use) const {
    if (p.half == HalfOut::channels)
      use(std::integral_constant<HalfOut, HalfOut::channels>());
    else if (kPatches && p.half != HalfOut::no)
      use(std::integral_constant<HalfOut, HalfOut::pixels>());
    else
      use(std::integral_constant<HalfOut, HalfOut::no>());
  }

  __device__ void store_own(const Pass& pass, Sums& acc, const Rows& rows) const {
    const int block = pass.block + row_group();
    tokens_arrived();
    shift<kUnits>(acc, rows, 0);
    with_half([&](auto half) {
      if constexpr (decltype(half)::value != HalfOut::no) {
#pragma unroll
        for (int first = 0; first < kUnits; first += kRound) {
          Four<Sum> sums[kRound];
#pragma unroll
          for (int i = 0; i < kRound; ++i) sums[i] = unit_of(acc, first + i);
          if (token_of(pass, first) < p.m) store_round<decltype(half)::value>(pass, block, first, first / kRound, sums, rows);
        }
      } else {
        // A run-time loop over rounds, for a single copy of the code; registers are indexed at compile time.
#pragma unroll 1
        for (int first = 0; first < kUnits; first += kRound) {
          Four<Sum> sums[kRound];
#pragma unroll
          for (int unit = 0; unit < kUnits; unit += kRound) {
            if (unit != first) continue;
#pragma unroll
            for (int i = 0; i < kRound; ++i) sums[i] = unit_of(acc, unit + i);
          }
          if (token_of(pass, first) < p.m) store_round<decltype(half)::value>(pass, block, first, first / kRound, sums, rows);
        }
      }
    });
    ptx::named_barrier(1 + warpgroup, kGroupThreads);  // before the next pass writes into the first buffer
  }

  // Units of a split pass: rank u·S/U owns unit u and has a box for it from every rank, 16 bytes a thread of a warpgroup.
  __device__ int owned_units() const { return p.blocks * kUnits / p.schedule.split; }
  __device__ void send(const Sums& acc) const {
    const int own = owned_units();
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const int unit = row_group() * kUnits + j;
      const std::uint32_t to = base + (((unit % own) * p.schedule.split + rank) * kGroupThreads + warp * 32 + lane) * 16;
      const Four<Sum> four = unit_of(acc, j);
      ptx::store_remote16(ptx::map_to_rank(to, unit / own), reinterpret_cast<const float4&>(four));
    }
  }
  /// Received units stored in a round: a power of two that divides their number, so that a round stays within a row block.
  __device__ int received_round() const { return min(kRound, owned_units() & -owned_units()); }
  /// The first owned unit that this warpgroup stores; rounds rotate among the kGroups warpgroups.
  __device__ int first_received() const { return rank * owned_units() + warpgroup * received_round(); }
  __device__ void store_received(const Pass& pass, Rows rows) const {
    tokens_arrived();
    const int own = owned_units(), each = received_round();
    int round = 0;
#pragma unroll 1
    for (int unit = first_received(); unit < (rank + 1) * own; unit += kGroups * each, ++round) {
      const int block = unit / kUnits;
      if (block >= pass.blocks) break;
      if (round > 0) rows = rows_of(pass.block + block);
      const auto received = [&](int i) {
        const auto* box = reinterpret_cast<const Four<Sum>*>(shared) +
                          (unit + i - rank * own) * p.schedule.split * kGroupThreads + warp * 32 + lane;
        Four<Sum> sum = box[0];
#pragma unroll 1
        for (int r = 1; r < p.schedule.split; ++r) {
          const Four<Sum> part = box[r * kGroupThreads];
#pragma unroll
          for (int j = 0; j < 4; ++j) sum.at[j] += part.at[j];
        }
        return sum;
      };
      if (each == kRound) {
        Four<Sum> sums[kRound];
#pragma unroll
        for (int i = 0; i < kRound; ++i) {
          sums[i] = received(i);
          shift<1>(sums[i].at, rows, unit % kUnits + i);
        }
        with_half(
            [&](auto half) { store_round<decltype(half)::value>(pass, pass.block + block, unit % kUnits, round, sums, rows); });
      } else {
#pragma unroll 1
        for (int i = 0; i < each; ++i) {
          Four<Sum> sums[1] = {received(i)};
          shift<1>(sums[0].at, rows, unit % kUnits + i);
          with_half(
              [&](auto half) { store_round<decltype(half)::value>(pass, pass.block + block, unit % kUnits + i, i, sums, rows); });
        }
      }
    }
  }

  __device__ __forceinline__ void consume_pass(const Pass& pass, Cursor& from) const {
    if constexpr (kTokenRows) return consume_tokens(pass, from);
    // Operands of the epilogue are loaded during the products.
    ask_for_tokens(pass);
    const int block = p.schedule.split > 1 ? min(first_received() / kUnits, p.blocks - 1) : row_group();
    const Rows rows = rows_of(pass.block + min(block, max(pass.blocks - 1, 0)));
    Sums acc = {};
    if (warpgroup >= active()) {
      // no row block of its own, but it may own units that other CTAs send
    } else if (row_group() < pass.blocks) {
      multiply(pass.records(), from, acc);
    } else {
      skip(pass.records(), from);
    }
    if (depth() > 1 && warpgroup < active()) sum_turns(acc);
    const bool has_sums = warpgroup < active() && k_index() == 0 && row_group() < pass.blocks;
    if (p.schedule.split > 1) {
      exchange();  // all rings have been read and become inboxes
      if (has_sums) send(acc);
      exchange();  // all sums have arrived
      store_received(pass, rows);
    } else if (has_sums) {
      if (p.schedule.split == kStreamK) {
        const Parts<Sum, kUnits> parts{p.parts, 4 * kGroups, 4 * warpgroup + warp, lane};
        if (pass.end < p.schedule.records) return parts.store(cluster, pass.blocks, acc);
        if (pass.first > 0) parts.add(p.schedule, cluster, pass.first, acc);
      }
      store_own(pass, acc, rows);
    }
  }
  __device__ static void exchange() {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  /// A pass with fewer row blocks than there are warpgroups.
  __device__ void skip(int count, Cursor& from) const {
#pragma unroll 1
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
    ptx::wait_for_predecessors();  // before scales and operands of the epilogue are read, and D is written
    if (warpgroup >= active() && p.schedule.split <= 1) return;
    Cursor from{0, 0};
    for_each_pass(p.schedule, [&](const Pass& pass) { consume_pass(pass, from); });
  }
};

template <class Code, int kTokens, bool kGrouped, bool kPatches, bool kTokenRows, bool kPrecise>
__global__ void __launch_bounds__(w8a8_threads(kTokens, kGrouped), 1) w8a8_sm90_kernel(const __grid_constant__ W8A8Params p) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const unsigned warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform over the warp, and known to be to the compiler
  constexpr unsigned kProducerWarp = 4 * w8a8_groups(kTokens, kGrouped);  // the last warpgroup
  using This = W8A8<Code, kTokens, kGrouped, kPatches, kTokenRows, kPrecise>;
  const This gemm{.p = p,
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
      ptx::barrier_init(gemm.full(s), kGrouped ? 1 + 32 : 1);  // the producer of weights, and a warp that copies scales
      ptx::barrier_init(gemm.empty(s), gemm.active() * gemm.kReleasing);
    }
    ptx::barrier_init_fence();
  }
  if constexpr (kGrouped)
    if (warp == kProducerWarp + 2) gemm.fill_scales();
  __syncthreads();
  if (warp >= kProducerWarp) {
    ptx::give_registers<kProducerRegisters<kGrouped, kPatches>>();
    const unsigned producer = warp - kProducerWarp;
    if (producer == 0 && gemm.lane == 0) gemm.produce_weights();
    if (producer == 1 && gemm.lane == 0) gemm.produce_activations();
    if constexpr (kGrouped)
      if (producer == 2) gemm.produce_scales();
    if (producer == 3) set_flags(p.parts, p.schedule, gemm.cluster, gemm.lane, kTokenRows ? This::kGroups : 1);
    __syncwarp();  // a warp must be converged at a barrier of the cluster
    if (p.schedule.split > 1) {
      gemm.exchange();
      gemm.exchange();
    }
  } else {
    ptx::take_registers<kConsumerRegisters<kTokens, kGrouped, kPatches>>();
    gemm.consume();
  }
}

template <class Code, bool kGrouped, bool kPatches = false, bool kPrecise = false>
W8A8Kernel kernel_for(int tokens) {
  switch (tokens) {
    case 16:
      if constexpr (!kPatches) return &kLaunchable<w8a8_sm90_kernel<Code, 16, kGrouped, false, false, kPrecise>>;
      break;
    case 32:
      if constexpr (!kPatches) return &kLaunchable<w8a8_sm90_kernel<Code, 32, kGrouped, false, false, kPrecise>>;
      break;
    case 64: return &kLaunchable<w8a8_sm90_kernel<Code, 64, kGrouped, kPatches, false, kPrecise>>;
    case 128: return &kLaunchable<w8a8_sm90_kernel<Code, 128, kGrouped, kPatches, false, kPrecise>>;
    case 256:
      if constexpr (!kGrouped) return &kLaunchable<w8a8_sm90_kernel<Code, 256, false, kPatches, false, kPrecise>>;
      break;
    default: break;
  }
  return nullptr;
}
/// The kernel for groups, with tokens as the 64-row operand.
template <class Code>
W8A8Kernel token_rows_kernel_for(int tokens) {
  switch (tokens) {
    case 128: return &kLaunchable<w8a8_sm90_kernel<Code, 128, true, false, true, false>>;
    case 256: return &kLaunchable<w8a8_sm90_kernel<Code, 256, true, false, true, false>>;
    default: return nullptr;
  }
}

}  // namespace
}  // namespace nibble::cuda
