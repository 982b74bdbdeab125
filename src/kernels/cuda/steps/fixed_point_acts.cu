// f32 activations as sums of three signed bytes, x ≈ (high·2¹⁶ + middle·2⁸ + low)·s, which tensor cores multiply as they do any codes.
//
//   A ──load──▶ 8 activations a lane, × prescale
//                 ├──▶ largest |x| of a fold, by shuffles ──▶ s, a power of two
//                 └──▶ ÷ s, round ──▶ low │ middle │ high ──▶ three rows of codes
//                                      └──▶ Σ of a fold, by shuffles ──▶ terms {2⁸ᵈ·s, 2⁸ᵈ·s·Σ} of digit d
//
//   The rows of a token follow each other, or are those of three images of codes (QuantizeTask::digit_codes).
//
//   CTA  = a part of a token, of as many channels as its threads hold: parts are independent, and neighbours read and write neighbouring
//          bytes. Of the grid x counts tokens, y parts
//
// Dividing by a power of two is exact, so that an activation is rounded once, by half a unit of the largest magnitude of its fold
// (docs/accuracy.md, "Exact does not mean float").
#include "kernels/cuda/steps/fixed_point_acts.hpp"

#include <algorithm>
#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/steps/act_vectors.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kPart = kThreads * kEach;  // channels
constexpr int kDigits = 3;

struct Params {
  QuantizeTask task;
  ActSource source;
  int columns, parts, fold_lanes;
};

struct Unit {
  float scale, inverse;  // the factor of activations
};
/// The power of two under which the largest magnitude just fits three signed digits, 127·2¹⁶ + 127·2⁸ + 127.
__device__ Unit unit_of(std::uint32_t largest) {
  constexpr float kMost = 8355711.0f;
  if (largest >= kInfinityBits) return {act_rule::kNan, 0.0f};  // no number: codes are 0, and all sums NaN
  const auto power = [](int exponent) { return __int_as_float(exponent << 23); };
  int exponent = max(static_cast<int>(largest >> 23), 24);  // tiny folds keep an absolute precision of 2⁻¹²⁶
  if (act_rule::multiply(__uint_as_float(largest), power(276 - exponent)) > kMost) ++exponent;
  return {power(exponent - 22), power(276 - exponent)};
}

/// The lowest bytes of eight integers.
__device__ __forceinline__ uint2 lowest_bytes(const std::int32_t (&x)[kEach]) {
  std::uint32_t word[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int32_t* v = x + 4 * half;
    const auto pair = [&](int i) {
      return __byte_perm(static_cast<std::uint32_t>(v[i]), static_cast<std::uint32_t>(v[i + 1]), 0x0040);
    };
    word[half] = __byte_perm(pair(0), pair(2), 0x5410);
  }
  return {word[0], word[1]};
}

/// Channels past K are 0. All lanes of a warp take part in the shuffles, those past the last column without writing.
__global__ void __launch_bounds__(kThreads, 8) fixed_point_acts_kernel(const __grid_constant__ Params p) {
  let_successor_start();
  wait_for_predecessor();
  const QuantizeTask& t = p.task;
  const std::int64_t token = blockIdx.x;
  for (int part = static_cast<int>(blockIdx.y); part < p.parts; part += static_cast<int>(gridDim.y)) {
    const int channel = part * kPart + static_cast<int>(threadIdx.x) * kEach;
    Raw<DType::f32> raw[1];
    load(raw, p.source, token, [=](int) { return channel; });
    float x[kEach];
    unpack(x, raw[0], p.source, channel);

    std::uint32_t largest = 0;
#pragma unroll
    for (float v : x) largest = max(largest, __float_as_uint(v) & 0x7fffffffu);
    for (int lanes = p.fold_lanes / 2; lanes > 0; lanes /= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
    const Unit unit = unit_of(largest);

    std::int32_t rest[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) rest[i] = __float2int_rn(act_rule::multiply(x[i], unit.inverse));
    float scale = unit.scale;
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit) {
      const uint2 bytes = lowest_bytes(rest), codes = interleave(bytes);
      std::int32_t sum = sum_of(bytes);
      for (int lanes = p.fold_lanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
      const bool images = t.digit_codes != 0;
      const std::int64_t row = token * kDigits + digit, at = images ? token * t.pitch + digit * t.digit_codes : row * t.pitch;
      if (channel < p.columns) *reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(t.codes) + at + channel) = codes;
      if (channel < p.columns && static_cast<int>(threadIdx.x) % p.fold_lanes == 0) {
        float* to = static_cast<float*>(t.terms) + 2 * (channel / t.fold) * t.term_fold;
        to += images ? 2 * (token * t.term_row + digit * t.digit_terms) : 2 * row - (row & 1);
        to[0] = scale, to[images ? 1 : 2] = act_rule::multiply(scale, static_cast<float>(sum));
      }
#pragma unroll
      for (std::int32_t& units : rest) units = (units + 128) >> 8;  // less the digit, a multiple of 256
      scale *= 256.0f;
    }
  }
}

}  // namespace

cudaError_t fixed_point_acts(const QuantizeTask& task, cudaStream_t stream) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;  // channels are counted in 32 bits
  constexpr int kMostParts = 65535;                                             // of a grid's second dimension
  const bool images = task.digit_codes != 0;
  if (task.m < 1 || task.k < 1 || task.columns < task.k || task.columns > kMost ||
      (task.fold != 16 && task.fold != 32 && task.fold != 128) || task.columns % (images ? task.fold : 128) != 0 ||
      task.type != DType::f32 || task.term_pairs == images || !aligned(task.codes, task.pitch, kEach) ||
      task.digit_codes % kEach != 0)
    return cudaErrorInvalidValue;
  if (task.m > kMost) return cudaErrorInvalidConfiguration;
  Params p{};
  p.task = task;
  p.source = act_source(task);
  p.columns = static_cast<int>(task.columns);
  p.parts = (p.columns + kPart - 1) / kPart;
  p.fold_lanes = task.fold / kEach;
  const dim3 grid(static_cast<unsigned>(task.m), static_cast<unsigned>(std::min(p.parts, kMostParts)));
  return launch_dependent(fixed_point_acts_kernel, grid, dim3(kThreads), 0, stream, p);
}

}  // namespace nibble::cuda
