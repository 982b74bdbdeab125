// A team of whole warps takes one block of one row, element by element: neighbouring lanes have neighbouring channels.
//
//   range   low, high and whether all are finite: a lane's elements, then shuffles, then the team's warps through shared memory
//   rule    act_rule.hpp, the same functions as on the host; every thread of the team computes it
//   codes   the elements once more, from L2; the team of a row's last block also writes the zeros behind K
//
// A matrix row lies in memory as it is. A patch's row does not: the place of its channel k follows from k by two divisions, and what is
// outside of the image is the number 0, which takes part in the range of a patch as any other.
#include "kernels/cuda/steps/quantize_blocks.hpp"

#include <algorithm>
#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/fragment.cuh"
#include "quantize/act_rule.hpp"

namespace nibble::cuda {
namespace {

constexpr int kBlockThreads = 256;  // of a CTA: a team, or several of one warp
constexpr int kLongBlock = 1024;    // channels from which a team is the whole CTA: 4 elements a thread
constexpr int kBlockWarps = kBlockThreads / 32;
constexpr std::uint32_t kEveryLane = 0xffffffffu;

struct BlockParams {
  QuantizeTask task;
  PatchRows rows;
  act_rule::Rule known;
  int k, columns, block, blocks;  // blocks of a row
  std::int64_t teams;
};

/// Where a row's channels are.
struct RowOfMatrix {
  std::int64_t first;
  __device__ RowOfMatrix(const BlockParams& p, std::int64_t row)
      : first((p.task.source == nullptr ? row : __ldcg(p.task.source + row) / p.task.divisor) * p.task.a_stride) {}
  __device__ std::int64_t at(const BlockParams& p, int k) const {
    return first + (p.task.perm == nullptr ? k : __ldg(p.task.perm + k));
  }
};
struct RowOfPatch {
  Corner from;
  int group;
  __device__ RowOfPatch(const BlockParams& p, std::int64_t row)
      : from(corner(p.rows.patches, p.rows.first + static_cast<int>(row / p.rows.patches.groups))),
        group(static_cast<int>(row % p.rows.patches.groups)) {}
  /// Negative: padding.
  __device__ std::int64_t at(const BlockParams& p, int k) const {
    const Patches& patches = p.rows.patches;
    const PatchChannel channel = patch_channel(patches, k);
    const int pixel = pixel_under(patches, {0, from.h, from.w}, channel);
    if (pixel < 0) return -1;
    return from.image * p.rows.a.image + pixel * p.rows.a.pixel + (group * patches.channels + channel.c) * p.rows.a.channel;
  }
};

/// Loads bypass L1: the previous kernel may have written A after this one started.
__device__ __forceinline__ float load_activation(const void* a, std::int64_t at, DType type) {
  if (type == DType::f32) return __ldcg(static_cast<const float*>(a) + at);
  return half_of(__ldcg(static_cast<const std::uint16_t*>(a) + at), 0, type);
}
template <class Row>
__device__ __forceinline__ float activation(const BlockParams& p, const Row& row, int k) {
  const QuantizeTask& t = p.task;
  const std::int64_t at = row.at(p, k);
  const float x = at < 0 ? 0.0f : load_activation(t.a, at, t.type);
  if (t.prescale == nullptr) return x;
  return act_rule::multiply(x, __ldg(t.prescale + (t.perm == nullptr ? k : __ldg(t.perm + k))));
}

struct BlockRange {
  float low, high;
  bool finite = true;

