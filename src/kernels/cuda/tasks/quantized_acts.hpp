// Activations that are codes already, as kernels of the GPU get them: plain values, host and device.
#pragma once

#include <cstdint>

namespace nibble::cuda {

/// Activations as codes, in device memory. A null array means one value for all.
struct QuantizedActs {
  const void* codes = nullptr;  // [M,K], s8 or e4m3
  std::int64_t pitch = 0;       // bytes between rows
  const float* scales = nullptr;
  std::int64_t scale_row = 0, scale_group = 0;  // elements between tokens, between groups of `group` channels
  float scale = 1.0f;                           // where there are no scales
  const std::int32_t* zeros = nullptr;
  std::int64_t zero_row = 0, zero_group = 0;  // the same of zero points, or offsets
  std::int32_t zero = 0;                      // where there are no zeros
  const std::int32_t* sums = nullptr;         // [M] of a token's codes; needed where the weight has zeros
  int group = 0;                              // channels that share a scale; 0: all
  const float* offsets = nullptr;             // in the place of zero points: code·scale + offset
};

/// FP8 codes as f16 numbers: x·scale of its row is what a code stands for. Without blocks x is the code's own number; with them what it stands
/// for divided by the row's scale, a power of two, and rounded.
struct CodeHalves {
  QuantizedActs acts;                  // e4m3, without zero points and offsets
  const std::int32_t* perm = nullptr;  // position k is channel perm[k] of the codes and of their blocks; null: in order
  std::int64_t m = 0;
  int k = 0;
  void* x = nullptr;        // [M, pitch], at a multiple of 16 bytes; past K up to a multiple of 8 x is 0
  std::int64_t pitch = 0;   // elements between rows, a multiple of 8
  float* scales = nullptr;  // [M]; null: not written
};

}  // namespace nibble::cuda
