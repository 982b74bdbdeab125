// int8 activations times the integer codes of gpu_n64k128 on every GPU (codes.cu), and what convolutions do before: patches to rows of codes
// (quantize_blocks.cu), codes to floats and to halves (decode_acts.cu), codes of u8 to those of s8 (recode_acts.cu). On the emulated GPU: launchers and kernels as they are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "emulator/codes_layer.hpp"
#include "kernels/cuda/steps/quantize_blocks.hpp"  // quantize_test.cpp has it
#include "quantize/act_rule.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/simt/codes.cu"
#include "kernels/cuda/steps/decode_acts.cu"
#include "kernels/cuda/steps/recode_acts.cu"

namespace nibble::cuda {
namespace {

class EmulatedCodes : public testing::TestWithParam<emulator::CodesCase> {};

TEST_P(EmulatedCodes, GivesTheSumsOfTheLayer) {
  emulator::use_shared_memory(shared);
  const emulator::CodesLayer layer(GetParam());
  layer.expect_sums([](const CodesTask& task) { return linear_codes_simt(task, nullptr); });
}

constexpr ZeroKind kNone = ZeroKind::none, kZeros = ZeroKind::integer, kOffsets = ZeroKind::offset;

// Folds of 128, 64 and 32; slots of 16 and 8; blocks below, equal to and above the groups, that end within a word; tails of K, rows and
// tokens; one token, few, many; act-order; exact sums.
constexpr emulator::CodesCase kCases[] = {
    {4, 128, kNone, 0, kNone, 1, 72, 1936},
    {4, 128, kZeros, 128, kNone, 7, 200, 640},
    {4, 128, kZeros, 32, kZeros, 5, 72, 400},
    {4, 64, kOffsets, 0, kOffsets, 6, 40, 530},
    {4, 32, kZeros, 64, kOffsets, 4, 72, 416},
    {8, 128, kZeros, 256, kZeros, 9, 100, 2700},
    {8, 96, kOffsets, 96, kOffsets, 3, 72, 672},
    {4, 16, kNone, 0, kNone, 1, 72, 1936},
    {4, 8, kZeros, 8, kZeros, 5, 72, 536},
    {4, 48, kOffsets, 24, kNone, 6, 40, 528},
    {8, 40, kZeros, 20, kOffsets, 5, 40, 203},
    {4, 24, kZeros, 3, kZeros, 3, 37, 203},
    {4, 1403, kZeros, 100, kOffsets, 6, 37, 1403},
    {4, 32, kZeros, 0, kZeros, 5, 72, 416, true},
    {4, 1040, kZeros, 0, kZeros, 9, 72, 1040, false, true},
    {8, 2700, kNone, 0, kNone, 40, 200, 2700, false, true},
    {8, 203, kZeros, 0, kZeros, 3, 5, 203, true, true},
    {4, 7, kNone, 0, kZeros, 1, 1, 7, false, true},
};
INSTANTIATE_TEST_SUITE_P(Simt, EmulatedCodes, testing::ValuesIn(kCases),
                         [](const auto& info) { return emulator::name(info.param); });

struct ConvCase {
  DType type;                                            // of A: f16, f32, or s8 for codes
  bool nchw;                                             // of A and D
  int images, height, width, channels, groups, outputs;  // channels and outputs of a group
  int filter, stride, padding, dilation;
  int block;  // of activations; 0: a patch; −1: known
  ZeroKind zeros;
  int weight_group;
  DType codes = DType::s8;
  int first = 0;  // the output pixel that begins the piece
};

std::string name(const ConvCase& c) {
  const char* const zeros[] = {"", "_zeros", "_offsets"};
  return fmt::format("{}_{}_{}x{}x{}_c{}x{}_o{}_f{}s{}p{}d{}_{}{}{}_g{}{}", nibble::name(c.type), c.nchw ? "nchw" : "nhwc",
                     c.images, c.height, c.width, c.groups, c.channels, c.outputs, c.filter, c.stride, c.padding, c.dilation,
                     nibble::name(c.codes), c.block < 0 ? "t" : std::to_string(c.block), zeros[static_cast<int>(c.zeros)],
                     c.weight_group, c.first != 0 ? "_piece" : "");
}

class EmulatedCodesConv : public testing::TestWithParam<ConvCase> {};

TEST_P(EmulatedCodesConv, GivesTheSumsOfPatches) {
  const ConvCase& c = GetParam();
  emulator::use_shared_memory(shared);
  std::mt19937 random(static_cast<unsigned>(c.width * 31 + c.channels));
  const int all = c.channels * c.groups, in = c.height * c.width, k = c.filter * c.filter * c.channels;
  const auto out = [&](int extent) { return (extent + 2 * c.padding - c.dilation * (c.filter - 1) - 1) / c.stride + 1; };
  Patches p{.channels = c.channels,
            .groups = c.groups,
            .group_outputs = c.outputs,
            .height = c.height,
            .width = c.width,
            .out_height = out(c.height),
            .out_width = out(c.width),
            .filter_h = c.filter,
            .filter_w = c.filter,
            .stride_h = c.stride,
            .stride_w = c.stride,
            .top = c.padding,
            .bottom = c.padding,
            .left = c.padding,
            .right = c.padding,
            .dilation_h = c.dilation,
            .dilation_w = c.dilation};
  const ImageStrides a = c.nchw ? ImageStrides{all * in, 1, in} : ImageStrides{all * in, all, 1};
  std::vector<std::uint8_t> memory(static_cast<std::size_t>(c.images * in * all) * 4);
  std::vector<float> values;
  for (int i = 0; i < c.images * in * all; ++i) {
    const float value = static_cast<float>(static_cast<int>(random() % 255) - 100) / (c.type == DType::s8 ? 1 : 64);
    const std::uint16_t half = to_f16(value).bits;
    if (c.type == DType::f32) std::memcpy(memory.data() + 4 * i, &value, 4);
    if (c.type == DType::f16) std::memcpy(memory.data() + 2 * i, &half, 2);
    if (c.type == DType::s8) memory[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(static_cast<int>(value));
    values.push_back(value);
  }

  // As run_conv does it, for the tokens from `first` on.
  const bool known = c.block < 0, e4m3 = c.codes == DType::e4m3;
  const int tokens = c.images * p.pixels() - c.first, rows = tokens * c.groups;
  const int block = c.block <= 0 ? k : c.block, blocks = (k + block - 1) / block, pitch = (k + 127) / 128 * 128;
  const std::int32_t zero = c.zeros == ZeroKind::integer ? -7 : 0;
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * pitch) + 16, 0xa5);
  std::vector<float> scales(static_cast<std::size_t>(rows * blocks)), offsets(scales.size());
  std::vector<std::int32_t> zeros(scales.size());
  QuantizeTask task{.a = memory.data(), .type = c.type, .m = rows, .k = k, .codes_type = c.codes};
  task.known = known, task.scale = 0.02f, task.zero = zero;
  task.group = std::max(c.block, 0);
  task.zero_points = c.zeros == ZeroKind::integer;
  task.codes = codes.data(), task.pitch = task.columns = pitch;
  QuantizedActs acts{.codes = codes.data(), .pitch = pitch, .scale = task.scale, .zero = zero, .group = std::max(c.block, 0)};
  if (!known) {
    acts.scales = task.scales = scales.data();
    if (c.zeros == ZeroKind::integer) acts.zeros = task.zeros = zeros.data();
    if (c.zeros == ZeroKind::offset) acts.offsets = task.offsets = offsets.data();
    acts.scale_row = acts.zero_row = task.scale_row = task.zero_row = 1;
    acts.scale_group = acts.zero_group = task.scale_group = task.zero_group = rows;
  }
  ASSERT_EQ(quantize_blocks(task, {.patches = p, .a = a, .first = c.first}, nullptr), cudaSuccess);

