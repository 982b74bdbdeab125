// Writing files of packed weights.
#include <algorithm>
#include <exception>
#include <unordered_map>

#include "checkpoint/io/json.hpp"
#include "checkpoint/io/safetensors.hpp"
#include "core/error.hpp"
#include "nibble/packed_file.hpp"
#include "nibble/version.hpp"
#include "packed/format.hpp"
#include "packed/parts.hpp"

namespace nibble {
namespace fs = std::filesystem;
using namespace packed;
using storage::printable;
namespace {

constexpr std::size_t kMaxName = 1000;             // with a suffix it is the name of a tensor
constexpr std::size_t kDescriptionRoom = 3 << 10;  // of the longest one in the header, without its name
constexpr std::size_t kFileRoom = 1 << 10;         // of the rest of the metadata, without the checkpoint's name

/// The most bytes that a text takes in JSON in a string of JSON, where both escape quotes and backslashes.
std::size_t escaped_twice(std::string_view text) { return 4 * text.size(); }

}  // namespace

struct PackedFileWriter::Impl {
  explicit Impl(storage::SafetensorsWriter w) : writer(std::move(w)) {}

  Status add(const std::string& name, const PackedWeight& weight);
  Status finish();

  storage::SafetensorsWriter writer;
  const Checkpoint* checkpoint = nullptr;
  std::unordered_map<std::string, bool> added;  // by name
  Json modules = Json::object();
  /// By their names in the file, where they are after all packed bytes: those begin at multiples of kAlignment.
  std::vector<std::pair<std::string, Tensor>> small;
};

Status PackedFileWriter::Impl::add(const std::string& name, const PackedWeight& weight) {
  const auto known = added.find(name);
  if (known == added.end() || known->second)
    return error(StatusCode::invalid_argument, "the weight {} {}", printable(name),
                 known == added.end() ? "is not among the names that the file was created for" : "was added before");
  if (weight.backend() == Backend::cuda) {
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight on_host, download(weight));
    return add(name, on_host);
  }
  const PackedWeightData& data = weight.data();
  Description description{.header = data, .spec = weight.spec(), .bytes = data.bytes.size(), .source = {}};
  if (checkpoint != nullptr)
    if (const Module* module = checkpoint->find_module(name); module != nullptr) {
      NIBBLE_ASSIGN_OR_RETURN(description.source, checkpoint->digest(*module));
    }
  Json json = to_json(description);
  const auto parsed = parse_description(json);
  if (!parsed.ok() || parsed->spec != description.spec)
    return error(StatusCode::internal, "the description of {} does not come back from its JSON", printable(name));
  if (storage::dump(Json(storage::dump(json))).size() > kDescriptionRoom)
    return error(StatusCode::internal, "the description of {} is longer than the {} bytes that are reserved", printable(name),
                 kDescriptionRoom);

  for (auto& [key, tensor] : small_tensors(data)) small.emplace_back(tensor_name(name, key), std::move(tensor));
  const std::uint64_t size = padded(data.bytes.size());
  const std::int64_t shape[] = {static_cast<std::int64_t>(size)};
  NIBBLE_RETURN_IF_ERROR(
      writer.append(tensor_name(name, kPacked), DType::u8, shape, data.bytes.span(), size - data.bytes.size()));
  modules[name] = std::move(json);
  known->second = true;
  return {};
}

Status PackedFileWriter::Impl::finish() {
  for (const auto& [name, done] : added)
    if (!done) return error(StatusCode::invalid_argument, "the weight {} was not added", printable(name));
  std::ranges::stable_sort(small, std::ranges::greater{}, [](const auto& item) {
    return storage::alignment_class(item.second.dtype, item.second.bytes.size());
  });
  for (const auto& [name, tensor] : small) NIBBLE_RETURN_IF_ERROR(writer.append(name, tensor.dtype, tensor.shape, tensor.bytes));
  storage::Metadata metadata{{std::string(kFormatKey), std::string(kFormatName)},
                             {std::string(kFormatVersionKey), std::string(kFormatVersion)},
                             {std::string(kLibraryVersionKey), NIBBLE_VERSION}};
  if (checkpoint != nullptr) metadata.emplace_back(kCheckpointKey, checkpoint_place(checkpoint->path()).filename().string());
  metadata.emplace_back(kModulesKey, storage::dump(modules));
  return writer.finish(metadata);
}

PackedFileWriter::PackedFileWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PackedFileWriter::PackedFileWriter(PackedFileWriter&&) noexcept = default;
PackedFileWriter::~PackedFileWriter() = default;

Result<PackedFileWriter> PackedFileWriter::create(const fs::path& path, std::span<const std::string> names,
                                                  const SavePackedOptions& options) try {
  std::size_t room = kFileRoom;
  if (options.checkpoint != nullptr) room += escaped_twice(checkpoint_place(options.checkpoint->path()).filename().string());
  std::unordered_map<std::string, bool> added;
  for (const std::string& name : names) {
    NIBBLE_RETURN_IF_ERROR(storage::check_tensor_name(name));
    if (name.size() > kMaxName)
      return error(StatusCode::invalid_argument, "the name {}... has {} bytes, more than {}", printable(name), name.size(),
                   kMaxName);
    if (!added.emplace(name, false).second)
      return error(StatusCode::invalid_argument, "two weights are called {}", printable(name));
    room += storage::SafetensorsWriter::header_bytes(tensor_name(name, kPacked), 1);
    for (const auto& [key, member] : kSmallTensors) room += storage::SafetensorsWriter::header_bytes(tensor_name(name, key), 1);
    room += kDescriptionRoom + escaped_twice(name);
  }
  NIBBLE_ASSIGN_OR_RETURN(auto writer, storage::SafetensorsWriter::create(path, {}, room, options.overwrite, kAlignment));
  auto impl = std::make_unique<Impl>(std::move(writer));
  impl->checkpoint = options.checkpoint;
  impl->added = std::move(added);
  return PackedFileWriter(std::move(impl));
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot write {}: {}", path.string(), caught().message());
}

Status PackedFileWriter::add(std::string_view name, const PackedWeight& weight) try {
  return impl_->add(std::string(name), weight);
} catch (...) {
  return caught();
}

Status PackedFileWriter::finish() try { return impl_->finish(); } catch (...) {
  return caught();
}

Status save_packed(const fs::path& path, std::span<const std::pair<std::string, PackedWeight>> weights,
                   const SavePackedOptions& options) try {
  std::vector<std::string> names;
  for (const auto& [name, weight] : weights) names.push_back(name);
  NIBBLE_ASSIGN_OR_RETURN(PackedFileWriter writer, PackedFileWriter::create(path, names, options));
  for (const auto& [name, weight] : weights) NIBBLE_RETURN_IF_ERROR(writer.add(name, weight));
  return writer.finish();
} catch (...) {
  return caught();
}

}  // namespace nibble
