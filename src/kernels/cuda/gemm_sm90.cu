// Launches the sm_90 GEMM (gemm_sm90_kernel.cuh): which activations it reads, how passes are dealt, how much shared memory there is.
#include <algorithm>
#include <bit>

#include "kernels/cuda/gemm.hpp"
#include "kernels/cuda/gemm_sm90.hpp"
#include "kernels/cuda/launch_shape.hpp"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/shared_memory.hpp"
#include "kernels/cuda/tensor_map.hpp"

namespace nibble::cuda {
namespace {

// ---- activations that TMA cannot read: act-order, rows that do not begin at multiples of 16 bytes, rows that overlap

/// A row of blocks per token; position i of a row is channel perm[i].
__global__ void gather_activations(const std::uint16_t* x, std::int64_t stride, const std::int32_t* perm, int k, std::uint16_t* to,
                                   int pitch) {
  ptx::let_dependents_start();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= k) return;
  const std::int64_t row = blockIdx.y;
  to[row * pitch + i] = x[row * stride + (perm != nullptr ? perm[i] : i)];
}

bool readable_by_tma(const LinearTask& task) {
  return task.weight.perm == nullptr && tma_reads(task.x, task.x_stride * 2, task.m, task.weight.geometry.k * 2);
}

/// Activations that TMA can read; `first_row` of D is theirs.
cudaError_t run_rows(const LinearTask& task, int first_row, const GemmConfig& config, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  const RecordFormat format = record_format(task.weight);
  const GemmKernel kernel = task.act == DType::f16    ? gemm_sm90_f16(config.tokens, format, geo.bits)
                            : task.act == DType::bf16 ? gemm_sm90_bf16(config.tokens, format, geo.bits)
                                                      : nullptr;
  if (kernel == nullptr || task.m < 1) return cudaErrorInvalidValue;
  int device = 0, most = 0;
  if (const cudaError_t e = most_shared(device, most)) return e;
  if (const cudaError_t e = allow_all_shared(reinterpret_cast<const void*>(kernel))) return e;

  GemmParams p{};
  p.records = static_cast<const std::uint8_t*>(task.weight.records);
  p.format = format;
  p.epilogue = task.epilogue;
  p.m = task.m;
  p.first_row = first_row;
  p.n = static_cast<int>(geo.n);
  p.tile_records = geo.records();
  p.split = static_cast<int>(std::bit_floor(static_cast<unsigned>(std::min(config.split, p.tile_records))));
  p.depth = config.depth;
  p.scale_after = task.weight.per_channel && task.weight.zero != Zero::offset;
  p.plain = task.epilogue.plain();

  if (!describe_rows(p.x, task.act, task.x, task.x_stride * 2, task.m, geo.k, config.tokens)) return cudaErrorInvalidValue;

  p.deal.row_blocks = geo.tiles();
  p.deal.token_tiles = (task.m + config.tokens - 1) / config.tokens;
  p.deal.most = gemm_groups(config.tokens) / p.depth;
  p.deal.clusters = p.split > 1 ? p.deal.row_tiles() * p.deal.token_tiles
                                : std::min(p.deal.units(), multiprocessors(device));

  // Never more stages than a CTA has records: what shared memory is left lets the next kernel begin.
  const int longest = ((p.tile_records + p.split - 1) / p.split + p.depth - 1) / p.depth;
  p.stages = 1;
  while (p.stages < longest * 2 &&
         gemm_map(p.stages + 1, config.tokens, p.depth, p.format.bytes, p.split).total <= most)
    ++p.stages;
  if (p.deal.units() <= p.deal.clusters * p.deal.most || p.split > 1) p.stages = std::min(p.stages, longest);
  const int smem = gemm_map(p.stages, config.tokens, p.depth, p.format.bytes, p.split).total;
  if (smem > most) return cudaErrorInvalidConfiguration;
  LaunchShape shape(p.deal.clusters * p.split, p.split, gemm_threads(config.tokens), smem, stream);
  return cudaLaunchKernelEx(&shape.config, kernel, p);
}

}  // namespace

cudaError_t linear_gemm_sm90(const LinearTask& task, const GemmConfig& config, cudaStream_t stream) {
  if (readable_by_tma(task)) return run_rows(task, 0, config, stream);
  if (task.scratch == nullptr) return cudaErrorInvalidValue;
  // As many rows at a time as the scratch memory holds.
  const int k = static_cast<int>(task.weight.geometry.k), pitch = gathered_pitch(k);
  const int most = gathered_rows(task.m, k, task.weight.perm != nullptr);
  for (int done = 0; done < task.m; done += most) {
    LinearTask part = task;
    part.m = std::min(most, task.m - done);
    const dim3 grid(static_cast<unsigned>((k + 255) / 256), static_cast<unsigned>(part.m));
    gather_activations<<<grid, 256, 0, stream>>>(static_cast<const std::uint16_t*>(task.x) + done * task.x_stride, task.x_stride,
                                                 task.weight.perm, k, static_cast<std::uint16_t*>(task.scratch), pitch);
    if (const cudaError_t e = cudaPeekAtLastError()) return e;
    part.x = task.scratch;
    part.x_stride = pitch;
    part.weight.perm = nullptr;
    if (const cudaError_t e = run_rows(part, done, config, stream)) return e;
  }
  return cudaSuccess;
}

}  // namespace nibble::cuda
