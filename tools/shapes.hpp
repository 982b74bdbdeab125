// Shape files: the layers a benchmark runs, one per line.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nibble/status.hpp"

namespace nibble::tools {

struct Shape {
  std::optional<std::int64_t> m;  // when the file fixes it
  std::int64_t n = 0, k = 0;
  std::string name;
  friend bool operator==(const Shape&, const Shape&) = default;
};

/// Lines of "[M] N K name"; '#' starts a comment. `file` is only for messages: "shapes.txt:3: ...".
Result<std::vector<Shape>> parse_shapes(std::string_view text, std::string_view file);
Result<std::vector<Shape>> read_shapes(const std::filesystem::path& path);

}  // namespace nibble::tools
