// f32 activations as pairs of f16 (pair_acts.cu) and the sm_90 GEMM of them, on the emulated GPU: the kernels as they are. The GEMM's launcher
// is gemm_test.cpp's.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "emulator/memory.hpp"
#include "emulator/pair_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm90/gemm/gemm_pairs.cu"
#include "kernels/cuda/sm90/gemm/gemm_pairs_float_codes.cu"
#undef __shared__
#define __shared__ static
#include "kernels/cuda/steps/pair_acts.cu"
#include "kernels/cuda/tasks/pairs.hpp"

namespace nibble::cuda {
namespace {

using gpu_tile::Codes;

// ---- activations

struct ActsCase {
  int m, k;
  int padding = 0;  // elements between rows
  bool act_order = false, prescaled = false;
};

class EmulatedPairActs : public testing::TestWithParam<ActsCase> {};

TEST_P(EmulatedPairActs, FollowTheDefinition) {
  const ActsCase& c = GetParam();
  std::mt19937 random(static_cast<unsigned>(c.m * 31 + c.k));
  const int stride = c.k + c.padding;
  std::vector<float> a(static_cast<std::size_t>(c.m * stride)), prescale;
  for (int m = 0; m < c.m; ++m)
    for (int k = 0; k < c.k; ++k) {
      // Tokens of all sizes, down to denormal numbers and up to the largest ones.
      const int exponent = (m * 97) % 250 - 143 - static_cast<int>(random() % 30);
      a[static_cast<std::size_t>(m * stride + k)] = std::ldexp(static_cast<float>(random()) - 0x1p31f, exponent - 8);
    }
  a[0] = std::numeric_limits<float>::max();
  if (c.m > 2) {
    a[static_cast<std::size_t>(stride + c.k - 1)] = std::numeric_limits<float>::quiet_NaN();
    a[static_cast<std::size_t>(2 * stride)] = -std::numeric_limits<float>::infinity();
  }
  std::vector<std::int32_t> perm(static_cast<std::size_t>(c.k));
  std::iota(perm.begin(), perm.end(), 0);
  if (c.act_order) std::shuffle(perm.begin(), perm.end(), random);
  for (int k = 0; k < c.k; ++k) prescale.push_back(0.25f + static_cast<float>(random() % 1000) / 999 / 2);

  const PairMap map = pair_map(c.m, c.k);
  std::vector<float4> memory(map.bytes / sizeof(float4) + 1);
  auto* const bytes = reinterpret_cast<std::uint8_t*>(memory.data());
  std::memset(bytes, 0x5a, map.bytes);
  auto* const scales = reinterpret_cast<float*>(bytes + map.scales);
  ASSERT_EQ(pair_acts({.a = a.data(),
                       .type = DType::f32,
                       .a_stride = stride,
                       .m = c.m,
                       .k = c.k,
                       .perm = c.act_order ? perm.data() : nullptr,
                       .prescale = c.prescaled ? prescale.data() : nullptr,
                       .codes = bytes,
                       .pitch = 2 * map.pitch,
                       .columns = map.pitch / 2,
                       .token_scales = scales},
                      nullptr),
            cudaSuccess);
  for (int m = 0; m < c.m; ++m) {
    std::vector<float> x(static_cast<std::size_t>(map.pitch / 2), 0.0f);
    double largest = 0;
    for (int k = 0; k < c.k; ++k) {
      const int channel = perm[static_cast<std::size_t>(k)];
      float& v = x[static_cast<std::size_t>(k)];
      v = a[static_cast<std::size_t>(m * stride + channel)];
      if (c.prescaled) v *= prescale[static_cast<std::size_t>(channel)];
      largest = std::isfinite(v) ? std::max(largest, std::abs(static_cast<double>(v))) : std::numeric_limits<double>::infinity();
      if (!std::isfinite(largest)) break;
    }
    if (!std::isfinite(largest)) {
      ASSERT_TRUE(std::isnan(scales[m])) << m;
      continue;
    }
    double unit = 0x1p-126;
    while (largest / unit >= 0x1p15) unit *= 2;
    ASSERT_EQ(static_cast<double>(scales[m]), unit) << m;
    const auto part = [&](int k, int which) {
      std::uint16_t half;
      std::memcpy(&half, bytes + 2 * (m * map.pitch + k / 64 * 128 + which * 64 + k % 64), 2);
      return static_cast<double>(to_f32(f16{half}));
    };
    for (int k = 0; k < map.pitch / 2; ++k) {
      const double wanted = static_cast<double>(x[static_cast<std::size_t>(k)]) / unit;
      ASSERT_EQ(part(k, 0), static_cast<double>(to_f32(to_f16(static_cast<float>(wanted))))) << m << " " << k;
      ASSERT_LE(std::abs(part(k, 0) + part(k, 1) - wanted), std::max(0x1p-23 * std::abs(wanted), 0x1p-25)) << m << " " << k;
    }
  }
}

constexpr ActsCase kActs[] = {
    {1, 128},
    {3, 1024},
    {5, 2500, 0, false, true},
    {4, 1000, 3},
    {7, 416, 0, true},
    {3, 8300, 5, true, true},
    {2, 33, 0, false, true},
};
INSTANTIATE_TEST_SUITE_P(Steps, EmulatedPairActs, testing::ValuesIn(kActs), [](const auto& info) {
  const ActsCase& c = info.param;
  return fmt::format("{}x{}{}{}{}", c.m, c.k, c.padding != 0 ? "_padded" : "", c.act_order ? "_act_order" : "",
                     c.prescaled ? "_prescaled" : "");
});

TEST(EmulatedPairActs, RefuseWhatTheyDoNotMake) {
  float scale = 0;
  const QuantizeTask task{.type = DType::f16, .m = 1, .k = 128, .columns = 128, .token_scales = &scale};
  EXPECT_EQ(pair_acts(task, nullptr), cudaErrorInvalidValue);
}

// ---- layers

struct Case {
  emulator::PairCase layer;
  GemmConfig config;
};

class EmulatedPairs : public testing::TestWithParam<Case> {};

TEST_P(EmulatedPairs, GiveTheSumsOfTheLayer) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  emulator::StreamKMemory scratch(c.config.tokens);
  emulator::expect_pair_product(c.layer, [&](PairTask task) {
    task.scratch_end = scratch.end();
    return linear_pairs_sm90(task, c.config, nullptr);
  });
}

// Rows, tokens and channels with tails, and more records than a ring has stages; every distribution of passes, every kind of weight.
constexpr auto kNone = ZeroKind::none, kInteger = ZeroKind::integer;
constexpr Case kCases[] = {
    {{Codes::u4, 128, kNone, 4, 72, 1000}, {.tokens = 16, .split = 2, .depth = 2}},
    {{Codes::u4, 128, kInteger, 20, 72, 640}, {.tokens = 32, .split = 1, .depth = 1}},
    {{Codes::u4, 128, kInteger, 70, 136, 272}, {.tokens = 64, .split = 1, .depth = 1}},
    {{Codes::u4, 256, kNone, 130, 72, 512}, {.tokens = 128, .split = 1, .depth = 1}},
    {{Codes::u4, 32, kInteger, 9, 72, 416}, {.tokens = 16, .split = 1, .depth = 4}},
    {{Codes::u4, 64, kNone, 20, 72, 400}, {.tokens = 64, .split = 4, .depth = 1}},
    {{Codes::u4, 96, kInteger, 20, 136, 384}, {.tokens = 128, .split = kStreamK, .depth = 1}},
    {{Codes::u4, 48, kInteger, 12, 72, 288}, {.tokens = 16, .split = 1, .depth = 1}},
    {{Codes::u8, 128, kInteger, 20, 72, 384}, {.tokens = 128, .split = 2, .depth = 1}},
    {{Codes::u8, 32, kNone, 33, 72, 272}, {.tokens = 64, .split = kStreamK, .depth = 1}},
    {{Codes::u4, 1024, kInteger, 20, 72, 1024}, {.tokens = 32, .split = 2, .depth = 2}},
    {{Codes::e4m3, 128, kNone, 20, 72, 400}, {.tokens = 64, .split = 1, .depth = 1}},
    {{Codes::e2m1, 32, kNone, 20, 72, 272}, {.tokens = 32, .split = 1, .depth = 1}},
    {{Codes::e2m1, 16, kNone, 5, 72, 272}, {.tokens = 16, .split = 1, .depth = 1}},
};
std::string name(const Case& c) {
  const char* const codes[] = {"u4", "u8", "e2m1", "e4m3", "e5m2"};
  return fmt::format("{}g{}{}_m{}_n{}_k{}_{}_depth{}{}", codes[static_cast<int>(c.layer.codes)], c.layer.group,
                     c.layer.zero == kInteger ? "_zeros" : "", c.layer.m, c.layer.n, c.layer.k, c.config.tokens, c.config.depth,
                     c.config.split == kStreamK ? "_streamk" : fmt::format("_split{}", c.config.split));
}
INSTANTIATE_TEST_SUITE_P(Gemm, EmulatedPairs, testing::ValuesIn(kCases), [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace nibble::cuda
