// The kernels of gemm_pairs.cu for codes that are floats: e4m3 in groups of 128 channels or more, e2m1 of 16, 32 or 64.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_pairs_float_codes(int tokens, const RecordFormat& format) {
  if (format.codes == Codes::e4m3 && format.span == gpu_tile::kChannels)
    return pairs_kernel_for<Codes::e4m3, ConstantsPath::float_codes>(tokens);
  if (format.codes != Codes::e2m1) return nullptr;
  if (format.span == 16) return pairs_kernel_for<Codes::e2m1, ConstantsPath::groups_of_16>(tokens);
  if (format.span == 32 || format.span == 64) return pairs_kernel_for<Codes::e2m1, ConstantsPath::fine_groups>(tokens);
  return nullptr;
}

}  // namespace nibble::cuda
