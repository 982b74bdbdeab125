// Dense weights without tensor cores: for every GPU and float type, and for few tokens, where W is read once at the speed of memory.
//
//   warp  = 2 rows of W × T tokens, all of K: a lane has 8 channels of every 256
//     W     global → registers, 16 bytes a lane, the loads of kAhead steps at once
//     x     global → registers; other warps find it in L1
//   end   = sum over the lanes by shuffles; epilogue
//
// The order of a sum depends on K alone: T, which depends on M, changes no bit.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/tasks/dense.hpp"

namespace nibble::cuda {
namespace {

constexpr int kWarps = 8, kRows = 2;
constexpr int kChannels = 8;           // of a lane in a step
constexpr int kStep = 32 * kChannels;  // of a warp
constexpr std::uint32_t kAllLanes = 0xffffffffu;

struct Params {
  DenseWeight weight;
  const void* x;
  std::int64_t x_stride;
  const float* prescale;
  std::int64_t m;
  int k;
  int token_blocks;
  DType a_dtype;
  bool in_vectors;  // x: eight channels are aligned loads of 16 bytes, without a prescale
  ExpertTiles experts;
  epilogue::Element epilogue;
};

/// Eight numbers in flight, as stored.
template <DType kType>
struct Eight {
  static constexpr int kVectors = kType == DType::f32 ? 2 : 1;
  uint4 raw[kVectors];

  __device__ __forceinline__ void load(const void* from) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) raw[i] = __ldg(static_cast<const uint4*>(from) + i);
  }
  __device__ __forceinline__ void floats(float (&to)[kChannels]) const {
    if constexpr (kType == DType::f32) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        to[4 * i] = __uint_as_float(raw[i].x), to[4 * i + 1] = __uint_as_float(raw[i].y);
        to[4 * i + 2] = __uint_as_float(raw[i].z), to[4 * i + 3] = __uint_as_float(raw[i].w);
      }
    } else {
      const std::uint32_t words[4] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w};
#pragma unroll
      for (int i = 0; i < kChannels; ++i) to[i] = half_of(words[i / 2], i % 2, kType);
    }
  }
};

template <DType kType>
__device__ __forceinline__ void load_vectors(const void* x, std::int64_t at, float (&to)[kChannels]) {
  Eight<kType> eight;
  eight.load(static_cast<const std::uint8_t*>(x) + at * (kType == DType::f32 ? 4 : 2));
  eight.floats(to);
}

/// x of eight channels of a token; 0 past K.
__device__ __forceinline__ void load_x(const Params& p, std::int64_t token, int k, float (&to)[kChannels]) {
  const std::int64_t at = token * p.x_stride + k;
  if (p.in_vectors) {
    if (p.a_dtype == DType::f32) return load_vectors<DType::f32>(p.x, at, to);
    return p.a_dtype == DType::f16 ? load_vectors<DType::f16>(p.x, at, to) : load_vectors<DType::bf16>(p.x, at, to);
  }
#pragma unroll 1
  for (int i = 0; i < kChannels; ++i) {
#pragma unroll
    for (int j = 1; j < kChannels; ++j) to[j - 1] = to[j];
    const float factor = p.prescale != nullptr && k + i < p.k ? p.prescale[k + i] : 1.0f;
    to[kChannels - 1] = k + i < p.k ? load_float(p.x, at + i, p.a_dtype) * factor : 0.0f;
  }
}

template <DType kType, int T>
__global__ void __launch_bounds__(32 * kWarps) linear_dense_kernel(const __grid_constant__ Params p) {
  constexpr int kAhead = 4 / Eight<kType>::kVectors;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Token blocks of the same rows run together: all but one find W in L2.
  const std::int64_t n = (std::int64_t{blockIdx.x / p.token_blocks} * kWarps + threadIdx.x / 32) * kRows;
  std::int64_t token = std::int64_t{blockIdx.x % p.token_blocks} * T, end = p.m;
  const auto* rows = static_cast<const std::uint8_t*>(p.weight.rows);
  if (p.experts.tiles != nullptr) {  // a block is a tile
    const int number = static_cast<int>(blockIdx.x % p.token_blocks);
    if (number >= __ldcg(&p.experts.count->tiles)) return;
    const ExpertTile tile = p.experts.tiles[number];
    token = tile.first, end = tile.first + tile.rows, rows += tile.expert * p.experts.weight_pitch;
  }
  if (n >= p.weight.n) return;
  const std::int64_t row_bytes = p.weight.stride * (kType == DType::f32 ? 4 : 2);
  const std::uint8_t* row[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)  // a row past the last one repeats it
    row[r] = rows + (n + r < p.weight.n ? n + r : n) * row_bytes;

  float sum[kRows][T] = {};
#pragma unroll 1
  for (int first = lane * kChannels; first < p.k; first += kAhead * kStep) {
    Eight<kType> ahead[kAhead][kRows];
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (const int k = first + a * kStep; k < p.k) ahead[a][r].load(row[r] + std::int64_t{k} * (kType == DType::f32 ? 4 : 2));
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int k = first + a * kStep;
      if (k >= p.k) continue;
      float w[kRows][kChannels];
#pragma unroll
      for (int r = 0; r < kRows; ++r) ahead[a][r].floats(w[r]);
#pragma unroll
      for (int t = 0; t < T; ++t) {
        float x[kChannels] = {};
        load_x(p, token + t < end ? token + t : end - 1, k, x);
#pragma unroll
        for (int i = 0; i < kChannels; ++i)
#pragma unroll
          for (int r = 0; r < kRows; ++r) sum[r][t] = fmaf(w[r][i], x[i], sum[r][t]);
      }
    }
  }
  float mine[kRows] = {};  // lane t stores those of token t
