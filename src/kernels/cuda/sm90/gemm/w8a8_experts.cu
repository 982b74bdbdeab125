// The sm_90 8-bit GEMM's kernels whose rows are of experts.
#include "kernels/cuda/sm90/gemm/w8a8_kernel.cuh"

namespace nibble::cuda {

W8A8Kernel w8a8_sm90_experts_s8(int tokens) { return experts_kernel_for<S8, false>(tokens); }
W8A8Kernel w8a8_sm90_experts_e4m3(int tokens, bool grouped) {
  return grouped ? experts_kernel_for<E4m3, true>(tokens) : experts_kernel_for<E4m3, false>(tokens);
}

}  // namespace nibble::cuda
