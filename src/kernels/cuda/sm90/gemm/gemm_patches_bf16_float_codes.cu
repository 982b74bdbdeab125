// The kernels of gemm_patches_bf16.cu for codes that are floats.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_patches_bf16_float_codes(int tokens, const RecordFormat& format) {
  return floats_kernel_for<__nv_bfloat16, true>(tokens, format);
}

}  // namespace nibble::cuda
