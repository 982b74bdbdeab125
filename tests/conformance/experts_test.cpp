// Layers of experts on a GPU, or on the emulated one: the values of their definition, for every kernel that takes experts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "expert_layer.hpp"
#include "kernels/kernel.hpp"
#include "quantize/act_rule.hpp"
#include "rows.hpp"

namespace nibble {
namespace {

using testing::distance;
using testing::Layer;
using testing::Sizes;

std::vector<const Kernel*> kernels_of_experts() {
  std::vector<const Kernel*> list;
  for (const Kernel& kernel : kernel_table())
    if (kernel.expert_rows != 0 && is_built(kernel)) list.push_back(&kernel);
  return list;
}

class ExpertConformance : public ::testing::TestWithParam<const Kernel*> {
 protected:
  void SetUp() override {
    if (const Status here = runs_there(*GetParam(), {}); !here.ok()) GTEST_SKIP() << here.message();
  }
};

struct Case {
  const char* scheme;
  Sizes sizes;
  bool hot = false;
  DType scale = DType::f16;
};

TEST_P(ExpertConformance, LayersAreTheirDefinition) {
  const Kernel& kernel = *GetParam();
  const Case cases[] = {
      {"u4zg32", {}},
      {"u4b8g128", {.experts = 9, .tokens = 21, .top_k = 2, .k = 256, .hidden = 128, .n = 200}, true},
      {"u4b8g128", {.experts = 40, .tokens = 1, .top_k = 4, .k = 256, .hidden = 128, .n = 72}},
      {"u4og64", {.experts = 4, .tokens = 5, .top_k = 2}},
      {"s8c", {.experts = 3, .tokens = 7, .top_k = 1}},
      {"e4m3c", {}},
      {"e2m1g32", {}, false, DType::e8m0},
      {"e2m1g16", {}, false, DType::e4m3},
      {"s8r_s8c", {.experts = 5, .tokens = 19, .top_k = 2, .k = 256, .hidden = 128, .n = 72}},
      {"e4m3r_e4m3c", {.experts = 5, .tokens = 19, .top_k = 2, .k = 256, .hidden = 128, .n = 72}},
      {"e4m3g128_e4m3b128x128", {.experts = 5, .tokens = 70, .top_k = 2, .k = 256, .hidden = 128, .n = 136}},
      {"e4m3r_u4b8g128", {.experts = 5, .tokens = 19, .top_k = 2, .k = 256, .hidden = 128, .n = 72}},
      {"s8r_u4b8g128", {.experts = 5, .tokens = 19, .top_k = 2, .k = 256, .hidden = 128, .n = 72}},
      {"s8zr_u4zg32", {}},
      {"s8g32_u4b8g32", {}},
      {"f16", {}},
  };
  int taken = 0;
  for (const Case& c : cases) {
    const Result<Scheme> scheme = Scheme::parse(c.scheme, c.scale);
    ASSERT_TRUE(scheme.ok()) << scheme.status().message();
    for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
      Layer layer(c.scheme, c.sizes, c.hot, c.scale);
      layer.set_type(type);
      if (!layer.is_taken(kernel)) continue;
      ++taken;
      const double unit = type == DType::f32 ? 0x1p-20 : type == DType::f16 ? 0x1p-10 : 0x1p-7;
      const double far =
          scheme->act.codes == DType::none ? 2 * unit : 2e-2 + 2 * unit + (scheme->act.codes == DType::e4m3 ? 0.04 : 0);
      EXPECT_LT(distance(layer.run_on_gpu(std::string(kernel.name)), layer.expected()), far) << c.scheme << " of " << name(type);
    }
  }
  EXPECT_GT(taken, 0);
}

TEST_P(ExpertConformance, ResultsHaveTheTypeThatDownWrites) {
  const Kernel& kernel = *GetParam();
  for (const std::int64_t n : {72, 75})  // vectors, and columns one by one
    for (const DType type : {DType::f16, DType::bf16}) {
      Layer layer("u4b8g128", {.experts = 6, .tokens = 9, .top_k = 1, .k = 256, .hidden = 128, .n = n});
      layer.set_type(type);
      if (!layer.is_taken(kernel)) continue;
      std::ranges::fill(layer.router, 1.0f);
      std::ranges::fill(layer.residual, 0.0f);
      for (const float x : layer.run_on_gpu(std::string(kernel.name))) {
        Tensor rounded(type, {1});
        rounded.set(0, x);
        ASSERT_EQ(rounded.at(0), x) << name(type);
      }
    }
}

TEST_P(ExpertConformance, TokensMayHaveFewerExpertsAndNone) {
  const Kernel& kernel = *GetParam();
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    Layer layer("u4b8g128", {.experts = 6, .tokens = 9, .top_k = 3, .k = 256, .hidden = 128, .n = 72});
    layer.set_type(type);
    if (!layer.is_taken(kernel)) continue;
    for (std::size_t i = 0; i < layer.ids.size(); i += 2) layer.ids[i] = i % 4 == 0 ? -1 : 77;  // both are none
    auto wanted = layer;
    std::ranges::replace(wanted.ids, 77, -1);
    EXPECT_LT(distance(layer.run_on_gpu(std::string(kernel.name)), wanted.expected()), 0x1p-6);
    std::ranges::fill(layer.ids, -1);
    EXPECT_EQ(layer.run_on_gpu(std::string(kernel.name)), layer.residual);
  }
}

