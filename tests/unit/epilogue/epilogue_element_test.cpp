// The epilogue of one element against the epilogue of a row: the same bits for every combination of parts.
#include "epilogue/element.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <vector>

#include "core/random.hpp"
#include "epilogue/epilogue.hpp"

namespace nibble {
namespace {

constexpr std::int64_t kRows = 3, kColumns = 37, kPitch = 41;

/// Numbers of all sizes, infinities and NaN.
Tensor operand(DType type, std::vector<std::int64_t> shape, std::uint64_t seed) {
  Tensor t(type, std::move(shape));
  for (std::int64_t i = 0; i < t.numel(); ++i) t.set(i, random_normal(seed, static_cast<std::uint64_t>(i)));
  return t;
}

std::vector<float> sums() {
  std::vector<float> v(static_cast<std::size_t>(kRows * kColumns));
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = random_normal(1, i) * std::ldexp(1.0f, static_cast<int>(i % 24) - 16);
  const float infinity = std::numeric_limits<float>::infinity();
  const float special[] = {0.0f,  -0.0f,  infinity, -infinity, std::numeric_limits<float>::quiet_NaN(),
                           1e30f, -1e30f, 65519.0f, 1e-42f};
  std::copy(std::begin(special), std::end(special), v.begin() + 5);
  return v;
}

ConstTensorView view(const Tensor& t) {
  return t.shape.size() == 1 ? ConstTensorView(t.bytes.data(), t.dtype, {t.shape[0]})
                             : ConstTensorView(t.bytes.data(), t.dtype, {t.shape[0], t.shape[1]});
}

/// D with `pitch` elements a row, 0xff where nothing was stored.
struct Output {
  std::vector<std::byte> bytes;
  TensorView d;
  explicit Output(DType type)
      : bytes(static_cast<std::size_t>(kRows * kPitch * bits(type) / 8), std::byte{0xff}),
        d(bytes.data(), type, {kRows, kColumns}) {
    d.strides[0] = kPitch;
  }
};

/// Clears the sign of every NaN: −x and −1·x are the same number, and NaNs of different signs.
void drop_signs_of_nan(Output& out) {
  const auto clear = [&](auto word, auto sign, auto infinity) {
    for (std::size_t i = 0; i < out.bytes.size(); i += sizeof word) {
      std::memcpy(&word, out.bytes.data() + i, sizeof word);
      if ((word & ~sign) > infinity) word = static_cast<decltype(word)>(word & ~sign);
      std::memcpy(out.bytes.data() + i, &word, sizeof word);
    }
  };
  if (out.d.dtype == DType::f32) clear(std::uint32_t{}, 0x80000000u, 0x7f800000u);
  if (out.d.dtype == DType::f16) clear(std::uint16_t{}, 0x8000u, 0x7c00u);
  if (out.d.dtype == DType::bf16) clear(std::uint16_t{}, 0x8000u, 0x7f80u);
}

TEST(EpilogueElement, GivesTheBitsOfARow) {
  const std::vector<float> acc = sums();
  const DType floats[] = {DType::f32, DType::f16, DType::bf16};
  for (Activation activation : kActivations)
    for (DType out : {DType::f32, DType::f16, DType::bf16, DType::s8, DType::u8})
      for (unsigned parts = 0; parts < 32; ++parts)
        for (DType type : floats) {
          EpilogueSpec spec{.row_scale = (parts & 1) != 0,
                            .col_scale = (parts & 2) != 0,
                            .bias = (parts & 4) != 0,
                            .activation = activation,
                            .clamp_low = -0.25f,
                            .clamp_high = 1.5f,
                            .negative_slope = -0.7f,
                            .gate = (parts & 8) != 0,
                            .residual = (parts & 16) != 0,
                            .out = out,
                            .out_scale = 0.037f,
                            .out_zero = out == DType::u8 ? 0 : -3,
                            .out_scales = out == DType::u8 && (parts & 1) != 0,
                            .out_low = (parts & 2) != 0 ? 3 : -1000,
                            .out_high = 120};
          Tensor out_scale = operand(DType::f32, {(parts & 4) != 0 ? kColumns : 1}, 7), out_zero(DType::s32, {1});
          for (std::int64_t i = 0; i < out_scale.numel(); ++i) out_scale.set(i, 0.001f + std::abs(out_scale.at(i)));
          out_zero.as<std::int32_t>()[0] = 100;
          const Tensor row_scale = operand(DType::f32, {kRows}, 2), col_scale = operand(DType::f32, {kColumns}, 3);
          const Tensor bias = operand(type, {kColumns}, 4), gate = operand(type, {kRows, kColumns}, 5),
                       residual = operand(type, {kRows, kColumns}, 6);
          const Operands args{.row_scale = view(row_scale),
                              .col_scale = view(col_scale),
                              .bias = view(bias),
                              .gate = view(gate),
                              .residual = view(residual),
                              .out_scale = view(out_scale),
                              .out_zero = (parts & 8) != 0 ? view(out_zero) : ConstTensorView()};
          constexpr float kAccScale = 0.75f;

          Output by_row(out), by_element(out);
          ASSERT_TRUE(epilogue::check_args(spec, args, by_row.d).ok());
          const epilogue::Element element = epilogue::element(spec, args, by_element.d, kAccScale);
          for (std::int64_t m = 0; m < kRows; ++m) {
            std::vector<float> row(acc.begin() + m * kColumns, acc.begin() + (m + 1) * kColumns);
            for (std::int64_t n = 0; n < kColumns; ++n) element.store(m, n, row[static_cast<std::size_t>(n)]);
            for (float& v : row) v *= kAccScale;
            epilogue::store_row(spec, args, row.data(), m, 0, kColumns, by_row.d);
          }
          drop_signs_of_nan(by_row), drop_signs_of_nan(by_element);
          ASSERT_EQ(std::memcmp(by_row.bytes.data(), by_element.bytes.data(), by_row.bytes.size()), 0)
              << spec.name() << ", operands of " << name(type);
        }
}

/// A glu takes channels j and N/2 + j of x from neighbouring sums.
TEST(EpilogueElement, GivesTheBitsOfARowOfAGlu) {
  constexpr std::int64_t kHalf = 18, kChannels = 2 * kHalf;
  for (Activation activation : kActivations)
    for (DType out : {DType::f32, DType::f16, DType::s8})
      for (unsigned parts = 0; parts < 32; ++parts) {
        const EpilogueSpec spec{.row_scale = (parts & 1) != 0,
                                .col_scale = (parts & 2) != 0,
                                .bias = (parts & 4) != 0,
                                .activation = activation,
                                .glu = true,
                                .glu_limit = (parts & 1) != 0 ? 0.5f : std::numeric_limits<float>::infinity(),
                                .glu_offset = (parts & 2) != 0 ? 1.0f : 0.0f,
                                .gate = (parts & 8) != 0,
                                .residual = (parts & 16) != 0,
                                .out = out,
                                .out_scale = 0.037f};
        const Tensor row_scale = operand(DType::f32, {kRows}, 2), col_scale = operand(DType::f32, {kChannels}, 3),
                     bias = operand(DType::f16, {kChannels}, 4), gate = operand(DType::f16, {kRows, kHalf}, 5),
                     residual = operand(DType::f32, {kRows, kHalf}, 6);
        const Operands args{.row_scale = view(row_scale),
                            .col_scale = view(col_scale),
                            .bias = view(bias),
                            .gate = view(gate),
                            .residual = view(residual)};
        Tensor by_row(out, {kRows, kHalf}), by_element(out, {kRows, kHalf}), expected(out, {kRows, kHalf});
        const auto d = [](Tensor& t) { return TensorView(t.bytes.data(), t.dtype, {kRows, kHalf}); };
        ASSERT_TRUE(epilogue::check_args(spec, args, d(by_row)).ok());
        const epilogue::Element element = epilogue::element(spec, args, d(by_element), 1.0f);
        const std::vector<float> acc = sums();
        for (std::int64_t m = 0; m < kRows; ++m) {
          std::vector<float> row(acc.begin() + m * kColumns, acc.begin() + m * kColumns + kChannels);
          for (std::int64_t n = 0; n < kChannels; n += 2)
            element.store_two(m, n, row[static_cast<std::size_t>(n)], row[static_cast<std::size_t>(n) + 1], kChannels);
          const auto x = [&](std::int64_t j, std::int64_t half) {
            float value = row[static_cast<std::size_t>(2 * j + half)];
            const std::int64_t n = half * kHalf + j;
            if (spec.row_scale) value *= row_scale.at(m);
            if (spec.col_scale) value *= col_scale.at(n);
            return spec.bias ? value + bias.at(n) : value;
          };
          for (std::int64_t j = 0; j < kHalf && out == DType::f32; ++j) {  // by the definition
            float value = std::isnan(x(j, 0)) ? x(j, 0) : std::min(x(j, 0), spec.glu_limit);
            epilogue::with_activation(spec, [&](auto function) { value = function(value); });
            const float other = x(j, 1);
            value *= (std::isnan(other) ? other : std::clamp(other, -spec.glu_limit, spec.glu_limit)) + spec.glu_offset;
            if (spec.gate) value *= gate.at(m * kHalf + j);
            if (spec.residual) value += residual.at(m * kHalf + j);
            expected.set(m * kHalf + j, value);
          }
          epilogue::store_row(spec, args, row.data(), m, 0, kChannels, d(by_row));
        }
        const auto same = [](const Tensor& a, const Tensor& b) {
          for (std::int64_t i = 0; i < a.numel(); ++i)
            if (!(a.at(i) == b.at(i) || (std::isnan(a.at(i)) && std::isnan(b.at(i))))) return false;
          return true;
        };
        ASSERT_TRUE(same(by_row, by_element)) << spec.name();
        if (out == DType::f32) {
          ASSERT_TRUE(same(by_row, expected)) << spec.name();
        }
      }
}

// Gate and residual of images, in either layout and each with distances of its own: the numbers of matrices whose rows are the pixels.
TEST(EpilogueElement, FindsThePixelsOfImages) {
  constexpr int kImages = 2, kPixels = 6;
  struct Strides {
    std::int64_t image, pixel, channel;
    std::int64_t at(int image_, int pixel_, std::int64_t n) const { return image_ * image + pixel_ * pixel + n * channel; }
  };
  const std::array<Strides, 3> nchw{{{(kColumns + 3) * kPixels, 1, kPixels}, {1000, 1, kPixels + 4}, {800, 1, kPixels}}};
  const std::array<Strides, 3> nhwc{{{kPixels * kColumns, kColumns, 1}, {kPixels * 50, 50, 1}, {kPixels * 41, 41, 1}}};
  const EpilogueSpec spec{.col_scale = true, .bias = true, .activation = Activation::silu, .gate = true, .residual = true};
  const Tensor col_scale = operand(DType::f32, {kColumns}, 3), bias = operand(DType::f16, {kColumns}, 4);
  for (const auto& [of_d, of_gate, of_residual] : {nchw, nhwc}) {
    const Tensor gate = operand(DType::f16, {2000}, 5), residual = operand(DType::f32, {2000}, 6);
    Tensor images(DType::f32, {2000}), matrix(DType::f32, {kImages * kPixels, kColumns});
    Tensor gate_rows(DType::f16, matrix.shape), residual_rows(DType::f32, matrix.shape);
    for (int image = 0; image < kImages; ++image)
      for (int pixel = 0; pixel < kPixels; ++pixel)
        for (std::int64_t n = 0; n < kColumns; ++n) {
          const std::int64_t i = (image * kPixels + pixel) * kColumns + n;
          gate_rows.set(i, gate.at(of_gate.at(image, pixel, n)));
          residual_rows.set(i, residual.at(of_residual.at(image, pixel, n)));
        }
    const Operands args{
        .col_scale = view(col_scale), .bias = view(bias), .gate = view(gate_rows), .residual = view(residual_rows)};
    const epilogue::Element rows =
        epilogue::element(spec, args, TensorView(matrix.bytes.data(), DType::f32, {kImages * kPixels, kColumns}), 0.75f);
    epilogue::Element element = rows;
    element.d = images.bytes.data();
    element.gate = {gate.bytes.data(), DType::f16, of_gate.pixel, of_gate.image, of_gate.channel};
    element.residual = {residual.bytes.data(), DType::f32, of_residual.pixel, of_residual.image, of_residual.channel};
    for (int image = 0; image < kImages; ++image)
      for (int pixel = 0; pixel < kPixels; ++pixel)
        for (std::int64_t n = 0; n < kColumns; ++n) {
          const std::int64_t m = image * kPixels + pixel, at = of_d.at(image, pixel, n);
          const float acc = random_normal(7, static_cast<std::uint64_t>(m * kColumns + n));
          rows.store(m, n, acc);
          element.store_at(at, epilogue::Pixel{image, pixel}, n, acc);
          ASSERT_EQ(images.at(at), matrix.at(m * kColumns + n)) << "pixel " << m << ", channel " << n;
        }
  }
}

// A spec without a part ignores an operand that is given for it.
TEST(EpilogueElement, NaNStaysAndIsZeroInInt8) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (Activation activation : kActivations) {
    float x = nan;
    epilogue::with_activation(EpilogueSpec{.activation = activation}, [&](auto function) { x = function(x); });
    EXPECT_TRUE(std::isnan(x)) << name(activation);
  }
  EXPECT_EQ(epilogue::quantize(nan, 0.5f, -3, {-128, 127}), 0);
  EXPECT_EQ(epilogue::quantize(nan, 0.5f, -3, {10, 127}), 10);
}

TEST(EpilogueElement, IgnoresOperandsTheSpecDoesNotName) {
  const Tensor bias = operand(DType::f16, {kColumns}, 4);
  const Output out(DType::f32);
  const epilogue::Element element = epilogue::element({}, {.bias = view(bias)}, out.d, 1.0f);
  EXPECT_EQ(element.bias.data, nullptr);
  element.store(1, 2, 3.5f);
  EXPECT_EQ(static_cast<const float*>(out.d.data)[kPitch + 2], 3.5f);
}

}  // namespace
}  // namespace nibble
