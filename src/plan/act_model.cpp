#include "plan/act_model.hpp"

#include "layouts/gpu_tile.hpp"

namespace nibble {

namespace {

/// Whether codes of a byte are multiplied less 128: exactly, but beside zero points of activations that are no integers of 16 bits.
bool subtracts_128([[maybe_unused]] const Kernel& kernel, [[maybe_unused]] const WeightScheme& scheme) {
#if defined(__aarch64__)
  return kernel.isa != Isa::i8mm && bits(scheme.codes) != 4;
#else
  return false;
#endif
}

reference::ActModel model_of_sums(const Kernel& kernel, DType act, const ActScheme& quantize, const WeightScheme& scheme,
                                  Accumulation accumulation) {
  const int base = 1 << (gpu_tile::stored_bits(scheme.codes) - 1);  // of codes as they are stored: 8 or 128
  switch (kernel.sums) {
    case Sums::f32: break;
    case Sums::fixed_point: return {.act_scheme = quantize, .fixed_point = true, .subtracts_zeros = true};
    case Sums::integers:  // over all of K they are exact: only scaling them rounds
      return {.act_scheme = quantize,
              .subtracts_zeros = !sums_whole_rows(scheme, quantize),
              .code_offset = quantize.zero == ZeroKind::offset && subtracts_128(kernel, scheme) ? 128.0 : 0.0};
    case Sums::integer_folds:
    case Sums::fixed_point_folds: {  // exact up to the end of a fold; zero points minus the base of codes are a separate term
      const bool floats = info(scheme.codes).kind == DTypeKind::floating;
      const bool centred = scheme.zero == ZeroKind::none && (floats || code_bias(scheme.codes) == base);
      return {.act_scheme = quantize,
              .fixed_point = kernel.sums == Sums::fixed_point_folds,
              .subtracts_zeros = true,
              .code_offset = centred ? 0.0 : static_cast<double>(base)};
    }
    case Sums::tensor_cores:
      if (kernel.rounds_weights)
        return {.act_scheme = quantize, .dot_factor = 4, .weight_type = act, .rounds_scales = kernel.rounds_scales};
      return {.act_scheme = quantize, .dot_factor = 4};
    case Sums::tensor_core_pairs: return {.act_scheme = quantize, .scaled_f16 = true};  // 128 channels at a time, then f32
    case Sums::tensor_core_codes:
      // Zero points are subtracted from the sums of a record of 128 channels. On sm_90 bf16 activations become f16; elsewhere bf16 carries a 4-bit code
      // u as 128 + u. Tensor cores align
      // products to the largest and truncate, a whole unit in the last place (two rounding units) for every 8 channels, where rounding to
      // nearest errs by half a unit and in both directions.
      return {.act_scheme = quantize,
              .scaled_f16 = act == DType::bf16 && kernel.isa == Isa::sm90,
              .subtracts_zeros = true,
              .part_roundings = 4 + 2.0 * gpu_tile::kChannels / 8,
              .code_offset = act == DType::bf16 && base == 8 && kernel.isa != Isa::sm90 ? 128.0 : 0.0,
              .dot_factor = 4};
    case Sums::tensor_core_fp8: {
      const bool grouped = quantize.group.k != 0 || scheme.group.n > 1;
      const int together = grouped ? 128 : accumulation == Accumulation::precise ? kPreciseChannels : 0;
      return {.act_scheme = quantize, .dot_factor = 4, .fp8_group = together};
    }
  }
  return {.act_scheme = quantize};
}

}  // namespace

reference::ActModel act_model(const Kernel& kernel, DType act, const ActScheme& quantize, const WeightScheme& scheme,
                              Accumulation accumulation) {
  const bool halves = kernel.form == ActForm::e4m3_halves;
  if (halves) act = DType::f16;  // in which codes are multiplied
  reference::ActModel model = model_of_sums(kernel, act, quantize, scheme, accumulation);
  if (halves && quantize.group.k != 0) model.block_type = act;
  if (kernel.rounds_prescaled) model.prescaled_type = act;
  return model;
}

}  // namespace nibble
