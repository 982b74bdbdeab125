// The sm_90 GEMM's kernels of patches that are s8 codes, with zero points and without.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_patches_s8(int tokens, const RecordFormat& format, int bits, int fold, bool zero_points) {
  const Zeros zeros = code_zeros_of(format, fold);
  if (zero_points)
    return bits == 4 ? kernel_for<std::int8_t, 4, true, ActTerms::zeros>(tokens, zeros)
                     : kernel_for<std::int8_t, 8, true, ActTerms::zeros>(tokens, zeros);
  return bits == 4 ? kernel_for<std::int8_t, 4, true>(tokens, zeros) : kernel_for<std::int8_t, 8, true>(tokens, zeros);
}

}  // namespace nibble::cuda
