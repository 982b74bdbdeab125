// Convolutions for tests: channels-last images, and the expected results, element by element.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "emulator/packed_codes.hpp"
#include "emulator/tile_weight.hpp"
#include "kernels/cuda/tasks/conv_task.hpp"
#include "layouts/gpu_w8.hpp"

namespace nibble::emulator {

struct ConvShape {
  int images, height, width, channels, outputs;
  int kernel, stride, padding, dilation;
  bool nchw;  // D's

  int k() const { return kernel * kernel * channels; }
  int out(int in) const { return (in + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1; }
  int pixels() const { return out(height) * out(width); }
  std::size_t inputs() const { return static_cast<std::size_t>(images * height * width * channels); }

  /// The task of channels-last images, without weight, activations, scratch memory and D.
  cuda::ConvTask task() const {
    cuda::ConvTask task;
    cuda::Patches& p = task.patches;
    p.channels = channels, p.group_outputs = outputs;
    p.height = height, p.width = width;
    p.filter_h = p.filter_w = kernel;
    p.stride_h = p.stride_w = stride;
    p.dilation_h = p.dilation_w = dilation;
    p.top = p.bottom = p.left = p.right = padding;
    p.out_height = out(height), p.out_width = out(width);
    task.images = images;
    task.a = {height * width * channels, channels, 1};
    task.d = nchw ? cuda::ImageStrides{pixels() * outputs, 1, pixels()} : cuda::ImageStrides{pixels() * outputs, outputs, 1};
    return task;
  }

  /// Has `launch` compute D of `task` as f32 or s32, and compares it with sum_bias and the sums of act(i) · weight(n, k): number i of the
  /// images, and the weight's channels, element by element of the filter. `spread`: the bound on rounding, relative to the sum of
  /// magnitudes of products; of s32 there is none.
  template <class Launch, class Act, class Weight>
  void expect_sums(cuda::ConvTask task, Launch launch, Act act, Weight weight, double spread) const {
    std::vector<float> d(static_cast<std::size_t>(images * pixels() * outputs) + 4, 0.5f);
    task.epilogue.d = d.data();
    task.epilogue.d_stride = task.d.pixel;
    ASSERT_EQ(launch(task), cudaSuccess);
    for (int n = 0; n < outputs; ++n)
      for (int image = 0; image < images; ++image)
        for (int oh = 0; oh < out(height); ++oh)
          for (int ow = 0; ow < out(width); ++ow) {
            double sum = task.epilogue.sum_bias == nullptr ? 0 : task.epilogue.sum_bias[n], magnitude = std::abs(sum);
            for (int kh = 0; kh < kernel; ++kh)
              for (int kw = 0; kw < kernel; ++kw) {
                const int h = oh * stride - padding + kh * dilation, w = ow * stride - padding + kw * dilation;
                if (h < 0 || h >= height || w < 0 || w >= width) continue;
                for (int i = 0; i < channels; ++i) {
                  const double product = act(static_cast<std::size_t>(((image * height + h) * width + w) * channels + i)) *
                                         weight(n, (kh * kernel + kw) * channels + i);
                  sum += product, magnitude += std::abs(product);
                }
              }
            const auto at = image * task.d.image + (oh * out(width) + ow) * task.d.pixel + n * task.d.channel;
            const float got = d[static_cast<std::size_t>(at)];
            const bool raw = task.epilogue.out == DType::s32;
            ASSERT_NEAR(raw ? std::bit_cast<std::int32_t>(got) : static_cast<double>(got), sum, raw ? 0.0 : magnitude * spread)
                << image << " " << oh << " " << ow << " " << n;
          }
    for (std::size_t i = d.size() - 4; i < d.size(); ++i) ASSERT_EQ(d[i], 0.5f) << "written past D";
  }
};

/// f16 images and a weight of 4 bits in gpu_n64k128.
struct FloatConv {
  ConvShape shape;
  std::mt19937 random;
  TileWeight weight;
  std::vector<std::uint16_t> x;
  std::vector<float> prescale;  // by channel; none: empty

