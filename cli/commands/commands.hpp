// The commands of the tool: each file defines one `add_*`, which declares its options and its action.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nibble/nibble.hpp"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace nibble::cli {

/// The outcome of a completed command.
enum class Outcome { ok, failed };  // failed: a verification or a comparison did
using Action = std::function<Result<Outcome>()>;

/// The documented exit codes: 0 ok, 1 verification failed or regression, 2 usage, 3 unsupported, 4 I/O or corrupt file;
/// 70 is a bug in nibble.
int exit_code(const Result<Outcome>& result);

/// Each add_* declares a command; parsing a command line that names it sets `action`.
void add_inspect(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_quantize(CLI::App& app, Action& action);
void add_convert(CLI::App& app, Action& action);
void add_dequantize(CLI::App& app, Action& action);
void add_pack(CLI::App& app, Action& action);
void add_sample(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);
void add_generate(CLI::App& app, Action& action);  // hidden

/// A subcommand with its example lines.
CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& summary, const std::string& example);

// Options of several commands.
CLI::Option* add_act(CLI::App& command, std::string& act);
CLI::Option* add_activations(CLI::App& command, std::string& activations, const std::string& help);
CLI::Option* add_accumulation(CLI::App& command, std::string& accumulation);
CLI::Option* add_dense(CLI::App& command, bool& dense);
CLI::Option* add_threads(CLI::App& command, int& threads);
CLI::Option* add_backend(CLI::App& command, std::string& backend);
CLI::Option* add_kernel(CLI::App& command, std::string& kernel);
/// --json [FILE]: `json` becomes "-" where no FILE follows; "" without the option.
CLI::Option* add_json(CLI::App& command, std::string& json);
CLI::Option* add_m_list(CLI::App& command, std::vector<std::int64_t>& list, const std::string& help);

/// The pattern of --layer and --skip, searched in names. The error of a bad one names the option.
Result<Pattern> compile_pattern(const std::string& option, const std::string& pattern);
/// The value of --backend: cpu or cuda.
Backend parse_backend(const std::string& text);
/// The value of a checked --accumulation.
Accumulation parse_accumulation(const std::string& text);
/// Ok if the backend runs here and the kernel of --kernel, if given, is of this build and of that backend. Errors: unsupported with the
/// reason there is no GPU; invalid_argument.
Status check_backend(const std::string& backend, const std::string& kernel = "");

/// already_exists with the option that helps.
Status with_force_hint(const Status& status);

/// The threads of --threads: nibble's own pool when 0.
class Threads {
 public:
  explicit Threads(int count) : own_(count > 0 ? make_executor(count) : nullptr) {}
  Executor& executor() { return own_ ? *own_ : default_executor(); }

 private:
  std::unique_ptr<Executor> own_;
};

/// Ok when activations can be quantized by this scheme while running; else an error that names the option and its value.
Status check_activations(const std::string& option, const std::string& text, const ActScheme& act);
/// The value of --act-scheme: "s8r", "s8g128"; "" for none. Errors name the option.
Result<ActScheme> parse_activations(const std::string& option, const std::string& text);
/// The activation scheme for the layers of a checkpoint: the value of the option ("none": not quantized); nothing without the option: as
/// the checkpoint says.
using AskedActivations = std::optional<ActScheme>;
Result<AskedActivations> parse_asked_activations(const std::string& text);
ActScheme activations_for(const Module& module, const AskedActivations& asked);
/// Adds a hint to run the layer without quantized activations to the error of an unsupported scheme of the checkpoint.
Status with_activations_hint(const Status& status, const ActScheme& act, const AskedActivations& asked);

}  // namespace nibble::cli
