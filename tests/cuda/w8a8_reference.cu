#include "w8a8_reference.hpp"

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>

#include "timing.hpp"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;

/// Calls f(i) for all i below count.
template <class F>
__global__ void for_all_kernel(std::int64_t count, F f) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) f(i);
}
template <class F>
void for_all(std::int64_t count, F f) {
  constexpr std::int64_t kMostBlocks = 1 << 16;
  const auto blocks = static_cast<unsigned>(std::clamp<std::int64_t>((count + kThreads - 1) / kThreads, 1, kMostBlocks));
  for_all_kernel<<<blocks, kThreads>>>(count, f);
  REQUIRE(cudaGetLastError());
}

// ---- numbers

/// Number i of a seed: 32 bits of a mixed counter.
__device__ std::uint32_t random_word(std::uint32_t seed, std::int64_t i) {
  std::uint64_t x = (std::uint64_t{seed} << 40) + static_cast<std::uint64_t>(i);
  for (int round = 0; round < 2; ++round) x = (x ^ (x >> 29)) * 0x9e3779b97f4a7c15ull;
  return static_cast<std::uint32_t>(x >> 32);
}
/// In (0, 1).
__device__ float uniform(std::uint32_t seed, std::int64_t i) {
  return (static_cast<float>(random_word(seed, i) >> 9) + 0.5f) * 0x1p-23f;
}
__device__ float normal(std::uint32_t seed, std::int64_t i) {
  return sqrtf(-2.0f * logf(uniform(seed, 2 * i))) * cospif(2.0f * uniform(seed, 2 * i + 1));
}

