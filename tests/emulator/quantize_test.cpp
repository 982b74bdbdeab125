// The quantizers of activations on the emulated GPU: the launcher and the kernels as they are, against the rule on the host, bit for bit.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "nibble/quantize.hpp"
#include "nibble/tensor.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/steps/quantize_acts.cu"
#include "kernels/cuda/steps/quantize_blocks.cu"

std::uint16_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t, __nv_fp8_interpretation_t) {
  using nibble::act_rule::to_e4m3;
  return static_cast<std::uint16_t>(to_e4m3(v.y) << 8 | to_e4m3(v.x));
}

namespace nibble::cuda {
namespace {

enum class Kind {
  s8_token,
  s8_zeros,
  s8_static,
  s8_offsets,
  e4m3_token,
  groups,
  group_zeros,
  halves,
  terms,
  plain_terms,
  zero_terms,
  offset_terms
};

constexpr int kDivisor = 3;  // of fetched rows

/// Channels of a fold, where so many share a scale.
int fold_of(int group) { return group == 0 || group >= 128 ? 128 : std::min(group, 32); }

struct Case {
  Kind kind;
  DType type;
  int m, k;
  int group = 0;    // channels that share a scale; 0: all
  int padding = 0;  // elements between rows
  bool prescaled = false;
  bool fetched = false;  // rows lie in another order, and `source` names them
  bool copied = false;   // of each kDivisor rows that are equal, and `row_of` is given, too

