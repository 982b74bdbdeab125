// nibble sample: a float checkpoint to try everything else on.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "commands/commands.hpp"
#include "commands/option_checks.hpp"
#include "commands/sample.hpp"
#include "terminal/output.hpp"

namespace nibble::cli {
namespace {

struct Options {
  std::filesystem::path out;
  SampleSpec spec;
  std::string dtype = "bf16", json;
};

Result<Outcome> run(const Options& options) {
  SampleSpec spec = options.spec;
  spec.dtype = parse_dtype(options.dtype).value_or(DType::bf16);
  if (Status written = write_sample(options.out, spec); !written.ok()) return with_force_hint(written);
  const auto text = [&] {
    const std::string experts = spec.experts == 0 ? "" : fmt::format(", {} experts of {}", spec.experts, spec.family);
    return fmt::format("{}: {} of random weights shaped like {}{}, {}, seed {}\n", options.out.string(),
                       counted(static_cast<std::size_t>(spec.layers), "layer"), spec.shapes, experts, options.dtype, spec.seed);
  };
  const auto document = [&]() -> Json {
    Json json = {{"schema", 1},         {"path", options.out.string()}, {"shapes", spec.shapes}, {"layers", spec.layers},
                 {"vocab", spec.vocab}, {"dtype", options.dtype},       {"seed", spec.seed}};
    if (spec.experts > 0) json["experts"] = {{"count", spec.experts}, {"top_k", spec.top_k}, {"family", spec.family}};
    return json;
  };
  if (Status written = print_result(options.json, text, document); !written.ok()) return written;
  return Outcome::ok;
}

}  // namespace

void add_sample(CLI::App& app, Action& action) {
  CLI::App* command = add_command(app, "sample", "Write a float checkpoint with random weights in the shapes of a real model",
                                  "  nibble sample float/ --shapes tiny\n"
                                  "  nibble quantize float/ awq/ --format awq\n"
                                  "  nibble verify awq/\n"
                                  "  nibble sample experts/ --shapes tiny --experts 8 --top-k 2 --family mixtral");
  auto options = std::make_shared<Options>();
  std::vector<std::string> shapes;
  for (std::string_view name : sample_shapes()) shapes.emplace_back(name);
  command->add_option("OUT", options->out, "Directory to write")->required();
  command->add_option("--shapes", options->spec.shapes, fmt::format("Model to imitate: {}", fmt::join(shapes, ", ")))
      ->check(one_of(shapes))
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--layers", options->spec.layers, "How many decoder layers")
      ->check(between(1, 1000))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--vocab", options->spec.vocab, "Rows of the embedding and of lm_head")
      ->check(between(1, 1 << 20))
      ->type_name("N")
      ->capture_default_str();
  CLI::Option* experts =
      command->add_option("--experts", options->spec.experts, "Experts in place of each feed-forward layer; 0: none")
          ->check(between(0, 4096))
          ->type_name("E")
          ->capture_default_str();
  command->add_option("--top-k", options->spec.top_k, "Experts of a token, which have the channels of the dense layer together")
      ->check(between(1, 4096))
      ->type_name("K")
      ->capture_default_str()
      ->needs(experts);
  std::vector<std::string> families;
  for (std::string_view name : sample_families()) families.emplace_back(name);
  command
      ->add_option(
          "--family", options->spec.family,
          "Whose names experts have: mixtral (w1, w3, w2), qwen3-moe (gate_proj, up_proj, down_proj), or of experts that "
          "are stored together qwen3-moe-fused ([E,N,K]), llama4 ([E,K,N]) and gpt-oss (MXFP4)")
      ->check(one_of(families))
      ->type_name("NAME")
      ->capture_default_str()
      ->needs(experts);
  command->add_option("--seed", options->spec.seed, "Seed of the weights")->check(seed())->type_name("N")->capture_default_str();
  command->add_option("--dtype", options->dtype, "Type of the weights: f32, f16 or bf16")
      ->check(one_of({"f32", "f16", "bf16"}))
      ->type_name("TYPE")
      ->capture_default_str();
  command->add_flag("--force", options->spec.overwrite,
                    "Replace OUT if it is a file, or a directory in which nibble wrote every file");
  add_json(*command, options->json);
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace nibble::cli
