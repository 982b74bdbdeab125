// Conformance: every kernel of the table × every scheme × awkward shapes × epilogues, against the oracle.
// A new row of the table is covered without further code. Two properties are tested of each:
//   bounds  on Gaussian data, is every output within its derived bound?
//   exact   on data for which f32 arithmetic is exact, are the outputs bit-identical to the oracle's?
//
// The tests of a kernel that this machine cannot run are skipped, with the reason. Properties of some rows only have a suite with just
// those rows, so that a skip always means that something is missing.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>

#include "epilogue/epilogue.hpp"
#include "kernels/kernel.hpp"
#include "kernels/reference/oracle.hpp"
#include "nibble/nibble.hpp"
#include "plan/act_model.hpp"
#include "plan/compare.hpp"
#include "plan/host_run.hpp"
#include "quantize/act_rule.hpp"
#include "random_weights.hpp"
#include "rows.hpp"

namespace nibble {
namespace {

using testing::all_schemes;
using testing::random_weight;

struct Shape {
  std::int64_t m, n, k;
};

/// 1, tile ± 1, primes, K of one group, and a slice of a real layer.
std::vector<Shape> shapes_for(const Kernel& kernel) {
  const std::int64_t tm = std::max(1, kernel.tile.m), tn = std::max(1, kernel.tile.n);
  return {{1, 1, 1},
          {1, tn, 128},
          {tm, tn - 1 > 0 ? tn - 1 : 1, 127},
          {tm + 1, tn + 1, 129},
          {3, 37, 61},
          {tm * 17 + 1, 2 * tn + 3, 257},
          {1, 96, 2048},
          {5, 64, 640}};
}

/// The memory from which the kernel reads weights.
Backend memory_of(const Kernel& kernel) { return kernel.backend == Backend::cuda ? Backend::cuda : Backend::cpu; }

/// The type of A, varied by the seed; kernels of 16-bit floats take only their type, those of fixed point on the GPU only f32.
DType act_for(const Kernel& kernel, std::uint64_t turn) {
  if (kernel.form == ActForm::s8x3_rows || kernel.form == ActForm::bf16x3k32) return DType::f32;
  if (kernel.form == ActForm::bf16x2k32) return DType::f16;
  if (kernel.act.starts_with("bf16")) return DType::bf16;
  if (kernel.act == "f16") return DType::f16;
  if (kernel.act == "f32" && kernel.backend == Backend::cuda) return DType::f32;
  return std::array{DType::f32, DType::f16, DType::bf16}[turn % 3];
}

/// How A is quantized for a kernel that multiplies codes: per token.
ActScheme quantize_for(const Kernel& kernel) {
  if (kernel.act == "s8" || kernel.act == "s8k64") return {DType::s8, GroupShape::channel()};
  if (kernel.act == "s8i16" || kernel.quantizes) return {DType::s8, GroupShape::group(128)};
  if (kernel.act == "e4m3") return {DType::e4m3, GroupShape::channel()};
  return {};
}

Problem problem_for(const Kernel& kernel, const WeightScheme& scheme, std::int64_t n, std::int64_t k, const ActScheme& quantize,
                    DType act) {
  return {.op = kernel.op,
          .n = n,
          .k = k,
          .scheme = scheme,
          .zero_type = testing::zero_type(scheme),
          .memory = memory_of(kernel),
          .a_dtype = act,
          .act_scheme = quantize};
}

bool takes(const Kernel& kernel, const WeightScheme& scheme, std::int64_t n, std::int64_t k, const ActScheme& quantize,
           DType act) {
  const std::int64_t group = scheme.group.k, block = quantize.group.k;
  if (scheme.is_dense() && quantize.codes != DType::none) return false;                    // plans refuse it
  if (block != 0 && group != 0 && group % block != 0 && block % group != 0) return false;  // plans refuse it
  return kernel.accepts(kernel, problem_for(kernel, scheme, n, k, quantize, act)).ok();
}

bool takes(const Kernel& kernel, const WeightScheme& scheme, std::int64_t n, std::int64_t k) {
  return takes(kernel, scheme, n, k, quantize_for(kernel), act_for(kernel, 0));
}

/// `wanted` or, if the kernel does not take it, something close that it takes.
WeightScheme scheme_for(const Kernel& kernel, const WeightScheme& wanted, std::int64_t n = 64, std::int64_t k = 1024) {
  std::vector<WeightScheme> candidates(3, wanted);
  candidates[1].group = GroupShape::channel();
  candidates[2].group = GroupShape::group(32);
  std::ranges::copy(all_schemes(), std::back_inserter(candidates));
  const auto first = std::ranges::find_if(candidates, [&](const WeightScheme& s) { return takes(kernel, s, n, k); });
  EXPECT_NE(first, candidates.end()) << kernel.name;
  return first == candidates.end() ? wanted : *first;
}

bool takes_act_order(const Kernel& kernel, const WeightScheme& scheme, const Shape& shape, const ActScheme& quantize, DType act) {
  Problem problem = problem_for(kernel, scheme, shape.n, shape.k, quantize, act);
  problem.permutes_k = true;
  return kernel.accepts(kernel, problem).ok();
}

bool takes_prescale(const Kernel& kernel) {
  Problem problem = problem_for(kernel, scheme_for(kernel, {}), 64, 128, quantize_for(kernel), act_for(kernel, 0));
  problem.prescales_k = true;
  return kernel.accepts(kernel, problem).ok();
}

/// The schemes a kernel takes for W[n,k]. A kernel that takes none would pass without being tested.
std::vector<WeightScheme> schemes_for(const Kernel& kernel, std::int64_t n = 64, std::int64_t k = 1024) {
  std::vector<WeightScheme> list;
  for (const WeightScheme& scheme : all_schemes())
    if (takes(kernel, scheme, n, k)) list.push_back(scheme);
  EXPECT_FALSE(list.empty()) << kernel.name;
  return list;
}

std::vector<const Kernel*> kernels_of(Op op, bool (*which)(const Kernel&) = nullptr) {
  std::vector<const Kernel*> list;
  for (const Kernel& kernel : kernel_table())
    if (kernel.op == op && is_built(kernel) && (which == nullptr || which(kernel))) list.push_back(&kernel);
  return list;
}

/// Every linear kernel that takes a scheme, and those that this machine cannot run.
std::vector<const Kernel*> linear_kernels_taking(bool (*something)(const Kernel&)) {
  auto list = kernels_of(Op::linear);
  std::erase_if(list, [&](const Kernel* kernel) { return runs_here(kernel->isa).ok() && !something(*kernel); });
  return list;
}

TEST(KernelTable, RowsOfTheGpuAreTestedWhereTheyAreBuilt) {
  int left_out = 0;
  for (const Kernel& kernel : kernel_table()) {
    const bool missing = runs_here(kernel.isa).message().find("built without CUDA") != std::string::npos;
    EXPECT_EQ(is_built(kernel), !missing) << kernel.name;
    left_out += missing ? 1 : 0;
  }
  if (left_out > 0) GTEST_SKIP() << left_out << " rows of the kernel table: built without CUDA; configure with NIBBLE_CUDA=ON";
}

std::string test_name(const ::testing::TestParamInfo<const Kernel*>& info) { return std::string(info.param->name); }

std::string name_of(const WeightScheme& weight, const ActScheme& act) { return Scheme{weight, act}.name(); }

Tensor gaussian(DType dtype, std::int64_t m, std::int64_t k) {
  Tensor a(dtype, {m, k});
  for (std::int64_t i = 0; i < a.numel(); ++i) a.set(i, random_normal(9, static_cast<std::uint64_t>(i)));
  return a;
}

ConstTensorView view_of(const Tensor& t) {
  if (t.shape.size() == 1) return {t.bytes.data(), t.dtype, {t.shape[0]}};
  return {t.bytes.data(), t.dtype, {t.shape[0], t.shape[1]}};
}

class OfKernel : public ::testing::TestWithParam<const Kernel*> {
 protected:
  void SetUp() override {
    if (const Status here = runs_here(GetParam()->isa); !here.ok()) GTEST_SKIP() << here.message();
  }
};
class LinearConformance : public OfKernel {};
class GpuLinearConformance : public OfKernel {};
class BatchInvariance : public OfKernel {};
class QuantizedConformance : public OfKernel {};
class ZeroPointBlocksConformance : public OfKernel {};
class ExactBlocksConformance : public OfKernel {};
class W8A8Conformance : public OfKernel {};
class DequantizeConformance : public OfKernel {};

VerifySpec spec_for(const Kernel& kernel, std::int64_t m, DType act, const EpilogueSpec& epilogue, std::uint64_t seed) {
  VerifySpec spec;
  spec.linear = {.a_dtype = act, .m_max = m, .epilogue = epilogue};
  spec.linear.act_scheme = quantize_for(kernel);
  spec.seed = seed;
  spec.plan.kernel = kernel.name;
  return spec;
}

void expect_verified(const QuantTensor& q, const VerifySpec& spec, std::string_view kernel) {
  const auto report = verify_linear(q, spec);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->kernel, kernel);  // the forced one ran
  EXPECT_TRUE(report->passed) << q.scheme.name() << " W[" << q.n << "," << q.k << "] " << spec.linear.epilogue.name() << ": "
                              << report->failure;
}

TEST_P(LinearConformance, EverySchemeAndShapeIsWithinItsBound) {
  const Kernel& kernel = *GetParam();
  std::uint64_t seed = 1;
  for (const WeightScheme& scheme : schemes_for(kernel))
    for (const Shape& shape : shapes_for(kernel)) {
      if (!takes(kernel, scheme, shape.n, shape.k)) continue;
      const DType act = act_for(kernel, seed);
      const DType out = std::array{DType::f16, DType::f32, DType::bf16, DType::f32}[seed % 4];
      const QuantTensor q = random_weight(scheme, shape.n, shape.k, seed);
      VerifySpec spec = spec_for(kernel, shape.m, act, {.out = out}, seed);
      const std::int32_t group = scheme.group.k == 0 ? 128 : scheme.group.k;
      if (seed % 2 == 0 && group % 8 == 0) {  // blocks below, equal to and above the weight's groups
        ActScheme blocks = spec.linear.act_scheme;
        blocks.group = GroupShape::group(std::array{group, 2 * group, group % 16 == 0 ? group / 2 : group}[seed % 3]);
        if (blocks.codes == DType::s8 && seed % 4 == 0) blocks.zero = seed % 8 == 0 ? ZeroKind::offset : ZeroKind::integer;
        if (blocks.codes != DType::none && takes(kernel, scheme, shape.n, shape.k, blocks, act)) spec.linear.act_scheme = blocks;
      }
      if (seed % 3 == 2) spec.linear.accumulation = Accumulation::precise;
      expect_verified(q, spec, kernel.name);
      ++seed;
    }
}

TEST_P(LinearConformance, ActOrderPrescaleAndSecondScale) {
  const Kernel& kernel = *GetParam();
  for (std::uint64_t variant = 0; variant < 8; ++variant) {
    if ((variant & 2) != 0 && !takes_prescale(kernel)) continue;
    const WeightScheme scheme = scheme_for(kernel, {DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16}, 40, 100);
    QuantTensor q = random_weight(scheme, 40, 100, 7 + variant,
                                  {.act_order = (variant & 1) != 0, .prescale = (variant & 2) != 0, .bias = true});
    if ((variant & 4) != 0 && !scheme.is_dense()) q.scale2 = 0.3f;
    for (std::int64_t m : {1, 9})
      expect_verified(q, spec_for(kernel, m, act_for(kernel, 0), {.bias = true, .out = DType::f32}, variant), kernel.name);
  }
}

TEST_P(LinearConformance, EveryEpilogue) {
  const Kernel& kernel = *GetParam();
  const WeightScheme scheme = scheme_for(kernel, {DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16}, 51, 96);
  const QuantTensor q = random_weight(scheme, 51, 96, 3);
  std::vector<EpilogueSpec> specs;
  for (Activation act : kActivations)
    for (DType out : {DType::f32, DType::f16, DType::bf16, DType::s8})
      specs.push_back({.activation = act, .out = out, .out_scale = 0.05f, .out_zero = -3});
  for (DType out : {DType::s8, DType::u8}) {
    specs.push_back({.bias = true, .out = out, .out_scale = 0.05f, .out_zero = 90, .out_low = 70, .out_high = 111});
    specs.push_back({.activation = Activation::relu, .out = out, .out_scales = true});
    specs.push_back({.residual = true, .out = out, .out_scales = true, .out_low = -5, .out_high = 300});
  }
  for (float slope : {-1.5f, 0.0f, 30.0f})
    specs.push_back({.activation = Activation::leaky_relu, .negative_slope = slope, .out = DType::f32});
  for (int parts = 0; parts < 32; ++parts)
    specs.push_back({.row_scale = (parts & 1) != 0,
                     .col_scale = (parts & 2) != 0,
                     .bias = (parts & 4) != 0,
                     .activation = Activation::silu,
                     .gate = (parts & 8) != 0,
                     .residual = (parts & 16) != 0,
                     .out = DType::f32});
  std::uint64_t seed = 1;
  for (const EpilogueSpec& spec : specs)
    for (std::uint64_t turn : {0, 1}) expect_verified(q, spec_for(kernel, 5, act_for(kernel, turn), spec, seed++), kernel.name);
}

/// Row n of W has one weight that is not 0, the code n, and all activations are 1: D is the value of the code, or NaN.
TEST_P(LinearConformance, EveryCodeOfFloats) {
  const Kernel& kernel = *GetParam();
  if (kernel.backend == Backend::cuda || kernel.quantizes) GTEST_SKIP() << "codes that are NaN are refused when packed for a GPU";
  constexpr std::int64_t n = 256, k = 264;
  int taken = 0;
  for (const DType codes : {DType::e4m3, DType::e2m1, DType::e5m2}) {
    const WeightScheme scheme{codes, ZeroKind::none, GroupShape::group(32), DType::f32};
    const DType act = act_for(kernel, 0);
    if (!takes(kernel, scheme, n, k, {}, act)) continue;
    ++taken;
    QuantTensor q = random_weight(scheme, n, k, 1);
    std::ranges::fill(q.codes, std::uint8_t{0});
    for (std::int64_t i = 0; i < n; ++i) {
      q.codes[static_cast<std::size_t>(i * k + i)] = static_cast<std::uint8_t>(i & ((1 << bits(codes)) - 1));
    }
    for (std::int64_t i = 0; i < q.scales.numel(); ++i) q.scales.set(i, 1.0f);
    for (const std::int64_t m : {1, 40}) {
      Tensor a(act, {m, k});
      for (std::int64_t i = 0; i < m * k; ++i) a.set(i, 1.0f);
      std::vector<float> d(static_cast<std::size_t>(m * n));
      const LinearSpec spec{.a_dtype = act, .m_max = m, .epilogue = {.out = DType::f32}};
      const auto weight = pack(q, spec, {.kernel = std::string(kernel.name)});
      ASSERT_TRUE(weight.ok()) << weight.status().message();
      const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      ASSERT_TRUE(run_on_host(*plan, *weight, view_of(a), TensorView(d.data(), {m, n}), {}).ok());
      for (std::int64_t i = 0; i < m * n; ++i) {
        const float expected = code_value(codes, q.codes[static_cast<std::size_t>(i % n * k + i % n)]),
                    got = d[static_cast<std::size_t>(i)];
        ASSERT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)))
            << name(codes) << " code " << i % n << ": " << got << " in place of " << expected;
      }
    }
  }
  if (taken == 0) GTEST_SKIP() << "takes no codes of floats";
}

