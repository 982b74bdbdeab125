// Replaces src/kernels/cuda/device/tensor_map.hpp.
#pragma once

#include <cuda.h>

#include "kernels/cuda/tasks/patches.hpp"
#include "nibble/types.hpp"

namespace nibble::cuda {

inline int bytes_of(DType type) { return type == DType::f16 || type == DType::bf16 ? 2 : 1; }
inline bool describe_rows(CUtensorMap& map, DType type, const void* x, std::int64_t pitch, std::int64_t m, std::int64_t k,
                          int rows) {
  map = {};
  map.element = bytes_of(type);
  map.bytes = static_cast<const std::uint8_t*>(x), map.pitch = pitch, map.m = m, map.row_bytes = k * map.element;
  map.box_rows = rows, map.box_bytes = 128;
  return rows <= 256;
}
inline bool describe_planar(CUtensorMap& map, DType type, const void* x, std::int64_t image_pitch, std::int64_t channel_pitch,
                            std::int64_t images, std::int64_t channels, std::int64_t pixels) {
  if (!describe_rows(map, type, x, channel_pitch, channels, pixels, kPatchChannels)) return false;
  map.images = static_cast<int>(images), map.plane_pitch = image_pitch;
  return channel_pitch % 16 == 0 && image_pitch % 16 == 0 && reinterpret_cast<std::uintptr_t>(x) % 16 == 0;
}
inline bool describe_patches(CUtensorMap& map, DType type, const void* x, std::int64_t pitch, std::int64_t batch,
                             const Patches& p, int channels, int tokens) {
  const PatchBounds bounds = patch_bounds(p);
  map = {};
  map.bytes = static_cast<const std::uint8_t*>(x), map.pitch = pitch;
  map.images = static_cast<int>(batch), map.height = p.height, map.width = p.width;
  map.lower_w = bounds.lower_w, map.lower_h = bounds.lower_h;
  map.last_w = p.width - 1 + bounds.upper_w, map.last_h = p.height - 1 + bounds.upper_h;
  map.stride_w = p.stride_w, map.stride_h = p.stride_h;
  map.element = bytes_of(type);
  map.box_rows = tokens, map.box_bytes = channels * map.element;
  return tokens <= 256 && map.box_bytes <= 128;
}

}  // namespace nibble::cuda
