// Convolutions without tensor cores, for every geometry.
//
//   CTA  = 128 output pixels × 8 output channels of one group × all of the patch
//   step = 64 channels of the patch: all threads decode the 8 rows' weights into shared memory, each once; then a thread multiplies
//          them by its pixel's activations, which it reads where they are, 8 products for each
//
//   Neighbouring threads are neighbouring pixels: their reads coalesce where pixels are contiguous (NCHW), and hit L1 where channels are.
//
// Sums run over the patch in its order, in f32 or in integers modulo 2³². Weights are as docs/accuracy.md defines them.
#include <algorithm>
#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/steps/w8a8_scales.cuh"
#include "kernels/cuda/tasks/conv.hpp"
#include "kernels/cuda/weights/float_codes.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 128;  // pixels
constexpr int kRows = 8;       // output channels
constexpr int kStep = 64;      // channels of the patch

/// W[n,k] of a weight packed as gpu_n64k128.
__device__ float weight_at(const DeviceWeight& w, int n, int k) {
  const gpu_tile::Geometry& geo = w.geometry;
  const int row = n % gpu_tile::kRows, channel = k % gpu_tile::kChannels;
  const auto* record = static_cast<const std::uint8_t*>(w.records) + geo.record(n / gpu_tile::kRows, k / gpu_tile::kChannels);
  const gpu_tile::Place place = gpu_tile::place(geo.bits, row, channel);
  const float code = code_number(w.codes, record[place.byte] >> place.shift & ((1u << geo.bits) - 1), w.zero_base);
  const int slot = channel / geo.span, position = gpu_tile::slot_position(row);
  const float scale = load_float(record + geo.scale_offset(slot), position, w.scale_type);
  const std::uint8_t* zeros = record + geo.zero_offset(slot);
  switch (w.zero) {
    case ZeroKind::none: return __fmul_rn(code, scale);
    case ZeroKind::integer: return __fmul_rn(code - static_cast<float>(zeros[position]), scale);
    case ZeroKind::offset: return fmaf(code, scale, load_float(zeros, position, w.zero_type));
    case ZeroKind::real: return __fmul_rn(code - load_float(zeros, position, w.zero_type), scale);
  }
  return 0.0f;
}
/// Ŵ[n,k] − z of a weight packed as gpu_w8n64k128.
__device__ std::int32_t code_at(const W8A8Weight& w, int n, int k) {
  const std::byte* record = w.bytes + w.geometry.record(n / gpu_w8::kRows, k / gpu_w8::kChannels);
  const auto code = static_cast<std::int8_t>(record[gpu_w8::place(n % gpu_w8::kRows, k % gpu_w8::kChannels)]);
  const std::int32_t* zeros = w.zeros();
  return code - (zeros == nullptr ? 0 : zeros[n]);
}

/// A float of the image, times the prescale of its channel.
__device__ float pixel(const ConvTask& t, std::int64_t at, int channel) {
  const float x = load_float(t.x, at, t.a_dtype);
  return t.prescale == nullptr ? x : __fmul_rn(x, __ldg(t.prescale + channel));
}

/// Activations as operands of the products.
struct Floats {
  using Value = float;
  __device__ explicit Floats(const ConvTask&) {}
  __device__ static float weight(const ConvTask& t, int n, int k) { return weight_at(t.weight, n, k); }
  __device__ float activation(const ConvTask& t, std::int64_t at, int channel) const { return pixel(t, at, channel); }
  __device__ static float add(float a, float b, float sum) { return fmaf(a, b, sum); }
  __device__ float number(const ConvTask&, int, float sum) const { return sum; }
};
struct Int8 {
  using Value = std::int32_t;
  act_rule::Rule rule;
  __device__ explicit Int8(const ConvTask& t) : rule(rule_of(t.acts)) {}
  __device__ static std::int32_t weight(const ConvTask& t, int n, int k) { return code_at(t.scaled, n, k); }
  /// Minus the zero point, so that padding is 0.
  __device__ std::int32_t activation(const ConvTask& t, std::int64_t at, int channel) const {
    const std::int8_t code =
        t.a_dtype == DType::s8 ? static_cast<const std::int8_t*>(t.x)[at] : act_rule::to_s8(pixel(t, at, channel), rule);
    return code - rule.zero;
  }
  __device__ static std::int32_t add(std::int32_t a, std::int32_t b, std::int32_t sum) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) * static_cast<std::uint32_t>(b) +
                                     static_cast<std::uint32_t>(sum));
  }
  __device__ float number(const ConvTask& t, int n, std::int32_t sum) const {
    if (t.epilogue.sum_bias != nullptr) sum = add(1, t.epilogue.sum_bias[n], sum);
    if (t.epilogue.out == DType::s32) return __int_as_float(sum);
    return __fmul_rn(__fmul_rn(static_cast<float>(sum), rule.scale), t.scaled.scales()[n]);
  }
};

