#include "commands/shapes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "nibble/tensor.hpp"
#include "terminal/output.hpp"

namespace nibble::cli {
namespace {

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
    if (!value || *value < 1 || *value > kMaxSize)
      return fmt::format("{} is '{}'; expected a whole number from 1 to {}", "MNK"[i], field, kMaxSize);
    sizes[i] = *value;
  }
  for (std::size_t i = 0; i < 3; ++i)  // of D, A and W
    if (const std::size_t j = (i + 1) % 3; sizes[i] > 0 && sizes[j] > kMaxElements / sizes[i])
      return fmt::format("{}={} times {}={} is more than the {} elements that a matrix may have", "MNK"[i], sizes[i], "MNK"[j],
                         sizes[j], kMaxElements);
  if (number(fields.back())) return fmt::format("the line ends with the number {}; a name must follow N and K", fields.back());
  shape = {first == 0 ? std::optional(sizes[0]) : std::nullopt, sizes[1], sizes[2], std::string(fields.back())};
  return "";
}

constexpr std::int64_t kLargestConv = 1 << 20;  // of a dimension
constexpr double kMostElements = 0x1p40;        // of an operand

std::string size_problem(std::string_view what, std::string_view field, std::int64_t least) {
  return fmt::format("{} is '{}'; expected a whole number from {} to {}", what, field, least, kLargestConv);
}

/// One number; the error text is empty on success.
std::string parse_size(std::string_view what, std::string_view field, std::int64_t least, std::int64_t& size) {
  const std::optional<std::int64_t> value = number(field);
  if (!value || *value < least || *value > kLargestConv) return size_problem(what, field, least);
  size = *value;
  return "";
}

/// "3x1", or "3" for both.
std::string parse_extent(std::string_view what, std::string_view field, std::int64_t least, Extent& extent) {
  const std::size_t x = field.find('x');
  const auto h = number(field.substr(0, x)), w = x == std::string_view::npos ? h : number(field.substr(x + 1));
  const auto good = [&](const std::optional<std::int64_t>& size) { return size && *size >= least && *size <= kLargestConv; };
  if (!good(h) || !good(w)) return size_problem(what, field, least) + ", or two of them as in 3x1";
  extent = {*h, *w};
  return "";
}

std::string parse_padding(std::string_view field, Padding& padding) {
  std::int64_t sides[4] = {};
  if (std::count(field.begin(), field.end(), ',') != 3) {
    Extent both;
    if (!parse_extent("padding", field, 0, both).empty())
      return size_problem("padding", field, 0) + ", two as in 3x1, or four as in 0,1,0,1 for top, bottom, left and right";
    padding = {both.h, both.h, both.w, both.w};
    return "";
  }
  std::string_view rest = field;
  for (std::int64_t& side : sides) {
    const std::string_view one = rest.substr(0, rest.find(','));
    if (std::string problem = parse_size("padding", one, 0, side); !problem.empty()) return problem;
    rest.remove_prefix(std::min(one.size() + 1, rest.size()));
  }
  padding = {sides[0], sides[1], sides[2], sides[3]};
  return "";
}

std::string parse_conv_option(std::string_view field, ConvGeometry& g) {
  const std::string_view key = field.substr(0, field.find('=')), value = field.substr(key.size() + 1);
  if (key == "stride") return parse_extent(key, value, 1, g.stride);
  if (key == "padding") return parse_padding(value, g.padding);
  if (key == "dilation") return parse_extent(key, value, 1, g.dilation);
  if (key == "groups") return parse_size(key, value, 1, g.groups);
  return fmt::format("there is no '{}'; write stride=S, padding=P, dilation=D or groups=G", key);
}

