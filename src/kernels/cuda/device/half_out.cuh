// The store of the wgmma kernels for a D of 16-bit floats and an epilogue of at most a bias: rounds of 64 rows × 32 tokens.
//
// The sums are Dᵀ: of every unit of 8 tokens a lane 4g + t of a warp has rows g and g + 8 of the warp's 16, and tokens 2t and 2t + 1.
// stmatrix writes four units to 4 KiB of shared memory; from there each thread stores 16 bytes to D:
//
//   channels side by side (matrices, NHWC)                 pixels side by side (NCHW)
//   transposed: token t is 128 bytes,                      as they are: row r is 64 bytes,
//   chunk c of 8 channels at c ^ (t mod 8)                 unit u at u ^ (r/2 mod 4)
//
// In both layouts the eight addresses of a matrix are in different banks, as are the reads of eight neighbouring threads. There are two
// buffers: one is read while the next round is written to the other, so that a round needs one barrier.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/device/opaque.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/tasks/half_out.hpp"
#include "layouts/gpu_tile.hpp"

namespace nibble::cuda {

/// Sums of a token for eight rows from `row` on, of n, from shared memory through the whole epilogue: the general store.
__device__ inline void store_rows(const epilogue::Element& e, std::int64_t token, int row, int n, const float* from) {
  if (row >= n) return;
  if (e.glu_half != 0) {
#pragma unroll 1  // two outputs at a time: more would need registers that the sums of the next rounds take
    for (int i = 0; i < 8 && row + i < n; i += 4) e.store_products(token, row + i, *reinterpret_cast<const float4*>(from + i), n);
  } else if (row + 8 <= n) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    e.store_eight(token, row, v);
  } else {
#pragma unroll 1  // of a single row tile: code in every kernel counts more than its time
    for (int i = 0; row + i < n; ++i) e.store(token, row + i, from[i]);
  }
}

constexpr int kRoundUnits = 4, kRoundTokens = 8 * kRoundUnits;
constexpr int kHalfRoundBytes = gpu_tile::kRows * kRoundTokens * 2;

/// The store of a warpgroup. Rounds alternate between the buffers; the caller puts a named barrier between the last round of a pass and
/// the first of the next.
template <bool kPixels>
struct HalfRounds {
  const epilogue::Element& e;
  int m, n;                                   // D's
  int first_row;                              // of D
  int image_tokens;                           // from one image to the next
  int unused;                                 // of them, after the pixels
  std::int64_t image_stride, channel_stride;  // pixels side by side
  bool fours;
  std::uint32_t buffers;  // two
  int barrier;            // a named one of the warpgroup's 128 threads
  int warp, lane;         // warp: of the warpgroup

  __device__ float2 bias(int block) const {
    float2 bias{-0.0f, -0.0f};  // adding −0 changes no number
    const int row = block * gpu_tile::kRows + warp * 16 + lane / 4;
    if (e.bias.data != nullptr && row < n) bias.x = e.bias.at(row);
    if (e.bias.data != nullptr && row + 8 < n) bias.y = e.bias.at(row + 8);
    return bias;
  }
  __device__ std::uint32_t buffer(int round) const { return buffers + round % 2 * kHalfRoundBytes; }

  /// A unit of sums as number `slot` of the round: {row g, token 2t}, {g, 2t + 1}, {g + 8, 2t}, {g + 8, 2t + 1}.
  __device__ void stage(int round, int slot, float4 v, float2 bias) const {
    const float a = __fadd_rn(v.x, bias.x), b = __fadd_rn(v.y, bias.x), c = __fadd_rn(v.z, bias.y), d = __fadd_rn(v.w, bias.y);
    std::uint32_t to = buffer(round);
    const int lane = opaque(this->lane);  // as in flush
    if constexpr (kPixels) {
      const int row = warp * 16 + lane % 16;
      to += row * (kRoundTokens * 2) + (slot ^ row / 2 % kRoundUnits) * 16;
    } else {
      const int token = lane % 8, chunk = warp * 2 + lane / 8 % 2;
      to += (slot * 8 + token) * (gpu_tile::kRows * 2) + (chunk ^ token) * 16;
    }
    if (e.out == DType::f16) {
      const __half2 low = __floats2half2_rn(a, b), high = __floats2half2_rn(c, d);
      ptx::store_matrices<!kPixels>(to, reinterpret_cast<const std::uint32_t&>(low),
                                    reinterpret_cast<const std::uint32_t&>(high));
    } else {
      const __nv_bfloat162 low = __floats2bfloat162_rn(a, b), high = __floats2bfloat162_rn(c, d);
      ptx::store_matrices<!kPixels>(to, reinterpret_cast<const std::uint32_t&>(low),
                                    reinterpret_cast<const std::uint32_t&>(high));
    }
  }

  /// The first `tokens` tokens of the round to D, whose number there is `first` on.
  __device__ void flush(int round, int block, int first, int tokens) const {
    ptx::named_barrier(barrier, 128);  // the next writers of the buffer pass another barrier first
    // Keeps the compiler from computing addresses before the products, which need the registers.
    const int lane = opaque(this->lane), image_tokens = opaque(this->image_tokens);
    const std::uint32_t from = buffer(round);
    auto* const d = static_cast<std::uint16_t*>(e.d);
    if constexpr (kPixels) {
      const int unit = lane % kRoundUnits, token = first + unit * 8;
      const auto at = [&](int t) { return d + (t / image_tokens * image_stride + t % image_tokens); };
      const auto stored = [&](int t) { return t < m && (unused == 0 || t % image_tokens < image_tokens - unused); };
      std::uint16_t *const low = at(token), *const high = fours ? at(token + 4) : low + 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = warp * 8 + lane / kRoundUnits + 32 * i, channel = block * gpu_tile::kRows + row;
        if (channel >= n || unit * 8 >= tokens || !stored(token)) continue;
        const uint4 v = ptx::load_shared16(from + row * (kRoundTokens * 2) + (unit ^ row / 2 % kRoundUnits) * 16);
        if (!fours) {
          *reinterpret_cast<uint4*>(low + channel * channel_stride) = v;
        } else {
          *reinterpret_cast<uint2*>(low + channel * channel_stride) = {v.x, v.y};
          if (stored(token + 4)) *reinterpret_cast<uint2*>(high + channel * channel_stride) = {v.z, v.w};
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = warp * 4 + lane / 8 + 16 * i, chunk = lane % 8, channel = block * gpu_tile::kRows + chunk * 8;
        if (token >= tokens || first + token >= m || channel >= n) continue;
        const uint4 v = ptx::load_shared16(from + token * (gpu_tile::kRows * 2) + (chunk ^ token % 8) * 16);
        *reinterpret_cast<uint4*>(d + (first_row + first + token) * e.d_stride + channel) = v;
      }
    }
  }
};

}  // namespace nibble::cuda
