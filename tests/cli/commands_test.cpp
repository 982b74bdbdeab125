// What all commands have in common on valid input, and doctor.
#include <algorithm>
#include <sstream>

#include "cli/cli.hpp"
#include "nibble/nibble.hpp"
#include "terminal/table.hpp"

namespace nibble::test {
namespace {

TEST_F(Cli, EveryCommandHelpsWithAnExample) {
  const Finished all = nibble({"--help"});
  EXPECT_EQ(all.exit_code, 0);
  EXPECT_TRUE(contains(all.out, "Exit codes"));
  for (const char* command : {"inspect", "verify", "bench", "quantize", "convert", "dequantize", "pack", "sample", "doctor"}) {
    EXPECT_TRUE(contains(all.out, command)) << command;
    const Finished help = nibble({command, "--help"});
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_TRUE(contains(help.out, std::string("Example:\n  nibble ") + command)) << help.out;
    EXPECT_EQ(help.err, "");
  }
}

TEST_F(Cli, SaysItsVersion) {
  const Finished version = nibble({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_TRUE(contains(version.out, "nibble 0.")) << version.out;
}

TEST_F(Cli, JsonMeansTheSameEverywhere) {
  const std::string awq = checkpoint("awq"), out = at("out");
  spit(at("shapes.txt"), "64 64 a\n");
  spit(at("bench.json"),
       R"({"schema": 1, "results": [{"name": "a", "scheme": "s", "a_dtype": "f32", "backend": "cpu", "kernel": "k",
                             "m": 1, "n": 64, "k": 64, "median_us": 2}]})");
  const std::vector<std::string> commands[] = {
      {"inspect", awq},
      {"verify", awq, "-M", "1"},
      {"bench", "--shapes", at("shapes.txt"), "--scheme", "u4zg64", "-M", "1", "--min-time", "0.001", "--no-baselines"},
      {"bench", "--compare", at("bench.json"), at("bench.json")},
      {"quantize", checkpoint("float"), out, "--format", "gptq", "--scheme", "u4b8g16", "--force"},
      {"convert", awq, out, "--format", "compressed-tensors", "--force"},
      {"dequantize", awq, out, "--force"},
      {"sample", out, "--shapes", "tiny", "--force"},
      {"doctor", "--formats"},
      {"doctor"}};
  for (const std::vector<std::string>& command : commands) {
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.begin(), command.begin(), command.end());
      return more;
    };
    SCOPED_TRACE(command.front() + " " + command.back());
    const auto keys = [](const nlohmann::json& json) {
      std::vector<std::string> names;
      for (const auto& [key, value] : json.items()) names.push_back(key);
      return names;
    };
    const auto alone = keys(nibble_json(with({"--json"})));
    EXPECT_GT(alone.size(), 1u);
    EXPECT_EQ(keys(nibble_json(with({"--json", "-"}))), alone);
    const Finished written = nibble(with({"--json", at("result.json")}));
    EXPECT_EQ(written.exit_code, 0) << written.err;
    EXPECT_EQ(keys(nlohmann::json::parse(slurp(at("result.json")))), alone);
    EXPECT_NE(written.out, "");
    EXPECT_FALSE(contains(written.out, "\"schema\"")) << written.out;
    EXPECT_TRUE(contains(nibble({command.front(), "--help"}).out, "--json [FILE]"));
  }
  EXPECT_EQ(nibble_json({"bench", "--compare", at("bench.json"), at("bench.json"), "--json"})["results"][0]["speed_up"], 1);
  // What comes after it is not lost.
  EXPECT_EQ(nibble_json({"inspect", "--json", awq})["path"], awq);
}

TEST_F(Cli, OutputFitsNarrowTerminals) {
  const RunOptions narrow{.environment = {"COLUMNS=60"}};
  const std::string awq = checkpoint("awq");
  std::vector<std::vector<std::string>> commands = {{"--help"},
                                                    {"inspect", awq, "--reference", checkpoint("float")},
                                                    {"verify", awq, "-M", "1"},
                                                    {"convert", awq, at("out"), "--format", "compressed-tensors"},
                                                    {"doctor", "--formats"}};
  for (const char* command : {"inspect", "verify", "bench", "quantize", "convert", "dequantize", "pack", "sample", "doctor"})
    commands.push_back({command, "--help"});
  for (const auto& command : commands) {
    const Finished finished = nibble(command, narrow);
    EXPECT_EQ(finished.exit_code, 0) << finished.err;
    std::string line;
    bool example = false;  // copied unchanged
    for (std::istringstream lines(finished.out); std::getline(lines, line);) {
      example = example || line.starts_with("Example");
      const bool word = line.find_first_of(' ', std::min(line.find_first_not_of(' '), line.size())) == line.npos;
      if (example || word) continue;
      EXPECT_LE(cli::display_width(line), 60) << command.front() << ": " << line;
    }
  }
}

