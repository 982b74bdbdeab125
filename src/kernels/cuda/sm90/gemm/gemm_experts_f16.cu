// The sm_90 GEMM's kernels for f16 activations whose rows are of experts.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_experts_f16(int tokens, const RecordFormat& format) { return experts_kernel_for<__half>(tokens, format); }

}  // namespace nibble::cuda