  // Every row by the rule on the host.
  std::vector<double> meant(static_cast<std::size_t>(rows * k)), parts(meant.size());
  for (int row = 0; row < rows; ++row) {
    const int token = c.first + row / c.groups, group = row % c.groups, pixel = token % p.pixels();
    std::vector<float> x;
    for (int kh = 0; kh < c.filter; ++kh)
      for (int kw = 0; kw < c.filter; ++kw)
        for (int i = 0; i < c.channels; ++i) {
          const int h = pixel / p.out_width * c.stride - c.padding + kh * c.dilation;
          const int w = pixel % p.out_width * c.stride - c.padding + kw * c.dilation;
          const bool inside = h >= 0 && h < c.height && w >= 0 && w < c.width;
          const auto at = token / p.pixels() * a.image + (h * c.width + w) * a.pixel + (group * c.channels + i) * a.channel;
          x.push_back(inside ? values[static_cast<std::size_t>(at)] : c.type == DType::s8 ? static_cast<float>(zero) : 0.0f);
        }
    for (int b = 0; b < blocks; ++b) {
      const auto begin = x.begin() + b * block, end = x.begin() + std::min(k, (b + 1) * block);
      float low = *std::min_element(begin, end), high = *std::max_element(begin, end);
      if (c.zeros != ZeroKind::offset) low = std::min(low, 0.0f), high = std::max(high, 0.0f);
      const act_rule::Rule rule = known                         ? act_rule::known(task.scale, zero)
                                  : c.zeros == ZeroKind::offset ? act_rule::with_offset(low, high)
                                  : c.zeros == ZeroKind::integer
                                      ? act_rule::asymmetric(low, high)
                                      : act_rule::symmetric(std::max(-low, high), e4m3 ? 448.0f : 127.0f);
      for (int i = b * block; i < std::min(k, (b + 1) * block); ++i) {
        const float value = x[static_cast<std::size_t>(i)];
        const std::uint8_t code = c.type == DType::s8    ? static_cast<std::uint8_t>(static_cast<int>(value))
                                  : rule.inverse == 0.0f ? 0
                                  : e4m3                 ? act_rule::to_e4m3(act_rule::multiply(value, rule.inverse))
                                                         : static_cast<std::uint8_t>(act_rule::to_s8(value - rule.low, rule));
        ASSERT_EQ(codes[static_cast<std::size_t>(row * pitch + i)], code) << row << " " << i;
        const auto at = static_cast<std::size_t>(row * k + i);
        const double q = static_cast<double>(code_value(c.codes, code)) - (c.zeros == ZeroKind::integer ? rule.zero : 0);
        const double offset = c.zeros == ZeroKind::offset ? static_cast<double>(rule.offset) : 0;
        meant[at] = q * static_cast<double>(rule.scale) + offset;
        parts[at] = std::abs(q * static_cast<double>(rule.scale)) + std::abs(offset);
      }
    }
    for (int i = k; i < pitch; ++i) ASSERT_EQ(codes[static_cast<std::size_t>(row * pitch + i)], 0);
  }
  for (std::size_t i = static_cast<std::size_t>(rows * pitch); i < codes.size(); ++i) ASSERT_EQ(codes[i], 0xa5);

