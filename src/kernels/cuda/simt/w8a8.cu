// 8-bit codes times 8-bit codes on the ordinary units: dp4a for integers, f32 multiply-adds for e4m3.
//
//   CTA    = a row tile (64 output channels) × 32 tokens, all of K
//   record = 128 channels: global → registers, a record ahead → shared memory
//   thread = row t mod 64 × tokens 8·(t / 64) … +7: a warp's lanes read 32 rows, whose swizzled chunks lie in different banks, and
//            the same tokens, which are broadcast
//   end    = zero points, scales, epilogue (w8a8_scales.cuh); a warp writes 32 neighbours of a row of D
//
// Activation codes of e4m3 are converted to f32 when they are written to shared memory, those of weights in registers. Each record's
// products are added up in the order of the channels, and, where scales are grouped, scaled before they join the sum.
#include "kernels/cuda/tasks/w8a8.hpp"

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <limits>
#include <type_traits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/steps/code_rows.cuh"
#include "kernels/cuda/steps/w8a8_scales.cuh"

namespace nibble::cuda {
namespace {

using gpu_w8::kChannels;
using gpu_w8::kChunk;
using gpu_w8::kRows;

constexpr int kThreads = 256;
constexpr int kEach = 8;  // tokens of a thread: 8 broadcasts and a load of weights for 32 dp4a
constexpr int kTokens = kThreads / kRows * kEach;
constexpr int kChunks = kChannels / kChunk;  // of a row
constexpr int kRecordCopies = gpu_w8::kRecordBytes / (kThreads * kChunk);
static_assert(kTokens * kChunks == kThreads, "a chunk of activations a thread");
static_assert(kChunk == kRowCodes && kTokens == kW8A8SimtExpertRows);

struct Params {
  W8A8Task task;
  int token_blocks;
  bool vector_codes;  // rows of codes begin at multiples of 16 bytes
};

__device__ inline void decode_e4m3(float (&x)[4], std::uint32_t codes) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> 16 * pair), __NV_E4M3);
    const float2 f = __half22float2(h);
    x[2 * pair] = f.x, x[2 * pair + 1] = f.y;
  }
}

/// 16 codes of a token; past K and `end` they are 0.
__device__ inline uint4 codes_of(const Params& p, int token, int end, int channel) {
  const int k = static_cast<int>(p.task.weight.geometry.k);
  return token < end ? load_codes(p.task.acts, token, channel, k, p.vector_codes) : uint4{};
}

