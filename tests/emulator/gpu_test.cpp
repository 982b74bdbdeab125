// The errors that the emulated GPU finds, and its messages.
#include "emulator/gpu.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

namespace nibble::emulator {
namespace {

using testing::HasSubstr;

alignas(1024) std::uint8_t shared[kSharedBytes];

std::string failure(int threads, const std::function<void()>& kernel) {
  use_shared_memory(shared);
  try {
    run({1}, {threads}, kernel);
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

TEST(Emulator, ThreadsThatWaitForEachOtherAreNamed) {
  const std::string text = failure(64, [] {
    if (thread() == 0) barrier_init(2048, 1);
    named_barrier(0, 64);
    barrier_wait(2048, thread() < 32 ? 1 : 0);  // the phase before the first is complete; the first never is
  });
  EXPECT_THAT(text, HasSubstr("block 0 waits for ever"));
  EXPECT_THAT(text, HasSubstr("thread 32 for mbarrier 2048"));
}

TEST(Emulator, ArrivalsThatNobodyExpectsAreFound) {
  EXPECT_THAT(failure(32,
                      [] {
                        if (thread() != 3) return;
                        barrier_init(2048, 2);
                        barrier_arrive(2048, 16);
                        barrier_arrive(2048);
                        barrier_arrive(2048);  // the bytes have not arrived
                      }),
              HasSubstr("thread 3: one arrival too many at barrier 2048"));
}

TEST(Emulator, ABarrierWaitsForArrivalsAndForBytes) {
  std::string order;
  EXPECT_EQ(failure(3,
                    [&] {
                      if (thread() == 0) barrier_init(2048, 1), barrier_init_fence();
                      named_barrier(0, 3);
                      if (thread() == 0) {
                        barrier_wait(2048, 0);
                        order += 'w';
                      } else if (thread() == 1) {
                        order += 'a';
                        barrier_arrive(2048, 32);
                      } else {
                        order += 'b';
                        barrier_bytes_came(2048, 32);
                      }
                    }),
            "");
  EXPECT_EQ(order.size(), 3u);
  EXPECT_EQ(order.back(), 'w');
}

TEST(Emulator, LanesOfAWarpSeeEachOthersValues) {
  int right = 0;
  EXPECT_EQ(failure(64,
                    [&] {
                      for (int step = 0; step < 3; ++step)
                        right += all_lanes(static_cast<std::uint64_t>(thread() + step))[5] ==
                                 static_cast<std::uint64_t>(thread() / kWarp * kWarp + 5 + step);
                    }),
            "");
  EXPECT_EQ(right, 3 * 64);
}

}  // namespace
}  // namespace nibble::emulator