/// The factors of an output are two rows of the packed weight; of a weight in blocks of rows, two columns of sums in the workspace.
TEST_P(LinearConformance, GatedLinearUnit) {
  const Kernel& kernel = *GetParam();
  const WeightScheme blocks{DType::e4m3, ZeroKind::none, GroupShape::block(128, 128), DType::f32};
  std::vector<WeightScheme> schemes{scheme_for(kernel, {DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16}, 54, 96)};
  if (takes(kernel, blocks, 300, 256)) schemes.push_back(blocks);
  std::uint64_t seed = 1;
  for (const WeightScheme& scheme : schemes) {
    const Shape size = scheme == blocks ? Shape{0, 300, 256} : Shape{0, 54, 96};  // neither N nor N/2 is a multiple of a tile
    const QuantTensor q = random_weight(scheme, size.n, size.k, 5, {.bias = true});
    for (std::int64_t m : {1, 5, 40})
      for (const EpilogueSpec& spec :
           {EpilogueSpec{.activation = Activation::silu, .glu = true, .out = DType::f16},
            EpilogueSpec{.glu = true, .out = DType::bf16},
            EpilogueSpec{.bias = true, .activation = Activation::quick_gelu, .glu = true, .glu_limit = 0.5f, .glu_offset = 1.0f},
            EpilogueSpec{.row_scale = true,
            .col_scale = true,
            .bias = true,
            .activation = Activation::gelu_tanh,
            .glu = true,
            .gate = true,
            .residual = true,
            .out = DType::f16},
            EpilogueSpec{.bias = true, .activation = Activation::silu, .glu = true, .out = DType::s8, .out_scales = true}})
        expect_verified(q, spec_for(kernel, m, act_for(kernel, seed), spec, seed), kernel.name), ++seed;
  }
}

/// Layers of the size of real ones: many records along K, shared by clusters, more row tiles than multiprocessors; activations quantized
/// per block, per token (of 28,672 channels) and in blocks of other sizes than a record, one after the other. Too slow for a CPU.
TEST_P(GpuLinearConformance, LargeLayers) {
  const Kernel& kernel = *GetParam();
  const std::array schemes{WeightScheme{DType::u4b8, ZeroKind::none, GroupShape::group(128), DType::f16},
                           WeightScheme{DType::u4, ZeroKind::integer, GroupShape::group(64), DType::bf16},
                           WeightScheme{DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32},
                           WeightScheme{DType::e4m3, ZeroKind::none, GroupShape::channel(), DType::f32},
                           WeightScheme{DType::e4m3, ZeroKind::none, GroupShape::block(128, 128), DType::f32},
                           WeightScheme::dense(DType::f16),
                           WeightScheme::dense(DType::bf16),
                           WeightScheme::dense(DType::f32)};
  const std::array ways{quantize_for(kernel), ActScheme{DType::s8, GroupShape::channel()},
                        ActScheme{DType::s8, GroupShape::group(256)}, ActScheme{DType::s8, GroupShape::group(32)}};
  std::uint64_t seed = 1;
  for (const WeightScheme& scheme : schemes)
    for (const Shape& shape : {Shape{16, 96, 28672}, {1, 9000, 512}, {16, 9000, 4096}, {3, 4096, 4096}, {300, 1000, 2048}}) {
      if (!takes(kernel, scheme, shape.n, shape.k)) continue;
      const DType act = act_for(kernel, seed);
      VerifySpec spec = spec_for(kernel, shape.m, act, {.out = act}, seed);
      const ActScheme& way = ways[seed % ways.size()];
      if (spec.linear.act_scheme.codes == DType::s8 && takes(kernel, scheme, shape.n, shape.k, way, act))
        spec.linear.act_scheme = way;
      spec.sample_columns = 64;
      const QuantTensor q = random_weight(scheme, shape.n, shape.k, seed);
      expect_verified(q, spec, kernel.name);
      spec.linear.accumulation = Accumulation::precise;
      if (spec.linear.act_scheme.codes == DType::e4m3) expect_verified(q, spec, kernel.name);
      ++seed;
    }
  EXPECT_GT(seed, 1u) << "the kernel took no layer";
}

