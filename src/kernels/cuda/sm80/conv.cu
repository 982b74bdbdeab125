// The same GEMM (gemm_kernel.cuh) of patches of images: a convolution of weights as codes and 16-bit floats, any geometry.
#include "kernels/cuda/sm80/gemm_kernel.cuh"
#include "kernels/cuda/tasks/conv.hpp"

namespace nibble::cuda {
namespace {

/// Cycles are those of rows of a matrix and, for 4 copies of a thread and record, about 130 for the gather: 15 instructions each.
/// 256 rows would leave no registers for it.
constexpr Variant kVariants[] = {variant<Shape<2, 64>, true>(1030), variant<Shape<1, 64>, true>(730),
                                 variant<Shape<1, 32>, true>(400)};

}  // namespace

cudaError_t conv_gemm_sm80(const ConvTask& task, cudaStream_t stream) {
  const Patches& patches = task.patches;
  const std::int64_t tokens = std::int64_t{task.images} * patches.pixels();
  if (tokens < 1 || tokens > std::numeric_limits<std::int32_t>::max() || patches.channels % 8 != 0 ||
      (patches.groups > 1 && patches.group_outputs % gpu_tile::kRows != 0) ||
      (task.a_dtype != DType::f16 && task.a_dtype != DType::bf16))
    return cudaErrorInvalidValue;
  Params p = params(task.weight, task.epilogue, static_cast<int>(tokens));
  p.patches = patches;
  p.x = static_cast<const std::uint16_t*>(task.x);
  p.x_stride = task.a.pixel;
  if (task.a.channel != 1 || task.prescale != nullptr) {
    if (const cudaError_t e = channels_last(task, task.scratch, stream)) return e;
    p.x = static_cast<const std::uint16_t*>(task.scratch);
    p.x_stride = std::int64_t{patches.channels} * patches.groups;
  } else if ((reinterpret_cast<std::uintptr_t>(p.x) | static_cast<std::uintptr_t>(p.x_stride * 2)) % 16 != 0) {
    return cudaErrorInvalidAddressSpace;
  }
  if (task.d.channel != 1) {
    p.image_stride = task.d.image;
    p.channel_stride = task.d.channel;
  }
  return launch(kVariants, p, task.a_dtype, stream);
}

}  // namespace nibble::cuda
