#include "checkpoint/io/safetensors.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <unordered_set>

#include "checkpoint/io/json.hpp"
#include "core/error.hpp"

namespace nibble::storage {
namespace {

constexpr std::size_t kPrefix = sizeof(std::uint64_t);  // the length of the header
constexpr std::uint64_t kMaxHeader = 100'000'000;       // what the reference reader allows
constexpr std::size_t kMaxName = 1024;                  // names end up in messages and tables
constexpr std::size_t kMaxRank = 64;                    // so do shapes

struct DTypeName {
  DType dtype;
  std::string_view name;
};
constexpr DTypeName kDTypeNames[] = {
    {DType::boolean, "BOOL"},
    {DType::e2m1, "F4"},
    {DType::e2m3, "F6_E2M3"},
    {DType::e3m2, "F6_E3M2"},
    {DType::u8, "U8"},
    {DType::s8, "I8"},
    {DType::e5m2, "F8_E5M2"},
    {DType::e4m3, "F8_E4M3"},
    {DType::e8m0, "F8_E8M0"},
    {DType::e4m3fnuz, "F8_E4M3FNUZ"},
    {DType::e5m2fnuz, "F8_E5M2FNUZ"},
    {DType::s16, "I16"},
    {DType::u16, "U16"},
    {DType::f16, "F16"},
    {DType::bf16, "BF16"},
    {DType::s32, "I32"},
    {DType::u32, "U32"},
    {DType::f32, "F32"},
    {DType::c64, "C64"},
    {DType::f64, "F64"},
    {DType::s64, "I64"},
    {DType::u64, "U64"},
};

/// An iterator over the header that publishes its position: nlohmann-json does not report the positions of values.
struct Cursor {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at;
  const char** reached;

  reference operator*() const { return *at; }
  Cursor& operator++() {
    *reached = ++at;
    return *this;
  }
  friend bool operator==(const Cursor& a, const Cursor& b) { return a.at == b.at; }
};

/// Receives the header's JSON events; anything a header may not contain ends the parse with `status`.
class HeaderHandler {
 public:
  struct Entry {
    TensorInfo tensor;
    std::uint64_t begin = 0, end = 0;  // relative to the data
  };

  HeaderHandler(std::string_view source, std::string_view header) : source_(source), begin_(header.data()), reached(begin_) {}

  bool null() { return unexpected("null"); }
  bool boolean(bool value) { return unexpected(value ? "true" : "false"); }
  bool number_integer(std::int64_t value) { return unexpected(fmt::to_string(value)); }
  bool number_float(double, const std::string& text) { return unexpected(std::string_view(text).substr(0, 40)); }
  bool binary(std::vector<std::uint8_t>&) { return unexpected("binary"); }

