// nibble pack: the packed weights of a checkpoint in a file; and what inspect and verify say of such files.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <type_traits>

#include "commands/commands.hpp"
#include "commands/inspect.hpp"
#include "commands/option_checks.hpp"
#include "commands/packed.hpp"
#include "terminal/output.hpp"
#include "terminal/progress.hpp"
#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

struct Options {
  std::filesystem::path in, out;
  std::string layer, backend = "cpu", gpu, layout, a_dtype = "f32", out_dtype, activations, accumulation = "fast", json;
  std::int64_t m_max = 8192;
  bool force = false, dense = false;
};

// "s8r"; "" of activations that are not quantized.
std::string act_scheme_text(const ActScheme& act, const WeightDesc& weight) {
  if (act.codes == DType::none) return "";
  const std::string scheme = Scheme{weight.scheme, act}.name();
  return scheme.substr(0, scheme.find('_'));
}

// What a weight was packed for: "f16 as s8r, M up to 512".
std::string spec_text(const PackedModule& module) {
  return std::visit(
      [&](const auto& spec) {
        const std::string act = act_scheme_text(spec.act_scheme, module.desc);
        std::string text = fmt::format("{}{}", name(spec.a_dtype), act.empty() ? "" : " as " + act);
        if constexpr (std::is_same_v<std::decay_t<decltype(spec)>, LinearSpec>)
          return text + fmt::format(", M up to {}", spec.m_max);
        else
          return text + fmt::format(", up to {} images of {}x{}", spec.batch_max, spec.geometry.height, spec.geometry.width);
      },
      module.spec);
}

Json spec_json(const PackedModule& module) {
  return std::visit(
      [&](const auto& spec) {
        Json json = {{"a_dtype", name(spec.a_dtype)},
                     {"act_scheme", act_scheme_text(spec.act_scheme, module.desc)},
                     {"out", name(spec.epilogue.out)}};
        if constexpr (std::is_same_v<std::decay_t<decltype(spec)>, LinearSpec>)
          json["m_max"] = spec.m_max;
        else
          json["batch_max"] = spec.batch_max, json["image"] = {spec.geometry.height, spec.geometry.width};
        return json;
      },
      module.spec);
}

std::string modules_text(const PackedFile& file, const Pattern& layer, bool colour) {
  using enum Table::Align;
  Table table({{"module"},
               {.title = "scheme", .fold = true},
               {"N", right},
               {"K", right},
               {"filter"},
               {.title = "order", .fold = true},
               {.title = "layout", .fold = true},
               {.title = "packed for", .fold = true},
               {"size", right}});
  std::size_t count = 0;
  double bytes = 0;
  for (const PackedModule& module : file.modules()) {
    if (!layer.search(module.name)) continue;
    const Extent filter = module.desc.filter;
    table.add({printable(module.name), module.desc.scheme.name(), std::to_string(module.desc.n), std::to_string(module.desc.k),
               filter == Extent{} ? "" : fmt::format("{}x{}", filter.h, filter.w), module.desc.act_order ? "act-order" : "",
               std::string(module.layout), spec_text(module), human_bytes(static_cast<double>(module.bytes))});
    ++count;
    bytes += static_cast<double>(module.bytes);
  }
  return table.render(colour) + fmt::format("{}: {}, {}, packed by nibble {}{}\n", file.path().string(),
                                            counted(count, "packed weight"), human_bytes(bytes),
                                            printable(file.library_version()),
                                            file.checkpoint().empty() ? "" : " from " + printable(file.checkpoint()));
}

Json modules_json(const PackedFile& file, const Pattern& layer) {
  Json modules = Json::array();
  for (const PackedModule& module : file.modules()) {
    if (!layer.search(module.name)) continue;
    Json& json = modules.emplace_back();
    json = {{"name", module.name},
            {"scheme", module.desc.scheme.name()},
            {"scale_type", name(module.desc.scheme.scale)},
            {"n", module.desc.n},
            {"k", module.desc.k},
            {"layout", module.layout},
            {"packed_for", spec_json(module)},
            {"bytes", module.bytes},
            {"act_order", module.desc.act_order},
            {"bias", module.has_bias}};
    if (module.desc.filter != Extent{}) json["filter"] = {module.desc.filter.h, module.desc.filter.w};
  }
  return {{"schema", 1},
          {"path", file.path().string()},
          {"library_version", file.library_version()},
          {"checkpoint", file.checkpoint()},
          {"modules", modules}};
}

// The findings about the checkpoint that lies beside the file, if it is there.
std::vector<Note> beside(const PackedFile& file) {
  std::error_code ignored;
  const std::filesystem::path name = file.checkpoint(), path = file.path().parent_path() / name;
  if (name.empty() || name.has_parent_path() || !std::filesystem::exists(path, ignored)) return {};
  const auto checkpoint = Checkpoint::open(path);
  if (!checkpoint.ok()) return {{Note::Severity::warning, checkpoint.status().message()}};
  return group_notes(file.compare(*checkpoint));
}

Result<GpuInfo> gpu_of(const Options& options) { return options.gpu.empty() ? this_gpu() : described_gpu(options.gpu); }

