// Weights that are still in memory, asked for while others are multiplied.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nibble::cpu {

/// What will be multiplied next: a few lines are asked for, into L2, with every step of what is multiplied now. The hardware sees a stream
/// only when it has begun, and then reads it no faster than it is multiplied, tile after tile.
struct Ahead {
  static constexpr std::int64_t kLine = 64;
  const std::byte* at = nullptr;
  const std::byte* end = nullptr;
  std::int64_t lines = 0;  // a step

  Ahead() = default;
  /// Of [begin, finish), in `steps` steps.
  Ahead(const std::byte* begin, const std::byte* finish, std::int64_t steps)
      : at(begin), end(finish), lines(((finish - begin) / kLine + steps - 1) / steps) {}

  [[gnu::always_inline]] void ask() {
    for (std::int64_t line = 0; line < lines && at < end; ++line, at += kLine) __builtin_prefetch(at, 0, 2);
  }
};

}  // namespace nibble::cpu
