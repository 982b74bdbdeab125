// Applying the canonical epilogue to accumulators: the only code that writes a linear layer's output.
#pragma once

#include <cstdint>

#include "nibble/epilogue.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble::epilogue {

/// Checks the operands an epilogue needs against D[M,N]: presence, dtype, shape, strides.
Status check_args(const EpilogueSpec& spec, const Operands& args, const TensorView& d);

/// Finishes acc[0…count), which are D[m, n0…n0+count), and stores them. `acc` is overwritten.
/// Precondition: check_args has accepted the operands.
void store_row(const EpilogueSpec& spec, const Operands& args, float* acc, std::int64_t m, std::int64_t n0, std::int64_t count,
               const TensorView& d);

}  // namespace nibble::epilogue
