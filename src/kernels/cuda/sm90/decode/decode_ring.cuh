// The mainloop of both decode kernels on Hopper: a ring of records in, partial sums out. A Work says what records are multiplied by: float
// activations (decode.cu), or codes quantized from them by this kernel (wna8_decode.cu).
//
//   cluster of S CTAs: takes row tiles c, c + C, c + 2C, ...  (C clusters, all resident)
//     CTA of rank r: records [r·R/S, (r+1)·R/S) of each of them, R = K/128; its slice of x stays in shared memory
//
//       producer warp ──ring of stages──▶ 8 multiplying warps ──parts──▶ finishing warps ──inboxes of the cluster──▶ D
//
//       producer    eight records → stage, evict-first, as far ahead as the ring is long; starts before the previous kernel has ended
//       multiplying warp w: record w of every stage; at the end of a tile its partial sums → parts
//       finishing   reduce the 8 partial sums in the order of the warps; S = 1: epilogue, store. Else each row's sum goes to the rank that
//                   owns the row (about 64/S each), which adds S of them in order of rank one tile later
//
// So multiplying warps never wait at the end of a tile, and only the epilogue of the last tile is exposed. The order of a sum depends on K
// and S: for a given S a row's bits depend neither on M nor on the other rows. S is chosen from the weight's shape and format, the token
// capacity of a launch, and the GPU.
//
// A Work has
//   Params         RingParams of its own Acts
//   kTiles         of 8 tokens
//   place(i)       the kPlaces addresses where a lane finds activations of the slice's first record; record_bytes(i) on, those of the next
//   multiply, sum  of a record; of a row's parts
//   request        if it requests(): by the first finishing warp, after the previous kernel has ended: starts the copy of x
//   fetch          by the multiplying warps: on return x is in shared memory or, with kQuantizes, A may be read and other CTAs written to
//   quantize       with kQuantizes: by the multiplying warps before their first tile, and in the dummy iteration: A → codes
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "kernels/cuda/device/launch_shape.hpp"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/ring.cuh"
#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/tasks/decode.hpp"
#include "kernels/cuda/tasks/decode_ring.hpp"
#include "kernels/cuda/weights/decode_record.cuh"

