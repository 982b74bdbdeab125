// Launches products with online quantized activations without wgmma (wna8_kernel.cuh), of rows of activations.
#include <algorithm>
#include <limits>

#include "kernels/cuda/sm80/wna8_kernel.cuh"

namespace nibble::cuda {
namespace {

using Kernel = const Launchable<Params>*;

template <int kBits, int kTokens, ActTerms kTerms>
Kernel kernel_for(ConstantsPath path) {
  if (path == ConstantsPath::fixed_zeros)
    return &kLaunchable<wna8_sm80_kernel<kBits, ConstantsPath::fixed_zeros, kTokens, kTerms>>;
  return path == ConstantsPath::integer_zeros
             ? &kLaunchable<wna8_sm80_kernel<kBits, ConstantsPath::integer_zeros, kTokens, kTerms>>
             : &kLaunchable<wna8_sm80_kernel<kBits, ConstantsPath::any, kTokens, kTerms>>;
}
template <int kBits, ActTerms kTerms>
Kernel kernel_for(ConstantsPath path, int tokens) {
  return tokens == kFew ? kernel_for<kBits, kFew, kTerms>(path) : kernel_for<kBits, kMany, kTerms>(path);
}
template <int kBits>
Kernel kernel_for(ConstantsPath path, int tokens, ZeroKind zero) {
  if (zero == ZeroKind::offset) return kernel_for<kBits, ActTerms::offsets>(path, tokens);
  return zero == ZeroKind::none ? kernel_for<kBits, ActTerms::scaled>(path, tokens)
                                : kernel_for<kBits, ActTerms::zeros>(path, tokens);
}

}  // namespace

cudaError_t linear_wna8_sm80(const Wna8Task& task, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1) return cudaErrorInvalidValue;
  Params p{};
  p.records = static_cast<const std::uint8_t*>(task.weight.records);
  p.format = record_format(task.weight);
  p.codes = static_cast<const std::uint8_t*>(task.codes);
  p.pitch = task.pitch;
  p.terms = static_cast<const std::uint8_t*>(task.terms);
  p.term_pitch = task.term_pitch;
  p.token_scales = task.token_scales;
  p.epilogue = task.epilogue;
  p.m = task.m;
  p.n = static_cast<int>(geo.n);
  p.k = static_cast<int>(geo.k);
  p.tile_records = geo.records();
  const int tokens = task.m <= kFew ? kFew : kMany;
  p.token_blocks = (task.m + tokens - 1) / tokens;
  const int fold_terms =
      gpu_tile::kChannels / task.fold * token_term_bytes(task.zero == ZeroKind::offset);  // of a token in a record
  p.stage_bytes = stage_bytes(tokens, fold_terms, p.format.bytes);
  const ConstantsPath path = code_constants_path(p.format, task.fold);
  const Kernel kernel = geo.bits == 4 ? kernel_for<4>(path, tokens, task.zero) : kernel_for<8>(path, tokens, task.zero);
  const std::int64_t ctas = std::int64_t{geo.tiles()} * p.token_blocks;
  const int smem = std::max(kStages * p.stage_bytes, tokens * kSumPitch * 4);
  if (ctas > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  if (const cudaError_t e = kernel->allow_all_shared()) return e;
  return launch_dependent(kernel->kernel, static_cast<unsigned>(ctas), static_cast<unsigned>(kThreads), smem, stream, p);
}

}  // namespace nibble::cuda
