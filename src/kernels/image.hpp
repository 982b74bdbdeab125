// The images of a convolution in kernels: three strides, whatever the layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "nibble/conv.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// Pixels p = h·W + w are evenly spaced in both layouts.
struct Image {
  void* data = nullptr;  // not written if the view was read-only
  DType dtype = DType::none;
  std::int64_t image = 0, pixel = 0, channel = 0;  // elements from one to the next

  bool channels_last() const { return channel == 1; }
  std::int64_t width() const { return bits(dtype) / 8; }
  std::byte* at(std::int64_t b, std::int64_t p, std::int64_t c) const {
    return static_cast<std::byte*>(data) + (b * image + p * pixel + c * channel) * width();
  }
  /// [rows, channels] of an image with its channels side by side, from a pixel and a channel on. Pixels run on through all images.
  TensorView matrix(std::int64_t b, std::int64_t p, std::int64_t c, std::int64_t rows, std::int64_t channels) const {
    TensorView view(at(b, p, c), dtype, {rows, channels});
    view.strides[0] = pixel;
    return view;
  }
};

/// The image of a view [B,C,H,W]. Errors: invalid_argument where it is not of that shape, or not as its layout says (ImageLayout), with
/// the values.
Result<Image> image_of(std::string_view what, const ConstTensorView& view, ImageLayout layout, std::int64_t batch,
                       std::int64_t channels, std::int64_t height, std::int64_t width);

}  // namespace nibble