#pragma unroll
  for (int t = 0; t < T; ++t)
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int apart = 16; apart > 0; apart /= 2) sum[r][t] += __shfl_xor_sync(kAllLanes, sum[r][t], apart);
      if (lane == t) mine[r] = sum[r][t];
    }
  if (lane < T && token + lane < end) p.epilogue.store_two(token + lane, n, mine[0], mine[1], p.weight.n);
}

static_assert(kDenseExpertRows == 4);  // T of more than one token

template <DType kType, int T>
cudaError_t launch(Params& p, cudaStream_t stream) {
  const std::int64_t blocks = p.experts.tiles != nullptr ? p.experts.most : (p.m + T - 1) / T,
                     ctas = blocks * ((p.weight.n + kWarps * kRows - 1) / (kWarps * kRows));
  if (ctas > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  p.token_blocks = static_cast<int>(blocks);
  return launch_after(linear_dense_kernel<kType, T>, dim3(static_cast<unsigned>(ctas)), dim3(32 * kWarps), 0, stream, p);
}
template <DType kType>
cudaError_t launch(Params& p, cudaStream_t stream) {
  return p.m == 1 && p.experts.tiles == nullptr ? launch<kType, 1>(p, stream) : launch<kType, 4>(p, stream);
}

// --- dequantizing ------------------------------------------------------------------------------------------------------------

constexpr int kThreads = 256, kMostCtas = 1 << 16;

/// One element a thread, in the order of `out`; a thread takes every so manyth.
__global__ void __launch_bounds__(kThreads)
    dequantize_dense_kernel(DenseWeight w, void* out, DType out_type, std::int64_t out_stride, bool transposed) {
  const std::int64_t columns = transposed ? w.n : w.k;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < w.n * w.k;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / columns, column = i % columns, to = row * out_stride + column;
    const float x = load_float(w.rows, transposed ? column * w.stride + row : row * w.stride + column, w.type);
    if (out_type == DType::f32)
      static_cast<float*>(out)[to] = x;
    else if (out_type == DType::f16)
      static_cast<__half*>(out)[to] = __float2half_rn(x);
    else
      static_cast<__nv_bfloat16*>(out)[to] = __float2bfloat16_rn(x);
  }
}

}  // namespace

cudaError_t linear_dense_simt(const DenseTask& task, cudaStream_t stream) {
  const DenseWeight& w = task.weight;
  if (task.m < 1 || w.n < 1 || w.k < 1 || w.k > std::numeric_limits<std::int32_t>::max() - 4 * kStep)
    return cudaErrorInvalidValue;
  const std::int64_t in_sixteen_bytes = task.a_dtype == DType::f32 ? 4 : 8;
  Params p{};
  p.weight = w;
  p.x = task.x;
  p.x_stride = task.x_stride;
  p.prescale = task.prescale;
  p.m = task.m;
  p.k = static_cast<int>(w.k);
  p.a_dtype = task.a_dtype;
  p.in_vectors = task.prescale == nullptr && w.k % kChannels == 0 && (task.m == 1 || task.x_stride % in_sixteen_bytes == 0) &&
                 reinterpret_cast<std::uintptr_t>(task.x) % 16 == 0;
  p.experts = task.experts;
  p.epilogue = task.epilogue;
  switch (w.type) {
    case DType::f32: return launch<DType::f32>(p, stream);
    case DType::f16: return launch<DType::f16>(p, stream);
    case DType::bf16: return launch<DType::bf16>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t dequantize_dense(const DenseWeight& weight, void* out, DType out_type, std::int64_t out_stride, bool transposed,
                             cudaStream_t stream) {
  const std::int64_t ctas = std::min<std::int64_t>((weight.n * weight.k + kThreads - 1) / kThreads, kMostCtas);
  return launch_after(dequantize_dense_kernel, dim3(static_cast<unsigned>(ctas)), dim3(kThreads), 0, stream, weight, out,
                      out_type, out_stride, transposed);
}

}  // namespace nibble::cuda