/// The error of a precise sum of FP8 does not grow with the number of channels; that of a fast one on sm_90 does, unless CTAs share the
/// channels.
TEST(Fp8, PreciseSumsOfManyChannelsAreCloser) {
  int tried = 0;
  const QuantTensor q = random_weight({DType::e4m3, ZeroKind::none, GroupShape::channel(), DType::f32}, 96, 28672, 1);
  for (const Kernel& kernel : kernel_table()) {
    if (kernel.op != Op::linear || kernel.act != "e4m3" || kernel.backend != Backend::cuda || !runs_here(kernel.isa).ok())
      continue;
    VerifySpec spec = spec_for(kernel, 16, DType::f32, {}, 1);
    const auto fast = verify_linear(q, spec);
    spec.linear.accumulation = Accumulation::precise;
    const auto precise = verify_linear(q, spec);
    ASSERT_TRUE(fast.ok() && precise.ok()) << kernel.name;
    EXPECT_TRUE(fast->passed && precise->passed) << fast->failure << precise->failure;
    EXPECT_LT(precise->relative_l2, 7e-4) << kernel.name;
    if (kernel.variant == "wgmma") {
      EXPECT_GT(fast->relative_l2, 4 * precise->relative_l2) << kernel.name;
    }
    ++tried;
  }
  if (tried == 0) GTEST_SKIP() << "no GPU";
}

/// Small integer activations, power-of-two scales: every product and partial sum is an exact f32, so that any difference is an error.
TEST_P(LinearConformance, ExactDataGivesExactResults) {
  const Kernel& kernel = *GetParam();
  for (const WeightScheme& scheme : schemes_for(kernel)) {
    if (info(scheme.codes).kind == DTypeKind::floating) continue;
    for (const Shape& shape : shapes_for(kernel)) {
      if (!takes(kernel, scheme, shape.n, shape.k)) continue;
      const LinearSpec spec = spec_for(kernel, shape.m, act_for(kernel, 0), {}, 0).linear;
      const std::int64_t block = spec.act_scheme.group.k;  // in the packed order; act-order would scatter the channels of a block
      const QuantTensor q =
          random_weight(scheme, shape.n, shape.k, 11,
                        {.act_order = block == 0, .prescale = shape.m == 5 && takes_prescale(kernel), .exact = true});
      Tensor a(spec.a_dtype, {shape.m, shape.k});
      for (std::int64_t i = 0; i < a.numel(); ++i)
        a.set(i, static_cast<float>(static_cast<int>(random_bits(5, static_cast<std::uint64_t>(i)) % 7) - 3));
      const float most = spec.act_scheme.codes == DType::e4m3 ? 448.0f : 127.0f;
      if (spec.act_scheme.codes != DType::none)  // a scale of exactly 1
        for (std::int64_t row = 0; row < shape.m; ++row)
          for (std::int64_t first = 0; first < shape.k; first += block == 0 ? shape.k : block)
            a.set(row * shape.k + first, most / (shape.m == 5 ? 2.0f : 1.0f));
      const ConstTensorView a_view(a.bytes.data(), spec.a_dtype, {shape.m, shape.k});

      const auto weight = pack(q, {.kernel = std::string(kernel.name)});
      ASSERT_TRUE(weight.ok()) << weight.status().message();
      const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      std::vector<float> d(static_cast<std::size_t>(shape.m * shape.n));
      const Status ran = run_on_host(*plan, *weight, a_view, TensorView(d.data(), {shape.m, shape.n}), {});
      ASSERT_TRUE(ran.ok()) << ran.message();

      std::vector<std::int64_t> columns(static_cast<std::size_t>(shape.n));
      std::iota(columns.begin(), columns.end(), 0);
      const auto expected = reference::linear(reference::arrays_of(q), a_view, {}, {}, columns, {.act_scheme = spec.act_scheme});
      for (std::size_t i = 0; i < d.size(); ++i)
        ASSERT_EQ(static_cast<double>(d[i]), expected[i].value)
            << scheme.name() << " element " << i << " of M=" << shape.m << " N=" << shape.n << " K=" << shape.k;
    }
  }
}

std::vector<ActScheme> ways_to_quantize() {
  std::vector<ActScheme> ways;
  for (GroupShape group : {GroupShape::tensor(), GroupShape::channel(), GroupShape::group(256), GroupShape::group(128),
                           GroupShape::group(64), GroupShape::group(32)}) {
    ways.push_back({DType::s8, group});
    ways.push_back({DType::s8, group, ZeroKind::integer});
    if (group != GroupShape::tensor()) ways.push_back({DType::s8, group, ZeroKind::offset});
    ways.push_back({DType::e4m3, group});
  }
  return ways;
}

/// At least one activation scheme with at least one weight scheme.
bool takes_one_of(const Kernel& kernel, const std::vector<ActScheme>& ways, const std::vector<WeightScheme>& schemes, DType act) {
  return std::ranges::any_of(ways, [&](const ActScheme& way) {
    return std::ranges::any_of(schemes, [&](const WeightScheme& s) { return takes(kernel, s, 64, 1024, way, act); });
  });
}

bool quantizes_activations(const Kernel& kernel) {
  return takes_one_of(kernel, ways_to_quantize(), all_schemes(), act_for(kernel, 1));
}

/// A with zero points, of a known scale, limited, in blocks, and as codes: within the bound, for every kernel that takes it.
TEST_P(QuantizedConformance, EveryWay) {
  const Kernel& kernel = *GetParam();
  std::vector<WeightScheme> schemes{{DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16},
                                    {DType::u4, ZeroKind::integer, GroupShape::group(128), DType::f16},
                                    {DType::u4, ZeroKind::integer, GroupShape::group(96), DType::f16},
                                    {DType::u4, ZeroKind::offset, GroupShape::channel(), DType::f32},
                                    {DType::u4, ZeroKind::real, GroupShape::group(64), DType::f16},
                                    {DType::s8, ZeroKind::none, GroupShape::group(256), DType::f32},
                                    {DType::s8, ZeroKind::integer, GroupShape::group(32), DType::f16},
                                    {DType::u8, ZeroKind::offset, GroupShape::group(128), DType::bf16},
                                    {DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32},
                                    {DType::u8, ZeroKind::integer, GroupShape::channel(), DType::f16},
                                    {DType::u4b8, ZeroKind::none, GroupShape::channel(), DType::bf16},
                                    {DType::e4m3, ZeroKind::none, GroupShape::tensor(), DType::f32},
                                    {DType::e4m3, ZeroKind::none, GroupShape::channel(), DType::f32},
                                    {DType::e4m3, ZeroKind::none, GroupShape::block(128, 128), DType::f32}};
  std::uint64_t seed = 1;
  int with_zeros = 0;
  for (const ActScheme& way : ways_to_quantize())
    for (const WeightScheme& scheme : schemes)
      for (const Shape& shape : {Shape{1, 40, 256}, {14, 33, 300}, {3, 5, 7}})
        for (bool comes_quantized : {false, true}) {
          const DType act = comes_quantized ? way.codes : act_for(kernel, seed);
          if (!takes(kernel, scheme, shape.n, shape.k, way, act)) continue;
          ++seed;
          QuantTensor q = random_weight(scheme, shape.n, shape.k, seed,
                                        {.act_order = seed % 2 == 0 && (way.group.k == 0 || !comes_quantized) &&
                                                      takes_act_order(kernel, scheme, shape, way, act),
                                         .prescale = seed % 3 == 0 && !comes_quantized && takes_prescale(kernel)});
          if (way.group == GroupShape::tensor()) q.static_acts = {0.02f, way.zero == ZeroKind::none ? 0 : -37};
          if (seed % 5 == 0) q.act_limit = 0.7f;
          VerifySpec spec = spec_for(kernel, shape.m, act, {}, seed);
          spec.linear.act_scheme = way;
          // Codes with zero points may as well be u8, of which kernels see nothing; the first of a kernel are.
          if (comes_quantized && way.zero == ZeroKind::integer && with_zeros++ % 2 == 0) spec.linear.a_dtype = DType::u8;
          SCOPED_TRACE(name_of(scheme, way) +
                       (comes_quantized ? ", A quantized as " + std::string(name(spec.linear.a_dtype)) : ""));
          expect_verified(q, spec, kernel.name);
        }
  EXPECT_GT(seed, 1u) << "the kernel took no layer";
}

