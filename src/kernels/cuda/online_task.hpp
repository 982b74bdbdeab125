// What the launcher of products with online quantized activations takes (online.hpp), and where a plan's workspace has them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/linear_task.hpp"
#include "kernels/cuda/quantize_task.hpp"

namespace nibble::cuda {

struct OnlineTask {
  DeviceWeight weight;
  int m = 0;
  const void* codes = nullptr;  // [M,K] s8, interleaved, 0 past K; rows begin at multiples of 16 bytes
  std::int64_t pitch = 0;       // bytes between rows, a multiple of 128: K and what follows it
  const void* terms = nullptr;  // float2 [pitch / fold][term_pitch]
  std::int64_t term_pitch = 0;  // tokens, a multiple of 128
  int fold = 128;               // channels: 32 or 128
  void* scratch_end = nullptr;  // memory for stream-K ends here (stream_k.hpp)
  epilogue::Element epilogue;
};

/// The same for the decode kernel, which quantizes by itself: acts.codes, scales, zeros, sums and terms are nobody's.
struct OnlineDecodeTask {
  DeviceWeight weight;
  QuantizeTask acts;
  int fold = 128;
  epilogue::Element epilogue;
};

/// Where the parts of quantized activations lie in a plan's workspace: codes [M][pitch] | terms float2 [folds][term_pitch].
struct OnlineMap {
  std::int64_t pitch = 0, folds = 0, term_pitch = 0;
  std::size_t terms = 0, bytes = 0;
};
constexpr OnlineMap online_map(int fold, std::int64_t m, std::int64_t k) {
  const auto round_up = [](std::int64_t count, std::int64_t to) { return (count + to - 1) / to * to; };
  OnlineMap map;
  map.pitch = round_up(k, gpu_tile::kChannels);
  map.folds = map.pitch / fold;
  map.term_pitch = round_up(m, 128);  // a pass reads the terms of all its tokens
  map.terms = static_cast<std::size_t>(round_up(m * map.pitch, 256));
  map.bytes = map.terms + 8 * static_cast<std::size_t>(map.folds * map.term_pitch);
  return map;
}

}  // namespace nibble::cuda
