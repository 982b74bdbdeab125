// Launches products of e2m1 weights (MXFP4, NVFP4) with the bytes of f32 activations, without wgmma (wna8_kernel.cuh): an e2m1 code is half an
// integer.
#include "kernels/cuda/sm80/wna8_kernel.cuh"

namespace nibble::cuda {
namespace {

template <int kTokens, int kFold>
constexpr const Launchable<Params>& kFloatKernel = kLaunchable<
    wna8_sm80_kernel<4, ConstantsPath::fixed_zeros, kTokens, ActTerms::scaled, false, false, kFold, gpu_tile::Codes::e2m1>>;

}  // namespace

cudaError_t linear_wna8_sm80_floats(const Wna8Task& task, int split, cudaStream_t stream) {
  constexpr int kStep = kStepChannels, kHalf = kStepChannels / 2;
  if (task.weight.codes != gpu_tile::Codes::e2m1 || task.zero != ZeroKind::none || (task.fold != kStep && task.fold != kHalf) ||
      task.weight.geometry.span < task.fold)
    return cudaErrorInvalidValue;
  return launch_parts(task, split, stream, [&](int tokens) {
    return task.fold == kStep ? tokens == kFew ? &kFloatKernel<kFew, kStep> : &kFloatKernel<kMany, kStep>
           : tokens == kFew ? &kFloatKernel<kFew, kHalf>
                              : &kFloatKernel<kMany, kHalf>;
  });
}

}  // namespace nibble::cuda
