// Layers of experts on a GPU, or on the emulated one: the values of their definition, for every kernel that takes experts.
#include <gtest/gtest.h>

#include <algorithm>

#include "expert_layer.hpp"
#include "kernels/kernel.hpp"
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
    if (const Status here = runs_here(GetParam()->isa); !here.ok()) GTEST_SKIP() << here.message();
  }
};

struct Case {
  const char* scheme;
  Sizes sizes;
  bool hot = false;
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
      {"e2m1g32_e8m0", {}},
      {"e2m1g16_e4m3_f32", {}},
      {"s8r_s8c", {.experts = 5, .tokens = 19, .top_k = 2, .k = 256, .hidden = 128, .n = 72}},
      {"e4m3r_e4m3c", {.experts = 5, .tokens = 19, .top_k = 2, .k = 256, .hidden = 128, .n = 72}},
      {"e4m3g128_e4m3b128x128", {.experts = 5, .tokens = 70, .top_k = 2, .k = 256, .hidden = 128, .n = 136}},
      {"s8r_u4b8g128", {.experts = 5, .tokens = 19, .top_k = 2, .k = 256, .hidden = 128, .n = 72}},
      {"s8zr_u4zg32", {}},
      {"s8g32_u4b8g32", {}},
      {"f16", {}},
  };
  int taken = 0;
  for (const Case& c : cases) {
    const Result<Scheme> scheme = Scheme::parse(c.scheme);
    if (!scheme.ok()) continue;
    for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
      Layer layer(c.scheme, c.sizes, c.hot);
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

INSTANTIATE_TEST_SUITE_P(Table, ExpertConformance, ::testing::ValuesIn(kernels_of_experts()),
                         [](const auto& test) { return std::string(test.param->name); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ExpertConformance);

}  // namespace
}  // namespace nibble
