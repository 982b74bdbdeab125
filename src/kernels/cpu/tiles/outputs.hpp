// The store of a task: its sums go through the epilogue into D.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace nibble::cpu {

struct Outputs {
  /// Finishes sums[height][R] of row block `block` and of tokens from m on, and stores them; R is that of the instruction set's layout.
  /// `sums` is overwritten.
  using Store = void (*)(const Outputs& outputs, float* sums, std::int64_t block, std::int64_t m, std::int64_t height);

  const EpilogueSpec* epilogue;
  const Operands* operands;
  const TensorView* d;
  std::int64_t n_begin, n_end;  // the output channels that are wanted; row blocks may hold others

  /// For sums of a kernel for `isa`. Borrows from `args`.
  Outputs(Isa isa, const StepArgs& args);

  /// The same for a D of s32, whose sums are [height][rows].
  void store_integers(const std::int32_t* sums, int rows, std::int64_t block, std::int64_t m, std::int64_t height) const;

  void store(float* sums, std::int64_t block, std::int64_t m, std::int64_t height) const {
    store_(*this, sums, block, m, height);
  }

 private:
  Store store_;
};

}  // namespace nibble::cpu
