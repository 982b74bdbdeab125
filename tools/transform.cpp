// nibble quantize, convert, dequantize: from one checkpoint to another.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>

#include "commands.hpp"
#include "option_checks.hpp"
#include "output.hpp"
#include "progress.hpp"
#include "table.hpp"

namespace nibble::tools {
namespace {

struct Options {
  std::filesystem::path in, out;
  std::string format, dtype, skip, backend = "cpu";
  int bits = 4, group = 128;
  bool symmetric = false, asymmetric = false, clip_search = false, force = false;
};

std::string report_text(const TransformReport& report, const std::filesystem::path& out, std::string_view verb) {
  using enum Table::Align;
  const bool colour = wants_colour(stdout);
  Table table({{"module"}, {.title = "scheme", .fold = true}, {"SQNR dB", right}, {"cosine", right}, {"max error", right}});
  double sum = 0, worst = INFINITY;
  std::size_t measured = 0;
  for (const TransformedModule& module : report.modules) {
    std::vector<Cell> row = {printable(module.name), module.scheme};
    if (module.error) {
      row.emplace_back(fmt::format("{:.1f}", module.error->sqnr_db));
      row.emplace_back(fmt::format("{:.6f}", module.error->cosine));
      row.emplace_back(fmt::format("{:.2e}", module.error->max_abs));
      sum += module.error->sqnr_db;
      worst = std::min(worst, module.error->sqnr_db);
      ++measured;
    }
    table.add(std::move(row));
  }
  std::string text = table.render(colour);
  text += fmt::format("{}: {} {}, {} → {}", out.string(), counted(report.modules.size(), "module"), verb,
                      human_bytes(static_cast<double>(report.bytes_in)), human_bytes(static_cast<double>(report.bytes_out)));
  if (measured > 0)
    text += fmt::format(", SQNR {:.1f} dB on average, {:.1f} at worst", sum / static_cast<double>(measured), worst);
  return text + "\n";
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

// Runs `transform` with a progress bar, and in such a way that Ctrl-C leaves nothing behind.
Result<Outcome> transform(const Options& options, std::string_view verb,
                          const std::function<Result<TransformReport>(const TransformOptions&)>& work) {
  std::optional<Result<TransformReport>> report;
  {
    const Interruptible interruptible;
    ProgressBar progress("working");
    TransformOptions how{.overwrite = options.force, .progress = progress.callback()};
    if (parse_backend(options.backend) == Backend::cuda) how.dequantize = dequantize_on_gpu;
    report = work(how);
  }
  if (!report->ok()) return with_force_hint(report->status());
  print(report_text(**report, options.out, verb));
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
  command.add_flag("--force", options.force, "Replace OUT if it exists");
}

CLI::Option* add_format(CLI::App& command, Options& options) {
  const auto names = writable_formats();
  return command.add_option("--format", options.format, fmt::format("Checkpoint format: {}", fmt::join(names, ", ")))
      ->check(one_of(names))
      ->type_name("NAME")
      ->required();
}

Result<Outcome> quantize_command(const Options& options) {
  if (const auto skip = compile_pattern("--skip", options.skip); !skip.ok()) return skip.status();
  QuantizeCheckpointSpec spec;
  spec.format = options.format;
  spec.skip = options.skip;
  spec.quantize.bits = options.bits;
  spec.quantize.group_size = options.group;
  spec.quantize.symmetric = options.symmetric || (!options.asymmetric && options.format != "awq");
  spec.quantize.scale = parse_dtype(options.dtype).value_or(DType::f16);
  spec.quantize.clip_search = options.clip_search;
  return transform(options, "quantized",
                   [&](const TransformOptions& how) { return quantize_checkpoint(options.in, options.out, spec, how); });
}

}  // namespace

void add_quantize(CLI::App& app, Action& action) {
  CLI::App* command = add_command(app, "quantize", "Quantize a float checkpoint",
                                  "  nibble quantize model-f16/ model-awq/ --format awq --bits 4 --group 128 --clip-search");
  auto options = std::make_shared<Options>();
  options->skip = QuantizeCheckpointSpec{}.skip;
  options->dtype = "f16";
  add_paths(*command, *options);
  add_format(*command, *options);
  command->add_option("--bits", options->bits, "Bits per weight, 2 to 8")
      ->check(between(2, 8))
      ->type_name("B")
      ->capture_default_str();
  command->add_option("--group", options->group, "Inputs that share a scale; 0: a whole output channel")
      ->check(between(0, 1 << 30))
      ->type_name("G")
      ->capture_default_str();
  CLI::Option* symmetric = command->add_flag("--symmetric", options->symmetric, "No zero points (default except for awq)");
  command->add_flag("--asymmetric", options->asymmetric, "Integer zero points (default for awq)")->excludes(symmetric);
  command->add_flag("--clip-search", options->clip_search, "Per group, shrink the range while that lowers the squared error");
  command->add_option("--skip", options->skip, "Leave modules whose name matches as they are (default: embeddings and lm_head)")
      ->type_name("REGEX");
  command->add_option("--scale-dtype", options->dtype, "Type of scales: f16, bf16 or f32")
      ->check(one_of({"f16", "bf16", "f32"}))
      ->type_name("TYPE")
      ->capture_default_str();
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

}  // namespace nibble::tools
