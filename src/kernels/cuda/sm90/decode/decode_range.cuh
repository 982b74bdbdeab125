// bf16 activations in the decode kernels on Hopper, which multiply f16: eight codes of 4 bits are unpacked to it in two instructions fewer than to
// bf16 (weights/unpack.cuh), codes of 8 bits in a fifth of them, and one kernel serves both types.
//
//   x, bf16 ──× 2ˢ, rounded──▶ f16, in place        s: the largest |x| of the token in this CTA's slice comes to 2¹⁴ … 2¹⁵
//   sums of a row tile ──× 2⁻ˢ──▶ partial sums
//
// f16 has all bits of a bf16 down to 2⁻³¹ of the largest, and rounds what is smaller by 2⁻³⁹ of the largest at most: less
// than an f32 sum of both keeps (docs/accuracy.md). s depends on the token and the slice alone.
#pragma once

#include <cstdint>

#include "kernels/cuda/sm90/decode/decode_cta.cuh"

namespace nibble::cuda {

/// 2ˢ as an f32, whose exponent is in [−114, 126], so that it and its inverse are normal numbers; of the bits of the largest |x|, a bf16. Where that is
/// infinite or not a number, so are the results.
__device__ inline std::uint32_t range_scale(unsigned largest) {
  constexpr int kTop = 127 + 14;
  const int s = min(kTop - static_cast<int>(largest >> 7), 126);
  return static_cast<std::uint32_t>(127 + s) << 23;
}
/// Of 2ˢ: 2⁻ˢ.
__device__ inline float range_unit(std::uint32_t scale) { return __uint_as_float((254u << 23) - scale); }

/// The multiplying warps, all of them: `channels` activations of each token, every `pitch` bytes from x on. Eight tokens are a warp's each; fewer are
/// shared by several, `thread` by thread. With `dummy` nothing is stored, and no thread waits: it fetches the instructions. Out of line, as
/// gather_apart is.
__device__ __noinline__ inline void narrow(std::uint32_t x, int pitch, int tokens, int channels, TokenRange* ranges, int thread,
                                           bool dummy) {
  constexpr int kEight = 8;  // activations of 16 bytes
  const int warp = thread / 32, lane = thread % 32;
  int parts = kDecodeWarps;  // of a token
  while (parts > 1 && tokens * parts > kDecodeWarps) parts /= 2;
  const int part = warp % parts, step = kDecodeWarps / parts, first = kEight * (part * 32 + lane);
#pragma unroll 1
  for (int token = warp / parts; token < tokens; token += step) {
    unsigned largest = 0;
#pragma unroll 4
    for (int k = first; k < channels; k += kEight * 32 * parts) {
      const uint4 v = ptx::load_shared16(x + token * pitch + 2 * k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t pair = i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
        largest = max(largest, max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
      }
    }
    largest = __reduce_max_sync(~0u, largest);
    if (!dummy && lane == 0) ranges[token].largest[part] = largest;
  }
  if (!dummy) ptx::named_barrier(1, kMultipliers);
#pragma unroll 1
  for (int token = warp / parts; token < tokens; token += step) {
    const unsigned largest = __reduce_max_sync(~0u, ranges[token].largest[lane % parts]);
    const std::uint32_t scale = range_scale(largest);
    const float factor = __uint_as_float(scale);
    if (!dummy && part == 0 && lane == 0) ranges[token].unit = range_unit(scale);
#pragma unroll 4
    for (int k = first; k < channels; k += kEight * 32 * parts) {
      const std::uint32_t at = x + token * pitch + 2 * k;
      const uint4 v = ptx::load_shared16(at);
      const auto narrowed = [factor](std::uint32_t pair) {
        return ptx::to_f16x2(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000u) * factor);
      };
      if (!dummy) ptx::store_shared16(at, {narrowed(v.x), narrowed(v.y), narrowed(v.z), narrowed(v.w)});
    }
  }
  if (!dummy) ptx::named_barrier(1, kMultipliers);
}
/// Fetches its instructions, by other warps: thread counts from 0. `memory`, as shared memory and as a pointer there, is read.
__device__ __forceinline__ void fetch_narrow(std::uint32_t memory, float* same, int thread) {
  narrow(memory, 0, 1, 8 * kMultipliers, reinterpret_cast<TokenRange*>(same), thread, true);
}

/// Multiplies the sums of a warp by their tokens' units.
template <int kTiles>
__device__ __forceinline__ void restore_range(const TokenRange* ranges, int tokens, Sums<kTiles>& acc) {
  const int token = threadIdx.x % 4 * 2;  // of this lane the first, of a tile of 8
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float unit = ranges[min(8 * t + token + i, tokens - 1)].unit;
#pragma unroll
      for (int f = 0; f < gpu_tile::kFragments; ++f) acc[f][t][i] *= unit, acc[f][t][i + 2] *= unit;
    }
}

}  // namespace nibble::cuda
