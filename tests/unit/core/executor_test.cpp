// Loops on a pool of threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

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

}  // namespace
}  // namespace nibble
