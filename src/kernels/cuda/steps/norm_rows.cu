// RMSNorm and LayerNorm: a CTA has a token, which it reads once and keeps in registers. It stores floats, or where they would be quantized
// next, their codes.
//
//   A, norm_add ──load──▶ V vectors of 8 channels a thread ──▶ x = A + norm_add, rounded ──▶ norm_sum
//   norm_weight ──load──▶ the same channels                    │
//                                                              ├──▶ mean(x)            layer: over the warp by shuffles, then over
//                                                              ├──▶ mean((x − mean)²)  the warps in shared memory, in a fixed order
//                                                              ▼
//                          y = (x − mean) · scale · weight + bias, rounded ──▶ workspace, or
//                                                                          ──▶ quantize_row ──▶ codes, scales, sums, terms
//
// Thread t has vectors t, t + T, … of T threads, so that neighbours read neighbouring bytes. Operands that the previous kernel does not
// write, weight and bias, are requested together with x: their latency passes behind that of x.
#include "kernels/cuda/steps/norm_rows.hpp"

#include <algorithm>

#include "epilogue/element.hpp"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/device/opaque.cuh"
#include "kernels/cuda/steps/quantize_rows.cuh"
#include "kernels/cuda/tasks/norm_limits.hpp"

namespace nibble::cuda {
namespace {

constexpr int kChannels = kEach;  // of a vector; a CTA with a vector or two a thread has up to kMaxThreads

struct NormParams {
  NormTask task;
  int k;
  // Whether vectors of eight channels are loaded and stored 16 bytes at a time: rows begin at multiples of 16 bytes.
  bool a_vectors, add_vectors, sum_vectors, weight_vectors, bias_vectors;
};

__device__ __forceinline__ float2 floats(std::uint32_t word, DType type) {
  return {half_of(word, 0, type), half_of(word, 1, type)};
}

/// Channels i … i + 7 of a row of k; 0 past its end. Loads bypass L1, which may hold stale lines.
__device__ __forceinline__ void load(float (&v)[kChannels], const void* row, DType type, int i, int k, bool vectors) {
  if (vectors && i + kChannels <= k) {
    if (type == DType::f32) {
      const float4* const from = reinterpret_cast<const float4*>(static_cast<const float*>(row) + i);
      const float4 low = __ldcg(from), high = __ldcg(from + 1);
      v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
      v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
      const uint4 words = __ldcg(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(row) + i));
      const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = floats(word[j], type);
        v[2 * j] = two.x, v[2 * j + 1] = two.y;
      }
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kChannels; ++j) {
    v[j] = 0.0f;
    if (i + j >= k) continue;
    if (type == DType::f32)
      v[j] = __ldcg(static_cast<const float*>(row) + i + j);
    else
      v[j] = floats(__ldcg(static_cast<const std::uint16_t*>(row) + i + j), type).x;
  }
}

__device__ __forceinline__ std::uint32_t halves(float low, float high, DType type) {
  if (type == DType::f16) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

__device__ __forceinline__ void store(const float (&v)[kChannels], void* row, DType type, int i, int k, bool vectors) {
  if (vectors && i + kChannels <= k) {
    if (type == DType::f32) {
      float4* const to = reinterpret_cast<float4*>(static_cast<float*>(row) + i);
      to[0] = {v[0], v[1], v[2], v[3]}, to[1] = {v[4], v[5], v[6], v[7]};
    } else {
      *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(row) + i) = {halves(v[0], v[1], type), halves(v[2], v[3], type),
                                                                         halves(v[4], v[5], type), halves(v[6], v[7], type)};
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kChannels; ++j) {
    if (i + j >= k) continue;
    if (type == DType::f32)
      static_cast<float*>(row)[i + j] = v[j];
    else
      static_cast<std::uint16_t*>(row)[i + j] = static_cast<std::uint16_t>(halves(v[j], 0.0f, type));
  }
}

/// x in the precision of its type.
__device__ __forceinline__ float rounded(float x, DType type) {
  return type == DType::f32 ? x : floats(halves(x, 0.0f, type), type).x;
}

__device__ __forceinline__ const void* row_of(const void* data, DType type, std::int64_t row, std::int64_t stride) {
  return static_cast<const std::uint8_t*>(data) + row * stride * (type == DType::f32 ? 4 : 2);
}
__device__ __forceinline__ void* row_of(void* data, DType type, std::int64_t row, std::int64_t stride) {
  return static_cast<std::uint8_t*>(data) + row * stride * (type == DType::f32 ? 4 : 2);
}

/// The sum over the CTA, the same bits in every thread. `parts`: one for each warp, which no other sum uses.
__device__ __forceinline__ float sum_of_cta(float sum, float* parts) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += parts[warp];
  return sum;
}

/// A token of a CTA. kWeightsWithX: weights are requested when it is made, before the previous kernel has ended, if registers suffice.
template <int kVectors, int kThreads, bool kWeightsWithX>
class NormRow {
 public:
  /// Partial sums of warps, in shared memory.
  using Parts = float[2][kThreads / 32];

