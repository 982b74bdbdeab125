// The dense tier: W is dequantized to f16 or bf16 once a run and multiplied by cuBLASLt, or a dense W where it lies. The memory it needs, and which kernel writes D;
// the rest is behind launch.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epilogue/element.hpp"
#include "nibble/epilogue.hpp"

namespace nibble::cuda {

/// Whether cuBLASLt writes D: the epilogue is acc_scale alone, and cuBLASLt has the output's type for operands of type `act`. Otherwise it
/// writes f32 sums, and the epilogue writes D. Plans and runs decide by the same function.
inline bool dense_writes_d(const EpilogueSpec& e, DType act) {
  return !e.row_scale && !e.col_scale && !e.bias && e.activation == Activation::none && !e.glu && !e.gate && !e.residual &&
         (e.out == act || e.out == DType::f32);
}
inline bool dense_writes_d(const epilogue::Element& e, DType act) {
  return e.row_scale == nullptr && e.col_scale == nullptr && e.bias.data == nullptr && e.activation == Activation::none &&
         e.glu_half == 0 && e.gate.data == nullptr && e.residual.data == nullptr && (e.out == act || e.out == DType::f32);
}

/// A layer of the dense tier, for up to `m` rows.
struct DenseSpec {
  std::int64_t m = 1, n = 1, k = 1;
  DType a_dtype = DType::f16, out = DType::f16;
  bool writes_d = false;  // dense_writes_d()
  bool in_place = false;  // W is dense and not in the scratch
};
/// What cuBLASLt answered: dense.cpp.
struct DenseConfig;

/// Scratch of a run: cuBLASLt's workspace | W, unless it is in place | sums, each aligned to 256 bytes. Rows of W and of sums begin at multiples of 16 bytes
/// whatever K and N are, as the fast kernels need.
struct DenseScratch {
  static constexpr std::size_t kLibraryBytes = std::size_t{32} << 20;  // what NVIDIA recommends for sm_90

  std::int64_t w_stride = 0, sums_stride = 0;  // elements between rows
  std::size_t w = 0, sums = 0;                 // where they begin
  std::size_t bytes = 0;                       // in all
};
inline DenseScratch dense_scratch(std::int64_t m, std::int64_t n, std::int64_t k, bool writes_d, bool in_place = false) {
  const auto round_up = [](std::int64_t x, std::int64_t to) { return (x + to - 1) / to * to; };
  DenseScratch scratch{.w_stride = round_up(k, 8), .sums_stride = round_up(n, 4), .w = DenseScratch::kLibraryBytes};
  scratch.sums = scratch.w + (in_place ? 0 : static_cast<std::size_t>(round_up(2 * n * scratch.w_stride, 256)));
  scratch.bytes = scratch.sums + (writes_d ? 0 : static_cast<std::size_t>(4 * m * scratch.sums_stride));
  return scratch;
}

}  // namespace nibble::cuda