namespace nibble::cuda {

constexpr int kMultipliers = 32 * kDecodeWarps;  // threads
constexpr int kProducer = kDecodeWarps;          // warp; those after it finish
/// A token's 64 rows are one warp's: one warp keeps up with 8 tokens, three with 16.
template <int kTiles>
constexpr int kFinishers = kTiles == 1 ? 1 : 3;
template <int kTiles>
constexpr int kThreads = kMultipliers + 32 * (1 + kFinishers<kTiles>);

/// The parameters of a launch. Acts is the Work's own description of activations, with the number of tokens, m.
template <class Acts>
struct RingParams {
  const std::uint8_t* records;
  Acts x;
  RecordFormat format;
  epilogue::Element epilogue;
  int first_token;  // of D, of this launch
  int n;
  int tiles, tile_records;
  int split;
  int row_lanes;  // log2 of the lanes that finish a token's rows of a rank, two each
  int stages;
  int part_buffers;
  int x_pitch;  // bytes between tokens
};

/// A CTA's records of a row tile, and the places of its activations in shared memory.
struct Slice {
  int rank;
  int first, records;    // of the tile's
  std::uint32_t x;       // token t's begin at x + t · x_pitch
  std::uint32_t x_full;  // a barrier of one arrival, of one use
  std::uint32_t parts;   // free until the first tile's sums
};

template <class Work>
__global__ void __launch_bounds__(kThreads<Work::kTiles>, 1) decode_ring_kernel(const __grid_constant__ typename Work::Params p) {
  constexpr int kTiles = Work::kTiles;
  extern __shared__ __align__(128) std::uint8_t shared[];
  const SharedMap map = shared_map(p.stages, p.format.bytes, p.x.m, p.x_pitch, p.part_buffers, p.split);
  const std::uint32_t base = ptx::shared_address(shared);
  const auto barrier = [&](int index) { return base + map.barriers + 8 * index; };
  const auto full = [&](int stage) { return barrier(stage); };
  const auto empty = [&](int stage) { return barrier(p.stages + stage); };
  const auto part_full = [&](int buffer) { return barrier(2 * p.stages + buffer); };
  const auto part_empty = [&](int buffer) { return barrier(2 * p.stages + p.part_buffers + buffer); };
  const auto inbox_full = [&](int buffer) { return barrier(2 * p.stages + 2 * p.part_buffers + buffer); };

  const std::uint32_t x_full = barrier(2 * p.stages + 2 * p.part_buffers + kInboxes);

  const int rank = p.split == 1 ? 0 : ptx::cluster_rank();
  const int clusters = gridDim.x / p.split;
  const int first_tile = blockIdx.x / p.split;
  const int first_record = rank * p.tile_records / p.split;
  const int slice = (rank + 1) * p.tile_records / p.split - first_record;  // records of a tile that are this CTA's
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const auto piece = [&] { return Slice{rank, first_record, slice, base + map.x, x_full, base + map.parts}; };
  float* parts = reinterpret_cast<float*>(shared + map.parts);
  const int part_floats = part_bytes(p.x.m) / 4;
  const int stage_bytes = kDecodeWarps * p.format.bytes;

  ptx::let_dependents_start();
  const std::uint8_t* const first_stage =
      p.records + (static_cast<std::int64_t>(first_tile) * p.tile_records + first_record) * p.format.bytes;
  const auto stage_of = [&](int r) {
    return min(kDecodeWarps, slice - r) * p.format.bytes;
  };  // bytes from record r of the slice on
  // Requests the records of the first row tile before any barrier: their latency is the longest.
  const int early = min(p.stages, (slice + kDecodeWarps - 1) / kDecodeWarps);
  if (warp == kProducer && lane == 0) {
    const std::uint64_t policy = ptx::evict_first();
    for (int s = 0; s < p.stages; ++s) {
      ptx::barrier_init(full(s), 1);
      ptx::barrier_init(empty(s), kDecodeWarps);
    }
    for (int b = 0; b < p.part_buffers; ++b) {
      ptx::barrier_init(part_full(b), kMultipliers);
      ptx::barrier_init(part_empty(b), 32 * kFinishers<kTiles>);
    }
    for (int b = 0; b < kInboxes; ++b) ptx::barrier_init(inbox_full(b), 1);
    ptx::barrier_init(x_full, 1);
    ptx::barrier_init_fence();
    for (int s = 0; s < early; ++s) {
      ptx::barrier_arrive_expect(full(s), stage_of(s * kDecodeWarps));
      ptx::bulk_copy(base + s * stage_bytes, first_stage + s * stage_bytes, stage_of(s * kDecodeWarps), full(s), policy);
    }
  }
  __syncthreads();
  if (p.split > 1) ptx::cluster_arrive();  // awaited before the first word to another CTA

  if (warp == kProducer) {
    if (lane == 0) {
      const std::uint64_t policy = ptx::evict_first();
      Cursor to{early % p.stages, early == p.stages ? 0u : 1u};  // an unused stage counts as emptied
      const std::uint8_t* from = first_stage;
      for (int tile = first_tile, r = early * kDecodeWarps; tile < p.tiles; tile += clusters, r = 0) {
        for (; r < slice; r += kDecodeWarps) {
          ptx::barrier_wait(empty(to.stage), to.parity);
          ptx::barrier_arrive_expect(full(to.stage), stage_of(r));
          ptx::bulk_copy(base + to.stage * stage_bytes, from + r * p.format.bytes, stage_of(r), full(to.stage), policy);
          to.advance(p.stages);
        }
        from += static_cast<std::int64_t>(clusters) * p.tile_records * p.format.bytes;
      }
    }
    if (p.split > 1) ptx::cluster_wait();
    return;
  }

  if (warp > kProducer) {
    const int finisher = warp - kProducer - 1;
    const float* inbox = reinterpret_cast<const float*>(shared + map.inbox);
    const int own_rows = rank_rows(p.split);
    const int box_floats = inbox_floats(p.split, p.x.m);
    const bool plain = p.epilogue.plain();
    bool warm_up = true;  // the dummy iteration of the multiplying warps; nothing is sent or stored
    const auto store = [&](int token, int n, float2 sum) {
      if (warm_up) return;
      if (plain && n + 1 < p.n) {
        p.epilogue.store_plain(p.first_token + token, n, sum);
      } else {
        if (n < p.n) p.epilogue.store(p.first_token + token, n, sum.x);
        if (n + 1 < p.n) p.epilogue.store(p.first_token + token, n + 1, sum.y);
      }
    };
    /// Calls use(token, row, sums of rows row and row + 1) for all of a tile.
    const auto for_each_sum = [&](int buffer, auto use) {
      const float* part = parts + buffer * part_floats;
#pragma unroll 2
      for (int token = finisher; token < p.x.m; token += kFinishers<kTiles>)
        use(token, 2 * lane, Work::sum(part, p.x.m, token, 2 * lane));
    };
    const auto send = [&](int buffer, int box) {
      const int rows = max(0, min(own_rows, gpu_tile::kRows - rank * own_rows));
      if (finisher == 0 && lane == 0) ptx::barrier_arrive_expect(inbox_full(box), p.split * p.x.m * rows * 4);
      const int owner = 2 * lane / own_rows;
      const std::uint32_t to =
          ptx::map_to_rank(base + map.inbox + (box * box_floats + rank * p.x.m * own_rows + 2 * lane % own_rows) * 4, owner);
      const std::uint32_t arrived = ptx::map_to_rank(inbox_full(box), owner);
      for_each_sum(buffer, [&](int token, int, float2 sum) { ptx::send(to + token * own_rows * 4, sum, arrived); });
    };
    const auto finish = [&](int tile, const Cursor& box) {
      if (!warm_up) ptx::barrier_wait_cluster(inbox_full(box.stage), box.parity);
      const float* in = warm_up ? parts : inbox + box.stage * box_floats;
      const int own = lane % (1 << p.row_lanes) * 2, row = rank * own_rows + own;
      const int step = 32 * kFinishers<kTiles> >> p.row_lanes;
      for (int token = (finisher * 32 + lane) >> p.row_lanes; token < p.x.m && own < own_rows && row < gpu_tile::kRows;
           token += step) {
        float2 total = {0.0f, 0.0f};
#pragma unroll 2
        for (int r = 0; r < p.split; ++r) {
          const float2 sum = *reinterpret_cast<const float2*>(in + (r * p.x.m + token) * own_rows + own);
          total.x += sum.x, total.y += sum.y;
        }
        store(token, tile * gpu_tile::kRows + row, total);
      }
      ptx::named_barrier(2, 32 * kFinishers<kTiles>);
    };

    Cursor from{0, 0}, fills{0, 0}, read{0, 0};
    const int end = p.tiles + (p.split > 1 ? clusters : 0);  // sums from other ranks are finished one tile later
    for (int tile = first_tile - clusters; tile < end; tile += clusters) {
      warm_up = tile < first_tile;
      if (tile < p.tiles) {
        if (!warm_up) ptx::barrier_wait(part_full(from.stage), from.parity);
        if (p.split == 1)
          for_each_sum(from.stage, [&](int token, int row, float2 sum) { store(token, tile * gpu_tile::kRows + row, sum); });
        else if (!warm_up)
          send(from.stage, fills.stage);
        if (!warm_up) {
          ptx::barrier_arrive(part_empty(from.stage));
          from.advance(p.part_buffers);
          fills.advance(kInboxes);
        }
      }
      // One tile later, so that no rank waits for a slower one. The sums of tile t overwrite those of t − 4: every rank had read these
      // before it sent those of t − 2, which have been read here.
      if (p.split > 1 && tile != first_tile) {
        finish(tile - clusters, read);
        if (!warm_up) read.advance(kInboxes);
      }
      if (!warm_up) continue;
      ptx::wait_for_predecessors();
      if (Work::requests(p) && finisher == 0) Work::request(p, first_record, slice, base + map.x, x_full, lane);
      ptx::named_barrier(3, kMultipliers + 32 * kFinishers<kTiles>);
      if (p.split > 1) ptx::cluster_wait();
    }
    return;
  }

  std::uint32_t x_at[Work::kPlaces];
#pragma unroll
  for (int i = 0; i < Work::kPlaces; ++i) x_at[i] = Work::place(p, base + map.x, lane, i);

  // Runs one dummy iteration first, on zero activations and whatever the memory of `parts` holds; its result is dropped. It fetches the
  // instructions (about 2 µs) while the first weights are in flight.
  const int all = (slice + kDecodeWarps - 1) / kDecodeWarps * kDecodeWarps;
  Cursor from{0, 0}, to{0, 1};
  for (int tile = first_tile - clusters; tile < p.tiles; tile += clusters) {
    const bool warm_up = tile < first_tile;
    if constexpr (Work::kQuantizes)
      if (tile <= first_tile) Work::quantize(p, piece(), warm_up);
    Sums<kTiles> acc = {};
    for (int r = warp; r < (warm_up ? warp + 1 : all); r += kDecodeWarps) {
      if (!warm_up) ptx::barrier_wait(full(from.stage), from.parity);
      if (r < slice) {
        std::uint32_t x[Work::kPlaces];
#pragma unroll
        for (int i = 0; i < Work::kPlaces; ++i) x[i] = warm_up ? base + map.parts : x_at[i] + r * Work::record_bytes(i);
        const std::uint32_t record = base + (warm_up ? map.parts : from.stage * stage_bytes + warp * p.format.bytes);
        Work::multiply(p.format, record, x, acc);
      }
      __syncwarp();
      if (!warm_up) {
        if (lane == 0) ptx::barrier_arrive(empty(from.stage));
        from.advance(p.stages);
      }
    }
    if (!warm_up) ptx::barrier_wait(part_empty(to.stage), to.parity);
    write_part<kTiles>(parts + to.stage * part_floats, warp, warm_up ? 0 : p.x.m, p.x.m, acc);
    if (!warm_up) {
      ptx::barrier_arrive(part_full(to.stage));
      to.advance(p.part_buffers);
      continue;
    }
    ptx::named_barrier(3, kMultipliers + 32 * kFinishers<kTiles>);  // all dummy iterations are over: shared memory may be written
    Work::fetch(p, first_record, slice, base + map.x, x_full);
  }
  if (!Work::kQuantizes && p.split > 1) ptx::cluster_wait();
}

// ---- launch

/// The room of the current device; asked once per device, of any kernel for 8 tokens.
inline cudaError_t ring_room(const void* kernel, RingRoom& room) {
  static std::atomic<int> known[kMaxDevices][kMaxSplit + 1];
  int device = 0;
  if (const cudaError_t e = most_shared(device, room.bytes)) return e;
  for (int split = 1; split <= kMaxSplit; ++split) {
    std::atomic<int>& cached = known[device][split];
    int clusters = cached.load();
    if (clusters == 0) {
      if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room.bytes)) return e;
      LaunchShape shape(split, split, kThreads<1>, room.bytes, nullptr);
      if (const cudaError_t e = cudaOccupancyMaxActiveClusters(&clusters, kernel, &shape.config)) return e;
      cached.store(clusters);
    }
    room.clusters[static_cast<std::size_t>(split)] = clusters;
  }
  return cudaSuccess;
}

