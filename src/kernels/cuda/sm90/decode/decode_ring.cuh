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
//   request_factors  if it has_factors(): by the producer, before the previous kernel has ended: starts the copy of what x is multiplied by
//   request        if it requests(): by the first finishing warp, after the previous kernel has ended: starts the copy of x
//   fetch          by the multiplying warps: on return x is in shared memory or, with kQuantizes, A may be read and other CTAs written to
//   fetch_steps    by the finishing warps, in their dummy iteration: fetches the instructions of what fetch does beside waiting; reads parts
//   restore_range  by the multiplying warps: gives the sums of a row tile the unit that fetch has taken out of x, if it has
//   quantize       with kQuantizes: by the multiplying warps before their first tile, and in the dummy iteration: A → codes
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "kernels/cuda/device/launch_shape.hpp"
#include "kernels/cuda/device/prefetch.cuh"
#include "kernels/cuda/sm90/decode/decode_cta.cuh"
#include "kernels/cuda/sm90/decode/decode_finish.cuh"

namespace nibble::cuda {

/// Clocks that the producer, with one stage requested, waits for x to be requested. An SM's requests are served in their order: behind a full
/// ring x comes when the ring has come. While the previous kernel runs x cannot be requested; the ring is filled then.
constexpr int kPatience = 700;

/// The producer warp: one of its threads.
template <class Work>
struct Produce : DecodeCta<Work> {
  using Base = DecodeCta<Work>;
  using Base::p, Base::base, Base::records, Base::full, Base::empty;

  const std::uint8_t* first_stage;  // in memory
  int early;                        // stages that are requested before any is empty again

  __device__ explicit Produce(const Base& cta)
      : Base(cta),
        first_stage(p.records + (static_cast<std::int64_t>(cta.first_tile) * p.tile_records + cta.first_record) * p.format.bytes),
        early(min(p.stages, (records + kDecodeWarps - 1) / kDecodeWarps)) {}

  __device__ void initialise_barriers() const {
    for (int s = 0; s < p.stages; ++s) {
      ptx::barrier_init(full(s), 1);
      ptx::barrier_init(empty(s), kDecodeWarps);
    }
    for (int b = 0; b < p.part_buffers; ++b) {
      ptx::barrier_init(this->part_full(b), kMultipliers);
      ptx::barrier_init(this->part_empty(b), kFinishingThreads);
    }
    for (int b = 0; b < kInboxes; ++b) ptx::barrier_init(this->inbox_full(b), 1);
    ptx::barrier_init(this->x_full(), Work::has_factors(p) ? 2 : 1);
    ptx::barrier_init(this->x_requested(), 1);
    ptx::barrier_init_fence();
  }
  /// Requests the first records: their latency is the longest.
  __device__ void request_first() const {
    request(0, first_stage, 0, ptx::evict_first());
    if (Work::has_factors(p)) Work::request_factors(p, this->first_record, records, base, this->x_full());
  }
  __device__ void run() const {
    const std::uint64_t policy = ptx::evict_first();
    if (Work::requests(p)) ptx::barrier_wait_briefly(this->x_requested(), 0, kPatience);
    for (int s = 1; s < early; ++s) request(s, first_stage, s * kDecodeWarps, policy);
    Cursor to{early % p.stages, early == p.stages ? 0u : 1u};  // an unused stage counts as emptied
    const std::uint8_t* from = first_stage;
    for (int tile = this->first_tile, r = early * kDecodeWarps; tile < p.tiles; tile += this->clusters, r = 0) {
      for (; r < records; r += kDecodeWarps) {
        ptx::barrier_wait(empty(to.stage), to.parity);
        request(to.stage, from, r, policy);
        to.advance(p.stages);
      }
      from += static_cast<std::int64_t>(this->clusters) * p.tile_records * p.format.bytes;
    }
    prefetch(p.next);
  }
  /// Records r, r + 1, … of a row tile whose first is at `from`.
  __device__ void request(int stage, const std::uint8_t* from, int r, std::uint64_t policy) const {
    const int bytes = min(kDecodeWarps, records - r) * p.format.bytes;
    ptx::barrier_arrive_expect(full(stage), bytes);
    ptx::bulk_copy(base + stage * this->stage_bytes(), from + r * p.format.bytes, bytes, full(stage), policy);
  }
};

/// The multiplying warps.
template <class Work>
struct Multiply : DecodeCta<Work> {
  using Base = DecodeCta<Work>;
  using Base::p, Base::base, Base::map, Base::records, Base::warp, Base::lane, Base::full, Base::empty;

