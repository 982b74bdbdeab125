#include "kernels/cuda/table/wgmma_cost.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <span>

#include "kernels/cuda/tasks/gemm_schedule.hpp"
#include "layouts/gpu_tile.hpp"

namespace nibble::cuda {

namespace {

constexpr WgmmaCost kH100Costs[] = {
#include "kernels/cuda/table/h100_costs.inc"
};
constexpr WgmmaCost kH200Costs[] = {
#include "kernels/cuda/table/h200_costs.inc"
};

/// A GPU whose kernels were measured.
struct MeasuredGpu {
  double read_gbytes_per_s;
  std::span<const WgmmaCost> costs;
};
constexpr MeasuredGpu kMeasuredGpus[] = {{kH100GbytesPerS, kH100Costs}, {kH200GbytesPerS, kH200Costs}};

/// Rows of A and of D: tokens, or the output pixels of a convolution.
std::int64_t rows_of(const Problem& p) { return p.op == Op::conv ? p.m * p.geometry.out_height() * p.geometry.out_width() : p.m; }
/// Elements of A in memory. An image has fewer than its patches, to which a pixel belongs several times.
std::int64_t activations_of(const Problem& p) {
  return p.op == Op::conv ? p.m * p.geometry.height * p.geometry.width * p.geometry.in_channels : p.m * p.k;
}
/// Of weights, so many activations, and the result.
double bytes_of(const Problem& p, double weight_bytes, std::int64_t activations, double act_bits) {
  return weight_bytes + static_cast<double>(activations) * act_bits / 8 +
         static_cast<double>(rows_of(p) * p.n) * bits(p.epilogue.out) / 8;
}

/// The time of two activities that overlap: the longer of the two, and some of the shorter one, for they also wait for each other.
double overlapped_us(double a, double b, double order) { return std::pow(std::pow(a, order) + std::pow(b, order), 1 / order); }

/// The expected number of tiles of `each` rows that an expert's rows make. m is their mean and a standard deviation more (mean_expert); they are
/// about normally distributed.
double expected_tiles(std::int64_t m, double each) {
  const double deviation = (std::sqrt(1 + 4 * static_cast<double>(m)) - 1) / 2, mean = deviation * deviation;
  const double least = mean - 4 * deviation, most = mean + 4 * deviation;
  double tiles = 1 + std::max(0.0, std::floor(least / each));  // that nearly all experts have
  for (double held = tiles * each; held < most; held += each)
    tiles += 0.5 * std::erfc((held + 0.5 - mean) / (deviation * std::numbers::sqrt2));
  return tiles;
}

// Of an H100 and an H200, from L2: to all SMs; to one, however idle the others are.
constexpr double kL2GbytesPerS = 12000, kSmGbytesPerS = 120;

}  // namespace

WgmmaCost wgmma_cost(WgmmaFamily family, const Tile& tile, const GpuInfo& gpu) {
  const auto ratio = [](double a, double b) { return std::abs(std::log2(a / b)); };
  const auto distance = [&](const WgmmaCost& cost) {
    if (cost.family != family) return 1e9;
    return ratio(cost.tokens, tile.m) + ratio(cost.rows, tile.n) + (cost.split == tile.split ? 0.0 : 0.5);
  };
  const auto gpu_distance = [&](const MeasuredGpu& measured) {
    const bool has = std::ranges::find(measured.costs, family, &WgmmaCost::family) != measured.costs.end();
    return has ? ratio(measured.read_gbytes_per_s, std::max(1.0, gpu.read_gbytes_per_s)) : 1e9;
  };
  WgmmaCost cost = *std::ranges::min_element(std::ranges::min_element(kMeasuredGpus, {}, gpu_distance)->costs, {}, distance);
  cost.block_us *= static_cast<float>(tile.m) / static_cast<float>(cost.tokens);
  cost.tokens = tile.m, cost.rows = tile.n, cost.split = tile.split;
  return cost;
}

// A CTA runs its passes one after the other. A pass has one step per stage of records, in which up to `blocks` warpgroups share the tensor
// cores. With stream-K a CTA also has a share of the records of the remaining passes.
WgmmaFeatures wgmma_features(WgmmaFamily family, const Tile& tile, const PassShape& shape, const GpuInfo& gpu, const Problem& p,
                             std::int64_t weight_bytes, int act_bits) {
  const auto up = [](double a, double b) { return std::ceil(a / b); };
  // Tiles of an expert do not share its rows: as many rows more of a layer with one token tile.
  const double tiles_of_expert = p.experts == 0 ? 1 : expected_tiles(p.m, tile.m);
  const double row_blocks = up(static_cast<double>(p.n) * tiles_of_expert, gpu_tile::kRows),
               token_tiles = p.experts == 0 ? up(static_cast<double>(rows_of(p)), tile.m) : 1;
  const double records = up(static_cast<double>(p.k), gpu_tile::kChannels);
  const double sms = std::max(8, gpu.sms);
  const double blocks = std::min<double>(shape.blocks, row_blocks);                // of a pass
  const double row_tiles = up(row_blocks, blocks), all = row_tiles * token_tiles;  // passes
  WgmmaFeatures f{.family = family, .tile = tile, .blocks = blocks * shape.depth};
  f.memory_us = moved_us(gpu, p, weight_bytes, act_bits);
  constexpr double kMostUnits = 1e9;  // D has no memory for more; they are counted in 32 bits
  Schedule schedule{.row_blocks = static_cast<int>(row_blocks),
                    .token_tiles = static_cast<int>(std::min(token_tiles, std::ceil(kMostUnits / row_blocks))),
                    .records = static_cast<int>(records),
                    .most = shape.blocks,
                    .split = tile.split,
                    .even = shape.even};
  if (tile.split <= 1) distribute(schedule, tile.m, static_cast<int>(sms));
  if (tile.split == kStreamK) {
    const int rounds = schedule.whole / schedule.clusters, each = schedule.longest_run();
    f.passes = rounds + (each > 0);
    f.parts = each > 0 ? up(records, each) : 0;
    f.steps = rounds * records + each;
  } else if (tile.split == 1 && schedule.band == 0) {
    f.passes = schedule.most_passes();
    f.steps = f.passes * up(records, shape.depth);
    f.blocks = schedule.longest_run() / f.passes * shape.depth;
  } else {
    constexpr double kFoursOfSms = 30.0 / 132;  // clusters of four: some of a GPC's SMs are left over
    const double share = tile.split == 1 ? 1.0 : tile.split == 2 ? 0.5 : kFoursOfSms;
    f.passes = up(all, std::floor(sms * share));
    f.steps = f.passes * up(up(records, tile.split), shape.depth);
  }
  const double all_bytes = bytes_of(p, token_tiles * tiles_of_expert * static_cast<double>(weight_bytes), rows_of(p) * p.k,
                                    row_tiles / tiles_of_expert * act_bits);
  const double tokens = static_cast<double>(rows_of(p)) / (token_tiles * tiles_of_expert);  // of a tile
  const double step_bytes = f.blocks * static_cast<double>(weight_bytes) * tiles_of_expert / (row_blocks * records) +
                            shape.depth * tokens * gpu_tile::kChannels * act_bits / 8;
  f.l2_us = 1e-3 * std::max(all_bytes / kL2GbytesPerS, f.steps * step_bytes / kSmGbytesPerS);
  if (shape.part != 0) {
    constexpr double kDecoding = 130;  // columns whose products take as long as codes take to become weights; measured on an H200
    f.blocks *= (kDecoding + shape.part * expected_tiles(p.m, shape.part) / tiles_of_expert) / (kDecoding + tile.m);
  }
  return f;
}

// Partial sums are added at the end, when nothing is left to read. bench/fit_gpu_costs.py has the same formula.
double wgmma_cost_us(const WgmmaCost& cost, const WgmmaFeatures& f) {
  constexpr double kPart = 0.75;                 // the cost of adding a partial sum, as a share of the fixed cost of a pass
  constexpr double kReads = 2.5, kProducts = 4;  // orders with the least regret over the layers measured on an H100 and an H200
  const double products_us = f.passes * cost.pass_us + f.steps * std::max<double>(cost.step_us, f.blocks * cost.block_us);
  const double reads_us = overlapped_us(f.memory_us, f.l2_us, kReads);
  return cost.fixed_us + kPart * f.parts * cost.pass_us + overlapped_us(reads_us, products_us, kProducts);
}

double wgmma_cost_us(const WgmmaFeatures& features, const GpuInfo& gpu) {
  return wgmma_cost_us(wgmma_cost(features.family, features.tile, gpu), features);
}

double moved_us(const GpuInfo& gpu, const Problem& p, std::int64_t weight_bytes, int act_bits) {
  return 1e-3 / gpu.read_gbytes_per_s * bytes_of(p, static_cast<double>(weight_bytes), activations_of(p), act_bits);
}

std::int64_t tile_bytes(const Problem& p) { return gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).total_bytes(); }

double tile_moved_us(const GpuInfo& gpu, const Problem& p, int act_bits) { return moved_us(gpu, p, tile_bytes(p), act_bits); }

}  // namespace nibble::cuda
