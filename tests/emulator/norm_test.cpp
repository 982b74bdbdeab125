// Normalizing and quantizing in one step (norm_rows.cu) on the emulated GPU: bit for bit the two steps one after the other.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "nibble/quantize.hpp"
#include "nibble/tensor.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/steps/norm_rows.cu"
#include "kernels/cuda/steps/quantize_acts.hpp"

namespace nibble::cuda {
namespace {

struct Case {
  const char* name;
  DType codes = DType::s8;
  int group = 0;
  bool zeros = false, known = false, terms = false;
};
constexpr Case kCases[] = {{.name = "s8"},
                           {.name = "s8_zeros", .zeros = true},
                           {.name = "s8_static", .known = true},
                           {.name = "e4m3", .codes = DType::e4m3},
                           {.name = "e4m3_groups", .codes = DType::e4m3, .group = 128},
                           {.name = "s8_groups", .group = 32},
                           {.name = "terms", .terms = true},
                           {.name = "zero_terms", .zeros = true, .terms = true},
                           {.name = "group_terms", .group = 128, .terms = true},
                           {.name = "short_group_zero_terms", .group = 32, .zeros = true, .terms = true}};

/// What a quantizer writes.
struct Written {
  std::vector<std::uint8_t> codes;
  std::vector<float> scales, terms, token_scales;
  std::vector<std::int32_t> zeros, sums;

  bool operator==(const Written& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {  // a NaN is equal to itself
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return codes == other.codes && zeros == other.zeros && sums == other.sums && same(scales, other.scales) &&
           same(terms, other.terms) && same(token_scales, other.token_scales);
  }
};

class EmulatedNormCodes : public testing::TestWithParam<Case> {};

TEST_P(EmulatedNormCodes, AreThoseOfTwoSteps) {
  const Case& c = GetParam();
  int number = 0;
  for (const int k : {40, 1000, 4096, 9000})
    for (const DType type : {DType::f16, DType::bf16, DType::f32}) {
      if (k > 4096 && type == DType::bf16) continue;  // as f16
      SCOPED_TRACE(fmt::format("{} of {} channels of {}", c.name, k, nibble::name(type)));
      const int m = 3, padded = (k + 7) / 8 * 8, columns = (k + 127) / 128 * 128;
      std::mt19937 random(static_cast<unsigned>(k));
      std::normal_distribution<float> normal;
      const auto tensor = [&](std::int64_t count) {
        Tensor t(type, {count});
        for (std::int64_t i = 0; i < count; ++i) t.set(i, normal(random));
        return t;
      };
      const Tensor a = tensor(m * k), add = tensor(m * k), weight = tensor(k), bias = tensor(k);
      Tensor y(type, {m * padded}), sum(type, {m * k}), fused_sum(type, {m * k});
      if (number % 3 == 1) const_cast<Tensor&>(a).set(k + 7, std::numeric_limits<float>::infinity());  // a token becomes NaN
      const bool layer = ++number % 2 == 0;
      NormTask norm{.spec = {.kind = layer ? Norm::layer : Norm::rms, .weight_offset = 1.0f, .bias = layer, .add = true},
                    .type = type,
                    .m = m,
                    .k = k,
                    .a = a.bytes.data(),
                    .a_stride = k,
                    .add = add.bytes.data(),
                    .add_type = type,
                    .add_stride = k,
                    .sum = sum.bytes.data(),
                    .sum_stride = k,
                    .weight = weight.bytes.data(),
                    .weight_type = type,
                    .bias = layer ? bias.bytes.data() : nullptr,
                    .bias_type = type,
                    .y = y.bytes.data(),
                    .y_stride = padded};
      const auto quantized = [&](auto run) {
        const int groups = c.group == 0 ? 1 : (k + c.group - 1) / c.group, fold = c.group == 32 ? 32 : 128;
        Written w;
        w.codes.assign(static_cast<std::size_t>(m * columns), 0xa5);
        QuantizeTask task{.a = y.bytes.data(),
                          .type = type,
                          .a_stride = padded,
                          .m = m,
                          .k = k,
                          .limit = 3.0f,
                          .codes_type = c.codes,
                          .zero_points = c.zeros,
                          .known = c.known,
                          .group = c.group,
                          .scale = 0.03f,
                          .zero = c.known ? 5 : 0,
                          .codes = w.codes.data(),
                          .pitch = columns,
                          .columns = columns};
        if (c.terms) {
          w.terms.resize(static_cast<std::size_t>(2 * (m + 1) * (columns / fold)));
          w.token_scales.resize(m);
          task.terms = w.terms.data(), task.term_fold = m + 1, task.fold = fold, task.term_pairs = true;
          if (c.group == 0) task.token_scales = w.token_scales.data();
        } else {
          w.scales.resize(static_cast<std::size_t>(m * groups)), w.zeros.resize(w.scales.size()), w.sums.resize(m);
          if (!c.known) task.scales = w.scales.data(), task.scale_row = 1, task.scale_group = m;
          if (c.zeros) task.zeros = w.zeros.data(), task.zero_row = 1, task.zero_group = m;
          if (c.codes == DType::s8) task.sums = w.sums.data(), task.sum_row = 1;
        }
        EXPECT_EQ(run(task), cudaSuccess);
        return w;
      };
      ASSERT_EQ(norm_rows(norm, nullptr), cudaSuccess);
      const Written expected = quantized([](const QuantizeTask& task) { return quantize_acts(task, nullptr); });
      norm.sum = fused_sum.bytes.data();
      norm.y = nullptr;
      EXPECT_TRUE(quantized([&](const QuantizeTask& task) { return norm_codes(norm, task, nullptr); }) == expected);
      EXPECT_EQ(std::memcmp(sum.bytes.data(), fused_sum.bytes.data(), sum.bytes.size()), 0);
    }
}

INSTANTIATE_TEST_SUITE_P(Emulator, EmulatedNormCodes, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace nibble::cuda
