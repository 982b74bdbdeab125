// nibble quantize, convert, dequantize: from one checkpoint to another.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>

#include "commands/commands.hpp"
#include "commands/inspect.hpp"
#include "commands/option_checks.hpp"
#include "terminal/output.hpp"
#include "terminal/progress.hpp"
#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

struct Options {
  std::filesystem::path in, out, calibration;
  std::string format, scheme, dtype, backend = "cpu", json, max_shard;
  std::vector<std::string> only, skip;
  std::optional<double> smooth;
  bool clip_search = false, convs = false, all = false, dry_run = false, force = false;
};

std::string report_text(const TransformReport& report, const std::filesystem::path& out, std::string_view verb) {
  using enum Table::Align;
  const bool colour = wants_colour(stdout);
  Table table({{"module"},
               {.title = "scheme", .fold = true},
               {"SQNR dB", right},
               {"cosine", right},
               {"max error", right},
               {.title = "smoothed", .fold = true}});
  double sum = 0, worst = INFINITY;
  std::size_t measured = 0, smoothed = 0;
  for (const TransformedModule& module : report.modules) {
    std::vector<Cell> row = {printable(module.name), module.scheme};
    if (module.error) {
      row.emplace_back(fmt::format("{:.1f}", module.error->sqnr_db));
      row.emplace_back(fmt::format("{:.6f}", module.error->cosine));
      row.emplace_back(fmt::format("{:.2e}", module.error->max_abs));
      row.emplace_back(module.smoothed ? "yes" : "");
      smoothed += module.smoothed ? 1 : 0;
      sum += module.error->sqnr_db;
      worst = std::min(worst, module.error->sqnr_db);
      ++measured;
    }
    table.add(std::move(row));
  }
  std::string text = table.render(colour);
  for (const Note& note : report.notes) text += fmt::format("{}\n", printable(note.text));
  text += fmt::format("{}: {} {}", out.string(), counted(report.modules.size(), "module"), verb);
  if (report.bytes_out > 0)
    text += fmt::format(", {} → {}", human_bytes(static_cast<double>(report.bytes_in)),
                        human_bytes(static_cast<double>(report.bytes_out)));
  if (measured > 0)
    text += fmt::format(", SQNR {:.1f} dB on average, {:.1f} at worst", sum / static_cast<double>(measured), worst);
  if (smoothed > 0) text += fmt::format(", {} smoothed", smoothed);
  return text + "\n";
}

Json report_json(const TransformReport& report, const std::filesystem::path& out) {
  Json modules = Json::array();
  for (const TransformedModule& module : report.modules) {
    Json& json = modules.emplace_back();
    json = {{"name", module.name}, {"scheme", module.scheme}};
    if (!module.error) continue;
    json["error"] = error_json(*module.error);
    json["smoothed"] = module.smoothed;
  }
  return {{"schema", 1},
          {"path", out.string()},
          {"bytes_in", report.bytes_in},
          {"bytes_out", report.bytes_out},
          {"modules", modules},
          {"notes", notes_json(report.notes)}};
}

Result<Tensor> dequantize_on_gpu(const QuantTensor& q, DType dtype) {
  const auto weight = pack(q, {.backend = Backend::cuda});
  if (!weight.ok()) return weight.status();
  const auto plan = Plan::dequantize(*weight, {.out = dtype});
  if (!plan.ok()) return plan.status();
  Tensor w(dtype, {q.n, q.k});
  const auto there = DeviceMemory::allocate(w.bytes.size());
  if (!there.ok()) return there.status();
  const TensorView out(there->data(), dtype, {q.n, q.k});
  if (Status ran = plan->run(*weight, {}, out, {}, {}, Stream{}); !ran.ok()) return ran;
  if (Status copied = copy_from_device(w.bytes.data(), there->data(), w.bytes.size()); !copied.ok()) return copied;
  return w;
}

// "5GB", "500MiB" or "1000000"; nothing for anything else.
std::optional<std::uint64_t> parse_bytes(const std::string& text) {
  static constexpr std::pair<std::string_view, std::uint64_t> kUnits[] = {
      {"KB", 1'000}, {"MB", 1'000'000}, {"GB", 1'000'000'000}, {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30},
      {"", 1},       {"B", 1}};
  std::uint64_t count = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), count);
  const auto* unit = std::ranges::find(kUnits, std::string_view(end, text.data() + text.size()), [](auto& u) { return u.first; });
  if (failure != std::errc() || unit == std::end(kUnits) || count == 0 || count > (std::uint64_t{1} << 60) / unit->second)
    return std::nullopt;
  return count * unit->second;
}

