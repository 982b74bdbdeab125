// Images in the order of tensor cores (conv_images.cu) on the emulated GPU, element by element: unchanged, or as codes with their sums.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>

#include "emulator/float_layer.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/steps/conv_images.cu"

namespace nibble::cuda {
namespace {

alignas(1024) std::uint8_t origin[1024];  // addresses of shared memory count from here

struct Case {
  DType type;
  bool nchw;
  int images, height, width, channels, groups, padding;
  bool codes, prescaled = false, fp8 = false, zero = true;  // zero: codes have a zero point, of int8
};

std::string name(const Case& c) {
  return fmt::format("{}_{}_{}x{}x{}_c{}_groups{}_padding{}{}{}{}", nibble::name(c.type), c.nchw ? "nchw" : "nhwc", c.images,
                     c.height, c.width, c.channels, c.groups, c.padding, c.codes ? "_codes" : "", c.prescaled ? "_prescaled" : "",
                     c.fp8                ? "_fp8"
                     : c.zero || !c.codes ? ""
                                          : "_symmetric");
}

class EmulatedImages : public testing::TestWithParam<Case> {};

TEST_P(EmulatedImages, AreChannelsLast) {
  const Case& c = GetParam();
  emulator::use_shared_memory(origin);
  std::mt19937 random(static_cast<unsigned>(c.width * 31 + c.channels));
  const int all = c.channels * c.groups, pixels = c.height * c.width;
  const std::size_t element = c.type == DType::f32 ? 4 : c.type == DType::s8 ? 1 : 2;
  ConvTask task;
  task.images = c.images;
  task.a_dtype = c.type;
  task.a = c.nchw ? ImageStrides{all * pixels, 1, pixels} : ImageStrides{all * pixels, all, 1};
  Patches& p = task.patches;
  p.channels = c.channels, p.groups = c.groups;
  p.height = c.height, p.width = c.width;
  p.filter_h = p.filter_w = 1 + 2 * c.padding;
  p.top = p.bottom = p.left = p.right = c.padding;
  p.out_height = c.height, p.out_width = c.width;

  std::vector<std::uint32_t> memory(static_cast<std::size_t>(c.images * pixels * all) * element / 4 + 4);
  auto* const bytes = reinterpret_cast<std::uint8_t*>(memory.data());
  std::vector<float> values(static_cast<std::size_t>(c.images * pixels * all));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float value = values[i] = static_cast<float>(static_cast<int>(random() % 255) - 127) / (c.type == DType::s8 ? 1 : 8);
    const std::uint16_t half = emulator::to_half(c.type == DType::f16 ? DType::f16 : DType::bf16, value);
    if (c.type == DType::f32)
      std::memcpy(bytes + 4 * i, &value, 4);
    else if (c.type == DType::s8)
      bytes[i] = static_cast<std::uint8_t>(static_cast<int>(value));
    else
      std::memcpy(bytes + 2 * i, &half, 2);
  }
  task.x = bytes;
  std::vector<float> prescale;
  for (int i = 0; i < c.channels; ++i) prescale.push_back(0.01f * static_cast<float>(50 + random() % 100));
  if (c.prescaled) task.prescale = prescale.data();
  const auto prescaled = [&](float x, int channel) {
    return c.prescaled ? x * prescale[static_cast<std::size_t>(channel % c.channels)] : x;
  };
  const auto place = [&](int image, int h, int w, int channel) {
    return static_cast<std::size_t>(image * task.a.image + (h * c.width + w) * task.a.pixel + channel * task.a.channel);
  };

  if (!c.codes) {
    std::vector<std::uint32_t> aligned(memory.size() + 8, 0xa5a5a5a5);
    auto* const to = reinterpret_cast<std::uint8_t*>((reinterpret_cast<std::uintptr_t>(aligned.data()) + 15) / 16 * 16);
    ASSERT_EQ(channels_last(task, to, nullptr), cudaSuccess);
    for (int image = 0; image < c.images; ++image)
      for (int pixel = 0; pixel < pixels; ++pixel)
        for (int channel = 0; channel < all; ++channel) {
          const auto at = static_cast<std::size_t>((image * pixels + pixel) * all + channel);
          const std::size_t from = place(image, 0, pixel, channel);
          if (c.prescaled) {
            const std::uint16_t half = emulator::to_half(c.type, prescaled(values[from], channel));
            std::memcpy(bytes + from * element, &half, 2);
          }
          ASSERT_EQ(std::memcmp(to + at * element, bytes + from * element, element), 0)
              << image << " " << pixel << " " << channel;
        }
    ASSERT_EQ(to[values.size() * element], 0xa5) << "written past the images";
    return;
  }

