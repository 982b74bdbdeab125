#include "report/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace nibble::cli {
namespace {

bool continues(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

std::string title_of(std::string_view tooltip) {
  return tooltip.empty() ? "" : fmt::format("<title>{}</title>", escape(tooltip));
}

}  // namespace

std::string escape(std::string_view text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string shortened(std::string_view text, std::size_t length) {
  std::size_t characters = 0;
  std::size_t cut = 0;  // where the last character that leaves room for "…" ends
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (continues(text[i])) continue;
    if (characters == length - 1) cut = i;
    if (++characters > length) return std::string(text.substr(0, cut)) + "…";
  }
  return std::string(text);
}

double text_width(std::string_view text) {
  return 6.8 * static_cast<double>(text.size() - std::ranges::count_if(text, continues));
}

std::string number(double value) {
  if (std::isnan(value)) return "–";
  if (std::isinf(value)) return value < 0 ? "-∞" : "∞";
  if (value == 0) return "0";
  const double magnitude = std::abs(value);
  if (magnitude < 1e-4 || magnitude >= 1e7) return fmt::format("{:.2g}", value);
  // Round first: 9.996 is 10.0, not 10.00.
  const double step = std::pow(10, std::floor(std::log10(magnitude)) - 2);
  const double rounded = std::round(value / step) * step;
  const int decimals = std::max(0, 2 - static_cast<int>(std::floor(std::log10(std::abs(rounded)) + 1e-9)));
  return fmt::format("{:.{}f}", rounded, decimals);
}

std::string duration(double microseconds) {
  if (microseconds < 1e3) return number(microseconds) + " µs";
  return microseconds < 1e6 ? number(microseconds * 1e-3) + " ms" : number(microseconds * 1e-6) + " s";
}

double Axis::at(double value) const {
  const double v = std::clamp(value, low, high);
  const double t = log ? std::log(v / low) / std::log(high / low) : (v - low) / (high - low);
  return from + t * (to - from);
}

std::vector<double> Axis::ticks() const {
  std::vector<double> all;
  const double room = std::max(2.0, std::abs(to - from) / 60);
  if (!log) {
    const double rough = (high - low) / room;
    const double power = std::pow(10, std::floor(std::log10(rough)));
    double step = 10 * power;
    for (double factor : {5.0, 2.0, 1.0})
      if (factor * power >= rough) step = factor * power;
    for (double i = std::ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; ++i) all.push_back(i * step + 0.0);  // no −0
    return all;
  }
  const double decades = std::log10(high / low);
  const int stride = std::max(1, static_cast<int>(std::ceil(decades / room)));
  for (int e = static_cast<int>(std::floor(std::log10(low))); e <= static_cast<int>(std::ceil(std::log10(high))); ++e)
    for (double factor : {1.0, 2.0, 5.0}) {
      const double value = factor * std::pow(10, e);
      if (factor > 1 && decades * 3 > room) continue;
      if (e % stride == 0 && value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) all.push_back(value);
    }
  return all;
}

Svg::Svg(double width, double height, std::string_view label) {
  out_ = fmt::format(R"(<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">)", width, height, escape(label));
}

void Svg::line(double x1, double y1, double x2, double y2, std::string_view css) {
  out_ += fmt::format(R"(<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>)", x1, y1, x2, y2, css);
}

void Svg::rect(double x, double y, double width, double height, std::string_view css, std::string_view tooltip) {
  out_ += fmt::format(R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="{}">{}</rect>)", x, y,
                      std::max(0.0, width), height, css, title_of(tooltip));
}

void Svg::text(double x, double y, std::string_view content, std::string_view anchor, std::string_view css, double degrees) {
  const std::string turn = degrees == 0 ? "" : fmt::format(" transform=\"rotate({:.1f} {:.1f} {:.1f})\"", degrees, x, y);
  out_ += fmt::format(R"(<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}"{}>{}</text>)", x, y, anchor, css, turn,
                      escape(content));
}

void Svg::path(const std::vector<std::pair<double, double>>& points, std::string_view css) {
  out_ += "<path d=\"";
  for (std::size_t i = 0; i < points.size(); ++i)
    out_ += fmt::format("{}{:.1f} {:.1f}", i ? "L" : "M", points[i].first, points[i].second);
  out_ += fmt::format("\" class=\"{}\"/>", css);
}

void Svg::mark(double x, double y, std::size_t index, std::string_view tooltip) {
  // A disc, square, diamond, triangle, triangle upside down and cross of about the same area.
  static constexpr std::string_view kShapes[kSeries] = {
      "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
      "m-3.6-3.6h7.2v7.2h-7.2z",
      "m0-5l5 5l-5 5l-5-5z",
      "m0-5l4.8 8.4h-9.6z",
      "m0 5l4.8-8.4h-9.6z",
      "m-1.6-4.8h3.2v3.2h3.2v3.2h-3.2v3.2h-3.2v-3.2h-3.2v-3.2h3.2z",
  };
  out_ += fmt::format(R"(<path d="M{:.1f} {:.1f}{}" class="mark s{}">{}</path>)", x, y, kShapes[index % kSeries], index % kSeries,
                      title_of(tooltip));
}

std::string Svg::finish() && { return std::move(out_) + "</svg>"; }

}  // namespace nibble::cli
