// The sm_90 GEMM's kernels for bf16 images, a translation unit of their own so that they compile beside the others.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_patches_bf16(int tokens, const RecordFormat& format) {
  return gpu_tile::are_floats(format.codes) ? gemm_sm90_patches_bf16_float_codes(tokens, format)
                                            : integers_kernel_for<__nv_bfloat16, true>(tokens, format);
}

}  // namespace nibble::cuda
