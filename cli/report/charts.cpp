#include "report/charts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "report/svg.hpp"

namespace nibble::cli {
namespace {

constexpr double kWidth = 960;
constexpr double kLeastError = 1e-6;  // the place of zero on a logarithmic axis

/// "model.layers.3.mlp.down_proj" → "mlp.down_proj": the path after the last number.
std::string within_block(std::string_view name) {
  std::size_t start = 0, begin = 0;
  while (begin < name.size()) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (end < name.size() && !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos) start = end + 1;
    begin = end + 1;
  }
  return std::string(name.substr(start));
}

std::string last_part(const std::string& name) { return name.substr(name.rfind('.') + 1); }

std::string layer_label(const LayerKind& kind) {
  const std::string name = shortened(kind.name, 36);
  return kind.layers.size() > 1 ? fmt::format("{} ×{}", name, kind.layers.size()) : name;
}

/// Room for the labels left of a chart with a row per kind.
double label_room(const std::vector<LayerKind>& kinds) {
  double widest = 0;
  for (const LayerKind& kind : kinds) widest = std::max(widest, text_width(layer_label(kind)));
  return widest + 20;
}

std::string figure(std::string_view css, std::string svg) { return fmt::format("<div class=\"{}\">{}</div>\n", css, svg); }

/// Grid lines and labels of a horizontal axis at the bottom of a plot that spans [top, bottom].
void draw_x_axis(Svg& svg, const Axis& x, double top, double bottom, std::string_view title) {
  for (double tick : x.ticks()) {
    svg.line(x.at(tick), top, x.at(tick), bottom, "grid");
    svg.text(x.at(tick), bottom + 18, fmt::format("{:g}", tick), "middle", "tick");
  }
  svg.text((x.from + x.to) / 2, bottom + 38, title, "middle", "axis");
}

void draw_y_axis(Svg& svg, const Axis& y, double left, double right) {
  for (double tick : y.ticks()) {
    svg.line(left, y.at(tick), right, y.at(tick), "grid");
    svg.text(left - 8, y.at(tick) + 4, fmt::format("{:g}", tick), "end", "tick");
  }
}

struct Point {
  double x, y;
  std::size_t series;
  std::string tooltip;
};

/// "memory ceiling", "int8 peak".
std::string limit_name(Ceiling ceiling) {
  return ceiling == Ceiling::read ? "memory ceiling" : std::string(name(ceiling)) + " peak";
}

std::vector<Point> roofline_points(const ReportData& data, const std::vector<std::int64_t>& ms) {
  std::vector<Point> points;
  for (std::size_t i = ms.size(); i-- > 0;)  // few rows last: decoding is what most people look for
    for (const ReportLayer& layer : data.layers) {
      const ReportTiming* t = timing_for(layer, ms[i]);
      if (!t || !(t->gflops > 0) || !(t->gbytes_per_s > 0)) continue;
      points.push_back(
          {t->gflops / t->gbytes_per_s, t->gflops, i,
           fmt::format("{}{}{}\nM={}: {}, {} GB/s, {} {}, {:.0f} % of the {}", layer.name, layer.mode.empty() ? "" : ", ",
                       layer.mode, t->m, duration(t->median_us), number(t->gbytes_per_s), number(t->gflops), unit_of(t->peak),
                       t->roofline_percent, limit_name(t->ceiling))});
    }
  return points;
}

}  // namespace

std::vector<LayerKind> kinds_of(const ReportData& data) {
  std::vector<LayerKind> kinds;
  for (const ReportLayer& layer : data.layers) {
    std::string name = layer.mode.empty() ? within_block(layer.name) : layer.mode;
    auto kind = std::ranges::find(kinds, name, &LayerKind::name);
    if (kind == kinds.end()) kind = kinds.insert(kinds.end(), {std::move(name), {}});
    kind->layers.push_back(&layer);
  }
  std::set<std::string> last_parts;
  for (const LayerKind& kind : kinds) last_parts.insert(last_part(kind.name));
  if (last_parts.size() == kinds.size())
    for (LayerKind& kind : kinds) kind.name = last_part(kind.name);
  return kinds;
}

std::vector<std::int64_t> m_values(const ReportData& data) {
  std::set<std::int64_t> ms;
  for (const ReportLayer& layer : data.layers)
    for (const ReportTiming& timing : layer.timings) ms.insert(timing.m);
  return {ms.begin(), ms.end()};
}

const ReportTiming* timing_for(const ReportLayer& layer, std::int64_t m) {
  const auto it = std::ranges::find(layer.timings, m, &ReportTiming::m);
  return it == layer.timings.end() ? nullptr : &*it;
}

