#include "nibble/conv.hpp"

#include "core/error.hpp"
#include "core/sizes.hpp"

namespace nibble {
namespace {

std::int64_t outputs(std::int64_t padded, std::int64_t filter, std::int64_t dilation, std::int64_t stride) {
  const std::int64_t covered = dilation * (filter - 1) + 1;
  return padded < covered || stride < 1 ? 0 : (padded - covered) / stride + 1;
}

}  // namespace

std::int64_t ConvGeometry::out_height() const {
  return outputs(height + padding.top + padding.bottom, filter.h, dilation.h, stride.h);
}

std::int64_t ConvGeometry::out_width() const {
  return outputs(width + padding.left + padding.right, filter.w, dilation.w, stride.w);
}

Status ConvGeometry::validate() const {
  for (const std::int64_t size : {in_channels, out_channels, height, width, filter.h, filter.w, stride.h, stride.w, padding.top,
                                  padding.bottom, padding.left, padding.right, dilation.h, dilation.w, groups})
    if (size < -kMaxSize || size > kMaxSize)
      return error(StatusCode::invalid_argument, "a convolution has a size of {}, which is outside [0, {}]", size, kMaxSize);
  const char* wrong = nullptr;
  if (in_channels < 1 || out_channels < 1 || height < 1 || width < 1)
    wrong = "sizes must be at least 1";
  else if (filter.h < 1 || filter.w < 1 || stride.h < 1 || stride.w < 1 || dilation.h < 1 || dilation.w < 1)
    wrong = "filter, stride and dilation must be at least 1";
  else if (padding.top < 0 || padding.bottom < 0 || padding.left < 0 || padding.right < 0)
    wrong = "padding must not be negative";
  else if (groups < 1 || in_channels % groups != 0 || out_channels % groups != 0)
    wrong = "groups must divide both numbers of channels";
  else if (out_height() < 1 || out_width() < 1)
    wrong = "the filter does not fit into the padded image";
  if (wrong == nullptr) {
    const std::int64_t k = product({filter.h, filter.w, group_inputs()});
    if (k <= kMaxSize) return {};
    return error(StatusCode::invalid_argument, "a patch of {}x{} elements of {} channels has more than {}", filter.h, filter.w,
                 group_inputs(), kMaxSize);
  }
  return error(
      StatusCode::invalid_argument,
      "convolution of [{},{},{}] with a filter [{},{}/{},{},{}], stride {}x{}, padding {},{},{},{} (top, bottom, left, right), "
      "dilation {}x{}, which gives an output of {}x{}: {}",
      in_channels, height, width, out_channels, in_channels, groups, filter.h, filter.w, stride.h, stride.w, padding.top,
      padding.bottom, padding.left, padding.right, dilation.h, dilation.w, out_height(), out_width(), wrong);
}

Status check_batch(const ConvGeometry& g, std::int64_t batch) {
  NIBBLE_RETURN_IF_ERROR(g.validate());
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"batch_max", batch}}));
  const std::int64_t pixels = product({batch, g.out_height(), g.out_width()});
  if (pixels > kMaxSize)
    return error(StatusCode::invalid_argument, "batch_max={} images of {}x{} outputs have more than {}", batch, g.out_height(),
                 g.out_width(), kMaxSize);
  NIBBLE_RETURN_IF_ERROR(check_elements("A with its padding", {batch, g.in_channels, g.height + g.padding.top + g.padding.bottom,
                                                               g.width + g.padding.left + g.padding.right}));
  NIBBLE_RETURN_IF_ERROR(check_elements("A as patches", {pixels, g.groups, g.k()}));
  return check_elements("D", {pixels, g.out_channels});
}

std::string_view name(ImageLayout layout) { return layout == ImageLayout::nchw ? "nchw" : "nhwc"; }

}  // namespace nibble
