#include "kernels/cuda/table/decode_cost.hpp"

#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "kernels/cuda/tasks/decode_ring.hpp"

namespace nibble::cuda {
namespace {

// What a split is chosen by: measured for floats with every split, on an H200; codes are computed from it (a record takes two thirds of the
// cycles, docs/kernels/cuda-wna8.md). Fits do not change it: another split is other bits.
constexpr double kChoiceBytesPerUs = 4.4e6;
constexpr DecodeCost kOneToken{.fixed_us = 2.5, .cluster_us = 2.3, .record_us = 0.10, .stall_us = 0.06};
constexpr DecodeCost kEightTokens{.fixed_us = 4.2, .cluster_us = 2.3, .round_us = 0.15, .record_us = 0.10, .stall_us = 0.06};
constexpr DecodeCost kMoreTokens{.fixed_us = 5.0, .cluster_us = 1.5, .round16_us = 0.3, .record16_us = 0.13, .stall_us = 0.078};
constexpr DecodeCost kOneTokenCodes{.fixed_us = 2.8, .cluster_us = 2.3, .record_us = 0.07, .stall_us = 0.042, .code_us = 0.05};
constexpr DecodeCost kEightTokensCodes{
    .fixed_us = 3.8, .cluster_us = 2.3, .round_us = 0.15, .record_us = 0.07, .stall_us = 0.042, .code_us = 0.05};

const DecodeCost& choice_cost(int folds, int tokens) {
  if (folds != 0) return tokens == 1 ? kOneTokenCodes : kEightTokensCodes;
  return tokens == 1 ? kOneToken : tokens <= 8 ? kEightTokens : kMoreTokens;
}

static_assert(std::tuple_size_v<decltype(RingRoom::clusters)> == kMaxSplit + 1);

/// The features that do not depend on the speed of memory.
DecodeFeatures launch_features(const gpu_tile::Geometry& weight, int folds, int tokens, int split, int clusters, int stages) {
  const int slice = longest_slice(weight, split), rounds = (weight.tiles() + clusters - 1) / clusters;
  return {.tokens = tokens,
          .stages = stages,
          .rounds = rounds,
          .records = rounds * slice,
          .clusters = split > 1,
          .ctas = clusters * split,
          .codes = folds == 0 ? 0 : 1e-3 * tokens * slice * gpu_tile::kChannels};
}

struct FamilyCost {
  WgmmaFamily family;
  DecodeCost cost;
};
constexpr FamilyCost kH100Costs[] = {
#include "kernels/cuda/table/h100_decode_costs.inc"
};
constexpr FamilyCost kH200Costs[] = {
#include "kernels/cuda/table/h200_decode_costs.inc"
};

/// Whether activations are 16-bit floats.
bool multiplies_floats(WgmmaFamily family) {
  return family == WgmmaFamily::floats || family == WgmmaFamily::float_folds || family == WgmmaFamily::bytes;
}

/// The room of a GPU that may not be in this machine. An H100 and an H200 have these clusters; other GPUs are scaled by their number of
/// multiprocessors. A plan that runs asks the device itself (ring_room).
RingRoom described_room(const GpuInfo& gpu) {
  RingRoom room{.bytes = static_cast<int>(gpu.shared_bytes_per_block), .clusters = {0, 132, 66, 39, 30, 22, 17, 15, 15}};
  for (int& clusters : room.clusters) clusters = clusters * gpu.sms / 132;
  return room;
}

}  // namespace

// The busiest CTA multiplies; memory may take longer. bench/fit_decode_costs.py has the same formula.
double decode_us(const DecodeCost& cost, const DecodeFeatures& f) {
  const double start_us = f.early ? cost.fixed_us * (1 - cost.early) : cost.fixed_us + cost.fill * f.fill_us;
  const bool few = f.tokens <= 8;
  const double record_us = (few ? cost.record_us : cost.record16_us) + std::max(0, 3 - f.stages) * cost.stall_us;
  const double memory_us = cost.memory * f.memory_us * std::max(1.0, cost.ctas / f.ctas);
  return f.launches * (start_us + (f.clusters ? cost.cluster_us : 0.0) + (std::min(f.tokens, 8) - 1) * cost.token_us +
                       f.rounds * (few ? cost.round_us : cost.round16_us) + f.codes * cost.code_us +
                       std::max(memory_us, f.records * record_us));
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
      DecodeFeatures features = launch_features(weight, folds, config.tokens, split, clusters, stages);
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
      return error(
          StatusCode::unsupported,
          "N={} K={}: no ring of weights fits beside the activations in {} bytes of shared memory; do not force this kernel",
          weight.n, weight.k, room.bytes);
  }
  // Pairs of CTAs for one token are faster with half the ring: 11.6 µs instead of 13.6 for 4096×14336; the cause is unknown.
  if (asked.smem == 0 && config.tokens == 1 && config.split == 2)
    if (const int stages = stages_beside(weight, folds, 1, 2, room.bytes / 2); stages >= 2) config.stages = stages;
  config.smem = ring_bytes(weight, folds, config.tokens, config.split, config.stages);
  return config;
}

