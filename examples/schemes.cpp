// Weights that no command makes: docs/schemes quotes how they are put together. Each layer is compared with the oracle here.
#include <nibble/nibble.hpp>

#include <cstdio>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace nibble;

constexpr std::int64_t n = 48, k = 256;
std::mt19937 random_engine(1);  // NOLINT: the same weights every time

float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(random_engine); }

/// [N,K] codes of so many bits.
std::vector<std::uint8_t> random_codes(int bits) {
  std::vector<std::uint8_t> codes(n * k);
  for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(random_engine() >> (32 - bits));
  return codes;
}

Tensor random_floats(DType type, std::vector<std::int64_t> shape, float low, float high) {
  Tensor t(type, std::move(shape));
  for (std::int64_t i = 0; i < t.numel(); ++i) t.set(i, uniform(low, high));
  return t;
}

/// GGUF's Q4_1: W = q·d + m, blocks of 32 with an f16 scale d and an f16 minimum m.
QuantTensor q4_1() {
  // docs: begin offsets
  QuantTensor q;
  q.scheme = Scheme::parse("u4og32")->weight;
  q.n = n;
  q.k = k;
  q.codes = random_codes(4);                                        // [N,K], a byte each
  q.scales = random_floats(DType::f16, {n, k / 32}, 0.01f, 0.02f);  // d of each block
  q.zeros = random_floats(DType::f16, {n, k / 32}, -0.2f, -0.1f);   // m of each block
  // docs: end offsets
  return q;
}

/// torchao's Int4Tensor and tinygemm: W = (u − 8)·s + z, which is q·s + o of codes that mean u − 8.
QuantTensor torchao() {
  QuantTensor q = q4_1();
  q.scheme = Scheme::parse("u4b8og32")->weight;
  return q;
}

/// HQQ: W = (q − z)·s with a zero point between two codes.
QuantTensor hqq() {
  QuantTensor q = q4_1();
  q.scheme = Scheme::parse("u4fg32")->weight;
  q.zeros = random_floats(DType::f16, {n, k / 32}, 6.5f, 8.5f);
  return q;
}

/// GPTQ's desc_act: which group an input channel belongs to is the checkpoint's choice.
QuantTensor act_order() {
  QuantTensor q;
  q.scheme = Scheme::parse("u4b8g64")->weight;
  q.n = n;
  q.k = k;
  q.codes = random_codes(4);
  q.scales = random_floats(DType::f16, {n, k / 64}, 0.01f, 0.02f);
  // docs: begin act_order
  for (std::int64_t channel = 0; channel < k; ++channel) q.g_idx.push_back(static_cast<std::int32_t>(channel % (k / 64)));
  // docs: end act_order
  return q;
}

/// SmoothQuant's W8A8B8O8: int8 in, int8 out, everything static.
QuantTensor w8a8() {
  QuantTensor q;
  q.scheme = Scheme::parse("s8c", DType::f32)->weight;
  q.n = n;
  q.k = k;
  q.codes = random_codes(8);
  q.scales = random_floats(DType::f32, {n, 1}, 0.001f, 0.002f);
  q.bias = random_floats(DType::f32, {n}, -1.0f, 1.0f);
  q.static_acts = StaticActs{.scale = 0.02f, .zero = 3};
  return q;
}

/// Every way to end a layer of int8 codes on both sides.
std::vector<LinearSpec> w8a8_ends() {
  // docs: begin w8a8
  const ActScheme per_token{DType::s8, GroupShape::channel()};                       // s8r
  const ActScheme with_zeros{DType::s8, GroupShape::channel(), ZeroKind::integer};   // s8zr
  const ActScheme known_before{DType::s8, GroupShape::tensor(), ZeroKind::integer};  // s8zt
  const LinearSpec scales{.a_dtype = DType::bf16, .epilogue = {.out = DType::bf16}, .act_scheme = per_token};
  const LinearSpec bias{.a_dtype = DType::bf16, .epilogue = {.bias = true, .out = DType::bf16}, .act_scheme = per_token};
  const LinearSpec zero_points{.a_dtype = DType::bf16, .epilogue = {.bias = true, .out = DType::bf16}, .act_scheme = with_zeros};
  const LinearSpec static_zero{
      .a_dtype = DType::bf16, .epilogue = {.bias = true, .out = DType::bf16}, .act_scheme = known_before};
  // A comes as int8, and D leaves as the int8 that the next layer takes: saturate(round(x / 0.05) − 4).
  const LinearSpec requantized{.a_dtype = DType::s8,
                               .epilogue = {.bias = true, .out = DType::s8, .out_scale = 0.05f, .out_zero = -4},
                               .act_scheme = known_before};
  // The same with a scale per channel that is an operand of each run, and a bias of integers. Codes end at 10, D's zero point in
  // Operands::out_zero, which is relu.
  const LinearSpec integers{.a_dtype = DType::s8,
                            .epilogue = {.sum_bias = true, .out = DType::u8, .out_scales = true, .out_low = 10},
                            .act_scheme = known_before};
  // The sums alone.
  const LinearSpec sums{.a_dtype = DType::s8, .epilogue = {.out = DType::s32}, .act_scheme = per_token};
  // docs: end w8a8
  return {scales, bias, zero_points, static_zero, requantized, integers, sums};
}

bool verified(const char* what, const QuantTensor& q, LinearSpec linear) {
  linear.m_max = 5;
  const auto report = verify_linear(q, {.linear = linear});
  std::printf("%-10s %s\n", what, Scheme{q.scheme, linear.act_scheme}.name().c_str());
  if (report && report->passed) return true;
  std::printf("  %s\n", report ? report->failure.c_str() : report.status().message().c_str());
  return false;
}

}  // namespace

int main() {
  bool ok = true;
  ok = verified("Q4_1", q4_1(), {}) && ok;
  ok = verified("torchao", torchao(), {}) && ok;
  ok = verified("HQQ", hqq(), {}) && ok;
  ok = verified("act-order", act_order(), {}) && ok;
  for (const LinearSpec& spec : w8a8_ends()) ok = verified("W8A8", w8a8(), spec) && ok;
  return ok ? 0 : 1;
}
