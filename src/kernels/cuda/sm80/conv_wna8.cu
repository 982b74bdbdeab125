// The products of wna8_kernel.cuh on patches of images: a convolution of weights as codes, and of activations that were quantized while
// running, came as codes, or are f32 as the bytes of fixed-point numbers.
#include <algorithm>
#include <limits>

#include "kernels/cuda/sm80/wna8_kernel.cuh"
#include "kernels/cuda/tasks/conv.hpp"

namespace nibble::cuda {
namespace {

template <int kBits>
Kernel kernel_for(ConstantsPath path) {
  constexpr ActTerms kTerms = ActTerms::scaled;
  if (path == ConstantsPath::fixed_zeros)
    return &kLaunchable<wna8_sm80_kernel<kBits, ConstantsPath::fixed_zeros, kMany, kTerms, false, true>>;
  return path == ConstantsPath::integer_zeros
             ? &kLaunchable<wna8_sm80_kernel<kBits, ConstantsPath::integer_zeros, kMany, kTerms, false, true>>
             : &kLaunchable<wna8_sm80_kernel<kBits, ConstantsPath::any, kMany, kTerms, false, true>>;
}

}  // namespace

cudaError_t conv_wna8_sm80(const ConvTask& task, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  const Patches& patches = task.patches;
  const std::int64_t tokens = std::int64_t{task.images} * patches.pixels();
  if (tokens < 1 || tokens > std::numeric_limits<std::int32_t>::max() || patches.channels % kPatchChannels != 0 ||
      (patches.groups > 1 && patches.group_outputs % gpu_tile::kRows != 0) || task.online.zero_points)
    return cudaErrorInvalidValue;
  PixelCodes codes;
  if (const cudaError_t e = code_pixels(task, codes, stream)) return e;

  Params p{};
  p.records = static_cast<const std::uint8_t*>(task.weight.records);
  p.format = record_format(task.weight);
  p.codes = reinterpret_cast<const std::uint8_t*>(codes.x);
  p.pitch = std::int64_t{patches.channels} * patches.groups;
  p.terms = reinterpret_cast<const std::uint8_t*>(codes.terms);
  p.pixel_terms = codes.term_pitch;
  p.epilogue = task.epilogue;
  p.m = static_cast<int>(tokens);
  p.n = static_cast<int>(geo.n);
  p.k = static_cast<int>(geo.k);
  p.planes = codes.planes;
  p.plane_pixels = task.images * patches.height * patches.width;
  p.tile_records = codes.planes * geo.records();
  p.token_blocks = (p.m + kMany - 1) / kMany;
  p.stage_bytes = stage_bytes(kMany, false, task.fold == gpu_tile::kChannels ? kTermBox : 2 * kTermBox, p.format.bytes);
  p.patches = patches;
  if (task.d.channel != 1) {
    p.image_stride = task.d.image;
    p.channel_stride = task.d.channel;
  }
  const ConstantsPath path = code_constants_path(p.format, task.fold);
  const Kernel kernel = geo.bits == 4 ? kernel_for<4>(path) : kernel_for<8>(path);
  const std::int64_t ctas = std::int64_t{geo.tiles()} * p.token_blocks;
  int stages = 0;
  if (const cudaError_t e = ring_stages_of_device(kStages, stages)) return e;
  const int smem = std::max(stages * p.stage_bytes + kMany * kCornerBytes, kMany * kSumPitch * 4);
  if (ctas > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  if (const cudaError_t e = kernel->allow_all_shared()) return e;
  return launch_dependent(kernel->kernel, static_cast<unsigned>(ctas), static_cast<unsigned>(kThreads), smem, stream, p);
}

}  // namespace nibble::cuda