std::vector<ActScheme> blocks_with_zero_points() {
  std::vector<ActScheme> ways;
  for (std::int32_t block : {32, 64, 128, 256})
    for (ZeroKind zero : {ZeroKind::integer, ZeroKind::offset}) ways.push_back({DType::s8, GroupShape::group(block), zero});
  return ways;
}

constexpr WeightScheme kBlocksWeight{DType::u4, ZeroKind::integer, GroupShape::group(64), DType::f16};

/// Whether blocks of activations may have any length.
bool takes_any_block(const Kernel& kernel) { return kernel.backend != Backend::cuda || kernel.variant == "codes"; }

bool takes_offsets(const Kernel& kernel) {
  return takes(kernel, kBlocksWeight, 64, 1024, {DType::s8, GroupShape::group(32), ZeroKind::offset}, act_for(kernel, 1));
}

bool takes_blocks_with_zero_points(const Kernel& kernel) {
  return takes_one_of(kernel, blocks_with_zero_points(), {kBlocksWeight}, act_for(kernel, 1));
}

/// Every epilogue and type of input and output after blocks of activations with zero points, of sizes that need all heights of a tile.
TEST_P(ZeroPointBlocksConformance, EveryEpilogue) {
  const Kernel& kernel = *GetParam();
  std::uint64_t seed = 1;
  for (Activation activation : kActivations)
    for (DType out : {DType::f32, DType::f16, DType::bf16, DType::s8})
      for (const ActScheme& way : blocks_with_zero_points()) {
        const DType act = act_for(kernel, seed);
        if (!takes(kernel, kBlocksWeight, 51, 513, way, act)) continue;
        ++seed;
        const QuantTensor q = random_weight(kBlocksWeight, 51, 513, seed, {.bias = true});
        const EpilogueSpec epilogue{
            .bias = seed % 2 == 0, .activation = activation, .out = out, .out_scale = 0.05f, .out_zero = -3};
        VerifySpec spec = spec_for(kernel, 1 + static_cast<std::int64_t>(seed % 15), act, epilogue, seed);
        spec.linear.act_scheme = way;
        expect_verified(q, spec, kernel.name);
      }
  EXPECT_GT(seed, 1u) << "the kernel took no layer";
}

/// Blocks that are no multiples of 8 channels, and long ones, below, equal to and above the weight's groups.
TEST_P(ZeroPointBlocksConformance, BlocksOfAnyLength) {
  const Kernel& kernel = *GetParam();
  if (!takes_any_block(kernel)) GTEST_SKIP() << "does not take blocks of any length";
  std::uint64_t seed = 1;
  for (DType codes : {DType::u4, DType::u8, DType::u3})
    for (const auto& [group, block] :
         {std::pair{24, 12}, {24, 3}, {20, 20}, {20, 60}, {0, 100}, {0, 264}, {600, 300}, {300, 600}, {0, 700}, {1040, 520}})
      for (ZeroKind zero : {ZeroKind::none, ZeroKind::integer, ZeroKind::offset})
        for (bool comes_quantized : {false, true}) {
          const ZeroKind zeros[] = {ZeroKind::integer, ZeroKind::offset, ZeroKind::real};
          const WeightScheme scheme{codes, zeros[seed % 3], group == 0 ? GroupShape::channel() : GroupShape::group(group),
                                    DType::f16};
          const ActScheme way{DType::s8, GroupShape::group(block), zero};
          const DType act = comes_quantized ? DType::s8 : act_for(kernel, seed);
          const std::int64_t k = group > 100 || block > 100 ? 1403 : 203;
          if (kernel.backend == Backend::cuda && group % 8 != 0) continue;  // which no layout of the GPU holds
          if (kernel.isa == Isa::amx && (block % 8 != 0 || zero == ZeroKind::offset)) continue;  // which it leaves to the vectors
          ASSERT_TRUE(takes(kernel, scheme, 37, k, way, act)) << name_of(scheme, way);
          ++seed;
          const QuantTensor q = random_weight(scheme, 37, k, seed, {.act_order = seed % 2 == 0 && !comes_quantized});
          VerifySpec spec = spec_for(kernel, 1 + static_cast<std::int64_t>(seed % 9), act, {}, seed);
          spec.linear.act_scheme = way;
          SCOPED_TRACE(name_of(scheme, way) + (comes_quantized ? ", A quantized" : ""));
          expect_verified(q, spec, kernel.name);
        }
}

/// Activations in [5, 6]: within the bound, and some six times as close to the product of floats with float offsets as with zero points,
/// whose range contains 0.
TEST_P(ZeroPointBlocksConformance, OffsetsAreFinerFarFromZero) {
  const Kernel& kernel = *GetParam();
  if (!takes_offsets(kernel)) GTEST_SKIP() << "takes no offsets";
  const std::int64_t m = 7, n = 51, k = 512;
  for (ZeroKind weight_zero : {ZeroKind::none, ZeroKind::integer, ZeroKind::offset, ZeroKind::real}) {
    const WeightScheme scheme{weight_zero == ZeroKind::none ? DType::u4b8 : DType::u4, weight_zero, GroupShape::group(32),
                              DType::f16};
    const QuantTensor q = random_weight(scheme, n, k, 3);
    Tensor a(act_for(kernel, 0), {m, k}), exact(DType::f32, {m, n});
    for (std::int64_t i = 0; i < a.numel(); ++i)
      a.set(i, 5.0f + static_cast<float>(random_uniform(4, static_cast<std::uint64_t>(i))));
    std::vector<std::int64_t> columns(static_cast<std::size_t>(n));
    std::iota(columns.begin(), columns.end(), 0);
    const auto plain = reference::linear(reference::arrays_of(q), view_of(a), {}, {}, columns);
    const auto error = [&](ZeroKind zero, GroupShape group) {
      const ActScheme way{DType::s8, group, zero};
      const LinearSpec spec{.a_dtype = a.dtype, .m_max = m, .act_scheme = way};
      const auto weight = pack(q, spec, {.kernel = std::string(kernel.name)});
      EXPECT_TRUE(weight.ok()) << weight.status().message();
      const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
      EXPECT_TRUE(plan.ok()) << plan.status().message();
      Tensor d(DType::f32, {m, n});
      EXPECT_TRUE(run_on_host(*plan, *weight, view_of(a), TensorView(d.bytes.data(), d.dtype, {m, n}), {}).ok());
      const reference::ActModel model = act_model(kernel, a.dtype, way, scheme);
      const Comparison comparison =
          compare(d, columns, reference::linear(reference::arrays_of(q), view_of(a), {}, {}, columns, model));
      EXPECT_EQ(comparison.failures, 0) << name_of(scheme, way);
      double sum = 0;
      for (std::int64_t i = 0; i < d.numel(); ++i) sum += std::pow(d.at(i) - plain[static_cast<std::size_t>(i)].value, 2);
      return std::sqrt(sum);
    };
    for (GroupShape group : {GroupShape::group(32), GroupShape::channel()})
      EXPECT_GT(error(ZeroKind::integer, group), 4.5 * error(ZeroKind::offset, group)) << scheme.name();
  }
}

/// Scales and offsets of an A that comes quantized: offsets that dwarf their codes, or that are all there is, and none.
TEST_P(ZeroPointBlocksConformance, OffsetsOfCodes) {
  const Kernel& kernel = *GetParam();
  if (!takes_offsets(kernel)) GTEST_SKIP() << "takes no offsets";
  const float scales[] = {0.01f, 0.0f, 1e-30f, 0.01f, -0.02f, 1e-12f, 0.0f},
              offsets[] = {5.5f, -3.0f, 1e4f, 0.0f, -1e3f, 2.0f, 0.0f};
  for (ZeroKind weight_zero : {ZeroKind::none, ZeroKind::integer, ZeroKind::offset}) {
    const WeightScheme scheme{weight_zero == ZeroKind::none ? DType::s8 : DType::u4, weight_zero, GroupShape::group(32),
                              DType::f16};
    for (GroupShape group : {GroupShape::channel(), GroupShape::group(32), GroupShape::group(64)}) {
      const std::int64_t m = 8, n = 37, k = 200;
      const ActScheme way{DType::s8, group, ZeroKind::offset};
      const QuantTensor q = random_weight(scheme, n, k, 5);
      const LinearSpec spec{.a_dtype = DType::s8, .m_max = m, .act_scheme = way};
      const auto weight = pack(q, spec, {.kernel = std::string(kernel.name)});
      ASSERT_TRUE(weight.ok()) << weight.status().message();
      const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      Tensor a(DType::s8, {m, k});
      for (std::int64_t i = 0; i < a.numel(); ++i)
        a.as<std::int8_t>()[i] = static_cast<std::int8_t>(random_bits(11, static_cast<std::uint64_t>(i)));
      std::vector<std::int64_t> shape{m};
      if (group.k != 0) shape.push_back(group.cols(k));
      Tensor a_scale(DType::f32, shape), a_zero(DType::f32, shape);
      for (std::int64_t i = 0; i < a_zero.numel(); ++i) {
        a_scale.set(i, scales[static_cast<std::size_t>(i) % std::size(scales)]);
        a_zero.set(i, offsets[static_cast<std::size_t>(i) % std::size(offsets)]);
      }
      const Operands args{.a_scale = view_of(a_scale), .a_zero = view_of(a_zero)};
      Tensor d(DType::f32, {m, n});
      const Status ran = run_on_host(*plan, *weight, view_of(a), TensorView(d.bytes.data(), d.dtype, {m, n}), args);
      ASSERT_TRUE(ran.ok()) << ran.message();
      std::vector<std::int64_t> columns(static_cast<std::size_t>(n));
      std::iota(columns.begin(), columns.end(), 0);
      const Comparison comparison = compare(d, columns,
                                            reference::linear(reference::arrays_of(q), view_of(a), spec.epilogue, args, columns,
                                                              act_model(kernel, DType::s8, way, scheme)));
      EXPECT_EQ(comparison.failures, 0) << name_of(scheme, way) << ", the worst at " << comparison.worst_m << ","
                                        << comparison.worst_n << ": " << comparison.worst_got << ", expected "
                                        << comparison.worst_expected.value << " ± " << comparison.worst_expected.bound;
    }
  }
}

