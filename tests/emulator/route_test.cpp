// Routing on the emulated GPU (route.cu): the choices and weights of route() in host memory.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "emulator/gpu.hpp"
#include "nibble/route.hpp"
#include "nibble/tensor.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) float route_memory[emulator::kSharedBytes / sizeof(float)];  // what the kernel declares extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/steps/route.cu"

namespace nibble::cuda {
namespace {

struct Case {
  const char* name;
  int tokens, experts;
  RouteSpec spec;
  bool bias = false;
  DType type = DType::f32;
};
const Case kCases[] = {
    {"mixtral", 5, 8, {.top_k = 2}},
    {"qwen3", 9, 128, {.top_k = 8}, false, DType::bf16},
    {"deepseek",
     7,
     256,
     {.top_k = 8, .score = RouteScore::sigmoid, .groups = 8, .top_groups = 4, .scale = 2.5f},
     true,
     DType::f16},
    {"scores", 3, 40, {.top_k = 40, .normalize = false}},
    {"many_groups", 4, 96, {.top_k = 5, .groups = 48, .top_groups = 7}, true},
    {"most", 2, 1024, {.top_k = 3}},
    {"one", 6, 1, {}},
};

class EmulatedRoute : public testing::TestWithParam<Case> {};

TEST_P(EmulatedRoute, ChoosesAsInHostMemory) {
  const Case& c = GetParam();
  emulator::use_shared_memory(reinterpret_cast<std::uint8_t*>(route_memory));
  std::mt19937 random(7);
  Tensor logits(c.type, {c.tokens, c.experts}), bias(DType::f32, {c.experts});
  for (std::int64_t i = 0; i < logits.numel(); ++i) {
    // Of few values, so that many are equal; the last token has those that are no numbers.
    float x = static_cast<float>(static_cast<int>(random() % 41) - 20) / 4;
    if (i / c.experts == c.tokens - 1) x = i % 3 == 0 ? NAN : i % 3 == 1 ? -std::numeric_limits<float>::infinity() : x;
    logits.set(i, x);
  }
  for (std::int64_t e = 0; e < c.experts; ++e) bias.set(e, static_cast<float>(random() % 8) / 16);
  const std::int64_t k = c.spec.top_k, pitch = k + 3;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(c.tokens * pitch), -7), wanted_ids = ids;
  std::vector<float> weights(ids.size(), -7.0f), wanted = weights;
  const auto rows = [&](auto* data, DType type) {
    TensorView view(data, type, {c.tokens, k});
    view.strides[0] = pitch;
    return view;
  };
  const ConstTensorView offsets = c.bias ? ConstTensorView(bias.as<float>(), {c.experts}) : ConstTensorView();
  const Status routed = route(ConstTensorView(logits.bytes.data(), c.type, {c.tokens, c.experts}), offsets, c.spec,
                              rows(wanted_ids.data(), DType::s32), rows(wanted.data(), DType::f32));
  ASSERT_TRUE(routed.ok()) << routed.message();
  const auto i = [](std::int64_t x) { return static_cast<int>(x); };
  ASSERT_EQ(route_tokens({.logits = {.data = logits.bytes.data(), .type = c.type, .stride = c.experts},
                          .bias = c.bias ? reinterpret_cast<const float*>(bias.bytes.data()) : nullptr,
                          .tokens = c.tokens,
                          .experts = c.experts,
                          .top_k = i(k),
                          .groups = i(c.spec.groups),
                          .top_groups = i(c.spec.top_groups),
                          .sigmoid = c.spec.score == RouteScore::sigmoid,
                          .normalize = c.spec.normalize,
                          .scale = c.spec.scale,
                          .ids = ids.data(),
                          .id_token = pitch,
                          .id_choice = 1,
                          .weights = weights.data(),
                          .weight_token = pitch,
                          .weight_choice = 1},
                         nullptr),
            cudaSuccess);
  EXPECT_EQ(ids, wanted_ids);
  for (std::size_t at = 0; at < weights.size(); ++at) ASSERT_NEAR(weights[at], wanted[at], 2e-6f * std::abs(wanted[at])) << at;
}

INSTANTIATE_TEST_SUITE_P(Steps, EmulatedRoute, testing::ValuesIn(kCases), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace nibble::cuda
