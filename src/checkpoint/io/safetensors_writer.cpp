// Writing safetensors files.
#include <algorithm>
#include <bit>
#include <exception>

#include "checkpoint/io/json.hpp"
#include "checkpoint/io/safetensors.hpp"
#include "core/error.hpp"

namespace nibble {
namespace storage {
namespace {

Result<std::string> json_string(std::string_view text) {
  try {
    return dump(Json(text));
  } catch (const Json::exception&) {
    return error(StatusCode::invalid_argument, "{} is not valid UTF-8", printable(text));
  }
}

/// The entry of a tensor in the header.
Result<std::string> header_entry(std::string_view tensor_name, DType dtype, std::span<const std::int64_t> shape,
                                 std::uint64_t begin, std::uint64_t end) {
  NIBBLE_RETURN_IF_ERROR(check_tensor_name(tensor_name));
  if (tensor_name == "__metadata__")
    return error(StatusCode::invalid_argument, "no tensor can be called {}, as the metadata is", printable(tensor_name));
  if (safetensors_dtype(dtype).empty())
    return error(StatusCode::invalid_argument, "tensor {}: safetensors cannot hold {}", printable(tensor_name), name(dtype));
  NIBBLE_ASSIGN_OR_RETURN(const std::string name_json, json_string(tensor_name));
  return fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}},)", name_json, safetensors_dtype(dtype),
                     fmt::join(shape, ","), begin, end);
}

/// The entry of the metadata, or nothing where there is none.
Result<std::string> metadata_entry(const Metadata& metadata) {
  std::string entry;
  std::unordered_set<std::string_view> keys;
  for (const auto& [key, value] : metadata) {
    if (!keys.insert(key).second) return error(StatusCode::invalid_argument, "the metadata has {} twice", printable(key));
    NIBBLE_ASSIGN_OR_RETURN(const std::string key_json, json_string(key));
    NIBBLE_ASSIGN_OR_RETURN(const std::string value_json, json_string(value));
    entry += fmt::format("{}{}:{},", entry.empty() ? R"("__metadata__":{)" : "", key_json, value_json);
  }
  if (entry.empty()) return entry;
  entry.back() = '}';
  return entry + ',';
}

}  // namespace

int alignment_class(DType dtype, std::uint64_t bytes) {
  return bytes % 8 == 0 ? 8 : static_cast<int>(std::bit_ceil(static_cast<unsigned>(bits(dtype) + 7) / 8));
}

std::size_t SafetensorsWriter::header_bytes(std::string_view tensor_name, std::size_t rank) {
  constexpr std::size_t kWorstEscape = 2;  // \" and \\; control characters are refused
  constexpr std::size_t kDigits = 21;      // of a number, with its comma
  return kWorstEscape * tensor_name.size() + kDigits * (rank + 2) + 64;
}

Result<SafetensorsWriter> SafetensorsWriter::create(const std::filesystem::path& path, const Metadata& metadata,
                                                    std::size_t header_room, bool overwrite, std::size_t alignment) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string entry, metadata_entry(metadata));
  std::string header = "{" + entry;
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path, overwrite));
  SafetensorsWriter writer(std::move(file));
  writer.data_begin_ = (sizeof(std::uint64_t) + header.size() + header_room + alignment) / alignment * alignment;
  writer.header_ = std::move(header);
  return writer;
}

Status SafetensorsWriter::append(std::string_view tensor_name, DType dtype, std::span<const std::int64_t> shape,
                                 std::span<const std::byte> bytes, std::size_t padding) {
  const std::size_t size = bytes.size() + padding;
  NIBBLE_ASSIGN_OR_RETURN(const std::string entry, header_entry(tensor_name, dtype, shape, data_bytes_, data_bytes_ + size));
  if (!names_.insert(std::string(tensor_name)).second)
    return error(StatusCode::invalid_argument, "two tensors are called {}", printable(tensor_name));
  const Result<std::uint64_t> expected = tensor_bytes(dtype, shape);
  if (!expected.ok()) return expected.status().with_context(fmt::format("tensor {}", printable(tensor_name)));
  if (size != *expected)
    return error(StatusCode::invalid_argument, "tensor {} comes with {} bytes, its shape [{}] of {} needs {}",
                 printable(tensor_name), size, fmt::join(shape, ","), safetensors_dtype(dtype), *expected);
  header_ += entry;
  NIBBLE_RETURN_IF_ERROR(file_.write_at(data_begin_ + data_bytes_, bytes));
  const std::vector<std::byte> zeros(padding);
  NIBBLE_RETURN_IF_ERROR(file_.write_at(data_begin_ + data_bytes_ + bytes.size(), zeros));
  data_bytes_ += size;
  return {};
}

