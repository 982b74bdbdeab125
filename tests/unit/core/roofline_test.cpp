// The ceilings of this machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "core/buffer.hpp"
#include "nibble/device.hpp"
#include "nibble/parallel.hpp"

namespace nibble {
namespace {

TEST(Roofline, IsMeasured) {
  auto executor = make_executor(1);
  const Roofline roofline = measure_roofline(*executor);
  EXPECT_GT(roofline.read_gbytes_per_s, 0.1);
  EXPECT_GT(roofline.f32_gflops, 0.1);
  EXPECT_EQ(roofline.threads, 1);
}

/// The time of the plainest loop over memory, as the compiler makes it.
double seconds_to_sum(std::span<const std::byte> bytes) {
  constexpr std::size_t kWords = 8;  // of a line
  const auto* const words = reinterpret_cast<const std::uint64_t*>(bytes.data());
  const auto start = std::chrono::steady_clock::now();
  std::uint64_t sum[kWords] = {};
  for (std::size_t i = 0; i < bytes.size() / sizeof *words; i += kWords)
    for (std::size_t j = 0; j < kWords; ++j) sum[j] += words[i + j];
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_NE(sum[0] + sum[kWords - 1], 0U);
  return seconds;
}

TEST(Roofline, NoPlainLoopReadsFaster) {
  auto executor = make_executor(1);
  RooflineProbe probe(*executor);
  constexpr std::size_t kPart = std::size_t{16} << 20;
  constexpr int kRounds = 15;
  // Twice the last-level cache, read as a whole once before it is read part by part: no part is in a cache, none waits to be written back.
  const std::size_t cached = static_cast<std::size_t>(std::max<std::int64_t>(this_device().l3_bytes, 0));
  Buffer memory(std::min(2 * cached + kRounds * kPart, static_cast<std::size_t>(this_device().memory_bytes / 8)));
  ASSERT_GE(memory.size(), kRounds * kPart);
  std::memset(memory.data(), 1, memory.size());
  seconds_to_sum(memory.span());
  double best_probe = 0, best_loop = 0;
  for (int round = 0; round < kRounds; ++round) {
    best_probe = std::max(best_probe, probe.measure(Ceiling::read, 0.01));
    best_loop = std::max(best_loop, kPart / 1e9 / seconds_to_sum(memory.span().subspan(round * kPart, kPart)));
  }
  EXPECT_GT(best_probe, 0.9 * best_loop);
}

}  // namespace
}  // namespace nibble
