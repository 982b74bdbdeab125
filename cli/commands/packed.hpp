// What `inspect` and `verify` say of files of packed weights.
#pragma once

#include <filesystem>
#include <string>

#include "commands/commands.hpp"

namespace nibble::cli {

/// Prints the weights of a packed file, and whether the checkpoint beside it has changed. `json` is the value of --json.
Result<Outcome> inspect_packed(const std::filesystem::path& path, const Pattern& layer, const std::string& json);

/// Compares every weight of a packed file whose name matches with its module in the checkpoint, bit for bit, and prints the result.
Result<Outcome> verify_packed(const Checkpoint& checkpoint, const std::filesystem::path& path, const Pattern& layer,
                              const std::string& json);

}  // namespace nibble::cli
