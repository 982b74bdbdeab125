// Sorting rows by expert, gathering them, and adding up the results of a token's experts.
//
//   sort      CTAs of up to 32 warps; warp w has the pairs of its run, W runs in all, 32 pairs at a time
//
//     pairs         │  run of warp 0   │  run of warp 1   │ …
//     count         counts[w][e]: the pairs of expert e in the run
//     add           over the warps of an expert, then over experts: begin[w][e], where the run's first pair of e goes
//     place         the run once more: a pair goes to begin[w][e], plus its rank among the lanes of that expert
//
//     One CTA sorts up to 2048 pairs. Of more, whose places one multiprocessor would take long to write, a launch before counts the pairs of each
//     CTA's runs, and every CTA adds up the counts of all.
//
//   up to 32      one warp, a lane a pair: device/sort_few.cuh
//
//   Each place depends on ids alone, not on the order in which threads run: equal ids stay in the order of pairs.
#include "kernels/cuda/steps/experts.hpp"

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/device/sort_few.cuh"

namespace nibble::cuda {
namespace {

// ---- sort

constexpr int kSortThreads = kMostExperts;  // a thread sums an expert's counts
constexpr int kSortWarps = kSortThreads / 32;

/// The inclusive sum of a value per thread over the CTA, and the sum of all. `sums` holds an integer a warp; all threads call it.
struct Scanned {
  int end, all;
};
__device__ __forceinline__ int scan_warp(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_sync(kWholeWarp, value, max(lane - step, 0));
    if (lane >= step) value += before;
  }
  return value;
}
__device__ Scanned scan(int value, int* sums) {
  static_assert(kSortWarps <= 32);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  value = scan_warp(value, lane);
  if (lane == 31) sums[warp] = value;
  __syncthreads();
  const int warps = scan_warp(lane < kSortWarps ? sums[lane] : 0, lane);
  const int before = __shfl_sync(kWholeWarp, warps, max(warp - 1, 0)), all = __shfl_sync(kWholeWarp, warps, 31);
  __syncthreads();  // sums may be written again
  return {warp == 0 ? value : value + before, all};
}

struct SortParams {
  SortTask task;
  int ctas;    // that have pairs
  int warps;   // of a CTA
  int run;     // pairs of a warp, a multiple of 32
  bool dense;  // ids follow one another
};

__device__ __forceinline__ int id_of(const SortParams& p, int pair) {
  return p.dense ? expert_at(p.task, pair) : expert_of_pair(p.task, pair);
}

/// Calls use(pair, whether it exists, id, rank among the lanes of that id, how many these are) for the pairs of a run, 32 at a time. Four times
/// as many are loaded at once, to hide the latency of memory.
template <class Use>
__device__ __forceinline__ void for_each_pair(const SortParams& p, Use use) {
  constexpr int kAhead = 4;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (warp >= p.warps) return;
  const int begin = (static_cast<int>(blockIdx.x) * p.warps + warp) * p.run, end = min(begin + p.run, p.task.rows);
#pragma unroll 1
  for (int first = begin; first < end; first += 32 * kAhead) {
    int ids[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int pair = first + 32 * i + lane;
      ids[i] = pair < end ? id_of(p, pair) : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int pair = first + 32 * i + lane;
      if (pair - lane >= end) break;
      const unsigned same = __match_any_sync(kWholeWarp, ids[i]);
      use(pair, pair < end, ids[i], __popc(same & ((1u << lane) - 1)), __popc(same));
      __syncwarp();
    }
  }
}

/// Counts the pairs of the CTA's runs: counts[w][e]. Returns those of expert threadIdx.x.
__device__ int count_pairs(const SortParams& p, int* counts) {
  const int e = static_cast<int>(threadIdx.x);
  for (int i = e; i < p.warps * p.task.experts; i += kSortThreads) counts[i] = 0;
  __syncthreads();
  int* const own = counts + e / 32 * p.task.experts;
  for_each_pair(p, [&](int, bool, int id, int rank, int of) {
    if (id >= 0 && rank == 0) own[id] += of;
  });
  __syncthreads();
  int count = 0;
  if (e < p.task.experts)
    for (int w = 0; w < p.warps; ++w) count += counts[w * p.task.experts + e];
  return count;
}

/// Rows of the experts from ids: fills pair_of, row_of and expert_of. Returns the number of rows of expert threadIdx.x, and its first.
__device__ int sort_pairs(const SortParams& p, int* counts, int* sums, int& first) {
  const SortTask& task = p.task;
  const int e = static_cast<int>(threadIdx.x), cta = static_cast<int>(blockIdx.x);
  int count = count_pairs(p, counts), before = 0;  // of all CTAs, of those before this one
  if (p.ctas > 1) {
    count = 0;
#pragma unroll 8
    for (int i = 0; i < p.ctas; ++i) {
      const int others = e < task.experts ? __ldcg(task.run_counts + i * task.experts + e) : 0;
      count += others;
      if (i < cta) before += others;
    }
  }
  const Scanned rows = scan(count, sums);
  first = rows.end - count;
  if (e < task.experts)
    for (int w = 0, at = first + before; w < p.warps; ++w) {
      const int of_warp = counts[w * task.experts + e];
      counts[w * task.experts + e] = at;
      at += of_warp;
    }
  __syncthreads();
  int* const own = counts + e / 32 * task.experts;
  for_each_pair(p, [&](int pair, bool exists, int id, int rank, int of) {
    if (id >= 0) {
      const int row = own[id] + rank;
      task.pair_of[row] = pair;
      task.expert_of[row] = id;
      task.row_of[pair] = row;
    } else if (exists) {
      task.row_of[pair] = -1;
    }
    __syncwarp();
    if (id >= 0 && rank == 0) own[id] += of;
  });
  if (cta == 0)
    for (int row = rows.all + e; row < task.rows; row += kSortThreads) task.pair_of[row] = 0, task.expert_of[row] = -1;
  return count;
}

/// The same where rows are sorted already: fills expert_of. `first` becomes the first row of expert threadIdx.x.
__device__ int given_rows(const SortTask& task, int* firsts, int& first) {
  const int e = static_cast<int>(threadIdx.x);
  int count = 0;
  if (e < task.experts && task.counts != nullptr) {
    first = e * task.pitch;
    count = min(max(__ldcg(task.counts + e * task.given_stride), 0), task.pitch);
  } else if (e < task.experts) {
    first = min(max(__ldcg(task.offsets + e * task.given_stride), 0), task.rows);
    count = max(min(__ldcg(task.offsets + (e + 1) * task.given_stride), task.rows) - first, 0);
  }
  firsts[e] = first;
  int* const counts = firsts + kSortThreads;
  counts[e] = count;
  __syncthreads();
  for (int row = e; row < task.rows; row += kSortThreads) {
    int low = 0, high = task.experts;  // the last expert that begins at the row or before it
    while (low + 1 < high) {
      const int middle = (low + high) / 2;
      (firsts[middle] <= row ? low : high) = middle;
    }
    task.expert_of[row] = row >= firsts[low] && row < firsts[low] + counts[low] ? low : -1;
  }
  __syncthreads();
  return count;
}

__global__ void __launch_bounds__(kSortThreads) count_pairs_kernel(const __grid_constant__ SortParams p) {
  extern __shared__ int sort_memory[];
  wait_for_predecessor();
  const int count = count_pairs(p, sort_memory), e = static_cast<int>(threadIdx.x);
  if (e < p.task.experts) p.task.run_counts[static_cast<int>(blockIdx.x) * p.task.experts + e] = count;
}

__global__ void __launch_bounds__(kSortThreads) sort_rows_kernel(const __grid_constant__ SortParams p) {
  extern __shared__ int sort_memory[];  // sums, then counts, or where experts begin and their counts
  int* const sums = sort_memory;
  wait_for_predecessor();
  const int e = static_cast<int>(threadIdx.x);
  int first = 0, count = 0;
  if (p.task.ids != nullptr) {
    count = sort_pairs(p, sort_memory + kSortThreads, sums, first);
  } else {
    count = given_rows(p.task, sums, first);
  }
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const SortTask::Tiles& product = p.task.products[i];
    if (product.rows == 0 || blockIdx.x != 0) continue;  // one CTA has the tiles of all
    const int tiles = (count + product.rows - 1) / product.rows;
    const auto [end, all] = scan(tiles, sums);
    for (int t = 0; t < tiles; ++t)
      product.tiles[end - tiles + t] = {e, first + t * product.rows, min(product.rows, count - t * product.rows)};
    if (e == 0) *product.count = {all, 0};
  }
  // The kernels that follow start when tiles can be read, and products begin with weights while their rows are still gathered.
  __threadfence();
  __syncthreads();
  let_successor_start();
}

