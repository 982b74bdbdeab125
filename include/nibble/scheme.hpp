// Scheme: what the numbers of a quantized layer mean. A small value that compares, prints as its name and parses back.
//
//   weight      <codes><zero><group>     u4zg128   4-bit codes, integer zero points, one scale per group of 128 along K
//                                        u4b8g32   4-bit codes meaning code − 8, no zero points, groups of 32
//                                        s8c       signed 8-bit, one scale per output channel
//                                        u4oci32   of a convolution: float offsets, groups of 32 channels of the images, which
//                                                  all elements of the filter share (MNN)
//                                        e4m3b128x128  FP8, one scale per 128×128 block
//                                        bf16      dense: not quantized, no scales; also f16, f32
//   activation  <codes><zero><group>_<weight>
//                                        s8r_s8c   activations quantized to int8 per token (row) while running
//                                        s8zr_s8c  the same with a zero point per token
//                                        s8zg128_u4zg128  a scale and a zero point per block of 128 input channels
//                                        s8og32_u4zg32  a scale and a float offset per block: the range need not contain 0
//                                        e4m3t_e4m3t  FP8 on both sides; the activations' scale is known beforehand
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "nibble/status.hpp"
#include "nibble/types.hpp"

namespace nibble {

/// How the zero point enters W = f(code). q is code_value(codes, code); s, z, o are the group's scale, zero, offset.
enum class ZeroKind {
  none,     // "":  W = q·s
  integer,  // "z": W = (q − z)·s, z an integer in code units (AWQ, GPTQ, compressed-tensors)
  offset,   // "o": W = q·s + o, o a float in weight units (llm-awq, torchao, GGUF Q4_1, MNN)
  real,     // "f": W = (q − z)·s, z a float in code units (HQQ)
};

/// The extent of the weight that shares one scale: `n` output channels × `k` input channels; 0 means the whole dimension.
struct GroupShape {
  std::int32_t n = 1;         // output channels; 0: all
  std::int32_t k = 0;         // input channels; 0: all
  bool all_elements = false;  // of a convolution: the same k channels of the images at every element of the filter

  /// "t": one scale for everything.
  static constexpr GroupShape tensor() { return {0, 0}; }
  /// "c", of activations "r": one per output channel, or token.
  static constexpr GroupShape channel() { return {1, 0}; }
  /// "g128": one per output channel, or token, and `size` input channels.
  static constexpr GroupShape group(std::int32_t size) { return {1, size}; }
  /// "b128x128": one per bn output × bk input channels.
  static constexpr GroupShape block(std::int32_t bn, std::int32_t bk) { return {bn, bk}; }
  /// "ci32": one per output channel and `size` channels of the images, for all elements of the filter.
  static constexpr GroupShape image_channels(std::int32_t size) { return {1, size, true}; }

  /// Rows of the scale tensor of a weight of n_total output channels; the last block may be partial.
  constexpr std::int64_t rows(std::int64_t n_total) const { return n == 0 ? 1 : (n_total + n - 1) / n; }
  /// Runs of K that share a scale, of k_total input channels; the last one may be partial.
  constexpr std::int64_t cols(std::int64_t k_total) const { return k == 0 ? 1 : (k_total + k - 1) / k; }
  /// Columns of the scale tensor of a weight of k_total input channels, whose filter has so many elements.
  constexpr std::int64_t cols(std::int64_t k_total, std::int64_t elements) const {
    return cols(all_elements ? k_total / elements : k_total);
  }

  friend constexpr bool operator==(const GroupShape&, const GroupShape&) = default;
};

/// How weights are quantized.
struct WeightScheme {
  DType codes = DType::u4b8;                  // of up to 8 bits: u2 … u8, their biased forms, s8, e4m3, ...; f32, f16, bf16
  ZeroKind zero = ZeroKind::none;             // how zero points enter W
  GroupShape group = GroupShape::group(128);  // what shares a scale and a zero point
  DType scale = DType::f16;                   // how scales are stored; not part of the name

  /// Of a weight that is not quantized: `type` is f32, f16 or bf16; one group, and no scales.
  static constexpr WeightScheme dense(DType type) { return {type, ZeroKind::none, GroupShape::tensor(), DType::none}; }
  /// Whether the codes are f32, f16 or bf16, which stand for themselves.
  constexpr bool is_dense() const { return is_compute_float(codes); }
  /// "u4zg128".
  std::string name() const;
  /// A sentence for people: "4-bit codes, integer zero points, f16 scales per group of 128".
  std::string describe() const;
  friend bool operator==(const WeightScheme&, const WeightScheme&) = default;
};

/// How activations are quantized before the product. codes == none: they are not (weight-only layers).
struct ActScheme {
  DType codes = DType::none;                 // s8 or e4m3
  GroupShape group = GroupShape::channel();  // {0,0} one known scale, "t"; {1,0} per token, "r"; {1,128} per 128 channels, "g128"
  ZeroKind zero = ZeroKind::none;            // integer: x ≈ (q − z)·s; offset: x ≈ q·s + o
  friend bool operator==(const ActScheme&, const ActScheme&) = default;
};

/// How products of FP8 codes are summed on GPUs of compute capability 9.0. Every other sum is exact or f32.
enum class Accumulation : std::uint8_t {
  fast,     // all of K in tensor cores, which keep 13 bits below the largest addend: the error grows with K
  precise,  // 512 channels in tensor cores, these partial sums in f32; docs/accuracy.md has both bounds
};

/// Both sides of a product.
struct Scheme {
  WeightScheme weight;  // the part of the name after "_"
  ActScheme act;        // of activations; by default not quantized

  /// "u4zg128", "s8r_s8c".
  std::string name() const;
  /// The inverse of name(). Scales are taken to be f16 unless `scale` says otherwise; dense weights have none.
  static Result<Scheme> parse(std::string_view text, DType scale = DType::f16);
  friend bool operator==(const Scheme&, const Scheme&) = default;
};

}  // namespace nibble