std::vector<Ceiling> peaks_of(const ReportData& data) {
  std::set<Ceiling> used;
  for (const ReportLayer& layer : data.layers)
    for (const ReportTiming& timing : layer.timings)
      if (data.roofline[timing.peak] > 0) used.insert(timing.peak);
  std::vector<Ceiling> peaks(used.begin(), used.end());
  std::ranges::stable_sort(peaks, {}, [&](Ceiling peak) { return data.roofline[peak]; });
  return peaks;
}

std::string_view unit_of(Ceiling ceiling) {
  return ceiling == Ceiling::read ? "GB/s" : ceiling == Ceiling::int8 ? "Gop/s" : "GFLOP/s";
}

std::string m_legend(const std::vector<std::int64_t>& ms) {
  std::string out = "<p class=\"legend\">";
  for (std::size_t i = 0; i < ms.size(); ++i) {
    Svg mark(12, 12, "");
    mark.mark(6, 6, i, "");
    out += fmt::format("<span>{} M={}</span>", std::move(mark).finish(), ms[i]);
  }
  return out + "</p>\n";
}

std::string roofline_chart(const ReportData& data) {
  const std::vector<std::int64_t> ms = m_values(data);
  const std::vector<Point> points = roofline_points(data, ms);
  if (points.empty()) return "";
  const double slope = data.roofline.read_gbytes_per_s;
  const std::vector<Ceiling> peaks = peaks_of(data);
  const bool measured = slope > 0 && !peaks.empty();

  double left = points[0].x, right = left, low = points[0].y, high = low;
  for (const Point& p : points) {
    left = std::min(left, p.x);
    right = std::max(right, p.x);
    low = std::min(low, p.y);
    high = std::max(high, p.y);
  }
  if (measured) {  // show both parts of every roof
    const double lowest = data.roofline[peaks.front()], highest = data.roofline[peaks.back()];
    left = std::min(left, lowest / slope / 4);
    right = std::max(right, highest / slope * 4);
    low = std::min(low, slope * left);
    high = std::max(high, highest);
  }
  std::vector<std::string> labels;  // right of the lines, beyond all marks
  double label_width = 0;
  for (Ceiling peak : peaks) {
    labels.push_back(fmt::format("{} {} {}", name(peak), number(data.roofline[peak]), unit_of(peak)));
    label_width = std::max(label_width, text_width(labels.back()) + 8);
  }
  const double height = 460;
  const Axis x{left / 1.4, right * 1.4, true, 64, kWidth - 16 - (measured ? label_width : 0)};
  const Axis y{low / 1.6, high * 1.6, true, height - 56, 12};

  Svg svg(kWidth, height, "Roofline: arithmetic intensity against speed, one mark per layer and M");
  draw_y_axis(svg, y, x.from, x.to);
  draw_x_axis(svg, x, y.to, y.from, "arithmetic intensity, operations per byte of weights, activations and outputs");
  const bool integers = std::ranges::find(peaks, Ceiling::int8) != peaks.end();
  svg.text(16, (y.from + y.to) / 2, integers ? "Gop/s" : "GFLOP/s", "middle", "axis", -90);
  if (measured) {
    const double start = std::max(x.low, y.low / slope), highest = data.roofline[peaks.back()];
    svg.path({{x.at(start), y.at(start * slope)}, {x.at(highest / slope), y.at(highest)}}, "roof");
    const double lowest = data.roofline[peaks.front()];
    const double x1 = x.at(start), y1 = y.at(start * slope), x2 = x.at(lowest / slope), y2 = y.at(lowest);
    const double degrees = std::atan2(y2 - y1, x2 - x1) * 180 / std::acos(-1.0);
    svg.text((x1 + x2) / 2 - 6, (y1 + y2) / 2 - 8, fmt::format("memory {} GB/s", number(slope)), "middle", "rooftext", degrees);
    double below = y.from;  // peaks that are close together have their names apart
    for (std::size_t i = 0; i < peaks.size(); ++i) {
      const double value = data.roofline[peaks[i]];
      svg.path({{x.at(value / slope), y.at(value)}, {x.to, y.at(value)}}, "roof");
      below = std::min(y.at(value), below - 15);
      svg.text(x.to + 8, below + 4, labels[i], "start", "rooftext");
    }
  }
  for (const Point& p : points) svg.mark(x.at(p.x), y.at(p.y), p.series, p.tooltip);
  return m_legend(ms) + figure("wide", std::move(svg).finish());
}

