// Decode of rows of experts on Hopper: the ring of decode_ring.cuh for a list of tiles (tasks/expert_tiles.hpp), each up to 8 rows of A of one
// expert.
//
//   An item is a tile times a run of row tiles of its expert's weight, over all of K. Items follow one another tile by tile, and each CTA gets
//   an equal share of them, one after the other; how many there are is known to the GPU only.
//
//     tile 0, expert 2   │ item 0 │ 1 │ 2 │ … │          CTA 0: items 0 … 3, of one tile
//     tile 1, expert 5   │ item 4 │ 5 │ 6 │ … │          CTA 1: items 4 … 7, of another
//
//   producer warp ──ring of stages──▶ 8 multiplying warps ──parts──▶ finishing warps ──▶ D
//                    rows of A ─────────▶                                  │
//                        └───────────── the next tile's ◀──────────────────┘
//
//       producer    eight records → stage, as far ahead as the ring is long, over the ends of items and of tiles
//       multiplying warp w: record w of every stage; at the end of a row tile its partial sums → parts
//       finishing   adds the 8 partial sums in the order of the warps; the epilogue. Sums of a tile's last item say that its rows of A have been
//                   read: the first finishing warp then requests those of the next tile
//
// Up to 32 pairs of tokens and experts are sorted by this kernel: every CTA makes the list of tiles in its shared memory, and the first one
// writes it to memory, for the kernels that follow.
//
// One launch may have two products, of which the second multiplies what the first writes, as down does in a layer of experts. Only its rows of A
// have to wait for that, so memory goes on:
//
//   producer     first product's records ▒▒▒▒▒▒▒▒▒│▓▓▓▓▓▓▓ second's, a ring ahead ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
//   multiplying           ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│        ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
//   finishing       the sums of each row tile, D  │──┬──▶ rows of A of the second, from the first one's D
//                                  tell all CTAs ─┘  └─ all CTAs have told
//
// CTAs wait for each other, so that all have to run at once: the launch is cooperative.
//
// A run is as long as keeps eight warps busy: of 12 records a row tile, which take two rounds of eight, two row tiles take three. Nothing splits
// K, and a run begins at a multiple of its length, so that a row's bits depend on its expert and itself alone.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/meeting.cuh"
#include "kernels/cuda/device/sort_few.cuh"
#include "kernels/cuda/sm90/decode/decode_range.cuh"
#include "kernels/cuda/sm90/decode/decode_ring.cuh"

namespace nibble::cuda {

/// Row tiles of a run: of 1, 2, 4 and 8 the fewest of whose rounds of eight warps nine tenths have a record. More would leave few items, and
/// multiprocessors without any: 8 tiles of 23 records have none to spare, one has a twenty-fourth.
constexpr int row_tiles_of_run(int records) {
  int run = 1;
  const auto rounds = [records](int tiles) { return (tiles * records + kDecodeWarps - 1) / kDecodeWarps; };
  while (run < kDecodeWarps && 10 * run * records < 9 * kDecodeWarps * rounds(run)) run *= 2;
  return run;
}
static_assert(row_tiles_of_run(32) == 1 && row_tiles_of_run(23) == 1 && row_tiles_of_run(12) == 2 && row_tiles_of_run(6) == 4);

/// The items of a CTA that are left; the first is run `run` of the weight times tile `tile` of the list.
struct Items {
  int tile, run, left;
  int runs;  // of a weight

  __device__ void advance() {
    --left;
    if (++run == runs) run = 0, ++tile;
  }
  /// Whether the next item is of another tile, or there is none.
  __device__ bool ends_tile() const { return left == 1 || run + 1 == runs; }
};

/// One product, or two in one launch. Both have the same pairs, tiles of as many rows, records of one format, and shared memory of one map.
template <class Params>
struct ExpertProducts {
  Params products[2];
  int count;
  Meeting* meeting;  // of two, after the first
  std::uint64_t ticket;
};

/// Where the multiplying warps are, over both products.
struct Multiplying {
  Cursor from{0, 0}, to{0, 1};  // a stage, and a buffer of partial sums
  std::uint32_t x_parity = 0;
  bool warm_up = true;
};

/// A CTA's part of a product. `Work` is that of a linear layer with up to 8 tokens of float activations. p is the first product, which has what
/// both share: the list of tiles, the format of records, the map of shared memory; p.x.m: rows of a tile, at most.
template <class Work>
struct ExpertCta : DecodeCta<Work> {
  using Base = DecodeCta<Work>;
  using Base::full, Base::empty, Base::part_full, Base::part_empty, Base::x_full, Base::x_requested;
  using Base::p, Base::base, Base::map, Base::warp, Base::lane;
  using Params = typename Work::Params;

  const Params& own;  // the product
  int records;        // of its row tiles