// Runs `transform` with a progress bar; Ctrl-C leaves no partial output behind.
Result<Outcome> transform(const Options& options, std::string_view verb,
                          const std::function<Result<TransformReport>(const TransformOptions&)>& work) {
  std::optional<Result<TransformReport>> report;
  {
    Interruptible interruptible;
    ProgressBar progress("working");
    TransformOptions how{.overwrite = options.force, .progress = progress.callback(), .executor = &interruptible.executor()};
    how.max_shard_bytes = parse_bytes(options.max_shard).value_or(0);
    if (parse_backend(options.backend) == Backend::cuda) how.dequantize = dequantize_on_gpu;
    report = work(how);
    if (!report->ok()) Interruptible::check();  // the library reports a loop that ended early as a failure
  }
  if (!report->ok()) return with_force_hint(report->status());
  const auto text = [&] { return report_text(**report, options.out, verb); };
  if (Status written = print_result(options.json, text, [&] { return report_json(**report, options.out); }); !written.ok())
    return written;
  return Outcome::ok;
}

std::vector<std::string> writable_formats() {
  std::vector<std::string> names;
  for (const FormatInfo& format : formats()) {
    if (format.can_write) names.emplace_back(format.name);
  }
  return names;
}

void add_paths(CLI::App& command, Options& options) {
  command.add_option("IN", options.in, "Checkpoint: a directory or one .safetensors file")->required();
  command.add_option("OUT", options.out, "What to write: a directory when IN is one, else a file")->required();
  command.add_flag("--force", options.force, "Replace OUT if it is a file, or a directory in which nibble wrote every file");
  command
      .add_option("--max-shard-size", options.max_shard,
                  "Cut a directory's weights into files of at most this size: 5GB, 500MB, GiB, ... (default: as IN is cut)")
      ->check(CLI::Validator(
          [](const std::string& text) {
            return parse_bytes(text) ? std::string() : fmt::format("'{}' is no size like 5GB, 500MB or 2GiB", text);
          },
          ""))
      ->type_name("SIZE");
  add_json(command, options.json);
}

CLI::Option* add_format(CLI::App& command, Options& options) {
  const auto names = writable_formats();
  return command
      .add_option("--format", options.format,
                  fmt::format("Checkpoint format: {}; awq and gptq are containers, not algorithms", fmt::join(names, ", ")))
      ->check(one_of(names))
      ->type_name("NAME")
      ->required();
}

// What a format holds unless --scheme says otherwise.
std::string_view usual_scheme(std::string_view format) {
  if (format == "awq") return "u4zg128";
  if (format == "int-quantized") return "s8r_s8c";
  if (format == "float-quantized") return "e4m3r_e4m3c";
  if (format == "nibble-codes") return "u4og32";
  if (format == "fp8") return "e4m3g128_e4m3b128x128";
  if (format == "mxfp4") return "e2m1g32";
  return "u4b8g128";
}

// One regular expression that matches what any of `patterns` matches; "" for none.
Result<std::string> any_of(const std::string& option, const std::vector<std::string>& patterns) {
  std::string joined;
  for (const std::string& pattern : patterns) {
    if (pattern.empty()) continue;  // an empty expression would match every name
    if (const auto compiled = compile_pattern(option, pattern); !compiled.ok()) return compiled.status();
    joined += fmt::format("{}(?:{})", joined.empty() ? "" : "|", pattern);
  }
  return joined;
}

Result<Outcome> quantize_command(const Options& options) {
  const auto only = any_of("--only", options.only), skip = any_of("--skip", options.skip);
  for (const auto* patterns : {&only, &skip})
    if (!patterns->ok()) return patterns->status();
  QuantizeCheckpointSpec spec;
  spec.format = options.format;
  spec.only = *only;
  spec.skip = *skip;
  spec.all = options.all;
  spec.dry_run = options.dry_run;
  spec.convs = options.convs;
  const auto scheme = Scheme::parse(options.scheme.empty() ? usual_scheme(options.format) : options.scheme);
  if (!scheme.ok()) return scheme.status().with_context("--scheme");
  spec.scheme = *scheme;
  spec.scheme.weight.scale = parse_dtype(options.dtype).value_or(DType::none);
  spec.clip_search = options.clip_search;
  spec.calibration = options.calibration;
  spec.smooth = options.smooth;
  return transform(options, options.dry_run ? "would be quantized; nothing was written" : "quantized",
                   [&](const TransformOptions& how) { return quantize_checkpoint(options.in, options.out, spec, how); });
}

}  // namespace

