// The cost model of the decode kernels of sm_90 (decode_ring.cuh): one formula, which chooses the split of a weight and tells the planner
// what launches take.
#pragma once

#include "kernels/cuda/table/wgmma_cost.hpp"
#include "kernels/cuda/tasks/decode_config.hpp"
#include "kernels/kernel.hpp"
#include "layouts/gpu_tile.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

/// What the model knows of a launch.
struct DecodeFeatures {
  double launches = 1;  // of a problem
  int tokens;
  int stages;     // of the ring
  int rounds;     // row tiles of the busiest CTA
  int records;    // that it multiplies, in all of its row tiles
  bool clusters;  // several CTAs share a row tile
  int ctas;
  bool early;        // the GPU has room for the next launch beside this one
  double memory_us;  // reading and writing
  double fill_us;    // reading what the rings hold at first
  double codes;      // thousands that a CTA quantizes
};

struct DecodeCost {
  double fixed_us;              // the start of a launch, and the sums of the last tile
  double early;                 // the share of it that the previous launch hides, where it leaves room
  double cluster_us;            // sending sums to other ranks
  double token_us;              // each of the second to the eighth
  double round_us, round16_us;  // a row tile; of up to 8, up to 16 tokens
  double record_us, record16_us;
  double stall_us;    // more of a record for each stage that the ring is shorter than three
  double fill;        // the share of fill_us in which nothing is multiplied, unless hidden too
  double code_us;     // a thousand
  double memory = 1;  // the time it takes, as a multiple of what the bandwidth promises
  double ctas;        // that keep memory busy; fewer take longer
};
/// Predicted microseconds of the launches.
double decode_us(const DecodeCost& cost, const DecodeFeatures& features);

/// Chooses what is 0 in `asked`: the most tokens a launch that leave room for a ring, then the fastest split. Neither depends on M, because a
/// row's bits depend on the split. `folds` of a record; 0: activations stay 16-bit floats. Errors: unsupported.
Result<DecodeConfig> configure_decode(const gpu_tile::Geometry& weight, int folds, const RingRoom& room,
                                      const DecodeConfig& asked);

/// The room that is left beside a list of tiles where rows are of experts.
RingRoom room_beside_tiles(RingRoom room, const Problem& problem);
/// What a row that takes so many tokens a launch asks configure_decode for: nothing splits K of a grouped product.
DecodeConfig asked_of_decode(const Problem& problem, int tokens);

/// The features of the row that takes so many tokens a launch. The family says whether activations are quantized, and how.
DecodeFeatures decode_features(WgmmaFamily family, int tokens, const GpuInfo& gpu, const Problem& problem);
/// Predicted microseconds of the row, with the numbers of the measured GPU whose memory is the most similar (bench/fit_decode_costs.py).
double decode_cost_us(WgmmaFamily family, int tokens, const GpuInfo& gpu, const Problem& problem);

/// How much longer decode with 16-bit activations takes where slots are shorter than the 64 channels of the layers that costs are fitted to:
/// a slot's sums are scaled at its end. Measured on an H200 (short-groups.json).
double short_slots(const Problem& problem);

}  // namespace nibble::cuda
