// The canonical epilogue: everything that happens to an output between the accumulator and memory, in one fixed order.
//
//   D = quantize( act( row_scale · col_scale · acc + bias ) ∘ gate + residual )
//
// The spec says which parts are present (it is part of a plan); the operands come with each run.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "nibble/status.hpp"
#include "nibble/tensor.hpp"
#include "nibble/types.hpp"

namespace nibble {

/// Activation functions; relu6 is clamp with 0 and 6. The two gelus are x·Φ(x) by erf and its approximation by tanh. All of them, clamp
/// and relu too, keep NaN.
enum class Activation : std::uint8_t { none, relu, clamp, gelu_erf, gelu_tanh, silu };
/// "gelu_tanh".
std::string_view name(Activation activation);
/// The inverse of name(); nothing for an unknown token.
std::optional<Activation> parse_activation(std::string_view token);

/// What happens between the sum acc = A·Wᵀ and memory, in this order; by default the sum is stored as it is.
///
///   D = quantize( activation( row_scale · col_scale · acc + bias ) ∘ gate + residual )
struct EpilogueSpec {
  bool row_scale = false;  // f32 [M]
  bool col_scale = false;  // f32 [N]
  bool bias = false;       // [N], any of f32, f16, bf16; the packed weight's own bias when the operand is absent
  Activation activation = Activation::none;  // of each element
  float clamp_low = 0.0f;                    // Activation::clamp: min(max(x, low), high); relu6 is clamp with 0 and 6
  float clamp_high = 6.0f;                   // not below clamp_low
  bool gate = false;                         // [M,N], multiplied in after the activation (silu·mul: gate_up layers)
  bool residual = false;                     // [M,N], added last
  DType out = DType::f32;                    // f32, f16, bf16 or s8
  float out_scale = 1.0f;                    // s8: D = saturate(round_to_even(x / out_scale) + out_zero); 0 where x is NaN
  std::int32_t out_zero = 0;                 // s8: −128 … 127

  /// "bias+silu+residual->f16"; "->f32" when nothing but the store is left.
  std::string name() const;
  /// Refuses what cannot be brought into the canonical form, with the reason.
  Status validate() const;
  friend bool operator==(const EpilogueSpec&, const EpilogueSpec&) = default;
};

/// Operands for the parts an EpilogueSpec names; the others are ignored. 2-D operands need a last stride of 1.
struct Operands {
  // Of an A that comes quantized (LinearSpec::a_dtype s8 or e4m3): A[m,k] = (code − a_zero[m, g])·a_scale[m, g], g = k / group.
  ConstTensorView a_scale = {};  // f32 [1] per tensor, [M] per token, [M,G] per group, any strides
  // s32 [1], [M] or [M,G] as a_scale, only where the scheme has zero points: −128 … 127, in device memory unchecked. In host memory any
  // s32 will do, but for a convolution with padding, which is filled with the code a_zero.
  ConstTensorView a_zero = {};
  ConstTensorView row_scale = {};  // f32 [M]
  ConstTensorView col_scale = {};  // f32 [N]
  ConstTensorView bias = {};       // f32, f16 or bf16 [N]
  ConstTensorView gate = {};       // f32, f16 or bf16, shaped like D
  ConstTensorView residual = {};   // f32, f16 or bf16, shaped like D
};

}  // namespace nibble