  __device__ ExpertCta(const ExpertProducts<Params>& both, int product, std::uint8_t* memory)
      : Base(both.products[0], memory), own(both.products[product]), records(own.tile_records) {}

  // The list can be read when this kernel starts, because those from the one that writes it on let their successors start only then
  // (steps/experts.cu). It is read past L1, which may have an earlier kernel's.
  __device__ bool sorts() const { return p.sort.ids != nullptr; }
  __device__ FewTiles& few() const { return *reinterpret_cast<FewTiles*>(this->shared + p.few_tiles); }
  __device__ int tiles() const { return sorts() ? few().count : __ldcg(&p.experts.count->tiles); }
  __device__ int expert(int tile) const { return sorts() ? few().tiles[tile].expert : __ldcg(&p.experts.tiles[tile].expert); }
  __device__ int first_row(int tile) const { return sorts() ? few().tiles[tile].first : __ldcg(&p.experts.tiles[tile].first); }
  __device__ int rows(int tile) const { return sorts() ? few().tiles[tile].rows : __ldcg(&p.experts.tiles[tile].rows); }
  /// Where row `row` of A lies.
  __device__ std::int64_t source(int row) const {
    if (own.experts.source == nullptr) return row;
    return (sorts() ? few().source[row] : __ldcg(own.experts.source + row)) / own.experts.divisor;
  }
  __device__ SortedPair sorted_pair() const { return sort_few(lane < p.sort.rows ? expert_of_pair(p.sort, lane) : -1); }
  /// One warp makes the list, of which this product is the first.
  __device__ void sort() const {
    const SortedPair pair = sorted_pair();
    if (pair.expert >= 0) few().source[pair.row] = lane;
    const int count = for_each_tile(pair, p.sort.products[0].rows, [&](int t, const ExpertTile& tile) { few().tiles[t] = tile; });
    if (lane == 0) few().count = count;
  }
  /// One warp lets the next kernel start, whose list can then be read: the first CTA writes it first.
  __device__ void let_next_start() const {
    if (blockIdx.x == 0) {
      write_sorted(p.sort, sorted_pair());
      __threadfence();
      __syncwarp();
    }
    ptx::let_dependents_start();
  }
  __device__ Items items(unsigned tiles, unsigned cta) const {
    const unsigned runs = (own.tiles + own.run - 1) / own.run, all = tiles * runs;
    const unsigned each = all / gridDim.x, more = all % gridDim.x, first = cta * each + min(cta, more);
    return {static_cast<int>(first / runs), static_cast<int>(first % runs), static_cast<int>(each + (cta < more)),
            static_cast<int>(runs)};
  }
  /// Of an item: the last run of a weight may be shorter.
  __device__ int row_tiles(const Items& at) const { return min(own.run, own.tiles - at.run * own.run); }

  __device__ void initialise_barriers() const {
    for (int s = 0; s < p.stages; ++s) {
      ptx::barrier_init(full(s), 1);
      ptx::barrier_init(empty(s), kDecodeWarps);
    }
    for (int b = 0; b < p.part_buffers; ++b) {
      ptx::barrier_init(part_full(b), kMultipliers);
      ptx::barrier_init(part_empty(b), kFinishingThreads);
    }
    ptx::barrier_init(x_full(), 1);
    ptx::barrier_init(x_requested(), 1);
    ptx::barrier_init_fence();
  }
  /// The channels past K of the last record are zeros: rows are copied up to K. `threads` threads call it, before the first copy.
  __device__ void clear_rest_of_rows(int thread, int threads) const {
    const int first = own.x.rule.k * 2, words = (records * gpu_tile::kChannels * 2 - first) / 4;
    for (int i = thread; i < p.x.m * words; i += threads)
      *reinterpret_cast<std::uint32_t*>(this->shared + map.x + i / words * p.x_pitch + first + i % words * 4) = 0;
  }

  // ---- roles

  /// The producer: one thread. It requests one stage, waits a moment for rows of A to be requested (kPatience), and goes on.
  __device__ void request_records(Items at, int first_expert, Cursor& to, bool& starts) const {
    const std::uint64_t policy = ptx::evict_first();
    const std::uint8_t* weight = own.records + first_expert * own.experts.weight_pitch;
    bool starts_tile = false;
    for (; at.left > 0; at.advance()) {
      if (starts_tile) weight = own.records + expert(at.tile) * own.experts.weight_pitch;
      starts_tile = at.ends_tile();
      const std::uint8_t* const from = weight + std::int64_t{at.run} * own.run * records * p.format.bytes;
      const int all = row_tiles(at) * records;
      for (int r = 0; r < all; r += kDecodeWarps) {
        ptx::barrier_wait(empty(to.stage), to.parity);
        const int bytes = min(kDecodeWarps, all - r) * p.format.bytes;
        ptx::barrier_arrive_expect(full(to.stage), bytes);
        ptx::bulk_copy(base + to.stage * this->stage_bytes(), from + r * p.format.bytes, bytes, full(to.stage), policy);
        to.advance(p.stages);
        if (starts) ptx::barrier_wait_briefly(x_requested(), 0, kPatience);
        starts = false;
      }
    }
  }

