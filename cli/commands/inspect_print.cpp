// The outputs of an inspection: text for people, JSON for programs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>

#include "commands/inspect.hpp"
#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

constexpr std::size_t kNotesShown = 20;

std::string_view severity_name(Note::Severity severity) {
  switch (severity) {
    case Note::Severity::info: return "note";
    case Note::Severity::warning: return "warning";
    case Note::Severity::error: return "error";
  }
  return "";
}

Style severity_style(Note::Severity severity) {
  switch (severity) {
    case Note::Severity::info: return Style::dim;
    case Note::Severity::warning: return Style::warn;
    case Note::Severity::error: return Style::bad;
  }
  return Style::plain;
}

// How the config says activations are quantized: "s8r"; "" when not at all.
std::string activations_of(const Module& module) {
  if (!module.claimed || module.claimed->act.codes == DType::none) return "";
  const std::string scheme = module.claimed->name();
  return scheme.substr(0, scheme.find('_'));
}

// The same with known scales: "s8zt, scale 0.0625, zero -3".
std::string activations_text(const InspectedModule& found) {
  std::string text = activations_of(found.module);
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (found.static_acts) {
    add(fmt::format("scale {:.4g}", found.static_acts->scale));
    if (found.static_acts->zero != 0) add(fmt::format("zero {}", found.static_acts->zero));
  }
  if (found.act_limit) add(fmt::format("limit {:g}", *found.act_limit));
  return text;
}

// The claim of the config, when it contradicts the tensors.
std::string conflict(const Module& module) {
  if (!module.claimed) return "";
  const std::string claimed = module.claimed->weight.name();
  return claimed == module.scheme.name() ? "" : claimed;
}

// "2 warnings" for the worst severity present.
Cell notes_cell(const std::vector<Note>& notes) {
  for (Note::Severity severity : {Note::Severity::error, Note::Severity::warning, Note::Severity::info}) {
    std::size_t count = 0;
    for (const Note& note : notes) count += note.severity == severity ? 1 : 0;
    if (count > 0) return {counted(count, severity_name(severity)), severity_style(severity)};
  }
  return "";
}

std::string module_table(const Inspection& inspection, bool colour) {
  using enum Table::Align;
  Table table({{"module"},
               {"format"},
               {"scheme"},
               {"config says"},
               {.title = "activations", .fold = true},
               {"N", right},
               {"K", right},
               {"filter"},
               {"bits/w", right},
               {"size", right},
               {"order"},
               {"SQNR dB", right},
               {"cosine", right},
               {"max error", right},
               {"notes"}});
  const auto basics = [](const Module& m, const std::string& activations, double bits) {
    return std::vector<Cell>{printable(m.name),
                             m.format,
                             m.quantized() ? m.scheme.name() : std::string(name(m.scheme.codes)),
                             {conflict(m), Style::bad},
                             activations,
                             std::to_string(m.n),
                             std::to_string(m.k),
                             m.filter ? fmt::format("{}x{}", m.filter->h, m.filter->w) : "",
                             fmt::format("{:.2f}", bits),
                             human_bytes(static_cast<double>(m.bytes)),
                             m.act_order ? "act-order" : ""};
  };
  for (const InspectedModule& found :
       inspection.summary ? grouped(inspection.modules) : with_experts_together(inspection.modules)) {
    std::string sqnr, cosine, max_error;
    if (found.error) {
      sqnr = std::isinf(found.error->sqnr_db) ? "exact" : fmt::format("{:.1f}", found.error->sqnr_db);
      cosine = fmt::format("{:.6f}", found.error->cosine);
      max_error = fmt::format("{:.2e}", found.error->max_abs);
    }
    std::vector<Cell> row = basics(found.module, activations_text(found), found.bits_per_weight);
    for (Cell cell : {Cell(sqnr), Cell(cosine), Cell(max_error), notes_cell(found.notes)}) row.push_back(std::move(cell));
    table.add(std::move(row));
  }
  if (inspection.modules.empty()) {  // of a float checkpoint, its float modules are of interest
    std::vector<InspectedModule> dense;
    for (const Module& module : inspection.dense) dense.push_back({.module = module});
    for (const InspectedModule& found : inspection.summary ? grouped(dense) : with_experts_together(dense))
      table.add(basics(found.module, "", bits(found.module.scheme.codes)));
  }
  return table.render(colour);
}

// "experts: 48 layers of 128: gate_proj, up_proj, down_proj", a line for each kind of layer.
std::string experts_text(const std::vector<ExpertLayer>& layers) {
  std::map<std::string, std::size_t> kinds;
  for (const ExpertLayer& layer : layers)
    ++kinds[fmt::format("of {}: {}, {}{}", layer.count, fmt::join(layer.gate_up, ", "), layer.down,
                        layer.interleaved ? ", rows of gate and up in turns" : "")];
  std::string text;
  for (const auto& [kind, count] : kinds) text += fmt::format("experts: {} {}\n", counted(count, "layer"), kind);
  return text;
}

std::string totals(const Inspection& inspection) {
  std::string text;
  const bool all_quantized = std::ranges::all_of(inspection.modules, [](const auto& found) { return found.module.quantized(); });
  if (!inspection.modules.empty()) {
    text += fmt::format("{}, {:.1f} M weights in {}: {:.2f} bits per weight\n",
                        counted(inspection.modules.size(), all_quantized ? "quantized module" : "module"),
                        static_cast<double>(inspection.weights()) / 1e6,
                        human_bytes(static_cast<double>(inspection.quantized_bytes)), inspection.mean_bits());
  }
  if (!inspection.dense.empty()) {
    std::map<std::string_view, std::size_t> by_type;
    for (const Module& module : inspection.dense) ++by_type[name(module.scheme.codes)];
    std::string types;
    for (const auto& [type, count] : by_type) types += fmt::format("{}{} {}", types.empty() ? "" : ", ", count, type);
    text += fmt::format("{} not quantized ({}), {}\n", counted(inspection.dense.size(), "module"), types,
                        human_bytes(static_cast<double>(inspection.dense_bytes)));
  }
  text += experts_text(inspection.experts);
  if (inspection.other_tensors > 0) {
    text += fmt::format("{}, {}\n", counted(inspection.other_tensors, "other tensor"),
                        human_bytes(static_cast<double>(inspection.other_bytes)));
  }
  return text;
}

