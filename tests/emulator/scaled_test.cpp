// The sm_90 GEMM of 8-bit codes on the emulated GPU: the launcher and the kernels as they are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>

#include "emulator/conv_patches.hpp"
#include "emulator/memory.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/scaled_sm90.cu"
#include "kernels/cuda/scaled_sm90_e4m3.cu"
#include "kernels/cuda/scaled_sm90_e4m3_grouped.cu"
#include "kernels/cuda/scaled_sm90_patches_s8.cu"
#include "kernels/cuda/scaled_sm90_s8.cu"

namespace nibble::cuda {

/// Images that are codes already, and lie as they have to.
cudaError_t code_images(const ConvTask& task, CodeImages& images, cudaStream_t) {
  images = {.x = task.x, .pitch = task.a.pixel, .patches = task.patches};
  return cudaSuccess;
}

namespace {

enum class Codes { s8, e4m3, groups };
enum Extra : unsigned {
  kBias = 1,
  kResidual = 2,
  kZeros = 4,
  kChannelScales = 8,  // of groups: the weight has a scale per channel, not per block
};

struct Case {
  Codes codes;
  int m, n, k;
  int tokens, blocks, depth, split;  // ScaledConfig
  DType out = DType::bf16;
  unsigned extra = 0;

  bool integers() const { return codes == Codes::s8; }
  bool grouped() const { return codes == Codes::groups; }
  bool has(Extra e) const { return (extra & e) != 0; }
};

std::string name(const Case& c) {
  const char* const codes[] = {"s8", "e4m3", "e4m3_groups"};
  return fmt::format("{}_m{}_n{}_k{}_{}x{}_depth{}{}_{}_{}", codes[static_cast<int>(c.codes)], c.m, c.n, c.k, c.tokens,
                     gpu_w8::kRows * c.blocks, c.depth, c.split == kStreamK ? "_streamk" : fmt::format("_split{}", c.split),
                     nibble::name(c.out), c.extra);
}

/// Room for a weight, and its codes [n,k] where they have to be.
template <class Byte>
std::vector<std::byte> packed_codes(const gpu_w8::Geometry& geometry, const std::vector<Byte>& codes) {
  std::vector<std::byte> packed(static_cast<std::size_t>(geometry.total_bytes()));
  for (int n = 0; n < geometry.n; ++n)
    for (int k = 0; k < geometry.k; ++k)
      packed[static_cast<std::size_t>(geometry.record(n / gpu_w8::kRows, k / gpu_w8::kChannels) +
                                      gpu_w8::place(n % gpu_w8::kRows, k % gpu_w8::kChannels))] =
          static_cast<std::byte>(codes[static_cast<std::size_t>(n * geometry.k + k)]);
  return packed;
}

/// Codes and scales of a layer, and D as it has to be.
struct Layer {
  explicit Layer(const Case& c) : c(c), records((c.k + 127) / 128), pitch((c.k + 15) / 16 * 16) {
    std::mt19937 random(static_cast<unsigned>(c.m * 31 + c.n * 7 + c.k));
    const auto code = [&] {
      for (;;) {
        const auto byte = static_cast<std::uint8_t>(random());
        if (c.integers() || (byte & 0x7f) < 0x60) return byte;  // up to 16: sums of a few thousand
      }
    };
    const auto scale = [&] { return 0.001f * static_cast<float>(1 + random() % 100); };
    acts.resize(static_cast<std::size_t>(c.m * pitch));
    weight.resize(static_cast<std::size_t>(c.n * c.k));
    for (auto& byte : acts) byte = code();
    for (auto& byte : weight) byte = code();
    act_scales.resize(static_cast<std::size_t>(c.m * (c.grouped() ? records : 1)));
    for (float& s : act_scales) s = scale();
    geometry = {.n = c.n,
                .k = c.k,
                .integers = c.integers(),
                .has_zeros = false,
                .block_rows = c.grouped() && !c.has(kChannelScales) ? 128 : 0};
    for (int i = 0; i < c.m; ++i) act_zeros.push_back(c.has(kZeros) ? static_cast<std::int32_t>(random() % 200) - 100 : 0);
    for (int i = 0; i < c.n; ++i) bias.push_back(static_cast<float>(random() % 100) - 50);
    for (int i = 0; i < c.m * c.n; ++i) residual.push_back(static_cast<float>(random() % 100) - 50);
    pack(scale);
  }

