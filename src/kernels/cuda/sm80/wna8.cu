// Launches products with online quantized activations without wgmma (wna8_kernel.cuh), of rows of activations.
#include "kernels/cuda/sm80/wna8_kernel.cuh"

namespace nibble::cuda {
namespace {

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

cudaError_t linear_wna8_sm80(const Wna8Task& task, int split, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || split < 1 || split > kMostSplitRanks) return cudaErrorInvalidValue;
  const int ranks = std::min(split, geo.records()), most = split_k_tokens(geo.n, ranks);
  const ConstantsPath path = code_constants_path(record_format(task.weight), task.fold);
  Wna8Task part = task;
  for (int done = 0; done < task.m; done += part.m) {
    part.m = std::min(most, task.m - done);
    part.codes = static_cast<const std::uint8_t*>(task.codes) + done * task.pitch;
    part.terms = static_cast<const std::uint8_t*>(task.terms) + done * token_term_bytes(task.zero == ZeroKind::offset);
    if (task.token_scales != nullptr) part.token_scales = task.token_scales + done;
    part.epilogue = task.epilogue.from_row(done);
    const int tokens = wna8_sm80_tokens(part.m);
    const Kernel kernel = geo.bits == 4 ? kernel_for<4>(path, tokens, task.zero) : kernel_for<8>(path, tokens, task.zero);
    if (const cudaError_t e = launch(kernel, part, tokens, (part.m + tokens - 1) / tokens, stream, ranks)) return e;
  }
  return cudaSuccess;
}

}  // namespace nibble::cuda