std::vector<WeightScheme> integer_schemes() {
  auto list = all_schemes();
  std::erase_if(list, [](const WeightScheme& s) { return info(s.codes).kind == DTypeKind::floating; });
  return list;
}

bool takes_exact_blocks(const Kernel& kernel) {
  return takes_one_of(kernel, blocks_with_zero_points(), integer_schemes(), DType::f32);
}

/// Blocks of activations whose scale is exactly 1 and whose zero points are not 0, power-of-two scales of the weight: all sums are
/// integers, so that results are the oracle's bits. Tokens for one tile, for two, and for more than one task; a K that is no multiple of
/// 8.
TEST_P(ExactBlocksConformance, BlocksWithZeroPoints) {
  const Kernel& kernel = *GetParam();
  int compared = 0;
  for (const WeightScheme& scheme : integer_schemes())
    for (const ActScheme& way : blocks_with_zero_points())
      for (const Shape& shape :
           {Shape{1, 33, 260}, {std::max(1, kernel.tile.m), 17, 512}, {kernel.tile.m + 1, 40, 263}, {197, 5, 256}}) {
        const auto [m, n, k] = shape;
        const std::int32_t group = scheme.group.k, block = way.group.k;
        if (group != 0 && group % block != 0 && block % group != 0) continue;
        if (!takes(kernel, scheme, n, k, way, DType::f32)) continue;
        const QuantTensor q = random_weight(scheme, n, k, 11, {.exact = true});
        Tensor a(DType::f32, {m, k});
        for (std::int64_t i = 0; i < a.numel(); ++i) {
          const std::int64_t channel = i % k % block, shift = (i / k + i % k / block) % 50;
          const auto small = static_cast<float>(static_cast<int>(random_bits(5, static_cast<std::uint64_t>(i)) % 7) - 3);
          const float high = static_cast<float>(200 - shift);
          const bool far = scheme.zero == ZeroKind::integer && i / k % 4 == 2;  // all as far from the zero point as possible
          a.set(i, far ? -255.0f : channel == 1 ? high : channel == 2 ? high - 255 : small);
        }
        const LinearSpec spec{.m_max = m, .act_scheme = way};
        const auto weight = pack(q, {.kernel = std::string(kernel.name)});
        ASSERT_TRUE(weight.ok()) << weight.status().message();
        const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        const ConstTensorView a_view(a.bytes.data(), DType::f32, {m, k});
        std::vector<float> d(static_cast<std::size_t>(m * n));
        const Status ran = run_on_host(*plan, *weight, a_view, TensorView(d.data(), {m, n}), {});
        ASSERT_TRUE(ran.ok()) << ran.message();
        std::vector<std::int64_t> columns(static_cast<std::size_t>(n));
        std::iota(columns.begin(), columns.end(), 0);
        const auto expected = reference::linear(reference::arrays_of(q), a_view, {}, {}, columns, {.act_scheme = way});
        for (std::size_t i = 0; i < d.size(); ++i)
          ASSERT_EQ(static_cast<double>(d[i]), expected[i].value)
              << name_of(scheme, way) << " element " << i << " of M=" << m << " N=" << n << " K=" << k;
        ++compared;
      }
  EXPECT_GT(compared, 0) << "the kernel took no layer";
}

/// W8A8 as docs/accuracy.md defines it, evaluated here: the exact integers, then f32 operations in their order.
Tensor exact_w8a8(const QuantTensor& q, const ConstTensorView& a, const LinearSpec& spec, const Operands& args) {
  const std::int64_t m = a.dim(0), n = q.n, k = q.k;
  Tensor d(spec.epilogue.out, {m, n});
  std::vector<std::int64_t> codes(static_cast<std::size_t>(k));
  std::vector<float> row(static_cast<std::size_t>(n));
  for (std::int64_t r = 0; r < m; ++r) {
    act_rule::Rule rule;
    const auto* bytes = static_cast<const std::byte*>(a.data) + r * k * bits(a.dtype) / 8;
    Tensor x(a.dtype, {k});
    std::memcpy(x.bytes.data(), bytes, x.bytes.size());
    if (!is_compute_float(a.dtype)) {
      const auto at = [&](const ConstTensorView& v) { return v.dim(0) == 1 ? 0 : r * v.stride(0); };
      if (q.static_acts) rule = act_rule::known(q.static_acts->scale, q.static_acts->zero);
      if (!args.a_scale.empty()) rule.scale = static_cast<const float*>(args.a_scale.data)[at(args.a_scale)];
      if (!args.a_zero.empty()) rule.zero = static_cast<const std::int32_t*>(args.a_zero.data)[at(args.a_zero)];
    } else if (q.static_acts) {
      rule = act_rule::known(q.static_acts->scale, q.static_acts->zero);
    } else {
      float low = 0, high = 0;
      bool finite = true;
      for (std::int64_t i = 0; i < k; ++i) {
        finite = finite && std::isfinite(x.at(i));
        low = std::min(low, x.at(i));
        high = std::max(high, x.at(i));
      }
      if (!finite) high = std::numeric_limits<float>::quiet_NaN();
      rule = spec.act_scheme.zero != ZeroKind::none ? act_rule::asymmetric(low, high)
                                                    : act_rule::symmetric(finite ? std::max(-low, high) : high, 127.0f);
    }
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t code = is_compute_float(a.dtype) ? act_rule::to_s8(x.at(i), rule) : x.as<std::int8_t>()[i];
      codes[static_cast<std::size_t>(i)] = code - rule.zero;
    }
    for (std::int64_t c = 0; c < n; ++c) {
      const std::int64_t at = q.scheme.group.n == 0 ? 0 : c;
      const std::int64_t zero = q.zeros.empty() ? 0 : static_cast<std::int64_t>(q.zeros.at(at));
      std::int64_t sum = 0;
      for (std::int64_t i = 0; i < k; ++i) {
        const float value = code_value(q.scheme.codes, q.codes[static_cast<std::size_t>(c * k + i)]);
        sum += codes[static_cast<std::size_t>(i)] * (static_cast<std::int64_t>(value) - zero);
      }
      if (spec.epilogue.sum_bias) sum += static_cast<const std::int32_t*>(args.sum_bias.data)[c];
      if (spec.epilogue.reads_sums()) sum = static_cast<std::int32_t>(static_cast<std::uint32_t>(sum));
      if (d.dtype == DType::s32) d.as<std::int32_t>()[r * n + c] = static_cast<std::int32_t>(sum);
      float y = static_cast<float>(sum);
      y = y * rule.scale;
      y = y * q.scales.at(at);
      if (q.scale2) y = y * *q.scale2;
      row[static_cast<std::size_t>(c)] = y;
    }
    if (d.dtype != DType::s32)
      epilogue::store_row(spec.epilogue, args, row.data(), r, 0, n, TensorView(d.bytes.data(), d.dtype, {m, n}));
  }
  return d;
}

/// The same bits, except for the payload of a NaN.
void expect_same(const Tensor& got, const Tensor& expected) {
  for (std::int64_t i = 0; i < got.numel(); ++i) {
    if (got.dtype == DType::s32) {
      ASSERT_EQ(got.as<std::int32_t>()[i], expected.as<std::int32_t>()[i]) << "element " << i;
      continue;
    }
    const float x = got.at(i), y = expected.at(i);
    if (std::isnan(x) && std::isnan(y)) continue;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(x), std::bit_cast<std::uint32_t>(y)) << "element " << i << ": " << x << " and " << y;
  }
}

bool multiplies_int8(const Kernel& kernel) {
  return (kernel.act == "s8" || kernel.act == "s8k64") &&
         takes_one_of(kernel, {{DType::s8, GroupShape::channel()}, {DType::s8, GroupShape::tensor()}},
                      testing::whole_row_schemes(), act_for(kernel, 1));
}

