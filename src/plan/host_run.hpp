// A plan on operands in host memory, wherever its weight is. For verification and tests: it allocates, copies and waits.
#pragma once

#include "nibble/plan.hpp"

namespace nibble {

/// Plan::run with `a`, `d` and the operands in host memory. The workspace is filled with NaN, so that reading unwritten memory shows, and
/// surrounded by canaries: writes beside it are an internal error. For a weight in device memory all operands are copied there and `d`
/// back, gaps between its rows included; `d` has canaries too.
Status run_on_host(const Plan& plan, const PackedWeight& weight, const ConstTensorView& a, const TensorView& d,
                   const Operands& operands, Executor* executor = nullptr);

}  // namespace nibble
