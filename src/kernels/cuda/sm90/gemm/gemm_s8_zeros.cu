// The same kernels for codes with zero points.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_s8_zeros(int tokens, const RecordFormat& format, int bits, int fold) {
  const Zeros zeros = code_zeros_of(format, fold);
  return bits == 4 ? kernel_for<std::int8_t, 4, false, ActTerms::zeros>(tokens, zeros)
                   : kernel_for<std::int8_t, 8, false, ActTerms::zeros>(tokens, zeros);
}

}  // namespace nibble::cuda
