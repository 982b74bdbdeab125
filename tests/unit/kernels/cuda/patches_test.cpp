// Patches in the GPU's kernels: the coordinates for TMA are simulated on the host and compared with the definition of patches.
#include "kernels/cuda/tasks/patches.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/cuda/tasks/conv_task.hpp"
#include "nibble/conv.hpp"

namespace nibble::cuda {
namespace {

/// Filters of 1×1 to 3×4, strides, dilations, paddings of all sides, one and two groups of 64 channels.
std::vector<Patches> geometries(int channels_unit) {
  std::vector<Patches> list;
  std::uint32_t dice = 1;
  const auto in = [&dice](int low, int high) {
    dice = dice * 1664525 + 1013904223;
    return low + static_cast<int>(dice >> 8) % (high - low + 1);
  };
  while (list.size() < 200) {
    Patches p{
        .channels = channels_unit * in(1, 3), .height = in(1, 9), .width = in(1, 11), .filter_h = in(1, 3), .filter_w = in(1, 4)};
    p.stride_h = in(1, 3), p.stride_w = in(1, 3);
    p.dilation_h = in(1, 3), p.dilation_w = in(1, 2);
    p.top = in(0, p.filter_h), p.bottom = in(0, p.filter_h), p.left = in(0, p.filter_w), p.right = in(0, p.filter_w);
    const ConvGeometry g{.in_channels = p.channels,
                         .height = p.height,
                         .width = p.width,
                         .filter = {p.filter_h, p.filter_w},
                         .stride = {p.stride_h, p.stride_w},
                         .padding = {p.top, p.bottom, p.left, p.right},
                         .dilation = {p.dilation_h, p.dilation_w}};
    if (!g.validate().ok()) continue;
    p.out_height = static_cast<int>(g.out_height()), p.out_width = static_cast<int>(g.out_width());
    list.push_back(p);
  }
  return list;
}

/// A pixel of an image, or none.
struct Pixel {
  int image = 0, h = 0, w = 0;
  bool exists = false;
};
/// The pixel under element (kh, kw) of the filter at an output pixel: the definition.
Pixel under(const Patches& p, int token, int kh, int kw) {
  const int image = token / p.pixels(), oh = token % p.pixels() / p.out_width, ow = token % p.out_width;
  const int h = oh * p.stride_h + kh * p.dilation_h - p.top, w = ow * p.stride_w + kw * p.dilation_w - p.left;
  return {image, h, w, h >= 0 && h < p.height && w >= 0 && w < p.width};
}

/// Pixel `i` of a box in TMA's walk over images: from (w, h) on in steps of the strides, to the bounds and on to the next row and image;
/// then the shift.
Pixel brought(const Patches& p, int images, const PatchBox& box, int i) {
  const PatchBounds bounds = patch_bounds(p);
  int image = box.image, h = box.h, w = box.w;
  for (; i > 0; --i) {
    w += p.stride_w;
    if (w < p.width + bounds.upper_w) continue;
    w = bounds.lower_w;
    h += p.stride_h;
    if (h < p.height + bounds.upper_h) continue;
    h = bounds.lower_h;
    ++image;
  }
  h += box.down, w += box.right;
  return {image, h, w, image < images && h >= 0 && h < p.height && w >= 0 && w < p.width};
}

TEST(Patches, TmaBringsThem) {
  constexpr int kImages = 2, kTokens = 16;
  for (const Patches& p : geometries(64))
    for (int step : {64, 128}) {
      if (p.channels % step != 0) continue;
      const int k = p.filter_h * p.filter_w * p.channels, tokens = kImages * p.pixels();
      for (int first = 0; first < tokens; first += kTokens)
        for (int begin : {0, 128}) {  // a CTA that shares K begins at a record
          PatchWalk walk = patch_walk(p, begin, step, first);
          for (int channel = begin; channel < (k + 127) / 128 * 128; channel += step) {
            const PatchBox box = walk.next(p, kImages);
            for (int i = 0; i < kTokens; ++i) {
              const Pixel got = brought(p, kImages, box, i);
              if (channel >= k) {
                ASSERT_FALSE(got.exists);
                continue;
              }
              const int element = channel / p.channels;
              const Pixel expected = under(p, first + i, element / p.filter_w, element % p.filter_w);
              ASSERT_EQ(box.c, channel % p.channels);
              ASSERT_EQ(got.exists, expected.exists && first + i < tokens) << "pixel " << first + i << ", channel " << channel;
              if (!got.exists) continue;
              ASSERT_EQ(got.image, expected.image);
              ASSERT_EQ(got.h, expected.h);
              ASSERT_EQ(got.w, expected.w);
            }
          }
        }
    }
}

TEST(Patches, AChannelIsWalkedToInAnySteps) {
  for (const Patches& p : geometries(8))
    for (int step : {8, 64, 128, 512}) {
      const PatchChannel by = patch_channel(p, step);
      PatchChannel at = patch_channel(p, 24);
      for (int channel = 24; channel < 4000; channel += step) {
        const PatchChannel expected = patch_channel(p, channel);
        ASSERT_EQ(at.c, expected.c);
        ASSERT_EQ(at.kw, expected.kw);
        ASSERT_EQ(at.kh, expected.kh);
        advance(at, p, by);
      }
    }
}

TEST(Patches, APixelIsFoundWhereItIs) {
  for (const Patches& p : geometries(8))
    for (int token = 0; token < 2 * p.pixels(); ++token)
      for (int kh = 0; kh <= p.filter_h; ++kh)
        for (int kw = 0; kw < p.filter_w; ++kw) {
          const Pixel expected = under(p, token, kh, kw);
          ASSERT_EQ(pixel_under(p, corner(p, token), {0, kw, kh}),
                    expected.exists && kh < p.filter_h ? (expected.image * p.height + expected.h) * p.width + expected.w : -1);
        }
}

/// With their padding in memory, as code z, patches have no other padding, so integers need no further correction than a matrix.
TEST(Patches, PaddingInMemoryIsExact) {
  constexpr int kZero = -37, kWeightZero = 5;
  for (Patches p : geometries(1)) {
    const int k = p.filter_h * p.filter_w * p.channels;
    const auto code = [](int i) { return (i * 97 + 13) % 256 - 128; };
    const ImageStrides strides{.image = 1 + p.channels * p.height * p.width, .pixel = p.channels, .channel = 1};
    const Patches frame = padded(p);
    const int across = frame.width, all = frame.height * frame.width;
    std::vector<int> framed_codes;
    for (int image = 0; image < 2; ++image)
      for (int pixel = 0; pixel < all; ++pixel) {
        const std::int64_t at = framed(p, strides, image, pixel);
        for (int c = 0; c < p.channels; ++c) framed_codes.push_back(at < 0 ? kZero : code(static_cast<int>(at) + c));
      }
    EXPECT_LT(framed(p, strides, 0, all), 0);  // past the last pixel there is none
    for (int token = 0; token < 2 * p.pixels(); ++token) {
      std::int64_t expected = 0, products = 0, weights = 0, codes = 0;
      PatchChannel at = patch_channel(frame, 0);
      for (int i = 0; i < k; ++i, advance(at, frame, patch_channel(frame, 1))) {
        const int weight = code(3 * i + 1);
        const Pixel pixel = under(p, token, at.kh, at.kw);
        if (pixel.exists) {
          const std::int64_t element = pixel.image * strides.image + (pixel.h * p.width + pixel.w) * strides.pixel + at.c;
          expected += (code(static_cast<int>(element)) - kZero) * (weight - kWeightZero);
        }
        const Pixel framed_pixel = under(frame, token, at.kh, at.kw);
        ASSERT_TRUE(framed_pixel.exists);
        const int q = framed_codes[static_cast<std::size_t>(
            ((framed_pixel.image * all) + framed_pixel.h * across + framed_pixel.w) * p.channels + at.c)];
        products += q * weight, weights += weight, codes += q;
      }
      ASSERT_EQ(products - kZero * weights - kWeightZero * codes + std::int64_t{k} * kZero * kWeightZero, expected);
    }
  }
}

/// wgmma reads what TMA wrote: both swizzle an address's bits of 16 bytes by those of a row, three of them where rows are 128 bytes, two
/// where they are 64.
TEST(Patches, BoxesOfCodesAreOperands) {
  constexpr int kRecord = 128, kStep = 32;
  for (int tokens : {64, 128, 256})
    for (int box : {64, 128}) {
      const auto swizzled = [box](int address) { return address ^ (address >> 7 & (box == 64 ? 3 : 7)) << 4; };
      std::vector<int> held(static_cast<std::size_t>(tokens * kRecord), -1);
      for (int token = 0; token < tokens; ++token)
        for (int channel = 0; channel < kRecord; ++channel)
          held.at(static_cast<std::size_t>(swizzled(channel / box * box * tokens + token * box + channel % box))) =
              token * kRecord + channel;
      for (int i = 0; i < kRecord / kStep; ++i)
        for (int token = 0; token < tokens; ++token)
          for (int c = 0; c < kStep; ++c)
            ASSERT_EQ(held.at(static_cast<std::size_t>(swizzled(code_columns(i, box, tokens) * 16 + token * box + c))),
                      token * kRecord + i * kStep + c);
    }
}

TEST(Patches, AnImageOfCodesHasRoomForItsPaddingAndSums) {
  const Patches p{
      .channels = 64, .height = 5, .width = 7, .out_height = 5, .out_width = 7, .top = 1, .bottom = 2, .left = 3, .right = 4};
  EXPECT_EQ(codes_map(p, 3, false).bytes, (3 * 8 * 14 * 64 + 255) / 256 * 256);
  EXPECT_EQ(codes_map(p, 3, true).sums, codes_map(p, 3, false).bytes);
  EXPECT_EQ(codes_map(p, 3, true).bytes, codes_map(p, 3, true).sums + (3 * 35 * 4 + 255) / 256 * 256);
  Patches groups = p;  // each with sums of its own
  groups.channels = 16, groups.groups = 4;
  EXPECT_EQ(codes_map(groups, 3, true).sums, codes_map(p, 3, true).sums);
  EXPECT_EQ(codes_map(groups, 3, true).bytes, codes_map(groups, 3, true).sums + (3 * 35 * 4 * 4 + 255) / 256 * 256);
}

}  // namespace
}  // namespace nibble::cuda
