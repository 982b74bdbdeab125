// nibble generate: the man page and the shells' completions, from the same commands and options that parse the command line. Hidden:
// the build runs it, packages install what it prints.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>

#include "commands/commands.hpp"
#include "commands/option_checks.hpp"
#include "terminal/output.hpp"

namespace nibble::cli {
namespace {

/// An option or a positional, as shells and man pages need it.
struct Parameter {
  std::vector<std::string> names;    // "-M", "--a-dtype"; the positional's name alone
  std::string value;                 // "TYPE,..."; "" for a flag
  std::string otherwise;             // the default, where one is shown
  std::vector<std::string> choices;  // all values; empty: any value
  std::string help;

  bool flag() const { return value.empty(); }
  bool optional() const { return value.starts_with('['); }  // its value is
  bool takes_file() const {
    static constexpr std::string_view kFiles[] = {"FILE", "PATH", "DIR", "BEFORE", "AFTER", "IN", "OUT"};
    return std::ranges::any_of(kFiles, [&](std::string_view file) { return value.starts_with(file) || optional(); });
  }
};

struct Command {
  std::string name, summary, footer;
  std::vector<Parameter> positionals, options;
};

std::vector<std::string> choices_of(CLI::Option& option) try {
  return CLI::detail::split(option.get_validator(0)->get_name(), ' ');
} catch (const CLI::OptionNotFound&) {
  return {};
}

Parameter describe(CLI::Option& option) {
  Parameter out{.otherwise = option.get_default_str(), .help = option.get_description()};
  if (option.get_positional()) out.names = {option.get_name(true)};
  for (const std::string& name : option.get_snames()) out.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) out.names.push_back("--" + name);
  out.value = option.get_positional() ? out.names.front() : option.get_type_size() == 0 ? "" : option.get_type_name();
  for (std::string& choice : choices_of(option))
    if (!choice.empty()) out.choices.push_back(std::move(choice));
  return out;
}

Command describe(CLI::App& app) {
  Command out{.name = app.get_name(), .summary = app.get_description(), .footer = app.get_footer()};
  for (CLI::Option* option : app.get_options())
    if (!option->get_group().empty()) (option->get_positional() ? out.positionals : out.options).push_back(describe(*option));
  return out;
}

std::vector<Command> commands_of(CLI::App& app) {
  std::vector<Command> out;
  for (CLI::App* command : app.get_subcommands({}))
    if (!command->get_group().empty()) out.push_back(describe(*command));
  return out;
}

std::string replaced(const std::string& text, const std::map<char, std::string>& by) {
  std::string out;
  for (const char c : text) {
    const auto found = by.find(c);
    out += found == by.end() ? std::string(1, c) : found->second;
  }
  return out;
}

// ---- The man page ----

/// A line of text for troff: dashes are those one types, and no line begins a request.
std::string troff(const std::string& text) {
  const std::string escaped = replaced(text, {{'\\', "\\e"}, {'-', "\\-"}});
  return escaped.starts_with('.') || escaped.starts_with('\'') ? "\\&" + escaped : escaped;
}

/// Several lines, verbatim.
std::string verbatim(const std::string& text) {
  std::string out = ".nf\n";
  for (const std::string& line : CLI::detail::split(text, '\n')) out += troff(line) + "\n";
  return out + ".fi\n";
}

std::string troff(const Parameter& p) {
  std::string head;
  for (const std::string& name : p.names) head += fmt::format("{}\\fB{}\\fR", head.empty() ? "" : ", ", troff(name));
  if (p.value != p.names.front() && !p.flag()) head += fmt::format(" \\fI{}\\fR", troff(p.value));
  if (!p.otherwise.empty()) head += "=" + troff(p.otherwise);
  return fmt::format(".TP\n{}\n{}\n", head, troff(p.help));
}

std::string man_page(CLI::App& app) {
  const Command tool = describe(app);
  std::string out = fmt::format(".TH NIBBLE 1 \"\" \"nibble {}\" \"User Commands\"\n.SH NAME\n{}\n", NIBBLE_VERSION,
                                troff("nibble - " + tool.summary.substr(tool.summary.find(": ") + 2)));
  out += ".SH SYNOPSIS\n.B nibble\n\\fICOMMAND\\fR [\\fIOPTIONS\\fR]\n.SH OPTIONS\n";
  for (const Parameter& p : tool.options) out += troff(p);
  out += ".SH COMMANDS\n";
  for (const Command& c : commands_of(app)) {
    std::string line = "nibble " + c.name + " [OPTIONS]";
    for (const Parameter& p : c.positionals) line += " " + p.names.front();
    out += fmt::format(".SS {}\n{}.\n.PP\n\\fB{}\\fR\n", troff(c.name), troff(c.summary), troff(line));
    for (const Parameter& p : c.positionals) out += troff(p);
    for (const Parameter& p : c.options) out += troff(p);
    if (!c.footer.empty()) out += ".PP\n" + verbatim(c.footer);
  }
  out +=
      ".SH ENVIRONMENT\n.TP\n\\fBNIBBLE_ISA\\fR, \\fBNIBBLE_KERNEL\\fR, \\fBNIBBLE_NUM_THREADS\\fR\n"
      "Pretend to be an older CPU; force a kernel; threads to use.\n";
  return out + ".SH EXIT STATUS\n" + verbatim(tool.footer);
}

// ---- Completions ----

/// A text in single quotes, for every shell.
std::string in_quotes(const std::string& text) { return "'" + replaced(text, {{'\'', "'\\''"}}) + "'"; }

std::string names_of(const std::vector<Parameter>& options) {
  std::string out;
  for (const Parameter& p : options)
    for (const std::string& name : p.names) out += (out.empty() ? "" : " ") + name;
  return out;
}

/// The completion of an option's value: its choices, a file (left to the shell), or nothing.
std::string bash_values(const std::vector<Parameter>& options) {
  std::string out;
  for (const Parameter& p : options) {
    if (p.flag()) continue;
    std::string action = p.takes_file() ? "return" : "compopt +o default; return";
    if (!p.choices.empty())
      action = fmt::format("COMPREPLY=($(compgen -W {} -- \"$cur\")); return",
                           in_quotes(fmt::format("{}", fmt::join(p.choices, " "))));
    out += fmt::format("        {}) {} ;;\n", fmt::join(p.names, " | "), action);
  }
  return out.empty() ? out : "      case $prev in\n" + out + "      esac\n";
}

std::string bash(CLI::App& app) {
  std::string names, cases;
  for (const Command& c : commands_of(app)) {
    names += " " + c.name;
    cases +=
        fmt::format("    {})\n{}      options={}\n      ;;\n", c.name, bash_values(c.options), in_quotes(names_of(c.options)));
  }
  return fmt::format(
      "# Completion of nibble for bash; generated by `nibble generate bash`.\n"
      "_nibble() {{\n"
      "  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} options=\n"
      "  COMPREPLY=()\n"
      "  if ((COMP_CWORD == 1)); then\n"
      "    COMPREPLY=($(compgen -W {} -- \"$cur\"))\n"
      "    return\n"
      "  fi\n"
      "  case ${{COMP_WORDS[1]}} in\n"
      "{}"
      "  esac\n"
      "  [[ $cur != -* ]] || COMPREPLY=($(compgen -W \"$options\" -- \"$cur\"))\n"
      "}}\n"
      "complete -o default -F _nibble nibble\n",
      in_quotes(names_of(describe(app).options) + names), cases);
}

std::string zsh_option(const Parameter& p) {
  const auto escape = [](const std::string& text) { return replaced(text, {{'[', "\\["}, {']', "\\]"}, {':', "\\:"}}); };
  std::string out;
  for (const std::string& name : p.names) {
    std::string spec = fmt::format("{}[{}]", name, escape(p.help));
    const std::string action = !p.choices.empty() ? fmt::format("({})", fmt::join(p.choices, " "))
                               : p.takes_file()   ? "_files"
                                                  : " ";
    if (!p.flag()) spec += fmt::format("{}:{}:{}", p.optional() ? ":" : "", escape(p.value), action);
    out += " \\\n        " + in_quotes(spec);
  }
  return out;
}

std::string zsh(CLI::App& app) {
  std::string names, cases;
  for (const Command& c : commands_of(app)) {
    names += "\n    " + in_quotes(c.name + ":" + c.summary);
    cases += fmt::format("    {})\n      _arguments", c.name);
    for (const Parameter& p : c.options) cases += zsh_option(p);
    cases += " \\\n        '*:file:_files' ;;\n";
  }
  return fmt::format(
      "#compdef nibble\n"
      "# Completion of nibble for zsh; generated by `nibble generate zsh`.\n"
      "_nibble() {{\n"
      "  local -a commands\n"
      "  commands=({}\n  )\n"
      "  if ((CURRENT == 2)); then\n"
      "    _describe command commands\n"
      "    return\n"
      "  fi\n"
      "  shift words\n"
      "  ((CURRENT--))\n"
      "  case $words[1] in\n"
      "{}"
      "  esac\n"
      "}}\n"
      "_nibble \"$@\"\n",
      names, cases);
}

std::string fish(CLI::App& app) {
  // Inside of single quotes of fish, backslashes are escapes too.
  const auto quote = [](const std::string& text) { return "'" + replaced(text, {{'\\', "\\\\"}, {'\'', "\\'"}}) + "'"; };
  std::string out = "# Completion of nibble for fish; generated by `nibble generate fish`.\n";
  for (const Command& c : commands_of(app)) {
    out += fmt::format("complete -c nibble -n __fish_use_subcommand -f -a {} -d {}\n", c.name, quote(c.summary));
    for (const Parameter& p : c.options) {
      out += fmt::format("complete -c nibble -n '__fish_seen_subcommand_from {}'", c.name);
      for (const std::string& name : p.names) out += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      if (!p.flag() && !p.optional()) out += p.takes_file() ? " -r" : " -x";
      if (!p.choices.empty()) out += " -a " + quote(fmt::format("{}", fmt::join(p.choices, " ")));
      out += " -d " + quote(p.help) + "\n";
    }
  }
  return out;
}

}  // namespace

void add_generate(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("generate", "Print the man page or the completions of a shell")->group("");
  auto what = std::make_shared<std::string>();
  command->add_option("WHAT", *what, "man, bash, zsh or fish")->required()->check(one_of({"man", "bash", "zsh", "fish"}));
  command->callback([what, &app, &action] {
    action = [what, &app]() -> Result<Outcome> {
      print(*what == "man" ? man_page(app) : *what == "bash" ? bash(app) : *what == "zsh" ? zsh(app) : fish(app));
      return Outcome::ok;
    };
  });
}

}  // namespace nibble::cli
