// The canonical epilogue: everything that happens to an output between the accumulator and memory, in one fixed order.
//
//   D = quantize( activation( row_scale · col_scale · acc + bias ) ∘ gate + residual )
//
// EpilogueSpec says which parts are present and belongs to a plan; Operands are given with each run.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "nibble/status.hpp"
#include "nibble/tensor.hpp"
#include "nibble/types.hpp"

namespace nibble {

class PackedWeight;

/// Activation functions. NaN stays NaN in each of them, clamp and relu too.
enum class Activation : std::uint8_t {
  none,
  relu,       // max(x, 0)
  clamp,      // min(max(x, clamp_low), clamp_high); relu6 is clamp with 0 and 6
  gelu_erf,   // x·Φ(x)
  gelu_tanh,  // its approximation by tanh
  silu,       // x·sigmoid(x)
  sigmoid,    // 1 / (1 + exp(−x))
  tanh,
  hardswish,   // x·min(max(x + 3, 0), 6)/6
  leaky_relu,  // x, or x·negative_slope where x < 0
  quick_gelu   // x·sigmoid(1.702·x)
};
/// All of them, in order.
inline constexpr std::array kActivations{
    Activation::none,    Activation::relu, Activation::clamp,     Activation::gelu_erf,   Activation::gelu_tanh, Activation::silu,
    Activation::sigmoid, Activation::tanh, Activation::hardswish, Activation::leaky_relu, Activation::quick_gelu};
/// "gelu_tanh".
std::string_view name(Activation activation);
/// The inverse of name(), and clamp for "relu6", whose bounds are those that EpilogueSpec has by default; nothing for an unknown token.
std::optional<Activation> parse_activation(std::string_view token);

/// What happens between the sum acc = A·Wᵀ and memory, in this order; by default the sum is stored as it is.
///
///   x = row_scale · col_scale · acc + bias
///   D = quantize( activation(x) ∘ gate + residual )
///
/// A gated linear unit (glu) joins the two halves of x [M,N], whose first N/2 columns are the gate and whose last N/2 the other factor, as
/// in the joined gate_up layers of decoders; D, gate and residual are [M,N/2] then, and the vectors of x [N] as before:
///
///   D = quantize( activation(min(x₁, glu_limit)) ∘ (clamp(x₂, ±glu_limit) + glu_offset) ∘ gate + residual )
///
/// Where D is f16 or bf16 and there are no scales, acc is rounded to that type first: whether the kernel of the product stores D or a last
/// step does, its bits are the same.
///
/// Of W8A8, where acc = s_a · s_w · I with the integer sums I = Σ (q_a − z_a)·(q_w − z_w), sum_bias is added to I, modulo 2³², and a D
/// of s32 is I. W8A8 is an A of int8 with a scale per token or tensor, and a W of integers with one per output channel.
struct EpilogueSpec {
  bool sum_bias = false;                     // s32 [N], of W8A8: added to the integer sums, before their scales
  bool row_scale = false;                    // f32 [M]
  bool col_scale = false;                    // f32 [N]
  bool bias = false;                         // f32, f16 or bf16 [N]; the packed weight's own bias when the operand is absent
  Activation activation = Activation::none;  // of each element
  float clamp_low = 0.0f;                    // Activation::clamp: min(max(x, low), high); relu6 is clamp with 0 and 6
  float clamp_high = 6.0f;                   // not below clamp_low
  float negative_slope = 0.01f;              // Activation::leaky_relu: finite
  bool glu = false;                          // N even: D[M,N/2] is activation(first half) ∘ second half. Of linear layers
  float glu_limit = std::numeric_limits<float>::infinity();  // positive: the magnitude at which both halves saturate (gpt-oss: 7)
  float glu_offset = 0.0f;                                   // finite: added to the second half (gpt-oss: 1)
  bool gate = false;      // shaped like D: multiplied in after the activation (silu·mul of two separate layers)
  bool residual = false;  // shaped like D: added last
  /// f32, f16, bf16, s8 or u8; or s32 of an A that comes as codes: the sums I, without any part but sum_bias.
  DType out = DType::f32;
  /// s8, u8: D = clamp(round_to_even(x / out_scale) + out_zero, the type's range and [out_low, out_high]); 0, clamped, where x is NaN.
  float out_scale = 1.0f;     // positive, finite
  std::int32_t out_zero = 0;  // a value of the type
  bool out_scales = false;    // they are Operands::out_scale and out_zero instead, known at run time
  std::int32_t out_low = std::numeric_limits<std::int32_t>::min(), out_high = std::numeric_limits<std::int32_t>::max();

