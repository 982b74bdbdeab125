// See companions.hpp.
#include "convert/companions.hpp"

#include <algorithm>
#include <iterator>

#include "checkpoint/config/codec_util.hpp"
#include "checkpoint/config/model_config.hpp"
#include "checkpoint/io/atomic_output.hpp"
#include "checkpoint/io/json.hpp"
#include "checkpoint/io/mapped_file.hpp"
#include "core/error.hpp"

namespace nibble {
namespace fs = std::filesystem;
using storage::printable;
namespace {

bool is_weights(const fs::path& file) {
  static constexpr std::string_view kWeights[] = {".safetensors", ".bin", ".pt",      ".pth", ".ckpt",
                                                  ".gguf",        ".h5",  ".msgpack", ".onnx"};
  return std::ranges::find(kWeights, file.extension().string()) != std::end(kWeights);
}

/// Whether to copy a file: tokenizer, generation settings, license, ..., but no weights and no description of the old weights.
bool is_companion(const fs::path& file) {
  const std::string name = file.filename().string();
  return name != "config.json" && !name.ends_with(".index.json") && !is_weights(file) &&
         std::ranges::find(storage::legacy_config_names(), name) == storage::legacy_config_names().end();
}

/// The first file of weights in a folder or below; "" when there is none.
Result<fs::path> weights_below(const fs::path& folder) {
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string> names, storage::names_in(folder));
  std::error_code ignored;
  for (const std::string& name : names) {
    fs::path found = folder / name;
    if (fs::symlink_status(found, ignored).type() == fs::file_type::directory) {
      NIBBLE_ASSIGN_OR_RETURN(found, weights_below(found));
    } else if (!is_weights(found)) {
      continue;
    }
    if (!found.empty()) return found;
  }
  return fs::path();
}

}  // namespace

std::set<fs::path> listed_folders(const fs::path& checkpoint) {
  std::set<fs::path> folders;
  const auto text = storage::read_file(checkpoint / "modules.json");
  if (!text.ok()) return folders;
  if (const auto list = storage::parse_json<Json>(*text, "modules.json"); list.ok())
    for (const Json& part : *list)
      if (const Json& path = codec::config_child(part, "path"); path.is_string()) folders.insert(path.get<std::string>());
  return folders;
}

Status copy_companions(const fs::path& from, const fs::path& inside, const fs::path& to, const std::set<fs::path>& listed,
                       std::vector<Note>& notes) {
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string> names, storage::names_in(from / inside));
  for (const std::string& name : names) {
    const fs::path relative = inside / name, source = from / relative;
    std::error_code failure, dangling;  // a link to nowhere is no reason to stop
    const bool hidden = name.starts_with('.');
    if (fs::symlink_status(source, dangling).type() == fs::file_type::directory) {
      if (hidden) continue;
      fs::path weights;
      if (inside.empty() && !listed.contains(relative)) {
        NIBBLE_ASSIGN_OR_RETURN(weights, weights_below(source));
      }
      if (weights.empty())
        NIBBLE_RETURN_IF_ERROR(copy_companions(from, relative, to, listed, notes));
      else
        notes.push_back(
            {Note::Severity::info, fmt::format("{} was not copied: it holds weights, {}", printable(relative.string()),
                                               printable(weights.lexically_relative(from).string()))});
      continue;
    }
    if (!fs::is_regular_file(source, dangling) || hidden || (inside.empty() && !is_companion(source))) continue;
    NIBBLE_RETURN_IF_ERROR(storage::check_inside(from, source));
    fs::create_directories((to / relative).parent_path(), failure);
    if (!failure) fs::copy_file(source, to / relative, failure);
    if (failure) return error(StatusCode::io_error, "cannot copy {}: {}", source.string(), failure.message());
  }
  return {};
}

}  // namespace nibble
