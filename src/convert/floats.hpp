// Float weights in other orders, and with factors of their columns.
#pragma once

#include <vector>

#include "nibble/parallel.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// Rows in the order kh, kw, ci as [Co,Ci/groups,Kh,Kw].
Tensor as_oihw(const Tensor& rows, Extent filter);
/// The inverse, of a stored tensor.
Tensor as_rows(const Tensor& w);
/// W·diag(s).
Tensor scaled_columns(const Tensor& w, const std::vector<float>& s, Executor& executor);
/// W·diag(prescale), rounded to the type.
Tensor with_prescale(const Tensor& w, const Tensor& prescale, DType dtype, Executor& executor);

}  // namespace nibble