  float act(int m, int k) const { return value(acts[static_cast<std::size_t>(m * pitch + k)]); }
  float row(int n, int k) const { return value(weight[static_cast<std::size_t>(n * c.k + k)]); }
  float value(std::uint8_t byte) const {
    return c.integers() ? static_cast<float>(static_cast<std::int8_t>(byte)) : code_value(DType::e4m3, byte);
  }
  float act_scale(int m, int record) const { return act_scales[static_cast<std::size_t>(c.grouped() ? record * c.m + m : m)]; }
  float weight_scale(int n, int record) const {
    const int at = geometry.block_rows == 0 ? n : n / geometry.block_rows * records + record;
    return weight_scales[static_cast<std::size_t>(at)];
  }
  /// D[m,n], and how much its rounding may be.
  std::pair<double, double> expected(int m, int n) const {
    double sum = 0, magnitude = 0;
    for (int r = 0; r < records; ++r) {
      const double scale = static_cast<double>(act_scale(m, r)) * static_cast<double>(weight_scale(n, r));
      for (int k = r * 128; k < std::min(c.k, r * 128 + 128); ++k) {
        const double product = scale *
                               static_cast<double>(act(m, k) - static_cast<float>(act_zeros[static_cast<std::size_t>(m)])) *
                               static_cast<double>(row(n, k));
        sum += product, magnitude += std::abs(product);
      }
    }
    const auto add = [&](float x) { sum += static_cast<double>(x), magnitude += std::abs(static_cast<double>(x)); };
    if (c.has(kBias)) add(bias[static_cast<std::size_t>(n)]);
    if (c.has(kResidual)) add(residual[static_cast<std::size_t>(m * c.n + n)]);
    const double of_output = c.out == DType::f32 ? 0 : c.out == DType::f16 ? 0x1p-10 : 0x1p-7;
    return {sum, magnitude * 0x1p-20 + std::abs(sum) * of_output};
  }

  Case c;
  int records, pitch;
  std::vector<std::uint8_t> acts, weight;
  std::vector<float> act_scales, weight_scales, bias, residual;
  std::vector<std::int32_t> act_zeros;
  gpu_w8::Geometry geometry;
  std::vector<std::byte> packed;

