#include "kernels/reference/reference.hpp"

#include <array>
#include <cmath>

#include "core/error.hpp"
#include "kernels/image.hpp"
#include "kernels/reference/conv.hpp"
#include "kernels/reference/oracle.hpp"

namespace nibble::reference {
namespace {

WeightArrays arrays_of(const PackedWeightData& packed) {
  WeightArrays w;
  w.scheme = packed.scheme;
  w.n = packed.n;
  w.k = packed.k;
  w.groups = packed.groups();
  const auto scale_count = static_cast<std::uint64_t>(w.scheme.group.rows(w.n) * w.groups);
  w.codes = reinterpret_cast<const std::uint8_t*>(packed.bytes.data());
  w.scales = packed.bytes.data() + w.n * w.k * code_bytes(w.scheme.codes);
  w.zeros = w.scales + storage_bytes(w.scheme.scale, scale_count);
  w.zero_type = packed.zero_type;
  w.scale2 = packed.scale2.value_or(1.0f);
  w.channel_of = packed.perm.empty() ? nullptr : packed.perm.data();  // group_of: the packed order has contiguous groups
  w.prescale = packed.prescale.empty() ? nullptr : &packed.prescale;
  w.static_acts = packed.static_acts;
  w.act_limit = packed.act_limit;
  w.paired = packed.paired;
  return w;
}

void store(const TensorView& d, std::int64_t at, double value) {
  switch (d.dtype) {
    case DType::f32: static_cast<float*>(d.data)[at] = static_cast<float>(value); break;
    case DType::f16: static_cast<f16*>(d.data)[at] = to_f16(static_cast<float>(value)); break;
    case DType::bf16: static_cast<bf16*>(d.data)[at] = to_bf16(static_cast<float>(value)); break;
    case DType::s32: static_cast<std::int32_t*>(d.data)[at] = static_cast<std::int32_t>(value); break;
    default:  // s8, u8: saturated already
      static_cast<std::uint8_t*>(d.data)[at] = static_cast<std::uint8_t>(static_cast<std::int32_t>(std::nearbyint(value)));
  }
}

Status run_linear(const Kernel&, const StepArgs& args) {
  const WeightArrays w = arrays_of(*args.weight);
  args.executor->parallel_for(args.d.dim(1), [&](std::int64_t n) {
    const std::int64_t column[] = {n};
    const std::vector<Expected> expected =
        linear(w, args.a, *args.epilogue, args.operands, column, {.act_scheme = args.act_scheme});
    for (std::int64_t m = 0; m < args.a.dim(0); ++m)
      store(args.d, m * args.d.stride(0) + n, expected[static_cast<std::size_t>(m)].value);
  });
  return {};
}

Status run_conv(const Kernel&, const StepArgs& args) {
  const WeightArrays w = arrays_of(*args.weight);
  const ConvGeometry& geometry = args.conv->geometry;
  const std::int64_t batch = args.a.dim(0), pixels = geometry.out_height() * geometry.out_width();
  NIBBLE_ASSIGN_OR_RETURN(const Image d, image_of("D", args.d, args.conv->output, batch, geometry.out_channels,
                                                  geometry.out_height(), geometry.out_width()));
  args.executor->parallel_for(w.n, [&](std::int64_t n) {
    const std::int64_t column[] = {n};
    const std::vector<Expected> expected = conv(w, *args.conv, args.a, args.operands, column, {.act_scheme = args.act_scheme});
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t p = 0; p < pixels; ++p)
        store(args.d, b * d.image + p * d.pixel + n * d.channel, expected[static_cast<std::size_t>(b * pixels + p)].value);
  });
  return {};
}

Status run_dequantize(const Kernel&, const StepArgs& args) {
  const PackedWeightData& packed = *args.weight;
  WeightArrays w = arrays_of(packed);
  w.scale2 = 1.0;
  args.executor->parallel_for(w.n, [&](std::int64_t n) {
    for (std::int64_t k = 0; k < w.k; ++k) {
      const std::int64_t channel = w.channel_of == nullptr ? k : w.channel_of[k];
      // W is an f32 number by definition (QuantTensor): rounded once, and once more by a second-level scale.
      float value = static_cast<float>(weight_value(w, n, k));
      if (packed.scale2) value *= *packed.scale2;
      store(args.d, args.transposed ? channel * args.d.stride(0) + n : n * args.d.stride(0) + channel, value);
    }
  });
  return {};
}

double cost_us(const Kernel&, const Problem& p) {
  constexpr double kNanosecondsPerTerm = 2.0;  // an estimate: the reference is never chosen for its speed
  return 1e-3 * kNanosecondsPerTerm * static_cast<double>(p.n) * static_cast<double>(p.k) * (2.0 + static_cast<double>(p.m)) /
         p.machine.threads;
}

constexpr std::array kKernels{
    Kernel{.backend = Backend::reference,
           .isa = Isa::baseline,
           .op = Op::linear,
           .out = "any",
           .act = "any",
           .weight = "any",
           .layout = "plain",
           .tile = {},
           .summary = "double-precision reference for every problem, one output at a time; slow",
           .accepts = accepts_common,
           .cost_us = cost_us,
           .run = run_linear},
    Kernel{.backend = Backend::reference,
           .isa = Isa::baseline,
           .op = Op::conv,
           .out = "any",
           .act = "any",
           .weight = "any",
           .layout = "plain",
           .tile = {},
           .summary = "double-precision reference for every convolution, one output at a time; slow",
           .accepts = accepts_common,
           .cost_us = cost_us,
           .run = run_conv},
    Kernel{.backend = Backend::reference,
           .isa = Isa::baseline,
           .op = Op::dequantize,
           .out = "any",
           .act = "none",
           .weight = "any",
           .layout = "plain",
           .tile = {},
           .summary = "writes W by its definition, one element at a time; slow",
           .accepts = accepts_common,
           .cost_us = cost_us,
           .run = run_dequantize},
};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

}  // namespace nibble::reference