__global__ void __launch_bounds__(32) sort_few_rows_kernel(const __grid_constant__ SortTask task) {
  const int lane = static_cast<int>(threadIdx.x);
  wait_for_predecessor();
  write_sorted(task, sort_few(lane < task.rows ? expert_of_pair(task, lane) : -1));
  __threadfence();  // as in sort_rows_kernel
  __syncwarp();
  let_successor_start();
}

// ---- gather

constexpr int kGatherThreads = 128;
constexpr int kPositions = 8;  // of a thread

__device__ __forceinline__ std::uint16_t half_bits(DType type, float x) {
  if (type == DType::f16) {
    const __half v = __float2half_rn(x);
    return reinterpret_cast<const std::uint16_t&>(v);
  }
  const __nv_bfloat16 v = __float2bfloat16_rn(x);
  return reinterpret_cast<const std::uint16_t&>(v);
}

/// Whether positions from `k` on are copied as they are.
__device__ __forceinline__ bool is_copied(const GatherRowsTask& p, int k) {
  const int bytes = p.type == DType::f32 ? 4 : 2;
  return p.perm == nullptr && p.prescale == nullptr && k + kPositions <= p.columns &&
         reinterpret_cast<std::uintptr_t>(p.from) % 16 == 0 && p.from_stride * bytes % 16 == 0;
}
__device__ __forceinline__ bool is_row(const GatherRowsTask& p, int expert, std::int64_t from) {
  return expert >= 0 && from >= 0 && from < p.sources;
}

