// Tensors: borrowed views, owned arrays, and QuantTensor, the one meeting point of checkpoint formats and packed layouts.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "nibble/scheme.hpp"
#include "nibble/status.hpp"
#include "nibble/types.hpp"

namespace nibble {

/// The limit of every single size: M, N, K, a batch, and the extents, strides, paddings and dilations of images.
inline constexpr std::int64_t kMaxSize = std::int64_t{1} << 30;
/// The limit of a matrix or batch of images, in elements: W; D; A, also as patches and with its padding. Within both limits no size
/// that nibble computes overflows, workspaces included; beyond them, calls fail with invalid_argument.
inline constexpr std::int64_t kMaxElements = std::int64_t{1} << 46;

// clang-format off
/// @{
/// The DType of a C++ element type.
template <class T> inline constexpr DType dtype_of = DType::none;
template <> inline constexpr DType dtype_of<float> = DType::f32;
template <> inline constexpr DType dtype_of<f16> = DType::f16;
template <> inline constexpr DType dtype_of<bf16> = DType::bf16;
template <> inline constexpr DType dtype_of<double> = DType::f64;
template <> inline constexpr DType dtype_of<std::int8_t> = DType::s8;
template <> inline constexpr DType dtype_of<std::uint8_t> = DType::u8;
template <> inline constexpr DType dtype_of<std::int32_t> = DType::s32;
template <> inline constexpr DType dtype_of<std::int64_t> = DType::s64;
/// @}
// clang-format on

/// A borrowed array of up to four dimensions; strides are in elements and not negative; the last one must be 1 where a
/// function says so.
template <class Void>
struct BasicTensorView {
  Void* data = nullptr;                   // of element [0, …, 0]; null: absent
  DType dtype = DType::none;              // of an element
  int rank = 0;                           // dimensions in use
  std::array<std::int64_t, 4> shape{};    // outermost first
  std::array<std::int64_t, 4> strides{};  // in elements

  /// Absent.
  BasicTensorView() = default;
  /// A dense view of memory whose element type is a run-time value.
  BasicTensorView(Void* d, DType t, std::initializer_list<std::int64_t> dims) : data(d), dtype(t) {
    for (std::int64_t dim : dims) shape[static_cast<std::size_t>(rank++)] = dim;
    std::int64_t stride = 1;
    for (int i = rank; i-- > 0;) {
      strides[static_cast<std::size_t>(i)] = stride;
      stride *= shape[static_cast<std::size_t>(i)];
    }
  }
  /// A dense view of typed memory: TensorView(pointer, {rows, cols}).
  template <class T, class = std::enable_if_t<!std::is_void_v<T>>>
  BasicTensorView(T* d, std::initializer_list<std::int64_t> dims)
      : BasicTensorView(static_cast<Void*>(d), dtype_of<std::remove_const_t<T>>, dims) {
    static_assert(dtype_of<std::remove_const_t<T>> != DType::none, "no DType for this element type");
  }
  /// A writable view converts to a read-only one.
  template <class V, class = std::enable_if_t<std::is_const_v<Void> && !std::is_const_v<V>>>
  BasicTensorView(const BasicTensorView<V>& v)  // NOLINT(google-explicit-constructor)
      : data(v.data), dtype(v.dtype), rank(v.rank), shape(v.shape), strides(v.strides) {}

  /// Whether it is absent.
  bool empty() const { return data == nullptr; }
  /// shape[i].
  std::int64_t dim(int i) const { return shape[static_cast<std::size_t>(i)]; }
  /// strides[i].
  std::int64_t stride(int i) const { return strides[static_cast<std::size_t>(i)]; }
  /// How many elements.
  std::int64_t numel() const {
    std::int64_t product = 1;
    for (int i = 0; i < rank; ++i) product *= dim(i);
    return product;
  }
};
/// A writable view.
using TensorView = BasicTensorView<void>;
/// A read-only view.
using ConstTensorView = BasicTensorView<const void>;

/// An owned, dense, row-major array.
struct Tensor {
  DType dtype = DType::none;        // none: empty
  std::vector<std::int64_t> shape;  // outermost first
  std::vector<std::byte> bytes;     // storage_bytes(dtype, numel())

  /// Empty.
  Tensor() = default;
  /// Filled with zero bytes.
  Tensor(DType t, std::vector<std::int64_t> dims);

  /// How many elements.
  std::int64_t numel() const;
  /// Whether it holds nothing.
  bool empty() const { return dtype == DType::none; }
  /// The elements; precondition: dtype is T's.
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(bytes.data());
  }
  /// The elements, to read.
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(bytes.data());
  }
  /// Element i of any float or integer type of at least 8 bits, as a float (exact for every type but f64, s32 and wider).
  float at(std::int64_t i) const;
  /// Stores `value` as element i, rounding to nearest even; dtype must be f32, f16, bf16, u8 or s8 (saturating).
  void set(std::int64_t i, float value);

  friend bool operator==(const Tensor&, const Tensor&) = default;
};

/// A scale and zero point for all of a layer's activations, known beforehand: x ≈ (q − zero)·scale.
struct StaticActs {
  float scale = 1.0f;     // positive
  std::int32_t zero = 0;  // of s8: −128 … 127; of e4m3: 0
  friend bool operator==(const StaticActs&, const StaticActs&) = default;
};

