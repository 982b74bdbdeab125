// What the launcher that quantizes activations takes (quantize_acts.hpp): plain values, host and device.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/cuda/tasks/patches.hpp"
#include "kernels/cuda/tasks/quantized_acts.hpp"
#include "nibble/types.hpp"

namespace nibble::cuda {

/// A[M,K], in device memory, and where its codes go.
struct QuantizeTask {
  const void* a = nullptr;
  DType type = DType::f16;    // f32, f16 or bf16; or s8: codes, which are `given`
  std::int64_t a_stride = 0;  // elements between rows
  std::int64_t m = 0, k = 0;
  const std::int32_t* source = nullptr;  // [M], of floats: row r of A is row source[r] / divisor in memory; null: row r
  int divisor = 1;
  /// [M], the inverse of `source`: the row that source[r] = i names is row_of[i], or −1 where none does. Where it is given, many rows are quantized
  /// once for all of the `divisor` rows that have one place in memory; rows that `source` does not name are not written then.
  const std::int32_t* row_of = nullptr;
  const std::int32_t* perm = nullptr;                    // [K]: position k is input channel perm[k]; null: in order
  const float* prescale = nullptr;                       // [K]: what an input channel is multiplied by first
  float limit = std::numeric_limits<float>::infinity();  // ranges end at ±limit; larger magnitudes saturate

  /// With type s8: the scales and zero points of the codes, which are only put in order, with their terms.
  QuantizedActs given;

  DType codes_type = DType::s8;  // s8 or e4m3
  bool zero_points = false;      // asymmetric ranges, of s8
  bool known = false;            // `scale` and `zero` are given, for all of A
  std::int64_t group = 0;        // channels that share a scale; 0: all
  float scale = 1.0f;
  std::int32_t zero = 0;

  void* codes = nullptr;   // [M, columns]
  void* halves = nullptr;  // in the place of codes: the f16 numbers that e4m3 codes are, [M, columns], at a multiple of 16 bytes
  std::int64_t pitch = 0;  // bytes between rows; of halves elements, and columns and it are multiples of 8
  std::int64_t columns = 0;  // K, or more: codes past K are 0
  float* scales = nullptr;   // of a token (and group)
  std::int64_t scale_row = 0, scale_group = 0;
  std::int32_t* zeros = nullptr;  // as scales
  std::int64_t zero_row = 0, zero_group = 0;
  float* offsets = nullptr;      // of ranges that need not contain 0, in the place of zeros
  std::int32_t* sums = nullptr;  // of a token's s8 codes; null: not written
  std::int64_t sum_row = 0;

  /// float2 {scale, scale·Σ codes} of every `fold` channels of a token; null: not written. With zero points {scale, zero_term} instead
  /// (wna8_task.hpp). With terms, codes are s8, of each 16 channels in the order of gpu_tile::interleaved, past K the zero point, and
  /// columns are a multiple of the fold.
  ///
  /// With float offsets terms are three, {scale, offset, Σ code·scale + offset} of the channels up to K, and codes past K are 0.
  ///
  /// A token that has one scale for all of K may leave it out of its terms: they are {1, Σ codes}, or {1, zero_term}, and the scale is
  /// token_scales' [M]; null: it is in the terms.
  void* terms = nullptr;
  std::int64_t term_row = 1, term_fold = 0;  // terms between tokens, between folds
  bool term_pairs = false;                   // of tokens 2i and 2i + 1: both scales, then both others; always with offsets
  bool term_offsets = false;                 // ranges need not contain 0
  float* token_scales = nullptr;
  int fold = 0;  // 32 or 128

  /// Of fixed point, as images: bytes of codes, and terms, from a byte of an activation to the next one's (fixed_point_acts.hpp).
  std::int64_t digit_codes = 0, digit_terms = 0;
};

/// QuantizeTask::a as images, whose patches are the rows: row t·groups + g is the patch of output pixel first + t in the channels of
/// group g.
struct PatchRows {
  Patches patches;  // channels 0: A is a matrix
  ImageStrides a;
  int first = 0;
  const std::int32_t* pad = nullptr;  // the code of padding, where A has codes; null: QuantizeTask::zero
};

}  // namespace nibble::cuda