TEST_F(Cli, HelpSaysWhatIsRequired) {
  for (const char* command : {"quantize", "convert"}) {
    const Finished help = nibble({command, "--help"});
    EXPECT_TRUE(contains(help.out.substr(help.out.find("--format NAME")), "(required)")) << help.out;
    EXPECT_EQ(nibble({command, at("in"), at("out")}).exit_code, 2);
  }
  EXPECT_FALSE(contains(nibble({"verify", "--help"}).out, "(required)"));
}

/// The example of sample, as a newcomer types it.
TEST_F(Cli, TheFirstExampleRuns) {
  std::istringstream lines(nibble({"sample", "--help"}).out);
  int commands = 0;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("  nibble ")) continue;
    std::vector<std::string> words;
    std::istringstream text(line.substr(9));
    for (std::string word; text >> word;) words.push_back(word.ends_with('/') ? at(word) : word);
    const Finished finished = nibble(words);
    EXPECT_EQ(finished.exit_code, 0) << line << ": " << finished.err;
    ++commands;
  }
  EXPECT_EQ(commands, 4);
}

TEST_F(Cli, TheFilesOfExamplesAreTheUsersOrMadeByThem) {
  for (const char* command : {"inspect", "verify", "bench", "quantize", "convert", "dequantize", "pack", "sample", "doctor"})
    EXPECT_FALSE(contains(nibble({command, "--help"}).out, "bench/")) << command << ": a path of the source tree";
}

TEST_F(Cli, DoctorKnowsTheMachineAndTheBuild) {
  const Finished text = nibble({"doctor"});
  EXPECT_EQ(text.exit_code, 0);
  EXPECT_TRUE(contains(text.out, "GB/s")) << text.out;
  for (const char* peak : {"f32 peak", "bf16 peak", "int8 peak"}) EXPECT_TRUE(contains(text.out, peak)) << text.out;
  const auto machine = nibble_json({"doctor", "--json"});
  for (const char* ceiling : {"read_gbytes_per_s", "f32_gflops", "int8_gops"}) EXPECT_GT(machine[ceiling].get<double>(), 0);
  EXPECT_GE(machine["bf16_gflops"].get<double>(), 0);
  EXPECT_FALSE(machine.contains("probes"));
  const auto gpu = this_gpu();
  EXPECT_EQ(machine["cuda"]["gpu"].is_null(), !gpu.ok());
  EXPECT_TRUE(gpu.ok() ||
              (machine["cuda"]["reason"] == gpu.status().message() && contains(text.out, "none: " + gpu.status().message())));
  const auto lists = nibble_json({"doctor", "--kernels", "--layouts", "--formats", "--json"});
  EXPECT_FALSE(lists["kernels"].empty());
  for (const auto& kernel : lists["kernels"]) {
    for (Isa isa : kAllIsas) EXPECT_TRUE(kernel["isa"] != name(isa) || kernel["runs_here"] == runs_here(isa).ok()) << kernel;
  }
  EXPECT_FALSE(lists["layouts"].empty());
  EXPECT_GE(lists["formats"].size(), 4u);
}

TEST_F(Cli, DoctorMeasuresTheSpread) {
  const auto json = nibble_json({"doctor", "--measure", "--json"});
  for (const char* ceiling : {"read", "f32", "bf16", "int8"}) {
    const auto& probes = json["probes"][ceiling];
    EXPECT_GE(probes["count"], 1) << ceiling;
    EXPECT_LE(probes["min"].get<double>(), probes["median"].get<double>());
    EXPECT_LE(probes["median"].get<double>(), probes["max"].get<double>());
  }
  EXPECT_GE(json["read_gbytes_per_s"].get<double>(), json["probes"]["read"]["max"].get<double>());
}

}  // namespace
}  // namespace nibble::test
