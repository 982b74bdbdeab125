#include "plan/act_model.hpp"

#include "kernels/cpu/segments.hpp"
#include "layouts/gpu_tile.hpp"

namespace nibble {

reference::ActModel act_model(const Kernel& kernel, DType act, const ActScheme& quantize, const WeightScheme& scheme,
                              Accumulation accumulation) {
  reference::ActModel model{.quantize = quantize};
  if (cpu::is_int8(kernel.act) && cpu::sums_whole_rows(scheme, quantize))
    return model;  // exact integers: only scaling them rounds
  if (kernel.act == "e4m3" && kernel.backend == Backend::cuda) {
    const bool grouped = quantize.group.k != 0 || scheme.group.n > 1;
    const int together = grouped ? 128 : accumulation == Accumulation::precise ? kPreciseChannels : 0;
    if (kernel.isa == Isa::sm90) return {.quantize = quantize, .dot_factor = 4, .fp8_group = together};
    return {.quantize = quantize, .dot_factor = kernel.isa == Isa::simt ? 1.0 : 4.0};  // f32 sums
  }
  if (kernel.backend == Backend::cuda && (kernel.act == "s8i16" || kernel.quantizes)) {
    // Integers up to the end of a fold, codes taken as u − 8 or u − 128, and what zeros differ from that apart.
    const int base = 1 << (gpu_tile::stored_bits(scheme.codes) - 1);
    const bool centred = scheme.zero == ZeroKind::none && code_bias(scheme.codes) == base;
    return {.quantize = quantize, .subtracts_zeros = true, .code_offset = centred ? 0.0 : static_cast<double>(base)};
  }
  if (kernel.rounds_weights)  // what is left are products of two 16-bit floats, summed by tensor cores as said below
    return {.quantize = quantize, .dot_factor = 4, .weight_type = act, .rounds_scales = kernel.rounds_scales};
  if (kernel.backend == Backend::cuda) {
    // Tensor cores: codes are multiplied as they are stored and zeros subtracted from the sums of a record of 128 channels; bf16
    // carries a 4-bit code u as 128 + u. They align products to the largest and truncate, a whole unit in the last place (two
    // rounding units) for every 8 channels, where rounding to nearest errs by half of one and to both sides.
    if (kernel.isa != Isa::simt)
      model = {.quantize = quantize,
               .subtracts_zeros = true,
               .part_roundings = 4 + 2.0 * gpu_tile::kChannels / 8,
               .code_offset = kernel.act == "bf16" && gpu_tile::stored_bits(scheme.codes) == 4 ? 128.0 : 0.0,
               .dot_factor = 4};
    return model;
  }
  model.fixed_point = kernel.act == "s8x3";
  model.subtracts_zeros = kernel.act == "s8x3" || cpu::is_int8(kernel.act);
  return model;
}

}  // namespace nibble
