// Activations as 24-bit fixed point (fixed_point_acts.cu) on the emulated GPU, bit for bit by their definition.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda/steps/fixed_point_acts.cu"
#include "kernels/cuda/tasks/wna8_task.hpp"
#include "layouts/gpu_tile.hpp"

namespace nibble::cuda {
namespace {

struct Case {
  int m, k, fold;
  int padding = 0;  // elements between rows
  bool act_order = false, prescaled = false;
};

class EmulatedFixedPoint : public testing::TestWithParam<Case> {};

/// The least power of two, 2⁻¹²⁵ or more, under which |x| is at most 127·2¹⁶ + 127·2⁸ + 127; NaN of what is no number.
double unit_of(double largest) {
  if (!std::isfinite(largest)) return std::numeric_limits<double>::quiet_NaN();
  double unit = 0x1p-125;
  while (largest / unit > 127 * 65536 + 127 * 256 + 127) unit *= 2;
  return unit;
}

TEST_P(EmulatedFixedPoint, FollowsTheDefinition) {
  const Case& c = GetParam();
  std::mt19937 random(static_cast<unsigned>(c.m * 31 + c.k));
  const int stride = c.k + c.padding;
  std::vector<float> a(static_cast<std::size_t>(c.m * stride)), prescale;
  for (int m = 0; m < c.m; ++m)
    for (int k = 0; k < c.k; ++k) {
      // Folds of all sizes, down to denormal numbers and up to the largest ones.
      const int exponent = (m * 7 + k / c.fold * 13) % 250 - 140 - static_cast<int>(random() % 12);
      a[static_cast<std::size_t>(m * stride + k)] = std::ldexp(static_cast<float>(random()) - 0x1p31f, exponent - 20);
    }
  a[0] = std::numeric_limits<float>::max();
  if (c.m > 2) {
    a[static_cast<std::size_t>(stride + c.k - 1)] = std::numeric_limits<float>::quiet_NaN();
    a[static_cast<std::size_t>(2 * stride)] = -std::numeric_limits<float>::infinity();
  }
  std::vector<std::int32_t> perm(static_cast<std::size_t>(c.k));
  std::iota(perm.begin(), perm.end(), 0);
  if (c.act_order) std::shuffle(perm.begin(), perm.end(), random);
  for (int k = 0; k < c.k; ++k) prescale.push_back(0.25f + static_cast<float>(random() % 1000) / 999);

  const Wna8Map map = wna8_map(c.fold, ZeroKind::none, 3 * c.m, c.k);
  std::vector<float4> memory(map.bytes / sizeof(float4) + 1);
  auto* const bytes = reinterpret_cast<std::int8_t*>(memory.data());
  std::memset(bytes, 0x5a, map.bytes);
  ASSERT_EQ(fixed_point_acts({.a = a.data(),
                              .type = DType::f32,
                              .a_stride = stride,
                              .m = c.m,
                              .k = c.k,
                              .perm = c.act_order ? perm.data() : nullptr,
                              .prescale = c.prescaled ? prescale.data() : nullptr,
                              .codes = bytes,
                              .pitch = map.pitch,
                              .columns = map.pitch,
                              .terms = bytes + map.terms,
                              .term_fold = map.term_pitch,
                              .term_pairs = true,
                              .fold = c.fold},
                             nullptr),
            cudaSuccess);

  const auto term = [&](int fold, int row, int which) {
    float value;
    std::memcpy(&value,
                bytes + map.terms + static_cast<std::size_t>(fold * map.term_pitch + row / 2 * 2) * 8 + row % 2 * 4 + which * 8,
                sizeof value);
    return value;
  };
  for (int m = 0; m < c.m; ++m)
    for (int fold = 0; fold < map.folds; ++fold) {
      std::vector<float> x(static_cast<std::size_t>(c.fold), 0.0f);
      double largest = 0;
      for (int i = 0; i < c.fold && fold * c.fold + i < c.k; ++i) {
        const int channel = perm[static_cast<std::size_t>(fold * c.fold + i)];
        float& v = x[static_cast<std::size_t>(i)];
        v = a[static_cast<std::size_t>(m * stride + channel)];
        if (c.prescaled) v *= prescale[static_cast<std::size_t>(channel)];
        largest =
            std::isfinite(v) ? std::max(largest, std::abs(static_cast<double>(v))) : std::numeric_limits<double>::infinity();
        if (!std::isfinite(largest)) break;
      }
      const double unit = unit_of(largest);
      int sums[3] = {};
      for (int i = 0; i < c.fold; ++i) {
        int position = i / 16 * 16;
        while (gpu_tile::interleaved(position % 16) != i % 16) ++position;
        int value = 0;
        for (int digit = 2; digit >= 0; --digit) {
          const int code = bytes[(3 * m + digit) * map.pitch + fold * c.fold + position];
          value = value * 256 + code;
          sums[digit] += code;
        }
        const double wanted =
            std::isfinite(unit) ? std::nearbyint(static_cast<double>(x[static_cast<std::size_t>(i)]) / unit) : 0;
        ASSERT_EQ(value, wanted) << "token " << m << ", channel " << fold * c.fold + i;
      }
      for (int digit = 0; digit < 3; ++digit) {
        const double scale = unit * (1 << 8 * digit);
        if (std::isfinite(unit)) {
          ASSERT_EQ(term(fold, 3 * m + digit, 0), static_cast<float>(scale)) << m << " " << fold;
          ASSERT_EQ(term(fold, 3 * m + digit, 1), static_cast<float>(scale * sums[digit])) << m << " " << fold;
        } else {
          ASSERT_TRUE(std::isnan(term(fold, 3 * m + digit, 0)) && std::isnan(term(fold, 3 * m + digit, 1))) << m << " " << fold;
        }
      }
    }
}

constexpr Case kCases[] = {
    {1, 128, 128},
    {3, 1024, 128},
    {5, 2500, 128, 0, false, true},
    {4, 1000, 32, 3},
    {7, 416, 32, 0, true},
    {3, 1300, 128, 5, true, true},
    {2, 33, 32, 0, false, true},
};
INSTANTIATE_TEST_SUITE_P(Steps, EmulatedFixedPoint, testing::ValuesIn(kCases), [](const auto& info) {
  const Case& c = info.param;
  return fmt::format("{}x{}_folds_of_{}{}{}{}", c.m, c.k, c.fold, c.padding != 0 ? "_padded" : "",
                     c.act_order ? "_act_order" : "", c.prescaled ? "_prescaled" : "");
});

TEST(EmulatedFixedPoint, RefusesWhatItDoesNotMake) {
  const QuantizeTask task{.type = DType::f16, .m = 1, .k = 128, .columns = 128, .term_pairs = true, .fold = 128};
  EXPECT_EQ(fixed_point_acts(task, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace nibble::cuda
