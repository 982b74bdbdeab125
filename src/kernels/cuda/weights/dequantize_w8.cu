// A CTA dequantizes a record: 64 rows × 128 channels of a byte each, through shared memory.
//
//     [N,K]   a warp writes a row: a lane has 4 channels           [K,N]   a warp writes a channel: a lane has 2 rows
//
//   1. the record goes to shared memory as it lies in the packed weight, chunks of 16 channels swizzled (gpu_w8.hpp)
//   2. a lane takes its codes, subtracts zeros, multiplies by scales and stores
//
// Exactness: a code less its zero is an integer of 9 bits, or an e4m3 number; its product with the scale is one f32 multiplication, as
// QuantTensor::value defines it, and scale2 another.
#include "kernels/cuda/weights/dequantize_w8.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"

namespace nibble::cuda {
namespace {

using gpu_w8::kChannels;
using gpu_w8::kRows;

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
constexpr int kRowCodes = kChannels / kLanes;  // of a lane that writes a row
constexpr int kColumnCodes = kRows / kLanes;   // of one that writes a channel

struct Params {
  W8Weight weight;
  void* out;
  std::int64_t stride;
  DType out_type;
  bool transposed;
};

__device__ inline float number(std::uint8_t code, bool integer) {
  if (integer) return static_cast<float>(static_cast<std::int8_t>(code));
  const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(code, __NV_E4M3);
  return __half22float2(h).x;
}

__device__ inline void store(const Params& p, std::int64_t at, float w) {
  if (p.out_type == DType::f32)
    static_cast<float*>(p.out)[at] = w;
  else if (p.out_type == DType::f16)
    static_cast<__half*>(p.out)[at] = __float2half_rn(w);
  else
    static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16_rn(w);
}

__global__ void __launch_bounds__(kThreads) dequantize_w8_kernel(const __grid_constant__ Params p) {
  __shared__ __align__(16) std::uint8_t codes[gpu_w8::kRecordBytes];
  const gpu_w8::Geometry& geo = p.weight.geometry;
  const int record = static_cast<int>(blockIdx.x % static_cast<unsigned>(geo.records())),
            tile = static_cast<int>(blockIdx.x / static_cast<unsigned>(geo.records()));
  const auto* const from = reinterpret_cast<const uint4*>(p.weight.bytes + geo.record(tile, record));
  for (int i = static_cast<int>(threadIdx.x); i < gpu_w8::kRecordBytes / 16; i += kThreads)
    reinterpret_cast<uint4*>(codes)[i] = __ldcs(from + i);
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  const float* const scales = p.weight.scales();
  const std::int32_t* const zeros = p.weight.zeros();
  const auto write = [&](int row, int channel) {
    const std::int64_t n = std::int64_t{tile} * kRows + row, k = std::int64_t{record} * kChannels + channel;
    if (n >= geo.n || k >= geo.k) return;
    const float scale = scales[geo.block_rows == 0 ? n : n / geo.block_rows * geo.records() + record];
    const float q =
        number(codes[gpu_w8::place(row, channel)], geo.integers) - (zeros == nullptr ? 0.0f : static_cast<float>(zeros[n]));
    const std::int64_t column = p.weight.perm == nullptr ? k : p.weight.perm[k];
    store(p, p.transposed ? column * p.stride + n : n * p.stride + column, __fmul_rn(__fmul_rn(q, scale), p.weight.scale2));
  };
  if (p.transposed) {
    for (int channel = warp; channel < kChannels; channel += kWarps)
      for (int i = 0; i < kColumnCodes; ++i) write(lane + kLanes * i, channel);
  } else {
    for (int row = warp; row < kRows; row += kWarps)
      for (int i = 0; i < kRowCodes; ++i) write(row, lane + kLanes * i);
  }
}

}  // namespace

cudaError_t dequantize_w8(const W8Weight& weight, void* out, DType out_type, std::int64_t stride, bool transposed,
                          cudaStream_t stream) {
  const std::int64_t records = std::int64_t{weight.geometry.tiles()} * weight.geometry.records();
  if (records < 1 || records > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidValue;
  const Params p{weight, out, stride, out_type, transposed};
  return launch_after(dequantize_w8_kernel, dim3(static_cast<unsigned>(records)), dim3(kThreads), 0, stream, p);
}

}  // namespace nibble::cuda
