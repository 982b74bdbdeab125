// The arguments of the launcher of products with f32 activations as pairs of f16 (pairs.hpp), and their places in a plan's workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/tasks/linear_task.hpp"

namespace nibble::cuda {

struct PairTask {
  DeviceWeight weight;
  int m = 0;
  const void* x = nullptr;        // [M][pitch] f16 of pair_acts.hpp, aligned to 16 bytes
  std::int64_t pitch = 0;         // elements between rows: pair_map's
  const float* scales = nullptr;  // of tokens; there is room for those of a whole tile
  void* scratch_end = nullptr;    // memory for stream-K ends here (stream_k.hpp)
  epilogue::Element epilogue;
  NextWeight next;
};

/// The places of pairs in a plan's workspace: f16 [M][pitch] | scales f32 of tokens.
struct PairMap {
  std::int64_t pitch = 0;  // elements
  std::size_t scales = 0, bytes = 0;
};
constexpr PairMap pair_map(std::int64_t m, std::int64_t k) {
  constexpr int kMostTokens = 128;  // of a pass, which reads the scales of all of them
  const auto round_up = [](std::int64_t count, std::int64_t to) { return (count + to - 1) / to * to; };
  PairMap map{.pitch = 2 * round_up(k, gpu_tile::kChannels)};
  map.scales = static_cast<std::size_t>(round_up(2 * m * map.pitch, 256));
  map.bytes = map.scales + 4 * static_cast<std::size_t>(round_up(m, kMostTokens));
  return map;
}

}  // namespace nibble::cuda
