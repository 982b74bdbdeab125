// The sm_90 GEMM's kernels for pairs of f16, a translation unit of their own so that they compile beside the others.
#include "kernels/cuda/sm90/gemm/gemm_kernel.cuh"

namespace nibble::cuda {

GemmKernel gemm_sm90_pairs(int tokens, const RecordFormat& format) {
  constexpr auto kWhole = ConstantsPath::integer_zeros, kFine = ConstantsPath::fine_groups, kShort = ConstantsPath::groups_of_16;
  if (gpu_tile::are_floats(format.codes)) return gemm_sm90_pairs_float_codes(tokens, format);
  if (format.zero != ZeroKind::none && format.zero != ZeroKind::integer) return nullptr;
  const bool four = format.codes == Codes::u4;
  switch (format.span) {
    case gpu_tile::kChannels:
      return four ? pairs_kernel_for<Codes::u4, kWhole>(tokens) : pairs_kernel_for<Codes::u8, kWhole>(tokens);
    case 64:
    case 32: return four ? pairs_kernel_for<Codes::u4, kFine>(tokens) : pairs_kernel_for<Codes::u8, kFine>(tokens);
    case 16: return four ? pairs_kernel_for<Codes::u4, kShort>(tokens) : nullptr;
    default: return nullptr;
  }
}

}  // namespace nibble::cuda