/// Every kernel that multiplies int8 by weights of one scale per output channel: no bound, the same bits.
TEST_P(W8A8Conformance, IsExact) {
  const Kernel& kernel = *GetParam();
  std::vector<EpilogueSpec> epilogues{
      {},
      {.bias = true, .activation = Activation::clamp, .out = DType::s8, .out_scale = 0.37f, .out_zero = 5},
      {.bias = true, .out = DType::f16},
      {.row_scale = true, .col_scale = true, .bias = true, .activation = Activation::relu, .gate = true, .residual = true},
      {.sum_bias = true, .bias = true, .out = DType::bf16},
      {.sum_bias = true, .out = DType::s32},
      {.out = DType::s32},
      {.sum_bias = true, .out = DType::u8, .out_scales = true, .out_high = 200}};
  std::vector<Shape> shapes = shapes_for(kernel);
  shapes.insert(shapes.end(), {{2, 3, 65536}, {1, 2, 70001}, {1, 2, 131072}, {13, 40, 4096}});
  // Chunks of K and a last step that is not whole, of several row blocks a task; more than a MiB of activations; two segments.
  if (kernel.isa == Isa::amx) shapes.insert(shapes.end(), {{70, 300, 1100}, {33, 34, 16448}, {17, 33, 32769}});
  std::uint64_t seed = 1;
  for (const WeightScheme& scheme : testing::whole_row_schemes())
    for (const Shape& shape : shapes)
      for (GroupShape group : {GroupShape::channel(), GroupShape::tensor()})
        for (ZeroKind zero : {ZeroKind::none, ZeroKind::integer})
          for (bool comes_quantized : {false, true}) {
            const ActScheme way{DType::s8, group, zero};
            const auto [m, n, k] = shape;
            const DType act = comes_quantized ? DType::s8 : act_for(kernel, seed);
            if (!takes(kernel, scheme, n, k, way, act)) continue;
            ++seed;
            QuantTensor q = random_weight(scheme, n, k, seed, {.bias = true});
            if (seed % 3 == 0) q.scale2 = 0.7f;
            if (group == GroupShape::tensor() && (!comes_quantized || seed % 2 == 0))
              q.static_acts = {0.013f, zero == ZeroKind::none ? 0 : 21};
            EpilogueSpec epilogue = epilogues[seed % epilogues.size()];
            const bool fits = k <= (std::int64_t{1} << 31) / (zero == ZeroKind::none ? 128 : 255) / 255;  // into 32 bits
            if (epilogue.reads_sums() && (!fits || (epilogue.out == DType::s32 && !comes_quantized))) epilogue = {};
            const LinearSpec spec{.a_dtype = act, .m_max = m, .epilogue = epilogue, .act_scheme = way};

            Tensor a = gaussian(comes_quantized ? DType::f32 : act, m, k);
            // One for all tokens, where the scheme has one a token, in every second and third case.
            Tensor a_scale(DType::f32, {group == GroupShape::tensor() || seed % 2 == 0 ? 1 : m});
            Tensor a_zero(DType::s32, {group == GroupShape::tensor() || seed % 3 == 0 ? 1 : m});
            if (comes_quantized) {
              a = Tensor(DType::s8, {m, k});
              const bool extreme = k > 60000;  // the largest sums there are
              for (std::int64_t i = 0; i < a.numel(); ++i)
                a.as<std::int8_t>()[i] =
                    extreme ? std::int8_t{-128} : static_cast<std::int8_t>(random_bits(seed, static_cast<std::uint64_t>(i)));
              if (extreme) std::ranges::fill(q.codes, scheme.codes == DType::s8 ? std::uint8_t{0x80} : std::uint8_t{0});
              for (std::int64_t i = 0; i < a_scale.numel(); ++i) a_scale.set(i, 0.01f + 0.001f * static_cast<float>(i));
              for (std::int64_t i = 0; i < a_zero.numel(); ++i)
                a_zero.as<std::int32_t>()[i] = extreme ? 127 : static_cast<std::int32_t>((i + 1) * 37 % 256) - 128;
            } else if (m >= 5 &&
                       k > 2) {  // NaN and infinity affect their token only; with a known scale they saturate or become 0
              a.set(k + 1, std::numeric_limits<float>::quiet_NaN());
              a.set(2 * k, std::numeric_limits<float>::infinity());
              a.set(4 * k + 2, -std::numeric_limits<float>::infinity());
            }
            Tensor row_scale(DType::f32, {m}), col_scale(DType::f32, {n}), gate = gaussian(DType::f16, m, n);
            for (std::int64_t i = 0; i < m; ++i)
              row_scale.set(i, 1.0f + 0.1f * random_normal(seed, static_cast<std::uint64_t>(i)));
            for (std::int64_t i = 0; i < n; ++i)
              col_scale.set(i, 1.0f - 0.1f * random_normal(seed, static_cast<std::uint64_t>(i)));
            Tensor sum_bias(DType::s32, {n}), out_scale(DType::f32, {seed % 4 == 1 ? 1 : n}), out_zero(DType::s32, {1});
            for (std::int64_t i = 0; i < n; ++i)
              sum_bias.as<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7919 % 40000) - 20000;
            for (std::int64_t i = 0; i < out_scale.numel(); ++i) out_scale.set(i, 0.3f + 0.07f * static_cast<float>(i % 9));
            out_zero.as<std::int32_t>()[0] = 77;
            Operands args{.row_scale = view_of(row_scale),
                          .col_scale = view_of(col_scale),
                          .bias = view_of(q.bias),
                          .gate = view_of(gate),
                          .residual = view_of(gate),
                          .sum_bias = view_of(sum_bias),
                          .out_scale = view_of(out_scale),
                          .out_zero = view_of(out_zero)};
            if (comes_quantized && !q.static_acts) {
              if (epilogue.out != DType::s32) args.a_scale = view_of(a_scale);
              if (zero != ZeroKind::none) args.a_zero = view_of(a_zero);
            }
            SCOPED_TRACE(::testing::Message() << name_of(scheme, way) << " M=" << m << " N=" << n << " K=" << k
                                              << (comes_quantized ? " A quantized " : " ") << epilogue.name());
            const auto weight = pack(q, {.kernel = std::string(kernel.name)});
            ASSERT_TRUE(weight.ok()) << weight.status().message();
            const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
            ASSERT_TRUE(plan.ok()) << plan.status().message();
            Tensor d(epilogue.out, {m, n});
            const Status ran = run_on_host(*plan, *weight, view_of(a), TensorView(d.bytes.data(), d.dtype, {m, n}), args);
            ASSERT_TRUE(ran.ok()) << ran.message();
            expect_same(d, exact_w8a8(q, view_of(a), spec, args));
            if (HasFatalFailure()) return;
          }
  EXPECT_GT(seed, 1u) << "the kernel took no layer";
}

TEST_P(LinearConformance, WritesOnlyItsOutputAndDoesNotDependOnThreads) {
  const Kernel& kernel = *GetParam();
  const std::int64_t m = 19, n = 45, k = 96, stride = 64;
  const WeightScheme scheme = scheme_for(kernel, {DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16}, n, k);
  const QuantTensor q = random_weight(scheme, n, k, 5);
  const auto weight = pack(q, {.kernel = std::string(kernel.name)});
  const LinearSpec spec = spec_for(kernel, m, act_for(kernel, 0), {}, 0).linear;
  const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const Tensor a = gaussian(spec.a_dtype, m, k);

  const float canary = -123.5f;
  std::vector<float> first;
  for (int threads : {1, 2, 5}) {
    auto executor = make_executor(threads);
    std::vector<float> d(static_cast<std::size_t>(m * stride), canary);
    TensorView out(d.data(), {m, n});
    out.strides[0] = stride;
    const Status status =
        run_on_host(*plan, *weight, ConstTensorView(a.bytes.data(), spec.a_dtype, {m, k}), out, {}, executor.get());
    ASSERT_TRUE(status.ok()) << status.message();
    for (std::int64_t row = 0; row < m; ++row)
      for (std::int64_t col = n; col < stride; ++col) ASSERT_EQ(d[static_cast<std::size_t>(row * stride + col)], canary);
    if (first.empty()) first = d;
    ASSERT_EQ(std::memcmp(first.data(), d.data(), d.size() * sizeof(float)), 0) << threads << " threads";
  }
}

/// Rows of A with NaN between them: as far from each other as kernels read them fast, which changes no bit, and off every alignment, where another
/// kernel may have to step in.
TEST_P(LinearConformance, RowsOfAMayLieApart) {
  const Kernel& kernel = *GetParam();
  const std::int64_t m = 19, n = 45, k = 96;
  const WeightScheme scheme = scheme_for(kernel, {DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16}, n, k);
  const auto weight = pack(random_weight(scheme, n, k, 5), {.kernel = std::string(kernel.name)});
  const LinearSpec spec = spec_for(kernel, m, act_for(kernel, 0), {}, 0).linear;
  const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<float> dense;
  for (const std::int64_t gap : {0, 16, 1}) {
    Tensor a(spec.a_dtype, {m, k + gap});
    for (std::int64_t i = 0; i < a.numel(); ++i) {
      const std::int64_t row = i / (k + gap), column = i % (k + gap);
      a.set(i, column < k ? random_normal(9, static_cast<std::uint64_t>(row * k + column))
                          : std::numeric_limits<float>::quiet_NaN());
    }
    ConstTensorView view(a.bytes.data(), a.dtype, {m, k});
    view.strides[0] = k + gap;
    std::vector<float> d(static_cast<std::size_t>(m * n));
    const Status ran = run_on_host(*plan, *weight, view, TensorView(d.data(), {m, n}), {});
    ASSERT_TRUE(ran.ok()) << ran.message();
    if (dense.empty()) dense = d;
    double moved = 0, norm = 0;
    for (std::size_t i = 0; i < d.size(); ++i) moved += std::pow(d[i] - dense[i], 2), norm += std::pow(dense[i], 2);
    EXPECT_LE(moved, gap == 16 ? 0.0 : 1e-4 * norm) << "a gap of " << gap;
  }
}