  __device__ __forceinline__ explicit NormRow(const NormParams& p) : p_(p) {
    if constexpr (kWeightsWithX) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) load_weight(v);
    }
  }

  __device__ __forceinline__ static int channel(int v) {
    return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kChannels;
  }

  /// Token m, with its sum: finish(v, y) gets the channels of vector v in f32, those past K with them.
  template <class Finish>
  __device__ __forceinline__ void normalize(std::int64_t m, Parts& parts, Finish finish) {
    const NormTask& t = p_.task;
    float x[kVectors][kChannels];
    const void* const a = row_of(t.a, t.type, m, t.a_stride);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load(x[v], a, t.type, channel(v), p_.k, p_.a_vectors);
    if (t.add != nullptr) {
      const void* const add = row_of(t.add, t.add_type, m, t.add_stride);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float more[kChannels];
        if constexpr (!kWeightsWithX) asm volatile("" ::: "memory");
        load(more, add, t.add_type, channel(v), p_.k, p_.add_vectors);
#pragma unroll
        for (int i = 0; i < kChannels; ++i) x[v][i] = rounded(__fadd_rn(x[v][i], more[i]), t.type);
        if (t.sum != nullptr) store(x[v], row_of(t.sum, t.type, m, t.sum_stride), t.type, channel(v), p_.k, p_.sum_vectors);
      }
    }

    const float share = 1.0f / static_cast<float>(p_.k);
    float mean = 0.0f;
    if (t.spec.kind == Norm::layer) {
      float sum = 0.0f;
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int i = 0; i < kChannels; ++i) sum += x[v][i];
      mean = sum_of_cta(sum, parts[0]) * share;
    }
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        const float distance = channel(v) + i < p_.k ? x[v][i] - mean : 0.0f;
        squares += distance * distance;
      }
    const float scale = 1.0f / sqrtf(sum_of_cta(squares, parts[1]) * share + t.spec.eps);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (!kWeightsWithX) {
        asm volatile("" ::: "memory");  // the next vector's loads would need the registers of this one
        load_weight(v);
      }
      float bias[kChannels] = {};
      if (t.bias != nullptr) load(bias, t.bias, t.bias_type, channel(v), p_.k, p_.bias_vectors);
#pragma unroll
      for (int i = 0; i < kChannels; ++i) x[v][i] = (x[v][i] - mean) * scale * (weight_[v][i] + t.spec.weight_offset) + bias[i];
      finish(v, x[v]);
    }
  }

 private:
  __device__ __forceinline__ void load_weight(int v) {
    load(weight_[v], p_.task.weight, p_.task.weight_type, channel(v), p_.k, p_.weight_vectors);
  }

  const NormParams& p_;
  float weight_[kVectors][kChannels];
};

template <int kVectors, int kThreads>
__global__ void __launch_bounds__(kThreads) norm_rows_kernel(const __grid_constant__ NormParams p) {
  __shared__ float parts[2][kThreads / 32];
  let_successor_start();
  NormRow<kVectors, kThreads, kVectors <= 2> row(p);
  wait_for_predecessor();
  const std::int64_t m = blockIdx.x;
  void* const y = row_of(p.task.y, p.task.type, m, p.task.y_stride);
  row.normalize(m, parts,
                [&](int v, const float(&values)[kChannels]) { store(values, y, p.task.type, row.channel(v), p.k, true); });
}

// ---- codes in the place of floats

struct NormCodesParams {
  NormParams norm;
  QuantizeParams codes;
};

/// Activations from `channel` on in the type of A, as if they had been stored and loaded; past K they are 0.
template <DType kType>
__device__ __forceinline__ Raw<kType> raw_of(const float (&y)[kChannels], int channel, int k) {
  Raw<kType> raw;
  float only[kChannels];
#pragma unroll
  for (int i = 0; i < kChannels; ++i) only[i] = channel + i < k ? y[i] : 0.0f;
#pragma unroll
  for (int i = 0; i < Raw<kType>::kWords; ++i)
    raw.word[i] =
        kType == DType::f32 ? __float_as_uint(only[i]) : halves(only[2 * i % kChannels], only[(2 * i + 1) % kChannels], kType);
  return raw;
}