template <bool kIntegers>
__global__ void __launch_bounds__(kThreads) w8a8_simt_kernel(const __grid_constant__ Params p) {
  using Sum = std::conditional_t<kIntegers, std::int32_t, float>;
  constexpr int kActVectors = kIntegers ? 1 : 4;  // of 16 bytes in shared memory, for a chunk
  __shared__ uint4 weights[kRows * kChunks];
  __shared__ uint4 acts[kTokens * kChunks * kActVectors];
  let_successor_start();
  const W8A8Task& t = p.task;
  const int thread = static_cast<int>(threadIdx.x), row = thread % kRows, first = thread / kRows * kEach;
  const int tile = static_cast<int>(blockIdx.x) / p.token_blocks;  // token blocks of the same weights run together
  const int block = static_cast<int>(blockIdx.x) % p.token_blocks;
  wait_for_predecessor();
  int first_token = block * kTokens, end = t.m;
  alignas(16) __shared__ std::uint8_t of_expert[sizeof(W8A8Weight)];
  __shared__ float scale2[1];
  const W8A8Weight* from_weight = &t.weight;
  if (t.experts.tiles != nullptr) {  // a block is a tile
    if (block >= __ldcg(&t.experts.count->tiles)) return;
    const ExpertTile rows = t.experts.tiles[block];
    first_token = rows.first, end = rows.first + rows.rows;
    auto& own = *reinterpret_cast<W8A8Weight*>(of_expert);
    if (thread == 0) {
      own = t.weight, own.bytes += rows.expert * t.experts.weight_pitch;
      if (t.experts.scale2 != nullptr) scale2[0] = t.experts.scale2[rows.expert];
    }
    __syncthreads();
    from_weight = &own;
  }
  const W8A8Weight& weight = *from_weight;
  const int count = min(kEach, end - first_token - first);  // of this thread's tokens
  const std::int64_t n = std::int64_t{tile} * kRows + row;
  const bool grouped = !kIntegers && is_grouped(t);
  const auto* from = reinterpret_cast<const uint4*>(weight.bytes + weight.geometry.record(tile, 0)) + thread;

  uint4 next[kRecordCopies], next_acts;
  const auto request = [&](int record) {
#pragma unroll
    for (int i = 0; i < kRecordCopies; ++i) next[i] = __ldg(from + record * (gpu_w8::kRecordBytes / kChunk) + i * kThreads);
    next_acts = codes_of(p, first_token + thread / kChunks, end, record * kChannels + thread % kChunks * kChunk);
  };
  const auto take = [&] {
#pragma unroll
    for (int i = 0; i < kRecordCopies; ++i) weights[thread + i * kThreads] = next[i];
    if constexpr (kIntegers) {
      acts[thread] = next_acts;
    } else {
      const std::uint32_t word[4] = {next_acts.x, next_acts.y, next_acts.z, next_acts.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[4];
        decode_e4m3(x, word[i]);
        reinterpret_cast<float4*>(acts)[thread * 4 + i] = {x[0], x[1], x[2], x[3]};
      }
    }
  };

  Sum sums[kEach] = {};
  const int records = t.weight.geometry.records();
  request(0);
#pragma unroll 1
  for (int record = 0; record < records; ++record) {
    __syncthreads();  // all threads have read the previous record
    take();
    __syncthreads();
    if (record + 1 < records) request(record + 1);

    Sum parts[kEach] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint4 codes = weights[row * kChunks + (chunk ^ row % 8)];
      const std::uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float w[4];
        if constexpr (!kIntegers) decode_e4m3(w, word[i]);
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          if (e >= count) continue;  // the same for a warp
          const int at = (first + e) * kChunks + chunk;
          if constexpr (kIntegers) {
            parts[e] = __dp4a(static_cast<int>(word[i]), reinterpret_cast<const int*>(acts)[at * 4 + i], parts[e]);
          } else {
            const float4 x = reinterpret_cast<const float4*>(acts)[at * 4 + i];
            parts[e] = fmaf(w[3], x.w, fmaf(w[2], x.z, fmaf(w[1], x.y, fmaf(w[0], x.x, parts[e]))));
          }
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if constexpr (!kIntegers)
        if (grouped) {
          if (e < count && n < t.weight.geometry.n)
            sums[e] =
                add_w8a8(parts[e], act_scale(t.acts, first_token + first + e, record), weight_scale(weight, n, record), sums[e]);
          continue;
        }
      sums[e] += parts[e];
    }
  }

  const std::int64_t rows = t.weight.geometry.n;
  const ChannelTerms channel(t, weight, min(n, rows - 1));
  const bool raw = kIntegers && t.epilogue.out == DType::s32;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (e >= count) continue;  // the same for a warp
    const int m = first_token + first + e;
    float sum = scaled_sum(TokenTerms(t, m, m), channel, raw, sums[e]);
    if (t.experts.scale2 != nullptr) sum = __fmul_rn(sum, scale2[0]);
    const float next = __shfl_xor_sync(0xffffffffu, sum, 1);
    if (n % 2 == 0) t.epilogue.store_two(m, n, sum, next, rows);
  }
}

}  // namespace

cudaError_t linear_w8a8_simt(const W8A8Task& task, cudaStream_t stream) {
  const gpu_w8::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1) return cudaErrorInvalidValue;
  const Params p{.task = task,
                 .token_blocks = task.experts.tiles != nullptr ? task.experts.most : (task.m + kTokens - 1) / kTokens,
                 .vector_codes = in_code_vectors(task.acts)};
  const std::int64_t ctas = std::int64_t{geo.tiles()} * p.token_blocks;
  if (ctas > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  return launch_dependent(geo.integers ? w8a8_simt_kernel<true> : w8a8_simt_kernel<false>, static_cast<unsigned>(ctas), kThreads,
                          0, stream, p);
}

}  // namespace nibble::cuda
