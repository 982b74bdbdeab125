// The sm_90 8-bit GEMM's kernels whose rows are of experts.
#include "kernels/cuda/sm90/gemm/w8a8_kernel.cuh"

namespace nibble::cuda {

W8A8Kernel w8a8_sm90_experts_s8(int tokens, bool token_rows) { return experts_kernel_for<S8, false>(tokens, token_rows); }
W8A8Kernel w8a8_sm90_experts_e4m3(int tokens, bool grouped, bool token_rows) {
  return grouped ? experts_kernel_for<E4m3, true>(tokens, token_rows) : experts_kernel_for<E4m3, false>(tokens, token_rows);
}

}  // namespace nibble::cuda
