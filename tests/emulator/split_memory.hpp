// The workspace of CTAs that divide K, for tests of their launchers.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace nibble::emulator {

/// How many CTAs divide K in a test with so many tokens: 3, whose parts are unequal; and 8, of which some have no record, where the emulated
/// GPU does not take seconds for each launch.
inline std::vector<int> splits_for(int tokens) { return tokens <= 64 ? std::vector{3, 8} : std::vector{3}; }

/// Has `expect(task, launch)` compare what `launch(task)` computes, twice in the same workspace of `bytes`, which is not cleared: right sums,
/// the same d_bytes of D again, and nothing written around the workspace.
template <class Task, class Launch, class Expect>
void expect_twice(Task task, std::size_t bytes, std::size_t d_bytes, Launch launch, Expect expect) {
  constexpr std::uint64_t kFence = 0x7fc123457fc12345;  // NaNs, and no counters
  constexpr std::size_t kAround = 64;
  std::vector<std::uint64_t> memory(bytes / 8 + 2 * kAround, kFence);
  task.scratch_end = memory.data() + kAround + bytes / 8;
  std::vector<std::uint8_t> d[2];
  for (std::vector<std::uint8_t>& run : d)
    expect(task, [&](const Task& t) {
      const auto result = launch(t);
      const auto* const from = static_cast<const std::uint8_t*>(t.epilogue.d);
      run.assign(from, from + d_bytes);
      return result;
    });
  EXPECT_EQ(d[0], d[1]);
  for (std::size_t i = 0; i < kAround; ++i) {
    ASSERT_EQ(memory[i], kFence) << "written before the workspace";
    ASSERT_EQ(memory[memory.size() - 1 - i], kFence) << "written past the workspace";
  }
}

}  // namespace nibble::emulator
