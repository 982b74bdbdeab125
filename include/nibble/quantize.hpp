// Float weights → QuantTensor.
#pragma once

#include <optional>
#include <string_view>

#include "nibble/device.hpp"
#include "nibble/parallel.hpp"
#include "nibble/scheme.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// What to quantize to, and how ranges are found.
struct QuantizeSpec {
  /// Codes uXbB (symmetric), uX with integer zero points or float offsets, s8 with zero points or without, e4m3; of 2 to 8 bits. Scales
  /// per tensor, channel, group (which divides K) or block (which may be ragged); they, and offsets, which have their type, are rounded to
  /// f16, bf16 or f32 before codes are chosen. Codes of e2m1 have scales of e8m0, as MXFP4 has them: e2m1g32. No checkpoint format but nibble's own
  /// holds offsets. Dense schemes, f32, f16 and bf16, round W to that type.
  WeightScheme scheme = {DType::u4b8, ZeroKind::none, GroupShape::group(128), DType::f16};
  bool clip_search = false;  // per group, shrink the range while that lowers the squared error
};

/// Rounds w[N,K] (f32, f16 or bf16, last stride 1) to nearest; e4m3 takes the scale max|w| / 448, e2m1 the least power of two
/// that is not below max|w| / 6. Bit-identical for any number of threads. Errors: unsupported for another scheme; invalid_argument when the
/// group size does not divide K, for e4m3 or e2m1 with zero points or a clipping search, for a NaN or infinity (with its position), or for a
/// weight beyond the range of a dense scheme (with its value).
Result<QuantTensor> quantize(const ConstTensorView& w, const QuantizeSpec& spec, Executor* executor = nullptr);
/// To a scheme by name, "u4zg128", with scales of f16. Errors: those of Scheme::parse too.
Result<QuantTensor> quantize(const ConstTensorView& w, std::string_view scheme, Executor* executor = nullptr);

/// The same for the filters of a convolution, w[Co,Ci/groups,Kh,Kw] (any strides): its rows become K = Kh·Kw·Ci/groups long, in the order
/// kh, kw, ci, so groups of a size that divides Ci/groups lie inside one element of a filter, and others run on through all of them. Only
/// here does a scheme like u4oci32 find one scale for the same channels at all elements.
Result<QuantTensor> quantize_conv(const ConstTensorView& w, const QuantizeSpec& spec, Executor* executor = nullptr);
Result<QuantTensor> quantize_conv(const ConstTensorView& w, std::string_view scheme, Executor* executor = nullptr);

/// How far a quantized weight is from the original.
struct QuantError {
  double sqnr_db = 0;      // 10·log10( Σw² / Σ(w−ŵ)² ); +infinity when equal
  double cosine = 0;       // ⟨w,ŵ⟩ / (‖w‖·‖ŵ‖)
  double max_abs = 0;      // max |w−ŵ|
  double relative_l2 = 0;  // ‖w−ŵ‖ / ‖w‖
};

/// The error of q against w[N,K] (f32, f16 or bf16, last stride 1). With a prescale p, w is compared with Ŵ·diag(p), by which the layer
/// multiplies its activations.
Result<QuantError> quantization_error(const ConstTensorView& w, const QuantTensor& q, Executor* executor = nullptr);

// Activations → 8-bit codes, on the CPU and on the GPU: bit for bit what Plan::run does with a float A. For engines that quantize once for
// several layers, or fused with another operator, and give the codes to plans (LinearSpec::a_dtype s8 or e4m3).
//
//   x ≈ (code − zero)·scale                              scheme                                                outputs beside codes
//
//   int8 per token (vLLM's scaled_int8_quant)             {.codes = s8}                                         scales [M]
//   the same with zero points                             {.codes = s8, .zero = ZeroKind::integer}              scales [M], zeros [M]
//   int8 in groups                                        {.codes = s8, .group = GroupShape::group(128)}        scales [M,G]
//   the same with zero points                             {.codes = s8, .group = …, .zero = ZeroKind::integer}  scales, zeros [M,G]
//   int8 in groups with float offsets                     {.codes = s8, .group = …, .zero = ZeroKind::offset}   scales, zeros [M,G]
//   x ≈ code·scale + zero, zeros are f32; also per token
//   FP8 per token (scaled_fp8_quant)                      {.codes = e4m3}                                       scales [M]
//   FP8 in groups (per_token_group_quant_fp8)             {.codes = e4m3, .group = GroupShape::group(128)}      scales [M,G]
//   a scale known beforehand, of either                   {.codes = s8, .group = GroupShape::tensor()}          none
//
// The codes are those that docs/accuracy.md defines, bit for bit, on every machine.

/// Where the results are written.
struct ActOutputs {
  TensorView codes;        // [M,K] of the scheme's type, last stride 1
  TensorView scales = {};  // f32 [M], with groups [M,G], any strides; block-scaled GEMMs read columns M apart
  TensorView zeros = {};   // shaped like scales, any strides: s32 with ZeroKind::integer, f32 with ZeroKind::offset
  TensorView sums = {};  // s32 [M], any stride: the sum of a token's s8 codes, for weights with zero points; absent: not written
};

/// Options of a quantizer; none by default.
struct ActOptions {
  ConstTensorView prescale = {};         // f32 [K], dense: activations are multiplied by it first
  std::optional<float> limit = {};       // the largest magnitude that a scale covers; larger activations saturate
  std::optional<StaticActs> known = {};  // with GroupShape::tensor(): the scale, and for s8 the zero point
};

/// Quantizes a[M,K] (f32, f16 or bf16, last stride 1). The last group may be shorter. A token or group with a NaN or an infinity gets the
/// scale NaN and codes 0; others are unaffected. With a known scale, infinities saturate and a NaN becomes 0 (s8) or NaN (e4m3).
/// Errors: invalid_argument with the values, unsupported for a scheme not listed above; nothing has been written then.
Status quantize_activations(const ConstTensorView& a, const ActScheme& scheme, const ActOutputs& out,
                            const ActOptions& options = {}, Executor* executor = nullptr);
/// The same in device memory, options.prescale too: enqueues on `stream` and returns, without allocation or synchronisation. Can be
/// captured in a CUDA graph once it has run on the device. Float offsets, and groups that are no multiples of 8 channels, go element by
/// element, and are slower.
/// Errors: as above, unsupported without a GPU, and internal with CUDA's message when the launch fails.
Status quantize_activations(const ConstTensorView& a, const ActScheme& scheme, const ActOutputs& out, const ActOptions& options,
                            Stream stream);

}  // namespace nibble