  bool number_unsigned(std::uint64_t value) {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return unexpected(fmt::to_string(value));
    if (where_ == Where::shape) {
      if (entries.back().tensor.shape.size() == kMaxRank) return fail("shape has more than {} dimensions", kMaxRank);
      entries.back().tensor.shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (where_ != Where::offsets || offsets_ == 2) return unexpected(fmt::to_string(value));
    (offsets_++ == 0 ? entries.back().begin : entries.back().end) = value;
    return true;
  }

  bool string(std::string& value) {
    if (where_ == Where::metadata) {
      metadata.emplace_back(key_, value);
      return true;
    }
    if (where_ != Where::tensor || key_ != "dtype") return unexpected(printable(value));
    const auto* row = std::ranges::find(kDTypeNames, std::string_view(value), &DTypeName::name);
    if (row == std::end(kDTypeNames)) return fail("unknown dtype {}", printable(value));
    entries.back().tensor.dtype = row->dtype;
    return true;
  }

  bool start_object(std::size_t) {
    if (where_ == Where::start) {
      where_ = Where::top;
    } else if (where_ == Where::top && key_ == "__metadata__") {
      where_ = Where::metadata;
      keys_.clear();
    } else if (where_ == Where::top) {
      where_ = Where::tensor;
      keys_.clear();
      entries.push_back({});
      entries.back().tensor.name = key_;
    } else {
      return unexpected("an object");
    }
    return true;
  }

  bool key(std::string& value) {
    key_ = value;
    if (where_ == Where::top) {
      if (!names_.insert(value).second) return fail("the name {} appears twice", printable(value));
      if (const Status bad = check_tensor_name(value); !bad.ok()) return fail("{}", bad.message());
    } else {
      if (!keys_.insert(value).second) return fail("the key {} appears twice", printable(value));
      if (where_ == Where::tensor && value != "dtype" && value != "shape" && value != "data_offsets")
        return fail("unknown key {}", printable(value));
    }
    return true;
  }

  bool end_object() {
    if (where_ == Where::tensor && keys_.size() != 3)
      return fail("{} of the keys dtype, shape and data_offsets", keys_.empty()       ? "none"
                                                                  : keys_.size() == 1 ? "only one"
                                                                                      : "only two");
    where_ = Where::top;
    return true;
  }

  bool start_array(std::size_t) {
    if (where_ != Where::tensor || key_ == "dtype") return unexpected("an array");
    where_ = key_ == "shape" ? Where::shape : Where::offsets;
    offsets_ = 0;
    return true;
  }

  bool end_array() {
    if (where_ == Where::offsets && offsets_ != 2) return fail("data_offsets has {} values instead of 2", offsets_);
    where_ = Where::tensor;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const Json::exception& e) {
    return fail("not valid JSON: {}", json_complaint(e.what()));
  }

 private:
  enum class Where { start, top, metadata, tensor, shape, offsets };

  bool unexpected(std::string_view found) {
    if (where_ == Where::shape || where_ == Where::offsets)
      return fail("{} {} where {} is expected", where_ == Where::shape ? "shape holds" : "data_offsets holds", found,
                  where_ == Where::offsets && offsets_ == 2 ? "nothing more" : "an integer from 0 to 2^63-1");
    const std::string_view wanted = where_ == Where::top        ? "an object"
                                    : where_ == Where::metadata ? "a string"
                                    : key_ == "dtype"           ? "the name of a dtype"
                                                                : "an array of integers";
    return fail("{} has the value {} where {} is expected", printable(key_), found, wanted);
  }

  template <class... Args>
  bool fail(fmt::format_string<Args...> format, Args&&... args) {
    const bool inside = where_ == Where::tensor || where_ == Where::shape || where_ == Where::offsets;
    status = error(StatusCode::corrupt_data, "{}: {}header at byte {}: {}", source_,
                   inside ? fmt::format("tensor {}: ", printable(entries.back().tensor.name)) : "",
                   sizeof(std::uint64_t) + static_cast<std::size_t>(std::max<std::ptrdiff_t>(reached - begin_ - 1, 0)),
                   fmt::format(format, std::forward<Args>(args)...));
    return false;
  }

  std::string_view source_;
  const char* begin_;
  Where where_ = Where::start;
  std::string key_;
  int offsets_ = 0;
  std::unordered_set<std::string> names_, keys_;

 public:
  const char* reached;  // the position of the parser
  std::vector<Entry> entries;
  Metadata metadata;
  Status status;
};

}  // namespace

std::string_view safetensors_dtype(DType dtype) {
  const auto* row = std::ranges::find(kDTypeNames, dtype, &DTypeName::dtype);
  return row == std::end(kDTypeNames) ? std::string_view() : row->name;
}

Status check_tensor_name(std::string_view tensor_name) {
  if (tensor_name.size() > kMaxName)
    return error(StatusCode::invalid_argument, "the name {}... has {} bytes, more than {}", printable(tensor_name),
                 tensor_name.size(), kMaxName);
  if (std::ranges::any_of(tensor_name, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }))
    return error(StatusCode::invalid_argument, "the name {} contains control characters", printable(tensor_name));
  return {};
}

Result<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::int64_t> shape) {
  if (shape.size() > kMaxRank)
    return error(StatusCode::invalid_argument, "a shape of {} dimensions; there are up to {}", shape.size(), kMaxRank);
  std::int64_t total = bits(dtype);
  bool empty = false;
  for (const std::int64_t dim : shape) {
    empty = empty || dim == 0;
    // The product of the other dimensions must fit even beside a dimension of 0, because strides are computed from it.
    if (dim < 0 || (dim > 0 && __builtin_mul_overflow(total, dim, &total)))
      return error(StatusCode::invalid_argument, "shape [{}] of {} does not fit in 63 bits", fmt::join(shape, ","),
                   safetensors_dtype(dtype));
  }
  if (empty) return std::uint64_t{0};
  if (total % 8 != 0)
    return error(StatusCode::invalid_argument, "shape [{}] of {} is {} bits, not a whole number of bytes", fmt::join(shape, ","),
                 safetensors_dtype(dtype), total);
  return static_cast<std::uint64_t>(total / 8);
}

