// The tile scheduler of experts. A tile has any number of rows, so that passes take different times, and CTAs draw them one by one. Their order is
// that of the schedule, in which passes that run at the same time share their inputs.
//
//   a thread of the producers':  draws a number, reads its tile ──slot s──▶ all threads that need the passes: other producers, multiplying warps
//
//   is_drawn[s]   slot s has a pass
//   is_read[s]    all readers have read it: it may be overwritten
//
// The first pass of a CTA is its own number and not drawn. Numbers come from a counter in memory, which the sort of the rows sets to 0, as does the
// CTA that draws the last number.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/passes.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/ring.cuh"

namespace nibble::cuda {
namespace {

struct ExpertPasses {
  std::uint32_t base;  // of kExpertPassBytes of shared memory

  __device__ std::uint32_t slot(int i) const { return base + kPassSlotBytes * i; }
  __device__ std::uint32_t is_drawn(int i) const { return base + kPassSlotBytes * kPassSlots + 8 * i; }
  __device__ std::uint32_t is_read(int i) const { return is_drawn(kPassSlots + i); }

  /// For so many threads that read passes.
  __device__ void initialise(int readers) const {
#pragma unroll
    for (int i = 0; i < kPassSlots; ++i) {
      ptx::barrier_init(is_drawn(i), 1);
      ptx::barrier_init(is_read(i), readers);
    }
    ptx::barrier_init_fence();
  }
  /// The work of one thread: all passes of the CTA. Tiles are read past L1, which may have an earlier kernel's.
  __device__ void draw(const Schedule& schedule, const ExpertTiles& experts) const {
    Passes passes(schedule);
    Cursor to{0, 1};
    bool more = true;
#pragma unroll 1
    for (bool first = true; more; first = false, to.advance(kPassSlots)) {
      ptx::barrier_wait(is_read(to.stage), to.parity);
      if (!first && schedule.band != 0) {  // else the CTA has a run of units
        // Each CTA draws until there is none left: as many numbers as passes, of which the first of each CTA were not drawn.
        const int number = static_cast<int>(atomicAdd(&experts.count->drawn, 1u));
        passes.at = schedule.clusters + number;
        if (number + 1 == schedule.whole) experts.count->drawn = 0;
      }
      Pass pass;
      more = passes.next(pass);
      if (more) {
        const int* const tile = &experts.tiles[pass.token_tile].expert;
        pass.tile = {__ldcg(tile), __ldcg(tile + 1), __ldcg(tile + 2)};
      }
      ptx::store_shared16(slot(to.stage),
                          {static_cast<std::uint32_t>(pass.block), more ? static_cast<std::uint32_t>(pass.blocks) : 0u,
                           static_cast<std::uint32_t>(pass.tile.expert), static_cast<std::uint32_t>(pass.tile.first)});
      ptx::store_shared4(slot(to.stage) + 16, static_cast<std::uint32_t>(pass.tile.rows));
      ptx::barrier_arrive(is_drawn(to.stage));
    }
  }
};

/// The same passes, for a thread that reads them.
struct DrawnPasses {
  ExpertPasses from;
  int records;
  Cursor at{0, 0};

  /// False when there is none.
  __device__ __forceinline__ bool next(Pass& pass) {
    ptx::barrier_wait(from.is_drawn(at.stage), at.parity);
    const uint4 drawn = ptx::load_shared16(from.slot(at.stage));
    const std::uint32_t rows = ptx::load_shared4(from.slot(at.stage) + 16);
    // K is never split: what does not change takes no registers.
    pass = {.block = static_cast<int>(drawn.x), .blocks = static_cast<int>(drawn.y), .first = 0, .end = records};
    pass.tile = {static_cast<int>(drawn.z), static_cast<int>(drawn.w), static_cast<int>(rows)};
    ptx::barrier_arrive(from.is_read(at.stage));
    at.advance(kPassSlots);
    return pass.blocks != 0;
  }
};

}  // namespace
}  // namespace nibble::cuda
