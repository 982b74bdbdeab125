// A convolution as kernels see it: tokens are output pixels, and a token's activations are the patch of its image under the kernel.
// Plain values, host and device.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace nibble::cuda {

/// Channels that TMA brings of a pixel at a time: 128 bytes of 16-bit floats.
constexpr int kPatchChannels = 64;

struct Patches {
  int channels = 0;  // of a pixel and group; 0: no convolution, tokens are rows of a matrix
  int groups = 1, group_outputs = 1;
  int height = 1, width = 1, out_height = 1, out_width = 1;
  int kernel_h = 1, kernel_w = 1;
  int stride_h = 1, stride_w = 1;
  int top = 0, bottom = 0, left = 0, right = 0;
  int dilation_h = 1, dilation_w = 1;

  NIBBLE_HOST_DEVICE constexpr int pixels() const { return out_height * out_width; }  // of an output image
};

/// Where output pixel `token` of all images begins in its image, padding counted: may be negative.
struct Corner {
  int image, h, w;
};
NIBBLE_HOST_DEVICE constexpr Corner corner(const Patches& p, int token) {
  const int image = token / p.pixels(), pixel = token % p.pixels();
  return {image, pixel / p.out_width * p.stride_h - p.top, pixel % p.out_width * p.stride_w - p.left};
}

/// Elements from one image, pixel and channel to the next.
struct ImageStrides {
  std::int64_t image = 0, pixel = 0, channel = 0;
};

}  // namespace nibble::cuda
