// The GEMM for GPUs without wgmma (gemm_kernel.cuh), of rows of activations.
#include "kernels/cuda/sm80/gemm_kernel.cuh"

namespace nibble::cuda {
namespace {

constexpr Variant kVariants[] = {
    variant<Shape<4, 64>, false>(kGemmSm80Shapes[0]), variant<Shape<2, 64>, false>(kGemmSm80Shapes[1]),
    variant<Shape<1, 64>, false>(kGemmSm80Shapes[2]), variant<Shape<1, 32>, false>(kGemmSm80Shapes[3])};
static_assert(std::ranges::all_of(kVariants, [](const Variant& v) {
  return v.tokens == v.shape.tokens && v.tiles * gpu_tile::kRows == v.shape.rows;
}));

}  // namespace

cudaError_t linear_gemm_sm80(const LinearTask& task, int split, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || split < 1 || split > kMostSplitRanks ||
      (task.a_dtype != DType::f16 && task.a_dtype != DType::bf16))
    return cudaErrorInvalidValue;
  const int ranks = std::min(split, geo.records());
  const int most = split_k_tokens(geo.n, ranks);
  for (int done = 0; done < task.m; done += std::min(most, task.m - done)) {
    Params p = params(task.weight, task.epilogue.from_row(done), std::min(most, task.m - done));
    p.x = static_cast<const std::uint16_t*>(task.x) + done * task.x_stride;
    p.x_stride = task.x_stride;
    p.rule = gather_rule(task);
    p.split.ranks = ranks;
    if (const cudaError_t e = launch(kVariants, p, task.a_dtype, stream, task.scratch_end)) return e;
  }
  return cudaSuccess;
}

}  // namespace nibble::cuda
