// Launches products with online quantized activations without wgmma (wna8_kernel.cuh), of rows of experts: tiles of many rows, or of few.
// Weights have 4 bits, activations neither zero points nor float offsets. A token's scale that is not in the terms is 1 there.
#include "kernels/cuda/sm80/wna8_kernel.cuh"

namespace nibble::cuda {
namespace {

static_assert(kFew == kSm80ExpertRows.few && kMany == kSm80ExpertRows.many);

template <int kTokens>
Kernel kernel_for(ConstantsPath path) {
  switch (path) {
    case ConstantsPath::fixed_zeros:
      return &kLaunchable<wna8_sm80_kernel<4, ConstantsPath::fixed_zeros, kTokens, ActTerms::scaled, true>>;
    case ConstantsPath::integer_zeros:
      return &kLaunchable<wna8_sm80_kernel<4, ConstantsPath::integer_zeros, kTokens, ActTerms::scaled, true>>;
    default: return &kLaunchable<wna8_sm80_kernel<4, ConstantsPath::any, kTokens, ActTerms::scaled, true>>;
  }
}

}  // namespace

cudaError_t linear_wna8_sm80_experts(const Wna8Task& task, int rows, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || geo.bits != 4 || task.zero != ZeroKind::none || task.experts.tiles == nullptr ||
      (rows != kFew && rows != kMany))
    return cudaErrorInvalidValue;
  const ConstantsPath path = code_constants_path(record_format(task.weight), task.fold);
  const Kernel kernel = rows == kFew ? kernel_for<kFew>(path) : kernel_for<kMany>(path);
  return launch(kernel, task, rows, task.experts.most, stream);
}

}  // namespace nibble::cuda