 private:
  template <class Scale>
  void pack(const Scale& scale) {
    packed = packed_codes(geometry, weight);
    for (std::int64_t i = 0; i < geometry.scale_count(); ++i) weight_scales.push_back(scale());
    std::memcpy(packed.data() + geometry.scales_offset(), weight_scales.data(), 4 * weight_scales.size());
    if (!c.integers()) return;
    std::vector<std::int32_t> sums(static_cast<std::size_t>(geometry.padded_rows()));
    for (int n = 0; n < c.n; ++n)
      for (int k = 0; k < c.k; ++k) sums[static_cast<std::size_t>(n)] += static_cast<std::int32_t>(row(n, k));
    std::memcpy(packed.data() + geometry.sums_offset(), sums.data(), 4 * sums.size());
  }
};

class Emulated : public testing::TestWithParam<Case> {};

TEST_P(Emulated, GivesTheSumsOfTheLayer) {
  const Case& c = GetParam();
  const Layer layer(c);
  emulator::use_shared_memory(shared);
  const std::size_t element = c.out == DType::f32 ? 4 : 2, count = static_cast<std::size_t>(c.m * c.n);
  std::vector<std::uint8_t> d((count + 16) * element, 0xa5);
  emulator::StreamKMemory scratch(c.tokens);

  ScaledTask task;
  task.weight = {layer.packed.data(), layer.geometry};
  task.acts = {.codes = layer.acts.data(), .pitch = layer.pitch, .scales = layer.act_scales.data(), .scale_row = 1};
  if (c.grouped()) task.acts.scale_group = c.m, task.acts.group = 128;
  if (c.has(kZeros)) task.acts.zeros = layer.act_zeros.data(), task.acts.zero_row = 1;
  task.m = c.m;
  task.epilogue.out = c.out;
  task.epilogue.d = d.data();
  task.epilogue.d_stride = c.n;
  if (c.has(kBias)) task.epilogue.bias = {.data = layer.bias.data()};
  if (c.has(kResidual)) task.epilogue.residual = {.data = layer.residual.data(), .stride = c.n};
  task.scratch_end = scratch.end();
  const ScaledConfig config{.tokens = c.tokens, .blocks = c.blocks, .depth = c.depth, .split = c.split};
  ASSERT_EQ(linear_scaled_sm90(task, config, nullptr), cudaSuccess);

  int wrong = 0;
  for (int m = 0; m < c.m; ++m)
    for (int n = 0; n < c.n; ++n) {
      const std::uint8_t* at = d.data() + static_cast<std::size_t>(m * c.n + n) * element;
      std::uint32_t bits = 0;
      std::memcpy(&bits, at, element);
      const float got = c.out == DType::f32   ? std::bit_cast<float>(bits)
                        : c.out == DType::f16 ? to_f32(f16{static_cast<std::uint16_t>(bits)})
                                              : to_f32(bf16{static_cast<std::uint16_t>(bits)});
      const auto [want, off] = layer.expected(m, n);
      if (std::abs(static_cast<double>(got) - want) <= off) continue;  // false of a NaN
      if (++wrong <= 5) ADD_FAILURE() << "D[" << m << "," << n << "] is " << got << ", expected " << want << " ± " << off;
    }
  EXPECT_EQ(wrong, 0);
  for (std::size_t i = count * element; i < d.size(); ++i) ASSERT_EQ(d[i], 0xa5) << "written past D";
}

// Rows, tokens and channels with tails, more records than a ring has stages, more passes than there are multiprocessors.
constexpr Case kCases[] = {
    {Codes::s8, 3, 72, 1936, 16, 2, 2, 1},
    {Codes::s8, 17, 200, 1024, 32, 4, 1, 1, DType::bf16, kZeros},
    {Codes::s8, 40, 320, 1152, 64, 4, 1, kStreamK},
    {Codes::s8, 130, 200, 640, 128, 3, 1, 1, DType::f32, kResidual},
    {Codes::s8, 300, 136, 768, 256, 2, 1, 1, DType::bf16, kBias},
    {Codes::e4m3, 20, 128, 2048, 16, 1, 2, 1, DType::f16},
    {Codes::e4m3, 260, 264, 768, 256, 2, 1, kStreamK},
    {Codes::s8, 10, 200, 1424, 16, 2, 1, 4, DType::bf16, kZeros},
    {Codes::s8, 300, 72, 768, 256, 1, 1, 2},
    {Codes::e4m3, 40, 136, 1152, 64, 1, 1, 4, DType::f32, kResidual},
    {Codes::groups, 130, 136, 640, 128, 2, 1, 2},
    {Codes::groups, 5, 136, 1424, 16, 2, 2, 1},
    {Codes::groups, 40, 72, 1024, 32, 4, 1, kStreamK, DType::bf16, kResidual},
    {Codes::groups, 70, 192, 896, 64, 2, 1, 1, DType::bf16, kBias},
    {Codes::groups, 150, 320, 640, 128, 2, 1, kStreamK},
    {Codes::groups, 130, 72, 1024, 128, 1, 1, 1, DType::f32, kResidual | kChannelScales},
    {Codes::groups, 2100, 136, 256, 128, 2, 1, 1},
    {Codes::groups, 300, 328, 912, 256, 2, 1, 1, DType::bf16, kBias},
    {Codes::groups, 270, 192, 768, 256, 2, 1, kStreamK, DType::f16},
    {Codes::groups, 530, 100, 640, 256, 2, 1, 1, DType::f32, kResidual | kChannelScales},
    {Codes::groups, 2100, 136, 256, 256, 2, 1, 1},
};

struct ConvCase {
  int images, height, width, channels, outputs;
  int kernel, stride, padding, dilation;
  int tokens, blocks, split;  // ScaledConfig
  bool nchw;                  // D's
};

class EmulatedConv : public testing::TestWithParam<ConvCase> {};

/// Sums are integers, which become floats by one rounding, and scales are 1: D is known to the bit.
TEST_P(EmulatedConv, GivesTheSumsOfTheLayer) {
  const ConvCase& c = GetParam();
  emulator::use_shared_memory(shared);
  const Patches p = emulator::patches(c);
  const int k = c.kernel * c.kernel * c.channels, pixels = p.pixels();
  std::mt19937 random(static_cast<unsigned>(c.channels + c.outputs));
  const auto code = [&] { return static_cast<std::int8_t>(random()); };
  std::vector<std::int8_t> x(static_cast<std::size_t>(c.images * c.height * c.width * c.channels)),
      w(static_cast<std::size_t>(c.outputs * k));
  for (auto& byte : x) byte = code();
  for (auto& byte : w) byte = code();
  ConvTask task;
  task.scaled.geometry = {.n = c.outputs, .k = k};
  const gpu_w8::Geometry& geometry = task.scaled.geometry;
  std::vector<std::byte> packed = packed_codes(geometry, w);
  const std::vector<float> ones(static_cast<std::size_t>(geometry.padded_rows()), 1.0f);
  std::memcpy(packed.data() + geometry.scales_offset(), ones.data(), 4 * ones.size());

  std::vector<float> d(static_cast<std::size_t>(c.images * pixels * c.outputs) + 4, 0.5f);
  task.scaled.bytes = packed.data();
  task.patches = p;
  task.images = c.images;
  task.act = DType::s8;
  task.x = x.data();
  task.a = {c.height * c.width * c.channels, c.channels, 1};
  task.d = c.nchw ? ImageStrides{pixels * c.outputs, 1, pixels} : ImageStrides{pixels * c.outputs, c.outputs, 1};
  task.epilogue.d = d.data();
  task.epilogue.d_stride = task.d.pixel;
  emulator::StreamKMemory scratch(c.tokens);
  task.scratch_end = scratch.end();
  ASSERT_EQ(conv_scaled_sm90(task, {.tokens = c.tokens, .blocks = c.blocks, .split = c.split}, nullptr), cudaSuccess);

  emulator::for_each_sum(
      p, c.images, [&](std::size_t i) { return static_cast<double>(x[i]); },
      [&](int n, int i) { return static_cast<double>(w[static_cast<std::size_t>(n * k + i)]); },
      [&](int image, int pixel, int n, const emulator::ConvSum& expected) {
        const auto at = static_cast<std::size_t>(image * task.d.image + pixel * task.d.pixel + n * task.d.channel);
        ASSERT_EQ(d[at], static_cast<float>(expected.sum)) << image << " " << pixel << " " << n;
      });
  for (std::size_t i = d.size() - 4; i < d.size(); ++i) ASSERT_EQ(d[i], 0.5f) << "written past D";
}

// Channels in boxes of 64 and of 128, strides, dilations, tiles that begin within an image and end in another.
constexpr ConvCase kConvs[] = {
    {2, 9, 7, 64, 72, 3, 1, 1, 1, 64, 4, 1, false},
    {1, 12, 11, 128, 136, 3, 2, 1, 1, 128, 2, 1, true},
    {3, 10, 10, 192, 64, 3, 1, 2, 2, 256, 1, 1, false},
    {2, 8, 9, 128, 200, 1, 1, 0, 1, 128, 3, kStreamK, true},
};
INSTANTIATE_TEST_SUITE_P(Scaled, EmulatedConv, testing::ValuesIn(kConvs));

INSTANTIATE_TEST_SUITE_P(Scaled, Emulated, testing::ValuesIn(kCases), [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace nibble::cuda