  __device__ explicit Multiply(const Base& cta) : Base(cta) {}

  // Runs one dummy iteration first, on zero activations and whatever the memory of `parts` holds; its result is dropped. It fetches the
  // instructions (about 2 µs) while the first weights are in flight.
  __device__ __forceinline__ void run() const {
    std::uint32_t x_at[Work::kPlaces];
#pragma unroll
    for (int i = 0; i < Work::kPlaces; ++i) x_at[i] = Work::place(p, this->x(), lane, i);
    const int all = (records + kDecodeWarps - 1) / kDecodeWarps * kDecodeWarps;
    Cursor from{0, 0}, to{0, 1};
    for (int tile = this->first_tile - this->clusters; tile < p.tiles; tile += this->clusters) {
      const bool warm_up = tile < this->first_tile;
      if constexpr (Work::kQuantizes)
        if (tile <= this->first_tile) Work::quantize(p, this->slice(), warm_up);
      Sums<Work::kTiles> acc = {};
      for (int r = warp; r < (warm_up ? warp + 1 : all); r += kDecodeWarps) {
        if (!warm_up) ptx::barrier_wait(full(from.stage), from.parity);
        if (r < records) {
          std::uint32_t x[Work::kPlaces];
#pragma unroll
          for (int i = 0; i < Work::kPlaces; ++i) x[i] = warm_up ? base + map.parts : x_at[i] + r * Work::record_bytes(i);
          const std::uint32_t record = base + (warm_up ? map.parts : from.stage * this->stage_bytes() + warp * p.format.bytes);
          Work::multiply(p.format, record, x, acc);
        }
        __syncwarp();
        if (!warm_up) {
          if (lane == 0) ptx::barrier_arrive(empty(from.stage));
          from.advance(p.stages);
        }
      }
      if (!Work::kQuantizes && tile == this->first_tile) this->end_warm_up();
      if (!warm_up) ptx::barrier_wait(this->part_empty(to.stage), to.parity);
      if (!warm_up) Work::restore_range(p, this->ranges(), acc);
      write_part<Work::kTiles>(this->parts(to.stage), warp, warm_up ? 0 : p.x.m, p.x.m, acc);
      if (!warm_up) {
        ptx::barrier_arrive(this->part_full(to.stage));
        to.advance(p.part_buffers);
        continue;
      }
      if (Work::kQuantizes) this->end_warm_up();
      Work::fetch(p, this->slice(), base);
    }
  }
};

template <class Work>
__global__ void __launch_bounds__(kThreads, 1) decode_ring_kernel(const __grid_constant__ typename Work::Params p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const DecodeCta<Work> cta(p, shared);
  const Produce<Work> producer(cta);
  ptx::let_dependents_start();
  if (cta.warp == kProducer && ptx::elected()) {
    producer.initialise_barriers();
    producer.request_first();
  }
  __syncthreads();
  if (p.split > 1) ptx::cluster_arrive();  // awaited before the first word to another CTA
  if (cta.warp == kProducer) {
    if (ptx::elected()) producer.run();
    if (p.split > 1) ptx::cluster_wait();
  } else if (cta.warp > kProducer) {
    Finish<Work>(cta).run();
  } else {
    Multiply<Work>(cta).run();
    if (!Work::kQuantizes && p.split > 1) ptx::cluster_wait();
  }
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
      LaunchShape shape(split, split, kThreads, room.bytes, nullptr);
      if (const cudaError_t e = cudaOccupancyMaxActiveClusters(&clusters, kernel, &shape.config)) return e;
      cached.store(clusters);
    }
    room.clusters[static_cast<std::size_t>(split)] = clusters;
  }
  return cudaSuccess;
}

/// The parameters of a launch that follow from the weight, the folds of a record (x_pitch) and the configuration.
template <class Acts, class Task>
RingParams<Acts> ring_params(const Task& task, int folds, const DecodeConfig& config) {
  const DeviceWeight& weight = task.weight;
  const gpu_tile::Geometry& geo = weight.geometry;
  RingParams<Acts> p{};
  p.records = static_cast<const std::uint8_t*>(weight.records);
  p.format = record_format(weight);
  p.epilogue = task.epilogue;
  p.next = task.next;
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
  LaunchShape shape(config.grid, config.split, kThreads, config.smem, stream);
  return cudaLaunchKernelEx(&shape.config, kernel.kernel, p);
}

}  // namespace nibble::cuda
