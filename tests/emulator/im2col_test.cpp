// Patches in memory, and rows of outputs in images (im2col.cu), on the emulated GPU: byte by byte as their definition.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <vector>

#include "emulator/gpu.hpp"
#include "nibble/types.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/steps/im2col.cu"

namespace nibble::cuda {
namespace {

struct Case {
  int element, channels;
  bool nchw;
  int more = 0;   // further channels of a pixel in memory
  int shift = 0;  // elements from an address that vectors need
};
std::string name(const Case& c) {
  return fmt::format("{}bytes_{}channels_{}_{}more_{}", c.element, c.channels, c.nchw ? "nchw" : "nhwc", c.more, c.shift);
}

constexpr int kImages = 2, kHeight = 5, kWidth = 7;

/// Images of random bytes, and the place of an element.
struct Images {
  std::vector<std::uint8_t> memory;
  std::uint8_t* bytes;
  ImageStrides strides;
  int element;

  Images(const Case& c, int channels, int pixels)
      : memory(static_cast<std::size_t>((kImages * pixels * (channels + c.more) + 16) * c.element) + 32), element(c.element) {
    for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::uint8_t>(i * 37 + i / 251);
    bytes = memory.data() + (16 - reinterpret_cast<std::uintptr_t>(memory.data()) % 16) % 16 + c.shift * c.element;
    const int all = channels + c.more;
    strides = c.nchw ? ImageStrides{all * pixels, 1, pixels} : ImageStrides{all * pixels, all, 1};
  }
  std::uint8_t* at(int image, int pixel, int channel) const {
    return bytes + (image * strides.image + pixel * strides.pixel + channel * strides.channel) * element;
  }
};

class EmulatedIm2col : public testing::TestWithParam<Case> {};

TEST_P(EmulatedIm2col, PatchesAreThoseOfTheDefinition) {
  const Case& c = GetParam();
  const Images images(c, c.channels, kHeight * kWidth);
  Im2colTask task{.x = images.bytes, .a = images.strides, .element = c.element, .first = 3};
  Patches& p = task.patches;
  p = {.channels = c.channels, .height = kHeight, .width = kWidth};
  p.filter_h = 2, p.filter_w = 3, p.stride_h = 2, p.dilation_w = 2;
  p.top = 1, p.left = 2, p.right = 1;
  p.out_height = (kHeight + 1 - 2) / 2 + 1, p.out_width = kWidth + 3 - 5 + 1;
  task.tokens = kImages * p.pixels() - task.first - 1;
  const std::int32_t pad = -37;
  task.pads = &pad;
  const int k = 2 * 3 * c.channels;
  task.pitch = (k * c.element + 15) / 16 * 16;
  std::vector<std::uint8_t> memory(static_cast<std::size_t>((task.tokens + 2) * task.pitch), 0xa5);
  auto* const rows = memory.data() + (16 - reinterpret_cast<std::uintptr_t>(memory.data()) % 16) % 16;
  task.rows = rows;
  ASSERT_EQ(im2col(task, nullptr), cudaSuccess);
  for (int token = 0; token < task.tokens; ++token) {
    const int all = task.first + token, image = all / p.pixels(), pixel = all % p.pixels();
    for (int i = 0; i < k; ++i) {
      const int element = i / c.channels, h = pixel / p.out_width * 2 - 1 + element / 3,
                w = pixel % p.out_width - 2 + element % 3 * 2;
      const bool inside = h >= 0 && h < kHeight && w >= 0 && w < kWidth;
      for (int byte = 0; byte < c.element; ++byte) {
        const std::uint8_t padding = c.element == 1 ? static_cast<std::uint8_t>(pad) : 0;
        ASSERT_EQ(rows[token * task.pitch + i * c.element + byte],
                  inside ? images.at(image, h * kWidth + w, i % c.channels)[byte] : padding)
            << "token " << token << ", channel " << i;
      }
    }
  }
  ASSERT_EQ(rows[task.tokens * task.pitch], 0xa5) << "written past the last row";
}

TEST_P(EmulatedIm2col, OutputsReachTheirImages) {
  const Case& c = GetParam();
  if (!c.nchw) GTEST_SKIP() << "rows lie where they belong";
  constexpr int kPixels = kHeight * kWidth;
  const Images rows({c.element, c.channels, false}, c.channels, kPixels), images(c, c.channels, kPixels);
  std::vector<std::uint8_t> before = images.memory;
  const int first = 3, tokens = kImages * kPixels - 5;
  ASSERT_EQ(col2im({.rows = rows.bytes,
                    .pitch = c.channels,
                    .element = c.element,
                    .channels = c.channels,
                    .pixels = kPixels,
                    .first = first,
                    .tokens = tokens,
                    .d = images.strides,
                    .images = images.bytes},
                   nullptr),
            cudaSuccess);
  for (int token = 0; token < kImages * kPixels; ++token)
    for (int channel = 0; channel < c.channels; ++channel)
      for (int byte = 0; byte < c.element; ++byte) {
        const std::uint8_t* const to = images.at(token / kPixels, token % kPixels, channel) + byte;
        const bool stored = token >= first && token < first + tokens;
        ASSERT_EQ(*to, stored ? rows.bytes[((token - first) * c.channels + channel) * c.element + byte]
                              : before[static_cast<std::size_t>(to - images.memory.data())])
            << "token " << token << ", channel " << channel;
      }
}

// Pieces of 16, 8, 4, 2 bytes and of one; images that lie anywhere, among other channels; pixels side by side.
constexpr Case kCases[] = {{2, 16, false}, {2, 4, false},    {2, 6, false},       {2, 3, false}, {1, 5, false}, {4, 3, false},
                           {1, 32, false}, {2, 8, false, 4}, {4, 8, false, 0, 1}, {1, 3, true},  {2, 40, true}, {4, 5, true, 3}};
INSTANTIATE_TEST_SUITE_P(Steps, EmulatedIm2col, testing::ValuesIn(kCases), [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace nibble::cuda
