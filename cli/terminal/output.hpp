// Output of commands: results on standard output, one-line errors on stderr, files that appear whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "json_values.hpp"
#include "nibble/status.hpp"

namespace nibble {
struct GpuInfo;
}

namespace nibble::cli {

using Json = OrderedJson;

/// Writes to standard output. The first failure is remembered for finish_output.
void print(std::string_view text);
/// JSON documents end with a newline; bytes that are not UTF-8 become U+FFFD and infinities null.
std::string to_text(const Json& json);
/// Prints the result of a command. `json` is the value of --json: "" prints the text, "-" the JSON document in its place, else the
/// document is written to that file.
Status print_result(const std::string& json, const std::function<std::string()>& text, const std::function<Json()>& document);
/// The properties of a GPU that need no measurement.
Json gpu_description(const GpuInfo& gpu);
/// Flushes standard output. A closed pipe (`| head`) is no error, a full disk is.
Status finish_output();

/// "nibble: <text>" as one line on stderr.
void complain(std::string_view text);

/// Writes a file under a temporary name in the same directory and renames it, replacing an existing file or the target of a link. Pipes
/// and character devices are written to; anything else is an error.
Status write_file(const std::filesystem::path& path, std::string_view contents);
Status read_file(const std::filesystem::path& path, std::string& contents);

/// "3.25 MB", "12.0 GB".
std::string human_bytes(double bytes);
/// "64 KiB", "31.4 GiB", for caches and memory.
std::string human_binary(std::int64_t bytes);
/// "7 modules", "1 module".
std::string counted(std::size_t count, std::string_view noun);
/// "model.layers.*.mlp.up_proj": the common name of modules of all layers.
std::string without_numbers(std::string_view name);
/// An expert in a name, "model.layers.0.mlp.experts.7.w1", without its number and up to it.
struct ExpertName {
  std::string before, after;  // "model.layers.0.mlp.experts.", ".w1"
  std::int64_t expert = 0;
};
/// Nothing for modules that are no experts.
std::optional<ExpertName> expert_in(std::string_view name);
/// The present moment as ISO 8601 in UTC.
std::string utc_now();

}  // namespace nibble::cli