/// A height and a width: of a filter, a stride or a dilation.
struct Extent {
  std::int64_t h = 1, w = 1;  // elements along the height and along the width
  friend constexpr bool operator==(const Extent&, const Extent&) = default;
};

/// A quantized weight matrix W[N,K] in canonical form: formats produce it, layouts pack it.
///
///   W[n,k] = dequantized value of codes[n,k] under scheme.zero with the scale of block (n / group.n, g),
///   where g = g_idx[k] when present (act-order), else k / group.k modulo the number of groups.
///
/// K of a convolution is Kh·Kw times the channels of the images. Only where all elements of the filter share the groups of these (scheme
/// "…ci32") are there fewer groups than K / group.k, and the modulo counts: the first element's groups are also those of all others.
///
/// The result is an f32 number: (q − z)·s rounded once to f32 (exact whenever s has at most 16 significant bits), times the
/// second-level scale rounded once more where there is one; q·s + o is computed in f64 and rounded once.
///
/// A dense weight, whose scheme is f32, f16 or bf16, is not quantized: its codes are the numbers themselves, exactly.
struct QuantTensor {
  WeightScheme scheme;              // what codes, scales and zeros mean
  std::int64_t n = 0;               // output channels, 1 … kMaxSize
  std::int64_t k = 0;               // input channels, as n; n·k at most kMaxElements
  std::vector<std::uint8_t> codes;  // [N,K], one code a byte, upper bits zero; of a dense weight code_bytes() each, little-endian
  Tensor scales;                    // [group.rows(n), groups()]; dtype scheme.scale; empty for dense
  Tensor zeros;                     // shaped like scales; u8 or s8 for integer, f32/f16/bf16 for offset and real; empty for none
  std::optional<float> scale2;      // second-level, per tensor: multiplies W; not of a dense weight
  std::vector<std::int32_t> g_idx;  // [K] group of each input channel; empty: k / group.k
  Tensor prescale;  // [K] multiplies the activations (AWQ/ModelOpt); of a filter, for each element the same [Ci]; empty: none
  Tensor bias;      // [N] float; empty: none
  Extent filter;    // Kh × Kw of a convolution, whose rows are in the order kh, kw, ci; 1×1 of linear layers
  // What the checkpoint says about the activations, for plans that quantize them.
  std::optional<StaticActs> static_acts;  // for plans with one scale per tensor: "s8t", "e4m3t"
  std::optional<float> act_limit;         // magnitudes saturate there before a scale is found (FBGEMM's activation_scale_ub)

  /// Groups along K: columns of scales.
  std::int64_t groups() const { return scheme.group.cols(k, filter.h * filter.w); }
  /// The group of input channel `col`.
  std::int64_t group_of(std::int64_t col) const {
    if (!g_idx.empty()) return g_idx[static_cast<std::size_t>(col)];
    return scheme.group.k == 0 ? 0 : col / scheme.group.k % groups();
  }
  /// Checks every size, dtype and index. Errors: invalid_argument with the field and the values.
  Status validate() const;
  /// W[n,k] by the formula above. For tests and small inspections; use Plan::dequantize for whole matrices.
  float value(std::int64_t row, std::int64_t col) const;
  /// The size of codes, scales, zeros, g_idx, prescale and bias as a checkpoint stores them, in bits per weight.
  double bits_per_weight() const;

  friend bool operator==(const QuantTensor&, const QuantTensor&) = default;
};

/// How codes of 4 bits lie in bytes, two to each.
enum class NibbleOrder : std::uint8_t {
  low_first,  // the first one in the low half: compressed-tensors, torchao, GPTQ along K
  high_first  // the first one in the high half: MNN, bitsandbytes, int4 matrices of PyTorch
};
/// QuantTensor::codes, one a byte, of codes [n,k] with two to a byte; each row begins with a byte of its own.
/// Errors: invalid_argument unless there are n · ⌈k / 2⌉ bytes.
Result<std::vector<std::uint8_t>> unpack_nibbles(std::span<const std::uint8_t> bytes, std::int64_t n, std::int64_t k,
                                                 NibbleOrder order);

/// What TensorRT-LLM's preprocess_weights_for_mixed_gemm made of a weight, which depends on the GPU that it was made for.
enum class TrtllmLayout : std::uint8_t {
  interleaved,      // compute capability 7.5 to 8.9 and 12.0, and experts on every GPU: 4 columns (of 8 bits 2) side by side
  interleaved_fp8,  // the same for FP8 activations (W4A8)
  transposed,       // 9.0 by the C++ tools, 10.0 and 10.3: [N,K], signed
  permuted          // 9.0 by the Python tools of 2026: not side by side
};
/// QuantTensor::codes of a weight in that layout, for the schemes of u4b8 or u8b128 (`bits` 4 or 8): u stands for u − 8 or u − 128. Where
/// zeros are passed to TensorRT-LLM, they are (8 − z)·s beside 4-bit codes: those of a scheme with offsets ("o").
/// Errors: invalid_argument unless there are n · k · bits / 8 bytes, K is a multiple of 64 and N of the columns (not of `transposed`).
Result<std::vector<std::uint8_t>> unpack_trtllm(std::span<const std::uint8_t> bytes, std::int64_t n, std::int64_t k, int bits,
                                                TrtllmLayout layout);

}  // namespace nibble
