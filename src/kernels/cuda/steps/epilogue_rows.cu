// A CTA takes pieces of rows, a thread kEach elements of each: neighbouring threads take neighbouring elements, and all sums of a thread
// are in flight before it uses the first.
#include "kernels/cuda/steps/epilogue_rows.hpp"

#include <algorithm>
#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;

__global__ void __launch_bounds__(kThreads)
    epilogue_rows_kernel(const __grid_constant__ epilogue::Element epilogue, const float* sums, std::int64_t stride, int n,
                         int pieces, std::int64_t all_pieces) {
  for (std::int64_t piece = blockIdx.x; piece < all_pieces; piece += gridDim.x) {
    const std::int64_t m = piece / pieces;
    const std::int64_t first = piece % pieces * (kThreads * kEach) + threadIdx.x;
    float sum[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const std::int64_t at = first + i * kThreads;
      sum[i] = at < n ? __ldcs(sums + m * stride + at) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const std::int64_t at = first + i * kThreads;
      if (at < n) epilogue.store(m, at, sum[i]);
    }
  }
}

}  // namespace

cudaError_t epilogue_rows(const epilogue::Element& epilogue, const float* sums, std::int64_t m, int n, std::int64_t stride,
                          cudaStream_t stream) {
  const int pieces = static_cast<int>((static_cast<std::int64_t>(n) + kThreads * kEach - 1) / (kThreads * kEach));
  const std::int64_t all_pieces = m * pieces;
  const auto ctas = std::min<std::int64_t>(all_pieces, std::numeric_limits<std::int32_t>::max());
  return launch_after(epilogue_rows_kernel, static_cast<unsigned>(ctas), kThreads, 0, stream, epilogue, sums, stride, n, pieces,
                      all_pieces);
}

}  // namespace nibble::cuda
