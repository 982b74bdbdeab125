// f32 activations × a weight in gpu_n64k128 in two steps, for tests of the kernels that take the second: pairs of f16, and their product.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "emulator/tile_weight.hpp"
#include "kernels/cuda/steps/pair_acts.hpp"
#include "kernels/cuda/tasks/pair_task.hpp"

namespace nibble::emulator {

struct PairCase {
  gpu_tile::Codes codes;  // of the weight
  int group;
  ZeroKind zero;
  int m, n, k;
};

/// Activations of very different magnitudes, and a NaN in the last token; every fifth group of the weight has a scale of 0. `launch`
/// multiplies pairs.
template <class Launch>
void expect_pair_product(const PairCase& c, Launch launch) {
  std::mt19937 random(static_cast<unsigned>(c.m * 31 + c.n * 7 + c.k));
  TileWeight weight(c.n, c.k, c.codes, c.group, c.zero, random);
  for (std::size_t i = 0; i < weight.scales.size(); ++i)
    weight.scales[i] =
        to_f16(i % 5 == 2 ? 0.0f : std::ldexp(to_f32(weight.scales[i]), static_cast<int>(i % 7) - 3) * (i % 3 == 0 ? -1 : 1));
  weight.repack();
  std::vector<float> a;
  for (int i = 0; i < c.m * c.k; ++i)
    a.push_back(std::ldexp(static_cast<float>(random() % 16777213) - 8388606, -40 - i / 64 % 5 * 3 + i / c.k % 7 * 9));
  a.back() = std::numeric_limits<float>::quiet_NaN();

  const cuda::PairMap map = cuda::pair_map(c.m, c.k);
  std::vector<float4> memory(map.bytes / sizeof(float4) + 1);
  auto* const prepared = reinterpret_cast<std::uint8_t*>(memory.data());
  auto* const scales = reinterpret_cast<float*>(prepared + map.scales);
  ASSERT_EQ(cuda::pair_acts({.a = a.data(),
                             .type = DType::f32,
                             .a_stride = c.k,
                             .m = c.m,
                             .k = c.k,
                             .codes = prepared,
                             .pitch = 2 * map.pitch,
                             .columns = map.pitch / 2,
                             .token_scales = scales},
                            nullptr),
            cudaSuccess);

  std::vector<float> d(static_cast<std::size_t>(c.m * c.n), std::numeric_limits<float>::quiet_NaN());
  cuda::PairTask task{.weight = weight.device(), .m = c.m, .x = prepared, .pitch = map.pitch, .scales = scales};
  task.epilogue.d = d.data();
  task.epilogue.d_stride = c.n;
  ASSERT_EQ(launch(task), cudaSuccess);

  // docs/accuracy.md: the dot product, and what pairs lose.
  for (int m = 0; m + 1 < c.m; ++m)
    for (int n = 0; n < c.n; ++n) {
      double sum = 0, magnitude = 0, weights = 0, largest = 0;
      for (int k = 0; k < c.k; ++k) {
        const double x = static_cast<double>(a[static_cast<std::size_t>(m * c.k + k)]), w = weight.value(n, k);
        sum += x * w, magnitude += std::abs(x * w), weights += std::abs(w), largest = std::max(largest, std::abs(x));
      }
      const double bound = (7 * std::sqrt(c.k) + 3) * 0x1p-24 * magnitude + 0x1p-39 * largest * weights;
      const double got = static_cast<double>(d[static_cast<std::size_t>(m * c.n + n)]);
      ASSERT_LE(std::abs(got - sum), bound) << "D[" << m << "," << n << "] is " << got << ", expected " << sum;
    }
  for (int n = 0; n < c.n; ++n)
    ASSERT_TRUE(std::isnan(d[static_cast<std::size_t>((c.m - 1) * c.n + n)])) << "D[last," << n << "]";
}

}  // namespace nibble::emulator
