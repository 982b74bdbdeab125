// The finishing warps of the decode kernels on Hopper: partial sums of the multiplying warps → D.
//
//   parts: 8 sums of a row ──added in the order of the warps──▶ S = 1: the epilogue, D
//                                                         └──▶ S > 1: the inbox of the rank that owns the row (about 64/S rows each)
//   inbox: S sums of a row ──added in the order of the ranks, one tile later──▶ the epilogue, D
#pragma once

#include <cstdint>

#include "kernels/cuda/sm90/decode/decode_cta.cuh"

namespace nibble::cuda {

template <class Work>
struct Finish : DecodeCta<Work> {
  using Base = DecodeCta<Work>;
  using Base::p, Base::shared, Base::map, Base::base, Base::rank, Base::clusters, Base::first_tile, Base::first_record,
      Base::records, Base::lane;
  using Base::part_full, Base::part_empty, Base::inbox_full, Base::parts;

  int finisher;              // number of this warp
  int own_rows, box_floats;  // of a rank; of an inbox
  bool plain;                // the epilogue is

  __device__ explicit Finish(const Base& cta)
      : Base(cta),
        finisher(cta.warp - kProducer - 1),
        own_rows(rank_rows(p.split)),
        box_floats(inbox_floats(p.split, p.x.m)),
        plain(p.epilogue.plain()) {}

  // In the dummy iteration (warm_up) everything runs but what would wait, send or store. x is requested before it: multiplying warps wait
  // for x at once, and for this warp at the end of a tile.

  __device__ __forceinline__ void run() const {
    if (Work::requests(p)) {
      ptx::wait_for_predecessors();
      if (finisher == 0) {
        Work::request(p, first_record, records, this->x(), this->x_full(), lane);
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(this->x_requested());
      }
    }
    Cursor from{0, 0}, fills{0, 0}, read{0, 0};              // a buffer of parts, the inbox that it goes to, the inbox to finish
    const int end = p.tiles + (p.split > 1 ? clusters : 0);  // sums from other ranks are finished one tile later
    for (int tile = first_tile - clusters; tile < end; tile += clusters) {
      const bool warm_up = tile < first_tile;
      if (tile < p.tiles) {
        if (!warm_up) ptx::barrier_wait(part_full(from.stage), from.parity);
        if (p.split == 1)
          for_each_sum(from.stage,
                       [&](int token, int row, float2 sum) { store(token, tile * gpu_tile::kRows + row, sum, warm_up); });
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
        add_ranks(tile - clusters, read, warm_up);
        if (!warm_up) read.advance(kInboxes);
      }
      if (!warm_up) continue;
      Work::fetch_steps(p, base + map.parts, parts(0), 32 * finisher + lane);
      ptx::wait_for_predecessors();
      this->end_warm_up();
      if (p.split > 1) ptx::cluster_wait();
    }
  }

  /// Calls use(token, row, sums of rows row and row + 1) for all of a tile.
  template <class Use>
  __device__ __forceinline__ void for_each_sum(int buffer, Use use) const {
    const float* part = parts(buffer);
#pragma unroll 2
    for (int token = finisher; token < p.x.m; token += kFinishers) use(token, 2 * lane, Work::sum(part, p.x.m, token, 2 * lane));
  }
  __device__ __forceinline__ void send(int buffer, int box) const {
    const int rows = max(0, min(own_rows, gpu_tile::kRows - rank * own_rows));
    if (finisher == 0 && lane == 0) ptx::barrier_arrive_expect(inbox_full(box), p.split * p.x.m * rows * 4);
    const int owner = 2 * lane / own_rows;
    const std::uint32_t to =
        ptx::map_to_rank(base + map.inbox + (box * box_floats + rank * p.x.m * own_rows + 2 * lane % own_rows) * 4, owner);
    const std::uint32_t arrived = ptx::map_to_rank(inbox_full(box), owner);
    for_each_sum(buffer, [&](int token, int, float2 sum) { ptx::send(to + token * own_rows * 4, sum, arrived); });
  }
  /// Adds the ranks' sums of the rows that this one owns.
  __device__ __forceinline__ void add_ranks(int tile, const Cursor& box, bool warm_up) const {
    if (!warm_up) ptx::barrier_wait_cluster(inbox_full(box.stage), box.parity);
    const float* in = warm_up ? parts(0) : reinterpret_cast<const float*>(shared + map.inbox) + box.stage * box_floats;
    const int own = lane % (1 << p.row_lanes) * 2, row = rank * own_rows + own;
    const int step = kFinishingThreads >> p.row_lanes;
    for (int token = (finisher * 32 + lane) >> p.row_lanes; token < p.x.m && own < own_rows && row < gpu_tile::kRows;
         token += step) {
      float2 total = {0.0f, 0.0f};
#pragma unroll 2
      for (int r = 0; r < p.split; ++r) {
        const float2 sum = *reinterpret_cast<const float2*>(in + (r * p.x.m + token) * own_rows + own);
        total.x += sum.x, total.y += sum.y;
      }
      store(token, tile * gpu_tile::kRows + row, total, warm_up);
    }
    ptx::named_barrier(2, kFinishingThreads);
  }
  __device__ __forceinline__ void store(int token, int n, float2 sum, bool warm_up) const {
    if (warm_up) return;
    if (plain && n + 1 < p.n) {
      p.epilogue.store_plain(p.first_token + token, n, sum);
    } else {
      p.epilogue.store_two(p.first_token + token, n, sum.x, sum.y, p.n);
    }
  }
};

}  // namespace nibble::cuda
