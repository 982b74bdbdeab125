// f32 activations as pairs of f16, x ≈ (high + low)·s, which tensor cores multiply as they do any f16.
//
//   A ──load──▶ 8 activations a lane, × prescale
//                 ├──▶ largest |x| of the token, by shuffles and shared memory ──▶ s, a power of two
//                 └──▶ ÷ s ──▶ high = f16(x) │ low = f16(x − high) ──▶ 64 channels' high parts │ their low parts │ …
//
//   CTA  = a token
//
// Under s the largest magnitude is in [2¹⁴, 2¹⁵). An f32 has 24 bits, high the first 11 of them, and low what is left, a sign and 12 bits, of
// which it may round the last: by 2⁻²³ of |x| at most. f16 ends at 2⁻²⁴, so that numbers smaller than the largest by more than 2¹⁵ lose what is
// below 2⁻³⁹ of that (docs/accuracy.md, "Exact does not mean float"). Dividing by s is exact.
#include "kernels/cuda/steps/pair_acts.hpp"

#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/steps/act_vectors.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kVectors = 4;                         // of a thread, which it keeps in registers
constexpr int kPart = kVectors * kThreads * kEach;  // channels
constexpr int kBox = 64;                            // channels of which high parts are side by side

struct Params {
  QuantizeTask task;
  ActSource source;
  int columns;
};

struct Unit {
  float scale, inverse;
};
/// The power of two under which the largest magnitude is in [2¹⁴, 2¹⁵), or less in tokens that are as small as denormal numbers.
__device__ Unit unit_of(std::uint32_t largest) {
  constexpr int kBias = 127, kTop = 14;
  if (largest >= kInfinityBits) return {act_rule::kNan, 0.0f};  // no number: the token's results are NaN
  const int exponent = max(static_cast<int>(largest >> 23) - kBias - kTop, -126);
  const auto power = [](int e) { return __int_as_float((e + kBias) << 23); };
  return {power(exponent), power(-exponent)};
}

__global__ void __launch_bounds__(kThreads) pair_acts_kernel(const __grid_constant__ Params p) {
  __shared__ std::uint32_t of_warp[kWarps];
  let_successor_start();
  wait_for_predecessor();
  const QuantizeTask& t = p.task;
  const std::int64_t token = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  Raw<DType::f32> raw[kVectors];
  const auto channel_of = [&](int first, int v) { return first + (v * kThreads + thread) * kEach; };
  const auto load_part = [&](int first) { load(raw, p.source, token, [&](int v) { return channel_of(first, v); }); };

  std::uint32_t largest = 0;
  const int parts = (p.columns + kPart - 1) / kPart;
#pragma unroll 1
  for (int part = parts - 1; part >= 0; --part) {  // the first one stays
    load_part(part * kPart);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float x[kEach];
      unpack(x, raw[v], p.source, channel_of(part * kPart, v));
#pragma unroll
      for (float value : x) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
    }
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
  if (thread % 32 == 0) of_warp[thread / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) largest = max(largest, of_warp[i]);
  const Unit unit = unit_of(largest);
  if (thread == 0) t.token_scales[token] = unit.scale;

  auto* const row = static_cast<std::uint8_t*>(t.codes) + token * t.pitch;
#pragma unroll 1
  for (int part = 0; part < parts; ++part) {
    if (part != 0) load_part(part * kPart);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int channel = channel_of(part * kPart, v);
      if (channel >= p.columns) continue;
      float x[kEach];
      unpack(x, raw[v], p.source, channel);
      std::uint32_t high[kEach / 2], low[kEach / 2];
#pragma unroll
      for (int i = 0; i < kEach / 2; ++i) {
        const float a = act_rule::multiply(x[2 * i], unit.inverse), b = act_rule::multiply(x[2 * i + 1], unit.inverse);
        high[i] = ptx::to_f16x2(a, b);
        low[i] = ptx::to_f16x2(a - half_of(high[i], 0, DType::f16), b - half_of(high[i], 1, DType::f16));
      }
      auto* const to = reinterpret_cast<uint4*>(row + (channel / kBox * 2 * kBox + channel % kBox) * 2);
      to[0] = {high[0], high[1], high[2], high[3]};
      to[kBox * 2 / 16] = {low[0], low[1], low[2], low[3]};
    }
  }
}

}  // namespace

cudaError_t pair_acts(const QuantizeTask& task, cudaStream_t stream) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 4;  // channels are counted in 32 bits
  if (task.m < 1 || task.k < 1 || task.columns < task.k || task.columns > kMost || task.columns % kBox != 0 ||
      task.type != DType::f32 || task.token_scales == nullptr || !aligned(task.codes, task.pitch, 16))
    return cudaErrorInvalidValue;
  if (task.m > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  Params p{};
  p.task = task;
  p.source = act_source(task);
  p.columns = static_cast<int>(task.columns);
  return launch_dependent(pair_acts_kernel, dim3(static_cast<unsigned>(task.m)), dim3(kThreads), 0, stream, p);
}

}  // namespace nibble::cuda