  if (e4m3) {
    std::vector<float> x(meant.size());
    ASSERT_EQ(decode_acts(acts, c.codes, nullptr, rows, k, x.data(), nullptr), cudaSuccess);
    for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(x[i], static_cast<float>(meant[i])) << i;
    return;
  }
  const emulator::TileWeight weight(c.groups * c.outputs, k, gpu_tile::Codes::u4, c.weight_group, ZeroKind::integer, random);
  const int n_all = c.groups * c.outputs, pixels = p.pixels();
  std::vector<float> d(static_cast<std::size_t>(c.images * pixels * n_all) + 4, 0.5f);
  CodesTask product{.weight = weight.device(), .acts = acts, .m = tokens, .groups = c.groups, .group_outputs = c.outputs};
  product.pixels = pixels, product.first = c.first;
  product.d = c.nchw ? ImageStrides{pixels * n_all, 1, pixels} : ImageStrides{pixels * n_all, n_all, 1};
  product.epilogue.d = d.data();
  product.epilogue.d_stride = product.d.pixel;
  ASSERT_EQ(linear_codes_simt(product, nullptr), cudaSuccess);
  for (int token = 0; token < c.images * pixels; ++token)
    for (int n = 0; n < n_all; ++n) {
      const auto at = token / pixels * product.d.image + token % pixels * product.d.pixel + n * product.d.channel;
      const float got = d[static_cast<std::size_t>(at)];
      if (token < c.first) {
        ASSERT_EQ(got, 0.5f) << "written before the piece";
        continue;
      }
      double sum = 0, magnitude = 0;
      for (int i = 0; i < k; ++i) {
        const auto from = static_cast<std::size_t>(((token - c.first) * c.groups + n / c.outputs) * k + i);
        sum += meant[from] * weight.value(n, i);
        magnitude += parts[from] * (std::abs(weight.value(n, i)) + 16 * static_cast<double>(weight.scale(n, i)));
      }
      ASSERT_NEAR(static_cast<double>(got), sum, magnitude * 0x1p-20) << token << " " << n;
    }
  for (std::size_t i = d.size() - 4; i < d.size(); ++i) ASSERT_EQ(d[i], 0.5f) << "written past D";
}

// Patches, blocks of a pixel and known rules; codes with padding; groups whose rows share a tile; strides, dilations, both layouts; a piece.
constexpr ConvCase kConvs[] = {
    {DType::f16, false, 2, 7, 6, 16, 1, 40, 3, 1, 1, 1, 0, ZeroKind::none, 16},
    {DType::f32, true, 1, 9, 8, 12, 2, 20, 3, 2, 1, 1, 0, ZeroKind::offset, 108},
    {DType::f16, true, 2, 8, 8, 6, 3, 5, 3, 1, 2, 2, 3, ZeroKind::offset, 54},
    {DType::f16, false, 1, 6, 7, 32, 2, 24, 3, 1, 1, 1, 32, ZeroKind::integer, 32},
    {DType::f32, false, 2, 6, 6, 1, 20, 1, 3, 1, 1, 1, 0, ZeroKind::integer, 9},
    {DType::f16, true, 1, 7, 7, 24, 1, 33, 1, 1, 0, 1, -1, ZeroKind::integer, 8},
    {DType::s8, false, 2, 6, 5, 16, 1, 20, 3, 1, 1, 1, -1, ZeroKind::integer, 32},
    {DType::s8, true, 2, 7, 5, 5, 2, 9, 3, 1, 1, 2, -1, ZeroKind::none, 45},
    {DType::f16, false, 2, 7, 6, 16, 1, 8, 3, 1, 1, 1, 16, ZeroKind::none, 48, DType::s8, 50},
    {DType::f16, false, 1, 5, 6, 8, 2, 8, 3, 1, 1, 1, 0, ZeroKind::none, 72, DType::e4m3},
    {DType::f32, false, 1, 16, 9, 160, 1, 8, 3, 1, 1, 1, 0, ZeroKind::none, 32},
};
INSTANTIATE_TEST_SUITE_P(Simt, EmulatedCodesConv, testing::ValuesIn(kConvs), [](const auto& info) { return name(info.param); });

/// Runs at multiples of 16 bytes and not, with tails, within images; zero points at any distance. What lies between runs stays.
TEST(EmulatedRecode, TakesHalfOfTheRangeFromCodesAndZeroPoints) {
  emulator::use_shared_memory(shared);
  struct RecodeCase {
    std::int64_t images, rows, length, from_row, to_row;
    std::int64_t tokens, groups;
  };
  for (const RecodeCase& c : {RecodeCase{1, 3, 100, 112, 112, 3, 2},
                              {1, 3, 100, 103, 112, 3, 1},
                              {2, 5, 48, 64, 48, 1, 1},
                              {2, 3, 35, 40, 35, 0, 0},
                              {1, 1, 5000, 5000, 5000, 1, 1}}) {
    SCOPED_TRACE(fmt::format("[{}][{}][{}]", c.images, c.rows, c.length));
    std::vector<std::uint8_t> from(static_cast<std::size_t>(c.images * c.rows * c.from_row) + 16);
    std::vector<std::int8_t> to(static_cast<std::size_t>(c.images * c.rows * c.to_row) + 16, 0x5a);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::uint8_t>(i * 77 + i / 7);
    std::vector<std::int32_t> zeros(static_cast<std::size_t>(c.tokens * c.groups) * 3 + 1, 9999), made(zeros.size(), 7777);
    for (std::size_t i = 0; i < zeros.size(); i += 3) zeros[i] = static_cast<std::int32_t>(i * 5 % 256);
    ASSERT_EQ(recode_acts({.from = from.data(),
                           .to = to.data(),
                           .images = c.images,
                           .rows = c.rows,
                           .length = c.length,
                           .from_image = c.rows * c.from_row,
                           .from_row = c.from_row,
                           .to_image = c.rows * c.to_row,
                           .to_row = c.to_row,
                           .zeros = zeros.data(),
                           .to_zeros = made.data(),
                           .tokens = c.tokens,
                           .groups = c.groups,
                           .zero_token = 3 * c.groups,
                           .zero_group = 3},
                          nullptr),
              cudaSuccess);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(to.size()); ++i) {
      const std::int64_t run = i / c.to_row, at = i % c.to_row;
      const bool code = run < c.images * c.rows && at < c.length;
      const int expected = code ? static_cast<int>(from[static_cast<std::size_t>(run * c.from_row + at)]) - 128 : 0x5a;
      ASSERT_EQ(static_cast<int>(to[static_cast<std::size_t>(i)]), expected) << i;
    }
    for (std::size_t i = 0; i < made.size(); ++i)
      ASSERT_EQ(made[i], static_cast<std::int64_t>(i) < c.tokens * c.groups ? zeros[3 * i] - 128 : 7777) << i;
  }
}

