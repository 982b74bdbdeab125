// What a CTA of this folder's kernels is, whatever it multiplies: the place of a thread, the ring of stages, the roles of the warps.
//
//   multiplying warpgroups ◀──ring of stages── producer warps          the producers' warpgroup is the last one
//
//   full[s]      the copies into stage s have arrived: the producers announce their bytes, the copies arrive
//   empty[s]     stage s may be overwritten: every multiplying warpgroup has released it
//
// `depth` d > 1 (small layers, few tokens): d warpgroups share a row block, and a stage has d of its records. Warpgroup g takes records
// g mod d, g mod d + d, … of the pass.
//
// A kernel derives from Cta and adds
//   prepare(i)     warp i of the producers', before the first barrier: barriers are initialised
//   produce(i)     the work of warp i of the producers'
//   consume        a pass of a multiplying warp
//   active()       the warpgroups that multiply: with few row blocks some have none
//   kProducerRegisters
//   producing_threads()   of experts: producers' threads that read passes. Another warp of theirs draws them
#pragma once

#include <cstdint>

#include "kernels/cuda/device/half_out.cuh"
#include "kernels/cuda/device/passes.cuh"
#include "kernels/cuda/device/prefetch.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/ring.cuh"
#include "kernels/cuda/sm90/gemm/expert_passes.cuh"

namespace nibble::cuda {
namespace {

constexpr int kGroupThreads = 128;
constexpr int kBoxBytesOfToken = 128;  // of a TMA box: the width of the swizzle
constexpr int kAllConsumers = 8;       // a named barrier; 1 … 4 are a warpgroup's
constexpr int kUnitTokens = 8;         // of a unit of sums: four a lane
/// Floats between tokens of the staging buffer: 68 ≡ 4 mod 32 puts a warp's 8 rows × 4 token pairs into 32 different banks.
constexpr int kStagePitch = gpu_tile::kRows + 4;
constexpr int kStagingBytes = kRoundUnits * kUnitTokens * kStagePitch * 4;  // of a warpgroup
static_assert(2 * kHalfRoundBytes <= kStagingBytes);

/// Registers of a thread of `groups` multiplying warpgroups. A CTA has all of an SM's, divided evenly at launch; the producers' warpgroup
/// then gives most of its share away.
NIBBLE_HOST_DEVICE constexpr int consumer_registers(int groups, int producer_registers) {
  const int share = 65536 / (kGroupThreads * (groups + 1)) / 8 * 8, all = (share + (share - producer_registers) / groups) / 8 * 8;
  return all > 240 ? 240 : all;
}

/// kReads: each multiplying warp reads more of a stage than its products do, so that each of the four releases it. Else one does, because
/// a warpgroup's products end together. kFromPatches: tokens are output pixels of a convolution. kOfExperts: a token tile is one of rows of an
/// expert (expert_tiles.hpp), and how many there are is known to the GPU only, which then distributes the passes.
template <class Params, int kPassTokens, int kWarpgroups, bool kReads, bool kFromPatches, bool kOfExperts = false>
struct Cta {
  static constexpr int kTokens = kPassTokens, kGroups = kWarpgroups, kThreads = kGroupThreads * (kGroups + 1);
  static constexpr bool kPatches = kFromPatches, kExperts = kOfExperts;
  static constexpr bool kPlanar = false;                // whether pixels of a channel are read side by side (gemm_stages.cuh)
  static constexpr bool kLooksAhead = false;            // whether consume() finds the next pass, while the last products run
  static constexpr int kUnits = kTokens / kUnitTokens;  // of a row block
  static constexpr int kReleasing = kReads ? 4 : 1;     // warps of a warpgroup
  /// Whether warpgroups may share a row block: all of their sums must fit in the staging buffers.
  static constexpr bool kMayShare = kTokens <= kRoundUnits * kUnitTokens;

  const Params& p;
  std::uint8_t* shared;
  /// shared's address, by a shuffle that ptxas cannot repeat: it would read the address anew for every record.
  std::uint32_t base;
  int rank, cluster, warpgroup, lane, warp;  // warp: of the warpgroup

