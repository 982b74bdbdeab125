#include "arrays.hpp"

#include <nanobind/stl/string.h>

#include <cstring>
#include <unordered_map>
#include <utility>

namespace nibble::python {

/// As DLPack 1.3 lays it out.
struct Exchange {
  std::uint32_t major, minor;
  const Exchange* older;                                               // the table of an earlier major version, or null
  const void* owning[3];                                               // make, export, import: not needed to look at an array
  int (*open)(void* array, nb::dlpack::dltensor* out);                 // −1 with a Python exception; may be null
  int (*stream)(int device_type, std::int32_t device_id, void** out);  // likewise; never null
};

namespace {

using Code = nb::dlpack::dtype_code;

constexpr struct {
  DType dtype;
  Code code;
  std::uint8_t bits;
} kTypes[] = {
    {DType::f64, Code::Float, 64},
    {DType::f32, Code::Float, 32},
    {DType::f16, Code::Float, 16},
    {DType::bf16, Code::Bfloat, 16},
    {DType::e4m3, Code::Float8_E4M3FN, 8},
    {DType::e5m2, Code::Float8_E5M2, 8},
    {DType::e8m0, Code::Float8_E8M0FNU, 8},
    {DType::s8, Code::Int, 8},
    {DType::s16, Code::Int, 16},
    {DType::s32, Code::Int, 32},
    {DType::s64, Code::Int, 64},
    {DType::u8, Code::UInt, 8},
    {DType::u16, Code::UInt, 16},
    {DType::u32, Code::UInt, 32},
    {DType::u64, Code::UInt, 64},
    {DType::boolean, Code::Bool, 8},
};

DType from_dlpack(nb::dlpack::dtype type) {
  for (const auto& row : kTypes)
    if (type == nb::dlpack::dtype{static_cast<std::uint8_t>(row.code), row.bits, 1}) return row.dtype;
  return DType::none;
}

std::string class_of(nb::handle object) { return nb::cast<std::string>(nb::str(object.type().attr("__qualname__"))); }

template <class Span>
std::string text(const Span& values, int count) {
  std::string out = "[";
  for (int i = 0; i < count; ++i) out += (i == 0 ? "" : ",") + std::to_string(values[static_cast<std::size_t>(i)]);
  return out + "]";
}

/// NumPy arrays of ml_dtypes speak neither protocol, and FP8 of older PyTorch does not; their bits do. None for anything else.
std::pair<nb::object, DType> bits_of(nb::handle object) {
  static constexpr struct {
    const char* name;
    DType dtype;
    const char* bits;
  } kNamed[] = {{"bfloat16", DType::bf16, "uint16"},
                {"float8_e4m3fn", DType::e4m3, "uint8"},
                {"float8_e5m2", DType::e5m2, "uint8"},
                {"float8_e8m0fnu", DType::e8m0, "uint8"}};
  const nb::object dtype = nb::getattr(object, "dtype", nb::none());
  if (dtype.is_none() || !nb::hasattr(object, "view")) return {nb::none(), DType::none};
  const std::string whole = nb::cast<std::string>(nb::str(dtype));  // "bfloat16", "torch.float8_e4m3fn"
  const bool torch = whole.starts_with("torch.");
  for (const auto& row : kNamed) {
    if (!whole.ends_with(row.name)) continue;
    const nb::object bits = torch ? nb::object(nb::module_::import_("torch").attr(row.bits)) : nb::object(nb::str(row.bits));
    return {object.attr("view")(bits), row.dtype};
  }
  return {nb::none(), DType::none};
}

/// Throws what names the type, where its framework has a name that nibble does not know.
void refuse_type(nb::handle array) {
  if (nb::hasattr(array, "dtype")) arrays_module().attr("token")(array.attr("dtype"));
}

}  // namespace

DType dtype_from(std::string_view token) {
  if (const auto dtype = parse_dtype(token)) return *dtype;
  throw Failure(StatusCode::invalid_argument, "'" + std::string(token) + "' is no type; write f32, f16, bf16, s8, e4m3, ...");
}

std::string python_name(DType dtype) {
  const std::string_view token = name(dtype);
  return nb::cast<std::string>(arrays_module().attr("NAMES")[nb::str(token.data(), token.size())]);
}

bool Kind::open(nb::handle array, nb::dlpack::dltensor& out) const {
  if (exchange == nullptr) return false;
  if (exchange->open(array.ptr(), &out) == 0) return true;
  PyErr_Clear();  // who asks has another way, which says what is wrong
  return false;
}

void* Kind::current_stream(int gpu) const {
  void* stream = nullptr;
  if (exchange->stream(nb::device::cuda::value, gpu, &stream) != 0) nb::raise_python_error();
  return stream;
}

nb::handle arrays_module() {
  static const nb::handle module = nb::module_::import_("nibble._arrays").release();
  return module;
}

const Kind& kind_of(nb::handle array) {
  // References into it stay valid. The interpreter's lock guards it, and it outlives the interpreter.
  static auto& kinds = *new std::unordered_map<PyTypeObject*, Kind>;
  PyTypeObject* const type = Py_TYPE(array.ptr());
  if (const auto found = kinds.find(type); found != kinds.end()) return found->second;
  const nb::object known = arrays_module().attr("known")(nb::handle(reinterpret_cast<PyObject*>(type)));
  Kind kind{.framework = nb::object(known[0]).release(), .host = nb::cast<bool>(nb::object(known[2]))};
  if (const nb::object table = known[1]; !table.is_none()) {
    const void* const address = PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api");
    if (address == nullptr) nb::raise_python_error();
    kind.exchange = static_cast<const Exchange*>(address);
    while (kind.exchange != nullptr && kind.exchange->major != 1) kind.exchange = kind.exchange->older;
    if (kind.exchange != nullptr && kind.exchange->open == nullptr) kind.exchange = nullptr;
  }
  Py_INCREF(reinterpret_cast<PyObject*>(type));  // its address stays its own
  return kinds.emplace(type, kind).first->second;
}

template <class Void>
Argument<Void>::Argument(nb::handle object, const char* what) : what_(what) {
  if (object.is_none()) return;
  DType dtype = DType::none;
  nb::dlpack::dltensor array;
  if (kind_of(object).open(object, array)) {
    owner_ = nb::borrow(object);
  } else if (!nb::try_cast(object, capsule_)) {
    nb::object bits;
    std::tie(bits, dtype) = bits_of(object);
    if (bits.is_none() || !nb::try_cast(bits, capsule_)) {
      refuse_type(object);
      const std::string message = std::string(what) + " is a " + class_of(object) +
                                  (kReadOnly ? ": no array that __dlpack__ or the buffer protocol opens (does it require grad?)"
                                             : ": no array that __dlpack__ or the buffer protocol opens for writing");
      throw nb::type_error(message.c_str());
    }
  }
  if (!owner_.is_valid())
    array = {.data = const_cast<void*>(static_cast<const void*>(capsule_.data())),
             .device = {capsule_.device_type(), capsule_.device_id()},
             .ndim = static_cast<std::int32_t>(capsule_.ndim()),
             .dtype = capsule_.dtype(),
             .shape = const_cast<std::int64_t*>(capsule_.shape_ptr()),
             .strides = const_cast<std::int64_t*>(capsule_.stride_ptr()),
             .byte_offset = 0};
  device_ = array.device;
  if (dtype == DType::none) dtype = from_dlpack(array.dtype);
  if (dtype == DType::none) {
    refuse_type(object);
    throw Failure(StatusCode::unsupported, std::string(what) + " has elements of DLPack type code " +
                                               std::to_string(array.dtype.code) + " with " + std::to_string(array.dtype.bits) +
                                               " bits, which nibble does not know");
  }
  if (static_cast<std::size_t>(array.ndim) > view.shape.size())
    throw Failure(StatusCode::invalid_argument,
                  std::string(what) + " has " + std::to_string(array.ndim) + " dimensions, 4 at most; reshape it");
  if (array.data != nullptr) view.data = static_cast<std::byte*>(array.data) + array.byte_offset;
  view.dtype = dtype;
  view.rank = array.ndim;
  std::int64_t dense = 1;
  for (int i = view.rank; i-- > 0;) {
    const auto at = static_cast<std::size_t>(i);
    view.shape[at] = array.shape[i];
    // The stride of a single element is anything; a producer of dense arrays may have none.
    view.strides[at] = view.shape[at] == 1 || array.strides == nullptr ? dense : array.strides[i];
    dense = view.strides[at] * view.shape[at];
  }
  if (view.empty() && view.numel() > 0)
    throw Failure(StatusCode::invalid_argument, std::string(what) + " has no data: was it freed?");
}

template <class Void>
Argument<Void>&& Argument<Void>::floats() && {
  if (view.dtype == DType::u16) view.dtype = DType::bf16;
  were_u8_ = view.dtype == DType::u8;
  if (were_u8_) view.dtype = DType::e4m3;
  return std::move(*this);
}

template <class Void>
Argument<Void>&& Argument<Void>::operand() && {
  Argument&& same = std::move(*this).floats();
  if (empty() || is_compute_float(view.dtype) || view.dtype == DType::s8 || view.dtype == DType::e4m3) return std::move(same);
  const std::string pass =
      kReadOnly ? std::string("; pass ") + what_ + ".astype('float32'), of a tensor " + what_ + ".float()" : "";
  throw Failure(StatusCode::unsupported,
                std::string(what_) + " is " + python_name(view.dtype) + ", which is none of " + kOperandTypes + pass);
}

/// The first `rank - dims + 1` dimensions become one. False where their strides do not allow that.
template <class Void>
bool Argument<Void>::collapse(View& view, int dims) {
  while (view.rank < dims) {  // a leading dimension of 1
    for (int i = view.rank++; i-- > 0;) {
      view.shape[static_cast<std::size_t>(i + 1)] = view.shape[static_cast<std::size_t>(i)];
      view.strides[static_cast<std::size_t>(i + 1)] = view.strides[static_cast<std::size_t>(i)];
    }
    view.shape[0] = 1;
    view.strides[0] = view.rank > 1 ? view.shape[1] * view.strides[1] : 1;
  }
  while (view.rank > dims) {
    const std::int64_t outer = view.dim(0), inner = view.dim(1);
    if (outer > 1 && inner > 1 && view.stride(0) != inner * view.stride(1)) return false;
    const std::int64_t stride = inner > 1 ? view.stride(1) : view.stride(0);
    --view.rank;
    for (int i = 1; i < view.rank; ++i) {
      view.shape[static_cast<std::size_t>(i)] = view.shape[static_cast<std::size_t>(i + 1)];
      view.strides[static_cast<std::size_t>(i)] = view.strides[static_cast<std::size_t>(i + 1)];
    }
    view.shape[0] = outer * inner;
    view.strides[0] = stride;
  }
  return true;
}

template <class Void>
void Argument<Void>::collapse(int dims) {
  const View whole = view;
  if (!empty() && !collapse(view, dims))
    throw Failure(StatusCode::invalid_argument, std::string(what_) + " of shape " + text(whole.shape, whole.rank) +
                                                    " and strides " + text(whole.strides, whole.rank) + " is no " +
                                                    (dims == 2 ? "matrix" : "vector") + " in memory; make it contiguous");
}

template <class Void>
Argument<Void>&& Argument<Void>::matrix() && {
  collapse(2);
  return std::move(*this);
}

template <class Void>
Argument<Void>&& Argument<Void>::vector() && {
  collapse(1);
  return std::move(*this);
}

template <class Void>
Argument<Void>&& Argument<Void>::on(Backend backend) && {
  if (empty()) return std::move(*this);
  const int type = device_.device_type;
  const bool host = type == nb::device::cpu::value || type == nb::device::cuda_host::value;
  const bool gpu = type == nb::device::cuda::value;
  const bool both = type == nb::device::cuda_managed::value;
  if (!host && !gpu && !both)
    throw Failure(StatusCode::unsupported,
                  std::string(what_) + " is on a device of DLPack type " + std::to_string(type) + "; nibble has cpu and cuda");
  if (backend == Backend::cuda ? host : gpu)
    throw Failure(StatusCode::invalid_argument, std::string(what_) + " is in " + (gpu ? "device" : "host") +
                                                    " memory, and the computation in " + (gpu ? "host" : "device") +
                                                    " memory; move it there, or pack the weight for " + (gpu ? "cuda" : "cpu"));
  return std::move(*this);
}

template struct Argument<const void>;
template struct Argument<void>;

Tensor copy(const Input& input, const char* what) {
  const ConstTensorView v = Input(input).on(Backend::cpu).view;
  Tensor out(v.dtype, std::vector<std::int64_t>(v.shape.begin(), v.shape.begin() + v.rank));
  const std::size_t size = static_cast<std::size_t>(bits(v.dtype) / 8);
  if (out.numel() > 0 && v.empty()) throw Failure(StatusCode::invalid_argument, std::string(what) + " has no data");
  int outer = v.rank;  // dimensions from here on lie in one piece
  std::int64_t run = 1;
  for (; outer > 0 && (v.dim(outer - 1) == 1 || v.stride(outer - 1) == run); --outer) run *= v.dim(outer - 1);
  std::array<std::int64_t, 4> at{};
  for (std::int64_t done = 0; done < out.numel(); done += run) {
    std::int64_t offset = 0;
    for (int d = 0; d < outer; ++d) offset += at[static_cast<std::size_t>(d)] * v.stride(d);
    std::memcpy(out.bytes.data() + static_cast<std::size_t>(done) * size,
                static_cast<const std::byte*>(v.data) + offset * static_cast<std::int64_t>(size),
                static_cast<std::size_t>(run) * size);
    for (int d = outer; d-- > 0;) {
      if (++at[static_cast<std::size_t>(d)] < v.dim(d)) break;
      at[static_cast<std::size_t>(d)] = 0;
    }
  }
  return out;
}

NumpyArray to_numpy(const void* data, DType dtype, std::span<const std::int64_t> shape, nb::handle owner) {
  DType stored = dtype;
  if (dtype == DType::bf16) stored = DType::u16;
  if (info(dtype).kind == DTypeKind::floating && bits(dtype) == 8) stored = DType::u8;
  nb::dlpack::dtype type{};
  for (const auto& row : kTypes)
    if (row.dtype == stored) type = {static_cast<std::uint8_t>(row.code), row.bits, 1};
  if (type.bits == 0) throw Failure(StatusCode::unsupported, "NumPy cannot show elements of type " + std::string(name(dtype)));
  std::vector<std::size_t> dims(shape.begin(), shape.end());
  static const std::byte kNothing{};  // NumPy takes a null pointer for a request to allocate
  nb::object array = nb::ndarray<nb::numpy, nb::ro>(data != nullptr ? data : &kNothing, dims.size(), dims.data(), owner, nullptr,
                                                    type, nb::device::cpu::value)
                         .cast(nb::rv_policy::reference);
  if (stored != dtype) array = nb::module_::import_("nibble._arrays").attr("named")(array, std::string(name(dtype)));
  return nb::borrow<NumpyArray>(array);
}

}  // namespace nibble::python
