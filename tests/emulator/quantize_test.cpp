// The quantizers of activations on the emulated GPU: the launcher and the kernels as they are, against the rule on the host, bit for bit.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>

#undef __shared__
#define __shared__ static

#include "kernels/cuda/steps/quantize_acts.cu"

std::uint16_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t, __nv_fp8_interpretation_t) {
  using nibble::act_rule::to_e4m3;
  return static_cast<std::uint16_t>(to_e4m3(v.y) << 8 | to_e4m3(v.x));
}

namespace nibble::cuda {
namespace {

enum class Kind { s8_token, s8_zeros, s8_static, e4m3_token, groups, terms, plain_terms, zero_terms };

struct Case {
  Kind kind;
  DType type;
  int m, k;
  int group = 0;    // channels that share a scale; 0: all
  int padding = 0;  // elements between rows
  bool prescaled = false;

  bool online() const { return kind >= Kind::terms; }
  bool e4m3() const { return kind == Kind::e4m3_token || kind == Kind::groups; }
  bool zeros() const { return kind == Kind::s8_zeros || kind == Kind::zero_terms; }
  int fold() const { return group != 0 && group < 128 ? 32 : 128; }
  int columns() const { return online() ? (k + 127) / 128 * 128 : k; }
};

std::string name(const Case& c) {
  const char* const kinds[] = {"s8", "s8_zeros", "s8_static", "e4m3", "e4m3", "terms", "plain_terms", "zero_terms"};
  return fmt::format("{}_{}_{}x{}_g{}{}{}", kinds[static_cast<int>(c.kind)], nibble::name(c.type), c.m, c.k, c.group,
                     c.padding != 0 ? "_padded" : "", c.prescaled ? "_prescaled" : "");
}

class EmulatedQuantizer : public testing::TestWithParam<Case> {};

TEST_P(EmulatedQuantizer, FollowsTheRule) {
  const Case& c = GetParam();
  std::mt19937 random(static_cast<unsigned>(c.m * 31 + c.k));
  const int stride = c.k + c.padding, columns = c.columns(), element = c.type == DType::f32 ? 4 : 2;
  const int group = c.group == 0 ? c.k : c.group, groups = (c.k + group - 1) / group, folds = columns / c.fold();

  // A, as bytes and as values.
  std::vector<std::uint8_t> a(static_cast<std::size_t>(c.m * stride * element));
  std::vector<float> x(static_cast<std::size_t>(c.m * c.k)), prescale;
  for (int k = 0; k < c.k; ++k) prescale.push_back(c.prescaled ? 0.5f + static_cast<float>(random() % 100) / 64 : 1.0f);
  for (int m = 0; m < c.m; ++m)
    for (int k = 0; k < c.k; ++k) {
      const bool spoiled = m == 1 && k == c.k / 2;  // an infinity, whose row or group becomes NaN
      const float value = spoiled ? -std::numeric_limits<float>::infinity() : (static_cast<float>(random() % 4001) - 1500) / 512;
      std::uint8_t* to = a.data() + static_cast<std::size_t>((m * stride + k) * element);
      float& read = x[static_cast<std::size_t>(m * c.k + k)];
      if (c.type == DType::f32) {
        std::memcpy(to, &value, 4), read = value;
      } else if (c.type == DType::f16) {
        const f16 half = to_f16(value);
        std::memcpy(to, &half, 2), read = to_f32(half);
      } else {
        const bf16 half = to_bf16(value);
        std::memcpy(to, &half, 2), read = to_f32(half);
      }
      read *= prescale[static_cast<std::size_t>(k)];
    }

  std::vector<std::uint8_t> codes(static_cast<std::size_t>(c.m * columns) + 16, 0xa5);
  std::vector<float> scales(static_cast<std::size_t>(c.m * groups)), token_scales(static_cast<std::size_t>(c.m));
  std::vector<std::int32_t> zeros(static_cast<std::size_t>(c.m)), sums(static_cast<std::size_t>(c.m));
  const int term_fold = (c.m + 1) / 2 * 2;
  std::vector<float> terms(static_cast<std::size_t>(2 * term_fold * folds));
  QuantizeTask task;
  task.a = a.data(), task.type = c.type, task.a_stride = stride, task.m = c.m, task.k = c.k;
  if (c.prescaled) task.prescale = prescale.data();
  task.codes_type = c.e4m3() ? DType::e4m3 : DType::s8;
  task.zero_points = c.zeros();
  task.group = c.group;
  task.known = c.kind == Kind::s8_static;
  task.scale = 0.03f, task.zero = task.known ? 5 : 0;
  task.codes = codes.data(), task.pitch = columns, task.columns = columns;
  if (c.online()) {
    task.terms = terms.data(), task.term_fold = term_fold, task.fold = c.fold();
    task.term_pairs = c.kind != Kind::terms;
    if (c.kind == Kind::plain_terms) task.token_scales = token_scales.data();
  } else {
    task.scales = scales.data(), task.scale_row = 1, task.scale_group = c.m;
    if (c.zeros()) task.zeros = zeros.data(), task.zero_row = 1;
    if (c.kind == Kind::s8_token) task.sums = sums.data(), task.sum_row = 1;
  }
  ASSERT_EQ(quantize_acts(task, nullptr), cudaSuccess);

  for (int m = 0; m < c.m; ++m) {
    std::vector<act_rule::Rule> rules;
    for (int g = 0; g < groups; ++g) {
      float low = 0, high = 0, absmax = 0;
      for (int k = g * group; k < std::min(c.k, (g + 1) * group); ++k) {
        const float value = x[static_cast<std::size_t>(m * c.k + k)];
        low = std::min(low, value), high = std::max(high, value), absmax = std::max(absmax, std::abs(value));
      }
      rules.push_back(task.known  ? act_rule::known(task.scale, task.zero)
                      : c.zeros() ? act_rule::asymmetric(low, high)
                                  : act_rule::symmetric(absmax, c.e4m3() ? act_rule::kE4m3Max : 127.0f));
      const act_rule::Rule& rule = rules.back();
      if (!task.known && !c.online()) {
        const float scale = scales[static_cast<std::size_t>(g * c.m + m)];
        ASSERT_EQ(std::bit_cast<std::uint32_t>(scale), std::bit_cast<std::uint32_t>(rule.scale)) << "scale " << m << " " << g;
        if (c.zeros()) {
          ASSERT_EQ(zeros[static_cast<std::size_t>(m)], rule.zero);
        }
      }
    }
    const auto code_of = [&](int channel) -> int {
      const act_rule::Rule& rule = rules[static_cast<std::size_t>(std::min(channel, c.k - 1) / group)];
      if (channel >= c.k) return rule.zero;  // past K: contributes 0
      const float value = x[static_cast<std::size_t>(m * c.k + channel)];
      if (c.e4m3()) return rule.inverse == 0.0f ? 0 : act_rule::to_e4m3(act_rule::multiply(value, rule.inverse));
      return rule.inverse == 0.0f ? rule.zero : act_rule::to_s8(value, rule);
    };
    std::int32_t sum = 0;
    for (int k = 0; k < columns; ++k) {
      const int channel = c.online() ? k / 16 * 16 + gpu_tile::interleaved(k % 16) : k;
      ASSERT_EQ(codes[static_cast<std::size_t>(m * columns + k)], static_cast<std::uint8_t>(code_of(channel)))
          << m << " " << channel;
      sum += static_cast<std::int8_t>(code_of(channel));
    }
    if (task.sums != nullptr) {
      ASSERT_EQ(sums[static_cast<std::size_t>(m)], sum);
    }
    for (int fold = 0; c.online() && fold < folds; ++fold) {
      const act_rule::Rule& rule = rules[static_cast<std::size_t>(std::min(fold * c.fold(), c.k - 1) / group)];
      std::int32_t of_fold = 0;
      for (int k = fold * c.fold(); k < (fold + 1) * c.fold(); ++k) of_fold += static_cast<std::int8_t>(code_of(k)) - rule.zero;
      const float scale = task.token_scales != nullptr ? 1.0f : rule.scale;
      const float second = c.zeros() ? std::bit_cast<float>(zero_term(of_fold, rule.zero)) : scale * static_cast<float>(of_fold);
      const auto of_token =
          static_cast<std::size_t>(2 * (fold * term_fold + m)) - (task.term_pairs ? static_cast<std::size_t>(m % 2) : 0);
      const float got[2] = {terms[of_token], terms[of_token + (task.term_pairs ? 2 : 1)]};
      ASSERT_EQ(std::bit_cast<std::uint32_t>(got[0]), std::bit_cast<std::uint32_t>(scale)) << m << " fold " << fold;
      if (scale == scale) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(got[1]), std::bit_cast<std::uint32_t>(second)) << m << " fold " << fold;
      }
    }
    if (task.token_scales != nullptr) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(token_scales[static_cast<std::size_t>(m)]),
                std::bit_cast<std::uint32_t>(rules[0].scale));
    }
  }
  for (std::size_t i = static_cast<std::size_t>(c.m * columns); i < codes.size(); ++i) ASSERT_EQ(codes[i], 0xa5);
}

