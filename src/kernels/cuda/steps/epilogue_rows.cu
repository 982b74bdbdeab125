// A piece of a row of D per CTA, eight columns of sums side by side per thread, which 16 bytes at a time are read, and written where D is
// aligned. The x coordinate of the grid counts pieces of a row, the y coordinate rows; where there are more rows than that, a CTA takes
// every so manyth.
#include "kernels/cuda/steps/epilogue_rows.hpp"

#include <algorithm>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/fragment.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 128;  // a row of a few thousand columns is that of many CTAs
constexpr int kCtas = 2048;    // at most, or one for each piece of a row: what 128 multiprocessors run at a time
constexpr int kColumns = 8;    // of a thread
/// CTAs of a multiprocessor, which bound the registers of a thread; 0: as many as the compiler likes. For 12.0 it likes six, and spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kResident = 5;
#else
constexpr int kResident = 0;
#endif

struct Params {
  epilogue::Element epilogue;
  StoredSums sums;
  std::int64_t m;
  int n;
  bool vectors;             // rows of sums, or halves of rows, begin at multiples of 16 bytes
  std::int64_t bias_pitch;  // elements between the biases of experts
};

__device__ __forceinline__ float load_one(const StoredSums& sums, std::int64_t i) {
  if (sums.type == DType::f32) return __ldcg(static_cast<const float*>(sums.data) + i);
  return half_of(__ldcg(static_cast<const std::uint16_t*>(sums.data) + i), 0, sums.type);
}
/// kCount sums side by side, 4 or 8.
template <int kCount>
__device__ __forceinline__ void load_vector(float (&v)[kCount], const StoredSums& sums, std::int64_t i) {
  if (sums.type == DType::f32) {
    const auto* const from = reinterpret_cast<const float4*>(static_cast<const float*>(sums.data) + i);
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      const float4 four = __ldcg(from + j / 4);
      v[j] = four.x, v[j + 1] = four.y, v[j + 2] = four.z, v[j + 3] = four.w;
    }
  } else {
    std::uint32_t word[kCount / 2];
    const std::uint16_t* const from = static_cast<const std::uint16_t*>(sums.data) + i;
    if constexpr (kCount == 8) {
      const uint4 eight = __ldcg(reinterpret_cast<const uint4*>(from));
      word[0] = eight.x, word[1] = eight.y, word[2] = eight.z, word[3] = eight.w;
    } else {
      const uint2 four = __ldcg(reinterpret_cast<const uint2*>(from));
      word[0] = four.x, word[1] = four.y;
    }
    const auto convert = [&](DType type) {  // a constant at both calls
#pragma unroll
      for (int j = 0; j < kCount; ++j) v[j] = half_of(word[j / 2], j % 2, type);
    };
    if (sums.type == DType::f16)
      convert(DType::f16);
    else
      convert(DType::bf16);
  }
}

/// Columns n … n + 7 of a row of sums, of halves the pairs n/2 … n/2 + 3. Loads bypass L1, which may hold stale lines: the previous kernel
/// may have written them after this one started.
__device__ __forceinline__ void load(float (&v)[kColumns], const Params& p, std::int64_t row, int n) {
  if (p.sums.halves) {
    const std::int64_t first = row * p.sums.stride + n / 2, second = first + p.n / 2;
    float one[kColumns / 2], two[kColumns / 2];
    const bool whole = p.vectors && n + kColumns <= p.n;
    if (whole) load_vector(one, p.sums, first), load_vector(two, p.sums, second);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const bool exists = n + 2 * i < p.n;
      v[2 * i] = whole ? one[i] : exists ? load_one(p.sums, first + i) : 0.0f;
      v[2 * i + 1] = whole ? two[i] : exists ? load_one(p.sums, second + i) : 0.0f;
    }
    return;
  }
  const std::int64_t first = row * p.sums.stride + n;
  if (p.vectors && n + kColumns <= p.n) return load_vector(v, p.sums, first);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) v[i] = n + i < p.n ? load_one(p.sums, first + i) : 0.0f;
}

/// kRows: of sums, for a row of D. With one, the sums of a thread's next row are on their way while it finishes this one; three of them would
/// take too many registers. kExperts: a row has the bias of its expert, which is asked for with the row's sums.
template <int kRows, bool kExperts = false>
__global__ void __launch_bounds__(kThreads, kResident) epilogue_rows_kernel(const __grid_constant__ Params p) {
  let_successor_start();
  const int n = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) * kColumns;
  if (n >= p.n) return;
  wait_for_predecessor();
  constexpr bool kAhead = kRows == 1;
  const epilogue::Element& epilogue = p.epilogue;
  float next[kRows][kColumns];
  int next_expert = 0;
  const auto request = [&](std::int64_t m) {
    if (kExperts) next_expert = __ldcg(p.sums.expert_of + m);
#pragma unroll
    for (int r = 0; r < kRows; ++r) load(next[r], p, m * kRows + r, n);
  };
  if (kAhead) request(blockIdx.y);
