// nibble inspect: the contents of a checkpoint, and whether they agree with its config.
#include "commands/inspect.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <map>
#include <unordered_set>

#include "commands/commands.hpp"
#include "commands/option_checks.hpp"
#include "commands/packed.hpp"
#include "terminal/progress.hpp"
#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

void add_note(std::vector<Note>& notes, Note::Severity severity, std::string text) {
  notes.push_back({severity, std::move(text)});
}

// A filter [Co,Ci/groups,Kh,Kw] as the rows that are quantized, in the order kh, kw, ci.
Tensor rows_of(const Tensor& w) {
  const std::int64_t channels = w.shape[1], elements = w.shape[2] * w.shape[3], k = channels * elements;
  const auto width = static_cast<std::size_t>(bits(w.dtype) / 8);
  Tensor rows(w.dtype, {w.shape[0], k});
  const std::byte* from = w.bytes.data();
  for (std::int64_t n = 0; n < w.shape[0]; ++n)
    for (std::int64_t c = 0; c < channels; ++c)
      for (std::int64_t e = 0; e < elements; ++e, from += width)
        std::copy_n(from, width, rows.bytes.data() + static_cast<std::size_t>(n * k + e * channels + c) * width);
  return rows;
}

// The module's weight in the reference checkpoint, or a note that says why there is none to compare with.
void compare(const Checkpoint& reference, const QuantTensor& q, InspectedModule& found) {
  const std::string name = found.module.name + ".weight";
  const TensorInfo* tensor = reference.find_tensor(name);
  if (tensor == nullptr) return add_note(found.notes, Note::Severity::warning, "the reference has no tensor " + name);
  const std::optional<Extent>& filter = found.module.filter;
  std::vector<std::int64_t> shape = {q.n, q.k};
  if (filter) shape = {q.n, q.k / (filter->h * filter->w), filter->h, filter->w};
  if (!is_compute_float(tensor->dtype) || tensor->shape != shape) {
    return add_note(found.notes, Note::Severity::warning,
                    fmt::format("the reference tensor {} is {} [{}], not a float [{}]", name, nibble::name(tensor->dtype),
                                fmt::join(tensor->shape, ", "), fmt::join(shape, ", ")));
  }
  auto stored = reference.load(*tensor);
  if (!stored.ok()) return add_note(found.notes, Note::Severity::error, stored.status().message());
  const Tensor rows = filter ? rows_of(*stored) : *std::move(stored);
  const auto error = quantization_error(ConstTensorView(rows.bytes.data(), rows.dtype, {q.n, q.k}), q);
  if (error.ok()) {
    found.error = *error;
  } else {
    add_note(found.notes, Note::Severity::warning, "no error against the reference: " + error.status().message());
  }
}

// The other modules and tensors, which inspect only counts.
void count_the_rest(const Checkpoint& checkpoint, const Pattern& layer, bool dense, Inspection& inspection) {
  std::unordered_set<std::string> claimed;
  for (const Module& module : checkpoint.modules()) {
    claimed.insert(module.tensors.begin(), module.tensors.end());
    if (module.quantized() || dense || !layer.search(module.name)) continue;
    inspection.dense.push_back(module);
    inspection.dense_bytes += module.bytes;
  }
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (claimed.contains(tensor.name)) continue;
    ++inspection.other_tensors;
    inspection.other_bytes += tensor.bytes;
  }
}

std::vector<const Module*> chosen_modules(const Checkpoint& checkpoint, const Pattern& layer, bool dense) {
  std::vector<const Module*> chosen;
  for (const Module& module : checkpoint.modules()) {
    if ((module.quantized() || dense) && layer.search(module.name)) chosen.push_back(&module);
  }
  return chosen;
}

// The values of --act-scheme, with "all" expanded.
Result<std::vector<ActScheme>> parse_ways(const std::vector<std::string>& texts) {
  std::vector<ActScheme> ways;
  for (const std::string& text : texts == std::vector<std::string>{"all"} ? usual_activations() : texts) {
    const auto way = parse_activations("--act-scheme", text);
    if (!way.ok()) return way.status();
    ways.push_back(*way);
  }
  return ways;
}

