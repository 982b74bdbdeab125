// A piece of a row of D per CTA, eight columns side by side per thread: 16 bytes at a time are read, and written where D is aligned.
#include "kernels/cuda/steps/epilogue_rows.hpp"

#include <algorithm>
#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8;  // of a thread

struct Params {
  epilogue::Element epilogue;
  const float* sums;
  std::int64_t stride;
  int n, pieces;
  std::int64_t all_pieces;
  bool vectors;  // rows of sums begin at multiples of 16 bytes
};

/// Columns n … n + 7 of a row of sums. Loads bypass L1, which may hold stale lines: the previous kernel may have written them after this
/// one started.
__device__ __forceinline__ void load(float (&v)[kColumns], const Params& p, std::int64_t row, int n) {
  const float* const from = p.sums + row * p.stride + n;
  if (p.vectors && n + kColumns <= p.n) {
    const float4 low = __ldcg(reinterpret_cast<const float4*>(from)), high = __ldcg(reinterpret_cast<const float4*>(from) + 1);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) v[i] = n + i < p.n ? __ldcg(from + i) : 0.0f;
  }
}

/// kRows: of sums, for a row of D.
template <int kRows>
__global__ void __launch_bounds__(kThreads) epilogue_rows_kernel(const __grid_constant__ Params p) {
  let_successor_start();
  wait_for_predecessor();
  for (std::int64_t piece = blockIdx.x; piece < p.all_pieces; piece += gridDim.x) {
    const std::int64_t m = piece / p.pieces;
    const int n = (static_cast<int>(piece % p.pieces) * kThreads + static_cast<int>(threadIdx.x)) * kColumns;
    if (n >= p.n) continue;
    float rows[kRows][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) load(rows[r], p, m * kRows + r, n);
    float(&sum)[kColumns] = rows[0];
#pragma unroll
    for (int r = 1; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[i] = epilogue::add(sum[i], rows[r][i]);
    if (n + kColumns <= p.n) {
      p.epilogue.store_eight(m, n, sum);
      continue;
    }
#pragma unroll 1  // the last columns of a row: code counts more than its time
    for (int i = 0; n + i < p.n; ++i) {
      p.epilogue.store(m, n + i, sum[0]);
#pragma unroll
      for (int j = 1; j < kColumns; ++j) sum[j - 1] = sum[j];
    }
  }
}

}  // namespace

cudaError_t epilogue_rows(const epilogue::Element& epilogue, const float* sums, int each, std::int64_t m, int n,
                          std::int64_t stride, cudaStream_t stream) {
  if (each != 1 && each != 3) return cudaErrorInvalidValue;
  Params p{};
  p.epilogue = epilogue;
  p.sums = sums;
  p.stride = stride;
  p.n = n;
  p.pieces = static_cast<int>((static_cast<std::int64_t>(n) + kThreads * kColumns - 1) / (kThreads * kColumns));
  p.all_pieces = m * p.pieces;
  p.vectors = stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(sums) % 16 == 0;
  const auto ctas = std::min<std::int64_t>(p.all_pieces, std::numeric_limits<std::int32_t>::max());
  return launch_dependent(each == 1 ? epilogue_rows_kernel<1> : epilogue_rows_kernel<3>, dim3(static_cast<unsigned>(ctas)),
                          dim3(kThreads), 0, stream, p);
}

}  // namespace nibble::cuda
