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
  const ConstantsPath path = code_constants_path(record_format(task.weight), task.fold);
  return launch_parts(task, split, stream, [&](int tokens) {
    return task.weight.geometry.bits == 4 ? kernel_for<4>(path, tokens, task.zero) : kernel_for<8>(path, tokens, task.zero);
  });
}

}  // namespace nibble::cuda
