// Prefetch of the next weights while the current ones are multiplied.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nibble::cpu {

/// The memory that is multiplied next: every step of the current product prefetches a few lines of it into L2. The hardware prefetcher
/// sees a stream only once it has begun, and then reads it no faster than it is multiplied.
struct Ahead {
  static constexpr std::int64_t kLine = 64;
  const std::byte* at = nullptr;
  const std::byte* end = nullptr;
  std::int64_t lines = 0;  // a step

  Ahead() = default;
  /// Prefetches [begin, finish) in `steps` steps.
  Ahead(const std::byte* begin, const std::byte* finish, std::int64_t steps)
      : at(begin), end(finish), lines(((finish - begin) / kLine + steps - 1) / steps) {}

  [[gnu::always_inline]] void prefetch() {
    for (std::int64_t line = 0; line < lines && at < end; ++line, at += kLine) __builtin_prefetch(at, 0, 2);
  }
};

/// How far ahead tiles of few tokens prefetch the weights that they stream, in bytes, into L2; 0: they leave it to the hardware.
std::ptrdiff_t low_tile_ahead();

/// Whether tiles of few tokens multiply several row blocks side by side: a core reads as many streams faster than one, whose pages the
/// hardware prefetcher begins one by one.
bool reads_in_streams();
constexpr int kMostStreams = 4;

/// A task of `blocks` row blocks, or of somewhat less, so that none of them is left to be read alone.
constexpr std::int64_t whole_streams(std::int64_t blocks) {
  return blocks > kMostStreams ? blocks - blocks % kMostStreams : blocks;
}

}  // namespace nibble::cpu
