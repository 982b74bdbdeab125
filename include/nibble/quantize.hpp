// Float weights → QuantTensor.
#pragma once

#include <optional>

#include "nibble/parallel.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// The scheme to quantize to, and how ranges are found.
struct QuantizeSpec {
  int bits = 4;                          // 2…8
  std::int32_t group_size = 128;         // along K; must divide K; 0: one group per output channel
  bool symmetric = true;                 // true: codes uXbB, no zero points; false: codes uX with integer zero points
  DType scale = DType::f16;              // f32, f16 or bf16: scales are rounded to this type before codes are chosen
  bool clip_search = false;              // per group, shrink the range while that lowers the squared error
  DType codes = DType::none;             // s8 or e4m3: these codes, of 8 bits whatever `bits` says
  std::optional<GroupShape> group = {};  // per tensor, per channel or in blocks, which may be ragged; in place of group_size

  /// What shares a scale.
  GroupShape shape() const { return group ? *group : group_size == 0 ? GroupShape::channel() : GroupShape::group(group_size); }
};

/// Rounds w[N,K] (f32, f16 or bf16, last stride 1) to nearest; e4m3 takes the scale max|w| / 448. Bit-identical for any number
/// of threads. Errors: invalid_argument when K % group_size != 0, for bits outside 2…8, for other codes, for e4m3 with zero
/// points or a clipping search, or for a NaN or infinity (with its position).
Result<QuantTensor> quantize(const ConstTensorView& w, const QuantizeSpec& spec, Executor* executor = nullptr);

/// The same for the kernel of a convolution, w[Co,Ci/groups,Kh,Kw] (any strides): its rows become K = Kh·Kw·Ci/groups long, in the order
/// kh, kw, ci, so groups of a size that divides Ci/groups lie inside one element of the kernel, and others run on through all of them.
Result<QuantTensor> quantize_conv(const ConstTensorView& w, const QuantizeSpec& spec, Executor* executor = nullptr);

/// How far a quantized weight is from the original.
struct QuantError {
  double sqnr_db = 0;      // 10·log10( Σw² / Σ(w−ŵ)² ); +infinity when equal
  double cosine = 0;       // ⟨w,ŵ⟩ / (‖w‖·‖ŵ‖)
  double max_abs = 0;      // max |w−ŵ|
  double relative_l2 = 0;  // ‖w−ŵ‖ / ‖w‖
};

/// `w` is [N,K] f32, f16 or bf16 with a last stride of 1. A prescale p belongs to the weight here: w is compared with Ŵ·diag(p),
/// which is what the layer multiplies.
Result<QuantError> quantization_error(const ConstTensorView& w, const QuantTensor& q, Executor* executor = nullptr);

}  // namespace nibble