// The status of the command.
Result<Outcome> worst_finding(const Inspection& inspection) {
  std::vector<ModuleNote> notes;
  for (const Note& note : inspection.notes) notes.push_back({"", note});
  for (const InspectedModule& found : inspection.modules)
    for (const Note& note : found.notes) notes.push_back({found.module.name, note});
  const Status worst = worst_error(notes);
  return worst.ok() ? Result<Outcome>(Outcome::ok) : Result<Outcome>(worst);
}

// Packed files have no weights to measure or explain.
Result<Outcome> run_packed(const InspectOptions& options) {
  if (options.explain || options.headers_only || options.summary || options.dense || !options.reference.empty() ||
      !options.activations.empty())
    return Status(StatusCode::invalid_argument,
                  fmt::format("{} holds packed weights, for which inspect has no option but --layer and --json; inspect the "
                              "checkpoint that it was packed from",
                              options.path.string()));
  const auto layer = compile_pattern("--layer", options.layer);
  if (!layer.ok()) return layer.status();
  return inspect_packed(options.path, *layer, options.json);
}

Result<Outcome> run(const InspectOptions& options) {
  if (PackedFile::recognises(options.path)) return run_packed(options);
  if (Status usable = check_backend(options.backend); !usable.ok()) return usable;
  const auto inspection = inspect_checkpoint(options);
  if (!inspection.ok()) return inspection.status();
  const auto text = [&] { return inspection_text(*inspection, wants_colour(stdout)); };
  if (Status written = print_result(options.json, text, [&] { return inspection_json(*inspection); }); !written.ok())
    return written;
  return worst_finding(*inspection);
}

}  // namespace

Status worst_error(std::span<const ModuleNote> notes) {
  std::size_t errors = 0;
  Status worst;
  for (const auto& [module, note] : notes) {
    if (note.severity != Note::Severity::error) continue;
    ++errors;
    const StatusCode code = note.code == StatusCode::ok ? StatusCode::corrupt_data : note.code;
    if (!worst.ok() && (worst.code() == StatusCode::corrupt_data || code == worst.code())) continue;
    worst = Status(code, module.empty() || note.text.find(module) != std::string::npos ? note.text : module + ": " + note.text);
  }
  return errors > 1 ? worst.with_context(fmt::format("{}; the worst", counted(errors, "error"))) : worst;
}

Status usable_whole(const Checkpoint& checkpoint) {
  std::vector<ModuleNote> notes;
  for (const Note& note : checkpoint.notes()) notes.push_back({"", note});
  return worst_error(notes);
}

std::int64_t Inspection::weights() const {
  std::int64_t sum = 0;
  for (const InspectedModule& found : modules) sum += found.module.n * found.module.k;
  return sum;
}

double Inspection::mean_bits() const {
  const std::int64_t count = weights();
  return count == 0 ? 0 : 8 * static_cast<double>(quantized_bytes) / static_cast<double>(count);
}

std::string shape_key(const Module& module) {
  return fmt::format("{} {} {} {}{}{}", module.n, module.k, module.scheme.name(), module.act_order ? "a" : "",
                     module.has_bias ? "b" : "", module.filter ? fmt::format("{}x{}", module.filter->h, module.filter->w) : "");
}

namespace {

// Takes another module into a row of several, which has `count` of them then.
void take_in(InspectedModule& group, const InspectedModule& each, std::size_t count) {
  group.module.bytes += each.module.bytes;
  group.bits_per_weight += (each.bits_per_weight - group.bits_per_weight) / static_cast<double>(count);
  group.notes.insert(group.notes.end(), each.notes.begin(), each.notes.end());
  if (group.static_acts != each.static_acts) group.static_acts.reset();
  if (!each.readable.ok()) group.readable = each.readable;
  if (!each.error) return;
  if (!group.error) group.error = each.error;
  group.error->sqnr_db = std::min(group.error->sqnr_db, each.error->sqnr_db);
  group.error->cosine = std::min(group.error->cosine, each.error->cosine);
  group.error->max_abs = std::max(group.error->max_abs, each.error->max_abs);
  group.error->relative_l2 = std::max(group.error->relative_l2, each.error->relative_l2);
}

// Modules as rows: those of the same common name, shape and scheme as one, which `name` names when it has all of them.
std::vector<InspectedModule> rows_of(const std::vector<InspectedModule>& modules,
                                     const std::function<std::string(const std::string& name)>& common,
                                     const std::function<std::string(const std::vector<const Module*>&)>& name) {
  std::vector<InspectedModule> rows;
  std::vector<std::vector<const Module*>> members;
  std::map<std::string, std::size_t> found;  // indices of rows
  for (const InspectedModule& each : modules) {
    const std::string claimed = each.module.claimed ? each.module.claimed->name() : "";
    const auto [at, is_new] = found.try_emplace(fmt::format("{}\n{}\n{}\n{}\n{}", common(each.module.name), each.module.format,
                                                            shape_key(each.module), claimed, each.act_limit.value_or(0)),
                                                rows.size());
    if (is_new) rows.push_back(each), members.emplace_back();
    std::vector<const Module*>& together = members[at->second];
    together.push_back(&each.module);
    if (!is_new) take_in(rows[at->second], each, together.size());
  }
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (members[i].size() > 1) rows[i].module.name = name(members[i]);
  return rows;
}

}  // namespace