  int place(int row) const { return copied ? (m - 1 - row) / kDivisor : fetched ? m - 1 - row : row; }
  bool online() const { return kind >= Kind::terms; }
  bool offsets() const { return kind == Kind::s8_offsets || kind == Kind::offset_terms; }
  bool e4m3() const { return kind == Kind::e4m3_token || kind == Kind::groups || kind == Kind::halves; }
  bool zeros() const { return kind == Kind::s8_zeros || kind == Kind::group_zeros || kind == Kind::zero_terms; }
  int fold() const { return fold_of(group); }
  int columns() const { return online() ? (k + 127) / 128 * 128 : kind == Kind::halves ? (k + 7) / 8 * 8 : k; }
};

std::string name(const Case& c) {
  const char* const kinds[] = {"s8",       "s8_zeros", "s8_static", "s8_offsets",  "e4m3",       "e4m3",
                               "s8_zeros", "halves",   "terms",     "plain_terms", "zero_terms", "offset_terms"};
  return fmt::format("{}_{}_{}x{}_g{}{}{}{}", kinds[static_cast<int>(c.kind)], nibble::name(c.type), c.m, c.k, c.group,
                     c.padding != 0 ? "_padded" : "", c.prescaled ? "_prescaled" : "", c.fetched ? "_fetched" : "") +
         (c.copied ? "_copied" : "");
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
  const auto in_memory = [&](int m, int k) { return a.data() + static_cast<std::size_t>((c.place(m) * stride + k) * element); };
  for (int m = 0; m < c.m; ++m)
    for (int k = 0; k < c.k; ++k) {
      const bool spoiled = c.place(m) == c.place(1) && k == c.k / 2;  // an infinity, whose row or group becomes NaN
      const float value = spoiled ? -std::numeric_limits<float>::infinity() : (static_cast<float>(random() % 4001) - 1500) / 512;
      const f16 half = to_f16(value);
      const bf16 brief = to_bf16(value);
      if (c.type == DType::f32)
        std::memcpy(in_memory(m, k), &value, 4);
      else if (c.type == DType::f16)
        std::memcpy(in_memory(m, k), &half, 2);
      else
        std::memcpy(in_memory(m, k), &brief, 2);
    }
  for (int m = 0; m < c.m; ++m)
    for (int k = 0; k < c.k; ++k) {
      float& read = x[static_cast<std::size_t>(m * c.k + k)];
      f16 half;
      bf16 brief;
      if (c.type == DType::f32)
        std::memcpy(&read, in_memory(m, k), 4);
      else if (c.type == DType::f16)
        std::memcpy(&half, in_memory(m, k), 2), read = to_f32(half);
      else
        std::memcpy(&brief, in_memory(m, k), 2), read = to_f32(brief);
      read *= prescale[static_cast<std::size_t>(k)];
    }

  std::vector<std::uint8_t> codes(static_cast<std::size_t>(c.m * columns) + 16, 0xa5);
  std::vector<float> scales(static_cast<std::size_t>(c.m * groups)), token_scales(static_cast<std::size_t>(c.m));
  std::vector<std::int32_t> zeros(scales.size()), sums(static_cast<std::size_t>(c.m));
  std::vector<float> offsets(scales.size());
  const int term_fold = (c.m + 1) / 2 * 2;
  const int count = c.offsets() ? 3 : 2;  // of a token and fold
  std::vector<float> terms(static_cast<std::size_t>(count * term_fold * folds));
  QuantizeTask task;
  task.a = a.data(), task.type = c.type, task.a_stride = stride, task.m = c.m, task.k = c.k;
  if (c.prescaled) task.prescale = prescale.data();
  std::vector<std::int32_t> source, row_of(static_cast<std::size_t>(c.m));
  for (int m = 0; m < c.m; ++m) source.push_back(c.copied ? c.m - 1 - m : kDivisor * c.place(m) + m % kDivisor);
  for (int m = 0; m < c.m; ++m) row_of[static_cast<std::size_t>(c.m - 1 - m)] = m;
  if (c.fetched || c.copied) task.source = source.data(), task.divisor = kDivisor;
  if (c.copied) task.row_of = row_of.data();
  task.codes_type = c.e4m3() ? DType::e4m3 : DType::s8;
  task.zero_points = c.zeros();
  task.group = c.group;
  task.known = c.kind == Kind::s8_static;
  task.scale = 0.03f, task.zero = task.known ? 5 : 0;
  task.codes = codes.data(), task.pitch = columns, task.columns = columns;
  std::vector<std::uint16_t> halves(static_cast<std::size_t>(c.kind == Kind::halves ? c.m * columns : 0) + 8, 0xa5a5);
  if (c.kind == Kind::halves) task.codes = nullptr, task.halves = halves.data();
  if (c.online()) {
    task.terms = terms.data(), task.term_fold = term_fold, task.fold = c.fold();
    task.term_pairs = c.kind != Kind::terms;
    task.term_offsets = c.offsets();
    if (c.kind == Kind::plain_terms) task.token_scales = token_scales.data();
  } else {
    task.scales = scales.data(), task.scale_row = 1, task.scale_group = c.m;
    task.zero_row = 1, task.zero_group = c.m;
    if (c.zeros()) task.zeros = zeros.data();
    if (c.offsets()) task.offsets = offsets.data();
    if (c.kind == Kind::s8_token || c.offsets() || (c.kind == Kind::group_zeros && c.m % 2 == 1))
      task.sums = sums.data(), task.sum_row = 1;
  }
  ASSERT_EQ(quantize_acts(task, nullptr), cudaSuccess);

  for (int m = 0; m < c.m; ++m) {
    std::vector<act_rule::Rule> rules;
    for (int g = 0; g < groups; ++g) {
      float low = c.offsets() ? act_rule::kLargest : 0, high = -low, absmax = 0;
      for (int k = g * group; k < std::min(c.k, (g + 1) * group); ++k) {
        const float value = x[static_cast<std::size_t>(m * c.k + k)];
        low = std::min(low, value), high = std::max(high, value), absmax = std::max(absmax, std::abs(value));
      }
      if (absmax > act_rule::kLargest && c.offsets()) high = act_rule::kNan;
      rules.push_back(task.known    ? act_rule::known(task.scale, task.zero)
                      : c.offsets() ? act_rule::with_offset(low, high)
                      : c.zeros()   ? act_rule::asymmetric(low, high)
                                    : act_rule::symmetric(absmax, c.e4m3() ? act_rule::kE4m3Max : 127.0f));
      const act_rule::Rule& rule = rules.back();
      if (!task.known && !c.online()) {
        const float scale = scales[static_cast<std::size_t>(g * c.m + m)];
        ASSERT_EQ(std::bit_cast<std::uint32_t>(scale), std::bit_cast<std::uint32_t>(rule.scale)) << "scale " << m << " " << g;
        if (c.zeros()) {
          ASSERT_EQ(zeros[static_cast<std::size_t>(g * c.m + m)], rule.zero) << "zero " << m << " " << g;
        }
        if (c.offsets()) {
          ASSERT_EQ(offsets[static_cast<std::size_t>(g * c.m + m)], rule.offset);
        }
      }
    }
    const auto code_of = [&](int channel) -> int {
      const act_rule::Rule& rule = rules[static_cast<std::size_t>(std::min(channel, c.k - 1) / group)];
      if (channel >= c.k) return c.offsets() ? 0 : rule.zero;  // past K: contributes 0
      if (c.offsets() && rule.inverse == 0.0f) return 0;
      const float value = x[static_cast<std::size_t>(m * c.k + channel)];
      if (c.e4m3()) return rule.inverse == 0.0f ? 0 : act_rule::to_e4m3(act_rule::multiply(value, rule.inverse));
      return rule.inverse == 0.0f ? rule.zero : act_rule::to_s8(value - rule.low, rule);
    };
    std::int32_t sum = 0;
    for (int k = 0; k < columns; ++k) {
      const int channel = c.online() ? k / 16 * 16 + gpu_tile::interleaved(k % 16) : k;
      const auto code = static_cast<std::uint8_t>(code_of(channel));
      if (c.kind == Kind::halves)
        ASSERT_EQ(halves[static_cast<std::size_t>(m * columns + k)],
                  std::bit_cast<std::uint16_t>(to_f16(code_value(DType::e4m3, code))))
            << m << " " << channel;
      else
        ASSERT_EQ(codes[static_cast<std::size_t>(m * columns + k)], code) << m << " " << channel;
      sum += static_cast<std::int8_t>(code_of(channel));
    }
    if (task.sums != nullptr) {
      ASSERT_EQ(sums[static_cast<std::size_t>(m)], sum);
    }
    for (int fold = 0; c.online() && fold < folds; ++fold) {
      const int of_group = fold * c.fold() / group, channels = std::clamp(c.k - fold * c.fold(), 0, c.fold());
      act_rule::Rule rule = rules[static_cast<std::size_t>(std::min(of_group, groups - 1))];
      if (of_group >= groups) rule = {.scale = 0.0f};  // past K
      std::int32_t of_fold = 0;
      for (int k = fold * c.fold(); k < (fold + 1) * c.fold(); ++k)
        of_fold += static_cast<std::int8_t>(code_of(k)) - (c.offsets() ? 0 : rule.zero);
      const float scale = task.token_scales != nullptr ? 1.0f : rule.scale, sum = scale * static_cast<float>(of_fold);
      std::vector<float> expected{scale, c.zeros() ? std::bit_cast<float>(zero_term(of_fold, rule.zero)) : sum};
      if (c.offsets()) expected = {scale, rule.offset, std::fma(static_cast<float>(channels), rule.offset, sum)};
      for (int i = 0; i < count && (i == 0 || scale == scale); ++i) {
        const int at = task.term_pairs ? count * (fold * term_fold + m / 2 * 2) + 2 * i + m % 2 : 2 * (fold * term_fold + m) + i;
        ASSERT_EQ(std::bit_cast<std::uint32_t>(terms[static_cast<std::size_t>(at)]),
                  std::bit_cast<std::uint32_t>(expected[static_cast<std::size_t>(i)]))
            << m << " fold " << fold << " term " << i;
      }
    }
    if (task.token_scales != nullptr) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(token_scales[static_cast<std::size_t>(m)]),
                std::bit_cast<std::uint32_t>(rules[0].scale));
    }
  }
  for (std::size_t i = static_cast<std::size_t>(c.m * columns); i < codes.size(); ++i) ASSERT_EQ(codes[i], 0xa5);
  for (std::size_t i = halves.size() - 8; i < halves.size(); ++i) ASSERT_EQ(halves[i], 0xa5a5);
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
    {Kind::halves, DType::bf16, 50, 2048},
    {Kind::halves, DType::f32, 2, 53248},
    {Kind::halves, DType::f16, 7, 205, 0, 3, true},
    {Kind::groups, DType::bf16, 3, 1024, 128},
    {Kind::groups, DType::f16, 70, 1536, 128},
    {Kind::groups, DType::f32, 30, 1024, 128},
    {Kind::groups, DType::bf16, 4, 600, 24},
    {Kind::groups, DType::f32, 200, 257, 128},
    {Kind::groups, DType::bf16, 70, 1028, 128},
    {Kind::group_zeros, DType::bf16, 3, 1024, 128},
    {Kind::group_zeros, DType::f16, 70, 1536, 32},
    {Kind::group_zeros, DType::f32, 31, 1024, 256},
    {Kind::group_zeros, DType::bf16, 4, 600, 24},
    {Kind::group_zeros, DType::f32, 200, 257, 64},
    {Kind::s8_zeros, DType::bf16, 7, 640, 32},
    {Kind::s8_zeros, DType::f16, 3, 203, 20, 5, true},
    {Kind::s8_token, DType::f32, 5, 203, 3},
    {Kind::s8_offsets, DType::f16, 4, 2000, 0, 0, true},
    {Kind::s8_offsets, DType::bf16, 9, 416, 32},
    {Kind::groups, DType::f16, 3, 500, 12, 3},
    {Kind::terms, DType::bf16, 40, 2048, 128},
    {Kind::terms, DType::f16, 90, 1024, 32},
    {Kind::terms, DType::bf16, 3, 400, 128},
    {Kind::terms, DType::bf16, 40, 2048, 16},
    {Kind::terms, DType::f32, 3, 410, 16},
    {Kind::zero_terms, DType::f16, 90, 1024, 16},
    {Kind::offset_terms, DType::bf16, 70, 5000, 16},
    {Kind::groups, DType::f16, 70, 1040, 16},
    {Kind::group_zeros, DType::bf16, 30, 1000, 16},
    {Kind::plain_terms, DType::bf16, 60, 1280},
    {Kind::plain_terms, DType::f16, 2, 200},
    {Kind::plain_terms, DType::f16, 7, 28672},
    {Kind::terms, DType::f32, 30, 2048, 128},
    {Kind::plain_terms, DType::f32, 2, 40000},
    {Kind::zero_terms, DType::bf16, 2, 33000},
    {Kind::zero_terms, DType::bf16, 50, 1536, 64},
    {Kind::offset_terms, DType::bf16, 3, 2048, 32},
    {Kind::offset_terms, DType::f16, 90, 1024, 64},
    {Kind::offset_terms, DType::f16, 5, 333, 128, 0, true},
    {Kind::offset_terms, DType::f32, 31, 420, 256},
    {Kind::offset_terms, DType::bf16, 60, 1280},
    {Kind::offset_terms, DType::f16, 2, 205, 0, 3},
    {Kind::offset_terms, DType::bf16, 2, 33000},
    {Kind::offset_terms, DType::f16, 7, 28672},
    {Kind::offset_terms, DType::f32, 2, 40000},
    {.kind = Kind::s8_token, .type = DType::bf16, .m = 7, .k = 1000, .fetched = true},
    {.kind = Kind::s8_static, .type = DType::bf16, .m = 5, .k = 64, .fetched = true},
    {.kind = Kind::s8_zeros, .type = DType::f16, .m = 5, .k = 70000, .fetched = true},
    {.kind = Kind::s8_offsets, .type = DType::bf16, .m = 9, .k = 416, .group = 32, .fetched = true},
    {.kind = Kind::groups, .type = DType::bf16, .m = 70, .k = 1536, .group = 128, .fetched = true},
    {.kind = Kind::terms, .type = DType::bf16, .m = 40, .k = 2048, .group = 128, .fetched = true},
    {.kind = Kind::groups, .type = DType::bf16, .m = 72, .k = 1536, .group = 128, .copied = true},
    {.kind = Kind::groups, .type = DType::f32, .m = 30, .k = 1024, .group = 128, .copied = true},
    {.kind = Kind::e4m3_token, .type = DType::f16, .m = 51, .k = 2048, .copied = true},
    {.kind = Kind::e4m3_token, .type = DType::bf16, .m = 9, .k = 28672, .copied = true},
    {.kind = Kind::s8_zeros, .type = DType::bf16, .m = 51, .k = 2048, .copied = true},
    {.kind = Kind::s8_token, .type = DType::bf16, .m = 51, .k = 2048, .copied = true},
    {.kind = Kind::group_zeros, .type = DType::f16, .m = 72, .k = 1536, .group = 32, .copied = true},
    {.kind = Kind::e4m3_token, .type = DType::bf16, .m = 3, .k = 72, .copied = true},
};

