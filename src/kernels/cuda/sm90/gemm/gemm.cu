// Launches the sm_90 GEMM (gemm_kernel.cuh): which activations it reads, how passes are distributed, how much shared memory there is.
#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/gather.cuh"
#include "kernels/cuda/device/launch_shape.hpp"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/device/tensor_map.hpp"
#include "kernels/cuda/device/token_tiles.hpp"
#include "kernels/cuda/sm90/gemm/gemm.hpp"
#include "kernels/cuda/tasks/conv.hpp"
#include "kernels/cuda/tasks/gemm.hpp"
#include "kernels/cuda/tasks/pairs.hpp"
#include "kernels/cuda/tasks/wna8.hpp"

namespace nibble::cuda {
namespace {

// ---- activations that TMA cannot read: act-order, a prescale, rows that do not begin at multiples of 16 bytes, rows that overlap

constexpr int kGatherThreads = 128, kGatherRows = 4;

struct GatherParams {
  const std::uint16_t* x;
  std::int64_t stride;
  GatherRule rule;
  std::uint16_t* to;
  int pitch, rows;
};

/// Eight positions a thread, of four rows: factors are loaded once, before the previous kernel has ended.
__global__ void __launch_bounds__(kGatherThreads) gather_activations(const __grid_constant__ GatherParams p) {
  let_successor_start();
  const int i = static_cast<int>(blockIdx.x * kGatherThreads + threadIdx.x) * 8,
            first = static_cast<int>(blockIdx.y) * kGatherRows;
  const bool scales = p.rule.prescale != nullptr && i < p.pitch;
  const EightFactors factors = scales ? load_factors(p.rule, i) : EightFactors{};
  wait_for_predecessor();
  if (i >= p.pitch) return;
  uint4 x[kGatherRows];
#pragma unroll
  for (int r = 0; r < kGatherRows; ++r)
    if (first + r < p.rows) x[r] = load_eight(p.rule, p.x + (first + r) * p.stride, i);
#pragma unroll
  for (int r = 0; r < kGatherRows; ++r)
    if (first + r < p.rows)
      *reinterpret_cast<uint4*>(p.to + static_cast<std::int64_t>(first + r) * p.pitch + i) =
          scales ? times(x[r], factors, p.rule.type) : x[r];
}

bool readable_by_tma(const LinearTask& task) {
  return task.weight.perm == nullptr && task.weight.prescale == nullptr &&
         readable_rows(task.x, task.x_stride * 2, task.m, task.weight.geometry.k * 2);
}

/// Fills the parameters that follow from the records, and from the depth and split of the row.
template <class Task>
GemmParams params(const Task& task, int m, const GemmConfig& config) {
  const DeviceWeight& weight = task.weight;
  GemmParams p{};
  p.records = static_cast<const std::uint8_t*>(weight.records);
  p.format = record_format(weight);
  p.epilogue = task.epilogue;
  p.m = m;
  p.n = static_cast<int>(weight.geometry.n);
  p.k = static_cast<int>(weight.geometry.k);
  p.schedule.row_blocks = weight.geometry.tiles();
  p.schedule.records = weight.geometry.records();
  p.schedule.split = static_cast<int>(std::bit_floor(static_cast<unsigned>(std::min(config.split, p.schedule.records))));
  p.depth = config.depth;
  p.half = half_out(task.epilogue, p.n);
  return p;
}

/// Distributes the passes, chooses the longest ring that fits, and launches. Memory for stream-K ends at `scratch_end`.
cudaError_t launch(GemmKernel kernel, GemmParams& p, const GemmShape& shape, void* scratch_end, cudaStream_t stream) {
  int device = 0, most = 0;
  if (const cudaError_t e = most_shared(device, most)) return e;
  if (const cudaError_t e = kernel->allow_all_shared()) return e;
  const int ctas = multiprocessors(device), cluster = std::max(1, p.schedule.split);
  const bool experts = p.experts.tiles != nullptr;
  p.schedule.token_tiles = experts ? p.experts.most : (p.m + shape.tokens - 1) / shape.tokens;
  p.schedule.most = shape.groups() / p.depth;
  distribute(p.schedule, shape.tokens, ctas);
  if (p.schedule.split == kStreamK) {
    if (scratch_end == nullptr) return cudaErrorInvalidValue;
    p.parts = stream_k(scratch_end, shape.tokens, shape.groups(), ctas);
  }

  // Never more stages than a CTA has records: the remaining shared memory lets the next kernel start.
  const auto map = [&](int stages) {
    GemmMap found = gemm_map(stages, shape, p.depth, p.format.bytes, cluster);
    if (experts) found.total = (found.total + 15) / 16 * 16 + kExpertPassBytes + kScheduleBytes;
    return found;
  };
  const int longest = (p.schedule.longest() + p.depth - 1) / p.depth;
  p.stages = 1;
  while (p.stages < longest && map(p.stages + 1).total <= most) ++p.stages;
  p.map = map(p.stages);
  if (p.map.total > most) return cudaErrorInvalidConfiguration;
  // Warpgroups that overlap records wait for a second stage before they release the first. Of 256 tokens they never do.
  if (p.stages == 1 && longest > 1 && shape.tokens != 256) return cudaErrorInvalidConfiguration;
  LaunchShape grid(p.schedule.clusters * cluster, cluster, shape.threads(), p.map.total, stream);
  return cudaLaunchKernelEx(&grid.config, kernel->kernel, p);
}

/// For activations that TMA can read; they belong to rows of D from `first_row` on.
cudaError_t run_rows(const LinearTask& task, int first_row, const GemmConfig& config, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  GemmParams p = params(task, task.m, config);
  p.next = task.next;
  p.experts = task.experts;
  const bool experts = p.experts.tiles != nullptr;
  if (experts && config.split != 1) return cudaErrorInvalidValue;
  const GemmKernel kernel = experts && task.a_dtype == DType::f16    ? gemm_sm90_experts_f16(config.tokens, p.format)
                            : experts && task.a_dtype == DType::bf16 ? gemm_sm90_experts_bf16(config.tokens, p.format)
                            : task.a_dtype == DType::f16             ? gemm_sm90_f16(config.tokens, p.format)
                            : task.a_dtype == DType::bf16            ? gemm_sm90_bf16(config.tokens, p.format)
                                                                     : nullptr;
  if (kernel == nullptr || task.m < 1) return cudaErrorInvalidValue;
  p.first_row = first_row;
  p.scale_after = task.weight.per_channel && task.weight.zero != ZeroKind::offset;
  const GemmShape shape{.tokens = config.tokens, .experts = experts};
  if (!describe_token_tiles(p, task.a_dtype, task.x, task.x_stride * 2, task.m, geo.k, config.tokens, experts ? shape.part() : 0))
    return cudaErrorInvalidValue;
  return launch(kernel, p, shape, task.scratch_end, stream);
}

}  // namespace

cudaError_t linear_gemm_sm90(const LinearTask& task, const GemmConfig& config, cudaStream_t stream) {
  if (readable_by_tma(task)) return run_rows(task, 0, config, stream);
  if (task.experts.tiles != nullptr) return cudaErrorInvalidAddressSpace;
  if (task.scratch == nullptr) return cudaErrorInvalidValue;
  // As many rows at a time as the scratch memory holds.
  const int k = static_cast<int>(task.weight.geometry.k), pitch = gathered_pitch(k);
  const int most = gathered_rows(task.m, k, task.weight.perm != nullptr || task.weight.prescale != nullptr);
  const GatherRule rule = gather_rule(task);
  for (int done = 0; done < task.m; done += most) {
    LinearTask part = task;
    part.m = std::min(most, task.m - done);
    const dim3 grid(static_cast<unsigned>((pitch / 8 - 1) / kGatherThreads + 1),
                    static_cast<unsigned>((part.m - 1) / kGatherRows + 1));
    const GatherParams params{.x = static_cast<const std::uint16_t*>(task.x) + done * task.x_stride,
                              .stride = task.x_stride,
                              .rule = rule,
                              .to = static_cast<std::uint16_t*>(task.scratch),
                              .pitch = pitch,
                              .rows = part.m};
    if (const cudaError_t e = launch_dependent(gather_activations, grid, kGatherThreads, 0, stream, params)) return e;
    part.x = task.scratch;
    part.x_stride = pitch;
    part.weight.perm = nullptr;
    part.weight.prescale = nullptr;
    if (const cudaError_t e = run_rows(part, done, config, stream)) return e;
  }
  return cudaSuccess;
}

cudaError_t linear_pairs_sm90(const PairTask& task, const GemmConfig& config, cudaStream_t stream) {
  GemmParams p = params(task, task.m, config);
  p.next = task.next;
  p.token_scales = task.scales;
  const GemmKernel kernel = gemm_sm90_pairs(config.tokens, p.format);
  if (kernel == nullptr || task.m < 1 || task.scales == nullptr) return cudaErrorInvalidValue;
  if (!describe_token_tiles(p, DType::f16, task.x, task.pitch * 2, task.m, task.pitch, config.tokens))
    return cudaErrorInvalidValue;
  return launch(kernel, p, {.tokens = config.tokens, .pairs = true}, task.scratch_end, stream);
}

namespace {

/// The kernel that reads NCHW images as they lie; null where there is none: it is of pointwise convolutions, whose D is NCHW, too.
GemmKernel planar_kernel(const ConvTask& task, const RecordFormat& format, int tokens) {
  const ImageStrides& a = task.a;
  const auto is_pitch = [](std::int64_t elements) { return elements > 0 && elements % 8 == 0; };  // of TMA
  if (!is_pointwise(task.patches) || !fill_boxes(task.patches.pixels()) || task.prescale != nullptr || a.pixel != 1 ||
      task.d.channel == 1 || !is_pitch(a.channel) || (task.images > 1 && !is_pitch(a.image)) ||
      reinterpret_cast<std::uintptr_t>(task.x) % 16 != 0)
    return nullptr;
  return task.a_dtype == DType::f16    ? gemm_sm90_planar_f16(tokens, format)
         : task.a_dtype == DType::bf16 ? gemm_sm90_planar_bf16(tokens, format)
                                       : nullptr;
}

cudaError_t run_planar(const ConvTask& task, GemmKernel kernel, const GemmConfig& config, cudaStream_t stream) {
  const Patches& patches = task.patches;
  const int pixels = patches.pixels(), image_tokens = planar_tokens(pixels);
  GemmParams p = params(task, task.images * image_tokens, config);
  p.scale_after = task.weight.per_channel && task.weight.zero != ZeroKind::offset;
  p.patches = patches;
  p.unused_tokens = image_tokens - pixels;
  describe_store(task, p);
  const std::int64_t image_pitch = task.images == 1 ? task.a.channel * patches.channels : task.a.image;
  if (!describe_planar(p.x, task.a_dtype, task.x, image_pitch * 2, task.a.channel * 2, task.images, patches.channels, pixels))
    return cudaErrorInvalidValue;
  return launch(kernel, p, {.tokens = config.tokens}, task.scratch_end, stream);
}

}  // namespace

cudaError_t conv_gemm_sm90(const ConvTask& task, const GemmConfig& config, cudaStream_t stream) {
  const Patches& patches = task.patches;
  const std::int64_t tokens = std::int64_t{task.images} * patches.pixels();
  if (tokens < 1 || tokens > std::numeric_limits<std::int32_t>::max() || patches.groups != 1 ||
      patches.channels % kPatchChannels != 0)
    return cudaErrorInvalidValue;
  if (const GemmKernel kernel = planar_kernel(task, record_format(task.weight), config.tokens))
    return run_planar(task, kernel, config, stream);
  const void* x = task.x;
  std::int64_t pitch = task.a.pixel * 2;
  if (task.a.channel != 1 || task.prescale != nullptr) {
    if (const cudaError_t e = channels_last(task, task.scratch, stream)) return e;
    x = task.scratch;
    pitch = std::int64_t{patches.channels} * 2;
  } else if (pitch % 16 != 0 || reinterpret_cast<std::uintptr_t>(x) % 16 != 0) {
    return cudaErrorInvalidAddressSpace;
  }
  GemmParams p = params(task, static_cast<int>(tokens), config);
  const GemmKernel kernel = task.a_dtype == DType::f16    ? gemm_sm90_patches_f16(config.tokens, p.format)
                            : task.a_dtype == DType::bf16 ? gemm_sm90_patches_bf16(config.tokens, p.format)
                                                          : nullptr;
  if (kernel == nullptr) return cudaErrorInvalidValue;
  p.scale_after = task.weight.per_channel && task.weight.zero != ZeroKind::offset;
  p.patches = patches;
  p.images = task.images;
  describe_store(task, p);
  if (!describe_patches(p.x, task.a_dtype, x, pitch, task.images, patches, kPatchChannels, config.tokens))
    return cudaErrorInvalidValue;
  return launch(kernel, p, {.tokens = config.tokens}, task.scratch_end, stream);
}

cudaError_t conv_wna8_sm90(const ConvTask& task, const GemmConfig& config, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  const Patches& patches = task.patches;
  const std::int64_t tokens = std::int64_t{task.images} * patches.pixels();
  if (tokens < 1 || tokens > std::numeric_limits<std::int32_t>::max() || patches.groups != 1 ||
      patches.channels % kPatchChannels != 0 || config.depth != 1)
    return cudaErrorInvalidValue;
  PixelCodes codes;
  if (const cudaError_t e = code_pixels(task, codes, stream)) return e;

  GemmParams p = params(task, static_cast<int>(tokens), config);
  const GemmKernel kernel = gemm_sm90_patches_s8(config.tokens, p.format, geo.bits, task.fold, task.online.zero_points);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  p.patches = patches;
  p.images = codes.planes * task.images;
  p.plane_images = task.images;
  p.plane_records = p.schedule.records;
  p.schedule.records *= codes.planes;
  p.box_channels = patches.channels % gpu_tile::kChannels == 0 ? gpu_tile::kChannels : kPatchChannels;
  describe_store(task, p);
  Patches of_terms = patches;  // as an image of bytes
  of_terms.channels = static_cast<int>(codes.term_pitch);
  if (!describe_patches(p.x, DType::s8, codes.x, patches.channels, p.images, patches, p.box_channels, config.tokens) ||
      !describe_patches(p.pixel_terms, DType::s8, codes.terms, of_terms.channels, p.images, of_terms, 16, config.tokens))
    return cudaErrorInvalidValue;
  return launch(kernel, p, {.tokens = config.tokens, .codes = true, .folds = gpu_tile::kChannels / task.fold, .patches = true},
                task.scratch_end, stream);
}

cudaError_t linear_wna8_sm90(const Wna8Task& task, const GemmConfig& config, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  GemmParams p = params(task, task.m, config);
  p.next = task.next;
  p.experts = task.experts;
  const bool offsets = task.zero == ZeroKind::offset, experts = p.experts.tiles != nullptr;
  if (experts && (config.split != 1 || task.zero != ZeroKind::none)) return cudaErrorInvalidValue;
  const auto kernel_of = experts                          ? gemm_sm90_experts_s8
                         : offsets                        ? gemm_sm90_s8_offsets
                         : task.zero == ZeroKind::integer ? gemm_sm90_s8_zeros
                         : task.token_scales != nullptr   ? gemm_sm90_s8_plain
                                                          : gemm_sm90_s8;
  const GemmKernel kernel = kernel_of(config.tokens, p.format, geo.bits, task.fold);
  if (kernel == nullptr || task.m < 1) return cudaErrorInvalidValue;
  p.terms = static_cast<const std::uint8_t*>(task.terms);
  p.fold_pitch = task.term_pitch * token_term_bytes(offsets);
  p.token_scales = task.token_scales;
  const GemmShape shape{
      .tokens = config.tokens, .codes = true, .folds = gpu_tile::kChannels / task.fold, .offsets = offsets, .experts = experts};
  if (!describe_token_tiles(p, DType::s8, task.codes, task.pitch, task.m, task.pitch, config.tokens, experts ? shape.part() : 0))
    return cudaErrorInvalidValue;
  return launch(kernel, p, shape, task.scratch_end, stream);
}

}  // namespace nibble::cuda
