// Conformance of the steps that normalize activations: with weights that pick single channels a plan's result is the normalized
// activations themselves, which are compared with the definition in double; with other weights it is that of a plan without a norm.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "core/random.hpp"
#include "kernels/kernel.hpp"
#include "nibble/nibble.hpp"
#include "plan/host_run.hpp"
#include "random_weights.hpp"
#include "rows.hpp"

namespace nibble {
namespace {

Tensor gaussian(DType type, std::vector<std::int64_t> shape, std::uint64_t seed, float mean = 0.0f) {
  Tensor t(type, std::move(shape));
  for (std::int64_t i = 0; i < t.numel(); ++i) t.set(i, mean + random_normal(seed, static_cast<std::uint64_t>(i)));
  return t;
}

/// W[n,k] = 1 where k is channel n of `n` evenly spread ones, else 0: of FP8 codes, of which kernels add nothing but the products; for f32,
/// which not all of them take, of integers.
QuantTensor picking(DType a, std::int64_t n, std::int64_t k) {
  const DType codes = a == DType::f32 ? DType::s8 : DType::e4m3;
  QuantTensor q = testing::random_weight({codes, ZeroKind::none, GroupShape::channel(), DType::f32}, n, k, 1);
  std::ranges::fill(q.codes, std::uint8_t{0});
  for (std::int64_t i = 0; i < n; ++i) {
    q.codes[static_cast<std::size_t>(i * k + i * k / n)] = codes == DType::s8 ? 1 : 0x38;
    q.scales.set(i, 1.0f);
  }
  return q;
}

double unit(DType type) { return type == DType::f16 ? 0x1p-11 : type == DType::bf16 ? 0x1p-8 : 0x1p-24; }

struct Case {
  NormSpec spec;
  DType type, add_type, weight_type;
  std::int64_t m, k;
};

class NormConformance : public ::testing::TestWithParam<const Kernel*> {
 protected:
  void SetUp() override {
    if (const Status here = runs_there(*GetParam(), {}); !here.ok()) GTEST_SKIP() << here.message();
  }
  static Backend backend() { return GetParam()->backend; }
};

std::vector<const Kernel*> steps_that_normalize() {
  std::vector<const Kernel*> list;
  for (const Kernel& kernel : kernel_table())
    if (kernel.form == ActForm::normalized && is_built(kernel)) list.push_back(&kernel);
  return list;
}

/// The operands of a case. A matrix has a channel more than k between its rows where `apart`, so that rows lie at odd addresses.
struct Data {
  Tensor a, add, weight, bias, sum;
  std::int64_t pitch;

