// Dᵀ becomes D: the sums of a warpgroup are stored in rounds of up to four units, 64 rows × 32 tokens, through shared memory.
//
//   sums of a lane ── finish ──▶ D's values ── stage ──▶ a warpgroup's staging buffer ── flush ──▶ D
//
// Three kinds of rounds: 16-bit floats with at most a bias, channels or pixels side by side (half_out.cuh), and the general kind, which
// stages f32, or the integers of a D of s32, and stores through the whole epilogue:
//
//   staging buffer, general kind: token t's 64 rows are 68 floats, at t · 68          68 ≡ 4 mod 32: a warp's 8 rows × 4 token pairs are
//                                                                                     in 32 different banks
#pragma once

#include <type_traits>

#include "kernels/cuda/device/half_out.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/sm90/gemm/cta.cuh"

namespace nibble::cuda {
namespace {

template <class Cta>
struct Store {
  const Cta& cta;
  int stop;  // of experts: rows of D before it are stored

  __device__ int end() const {
    if constexpr (Cta::kExperts)
      return stop;
    else
      return cta.p.m;
  }

  /// Of images: tokens of each after its pixels, which are not stored.
  __device__ int unused() const {
    if constexpr (Cta::kPlanar)
      return cta.p.unused_tokens;
    else
      return 0;
  }

  __device__ int staging() const { return cta.p.map.staging + cta.warpgroup * kStagingBytes; }

  // ---- the general kind

  /// A unit as number `slot` of the round.
  __device__ void stage_floats(int slot, float4 v) const {
    const int lane = opaque(cta.lane);
    float* to = reinterpret_cast<float*>(cta.shared + staging()) + (slot * kUnitTokens + lane % 4 * 2) * kStagePitch +
                cta.warp * 16 + lane / 4;
    to[0] = v.x;
    to[kStagePitch] = v.y;
    to[8] = v.z;
    to[kStagePitch + 8] = v.w;
  }
  __device__ void flush_floats(int block, int first_m, int tokens) const {
    const auto& p = cta.p;
    const int lane = Cta::kReleasing > 1 ? opaque(cta.lane) : cta.lane, warp = cta.warp, n = p.rows();
    ptx::named_barrier(1 + cta.warpgroup, kGroupThreads);
    const float* from = reinterpret_cast<const float*>(cta.shared + staging());
    if (Cta::kPatches && p.channel_stride != 0) {  // NCHW: pixels are contiguous, a warp stores 32 tokens of a row
      const int m = first_m + lane, image_tokens = p.patches.pixels() + unused();
      const epilogue::Pixel pixel{m / image_tokens, m % image_tokens};
      const bool stored = lane < tokens && m < end() && (!Cta::kPlanar || pixel.pixel < p.patches.pixels());
      const std::int64_t at = pixel.image * p.image_stride + pixel.pixel;
#pragma unroll 1
      for (int row = 2 * warp; row < gpu_tile::kRows; row += 8) {
        const int channel = block * gpu_tile::kRows + row;
        if (stored && channel < n)
          p.epilogue.store_pair(at + channel * p.channel_stride, p.channel_stride, pixel, channel,
                                *reinterpret_cast<const float2*>(from + lane * kStagePitch + row), channel + 1 < n);
      }
    } else {
#pragma unroll 1
      for (int i = warp * 4 + lane / 8; i < tokens; i += 16)  // eight lanes store a token's 64 rows
        if (first_m + i < end())
          store_rows(p.epilogue, p.first_row + first_m + i, block * gpu_tile::kRows + lane % 8 * 8, n,
                     from + i * kStagePitch + lane % 8 * 8);
    }
    ptx::named_barrier(1 + cta.warpgroup, kGroupThreads);
  }

  // ---- 16-bit floats

  template <bool kPixels>
  __device__ HalfRounds<kPixels> halves() const {
    const auto& p = cta.p;
    return {.e = p.epilogue,
            .m = end(),
            .n = p.rows(),
            .first_row = p.first_row,
            .image_tokens = kPixels ? p.patches.pixels() + unused() : 1,
            .unused = unused(),
            .image_stride = p.image_stride,
            .channel_stride = p.channel_stride,
            .fours = p.half == HalfOut::pixel_fours,
            .buffers = cta.base + staging(),
            .barrier = 1 + cta.warpgroup,
            .warp = cta.warp,
            .lane = cta.lane};
  }
  /// Of a lane's two rows of a row block; −0 where D takes the general kind, whose epilogue adds it.
  __device__ float2 bias(int block) const { return halves<false>().bias(block); }

  // ---- the kind that D takes

  template <bool kPixels>
  struct Halves : HalfRounds<kPixels> {
    static constexpr bool kHalf = true, kRaw = false;
  };
  template <bool kRaw_>
  struct Words {  // floats, or the bits of integers
    static constexpr bool kHalf = false, kRaw = kRaw_;
    const Store& out;
    __device__ void stage(int, int slot, float4 v, float2) const { out.stage_floats(slot, v); }
    __device__ void flush(int, int block, int first_m, int tokens) const { out.flush_floats(block, first_m, tokens); }
  };
  /// Calls `use` with the rounds that D takes: stage(round, slot, values, bias) and flush(round, row block, first token, tokens).
  template <class Use>
  __device__ __forceinline__ void with_kind(Use use) const {
    constexpr bool kIntegers = std::is_same_v<typename Cta::Sum, std::int32_t>;
    if (cta.p.half == HalfOut::channels)
      use(Halves<false>{halves<false>()});
    else if (Cta::kPatches && cta.p.half != HalfOut::no)
      use(Halves<true>{halves<true>()});
    else if (kIntegers && cta.p.epilogue.out == DType::s32)
      use(Words<kIntegers>{*this});
    else
      use(Words<false>{*this});
  }
};

}  // namespace
}  // namespace nibble::cuda
