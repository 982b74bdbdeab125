// Conformance of quantized activations: every linear kernel that quantizes A or takes its codes, against the oracle and, where sums are
// exact, the definition.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "epilogue/epilogue.hpp"
#include "kernels/kernel.hpp"
#include "kernels/reference/oracle.hpp"
#include "linear_rows.hpp"
#include "nibble/nibble.hpp"
#include "plan/act_model.hpp"
#include "plan/compare.hpp"
#include "plan/host_run.hpp"
#include "quantize/act_rule.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using testing::all_schemes;
using testing::random_weight;

class QuantizedConformance : public OfKernel {};
class ZeroPointBlocksConformance : public OfKernel {};
class ExactBlocksConformance : public OfKernel {};
class W8A8Conformance : public OfKernel {};

std::vector<ActScheme> ways_to_quantize() {
  std::vector<ActScheme> ways;
  for (GroupShape group : {GroupShape::tensor(), GroupShape::channel(), GroupShape::group(256), GroupShape::group(128),
                           GroupShape::group(64), GroupShape::group(32), GroupShape::group(16)}) {
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
                                    {DType::u4b8, ZeroKind::none, GroupShape::group(16), DType::f16},
                                    {DType::u8, ZeroKind::offset, GroupShape::group(48), DType::f16},
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
  const bool integers = kernel.act == "s8" || kernel.act == "s8k64" || (kernel.quantizes && kernel.sums == Sums::integers);
  return integers && takes_one_of(kernel, {{DType::s8, GroupShape::channel()}, {DType::s8, GroupShape::tensor()}},
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

/// Codes and zero points of which one has a sign: |q − z| is up to 383, and 32 bits hold the sums of fewer channels.
TEST_P(W8A8Conformance, ZeroPointsOfTheOtherSign) {
  const Kernel& kernel = *GetParam();
  if (kernel.quantizes) GTEST_SKIP() << "makes codes itself, and multiplies by no weights with zero points";
  struct Extreme {
    DType codes, zeros;
    std::uint8_t code;
    float zero;
  };
  constexpr Extreme kExtremes[] = {
      {DType::s8, DType::u8, 0x80, 255}, {DType::u8, DType::s8, 255, -128}, {DType::u8b128, DType::u8, 0, 255}};
  constexpr std::int64_t m = 2, n = 3;
  int compared = 0;
  for (const auto& [codes, zeros, code, zero] : kExtremes)
    for (ZeroKind of_acts : {ZeroKind::none, ZeroKind::integer})
      for (const DType out : {DType::f32, DType::s32}) {
        constexpr std::int64_t kWhole = 16;  // channels, without which some kernels do not take a row of codes
        const std::int64_t held = ((std::int64_t{1} << 31) - 1) / (383 * (of_acts == ZeroKind::none ? 128 : 255));
        const std::int64_t most = held / kWhole * kWhole;
        for (const std::int64_t k : {most, most + kWhole}) {
          const ActScheme way{DType::s8, GroupShape::channel(), of_acts};
          SCOPED_TRACE(::testing::Message() << name(codes) << " less " << name(zeros) << ", " << name_of({}, way) << " K=" << k
                                            << " to " << name(out));
          QuantTensor q = random_weight({DType::s8, ZeroKind::integer, GroupShape::channel(), DType::f32}, n, k, 3);
          q.scheme.codes = codes;
          q.zeros = Tensor(zeros, {n, 1});
          for (std::int64_t i = 0; i < n; ++i) q.zeros.set(i, zero);
          std::ranges::fill(q.codes, code);
          const LinearSpec spec{.a_dtype = DType::s8, .m_max = m, .epilogue = {.out = out}, .act_scheme = way};
          const auto weight = pack(q, {.kernel = std::string(kernel.name)});
          if (!weight.ok()) continue;  // not of such codes
          const auto plan = Plan::linear(*weight, spec, {.kernel = std::string(kernel.name)});
          if (!plan.ok()) {
            EXPECT_GT(k, most) << plan.status().message();
            continue;
          }
          EXPECT_TRUE(out == DType::f32 || k <= most) << "sums that 32 bits do not hold";
          Tensor a(DType::s8, {m, k}), a_scale(DType::f32, {m}), a_zero(DType::s32, {m});
          std::ranges::fill(a.bytes, std::byte{0x80});
          for (std::int64_t i = 0; i < m; ++i) a_scale.set(i, 0.25f), a_zero.as<std::int32_t>()[i] = 127;
          Operands args;
          if (out != DType::s32) args.a_scale = view_of(a_scale);
          if (of_acts != ZeroKind::none) args.a_zero = view_of(a_zero);
          Tensor d(out, {m, n});
          const Status ran = run_on_host(*plan, *weight, view_of(a), TensorView(d.bytes.data(), d.dtype, {m, n}), args);
          ASSERT_TRUE(ran.ok()) << ran.message();
          expect_same(d, exact_w8a8(q, view_of(a), spec, args));
          if (HasFatalFailure()) return;
          ++compared;
        }
      }
  EXPECT_GT(compared, 0) << "the kernel took no layer";
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

INSTANTIATE_TEST_SUITE_P(Table, QuantizedConformance, ::testing::ValuesIn(linear_kernels_taking(quantizes_activations)),
                         test_name);
INSTANTIATE_TEST_SUITE_P(Table, ZeroPointBlocksConformance,
                         ::testing::ValuesIn(linear_kernels_taking(takes_blocks_with_zero_points)), test_name);
INSTANTIATE_TEST_SUITE_P(Table, ExactBlocksConformance, ::testing::ValuesIn(linear_kernels_taking(takes_exact_blocks)),
                         test_name);
INSTANTIATE_TEST_SUITE_P(Table, W8A8Conformance, ::testing::ValuesIn(linear_kernels_taking(multiplies_int8)), test_name);

}  // namespace
}  // namespace nibble
