// As f32 a thread an element: neighbours read neighbouring codes, if the order of channels is theirs, and write neighbouring floats. As f16
// a thread eight. The x coordinate of the grid counts pieces of a row, so that no thread divides by K.
#include "kernels/cuda/steps/decode_acts.hpp"

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/weights/float_codes.cuh"

namespace nibble::cuda {
namespace {

constexpr int kDecodeThreads = 256;
constexpr std::int64_t kMostRows = 65535;  // of a grid's second dimension; a CTA takes every so manyth row

struct DecodeParams {
  QuantizedActs acts;
  DType type;
  const std::int32_t* perm;
  std::int64_t m;
  int k;
  float* x;
};

__device__ __forceinline__ float code_as_float(std::uint8_t code, DType type) {
  if (type == DType::s8) return static_cast<float>(static_cast<std::int8_t>(code));
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(code, __NV_E4M3);
  return __half22float2(pair).x;
}

__global__ void __launch_bounds__(kDecodeThreads) decode_acts_kernel(const __grid_constant__ DecodeParams p) {
  let_successor_start();
  const int k = static_cast<int>(blockIdx.x * kDecodeThreads + threadIdx.x);
  wait_for_predecessor();
  if (k >= p.k) return;
  const QuantizedActs& a = p.acts;
  const int channel = p.perm == nullptr ? k : __ldg(p.perm + k);
  const std::int64_t block = a.group == 0 ? 0 : channel / a.group;
  for (std::int64_t row = blockIdx.y; row < p.m; row += gridDim.y) {
    const float code = code_as_float(__ldcg(static_cast<const std::uint8_t*>(a.codes) + row * a.pitch + channel), p.type);
    const float scale = a.scales == nullptr ? a.scale : __ldcg(a.scales + row * a.scale_row + block * a.scale_group);
    const std::int64_t zero = row * a.zero_row + block * a.zero_group;
    float x;
    if (a.offsets != nullptr)
      x = fmaf(code, scale, __ldcg(a.offsets + zero));
    else
      x = __fmul_rn(code - static_cast<float>(a.zeros == nullptr ? a.zero : __ldcg(a.zeros + zero)), scale);
    p.x[row * p.k + k] = x;
  }
}

// ---- as f16

constexpr int kHalfThreads = 128, kHalves = 8;  // of a thread

struct HalvesParams {
  CodeHalves task;
  bool vectors;  // eight codes of a row begin at multiples of eight bytes, in order
  bool even;     // eight neighbours share a scale
};

/// A power of two, by which what a row's codes stand for is divided before it is rounded, and its inverse.
struct PowerOfTwo {
  float value, inverse;
};
/// Not above the largest scale of the row's blocks, and at least half of it, so that quotients are below 2·448; where a scale is not finite
/// a NaN. All lanes of a warp must call this.
__device__ __forceinline__ PowerOfTwo power_below(const QuantizedActs& acts, std::int64_t row, int k) {
  constexpr unsigned kAll = 0xffffffffu;
  std::uint32_t largest = 0;
  for (int block = static_cast<int>(threadIdx.x) % 32; block * acts.group < k; block += 32)
    largest = max(largest, __float_as_uint(__ldcg(acts.scales + row * acts.scale_row + block * acts.scale_group)) & 0x7fffffffu);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) largest = max(largest, __shfl_xor_sync(kAll, largest, lanes));
  constexpr std::uint32_t kInfinity = 0x7f800000u, kLeast = 1, kMost = 253;  // the inverse is no subnormal number
  if (largest >= kInfinity) return {__uint_as_float(0x7fc00000u), 1.0f};
  const std::uint32_t exponent = min(max(largest >> 23, kLeast), kMost);
  return {__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23)};
}

