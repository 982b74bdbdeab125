// Building blocks of the report: escaped text, readable numbers, axes, and SVG elements.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace nibble::cli {

/// Text as HTML or XML content or attribute value.
std::string escape(std::string_view text);
/// At most `length` characters of UTF-8, the last one "…" if some are missing.
std::string shortened(std::string_view text, std::size_t length);
/// Roughly how wide a line of 12-pixel text is.
double text_width(std::string_view text);

/// Three significant digits and no exponent where that is readable: 0.0123, 4.56, 789, 12300; "–" for NaN, "∞".
std::string number(double value);
/// A time with a suitable unit: "45.6 µs", "1.23 ms".
std::string duration(double microseconds);

/// A range of values, linear or logarithmic, laid along [from, to] in pixels.
struct Axis {
  double low = 0, high = 1;
  bool log = false;
  double from = 0, to = 1;

  /// The pixel of a value; values outside the range are moved to its ends.
  double at(double value) const;
  /// Round values to label, about one per 60 pixels.
  std::vector<double> ticks() const;
};

/// An SVG picture of fixed inner size that scales with the page. Colours come from CSS classes.
class Svg {
 public:
  /// `label` describes the picture for screen readers.
  Svg(double width, double height, std::string_view label);
  void line(double x1, double y1, double x2, double y2, std::string_view css);
  void rect(double x, double y, double width, double height, std::string_view css, std::string_view tooltip = "");
  /// anchor: "start", "middle" or "end"; `degrees` rotates the text around its anchor.
  void text(double x, double y, std::string_view content, std::string_view anchor, std::string_view css, double degrees = 0);
  void path(const std::vector<std::pair<double, double>>& points, std::string_view css);
  /// The mark of series `index`: its own colour and, for readers who do not see colours, its own shape.
  void mark(double x, double y, std::size_t index, std::string_view tooltip);
  std::string finish() &&;

 private:
  std::string out_;
};

/// Series have this many distinct marks; then they repeat.
inline constexpr std::size_t kSeries = 6;

}  // namespace nibble::cli
