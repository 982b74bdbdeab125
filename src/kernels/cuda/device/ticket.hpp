// Numbers that tell launches apart, for flags and counters in device memory that is not cleared before a launch.
#pragma once

#include <atomic>
#include <cstdint>

namespace nibble::cuda {

/// Odd multiples of the golden ratio: distinct numbers that are unlikely as bits of sums.
inline std::uint64_t next_ticket() {
  static std::atomic<std::uint64_t> launches{0};
  return (2 * launches.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9e3779b97f4a7c15u;
}

}  // namespace nibble::cuda