/// For every M up to the plan's largest; run_on_host checks the canaries around a workspace of exactly workspace_bytes().
TEST_P(LinearConformance, WritesOnlyItsWorkspace) {
  const Kernel& kernel = *GetParam();
  const std::int64_t n = 45, k = 96;
  const WeightScheme scheme = scheme_for(kernel, {DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16}, n, k);
  const auto weight = pack(random_weight(scheme, n, k, 5), {.kernel = std::string(kernel.name)});
  for (std::int64_t m_max : {1, 2, 19}) {
    const LinearSpec spec = spec_for(kernel, m_max, act_for(kernel, 0), {}, 0).linear;
    const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const Tensor a = gaussian(spec.a_dtype, m_max, k);
    std::vector<float> d(static_cast<std::size_t>(m_max * n));
    for (std::int64_t m = 1; m <= m_max; ++m) {
      const Status status =
          run_on_host(*plan, *weight, ConstTensorView(a.bytes.data(), spec.a_dtype, {m, k}), TensorView(d.data(), {m, n}), {});
      ASSERT_TRUE(status.ok()) << "M=" << m << " of " << m_max << ": " << status.message();
    }
  }
}

/// A row gives the same bits alone, among others and in batches of any size, although the path through a kernel may depend on M.
TEST_P(BatchInvariance, ARowDoesNotDependOnTheOthers) {
  const Kernel& kernel = *GetParam();
  const std::int64_t m = 33, n = 45, k = 200;
  const LinearSpec spec = spec_for(kernel, m, act_for(kernel, 0), {}, 0).linear;
  const Tensor a = gaussian(spec.a_dtype, m, k);
  for (const WeightScheme& scheme : schemes_for(kernel, n, k)) {
    const auto weight = pack(random_weight(scheme, n, k, 6), {.kernel = std::string(kernel.name)});
    const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    std::vector<float> all(static_cast<std::size_t>(m * n)), some(all.size());
    const auto run_rows = [&](std::int64_t first, std::int64_t count, std::vector<float>& d) {
      const ConstTensorView rows(a.bytes.data() + first * k * bits(spec.a_dtype) / 8, spec.a_dtype, {count, k});
      return run_on_host(*plan, *weight, rows, TensorView(d.data(), {count, n}), {});
    };
    ASSERT_TRUE(run_rows(0, m, all).ok());
    for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{7, 1},
                                       {0, 1},
                                       {0, 2},
                                       {1, 7},
                                       {3, 8},
                                       {0, 9},
                                       {16, 15},
                                       {5, 16},
                                       {1, 17},
                                       {0, 31},
                                       {1, 32}}) {
      ASSERT_TRUE(run_rows(first, count, some).ok());
      EXPECT_EQ(std::memcmp(some.data(), all.data() + first * n, static_cast<std::size_t>(count * n) * sizeof(float)), 0)
          << scheme.name() << " rows " << first << " to " << first + count;
    }
  }
}

/// On the GPU the kernel of the product stores D of few tokens, a last step that of more: with the same bits.
TEST_P(BatchInvariance, AGluDoesNotDependOnWhatStoresIt) {
  const Kernel& kernel = *GetParam();
  const std::int64_t m = 33, n = 54, k = 96;
  const WeightScheme scheme = scheme_for(kernel, {DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16}, n, k);
  const QuantTensor q = random_weight(scheme, n, k, 6);
  for (const DType out : {DType::f16, DType::bf16, DType::f32}) {
    const EpilogueSpec glu{.activation = Activation::silu, .glu = true, .out = out};
    const LinearSpec spec = spec_for(kernel, m, act_for(kernel, 0), glu, 0).linear;
    const auto weight = pack(q, spec, {.kernel = std::string(kernel.name)});
    ASSERT_TRUE(weight.ok()) << weight.status().message();
    const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    const Tensor a = gaussian(spec.a_dtype, m, k);
    Tensor all(out, {m, n / 2}), some(out, {m, n / 2});
    const auto run_rows = [&](std::int64_t first, std::int64_t count, Tensor& d) {
      const ConstTensorView rows(a.bytes.data() + first * k * bits(spec.a_dtype) / 8, spec.a_dtype, {count, k});
      return run_on_host(*plan, *weight, rows, TensorView(d.bytes.data(), out, {count, n / 2}), {});
    };
    ASSERT_TRUE(run_rows(0, m, all).ok());
    for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{7, 1}, {3, 8}, {5, 16}}) {
      ASSERT_TRUE(run_rows(first, count, some).ok());
      const std::int64_t row = n / 2 * bits(out) / 8;
      EXPECT_EQ(std::memcmp(some.bytes.data(), all.bytes.data() + first * row, static_cast<std::size_t>(count * row)), 0)
          << name(out) << " rows " << first << " to " << first + count;
    }
  }
}

/// A NaN or infinite activation makes all of its token NaN, and no other.
TEST_P(LinearConformance, NonFiniteActivationsStayInTheirRow) {
  const Kernel& kernel = *GetParam();
  const std::int64_t m = 8, n = 45, k = 200;
  const LinearSpec spec = spec_for(kernel, m, act_for(kernel, 0), {}, 0).linear;
  const Tensor clean = gaussian(spec.a_dtype, m, k);
  Tensor dirty = clean;
  dirty.set(2 * k + 5, std::numeric_limits<float>::quiet_NaN());
  dirty.set(5 * k + 190, std::numeric_limits<float>::infinity());
  dirty.set(7 * k, -std::numeric_limits<float>::infinity());
  const WeightScheme scheme = scheme_for(kernel, {DType::u4, ZeroKind::integer, GroupShape::channel(), DType::f16}, n, k);
  const auto weight = pack(random_weight(scheme, n, k, 6), {.kernel = std::string(kernel.name)});
  const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<float> expected(static_cast<std::size_t>(m * n)), d(static_cast<std::size_t>(m * n));
  for (auto [a, out] : {std::pair{&clean, &expected}, std::pair{&std::as_const(dirty), &d}}) {
    const ConstTensorView a_view(a->bytes.data(), spec.a_dtype, {m, k});
    ASSERT_TRUE(run_on_host(*plan, *weight, a_view, TensorView(out->data(), {m, n}), {}).ok());
  }
  for (std::int64_t row = 0; row < m; ++row)
    for (std::int64_t col = 0; col < n; ++col) {
      const auto i = static_cast<std::size_t>(row * n + col);
      if (row == 2) {
        EXPECT_TRUE(std::isnan(d[i])) << row << "," << col;
      } else if (row == 5 || row == 7) {
        EXPECT_TRUE(spec.act_scheme.codes == DType::none ? !std::isfinite(d[i]) : std::isnan(d[i])) << row << "," << col;
      } else {
        EXPECT_EQ(d[i], expected[i]) << row << "," << col;
      }
    }
}

/// A NaN of the sum or of the bias is NaN after every activation, bound and addend, and the code 0 in int8.
TEST_P(LinearConformance, NaNGoesThroughEveryEpilogue) {
  const Kernel& kernel = *GetParam();
  const std::int64_t m = 4, n = 2 * std::max(1, kernel.tile.n) + 3, k = 128, dirty = 2;
  const WeightScheme scheme = scheme_for(kernel, {DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16}, n, k);
  const auto weight = pack(random_weight(scheme, n, k, 3), {.kernel = std::string(kernel.name)});
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Tensor bias(DType::f32, {n}), image = gaussian(DType::f16, m, n), a = gaussian(act_for(kernel, 0), m, k);
  for (std::int64_t i = 0; i < n; ++i) bias.set(i, i % 5 == 3 ? nan : 0.5f);
  a.set(dirty * k + 5, nan);
  for (Activation activation : kActivations)
    for (DType out : {DType::f32, DType::f16, DType::bf16, DType::s8})
      for (bool images : {false, true}) {
        const EpilogueSpec epilogue{.bias = true,
                                    .activation = activation,
                                    .gate = images,
                                    .residual = images,
                                    .out = out,
                                    .out_scale = 0.05f,
                                    .out_zero = -3};
        const LinearSpec spec = spec_for(kernel, m, a.dtype, epilogue, 0).linear;
        const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        Tensor d(out, {m, n});
        const Status ran =
            run_on_host(*plan, *weight, ConstTensorView(a.bytes.data(), a.dtype, {m, k}), TensorView(d.bytes.data(), out, {m, n}),
                        {.bias = ConstTensorView(bias.bytes.data(), DType::f32, {n}),
                         .gate = ConstTensorView(image.bytes.data(), DType::f16, {m, n}),
                         .residual = ConstTensorView(image.bytes.data(), DType::f16, {m, n})});
        ASSERT_TRUE(ran.ok()) << ran.message();
        for (std::int64_t i = 0; i < d.numel(); ++i) {
          const bool is_nan = i / n == dirty || i % n % 5 == 3;
          if (out != DType::s8) {
            ASSERT_EQ(std::isnan(d.at(i)), is_nan) << epilogue.name() << " " << i / n << "," << i % n << ": " << d.at(i);
          } else if (is_nan) {
            ASSERT_EQ(d.at(i), 0.0f) << epilogue.name() << " " << i / n << "," << i % n;
          }
        }
      }
}

