// Normalization of activations before a linear layer, as the first step of its plan.
//
//   x = A, or with `add` the residual stream A + norm_add, rounded to the type of A and stored as norm_sum
//   rms:    y = x / sqrt(mean(x²) + eps) · (norm_weight + weight_offset)
//   layer:  y = (x − mean(x)) / sqrt(mean((x − mean(x))²) + eps) · (norm_weight + weight_offset) + norm_bias
//
// Means are over the K channels of a token, arithmetic is f32, and y is rounded once to the type of A; the layer multiplies, or quantizes, y.
#pragma once

#include <cstdint>
#include <string_view>

#include "nibble/status.hpp"

namespace nibble {

/// The kind of normalization.
enum class Norm : std::uint8_t {
  none,
  rms,   // RMSNorm (Zhang and Sennrich, 2019): Llama, Qwen, Mistral, Gemma
  layer  // LayerNorm: Phi, GPT-NeoX, Whisper
};
/// "rms".
std::string_view name(Norm kind);

/// What the first step does. Its operands are Operands::norm_weight, norm_bias, norm_add and norm_sum.
struct NormSpec {
  Norm kind = Norm::none;
  float eps = 1e-6f;           // not negative, finite
  float weight_offset = 0.0f;  // finite: added to norm_weight; 1 in Gemma, whose checkpoints store the weight less 1
  bool bias = false;           // layer: norm_bias is added
  bool add = false;            // norm_add is added to A first

  /// "rms", "add+rms", "add+layer+bias"; "" for none.
  std::string_view text() const;
  /// Ok, or invalid_argument with the values.
  Status validate() const;
  friend bool operator==(const NormSpec&, const NormSpec&) = default;
};

}  // namespace nibble
