// Names of tensors.
#pragma once

#include <string>
#include <string_view>

namespace nibble::storage {

/// "module.suffix"; the suffix alone for the module without a name.
inline std::string join_name(std::string_view module, std::string_view suffix) {
  std::string name(module);
  if (!name.empty()) name += '.';
  return name += suffix;
}

}  // namespace nibble::storage
