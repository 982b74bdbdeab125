// Small kernels with an error of synchronization each, which the emulated GPU must find within a few seeds, and the same kernels without it.
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/ring.cuh"
#include "kernels/cuda/device/wgmma8.cuh"

namespace nibble::cuda {
namespace {

alignas(1024) std::uint8_t shared[emulator::kSharedBytes];
constexpr int kSeeds = 12;

using Values = std::vector<std::uint32_t>;

/// Seeds with which `kernel` does not give the expected values, of kSeeds. It writes to `out`, which it may find in any state.
template <class Kernel>
int seeds_that_fail(Values& out, const Values& expected, int ctas, int threads, int cluster, Kernel kernel,
                    int shared_bytes = 4096) {
  emulator::use_shared_memory(shared);
  int failed = 0;
  for (int seed = 1; seed <= kSeeds; ++seed) {
    emulator::use_seed(static_cast<std::uint64_t>(seed));
    out.assign(expected.size(), 0xdead);
    try {
      emulator::run({ctas}, {threads}, kernel, cluster, shared_bytes);
      failed += out != expected;
    } catch (const std::runtime_error&) {
      ++failed;
    }
  }
  return failed;
}

#define EXPECT_FOUND(fault, none, failed) \
  if ((fault) == (none))                  \
    EXPECT_EQ(failed, 0);                 \
  else                                    \
    EXPECT_GT(failed, 0)

// ---- cp.async: each thread copies 16 bytes, and reads those of the opposite thread, in four rounds of two stages

enum class Async { right, no_wait, waits_for_too_few, no_barrier, reused_too_early, arrives_before_copies };
class AsyncCopies : public testing::TestWithParam<Async> {};

TEST_P(AsyncCopies, AreWaitedFor) {
  constexpr int kThreads = 64, kRounds = 4;
  const Async fault = GetParam();
  Values from(kRounds * kThreads * 4), out, expected;
  std::iota(from.begin(), from.end(), 1u);
  for (int round = 0; round < kRounds; ++round)
    for (int t = 0; t < kThreads; ++t)
      expected.push_back(from[static_cast<std::size_t>((round * kThreads + kThreads - 1 - t) * 4)]);
  const auto kernel = [&] {
    const int t = static_cast<int>(threadIdx.x);
    const std::uint32_t base = ptx::shared_address(shared), barrier = base + 2 * kThreads * 16;
    const auto stage = [&](int round, int thread) {
      return base + static_cast<std::uint32_t>((round % 2 * kThreads + thread) * 16);
    };
    const auto request = [&](int round) {
      if (round < kRounds) ptx::async_copy16(stage(round, t), &from[static_cast<std::size_t>((round * kThreads + t) * 4)], 16);
      ptx::async_copy_commit();
    };
    if (fault == Async::arrives_before_copies) {
      if (t == 0) ptx::barrier_init(barrier, kThreads), ptx::barrier_init_fence();
      __syncthreads();
    }
    request(0);
    for (int round = 0; round < kRounds; ++round) {
      request(round + 1);
      if (fault == Async::arrives_before_copies) {  // should be barrier_arrive_after_copies
        ptx::barrier_arrive(barrier);
        ptx::barrier_wait(barrier, static_cast<std::uint32_t>(round % 2));
      } else if (fault == Async::waits_for_too_few) {
        ptx::async_copy_wait<2>();
      } else if (fault != Async::no_wait) {
        ptx::async_copy_wait<1>();
      }
      if (fault != Async::no_barrier) __syncthreads();
      out[static_cast<std::size_t>(round * kThreads + t)] = ptx::load_shared4(stage(round, kThreads - 1 - t));
      if (fault != Async::reused_too_early) __syncthreads();
    }
  };
  EXPECT_FOUND(fault, Async::right, seeds_that_fail(out, expected, 1, kThreads, 1, kernel));
}
INSTANTIATE_TEST_SUITE_P(Races, AsyncCopies,
                         testing::Values(Async::right, Async::no_wait, Async::waits_for_too_few, Async::no_barrier,
                                         Async::reused_too_early, Async::arrives_before_copies));

// ---- a ring of stages: a producer and two consuming warps

enum class Ring {
  right,
  right_with_small_copies,
  no_full_wait,
  wrong_full_parity,
  no_empty_wait,
  wrong_empty_parity,
  released_before_read,
  released_by_one,
  too_few_bytes,
  no_init_fence,
  no_init_barrier,
  ends_before_copies
};
class Rings : public testing::TestWithParam<Ring> {};

TEST_P(Rings, KeepStagesUntilTheyAreRead) {
  constexpr int kStages = 2, kStageBytes = 256, kRounds = 7, kConsumers = 64;
  const Ring fault = GetParam();
  const bool right = fault == Ring::right || fault == Ring::right_with_small_copies;
  Values from(kRounds * kConsumers), out;
  std::iota(from.begin(), from.end(), 1u);
  const auto kernel = [&] {
    const int t = static_cast<int>(threadIdx.x), lane = t % 32;
    const std::uint32_t base = ptx::shared_address(shared);
    const auto stage = [&](int i) { return base + static_cast<std::uint32_t>(i * kStageBytes); };
    const auto full = [&](int i) { return base + static_cast<std::uint32_t>(kStages * kStageBytes + 8 * i); };
    const auto empty = [&](int i) { return full(kStages + i); };
    if (t == kConsumers) {
      for (int i = 0; i < kStages; ++i) {
        ptx::barrier_init(full(i), fault == Ring::right_with_small_copies ? 32 : 1);
        ptx::barrier_init(empty(i), fault == Ring::released_by_one ? 1 : 2);
      }
      if (fault != Ring::no_init_fence) ptx::barrier_init_fence();
    }
    if (fault != Ring::no_init_barrier) __syncthreads();
    if (t >= kConsumers) {
      Cursor to{0, fault == Ring::wrong_empty_parity ? 0u : 1u};
      const int rounds = kRounds + (fault == Ring::ends_before_copies ? 1 : 0);
      if (fault == Ring::right_with_small_copies) {
        for (int round = 0; round < kRounds; ++round, to.advance(kStages)) {
          ptx::barrier_wait(empty(to.stage), to.parity);
          for (int i = lane; i < kConsumers; i += 32)
            ptx::async_copy4(stage(to.stage) + static_cast<std::uint32_t>(4 * i),
                             &from[static_cast<std::size_t>(round * kConsumers + i)]);
          ptx::barrier_arrive_after_copies(full(to.stage));
        }
      } else if (lane == 0) {
        for (int round = 0; round < rounds; ++round, to.advance(kStages)) {
          if (fault != Ring::no_empty_wait) ptx::barrier_wait(empty(to.stage), to.parity);
          ptx::barrier_arrive_expect(full(to.stage), fault == Ring::too_few_bytes ? kStageBytes / 2 : kStageBytes);
          for (int half = 0; half < 2; ++half)
            ptx::bulk_copy(stage(to.stage) + static_cast<std::uint32_t>(half * kStageBytes / 2),
                           &from[static_cast<std::size_t>((2 * (round % kRounds) + half) * kConsumers / 2)], kStageBytes / 2,
                           full(to.stage), 0);
        }
      }
      return;
    }
    Cursor at{0, fault == Ring::wrong_full_parity ? 1u : 0u};
    for (int round = 0; round < kRounds; ++round, at.advance(kStages)) {
      if (fault != Ring::no_full_wait) ptx::barrier_wait(full(at.stage), at.parity);
      const bool releases = lane == 0 && (fault != Ring::released_by_one || t == 0);
      if (fault == Ring::released_before_read && releases) ptx::barrier_arrive(empty(at.stage));
      out[static_cast<std::size_t>(round * kConsumers + t)] =
          ptx::load_shared4(stage(at.stage) + static_cast<std::uint32_t>(4 * t));
      __syncwarp();
      if (fault != Ring::released_before_read && releases) ptx::barrier_arrive(empty(at.stage));
    }
  };
  EXPECT_FOUND(right, true, seeds_that_fail(out, from, 2, kConsumers + 32, 1, kernel));
}
INSTANTIATE_TEST_SUITE_P(Races, Rings,
                         testing::Values(Ring::right, Ring::right_with_small_copies, Ring::no_full_wait, Ring::wrong_full_parity,
                                         Ring::no_empty_wait, Ring::wrong_empty_parity, Ring::released_before_read,
                                         Ring::released_by_one, Ring::too_few_bytes, Ring::no_init_fence, Ring::no_init_barrier,
                                         Ring::ends_before_copies));

// ---- wgmma: sums of a warpgroup over two stages that are written in turn

enum class Matrix { right, no_fence, no_commit, no_wait, released_before_wait };
class Matrices : public testing::TestWithParam<Matrix> {};

TEST_P(Matrices, AreWaitedFor) {
  constexpr int kThreads = 128, kRounds = 3, kBytes = 64 * 128;
  const Matrix fault = GetParam();
  Values out, expected(kThreads * 8, 6 * 32);  // of codes 1, 2, 3
  const auto kernel = [&] {
    const int t = static_cast<int>(threadIdx.x);
    const std::uint32_t weights = ptx::shared_address(shared), tokens = weights + kBytes;
    std::int32_t sums[8] = {};
    for (int i = t; i < 16 * 128; i += kThreads) shared[kBytes + i] = 1;
    for (int round = 1; round <= kRounds; ++round) {
      for (int i = t; i < kBytes; i += kThreads) shared[i] = static_cast<std::uint8_t>(round);
      __syncthreads();
      if (fault != Matrix::no_fence) wgmma_fence();
      Wgmma8<S8, 16>::add(sums, wgmma_operand_low(weights), wgmma_operand(wgmma_operand_low(tokens)));
      if (fault != Matrix::no_commit) wgmma_commit();
      if (fault == Matrix::released_before_wait) __syncthreads();
      if (fault == Matrix::no_wait || fault == Matrix::released_before_wait) continue;
      wgmma_wait<0>();
      __syncthreads();
    }
    if (fault == Matrix::released_before_wait) wgmma_wait<0>();
    for (int i = 0; i < 8; ++i) out[static_cast<std::size_t>(8 * t + i)] = static_cast<std::uint32_t>(sums[i]);
  };
  EXPECT_FOUND(fault, Matrix::right, seeds_that_fail(out, expected, 1, kThreads, 1, kernel, kBytes + 16 * 128));
}
INSTANTIATE_TEST_SUITE_P(Races, Matrices,
                         testing::Values(Matrix::right, Matrix::no_fence, Matrix::no_commit, Matrix::no_wait,
                                         Matrix::released_before_wait));

// ---- clusters: each CTA gives its number to the next one

enum class Cluster {
  right,
  right_with_barrier,
  no_cluster_barrier,
  arrives_too_early,
  no_wait,
  no_start_barrier,
  ends_too_early
};
class Clusters : public testing::TestWithParam<Cluster> {};

TEST_P(Clusters, WaitForEachOther) {
  constexpr int kCtas = 3, kThreads = 32;
  const Cluster fault = GetParam();
  const bool sends = fault == Cluster::right_with_barrier || fault == Cluster::no_wait || fault == Cluster::no_start_barrier;
  Values out, expected;
  for (int cta = 0; cta < kCtas; ++cta)
    for (int t = 0; t < kThreads; ++t) expected.push_back(static_cast<std::uint32_t>((cta + kCtas - 1) % kCtas * kThreads + t));
  const auto kernel = [&] {
    const int t = static_cast<int>(threadIdx.x), rank = ptx::cluster_rank(), next = (rank + 1) % kCtas;
    const std::uint32_t base = ptx::shared_address(shared), barrier = base,
                        place = base + 16 + static_cast<std::uint32_t>(16 * t);
    const float number = __uint_as_float(static_cast<std::uint32_t>(rank * kThreads + t));
    if (t == 0 && sends) {
      ptx::barrier_init(barrier, 1);
      ptx::barrier_init_fence();
      ptx::barrier_arrive_expect(barrier, 8 * kThreads);
    }
    if (fault != Cluster::no_start_barrier) ptx::cluster_arrive(), ptx::cluster_wait();
    if (fault == Cluster::arrives_too_early) ptx::cluster_arrive();
    if (sends)
      ptx::send(ptx::map_to_rank(place, next), {number, 0.0f}, ptx::map_to_rank(barrier, next));
    else
      ptx::store_remote16(ptx::map_to_rank(place, next), {number, 0.0f, 0.0f, 0.0f});
    if (fault == Cluster::ends_too_early && rank == 0) return;
    if (fault == Cluster::right || fault == Cluster::ends_too_early) ptx::cluster_arrive();
    if (fault == Cluster::right || fault == Cluster::ends_too_early || fault == Cluster::arrives_too_early) ptx::cluster_wait();
    if (sends && fault != Cluster::no_wait) ptx::barrier_wait_cluster(barrier, 0);
    out[static_cast<std::size_t>(rank * kThreads + t)] = ptx::load_shared4(place);
  };
  const bool right = fault == Cluster::right || fault == Cluster::right_with_barrier;
  EXPECT_FOUND(right, true, seeds_that_fail(out, expected, kCtas, kThreads, kCtas, kernel));
}
INSTANTIATE_TEST_SUITE_P(Races, Clusters,
                         testing::Values(Cluster::right, Cluster::right_with_barrier, Cluster::no_cluster_barrier,
                                         Cluster::arrives_too_early, Cluster::no_wait, Cluster::no_start_barrier,
                                         Cluster::ends_too_early));

// ---- flags in device memory: a CTA reads what the one before it has stored

enum class Flag { right, no_wait, raised_too_early };
class Flags : public testing::TestWithParam<Flag> {};

TEST_P(Flags, SayThatStoresAreDone) {
  constexpr int kThreads = 96;  // the last warp raises the flag
  const Flag fault = GetParam();
  Values out, part;
  const Values expected(64, 7);
  std::uint64_t flag = 0;
  const auto kernel = [&] {
    const int t = static_cast<int>(threadIdx.x);
    if (blockIdx.x == 0) {
      if (t < 64) part[static_cast<std::size_t>(t)] = 7;
      if (t < 64)
        ptx::named_barrier_arrive(1, kThreads);
      else if (fault != Flag::raised_too_early)
        ptx::named_barrier(1, kThreads);
      if (t == 64) ptx::store_release(&flag, 1);
    } else if (t < 64) {
      while (fault != Flag::no_wait && ptx::load_acquire(&flag) != 1) {
      }
      out[static_cast<std::size_t>(t)] = part[static_cast<std::size_t>(t)];
    }
    if (blockIdx.x == 0) return;
    __syncthreads();
    if (t == 0) flag = 0, part.assign(64, 0);  // for the next launch
  };
  part.assign(64, 0);
  EXPECT_FOUND(fault, Flag::right, seeds_that_fail(out, expected, 2, kThreads, 1, kernel));
}
INSTANTIATE_TEST_SUITE_P(Races, Flags, testing::Values(Flag::right, Flag::no_wait, Flag::raised_too_early));

// ---- lanes of a warp

TEST(WarpRaces, LanesThatExchangeNumbersInSharedMemoryAreWaitedFor) {
  Values out, expected;
  for (std::uint32_t t = 0; t < 32; ++t) expected.push_back(t ^ 1);
  for (const bool waits : {true, false}) {
    const int failed = seeds_that_fail(out, expected, 1, 32, 1, [&] {
      const std::uint32_t t = threadIdx.x, base = ptx::shared_address(shared);
      ptx::store_shared4(base + 4 * t, t);
      if (waits) __syncwarp();
      out[t] = ptx::load_shared4(base + 4 * (t ^ 1));
    });
    EXPECT_FOUND(waits, true, failed);
  }
}

TEST(WarpRaces, SharedMemoryEndsWhereTheLaunchSays) {
  Values out;
  for (const std::uint32_t at : {4092u, 4093u}) {
    const int failed = seeds_that_fail(out, {}, 1, 1, 1, [at] { ptx::store_shared4(ptx::shared_address(shared) + at, 1); });
    EXPECT_FOUND(at, 4092u, failed);
  }
}

}  // namespace
}  // namespace nibble::cuda
