// One read of A: a row, or a part of one, stays in registers until its scale is known.
//
//   A ──load──▶ V vectors of 8 activations a thread, unconverted
//                 │ × prescale
//                 ├──▶ range of 8·V ──▶ of a group, by shuffles ──┐
//                 │                └──▶ of a row, by shuffles and shared memory ──▶ rule: scale, inverse, zero ──▶ scales, zeros
//                 │ × prescale                                                       │
//                 └──▶ × inverse, round ◀────────────────────────────────────────────┘ ──▶ codes, Σ codes
//
//   thread t of a team of P has vectors t, t + P, ... of its part: neighbours read and write neighbouring bytes
//   team = the threads of a row where a row has one scale, else of any part of a row
//   CTA  = one team, or several small ones: x counts a team's threads, y teams. Of the grid x counts CTAs of rows, y parts of a row. So no
//        division delays the first loads
//
// Codes of FP8 are numbers of f16, too: for kernels that multiply those they are written as such, after the same rounding.
//
// Codes that are given, with their scales, are a type of A: nothing is looked for or rounded. They become what products with gpu_n64k128
// read, as the codes made here do.
//
// Float offsets without terms, and groups that are no multiple of a vector, go element by element (quantize_blocks.cu).
//
// Rows that do not fit into the registers of a CTA, and groups that no power of two of lanes holds, use the general kernel: a CTA a row,
// segment by segment, each read twice; the second read hits L2.
#include "kernels/cuda/steps/quantize_acts.hpp"

#include <algorithm>
#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/opaque.cuh"
#include "kernels/cuda/steps/quantize_blocks.hpp"
#include "kernels/cuda/steps/quantize_rows.cuh"