// Notes of a kind are printed once, with the number of modules.
std::string notes_text(const Inspection& inspection, bool colour) {
  std::vector<ModuleNote> all;
  for (const Note& note : inspection.notes) all.push_back({"", note});
  for (const InspectedModule& found : inspection.modules)
    for (const Note& note : found.notes) all.push_back({found.module.name, note});
  const std::vector<Note> notes = group_notes(all);
  std::string text;
  for (const Note& note : std::span(notes).first(std::min(notes.size(), kNotesShown)))
    text += styled(severity_name(note.severity), severity_style(note.severity), colour) + ": " + printable(note.text) + "\n";
  if (notes.size() > kNotesShown) text += fmt::format("… and {} more; --json has them all\n", notes.size() - kNotesShown);
  return text;
}

Json module_json(const Module& module) {
  Json json = {{"name", module.name},
               {"format", module.format},
               {"scheme", module.scheme.name()},
               {"scale_type", name(module.scheme.scale)},
               {"claimed", nullptr},
               {"n", module.n},
               {"k", module.k},
               {"bytes", module.bytes},
               {"act_order", module.act_order},
               {"bias", module.has_bias}};
  if (module.claimed) json["claimed"] = module.claimed->name();
  if (module.filter) json["filter"] = {module.filter->h, module.filter->w};
  if (!module.stack.empty()) json["stack"] = module.stack;
  return json;
}

// Null when nothing is known of them.
Json activations_json(const InspectedModule& found) {
  const std::string scheme = activations_of(found.module);
  Json json;
  if (!scheme.empty()) json["scheme"] = scheme;
  if (found.static_acts) json["static"] = {{"scale", found.static_acts->scale}, {"zero", found.static_acts->zero}};
  if (found.act_limit) json["limit"] = *found.act_limit;
  return json;
}

}  // namespace

std::string inspection_text(const Inspection& inspection, bool colour) {
  std::string text = module_table(inspection, colour);
  text += totals(inspection);
  const std::string notes = notes_text(inspection, colour);
  if (!notes.empty()) text += "\n" + notes;
  if (inspection.added_source) {
    std::vector<AddedErrors> added;
    for (const InspectedModule& found : inspection.modules) {
      if (!found.added.empty()) added.push_back({found.module.name, found.added});
    }
    text += "\n" + added_error_text(added, *inspection.added_source, colour);
  }
  for (const ExplainedShape& shape : inspection.shapes) text += "\n" + explained_text(shape, colour);
  return text;
}

Json notes_json(const std::vector<Note>& notes) {
  Json list = Json::array();
  for (const Note& note : notes) list.push_back({{"severity", severity_name(note.severity)}, {"text", note.text}});
  return list;
}

Json error_json(const QuantError& error) {
  return {{"sqnr_db", error.sqnr_db}, {"cosine", error.cosine}, {"max_abs", error.max_abs}, {"relative_l2", error.relative_l2}};
}

Json inspection_json(const Inspection& inspection) {
  Json modules = Json::array();
  for (const InspectedModule& found : inspection.modules) {
    Json json = module_json(found.module);
    json["bits_per_weight"] = found.bits_per_weight;
    json["readable"] = found.readable.ok();
    if (found.error) json["error"] = error_json(*found.error);
    json["activations"] = activations_json(found);
    if (!found.added.empty()) json["added_error"] = added_error_json(found.added);
    json["notes"] = notes_json(found.notes);
    modules.push_back(json);
  }
  Json dense = Json::array();
  for (const Module& module : inspection.dense) dense.push_back(module_json(module));
  Json json = {{"schema", 1},
               {"path", inspection.path.string()},
               {"totals",
                {{"quantized_modules", inspection.modules.size()},
                 {"quantized_weights", inspection.weights()},
                 {"quantized_bytes", inspection.quantized_bytes},
                 {"bits_per_weight", inspection.mean_bits()},
                 {"dense_modules", inspection.dense.size()},
                 {"dense_bytes", inspection.dense_bytes},
                 {"other_tensors", inspection.other_tensors},
                 {"other_bytes", inspection.other_bytes}}},
               {"notes", notes_json(inspection.notes)},
               {"modules", modules},
               {"dense_modules", dense}};
  if (!inspection.experts.empty()) {
    json["experts"] = Json::array();
    for (const ExpertLayer& layer : inspection.experts)
      json["experts"].push_back({{"name", layer.name},
                                 {"count", layer.count},
                                 {"gate_up", layer.gate_up},
                                 {"down", layer.down},
                                 {"interleaved", layer.interleaved}});
  }
  if (inspection.summary) {
    json["groups"] = Json::array();
    for (const InspectedModule& found : grouped(inspection.modules)) {
      Json& group = json["groups"].emplace_back(module_json(found.module));
      if (found.error) group["worst_error"] = error_json(*found.error);
    }
  }
  if (inspection.added_source) json["added_error_of"] = inspection.added_source->describe();
  if (inspection.shapes.empty()) return json;
  json["shapes"] = Json::array();
  for (const ExplainedShape& shape : inspection.shapes) json["shapes"].push_back(explained_json(shape));
  return json;
}

}  // namespace nibble::cli