std::vector<InspectedModule> grouped(const std::vector<InspectedModule>& modules) {
  return rows_of(modules, without_numbers, [](const std::vector<const Module*>& members) {
    return fmt::format("{} ×{}", without_numbers(members.front()->name), members.size());
  });
}

std::vector<InspectedModule> with_experts_together(const std::vector<InspectedModule>& modules) {
  const auto common = [](const std::string& name) {
    const auto expert = expert_in(name);
    return expert ? fmt::format("{}*{}", expert->before, expert->after) : name;
  };
  return rows_of(modules, common, [](const std::vector<const Module*>& members) {
    std::int64_t first = INT64_MAX, last = 0;
    for (const Module* member : members) {
      const std::int64_t number = expert_in(member->name)->expert;
      first = std::min(first, number), last = std::max(last, number);
    }
    const auto name = *expert_in(members.front()->name);
    const bool all = last - first + 1 == std::ssize(members);
    return fmt::format("{}{}…{}{}{}", name.before, first, last, name.after,
                       all ? "" : fmt::format(" ({} of them)", members.size()));
  });
}

Result<Inspection> inspect_checkpoint(const InspectOptions& options) {
  const auto layer = compile_pattern("--layer", options.layer);
  if (!layer.ok()) return layer.status();
  const auto checkpoint = Checkpoint::open(options.path);
  if (!checkpoint.ok()) return checkpoint.status();
  std::optional<Checkpoint> reference;
  if (!options.reference.empty()) {
    auto opened = Checkpoint::open(options.reference);
    if (!opened.ok()) return opened.status().with_context("--reference");
    reference = *opened;
  }

  Inspection inspection;
  inspection.path = options.path;
  inspection.summary = options.summary;
  inspection.notes.assign(checkpoint->notes().begin(), checkpoint->notes().end());
  count_the_rest(*checkpoint, *layer, options.dense, inspection);
  std::vector<ModuleNote> incomplete;
  inspection.experts = expert_layers(*checkpoint, &incomplete);
  for (const Note& note : group_notes(incomplete)) inspection.notes.push_back(note);

  const DType act = parse_dtype(options.a_dtype).value_or(DType::f32);
  const auto ways = parse_ways(options.activations);
  if (!ways.ok()) return ways.status();
  KernelQuestion question{.backend = parse_backend(options.backend),
                          .a_dtype = act,
                          .act_scheme = {},
                          .accumulation = parse_accumulation(options.accumulation),
                          .machine = {}};
  if (ways->size() == 1) question.act_scheme = ways->front();
  if (!options.gpu.empty()) {
    question.backend = Backend::cuda;
    auto gpu = described_gpu(options.gpu);
    if (!gpu.ok()) return gpu.status();
    question.gpu = *std::move(gpu);
  }
  if (!ways->empty()) {
    auto source = AddedErrorSource::open(options.calibration, options.outliers);
    if (!source.ok()) return source.status();
    inspection.added_source = *std::move(source);
  }
  if (options.explain && question.backend == Backend::cpu) question.machine = measure_roofline(default_executor());
  const auto chosen = chosen_modules(*checkpoint, *layer, options.dense);
  std::map<std::string, std::size_t> shape_of;  // shape_key → index into inspection.shapes
  ProgressBar progress("reading");
  for (const Module* module : chosen) {
    progress.update(inspection.modules.size(), chosen.size(), module->name);
    InspectedModule& found = inspection.modules.emplace_back();
    found.module = *module;
    found.notes = module->notes;
    found.bits_per_weight = 8 * static_cast<double>(module->bytes) / static_cast<double>(module->n * module->k);
    inspection.quantized_bytes += module->bytes;
    if (options.headers_only) continue;
    const auto q = checkpoint->read(*module, &found.notes);
    if (!q.ok()) {
      found.readable = q.status();
      found.notes.push_back({Note::Severity::error, q.status().message(), q.status().code()});
      continue;
    }
    found.bits_per_weight = q->bits_per_weight();
    found.static_acts = q->static_acts;
    found.act_limit = q->act_limit;
    if (reference) compare(*reference, *q, found);
    if (!ways->empty()) {
      auto added = inspection.added_source->measure(*module, *q, *ways);
      if (!added.ok()) return added.status().with_context(module->name);
      if (added->empty()) add_note(found.notes, Note::Severity::info, "the calibration has no input of it");
      found.added = *std::move(added);
    }
    if (!options.explain) continue;
    const auto [at, is_new] = shape_of.try_emplace(shape_key(*module), inspection.shapes.size());
    if (is_new) {
      question.bias = !q->bias.empty();
      auto shape = explain_shape(describe(*q), question);
      if (shape.status().code() == StatusCode::unsupported) {  // no kernel there takes it; the others are still of interest
        add_note(found.notes, Note::Severity::warning, shape.status().message());
        shape_of.erase(at);
        continue;
      }
      if (!shape.ok()) return shape.status().with_context(module->name);
      inspection.shapes.push_back(*std::move(shape));
    }
    ++inspection.shapes[at->second].modules;
  }
  return inspection;
}

