// Device memory for tests of launchers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/gpu.hpp"
#include "kernels/cuda/device/stream_k.hpp"

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

}  // namespace nibble::emulator
