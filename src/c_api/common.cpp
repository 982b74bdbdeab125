#include "c_api/common.hpp"

#include <cstdlib>

namespace nibble::c_api {
namespace {

// The numbers of the C header are fixed; if the order in C++ changes, a table has to translate.
#define SAME(c, cpp) static_assert((c) == static_cast<int>(cpp))
SAME(NIB_OK, StatusCode::ok);
SAME(NIB_INVALID_ARGUMENT, StatusCode::invalid_argument);
SAME(NIB_UNSUPPORTED, StatusCode::unsupported);
SAME(NIB_NOT_FOUND, StatusCode::not_found);
SAME(NIB_ALREADY_EXISTS, StatusCode::already_exists);
SAME(NIB_IO_ERROR, StatusCode::io_error);
SAME(NIB_CORRUPT_DATA, StatusCode::corrupt_data);
SAME(NIB_INTERNAL, StatusCode::internal);
// One of each run of types; the C test compares every name.
SAME(NIB_F64, DType::f64);
SAME(NIB_E4M3, DType::e4m3);
SAME(NIB_BOOLEAN, DType::boolean);
SAME(NIB_U2, DType::u2);
SAME(NIB_U2B2, DType::u2b2);
SAME(NIB_C64, DType::c64);
SAME(NIB_ACTIVATION_NONE, Activation::none);
SAME(NIB_ACTIVATION_RELU, Activation::relu);
SAME(NIB_ACTIVATION_CLAMP, Activation::clamp);
SAME(NIB_ACTIVATION_GELU_ERF, Activation::gelu_erf);
SAME(NIB_ACTIVATION_GELU_TANH, Activation::gelu_tanh);
SAME(NIB_ACTIVATION_SILU, Activation::silu);
SAME(NIB_ACTIVATION_SIGMOID, Activation::sigmoid);
SAME(NIB_ACTIVATION_TANH, Activation::tanh);
SAME(NIB_ACTIVATION_HARDSWISH, Activation::hardswish);
SAME(NIB_ACTIVATION_LEAKY_RELU, Activation::leaky_relu);
SAME(NIB_ACTIVATION_QUICK_GELU, Activation::quick_gelu);
#undef SAME

/// The last failure's text; longer ones end in "...". No std::string: registering its destructor allocates, and without memory the C
/// library ends the process.
constexpr std::size_t kLongest = 8192;
thread_local char last_error[kLongest] = "";

nib_status record(StatusCode code, std::string_view message) noexcept {
  constexpr std::string_view kMore = "...";
  const std::size_t length = std::min(message.size(), kLongest - kMore.size() - 1);
  std::memcpy(last_error, message.data(), length);
  std::strcpy(last_error + length, length < message.size() ? kMore.data() : "");
  return static_cast<nib_status>(code);
}

std::atomic<Shell*> graveyard{nullptr};

constexpr std::size_t kLargestStruct = 1 << 16;  // a larger struct_size was never set

}  // namespace

const char* last_error_text() noexcept { return last_error; }

nib_status report(const Status& status) noexcept { return record(status.code(), status.message()); }

nib_status report_exception() noexcept {
  try {
    return report(caught());
  } catch (...) {  // no memory for the text
    return record(StatusCode::io_error, "out of memory");
  }
}

Status required(std::initializer_list<std::pair<std::string_view, const void*>> pointers) {
  for (const auto& [what, pointer] : pointers)
    if (pointer == nullptr) return error(StatusCode::invalid_argument, "the {} is NULL", what);
  return {};
}

void bury(Shell* shell) noexcept {
  shell->next = graveyard.load(std::memory_order_relaxed);
  while (!graveyard.compare_exchange_weak(shell->next, shell, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

Status check_size(std::string_view name, const void* given, std::size_t size, std::size_t known) {
  if (size < sizeof size || size > kLargestStruct || size % 8 != 0)
    return error(StatusCode::invalid_argument, "{}.struct_size is {}: set it to sizeof({}), which is {} in this version", name,
                 size, name, known);
  const auto* bytes = static_cast<const unsigned char*>(given);
  for (std::size_t i = known; given != nullptr && i < size; ++i)
    if (bytes[i] != 0)
      return error(StatusCode::unsupported,
                   "{} has {} bytes and something at byte {}, which this libnibble {} does not know: it ends at {}", name, size,
                   i, NIBBLE_VERSION, known);
  return {};
}

Status give(std::string_view text, char** out) {
  if (out == nullptr) return {};
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  text.copy(copy, text.size());
  copy[text.size()] = '\0';
  *out = copy;
  return {};
}

std::string notes_text(const std::vector<Note>& notes, std::string_view about) {
  std::string text;
  for (const Note& note : notes) {
    const char* severity = note.severity == Note::Severity::info      ? "note"
                           : note.severity == Note::Severity::warning ? "warning"
                                                                      : "error";
    text += fmt::format("{}: {}{}{}\n", severity, about, about.empty() ? "" : ": ", note.text);
  }
  return text;
}

Result<DType> dtype(std::string_view what, nib_dtype number, DType otherwise) {
  if (number == NIB_NONE) return otherwise;
  if (number < NIB_NONE || number > NIB_C64) return error(StatusCode::invalid_argument, "{}: {} is no nib_dtype", what, number);
  return static_cast<DType>(number);
}

Result<WeightScheme> weight_scheme(const char* text, DType scale) {
  NIBBLE_RETURN_IF_ERROR(required({{"scheme", text}}));
  NIBBLE_ASSIGN_OR_RETURN(const Scheme scheme, Scheme::parse(text, scale));
  if (scheme.act.codes == DType::none) return scheme.weight;
  return error(StatusCode::invalid_argument, "scheme '{}' says how activations are quantized; this one is for weights",
               shown(text));
}

Result<ActScheme> act_scheme(const char* text) {
  if (text == nullptr) return ActScheme{};
  const auto scheme = Scheme::parse(std::string(text) + "_s8c");
  if (!scheme.ok() || std::strchr(text, '_') != nullptr)
    return error(StatusCode::invalid_argument,
                 "'{}' is no scheme of activations; write <s8|e4m3><z|o|><t|r|gSIZE>: s8r, s8zr, s8og32, e4m3g128", shown(text));
  return scheme->act;
}

Result<Backend> backend(nib_backend number) {
  if (number == NIB_CPU) return Backend::cpu;
  if (number == NIB_CUDA) return Backend::cuda;
  return error(StatusCode::invalid_argument, "backend {} is neither NIB_CPU nor NIB_CUDA", number);
}

Result<ImageLayout> image_layout(std::string_view what, nib_image_layout number) {
  if (number == NIB_NCHW) return ImageLayout::nchw;
  if (number == NIB_NHWC) return ImageLayout::nhwc;
  return error(StatusCode::invalid_argument, "{} is {}, neither NIB_NCHW nor NIB_NHWC", what, number);
}

Result<Accumulation> accumulation(std::string_view what, nib_accumulation number) {
  if (number == NIB_FAST) return Accumulation::fast;
  if (number == NIB_PRECISE) return Accumulation::precise;
  return error(StatusCode::invalid_argument, "{} is {}, neither NIB_FAST nor NIB_PRECISE", what, number);
}

Result<QuantizeSpec> quantize_spec(const nib_quantize_desc* given) {
  NIBBLE_ASSIGN_OR_RETURN(const nib_quantize_desc desc, read("nib_quantize_desc", given, true));
  NIBBLE_ASSIGN_OR_RETURN(const DType scale, dtype("nib_quantize_desc.scale", desc.scale, DType::f16));
  const std::string text(text_or(desc.scheme, "u4b8g128"));
  NIBBLE_ASSIGN_OR_RETURN(const WeightScheme scheme, weight_scheme(text.c_str(), scale));
  return QuantizeSpec{scheme, desc.clip_search != 0};
}

Result<TensorView> view(std::string_view what, const nib_view* v, bool aligned) {
  if (v == nullptr || v->data == nullptr) return TensorView();
  NIBBLE_ASSIGN_OR_RETURN(const DType type, dtype(what, v->dtype));
  if (bits(type) < 8) return error(StatusCode::invalid_argument, "{}: {} is no type of whole bytes", what, name(type));
  if (v->rank < 0 || v->rank > 4) return error(StatusCode::invalid_argument, "{}: rank {} is outside [0, 4]", what, v->rank);
  TensorView out(v->data, type, {});
  out.rank = v->rank;
  std::int64_t elements = 1, last = 0;  // the index of the last element
  for (int i = 0; i < v->rank; ++i) {
    const std::int64_t size = v->shape[i], stride = v->strides[i];
    if (size < 0 || stride < 0)
      return error(StatusCode::invalid_argument, "{}: dimension {} has {} elements and stride {}; neither may be negative", what,
                   i, size, stride);
    std::int64_t reach = 0;
    bool over = __builtin_mul_overflow(elements, size, &elements);
    over = over || (size > 0 && __builtin_mul_overflow(size - 1, stride, &reach));
    over = over || __builtin_add_overflow(last, reach, &last);
    if (over || elements > INT64_MAX / 16 || last > INT64_MAX / 16)
      return error(StatusCode::invalid_argument, "{}: dimension {} of {} elements and stride {} overflows", what, i, size,
                   stride);
    out.shape[static_cast<std::size_t>(i)] = size;
    // A dimension of one element is never stepped over and may have any stride; a large one would overflow when counted in bytes.
    constexpr std::int64_t kLargest = std::int64_t{1} << 31;
    out.strides[static_cast<std::size_t>(i)] = size > 1 ? stride : std::min(stride, kLargest);
  }
  if (const auto address = reinterpret_cast<std::uintptr_t>(v->data), size = std::uintptr_t(bits(type)) / 8;
      aligned && address % size != 0)
    return error(StatusCode::invalid_argument, "{}: data at {:#x} is not aligned to the {} bytes of {}", what, address, size,
                 name(type));
  return out;
}

nib_view view(const ConstTensorView& v) {
  nib_view out{const_cast<void*>(v.data), static_cast<nib_dtype>(v.dtype), v.rank, {}, {}};
  std::ranges::copy(v.shape, out.shape);
  std::ranges::copy(v.strides, out.strides);
  return out;
}

Result<Executor*> executor(const nib_context* context) {
  if (context == nullptr) return static_cast<Executor*>(nullptr);
  NIBBLE_ASSIGN_OR_RETURN(const Threads* threads, open(context));
  return threads->own.get();
}

}  // namespace nibble::c_api
