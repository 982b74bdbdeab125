// The shared memory of a CTA of the decode kernels of sm_90 (decode_ring.cuh), host and device.
#pragma once

#include <algorithm>

#include "core/host_device.hpp"
#include "kernels/cuda/tasks/experts_task.hpp"
#include "kernels/cuda/tasks/wna8_slice.hpp"
#include "layouts/gpu_tile.hpp"

namespace nibble::cuda {

/// Multiplying warps of a CTA: each takes every eighth record, whole. Half records for 4 × 2 or 8 × 2 warps were slower
/// (docs/kernels/cuda-decode.md): they pay twice for a record's activations, their sums and its bookkeeping.
constexpr int kDecodeWarps = 8;
/// Floats between tokens of partial sums: 68 ≡ 4 mod 32 puts a fragment's 8 rows × 4 token pairs into 32 different banks.
constexpr int kPartPitch = gpu_tile::kRows + 4;
NIBBLE_HOST_DEVICE constexpr int part_bytes(int m) { return kDecodeWarps * m * kPartPitch * 4; }

constexpr int kMaxSplit = kMostRanks;  // the largest portable cluster
/// Rows of a tile that a rank owns: even, because they are sent in pairs.
NIBBLE_HOST_DEVICE constexpr int rank_rows(int split) { return (gpu_tile::kRows / 2 + split - 1) / split * 2; }
/// Floats of the partial sums that other ranks send.
NIBBLE_HOST_DEVICE constexpr int inbox_floats(int split, int m) { return split * rank_rows(split) * m; }
/// Inboxes of a rank. A rank may be two tiles ahead of another, which reads one tile late: it writes to the box used four tiles ago.
constexpr int kInboxes = 4;

/// Of bf16 activations (decode_kernel.cuh): the largest of each warp's part of a token, and what its sums are multiplied by.
struct TokenRange {
  unsigned largest[kDecodeWarps];
  float unit;
};

/// Where its parts begin, in bytes, in this order: the ring at 0, activations, partial sums, inboxes, the ranges of tokens, barriers.
struct SharedMap {
  int x, parts, inbox, ranges, barriers, total;
};
NIBBLE_HOST_DEVICE constexpr int align16(int bytes) { return (bytes + 15) / 16 * 16; }
NIBBLE_HOST_DEVICE constexpr int align128(int bytes) { return (bytes + 127) / 128 * 128; }
NIBBLE_HOST_DEVICE constexpr SharedMap shared_map(int stages, int record_bytes, int m, int x_pitch, int part_buffers, int split) {
  SharedMap s{};
  s.x = align128(stages * kDecodeWarps * record_bytes);
  s.parts = align128(s.x + m * x_pitch);
  s.inbox = s.parts + part_buffers * part_bytes(m);
  s.ranges = s.inbox + (split > 1 ? kInboxes * inbox_floats(split, m) * 4 : 0);
  s.barriers = align16(s.ranges + m * static_cast<int>(sizeof(TokenRange)));
  const int used = s.barriers + 8 * (2 * stages + 2 * part_buffers + kInboxes + 2);
  s.total = used > s.parts + record_bytes ? used : s.parts + record_bytes;  // the dummy iteration reads a record from `parts` on
  return s;
}

/// The tiles of pairs that a CTA of the kernel for rows of experts has sorted itself, behind everything else.
struct FewTiles {
  ExpertTile tiles[kFewPairs];
  int source[kFewPairs];  // of a row: its pair
  int count;              // of tiles
};
constexpr int kFewTilesBytes = align16(sizeof(FewTiles));

/// Two buffers, so that multiplying warps do not wait for the finishing ones; one where activations of more tokens need the memory.
constexpr int part_buffers(int tokens) { return tokens <= 8 ? 2 : 1; }

/// Records of a row tile that the busiest rank multiplies.
constexpr int longest_slice(const gpu_tile::Geometry& geo, int split) { return (geo.records() + split - 1) / split; }

/// Bytes between tokens of a CTA's slice of x: of codes with so many folds a record (wna8_slice.hpp), or with 0 of 16-bit floats. Those have
/// 16 bytes more than a multiple of 128, which puts 8 tokens of an ldmatrix into 8 different bank groups.
constexpr int x_pitch(const gpu_tile::Geometry& geo, int split, int folds) {
  const int records = longest_slice(geo, split);
  return folds == 0 ? records * gpu_tile::kChannels * 2 + 16 : token_row(records, folds).pitch;
}

constexpr int ring_bytes(const gpu_tile::Geometry& geo, int folds, int tokens, int split, int stages) {
  return shared_map(stages, geo.record_bytes(), tokens, x_pitch(geo, split, folds), part_buffers(tokens), split).total;
}

/// Stages of the ring that fit beside everything else.
constexpr int stages_beside(const gpu_tile::Geometry& geo, int folds, int tokens, int split, int bytes) {
  int stages = std::max(0, (bytes - ring_bytes(geo, folds, tokens, split, 0)) / (kDecodeWarps * geo.record_bytes()));
  while (stages > 0 && ring_bytes(geo, folds, tokens, split, stages) > bytes) --stages;
  return stages;
}

}  // namespace nibble::cuda
