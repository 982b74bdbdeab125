// Sums of a product that lie in memory, for the epilogue (steps/epilogue_rows.hpp).
#pragma once

#include <cstdint>

#include "nibble/types.hpp"

namespace nibble::cuda {

/// Sums [M,N].
struct StoredSums {
  const void* data = nullptr;
  DType type = DType::f32;  // or f16, bf16
  std::int64_t stride = 0;  // elements between rows
  int each = 1;             // rows for a row of D, one after the other, which are added in their order: 1 or 3
  const std::int32_t* expert_of =
      nullptr;  // [M]: which bias a row has, bias_pitch bytes apart; −1: the row is not finished. Null: one for all
  std::int64_t bias_pitch = 0;
  bool halves = false;  // of a glu: D[m,j] is made of columns j and N/2 + j, not 2j and 2j + 1
};

}  // namespace nibble::cuda
