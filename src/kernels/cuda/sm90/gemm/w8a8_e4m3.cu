// The sm_90 8-bit GEMM's kernels for this type of codes: a translation unit of their own, so that they compile in parallel.
#include "kernels/cuda/sm90/gemm/w8a8_kernel.cuh"

namespace nibble::cuda {

W8A8Kernel w8a8_sm90_e4m3(int tokens, bool token_rows) {
  return token_rows ? token_rows_kernel_for<E4m3, false>(tokens) : kernel_for<E4m3, false>(tokens);
}

}  // namespace nibble::cuda