  /// The columns of D for a weight of n output channels: N, of a glu N/2.
  std::int64_t columns(std::int64_t n) const { return glu ? n / 2 : n; }
  /// The type to which acc of a glu is rounded first: that of D, or f32.
  DType factor_type() const { return !row_scale && !col_scale && (out == DType::f16 || out == DType::bf16) ? out : DType::f32; }
  /// Whether it needs the integer sums of W8A8.
  bool reads_sums() const { return sum_bias || out == DType::s32; }
  /// "bias+silu+residual->f16"; "->f32" when the sum is only stored.
  std::string name() const;
  /// Ok, or invalid_argument or unsupported with the values and the reason.
  Status validate() const;
  friend bool operator==(const EpilogueSpec&, const EpilogueSpec&) = default;
};

/// What a run reads beside A and W. Operands that the plan does not use are ignored; 2-D operands have a last stride of 1, images the
/// strides of their layout (ImageLayout).
struct Operands {
  // For an A that comes quantized (LinearSpec::a_dtype s8, u8 or e4m3): A[m,k] = (code − a_zero[m,g])·a_scale[m,g], g = k / group.k.
  // f32 [1] per tensor, [M] or, for all tokens, [1] per token, [M,G] per group, any strides; absent, per tensor: the weight's
  // static_acts, zero point included, which is that of s8 codes: of u8 codes 128 more. A D of s32 does not need it.
  ConstTensorView a_scale = {};
  // s32 of the shapes of a_scale, where the scheme has zero points; one of the two may be [1] and the other [M]. In device memory
  // −128 … 127, not checked. In host memory any s32; of a convolution with padding −128 … 127, because padding is filled with the code
  // a_zero. Of u8 codes 0 … 255 in place of −128 … 127. With ZeroKind::offset f32, and A[m,k] = code·a_scale[m,g] + a_zero[m,g].
  ConstTensorView a_zero = {};
  ConstTensorView row_scale = {};  // f32 [M], with EpilogueSpec::row_scale
  ConstTensorView col_scale = {};  // f32 [N], with col_scale
  ConstTensorView bias = {};       // f32, f16 or bf16 [N], with bias; absent: the weight's own
  ConstTensorView gate = {};       // f32, f16 or bf16, shaped like D, with gate
  ConstTensorView residual = {};   // f32, f16 or bf16, shaped like D, with residual
  ConstTensorView sum_bias = {};   // s32 [N], with sum_bias
  ConstTensorView out_scale = {};  // f32 [1] or [N], with out_scales: positive, finite, not checked
  ConstTensorView out_zero = {};   // s32 [1], with out_scales: a value of D's type, not checked; absent: 0
  // With LinearSpec::norm (norm.hpp).
  ConstTensorView norm_weight = {};  // f32, f16 or bf16 [K]
  ConstTensorView norm_bias = {};    // the same, with NormSpec::bias
  ConstTensorView norm_add = {};     // f32, f16 or bf16 [M,K], with NormSpec::add
  TensorView norm_sum = {};  // of A's type [M,K], with add: receives the sum; may lie on A or on norm_add; absent: not stored
  /// A hint: the weight of the call that follows on the same stream. Kernels of sm_90 for up to 16 tokens ask for it in L2 (up to 8 MB,
  /// evenly spaced) once they have asked for their own, so that memory is busy while this call ends and other kernels run before the next.
  /// D does not change. In device memory, of the same GPU, where it has to live as long as this call's. Other kernels ignore it.
  const PackedWeight* next = nullptr;
};

}  // namespace nibble