/// Codes at multiples of 8 bytes and not, with a scale per tensor, per token and per block, in order and not; every code, NaN too.
TEST(EmulatedCodeHalves, TimesTheirScaleAreWhatCodesStandFor) {
  emulator::use_shared_memory(shared);
  struct HalvesCase {
    int m, k, pitch, group;  // group −1: a scale of the tensor
    bool permuted;
  };
  for (const HalvesCase& c : {HalvesCase{3, 520, 520, 0, false},
                              {2, 2000, 2003, -1, false},
                              {5, 203, 208, 0, true},
                              {4, 1300, 1304, 128, false},
                              {3, 203, 203, 20, false},
                              {3, 333, 336, 64, true}}) {
    SCOPED_TRACE(fmt::format("[{},{}], blocks of {}", c.m, c.k, c.group));
    std::mt19937 random(static_cast<unsigned>(c.k));
    const int blocks = c.group <= 0 ? 1 : (c.k + c.group - 1) / c.group, pitch = (c.k + 7) / 8 * 8;
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(c.m * c.pitch));
    for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i < 256 ? i : random() % 127);
    std::vector<float> scales;
    for (int i = 0; i < c.m * blocks; ++i) scales.push_back(std::ldexp(1.0f + static_cast<float>(random() % 97) / 97, i % 7 - 9));
    scales.back() = 0;
    std::vector<std::int32_t> perm;
    for (int k = 0; k < c.k; ++k) perm.push_back((k * 7 + 3) % c.k);
    std::vector<std::uint16_t> x(static_cast<std::size_t>(c.m * pitch) + 8, 0xa5a5);
    std::vector<float> made(static_cast<std::size_t>(c.m) + 1, -5.0f);
    QuantizedActs acts{.codes = codes.data(), .pitch = c.pitch, .scale = 0.75f};
    if (c.group >= 0) acts.scales = scales.data(), acts.scale_row = blocks, acts.scale_group = 1, acts.group = c.group;
    ASSERT_EQ(code_halves({.acts = acts,
                           .perm = c.permuted ? perm.data() : nullptr,
                           .m = c.m,
                           .k = c.k,
                           .x = x.data(),
                           .pitch = pitch,
                           .scales = made.data()},
                          nullptr),
              cudaSuccess);
    for (int m = 0; m < c.m; ++m) {
      const float scale = made[static_cast<std::size_t>(m)];
      if (c.group <= 0) {
        ASSERT_EQ(scale, c.group < 0 ? 0.75f : scales[static_cast<std::size_t>(m)]);
      } else {
        int exponent = 0;
        ASSERT_EQ(std::frexp(scale, &exponent), 0.5f);
        const float largest = *std::max_element(scales.begin() + m * blocks, scales.begin() + (m + 1) * blocks);
        ASSERT_TRUE(scale <= largest && largest < 2 * scale) << scale << " of " << largest;
      }
      for (int k = 0; k < pitch; ++k) {
        const float got = to_f32(std::bit_cast<f16>(x[static_cast<std::size_t>(m * pitch + k)]));
        if (k >= c.k) {
          ASSERT_EQ(got, 0.0f);
          continue;
        }
        const int channel = c.permuted ? perm[static_cast<std::size_t>(k)] : k;
        const float number = code_value(DType::e4m3, codes[static_cast<std::size_t>(m * c.pitch + channel)]);
        if (std::isnan(number)) {
          ASSERT_TRUE(std::isnan(got)) << m << " " << k;
          continue;
        }
        const float quotient = c.group <= 0 ? 1.0f : scales[static_cast<std::size_t>(m * blocks + channel / c.group)] / scale;
        ASSERT_EQ(got, to_f32(to_f16(number * quotient))) << m << " " << k;
      }
    }
    ASSERT_EQ(made.back(), -5.0f);
    for (std::size_t i = x.size() - 8; i < x.size(); ++i) ASSERT_EQ(x[i], 0xa5a5);
  }
}

}  // namespace
}  // namespace nibble::cuda
