// Applying the canonical epilogue to accumulators: the only code that writes a linear layer's output.
#pragma once

#include <cstdint>

#include "epilogue/activation.hpp"
#include "nibble/epilogue.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble::epilogue {

/// How a D of s8 or u8 is quantized: by the constants of the specification, or by operands in host memory.
struct OutCodes {
  const float* scales;
  std::int64_t step;  // 0: one scale for all channels
  std::int32_t zero;
  CodeRange range;

  /// Borrows both.
  OutCodes(const EpilogueSpec& spec, const Operands& args)
      : scales(spec.out_scales ? static_cast<const float*>(args.out_scale.data) : &spec.out_scale),
        step(spec.out_scales && args.out_scale.dim(0) > 1 ? 1 : 0),
        zero(!spec.out_scales        ? spec.out_zero
             : args.out_zero.empty() ? 0
                                     : *static_cast<const std::int32_t*>(args.out_zero.data)),
        range(code_range(spec)) {}
  float scale(std::int64_t n) const { return scales[n * step]; }
};

/// Checks the operands an epilogue needs against D[M,N]: presence, dtype, shape, strides.
Status check_args(const EpilogueSpec& spec, const Operands& args, const TensorView& d);

/// Finishes acc[0…count), which are D[m, n0…n0+count), and stores them. `acc` is overwritten. Of a glu the sums are in pairs, channels 2j
/// and 2j + 1 for channels j and N/2 + j of x, and n0 and count are even.
/// Precondition: check_args has accepted the operands.
void store_row(const EpilogueSpec& spec, const Operands& args, float* acc, std::int64_t m, std::int64_t n0, std::int64_t count,
               const TensorView& d);

}  // namespace nibble::epilogue