/// Eight positions of a row from `k` on, as they are or one by one.
__device__ __forceinline__ void gather_eight(const GatherRowsTask& p, std::int64_t row, int expert, std::int64_t from, int k) {
  const bool exists = is_row(p, expert, from), halves = p.type != DType::f32;
  const int bytes = halves ? 2 : 4;
  const auto* const x = static_cast<const std::uint8_t*>(p.from) + (exists ? from * p.from_stride : 0) * bytes;
  auto* const to = reinterpret_cast<uint4*>(static_cast<std::uint8_t*>(p.to) + (row * p.to_stride + k) * bytes);
  if (!exists || is_copied(p, k)) {
    const auto* const vectors = reinterpret_cast<const uint4*>(x + k * bytes);
    to[0] = exists ? vectors[0] : uint4{};
    if (!halves) to[1] = exists ? vectors[1] : uint4{};
    return;
  }
  const std::int64_t parameters = expert * p.parameter_pitch;
#pragma unroll 1
  for (int i = 0; i < kPositions; ++i) {
    float v = 0.0f;
    if (k + i < p.columns) {
      const int channel = p.perm == nullptr ? k + i : __ldg(p.perm + parameters + k + i);
      v = load_float(x, channel, p.type);
      if (p.prescale != nullptr) v = epilogue::multiply(v, __ldg(p.prescale + parameters + channel));
    }
    if (halves)
      reinterpret_cast<std::uint16_t*>(to)[i] = half_bits(p.type, v);
    else
      reinterpret_cast<float*>(to)[i] = v;
  }
}

/// Where rows come from is loaded for four rows at once, and so are those of 16 bits that are copied.
__global__ void __launch_bounds__(kGatherThreads) gather_rows_kernel(const __grid_constant__ GatherRowsTask p) {
  constexpr int kRows = 4;
  wait_for_predecessor();
  let_successor_start();  // only now, so that tiles can be read when the product starts
  const int k = static_cast<int>(blockIdx.x * kGatherThreads + threadIdx.x) * kPositions;
  if (k >= p.to_stride) return;
  const bool halves_as_they_are = p.type != DType::f32 && is_copied(p, k);
#pragma unroll 1
  for (std::int64_t first = std::int64_t{blockIdx.y} * kRows; first < p.rows; first += std::int64_t{gridDim.y} * kRows) {
    int expert[kRows];
    std::int64_t from[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const std::int64_t row = min(first + i, p.rows - 1);
      expert[i] = __ldcg(p.expert_of + row);
      from[i] = p.source == nullptr ? row : __ldcg(p.source + row * p.source_stride) / p.divisor;
    }
    if (halves_as_they_are) {
      uint4 x[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        x[i] = {};
        if (!is_row(p, expert[i], from[i])) continue;
        x[i] = __ldcg(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p.from) + from[i] * p.from_stride + k));
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (first + i < p.rows)
          *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.to) + (first + i) * p.to_stride + k) = x[i];
      continue;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (first + i < p.rows) gather_eight(p, first + i, expert[i], from[i], k);
  }
}