void add_inspect(CLI::App& app, Action& action) {
  CLI::App* command =
      add_command(app, "inspect", "Show what is in a checkpoint: schemes, activations, sizes, anomalies, error, kernels",
                  "  nibble inspect model/ --layer 'layers\\.0\\.' --explain --reference model-f16/\n"
                  "  nibble inspect model/ --act-scheme s8r,s8g128,s8zg128 --calibration acts.safetensors");
  auto options = std::make_shared<InspectOptions>();
  command->add_option("PATH", options->path, "Checkpoint: a directory or one .safetensors file; or a file of nibble pack")
      ->required();
  command->add_option("--layer", options->layer, "Only modules whose name matches this regular expression")->type_name("REGEX");
  add_dense(*command, options->dense);
  command->add_flag("--summary", options->summary, "Equal modules of all layers in one row, with the worst of their errors");
  command->add_flag("--explain", options->explain, "Which kernel runs for which M, and why the others do not");
  command->add_option("--reference", options->reference, "Float checkpoint to measure the quantization error against")
      ->type_name("PATH");
  CLI::Option* explain = command->get_option("--explain");
  add_backend(*command, options->backend)->needs(explain);
  const std::vector<std::string_view> gpus = described_gpus();
  command->add_option("--gpu", options->gpu, "Explain for this GPU, which need not be there; in place of --backend")
      ->check(one_of({gpus.begin(), gpus.end()}))
      ->type_name("NAME")
      ->needs(explain)
      ->excludes("--backend");
  add_act(*command, options->a_dtype);
  CLI::Option* activations =
      command
          ->add_option(
              "--act-scheme", options->activations,
              "Measure what quantizing activations adds to the error of each layer: ways like s8r, s8zg128, e4m3g128, or "
              "all; --explain explains the kernels of one way")
          ->delimiter(',')
          ->type_name("SCHEME,...");
  add_accumulation(*command, options->accumulation)->needs(explain);
  CLI::Option* calibration =
      command
          ->add_option("--calibration", options->calibration,
                       "For --act-scheme: what went into layers, a safetensors file with MODULE.input [tokens,K]")
          ->type_name("FILE")
          ->needs(activations);
  command->add_option("--outliers", options->outliers, "For --act-scheme: make every 256th input channel this many times larger")
      ->check(outlier_factor())
      ->type_name("FACTOR")
      ->capture_default_str()
      ->needs(activations)
      ->excludes(calibration);
  CLI::Option* headers = command->add_flag("--headers", options->headers_only, "Do not read the weights: fast, but finds less");
  headers->excludes("--explain")->excludes("--reference")->excludes(activations);
  add_json(*command, options->json);
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace nibble::cli
