// Launches the GEMM of 8-bit codes for GPUs without wgmma (w8a8_kernel.cuh), of rows of experts: tiles of many rows, or of few.
#include "kernels/cuda/sm80/w8a8_kernel.cuh"
#include "kernels/cuda/steps/code_rows.cuh"

namespace nibble::cuda {
namespace {

static_assert(Few::kTokens == kSm80ExpertRows.few && Some::kTokens == kSm80ExpertRows.many);

template <class S, Mode kMode>
cudaError_t launch(const W8A8Task& task, cudaStream_t stream) {
  const auto& kernel = kLaunchable<w8a8_sm80_kernel<S, kMode, RowCopier, true>>;
  Params p{};
  p.task = task;
  p.token_blocks = task.experts.most;
  p.vector_codes = in_code_vectors(task.acts);
  const std::int64_t ctas = (task.weight.geometry.n + S::kRows - 1) / S::kRows * p.token_blocks;
  if (ctas > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  int smem = 0;
  if (const cudaError_t e = shared_of_device<S>(smem)) return e;
  if (const cudaError_t e = kernel.allow_all_shared()) return e;
  return launch_dependent(kernel.kernel, static_cast<unsigned>(ctas), static_cast<unsigned>(S::kThreads), smem, stream, p);
}
template <class S>
cudaError_t launch(const W8A8Task& task, cudaStream_t stream) {
  if (task.weight.geometry.integers) return launch<S, Mode::integers>(task, stream);
  return is_grouped(task) ? launch<S, Mode::grouped>(task, stream) : launch<S, Mode::floats>(task, stream);
}

}  // namespace

cudaError_t linear_w8a8_sm80_experts(const W8A8Task& task, int rows, cudaStream_t stream) {
  const gpu_w8::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || task.experts.tiles == nullptr) return cudaErrorInvalidValue;
  if (rows == kSm80ExpertRows.many) return launch<Some>(task, stream);
  return rows == kSm80ExpertRows.few ? launch<Few>(task, stream) : cudaErrorInvalidValue;
}

}  // namespace nibble::cuda