// ---- combine

constexpr int kCombineThreads = 128;
constexpr int kColumns = 8;  // of a thread
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kVectorCtas = 5;  // of an SM: six would spill registers
#else
constexpr int kVectorCtas = 6;
#endif

/// Eight results of a row, as they lie in memory: conversions would wait for each load before the next one.
template <DType kType>
struct Results {
  using Number = std::conditional_t<kType == DType::f32, std::uint32_t, std::uint16_t>;
  static constexpr int kWords = kColumns * static_cast<int>(sizeof(Number)) / 4;
  std::uint32_t word[kWords] = {};

  __device__ void load(const void* results, std::int64_t at) {
    const auto* const from = reinterpret_cast<const uint4*>(static_cast<const Number*>(results) + at);
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = __ldcg(from + i / 4);
      word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
    }
  }
  /// The first `count` of them, wherever they begin.
  __device__ void load_some(const void* results, std::int64_t at, int count) {
    const Number* const from = static_cast<const Number*>(results) + at;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (c < count) word[c * kWords / kColumns] |= std::uint32_t{__ldcg(from + c)} << c * 8 * sizeof(Number) % 32;
  }
  __device__ float operator[](int c) const {
    return kType == DType::f32 ? __uint_as_float(word[c * kWords / kColumns])
                               : half_of(word[c * kWords / kColumns], c % 2, kType);
  }
};

/// Eight results of a token are loaded at once, and added one after the other, while the next ones' rows and weights are on their way. kVectors: they are
/// whole vectors of 16-bit floats without a bias, for which fewer registers do, so that more CTAs have loads in flight.
template <DType kType, bool kVectors>
__global__ void __launch_bounds__(kCombineThreads, kVectors ? kVectorCtas : 1)
    combine_rows_kernel(const __grid_constant__ CombineTask p) {
  constexpr int kResults = 8;
  let_successor_start();
  const int n = static_cast<int>(blockIdx.x * kCombineThreads + threadIdx.x) * kColumns;
  if (n >= p.n) return;
  // Rows and weights of a token were in memory before the products began, so that the first ones need no waiting for their end.
  int row[kResults];
  float weight[kResults];
  const auto load = [&](int t, int first) {
#pragma unroll
    for (int i = 0; i < kResults; ++i) {
      const int j = first + i;
      row[i] = j < p.top_k ? __ldcg(p.row_of + t * p.top_k + j) : -1;
      weight[i] = j < p.top_k ? __ldcg(p.weights + t * p.token_stride + j * p.choice_stride) : 0.0f;
    }
  };
  load(static_cast<int>(blockIdx.y), 0);
  wait_for_predecessor();
  const bool whole = kVectors || n + kColumns <= p.n;
  const bool vectors = kVectors || (whole && p.n % (kType == DType::f32 ? 4 : 8) == 0);
#pragma unroll 1
  for (int t = static_cast<int>(blockIdx.y); t < p.tokens; t += static_cast<int>(gridDim.y)) {
    float sum[kColumns] = {};
#pragma unroll 1
    for (int first = 0; first < p.top_k; first += kResults) {
      Results<kType> result[kResults];
      int of_row[kResults];
      float factor[kResults];
#pragma unroll
      for (int i = 0; i < kResults; ++i) {
        of_row[i] = row[i], factor[i] = row[i] < 0 ? 0.0f : weight[i];
        if (row[i] < 0) continue;
        const std::int64_t at = static_cast<std::int64_t>(row[i]) * p.n + n;
        vectors ? result[i].load(p.results, at) : result[i].load_some(p.results, at, p.n - n);
      }
      const bool more = first + kResults < p.top_k;
      if (const int next = more ? t : t + static_cast<int>(gridDim.y); next < p.tokens) load(next, more ? first + kResults : 0);
#pragma unroll
      for (int i = 0; i < kResults; ++i) {
        if (!kVectors && of_row[i] < 0) continue;  // else what does not exist adds 0 · 0, and no sum is −0
        float v[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) v[c] = result[i][c];
        if (!kVectors && p.bias.data != nullptr) {
          const std::int64_t of = __ldcg(p.expert_of + of_row[i]) * p.bias.stride + n;
#pragma unroll
          for (int c = 0; c < kColumns; ++c)
            if (n + c < p.n) v[c] = epilogue::add(v[c], p.bias.at(of + c));
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[c] = epilogue::add(sum[c], epilogue::multiply(factor[i], v[c]));
      }
    }
    if (whole) {
      p.epilogue.store_eight(t, n, sum);
    } else {
#pragma unroll 1  // the last columns of a row: code counts more than its time
      for (int c = 0; n + c < p.n; ++c) {
        p.epilogue.store(t, n + c, sum[0]);
#pragma unroll
        for (int j = 1; j < kColumns; ++j) sum[j - 1] = sum[j];
      }
    }
  }
}

/// A CTA for each piece of a row, and for rows as many as keep every SM busy.
dim3 pieces_by_rows(std::int64_t columns, int of_a_cta, std::int64_t rows) {
  constexpr std::int64_t kCtas = 2048;  // 16 for each of 128 SMs
  const std::int64_t pieces = (columns + of_a_cta - 1) / of_a_cta;
  return {static_cast<unsigned>(pieces), static_cast<unsigned>(std::clamp<std::int64_t>(kCtas / pieces, 1, rows))};
}

}  // namespace

