// The GEMM for GPUs without wgmma (gemm_kernel.cuh), of rows of activations.
#include "kernels/cuda/sm80/gemm_kernel.cuh"

namespace nibble::cuda {
namespace {

constexpr Variant kVariants[] = {variant<Shape<4, 64>, false>(1740), variant<Shape<2, 64>, false>(900),
                                 variant<Shape<1, 64>, false>(600), variant<Shape<1, 32>, false>(330)};

}  // namespace

cudaError_t linear_gemm_sm80(const LinearTask& task, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || (task.a_dtype != DType::f16 && task.a_dtype != DType::bf16))
    return cudaErrorInvalidValue;
  Params p = params(task.weight, task.epilogue, task.m);
  p.x = static_cast<const std::uint16_t*>(task.x);
  p.x_stride = task.x_stride;
  p.rule = gather_rule(task);
  return launch(kVariants, p, task.a_dtype, stream);
}

}  // namespace nibble::cuda
