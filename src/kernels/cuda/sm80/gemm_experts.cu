// The GEMM for GPUs without wgmma (gemm_kernel.cuh), of rows of experts: tiles of many rows, or of few, whose bound is reading the weights.
#include "kernels/cuda/sm80/gemm_kernel.cuh"

namespace nibble::cuda {
namespace {

/// 128 rows: nearly as fast as 256 for a row of the weight, and shorter where few rows of A are left.
constexpr Variant kMany[] = {variant<Shape<2, 64>, false, true>(900)};
/// Of 16 tokens ldmatrix is the bound, as of 32 and 64: about 60 cycles and 8.4 a token.
constexpr Variant kFew[] = {variant<Shape<1, 16>, false, true>(195)};
static_assert(kMany[0].tokens == kSm80ExpertRows.many && kFew[0].tokens == kSm80ExpertRows.few);

}  // namespace

cudaError_t linear_gemm_sm80_experts(const LinearTask& task, int rows, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || (task.a_dtype != DType::f16 && task.a_dtype != DType::bf16) ||
      task.experts.tiles == nullptr)
    return cudaErrorInvalidValue;
  Params p = params(task.weight, task.epilogue, task.m);
  p.x = static_cast<const std::uint16_t*>(task.x);
  p.x_stride = task.x_stride;
  p.rule = gather_rule(task);
  p.experts = task.experts;
  if (rows == kSm80ExpertRows.many) return launch(kMany, p, task.a_dtype, stream);
  return rows == kSm80ExpertRows.few ? launch(kFew, p, task.a_dtype, stream) : cudaErrorInvalidValue;
}

}  // namespace nibble::cuda
