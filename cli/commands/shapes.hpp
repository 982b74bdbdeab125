// Shape files: the layers a benchmark runs, one per line.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nibble/conv.hpp"
#include "nibble/status.hpp"

namespace nibble::cli {

struct Shape {
  std::optional<std::int64_t> m;  // when the file fixes it
  std::int64_t n = 0, k = 0;
  std::string name;
  friend bool operator==(const Shape&, const Shape&) = default;
};

/// Lines of "[M] N K name"; '#' starts a comment. `file` is only for messages: "shapes.txt:3: ...".
Result<std::vector<Shape>> parse_shapes(std::string_view text, std::string_view file);
Result<std::vector<Shape>> read_shapes(const std::filesystem::path& path);

struct ConvShape {
  std::optional<std::int64_t> batch;  // when the file fixes it
  ConvGeometry geometry;
  std::string name;
  friend bool operator==(const ConvShape&, const ConvShape&) = default;
};

/// "3x1" as height and width, "3" for both, from 1; errors name `what`.
Result<Extent> parse_extent(std::string_view what, std::string_view text);

/// Lines of "[B] C HxW CO FILTER name [stride=S] [padding=P] [dilation=D] [groups=G]". FILTER, S, P and D are one number, or two for
/// height and width as in 3x1; P may be four, for top, bottom, left and right as in 0,1,0,1.
Result<std::vector<ConvShape>> parse_conv_shapes(std::string_view text, std::string_view file);
Result<std::vector<ConvShape>> read_conv_shapes(const std::filesystem::path& path);

}  // namespace nibble::cli
