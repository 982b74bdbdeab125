// The sm_90 GEMM's kernels of patches that are s8 codes, with zero points and without.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_patches_s8(int tokens, const RecordFormat& format, int bits, int fold, bool zero_points) {
  const ConstantsPath path = code_constants_path(format, fold);
  if (zero_points)
    return bits == 4 ? kernel_for<std::int8_t, Codes::u4, true, ActTerms::zeros>(tokens, path)
                     : kernel_for<std::int8_t, Codes::u8, true, ActTerms::zeros>(tokens, path);
  return bits == 4 ? kernel_for<std::int8_t, Codes::u4, true>(tokens, path)
                   : kernel_for<std::int8_t, Codes::u8, true>(tokens, path);
}

}  // namespace nibble::cuda