void add_quantize(CLI::App& app, Action& action) {
  CLI::App* command =
      add_command(app, "quantize", "Quantize the linear layers of a float checkpoint, to the nearest code",
                  "  nibble quantize model-f16/ model-awq/ --format awq --scheme u4zg128 --clip-search\n"
                  "  nibble quantize model-f16/ model-w8a8/ --format int-quantized --smooth 0.5 --calibration acts.safetensors");
  auto options = std::make_shared<Options>();
  add_paths(*command, *options);
  add_format(*command, *options);
  command
      ->add_option(
          "--scheme", options->scheme,
          "Type of the codes and how many share a scale: u4b8g128 is 4 bits, symmetric, in groups of 128; u4zg32 with zero "
          "points, "
          "in groups of 32; u3b4c, s8c per output channel. In front, how activations are quantized while running: s8r_s8c per "
          "token, s8t_s8c with scales from the calibration (default: gptq, compressed-tensors u4b8g128; awq u4zg128; "
          "int-quantized s8r_s8c; "
          "float-quantized e4m3r_e4m3c; fp8 e4m3g128_e4m3b128x128)")
      ->type_name("SCHEME");
  command->add_flag("--convolutions", options->convs,
                    "Convolutions too, weights of 4 dimensions: for compressed-tensors and int-quantized; few loaders know them");
  command->add_flag("--clip-search", options->clip_search, "Per group, shrink the range while that lowers the squared error");
  command->add_option("--only", options->only, "Quantize only modules whose name matches; may be given several times")
      ->allow_extra_args(false)
      ->type_name("REGEX");
  command->add_option("--skip", options->skip, "Leave modules whose name matches as they are; may be given several times")
      ->allow_extra_args(false)
      ->type_name("REGEX");
  command->add_flag("--all", options->all,
                    "Embeddings, output heads and routers of experts too, which stay as they are otherwise");
  command->add_flag("--dry-run", options->dry_run, "Show what would be quantized and what not, and why; write nothing");
  command
      ->add_option("--scale-dtype", options->dtype,
                   "Type of scales: f16, bf16 or f32 (default: that of bf16 models, to which loaders round them; else f16, or "
                   "f32 for codes of "
                   "8 bits on both sides; fp8: f32)")
      ->check(one_of({"f16", "bf16", "f32"}))
      ->type_name("TYPE");
  CLI::Option* calibration =
      command
          ->add_option("--calibration", options->calibration,
                       "What went into layers: a safetensors file with MODULE.input_absmax [K] or MODULE.input [tokens,K]")
          ->type_name("FILE");
  command
      ->add_option("--smooth", options->smooth,
                   "SmoothQuant: move the outliers of activations into the weights behind the norms of Llama-like models and "
                   "mixtures of experts, 0 to 1")
      ->check(between(0.0, 1.0))
      ->type_name("ALPHA")
      ->needs(calibration);
  command->callback([options, &action] { action = [options] { return quantize_command(*options); }; });
}

void add_convert(CLI::App& app, Action& action) {
  CLI::App* command = add_command(app, "convert", "Rewrite a quantized checkpoint in another format, without loss or not at all",
                                  "  nibble convert model-gptq/ model-ct/ --format compressed-tensors");
  auto options = std::make_shared<Options>();
  add_paths(*command, *options);
  add_format(*command, *options);
  command->callback([options, &action] {
    action = [options] {
      return transform(*options, "converted", [&](const TransformOptions& how) {
        return convert_checkpoint(options->in, options->out, options->format, how);
      });
    };
  });
}

void add_dequantize(CLI::App& app, Action& action) {
  CLI::App* command = add_command(app, "dequantize", "Turn a quantized checkpoint back into a float one",
                                  "  nibble dequantize model-awq/ model-f16/ --dtype f16");
  auto options = std::make_shared<Options>();
  options->dtype = "f16";
  add_paths(*command, *options);
  command->add_option("--dtype", options->dtype, "Type of the weights: f32, f16 or bf16")
      ->check(one_of({"f32", "f16", "bf16"}))
      ->type_name("TYPE")
      ->capture_default_str();
  add_backend(*command, options->backend);
  command->callback([options, &action] {
    action = [options] {
      if (Status usable = check_backend(options->backend); !usable.ok()) return Result<Outcome>(usable);
      const DType dtype = parse_dtype(options->dtype).value_or(DType::f16);
      return transform(*options, "dequantized",
                       [&](const TransformOptions& how) { return dequantize_checkpoint(options->in, options->out, dtype, how); });
    };
  });
}

}  // namespace nibble::cli