template <DType kType, int kVectors, QuantizeOutput kOutput>
__global__ void __launch_bounds__(kMaxThreads) norm_codes_kernel(const __grid_constant__ NormCodesParams p) {
  __shared__ float parts[2][kMaxWarps];
  __shared__ Range ranges[kMaxWarps];
  __shared__ std::int32_t sums[kMaxWarps];
  let_successor_start();
  NormRow<kVectors, kMaxThreads, kVectors == 1> row(p.norm);
  wait_for_predecessor();
  const std::int64_t m = blockIdx.x;
  Raw<kType> raw[kVectors];
  row.normalize(m, parts, [&](int v, const float(&y)[kChannels]) { raw[v] = raw_of<kType>(y, row.channel(v), p.norm.k); });
  // Two vectors leave no registers for their places, which are computed once more.
  const auto again = [](int place) { return kVectors == 1 ? place : opaque(place); };
  quantize_row<kType, kVectors, kOutput, false>(raw, p.codes, Team(), again(static_cast<int>(blockIdx.x)), true,
                                                again(row.channel(0)), again(row.channel(1) - row.channel(0)), ranges, sums);
}

/// By type of A, vectors of a thread and output.
using NormCodesKernel = void (*)(NormCodesParams);
template <int kVectors, QuantizeOutput kOutput>
NormCodesKernel norm_codes_kernel_of(DType type) {
  if (type == DType::f32) return norm_codes_kernel<DType::f32, kVectors, kOutput>;
  return type == DType::f16 ? norm_codes_kernel<DType::f16, kVectors, kOutput>
                            : norm_codes_kernel<DType::bf16, kVectors, kOutput>;
}

/// Whether rows begin at multiples of 16 bytes.
bool in_vectors(const void* data, DType type, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride * bits(type) % (16 * 8) == 0;
}

NormParams params_of(const NormTask& task) {
  return {.task = task,
          .k = static_cast<int>(task.k),
          .a_vectors = in_vectors(task.a, task.type, task.a_stride),
          .add_vectors = task.add != nullptr && in_vectors(task.add, task.add_type, task.add_stride),
          .sum_vectors = task.sum != nullptr && in_vectors(task.sum, task.type, task.sum_stride),
          .weight_vectors = in_vectors(task.weight, task.weight_type, 0),
          .bias_vectors = task.bias != nullptr && in_vectors(task.bias, task.bias_type, 0)};
}

/// The vectors of a thread, and the threads of a token, on which the order of sums depends.
struct Shape {
  int each, threads;

  explicit Shape(std::int64_t k) {
    const int vectors = static_cast<int>((k + kChannels - 1) / kChannels);
    each = vectors <= kMaxThreads ? 1 : vectors <= 2 * kMaxThreads ? 2 : kNormVectors;
    threads = ((vectors + each - 1) / each + 31) / 32 * 32;
  }
};

}  // namespace

cudaError_t norm_rows(const NormTask& task, cudaStream_t stream) {
  if (task.m < 1 || task.k < 1 || task.k > kNormChannels) return cudaErrorInvalidValue;
  const Shape shape(task.k);
  const auto kernel = shape.each == 1   ? norm_rows_kernel<1, kMaxThreads>
                      : shape.each == 2 ? norm_rows_kernel<2, kMaxThreads>
                                        : norm_rows_kernel<kNormVectors, kNormThreads>;
  return launch_dependent(kernel, static_cast<unsigned>(task.m), static_cast<unsigned>(shape.threads), 0, stream,
                          params_of(task));
}

cudaError_t norm_codes(const NormTask& task, const QuantizeTask& codes, cudaStream_t stream) {
  const Shape shape(task.k);
  if (task.m < 1 || task.k < 1 || task.k > kNormCodesChannels || codes.m != task.m || codes.k != task.k ||
      codes.type != task.type || codes.perm != nullptr || codes.offsets != nullptr || codes.term_offsets || !lanes_fit(codes) ||
      codes.columns > std::int64_t{kChannels} * shape.each * shape.threads)
    return cudaErrorInvalidValue;
  const bool terms = codes.terms != nullptr;
  const NormCodesKernel kernel = shape.each == 1 ? (terms ? norm_codes_kernel_of<1, QuantizeOutput::terms>(task.type)
                                                          : norm_codes_kernel_of<1, QuantizeOutput::sums>(task.type))
                                                 : (terms ? norm_codes_kernel_of<2, QuantizeOutput::terms>(task.type)
                                                          : norm_codes_kernel_of<2, QuantizeOutput::sums>(task.type));
  return launch_dependent(kernel, static_cast<unsigned>(task.m), static_cast<unsigned>(shape.threads), 0, stream,
                          NormCodesParams{params_of(task), params_of(codes)});
}

}  // namespace nibble::cuda
