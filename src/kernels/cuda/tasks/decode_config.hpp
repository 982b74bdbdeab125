// How the decode kernels of sm_90 (decode.hpp, wna8.hpp) are launched: plain values, without CUDA.
#pragma once

#include <array>
#include <cstdint>

namespace nibble::cuda {

constexpr int kDecodeTokens = 16;     // of one launch, at most
constexpr int kDecodeExpertRows = 8;  // of a tile of experts, at most: as many tokens as a matrix instruction has

/// The room that a GPU has for rings, with one CTA per SM.
struct RingRoom {
  int bytes = 0;                     // of a CTA's shared memory
  std::array<int, 9> clusters = {};  // clusters[s]: how many clusters of s CTAs can be resident at once
};

/// The configuration of a launch on sm_90, found once per plan. The bits of a result depend on `split` only, which depends on the weight's shape
/// and format, on `tokens` and on the GPU, not on M.
struct DecodeConfig {
  int tokens = kDecodeTokens;  // the capacity of a launch; fewer leave a longer ring
  int split = 0;               // CTAs of a cluster that share a row tile along K; 0: chosen
  int grid = 0;                // CTAs; chosen
  int stages = 0;              // of the ring, eight records each; chosen
  int smem = 0;                // bytes of a CTA; 0: chosen
};

/// Device memory by which the CTAs of a launch wait for each other once (device/meeting.cuh). Its contents do not matter before a launch.
struct Meeting {
  std::uint64_t open;     // the ticket of the launch that uses it
  std::uint64_t arrived;  // CTAs
  unsigned left;          // CTAs
};

}  // namespace nibble::cuda