RingRoom room_beside_tiles(RingRoom room, const Problem& p) {
  if (p.experts != 0) room.bytes -= kFewTilesBytes;
  return room;
}

DecodeConfig asked_of_decode(const Problem& p, int tokens) { return {.tokens = tokens, .split = p.experts == 0 ? 0 : 1}; }

DecodeFeatures decode_features(WgmmaFamily family, int tokens, const GpuInfo& gpu, const Problem& p) {
  constexpr double kNever = 1e9;
  const int folds = multiplies_floats(family) ? 0 : family == WgmmaFamily::online_folds ? 4 : 1;
  const gpu_tile::Geometry weight = gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k);
  const RingRoom room = room_beside_tiles(described_room(gpu), p);
  const Result<DecodeConfig> config = configure_decode(weight, folds, room, asked_of_decode(p, tokens));
  if (!config.ok()) return {.launches = kNever, .tokens = 1, .stages = 1, .rounds = 1, .records = 1, .ctas = 1};
  Problem launch = p;
  launch.m = std::min<std::int64_t>(p.m, config->tokens);
  DecodeFeatures features =
      launch_features(weight, folds, static_cast<int>(launch.m), config->split, config->grid / config->split, config->stages);
  constexpr int kReserved = 1024;  // bytes of every CTA
  const double launches = static_cast<double>(p.m) / config->tokens;
  features.launches =
      p.experts == 0 ? std::ceil(launches) : std::max(1.0, launches);  // of some experts only, there are several tiles
  features.early = 2 * config->grid <= gpu.sms || 2 * config->smem + kReserved <= room.bytes;
  features.memory_us = tile_moved_us(gpu, launch, bits(p.a_dtype));
  features.fill_us = 1e-3 / std::max(1.0, gpu.read_gbytes_per_s) * config->grid * weight.record_bytes() *
                     std::min(features.records, config->stages * kDecodeWarps);
  return features;
}

double short_slots(const Problem& p) {
  const int span = gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).span;
  const bool zeros = p.scheme.zero != ZeroKind::none;
  return span > 32 ? 1 : span == 32 ? (zeros ? 1.25 : 1.15) : (zeros ? 1.75 : 1.5);
}

namespace {

/// The numbers of the GPU whose memory is more similar, or else of the other, if they were fitted there alone.
const DecodeCost& fitted_cost(WgmmaFamily family, const GpuInfo& gpu) {
  const auto* const here = std::ranges::find(kH100Costs, family, &FamilyCost::family);
  const bool slow = gpu.read_gbytes_per_s <= std::sqrt(kH100GbytesPerS * kH200GbytesPerS);
  return (slow && here != std::end(kH100Costs) ? here : std::ranges::find(kH200Costs, family, &FamilyCost::family))->cost;
}

/// How many times as long as with the fitted 4-bit integers multiplying a record and waiting for a short ring take, of 16-bit activations.
struct Slower {
  double record, stall;
};
Slower slower(DType codes) {
  if (codes == DType::e4m3) return {2.75, 2.0};
  return gpu_tile::stored_bits(codes) == 8 ? Slower{2.0, 1.5} : Slower{1.0, 1.0};
}

/// What bf16 activations take to become f16 (sm90/decode/decode_range.cuh), in a launch: as measured with 1 to 8 tokens on an H200, beside the
/// instructions of a channel, which are computed. The fitted costs are those of f16.
double narrow_us(const DecodeFeatures& features) {
  constexpr double kUs = 0.5, kTokenUs = 0.2, kChannelUs = 2e-5;
  const double channels = features.records / std::max(1.0, static_cast<double>(features.rounds)) * gpu_tile::kChannels;
  return features.launches * (kUs + kTokenUs * (features.tokens - 1) + kChannelUs * features.tokens * channels);
}

}  // namespace

double decode_cost_us(WgmmaFamily family, int tokens, const GpuInfo& gpu, const Problem& p) {
  DecodeCost cost = fitted_cost(family, gpu);
  const bool floats = multiplies_floats(family);
  if (floats && family != WgmmaFamily::bytes) {
    const auto [record, stall] = slower(p.scheme.codes);
    cost.record_us *= record, cost.record16_us *= record, cost.stall_us *= stall;
  }
  const double longer = family == WgmmaFamily::float_folds ? short_slots(p) : 1.0;
  const DecodeFeatures features = decode_features(family, tokens, gpu, p);
  return longer * decode_us(cost, features) + (floats && p.a_dtype == DType::bf16 ? narrow_us(features) : 0);
}

}  // namespace nibble::cuda
