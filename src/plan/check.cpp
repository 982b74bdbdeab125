#include "plan/check.hpp"

#include <cmath>

#include "core/environment.hpp"
#include "core/error.hpp"
#include "core/sizes.hpp"
#include "kernels/kernel.hpp"

namespace nibble {
namespace {

/// Ok for a supported scheme of quantizing activations.
Status check_quantize(const LinearSpec& spec, const WeightDesc& weight) {
  const ActScheme& act = spec.act_scheme;
  const bool as_u8 = spec.a_dtype == DType::u8 && act.codes == DType::s8;
  if (as_u8 && act.zero == ZeroKind::none)
    return error(StatusCode::unsupported,
                 "A of u8 codes has zero points: use a scheme with them, {} (a_zero is 0 for codes that have none)",
                 Scheme{weight.scheme, {act.codes, act.group, ZeroKind::integer}}.name());
  if (as_u8 && act.zero != ZeroKind::integer)
    return error(StatusCode::unsupported,
                 "A of u8 codes has integer zero points, not offsets: pass codes − 128 as s8, with offsets + 128·scale");
  if (!is_compute_float(spec.a_dtype) && spec.a_dtype != act.codes && !as_u8)
    return error(StatusCode::unsupported,
                 "activations of type {}: neither f32, f16, bf16 nor codes, which LinearSpec::act_scheme names",
                 name(spec.a_dtype));
  if (act.codes == DType::none) return {};
  if (weight.scheme.is_dense())
    return error(StatusCode::unsupported,
                 "the weight is {}, not quantized, and its activations are not quantized either: leave act_scheme out",
                 weight.scheme.name());
  if (act.codes != DType::s8 && act.codes != DType::e4m3)
    return error(StatusCode::unsupported, "activations cannot be quantized to {}; use s8 or e4m3", name(act.codes));
  if (act.zero == ZeroKind::real || (act.zero != ZeroKind::none && act.codes != DType::s8))
    return error(StatusCode::unsupported, "activations of type {} have no such zero points; s8 has integers or offsets",
                 name(act.codes));
  if (act.zero == ZeroKind::offset && act.group == GroupShape::tensor())
    return error(
        StatusCode::unsupported,
        "offsets of activations are per token or block, found while running; a scale per tensor, known beforehand, has an "
        "integer zero point");
  if (act.group.n > 1) return error(StatusCode::unsupported, "a scale of activations is not shared by {} tokens", act.group.n);
  if (act.group == GroupShape::tensor() && is_compute_float(spec.a_dtype) && !weight.static_acts)
    return error(StatusCode::unsupported,
                 "a scale per tensor for activations has to be known beforehand, and the weight has no static_acts; use one per "
                 "token or block");
  if (act.group == GroupShape::tensor() && act.zero == ZeroKind::none && weight.static_acts && weight.static_acts->zero != 0)
    return error(StatusCode::unsupported, "the weight's static_acts have the zero point {}; quantize with ZeroKind::integer",
                 weight.static_acts->zero);
  if (!is_compute_float(spec.a_dtype) && weight.prescale)
    return error(StatusCode::unsupported,
                 "A comes quantized, but the weight has a prescale, which activations are multiplied by first: pass A as f32, "
                 "f16 or bf16");
  const std::int64_t group = weight.scheme.group.k, block = act.group.k;
  if (block != 0 && group != 0 && group % block != 0 && block % group != 0)
    return error(
        StatusCode::unsupported,
        "activations in blocks of {} do not line up with the weight's groups of {}: take blocks that divide the groups, or "
        "that they divide",
        block, group);
  return {};
}

/// Ok unless the epilogue needs integer sums, and the schemes have none, or they may not fit.
Status check_sums(const EpilogueSpec& epilogue, DType a_dtype, const ActScheme& act, const WeightDesc& weight) {
  if (!epilogue.reads_sums()) return {};
  if (!sums_whole_rows(weight.scheme, act))
    return error(
        StatusCode::unsupported,
        "{} is for W8A8, int8 activations with a scale per token or tensor and integer weights with one per output channel; "
        "this is {}",
        epilogue.name(), Scheme{weight.scheme, act}.name());
  if (epilogue.out == DType::s32 && is_compute_float(a_dtype))
    return error(StatusCode::unsupported, "a D of s32 is the sums of codes that the caller has: pass A as s8 or u8, not {}",
                 name(a_dtype));
  const std::int64_t most = most_whole_channels(weight.scheme, weight.zero_type, act);
  if (weight.k <= most) return {};
  return error(StatusCode::unsupported, "K={}: integer sums of more than {} such products do not fit into 32 bits", weight.k,
               most);
}

}  // namespace

/// The checks of every plan's options.
Status check_options(const PlanOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_environment());
  const int threads = options.machine ? options.machine->threads : options.threads;
  if (threads < 0 || threads > kMaxThreads)
    return error(StatusCode::invalid_argument, "a plan for {} threads; {} at most", threads, kMaxThreads);
  if (!options.machine) return {};
  for (const Ceiling ceiling : kAllCeilings)
    if (const double rate = (*options.machine)[ceiling]; !std::isfinite(rate) || rate < 0)
      return error(StatusCode::invalid_argument, "the machine's {} is {}; measure_roofline() gives finite numbers", name(ceiling),
                   rate);
  if (threads > 0 && options.machine->read_gbytes_per_s > 0 && options.machine->f32_gflops > 0) return {};
  return error(StatusCode::invalid_argument, "the machine was not measured: {} threads, {} GB/s, {} GFLOP/s", threads,
               options.machine->read_gbytes_per_s, options.machine->f32_gflops);
}

