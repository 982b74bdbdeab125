// The sm_90 GEMM's kernels for pointwise convolutions of f16 images in NCHW, a translation unit of their own so that they compile beside the
// others.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_planar_f16(int tokens, const RecordFormat& format) { return planar_kernel_for<__half>(tokens, format); }

}  // namespace nibble::cuda