#pragma unroll 1
  for (std::int64_t m = blockIdx.y; m < p.m; m += gridDim.y) {
    if (!kAhead) request(m);
    float sum[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      sum[i] = next[0][i];
#pragma unroll
      for (int r = 1; r < kRows; ++r) sum[i] = epilogue::add(sum[i], next[r][i]);
    }
    const int expert = next_expert;
    if (kAhead && m + gridDim.y < p.m) request(m + gridDim.y);
    if (kExperts && expert < 0) continue;
    const std::int64_t bias_first = kExperts ? expert * p.bias_pitch : 0;
    if (epilogue.glu_half != 0) {
      if (n + kColumns <= p.n) {
        epilogue.store_four_products(m, n, sum, bias_first);
      } else {
        epilogue.store_products(m, n, {sum[0], sum[1], sum[2], sum[3]}, p.n, bias_first);
        if (n + 4 < p.n) epilogue.store_products(m, n + 4, {sum[4], sum[5], sum[6], sum[7]}, p.n, bias_first);
      }
    } else if (n + kColumns <= p.n) {
      epilogue.store_eight(m, n, sum, bias_first);
    } else {
#pragma unroll 1  // the last columns of a row: code counts more than its time
      for (int i = 0; n + i < p.n; ++i) {
        epilogue.store(m, n + i, sum[0], bias_first);
#pragma unroll
        for (int j = 1; j < kColumns; ++j) sum[j - 1] = sum[j];
      }
    }
  }
}

// ---- a glu of 16-bit sums, and nothing else but a bias: the usual layer
//
// What the kernel above asks for every row, a CTA asks once, so that a row is loads, the function and a store: of experts the others are as
// long as the product.

constexpr int kProducts = 8;  // of a thread: a vector of D

/// Elements i … i + 7 of a bias, which need not be aligned.
__device__ __forceinline__ void load_bias(float (&v)[kProducts], const epilogue::Operand& bias, std::int64_t i) {
  if (bias.type == DType::f32) {
#pragma unroll
    for (int j = 0; j < kProducts; ++j) v[j] = static_cast<const float*>(bias.data)[i + j];
  } else {
#pragma unroll
    for (int j = 0; j < kProducts; ++j) v[j] = bias.at(i + j);
  }
}

template <DType kType>
struct GluRows {
  const Params& p;

  /// Sums of a row: of channels j … j + 7 of both halves, or pairs of them.
  struct Sums {
    uint4 first, second;
  };
  __device__ Sums request(std::int64_t row, int j) const {
    const auto* const sums = static_cast<const std::uint16_t*>(p.sums.data) + row * p.sums.stride;
    const auto at = [sums](int i) { return __ldcg(reinterpret_cast<const uint4*>(sums + i)); };
    return p.sums.halves ? Sums{at(j), at(p.n / 2 + j)} : Sums{at(2 * j), at(2 * j + kProducts)};
  }
  __device__ void convert(const Sums& sums, float (&gates)[kProducts], float (&others)[kProducts]) const {
    const std::uint32_t word[kProducts] = {sums.first.x,  sums.first.y,  sums.first.z,  sums.first.w,
                                           sums.second.x, sums.second.y, sums.second.z, sums.second.w};
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      if (p.sums.halves) {
        gates[i] = half_of(word[i / 2], i % 2, kType);
        others[i] = half_of(word[kProducts / 2 + i / 2], i % 2, kType);
      } else {
        gates[i] = half_of(word[i], 0, kType);
        others[i] = half_of(word[i], 1, kType);
      }
    }
  }
  __device__ static std::uint32_t pair(float low, float high) {
    if constexpr (kType == DType::f16) {
      const __half2 both = __floats2half2_rn(low, high);
      return reinterpret_cast<const std::uint32_t&>(both);
    } else {
      const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
      return reinterpret_cast<const std::uint32_t&>(both);
    }
  }

  /// Rows blockIdx.y, blockIdx.y + gridDim.y, …; the sums of the next one are on their way meanwhile.
  template <class Function>
  __device__ __forceinline__ void run(Function function) const {
    const int j = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) * kProducts;
    if (j >= p.n / 2) return;
    const epilogue::Element& e = p.epilogue;
    const bool of_experts = p.sums.expert_of != nullptr,
               limited = e.glu_limits.limit != epilogue::kInfinity || e.glu_limits.offset != 0;
    const auto expert_of = [&](std::int64_t row) { return of_experts ? __ldcg(p.sums.expert_of + row) : 0; };
    std::int64_t m = blockIdx.y;
    Sums next = request(m, j);
    int next_expert = expert_of(m);
