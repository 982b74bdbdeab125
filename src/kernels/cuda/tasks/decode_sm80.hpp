// The sm_80 kernel for few tokens (sm80/decode.cu) in plain numbers: how long a launch takes, and among how many CTAs K of a row tile is divided.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/cuda/tasks/decode_config.hpp"
#include "kernels/cuda/tasks/linear_task.hpp"
#include "kernels/cuda/tasks/split_k.hpp"

namespace nibble::cuda {

constexpr int decode_sm80_chunks(int records) { return (records + kSm80ChunkRecords - 1) / kSm80ChunkRecords; }

/// Predicted microseconds of a launch whose bound is not memory, fitted to the sm80_m16n64k128 of bench/results/h200/survey-wna16.json: N = 4096
/// with K = 4096, 7168 and 14336 gives the time of a chunk, N = 28672 that of a round of CTAs.
constexpr double decode_sm80_us(int tiles, int records, int ranks, int tokens, int sms) {
  constexpr double kStartUs = 2.0, kRoundUs = 1.15, kFewUs = 1.35, kTokenUs = 0.02, kMoreUs = 2.15;
  const int rounds = (tiles * ranks + sms - 1) / sms, chunks = (decode_sm80_chunks(records) + ranks - 1) / ranks;
  const double chunk_us =
      tokens <= 8 ? kFewUs + kTokenUs * (tokens - 1) : kMoreUs;  // absent tokens of a matrix instruction cost little
  return kStartUs + rounds * (kRoundUs + chunks * chunk_us) + add_ranks_us(ranks, rounds, gpu_tile::kRows, tokens);
}

/// The CTAs that divide K of a row tile: as many as one token takes the least time with. They depend on the weight and the GPU, not on M,
/// because the order of sums depends on them.
constexpr int decode_sm80_ranks(int tiles, int records, int sms) {
  constexpr int kMost = 8;
  int best = 1;
  for (int ranks = 2; ranks <= std::min(kMost, decode_sm80_chunks(records)); ++ranks)
    if (decode_sm80_us(tiles, records, ranks, 1, sms) < decode_sm80_us(tiles, records, best, 1, sms)) best = ranks;
  return best;
}

/// The memory in which the sums of a launch meet.
constexpr std::size_t decode_sm80_bytes(int tiles, int ranks) {
  return split_k_bytes(ranks, tiles, gpu_tile::kRows, kDecodeTokens);
}

}  // namespace nibble::cuda
