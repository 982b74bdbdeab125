// Float matrices as the quantizer and its error measure accept them.
#pragma once

#include <cstdint>

#include "core/error.hpp"
#include "core/sizes.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// ok when `w` is [N,K] with N, K ≥ 1, f32, f16 or bf16, and a last stride of 1.
inline Status check_float_matrix(const ConstTensorView& w) {
  if (w.rank != 2 || w.empty() || w.dim(0) < 1 || w.dim(1) < 1)
    return error(StatusCode::invalid_argument, "w must be a matrix [N,K] of at least one element; it has rank {}{}", w.rank,
                 w.rank == 2 ? fmt::format(" and shape [{},{}]", w.dim(0), w.dim(1)) : "");
  if (!is_compute_float(w.dtype))
    return error(StatusCode::invalid_argument, "w is {}; convert it to f32, f16 or bf16", name(w.dtype));
  if (w.stride(1) != 1) return error(StatusCode::invalid_argument, "w has a last stride of {}; it must be 1", w.stride(1));
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"rows", w.dim(0)}, {"columns", w.dim(1)}}));
  return check_elements("w", {w.dim(0), w.dim(1)});
}

/// Calls f with a pointer to row n of a matrix that passed check_float_matrix, as its own element type.
template <class F>
auto with_row(const ConstTensorView& w, std::int64_t n, F&& f) {
  const std::int64_t at = n * w.stride(0);
  switch (w.dtype) {
    case DType::f16: return f(static_cast<const f16*>(w.data) + at);
    case DType::bf16: return f(static_cast<const bf16*>(w.data) + at);
    default: return f(static_cast<const float*>(w.data) + at);
  }
}

}  // namespace nibble
