// Where the sums of a task go: through the epilogue into D.
#pragma once

#include <cstdint>

#include "kernels/kernel.hpp"

namespace nibble::cpu {

struct Outputs {
  const EpilogueSpec* epilogue;
  const EpilogueArgs* operands;
  const TensorView* d;
  std::int64_t n_begin, n_end;  // the output channels that are wanted; row blocks may hold others

  /// Borrows from `args`.
  explicit Outputs(const StepArgs& args)
      : epilogue(args.epilogue),
        operands(&args.operands),
        d(&args.d),
        n_begin(args.n_begin),
        n_end(args.n_end == 0 ? args.weight->n : args.n_end) {}

  /// Finishes sums[height][rows] of row block `block` and tokens from m on, and stores them. `sums` is overwritten.
  void store(float* sums, int rows, std::int64_t block, std::int64_t m, std::int64_t height) const;
};

}  // namespace nibble::cpu
