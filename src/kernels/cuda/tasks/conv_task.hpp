// What the launchers of convolutions take (conv.hpp): plain values, host and device.
#pragma once

#include "epilogue/element.hpp"
#include "kernels/cuda/tasks/linear_task.hpp"
#include "kernels/cuda/tasks/patches.hpp"
#include "kernels/cuda/tasks/w8a8_task.hpp"
#include "kernels/cuda/tasks/wna8_task.hpp"

namespace nibble::cuda {

/// Images in device memory: A[B,Ci,H,W] and D[B,Co,Oh,Ow]. Gate and residual are images of D's layout; where channels are side by side, row m
/// of them is output pixel m of all images.
struct ConvTask {
  Patches patches;
  int images = 0;
  DType a_dtype = DType::f16;
  const void* x = nullptr;
  ImageStrides a, d;                // elements
  const float* prescale = nullptr;  // [channels of a group]: what the pixels of each group are multiplied by first; null: nothing
  void* scratch = nullptr;
  void* scratch_end = nullptr;  // memory for stream-K ends here (stream_k.hpp)
  epilogue::Element epilogue;   // d_stride is d.pixel

  DeviceWeight weight;  // packed as gpu_n64k128, or
  W8A8Weight scaled;    // as gpu_w8n64k128, for activations that are codes:
  QuantizedActs acts;   // their scale and zero point; codes are x itself, or quantized from a float x

  QuantizeTask online;       // the rule of codes that `weight` is multiplied by; a, its size and the outputs are not set
  int fold = 0;              // channels whose products are summed as integers: 128 or 32; 0: activations are not quantized
  bool fixed_point = false;  // instead of `online`: f32 as the bytes of fixed-point numbers (steps/fixed_point_acts.hpp)
};

/// The places of an image of codes in a plan's workspace: codes [B][H'][W'][C] with their padding | sums s32 of each group's patches'
/// codes.
struct CodesMap {
  std::size_t sums = 0, bytes = 0;
};
constexpr CodesMap codes_map(const Patches& patches, std::int64_t images, bool with_sums) {
  const auto round_up = [](std::int64_t bytes) { return static_cast<std::size_t>((bytes + 255) / 256 * 256); };
  const Patches frame = padded(patches);
  CodesMap map;
  map.sums = round_up(images * frame.height * frame.width * frame.channels * frame.groups);
  map.bytes = map.sums + (with_sums ? round_up(4 * images * patches.pixels() * patches.groups) : 0);
  return map;
}

}  // namespace nibble::cuda
