// A test's convolution: its geometry, and its sums one by one.
#pragma once

#include <cmath>
#include <cstddef>

#include "kernels/cuda/patches.hpp"

namespace nibble::emulator {

template <class Case>
cuda::Patches patches(const Case& c) {
  const auto size = [&](int in) { return (in + 2 * c.padding - c.dilation * (c.kernel - 1) - 1) / c.stride + 1; };
  cuda::Patches p{.channels = c.channels,
                  .group_outputs = c.outputs,
                  .height = c.height,
                  .width = c.width,
                  .kernel_h = c.kernel,
                  .kernel_w = c.kernel,
                  .stride_h = c.stride,
                  .stride_w = c.stride};
  p.top = p.bottom = p.left = p.right = c.padding;
  p.dilation_h = p.dilation_w = c.dilation;
  p.out_height = size(c.height), p.out_width = size(c.width);
  return p;
}

struct ConvSum {
  double sum = 0, magnitude = 0;
};
/// Calls check(image, pixel of it, n, sum) for every number of D. act(i) is number i of the images, channels
/// last; weight(n, k) is of the kernel's elements in order, each with its channels.
template <class Act, class Weight, class Check>
void for_each_sum(const cuda::Patches& p, int images, Act act, Weight weight, Check check) {
  for (int n = 0; n < p.group_outputs; ++n)
    for (int image = 0; image < images; ++image)
      for (int oh = 0; oh < p.out_height; ++oh)
        for (int ow = 0; ow < p.out_width; ++ow) {
          ConvSum s;
          for (int kh = 0; kh < p.kernel_h; ++kh)
            for (int kw = 0; kw < p.kernel_w; ++kw) {
              const int h = oh * p.stride_h - p.top + kh * p.dilation_h, w = ow * p.stride_w - p.left + kw * p.dilation_w;
              if (h < 0 || h >= p.height || w < 0 || w >= p.width) continue;
              for (int i = 0; i < p.channels; ++i) {
                const double product = act(static_cast<std::size_t>(((image * p.height + h) * p.width + w) * p.channels + i)) *
                                       weight(n, (kh * p.kernel_w + kw) * p.channels + i);
                s.sum += product, s.magnitude += std::abs(product);
              }
            }
          check(image, oh * p.out_width + ow, n, s);
        }
}

}  // namespace nibble::emulator
