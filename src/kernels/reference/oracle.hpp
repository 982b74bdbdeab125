// The oracle, with which every kernel is compared. Scalar, in double, directly from the definitions; it shares no arithmetic with the
// kernels, not even the epilogue, so that a bug cannot be in both.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "nibble/epilogue.hpp"
#include "nibble/tensor.hpp"

namespace nibble::reference {

/// The canonical arrays of a weight, wherever they are stored.
struct WeightArrays {
  WeightScheme scheme;
  std::int64_t n = 0, k = 0;
  const std::uint8_t* codes = nullptr;  // [N,K]
  std::int64_t groups = 1;              // along K: columns of scales
  const std::byte* scales = nullptr;    // [rows,groups] of scheme.scale
  const std::byte* zeros = nullptr;     // of zero_type
  DType zero_type = DType::none;
  double scale2 = 1.0;
  const std::int32_t* group_of = nullptr;    // g_idx; null: k / group modulo groups
  const std::int32_t* channel_of = nullptr;  // position k holds input channel channel_of[k]; null: in order
  const Tensor* prescale = nullptr;
  std::optional<StaticActs> static_acts;
  std::optional<float> act_limit;
  bool paired = false;  // of a glu: rows 2j and 2j + 1 are channels j and N/2 + j
};
WeightArrays arrays_of(const QuantTensor& q);

/// W[n,k] as an exact-as-double real number before it is rounded to f32.
double weight_value(const WeightArrays& w, std::int64_t n, std::int64_t k);

/// One element of D before it is rounded to the output type, and the bound on the error of a correct kernel.
struct Expected {
  double value = 0;
  double bound = 0;  // on |D_kernel − value|, D's own rounding included
};

/// The arithmetic that a kernel may use; it determines the bound, and act_scheme the values too.
struct ActModel {
  ActScheme act_scheme = {};     // to int8 or e4m3: part of the definition of the result
  bool fixed_point = false;      // activations are rounded to 24-bit fixed point per 128 channels
  bool scaled_f16 = false;       // activations are rounded to f16, or to pairs of it, under a power of two per token
  bool subtracts_zeros = false;  // Σa·q and z·Σa are computed separately, so that their rounding does not shrink with q − z
  double part_roundings = 4;     // of those two sums and their difference, in units of f32
  double code_offset = 0;        // added to codes and zeros in both sums
  double dot_factor = 1;         // the error of a dot product relative to correctly rounded f32 additions
  DType weight_type = DType::f32;     // f16 or bf16: W without scale2 is rounded to it before the product
  DType prescaled_type = DType::f32;  // f16 or bf16: activations times a prescale are rounded to it before the product
  /// f16: of activations in blocks, what codes stand for is rounded to it, in units of a power of two: the largest one up to the token's
  /// largest scale.
  DType block_type = DType::f32;
  bool rounds_scales = false;  // before that, scales and the fractional part of float zeros are rounded too
  /// Sums of e4m3 products keep 13 bits below the largest addend (sm_90's tensor cores), over all of K (0) or so many channels at a
  /// time, at most (128, 512). −1: they are f32.
  int fp8_group = -1;
};

/// Expected D[m, columns[j]] for m in [0, M), row by row; of a glu D has N/2 columns. `a` is [M,K] float, or the codes that model.act_scheme names.
/// The bound assumes f32 accumulation in any order over any number of partial sums (docs/accuracy.md derives it).
std::vector<Expected> linear(const WeightArrays& w, const ConstTensorView& a, const EpilogueSpec& spec, const Operands& args,
                             std::span<const std::int64_t> columns, const ActModel& model = {});

}  // namespace nibble::reference
