// Options that several commands share, and the checks behind them.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "commands.hpp"
#include "option_checks.hpp"

namespace nibble::tools {

CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& summary, const std::string& example) {
  CLI::App* command = app.add_subcommand(name, summary);
  command->footer("Example:\n" + example);
  return command;
}

CLI::Option* add_act(CLI::App& command, std::string& act) {
  return command.add_option("--act", act, "Type of activations and outputs: f32, f16 or bf16")
      ->check(one_of({"f32", "f16", "bf16"}))
      ->type_name("TYPE")
      ->capture_default_str();
}

CLI::Option* add_activations(CLI::App& command, std::string& activations, const std::string& help) {
  return command
      .add_option("--activations", activations,
                  help + ": s8 or e4m3, z for zero points, r (token), gSIZE (block) or t (static); s8r, s8zg128, e4m3g128")
      ->type_name("SCHEME");
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

CLI::Option* add_m_list(CLI::App& command, std::vector<std::int64_t>& list, const std::string& help) {
  return command.add_option("-M", list, help)
      ->delimiter(',')
      ->check(between(1, 1 << 20))
      ->type_name("M,...")
      ->capture_default_str();
}

Result<std::regex> compile_pattern(const std::string& option, const std::string& pattern) {
  try {
    return std::regex(pattern, std::regex::ECMAScript | std::regex::optimize);
  } catch (const std::regex_error& error) {
    return Status(StatusCode::invalid_argument,
                  fmt::format("{}: '{}' is not a regular expression: {}", option, pattern, error.what()));
  }
}

Backend parse_backend(const std::string& text) { return text == "cuda" ? Backend::cuda : Backend::cpu; }

Status check_backend(const std::string& backend, const std::string& kernel) {
  const bool gpu = parse_backend(backend) == Backend::cuda;
  if (!kernel.empty()) {
    const auto known = kernels();
    const auto at = std::find_if(known.begin(), known.end(), [&](const KernelInfo& k) { return k.name == kernel; });
    if (at == known.end()) {
      return {StatusCode::invalid_argument,
              fmt::format("--kernel: there is no kernel '{}'; nibble doctor --kernels lists them", kernel)};
    }
    if ((at->backend == Backend::cuda) != gpu) {
      return {StatusCode::invalid_argument,
              fmt::format("--kernel: {} is for --backend {}, not {}", kernel, gpu ? "cpu" : "cuda", backend)};
    }
  }
  return gpu ? runs_here(Isa::simt).with_context("--backend cuda") : Status();
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
                                                            "for zero points, and r, t or gSIZE: s8r, s8zg128, e4m3g128",
                                                            option, text));
  }
  if (Status known = check_activations(option, text, parsed->act); !known.ok()) return known;
  return parsed->act;
}

Result<AskedActivations> parse_asked_activations(const std::string& text) {
  if (text.empty()) return AskedActivations();
  if (text == "none") return AskedActivations(ActScheme{});
  const auto act = parse_activations("--activations", text);
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
          status.message() + " (the checkpoint says how activations are quantized; --activations none leaves them as they are)"};
}

}  // namespace nibble::tools
