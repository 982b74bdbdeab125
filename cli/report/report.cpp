#include "report/report.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "report/charts.hpp"
#include "report/style.hpp"
#include "report/svg.hpp"
#include "terminal/output.hpp"

namespace nibble::cli {
namespace {

/// All layers timed in one mode at one M, one after the other.
struct Step {
  std::string mode;
  std::int64_t m = 0;
  std::size_t layers = 0;
  double us = 0, ideal_us = 0, gbytes = 0, gflop = 0;  // sums; ideal: at the roofline
  struct Baseline {
    double own_us = 0, us = 0;  // sums over the layers this baseline has, too
  };
  std::map<std::string, Baseline> baselines;

  double tokens_per_s() const { return static_cast<double>(m) / us * 1e6; }
};

/// The modes layers were measured in, in file order; a single one is "".
std::vector<std::string> modes_of(const ReportData& data) {
  std::vector<std::string> modes;
  for (const ReportLayer& layer : data.layers)
    if (std::ranges::find(modes, layer.mode) == modes.end()) modes.push_back(layer.mode);
  return modes;
}

Step step_of(const ReportData& data, const std::string& mode, std::int64_t m) {
  Step step;
  step.mode = mode;
  step.m = m;
  for (const ReportLayer& layer : data.layers) {
    const ReportTiming* t = timing_for(layer, m);
    if (layer.mode != mode || !t || !(t->median_us > 0)) continue;
    ++step.layers;
    step.us += t->median_us;
    step.ideal_us += t->median_us * t->roofline_percent / 100;
    step.gbytes += t->gbytes_per_s * t->median_us * 1e-6;
    step.gflop += t->gflops * t->median_us * 1e-6;
    for (const auto& [name, us] : t->baselines_us) {
      step.baselines[name].own_us += t->median_us;
      step.baselines[name].us += us;
    }
  }
  return step;
}

std::vector<Step> steps_of(const ReportData& data) {
  std::vector<Step> steps;
  for (const std::string& mode : modes_of(data))
    for (std::int64_t m : m_values(data))
      if (Step step = step_of(data, mode, m); step.layers > 0) steps.push_back(std::move(step));
  return steps;
}

// ---------------------------------------------------------------------------------------------------------- headline

std::string tile(std::string_view value, std::string_view what, std::string_view detail, bool bad = false) {
  return fmt::format("<div><b{}>{}</b><span>{}</span><span class=\"sub\">{}</span></div>\n", bad ? " class=\"bad\"" : "",
                     escape(value), escape(what), escape(detail));
}

std::string headline(const ReportData& data, const std::vector<Step>& steps) {
  std::string out;
  if (data.bytes_before > 0 && data.bytes_after > 0)
    out += tile(number(static_cast<double>(data.bytes_before) / static_cast<double>(data.bytes_after)) + "×", "smaller",
                fmt::format("{} → {}", human_bytes(static_cast<double>(data.bytes_before)),
                            human_bytes(static_cast<double>(data.bytes_after))));
  else if (data.bits_per_weight > 0)
    out += tile(number(data.bits_per_weight), "bits per weight", human_bytes(static_cast<double>(data.bytes_after)));

  const ReportLayer* worst = nullptr;
  std::size_t verified = 0, passed = 0;
  double closest = 0;
  for (const ReportLayer& layer : data.layers) {
    if (layer.error && (!worst || layer.error->sqnr_db < worst->error->sqnr_db)) worst = &layer;
    if (!layer.verify) continue;
    ++verified;
    passed += layer.verify->passed;
    closest = std::max(closest, layer.verify->worst_error_over_bound);
  }
  if (worst) out += tile(number(worst->error->sqnr_db) + " dB", "SQNR of the worst layer", worst->name);
  if (verified > 0)
    out += tile(fmt::format("{}/{}", passed, verified), "layers verified",
                fmt::format("largest error {} of its bound", number(closest)), passed < verified);
  if (!steps.empty()) {
    const Step& step = steps.front();
    out += tile(duration(step.us),
                fmt::format("for M={}, {}{}{}", step.m, counted(step.layers, "layer"), step.mode.empty() ? "" : ", ", step.mode),
                fmt::format("at most {} tokens/s", number(step.tokens_per_s())));
    // Only the fastest of several baselines counts.
    const auto fastest =
        std::ranges::min_element(step.baselines, {}, [](const auto& named) { return named.second.us / named.second.own_us; });
    if (fastest != step.baselines.end())
      out += tile(number(fastest->second.us / fastest->second.own_us) + "×", fmt::format("as fast as {}", fastest->first),
                  fmt::format("M={}, the same layers", step.m));
  }
  return out.empty() ? "" : "<div class=\"headline\">\n" + out + "</div>\n";
}

std::string facts(const ReportData& data) {
  std::string out;
  auto add = [&](std::string_view term, const std::string& text) {
    if (!text.empty()) out += fmt::format("<dt>{}</dt><dd>{}</dd>\n", term, escape(text));
  };
  add("Checkpoint", data.checkpoint);
  add("Format", fmt::format("{}", fmt::join(data.formats, ", ")));
  std::string weights;
  const double millions = static_cast<double>(data.parameters) * 1e-6;
  if (millions > 0)
    weights = millions < 1e3 ? number(millions) + " million parameters" : number(millions * 1e-3) + " billion parameters";
  if (data.bits_per_weight > 0)
    weights += fmt::format("{}{} bits per weight", weights.empty() ? "" : ", ", number(data.bits_per_weight));
  add("Weights", weights);
  if (!data.device.cpu_name.empty())
    add("Device", fmt::format("{}, {}, {}", data.device.cpu_name, counted(static_cast<std::size_t>(data.device.cores), "core"),
                              name(data.device.isa)));
  if (data.roofline.read_gbytes_per_s > 0) {
    std::string measured = number(data.roofline.read_gbytes_per_s) + " GB/s read";
    for (Ceiling peak : kAllCeilings)
      if (peak != Ceiling::read && data.roofline[peak] > 0)
        measured += fmt::format(", {} {} in {}", number(data.roofline[peak]), unit_of(peak), name(peak));
    add("Measured", measured + ", with " + counted(static_cast<std::size_t>(data.roofline.threads), "thread"));
  }
  return out.empty() ? "" : "<dl class=\"facts\">\n" + out + "</dl>\n";
}

// ------------------------------------------------------------------------------------------------------------- notes

std::string notes(const ReportData& data) {
  struct Group {
    Note note;
    std::vector<std::string> layers;
  };
  std::vector<Group> groups;
  for (const Note& note : data.notes) groups.push_back({note, {}});
  const std::size_t own = groups.size();
  for (const ReportLayer& layer : data.layers)
    for (const Note& note : layer.notes) {
      auto same = std::find_if(groups.begin() + static_cast<std::ptrdiff_t>(own), groups.end(),
                               [&](const Group& g) { return g.note.severity == note.severity && g.note.text == note.text; });
      if (same == groups.end()) same = groups.insert(groups.end(), {note, {}});
      same->layers.push_back(layer.name);
    }
  if (groups.empty()) return "";
  std::ranges::stable_sort(groups, std::greater{}, [](const Group& g) { return g.note.severity; });

  std::string out = "<h2>Notes</h2>\n<ul class=\"notes\">\n";
  for (const Group& group : groups) {
    const bool error = group.note.severity == Note::Severity::error, warning = group.note.severity == Note::Severity::warning;
    out += fmt::format("<li><b class=\"{}\">{}</b>{}",
                       error     ? "bad"
                       : warning ? "warning"
                                 : "quiet",
                       error     ? "Error"
                       : warning ? "Warning"
                                 : "Note",
                       escape(group.note.text));
    if (group.layers.size() == 1) out += fmt::format(" <span class=\"sub\">({})</span>", escape(group.layers[0]));
    if (group.layers.size() > 1)
      out += fmt::format("<details><summary>{}</summary>{}</details>", counted(group.layers.size(), "layer"),
                         escape(fmt::format("{}", fmt::join(group.layers, ", "))));
    out += "</li>\n";
  }
  return out + "</ul>\n";
}

// ------------------------------------------------------------------------------------------------------------ tables

std::string header(std::string_view what, std::string_view unit = "", std::string_view css = "") {
  return fmt::format("<th{}>{}{}</th>", css.empty() ? "" : fmt::format(" class=\"{}\"", css), escape(what),
                     unit.empty() ? "" : fmt::format("<span class=\"unit\">{}</span>", escape(unit)));
}

std::string cell(std::string_view content, std::string_view css = "") {
  return fmt::format("<td{}>{}</td>", css.empty() ? "" : fmt::format(" class=\"{}\"", css), escape(content));
}

std::string two_lines(std::string_view content, std::string_view below, std::string_view css = "") {
  return fmt::format("<td{}>{}<span class=\"sub\">{}</span></td>", css.empty() ? "" : fmt::format(" class=\"{}\"", css),
                     escape(content), escape(below));
}

std::string step_table(const std::vector<Step>& steps) {
  std::set<std::string> baselines;
  for (const Step& step : steps)
    for (const auto& [name, sums] : step.baselines) baselines.insert(name);
  const bool modes = std::ranges::any_of(steps, [](const Step& step) { return !step.mode.empty(); });
  std::string out = "<div class=\"wide\"><table><thead><tr>" + (modes ? header("Mode", "weights × activations") : "") +
                    header("M", "rows") + header("Layers") + header("Time", "sum of medians") + header("Tokens/s", "at most") +
                    header("Memory", "GB/s") + header("Compute", "Gop/s") + header("Roofline", "%");
  for (const std::string& name : baselines) out += header("Speed-up", "against " + name);
  out += "</tr></thead><tbody>\n";
  for (const Step& step : steps) {
    out += "<tr>" + (modes ? cell(step.mode) : "") + cell(fmt::format("{}", step.m)) + cell(fmt::format("{}", step.layers)) +
           cell(duration(step.us)) + cell(number(step.tokens_per_s())) + cell(number(step.gbytes / step.us * 1e6)) +
           cell(number(step.gflop / step.us * 1e6)) + cell(fmt::format("{:.0f}", step.ideal_us / step.us * 100));
    for (const std::string& name : baselines) {
      const auto it = step.baselines.find(name);
      out += cell(it == step.baselines.end() ? "" : number(it->second.us / it->second.own_us) + "×");
    }
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

std::string layer_table(const ReportData& data) {
  const bool errors = std::ranges::any_of(data.layers, [](const ReportLayer& l) { return l.error.has_value(); });
  const bool verified = std::ranges::any_of(data.layers, [](const ReportLayer& l) { return l.verify.has_value(); });
  const bool added = std::ranges::any_of(data.layers, [](const ReportLayer& l) { return l.verify && l.verify->added_error; });
  const std::vector<std::int64_t> ms = m_values(data);

  std::string out = "<div class=\"scroll\"><table><thead><tr>" + header("Layer", "kernel") + header("N×K") +
                    header("Scheme", "bits/weight", "left");
  if (errors) out += header("SQNR", "dB, cosine") + header("Largest", "error");
  if (verified) out += header("Verified", "error/bound, L2");
  if (added) out += header("Added error", "activations");
  for (std::int64_t m : ms) out += header(fmt::format("M={}", m), "µs, % roofline");
  out += "</tr></thead><tbody>\n";
  for (const ReportLayer& layer : data.layers) {
    out += fmt::format("<tr><td>{}<span class=\"sub\">{}</span></td>", escape(layer.name), escape(layer.kernel));
    out += cell(fmt::format("{}×{}", layer.n, layer.k)) +
           two_lines(layer.mode.empty() ? layer.scheme : layer.mode,
                     layer.bits_per_weight > 0 ? number(layer.bits_per_weight) : "", "left");
    if (const auto& e = layer.error)
      out += two_lines(number(e->sqnr_db), fmt::format("{:.5f}", e->cosine)) + cell(fmt::format("{:.2g}", e->max_abs));
    else if (errors)
      out += cell("") + cell("");
    if (const auto& v = layer.verify)
      out += two_lines((v->passed ? "✓ " : "✗ ") + number(v->worst_error_over_bound), fmt::format("{:.1e}", v->relative_l2),
                       v->passed ? "" : "bad");
    else if (verified)
      out += cell("");
    if (added) {
      const bool known = layer.verify && layer.verify->added_error;
      out += cell(known ? fmt::format("{:.2f} %", 100 * *layer.verify->added_error) : "");
    }
    for (std::int64_t m : ms) {
      const ReportTiming* t = timing_for(layer, m);
      out += t ? two_lines(number(t->median_us), fmt::format("{:.0f} %", t->roofline_percent)) : cell("");
    }
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

// --------------------------------------------------------------------------------------------------------- the words

constexpr std::string_view kTerms = R"html(<h2>How to read this</h2>
<dl class="terms">
<dt>M, N, K</dt><dd>A layer multiplies M rows of activations by a weight of N outputs and K inputs. M=1 is one token being
decoded; large M is a prompt being read, or many users at once.</dd>
<dt>Scheme</dt><dd>The type of a stored code, how its zero is stored (z: an integer for each group), and what shares a scale
(g128: 128 consecutive inputs; c: an output channel). u4b8 codes mean code − 8. Bits per weight count scales and zeros too.</dd>
<dt>SQNR, cosine, largest error</dt><dd>How far the quantized weights are from the original ones. SQNR is the energy of the
weights over the energy of the error: 20 dB means an error of a tenth of the weights in root mean square; each further bit gives
about 6 dB.</dd>
<dt>Verified</dt><dd>The kernel's outputs on random activations against the same product in double precision with the same
quantized weights. The bound is what rounding in the kernel's number formats may cause at worst; a correct kernel stays below 1.
Relative L2 is the error of all outputs together over their size.</dd>
<dt>Time</dt><dd>The median of many runs. The weights are cold: copies are rotated so that they come from memory, as they do
while a model runs, and not from a cache. The time of a step is the sum over the layers shown. It leaves out attention, norms
and sampling, so tokens per second are an upper bound.</dd>
<dt>Roofline</dt><dd>What this machine can do at best, measured on it: a layer can be no faster than reading its weights,
activations and outputs from memory (the slope), nor than doing its 2·M·N·K operations (the level lines): in int8 where the
activations are quantized, too, in bf16 where they are bf16 and the processor has instructions for that, else in f32. The lines are
the best that was measured; the share reached is against the lower of the two ceilings as they were beside each run, because on a
machine shared with others they move. It can pass 100&#160;% where a kernel uses faster instructions than those its line is of, and
where caches shared between runs lift a small layer.</dd>
</dl>
)html";

std::string section(std::string_view title, std::string_view text, const std::string& content) {
  return content.empty() ? "" : fmt::format("<h2>{}</h2>\n<p class=\"sub\">{}</p>\n{}", title, text, content);
}

}  // namespace

std::string render_report(const ReportData& data) {
  const std::vector<Step> steps = steps_of(data);
  const std::string title = data.title.empty() ? "nibble report" : data.title;
  std::string byline = data.version.empty() ? "nibble" : "nibble " + data.version;
  if (!data.commit.empty()) byline += " (" + data.commit + ")";
  if (!data.date.empty()) byline += " · " + data.date;

  std::string out = fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{0}</title>\n<style>{1}</style>\n"
      "</head>\n<body>\n<h1>{0}</h1>\n<p class=\"quiet\">{2}</p>\n",
      escape(title), kReportStyle, escape(byline));
  out += headline(data, steps) + facts(data) + notes(data);
  if (!steps.empty())
    out += section(
        "A step through all layers",
        "The layers one after the other, each with its weights read from memory. Roofline is the share of what this machine "
        "can do at best. More than 100&#160;% is no mistake: a kernel may use faster instructions than those the peak is "
        "measured with, and caches lift small layers.",
        step_table(steps));
  out += section("Roofline", "Each mark is a layer at one M. The closer to its line, the less there is left to gain.",
                 roofline_chart(data));
  out += section("Speed reached",
                 modes_of(data).size() > 1
                     ? "Of what the roofline allows, per mode: the median layer, with a line from the slowest to the fastest."
                     : "Of what the roofline allows, per kind of layer: the median, with a line from the slowest to the fastest.",
                 efficiency_chart(data));
  out += section("Error of the quantized weights", "Signal to quantization noise against the original weights; higher is better.",
                 sqnr_chart(data));
  out += section("Error of the kernels", "Against double precision on the same quantized weights; left of the bound is correct.",
                 kernel_error_chart(data));
  if (!data.layers.empty()) out += section("Layers", counted(data.layers.size(), "layer") + " in file order.", layer_table(data));
  out += kTerms;
  return out + "</body>\n</html>\n";
}

}  // namespace nibble::cli
