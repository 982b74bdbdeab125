// The tensors of a part of a layer, cut out of those of the whole.
#pragma once

#include <span>
#include <vector>

#include "checkpoint/config/format.hpp"

namespace nibble::codec {

/// The elements of a stored tensor that a part needs: rows [row, row + rows) and, of each, columns [col, col + cols). A vector is one row.
struct Cut {
  std::int64_t row = 0, rows = 0, col = 0, cols = 0;
  std::vector<std::int64_t> shape;    // of the result
  std::vector<std::int64_t> numbers;  // its elements, where they are not those of the whole; of s32 or s64
};

/// How `part` cuts the tensor that `stored` describes. Errors: unsupported where a word, a group or a block has channels on both sides of
/// a boundary, and for what has no such parts.
Result<Cut> cut(const StoredTensor& stored, const ConstTensorView& whole, const Module& module, const LayerPart& part);

}  // namespace nibble::codec
