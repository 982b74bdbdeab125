// The cost model of the decode kernels of sm_90 (decode_ring.cuh): one formula, which chooses the split of a weight and tells the planner
// what a launch takes.
#pragma once

#include "kernels/cuda/tasks/decode_config.hpp"
#include "layouts/gpu_tile.hpp"
#include "nibble/status.hpp"

namespace nibble::cuda {

/// What the model knows of a launch.
struct DecodeFeatures {
  int tokens;
  int stages;        // of the ring
  int rounds;        // row tiles of the busiest CTA
  int records;       // that it multiplies, of all of them
  bool clusters;     // several CTAs share a row tile
  double memory_us;  // reading and writing
  double codes;      // thousands that a CTA quantizes
};
/// Of `tokens` tokens; folds of a record, 0: activations stay floats.
DecodeFeatures decode_features(const gpu_tile::Geometry& weight, int folds, int tokens, int split, int clusters, int stages);

/// Microseconds.
struct DecodeCost {
  double fixed_us;                // the start of a launch, and the sums of the last tile
  double cluster_us;              // sending sums to other ranks
  double round_us;                // a row tile
  double record_us, record16_us;  // of up to 8, up to 16 tokens
  double code_us;                 // a thousand
};
double decode_us(const DecodeCost& cost, const DecodeFeatures& features);

/// Chooses what is 0 in `asked`: the most tokens a launch that leave room for a ring, then the fastest split. Neither depends on M, because a
/// row's bits depend on the split. Errors: unsupported.
Result<DecodeConfig> configure_decode(const gpu_tile::Geometry& weight, int folds, const RingRoom& room,
                                      const DecodeConfig& asked);

}  // namespace nibble::cuda