cudaError_t sort_rows(const SortTask& task, cudaStream_t stream) {
  const int given = (task.ids != nullptr) + (task.offsets != nullptr) + (task.counts != nullptr);
  if (given != 1 || task.experts < 1 || task.experts > kMostExperts || task.rows < 1) return cudaErrorInvalidValue;
  int device = 0, most = 0;
  if (const cudaError_t e = most_shared(device, most)) return e;
  SortParams p{
      .task = task, .ctas = 1, .warps = 0, .run = 0, .dense = task.choice_stride == 1 && task.token_stride == task.top_k};
  if (task.ids != nullptr && task.rows <= kFewPairs)
    return launch_dependent(sort_few_rows_kernel, dim3(1), dim3(32), 0, stream, task);
  if (task.ids != nullptr) p.ctas = sort_ctas(task.rows);
  if (p.ctas > 1 && task.run_counts == nullptr) return cudaErrorInvalidValue;
  const int groups = (task.rows + 31) / 32, fit = (most / 4 - kSortThreads) / task.experts;
  p.warps = std::min({(groups + p.ctas - 1) / p.ctas, kSortWarps, fit});
  p.run = (groups + p.ctas * p.warps - 1) / (p.ctas * p.warps) * 32;
  const int counts = p.warps * task.experts;
  const auto& kernel = kLaunchable<sort_rows_kernel>;
  if (const cudaError_t e = kernel.allow_all_shared()) return e;
  const dim3 grid(static_cast<unsigned>(p.ctas));
  if (p.ctas > 1) {
    const auto& count = kLaunchable<count_pairs_kernel>;
    if (const cudaError_t e = count.allow_all_shared()) return e;
    if (const cudaError_t e = launch_dependent(count.kernel, grid, dim3(kSortThreads), 4 * counts, stream, p)) return e;
  }
  const int smem = 4 * (kSortThreads + (task.ids == nullptr ? kSortThreads : counts));
  return launch_dependent(kernel.kernel, grid, dim3(kSortThreads), smem, stream, p);
}

cudaError_t gather_expert_rows(const GatherRowsTask& task, cudaStream_t stream) {
  if (task.rows < 1 || task.columns < 1 || task.to_stride % kPositions != 0 || task.expert_of == nullptr)
    return cudaErrorInvalidValue;
  return launch_dependent(gather_rows_kernel, pieces_by_rows(task.to_stride, kGatherThreads * kPositions, task.rows),
                          dim3(kGatherThreads), 0, stream, task);
}

cudaError_t combine_rows(const CombineTask& task, cudaStream_t stream) {
  if (task.tokens < 1 || task.n < 1 || task.top_k < 1) return cudaErrorInvalidValue;
  const auto kernel_of = [&task](auto vectors) {
    return task.type == DType::f16    ? combine_rows_kernel<DType::f16, vectors>
           : task.type == DType::bf16 ? combine_rows_kernel<DType::bf16, vectors>
                                      : combine_rows_kernel<DType::f32, false>;
  };
  const bool vectors = task.n % kColumns == 0 && task.bias.data == nullptr;
  const auto kernel = vectors ? kernel_of(std::true_type{}) : kernel_of(std::false_type{});
  return launch_dependent(kernel, pieces_by_rows(task.n, kCombineThreads * kColumns, task.tokens), dim3(kCombineThreads), 0,
                          stream, task);
}

}  // namespace nibble::cuda
