// Device memory that tests of launchers hand out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/gpu.hpp"
#include "kernels/cuda/device/stream_k.hpp"

namespace nibble::emulator {

/// What stream-K asks for in front of end(), of kernels of up to four multiplying warpgroups.
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

}  // namespace nibble::emulator