  task.acts.scale = c.type == DType::s8 ? 1.0f : 0.11f;
  task.acts.zero = c.fp8 || !c.zero ? 0 : 7;
  task.scaled.geometry.integers = !c.fp8;
  task.scaled.geometry.has_zeros = !c.fp8;
  const CodesMap map = codes_map(p, c.images, !c.fp8);
  std::vector<std::uint32_t> scratch(map.bytes / 4 + 4, 0xa5a5a5a5);
  task.scratch = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(scratch.data()) + 15) / 16 * 16);
  CodeImages images;
  ASSERT_EQ(code_images(task, images, nullptr), cudaSuccess);
  const int frame = task.acts.zero != 0 ? c.padding : 0;  // pixels of padding in memory
  const int across = c.width + 2 * frame, down = c.height + 2 * frame;
  const act_rule::Rule rule = act_rule::known(task.acts.scale, task.acts.zero);
  const auto code = [&](int image, int h, int w, int channel) -> int {
    if (h < 0 || h >= c.height || w < 0 || w >= c.width) return rule.zero;
    const float value = prescaled(values[place(image, h, w, channel)], channel);
    if (c.fp8) return static_cast<std::int8_t>(act_rule::to_e4m3(act_rule::multiply(value, rule.inverse)));
    return c.type == DType::s8 ? static_cast<int>(value) : act_rule::to_s8(value, rule);
  };
  for (int image = 0; image < c.images; ++image)
    for (int h = 0; h < down; ++h)
      for (int w = 0; w < across; ++w)
        for (int channel = 0; channel < all; ++channel) {
          const auto* const pixel =
              static_cast<const std::int8_t*>(images.x) + ((std::int64_t{image} * down + h) * across + w) * images.pitch;
          ASSERT_EQ(pixel[channel], code(image, h - frame, w - frame, channel))
              << image << " " << h << " " << w << " " << channel;
        }
  for (int group = 0; group < c.groups && !c.fp8; ++group)
    for (int token = 0; token < c.images * pixels; ++token) {
      const int h = token % pixels / c.width, w = token % c.width;
      std::int32_t sum = 0;
      for (int kh = -c.padding; kh <= c.padding; ++kh)
        for (int kw = -c.padding; kw <= c.padding; ++kw)
          for (int i = 0; i < c.channels; ++i) sum += code(token / pixels, h + kh, w + kw, group * c.channels + i);
      ASSERT_EQ(images.sums[group * c.images * pixels + token], sum) << group << " " << token;
    }
}

// Vectors of 8 and 4 pixels, pixels and channels one by one, tails of squares, padding, groups.
constexpr Case kCases[] = {
    {DType::f16, true, 2, 8, 12, 72, 1, 0, false},
    {DType::bf16, true, 1, 6, 10, 136, 1, 0, false},
    {DType::f16, true, 2, 7, 11, 72, 1, 1, false},
    {DType::f32, true, 2, 9, 9, 68, 1, 0, false},
    {DType::f16, true, 2, 8, 12, 80, 1, 1, true},
    {DType::f32, false, 2, 9, 7, 32, 2, 1, true},
    {DType::bf16, false, 1, 11, 9, 144, 1, 1, true},
    {DType::s8, true, 2, 9, 9, 16, 3, 1, true},
    {DType::s8, false, 1, 8, 8, 64, 1, 0, true},
    {DType::s8, true, 2, 9, 11, 80, 1, 1, false},
    {DType::f16, true, 2, 8, 12, 72, 1, 1, false, true},
    {DType::bf16, false, 2, 9, 7, 40, 2, 0, false, true},
    {DType::f16, true, 2, 8, 12, 80, 1, 1, true, true},
    {DType::f32, false, 2, 9, 7, 32, 2, 1, true, true},
    {DType::f16, true, 2, 8, 12, 80, 1, 1, true, true, true},
    {DType::f32, false, 2, 9, 7, 32, 2, 1, true, false, true},
    {DType::f16, true, 2, 8, 12, 144, 1, 1, true, false, false, false},
    {DType::bf16, true, 1, 6, 10, 80, 1, 1, true, false, false, false},
    {DType::f16, true, 2, 9, 9, 32, 2, 1, true, false, false, false},
    {DType::f16, true, 2, 10, 10, 80, 1, 0, true},
    {DType::f16, false, 2, 9, 7, 48, 1, 1, true, false, false, false},
};
INSTANTIATE_TEST_SUITE_P(Steps, EmulatedImages, testing::ValuesIn(kCases), [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace nibble::cuda