// Whether the layout depends on a GPU; else it is that of --weight-layout, or pack() chooses.
bool asks_for_layout(const Options& options) {
  return options.layout.empty() && (!options.gpu.empty() || options.backend != "cpu");
}

// The layout that the GPU's kernels read.
Result<std::string> layout_for(const Options& options, const WeightDesc& weight, const LinearSpec& spec) {
  const auto gpu = gpu_of(options);
  if (!gpu.ok()) return gpu.status();
  const auto explanation = explain(weight, spec, Machine(*gpu));
  if (!explanation.ok()) return explanation.status();
  return std::string(explanation->layout);
}

Result<Outcome> pack_command(Options options) {
  const auto layer = compile_pattern("--layer", options.layer);
  if (!layer.ok()) return layer.status();
  const auto asked = parse_asked_activations(options.activations);
  if (!asked.ok()) return asked.status();
  if (Status usable = check_backend(options.backend); !usable.ok()) return usable;
  const auto checkpoint = Checkpoint::open(options.in);
  if (!checkpoint.ok()) return checkpoint.status();
  if (options.out.empty()) options.out = packed_path(options.in);

  std::vector<const Module*> modules;
  std::vector<std::string> names;
  std::size_t convs = 0;
  for (const Module& module : checkpoint->modules()) {
    if ((!module.quantized() && !options.dense) || !layer->search(module.name)) continue;
    if (module.filter) {
      ++convs;
      continue;
    }
    modules.push_back(&module);
    names.push_back(module.name);
  }
  // A file beside a checkpoint stands for all of it, unless --layer says otherwise.
  if (options.layer.empty() || modules.empty())
    if (Status readable = usable_whole(*checkpoint); !readable.ok()) return readable.with_context(options.in.string());
  if (modules.empty())
    return Status(StatusCode::invalid_argument,
                  fmt::format("{} has no {}linear layer{}", options.in.string(), options.dense ? "" : "quantized ",
                              options.layer.empty() ? " to pack; nibble quantize makes some, --dense packs others"
                                                    : " whose name matches --layer; see nibble inspect"));
  LinearSpec spec{.a_dtype = parse_dtype(options.a_dtype).value_or(DType::f32),
                  .m_max = options.m_max,
                  .accumulation = parse_accumulation(options.accumulation)};
  spec.epilogue.out = parse_dtype(options.out_dtype).value_or(spec.a_dtype);
  std::vector<ModuleNote> notes;
  {
    Interruptible interruptible;
    ProgressBar bar("packing");
    const Progress progress = bar.callback();
    auto writer = PackedFileWriter::create(options.out, names, {.overwrite = options.force, .checkpoint = &*checkpoint});
    if (!writer.ok()) return with_force_hint(writer.status());
    const auto pack_module = [&](const Module& module) -> Status {
      std::vector<Note> found;
      spec.act_scheme = activations_for(module, *asked);
      spec.epilogue.bias = module.has_bias;
      PackOptions packing{.layout = options.layout, .executor = &interruptible.executor()};
      if (asks_for_layout(options)) {
        const auto q = checkpoint->read(module);
        if (!q.ok()) return q.status();
        const auto layout = layout_for(options, describe(*q), spec);
        if (!layout.ok()) return with_activations_hint(layout.status(), spec.act_scheme, *asked);
        packing.layout = *layout;
      }
      const auto weight = pack(*checkpoint, module, spec, packing, &found);
      for (Note& note : found) notes.push_back({module.name, std::move(note)});
      if (!weight.ok()) return with_activations_hint(weight.status(), spec.act_scheme, *asked);
      return writer->add(module.name, *weight);
    };
    for (std::size_t i = 0; i < modules.size(); ++i) {
      progress(i, modules.size(), modules[i]->name);
      if (Status added = pack_module(*modules[i]); !added.ok()) {
        Interruptible::check();  // a loop that ended early is a failure, too
        return added.with_context(modules[i]->name);
      }
    }
    progress(modules.size(), modules.size(), "");
    if (Status finished = writer->finish(); !finished.ok()) return with_force_hint(finished);
  }
  if (convs > 0)
    notes.push_back({"",
                     {Note::Severity::info,
                      fmt::format("{} left out: only the model knows the images of a convolution; pack them with the library",
                                  counted(convs, "convolution"))}});
  const auto file = PackedFile::open(options.out);
  if (!file.ok()) return file.status();
  const Pattern all = *Pattern::compile("");
  const std::vector<Note> grouped = group_notes(notes);
  const auto text = [&] {
    std::string result = modules_text(*file, all, wants_colour(stdout));
    for (const Note& note : grouped) result += printable(note.text) + "\n";
    return result;
  };
  const auto document = [&] {
    Json json = modules_json(*file, all);
    json["notes"] = notes_json(grouped);
    return json;
  };
  if (Status written = print_result(options.json, text, document); !written.ok()) return written;
  return Outcome::ok;
}

}  // namespace