/// The same for a line of a convolution.
std::string parse_conv_line(std::vector<std::string_view> fields, ConvShape& shape) {
  ConvGeometry& g = shape.geometry;
  std::vector<std::string_view> options;
  while (!fields.empty() && fields.back().find('=') != std::string_view::npos) {
    options.insert(options.begin(), fields.back());
    fields.pop_back();
  }
  if (fields.size() != 5 && fields.size() != 6)
    return fmt::format("expected '[B] C HxW CO FILTER name [stride=S] [padding=P] [dilation=D] [groups=G]', found {} field{}{}",
                       fields.size(), fields.size() == 1 ? "" : "s", options.empty() ? "" : " in front of the options");
  std::string problem;
  const auto take = [&](const std::string& found) {
    if (problem.empty()) problem = found;
  };
  if (fields.size() == 6) {
    take(parse_size("B", fields.front(), 1, shape.batch.emplace()));
    fields.erase(fields.begin());
  }
  Extent image;
  take(parse_size("C", fields[0], 1, g.in_channels));
  take(parse_extent("HxW", fields[1], 1, image));
  take(parse_size("CO", fields[2], 1, g.out_channels));
  take(parse_extent("FILTER", fields[3], 1, g.filter));
  if (number(fields[4])) take(fmt::format("the number {} stands where the name should; a name must follow FILTER", fields[4]));
  for (const std::string_view option : options) take(parse_conv_option(option, g));
  if (!problem.empty()) return problem;
  g.height = image.h, g.width = image.w;
  shape.name = std::string(fields[4]);
  if (const Status valid = g.validate(); !valid.ok()) return valid.message();
  const auto elements = [&](std::int64_t channels, std::int64_t height, std::int64_t width) {
    return static_cast<double>(shape.batch.value_or(1)) * static_cast<double>(channels) * static_cast<double>(height) *
           static_cast<double>(width);
  };
  const double most =
      std::max({elements(g.in_channels, g.height, g.width), elements(g.out_channels, g.out_height(), g.out_width()),
                static_cast<double>(g.out_channels) * static_cast<double>(g.k())});
  return most <= kMostElements ? "" : fmt::format("an operand has {:.3g} elements; expected at most {:.3g}", most, kMostElements);
}

/// Calls parse(fields, shape) for every line that has fields.
template <class AnyShape, class Parse>
Result<std::vector<AnyShape>> parse_lines(std::string_view text, std::string_view file, std::string_view grammar, Parse parse) {
  std::vector<AnyShape> shapes;
  for (int line = 1; !text.empty(); ++line) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::vector<std::string_view> fields = fields_of(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (fields.empty()) continue;
    const std::string problem = parse(fields, shapes.emplace_back());
    if (!problem.empty()) return Status(StatusCode::invalid_argument, fmt::format("{}:{}: {}", file, line, problem));
  }
  if (shapes.empty()) return Status(StatusCode::invalid_argument, fmt::format("{}: no shapes; write '{}' lines", file, grammar));
  return shapes;
}

}  // namespace

Result<std::vector<Shape>> parse_shapes(std::string_view text, std::string_view file) {
  return parse_lines<Shape>(text, file, "[M] N K name", parse_line);
}

Result<std::vector<Shape>> read_shapes(const std::filesystem::path& path) {
  std::string text;
  if (Status status = read_file(path, text); !status.ok()) return status;
  return parse_shapes(text, path.string());
}

Result<Extent> parse_extent(std::string_view what, std::string_view text) {
  Extent extent;
  if (std::string problem = parse_extent(what, text, 1, extent); !problem.empty())
    return Status(StatusCode::invalid_argument, std::move(problem));
  return extent;
}

Result<std::vector<ConvShape>> parse_conv_shapes(std::string_view text, std::string_view file) {
  return parse_lines<ConvShape>(text, file, "[B] C HxW CO FILTER name", parse_conv_line);
}

Result<std::vector<ConvShape>> read_conv_shapes(const std::filesystem::path& path) {
  std::string text;
  if (Status status = read_file(path, text); !status.ok()) return status;
  return parse_conv_shapes(text, path.string());
}

}  // namespace nibble::cli
