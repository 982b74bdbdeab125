// How a CTA of the decode kernel for online quantized activations (wna8_decode.cu) keeps the codes of its slice of K in shared memory,
// and which lane makes which of them: index maths, host and device.
//
// A token's row holds everything that a lane multiplies and folds with, so that one stride between tokens serves for all:
//
//   row   = codes: 128 bytes a record | terms: {s_a, s_a·Σa} of each fold, 8 bytes | tops: the largest |x| of each rank, 8 bytes | gap
//   codes = of each 16 channels in the order of gpu_tile::interleaved
//
// The pitch is an odd number of 16-byte chunks: ldmatrix reads a chunk of each of 8 tokens, from 8 different groups of banks.
//
// A warp quantizes chunks of 8 records of one token: lanes 4g … 4g+3 have record g, four vectors of 8 channels each. So a scale per 128
// channels takes two shuffles among four lanes; 16 lanes in a row would take four for every vector.
//
//   vector v of lane 4g + q = channels 128·g + 32·(v ^ g mod 4) + 8·q … + 7
//
// The four lanes together read 64 bytes of 16-bit floats in a piece. Without the exclusive or, lanes 0, 4, 8, 12 would write their 8 bytes of
// codes to the same banks; with it, half a warp writes into 32 different ones. Channels that share a scale of 32 or 64 stay together: v with
// its exclusive or is a fold, and v and v ^ 1 are two folds of the same 64.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"
#include "layouts/gpu_tile.hpp"

namespace nibble::cuda {

constexpr int kChunkRecords = 8;  // that a warp quantizes at a time
constexpr int kLaneVectors = 4;   // of 8 channels, of each lane
constexpr int kMostRanks = 8;     // of a cluster

/// The fold of 32 channels that a lane's vector v is.
NIBBLE_HOST_DEVICE constexpr int vector_fold(int lane, int v) { return v ^ (lane / 4 % 4); }
/// The first channel of it, in the chunk.
NIBBLE_HOST_DEVICE constexpr int vector_channel(int lane, int v) {
  return lane / 4 * gpu_tile::kChannels + vector_fold(lane, v) * 32 + lane % 4 * 8;
}

/// Bytes from the beginning of a token's row; `records` of the longest slice of a cluster, so that all its CTAs agree.
struct TokenRow {
  int terms, tops, pitch;
};
NIBBLE_HOST_DEVICE constexpr TokenRow token_row(int records, int folds) {
  TokenRow row{};
  row.terms = records * gpu_tile::kChannels;
  row.tops = row.terms + records * folds * 8;
  row.pitch = (row.tops + kMostRanks * 8 + 31) / 32 * 32 + 16;
  return row;
}

/// Warps of a CTA that share a token: of 8 warps, warp w has token w mod tokens, a power of two that is not less than M; the
/// chunks w / tokens, and so many on.
NIBBLE_HOST_DEVICE constexpr int token_shift(int m) { return m <= 1 ? 0 : m <= 2 ? 1 : m <= 4 ? 2 : 3; }

/// Records that a CTA reads to find its scales, [first, end): half of a group of 256 channels may belong to a neighbour.
struct Seen {
  int first, end;
  NIBBLE_HOST_DEVICE constexpr int chunks() const { return (end - first + kChunkRecords - 1) / kChunkRecords; }
};
NIBBLE_HOST_DEVICE constexpr Seen seen_records(int first, int records, int group) {
  const int odd = group == 2 * gpu_tile::kChannels ? 1 : 0;
  return {first - (first & odd), first + records + ((first + records) & odd)};
}

}  // namespace nibble::cuda
