// A thread flips the top bit of 16 codes, or of one where they do not lie at multiples of 16 bytes: code − 128 modulo 256. The x
// coordinate of the grid counts pieces of a run, so that no thread divides by its length. The threads of the grid share the zero points.
#include "kernels/cuda/steps/recode_acts.hpp"

#include <algorithm>

#include "kernels/cuda/device/dependent_launch.cuh"

namespace nibble::cuda {
namespace {

constexpr int kRecodeThreads = 256;
constexpr int kVectorCodes = 16;
constexpr std::int64_t kMostRuns = 65535;  // of a grid's second dimension; a CTA takes every so manyth run

struct RecodeParams {
  RecodeTask task;
  bool vectors;
};

__global__ void __launch_bounds__(kRecodeThreads) recode_acts_kernel(const __grid_constant__ RecodeParams p) {
  let_successor_start();
  const RecodeTask& t = p.task;
  const std::int64_t piece = static_cast<std::int64_t>(blockIdx.x) * kRecodeThreads + threadIdx.x;
  wait_for_predecessor();
  for (std::int64_t run = blockIdx.y; run < t.images * t.rows; run += gridDim.y) {
    const std::int64_t image = run / t.rows, row = run - image * t.rows;
    const std::uint8_t* const from = t.from + image * t.from_image + row * t.from_row;
    std::int8_t* const to = t.to + image * t.to_image + row * t.to_row;
    if (!p.vectors) {
      if (piece < t.length) to[piece] = static_cast<std::int8_t>(__ldcg(from + piece) ^ 0x80);
      continue;
    }
    const std::int64_t first = piece * kVectorCodes;
    if (first + kVectorCodes <= t.length) {
      constexpr std::uint32_t kTop = 0x80808080u;
      const uint4 codes = __ldcg(reinterpret_cast<const uint4*>(from + first));
      *reinterpret_cast<uint4*>(to + first) = uint4{codes.x ^ kTop, codes.y ^ kTop, codes.z ^ kTop, codes.w ^ kTop};
    } else {
      for (std::int64_t k = first; k < t.length; ++k) to[k] = static_cast<std::int8_t>(__ldcg(from + k) ^ 0x80);
    }
  }
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * gridDim.y * kRecodeThreads;
  const std::int64_t thread = (static_cast<std::int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * kRecodeThreads + threadIdx.x;
  for (std::int64_t i = thread; i < t.tokens * t.groups; i += threads) {
    const std::int64_t token = i / t.groups, group = i - token * t.groups;
    t.to_zeros[i] = __ldcg(t.zeros + token * t.zero_token + group * t.zero_group) - 128;
  }
}

bool in_vectors(const RecodeTask& t) {
  const auto bits = reinterpret_cast<std::uintptr_t>(t.from) | reinterpret_cast<std::uintptr_t>(t.to);
  std::int64_t strides = 0;  // of more than one run
  if (t.rows > 1) strides |= t.from_row | t.to_row;
  if (t.images > 1) strides |= t.from_image | t.to_image;
  return (bits | static_cast<std::uintptr_t>(strides)) % kVectorCodes == 0;
}

}  // namespace

cudaError_t recode_acts(const RecodeTask& task, cudaStream_t stream) {
  if (task.images < 1 || task.rows < 1 || task.length < 1) return cudaErrorInvalidValue;
  const bool vectors = in_vectors(task);
  const std::int64_t codes = std::int64_t{kRecodeThreads} * (vectors ? kVectorCodes : 1);
  const dim3 grid(static_cast<unsigned>((task.length - 1) / codes + 1),
                  static_cast<unsigned>(std::min(task.images * task.rows, kMostRuns)));
  return launch_dependent(recode_acts_kernel, grid, kRecodeThreads, 0, stream, RecodeParams{task, vectors});
}

}  // namespace nibble::cuda
