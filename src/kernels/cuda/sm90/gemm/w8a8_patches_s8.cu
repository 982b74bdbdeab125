// The sm_90 8-bit GEMM's kernels for images of s8 codes, a translation unit of their own so that they compile beside the others.
#include "kernels/cuda/sm90/gemm/w8a8_kernel.cuh"

namespace nibble::cuda {

W8A8Kernel w8a8_sm90_patches_s8(int tokens) { return kernel_for<S8, false, true>(tokens); }

}  // namespace nibble::cuda
