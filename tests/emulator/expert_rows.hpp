// Rows of experts for the kernels of float activations: layers whose rows follow one another, and the list of their tiles.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "emulator/float_layer.hpp"
#include "kernels/cuda/tasks/linear_task.hpp"

namespace nibble::emulator {

/// Experts with such numbers of rows, in tiles of up to `tokens` rows.
struct ExpertCase {
  FloatCase layer;  // of an expert, without its m
  int tokens;
  std::vector<int> rows;
};

inline std::string name(const ExpertCase& c) { return fmt::format("{}_{}", name(c.layer), c.tokens); }

/// Expects of launch(task) the sums of each expert, times its scale2, and nothing past the last row. multiplied(weight, row, k): what the kernel
/// multiplies by. fetches: rows of A lie in the reverse order, from where the kernel fetches them.
template <class Launch, class MultipliedAt>
void expect_sums_of_experts(const ExpertCase& c, Launch launch, MultipliedAt multiplied, bool fetches = false) {
  std::vector<FloatLayer> layers;
  std::vector<cuda::ExpertTile> tiles;
  std::vector<std::uint8_t> records;
  std::vector<std::uint16_t> x;
  std::size_t pitch = 0;
  int m = 0;
  for (const int rows : c.rows) {
    const int expert = static_cast<int>(layers.size());
    FloatCase one = c.layer;
    one.m = std::max(rows, 1);
    layers.emplace_back(one).scales_tokens = false;
    pitch = (layers.back().weight.records.size() + 255) / 256 * 256;
    records.insert(records.end(), layers.back().weight.records.begin(), layers.back().weight.records.end());
    records.resize(pitch * layers.size());
    if (rows > 0) x.insert(x.end(), layers.back().x.begin(), layers.back().x.end());
    for (int first = 0; first < rows; first += c.tokens) tiles.push_back({expert, m + first, std::min(c.tokens, rows - first)});
    m += rows;
  }
  const int count = static_cast<int>(tiles.size()), n = c.layer.n;
  x.resize(std::max(x.size(), layers.front().x.size()));
  std::vector<float> scale2;
  for (std::size_t e = 0; e < layers.size(); ++e) scale2.push_back(e % 2 == 0 ? 1.0f : 2.0f);
  tiles.resize(tiles.size() + 3, {99, 1 << 20, 16});  // kernels read none of these
  std::vector<std::uint16_t> d(static_cast<std::size_t>(m * n) + 16, 0xa5a5);
  cuda::LinearTask task = layers.front().task();
  task.weight.records = records.data();
  task.m = std::max(m, 1);
  task.x = x.data();
  task.experts = {.tiles = tiles.data(),
                  .count = &count,
                  .most = static_cast<int>(tiles.size()),
                  .weight_pitch = static_cast<std::int64_t>(pitch),
                  .scale2 = scale2.data()};
  task.epilogue.out = c.layer.a_dtype;
  task.epilogue.d = d.data();
  task.epilogue.d_stride = n;
  std::vector<std::int32_t> source;
  if (fetches) {
    const auto pitch_of_x = static_cast<std::ptrdiff_t>(task.x_stride);
    for (int row = 0; row < m / 2; ++row)
      std::swap_ranges(x.begin() + row * pitch_of_x, x.begin() + (row + 1) * pitch_of_x, x.begin() + (m - 1 - row) * pitch_of_x);
    for (int row = 0; row < m; ++row) source.push_back(3 * (m - 1 - row) + 1);
    task.experts.source = source.data();
    task.experts.divisor = 3;
  }
  ASSERT_EQ(launch(task), cudaSuccess);
  const std::uint16_t* from = d.data();
  for (std::size_t e = 0; e < layers.size(); ++e) {
    if (c.rows[e] == 0) continue;
    const std::size_t size = static_cast<std::size_t>(c.rows[e] * n);
    layers[e].expect_sums(
        layers[e].task(),
        [&](const cuda::LinearTask& own) {
          std::copy_n(from, size, static_cast<std::uint16_t*>(own.epilogue.d));
          return cudaSuccess;
        },
        [&](int row, int k) {
          Multiplied w = multiplied(layers[e].weight, row, k);
          w.value *= static_cast<double>(scale2[e]);
          return w;
        });
    from += size;
  }
  for (std::size_t i = static_cast<std::size_t>(m * n); i < d.size(); ++i) ASSERT_EQ(d[i], 0xa5a5) << "written past D";
}

}  // namespace nibble::emulator
