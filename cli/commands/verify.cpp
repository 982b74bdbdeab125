// nibble verify: every quantized layer of a checkpoint, packed, run and compared with the oracle.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <set>

#include "commands/commands.hpp"
#include "commands/inspect.hpp"
#include "commands/option_checks.hpp"
#include "commands/packed.hpp"
#include "commands/shapes.hpp"
#include "commands/verify.hpp"
#include "terminal/output.hpp"
#include "terminal/progress.hpp"
#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

struct Options {
  std::filesystem::path path, packed;
  std::string layer, backend = "cpu", a_dtype = "f32", out, activations, kernel, image = "5x7", layout = "nchw";
  std::string accumulation = "fast";
  std::vector<std::int64_t> m = {1, 16};
  std::uint64_t seed = 1;
  std::int64_t sample_columns = 0, experts = kSampledExperts;
  float outliers = 1.0f;
  int threads = 0;
  bool dense = false;
  std::string json;
};

// A regular expression that matches only `name`.
std::string exactly(std::string_view name) {
  std::string pattern = "^";
  for (char c : name) {
    if (std::string_view(R"(\^$.|?*+()[]{})").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return pattern + "$";
}

// The command that repeats one failed check.
std::string repeat_command(const Options& options, const VerifiedLayer& layer) {
  std::string command = fmt::format("nibble verify {} --layer '{}' -M {} --a-dtype {} --seed {}", options.path.string(),
                                    exactly(layer.name), layer.m, options.a_dtype, options.seed);
  if (options.dense) command += " --dense";
  if (options.backend != "cpu") command += " --backend " + options.backend;
  if (!options.out.empty()) command += " --out " + options.out;
  if (!options.activations.empty()) command += " --act-scheme " + options.activations;
  if (options.accumulation != "fast") command += " --accumulation " + options.accumulation;
  if (!options.kernel.empty()) command += " --kernel " + options.kernel;
  if (options.image != "5x7") command += " --image " + options.image;
  if (options.layout != "nchw") command += " --image-layout " + options.layout;
  if (options.outliers != 1.0f) command += fmt::format(" --outliers {}", options.outliers);
  if (options.sample_columns > 0) command += fmt::format(" --sample-columns {}", options.sample_columns);
  return command;
}

std::string verification_table(const std::vector<VerifiedLayer>& layers, bool colour) {
  using enum Table::Align;
  Table table({{"module"},
               {.title = "scheme", .fold = true},
               {"M", right},
               {.title = "kernel", .fold = true},
               {"checked", right},
               {"error/bound", right},
               {"relative L2", right},
               {.title = "added error", .align = right, .fold = true},
               {.title = "repacked", .fold = true},
               {.title = "repeated", .fold = true},
               {"result"}});
  const auto yes = [](bool good) { return good ? Cell("same") : Cell("differs", Style::bad); };
  for (const VerifiedLayer& layer : layers) {
    const VerifyReport& r = layer.report;
    table.add({printable(layer.name), (layer.activations.empty() ? "" : layer.activations + "_") + layer.scheme,
               std::to_string(layer.m), r.kernel, std::to_string(r.checked), fmt::format("{:.3f}", r.worst_error_over_bound),
               fmt::format("{:.1e}", r.relative_l2), r.added_error ? fmt::format("{:.2f} %", 100 * *r.added_error) : "",
               yes(r.round_trip), yes(r.repeatable), r.passed ? Cell("ok", Style::good) : Cell("FAILED", Style::bad)});
  }
  return table.render(colour);
}

// `unread`: errors of modules that could not be verified, because they are damaged or in a format that nibble does not decode.
std::string verification_text(const Options& options, const std::vector<VerifiedLayer>& layers, const std::vector<Note>& unread,
                              bool colour) {
  std::string text = verification_table(layers, colour);
  std::size_t failed = 0;
  double worst = 0;
  std::int64_t checked = 0;
  for (const VerifiedLayer& layer : layers) {
    worst = std::max(worst, layer.report.worst_error_over_bound);
    checked += layer.report.checked;
    if (layer.report.passed) continue;
    ++failed;
    text += fmt::format("{}, M={}: {}\n  repeat with: {}\n", printable(layer.name), layer.m, printable(layer.report.failure),
                        repeat_command(options, layer));
  }
  std::set<std::string> ways;
  for (const VerifiedLayer& layer : layers)
    if (!layer.activations.empty()) ways.insert(layer.activations);
  const std::string as = fmt::format("{}", fmt::join(ways, ", "));
  std::set<std::string> experts;
  for (const VerifiedLayer& layer : layers)
    if (const auto name = expert_in(layer.name)) experts.insert(name->before);
  if (!experts.empty() && options.experts > 0)
    text += fmt::format("experts: up to {} of each layer; --experts 0 verifies all\n", options.experts);
  for (const Note& note : unread) text += fmt::format("{}: {}\n", styled("error", Style::bad, colour), printable(note.text));
  if (failed > 0)
    text += styled(fmt::format("{} failed", failed), Style::bad, colour);
  else
    text += unread.empty() ? styled("all passed", Style::good, colour) : styled("incomplete", Style::bad, colour);
  text += fmt::format(": {}, {} outputs compared with the oracle, worst error {:.3f} of the bound, activations {}, seed {}\n",
                      counted(layers.size(), "check"), checked, worst,
                      options.a_dtype + (as.empty() ? "" : " as " + as) +
                          (options.accumulation == "fast" ? "" : ", accumulation " + options.accumulation),
                      options.seed);
  return text;
}

Json verification_json(const Options& options, const std::vector<VerifiedLayer>& layers, const std::vector<Note>& unread) {
  Json results = Json::array();
  bool passed = unread.empty();
  for (const VerifiedLayer& layer : layers) {
    const VerifyReport& r = layer.report;
    passed = passed && r.passed;
    Json json = {{"name", layer.name},
                 {"scheme", layer.scheme},
                 {"m", layer.m},
                 {"n", layer.n},
                 {"k", layer.k},
                 {"kernel", r.kernel},
                 {"passed", r.passed},
                 {"checked", r.checked},
                 {"worst_error_over_bound", r.worst_error_over_bound},
                 {"relative_l2", r.relative_l2},
                 {"round_trip", r.round_trip},
                 {"repeatable", r.repeatable}};
    if (!layer.activations.empty()) json["act_scheme"] = layer.activations;
    if (r.added_error) json["added_error"] = *r.added_error;
    if (!r.passed) {
      json["failure"] = r.failure;
      json["repeat_with"] = repeat_command(options, layer);
    }
    results.push_back(json);
  }
  return {{"schema", 1},
          {"path", options.path.string()},
          {"backend", options.backend},
          {"a_dtype", options.a_dtype},
          {"act_scheme", options.activations},
          {"accumulation", options.accumulation},
          {"seed", options.seed},
          {"experts", options.experts},
          {"passed", passed},
          {"results", results},
          {"notes", notes_json(unread)}};
}

Result<Outcome> run(const Options& options) {
  const auto layer = compile_pattern("--layer", options.layer);
  if (!layer.ok()) return layer.status();
  if (Status usable = check_backend(options.backend, options.kernel); !usable.ok()) return usable;
  const auto quantize = parse_asked_activations(options.activations);
  if (!quantize.ok()) return quantize.status();
  VerifyImages images{.layout = options.layout == "nhwc" ? ImageLayout::nhwc : ImageLayout::nchw};
  const auto size = parse_extent("--image", options.image);
  if (!size.ok()) return size.status();
  images.size = *size;
  const auto checkpoint = Checkpoint::open(options.path);
  if (!checkpoint.ok()) return checkpoint.status();
  if (!options.packed.empty()) return verify_packed(*checkpoint, options.packed, *layer, options.json);

  Threads threads(options.threads);
  VerifySpec spec;
  spec.linear.a_dtype = parse_dtype(options.a_dtype).value_or(DType::f32);
  spec.linear.epilogue.out = parse_dtype(options.out).value_or(spec.linear.a_dtype);
  spec.linear.accumulation = parse_accumulation(options.accumulation);
  spec.seed = options.seed;
  spec.outliers = options.outliers;
  spec.sample_columns = options.sample_columns;
  spec.added_error = true;
  spec.pack.backend = parse_backend(options.backend);
  spec.plan.kernel = spec.pack.kernel = options.kernel;
  const auto layers = verify_checkpoint(*checkpoint, *layer, options.m, spec, *quantize, threads.executor(), images,
                                        options.dense, options.experts);
  if (!layers.ok()) return layers.status();
  // Neither must a checkpoint of which a part cannot be read look sound; --layer asks about other modules.
  const bool whole = options.layer.empty() || layers->empty();
  std::vector<Note> unread;
  for (const Note& note : checkpoint->notes())
    if (whole && note.severity == Note::Severity::error) unread.push_back(note);
  const Status readable = whole ? usable_whole(*checkpoint) : Status();
  if (layers->empty() && !readable.ok()) return readable;
  if (layers->empty())  // no check must not look like success
    return Status(StatusCode::invalid_argument,
                  fmt::format("{} has no {}module{}", options.path.string(), options.dense ? "" : "quantized ",
                              options.layer.empty() ? " to verify; nibble quantize makes some, --dense verifies others"
                                                    : " whose name matches --layer; see nibble inspect"));
  const auto text = [&] { return verification_text(options, *layers, unread, wants_colour(stdout)); };
  if (Status written = print_result(options.json, text, [&] { return verification_json(options, *layers, unread); });
      !written.ok())
    return written;
  const bool failed = std::any_of(layers->begin(), layers->end(), [](const VerifiedLayer& l) { return !l.report.passed; });
  if (failed) return Outcome::failed;
  return readable.ok() ? Result<Outcome>(Outcome::ok) : Result<Outcome>(readable);
}

// As spec.linear says, on spec.linear.m_max images.
Result<VerifyReport> verify_module_conv(const Module& module, const QuantTensor& q, const VerifySpec& spec,
                                        const VerifyImages& images, Executor& executor) {
  const VerifyConvSpec conv{.conv = {.geometry = verified_geometry(module, images.size),
                                     .input = images.layout,
                                     .output = images.layout,
                                     .a_dtype = spec.linear.a_dtype,
                                     .batch_max = spec.linear.m_max,
                                     .epilogue = spec.linear.epilogue,
                                     .act_scheme = spec.linear.act_scheme,
                                     .accumulation = spec.linear.accumulation},
                            .seed = spec.seed,
                            .outliers = spec.outliers,
                            .sample_columns = spec.sample_columns,
                            .plan = spec.plan,
                            .pack = spec.pack};
  return verify_conv(q, conv, &executor);
}

// Without most of the experts of each layer: `experts` of them stay, evenly spread, and others in each layer.
std::vector<const Module*> sampled(const std::vector<const Module*>& modules, std::int64_t experts) {
  std::map<std::string, std::set<std::int64_t>> layers;  // by name up to the number
  for (const Module* module : modules)
    if (const auto name = expert_in(module->name)) layers[name->before].insert(name->expert);
  std::int64_t offset = 0;
  for (auto& [name, numbers] : layers) {
    const auto count = std::ssize(numbers);
    if (experts == 0 || count <= experts) continue;
    const std::vector<std::int64_t> all(numbers.begin(), numbers.end());
    numbers.clear();
    for (std::int64_t i = 0; i < experts; ++i)
      numbers.insert(all[static_cast<std::size_t>((offset + i * count / experts) % count)]);
    ++offset;
  }
  std::vector<const Module*> kept;
  for (const Module* module : modules) {
    const auto name = expert_in(module->name);
    if (!name || layers[name->before].contains(name->expert)) kept.push_back(module);
  }
  return kept;
}

}  // namespace

ConvGeometry verified_geometry(const Module& module, Extent image) {
  const Extent filter = *module.filter;
  const std::int64_t channels = module.k / (filter.h * filter.w);  // of a group
  const bool depthwise = channels == 1 && module.n > 1;
  return {.in_channels = depthwise ? module.n : channels,
          .out_channels = module.n,
          .height = image.h,
          .width = image.w,
          .filter = filter,
          .padding = {filter.h / 2, filter.h / 2, filter.w / 2, filter.w / 2},
          .groups = depthwise ? module.n : 1};
}

Result<std::vector<VerifiedLayer>> verify_checkpoint(const Checkpoint& checkpoint, const Pattern& layer,
                                                     std::span<const std::int64_t> m_list, VerifySpec spec,
                                                     const AskedActivations& asked, Executor& executor,
                                                     const VerifyImages& images, bool dense, std::int64_t experts) {
  std::vector<const Module*> modules;
  for (const Module& module : checkpoint.modules()) {
    if ((module.quantized() || dense) && layer.search(module.name)) modules.push_back(&module);
  }
  modules = sampled(modules, experts);
  spec.plan.threads = executor.threads();
  spec.pack.executor = &executor;
  std::vector<VerifiedLayer> layers;
  ProgressBar progress("verifying");
  for (const Module* module : modules) {
    progress.update(layers.size(), modules.size() * m_list.size(), module->name);
    std::vector<Note> notes;
    const auto q = checkpoint.read(*module, &notes);
    if (!q.ok()) return q.status().with_context(module->name);
    std::vector<ModuleNote> found;
    for (Note& note : notes) found.push_back({module->name, std::move(note)});
    if (Status damage = worst_error(found); !damage.ok()) return damage;
    const ActScheme act = activations_for(*module, asked);
    std::string way;
    if (act.codes != DType::none) way = Scheme{module->scheme, act}.name();
    way = way.substr(0, way.find('_'));
    for (std::int64_t m : m_list) {
      progress.update(layers.size(), modules.size() * m_list.size(), module->name);
      spec.linear.m_max = m;
      spec.linear.act_scheme = act;
      spec.linear.epilogue.bias = !q->bias.empty();
      auto report = module->filter ? verify_module_conv(*module, *q, spec, images, executor) : verify_linear(*q, spec, &executor);
      if (!report.ok()) return with_activations_hint(report.status(), act, asked).with_context(module->name);
      layers.push_back({module->name, module->scheme.name(), way, m, q->n, q->k, *std::move(report)});
    }
  }
  return layers;
}

void add_verify(CLI::App& app, Action& action) {
  CLI::App* command = add_command(app, "verify", "Run every quantized layer and compare it with a double-precision oracle",
                                  "  nibble verify model/ -M 1,16 --a-dtype f16");
  auto options = std::make_shared<Options>();
  command->add_option("PATH", options->path, "Checkpoint: a directory or one .safetensors file")->required();
  command->add_option("--layer", options->layer, "Only modules whose name matches this regular expression")->type_name("REGEX");
  add_dense(*command, options->dense);
  add_m_list(*command, options->m, "Rows of activations to run; images, of convolutions");
  command->add_option("--image", options->image, "Height and width of images for convolutions, padded by half the filter")
      ->type_name("HxW")
      ->capture_default_str();
  command->add_option("--image-layout", options->layout, "How images lie: nchw or nhwc")
      ->check(one_of({"nchw", "nhwc"}))
      ->type_name("NAME")
      ->capture_default_str();
  add_act(*command, options->a_dtype);
  command->add_option("--out", options->out, "Type of outputs: f32, f16 or bf16 (default: that of the activations)")
      ->check(one_of({"f32", "f16", "bf16"}))
      ->type_name("TYPE");
  add_activations(*command, options->activations,
                  "Quantize activations while running (default: as the checkpoint says; none: leave them as they are)");
  add_accumulation(*command, options->accumulation);
  add_backend(*command, options->backend);
  add_kernel(*command, options->kernel);
  command->add_option("--sample-columns", options->sample_columns, "Compare only this many output columns (default: all)")
      ->check(between(1, 1 << 30))
      ->type_name("N");
  command
      ->add_option("--experts", options->experts,
                   "Of the experts of a layer, verify only this many, others in each layer; 0: all")
      ->check(between(0, 1 << 20))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--outliers", options->outliers, "Make every 256th input channel this many times larger")
      ->check(outlier_factor())
      ->type_name("FACTOR")
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of the random activations")
      ->check(seed())
      ->type_name("N")
      ->capture_default_str();
  add_threads(*command, options->threads);
  const std::vector<CLI::Option*> of_runs = command->get_options([](const CLI::Option* option) {
    return !option->get_positional() && !option->check_name("--help") && !option->check_name("--layer");
  });
  CLI::Option* packed =
      command
          ->add_option("--packed", options->packed,
                       "Run nothing: compare the weights of this file of nibble pack with the checkpoint, bit for bit")
          ->type_name("FILE");
  for (CLI::Option* option : of_runs) packed->excludes(option);
  add_json(*command, options->json);
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace nibble::cli
