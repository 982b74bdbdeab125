#include "kernels/image.hpp"

#include "core/error.hpp"

namespace nibble {

Result<Image> image_of(std::string_view what, const ConstTensorView& v, ImageLayout layout, std::int64_t batch,
                       std::int64_t channels, std::int64_t height, std::int64_t width) {
  if (v.empty()) return error(StatusCode::invalid_argument, "{} has no data", what);
  if (v.rank != 4 || v.dim(0) != batch || v.dim(1) != channels || v.dim(2) != height || v.dim(3) != width)
    return error(StatusCode::invalid_argument, "{} must be [{},{},{},{}], got rank {} and [{},{},{},{}]", what, batch, channels,
                 height, width, v.rank, v.dim(0), v.dim(1), v.dim(2), v.dim(3));
  Image image{.data = const_cast<void*>(v.data), .dtype = v.dtype};
  const std::int64_t pixels = height * width;
  // The stride of a dimension of 1 is arbitrary: the next one takes its place.
  const std::int64_t between_rows = height > 1 ? v.stride(2) : 0;
  bool fits = true;
  if (layout == ImageLayout::nchw) {
    image.pixel = pixels > 1 || channels == 1 ? 1 : channels;
    image.channel = channels > 1 ? v.stride(1) : pixels;
    image.image = batch > 1 ? v.stride(0) : channels * image.channel;
    fits = (width == 1 || v.stride(3) == 1) && (height == 1 || between_rows == width) &&
           (pixels == 1 ? channels == 1 || image.channel == 1 : image.channel >= pixels) &&
           image.image >= (channels - 1) * image.channel + pixels;
    if (pixels == 1) image.pixel = image.image;
  } else {
    image.channel = 1;
    image.pixel = width > 1 ? v.stride(3) : height > 1 ? between_rows : batch > 1 ? v.stride(0) : channels;
    image.image = pixels * image.pixel;
    fits = (channels == 1 || v.stride(1) == 1) && image.pixel >= channels &&
           (height == 1 || between_rows == width * image.pixel) && (batch == 1 || v.stride(0) == image.image);
  }
  if (fits) return image;
  return error(StatusCode::invalid_argument, "{} [{},{},{},{}] has strides {},{},{},{}, which is not {}: {}", what, batch,
               channels, height, width, v.stride(0), v.stride(1), v.stride(2), v.stride(3), name(layout),
               layout == ImageLayout::nchw ? "pixels of a channel lie side by side, and channels of 1×1 images"
                                           : "channels of a pixel lie side by side, and pixels evenly through all images");
}

}  // namespace nibble