  __device__ Cta(const Params& params, std::uint8_t* memory, unsigned cta_warp)
      : p(params),
        shared(memory),
        base(__shfl_sync(~0u, ptx::shared_address(memory), 0)),
        rank(cluster_rank(params.schedule)),
        cluster(cluster_index(params.schedule)),
        warpgroup(static_cast<int>(cta_warp / 4)),
        lane(static_cast<int>(threadIdx.x % 32)),
        warp(static_cast<int>(cta_warp % 4)) {}

  /// Warpgroups that share a row block along K; this warpgroup's row block; its place among them, and so its first record in a stage.
  __device__ int depth() const { return kMayShare ? p.depth : 1; }
  __device__ int row_group() const { return kMayShare ? warpgroup / p.depth : warpgroup; }
  __device__ int k_index() const { return kMayShare ? warpgroup % p.depth : 0; }

  /// The last token tile has a box of the tokens that there are; the rest of its stage is never stored. Boxes of experts go on into the rows of
  /// the next one.
  __device__ bool is_last(const Pass& pass) const {
    return !kPatches && !kExperts && pass.token_tile == p.schedule.token_tiles - 1;
  }

  // ---- experts

  /// The schedule that walks over passes.
  __device__ const Schedule& schedule() const {
    if constexpr (kExperts)
      return *reinterpret_cast<const Schedule*>(shared + p.map.total - kScheduleBytes);
    else
      return p.schedule;
  }
  /// One thread makes it: p.schedule for the tiles that there are. They can be read when this kernel starts, because those from the one that
  /// writes them on let their successors start only then (steps/experts.cu).
  __device__ void distribute_tiles() const {
    Schedule own = p.schedule;
    own.token_tiles = __ldcg(&p.experts.count->tiles);
    if (own.token_tiles != 0) distribute(own, kTokens, static_cast<int>(gridDim.x));
    *reinterpret_cast<Schedule*>(shared + p.map.total - kScheduleBytes) = own;
  }
  __device__ ExpertPasses expert_passes() const { return {base + p.map.total - kScheduleBytes - kExpertPassBytes}; }
  __device__ auto passes() const {
    if constexpr (kExperts)
      return DrawnPasses{expert_passes(), p.schedule.records};
    else
      return Passes(p.schedule);
  }
  /// Calls use(pass) for every pass of this CTA.
  template <class Use>
  __device__ __forceinline__ void for_each_pass(Use use) const {
    auto all = passes();
    Pass pass;
#pragma unroll 1
    while (all.next(pass)) use(pass);
  }
  /// The tokens of a pass are rows [first, end) of A and D. But for experts they are computed at each use, which takes no register in between.
  struct ReadRange {
    int first_row, end_row;
    __device__ int first() const { return first_row; }
    __device__ int end() const { return end_row; }
  };
  struct ComputedRange {
    const Pass& pass;
    const Params& p;
    __device__ int first() const { return pass.token_tile * kTokens; }
    __device__ int end() const { return p.m; }
  };
  __device__ auto tokens_of(const Pass& pass) const {
    if constexpr (kExperts) {
      return ReadRange{pass.tile.first, pass.tile.first + pass.tile.rows};
    } else {
      return ComputedRange{pass, p};
    }
  }
  /// Where the weight of a pass begins behind that of the first expert.
  __device__ std::int64_t weight_offset(const Pass& pass) const {
    if constexpr (kExperts)
      return pass.tile.expert * p.experts.weight_pitch;
    else
      return 0;
  }

  // ---- the ring

  __device__ std::uint32_t full(int stage) const { return base + p.map.barriers + 8 * stage; }
  __device__ std::uint32_t empty(int stage) const { return base + p.map.barriers + 8 * (p.stages + stage); }
  __device__ void initialise_barriers(int producers, int consumers) const {
    if (lane != 0) return;
    for (int s = 0; s < p.stages; ++s) {
      ptx::barrier_init(full(s), producers);
      ptx::barrier_init(empty(s), consumers * kReleasing);
    }
    ptx::barrier_init_fence();
  }

