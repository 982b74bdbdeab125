#include "checkpoint/io/shards.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/io/json.hpp"
#include "core/error.hpp"

namespace nibble::storage {
namespace fs = std::filesystem;
namespace {

/// tensor → file, from the index.
using WeightMap = std::map<std::string, std::string, std::less<>>;

Result<WeightMap> read_index(const fs::path& path) {
  NIBBLE_RETURN_IF_ERROR(check_inside(path.parent_path(), path));
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  NIBBLE_ASSIGN_OR_RETURN(const Json index, parse_json<Json>(text, path.string(), true));
  const auto corrupt = [&](const std::string& what) { return error(StatusCode::corrupt_data, "{}: {}", path.string(), what); };
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (map == index.end() || !map->is_object()) return corrupt("there is no object \"weight_map\"");
  WeightMap result;
  for (const auto& [tensor, value] : map->items()) {
    if (!value.is_string()) return corrupt(fmt::format("tensor {} has no file name", printable(tensor)));
    auto shard = value.get<std::string>();
    const fs::path relative(shard);
    // "../x" and "/etc/x" would make an innocent command read any file.
    if (shard.empty() || relative.is_absolute() || std::ranges::find(relative, fs::path("..")) != relative.end() ||
        shard.find('\0') != std::string::npos)
      return corrupt(
          fmt::format("tensor {} is in {}, which is not a file of this checkpoint", printable(tensor), printable(shard)));
    result.emplace(tensor, std::move(shard));
  }
  if (result.empty()) return corrupt("\"weight_map\" is empty");
  return result;
}

/// Names of the files that end in .safetensors, sorted; hidden files are left out: other tools leave them behind.
Result<std::set<std::string>> list_shards(const fs::path& directory) {
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string> all, names_in(directory));
  std::set<std::string> names;
  for (const std::string& name : all)
    if (name.ends_with(".safetensors") && !name.starts_with('.')) names.insert(name);
  return names;
}

/// GGUF is another container, which is not read.
Status refuse_gguf(const fs::path& path) {
  return error(StatusCode::unsupported,
               "{} is GGUF, llama.cpp's format; nibble reads safetensors: take the checkpoint that it was made from",
               path.string());
}

/// Without an index, all files of a series model-00001-of-00005.safetensors have to be present.
void note_missing_shards(Shards& shards, const std::set<std::string>& names) {
  constexpr std::string_view kEnd = ".safetensors", kOf = "-of-";
  constexpr std::size_t kDigits = 5;
  const auto digits = [](std::string_view text) { return text.find_first_not_of("0123456789") == std::string_view::npos; };
  std::map<std::pair<std::string, std::string>, std::size_t> families;  // {"model-", "00005"}: how many are there
  for (const std::string& name : names) {
    if (!name.ends_with(kEnd) || name.size() < kEnd.size() + 2 * kDigits + kOf.size()) continue;
    const std::size_t last = name.size() - kEnd.size() - kDigits, of = last - kOf.size(), first = of - kDigits;
    if (name.compare(of, kOf.size(), kOf) == 0 && digits(name.substr(first, kDigits)) && digits(name.substr(last, kDigits)))
      ++families[{name.substr(0, first), name.substr(last, kDigits)}];
  }
  for (const auto& [family, count] : families)
    if (count < std::stoul(family.second))
      shards.notes.push_back(
          {Note::Severity::warning,
           fmt::format("{} of the {} files {} are here: modules may be missing", count, std::stoul(family.second),
                       printable(fmt::format("{}*-of-{}{}", family.first, family.second, kEnd)))});
}

/// Whether formats read its numbers during detection: shapes, and the order of input channels.
bool tells_formats_apart(const TensorInfo& tensor) {
  return tensor.shape.size() == 1 && (tensor.dtype == DType::s32 || tensor.dtype == DType::s64);
}

Status add_shard(Shards& shards, const fs::path& directory, const std::string& name) {
  const fs::path path = directory / name;
  NIBBLE_ASSIGN_OR_RETURN(auto file, MappedFile::open(path));
  NIBBLE_ASSIGN_OR_RETURN(SafetensorsHeader header, read_header(*file, path));
  for (TensorInfo& tensor : header.tensors) {
    tensor.file = name;
    shards.data.push_back(file->bytes().data() + tensor.file_offset);
    if (tells_formats_apart(tensor)) {
      auto& bytes = shards.read_before.emplace_back(tensor.bytes);
      NIBBLE_RETURN_IF_ERROR(file->read(tensor.file_offset, bytes));
      shards.data.back() = bytes.data();
    }
    shards.file.push_back(file.get());
    shards.tensors.push_back(std::move(tensor));
  }
  std::ranges::move(header.metadata, std::back_inserter(shards.metadata));
  shards.files.push_back(std::move(file));
  return {};
}

/// Compares the index with the contents of the shards.
Status check_index(Shards& shards, const WeightMap& index, const fs::path& directory) {
  std::size_t unnamed = 0, indexed = 0;
  const TensorInfo* first_unnamed = nullptr;
  std::unordered_map<std::string_view, const TensorInfo*> present;
  for (const TensorInfo& tensor : shards.tensors) present.emplace(tensor.name, &tensor);
  for (const auto& [tensor, shard] : index) {
    const auto it = present.find(tensor);
    if (it != present.end() && it->second->file == shard) continue;
    return error(StatusCode::corrupt_data, "{}: tensor {} should be in {}, but {}", (directory / kIndexName).string(),
                 printable(tensor), printable(shard),
                 it == present.end() ? "it is in no shard" : fmt::format("it is in {}", printable(it->second->file)));
  }
  for (const TensorInfo& tensor : shards.tensors) {
    if (index.contains(tensor.name))
      ++indexed;
    else if (unnamed++ == 0)
      first_unnamed = &tensor;
  }
  if (first_unnamed != nullptr)
    shards.notes.push_back({Note::Severity::warning,
                            fmt::format("{} names {} of {} tensors; the first it leaves out is {} in {}", kIndexName, indexed,
                                        indexed + unnamed, printable(first_unnamed->name), printable(first_unnamed->file))});
  return {};
}

}  // namespace

