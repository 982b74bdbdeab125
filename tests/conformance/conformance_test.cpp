// Conformance: every kernel of the table × every scheme × awkward shapes × epilogues, against the oracle.
// A new row of the table is covered without further code. Two properties are tested of each:
//   bounds  on Gaussian data, is every output within its derived bound?
//   exact   on data for which f32 arithmetic is exact, are the outputs bit-identical to the oracle's?
//
// The tests of a kernel that this machine cannot run are skipped, with the reason. Properties of some rows only have a suite with just
// those rows, so that a skip always means that something is missing.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>

#include "kernels/kernel.hpp"
#include "kernels/reference/oracle.hpp"
#include "linear_rows.hpp"
#include "nibble/nibble.hpp"
#include "plan/host_run.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using testing::all_schemes;
using testing::random_weight;

class GpuLinearConformance : public OfKernel {};
class BatchInvariance : public OfKernel {};
class DequantizeConformance : public OfKernel {};

TEST(KernelTable, RowsOfTheGpuAreTestedWhereTheyAreBuilt) {
  int left_out = 0;
  for (const Kernel& kernel : kernel_table()) {
    const bool missing = runs_here(kernel.isa).message().find("built without CUDA") != std::string::npos;
    EXPECT_EQ(is_built(kernel), !missing) << kernel.name;
    left_out += missing ? 1 : 0;
  }
  if (left_out > 0) GTEST_SKIP() << left_out << " rows of the kernel table: built without CUDA; configure with NIBBLE_CUDA=ON";
}

TEST_P(LinearConformance, EverySchemeAndShapeIsWithinItsBound) {
  const Kernel& kernel = *GetParam();
  std::uint64_t seed = 1;
  for (const WeightScheme& scheme : schemes_for(kernel))
    for (const Shape& shape : shapes_for(kernel)) {
      if (!takes(kernel, scheme, shape.n, shape.k)) continue;
      const DType act = act_for(kernel, seed);
      const DType out = std::array{DType::f16, DType::f32, DType::bf16, DType::f32}[seed % 4];
      const QuantTensor q = weight_for(kernel, scheme, shape.n, shape.k, seed);
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
    QuantTensor q = weight_for(kernel, scheme, 40, 100, 7 + variant,
                               {.act_order = (variant & 1) != 0, .prescale = (variant & 2) != 0, .bias = true});
    if ((variant & 4) != 0 && !scheme.is_dense()) q.scale2 = 0.3f;
    for (std::int64_t m : {1, 9})
      expect_verified(q, spec_for(kernel, m, act_for(kernel, 0), {.bias = true, .out = DType::f32}, variant), kernel.name);
  }
}

