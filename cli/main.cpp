// nibble, the command-line tool: parses, runs one command, maps its status to an exit code.
#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <sstream>
#include <stdexcept>
#include <system_error>

#include "commands/commands.hpp"
#include "commands/option_checks.hpp"
#include "terminal/output.hpp"
#include "terminal/progress.hpp"
#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

constexpr int kUsage = 2;

int exit_code(StatusCode code) {
  switch (code) {
    case StatusCode::ok: return 0;
    case StatusCode::invalid_argument: return kUsage;
    case StatusCode::unsupported: return 3;
    case StatusCode::not_found:
    case StatusCode::already_exists:
    case StatusCode::io_error:
    case StatusCode::corrupt_data: return 4;
    case StatusCode::internal: break;
  }
  return 70;
}

int out_of_memory() {
  std::fputs("nibble: out of memory\n", stderr);
  return exit_code(StatusCode::io_error);
}

// Options as "--name TYPE=default"; error messages say which options exclude each other.
class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter() { column_width(28); }
  std::string make_option_opts(const CLI::Option* option) const override {
    if (option->get_type_size() == 0 || option->get_positional()) return "";
    const std::string value = option->get_default_str();
    return " " + option->get_type_name() + (value.empty() ? "" : "=" + value);
  }
  // On narrow terminals the text of an option is below its name.
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    const bool named = option->get_required() && !is_positional;  // what is positional is in the usage
    return laid_out(make_option_name(option, is_positional) + make_option_opts(option),
                    make_option_desc(option) + (named ? " (required)" : ""));
  }
  std::string make_description(const CLI::App* app) const override { return fitted(CLI::Formatter::make_description(app)); }
  std::string make_footer(const CLI::App* app) const override { return fitted(CLI::Formatter::make_footer(app)); }
  std::string make_subcommand(const CLI::App* command) const override {
    return laid_out(command->get_name(), command->get_description());
  }

 private:
  std::string laid_out(const std::string& name, const std::string& text) const {
    constexpr int kNarrow = 80, kIndent = 6;
    const int columns = output_columns(),
              start = columns > 0 && columns < kNarrow ? kIndent : static_cast<int>(get_column_width());
    std::string line = "  " + name.substr(0, name.find_last_not_of(' ') + 1);
    if (display_width(line) + 1 > start || start == kIndent) {
      line += "\n" + std::string(static_cast<std::size_t>(start), ' ');
    } else {
      line.append(static_cast<std::size_t>(start - display_width(line)), ' ');
    }
    return line + wrapped(text, columns, start, start) + "\n";
  }
};

void add_commands(CLI::App& app, Action& action) {
  app.formatter(std::make_shared<HelpFormatter>());
  app.set_version_flag("--version", "nibble " NIBBLE_VERSION, "Print the version and exit");
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 ok, 1 verification failed or regression, 2 usage, 3 unsupported, 4 I/O error or corrupt file.\n"
      "`nibble COMMAND --help` shows the options of a command and an example; that of sample needs no model of yours.");
  add_inspect(app, action);
  add_verify(app, action);
  add_bench(app, action);
  add_quantize(app, action);
  add_convert(app, action);
  add_dequantize(app, action);
  add_pack(app, action);
  add_sample(app, action);
  add_doctor(app, action);
  add_generate(app, action);
}

std::vector<std::string> names_of_commands(CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({}))
    if (!command->get_group().empty()) names.push_back(command->get_name());
  return names;
}

std::vector<std::string> names_of_options(CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

// The first unknown option on the command line, without its value; "" when all are known.
std::string unknown_option(const CLI::App& app) {
  for (const std::string& word : app.remaining(true)) {
    if (word.size() > 1 && word[0] == '-') return word.substr(0, word.find('='));
  }
  return "";
}

// The terminate handler during CLI11, which allocates in noexcept functions.
[[noreturn]] void end_without_memory() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::bad_alloc&) {
    std::_Exit(out_of_memory());
  } catch (...) {
  }
  std::abort();
}

int run(int argc, char** argv) {
  const std::terminate_handler before = std::set_terminate(end_without_memory);
  CLI::App app("nibble: inspect, verify, measure and make 4-bit and 8-bit quantized checkpoints", "nibble");
  Action action;
  add_commands(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help_or_version) {
    std::ostringstream text;
    app.exit(help_or_version, text, text);
    print(text.str());
    const Status output = finish_output();
    if (!output.ok()) complain(output.message());
    return exit_code(output.code());
  } catch (const CLI::ParseError& error) {
    if (argc == 1) {
      print(app.help());
      return kUsage;
    }
    const auto chosen = app.get_subcommands();
    std::string what = error.what();
    if (chosen.empty() && argv[1][0] != '-') {
      what = std::string("there is no command '") + argv[1] + "'" + nearest_of(argv[1], names_of_commands(app));
    } else if (const std::string unknown = unknown_option(app); !unknown.empty()) {
      what = "there is no option " + unknown + nearest_of(unknown, names_of_options(chosen.empty() ? app : *chosen.front()));
    }
    complain(what + "; see nibble " + (chosen.empty() ? "" : chosen.front()->get_name() + " ") + "--help");
    return kUsage;
  }
  std::set_terminate(before);
  if (const Status known = check_environment(); !known.ok()) {
    complain(known.message());
    return exit_code(known.code());
  }
  const Result<Outcome> result = action();
  const Status output = finish_output();
  if (!result.ok()) complain(result.status().message());
  if (result.ok() && !output.ok()) {
    complain(output.message());
    return exit_code(output.code());
  }
  return exit_code(result);
}

/// Handles every exception.
int run_or_explain(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const Interrupted& interrupted) {
    complain("interrupted; nothing was written");
    return 128 + interrupted.signal;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::length_error&) {
    throw std::bad_alloc();
  } catch (const std::system_error& error) {
    complain(error.what());
    return 4;
  } catch (const std::exception& error) {
    complain(std::string("internal error, please report it: ") + error.what());
    return 70;
  }
}

}  // namespace

int exit_code(const Result<Outcome>& result) {
  if (result.ok()) return *result == Outcome::ok ? 0 : 1;
  return exit_code(result.status().code());
}

}  // namespace nibble::cli

int main(int argc, char** argv) {
  using namespace nibble::cli;
  signal(SIGPIPE, SIG_IGN);  // a closed pipe is a failed write, not a signal that could leave half a file behind
  signal(SIGXFSZ, SIG_IGN);  // so is a file that exceeds its size limit
  try {
    return run_or_explain(argc, argv);
  } catch (...) {  // no memory for the explanation
    return out_of_memory();
  }
}
