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
  e.row_scale = floats(spec.row_scale, args.row_scale);
  e.col_scale = floats(spec.col_scale, args.col_scale);
  e.bias = operand(spec.bias, args.bias);
  e.gate = operand(spec.gate, args.gate);
  e.residual = operand(spec.residual, args.residual);
  e.activation = spec.activation;
  e.clamp_low = spec.clamp_low;
  e.clamp_high = spec.clamp_high;
  e.negative_slope = spec.negative_slope;
  e.out = d.dtype;
  e.out_scale = spec.out_scale;
  e.out_zero = spec.out_zero;
  e.d = d.data;
  e.d_stride = d.stride(0);
  return e;
}

}  // namespace nibble::epilogue
