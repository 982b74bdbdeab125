#include "kernels/cuda/table/wgmma_cost.hpp"

#include <algorithm>
#include <cmath>
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

/// A GPU whose kernels were measured, told by GpuInfo::read_gbytes_per_s.
struct MeasuredGpu {
  double read_gbytes_per_s;
  std::span<const WgmmaCost> costs;
};
constexpr MeasuredGpu kMeasuredGpus[] = {{3051, kH100Costs}, {4381, kH200Costs}};

/// Of weights, activations and the result.
double bytes_of(const Problem& p, double weight_bytes, double act_bits) {
  return weight_bytes + static_cast<double>(p.m * p.k) * act_bits / 8 + static_cast<double>(p.m * p.n) * bits(p.epilogue.out) / 8;
}

constexpr double kL2GbytesPerS = 8500;  // of an H100 and an H200, to all SMs

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
// cores. Reading and multiplying overlap; the L2 cache delivers the weights to every token tile, and the activations to every row tile. With
// stream-K a CTA also has a share of the records of the remaining passes, and adds the partial sums of the pass that it finishes at the end,
// when nothing is left to read. bench/fit_gpu_costs.py fits the numbers and has the same formula.
double wgmma_cost_us(const WgmmaCost& cost, const PassShape& shape, const GpuInfo& gpu, const Problem& p,
                     std::int64_t weight_bytes, int act_bits) {
  const auto up = [](double a, double b) { return std::ceil(a / b); };
  const double row_blocks = up(static_cast<double>(p.n), gpu_tile::kRows),
               token_tiles = up(static_cast<double>(p.m), cost.tokens);
  const double records = up(static_cast<double>(p.k), gpu_tile::kChannels);
  const double sms = std::max(8, gpu.sms);
  const double blocks = std::min<double>(shape.blocks, row_blocks);                // of a pass
  const double row_tiles = up(row_blocks, blocks), all = row_tiles * token_tiles;  // passes
  double passes, steps, wide = blocks;  // of a CTA: passes; records; row blocks of a pass
  double parts = 0;                     // of the pass that a CTA finishes, its own included
  constexpr double kMostUnits = 1e9;    // D has no memory for more; they are counted in 32 bits
  Schedule schedule{.row_blocks = static_cast<int>(row_blocks),
                    .token_tiles = static_cast<int>(std::min(token_tiles, std::ceil(kMostUnits / row_blocks))),
                    .records = static_cast<int>(records),
                    .most = shape.blocks,
                    .split = cost.split};
  if (cost.split <= 1) distribute(schedule, cost.tokens, static_cast<int>(sms));
  if (cost.split == kStreamK) {
    const int rounds = schedule.whole / schedule.clusters, each = schedule.longest_run();
    passes = rounds + (each > 0);
    parts = each > 0 ? up(records, each) : 0;
    steps = rounds * records + each;
  } else if (cost.split == 1 && schedule.band == 0) {
    passes = schedule.most_passes();
    steps = passes * up(records, shape.depth);
    wide = schedule.longest_run() / passes;
  } else {
    constexpr double kFoursOfSms = 30.0 / 132;  // clusters of four: some of a GPC's SMs are left over
    const double share = cost.split == 1 ? 1.0 : cost.split == 2 ? 0.5 : kFoursOfSms;
    passes = up(all, std::floor(sms * share));
    steps = passes * up(up(records, cost.split), shape.depth);
  }
  constexpr double kPart = 0.75;  // the cost of adding a partial sum, as a share of the fixed cost of a pass
  const double moved =
      std::max(moved_us(gpu, p, weight_bytes, act_bits),
               1e-3 / kL2GbytesPerS * bytes_of(p, token_tiles * static_cast<double>(weight_bytes), row_tiles * act_bits));
  return cost.fixed_us + kPart * parts * cost.pass_us +
         std::max(moved, passes * cost.pass_us + steps * std::max<double>(cost.step_us, wide * shape.depth * cost.block_us));
}

double moved_us(const GpuInfo& gpu, const Problem& p, std::int64_t weight_bytes, int act_bits) {
  return 1e-3 / gpu.read_gbytes_per_s * bytes_of(p, static_cast<double>(weight_bytes), act_bits);
}

std::int64_t tile_bytes(const Problem& p) { return gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).total_bytes(); }

double tile_moved_us(const GpuInfo& gpu, const Problem& p, int act_bits) { return moved_us(gpu, p, tile_bytes(p), act_bits); }

}  // namespace nibble::cuda
