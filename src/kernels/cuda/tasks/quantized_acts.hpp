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

}  // namespace nibble::cuda
