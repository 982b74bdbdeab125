// Reading files of packed weights.
#include "nibble/packed_file.hpp"

#include <algorithm>
#include <exception>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/io/json.hpp"
#include "checkpoint/io/mapped_file.hpp"
#include "checkpoint/io/safetensors.hpp"
#include "checkpoint/io/shards.hpp"
#include "core/error.hpp"
#include "packed/format.hpp"
#include "packed/parts.hpp"
#include "plan/pack.hpp"

namespace nibble {
namespace fs = std::filesystem;
using namespace packed;
using storage::printable;

/// A weight of the file: its description, and its tensors. Null: it has no such tensor.
struct StoredWeight {
  PackedWeightHeader header;
  const TensorInfo* packed = nullptr;
  SmallTensors small;
};

struct PackedFile::Impl {
  static Result<std::shared_ptr<const Impl>> open(const fs::path& path);
  Result<PackedWeight> load(std::size_t index) const;

  fs::path path;
  std::shared_ptr<const storage::MappedFile> file;
  std::vector<TensorInfo> tensors;
  std::string library_version, checkpoint;
  std::vector<PackedModule> modules;
  std::vector<StoredWeight> stored;  // of each module
  std::unordered_map<std::string_view, std::size_t> index;

 private:
  Status read_modules(const Json& json);
  Result<Tensor> read_tensor(const TensorInfo& info) const;
};

namespace {

/// The value of a key of the metadata; "" when there is none.
std::string_view find_value(const storage::Metadata& metadata, std::string_view key) {
  const auto found = std::ranges::find(metadata, key, &storage::Metadata::value_type::first);
  return found == metadata.end() ? std::string_view() : found->second;
}

Status check_format(const storage::Metadata& metadata, const fs::path& path) {
  if (find_value(metadata, kFormatKey) != kFormatName)
    return error(StatusCode::corrupt_data,
                 "{} is no file of packed weights: its metadata has no \"{}\": \"{}\"; nibble pack makes one", path.string(),
                 kFormatKey, kFormatName);
  const std::string_view version = find_value(metadata, kFormatVersionKey);
  if (version == kFormatVersion) return {};
  return error(StatusCode::unsupported,
               "{} has version {} of the format of packed weights, and this library reads {}: pack it again", path.string(),
               printable(version), kFormatVersion);
}

/// Whether what the file says about a weight fits together.
Status check(const StoredWeight& weight, const Description& description) {
  NIBBLE_RETURN_IF_ERROR(check(description, weight.small));
  NIBBLE_RETURN_IF_ERROR(check_tensor(*weight.packed, DType::u8, static_cast<std::int64_t>(padded(description.bytes))));
  if (weight.packed->file_offset % kAlignment != 0)
    return error(StatusCode::corrupt_data, "tensor {} begins at byte {}, not at a multiple of {}", printable(weight.packed->name),
                 weight.packed->file_offset, kAlignment);
  if (weight.small.channel_sums == nullptr && channel_sums_length(description.header.scheme, description.header.n) != 0)
    return error(StatusCode::corrupt_data, "has no channel_sums");
  return {};
}

}  // namespace

Status PackedFile::Impl::read_modules(const Json& json) {
  const auto bad = [&](std::string_view module, const Status& status) {
    return status.with_context(fmt::format("{}: module {}", path.string(), printable(module)));
  };
  if (!json.is_object())
    return error(StatusCode::corrupt_data, "{}: \"{}\" of the metadata is no JSON object", path.string(), kModulesKey);
  std::unordered_map<std::string_view, const TensorInfo*> by_name;
  for (const TensorInfo& tensor : tensors) by_name.emplace(tensor.name, &tensor);
  std::vector<std::pair<PackedModule, StoredWeight>> found;
  std::size_t used = 0;
  for (const auto& item : json.items()) {
    const std::string& module = item.key();
    Result<Description> description = parse_description(item.value());
    if (!description.ok()) return bad(module, description.status());
    StoredWeight weight{.header = description->header};
    const auto tensor = [&](std::string_view key) -> const TensorInfo* {
      const auto at = by_name.find(tensor_name(module, key));
      used += at == by_name.end() ? 0 : 1;
      return at == by_name.end() ? nullptr : at->second;
    };
    weight.packed = tensor(kPacked);
    for (const auto& [key, member] : kSmallTensors) weight.small.*member = tensor(key);
    if (weight.packed == nullptr)
      return bad(module, error(StatusCode::corrupt_data, "there is no tensor {}", printable(tensor_name(module, kPacked))));
    if (const Status sound = check(weight, *description); !sound.ok()) return bad(module, sound);
    PackedModule described{.name = module,
                           .desc = desc_of(weight.header, weight.small),
                           .spec = description->spec,
                           .layout = weight.header.layout->name,
                           .has_bias = weight.small.bias != nullptr,
                           .bytes = description->bytes,
                           .source = std::move(description->source)};
    found.emplace_back(std::move(described), std::move(weight));
  }
  if (used != tensors.size())
    return error(StatusCode::corrupt_data, "{}: {} of its {} tensors belong to no module that \"{}\" describes", path.string(),
                 tensors.size() - used, tensors.size(), kModulesKey);
  std::ranges::sort(found, {}, [](const auto& each) { return each.second.packed->file_offset; });
  for (auto& [module, weight] : found) {
    modules.push_back(std::move(module));
    stored.push_back(std::move(weight));
  }
  for (std::size_t i = 0; i < modules.size(); ++i) index.emplace(modules[i].name, i);
  return {};
}

Result<std::shared_ptr<const PackedFile::Impl>> PackedFile::Impl::open(const fs::path& path) {
  auto impl = std::make_shared<Impl>();
  impl->path = path;
  NIBBLE_ASSIGN_OR_RETURN(impl->file, storage::MappedFile::open(path));
  NIBBLE_ASSIGN_OR_RETURN(storage::SafetensorsHeader header, storage::read_header(*impl->file, path));
  NIBBLE_RETURN_IF_ERROR(check_format(header.metadata, path));
  impl->tensors = std::move(header.tensors);
  impl->library_version = find_value(header.metadata, kLibraryVersionKey);
  impl->checkpoint = find_value(header.metadata, kCheckpointKey);
  NIBBLE_ASSIGN_OR_RETURN(const Json json,
                          storage::parse_json<Json>(find_value(header.metadata, kModulesKey),
                                                    fmt::format("{}: \"{}\"", path.string(), kModulesKey), true));
  NIBBLE_RETURN_IF_ERROR(impl->read_modules(json));
  return std::shared_ptr<const Impl>(std::move(impl));
}

Result<Tensor> PackedFile::Impl::read_tensor(const TensorInfo& info) const {
  Tensor tensor(info.dtype, info.shape);
  NIBBLE_RETURN_IF_ERROR(file->read(info.file_offset, tensor.bytes));
  return tensor;
}

Result<PackedWeight> PackedFile::Impl::load(std::size_t i) const {
  const StoredWeight& from = stored[i];
  NIBBLE_ASSIGN_OR_RETURN(auto weight,
                          without_bytes(from.header, from.small, [&](const TensorInfo& info) { return read_tensor(info); }));
  std::byte last;  // a file that has been truncated has no such page
  NIBBLE_RETURN_IF_ERROR(file->read(from.packed->file_offset + from.packed->bytes - 1, {&last, 1}));
  weight->bytes = Buffer(file->bytes().subspan(from.packed->file_offset, modules[i].bytes), file);
  return PackedWeight(std::move(weight), modules[i].spec);
}

Result<PackedFile> PackedFile::open(const fs::path& path) try {
  NIBBLE_ASSIGN_OR_RETURN(auto impl, Impl::open(path));
  return PackedFile(std::move(impl));
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot open {}: {}", path.string(), caught().message());
}

bool PackedFile::recognises(const fs::path& path) try {
  const auto file = storage::MappedFile::open(path);
  if (!file.ok()) return false;
  const auto header = storage::read_header(**file, path);
  return header.ok() && find_value(header->metadata, kFormatKey) == kFormatName;
} catch (...) {
  return false;
}

const fs::path& PackedFile::path() const { return impl_->path; }
const std::string& PackedFile::library_version() const { return impl_->library_version; }
const std::string& PackedFile::checkpoint() const { return impl_->checkpoint; }
std::span<const PackedModule> PackedFile::modules() const { return impl_->modules; }

const PackedModule* PackedFile::find(std::string_view name) const {
  const auto found = impl_->index.find(name);
  return found == impl_->index.end() ? nullptr : &impl_->modules[found->second];
}

Result<PackedWeight> PackedFile::load(std::string_view name) const try {
  const auto found = impl_->index.find(name);
  if (found == impl_->index.end())
    return error(StatusCode::not_found, "{} has no module {}", impl_->path.string(), printable(name));
  Result<PackedWeight> weight = impl_->load(found->second);
  if (!weight.ok()) return weight.status().with_context(fmt::format("{}: module {}", impl_->path.string(), printable(name)));
  return weight;
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot load {}: {}", printable(name), caught().message());
}

}  // namespace nibble