std::string efficiency_chart(const ReportData& data) {
  const std::vector<std::int64_t> ms = m_values(data);
  const std::vector<LayerKind> kinds = kinds_of(data);
  double most = 100;
  std::size_t bars = 0, groups = 0;
  for (const LayerKind& kind : kinds) {
    std::set<std::int64_t> timed;
    for (const ReportLayer* layer : kind.layers)
      for (const ReportTiming& t : layer->timings) {
        if (!std::isfinite(t.roofline_percent)) continue;
        timed.insert(t.m);
        most = std::max(most, t.roofline_percent);
      }
    bars += timed.size();
    groups += !timed.empty();
  }
  if (bars == 0) return "";

  const double bar = 10, pitch = 16, gap = 14;
  const double bottom = 8 + static_cast<double>(bars) * pitch + static_cast<double>(groups) * gap;
  const Axis x{0, most, false, label_room(kinds), kWidth - 226};
  Svg svg(kWidth, bottom + 44, "Share of the roofline reached, per kind of layer and M");
  draw_x_axis(svg, x, 4, bottom, "% of the roofline");
  double top = 8;
  for (const LayerKind& kind : kinds) {
    const double first = top;
    for (std::size_t i = 0; i < ms.size(); ++i) {
      std::vector<const ReportTiming*> timings;
      for (const ReportLayer* layer : kind.layers)
        if (const ReportTiming* t = timing_for(*layer, ms[i]); t && std::isfinite(t->roofline_percent)) timings.push_back(t);
      if (timings.empty()) continue;
      std::ranges::sort(timings, {}, &ReportTiming::roofline_percent);
      const ReportTiming& t = *timings[(timings.size() - 1) / 2];  // the middle layer represents its kind
      const double least = timings.front()->roofline_percent, greatest = timings.back()->roofline_percent;
      const double share = t.roofline_percent, achieved = t.ceiling == Ceiling::read ? t.gbytes_per_s : t.gflops;
      svg.rect(x.at(0), top, x.at(100) - x.at(0), bar, "track");
      svg.rect(x.at(0), top, x.at(share) - x.at(0), bar, fmt::format("s{}", i % kSeries),
               fmt::format("{}, M={}: median {:.0f} %, {:.0f} to {:.0f} %, of the {}", kind.name, ms[i], share, least, greatest,
                           limit_name(t.ceiling)));
      if (timings.size() > 1) svg.line(x.at(least), top + bar / 2, x.at(greatest), top + bar / 2, "whisker");
      svg.text(x.to + 44, top + bar - 0.5, fmt::format("{:.0f} %", share), "end", "value");
      if (share > 0)
        svg.text(x.to + 54, top + bar - 0.5,
                 fmt::format("{} of {} {}{}", number(achieved), number(achieved / share * 100), unit_of(t.ceiling),
                             t.ceiling == Ceiling::read ? "" : fmt::format(" {}", name(t.ceiling))),
                 "start", "tick");
      top += pitch;
    }
    if (top == first) continue;
    svg.text(x.from - 12, (first + top - (pitch - bar)) / 2 + 4, layer_label(kind), "end", "label");
    top += gap;
  }
  return m_legend(ms) + figure("wide", std::move(svg).finish());
}