  explicit Data(const Case& c, bool apart)
      : a(gaussian(c.type, {c.m, c.k + apart}, 1, 0.3f)),
        add(gaussian(c.add_type, {c.m, c.k + apart}, 2, -0.1f)),
        weight(gaussian(c.weight_type, {c.k}, 3, 1.0f)),
        bias(gaussian(c.weight_type, {c.k}, 4)),
        sum(c.type, {c.m, c.k + apart}),
        pitch(c.k + apart) {}
  static ConstTensorView vector(const Tensor& t) { return {t.bytes.data(), t.dtype, {t.shape[0]}}; }
  template <class View>
  View matrix(auto& t) const {
    View view(t.bytes.data(), t.dtype, {t.shape[0], pitch});
    view.shape[1] = weight.shape[0];
    return view;
  }
  Operands operands(const NormSpec& spec) {
    Operands args{.norm_weight = vector(weight)};
    if (spec.bias) args.norm_bias = vector(bias);
    if (spec.add) args.norm_add = matrix<ConstTensorView>(add), args.norm_sum = matrix<TensorView>(sum);
    return args;
  }
};

/// x of the definition.
float summed(const Case& c, const Data& data, std::int64_t m, std::int64_t k) {
  const float x = data.a.at(m * data.pitch + k);
  if (!c.spec.add) return x;
  Tensor rounded(c.type, {1});
  rounded.set(0, x + data.add.at(m * data.pitch + k));
  return rounded.at(0);
}

/// y of a token, in double, and the bound on its error.
std::pair<double, double> expected(const Case& c, const Data& data, std::int64_t m, std::int64_t k) {
  double mean = 0, squares = 0;
  const auto count = static_cast<double>(c.k);
  for (std::int64_t i = 0; i < c.k && c.spec.kind == Norm::layer; ++i) mean += summed(c, data, m, i) / count;
  for (std::int64_t i = 0; i < c.k; ++i) squares += std::pow(summed(c, data, m, i) - mean, 2) / count;
  const double scale = 1 / std::sqrt(squares + static_cast<double>(c.spec.eps));
  const double factor = static_cast<double>(data.weight.at(k)) + static_cast<double>(c.spec.weight_offset);
  const double y = (summed(c, data, m, k) - mean) * scale * factor + (c.spec.bias ? static_cast<double>(data.bias.at(k)) : 0.0);
  const double parts = (std::abs(summed(c, data, m, k)) + std::abs(mean)) * scale * std::abs(factor) + std::abs(y);
  // Of f32, 24-bit fixed point of the largest among 128 neighbours.
  const double product = c.type == DType::f32 ? 16 * 0x1p-22 : 0x1p-24;
  return {y, unit(c.type) * std::abs(y) + 16 * 0x1p-24 * parts + product};
}

/// `kernel` is the one to run, or where it is empty, receives the plan's; `first` receives the name of the first step.
Result<Tensor> run(const Case& c, Data& data, const QuantTensor& q, Backend backend, const NormSpec& norm,
                   const ConstTensorView& a, std::string* kernel = nullptr, const ActScheme& act = {},
                   std::string* first = nullptr) {
  const LinearSpec spec{.a_dtype = c.type, .m_max = c.m, .act_scheme = act, .norm = norm};
  NIBBLE_ASSIGN_OR_RETURN(const PackedWeight weight, pack(q, spec, {.backend = backend}));
  NIBBLE_ASSIGN_OR_RETURN(const Plan plan, Plan::linear(weight, spec, {.kernel = kernel != nullptr ? *kernel : ""}));
  if (kernel != nullptr) *kernel = plan.kernel(c.m);
  if (first != nullptr) *first = plan.explain().buckets.back().steps.front();
  Tensor d(DType::f32, {c.m, q.n});
  const Operands operands = norm.kind == Norm::none ? Operands{} : data.operands(norm);
  NIBBLE_RETURN_IF_ERROR(run_on_host(plan, weight, a, TensorView(d.bytes.data(), d.dtype, {c.m, q.n}), operands));
  return d;
}

std::vector<Case> cases() {
  std::vector<Case> list;
  const DType types[] = {DType::f16, DType::bf16, DType::f32};
  const NormSpec specs[] = {{.kind = Norm::rms},
                            {.kind = Norm::rms, .eps = 0.1f, .weight_offset = 1.0f, .add = true},
                            {.kind = Norm::layer, .bias = true, .add = true},
                            {.kind = Norm::layer}};
  std::size_t i = 0;
  for (const NormSpec& spec : specs)
    for (const std::int64_t k : {1, 5, 96, 1000, 8192, 9000, 20000, 24576})
      for (const std::int64_t m : {1, 3}) {
        const DType type = types[i % 3];
        list.push_back({spec, type, types[(i / 2 + 1) % 3], types[i / 5 % 3], m, k});
        ++i;
      }
  return list;
}

TEST_P(NormConformance, GivesTheDefinition) {
  for (const Case& c : cases())
    for (const bool apart : {false, true}) {
      SCOPED_TRACE(std::string(c.spec.text()) + " of " + std::string(name(c.type)) + " M=" + std::to_string(c.m) +
                   " K=" + std::to_string(c.k));
      Data data(c, apart);
      const std::int64_t n = std::min<std::int64_t>(c.k, 48);
      const auto d = run(c, data, picking(c.type, n, c.k), backend(), c.spec, data.matrix<ConstTensorView>(data.a));
      ASSERT_TRUE(d.ok()) << d.status().message();
      for (std::int64_t m = 0; m < c.m; ++m) {
        for (std::int64_t i = 0; i < n; ++i) {
          const auto [y, bound] = expected(c, data, m, i * c.k / n);
          ASSERT_NEAR(static_cast<double>(d->at(m * n + i)), y, bound) << "token " << m << ", channel " << i * c.k / n;
        }
        for (std::int64_t k = 0; k < c.k && c.spec.add; ++k)
          ASSERT_EQ(data.sum.at(m * data.pitch + k), summed(c, data, m, k)) << "norm_sum[" << m << "," << k << "]";
      }
    }
}

/// What follows sees the normalized activations: the bits of a plan without a norm, given these.
TEST_P(NormConformance, IsTheFirstStep) {
  const Case c{{.kind = Norm::rms, .add = true}, DType::f16, DType::f16, DType::bf16, 5, 96};
  Data data(c, false);
  const auto y = run(c, data, picking(c.type, c.k, c.k), backend(), c.spec, data.matrix<ConstTensorView>(data.a));
  ASSERT_TRUE(y.ok()) << y.status().message();
  Tensor halves(DType::f16, y->shape);
  for (std::int64_t i = 0; i < y->numel(); ++i) halves.set(i, y->at(i));
  for (const bool act_order : {false, true}) {
    const QuantTensor q = testing::random_weight({DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16}, 70, c.k, 3,
                                                 {.act_order = act_order});
    std::string with, without;
    const auto d = run(c, data, q, backend(), c.spec, data.matrix<ConstTensorView>(data.a), &with);
    const auto plain = run(c, data, q, backend(), {}, data.matrix<ConstTensorView>(halves), &without);
    ASSERT_TRUE(d.ok() && plain.ok()) << d.status().message() << plain.status().message();
    EXPECT_EQ(with, without);
    EXPECT_EQ(d->bytes, plain->bytes);
  }
}

/// Quantizing sees them too, whether or not the same step does it: on the GPU it does, unless the product quantizes itself.
TEST_P(NormConformance, QuantizesWhatIsNormalized) {
  for (const DType type : {DType::f16, DType::bf16}) {
    const Case c{{.kind = Norm::rms, .add = true}, type, type, DType::f32, 33, 256};
    Data data(c, false);
    const auto y = run(c, data, picking(type, c.k, c.k), backend(), c.spec, data.matrix<ConstTensorView>(data.a));
    ASSERT_TRUE(y.ok()) << y.status().message();
    Tensor halves(type, y->shape);
    for (std::int64_t i = 0; i < y->numel(); ++i) halves.set(i, y->at(i));
    for (const char* const text : {"s8r_s8c", "s8zr_s8c", "s8t_s8zc", "e4m3r_e4m3c", "e4m3g128_e4m3b128x128", "s8r_u4b8g128",
                                   "s8g128_u4zg128", "s8zg32_u4zg32", "s8zr_u8b128g128"}) {
      SCOPED_TRACE(text);
      const Scheme scheme = *Scheme::parse(text);
      QuantTensor q = testing::random_weight(scheme.weight, 70, c.k, 3);
      if (scheme.act.group == GroupShape::tensor()) q.static_acts = StaticActs{0.03f, 0};
      std::string kernel, first;
      const auto d = run(c, data, q, backend(), c.spec, data.matrix<ConstTensorView>(data.a), &kernel, scheme.act, &first);
      const auto plain = run(c, data, q, backend(), {}, data.matrix<ConstTensorView>(halves), &kernel, scheme.act);
      ASSERT_TRUE(d.ok() && plain.ok()) << d.status().message() << plain.status().message();
      EXPECT_EQ(d->bytes, plain->bytes);
      const ActForm form = find_kernel(kernel)->form;  // as_given: the product quantizes itself
      if (form == ActForm::s8_rows || form == ActForm::e4m3_rows || form == ActForm::s8i16) {
        EXPECT_TRUE(first.ends_with("_norm")) << first << " before " << kernel;
      }
    }
  }
}

/// The sum may take the place of an operand.
TEST_P(NormConformance, AddsInPlace) {
  const Case c{{.kind = Norm::rms, .add = true}, DType::f16, DType::f16, DType::f32, 3, 200};
  if (backend() == Backend::cuda) GTEST_SKIP() << "operands are copied to the GPU one by one";
  Data apart(c, false), in_place(c, false);
  const QuantTensor q = picking(c.type, 50, c.k);
  const auto expected = run(c, apart, q, backend(), c.spec, apart.matrix<ConstTensorView>(apart.a));
  in_place.sum = in_place.add;
  const LinearSpec spec{.a_dtype = c.type, .m_max = c.m, .norm = c.spec};
  const auto weight = pack(q, spec);
  ASSERT_TRUE(expected.ok() && weight.ok());
  const auto plan = Plan::linear(*weight, spec);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  Tensor d(DType::f32, {c.m, q.n});
  Operands operands = in_place.operands(c.spec);
  operands.norm_add = in_place.matrix<ConstTensorView>(in_place.sum);
  const Status ran = run_on_host(*plan, *weight, in_place.matrix<ConstTensorView>(in_place.a),
                                 TensorView(d.bytes.data(), d.dtype, {c.m, q.n}), operands);
  ASSERT_TRUE(ran.ok()) << ran.message();
  EXPECT_EQ(d.bytes, expected->bytes);
  EXPECT_EQ(in_place.sum, apart.sum);
}

INSTANTIATE_TEST_SUITE_P(Table, NormConformance, ::testing::ValuesIn(steps_that_normalize()),
                         [](const auto& test) { return std::string(test.param->name); });

}  // namespace
}  // namespace nibble