TEST_P(LinearConformance, EveryEpilogue) {
  const Kernel& kernel = *GetParam();
  const WeightScheme scheme = scheme_for(kernel, {DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16}, 51, 96);
  const QuantTensor q = weight_for(kernel, scheme, 51, 96, 3);
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

/// Zero points of either type, with every sign of codes, up to both ends: code − zero has up to ten bits.
TEST_P(LinearConformance, ZeroPointsFarFromTheCodes) {
  const Kernel& kernel = *GetParam();
  if (kernel.backend == Backend::cuda) GTEST_SKIP() << "kernels of the CPU hold code − zero in types of their own";
  constexpr std::int64_t n = 40, k = 256;
  const DType act = act_for(kernel, 0);
  int taken = 0;
  for (const DType codes : {DType::u8b128, DType::u8, DType::s8, DType::u4b8, DType::u4, DType::u7b64})
    for (const DType zero : {DType::u8, DType::s8}) {
      const WeightScheme scheme{codes, ZeroKind::integer, GroupShape::group(32), DType::f16};
      Problem problem = problem_for(kernel, scheme, n, k, quantize_for(kernel), act);
      problem.zero_type = zero;
      if (!kernel.accepts(kernel, problem).ok()) continue;
      ++taken;
      QuantTensor q = weight_for(kernel, scheme, n, k, 1);
      q.zeros = Tensor(zero, q.scales.shape);
      for (std::int64_t i = 0; i < q.zeros.numel(); ++i)
        q.zeros.set(
            i, static_cast<float>(std::array{0, 255, 254, 131}[static_cast<std::size_t>(i % 4)] - (zero == DType::s8 ? 128 : 0)));
      for (const std::int64_t m : {1, 33}) expect_verified(q, spec_for(kernel, m, act, {.out = DType::f32}, 5), kernel.name);
    }
  if (taken == 0) GTEST_SKIP() << "takes no integers with zero points";
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
    QuantTensor q = weight_for(kernel, scheme, n, k, 1);
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
    const QuantTensor q = weight_for(kernel, scheme, size.n, size.k, 5, {.bias = true});
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
      const QuantTensor q = weight_for(kernel, scheme, shape.n, shape.k, seed);
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
    if (kernel.op != Op::linear || kernel.act != "e4m3" || kernel.backend != Backend::cuda || !takes_one_weight(kernel) ||
        !runs_here(kernel.isa).ok())
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
          weight_for(kernel, scheme, shape.n, shape.k, 11,
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

TEST_P(LinearConformance, WritesOnlyItsOutputAndDoesNotDependOnThreads) {
  const Kernel& kernel = *GetParam();
  const std::int64_t k = 96;
  std::vector<std::pair<std::int64_t, std::int64_t>> sizes = {{19, 45}};
  // How many row blocks are multiplied side by side depends on the threads.
  if (kernel.backend == Backend::cpu) sizes.emplace_back(1, 27 * std::max(1, kernel.tile.n) + 13);
  for (const auto& [m, n] : sizes) {
    const std::int64_t stride = n + 19;
    const WeightScheme scheme = scheme_for(kernel, {DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16}, n, k);
    const QuantTensor q = weight_for(kernel, scheme, n, k, 5);
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
}

/// Rows of A with NaN between them: as far from each other as kernels read them fast, which changes no bit, and off every alignment, where another
/// kernel may have to step in.
TEST_P(LinearConformance, RowsOfAMayLieApart) {
  const Kernel& kernel = *GetParam();
  const std::int64_t m = 19, n = 45, k = 96;
  const WeightScheme scheme = scheme_for(kernel, {DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16}, n, k);
  const auto weight = pack(weight_for(kernel, scheme, n, k, 5), {.kernel = std::string(kernel.name)});
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
  const auto weight = pack(weight_for(kernel, scheme, n, k, 5), {.kernel = std::string(kernel.name)});
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
    const auto weight = pack(weight_for(kernel, scheme, n, k, 6), {.kernel = std::string(kernel.name)});
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
  const QuantTensor q = weight_for(kernel, scheme, n, k, 6);
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

/// A NaN or infinite activation makes all of its token NaN, and no other; with a scale that is known it becomes a code.
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
  const auto weight = pack(weight_for(kernel, scheme, n, k, 6), {.kernel = std::string(kernel.name)});
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
      if (knows_the_scale(kernel)) {
        EXPECT_TRUE(std::isfinite(d[i]) && (row == 2 || row == 5 || row == 7 || d[i] == expected[i])) << row << "," << col;
      } else if (row == 2) {
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
  const auto weight = pack(weight_for(kernel, scheme, n, k, 3), {.kernel = std::string(kernel.name)});
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
          const bool is_nan = (i / n == dirty && !knows_the_scale(kernel)) || i % n % 5 == 3;
          if (out != DType::s8) {
            ASSERT_EQ(std::isnan(d.at(i)), is_nan) << epilogue.name() << " " << i / n << "," << i % n << ": " << d.at(i);
          } else if (is_nan) {
            ASSERT_EQ(d.at(i), 0.0f) << epilogue.name() << " " << i / n << "," << i % n;
          }
        }
      }
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