namespace {

struct Value {
  const ReportLayer* layer;
  double value;
};
struct ValueRow {
  const LayerKind* kind;
  std::vector<Value> values;
};

template <class Get>
std::vector<ValueRow> value_rows(const std::vector<LayerKind>& kinds, Get get) {
  std::vector<ValueRow> rows;
  for (const LayerKind& kind : kinds) {
    ValueRow row{&kind, {}};
    for (const ReportLayer* layer : kind.layers)
      if (const std::optional<double> value = get(*layer); value && !std::isnan(*value)) row.values.push_back({layer, *value});
    if (!row.values.empty()) rows.push_back(std::move(row));
  }
  return rows;
}

/// A row per kind and a mark per layer.
std::string row_chart(const std::vector<LayerKind>& kinds, const std::vector<ValueRow>& rows, Axis x, std::string_view title,
                      std::optional<double> limit, const auto& describe) {
  const double pitch = 26, top = limit ? 24 : 8, bottom = top + pitch * static_cast<double>(rows.size());
  x.from = label_room(kinds);
  x.to = kWidth - 80;
  Svg svg(kWidth, bottom + 44, title);
  draw_x_axis(svg, x, top, bottom, title);
  if (limit) {
    svg.line(x.at(*limit), top, x.at(*limit), bottom, "limit");
    svg.text(x.at(*limit), top - 8, "bound", "middle", "rooftext");
  }
  double y = top + pitch / 2;
  for (const ValueRow& row : rows) {
    svg.text(x.from - 12, y + 4, layer_label(*row.kind), "end", "label");
    const auto [least, greatest] = std::ranges::minmax(row.values, {}, &Value::value);
    if (!x.log) svg.line(x.from, y, x.at(least.value), y, "stem");  // a logarithmic axis has no zero to start from
    svg.line(x.at(least.value), y, x.at(greatest.value), y, "stem");
    for (const Value& v : row.values) svg.mark(x.at(v.value), y, 0, describe(v));
    const std::string text = number(least.value) == number(greatest.value)
                                 ? number(least.value)
                                 : fmt::format("{} to {}", number(least.value), number(greatest.value));
    svg.text(kWidth - 4, y + 4, text, "end", "value");
    y += pitch;
  }
  return figure("wide", std::move(svg).finish());
}

std::string describe_sqnr(const Value& v) {
  return fmt::format("{}: {} dB, cosine {:.5f}", v.layer->name, number(v.value), v.layer->error->cosine);
}

/// One small picture per kind on a common scale, left to right in file order: shows which depth suffers.
std::string sqnr_panels(const std::vector<ValueRow>& rows, double low, double high, const ReportLayer* worst) {
  const double width = 300, height = 132;
  std::string out = "<div class=\"panels\">\n";
  for (const ValueRow& row : rows) {
    const double last = static_cast<double>(row.values.size() - 1);
    const Axis x{0, std::max(1.0, last), false, 40, width - 10};
    const Axis y{low, high, false, height - 22, 8};
    Svg svg(width, height, "SQNR of " + row.kind->name + " in dB, in file order");
    draw_y_axis(svg, y, 32, width - 4);
    std::vector<std::pair<double, double>> points;
    for (std::size_t i = 0; i < row.values.size(); ++i)
      points.emplace_back(x.at(static_cast<double>(i)), y.at(row.values[i].value));
    svg.path(points, "trend");
    for (std::size_t i = 0; i < points.size(); ++i)
      svg.mark(points[i].first, points[i].second, row.values[i].layer == worst ? 5 : 0, describe_sqnr(row.values[i]));
    svg.text(x.from, height - 4, "first", "middle", "tick");
    if (last > 0) svg.text(x.to, height - 4, "last", "end", "tick");
    const auto [least, greatest] = std::ranges::minmax(row.values, {}, &Value::value);
    out += fmt::format("<figure><figcaption><b>{}</b> {} to {} dB</figcaption>{}</figure>\n", escape(layer_label(*row.kind)),
                       number(least.value), number(greatest.value), std::move(svg).finish());
  }
  out += "</div>\n";
  if (worst) out += fmt::format("<p class=\"sub\">The cross is the worst layer, {}.</p>\n", escape(worst->name));
  return out;
}

}  // namespace

std::string sqnr_chart(const ReportData& data) {
  const std::vector<LayerKind> kinds = kinds_of(data);
  const std::vector<ValueRow> rows = value_rows(
      kinds, [](const ReportLayer& layer) { return layer.error ? std::optional(layer.error->sqnr_db) : std::nullopt; });
  if (rows.empty()) return "";
  double low = INFINITY, high = -INFINITY;
  const ReportLayer* worst = nullptr;
  std::size_t most = 0;
  for (const ValueRow& row : rows) {
    most = std::max(most, row.values.size());
    for (const Value& v : row.values) {
      if (v.value < low) worst = v.layer;
      if (!std::isfinite(v.value)) continue;  // exact layers are drawn at the top
      low = std::min(low, v.value);
      high = std::max(high, v.value);
    }
  }
  if (!(low <= high)) low = high = 0;
  if (most > 2) return sqnr_panels(rows, std::floor(low - 1), std::ceil(high + 1), worst);
  return row_chart(kinds, rows, {std::min(0.0, low), std::max(10.0, std::ceil(high * 1.05)), false, 0, 0}, "SQNR, dB", {},
                   describe_sqnr);
}

std::string kernel_error_chart(const ReportData& data) {
  const std::vector<LayerKind> kinds = kinds_of(data);
  const std::vector<ValueRow> rows = value_rows(kinds, [](const ReportLayer& layer) {
    return layer.verify ? std::optional(std::max(kLeastError, layer.verify->worst_error_over_bound)) : std::nullopt;
  });
  if (rows.empty()) return "";
  double low = 0.1, high = 2;
  for (const ValueRow& row : rows)
    for (const Value& v : row.values) {
      low = std::min(low, v.value / 2);
      if (std::isfinite(v.value)) high = std::max(high, v.value * 2);
    }
  return row_chart(kinds, rows, {low, high, true, 0, 0}, "largest error of an output, as a share of what rounding may cause", 1.0,
                   [](const Value& v) {
                     return fmt::format("{}: {} of the bound, relative error {:.2g}{}", v.layer->name,
                                        number(v.layer->verify->worst_error_over_bound), v.layer->verify->relative_l2,
                                        v.layer->verify->passed ? "" : ", FAILED");
                   });
}

}  // namespace nibble::cli