INSTANTIATE_TEST_SUITE_P(Quantizer, EmulatedQuantizer, testing::ValuesIn(kCases),
                         [](const auto& info) { return name(info.param); });

// ---- codes that are given

/// What products with gpu_n64k128 read, bit for bit.
struct Prepared {
  std::vector<std::uint8_t> codes;
  std::vector<std::uint32_t> terms, token_scales;

  friend bool operator==(const Prepared&, const Prepared&) = default;
};

int columns_of(const QuantizeTask& task) { return static_cast<int>((task.k + 127) / 128 * 128); }
/// Terms of a fold: of whole pairs of tokens.
int term_fold_of(const QuantizeTask& task) { return static_cast<int>((task.m + 1) / 2 * 2); }

/// Of a token and fold.
int terms_of(const QuantizeTask& task) { return task.term_offsets ? 3 : 2; }

/// Has the launcher prepare A, whose rule and size `task` has.
Prepared prepared(QuantizeTask task) {
  const int columns = columns_of(task);
  task.fold = fold_of(static_cast<int>(task.group));
  Prepared out;
  out.codes.assign(static_cast<std::size_t>(task.m * columns) + 16, 0xa5);
  out.terms.assign(static_cast<std::size_t>(terms_of(task) * term_fold_of(task) * (columns / task.fold)) + 4, 0xa5a5a5a5u);
  out.token_scales.assign(static_cast<std::size_t>(task.m) + 1, 0xa5a5a5a5u);
  task.codes = out.codes.data(), task.pitch = columns, task.columns = columns;
  task.terms = out.terms.data(), task.term_fold = term_fold_of(task), task.term_pairs = true;
  if (task.group == 0 && !task.term_offsets) task.token_scales = reinterpret_cast<float*>(out.token_scales.data());
  EXPECT_EQ(quantize_acts(task, nullptr), cudaSuccess);
  return out;
}