/// Products of rows that are sorted by expert, gathered, and padded, with the operands of each, against the same on the CPU.
TEST_P(ExpertConformance, GroupedRowsInEveryForm) {
  const std::string kernel(GetParam()->name);
  constexpr std::int64_t kExperts = 4, kMost = 21, kN = 72, kK = 256, kTokens = 5;
  const std::vector<std::int32_t> counts{3, 0, kMost, 1}, offsets{0, 3, 3, 24, 25};
  const std::int64_t rows = offsets.back(), all = kExperts * kMost;
  std::vector<std::int32_t> places;
  for (std::int64_t i = 0; i < rows; ++i) places.push_back(static_cast<std::int32_t>(i * 3 % kTokens));
  int taken = 0;
  for (const char* text : {"u4b8g128", "f16", "s8r_u4b8g128", "s8r_s8c", "e4m3r_u4b8g128", "e4m3g128_u4b8g128", "e4m3r_e4m3c",
                           "e4m3g128_e4m3b128x128"})
    for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::s8, DType::e4m3}) {
      const Scheme scheme = *Scheme::parse(text);
      const bool floats = is_compute_float(type);
      if (!floats && scheme.act.codes != type) continue;
      const LinearSpec spec{.a_dtype = type,
                            .m_max = all,
                            .epilogue = {.row_scale = true, .bias = true, .residual = true, .out = floats ? type : DType::bf16},
                            .act_scheme = scheme.act};
      const auto weights = testing::weights_of(scheme.weight.name().c_str(), kExperts, kN, kK, 1, {.bias = true});
      const auto experts = pack_experts(weights, spec, {.kernel = kernel, .backend = Backend::cuda});
      if (!experts.ok()) continue;
      const auto plan = GroupedPlan::make(*experts, spec, {.kernel = kernel});
      if (!plan.ok()) continue;
      ++taken;
      const auto host = pack_experts(weights, spec);
      const auto on_host = GroupedPlan::make(*host, spec);
      ASSERT_TRUE(on_host.ok()) << on_host.status().message();

      // Of sorted rows, and the same in [E,kMost,…], between values that are not to be read.
      const std::int64_t groups = spec.act_scheme.group.k == 0 ? 1 : kK / spec.act_scheme.group.k;
      Tensor a(type, {rows, kK}), tokens(type, {kTokens, kK}), padded_a(type, {all, kK});
      for (Tensor* each : {&a, &tokens})
        for (std::int64_t i = 0; i < each->numel(); ++i) {
          const float x = testing::random_floats(1, static_cast<std::uint64_t>(i)).front();
          if (type == DType::e4m3)
            each->bytes[static_cast<std::size_t>(i)] = static_cast<std::byte>(act_rule::to_e4m3(x));
          else
            each->set(i, type == DType::s8 ? std::round(100 * x) : x);
        }
      const auto scale = testing::random_floats(rows, 2), residual = testing::random_floats(rows * kN, 3),
                 a_scale = testing::random_floats(rows * groups, 4);
      const auto padded = [&](const auto& of, std::int64_t columns, auto filler) {
        std::remove_cvref_t<decltype(of)> to(static_cast<std::size_t>(all * columns), filler);
        for (std::size_t e = 0; e < kExperts; ++e)
          std::copy_n(of.begin() + offsets[e] * columns, counts[e] * columns,
                      to.begin() + static_cast<std::int64_t>(e) * kMost * columns);
        return to;
      };
      padded_a.bytes = padded(a.bytes, kK * bits(type) / 8, std::byte{0x7f});
      const auto view_of = [&](const void* data, std::int64_t count) {
        ConstTensorView view(data, DType::f32, {count, groups});
        if (spec.act_scheme.group.k == 0) view = ConstTensorView(data, DType::f32, {count});
        return floats ? ConstTensorView() : view;
      };
      const auto operands = [&](const float* of_scale, const float* of_residual, const float* of_a, std::int64_t count) {
        return Operands{.a_scale = view_of(of_a, count),
                        .row_scale = ConstTensorView(of_scale, {count}),
                        .residual = ConstTensorView(of_residual, {count, kN})};
      };
      const auto values = [&](const Tensor& d) {
        std::vector<float> all_values;
        for (std::int64_t i = 0; i < d.numel(); ++i) all_values.push_back(d.at(i));
        return all_values;
      };
      const auto expected = [&](const Tensor& from, const ExpertRows& which) {
        Tensor d(spec.epilogue.out, {rows, kN});
        std::vector<std::byte> workspace(on_host->workspace_bytes());
        const Status status = on_host->run(*host, ConstTensorView(from.bytes.data(), type, {from.shape[0], kK}), which,
                                           TensorView(d.bytes.data(), d.dtype, {rows, kN}),
                                           operands(scale.data(), residual.data(), a_scale.data(), rows), workspace);
        EXPECT_TRUE(status.ok()) << status.message();
        const std::vector<float> got = values(d);
        return std::vector<double>(got.begin(), got.end());
      };
      const testing::Copied of_scale(scale), of_residual(residual), of_a(a_scale), of_offsets(offsets), of_counts(counts),
          of_places(places);
      const testing::Copied workspace(std::vector<std::byte>(plan->workspace_bytes(), std::byte{0xff}));
      const auto run = [&](const Tensor& from, std::initializer_list<std::int64_t> a_shape, const ExpertRows& which,
                           std::initializer_list<std::int64_t> d_shape, const Operands& with) {
        const testing::Copied x(from.bytes), d(std::vector<float>(static_cast<std::size_t>(all * kN), 7.0f));
        Tensor result(spec.epilogue.out, {all, kN});
        const Status status = plan->run(*experts, ConstTensorView(x.memory.data(), type, a_shape), which,
                                        TensorView(d.memory.data(), spec.epilogue.out, d_shape), with,
                                        {workspace.memory.data(), plan->workspace_bytes()}, Stream{});
        EXPECT_TRUE(status.ok()) << status.message();
        EXPECT_TRUE(copy_from_device(result.bytes.data(), d.memory.data(), result.bytes.size()).ok());
        return values(result);
      };
      const Operands sorted_operands = operands(of_scale.as<float>(), of_residual.as<float>(), of_a.as<float>(), rows);
      const ExpertRows sorted{.offsets = ConstTensorView(of_offsets.as<std::int32_t>(), {kExperts + 1})};
      const double unit = spec.epilogue.out == DType::f32 ? 0x1p-18 : spec.epilogue.out == DType::f16 ? 0x1p-9 : 0x1p-6;
      const double far = floats && scheme.act.codes != DType::none ? 2e-2 + 0.04 + unit : unit;  // codes may fall the other way
      const std::string what = std::string(text) + " of " + std::string(name(type));
      const auto first_rows = [&](std::vector<float> of) { return of.resize(static_cast<std::size_t>(rows * kN)), of; };

      const std::vector<double> wanted = expected(a, {.offsets = ConstTensorView(offsets.data(), {kExperts + 1})});
      EXPECT_LT(distance(first_rows(run(a, {rows, kK}, sorted, {rows, kN}, sorted_operands)), wanted), far) << what;
      if (floats) {
        ExpertRows gathered = sorted;
        gathered.rows = ConstTensorView(of_places.as<std::int32_t>(), {rows});
        const ExpertRows on_cpu{.offsets = ConstTensorView(offsets.data(), {kExperts + 1}),
                                .rows = ConstTensorView(places.data(), {rows})};
        EXPECT_LT(
            distance(first_rows(run(tokens, {kTokens, kK}, gathered, {rows, kN}, sorted_operands)), expected(tokens, on_cpu)),
            far)
            << what;
      }
      if (floats) {  // 5 tokens of 5 experts each, some of which are none
        LinearSpec by_ids = spec;
        by_ids.epilogue.row_scale = false;
        const auto plan_of_ids = GroupedPlan::make(*experts, by_ids, {.kernel = kernel}),
                   host_of_ids = GroupedPlan::make(*host, by_ids);
        ASSERT_TRUE(plan_of_ids.ok() && host_of_ids.ok()) << plan_of_ids.status().message();
        std::vector<std::int32_t> ids;
        for (std::int32_t i = 0; i < rows; ++i) ids.push_back(i % 7 == 3 ? -1 : i * 5 % 4 == 1 ? 2 : i * 5 % 4);
        const testing::Copied of_ids(ids), scratch(std::vector<std::byte>(plan_of_ids->ids_workspace_bytes(), std::byte{0xff}));
        const ExpertRows on_gpu{.ids = ConstTensorView(of_ids.as<std::int32_t>(), {kTokens, kTokens})},
            on_cpu{.ids = ConstTensorView(ids.data(), {kTokens, kTokens})};
        for (const Tensor* each : {&tokens, &a}) {  // a row for each token, and one for each pair
          Tensor right(spec.epilogue.out, {rows, kN}), got(spec.epilogue.out, {rows, kN});
          std::vector<std::byte> host_scratch(host_of_ids->ids_workspace_bytes());
          const Status of_host = host_of_ids->run(*host, ConstTensorView(each->bytes.data(), type, {each->shape[0], kK}), on_cpu,
                                                  TensorView(right.bytes.data(), right.dtype, {rows, kN}),
                                                  {.residual = ConstTensorView(residual.data(), {rows, kN})}, host_scratch);
          ASSERT_TRUE(of_host.ok()) << of_host.message();
          const testing::Copied x(each->bytes), d(std::vector<float>(static_cast<std::size_t>(rows * kN), 7.0f));
          const ConstTensorView from(x.memory.data(), type, {each->shape[0], kK});
          const TensorView to(d.memory.data(), got.dtype, {rows, kN});
          const std::span<std::byte> workspace_of_ids(scratch.memory.data(), scratch.memory.size());
          const Status ran =
              plan_of_ids->run(*experts, from, on_gpu, to, {.residual = ConstTensorView(of_residual.as<float>(), {rows, kN})},
                               workspace_of_ids, Stream{});
          ASSERT_TRUE(ran.ok()) << ran.message();
          ASSERT_TRUE(copy_from_device(got.bytes.data(), d.memory.data(), got.bytes.size()).ok());
          const std::vector<float> exact = values(right);
          EXPECT_LT(distance(values(got), std::vector<double>(exact.begin(), exact.end())), far) << what << " by ids";
          EXPECT_NE(
              plan->run(*experts, from, on_gpu, to, sorted_operands, workspace_of_ids, Stream{}).message().find("row_scale"),
              std::string::npos);
        }
      }
      const testing::Copied p_scale(padded(scale, 1, NAN)), p_residual(padded(residual, kN, NAN)),
          p_a(padded(a_scale, groups, NAN));
      const std::vector<float> got =
          run(padded_a, {kExperts, kMost, kK}, {.counts = ConstTensorView(of_counts.as<std::int32_t>(), {kExperts})},
              {kExperts, kMost, kN}, operands(p_scale.as<float>(), p_residual.as<float>(), p_a.as<float>(), all));
      std::vector<float> written;
      for (std::size_t e = 0; e < kExperts; ++e)
        for (std::int64_t i = 0; i < kMost * kN; ++i) {
          const float value = got[e * kMost * kN + static_cast<std::size_t>(i)];
          if (i < counts[e] * kN)
            written.push_back(value);
          else
            ASSERT_EQ(value, got[kMost * kN + static_cast<std::size_t>(i % 2)])  // of an expert without rows
                << what << ": written, expert " << e << " element " << i;
        }
      EXPECT_LT(distance(written, wanted), far) << what << " padded";
    }
  EXPECT_GT(taken, 0);
}

INSTANTIATE_TEST_SUITE_P(Table, ExpertConformance, ::testing::ValuesIn(kernels_of_experts()),
                         [](const auto& test) { return std::string(test.param->name); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ExpertConformance);

}  // namespace
}  // namespace nibble