Result<SafetensorsHeader> read_header(const MappedFile& file, const fs::path& path) {
  const std::uint64_t size = file.bytes().size();
  std::vector<std::byte> bytes(std::min<std::uint64_t>(size, sizeof(std::uint64_t)));
  NIBBLE_RETURN_IF_ERROR(file.read(0, bytes));
  bytes.resize(std::min(size, safetensors_header_bytes(bytes)));
  NIBBLE_RETURN_IF_ERROR(file.read(0, bytes));
  return parse_safetensors(bytes, path.string(), size);
}

Result<Tensor> Shards::load(std::size_t tensor) const {
  const TensorInfo& info = tensors[tensor];
  Tensor loaded(info.dtype, info.shape);
  NIBBLE_RETURN_IF_ERROR(file[tensor]->read(info.file_offset, loaded.bytes));
  return loaded;
}

Status Shards::load(std::size_t tensor, std::int64_t first, std::span<std::byte> to) const {
  const TensorInfo& info = tensors[tensor];
  return file[tensor]->read(info.file_offset + storage_bytes(info.dtype, static_cast<std::uint64_t>(first)), to);
}

Result<Shards> open_shards(const fs::path& path) {
  std::error_code failure;
  const fs::file_status status = fs::status(path, failure);
  if (status.type() == fs::file_type::not_found) return error(StatusCode::not_found, "{} does not exist", path.string());
  if (failure) return error(StatusCode::io_error, "cannot stat {}: {}", path.string(), failure.message());
  Shards shards;
  if (!fs::is_directory(status)) {
    if (path.extension() == ".gguf") return refuse_gguf(path);
    NIBBLE_RETURN_IF_ERROR(add_shard(shards, path.parent_path(), path.filename().string()));
    note_missing_shards(shards, {path.filename().string()});
    return shards;
  }

  NIBBLE_ASSIGN_OR_RETURN(std::set<std::string> names, list_shards(path));
  WeightMap index;
  const bool indexed = fs::exists(path / kIndexName, failure);
  if (indexed) {
    NIBBLE_ASSIGN_OR_RETURN(index, read_index(path / kIndexName));
    std::set<std::string> named;
    for (const auto& [tensor, shard] : index)
      if (named.insert(shard).second && !fs::exists(path / shard, failure))
        return error(StatusCode::not_found, "{}: shard {} of tensor {} does not exist", (path / kIndexName).string(),
                     printable(shard), printable(tensor));
    for (const std::string& name : names)
      if (!named.contains(name))
        shards.notes.push_back({Note::Severity::info, fmt::format("{} is not in {} and left out", printable(name), kIndexName)});
    names = std::move(named);
  } else {
    note_missing_shards(shards, names);
  }
  if (names.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string> others, names_in(path));
    for (const std::string& other : others)
      if (fs::path(other).extension() == ".gguf") return refuse_gguf(path / other);
    return error(StatusCode::not_found, "{} holds no *.safetensors; convert other files (*.bin, *.pt) first", path.string());
  }
  for (const std::string& name : names) {
    NIBBLE_RETURN_IF_ERROR(check_inside(path, path / name));
    NIBBLE_RETURN_IF_ERROR(add_shard(shards, path, name));
  }
  std::unordered_set<std::string> keys;
  std::erase_if(shards.metadata, [&](const Metadata::value_type& entry) { return !keys.insert(entry.first).second; });

  std::unordered_map<std::string_view, const TensorInfo*> seen;
  for (const TensorInfo& tensor : shards.tensors)
    if (const auto [it, fresh] = seen.emplace(tensor.name, &tensor); !fresh)
      return error(StatusCode::corrupt_data, "{}: tensor {} is in two shards: {} at byte {} and {} at byte {}", path.string(),
                   printable(tensor.name), it->second->file, it->second->file_offset, tensor.file, tensor.file_offset);
  if (indexed) NIBBLE_RETURN_IF_ERROR(check_index(shards, index, path));
  return shards;
}

}  // namespace nibble::storage
