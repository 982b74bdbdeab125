#include "kernels/cuda/table/decode_cost.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "kernels/cuda/tasks/decode_ring.hpp"

namespace nibble::cuda {
namespace {

// What a split is chosen by: measured for floats with every split, on an H200; codes are computed from it (a record takes two thirds of the
// cycles, docs/kernels/cuda-wna8.md). Fits do not change it: another split is other bits.
constexpr double kChoiceBytesPerUs = 4.4e6;
constexpr DecodeCost kOneToken{.fixed_us = 2.5, .cluster_us = 2.3, .record_us = 0.10};
constexpr DecodeCost kEightTokens{.fixed_us = 4.2, .cluster_us = 2.3, .round_us = 0.15, .record_us = 0.10};
constexpr DecodeCost kMoreTokens{.fixed_us = 5.0, .cluster_us = 1.5, .round_us = 0.3, .record16_us = 0.13};
constexpr DecodeCost kOneTokenCodes{.fixed_us = 2.8, .cluster_us = 2.3, .record_us = 0.07, .code_us = 0.05};
constexpr DecodeCost kEightTokensCodes{.fixed_us = 3.8, .cluster_us = 2.3, .round_us = 0.15, .record_us = 0.07, .code_us = 0.05};

const DecodeCost& choice_cost(int folds, int tokens) {
  if (folds != 0) return tokens == 1 ? kOneTokenCodes : kEightTokensCodes;
  return tokens == 1 ? kOneToken : tokens <= 8 ? kEightTokens : kMoreTokens;
}

}  // namespace

DecodeFeatures decode_features(const gpu_tile::Geometry& weight, int folds, int tokens, int split, int clusters, int stages) {
  const int slice = longest_slice(weight, split), rounds = (weight.tiles() + clusters - 1) / clusters;
  return {.tokens = tokens,
          .stages = stages,
          .rounds = rounds,
          .records = rounds * slice,
          .clusters = split > 1,
          .codes = folds == 0 ? 0 : 1e-3 * tokens * slice * gpu_tile::kChannels};
}

// The busiest CTA multiplies; memory may take longer.
double decode_us(const DecodeCost& cost, const DecodeFeatures& f) {
  const double record_us = (f.tokens <= 8 ? cost.record_us : cost.record16_us) * (f.stages >= 3   ? 1.0
                                                                                  : f.stages == 2 ? 1.6
                                                                                                  : 2.2);
  return cost.fixed_us + (f.clusters ? cost.cluster_us : 0.0) + f.rounds * cost.round_us + f.codes * cost.code_us +
         std::max(f.memory_us, f.records * record_us);
}

Result<DecodeConfig> configure_decode(const gpu_tile::Geometry& weight, int folds, const RingRoom& room,
                                      const DecodeConfig& asked) {
  DecodeConfig config = asked;
  config.split = 0;
  for (; config.split == 0; config.tokens = (config.tokens + 1) / 2) {
    double best = 0;
    for (int split = 1; split <= kMaxSplit; ++split) {
      if (asked.split != 0 && split != asked.split) continue;
      const int stages = stages_beside(weight, folds, config.tokens, split, asked.smem != 0 ? asked.smem : room.bytes);
      const int clusters = std::min(weight.tiles(), room.clusters[static_cast<std::size_t>(split)]);
      if (stages == 0 || clusters < 1) continue;
      DecodeFeatures features = decode_features(weight, folds, config.tokens, split, clusters, stages);
      features.memory_us = static_cast<double>(weight.total_bytes()) / kChoiceBytesPerUs;
      const double us = decode_us(choice_cost(folds, config.tokens), features);
      if (config.split != 0 && us >= best) continue;
      best = us;
      config.split = split;
      config.stages = stages;
      config.grid = clusters * split;
    }
    if (config.split != 0) break;
    if (config.tokens == 1)
      return error(StatusCode::unsupported, "N={} K={}: no ring fits into {} bytes of shared memory", weight.n, weight.k,
                   room.bytes);
  }
  // Pairs of CTAs for one token are faster with half the ring: 11.6 µs instead of 13.6 for 4096×14336; the cause is unknown.
  if (asked.smem == 0 && config.tokens == 1 && config.split == 2)
    if (const int stages = stages_beside(weight, folds, 1, 2, room.bytes / 2); stages >= 2) config.stages = stages;
  config.smem = ring_bytes(weight, folds, config.tokens, config.split, config.stages);
  return config;
}

}  // namespace nibble::cuda
