// Rows of experts for the kernels of float activations: layers whose rows follow one another, and the list of their tiles.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "emulator/float_layer.hpp"
#include "kernels/cuda/tasks/experts_task.hpp"
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
/// multiplies by. fetches: rows of A lie in the reverse order, from where the kernel fetches them; and up to kFewPairs of them in an order
/// that the kernel sorts.
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
  cuda::TileCount tile_count{.tiles = count};
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
                  .count = &tile_count,
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
  EXPECT_EQ(tile_count.drawn, 0u);  // as the next kernel needs it
  std::vector<std::uint16_t> sorted_d(d.size(), 0xa5a5);
  if (fetches && m >= 1 && m < cuda::kFewPairs) {
    // The pairs of the experts in turn, and one without an expert.
    std::vector<std::int32_t> ids(1, -1);
    for (int turn = 0; turn < m; ++turn)
      for (std::size_t e = layers.size(); e-- > 0;)
        if (turn < c.rows[e]) ids.push_back(static_cast<std::int32_t>(e));
    const int pairs = static_cast<int>(ids.size());
    std::vector<std::int32_t> pair_of, row_of(ids.size(), -1), expert_of;
    for (std::size_t e = 0; e < layers.size(); ++e)
      for (int pair = 0; pair < pairs; ++pair)
        if (ids[static_cast<std::size_t>(pair)] == static_cast<std::int32_t>(e)) {
          row_of[static_cast<std::size_t>(pair)] = static_cast<std::int32_t>(pair_of.size());
          pair_of.push_back(pair), expert_of.push_back(static_cast<std::int32_t>(e));
        }
    pair_of.push_back(0), expert_of.push_back(-1);
    const auto pitch_of_x = static_cast<std::size_t>(task.x_stride);
    std::vector<std::uint16_t> x_of_pairs(ids.size() * pitch_of_x + 8);
    auto* const aligned = x_of_pairs.data() + (16 - reinterpret_cast<std::uintptr_t>(x_of_pairs.data()) % 16) % 16 / 2;
    for (int row = 0; row < m; ++row)  // rows of x have been reversed
      std::copy_n(x.begin() + (m - 1 - row) * static_cast<std::ptrdiff_t>(pitch_of_x), pitch_of_x,
                  aligned + static_cast<std::size_t>(pair_of[static_cast<std::size_t>(row)]) * pitch_of_x);
    std::vector<std::int32_t> written[3] = {std::vector<std::int32_t>(ids.size(), 77), std::vector<std::int32_t>(ids.size(), 77),
                                            std::vector<std::int32_t>(ids.size(), 77)};
    std::vector<cuda::ExpertTile> written_tiles[2] = {std::vector<cuda::ExpertTile>(tiles.size()),
                                                      std::vector<cuda::ExpertTile>(ids.size())};
    cuda::TileCount counts[2] = {{-1, 5}, {-1, 5}};
    const cuda::SortTask sort{
        .ids = ids.data(),
        .token_stride = 1,
        .choice_stride = 1,
        .experts = static_cast<int>(layers.size()),
        .rows = pairs,
        .top_k = 1,
        .pair_of = written[0].data(),
        .row_of = written[1].data(),
        .expert_of = written[2].data(),
        .products = {{c.tokens, written_tiles[0].data(), &counts[0]}, {1, written_tiles[1].data(), &counts[1]}}};
    cuda::LinearTask unsorted = task;
    unsorted.m = pairs;
    unsorted.x = aligned;
    unsorted.experts.tiles = written_tiles[0].data(), unsorted.experts.count = &counts[0];
    unsorted.experts.source = written[0].data();
    unsorted.experts.divisor = 1;
    unsorted.experts.sort = &sort;
    unsorted.epilogue.d = sorted_d.data();
    ASSERT_EQ(launch(unsorted), cudaSuccess);
    EXPECT_EQ(sorted_d, d);
    EXPECT_EQ(written[0], pair_of);
    EXPECT_EQ(written[1], row_of);
    EXPECT_EQ(written[2], expert_of);
    ASSERT_EQ(counts[0].tiles, count);
    EXPECT_EQ(counts[1].tiles, m);
    for (int t = 0; t < count; ++t) {
      const cuda::ExpertTile &got = written_tiles[0][static_cast<std::size_t>(t)], &expected = tiles[static_cast<std::size_t>(t)];
      EXPECT_TRUE(got.expert == expected.expert && got.first == expected.first && got.rows == expected.rows) << t;
    }
  }
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