Result<Outcome> inspect_packed(const std::filesystem::path& path, const Pattern& layer, const std::string& json) {
  const auto file = PackedFile::open(path);
  if (!file.ok()) return file.status();
  const std::vector<Note> notes = beside(*file);
  const auto text = [&] {
    std::string result = modules_text(*file, layer, wants_colour(stdout));
    for (const Note& note : notes) result += fmt::format("warning: {}\n", printable(note.text));
    return result;
  };
  const auto document = [&] {
    Json all = modules_json(*file, layer);
    all["notes"] = notes_json(notes);
    return all;
  };
  if (Status written = print_result(json, text, document); !written.ok()) return written;
  return Outcome::ok;
}

Result<Outcome> verify_packed(const Checkpoint& checkpoint, const std::filesystem::path& path, const Pattern& layer,
                              const std::string& json) {
  const auto file = PackedFile::open(path);
  if (!file.ok()) return file.status();
  std::vector<std::pair<std::string, std::string>> results;  // the name of a module, and how it differs
  std::size_t failed = 0;
  ProgressBar progress("verifying");
  for (const PackedModule& packed : file->modules()) {
    if (!layer.search(packed.name)) continue;
    progress.update(results.size(), file->modules().size(), packed.name);
    const Module* module = checkpoint.find_module(packed.name);
    std::string difference = "the checkpoint has no such module";
    if (module != nullptr) {
      const auto weight = file->load(packed.name);
      if (!weight.ok()) return weight.status();
      const auto back = unpack(*weight), q = checkpoint.read(*module);
      for (const auto* each : {&back, &q})
        if (!each->ok()) return each->status().with_context(packed.name);
      difference = *back == *q ? "" : "differs from the checkpoint";
    }
    failed += difference.empty() ? 0 : 1;
    results.emplace_back(packed.name, std::move(difference));
  }
  if (results.empty())
    return Status(StatusCode::invalid_argument, fmt::format("{} has no packed weight whose name matches --layer", path.string()));
  const auto text = [&] {
    std::string lines;
    for (const auto& [name, difference] : results)
      if (!difference.empty()) lines += fmt::format("{}: {}\n", printable(name), difference);
    const bool colour = wants_colour(stdout);
    lines +=
        failed == 0 ? styled("all the same", Style::good, colour) : styled(fmt::format("{} failed", failed), Style::bad, colour);
    return lines + fmt::format(": {} of {} compared with {}, bit for bit\n", counted(results.size(), "packed weight"),
                               path.string(), checkpoint.path().string());
  };
  const auto document = [&] {
    Json list = Json::array();
    for (const auto& [name, difference] : results) {
      Json& each = list.emplace_back(Json{{"name", name}, {"passed", difference.empty()}});
      if (!difference.empty()) each["failure"] = difference;
    }
    return Json{{"schema", 1},
                {"path", checkpoint.path().string()},
                {"packed", path.string()},
                {"passed", failed == 0},
                {"results", list}};
  };
  if (Status written = print_result(json, text, document); !written.ok()) return written;
  return failed == 0 ? Outcome::ok : Outcome::failed;
}

void add_pack(CLI::App& app, Action& action) {
  CLI::App* command = add_command(
      app, "pack", "Pack the quantized linear layers of a checkpoint into a file, which programs map instead of packing",
      "  nibble pack model-awq/ --a-dtype f16 --m-max 512\n"
      "  nibble pack model-awq/ model-h100.nibble --gpu h100 --a-dtype f16");
  auto options = std::make_shared<Options>();
  command->add_option("IN", options->in, "Checkpoint: a directory or one .safetensors file")->required();
  command->add_option("OUT", options->out, "What to write: a file (default: MODEL.nibble beside MODEL or MODEL.safetensors)");
  command->add_option("--layer", options->layer, "Only modules whose name matches this regular expression")->type_name("REGEX");
  add_dense(*command, options->dense);
  add_act(*command, options->a_dtype);
  command->add_option("--out", options->out_dtype, "Type of outputs: f32, f16 or bf16 (default: that of the activations)")
      ->check(one_of({"f32", "f16", "bf16"}))
      ->type_name("TYPE");
  add_activations(*command, options->activations,
                  "Quantize activations while running (default: as the checkpoint says; none: leave them as they are)");
  add_accumulation(*command, options->accumulation);
  command->add_option("--m-max", options->m_max, "The most rows of activations in a run")
      ->check(between(1, 1 << 20))
      ->type_name("M")
      ->capture_default_str();
  add_backend(*command, options->backend);
  const std::vector<std::string_view> gpus = described_gpus();
  command->add_option("--gpu", options->gpu, "Pack for this GPU, which need not be there; in place of --backend")
      ->check(one_of({gpus.begin(), gpus.end()}))
      ->type_name("NAME")
      ->excludes("--backend");
  command->add_option("--weight-layout", options->layout, "Pack in this layout (names: nibble doctor --layouts)")
      ->type_name("NAME");
  command->add_flag("--force", options->force, "Replace OUT if it is a file");
  add_json(*command, options->json);
  command->callback([options, &action] { action = [options] { return pack_command(*options); }; });
}

}  // namespace nibble::cli
