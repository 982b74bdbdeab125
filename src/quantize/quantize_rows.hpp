// Quantizing the rows of a weight, whether they are of a linear layer or of filters.
#pragma once

#include "nibble/quantize.hpp"

namespace nibble {

/// quantize() of w[N,K] whose rows are filters in the order kh, kw, channel; 1×1 of linear layers. The result has the filter.
Result<QuantTensor> quantize_rows(const ConstTensorView& w, const QuantizeSpec& spec, const Extent& filter, Executor* executor);

}  // namespace nibble