template <class Products>
__global__ void __launch_bounds__(kThreads, 4) conv_direct_kernel(const __grid_constant__ ConvTask t) {
  using Value = typename Products::Value;
  __shared__ Value weights[kStep][kRows];
  let_successor_start();
  const Patches& p = t.patches;
  const int blocks = (p.group_outputs + kRows - 1) / kRows;  // of a group
  const int group = static_cast<int>(blockIdx.y) / blocks, first = static_cast<int>(blockIdx.y) % blocks * kRows;
  const int n = group * p.group_outputs + first, rows = min(kRows, p.group_outputs - first);
  const std::int64_t token = std::int64_t{blockIdx.x} * kThreads + threadIdx.x, tokens = std::int64_t{t.images} * p.pixels();
  const bool exists = token < tokens;
  const Corner from = corner(p, exists ? static_cast<int>(token) : 0);
  const std::int64_t image = from.image * t.a.image + std::int64_t{group} * p.channels * t.a.channel;
  const int k = p.filter_h * p.filter_w * p.channels;

  wait_for_predecessor();
  const Products products(t);
  Value sums[kRows] = {};
  int channel = 0, kh = 0, kw = 0;
#pragma unroll 1
  for (int begin = 0; begin < k; begin += kStep) {
    __syncthreads();  // all threads have read the previous weights
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < kStep * kRows; i += kThreads) {
      const int row = i / kStep, at = begin + i % kStep;
      weights[i % kStep][row] = row < rows && at < k ? Products::weight(t, n + row, at) : Value{};
    }
    __syncthreads();
    const int steps = min(kStep, k - begin);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const int h = from.h + kh * p.dilation_h, w = from.w + kw * p.dilation_w;
      if (exists && h >= 0 && h < p.height && w >= 0 && w < p.width) {
        const Value x =
            products.activation(t, image + (std::int64_t{h} * p.width + w) * t.a.pixel + channel * t.a.channel, channel);
#pragma unroll
        for (int row = 0; row < kRows; ++row) sums[row] = Products::add(weights[i][row], x, sums[row]);
      }
      if (++channel == p.channels) {
        channel = 0;
        if (++kw == p.filter_w) kw = 0, ++kh;
      }
    }
  }
  if (!exists) return;
  const epilogue::Pixel pixel{static_cast<int>(token / p.pixels()), static_cast<int>(token % p.pixels())};
  const std::int64_t at = pixel.image * t.d.image + pixel.pixel * t.d.pixel;
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    if (row < rows) t.epilogue.store_at(at + (n + row) * t.d.channel, pixel, n + row, products.number(t, n + row, sums[row]));
}

template <class Products>
cudaError_t launch_direct(const ConvTask& task, cudaStream_t stream) {
  const Patches& p = task.patches;
  const std::int64_t tokens = std::int64_t{task.images} * p.pixels();
  const std::int64_t across = (tokens + kThreads - 1) / kThreads;
  const std::int64_t down = std::int64_t{p.groups} * ((p.group_outputs + kRows - 1) / kRows);
  if (tokens < 1 || p.channels < 1) return cudaErrorInvalidValue;
  if (tokens > std::numeric_limits<std::int32_t>::max() || down > 65535) return cudaErrorInvalidConfiguration;
  return launch_dependent(conv_direct_kernel<Products>, dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)),
                          kThreads, 0, stream, task);
}

}  // namespace

cudaError_t conv_direct(const ConvTask& task, cudaStream_t stream) { return launch_direct<Floats>(task, stream); }
cudaError_t conv_direct_s8(const ConvTask& task, cudaStream_t stream) { return launch_direct<Int8>(task, stream); }

}  // namespace nibble::cuda