struct GivenCase {
  int m, k;
  int group = 0;  // channels that share a scale; 0: all
  bool zeros = false;
  int gap = 0;            // bytes between rows
  int skew = 0;           // bytes that A is off its alignment
  bool shuffled = false;  // act-order
  bool shared = false;    // one scale and zero point for all tokens
  bool offsets = false;   // floats, in the place of zero points

  int groups() const { return group == 0 ? 1 : (k + group - 1) / group; }
};

class EmulatedGivenCodes : public testing::TestWithParam<GivenCase> {};

/// Any scales: the caller's may be negative, huge or tiny.
TEST_P(EmulatedGivenCodes, AreInterleavedWithTheTermsOfTheirFolds) {
  const GivenCase& c = GetParam();
  std::mt19937 random(static_cast<unsigned>(c.m * 31 + c.k));
  const int stride = c.k + c.gap, groups = c.groups(), rows = c.shared ? 1 : c.m;
  std::vector<std::int8_t> a(static_cast<std::size_t>(c.skew + c.m * stride));
  for (auto& code : a) code = static_cast<std::int8_t>(random());
  // [G][M]: the strides are the caller's.
  std::vector<float> scales(static_cast<std::size_t>(rows * groups));
  std::vector<std::int32_t> zeros(scales.size()), perm;
  std::vector<float> offsets(scales.size());
  constexpr float kScales[] = {0.01f, -0.5f, 1e30f, 1e-38f, 0.0f, 7.25f};
  for (float& scale : scales) scale = kScales[random() % std::size(kScales)];
  for (std::int32_t& zero : zeros) zero = c.zeros ? static_cast<std::int32_t>(random() % 256) - 128 : 0;
  for (float& offset : offsets) offset = c.offsets ? 0.1f * static_cast<float>(random() % 100) - 3.0f : 0.0f;
  for (int k = 0; k < c.k; ++k) perm.push_back(k);
  if (c.shuffled) std::ranges::shuffle(perm, random);

  QuantizeTask task;
  task.a = a.data() + c.skew, task.type = DType::s8, task.a_stride = stride, task.m = c.m, task.k = c.k;
  if (c.shuffled) task.perm = perm.data();
  task.zero_points = c.zeros;
  task.group = c.group;
  task.given.scales = scales.data(), task.given.scale_row = c.shared ? 0 : 1, task.given.scale_group = rows;
  task.given.zero_row = c.shared ? 0 : 1, task.given.zero_group = rows;
  if (c.zeros) task.given.zeros = zeros.data();
  if (c.offsets) task.given.offsets = offsets.data(), task.term_offsets = true;
  const Prepared got = prepared(task);

  const int columns = columns_of(task), fold = fold_of(c.group);
  const auto rule_of = [&](int m, int channel) {
    const int group = c.group == 0 ? 0 : channel / c.group;
    if (group >= groups) return act_rule::Rule{.scale = 0.0f};  // past K
    const auto at = static_cast<std::size_t>(group * rows + (c.shared ? 0 : m));
    return act_rule::Rule{.scale = scales[at], .zero = zeros[at], .offset = offsets[at]};
  };
  const auto code_of = [&](int m, int channel) -> int {
    if (channel >= c.k) return rule_of(m, channel).zero;  // contributes 0
    return a[static_cast<std::size_t>(c.skew + m * stride + perm[static_cast<std::size_t>(channel)])];
  };
  for (int m = 0; m < c.m; ++m) {
    for (int k = 0; k < columns; ++k)
      ASSERT_EQ(static_cast<std::int8_t>(got.codes[static_cast<std::size_t>(m * columns + k)]),
                code_of(m, k / 16 * 16 + gpu_tile::interleaved(k % 16)))
          << m << " " << k;
    for (int f = 0; f < columns / fold; ++f) {
      const act_rule::Rule rule = rule_of(m, f * fold);
      std::int32_t sum = 0;
      for (int k = f * fold; k < (f + 1) * fold; ++k) sum += code_of(m, k) - rule.zero;
      const float scale = c.group == 0 && !c.offsets ? 1.0f : rule.scale, scaled = scale * static_cast<float>(sum);
      const auto channels = static_cast<float>(std::clamp(c.k - f * fold, 0, fold));
      std::vector<float> expected{scale, c.zeros ? std::bit_cast<float>(zero_term(sum, rule.zero)) : scaled};
      if (c.offsets) expected = {scale, rule.offset, std::fma(channels, rule.offset, scaled)};
      const int count = terms_of(task);
      for (int i = 0; i < count; ++i) {
        const auto at = static_cast<std::size_t>(count * (f * term_fold_of(task) + m / 2 * 2) + 2 * i + m % 2);
        ASSERT_EQ(got.terms[at], std::bit_cast<std::uint32_t>(expected[static_cast<std::size_t>(i)]))
            << m << " fold " << f << " term " << i;
      }
    }
    if (c.group == 0 && !c.offsets) {
      ASSERT_EQ(got.token_scales[static_cast<std::size_t>(m)], std::bit_cast<std::uint32_t>(rule_of(m, 0).scale)) << m;
    }
  }
  for (std::size_t i = static_cast<std::size_t>(c.m * columns); i < got.codes.size(); ++i) ASSERT_EQ(got.codes[i], 0xa5);
  EXPECT_EQ(got.terms.back(), 0xa5a5a5a5u);
  EXPECT_EQ(got.token_scales.back(), 0xa5a5a5a5u);
}