Status SafetensorsWriter::finish(const Metadata& metadata) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string entry, metadata_entry(metadata));
  header_ += entry;
  if (header_.size() == 1) header_ += '}';
  header_.back() = '}';
  const std::uint64_t room = data_begin_ - sizeof(std::uint64_t);
  if (header_.size() > room)
    return error(StatusCode::internal, "the header takes {} bytes, {} are reserved", header_.size(), room);
  std::string prefix(sizeof(std::uint64_t), '\0');
  for (std::size_t i = 0; i < prefix.size(); ++i) prefix[i] = static_cast<char>(room >> (8 * i) & 0xff);
  header_.resize(room, ' ');
  header_.insert(0, prefix);
  NIBBLE_RETURN_IF_ERROR(file_.write_at(0, std::as_bytes(std::span(header_))));
  return file_.commit();
}

}  // namespace storage

Status write_safetensors(const std::filesystem::path& path, std::span<const TensorSource> tensors,
                         const std::vector<std::pair<std::string, std::string>>& metadata, bool overwrite) try {
  using namespace storage;
  // In an order that keeps every tensor aligned, and with the offsets that order gives, so that the header's size is exact.
  std::vector<std::pair<int, const TensorSource*>> order;
  for (const TensorSource& source : tensors) {
    const Result<std::uint64_t> bytes = tensor_bytes(source.dtype, source.shape);
    if (!bytes.ok()) return bytes.status().with_context(fmt::format("tensor {}", printable(source.name)));
    order.emplace_back(alignment_class(source.dtype, *bytes), &source);
  }
  std::ranges::stable_sort(order, std::ranges::greater{}, &std::pair<int, const TensorSource*>::first);
  std::size_t room = 0;
  std::uint64_t offset = 0;
  for (const auto& [alignment, source] : order) {
    const std::uint64_t end = offset + *tensor_bytes(source->dtype, source->shape);
    NIBBLE_ASSIGN_OR_RETURN(const std::string entry, header_entry(source->name, source->dtype, source->shape, offset, end));
    room += entry.size();
    offset = end;
  }
  NIBBLE_ASSIGN_OR_RETURN(SafetensorsWriter writer, SafetensorsWriter::create(path, metadata, room, overwrite));
  for (const auto& [alignment, source] : order) {
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, source->produce());
    NIBBLE_RETURN_IF_ERROR(writer.append(source->name, source->dtype, source->shape, bytes));
  }
  return writer.finish();
} catch (const std::exception&) {  // out of memory, or thrown by the caller's produce()
  return error(StatusCode::io_error, "cannot write {}: {}", path.string(), caught().message());
}

Status write_checkpoint(const std::filesystem::path& directory, std::span<const TensorSource> tensors, std::string_view config,
                        bool overwrite) try {
  NIBBLE_ASSIGN_OR_RETURN(auto output, storage::OutputDirectory::create(directory, overwrite));
  NIBBLE_RETURN_IF_ERROR(write_safetensors(output.path() / "model.safetensors", tensors, {{"format", "pt"}}));
  NIBBLE_ASSIGN_OR_RETURN(auto file, storage::OutputFile::create(output.path() / "config.json", false));
  NIBBLE_RETURN_IF_ERROR(file.write_at(0, std::as_bytes(std::span(config))));
  NIBBLE_RETURN_IF_ERROR(file.commit());
  return output.commit();
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot write {}: {}", directory.string(), caught().message());
}

}  // namespace nibble
