// A thread an element: neighbours read neighbouring codes, if the order of channels is theirs, and write neighbouring floats. The x
// coordinate of the grid counts pieces of a row, so that no thread divides by K.
#include "kernels/cuda/steps/decode_acts.hpp"

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>

#include "kernels/cuda/device/dependent_launch.cuh"

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

}  // namespace

cudaError_t decode_acts(const QuantizedActs& acts, DType type, const std::int32_t* perm, std::int64_t m, int k, float* x,
                        cudaStream_t stream) {
  if (m < 1 || k < 1 || (type != DType::s8 && type != DType::e4m3)) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((k - 1) / kDecodeThreads + 1), static_cast<unsigned>(std::min(m, kMostRows)));
  return launch_dependent(decode_acts_kernel, grid, kDecodeThreads, 0, stream, DecodeParams{acts, type, perm, m, k, x});
}

}  // namespace nibble::cuda
