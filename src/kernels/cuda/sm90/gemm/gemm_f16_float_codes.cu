// The kernels of gemm_f16.cu for codes that are floats.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_f16_float_codes(int tokens, const RecordFormat& format) { return floats_kernel_for<__half>(tokens, format); }

}  // namespace nibble::cuda