#pragma unroll 1
    for (; m < p.m; m += gridDim.y) {
      float gates[kProducts], others[kProducts];
      convert(next, gates, others);
      const int expert = next_expert;
      if (m + gridDim.y < p.m) next = request(m + gridDim.y, j), next_expert = expert_of(m + gridDim.y);
      if (expert < 0) continue;
      if (e.bias.data != nullptr) {
        float bias[kProducts];
        load_bias(bias, e.bias, expert * p.bias_pitch + j);
#pragma unroll
        for (int i = 0; i < kProducts; ++i) gates[i] = epilogue::add(gates[i], bias[i]);
        load_bias(bias, e.bias, expert * p.bias_pitch + p.n / 2 + j);
#pragma unroll
        for (int i = 0; i < kProducts; ++i) others[i] = epilogue::add(others[i], bias[i]);
      }
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        if (limited) gates[i] = e.glu_limits.gate(gates[i]);
        others[i] = limited ? e.glu_limits.other(others[i]) : epilogue::add(others[i], 0.0f);  // of −0 it is 0 in either case
      }
      std::uint32_t word[kProducts / 2];
#pragma unroll
      for (int i = 0; i < kProducts; i += 2)
        word[i / 2] =
            pair(epilogue::multiply(function(gates[i]), others[i]), epilogue::multiply(function(gates[i + 1]), others[i + 1]));
      *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(e.d) + m * e.d_stride + j) = {word[0], word[1], word[2], word[3]};
    }
  }
};

template <DType kType>
__global__ void __launch_bounds__(kThreads) glu_rows_kernel(const __grid_constant__ Params p) {
  let_successor_start();
  wait_for_predecessor();
  const GluRows<kType> rows{p};
  if (p.epilogue.activation == Activation::silu)
    return rows.run(epilogue::Sigmoid{1.0f, true});  // as with_activation(), of constants
  epilogue::with_activation(p.epilogue, [&](auto function) { rows.run(function); });
}

/// Whether that kernel can finish them.
bool is_glu(const Params& p) {
  const epilogue::Element& e = p.epilogue;
  const bool halves = e.out == p.sums.type && (e.out == DType::f16 || e.out == DType::bf16);
  return halves && p.sums.each == 1 && e.glu_half != 0 && e.glu_half % kProducts == 0 && p.vectors && e.acc_scale == 1.0f &&
         e.unscaled() && e.gate.data == nullptr && e.residual.data == nullptr && e.d_stride % kProducts == 0 &&
         reinterpret_cast<std::uintptr_t>(e.d) % 16 == 0;
}

}  // namespace

cudaError_t epilogue_rows(const epilogue::Element& epilogue, const StoredSums& sums, std::int64_t m, int n, cudaStream_t stream) {
  if ((sums.each != 1 && (sums.each != 3 || sums.expert_of != nullptr)) || m < 1 || n < 1) return cudaErrorInvalidValue;
  Params p{};
  p.epilogue = epilogue;
  p.sums = sums;
  p.m = m;
  p.n = n;
  const std::int64_t bytes = bits(sums.type) / 8, apart = sums.halves ? n / 2 : 0;
  p.vectors = sums.stride * bytes % 16 == 0 && apart * bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(sums.data) % 16 == 0;
  p.bias_pitch = sums.bias_pitch / (bits(epilogue.bias.type) / 8);
  const bool glu = is_glu(p);
  const std::int64_t of_a_cta = kThreads * (glu ? 2 * kProducts : kColumns);
  const std::int64_t pieces = (n + of_a_cta - 1) / of_a_cta;
  const dim3 grid(static_cast<unsigned>(pieces), static_cast<unsigned>(std::clamp<std::int64_t>(kCtas / pieces, 1, m)));
  void (*kernel)(Params) = sums.expert_of != nullptr ? epilogue_rows_kernel<1, true> : epilogue_rows_kernel<1>;
  if (sums.each == 3) kernel = epilogue_rows_kernel<3>;
  if (glu) kernel = epilogue.out == DType::f16 ? glu_rows_kernel<DType::f16> : glu_rows_kernel<DType::bf16>;
  return launch_dependent(kernel, grid, dim3(kThreads), 0, stream, p);
}

}  // namespace nibble::cuda
