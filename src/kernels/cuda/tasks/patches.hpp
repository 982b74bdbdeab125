// A convolution in the kernels: tokens are output pixels, and a token's activations are the patch of its image under the filter. Plain
// values, host and device.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace nibble::cuda {

/// The channels of a pixel in a TMA box, or half of them: 128 bytes of 16-bit floats, 64 or 128 of codes.
constexpr int kPatchChannels = 64;
/// The pixels of a channel in a TMA box of images whose pixels are side by side: 128 bytes of 16-bit floats.
constexpr int kPlanarPixels = 64;
/// The tokens that such an image counts for, because a box has pixels of one image; and whether they are worth it, at most a quarter being none.
constexpr int planar_tokens(int pixels) { return (pixels + kPlanarPixels - 1) / kPlanarPixels * kPlanarPixels; }
constexpr bool fill_boxes(int pixels) { return planar_tokens(pixels) - pixels <= planar_tokens(pixels) / 4; }

struct Patches {
  int channels = 0;  // of a pixel and group; 0: no convolution, tokens are rows of a matrix
  int groups = 1, group_outputs = 1;
  int height = 1, width = 1, out_height = 1, out_width = 1;
  int filter_h = 1, filter_w = 1;
  int stride_h = 1, stride_w = 1;
  int top = 0, bottom = 0, left = 0, right = 0;
  int dilation_h = 1, dilation_w = 1;

  NIBBLE_HOST_DEVICE constexpr int pixels() const { return out_height * out_width; }  // of an output image
};

/// Whether an output pixel is made of the input pixel in its place.
NIBBLE_HOST_DEVICE constexpr bool is_pointwise(const Patches& p) {
  return p.filter_h == 1 && p.filter_w == 1 && p.stride_h == 1 && p.stride_w == 1 && p.groups == 1 && p.top == 0 &&
         p.bottom == 0 && p.left == 0 && p.right == 0;
}

/// The corner of output pixel `token` of all images in its image, padding counted: may be negative.
struct Corner {
  int image, h, w;
};
NIBBLE_HOST_DEVICE constexpr Corner corner(const Patches& p, int token) {
  const int image = token / p.pixels(), pixel = token % p.pixels();
  return {image, pixel / p.out_width * p.stride_h - p.top, pixel % p.out_width * p.stride_w - p.left};
}

/// The patches of images whose padding is in memory.
NIBBLE_HOST_DEVICE constexpr Patches padded(Patches p) {
  p.height += p.top + p.bottom;
  p.width += p.left + p.right;
  p.top = p.bottom = p.left = p.right = 0;
  return p;
}

/// A channel of the patches: channel c of a pixel, of the filter's element (kh, kw). Kernels walk along the channels, which takes no
/// divisions.
struct PatchChannel {
  int c, kw, kh;
};
NIBBLE_HOST_DEVICE constexpr PatchChannel patch_channel(const Patches& p, int channel) {
  const int element = channel / p.channels;
  return {channel % p.channels, element % p.filter_w, element / p.filter_w};
}
/// Advances by as many channels as `step` is from the first one.
NIBBLE_HOST_DEVICE constexpr void advance(PatchChannel& at, const Patches& p, const PatchChannel& step) {
  at.c += step.c, at.kw += step.kw, at.kh += step.kh;
  if (at.c >= p.channels) at.c -= p.channels, ++at.kw;
  if (at.kw >= p.filter_w) at.kw -= p.filter_w, ++at.kh;
}

/// The index, over all images, of the pixel under an element of the filter that begins at `from`; negative for padding and past the last
/// element.
NIBBLE_HOST_DEVICE constexpr int pixel_under(const Patches& p, const Corner& from, const PatchChannel& at) {
  const int h = from.h + at.kh * p.dilation_h, w = from.w + at.kw * p.dilation_w;
  const bool inside = at.kh < p.filter_h && static_cast<unsigned>(h) < static_cast<unsigned>(p.height) &&
                      static_cast<unsigned>(w) < static_cast<unsigned>(p.width);
  return inside ? (from.image * p.height + h) * p.width + w : -1;
}

/// Channels [c, …) of one element of the filter, for consecutive output pixels, as coordinates of TMA (ptx::load_patches): where the
/// filter begins at the first of them, and the offset of the element.
struct PatchBox {
  int c, w, h, image;
  int right, down;
};
/// Past the last element the box is of an image that does not exist, and all zeros.
NIBBLE_HOST_DEVICE constexpr PatchBox patch_box(const Patches& p, int images, const PatchChannel& at, const Corner& from) {
  if (at.kh >= p.filter_h) return {0, from.w, from.h, images, 0, 0};
  return {at.c, from.w, from.h, from.image, at.kw * p.dilation_w, at.kh * p.dilation_h};
}
/// The boxes of a tile of output pixels, one after the other.
struct PatchWalk {
  PatchChannel at, step;
  Corner from;

  NIBBLE_HOST_DEVICE constexpr PatchBox next(const Patches& p, int images) {
    const PatchBox box = patch_box(p, images, at, from);
    advance(at, p, step);
    return box;
  }
};
/// From channel `channel` on, `step` at a time, for output pixels from `token` on.
NIBBLE_HOST_DEVICE constexpr PatchWalk patch_walk(const Patches& p, int channel, int step, int token) {
  return {patch_channel(p, channel), patch_channel(p, step), corner(p, token)};
}

/// The range in which filters may begin, as TMA's corners: from `lower` to the image's far corner plus `upper`, which is negative inside
/// of the image.
struct PatchBounds {
  int lower_w, lower_h, upper_w, upper_h;
};
NIBBLE_HOST_DEVICE constexpr PatchBounds patch_bounds(const Patches& p) {
  return {-p.left, -p.top, p.right - (p.filter_w - 1) * p.dilation_w, p.bottom - (p.filter_h - 1) * p.dilation_h};
}

/// The offset of channels [32·i, …) of a record of codes in shared memory, in units of 16 bytes: `tokens` × 128 channels are one box,
/// whose rows are 128 bytes, or two of 64, one after the other.
NIBBLE_HOST_DEVICE constexpr int code_columns(int i, int box_channels, int tokens) {
  return box_channels == kPatchChannels ? i / 2 * tokens * kPatchChannels / 16 + i % 2 * 2 : i * 2;
}

/// Elements from one image, pixel and channel to the next.
struct ImageStrides {
  std::int64_t image = 0, pixel = 0, channel = 0;
};

/// The place of channel 0 of pixel `pixel` of an image, counted with the padding around it; negative where the pixel is padding, or none.
NIBBLE_HOST_DEVICE constexpr std::int64_t framed(const Patches& p, const ImageStrides& a, int image, int pixel) {
  const int across = p.left + p.width + p.right, h = pixel / across - p.top, w = pixel % across - p.left;
  if (h < 0 || h >= p.height || w < 0 || w >= p.width) return -1;
  return image * a.image + (std::int64_t{h} * p.width + w) * a.pixel;
}

}  // namespace nibble::cuda