__device__ double from_e4m3(std::uint8_t code) {
  return __half2float(static_cast<__half>(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

// ---- the formula

__device__ double act_scale_of(const QuantizedActs& a, std::int64_t m, std::int64_t group) {
  return a.scales == nullptr ? a.scale : a.scales[m * a.scale_row + group * a.scale_group];
}

__device__ float integer_output(const W8A8Task& t, const std::int8_t* w, std::int64_t m, std::int64_t n) {
  const std::int64_t k = t.weight.geometry.k;
  const std::int8_t* a = static_cast<const std::int8_t*>(t.acts.codes) + m * t.acts.pitch;
  const int a_zero = t.acts.zeros == nullptr ? t.acts.zero : t.acts.zeros[m * t.acts.zero_row];
  const int w_zero = t.weight.zeros() == nullptr ? 0 : t.weight.zeros()[n];
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < k; ++i) sum += (a[i] - a_zero) * (w[n * k + i] - w_zero);
  const float scaled = __fmul_rn(__ll2float_rn(sum), static_cast<float>(act_scale_of(t.acts, m, 0)));
  return __fmul_rn(scaled, t.weight.scales()[n]);
}

/// In f64, where rounding does not matter.
__device__ double2 float_output(const W8A8Task& t, const std::uint8_t* w, std::int64_t m, std::int64_t n) {
  const gpu_w8::Geometry& geo = t.weight.geometry;
  const std::uint8_t* a = static_cast<const std::uint8_t*>(t.acts.codes) + m * t.acts.pitch;
  double sum = 0, squares = 0;
  for (std::int64_t i = 0; i < geo.k; ++i) {
    const std::int64_t group = i / gpu_w8::kChannels;
    const double s_a = act_scale_of(t.acts, m, t.acts.group == 0 ? 0 : group);
    const double s_w = t.weight.scales()[geo.block_rows == 0 ? n : n / geo.block_rows * geo.records() + group];
    const double product = s_a * s_w * from_e4m3(a[i]) * from_e4m3(w[n * geo.k + i]);
    sum += product;
    squares += product * product;
  }
  return {sum, sqrt(squares)};
}

// ---- comparison

__device__ void note(Difference* found, std::int64_t at) {
  atomicAdd(&found->count, 1ull);
  atomicMin(&found->first, static_cast<unsigned long long>(at));
}

/// Whether D[m,n], element i, is within its bound.
__device__ bool as_expected(const W8A8Task& t, std::int64_t i, float value, float spread, const Bound& bound) {
  const bool wide = t.epilogue.out == DType::f32;
  const __half half = wide ? __half() : static_cast<const __half*>(t.epilogue.d)[i];
  const float got = wide ? static_cast<const float*>(t.epilogue.d)[i] : __half2float(half);
  if (bound.spread == 0 && wide) return __float_as_uint(got) == __float_as_uint(value);
  if (bound.spread == 0) return __half_as_ushort(half) == __half_as_ushort(__float2half_rn(value));
  const double error = fabs(static_cast<double>(got) - value);
  return error <= double{bound.spread} * spread + double{bound.relative} * fabs(value) + bound.absolute;  // false for a NaN
}
__device__ bool untouched(const W8A8Task& t, std::int64_t i) {
  return t.epilogue.out == DType::f32 ? static_cast<const std::uint32_t*>(t.epilogue.d)[i] == ~0u
                                      : static_cast<const std::uint16_t*>(t.epilogue.d)[i] == 0xffff;
}

}  // namespace

void fill_codes(void* codes, std::int64_t count, bool integers, std::uint32_t seed) {
  auto* const to = static_cast<std::uint8_t*>(codes);
  for_all(count, [=] __device__(std::int64_t i) {
    const float x = normal(seed, i);
    to[i] = integers ? static_cast<std::uint8_t>(min(max(__float2int_rn(32.0f * x), -128), 127))
                     : __nv_cvt_float_to_fp8(60.0f * x, __NV_SATFINITE, __NV_E4M3);
  });
}

void fill_scales(float* scales, std::int64_t count, float around, std::uint32_t seed) {
  for_all(count, [=] __device__(std::int64_t i) { scales[i] = around * (0.5f + uniform(seed, i)); });
}

void fill_zeros(std::int32_t* zeros, std::int64_t count, std::uint32_t seed) {
  for_all(count, [=] __device__(std::int64_t i) { zeros[i] = static_cast<std::int32_t>(random_word(seed, i) % 256) - 128; });
}

void sum_codes(const void* codes, std::int64_t pitch, std::int64_t rows, std::int64_t k, std::int32_t* sums) {
  const auto* const from = static_cast<const std::int8_t*>(codes);
  for_all(rows, [=] __device__(std::int64_t row) {
    std::int32_t sum = 0;
    for (std::int64_t i = 0; i < k; ++i) sum += from[row * pitch + i];
    sums[row] = sum;
  });
}

void pack_codes(const void* codes, const gpu_w8::Geometry& geometry, std::byte* weight) {
  const auto* const from = static_cast<const std::uint8_t*>(codes);
  const gpu_w8::Geometry geo = geometry;
  const std::int64_t columns = std::int64_t{geo.records()} * gpu_w8::kChannels;
  for_all(geo.padded_rows() * columns, [=] __device__(std::int64_t i) {
    const std::int64_t n = i / columns, k = i % columns;
    const std::int64_t record = geo.record(static_cast<int>(n / gpu_w8::kRows), static_cast<int>(k / gpu_w8::kChannels));
    const int place = gpu_w8::place(static_cast<int>(n % gpu_w8::kRows), static_cast<int>(k % gpu_w8::kChannels));
    weight[record + place] = n < geo.n && k < geo.k ? std::byte{from[n * geo.k + k]} : std::byte{0};
  });
}

void multiply_codes(const W8A8Task& task, const void* codes, const Expected& expected) {
  const W8A8Task t = task;
  const Expected to = expected;
  const auto* const bias = static_cast<const float*>(t.epilogue.bias.data);
  for_all(t.m * t.weight.geometry.n, [=] __device__(std::int64_t i) {
    const std::int64_t m = i / t.weight.geometry.n, n = i % t.weight.geometry.n;
    const float b = bias == nullptr ? -0.0f : bias[n];
    if (t.weight.geometry.integers) {
      to.value[i] = __fadd_rn(integer_output(t, static_cast<const std::int8_t*>(codes), m, n), b);
      return;
    }
    const double2 output = float_output(t, static_cast<const std::uint8_t*>(codes), m, n);
    to.value[i] = static_cast<float>(output.x + b);
    to.spread[i] = static_cast<float>(output.y);
  });
}

void compare(const W8A8Task& task, const Expected& expected, const Bound& bound, Difference* found) {
  const W8A8Task t = task;
  const Expected want = expected;
  const Bound allowed = bound;
  const std::int64_t n = t.weight.geometry.n;
  for_all((std::int64_t{t.m} + 1) * t.epilogue.d_stride, [=] __device__(std::int64_t i) {
    const std::int64_t row = i / t.epilogue.d_stride, column = i % t.epilogue.d_stride, at = row * n + column;
    const bool inside = row < t.m && column < n;
    const float spread = inside && want.spread != nullptr ? want.spread[at] : 0.0f;
    if (!(inside ? as_expected(t, i, want.value[at], spread, allowed) : untouched(t, i))) note(found, i);
  });
}

void compare_words(const void* a, const void* b, std::int64_t words, Difference* found) {
  const auto *const x = static_cast<const std::uint32_t*>(a), *const y = static_cast<const std::uint32_t*>(b);
  for_all(words, [=] __device__(std::int64_t i) {
    if (x[i] != y[i]) note(found, i);
  });
}

}  // namespace nibble::cuda
