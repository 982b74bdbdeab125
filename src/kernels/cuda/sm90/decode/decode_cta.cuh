// A CTA of the decode kernels on Hopper: the parameters of a launch, the place of a thread, the barriers.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/ring.cuh"
#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/tasks/decode.hpp"
#include "kernels/cuda/tasks/decode_ring.hpp"
#include "kernels/cuda/tasks/expert_tiles.hpp"
#include "kernels/cuda/tasks/experts_task.hpp"
#include "kernels/cuda/weights/decode_record.cuh"

namespace nibble::cuda {

constexpr int kMultipliers = 32 * kDecodeWarps;  // threads
constexpr int kProducer = kDecodeWarps;          // warp; those after it finish
/// They share the tokens, because the sums of the last row tile are waited for. There are three: each of twelve warps has as many registers as
/// each of nine.
constexpr int kFinishers = 3;
constexpr int kFinishingThreads = 32 * kFinishers;
constexpr int kThreads = kMultipliers + 32 + kFinishingThreads;

/// The parameters of a launch. Acts is the Work's own description of activations, with the number of tokens, m.
template <class Acts>
struct RingParams {
  const std::uint8_t* records;
  Acts x;
  RecordFormat format;
  epilogue::Element epilogue;
  NextWeight next;
  int first_token;  // of D, of this launch
  int n;
  int tiles, tile_records;
  int split;
  int row_lanes;  // log2 of the lanes that finish a token's rows of a rank, two each
  int stages;
  int part_buffers;
  int x_pitch;          // bytes between tokens
  ExpertTiles experts;  // of rows of experts (decode_experts.cuh), as the next ones
  SortTask sort;        // of pairs that this kernel sorts; no ids: they are sorted
  int few_tiles;        // where the list of their tiles begins in shared memory
  int run;              // row tiles that a CTA takes together
};

/// A CTA's records of a row tile, and the places of its activations in shared memory.
struct Slice {
  int rank;
  int first, records;    // of the tile's
  std::uint32_t x;       // token t's begin at x + t · x_pitch
  std::uint32_t x_full;  // a barrier of one arrival, of one use
  std::uint32_t parts;   // free until the first tile's sums
  TokenRange* ranges;
};

/// What every role knows: its CTA's share of the weight, its thread, its barriers.
template <class Work>
struct DecodeCta {
  using Params = typename Work::Params;
  static constexpr int kTiles = Work::kTiles;

  const Params& p;
  std::uint8_t* shared;
  SharedMap map;
  std::uint32_t base;         // shared's address
  int rank, clusters;         // of the cluster's CTAs; of the grid
  int first_tile;             // then every clusters-th
  int first_record, records;  // of a tile that are this CTA's
  int warp, lane;

  __device__ DecodeCta(const Params& params, std::uint8_t* memory)
      : p(params),
        shared(memory),
        map(shared_map(p.stages, p.format.bytes, p.x.m, p.x_pitch, p.part_buffers, p.split)),
        base(ptx::shared_address(memory)),
        rank(p.split == 1 ? 0 : ptx::cluster_rank()),
        clusters(gridDim.x / p.split),
        first_tile(blockIdx.x / p.split),
        first_record(rank * p.tile_records / p.split),
        records((rank + 1) * p.tile_records / p.split - first_record),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32) {}

  // Barriers. A stage is full when its records have arrived, empty when each multiplying warp has read its own; a buffer of partial sums is
  // full when all multiplying threads have written, empty when the finishing ones have read; an inbox is full when all ranks' sums are in.
  __device__ std::uint32_t barrier(int index) const { return base + map.barriers + 8 * index; }
  __device__ std::uint32_t full(int stage) const { return barrier(stage); }
  __device__ std::uint32_t empty(int stage) const { return barrier(p.stages + stage); }
  __device__ std::uint32_t part_full(int buffer) const { return barrier(2 * p.stages + buffer); }
  __device__ std::uint32_t part_empty(int buffer) const { return barrier(2 * p.stages + p.part_buffers + buffer); }
  __device__ std::uint32_t inbox_full(int box) const { return barrier(2 * p.stages + 2 * p.part_buffers + box); }
  __device__ std::uint32_t x_full() const { return barrier(2 * p.stages + 2 * p.part_buffers + kInboxes); }
  __device__ std::uint32_t x_requested() const { return barrier(2 * p.stages + 2 * p.part_buffers + kInboxes + 1); }

  __device__ std::uint32_t x() const { return base + map.x; }
  __device__ float* parts(int buffer) const {
    return reinterpret_cast<float*>(shared + map.parts) + buffer * (part_bytes(p.x.m) / 4);
  }
  __device__ TokenRange* ranges() const { return reinterpret_cast<TokenRange*>(shared + map.ranges); }
  __device__ int stage_bytes() const { return kDecodeWarps * p.format.bytes; }
  __device__ Slice slice() const { return {rank, first_record, records, x(), x_full(), base + map.parts, ranges()}; }

  /// Multiplying and finishing warps meet here once, before the memory of sums is written: all dummy iterations, which read it, are over.
  __device__ static void end_warm_up() { ptx::named_barrier(3, kMultipliers + kFinishingThreads); }
};

}  // namespace nibble::cuda
