// Options that several commands share, and the checks behind them.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "commands/added_error.hpp"
#include "commands/commands.hpp"
#include "commands/option_checks.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cli {

std::string nearest_of(const std::string& text, const std::vector<std::string>& names) {
  // The edit distance: letters inserted, deleted, replaced, and neighbours exchanged.
  const auto distance = [&text](const std::string& name) {
    std::vector<std::vector<std::size_t>> d(text.size() + 1, std::vector<std::size_t>(name.size() + 1));
    for (std::size_t i = 0; i <= text.size(); ++i) {
      for (std::size_t j = 0; j <= name.size(); ++j) {
        if (i == 0 || j == 0) {
          d[i][j] = i + j;
          continue;
        }
        d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (text[i - 1] == name[j - 1] ? 0 : 1)});
        if (i > 1 && j > 1 && text[i - 1] == name[j - 2] && text[i - 2] == name[j - 1])
          d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
    return d[text.size()][name.size()];
  };
  constexpr std::size_t kLongest = 200;  // names are short: longer texts are no typing errors
  if (text.size() > kLongest) return "";
  const auto nearest = std::ranges::min_element(names, {}, distance);
  if (nearest == names.end() || distance(*nearest) > std::max<std::size_t>(1, std::min(text.size(), nearest->size()) / 3))
    return "";
  return fmt::format("; the nearest is '{}'", *nearest);
}

CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& summary, const std::string& example) {
  CLI::App* command = app.add_subcommand(name, summary);
  command->footer("Example:\n" + example);
  return command;
}

CLI::Option* add_act(CLI::App& command, std::string& act) {
  return command.add_option("--a-dtype", act, "Type of activations and outputs: f32, f16 or bf16")
      ->check(one_of({"f32", "f16", "bf16"}))
      ->type_name("TYPE")
      ->capture_default_str();
}

CLI::Option* add_activations(CLI::App& command, std::string& activations, const std::string& help) {
  return command
      .add_option(
          "--act-scheme", activations,
          help +
              ": s8 or e4m3, z for zero points, o for float offsets, r (token), gSIZE (block) or t (static); s8r, s8zg128, "
              "s8og32, e4m3g128")
      ->type_name("SCHEME");
}

CLI::Option* add_accumulation(CLI::App& command, std::string& accumulation) {
  return command
      .add_option(
          "--accumulation", accumulation,
          "How FP8 products are added up on GPUs of compute capability 9.0: fast, or precise, whose error does not grow with K")
      ->check(one_of({"fast", "precise"}))
      ->type_name("NAME")
      ->capture_default_str();
}

CLI::Option* add_dense(CLI::App& command, bool& dense) {
  return command.add_flag("--dense", dense,
                          "Also layers whose weight is not quantized; embeddings look like them, which --layer can leave out");
}

CLI::Option* add_threads(CLI::App& command, int& threads) {
  return command.add_option("--threads", threads, "Threads to use (default: one per core, or NIBBLE_NUM_THREADS)")
      ->check(between(1, 4096))
      ->type_name("N");
}

CLI::Option* add_backend(CLI::App& command, std::string& backend) {
  return command.add_option("--backend", backend, "Where to run: cpu, or cuda for the GPU")
      ->check(one_of({"cpu", "cuda"}))
      ->type_name("NAME")
      ->capture_default_str();
}

CLI::Option* add_kernel(CLI::App& command, std::string& kernel) {
  return command.add_option("--kernel", kernel, "Force this kernel (names: nibble doctor --kernels)")->type_name("NAME");
}

CLI::Option* add_json(CLI::App& command, std::string& json) {
  return command
      .add_option_function<std::string>(
          "--json", [&json](const std::string& file) { json = file.empty() ? "-" : file; },
          "Results as JSON: written to FILE, beside the text; without FILE, or as -, on standard output in place of it")
      ->expected(0, 1)
      ->type_name("[FILE]");
}

CLI::Option* add_m_list(CLI::App& command, std::vector<std::int64_t>& list, const std::string& help) {
  return command.add_option("-M", list, help)
      ->delimiter(',')
      ->check(between(1, 1 << 20))
      ->type_name("M,...")
      ->capture_default_str();
}

Result<Pattern> compile_pattern(const std::string& option, const std::string& pattern) {
  auto compiled = Pattern::compile(pattern);
  if (!compiled.ok()) return compiled.status().with_context(option);
  return compiled;
}

Accumulation parse_accumulation(const std::string& text) {
  return text == "precise" ? Accumulation::precise : Accumulation::fast;
}

Backend parse_backend(const std::string& text) { return text == "cuda" ? Backend::cuda : Backend::cpu; }

Status check_backend(const std::string& backend, const std::string& kernel) {
  const bool gpu = parse_backend(backend) == Backend::cuda;
  if (!kernel.empty()) {
    const auto known = kernel_info(kernel);
    if (!known.ok()) return {StatusCode::invalid_argument, "--kernel: " + known.status().message()};
    if ((known->backend == Backend::cuda) != gpu) {
      return {StatusCode::invalid_argument,
              fmt::format("--kernel: {} is for --backend {}, not {}", kernel, gpu ? "cpu" : "cuda", backend)};
    }
  }
  if (!gpu) return {};
  const Status there = this_gpu().status();
  return (there.ok() ? runs_here(Isa::simt) : there).with_context("--backend cuda");
}

Status with_force_hint(const Status& status) {
  if (status.code() != StatusCode::already_exists) return status;
  return {status.code(), status.message() + " (--force)"};
}

Status check_activations(const std::string& option, const std::string& text, const ActScheme& act) {
  const bool known = act.codes == DType::none || act.codes == DType::s8 || act.codes == DType::e4m3;
  if (known) return {};
  return {StatusCode::unsupported, fmt::format("{}: {} quantizes activations, but neither to s8 nor to e4m3", option, text)};
}

Result<ActScheme> parse_activations(const std::string& option, const std::string& text) {
  if (text.empty()) return ActScheme{};
  const auto parsed = Scheme::parse(text + "_s8c");
  if (!parsed.ok()) {
    return Status(StatusCode::invalid_argument, fmt::format("{}: '{}' is not a way to quantize activations; write s8 or e4m3, z "
                                                            "for zero points or o for float offsets, and r, t or gSIZE: s8r, "
                                                            "s8zg128, s8og32, e4m3g128{}",
                                                            option, text, nearest_of(text, usual_activations())));
  }
  if (Status known = check_activations(option, text, parsed->act); !known.ok()) return known;
  return parsed->act;
}

Result<AskedActivations> parse_asked_activations(const std::string& text) {
  if (text.empty()) return AskedActivations();
  if (text == "none") return AskedActivations(ActScheme{});
  const auto act = parse_activations("--act-scheme", text);
  if (!act.ok()) return act.status();
  return AskedActivations(*act);
}

ActScheme activations_for(const Module& module, const AskedActivations& asked) {
  if (asked) return *asked;
  return module.claimed ? module.claimed->act : ActScheme{};
}

Status with_activations_hint(const Status& status, const ActScheme& act, const AskedActivations& asked) {
  if (status.ok() || asked || act.codes == DType::none) return status;
  return {status.code(),
          status.message() + " (the checkpoint says how activations are quantized; --act-scheme none leaves them as they are)"};
}

}  // namespace nibble::cli
