// Depthwise convolutions, where output channels share no inputs: R channels side by side, one multiply-add of a vector per tap and pixel.
//
//   for each row block of R output channels
//     decode  codes → panel [taps][R]                          W, or for W8A8 the integers q − z
//     expand  pixels → floats [pixels][R]                      channel j under output channel j; for W8A8 the integers q − z
//     for every few tokens of an output row: acc[few][R] += pixel ∘ panel                registers over all taps
//     W8A8: the scales; epilogue
//
// Integers are multiplied as floats, exact while their sums stay below kExactSums.
#pragma once

#include <cstdint>

#include "kernels/cpu/prepare/prepare.hpp"

namespace nibble::cpu {

/// f32 holds every integer up to here.
constexpr std::int64_t kExactSums = 1 << 24;

struct DepthwiseTask {
  const Patches* patches;  // of `type`, `pixel_bytes` apart
  DType type;
  std::int64_t rows, pixels, pixel_bytes;
  std::int64_t multiplier, skipped, count;  // pixel channel (skipped + j) / multiplier belongs to output channel j < count
  float zero;                               // of codes
  std::int64_t taps_h, taps_w, tap_down, tap_beside, row_down, pixel_step;  // as in PatchTask
  const float* panel;                                                       // [taps][R]
  const float* scale;  // [R]: sums are integers, times `token_scale`, times this, times scale2; null: sums are the result
  float token_scale, scale2;
  float* floats;  // [pixels][R], scratch
  float* sums;    // [tokens][R], the result
};

struct DepthwiseIsa {
  void (*multiply)(const DepthwiseTask& task);
};

extern const DepthwiseIsa kBaselineDepthwise;
#if defined(__x86_64__)
extern const DepthwiseIsa kAvx2Depthwise, kAvx512Depthwise;
#endif

}  // namespace nibble::cpu
