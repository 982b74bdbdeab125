// Loops on a pool of threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "nibble/parallel.hpp"

namespace nibble {
namespace {

TEST(Executor, RunsEveryIterationOnceForAnyThreadCountAndBackToBack) {
  for (int threads : {1, 2, 3, 8}) {
    auto executor = make_executor(threads);
    EXPECT_EQ(executor->threads(), threads);
    for (int round = 0; round < 200; ++round) {
      std::vector<std::atomic<int>> hits(static_cast<std::size_t>(round % 17));
      executor->parallel_for(round % 17, [&](std::int64_t i) { hits[static_cast<std::size_t>(i)].fetch_add(1); });
      for (const auto& hit : hits) ASSERT_EQ(hit.load(), 1);
    }
  }
}

/// A body may start a loop of its own, as one that reads a layer does: of the same pool it runs on the thread of the body.
TEST(Executor, RunsALoopWithinALoop) {
  for (int threads : {1, 2, 8}) {
    auto executor = make_executor(threads), other = make_executor(2);
    std::vector<std::atomic<int>> hits(7 * 5), hits_of_other(7 * 5);
    executor->parallel_for(7, [&](std::int64_t i) {
      const auto thread = std::this_thread::get_id();
      executor->parallel_for(5, [&](std::int64_t j) {
        EXPECT_EQ(std::this_thread::get_id(), thread);
        hits[static_cast<std::size_t>(5 * i + j)].fetch_add(1);
      });
      other->parallel_for(5, [&](std::int64_t j) { hits_of_other[static_cast<std::size_t>(5 * i + j)].fetch_add(1); });
    });
    for (const auto& hit : hits) EXPECT_EQ(hit.load(), 1) << threads;
    for (const auto& hit : hits_of_other) EXPECT_EQ(hit.load(), 1) << threads;
  }
}

}  // namespace
}  // namespace nibble
