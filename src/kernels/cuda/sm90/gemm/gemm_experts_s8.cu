// The sm_90 GEMM's kernels for s8 codes whose rows are of experts, and weights of 4 bits.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_experts_s8(int tokens, const RecordFormat& format, int bits, int fold) {
  const ConstantsPath path = code_constants_path(format, fold);
  if (bits != 4) return nullptr;
  if (path == ConstantsPath::fixed_zeros) return experts_kernel_of_codes<ConstantsPath::fixed_zeros>(tokens);
  if (path == ConstantsPath::integer_zeros) return experts_kernel_of_codes<ConstantsPath::integer_zeros>(tokens);
  return experts_kernel_of_codes<ConstantsPath::any>(tokens);
}

}  // namespace nibble::cuda