/// Zero points that are no codes, of an A that comes quantized: right for every integer of 32 bits, and beside others.
TEST_P(LinearConformance, ZeroPointsOutsideTheCodes) {
  const Kernel& kernel = *GetParam();
  if (kernel.backend == Backend::cuda) GTEST_SKIP() << "takes zero points of a byte";
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min(), kMost = std::numeric_limits<std::int32_t>::max();
  const std::int32_t zeros[] = {-3, 128, -129, -700, 33'000, 70'000, -1'000'000, (1 << 24) + 1, kLeast, kMost, 127};
  const auto m = static_cast<std::int64_t>(std::size(zeros));
  int compared = 0;
  for (const WeightScheme& scheme : schemes_for(kernel))
    for (GroupShape group : {GroupShape::tensor(), GroupShape::channel(), GroupShape::group(32), GroupShape::group(64)}) {
      const ActScheme way{DType::s8, group, ZeroKind::integer};
      const std::int64_t n = std::max(1, kernel.tile.n) + 5, k = 203;
      if (!takes(kernel, scheme, n, k, way, DType::s8)) continue;
      const QuantTensor q = random_weight(scheme, n, k, 5);
      const auto weight = pack(q, {.kernel = std::string(kernel.name)});
      ASSERT_TRUE(weight.ok()) << weight.status().message();
      const LinearSpec spec{.a_dtype = DType::s8, .m_max = m, .act_scheme = way};
      const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
      if (!plan.ok() && group.k != 0) continue;  // blocks that do not match the groups
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      Tensor a(DType::s8, {m, k});
      for (std::int64_t i = 0; i < a.numel(); ++i)
        a.as<std::int8_t>()[i] = static_cast<std::int8_t>(random_bits(11, static_cast<std::uint64_t>(i)));
      for (std::size_t turn = 0; turn < (group == GroupShape::tensor() ? std::size(zeros) : 1); ++turn) {
        std::vector<std::int64_t> shape{group == GroupShape::tensor() ? 1 : m};
        if (group.k != 0) shape.push_back(group.cols(k));
        Tensor a_scale(DType::f32, shape), a_zero(DType::s32, shape);
        for (std::int64_t i = 0; i < a_zero.numel(); ++i) {
          a_scale.set(i, 0.01f + 0.001f * static_cast<float>(i % 7));
          a_zero.as<std::int32_t>()[i] = zeros[(turn + static_cast<std::size_t>(i)) % std::size(zeros)];
        }
        const Operands args{.a_scale = view_of(a_scale), .a_zero = view_of(a_zero)};
        Tensor d(DType::f32, {m, n});
        const Status ran = run_on_host(*plan, *weight, view_of(a), TensorView(d.bytes.data(), d.dtype, {m, n}), args);
        ASSERT_TRUE(ran.ok()) << ran.message();
        std::vector<std::int64_t> columns(static_cast<std::size_t>(n));
        std::iota(columns.begin(), columns.end(), 0);
        reference::ActModel model = act_model(kernel, DType::s8, way, scheme);
#if defined(__aarch64__)  // codes of a byte are multiplied less 128, which is exact but for such zero points
        if (kernel.isa != Isa::i8mm && bits(scheme.codes) != 4) model.code_offset = 128;
#endif
        const Comparison comparison =
            compare(d, columns, reference::linear(reference::arrays_of(q), view_of(a), spec.epilogue, args, columns, model));
        ASSERT_EQ(comparison.failures, 0) << name_of(scheme, way) << ", the worst at " << comparison.worst_m << ","
                                          << comparison.worst_n << ": " << comparison.worst_got << ", expected "
                                          << comparison.worst_expected.value << " ± " << comparison.worst_expected.bound;
        if (kernel.variant == "whole") expect_same(d, exact_w8a8(q, view_of(a), spec, args));
        if (HasFatalFailure()) return;
        ++compared;
      }
    }
  if (compared == 0) GTEST_SKIP() << "it does not multiply int8 that has zero points";
}

INSTANTIATE_TEST_SUITE_P(Table, LinearConformance, ::testing::ValuesIn(kernels_of(Op::linear)), test_name);
INSTANTIATE_TEST_SUITE_P(Table, GpuLinearConformance,
                         ::testing::ValuesIn(kernels_of(Op::linear,
                                                        [](const Kernel& kernel) { return kernel.backend == Backend::cuda; })),
                         test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GpuLinearConformance);  // a build without CUDA
INSTANTIATE_TEST_SUITE_P(Table, BatchInvariance,
                         ::testing::ValuesIn(kernels_of(Op::linear, [](const Kernel& kernel) { return kernel.batch_invariant; })),
                         test_name);
INSTANTIATE_TEST_SUITE_P(Table, QuantizedConformance, ::testing::ValuesIn(linear_kernels_taking(quantizes_activations)),
                         test_name);
INSTANTIATE_TEST_SUITE_P(Table, ZeroPointBlocksConformance,
                         ::testing::ValuesIn(linear_kernels_taking(takes_blocks_with_zero_points)), test_name);
INSTANTIATE_TEST_SUITE_P(Table, ExactBlocksConformance, ::testing::ValuesIn(linear_kernels_taking(takes_exact_blocks)),
                         test_name);
INSTANTIATE_TEST_SUITE_P(Table, W8A8Conformance, ::testing::ValuesIn(linear_kernels_taking(multiplies_int8)), test_name);

/// D, in rows that are `pitch` apart, of what a kernel writes and of what W is: bytes between the rows stay as they are.
void expect_dequantized(const Kernel& kernel, const QuantTensor& q, const DequantizeSpec& spec, std::int64_t pitch) {
  const auto weight = pack(q, {.layout = std::string(kernel.layout), .backend = memory_of(kernel)});
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  const auto plan = Plan::dequantize(*weight, spec, {.kernel = std::string(kernel.name)});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->kernel(), kernel.name);
  const std::int64_t rows = spec.transposed ? q.k : q.n, columns = spec.transposed ? q.n : q.k;
  Tensor d(spec.out, {rows, pitch});
  TensorView view(d.bytes.data(), spec.out, {rows, columns});
  view.strides[0] = pitch;
  const Status ran = run_on_host(*plan, *weight, {}, view, {});
  ASSERT_TRUE(ran.ok()) << ran.message();
  Tensor expected(spec.out, d.shape);
  for (std::int64_t row = 0; row < q.n; ++row)
    for (std::int64_t col = 0; col < q.k; ++col)
      expected.set(spec.transposed ? col * pitch + row : row * pitch + col, q.value(row, col));
  ASSERT_EQ(d.bytes, expected.bytes) << q.scheme.name() << " [" << q.n << "," << q.k << "] to " << name(spec.out)
                                     << (spec.transposed ? " as [K,N]" : " as [N,K]") << (q.g_idx.empty() ? "" : ", act-order");
}

/// Bit-exact: W is an f32 number by definition, and is rounded once to the output type.
TEST_P(DequantizeConformance, BitExact) {
  const Kernel& kernel = *GetParam();
  std::uint64_t seed = 1;
  int compared = 0;
  for (const WeightScheme& scheme : all_schemes())
    for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {33, 61}, {136, 264}, {67, 523}}) {
      if (!takes(kernel, scheme, n, k)) continue;
      for (bool act_order : {false, true}) {
        QuantTensor q = random_weight(scheme, n, k, ++seed, {.act_order = act_order});
        if (act_order && q.g_idx.empty()) continue;
        if (seed % 5 == 0 && !scheme.is_dense()) q.scale2 = 0.7f;
        for (DType out : {DType::f32, DType::f16, DType::bf16})
          for (bool transposed : {false, true}) {
            const std::int64_t pitch = (transposed ? n : k) + (seed % 2 == 0 ? 8 : 3);
            ASSERT_NO_FATAL_FAILURE(expect_dequantized(kernel, q, {.out = out, .transposed = transposed}, pitch));
            ++compared;
          }
      }
    }
  EXPECT_GT(compared, 0) << "the kernel took no scheme";
}

/// Every code there is, and scales from which W is subnormal, overflows the output type or is no number.
TEST_P(DequantizeConformance, EveryCodeAndExtremeScales) {
  const Kernel& kernel = *GetParam();
  if (backend(kernel.isa) != Backend::cpu) GTEST_SKIP() << "a NaN of a GPU has other bits";
  constexpr std::int64_t n = 48, k = 256;
  for (DType codes : {DType::u4, DType::u4b8, DType::s8, DType::e4m3, DType::e5m2})
    for (DType out : {DType::f32, DType::f16, DType::bf16}) {
      const WeightScheme scheme{codes, codes == DType::u4 ? ZeroKind::integer : ZeroKind::none, GroupShape::channel(),
                                DType::f32};
      if (!takes(kernel, scheme, n, k)) continue;
      // Rounding up to bf16 would turn this NaN into −0. f16 may keep its payload, and so may a product with the NaN of a code.
      const bool payload = out == DType::bf16 && info(codes).kind != DTypeKind::floating;
      const float nan = std::bit_cast<float>(payload ? 0x7fffffffu : 0x7fc00000u);
      const std::array scales{
          1.0f, 0x1p-17f, -0x1.8p-24f, 0x1p-130f, 0x1.fp14f, 0x1.fffffep120f, std::numeric_limits<float>::infinity(), nan};
      QuantTensor q = random_weight(scheme, n, k, 1);
      for (std::size_t i = 0; i < q.codes.size(); ++i) q.codes[i] = static_cast<std::uint8_t>(i & ((1u << bits(codes)) - 1));
      for (std::int64_t row = 0; row < n; ++row) q.scales.set(row, scales[static_cast<std::size_t>(row) % scales.size()]);
      for (bool transposed : {false, true})
        ASSERT_NO_FATAL_FAILURE(expect_dequantized(kernel, q, {.out = out, .transposed = transposed}, transposed ? n : k));
    }
}

INSTANTIATE_TEST_SUITE_P(Table, DequantizeConformance, ::testing::ValuesIn(kernels_of(Op::dequantize)), test_name);

}  // namespace
}  // namespace nibble