  // The multiplying warps run one dummy row tile first, as those of a linear layer: it fetches their instructions while the first records are
  // in flight, reads what the memory of `parts` holds, and stores nothing.
  __device__ __forceinline__ void multiply(Items at, Multiplying& state) const {
    auto& [from, to, x_parity, warm_up] = state;
    const std::uint32_t x_at = Work::place(p, this->x(), lane, 0);
    int count = 0;
    bool starts_tile = true;
    while (at.left > 0) {
      if (!warm_up && starts_tile) {
        count = rows(at.tile);
        ptx::barrier_wait(x_full(), x_parity);
        x_parity ^= 1;
        if (Work::narrows(p)) {
          narrow(this->x(), p.x_pitch, count, records * gpu_tile::kChannels, this->ranges(), threadIdx.x, false);
          ptx::fence_for_copies();  // the next tile's rows are copied there
        }
      }
      const int tiles = warm_up ? 1 : row_tiles(at);
      int r = warp;  // the warp's next record, counted from the first one of a row tile
      for (int t = 0; t < tiles; ++t) {
        Sums<1> acc = {};
        for (; r < (warm_up ? warp + 1 : records); r += kDecodeWarps) {
          if (!warm_up) ptx::barrier_wait(full(from.stage), from.parity);
          const std::uint32_t x[1] = {warm_up ? base + map.parts : x_at + r * Work::record_bytes(0)};
          const std::uint32_t record = base + (warm_up ? map.parts : from.stage * this->stage_bytes() + warp * p.format.bytes);
          Work::multiply(p.format, record, x, acc);
          if (!warm_up) release(from);
        }
        r -= records;
        if (warm_up)
          ptx::named_barrier(1, kMultipliers);  // all have read what is written now
        else
          ptx::barrier_wait(part_empty(to.stage), to.parity);
        if (!warm_up) Work::restore_range(p, this->ranges(), acc);
        write_part<1>(this->parts(to.stage), warp, warm_up ? 0 : count, p.x.m, acc);
        if (warm_up) continue;
        ptx::barrier_arrive(part_full(to.stage));
        to.advance(p.part_buffers);
      }
      if (!warm_up) {
        const int rest = tiles * records % kDecodeWarps;
        if (rest != 0 && warp >= rest) {  // the last stage has no record for this warp
          ptx::barrier_wait(full(from.stage), from.parity);
          release(from);
        }
        starts_tile = at.ends_tile();
        at.advance();
      }
      warm_up = false;
    }
  }
  __device__ __forceinline__ void release(Cursor& from) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(empty(from.stage));
    from.advance(p.stages);
  }