Roofline machine_for(const PlanOptions& options, std::optional<Isa> cpu) {
  if (options.machine) return *options.machine;
  return assumed_roofline(options.threads > 0 ? options.threads : default_executor().threads(), cpu);
}

Status check_spec(const WeightDesc& weight, const LinearSpec& spec) {
  NIBBLE_RETURN_IF_ERROR(check_quantize(spec, weight));
  NIBBLE_RETURN_IF_ERROR(spec.norm.validate());
  if (spec.norm.kind != Norm::none && !is_compute_float(spec.a_dtype))
    return error(StatusCode::unsupported, "a norm is of float activations, A is {}: normalize before quantizing",
                 name(spec.a_dtype));
  NIBBLE_RETURN_IF_ERROR(check_product(spec.m_max, weight.n, weight.k));
  NIBBLE_RETURN_IF_ERROR(spec.epilogue.validate());
  if (spec.epilogue.glu && weight.n % 2 != 0)
    return error(StatusCode::invalid_argument, "a glu multiplies the two halves of N output channels; N={} is odd", weight.n);
  return check_sums(spec.epilogue, spec.a_dtype, spec.act_scheme, weight);
}

Status check_spec(const WeightDesc& weight, const ConvSpec& spec) {
  const ConvGeometry& geometry = spec.geometry;
  NIBBLE_RETURN_IF_ERROR(check_batch(geometry, spec.batch_max));
  if (weight.n != geometry.out_channels || weight.k != geometry.k() || weight.filter != geometry.filter)
    return error(
        StatusCode::invalid_argument,
        "the convolution has {} output channels and a filter of {}x{} with {} channels, the weight is W[{},{}] of a {}x{} filter",
        geometry.out_channels, geometry.filter.h, geometry.filter.w, geometry.group_inputs(), weight.n, weight.k, weight.filter.h,
        weight.filter.w);
  NIBBLE_RETURN_IF_ERROR(spec.epilogue.validate());
  if (spec.epilogue.row_scale)
    return error(StatusCode::unsupported, "a convolution has no row_scale; apply a scale per pixel in the layer that reads D");
  if (spec.epilogue.glu) return error(StatusCode::unsupported, "a convolution has no glu; linear layers do");
  NIBBLE_RETURN_IF_ERROR(check_quantize({.a_dtype = spec.a_dtype, .act_scheme = spec.act_scheme}, weight));
  NIBBLE_RETURN_IF_ERROR(check_sums(spec.epilogue, spec.a_dtype, spec.act_scheme, weight));
  if (weight.act_order)
    return error(
        StatusCode::unsupported,
        "a convolution's weight has no act-order, and this one has a g_idx: quantize it without (GPTQ: desc_act=False), or "
        "dequantize it and quantize the result");
  if (!is_compute_float(spec.a_dtype) && spec.act_scheme.group != GroupShape::tensor())
    return error(StatusCode::unsupported, "images that come quantized have one scale per tensor; leave other scales to run()");
  const std::int64_t block = spec.act_scheme.group.k;
  if (block != 0 && geometry.group_inputs() % block != 0)
    return error(StatusCode::unsupported, "activations in blocks of {} channels do not divide the {} of a pixel and group", block,
                 geometry.group_inputs());
  return {};
}

}  // namespace nibble