  FloatConv(const ConvShape& shape, int group, bool prescaled = false)
      : shape(shape),
        random(static_cast<unsigned>(shape.channels + shape.outputs)),
        weight(shape.outputs, shape.k(), gpu_tile::Codes::u4, group, ZeroKind::none, random),
        x(shape.inputs()) {
    for (auto& v : x) v = to_f16(static_cast<float>(static_cast<int>(random() % 129) - 64) / 16).bits;
    for (int i = 0; prescaled && i < shape.channels; ++i) prescale.push_back(0.01f * static_cast<float>(50 + random() % 100));
  }
  cuda::ConvTask task() const {
    cuda::ConvTask task = shape.task();
    task.weight = weight.device();
    task.a_dtype = DType::f16;
    task.x = x.data();
    if (!prescale.empty()) task.prescale = prescale.data();
    return task;
  }
  /// Times the prescale, as f32.
  float act(std::size_t i) const {
    const float v = to_f32(f16{x[i]});
    return prescale.empty() ? v : v * prescale[i % prescale.size()];
  }
  /// The same as tensor cores multiply it.
  float act_f16(std::size_t i) const { return to_f32(to_f16(act(i))); }
  /// Makes the images, times a prescale if any, integers of 255 steps in every block of channels: scales are 1, and quantization is exact.
  void be_exact_codes(int block, bool zeros, bool prescaled) {
    for (int i = 0; prescaled && i < shape.channels; ++i) prescale.push_back(i % 3 == 0 ? 0.5f : 2.0f);
    const int lowest = zeros ? -100 : -127, highest = lowest + (zeros ? 255 : 254);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::size_t in_block = i % static_cast<std::size_t>(block);
      const int value = in_block == 0   ? lowest
                        : in_block == 1 ? highest
                                        : lowest + static_cast<int>(random() % static_cast<unsigned>(highest - lowest + 1));
      x[i] = to_f16(static_cast<float>(value) / (prescaled ? prescale[i % prescale.size()] : 1.0f)).bits;
    }
  }
  /// Has `launch` multiply f32 images, as fixed point in folds of so many channels, and compares.
  template <class Launch>
  void expect_f32_sums(bool channels_first, int fold, Launch launch) {
    const int pixels = shape.height * shape.width;
    cuda::ConvTask f32 = task();
    if (channels_first) f32.a = {pixels * shape.channels, 1, pixels};
    const auto place = [&](std::size_t i) {  // of number i with channels last
      const auto channel = static_cast<int>(i) % shape.channels, pixel = static_cast<int>(i) / shape.channels;
      return static_cast<std::size_t>(pixel / pixels * f32.a.image + pixel % pixels * f32.a.pixel + channel * f32.a.channel);
    };
    std::vector<float4> memory(shape.inputs() / 4 + 1);  // aligned
    auto* const images = reinterpret_cast<float*>(memory.data());
    for (std::size_t i = 0; i < shape.inputs(); ++i)
      images[i] = std::ldexp(static_cast<float>(random() % 0x1000000) - 0x1p23f, static_cast<int>(random() % 3) - 24);
    f32.a_dtype = DType::f32;
    f32.x = images;
    f32.fold = fold;
    f32.fixed_point = true;
    const std::int64_t all = shape.images * pixels;
    const cuda::Wna8ImageMap map =
        cuda::wna8_image_map(fold, cuda::kDigitPlanes * all, shape.channels, channels_first ? 4 * all * shape.channels : 0);
    std::vector<float4> workspace(map.bytes / sizeof(float4));
    f32.scratch = workspace.data();
    const auto act = [&](std::size_t i) {
      const float v = images[place(i)];
      return prescale.empty() ? v : v * prescale[i % prescale.size()];
    };
    shape.expect_sums(
        f32, launch, act, [&](int n, int k) { return weight.value(n, k); }, 0x1p-20);
  }
  /// Scratch memory for the images.
  std::vector<std::uint32_t> scratch(cuda::ConvTask& task) const {
    std::vector<std::uint32_t> memory(x.size() / 2 + 68);
    task.scratch = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 255) / 256 * 256);
    return memory;
  }
};

/// Images of codes and a weight of the same kind in gpu_w8n64k128, scales of 1: s8, whose sums are integers, which become floats by one
/// rounding; or e4m3 of less than 2.
struct CodesConv {
  ConvShape shape;
  DType type;
  std::vector<std::int8_t> x, w;
  gpu_w8::Geometry geometry;
  std::vector<std::byte> packed;

  explicit CodesConv(const ConvShape& shape, DType type = DType::s8)
      : shape(shape), type(type), x(shape.inputs()), w(static_cast<std::size_t>(shape.outputs * shape.k())) {
    std::mt19937 random(static_cast<unsigned>(shape.channels + shape.outputs));
    const unsigned mask = type == DType::s8 ? 0xff : 0xbf;
    for (auto& byte : x) byte = static_cast<std::int8_t>(random() & mask);
    for (auto& byte : w) byte = static_cast<std::int8_t>(random() & mask);
    geometry = {.n = shape.outputs, .k = shape.k(), .integers = type == DType::s8};
    packed = packed_codes(geometry, w);
    const std::vector<float> ones(static_cast<std::size_t>(geometry.padded_rows()), 1.0f);
    std::memcpy(packed.data() + geometry.scales_offset(), ones.data(), 4 * ones.size());
  }
  cuda::ConvTask task() const {
    cuda::ConvTask task = shape.task();
    task.scaled = {packed.data(), geometry};
    task.a_dtype = type;
    task.x = x.data();
    return task;
  }
  double value(std::int8_t code) const {
    return type == DType::s8 ? code : static_cast<double>(code_value(type, static_cast<std::uint8_t>(code)));
  }
  /// As f32 and, of s8, with sum_bias as s32.
  template <class Launch>
  void expect_sums(cuda::ConvTask task, Launch launch) const {
    const auto act = [&](std::size_t i) { return value(x[i]); };
    const auto weight = [&](int n, int k) { return value(w[static_cast<std::size_t>(n * shape.k() + k)]); };
    shape.expect_sums(task, launch, act, weight, type == DType::s8 ? 0x1p-24 : 0x1p-10);
    if (type != DType::s8) return;
    std::vector<std::int32_t> bias;
    for (int n = 0; n < shape.outputs; ++n) bias.push_back(1000 * n - 40000);
    task.epilogue.sum_bias = bias.data();
    task.epilogue.out = DType::s32;
    shape.expect_sums(task, launch, act, weight, 0);
  }
};

}  // namespace nibble::emulator