/// The parameters of a launch that follow from the weight, the folds of a record (x_pitch) and the configuration.
template <class Acts>
RingParams<Acts> ring_params(const DeviceWeight& weight, const epilogue::Element& epilogue, int folds,
                             const DecodeConfig& config) {
  const gpu_tile::Geometry& geo = weight.geometry;
  RingParams<Acts> p{};
  p.records = static_cast<const std::uint8_t*>(weight.records);
  p.format = record_format(weight);
  p.epilogue = epilogue;
  p.n = static_cast<int>(geo.n);
  p.tiles = geo.tiles();
  p.tile_records = geo.records();
  p.split = config.split;
  p.row_lanes = std::bit_width(static_cast<unsigned>(rank_rows(config.split) / 2 - 1));
  p.stages = config.stages;
  p.part_buffers = part_buffers(config.tokens);
  p.x_pitch = x_pitch(geo, config.split, folds);
  return p;
}

template <class Acts>
cudaError_t launch_ring(const Launchable<RingParams<Acts>>& kernel, const RingParams<Acts>& p, const DecodeConfig& config,
                        cudaStream_t stream) {
  if (const cudaError_t e = kernel.allow_all_shared()) return e;
  LaunchShape shape(config.grid, config.split, p.x.m <= 8 ? kThreads<1> : kThreads<2>, config.smem, stream);
  return cudaLaunchKernelEx(&shape.config, kernel.kernel, p);
}

}  // namespace nibble::cuda
