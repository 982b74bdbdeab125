// The CUDA kernel family. Its rows are in every build; without CUDA, or without a GPU that runs them, they refuse.
#pragma once

#include <span>
#include <string_view>

#include "kernels/cuda/device/stream_k.hpp"
#include "kernels/cuda/table/wgmma_cost.hpp"
#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

std::span<const Kernel> kernels();

/// The GPU of a problem; precondition: accepts_common has accepted the problem.
GpuInfo gpu_of(const Problem& problem);
/// Kernel::least_m of a tile of so many tokens: more than half of it is full, unless there is no smaller tile.
constexpr std::int64_t least_m(int tokens) { return tokens <= 16 ? 1 : tokens / 2 + 1; }
/// The variant of a row whose passes `split` CTAs share along K (gemm_schedule.hpp).
constexpr std::string_view wgmma_variant(int split) {
  return split == kStreamK ? "streamk" : split == 1 ? "wgmma" : split == 2 ? "wgmma2" : "wgmma4";
}
/// The workspace of a row of tiles of kTokens: kBase's bytes, followed, with stream-K, by memory for the partial sums of kGroups
/// warpgroups.
template <int kTokens, int kGroups, int kSplit, std::size_t (*kBase)(const Kernel&, const Problem&)>
std::size_t wgmma_workspace(const Kernel& self, const Problem& p) {
  std::size_t bytes = 0;
  if constexpr (kBase != nullptr) bytes = kBase(self, p);
  if constexpr (kSplit == kStreamK) bytes = (bytes + 255) / 256 * 256 + stream_k_bytes(kTokens, kGroups, gpu_of(p).sms);
  return bytes;
}
/// The end of that workspace.
inline void* end_of(std::span<std::byte> scratch) { return scratch.data() + scratch.size(); }

constexpr double kLaunchUs = 1.5;  // the cost of a launch among others in a stream or graph

/// Predicted microseconds of a linear kernel of level `isa` on a GPU.
double linear_cost_us(Isa isa, int tokens, const GpuInfo& gpu, const Problem& problem);
/// Predicted microseconds of sm_90's wgmma kernels of 16-bit activations: kTokens × kRows outputs a pass of a CTA, kSplit of which share
/// it along K.
double floats_cost_us(const WgmmaCost& whole, const WgmmaCost& folds, const GpuInfo& gpu, const Problem& problem);
template <int kTokens, int kRows, int kSplit>
double gemm_sm90_cost_us(const GpuInfo& gpu, const Problem& problem) {
  static constexpr WgmmaCost kWhole = wgmma_cost(WgmmaFamily::floats, kTokens, kRows, kSplit);
  static constexpr WgmmaCost kFolds = wgmma_cost(WgmmaFamily::float_folds, kTokens, kRows, kSplit);
  return floats_cost_us(kWhole, kFolds, gpu, problem);
}
double gemm_sm80_cost_us(const GpuInfo& gpu, const Problem& problem);
/// Predicted microseconds of the dense tier.
double dense_cost_us(const GpuInfo& gpu, const Problem& problem);

}  // namespace nibble::cuda
