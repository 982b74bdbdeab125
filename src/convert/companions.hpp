// What a checkpoint has beside its weights and its configuration, in the output of a transformation.
#pragma once

#include <filesystem>
#include <set>
#include <vector>

#include "nibble/checkpoint.hpp"

namespace nibble {

/// The folders of a sentence-transformers model that are parts of it.
std::set<std::filesystem::path> listed_folders(const std::filesystem::path& checkpoint);
/// Copies the other files, and folders without weights: a folder with them is another form of the model, unless modules.json lists it.
/// `inside` is the folder of the checkpoint `from` that is copied now.
Status copy_companions(const std::filesystem::path& from, const std::filesystem::path& inside, const std::filesystem::path& to,
                       const std::set<std::filesystem::path>& listed, std::vector<Note>& notes);

}  // namespace nibble
