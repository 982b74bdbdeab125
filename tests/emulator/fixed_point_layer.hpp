// f32 activations × a weight in gpu_n64k128 in three steps, for tests of the kernels that take the second: fixed point, the product of its
// three bytes, their sum. The launchers of the other steps are those of fixed_point_test.cpp and epilogue_rows_test.cpp.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "emulator/tile_weight.hpp"
#include "kernels/cuda/steps/epilogue_rows.hpp"
#include "kernels/cuda/steps/fixed_point_acts.hpp"
#include "kernels/cuda/tasks/wna8_task.hpp"

namespace nibble::emulator {

struct FixedPointCase {
  int bits, group;  // of the weight
  ZeroKind zero;
  int m, n, k;
  bool floats = false;  // e2m1 codes

  gpu_tile::Codes codes() const { return floats ? gpu_tile::Codes::e2m1 : gpu_tile::integers(bits); }
  int fold() const {
    const int span = gpu_tile::span(group);
    return zero != ZeroKind::offset && !floats && span == gpu_tile::kChannels ? span : std::min(span, 32);
  }
};

/// Activations whose folds have different magnitudes, and a NaN in the last token. `launch` multiplies codes.
template <class Launch>
void expect_f32_product(const FixedPointCase& c, Launch launch) {
  std::mt19937 random(static_cast<unsigned>(c.m * 31 + c.n * 7 + c.k));
  const TileWeight weight(c.n, c.k, c.codes(), c.group, c.zero, random);
  std::vector<float> a;
  for (int i = 0; i < c.m * c.k; ++i)
    a.push_back(std::ldexp(static_cast<float>(random() % 200001) - 100000, -20 - i / c.fold() % 5 * 3));
  a.back() = std::numeric_limits<float>::quiet_NaN();

  const cuda::Wna8Map map = cuda::wna8_map(c.fold(), ZeroKind::none, 3 * c.m, c.k);
  std::vector<float4> memory(map.bytes / sizeof(float4) + 1);
  auto* const prepared = reinterpret_cast<std::uint8_t*>(memory.data());
  ASSERT_EQ(cuda::fixed_point_acts({.a = a.data(),
                                    .type = DType::f32,
                                    .a_stride = c.k,
                                    .m = c.m,
                                    .k = c.k,
                                    .codes = prepared,
                                    .pitch = map.pitch,
                                    .columns = map.pitch,
                                    .terms = prepared + map.terms,
                                    .term_fold = map.term_pitch,
                                    .term_pairs = true,
                                    .fold = c.fold()},
                                   nullptr),
            cudaSuccess);

  const int stride = (c.n + 7) / 8 * 8;
  std::vector<float> sums(static_cast<std::size_t>(3 * c.m * stride), std::numeric_limits<float>::quiet_NaN());
  cuda::Wna8Task task{.weight = weight.device(),
                      .m = 3 * c.m,
                      .codes = prepared,
                      .pitch = map.pitch,
                      .terms = prepared + map.terms,
                      .term_pitch = map.term_pitch,
                      .fold = c.fold()};
  task.epilogue.d = sums.data();
  task.epilogue.d_stride = stride;
  ASSERT_EQ(launch(task), cudaSuccess);

  std::vector<float> d(static_cast<std::size_t>(c.m * c.n));
  epilogue::Element epilogue;
  epilogue.d = d.data();
  epilogue.d_stride = c.n;
  ASSERT_EQ(cuda::epilogue_rows(epilogue, {.data = sums.data(), .stride = stride, .each = 3}, c.m, c.n, nullptr), cudaSuccess);

  // docs/accuracy.md: the dot product, fixed point, and the two sums of weights with zero points.
  for (int m = 0; m + 1 < c.m; ++m)
    for (int n = 0; n < c.n; ++n) {
      double sum = 0, magnitude = 0, parts = 0, moved = 0;
      for (int begin = 0; begin < c.k; begin += c.fold()) {
        double largest = 0, weights = 0;
        for (int k = begin; k < std::min(c.k, begin + c.fold()); ++k) {
          const double x = static_cast<double>(a[static_cast<std::size_t>(m * c.k + k)]), w = weight.value(n, k);
          sum += x * w, magnitude += std::abs(x * w), weights += std::abs(w), largest = std::max(largest, std::abs(x));
          parts += std::abs(x) *
                   (static_cast<double>(weight.scale(n, k)) * (4 << c.bits) + std::abs(static_cast<double>(weight.offset(n, k))));
        }
        moved += largest * weights;
      }
      const double bound = (7 * std::sqrt(c.k) + 3) * 0x1p-24 * magnitude + 4 * 0x1p-24 * parts + 1.01 * 0x1p-23 * moved;
      const double got = static_cast<double>(d[static_cast<std::size_t>(m * c.n + n)]);
      ASSERT_LE(std::abs(got - sum), bound) << "D[" << m << "," << n << "] is " << got << ", expected " << sum;
    }
  for (int n = 0; n < c.n; ++n)
    ASSERT_TRUE(std::isnan(d[static_cast<std::size_t>((c.m - 1) * c.n + n)])) << "D[last," << n << "]";
}

}  // namespace nibble::emulator