namespace nibble::cuda {
namespace {

template <DType kType, int V, QuantizeOutput kOutput, bool kWhole>
__global__ void __launch_bounds__(kRowThreads<kType, V, kWhole>, kRowCtas<kType, V, kOutput, kWhole>)
    quantize_rows_kernel(const __grid_constant__ QuantizeParams given) {
  const QuantizeParams p = known_of<kWhole>(given);
  __shared__ Range ranges[kMaxWarps];
  __shared__ std::int32_t sums[kMaxWarps];
  let_successor_start();
  const Team team;
  const QuantizeTask& t = p.task;
  const std::int64_t own_row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool exists = own_row < t.m;
  const std::int64_t row = exists ? own_row : t.m - 1;  // teams without a row repeat the last row, without writing
  const int step = static_cast<int>(blockDim.x) * kEach;
  const int first = static_cast<int>(blockIdx.y) * V * step + team.thread * kEach;

  wait_for_predecessor();
  Raw<kType> raw[V];
  load(raw, p.source, p.source.place(row), [=](int v) { return first + v * step; });
  // Long rows leave no registers for the places of their vectors, which are computed once more.
  const auto again = [](int place) { return kWhole && V == kLongVectors<kType> ? opaque(place) : place; };
  quantize_row<kType, V, kOutput, kWhole>(raw, p, team, row, exists, again(first), again(step), ranges, sums);
}

// ---- the general kernel

template <DType kType, QuantizeOutput kOutput>
__global__ void __launch_bounds__(kMaxThreads, 1) quantize_segments_kernel(const __grid_constant__ QuantizeParams p) {
  constexpr bool kOffsets = kOutput == QuantizeOutput::offset_terms;
  __shared__ Range ranges[kMaxWarps];
  __shared__ std::int32_t sums[kMaxWarps];
  let_successor_start();
  const Team team;
  const QuantizeTask& t = p.task;
  const std::int64_t row = blockIdx.x;
  const int segment = t.group == 0 || t.group >= p.k ? p.k : static_cast<int>(t.group);
  const int step = static_cast<int>(blockDim.x) * kEach;
  wait_for_predecessor();
  const std::int64_t from = p.source.place(row);
  std::int32_t sum = 0;
#pragma unroll 1
  for (int begin = 0; begin < p.k; begin += segment) {
    const int end = min(begin + segment, p.k);
    Rule rule = p.known;
    if (!t.known) {
      Range range = kOffsets ? Range::nothing() : Range{};
#pragma unroll 1
      for (int channel = begin + team.thread * kEach; channel < end; channel += step) {
        Raw<kType> raw[1];
        load(raw, p.source, from, [=](int) { return channel; });
        range.take(range_of<kOffsets>(raw, p, channel, 0));
      }
      rule = rule_of<kOffsets>(t, team.reduce(range, ranges));
      __syncthreads();  // all threads have read the ranges of the warps
      if (team.thread == 0) store_rule(t, row, begin / segment, rule);
    }
    const int last = end == p.k ? p.columns : end;
#pragma unroll 1
    for (int base = begin; base < last; base += step) {  // uniform over the warp: online vectors are exchanged between neighbours
      const int channel = base + team.thread * kEach;
      Raw<kType> raw[1];
      load(raw, p.source, from, [=](int) { return channel; });
      if constexpr (kIsOnline<kOutput>)
        finish_wna8<kOffsets>(raw[0], p, row, channel, rule, true);
      else if (channel < last)
        sum += finish<kOutput == QuantizeOutput::halves>(raw[0], p, row, channel, rule);
    }
  }
  if (t.sums == nullptr) return;
  sum = team.reduce(sum, sums);
  if (team.thread == 0) t.sums[row * t.sum_row] = sum;
}

// ---- sums of codes that were given without

constexpr int kSumThreads = 256;

struct SumParams {
  const std::uint8_t* codes;
  std::int64_t pitch;
  int k;
  bool words;  // rows begin at whole words
  std::int32_t* sums;
  std::int64_t sum_row;
};
__global__ void __launch_bounds__(kSumThreads) sum_codes_kernel(const __grid_constant__ SumParams p) {
  __shared__ std::int32_t sums[kMaxWarps];
  let_successor_start();
  wait_for_predecessor();
  const Team team;
  const std::uint8_t* const row = p.codes + blockIdx.x * p.pitch;
  const int words = p.words ? p.k / 4 : 0;
  std::int32_t sum = 0;
  for (int i = team.thread; i < words; i += kSumThreads)
    sum = __dp4a(__ldcg(reinterpret_cast<const std::int32_t*>(row) + i), 0x01010101, sum);
  for (int i = words * 4 + team.thread; i < p.k; i += kSumThreads) sum += static_cast<std::int8_t>(__ldcg(row + i));
  sum = team.reduce(sum, sums);
  if (team.thread == 0) p.sums[blockIdx.x * p.sum_row] = sum;
}

// ---- launch

using Kernel = void (*)(QuantizeParams);

struct Kernels {
  Kernel few, many, many_whole, long_whole, segments;
  Kernel many_copies;  // many_whole for QuantizeTask::row_of
  int many_vectors;
};
/// With offsets a thread that has so many vectors has no register left.
template <DType kType, QuantizeOutput kOutput>
constexpr Kernel long_whole() {
  if constexpr (kOutput == QuantizeOutput::offset_terms)
    return nullptr;
  else
    return quantize_rows_kernel<kType, kLongVectors<kType>, kOutput, true>;
}
template <DType kType, QuantizeOutput kOutput>
constexpr Kernel many_copies() {
  if constexpr (kOutput == QuantizeOutput::sums)
    return quantize_rows_kernel<kType, kManyVectors<kType>, QuantizeOutput::copies, true>;
  else
    return nullptr;
}
template <DType kType, QuantizeOutput kOutput>
constexpr Kernels kKernels{quantize_rows_kernel<kType, kFewVectors, kOutput, false>,
                           quantize_rows_kernel<kType, kManyVectors<kType>, kOutput, false>,
                           quantize_rows_kernel<kType, kManyVectors<kType>, kOutput, true>,
                           long_whole<kType, kOutput>(),
                           quantize_segments_kernel<kType, kOutput>,
                           many_copies<kType, kOutput>(),
                           kManyVectors<kType>};
/// A given scale is not looked for, so that parts of a row are independent and any row fits.
template <QuantizeOutput kOutput>
constexpr Kernels kKernels<DType::s8, kOutput>{quantize_rows_kernel<DType::s8, kFewVectors, kOutput, false>,
                                               quantize_rows_kernel<DType::s8, kManyVectors<DType::s8>, kOutput, false>,
                                               quantize_rows_kernel<DType::s8, kManyVectors<DType::s8>, kOutput, true>,
                                               nullptr,
                                               nullptr,
                                               nullptr,
                                               kManyVectors<DType::s8>};
template <QuantizeOutput kOutput>
const Kernels& kernels_for(DType type) {
  if constexpr (kIsOnline<kOutput>)
    if (type == DType::s8) return kKernels<DType::s8, kOutput>;
  if (type == DType::f32) return kKernels<DType::f32, kOutput>;
  return type == DType::f16 ? kKernels<DType::f16, kOutput> : kKernels<DType::bf16, kOutput>;
}

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;  // channels are counted in 32 bits

/// Contiguous rows as a single one: a known scale is the same for all rows, and short rows would leave most threads of a CTA idle.
QuantizeTask one_row(const QuantizeTask& task) {
  const bool one = task.known && task.source == nullptr && task.a_stride == task.k && task.pitch == task.k &&
                   std::max(task.columns, task.k) == task.k && task.perm == nullptr && task.prescale == nullptr &&
                   task.sums == nullptr && task.terms == nullptr &&
                   task.m <= kMost / 4 / task.k;  // parts of a row are counted in 16 bits
  if (!one) return task;
  QuantizeTask row = task;
  row.m = 1;
  row.k = row.columns = row.a_stride = row.pitch = task.m * task.k;
  return row;
}

cudaError_t sum_rows(const void* codes, std::int64_t pitch, std::int64_t m, std::int64_t k, std::int32_t* sums,
                     std::int64_t sum_row, cudaStream_t stream) {
  if (m < 1 || m > std::numeric_limits<std::int32_t>::max() || k > std::numeric_limits<std::int32_t>::max())
    return cudaErrorInvalidValue;
  const SumParams p{static_cast<const std::uint8_t*>(codes), pitch, static_cast<int>(k), aligned(codes, pitch, 4), sums, sum_row};
  return launch_dependent(sum_codes_kernel, static_cast<unsigned>(m), kSumThreads, 0, stream, p);
}

}  // namespace

cudaError_t quantize_acts(const QuantizeTask& rows, cudaStream_t stream) {
  if (rows.offsets != nullptr || (!rows.known && rows.group % kEach != 0)) {
    QuantizeTask blocks = rows;
    blocks.sums = nullptr;
    if (const cudaError_t e = quantize_blocks(blocks, {}, stream)) return e;
    return rows.sums == nullptr ? cudaSuccess : sum_rows(rows.codes, rows.pitch, rows.m, rows.k, rows.sums, rows.sum_row, stream);
  }
  const QuantizeTask task = rows.m < 1 || rows.k < 1 ? rows : one_row(rows);
  const std::int64_t columns = std::max(task.columns, task.k);
  if (task.m < 1 || task.k < 1 || columns > kMost || task.group < 0) return cudaErrorInvalidValue;
  if (task.m > kMost) return cudaErrorInvalidConfiguration;
  int device = 0, sms = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;

  QuantizeParams p = params_of(task);
  const bool whole = task.prescale == nullptr && task.perm == nullptr && p.source.vector_loads && p.vector_stores &&
                     p.k % kEach == 0 && p.columns == p.k;
  const bool online = task.terms != nullptr, given = task.type == DType::s8;
  if (given && (!online || task.prescale != nullptr || task.source != nullptr)) return cudaErrorInvalidValue;
  if (online && (task.fold < 1 || columns % task.fold != 0 || task.codes_type != DType::s8 || task.sums != nullptr ||
                 (task.term_offsets && (!task.term_pairs || task.known))))
    return cudaErrorInvalidValue;
  if (task.halves != nullptr && (online || task.codes_type != DType::e4m3 || task.sums != nullptr || columns % kEach != 0 ||
                                 !aligned(task.halves, task.pitch * 2, 16)))
    return cudaErrorInvalidValue;
  const Kernels& kernels = task.halves != nullptr ? kernels_for<QuantizeOutput::halves>(task.type)
                           : !online              ? kernels_for<QuantizeOutput::sums>(task.type)
                           : task.term_offsets    ? kernels_for<QuantizeOutput::offset_terms>(task.type)
                                                  : kernels_for<QuantizeOutput::terms>(task.type);

  const int vectors = (p.columns + kEach - 1) / kEach;
  const bool known = task.known || given;  // no scale is looked for; several: a row has more than one
  const bool several = !task.known && task.group != 0 && task.group < task.k, grouped = several && !given;
  const bool fits = lanes_fit(task, kFewestGroupLanes);
  const bool divisible = (grouped || known) && task.sums == nullptr;  // parts of a row are independent

  constexpr int kPartThreads = 256, kLeastThreads = 128;  // of a part of a divisible row; of a CTA with many rows
  constexpr int kMostParts = 65535;                       // of a grid's second dimension
  const bool many = task.m * vectors > std::int64_t{kMaxThreads} * sms;
  // With a known scale threads exchange nothing: teams of short rows are parts of a warp.
  const int lanes = task.known && divisible && !online ? 1 : 32;
  const auto threads_for = [&](int each) { return ((vectors + each - 1) / each + lanes - 1) / lanes * lanes; };
  const bool row_of_a_cta = whole && !grouped && !divisible && kernels.long_whole != nullptr;
  if (row_of_a_cta && threads_for(kernels.many_vectors) > (many ? kWholeThreads : kMaxThreads) &&
      threads_for(2 * kernels.many_vectors) <= kMaxThreads)
    return launch_dependent(kernels.long_whole, static_cast<unsigned>(task.m),
                            static_cast<unsigned>(threads_for(2 * kernels.many_vectors)), 0, stream, p);
  const bool copies = many && !known && task.row_of != nullptr && task.sums == nullptr && kernels.many_copies != nullptr;
  for (const int each : {many ? kernels.many_vectors : kFewVectors, kernels.many_vectors, kFewVectors}) {
    const int wanted = threads_for(each);
    if (!fits || (wanted > kMaxThreads && !divisible) || (grouped && each > p.group_lanes)) continue;
    const int team = divisible ? std::min(wanted, kPartThreads) : wanted;
    const int parts = (vectors + team * each - 1) / (team * each), teams = many ? std::max(1, kLeastThreads / team) : 1;
    if (parts > kMostParts) return cudaErrorInvalidConfiguration;
    const bool has_group_zeros = grouped && task.zero_points && !online;  // which kernels of whole rows do not have
    const bool usual = whole && team * teams <= kWholeThreads && !has_group_zeros;
    Kernel kernel = each == kFewVectors ? kernels.few : usual ? kernels.many_whole : kernels.many;
    if (copies && kernel == kernels.many_whole) {  // a token whose codes go to several rows is quantized once
      kernel = kernels.many_copies;
      p.task.m /= task.divisor;
      p.source.source = nullptr;
    }
    const dim3 grid(static_cast<unsigned>((p.task.m + teams - 1) / teams), static_cast<unsigned>(parts));
    const dim3 block(static_cast<unsigned>(team), static_cast<unsigned>(teams));
    return launch_dependent(kernel, grid, block, 0, stream, p);
  }
  if (online && several) return cudaErrorInvalidValue;  // groups of online quantization always fit lanes
  const std::int64_t segment = grouped ? task.group : columns;
  const int threads = static_cast<int>(std::min<std::int64_t>((segment / kEach + 31) / 32 * 32, kMaxThreads));
  return launch_dependent(kernels.segments, static_cast<unsigned>(task.m), static_cast<unsigned>(std::max(threads, 32)), 0,
                          stream, p);
}

cudaError_t sum_codes(const void* codes, std::int64_t pitch, std::int64_t m, std::int64_t k, std::int32_t* sums,
                      cudaStream_t stream) {
  return sum_rows(codes, pitch, m, k, sums, 1, stream);
}

}  // namespace nibble::cuda
