#include "shapes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "output.hpp"

namespace nibble::tools {
namespace {

constexpr std::int64_t kLargest = std::int64_t{1} << 31;  // of a dimension; products then stay within 64 bits

std::vector<std::string_view> fields_of(std::string_view line) {
  line = line.substr(0, line.find('#'));
  constexpr std::string_view kBlank = " \t\r";
  std::vector<std::string_view> fields;
  for (;;) {
    const std::size_t begin = line.find_first_not_of(kBlank);
    if (begin == std::string_view::npos) return fields;
    line.remove_prefix(begin);
    fields.push_back(line.substr(0, line.find_first_of(kBlank)));
    line.remove_prefix(fields.back().size());
  }
}

std::optional<std::int64_t> number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (ec != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// The error text is empty when the line is a shape.
std::string parse_line(const std::vector<std::string_view>& fields, Shape& shape) {
  if (fields.size() != 3 && fields.size() != 4)
    return fmt::format("expected '[M] N K name', found {} field{}", fields.size(), fields.size() == 1 ? "" : "s");
  const std::size_t first = fields.size() == 4 ? 0 : 1;  // index into "MNK"
  std::int64_t sizes[3] = {};
  for (std::size_t i = first; i < 3; ++i) {
    const std::string_view field = fields[i - first];
    const std::optional<std::int64_t> value = number(field);
    if (!value || *value < 1 || *value > kLargest)
      return fmt::format("{} is '{}'; expected a whole number from 1 to {}", "MNK"[i], field, kLargest);
    sizes[i] = *value;
  }
  if (number(fields.back())) return fmt::format("the line ends with the number {}; a name must follow N and K", fields.back());
  shape = {first == 0 ? std::optional(sizes[0]) : std::nullopt, sizes[1], sizes[2], std::string(fields.back())};
  return "";
}

}  // namespace

Result<std::vector<Shape>> parse_shapes(std::string_view text, std::string_view file) {
  std::vector<Shape> shapes;
  for (int line = 1; !text.empty(); ++line) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::vector<std::string_view> fields = fields_of(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (fields.empty()) continue;
    const std::string problem = parse_line(fields, shapes.emplace_back());
    if (!problem.empty()) return Status(StatusCode::invalid_argument, fmt::format("{}:{}: {}", file, line, problem));
  }
  if (shapes.empty()) return Status(StatusCode::invalid_argument, fmt::format("{}: no shapes; write '[M] N K name' lines", file));
  return shapes;
}

Result<std::vector<Shape>> read_shapes(const std::filesystem::path& path) {
  std::string text;
  if (Status status = read_file(path, text); !status.ok()) return status;
  return parse_shapes(text, path.string());
}

}  // namespace nibble::tools