std::uint64_t safetensors_header_bytes(std::span<const std::byte> beginning) {
  std::uint64_t length = 0;
  for (std::size_t i = beginning.size(); i-- > 0;) length = length << 8 | std::to_integer<std::uint64_t>(beginning[i]);
  return kPrefix + std::min<std::uint64_t>(length, kMaxHeader);
}

Result<SafetensorsHeader> parse_safetensors(std::span<const std::byte> file, std::string_view source, std::uint64_t size) {
  size = std::max<std::uint64_t>(size, file.size());
  const auto corrupt = [source]<class... Args>(fmt::format_string<Args...> format, Args&&... args) {
    return error(StatusCode::corrupt_data, "{}: {}", source, fmt::format(format, std::forward<Args>(args)...));
  };
  if (file.size() < kPrefix)
    return corrupt("{} bytes long; a safetensors file starts with 8 bytes of header length", file.size());
  std::uint64_t length = 0;
  for (std::size_t i = kPrefix; i-- > 0;) length = length << 8 | std::to_integer<std::uint64_t>(file[i]);
  if (length > kMaxHeader)
    return corrupt("header length {} at byte 0 is more than {}; is this a safetensors file?", length, kMaxHeader);
  if (length > size - kPrefix)
    return corrupt("header length {} at byte 0 leads past the end of the file ({} bytes); it is truncated", length, size);

  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kPrefix, length);
  if (!text.starts_with('{')) return corrupt("the header at byte {} does not start with '{{'", kPrefix);
  NIBBLE_RETURN_IF_ERROR(check_no_zero_bytes(text, fmt::format("{}: header from byte {} on", source, kPrefix)));
  HeaderHandler handler(source, text);
  const Cursor first{text.data(), &handler.reached}, last{text.data() + text.size(), &handler.reached};
  if (!Json::sax_parse(first, last, &handler)) return handler.status;

  std::vector<HeaderHandler::Entry>& entries = handler.entries;
  std::ranges::stable_sort(entries, {}, [](const HeaderHandler::Entry& e) { return std::pair(e.begin, e.end); });
  const std::uint64_t data_begin = kPrefix + length;
  const std::uint64_t data_bytes = size - data_begin;
  std::uint64_t expected = 0;
  SafetensorsHeader header;
  header.metadata = std::move(handler.metadata);
  header.tensors.reserve(entries.size());
  for (HeaderHandler::Entry& entry : entries) {
    TensorInfo& tensor = entry.tensor;
    const std::uint64_t begin = entry.begin, end = entry.end;
    const auto bad = [&]<class... Args>(fmt::format_string<Args...> format, Args&&... args) {
      return corrupt("tensor {} at byte {}: {}", printable(tensor.name), data_begin + begin,
                     fmt::format(format, std::forward<Args>(args)...));
    };
    if (end < begin) return bad("data_offsets [{},{}] end before they begin", begin, end);
    if (end > data_bytes)
      return bad("data_offsets [{},{}] lead past the {} bytes of data in the file; it is truncated", begin, end, data_bytes);
    if (begin < expected) {
      const TensorInfo& other = header.tensors.back();
      return bad("data_offsets [{},{}] overlap tensor {}, which ends at {}", begin, end, printable(other.name), expected);
    }
    if (begin > expected) return bad("data_offsets [{},{}] leave a hole of {} bytes before it", begin, end, begin - expected);
    const Result<std::uint64_t> bytes = tensor_bytes(tensor.dtype, tensor.shape);
    if (!bytes.ok()) return bad("{}", bytes.status().message());
    if (*bytes != end - begin)
      return bad("shape [{}] of {} needs {} bytes, data_offsets [{},{}] hold {}", fmt::join(tensor.shape, ","),
                 safetensors_dtype(tensor.dtype), *bytes, begin, end, end - begin);
    tensor.bytes = *bytes;
    tensor.file_offset = data_begin + begin;
    expected = end;
    header.tensors.push_back(std::move(tensor));
  }
  if (expected != data_bytes)
    return corrupt("{} bytes from byte {} on belong to no tensor", data_bytes - expected, data_begin + expected);
  return header;
}

}  // namespace nibble::storage
