#include "epilogue/element.hpp"

namespace nibble::epilogue {

Element element(const EpilogueSpec& spec, const Operands& args, const TensorView& d, float acc_scale) {
  const auto floats = [](bool present, const ConstTensorView& v) {
    return present ? static_cast<const float*>(v.data) : nullptr;
  };
  const auto operand = [](bool present, const ConstTensorView& v) {
    return present ? Operand{v.data, v.dtype, v.rank == 2 ? v.stride(0) : 0} : Operand{};
  };
  Element e;
  e.acc_scale = acc_scale;
  if (spec.sum_bias) e.sum_bias = static_cast<const std::int32_t*>(args.sum_bias.data);
  e.row_scale = floats(spec.row_scale, args.row_scale);
  e.col_scale = floats(spec.col_scale, args.col_scale);
  e.bias = operand(spec.bias, args.bias);
  e.gate = operand(spec.gate, args.gate);
  e.residual = operand(spec.residual, args.residual);
  if (spec.glu) e.glu_half = d.dim(1);
  e.glu_limits = {spec.glu_limit, spec.glu_offset};
  e.activation = spec.activation;
  e.clamp_low = spec.clamp_low;
  e.clamp_high = spec.clamp_high;
  e.negative_slope = spec.negative_slope;
  e.out = d.dtype;
  e.out_scale = spec.out_scale;
  e.out_zero = spec.out_zero;
  e.out_range = code_range(spec);
  if (spec.out_scales) {
    e.out_scales = static_cast<const float*>(args.out_scale.data);
    e.out_scale_each = args.out_scale.dim(0) > 1;
    e.out_zero = 0;
    e.out_zeros = static_cast<const std::int32_t*>(args.out_zero.data);
  }
  e.d = d.data;
  e.d_stride = d.stride(0);
  return e;
}

}  // namespace nibble::epilogue
