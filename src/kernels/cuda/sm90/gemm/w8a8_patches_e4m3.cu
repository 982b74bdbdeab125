// The sm_90 8-bit GEMM's kernels for images of e4m3 codes, a translation unit of their own so that they compile beside the others.
#include "kernels/cuda/sm90/gemm/w8a8_kernel.cuh"

namespace nibble::cuda {

W8A8Kernel w8a8_sm90_patches_e4m3(int tokens) { return kernel_for<E4m3, false, true>(tokens); }

}  // namespace nibble::cuda
