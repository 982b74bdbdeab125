#include "nibble/conv.hpp"

#include "core/error.hpp"

namespace nibble {
namespace {

std::int64_t outputs(std::int64_t padded, std::int64_t kernel, std::int64_t dilation, std::int64_t stride) {
  const std::int64_t covered = dilation * (kernel - 1) + 1;
  return padded < covered || stride < 1 ? 0 : (padded - covered) / stride + 1;
}

}  // namespace

std::int64_t ConvGeometry::out_height() const {
  return outputs(height + padding.top + padding.bottom, kernel.h, dilation.h, stride.h);
}

std::int64_t ConvGeometry::out_width() const {
  return outputs(width + padding.left + padding.right, kernel.w, dilation.w, stride.w);
}

Status ConvGeometry::validate() const {
  // Beyond these the arithmetic on sizes could overflow.
  constexpr std::int64_t kLargest = std::int64_t{1} << 30;
  for (const std::int64_t size : {in_channels, out_channels, height, width, kernel.h, kernel.w, stride.h, stride.w, padding.top,
                                  padding.bottom, padding.left, padding.right, dilation.h, dilation.w, groups})
    if (size > kLargest) return error(StatusCode::invalid_argument, "a convolution has a size of {}; {} at most", size, kLargest);
  const char* wrong = nullptr;
  if (in_channels < 1 || out_channels < 1 || height < 1 || width < 1)
    wrong = "sizes must be at least 1";
  else if (kernel.h < 1 || kernel.w < 1 || stride.h < 1 || stride.w < 1 || dilation.h < 1 || dilation.w < 1)
    wrong = "kernel, stride and dilation must be at least 1";
  else if (padding.top < 0 || padding.bottom < 0 || padding.left < 0 || padding.right < 0)
    wrong = "padding must not be negative";
  else if (groups < 1 || in_channels % groups != 0 || out_channels % groups != 0)
    wrong = "groups must divide both numbers of channels";
  else if (out_height() < 1 || out_width() < 1)
    wrong = "the kernel does not fit into the padded image";
  if (wrong == nullptr) return {};
  return error(
      StatusCode::invalid_argument,
      "convolution of [{},{},{}] with a kernel [{},{}/{},{},{}], stride {}x{}, padding {},{},{},{} (top, bottom, left, right), "
      "dilation {}x{}, which gives an output of {}x{}: {}",
      in_channels, height, width, out_channels, in_channels, groups, kernel.h, kernel.w, stride.h, stride.w, padding.top,
      padding.bottom, padding.left, padding.right, dilation.h, dilation.w, out_height(), out_width(), wrong);
}

std::string_view name(ImageLayout layout) { return layout == ImageLayout::nchw ? "nchw" : "nhwc"; }

}  // namespace nibble