/// What quantize_activations() makes of floats becomes the bits that quantizing while running makes of them.
TEST_P(EmulatedGivenCodes, OfQuantizedFloatsAreThoseMadeWhileRunning) {
  const GivenCase& c = GetParam();
  std::vector<float> x(static_cast<std::size_t>(c.m * c.k));
  std::mt19937 random(static_cast<unsigned>(c.m + c.k));
  for (float& value : x) value = (static_cast<float>(random() % 4001) - 1500) / 512;
  QuantizeTask task;
  task.a = x.data(), task.type = DType::f32, task.a_stride = c.k, task.m = c.m, task.k = c.k;
  task.zero_points = c.zeros;
  task.term_offsets = c.offsets;
  task.group = c.group;
  const Prepared fused = prepared(task);

  const ActScheme scheme{DType::s8, c.group == 0 ? GroupShape::channel() : GroupShape::group(c.group),
                         c.offsets ? ZeroKind::offset
                         : c.zeros ? ZeroKind::integer
                                   : ZeroKind::none};
  std::vector<std::int64_t> shape{c.m};
  if (c.group != 0) shape.push_back(c.groups());
  Tensor codes(DType::s8, {c.m, c.k}), scales(DType::f32, shape), zeros(c.offsets ? DType::f32 : DType::s32, shape);
  const auto view_of = [](Tensor& t) {
    return t.shape.size() == 1 ? TensorView(t.bytes.data(), t.dtype, {t.shape[0]})
                               : TensorView(t.bytes.data(), t.dtype, {t.shape[0], t.shape[1]});
  };
  ActOutputs out{.codes = view_of(codes), .scales = view_of(scales)};
  if (c.zeros || c.offsets) out.zeros = view_of(zeros);
  const Status quantized = quantize_activations(ConstTensorView(x.data(), {c.m, c.k}), scheme, out);
  ASSERT_TRUE(quantized.ok()) << quantized.message();
  task.a = codes.bytes.data(), task.type = DType::s8;
  task.given.scales = scales.as<float>(), task.given.scale_row = c.groups(), task.given.scale_group = 1;
  task.given.zero_row = c.groups(), task.given.zero_group = 1;
  if (c.zeros) task.given.zeros = zeros.as<std::int32_t>();
  if (c.offsets) task.given.offsets = zeros.as<float>();
  EXPECT_TRUE(prepared(task) == fused);
}

