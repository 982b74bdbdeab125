// Launches products with online quantized activations without wgmma (wna8_kernel.cuh), of scales that change every 16 channels.
#include "kernels/cuda/sm80/wna8_kernel.cuh"

namespace nibble::cuda {
namespace {

template <int kBits, int kTokens>
Kernel kernel_for(ZeroKind zero) {
  constexpr int kFold = kStepChannels / 2;
  constexpr ConstantsPath kPath = ConstantsPath::any;
  switch (zero) {
    case ZeroKind::offset: return &kLaunchable<wna8_sm80_kernel<kBits, kPath, kTokens, ActTerms::offsets, false, false, kFold>>;
    case ZeroKind::none: return &kLaunchable<wna8_sm80_kernel<kBits, kPath, kTokens, ActTerms::scaled, false, false, kFold>>;
    default: return &kLaunchable<wna8_sm80_kernel<kBits, kPath, kTokens, ActTerms::zeros, false, false, kFold>>;
  }
}
template <int kBits>
Kernel kernel_for(int tokens, ZeroKind zero) {
  return tokens == kFew ? kernel_for<kBits, kFew>(zero) : kernel_for<kBits, kMany>(zero);
}

}  // namespace

cudaError_t linear_wna8_sm80_halves(const Wna8Task& task, int split, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.fold != kStepChannels / 2 || geo.span < task.fold) return cudaErrorInvalidValue;
  return launch_parts(task, split, stream, [&](int tokens) {
    return geo.bits == 4 ? kernel_for<4>(tokens, task.zero) : kernel_for<8>(tokens, task.zero);
  });
}

}  // namespace nibble::cuda
