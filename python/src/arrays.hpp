// Other people's memory as nibble's tensors, and nibble's as NumPy arrays. Nothing is copied but where a function says so.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <span>
#include <string>
#include <string_view>

#include "nibble/device.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble::python {

namespace nb = nanobind;

/// A Status on its way to Python, where it becomes the exception of its code.
struct Failure : std::exception {
  explicit Failure(Status s) : status(std::move(s)) {}
  Failure(StatusCode code, std::string message) : status(code, std::move(message)) {}
  const char* what() const noexcept override { return status.message().c_str(); }
  Status status;
};

inline void check(const Status& status) {
  if (!status.ok()) throw Failure(status);
}
template <class T>
T check(Result<T> result) {
  if (!result.ok()) throw Failure(result.status());
  return std::move(result).value();
}

/// "f16" → DType::f16. Throws Failure.
DType dtype_from(std::string_view token);
/// DType::f64 → "float64".
std::string python_name(DType dtype);
/// What x, weights, results and what is added to them can be.
inline constexpr const char* kOperandTypes = "float32, float16, bfloat16, int8 and float8_e4m3fn";

/// DLPack's table of C functions (DLPackExchangeAPI), by which a framework opens its arrays without a capsule.
struct Exchange;

/// What is known of a type of arrays; found when one is first seen, and kept.
struct Kind {
  nb::handle framework;                // of nibble._arrays
  const Exchange* exchange = nullptr;  // null: its arrays come by __dlpack__ or the buffer protocol
  bool host = false;                   // NumPy's: in host memory, and opened as they are

  /// Describes an array; valid while that lives and keeps its shape. False without `exchange`, and for what that does not open.
  bool open(nb::handle array, nb::dlpack::dltensor& out) const;
  /// The framework's current stream of a GPU. Needs `exchange`. Throws what the framework raises.
  void* current_stream(int gpu) const;
};
const Kind& kind_of(nb::handle array);
/// nibble._arrays.
nb::handle arrays_module();

/// An argument that speaks DLPack or the buffer protocol, kept alive as long as this is. Types NumPy has no name for may come as
/// their bits: u16 is read as bf16, u8 as e4m3, where floats are meant.
template <class Void>
struct Argument {
  static constexpr bool kReadOnly = std::is_const_v<Void>;
  using View = BasicTensorView<Void>;
  View view;

  Argument() = default;  // absent
  /// Throws TypeError when `object` is no array (and nb::none is absent), Failure for one of more than 4 dimensions, of a type or on a
  /// device that nibble does not know.
  Argument(nb::handle object, const char* what);

  bool empty() const { return view.empty(); }
  /// Whether floats() found u8: bits of e4m3, or codes of u8.
  bool were_u8() const { return were_u8_; }
  /// The same, its bits read as the floats they are.
  Argument&& floats() &&;
  /// That, of types nibble computes in. Throws Failure for float64, int32, ... in Python's words.
  Argument&& operand() &&;
  /// Leading dimensions become one until `dims` are left: 2, [..., K] → [M,K], [K] → [1,K]; 1, [M,1] → [M]. Throws Failure when their
  /// strides do not allow that.
  void collapse(int dims);
  /// collapse(2)
  Argument&& matrix() &&;
  /// collapse(1)
  Argument&& vector() &&;
  /// Whether it is one matrix (dims: 2) or one vector (1) in memory, whose last stride is 1.
  /// dims 0: it may lie as it likes.
  bool dense(int dims) const {
    View one = view;
    return empty() || dims == 0 || (collapse(one, dims) && (one.dim(dims - 1) == 1 || one.stride(dims - 1) == 1));
  }
  /// Throws Failure unless the memory is where `backend` computes.
  Argument&& on(Backend backend) &&;
  /// Throws Failure when the two are in the memory of different GPUs.
  template <class Other>
  void beside(const Argument<Other>& other) const {
    if (!empty() && !other.empty() && device_.device_type == other.device_.device_type &&
        device_.device_id != other.device_.device_id)
      throw Failure(StatusCode::invalid_argument, std::string(what_) + " is on GPU " + std::to_string(device_.device_id) +
                                                      ", the rest on GPU " + std::to_string(other.device_.device_id));
  }

 private:
  template <class>
  friend struct Argument;
  const char* what_ = "";
  bool were_u8_ = false;
  nb::dlpack::device device_{};
  nb::object owner_;  // or
  std::conditional_t<kReadOnly, nb::ndarray<nb::ro>, nb::ndarray<>> capsule_;
  static bool collapse(View& view, int dims);
};
using Input = Argument<const void>;
using Output = Argument<void>;

extern template struct Argument<const void>;
extern template struct Argument<void>;

/// A dense copy in host memory; a device's memory is refused.
Tensor copy(const Input& input, const char* what);

/// What type stubs call numpy.ndarray.
class NumpyArray : public nb::object {
  NB_OBJECT_DEFAULT(NumpyArray, nb::object, "numpy.ndarray", [](PyObject*) { return true; })
};

/// A read-only NumPy array over memory that `owner` keeps. bf16 and FP8 are ml_dtypes where that package is installed, else bits.
NumpyArray to_numpy(const void* data, DType dtype, std::span<const std::int64_t> shape, nb::handle owner);

}  // namespace nibble::python
