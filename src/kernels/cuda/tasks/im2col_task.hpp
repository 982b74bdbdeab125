// The steps around a convolution that runs as a linear layer (steps/im2col.hpp): plain values, host and device.
#pragma once

#include <cstdint>

#include "kernels/cuda/tasks/patches.hpp"

namespace nibble::cuda {

/// The patches of some output pixels, as rows of a matrix in memory. One group.
struct Im2colTask {
  const void* x = nullptr;  // images
  ImageStrides a;
  int element = 2;  // bytes of an activation: 1, 2 or 4
  Patches patches;
  int first = 0, tokens = 0;           // the output pixels, counted over all images
  std::int32_t pad = 0;                // the code of padding, of activations of a byte; of others padding is the number 0
  const std::int32_t* pads = nullptr;  // in place of `pad`, in device memory
  void* rows = nullptr;                // [tokens][pitch], at a multiple of 16 bytes
  std::int64_t pitch = 0;              // bytes, a multiple of 16; what follows a patch is padding
};

/// Rows of outputs, and the images [B,C,H,W] that they go to.
struct Col2imTask {
  const void* rows = nullptr;    // [tokens][pitch]
  std::int64_t pitch = 0;        // elements
  int element = 2;               // bytes of one: 1, 2 or 4
  int channels = 0, pixels = 0;  // of an image
  int first = 0, tokens = 0;     // as above
  ImageStrides d;
  void* images = nullptr;
};

}  // namespace nibble::cuda
