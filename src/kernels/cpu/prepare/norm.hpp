// Normalizing a token on the CPU, alone or before it is prepared.
#pragma once

#include "kernels/kernel.hpp"
#include "kernels/norm_task.hpp"

namespace nibble::cpu {

/// Stores y of token m, and its sum. All instruction sets give the same bits.
using NormalizeRow = void (*)(const NormTask& task, std::int64_t m);
/// The loops of a row of the table.
NormalizeRow normalize_row(Isa isa);
/// Predicted microseconds for all tokens.
double normalize_cost_us(Isa isa, const Problem& p);

}  // namespace nibble::cpu