  __device__ void take(const BlockRange& other) {
    low = fminf(low, other.low), high = fmaxf(high, other.high), finite = finite && other.finite;
  }
  __device__ BlockRange over_warp() const {
    BlockRange all = *this;
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      all.take({__shfl_xor_sync(kEveryLane, all.low, step), __shfl_xor_sync(kEveryLane, all.high, step),
                __shfl_xor_sync(kEveryLane, static_cast<int>(all.finite), step) != 0});
    return all;
  }
};

__device__ __forceinline__ act_rule::Rule rule_of(const QuantizeTask& t, const BlockRange& range) {
  const float low = fminf(fmaxf(range.low, -t.limit), t.limit), high = fminf(fmaxf(range.high, -t.limit), t.limit);
  const float top = range.finite ? high : act_rule::kNan;
  if (t.offsets != nullptr) return act_rule::with_offset(low, top);
  if (t.zero_points) return act_rule::asymmetric(low, top);
  const float reach = t.codes_type == DType::e4m3 ? act_rule::kE4m3Max : 127.0f;
  return act_rule::symmetric(range.finite ? fmaxf(-low, high) : top, reach);
}

template <class Row>
__global__ void __launch_bounds__(kBlockThreads) quantize_blocks_kernel(const __grid_constant__ BlockParams p) {
  __shared__ BlockRange ranges[kBlockWarps];
  let_successor_start();
  const QuantizeTask& t = p.task;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const std::int64_t own = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool exists = own < p.teams;
  const std::int64_t team = exists ? own : p.teams - 1;  // without a block of its own it repeats the last one, without writing
  const std::int64_t row = team / p.blocks;
  const int number = static_cast<int>(team % p.blocks);
  const int begin = number * p.block, end = min(begin + p.block, p.k);
  wait_for_predecessor();

  const Row from(p, row);
  auto* const codes = static_cast<std::uint8_t*>(t.codes) + row * t.pitch;
  if (number == p.blocks - 1 && exists)
    for (int k = p.k + thread; k < p.columns; k += threads) codes[k] = 0;
  if (t.type == DType::s8 || t.type == DType::e4m3) {
    const auto pad = static_cast<std::uint8_t>(p.rows.pad == nullptr ? t.zero : *p.rows.pad);
    for (int k = begin + thread; k < end && exists; k += threads) {
      const std::int64_t at = from.at(p, k);
      codes[k] = at < 0 ? pad : __ldcg(static_cast<const std::uint8_t*>(t.a) + at);
    }
    return;
  }

  act_rule::Rule rule = p.known;
  if (!t.known) {
    const float least = t.offsets != nullptr ? act_rule::kLargest : 0.0f;  // a range without an offset contains 0
    BlockRange range{least, -least};
    for (int k = begin + thread; k < end; k += threads) {
      const float x = activation(p, from, k);
      range.take({x, x, fabsf(x) <= act_rule::kLargest});
    }
    range = range.over_warp();
    if (threads > 32) {
      if (thread % 32 == 0) ranges[thread / 32] = range;
      __syncthreads();
      for (int warp = 0; warp < kBlockWarps; ++warp) range.take(ranges[warp]);
    }
    rule = rule_of(t, range);
    if (thread == 0 && exists) {
      if (t.scales != nullptr) t.scales[row * t.scale_row + number * t.scale_group] = rule.scale;
      if (t.zeros != nullptr) t.zeros[row * t.zero_row + number * t.zero_group] = rule.zero;
      if (t.offsets != nullptr) t.offsets[row * t.zero_row + number * t.zero_group] = rule.offset;
    }
  }
  for (int k = begin + thread; k < end && exists; k += threads) {
    const float x = activation(p, from, k);
    codes[k] = rule.inverse == 0.0f          ? 0
               : t.codes_type == DType::e4m3 ? act_rule::to_e4m3(act_rule::multiply(x, rule.inverse))
                                             : static_cast<std::uint8_t>(act_rule::to_s8(x - rule.low, rule));
  }
}

}  // namespace

cudaError_t quantize_blocks(const QuantizeTask& task, const PatchRows& patches, cudaStream_t stream) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 2;  // channels are counted in 32 bits
  if (task.m < 1 || task.k < 1 || std::max(task.k, task.columns) > kMost || task.group < 0 || task.terms != nullptr ||
      task.sums != nullptr)
    return cudaErrorInvalidValue;
  BlockParams p{};
  p.task = task;
  p.rows = patches;
  p.known = act_rule::known(task.scale, task.zero);
  p.k = static_cast<int>(task.k);
  p.columns = static_cast<int>(std::max(task.columns, task.k));
  // With a known rule any run of channels is a block.
  const std::int64_t block = task.known || bits(task.type) == 8 ? kLongBlock : task.group;
  p.block = static_cast<int>(block == 0 ? task.k : std::min(block, task.k));
  p.blocks = (p.k + p.block - 1) / p.block;
  p.teams = task.m * p.blocks;
  const unsigned team = p.block < kLongBlock ? 32 : kBlockThreads, each = kBlockThreads / team;
  const std::int64_t ctas = (p.teams + each - 1) / each;
  if (ctas > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  return launch_dependent(
      patches.patches.channels == 0 ? quantize_blocks_kernel<RowOfMatrix> : quantize_blocks_kernel<RowOfPatch>,
      static_cast<unsigned>(ctas), dim3(team, each), 0, stream, p);
}

}  // namespace nibble::cuda
