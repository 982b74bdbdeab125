// Device memory for tests of launchers.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/gpu.hpp"
#include "kernels/cuda/device/stream_k.hpp"
#include "kernels/cuda/tasks/next_weight.hpp"

namespace nibble::emulator {

/// The memory of stream-K before end(), for kernels of up to four multiplying warpgroups.
class StreamKMemory {
 public:
  explicit StreamKMemory(int tokens) : bytes_(cuda::stream_k_bytes(tokens, 4, kMultiprocessors)), memory_(bytes_ + kAlignment) {}
  void* end() {
    return reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(memory_.data()) + bytes_ + kAlignment - 1) / kAlignment *
                                   kAlignment);
  }

 private:
  static constexpr std::size_t kAlignment = 256;
  std::size_t bytes_;
  std::vector<std::byte> memory_;
};

/// The weight of the call after the one that is tested: more pieces than there are CTAs, and a rest.
class NextMemory {
 public:
  NextMemory() { asked_in_l2.clear(); }
  cuda::NextWeight weight() const { return cuda::next_weight(memory_.data(), static_cast<std::int64_t>(memory_.size())); }
  /// Every piece of it, once a kernel has run; or none.
  void expect_asked(bool asked = true) const {
    if (!asked) {
      EXPECT_TRUE(asked_in_l2.empty());
      return;
    }
    const cuda::NextWeight next = weight();
    ASSERT_EQ(next.pieces, kPieces);
    for (std::size_t i = 0; i < kPieces; ++i) EXPECT_TRUE(asked_in_l2.contains(next.bytes + i * next.stride)) << "piece " << i;
    EXPECT_EQ(asked_in_l2.size(), kPieces);
  }

 private:
  static constexpr std::size_t kPieces = 17;
  std::vector<std::byte> memory_ = std::vector<std::byte>(kPieces * cuda::NextWeight::kPieceBytes + 100);
};

}  // namespace nibble::emulator