  /// `read`: bits of what was loaded from the stage for later than its products, so that the arrival waits for them. ptxas lets it overtake
  /// loads whose values are not needed yet; while other warpgroups store, a load can then take longer than the copy of the next records.
  __device__ void release(int stage, std::uint32_t read = 0) const {
    if (kReads) __syncwarp();
    const auto nothing = static_cast<std::uint32_t>(p.stages) >> 16;  // 0, which ptxas does not know
    if (warp < kReleasing && lane == 0) ptx::barrier_arrive(empty(stage) + (read & nothing));
  }
  /// Releases a stage unread. Only the warps that release wait: the others may lag, and a barrier that has advanced by two phases looks to
  /// a late thread as if it had not advanced.
  __device__ void pass_on(int stage, std::uint32_t parity) const {
    if (warp >= kReleasing) return;
    ptx::barrier_wait(full(stage), parity);
    __syncwarp();  // all lanes have seen the phase
    release(stage);
  }
  /// After the warpgroup's records of `count`, r being the next: the last stage may have none for it.
  __device__ void pass_on_rest(int r, int count, Cursor& from) const {
    if (r - k_index() >= count) return;
    pass_on(from.stage, from.parity);
    from.advance(p.stages);
  }
  /// A pass with fewer row blocks than there are warpgroups.
  __device__ void skip(int count, Cursor& from) const {
#pragma unroll 1
    for (int r = 0; r < count; r += depth()) {
      pass_on(from.stage, from.parity);
      from.advance(p.stages);
    }
    ptx::named_barrier(1 + warpgroup, kGroupThreads);  // keeps the other warps of the warpgroup beside the first
  }

  /// All CTAs of the cluster are here. A split pass has two such points: all rings have been read and become inboxes; all sums have arrived.
  __device__ static void meet_cluster() {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
};

/// A kernel: gives each warp its role.
template <class Kernel, class Params>
__device__ __forceinline__ void run_roles(const Params& p, std::uint8_t* shared) {
  const unsigned warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform over the warp, and known to be to the compiler
  constexpr unsigned kProducerWarp = 4 * Kernel::kGroups;       // the first: warpgroups begin at multiples of four warps
  const Kernel cta(p, shared, warp);
  ptx::let_dependents_start();
  cta.prepare(warp - kProducerWarp);
  if constexpr (Kernel::kExperts) {
    if (threadIdx.x == 0) {
      cta.distribute_tiles();
      cta.expert_passes().initialise(kGroupThreads * cta.active() + cta.producing_threads());
    }
  }
  __syncthreads();
  if constexpr (Kernel::kExperts) {
    if (cta.schedule().token_tiles == 0) return ptx::wait_for_predecessors();  // else it could end before them
    if (cta.cluster >= cta.schedule().clusters) return;
  }
  if (warp >= kProducerWarp) {
    ptx::give_registers<Kernel::kProducerRegisters>();
    cta.produce(warp - kProducerWarp);
    __syncwarp();  // a warp must be converged at a barrier of the cluster
    if (p.schedule.split > 1) {
      cta.meet_cluster();
      cta.meet_cluster();
    }
  } else {
    ptx::take_registers<consumer_registers(Kernel::kGroups, Kernel::kProducerRegisters)>();
    ptx::wait_for_predecessors();  // before operands of the epilogue are read, and D is written
    if (p.schedule.split <= 1 && cta.warpgroup >= cta.active()) return;
    Cursor from{0, 0};
    if constexpr (Kernel::kLooksAhead) {
      auto passes = cta.passes();
      Pass pass, upcoming;
      bool more = passes.next(pass);
#pragma unroll 1
      while (more) {
        cta.consume(pass, from, [&] { more = passes.next(upcoming); });
        pass = upcoming;
      }
    } else {
      cta.for_each_pass([&](const Pass& pass) { cta.consume(pass, from); });
    }
  }
}

}  // namespace
}  // namespace nibble::cuda