// A vector a thread, and several; whole rows, tails, gaps; CTAs of several rows, parts of rows, and rows too long for a CTA.
constexpr Case kCases[] = {
    {Kind::s8_token, DType::bf16, 3, 1000},
    {Kind::s8_token, DType::f16, 40, 4096},
    {Kind::s8_token, DType::f32, 2, 50000},
    {Kind::s8_token, DType::bf16, 8, 28672},
    {Kind::s8_zeros, DType::f16, 5, 20000},
    {Kind::s8_token, DType::f32, 40, 2048},
    {Kind::s8_zeros, DType::f32, 12, 14336},
    {Kind::s8_zeros, DType::bf16, 5, 520, 0, 8},
    {Kind::s8_zeros, DType::f16, 100, 1024, 0, 0, true},
    {Kind::s8_static, DType::bf16, 7, 333},
    {Kind::s8_static, DType::f16, 60, 2048},
    {Kind::e4m3_token, DType::bf16, 50, 2048},
    {Kind::e4m3_token, DType::bf16, 2, 53248},
    {Kind::groups, DType::bf16, 3, 1024, 128},
    {Kind::groups, DType::f16, 70, 1536, 128},
    {Kind::groups, DType::f32, 30, 1024, 128},
    {Kind::groups, DType::bf16, 4, 600, 24},
    {Kind::groups, DType::f32, 200, 257, 128},
    {Kind::groups, DType::bf16, 70, 1028, 128},
    {Kind::terms, DType::bf16, 40, 2048, 128},
    {Kind::terms, DType::f16, 90, 1024, 32},
    {Kind::terms, DType::bf16, 3, 400, 128},
    {Kind::plain_terms, DType::bf16, 60, 1280},
    {Kind::plain_terms, DType::f16, 2, 200},
    {Kind::plain_terms, DType::f16, 7, 28672},
    {Kind::terms, DType::f32, 30, 2048, 128},
    {Kind::plain_terms, DType::f32, 2, 40000},
    {Kind::zero_terms, DType::bf16, 2, 33000},
    {Kind::zero_terms, DType::bf16, 50, 1536, 64},
};

INSTANTIATE_TEST_SUITE_P(Quantizer, EmulatedQuantizer, testing::ValuesIn(kCases),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace nibble::cuda
