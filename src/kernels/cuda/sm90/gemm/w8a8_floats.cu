// The sm_90 8-bit GEMM's kernels for tokens that come as 16-bit floats, a translation unit of their own so that they compile beside the others.
#include "kernels/cuda/sm90/gemm/w8a8_float_rows.cuh"
#include "kernels/cuda/sm90/gemm/w8a8_kernel.cuh"

namespace nibble::cuda {
namespace {

template <DType kType>
W8A8Kernel float_rows_kernel_for(int blocks) {
  switch (blocks) {
    case 1: return &kLaunchable<w8a8_sm90_kernel<W8A8FloatRows<W8A8FloatTraits<kType, 1>>>>;
    case 2: return &kLaunchable<w8a8_sm90_kernel<W8A8FloatRows<W8A8FloatTraits<kType, 2>>>>;
    default: return nullptr;
  }
}

}  // namespace

W8A8Kernel w8a8_sm90_floats(DType type, int blocks) {
  return type == DType::f16    ? float_rows_kernel_for<DType::f16>(blocks)
         : type == DType::bf16 ? float_rows_kernel_for<DType::bf16>(blocks)
                               : nullptr;
}

}  // namespace nibble::cuda
