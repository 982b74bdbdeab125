// The same kernels for codes with float offsets.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_s8_offsets(int tokens, const RecordFormat& format, int bits, int fold) {
  const ConstantsPath path = code_constants_path(format, fold);
  return bits == 4 ? kernel_for<std::int8_t, Codes::u4, false, ActTerms::offsets>(tokens, path)
                   : kernel_for<std::int8_t, Codes::u8, false, ActTerms::offsets>(tokens, path);
}

}  // namespace nibble::cuda