  /// The finishing warps, once the first rows of A have been requested.
  __device__ void finish(Items at, Cursor& from) const {
    const int finisher = warp - kProducer - 1;
    const bool halves = own.epilogue.plain(), floats = own.epilogue.plain_floats();
    int row = 0, count = 0;
    float scale2 = 1.0f;
    for (bool starts_tile = true; at.left > 0; at.advance()) {
      if (starts_tile) {
        row = first_row(at.tile), count = rows(at.tile);
        if (own.experts.scale2 != nullptr) scale2 = __ldg(own.experts.scale2 + expert(at.tile));
      }
      starts_tile = at.ends_tile();
      const int tiles = row_tiles(at);
      for (int t = 0; t < tiles; ++t) {
        ptx::barrier_wait(part_full(from.stage), from.parity);
        if (finisher == 0 && t + 1 == tiles && starts_tile && at.left > 1) request_rows(at.tile + 1);
        const int n = (at.run * own.run + t) * gpu_tile::kRows + 2 * lane;
#pragma unroll 1
        for (int token = finisher; token < count; token += kFinishers) {
          float2 sum = Work::sum(this->parts(from.stage), p.x.m, token, 2 * lane);
          sum.x *= scale2, sum.y *= scale2;
          if (floats && n + 1 < own.n) {
            own.epilogue.store_plain_floats(row + token, n, sum);
          } else if (halves && n + 1 < own.n) {
            own.epilogue.store_plain(row + token, n, sum);
          } else {
            own.epilogue.store_two(row + token, n, sum.x, sum.y, own.n);
          }
        }
        ptx::barrier_arrive(part_empty(from.stage));
        from.advance(p.part_buffers);
      }
    }
  }
  /// The finishing warps, before anything else.
  __device__ void request_first_rows(const ExpertProducts<Params>& both, const Items& at) const {
    // Rows that the list's writer names with `source` were in memory before it ran, so that they need no waiting for its end.
    if (own.experts.source == nullptr) ptx::wait_for_predecessors();
    if (warp == kProducer + 1) {
      if (at.left > 0) request_rows(at.tile);
      if (lane == 0) ptx::barrier_arrive(x_requested());
    }
    if (Work::narrows(p)) fetch_narrow(base + map.parts, this->parts(0), threadIdx.x - kMultipliers - 32);
    ptx::wait_for_predecessors();  // before operands of the epilogue are read, and D is written
    if (both.count > 1 && warp == kProducer + 1 && lane == 0) open_meeting(both.meeting, both.ticket);
  }
  /// The finishing warps, after the first of two products: when all CTAs have stored its results, the first rows of the second can be copied.
  __device__ void request_results(const ExpertProducts<Params>& both, const Items& at) const {
    ptx::named_barrier(2, kFinishingThreads);
    if (warp != kProducer + 1) return;
    if (lane == 0) meet(both.meeting);
    __syncwarp();
    ptx::fence_for_copies();
    if (at.left > 0) {
      clear_rest_of_rows(lane, 32);
      request_rows(at.tile);
    }
    if (lane == 0) leave_meeting(both.meeting);
  }
  /// A tile's rows of A, each a copy of one lane.
  __device__ void request_rows(int tile) const {
    const int count = rows(tile), row = first_row(tile) + lane, bytes = own.x.rule.k * 2;
    if (lane == 0) ptx::barrier_arrive_expect(x_full(), count * bytes);
    __syncwarp();
    if (lane >= count) return;
    ptx::bulk_copy(this->x() + lane * p.x_pitch, static_cast<const std::uint16_t*>(own.x.x) + source(row) * own.x.stride, bytes,
                   x_full(), ptx::evict_last());
  }
};

/// `Work::kJoins`: the kernel has registers for two products.
template <class Work>
__global__ void __launch_bounds__(kThreads, 1)
    decode_experts_kernel(const __grid_constant__ ExpertProducts<typename Work::Params> both) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const ExpertCta<Work> first(both, 0, shared);
  const bool sorts = first.sorts();
  // A CTA's first tile follows from the number of tiles: the experts of the first 32 are loaded together with it.
  int tiles = 0, of_lane = 0;
  const auto load_tiles = [&] { tiles = first.tiles(), of_lane = first.expert(min(first.lane, first.p.experts.most - 1)); };
  if (!sorts) {
    ptx::let_dependents_start();
    load_tiles();
  }
  if (first.warp == kProducer && ptx::elected()) first.initialise_barriers();
  first.clear_rest_of_rows(threadIdx.x, kThreads);
  if (sorts) {
    ptx::wait_for_predecessors();
    if (first.warp == 0) first.sort();
  }
  __syncthreads();
  if (sorts) {
    if (first.warp == kProducer + kFinishers) first.let_next_start();
    load_tiles();
  }
  if (tiles == 0) return ptx::wait_for_predecessors();  // else it could end before them
  // The CTAs with one item more of the first product are those with one less of the second.
  const auto items_of = [&](const ExpertCta<Work>& cta, int product) {
    return cta.items(tiles, product == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  };
  const int products = Work::kJoins ? both.count : 1;
  // One copy of each role's loop serves both products: a second one would have to be fetched in the middle.
  if (first.warp > kProducer) {
    Cursor from{0, 0};
#pragma unroll 1
    for (int i = 0; i < products; ++i) {
      const ExpertCta<Work> cta(both, i, shared);
      const Items items = items_of(cta, i);
      if (i == 0)
        cta.request_first_rows(both, items);
      else
        cta.request_results(both, items);
      cta.finish(items, from);
    }
  } else if (first.warp < kProducer) {
    Multiplying state;
#pragma unroll 1
    for (int i = 0; i < products; ++i) {
      const ExpertCta<Work> cta(both, i, shared);
      cta.multiply(items_of(cta, i), state);
    }
  } else {
    Cursor to{0, 1};  // an unused stage counts as emptied
    bool starts = true;
#pragma unroll 1
    for (int i = 0; i < products; ++i) {
      const ExpertCta<Work> cta(both, i, shared);
      const Items items = items_of(cta, i);
      const int loaded = __shfl_sync(~0u, of_lane, items.tile % 32);
      if (items.left == 0) continue;
      if (ptx::elected()) cta.request_records(items, items.tile < 32 ? loaded : cta.expert(items.tile), to, starts);
    }
  }
}

}  // namespace nibble::cuda
