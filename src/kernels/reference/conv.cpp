#include "kernels/reference/conv.hpp"

#include <cstring>

#include "kernels/recode.hpp"

namespace nibble::reference {
namespace {

const std::byte* element(const ConstTensorView& v, std::int64_t b, std::int64_t c, std::int64_t h, std::int64_t w) {
  const std::int64_t at = b * v.stride(0) + c * v.stride(1) + h * v.stride(2) + w * v.stride(3);
  return static_cast<const std::byte*>(v.data) + at * (bits(v.dtype) / 8);
}

ConstTensorView matrix(const Tensor& t) { return {t.bytes.data(), t.dtype, {t.shape[0], t.shape[1]}}; }

}  // namespace

Tensor patches(const ConvGeometry& g, const ConstTensorView& a, std::int64_t group, float pad) {
  const std::int64_t batch = a.dim(0), height = g.out_height(), width = g.out_width(), channels = g.group_inputs();
  Tensor rows(a.dtype, {batch * height * width, g.k()});
  Tensor padding(a.dtype, {1});
  padding.set(0, pad);
  const auto size = static_cast<std::size_t>(bits(a.dtype) / 8);
  std::byte* to = rows.bytes.data();
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t oh = 0; oh < height; ++oh)
      for (std::int64_t ow = 0; ow < width; ++ow)
        for (std::int64_t kh = 0; kh < g.filter.h; ++kh)
          for (std::int64_t kw = 0; kw < g.filter.w; ++kw) {
            const std::int64_t h = oh * g.stride.h + kh * g.dilation.h - g.padding.top;
            const std::int64_t w = ow * g.stride.w + kw * g.dilation.w - g.padding.left;
            const bool inside = h >= 0 && h < g.height && w >= 0 && w < g.width;
            for (std::int64_t c = 0; c < channels; ++c, to += size)
              std::memcpy(to, inside ? element(a, b, group * channels + c, h, w) : padding.bytes.data(), size);
          }
  return rows;
}

Tensor pixels(const ConstTensorView& v) {
  if (v.empty()) return {};
  Tensor rows(v.dtype, {v.dim(0) * v.dim(2) * v.dim(3), v.dim(1)});
  const auto size = static_cast<std::size_t>(bits(v.dtype) / 8);
  std::byte* to = rows.bytes.data();
  for (std::int64_t b = 0; b < v.dim(0); ++b)
    for (std::int64_t h = 0; h < v.dim(2); ++h)
      for (std::int64_t w = 0; w < v.dim(3); ++w)
        for (std::int64_t c = 0; c < v.dim(1); ++c, to += size) std::memcpy(to, element(v, b, c, h, w), size);
  return rows;
}

float padding_code(const ConvSpec& spec, DType type, const WeightArrays& w, const Operands& args) {
  if (is_compute_float(type) || spec.act_scheme.zero == ZeroKind::none) return 0;
  if (args.a_scale.empty() && w.static_acts) return static_cast<float>(w.static_acts->zero + code_shift(type));
  return static_cast<float>(*static_cast<const std::int32_t*>(args.a_zero.data));
}

std::vector<Expected> conv(const WeightArrays& w, const ConvSpec& spec, const ConstTensorView& a, const Operands& args,
                           std::span<const std::int64_t> columns, const ActModel& model) {
  const std::int64_t group = columns.front() / spec.geometry.group_outputs();
  const Tensor rows = patches(spec.geometry, a, group, padding_code(spec, a.dtype, w, args));
  const Tensor gate = spec.epilogue.gate ? pixels(args.gate) : Tensor(),
               residual = spec.epilogue.residual ? pixels(args.residual) : Tensor();
  Operands flat = args;
  if (!gate.empty()) flat.gate = matrix(gate);
  if (!residual.empty()) flat.residual = matrix(residual);
  return linear(w, matrix(rows), spec.epilogue, flat, columns, model);
}

}  // namespace nibble::reference