// A vector a thread, and several; whole rows, tails, gaps and A off its alignment; parts of rows; folds without channels.
constexpr GivenCase kGivenCases[] = {
    {.m = 3, .k = 1000},
    {.m = 1, .k = 256, .group = 128},
    {.m = 40, .k = 4096, .group = 128, .zeros = true},
    {.m = 70, .k = 300, .group = 32, .zeros = true, .gap = 5},
    {.m = 5, .k = 20000, .zeros = true},
    {.m = 2, .k = 90, .group = 32},
    {.m = 40, .k = 1000, .group = 16, .zeros = true},
    {.m = 3, .k = 300, .group = 16, .offsets = true},
    {.m = 9, .k = 400, .group = 256, .zeros = true, .gap = 8},
    {.m = 33, .k = 640, .group = 64, .skew = 3},
    {.m = 7, .k = 333, .zeros = true, .shuffled = true},
    {.m = 130, .k = 520, .shuffled = true},
    {.m = 100, .k = 512, .shared = true},
    {.m = 4, .k = 33, .zeros = true, .shared = true},
    {.m = 3, .k = 1000, .offsets = true},
    {.m = 70, .k = 300, .group = 32, .gap = 5, .offsets = true},
    {.m = 40, .k = 4096, .group = 128, .offsets = true},
    {.m = 9, .k = 400, .group = 256, .skew = 3, .offsets = true},
    {.m = 7, .k = 333, .shuffled = true, .shared = true, .offsets = true},
};

INSTANTIATE_TEST_SUITE_P(Quantizer, EmulatedGivenCodes, testing::ValuesIn(kGivenCases), [](const auto& info) {
  const GivenCase& c = info.param;
  return fmt::format("{}x{}_g{}{}{}{}{}{}{}", c.m, c.k, c.group, c.zeros ? "_zeros" : "", c.offsets ? "_offsets" : "",
                     c.gap != 0 ? "_gap" : "", c.skew != 0 ? "_skew" : "", c.shuffled ? "_shuffled" : "",
                     c.shared ? "_shared" : "");
});

}  // namespace
}  // namespace nibble::cuda