/// Codes `channel` … `channel` + 7 of a row; past K they are 0.
__device__ __forceinline__ uint2 eight_codes(const HalvesParams& p, const std::uint8_t* row, int channel) {
  const CodeHalves& t = p.task;
  if (p.vectors && channel + kHalves <= t.k) return __ldcg(reinterpret_cast<const uint2*>(row + channel));
  std::uint32_t word[2] = {};
#pragma unroll
  for (int i = 0; i < kHalves; ++i)
    if (channel + i < t.k)
      word[i / 4] |= std::uint32_t{__ldcg(row + (t.perm == nullptr ? channel + i : __ldg(t.perm + channel + i)))} << i % 4 * 8;
  return {word[0], word[1]};
}

__global__ void __launch_bounds__(kHalfThreads) code_halves_kernel(const __grid_constant__ HalvesParams p) {
  let_successor_start();
  const CodeHalves& t = p.task;
  const QuantizedActs& a = t.acts;
  const int thread = static_cast<int>(blockIdx.x * kHalfThreads + threadIdx.x), channel = thread * kHalves;
  wait_for_predecessor();
  for (std::int64_t row = blockIdx.y; row < t.m; row += gridDim.y) {
    PowerOfTwo power{1.0f, 1.0f};
    if (a.group != 0) power = power_below(a, row, t.k);
    if (thread == 0 && t.scales != nullptr)
      t.scales[row] = a.group != 0 ? power.value : a.scales == nullptr ? a.scale : __ldcg(a.scales + row * a.scale_row);
    if (channel >= t.k) continue;
    const auto factor = [&](int position) {  // of the position's block
      position = min(position, t.k - 1);
      const int of = t.perm == nullptr ? position : __ldg(t.perm + position);
      return __ldcg(a.scales + row * a.scale_row + of / a.group * a.scale_group) * power.inverse;
    };
    const float shared = a.group != 0 && p.even ? factor(channel) : 1.0f;
    const uint2 codes = eight_codes(p, static_cast<const std::uint8_t*>(a.codes) + row * a.pitch, channel);
    const uint4 x = halves_of(codes);
    std::uint32_t word[kHalves / 2] = {x.x, x.y, x.z, x.w};
    if (a.group != 0) {
#pragma unroll
      for (int i = 0; i < kHalves / 2; ++i) {
        const int first = channel + 2 * i;
        const float low = half_of(word[i], 0, DType::f16) * (p.even ? shared : factor(first));
        word[i] = ptx::to_f16x2(low, half_of(word[i], 1, DType::f16) * (p.even ? shared : factor(first + 1)));
      }
    }
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(t.x) + row * t.pitch + channel) = {word[0], word[1], word[2], word[3]};
  }
}

}  // namespace

cudaError_t code_halves(const CodeHalves& task, cudaStream_t stream) {
  const QuantizedActs& a = task.acts;
  if (task.m < 1 || task.k < 1 || task.pitch % kHalves != 0 || task.pitch < task.k || (a.group != 0 && a.scales == nullptr))
    return cudaErrorInvalidValue;
  const bool aligned = (reinterpret_cast<std::uintptr_t>(a.codes) | static_cast<std::uintptr_t>(a.pitch)) % kHalves == 0;
  const bool in_order = task.perm == nullptr;
  const int threads = (task.k - 1) / kHalves + 1;
  const dim3 grid(static_cast<unsigned>((threads - 1) / kHalfThreads + 1), static_cast<unsigned>(std::min(task.m, kMostRows)));
  return launch_dependent(code_halves_kernel, grid, kHalfThreads, 0, stream,
                          HalvesParams{task, aligned && in_order, in_order && a.group % kHalves == 0});
}

cudaError_t decode_acts(const QuantizedActs& acts, DType type, const std::int32_t* perm, std::int64_t m, int k, float* x,
                        cudaStream_t stream) {
  if (m < 1 || k < 1 || (type != DType::s8 && type != DType::e4m3)) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((k - 1) / kDecodeThreads + 1), static_cast<unsigned>(std::min(m, kMostRows)));
  return launch_dependent(decode_acts_kernel, grid, kDecodeThreads, 0, stream, DecodeParams{acts, type, perm, m, k, x});
}

}  // namespace nibble::cuda
