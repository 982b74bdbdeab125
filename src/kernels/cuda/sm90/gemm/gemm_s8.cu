// The sm_90 GEMM's kernels for activations that are s8 codes, a translation unit of their own so that they compile beside the others.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_s8(int tokens, const RecordFormat& format, int bits, int fold) {
  const ConstantsPath path = code_constants_path(format, fold);
  return bits == 4 ? kernel_for<std::int8_t, Codes::u4>(tokens, path) : kernel_for<std::int8_t, Codes::u8>(tokens, path);
}

}  // namespace nibble::cuda
