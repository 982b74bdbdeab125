// Every command on valid input: its text, its JSON and its files.
#include <algorithm>
#include <sstream>

#include "cli/cli.hpp"
#include "nibble/nibble.hpp"
#include "terminal/table.hpp"

namespace nibble::test {
namespace {

namespace fs = std::filesystem;
using ::testing::Test;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

const std::vector<std::string> kFormats = {"awq", "gptq", "compressed-tensors"};

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

TEST_F(Cli, InspectsEveryFormat) {
  for (const std::string& format : kFormats) {
    const auto json = nibble_json({"inspect", checkpoint(format), "--json", "--reference", checkpoint("float")});
    EXPECT_EQ(json["totals"]["quantized_modules"], 7);
    EXPECT_EQ(json["modules"].size(), 7u);
    for (const auto& module : json["modules"]) {
      EXPECT_EQ(module["format"], format);
      EXPECT_EQ(module["scheme"], format == "awq" ? "u4zg16" : "u4b8g16");
      EXPECT_TRUE(module["readable"]);
      EXPECT_GT(module["error"]["sqnr_db"].get<double>(), 10) << module;
      EXPECT_GT(module["bits_per_weight"].get<double>(), 4);
    }
    const Finished text = nibble({"inspect", checkpoint(format)});
    EXPECT_EQ(text.exit_code, 0);
    EXPECT_TRUE(contains(text.out, "7 quantized modules")) << text.out;
    EXPECT_FALSE(contains(text.out, "\033")) << "escape codes in a file";
    EXPECT_EQ(text.err, "");
  }
}

TEST_F(Cli, InspectSummaryHasEqualModulesInOneRow) {
  ASSERT_EQ(nibble({"sample", at("f"), "--shapes", "tiny", "--layers", "3"}).exit_code, 0);
  ASSERT_EQ(nibble({"quantize", at("f"), at("q"), "--format", "awq", "--scheme", "u4zg16"}).exit_code, 0);
  const std::vector<std::string> command = {"inspect", at("q"), "--summary", "--reference", at("f")};
  const Finished text = nibble(command);
  EXPECT_TRUE(contains(text.out, "model.layers.*.mlp.up_proj ×3 ")) << text.out;
  EXPECT_FALSE(contains(text.out, "layers.0.")) << text.out;
  EXPECT_TRUE(contains(text.out, "21 quantized modules")) << text.out;
  auto as_json = command;
  as_json.emplace_back("--json");
  const auto json = nibble_json(as_json);
  ASSERT_EQ(json["groups"].size(), 7u);
  EXPECT_EQ(json["modules"].size(), 21u);
  for (const auto& group : json["groups"]) {
    double worst = 1000;
    std::uint64_t bytes = 0;
    const std::string kind = group["name"].get<std::string>().substr(14, 8);  // behind "model.layers.*"
    for (const auto& module : json["modules"]) {
      if (!contains(module["name"], kind) || module["n"] != group["n"] || module["k"] != group["k"]) continue;
      if (!contains(group["name"], module["name"].get<std::string>().substr(14))) continue;
      worst = std::min(worst, module["error"]["sqnr_db"].get<double>());
      bytes += module["bytes"].get<std::uint64_t>();
    }
    EXPECT_EQ(group["worst_error"]["sqnr_db"], worst) << group;
    EXPECT_EQ(group["bytes"], bytes) << group;
  }
  EXPECT_TRUE(contains(nibble({"inspect", at("f"), "--summary"}).out, "model.layers.*.mlp.up_proj ×3")) << "of float models too";
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
  EXPECT_EQ(commands, 3);
}

TEST_F(Cli, TheFilesOfExamplesAreTheUsersOrMadeByThem) {
  for (const char* command : {"inspect", "verify", "bench", "quantize", "convert", "dequantize", "pack", "sample", "doctor"})
    EXPECT_FALSE(contains(nibble({command, "--help"}).out, "bench/")) << command << ": a path of the source tree";
}

TEST_F(Cli, InspectFiltersLayers) {
  const auto json = nibble_json({"inspect", checkpoint("awq"), "--json", "--layer", "mlp\\.(up|gate)_proj$"});
  EXPECT_EQ(json["modules"].size(), 2u);
}

TEST_F(Cli, InspectExplainsTheChoiceOfKernels) {
  const auto json = nibble_json({"inspect", checkpoint("awq"), "--json", "--explain"});
  ASSERT_FALSE(json["shapes"].empty());
  for (const auto& shape : json["shapes"]) {
    EXPECT_GE(shape["modules"], 1);
    std::int64_t next = 1;
    for (const auto& bucket : shape["buckets"]) {
      EXPECT_EQ(bucket["m_low"], next) << "buckets follow each other";
      next = bucket["m_high"].get<std::int64_t>() + 1;
      EXPECT_GT(bucket["predicted_us"].get<double>(), 0);
      EXPECT_FALSE(bucket["steps"].empty());
      for (const auto& candidate : bucket["candidates"]) {
        EXPECT_TRUE(candidate["accepted"].get<bool>() ? candidate.contains("predicted_us") : !candidate["refusal"].empty());
      }
    }
  }
  const auto described =
      nibble_json({"inspect", NIBBLE_SOURCE_DIR "/tests/golden/awq/g128", "--json", "--explain", "--gpu", "h200"});
  ASSERT_FALSE(described["shapes"].empty());
  EXPECT_THAT(described["shapes"].front()["buckets"].back()["steps"].back().get<std::string>(), ::testing::HasSubstr("__cuda_"));
  const Finished text = nibble({"inspect", checkpoint("awq"), "--explain"});
  EXPECT_TRUE(contains(text.out, "predicted µs")) << text.out;
  const Status gpu = runs_here(Isa::simt);
  EXPECT_TRUE(contains(text.out, " more: refused: " + (gpu.ok() ? "runs on the GPU: --backend cuda" : gpu.message())));
}

TEST_F(Cli, InspectTellsWhatEveryWayToRunALayerWouldCost) {
  const auto json = nibble_json({"inspect", checkpoint("awq"), "--json", "--explain", "--act-scheme", "s8zg32"});
  ASSERT_FALSE(json["shapes"].empty());
  for (const auto& shape : json["shapes"]) {
    EXPECT_TRUE(contains(shape["scheme"], "s8zg32_")) << shape["scheme"];
    std::vector<std::string> modes;
    for (const auto& mode : shape["modes"]) {
      modes.push_back(mode["mode"]);
      EXPECT_EQ(mode["m"].size(), mode["predicted_us"].size());
      for (const auto& us : mode["predicted_us"]) EXPECT_GT(us.get<double>(), 0);
    }
    EXPECT_EQ(modes, (std::vector<std::string>{"weight-only", "s8r", "s8zr", "s8g128", "s8zg128", "e4m3r", "dense f32"}));
  }
}

TEST_F(Cli, InspectMeasuresWhatQuantizingActivationsAdds) {
  const std::vector<std::string> command{"inspect", checkpoint("awq"), "--act-scheme", "s8r,s8g32,s8zg32,s8g24,e4m3r"};
  auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), command.begin(), command.end());
    return more;
  };
  const auto json = nibble_json(with({"--json"})), outliers = nibble_json(with({"--json", "--outliers", "100"}));
  EXPECT_EQ(json["added_error_of"], "Gaussian activations");
  for (std::size_t i = 0; i < json["modules"].size(); ++i) {
    const auto error = [&](const nlohmann::json& of, std::size_t way) {
      return of["modules"][i]["added_error"][way].value("relative_l2", -1.0);
    };
    EXPECT_GT(error(json, 0), error(json, 1)) << "blocks are finer than tokens";
    EXPECT_GT(error(json, 1), error(json, 2)) << "zero points use all codes";
    EXPECT_GT(error(json, 4), error(json, 0)) << "e4m3 has three bits of fraction";
    EXPECT_LT(error(json, 0), 0.02);
    EXPECT_GT(error(outliers, 0), 2 * error(outliers, 1)) << "an outlier takes its token's precision, or its block's";
    EXPECT_TRUE(contains(json["modules"][i]["added_error"][3]["refusal"], "do not line up"));
  }
  const Finished text = nibble(with({}));
  EXPECT_TRUE(contains(text.out, "s8zg32") && contains(text.out, "refused") && contains(text.out, "median")) << text.out;
  const auto all = nibble_json({"inspect", checkpoint("awq"), "--act-scheme", "all", "--layer", "q_proj", "--json"});
  EXPECT_EQ(all["modules"][0]["added_error"].size(), 9u);
}

TEST_F(Cli, InspectTakesTheInputsOfACalibration) {
  const auto model = Checkpoint::open(checkpoint("awq"));
  ASSERT_TRUE(model.ok());
  const Module& module = *std::ranges::find_if(model->modules(), &Module::quantized);
  const auto write = [&](std::int64_t k) {
    std::vector<float> inputs(static_cast<std::size_t>(3 * k), 0.5f);  // constant: int8 with a scale per block holds it exactly
    const auto* bytes = reinterpret_cast<const std::byte*>(inputs.data());
    std::vector<TensorSource> tensors;
    tensors.push_back({module.name + ".input", DType::f32, {3, k}, [all = std::vector(bytes, bytes + 12 * k)] {
                         return Result<std::vector<std::byte>>(all);
                       }});
    std::filesystem::remove(at("acts.safetensors"));
    ASSERT_TRUE(write_safetensors(at("acts.safetensors"), tensors).ok());
  };
  const std::vector<std::string> command{"inspect", checkpoint("awq"), "--act-scheme",
                                         "s8r",     "--calibration",   at("acts.safetensors")};
  write(module.k);
  auto as_json = command;
  as_json.emplace_back("--json");
  const auto json = nibble_json(as_json);
  EXPECT_LT(json["modules"][0]["added_error"][0]["relative_l2"].get<double>(), 1e-6);
  EXPECT_FALSE(json["modules"][1].contains("added_error")) << "nobody knows its inputs";
  EXPECT_TRUE(contains(nibble(command).out, "the calibration has no input of it"));
  write(module.k + 8);
  const Finished wrong = nibble(command);
  EXPECT_EQ(wrong.exit_code, 2) << wrong.err;
  EXPECT_TRUE(contains(wrong.err, "inputs must be")) << wrong.err;
}

TEST_F(Cli, VerifyTellsTheAddedError) {
  const auto json = nibble_json({"verify", checkpoint("awq"), "--json", "-M", "3", "--act-scheme", "s8zg32"});
  for (const auto& result : json["results"]) {
    EXPECT_GT(result["added_error"].get<double>(), 1e-4);
    EXPECT_LT(result["added_error"].get<double>(), 2e-2);
  }
  EXPECT_FALSE(nibble_json({"verify", checkpoint("awq"), "--json", "-M", "1"})["results"][0].contains("added_error"));
}

TEST_F(Cli, AccumulationIsAskedForAndTold) {
  const std::vector<std::string> verify{"verify", checkpoint("awq"), "-M", "2", "--act-scheme", "e4m3r"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), verify.begin(), verify.end());
    return more;
  };
  EXPECT_EQ(nibble_json(with({"--json"}))["accumulation"], "fast");
  EXPECT_EQ(nibble_json(with({"--json", "--accumulation", "precise"}))["accumulation"], "precise");
  const Finished text = nibble(with({"--accumulation", "precise"}));
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "activations f32 as e4m3r, accumulation precise")) << text.out;
  const Finished wrong = nibble(with({"--accumulation", "exact"}));
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_TRUE(contains(wrong.err, "--accumulation") && contains(wrong.err, "precise")) << wrong.err;
  EXPECT_EQ(nibble({"inspect", checkpoint("awq"), "--explain", "--act-scheme", "e4m3r", "--accumulation", "precise"}).exit_code,
            0);
  EXPECT_EQ(nibble({"inspect", checkpoint("awq"), "--accumulation", "precise"}).exit_code, 2) << "of what?";
}

TEST_F(Cli, InspectOfAFloatCheckpointListsItsModules) {
  const Finished text = nibble({"inspect", checkpoint("float")});
  EXPECT_EQ(text.exit_code, 0);
  EXPECT_TRUE(contains(text.out, "model.layers.0.mlp.down_proj")) << text.out;
  EXPECT_EQ(nibble_json({"inspect", checkpoint("float"), "--json"})["totals"]["quantized_modules"], 0);
}

TEST_F(Cli, InspectTellsWhenTheConfigContradictsTheTensors) {
  const std::string path = copy_of("awq");
  auto config = nlohmann::json::parse(slurp(path + "/config.json"));
  config["quantization_config"]["group_size"] = 64;
  spit(path + "/config.json", config.dump());
  const auto json = nibble_json({"inspect", path, "--json"});
  EXPECT_EQ(json["modules"][0]["scheme"], "u4zg16");
  const bool noted = !json["notes"].empty() || !json["modules"][0]["notes"].empty();
  EXPECT_TRUE(noted) << json["modules"][0];
}

TEST_F(Cli, VerifiesEveryFormat) {
  for (const std::string& format : kFormats) {
    const auto json = nibble_json({"verify", checkpoint(format), "--json", "-M", "1,3", "--a-dtype", "bf16", "--threads", "2"});
    EXPECT_TRUE(json["passed"]);
    EXPECT_EQ(json["results"].size(), 14u);
    for (const auto& result : json["results"]) {
      EXPECT_LE(result["worst_error_over_bound"].get<double>(), 1);
      EXPECT_TRUE(result["round_trip"]);
      EXPECT_TRUE(result["repeatable"]);
      EXPECT_EQ(result["checked"], result["m"].get<int>() * result["n"].get<int>());
    }
  }
}

TEST_F(Cli, VerifyRunsTheKernelItIsTold) {
  const auto kernels = nibble_json({"doctor", "--kernels", "--json"})["kernels"];
  ASSERT_FALSE(kernels.empty());
  for (const auto& kernel : kernels) {
    if (kernel["op"] != "linear" || kernel["backend"] == "cuda" || !kernel["runs_here"]) continue;
    // linear_out_act_weight__...: some kernels take one type of activations only.
    const std::string name = kernel["name"], after_out = name.substr(name.find('_', name.find('_') + 1) + 1);
    const std::string act = after_out.substr(0, after_out.find('_'));
    std::vector<std::string> command = {"verify",
                                        checkpoint("gptq"),
                                        "--json",
                                        "--layer",
                                        "k_proj",
                                        "-M",
                                        "2",
                                        "--kernel",
                                        name,
                                        "--a-dtype",
                                        act.starts_with("bf16") ? "bf16" : "f32"};
    if (name.find("_whole_") != std::string::npos) continue;  // this layer has groups
    if (act == "s8" || act == "s8k64") {
      EXPECT_EQ(nibble(command).exit_code, 3) << name << " quantizes activations, which was not asked for";
      command.insert(command.end(), {"--act-scheme", "s8r"});
    }
    EXPECT_EQ(nibble_json(command)["results"][0]["kernel"], name);
  }
}

TEST_F(Cli, BenchOfACheckpointHasAllFields) {
  const Finished run = nibble({"bench", checkpoint("awq"), "-M", "1,4", "--min-time", "0.001", "--json", at("b.json"), "--report",
                               at("r.html"), "--reference", checkpoint("float")},
                              {.environment = {"NIBBLE_COMMIT=abc123"}});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "roofline")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  EXPECT_EQ(json["schema"], 1);
  EXPECT_EQ(json["commit"], "abc123");
  EXPECT_EQ(json["date"].get<std::string>().size(), std::string("2026-01-01T00:00:00Z").size());
  EXPECT_GT(json["device"]["read_gbytes_per_s"].get<double>(), 0);
  EXPECT_TRUE(json["device"]["cpu"].is_string());
  EXPECT_GT(json["device"]["f32_gflops"].get<double>(), 0);
  EXPECT_GT(json["device"]["int8_gops"].get<double>(), 0);
  EXPECT_GE(json["device"]["bf16_gflops"].get<double>(), 0);
  EXPECT_FALSE(json.contains("regret"));
  // Seven modules of five shapes: q and o are alike, k and v, gate and up.
  EXPECT_EQ(json["results"].size(), 2u * 4u);
  for (const auto& r : json["results"]) {
    for (const char* text : {"name", "scheme", "a_dtype", "backend", "kernel", "bound", "peak"})
      EXPECT_TRUE(r[text].is_string()) << text;
    for (const char* number : {"m", "n", "k", "median_us", "gbytes_per_s", "gflops", "roofline_percent", "memory_percent",
                               "compute_percent", "ceiling_gbytes_per_s", "ceiling_gops"}) {
      EXPECT_GT(r[number].get<double>(), 0) << number;
    }
    EXPECT_EQ(r["peak"], "f32");
    EXPECT_EQ(r["round_percents"].size(), 7u);
    EXPECT_TRUE(r["bound"] == "memory" || r["bound"] == "compute");
    EXPECT_TRUE(r["baselines"].is_object());
    EXPECT_GE(r["samples"], 7);
  }
  const std::string page = slurp(at("r.html"));
  EXPECT_TRUE(contains(page, "<html") && contains(page, "</html>") && contains(page, "down_proj"));
  EXPECT_EQ(listing(directory_), (std::vector<std::string>{"b.json", "r.html"}));
}

TEST_F(Cli, BenchOfShapes) {
  spit(at("shapes.txt"), "# a comment\n48 64 first\n3 32 128 fixed\n");
  const Finished run =
      nibble({"bench", "--shapes", at("shapes.txt"), "-M", "1,2", "--scheme", "u4b8g32", "--a-dtype", "f16", "--all-kernels",
              "--no-baselines", "--min-time", "0.001", "--json", at("b.json"), "--report", at("r.html")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  std::vector<std::int64_t> rows;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  for (const auto& r : json["results"]) {
    EXPECT_EQ(r["scheme"], "u4b8g32");
    EXPECT_EQ(r["a_dtype"], "f16");
    EXPECT_TRUE(r["baselines"].empty());
    rows.push_back(r["m"]);
  }
  EXPECT_EQ(std::count(rows.begin(), rows.end(), 3) * 3, static_cast<std::ptrdiff_t>(rows.size())) << "a fixed M overrides -M";
}

/// Its four products, each alone, and the block: what it moves and computes is what they do.
TEST_F(Cli, BenchOfABlock) {
  const Finished run = nibble({"bench", "--block", "128,192,4,2,32", "-M", "1,5", "--scheme", "u4zg64,s8r_s8c,s8g32_u4b8g32",
                               "--a-dtype", "f32,bf16", "--rounds", "2", "--min-time", "0.001", "--json", at("b.json")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "gate_up (glu) (rms norm)") && contains(run.out, "block: its four products")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  const auto& results = json["results"];
  ASSERT_EQ(results.size(), 5u * 3u * 2u * 2u);
  struct Expected {
    const char* name;
    std::int64_t n, k;
  };
  constexpr Expected kExpected[] = {
      {"qkv", 256, 128}, {"o", 128, 128}, {"gate_up", 384, 128}, {"down", 128, 192}, {"block", 128, 128}};
  for (std::size_t i = 0; i < results.size(); i += 5) {
    double bytes = 0, operations = 0;
    for (std::size_t j = 0; j < 5; ++j) {
      const auto& r = results[i + j];
      const double us = r["median_us"], moved = r["gbytes_per_s"].get<double>() * us, done = r["gflops"].get<double>() * us;
      EXPECT_EQ(r["name"], kExpected[j].name);
      EXPECT_EQ(r["n"], kExpected[j].n);
      EXPECT_EQ(r["k"], kExpected[j].k);
      EXPECT_EQ(r["block"]["intermediate"], 192);
      EXPECT_EQ(r.contains("norm"), j == 0 || j == 2) << r;
      EXPECT_EQ(r.contains("glu"), j == 2) << r;
      EXPECT_EQ(r["kernel"] == "", j == 4) << r;
      EXPECT_GT(r["roofline_percent"].get<double>(), 0);
      if (j == 4) {
        EXPECT_NEAR(moved, bytes, 1e-6 * bytes);
        EXPECT_NEAR(done, operations, 1e-6 * operations);
      }
      bytes += moved, operations += done;
    }
  }
  EXPECT_EQ(nibble({"bench", "--compare", at("b.json"), at("b.json"), "--fail-under", "0.99"}).exit_code, 0);
}

TEST_F(Cli, BenchOfConvolutions) {
  spit(at("conv.txt"),
       "# a comment\n16 9x7 24 3 first stride=2 padding=1\n3 16 5 16 3 depthwise padding=1 groups=16\n"
       "96 20x30 64 1 pointwise\n");
  const auto bench = [&](const std::string& json, std::vector<std::string> more) {
    std::vector<std::string> command{"bench", "--conv", at("conv.txt"), "--min-time", "0.001", "--json", at(json)};
    command.insert(command.end(), more.begin(), more.end());
    return nibble(command);
  };
  const Finished run = bench("a.json", {"--batch", "1,2", "--a-dtype", "f16", "--image-layout", "nhwc"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "output pixels")) << run.out;
  const auto results = nlohmann::json::parse(slurp(at("a.json")))["results"];
  ASSERT_EQ(results.size(), 2u + 1u + 2u) << "a batch in the file overrides --batch";
  const auto& r = results[1];
  EXPECT_EQ(r["name"], "first");
  EXPECT_EQ(r["m"], 2 * 5 * 4);
  EXPECT_EQ(r["n"], 24);
  EXPECT_EQ(r["k"], 9 * 16);
  EXPECT_EQ(r["scheme"], "s8t_s8c");
  EXPECT_EQ(r["peak"], "int8");
  EXPECT_EQ(r["conv"]["batch"], 2);
  EXPECT_EQ(r["conv"]["stride"], (std::vector<int>{2, 2}));
  EXPECT_EQ(r["conv"]["padding"], (std::vector<int>{1, 1, 1, 1}));
  EXPECT_EQ(r["conv"]["input"], "nhwc");
  EXPECT_NEAR(r["gflops"].get<double>(), 2e-3 * 40 * 24 * 144 / r["median_us"].get<double>(), 1e-6);
  EXPECT_TRUE(r["kernel"].get<std::string>().starts_with("conv_")) << r;
  EXPECT_EQ(results[2]["conv"]["groups"], 16);
  EXPECT_EQ(results[2]["k"], 9);
  EXPECT_TRUE(results[3]["kernel"].get<std::string>().starts_with("linear_")) << "pixels are rows of a matrix";

  const Finished weights = bench("b.json", {"--scheme", "u4b8g16", "--act-scheme", "s8r", "--layer", "first|point"});
  ASSERT_EQ(weights.exit_code, 0) << weights.err;
  EXPECT_EQ(nlohmann::json::parse(slurp(at("b.json")))["results"][0]["scheme"], "s8r_u4b8g16");
  const Finished compared = nibble({"bench", "--compare", at("a.json"), at("a.json")});
  EXPECT_EQ(compared.exit_code, 0) << compared.err;
  EXPECT_TRUE(contains(compared.out, "5 results compared")) << compared.out;

  const Finished all = bench("c.json", {"--all-kernels", "--layer", "point", "--image-layout", "nhwc:nchw"});
  ASSERT_EQ(all.exit_code, 0) << all.err;
  EXPECT_EQ(nlohmann::json::parse(slurp(at("c.json")))["regret"]["choices"], 1);

  spit(at("conv.txt"), "16 9x7 24 3 first\n16 9x7 24 3 first stride=two\n");
  const Finished wrong = bench("d.json", {});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_TRUE(contains(wrong.err, "conv.txt:2: stride is 'two'; expected a whole number from 1")) << wrong.err;
  spit(at("conv.txt"), "16 9x7 24 3 first\n");
  EXPECT_EQ(bench("d.json", {"--scheme", "s8r_s8c", "--act-scheme", "s8t"}).exit_code, 2) << "which of them?";
}

TEST_F(Cli, ConvolutionsOfACheckpoint) {
  const auto tensor = [](const std::string& name, std::vector<std::int64_t> shape) {
    return TensorSource{
        .name = name, .dtype = DType::f32, .shape = shape, .produce = [shape]() -> Result<std::vector<std::byte>> {
          Tensor t(DType::f32, shape);
          for (std::int64_t i = 0; i < t.numel(); ++i) t.set(i, static_cast<float>((i * 37) % 101) / 50 - 1);
          return t.bytes;
        }};
  };
  const std::vector<TensorSource> tensors{tensor("stem.weight", {24, 16, 3, 3}), tensor("stem.bias", {24}),
                                          tensor("depthwise.weight", {24, 1, 3, 3}), tensor("pointwise.weight", {8, 24, 1, 1})};
  ASSERT_TRUE(write_safetensors(at("float.safetensors"), tensors).ok());
  EXPECT_EQ(nibble({"quantize", at("float.safetensors"), at("q.safetensors"), "--format", "int-quantized"}).exit_code, 2)
      << "convolutions are not asked for";
  const Finished quantized =
      nibble({"quantize", at("float.safetensors"), at("q.safetensors"), "--format", "int-quantized", "--convolutions"});
  ASSERT_EQ(quantized.exit_code, 0) << quantized.err;

  const Finished table = nibble({"inspect", at("q.safetensors")});
  EXPECT_TRUE(contains(table.out, "filter") && contains(table.out, "3x3")) << table.out;
  const auto inspected = nibble_json({"inspect", at("q.safetensors"), "--reference", at("float.safetensors"), "--json"});
  ASSERT_EQ(inspected["modules"].size(), 3u);
  for (const auto& module : inspected["modules"]) {
    const std::vector<int> filter = module["name"] == "pointwise" ? std::vector{1, 1} : std::vector{3, 3};
    EXPECT_EQ(module["filter"], filter);
    EXPECT_GT(module["error"]["sqnr_db"].get<double>(), 30) << "the reference is compared in the same order";
  }
  for (const std::string layout : {"nchw", "nhwc"}) {
    const auto verified = nibble_json({"verify", at("q.safetensors"), "-M", "1,2", "--image", "6x9", "--image-layout", layout,
                                       "--act-scheme", "s8r", "--json"});
    EXPECT_EQ(verified["passed"], true) << verified;
    EXPECT_EQ(verified["results"].size(), 6u);
    EXPECT_EQ(verified["results"][1]["checked"], 2 * 6 * 9 * 24);
  }
  const Finished wrong = nibble({"verify", at("q.safetensors"), "--image", "6by9"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_TRUE(contains(wrong.err, "--image is '6by9'")) << wrong.err;
  const Finished bench = nibble({"bench", at("q.safetensors")});
  EXPECT_TRUE(contains(bench.err, "--conv FILE")) << bench.err;
}

TEST_F(Cli, BenchHoldsEachModeAgainstItsPeak) {
  spit(at("shapes.txt"), "48 256 first\n32 256 second\n");
  const Finished run =
      nibble({"bench", "--shapes", at("shapes.txt"), "-M", "1,2", "--scheme", "u4b8g128,s8g128_u4b8g128,s8r_s8c", "--a-dtype",
              "f32,bf16", "--no-baselines", "--min-time", "0.001", "--json", at("b.json"), "--report", at("r.html")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "Gop/s int8")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  EXPECT_EQ(json["results"].size(), 2u * 2u * 3u * 2u);
  const bool has_bf16 = json["device"]["bf16_gflops"] > 0;
  for (const auto& r : json["results"]) {
    const bool dynamic = r["scheme"] == "s8g128_u4b8g128" || r["scheme"] == "s8r_s8c";
    EXPECT_TRUE(dynamic || r["scheme"] == "u4b8g128") << r;
    EXPECT_EQ(r["peak"], dynamic ? "int8" : r["a_dtype"] == "bf16" && has_bf16 ? "bf16" : "f32") << r;
    const double best = json["device"][r["peak"] == "int8" ? "int8_gops" : r["peak"] == "bf16" ? "bf16_gflops" : "f32_gflops"];
    EXPECT_LE(r["ceiling_gops"].get<double>(), best) << "the device's ceiling is the best of all";
  }
  EXPECT_TRUE(contains(slurp(at("r.html")), "s8r_s8c × bf16"));
}

TEST_F(Cli, BenchLeavesOutWhatASchemeDoesNotFit) {
  spit(at("conv.txt"), "16 9x7 24 3 narrow\n96 5x6 64 1 pointwise\n");
  const std::vector<std::string> command{"bench", "--conv", at("conv.txt"), "--scheme", "s8g32_u4b8g32", "--min-time", "0.001"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), command.begin(), command.end());
    return nibble(more);
  };
  const Finished run = with({"--json", at("b.json")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "left out: narrow: ")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  ASSERT_EQ(json["results"].size(), 1u);
  EXPECT_EQ(json["results"][0]["name"], "pointwise");
  EXPECT_EQ(json["left_out"].size(), 1u);
  const Finished none = with({"--layer", "narrow"});
  EXPECT_EQ(none.exit_code, 3);
  EXPECT_TRUE(contains(none.err, "narrow: ")) << none.err;
}

TEST_F(Cli, BenchLeavesOutAnActivationTypeAlone) {
  spit(at("shapes.txt"), "64 128 small\n");
  const std::vector<std::string> command{"bench", "--shapes", at("shapes.txt"), "--scheme", "s8r_s8c",
                                         "-M",    "1",        "--min-time",     "0.001"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), command.begin(), command.end());
    return nibble(more);
  };
  const Finished run = with({"--a-dtype", "e4m3,f32", "--json", at("b.json")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "left out: small × e4m3: ")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  ASSERT_EQ(json["results"].size(), 1u);
  EXPECT_EQ(json["results"][0]["a_dtype"], "f32");
  const Finished none = with({"--a-dtype", "e4m3"});
  EXPECT_EQ(none.exit_code, 3);
  EXPECT_TRUE(contains(none.err, "small: ")) << none.err;
}

TEST_F(Cli, BenchTakesActivationsThatAreCodes) {
  spit(at("shapes.txt"), "96 256 some_layer\n");
  spit(at("conv.txt"), "16 9x7 24 3 some_layer padding=1\n");
  const std::string linear = "s8r_s8c,s8zr_s8c,s8g128_u4b8g128,s8zg64_u4b8g64,s8t_s8c";
  for (const std::vector<std::string>& source : std::vector<std::vector<std::string>>{
           {"--shapes", at("shapes.txt"), "-M", "3", "--a-dtype", "s8", "--scheme", linear},
           {"--shapes", at("shapes.txt"), "-M", "3", "--a-dtype", "e4m3", "--scheme", "e4m3r_e4m3c,e4m3g128_e4m3g128"},
           {"--conv", at("conv.txt"), "--a-dtype", "s8", "--scheme", "s8t_s8c,s8zt_s8c"}}) {
    std::vector<std::string> command{"bench", "--no-baselines", "--min-time", "0.001", "--json", at("b.json")};
    command.insert(command.end(), source.begin(), source.end());
    const Finished run = nibble(command);
    ASSERT_EQ(run.exit_code, 0) << run.err;
    const auto json = nlohmann::json::parse(slurp(at("b.json")));
    for (const auto& r : json["results"]) EXPECT_GT(r["median_us"], 0) << r;
  }
  const Finished floats = nibble({"bench", "--shapes", at("shapes.txt"), "--a-dtype", "s8"});
  EXPECT_TRUE(contains(floats.err, "activations of type s8")) << floats.err;
}

TEST_F(Cli, BenchOfOperationsWithoutAProduct) {
  spit(at("shapes.txt"), "40 256 a\n3 24 512 b\n");
  const auto bench = [&](const char* operation, const char* schemes) {
    const Finished run = nibble({"bench", "--shapes", at("shapes.txt"), "-M", "1,4", "--operation", operation, "--scheme",
                                 schemes, "--a-dtype", "f32,bf16", "--min-time", "0.001", "--json", at("b.json")});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_FALSE(contains(run.out, "baseline")) << run.out;
    EXPECT_EQ(nibble({"bench", "--compare", at("b.json"), at("b.json"), "--fail-under", "1"}).exit_code, 0);
    auto json = nlohmann::json::parse(slurp(at("b.json")));
    for (const auto& r : json["results"]) {
      EXPECT_EQ(r["operation"], operation);
      EXPECT_EQ(r["bound"], "memory");
      EXPECT_GT(r["memory_percent"], 0);
      EXPECT_EQ(r["compute_percent"], 0);
      EXPECT_TRUE(r["baselines"].empty());
      const double bytes = r["gbytes_per_s"].get<double>() * r["median_us"].get<double>() * 1e3;
      const double n = r["n"], k = r["k"], m = r["m"], a = r["a_dtype"] == "f32" ? 4 : 2;
      if (r["scheme"] == "s8r_s8c") {
        EXPECT_NEAR(bytes, m * k * (a + 1) + 4 * m, 1);
      } else if (r["scheme"] == "s8zg128_u4zg128") {
        EXPECT_NEAR(bytes, m * k * (a + 1) + 2 * 4 * m * k / 128, 1);
      } else {
        EXPECT_GT(bytes, n * k * (a + 0.5));
      }
    }
    return json;
  };
  // Two layers and two types, each in two orders.
  const auto dequantized = bench("dequantize", "u4zg128");
  ASSERT_EQ(dequantized["results"].size(), 8u);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(dequantized["results"][i].value("transposed", false), i % 2 == 1);
  // Two schemes and two types; the second layer has an M of its own.
  const auto quantized = bench("quantize", "s8r_s8c,s8zg128_u4zg128,u4zg128");
  EXPECT_EQ(quantized["results"].size(), 12u);
  EXPECT_TRUE(contains(quantized["left_out"][0], "does not quantize activations"));
  const Finished none = nibble({"bench", "--shapes", at("shapes.txt"), "--operation", "quantize"});
  EXPECT_TRUE(contains(none.err, "does not quantize activations")) << none.err;
}

TEST_F(Cli, BenchOfACheckpointQuantizesActivations) {
  const Finished run = nibble({"bench", checkpoint("gptq"), "-M", "2", "--layer", "k_proj", "--act-scheme", "s8r",
                               "--no-baselines", "--min-time", "0.001", "--json", at("b.json"), "--report", at("r.html")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  EXPECT_EQ(json["results"][0]["scheme"], "s8r_u4b8g16");
  EXPECT_EQ(json["results"][0]["peak"], "int8");
  EXPECT_TRUE(contains(slurp(at("r.html")), "s8r_u4b8g16"));
}

TEST_F(Cli, BenchOfAllKernelsTellsTheRegret) {
  spit(at("shapes.txt"), "64 128 a\n");
  const Finished run = nibble({"bench", "--shapes", at("shapes.txt"), "-M", "1,16", "--all-kernels", "--no-baselines",
                               "--min-time", "0.001", "--json", at("b.json")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "regret: the chosen kernel was at most")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  EXPECT_EQ(json["regret"]["choices"], 2);
  EXPECT_GE(json["regret"]["max_ratio"].get<double>(), json["regret"]["median_ratio"].get<double>());
  EXPECT_GE(json["regret"]["median_ratio"].get<double>(), 1);
  EXPECT_EQ(json["regret"]["worst"]["name"], "a");
  std::size_t chosen = 0;
  for (const auto& r : json["results"]) chosen += r["chosen"].get<bool>();
  EXPECT_EQ(chosen, 2u);
}

TEST_F(Cli, CompareFindsRegressions) {
  const auto result = [](double us) {
    return nlohmann::json({{"schema", 1},
                           {"results",
                            {{{"name", "a"},
                              {"m", 1},
                              {"n", 2},
                              {"k", 3},
                              {"scheme", "u4zg128"},
                              {"a_dtype", "f32"},
                              {"backend", "cpu"},
                              {"kernel", "fast"},
                              {"median_us", us}}}}})
        .dump();
  };
  spit(at("slow.json"), result(200));
  spit(at("fast.json"), result(100));
  const Finished better = nibble({"bench", "--compare", at("slow.json"), at("fast.json"), "--fail-under", "1.9"});
  EXPECT_EQ(better.exit_code, 0) << better.out << better.err;
  EXPECT_TRUE(contains(better.out, "2.000")) << better.out;
  const Finished worse = nibble({"bench", "--compare", at("fast.json"), at("slow.json"), "--fail-under", "0.9"});
  EXPECT_EQ(worse.exit_code, 1);
  EXPECT_TRUE(contains(worse.out, "regression: 0.500 is below 0.900")) << worse.out;
  EXPECT_EQ(nibble({"bench", "--compare", at("fast.json"), at("slow.json")}).exit_code, 0) << "no limit was asked for";

  nlohmann::json other = nlohmann::json::parse(result(100));
  other["results"][0]["d_dtype"] = "f16";  // files that do not say wrote the type of the activations
  spit(at("other.json"), other.dump());
  const Finished different = nibble({"bench", "--compare", at("slow.json"), at("other.json")});
  EXPECT_EQ(different.exit_code, 2);
  EXPECT_TRUE(contains(different.err, "no result in common")) << different.err;

  nlohmann::json both = nlohmann::json::parse(result(100));  // files that do not say called back to back
  both["results"].push_back(both["results"][0]);
  both["results"][0]["calls"] = "isolated";
  both["results"][1]["calls"] = "back-to-back";
  both["results"][1]["median_us"] = 50;
  spit(at("both.json"), both.dump());
  const auto matched = nibble_json({"bench", "--compare", at("slow.json"), at("both.json"), "--json"});
  ASSERT_EQ(matched["results"].size(), 1u);
  EXPECT_EQ(matched["results"][0]["speed_up"], 4);
  EXPECT_TRUE(contains(nibble({"bench", "--compare", at("both.json"), at("both.json")}).out, "a (isolated)"));
}

TEST_F(Cli, QuantizeTellsTheErrorOfEachModule) {
  const Finished run = nibble({"quantize", checkpoint("float"), at("out"), "--format", "gptq", "--scheme", "u8b128c",
                               "--clip-search", "--scale-dtype", "f16", "--skip", "embed|lm_head|q_proj"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "6 modules quantized")) << run.out;
  EXPECT_TRUE(contains(run.out, "SQNR")) << run.out;
  const auto json = nibble_json({"inspect", at("out"), "--json"});
  for (const auto& module : json["modules"]) EXPECT_EQ(module["scheme"], "u8b128c");
}

TEST_F(Cli, QuantizesBothSides) {
  const struct {
    std::vector<std::string> options;
    std::string weight, activations;
  } cases[] = {
      {{"--format", "int-quantized"}, "s8c", "s8r"},
      {{"--format", "int-quantized", "--scheme", "s8r_s8zg16"}, "s8zg16", "s8r"},
      {{"--format", "int-quantized", "--scheme", "s8r_s8t", "--clip-search"}, "s8t", "s8r"},
      {{"--format", "float-quantized"}, "e4m3c", "e4m3r"},
      {{"--format", "float-quantized", "--scheme", "e4m3r_e4m3t", "--scale-dtype", "bf16"}, "e4m3t", "e4m3r"},
      {{"--format", "fp8"}, "e4m3b128x128", "e4m3g128"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.options[1] + " " + c.weight);
    std::vector<std::string> command = {"quantize", checkpoint("float"), at("out"), "--force"};
    command.insert(command.end(), c.options.begin(), c.options.end());
    const Finished run = nibble(command);
    ASSERT_EQ(run.exit_code, 0) << run.err;
    EXPECT_TRUE(contains(run.out, c.activations + "_" + c.weight)) << run.out;
    const auto json = nibble_json({"inspect", at("out"), "--json", "--reference", checkpoint("float")});
    for (const auto& module : json["modules"]) {
      EXPECT_EQ(module["format"], c.options[1]);
      EXPECT_EQ(module["scheme"], c.weight);
      EXPECT_EQ(module["activations"]["scheme"], c.activations);
      EXPECT_FALSE(module["activations"].contains("static"));
      EXPECT_EQ(module["notes"].size(), 0u) << module;
      EXPECT_GT(module["error"]["sqnr_db"].get<double>(), 25);
    }
    const Finished text = nibble({"inspect", at("out")});
    EXPECT_TRUE(contains(text.out, "activations") && contains(text.out, c.activations)) << text.out;
    EXPECT_FALSE(contains(text.out, "config says")) << text.out;
    const auto verified = nibble_json({"verify", at("out"), "--json", "-M", "2"});
    EXPECT_TRUE(verified["passed"]);
    for (const auto& result : verified["results"]) EXPECT_EQ(result["act_scheme"], c.activations) << "as the checkpoint says";
  }
  const auto weights = nibble_json({"verify", at("out"), "--json", "-M", "2", "--act-scheme", "none"});
  for (const auto& result : weights["results"]) EXPECT_FALSE(result.contains("act_scheme")) << result;
  for (const bool none : {false, true}) {
    std::vector<std::string> command = {"bench",          at("out"), "-M",     "1",      "--min-time", "0.001",
                                        "--no-baselines", "--layer", "k_proj", "--json", at("b.json")};
    if (none) command.insert(command.end(), {"--act-scheme", "none"});
    ASSERT_EQ(nibble(command).exit_code, 0);
    const auto measured = nlohmann::json::parse(slurp(at("b.json")));
    for (const auto& result : measured["results"]) EXPECT_EQ(result["scheme"], none ? "e4m3b128x128" : "e4m3g128_e4m3b128x128");
  }
}

TEST_F(Cli, AWayOutWhereActivationsCannotBeAsTheCheckpointSays) {
  ASSERT_EQ(nibble({"quantize", checkpoint("float"), at("out"), "--format", "int-quantized"}).exit_code, 0);
  auto config = nlohmann::json::parse(slurp(at("out/config.json")));
  auto& acts = config["quantization_config"]["config_groups"]["group_0"]["input_activations"];
  acts["dynamic"] = false;
  acts["strategy"] = "tensor";
  spit(at("out/config.json"), config.dump());
  const Finished run = nibble({"verify", at("out"), "-M", "1"});
  EXPECT_NE(run.exit_code, 0);
  EXPECT_TRUE(contains(run.err, "static_acts") && contains(run.err, "--act-scheme none leaves them as they are")) << run.err;
  EXPECT_EQ(nibble({"verify", at("out"), "-M", "1", "--act-scheme", "none"}).exit_code, 0);
}

TEST_F(Cli, QuantizeChoosesByName) {
  const std::vector<std::string> quantize = {"quantize", checkpoint("float"), at("out"), "--format", "awq", "--scheme", "u4zg16"};
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> command = quantize;
    command.insert(command.end(), more.begin(), more.end());
    return nibble(command);
  };
  const Finished whole = with({"--dry-run"});
  EXPECT_TRUE(contains(whole.out, "7 modules would be quantized; nothing was written")) << whole.out;
  EXPECT_TRUE(contains(whole.out, "lm_head: left as it is: an output head")) << whole.out;
  const Finished plan = with({"--dry-run", "--only", "k_proj$", "--only", "v_proj$", "--skip", "layers.1", "--skip", "layers.2"});
  ASSERT_EQ(plan.exit_code, 0) << plan.err;
  EXPECT_TRUE(contains(plan.out, "model.layers.0.self_attn.k_proj") && contains(plan.out, "u4zg16")) << plan.out;
  EXPECT_TRUE(contains(plan.out, "2 modules would be quantized; nothing was written")) << plan.out;
  EXPECT_TRUE(contains(plan.out, "in 7 modules, e.g. model.embed_tokens: left as it is: the only expression")) << plan.out;
  EXPECT_TRUE(listing(directory_).empty());
  EXPECT_EQ(with({"--only", "*"}).exit_code, 2);
  const Finished heads = with({"--only", "lm_head"});
  EXPECT_EQ(heads.exit_code, 2);
  EXPECT_TRUE(contains(heads.err, "lm_head: an output head (--all takes it)")) << heads.err;
  EXPECT_EQ(with({"--only", "lm_head", "--all"}).exit_code, 0);
  EXPECT_TRUE(contains(nibble({"quantize", "--help"}).out, "containers, not algorithms"));
}

TEST_F(Cli, InspectFiltersFloatModels) {
  const auto all = nibble_json({"inspect", checkpoint("float"), "--json"})["dense_modules"].size();
  const auto some = nibble_json({"inspect", checkpoint("float"), "--json", "--layer", "k_proj"})["dense_modules"];
  EXPECT_GT(all, some.size());
  for (const auto& module : some) EXPECT_TRUE(contains(module["name"], "k_proj")) << module;
  EXPECT_FALSE(contains(nibble({"inspect", checkpoint("float"), "--layer", "k_proj"}).out, "lm_head"));
}

TEST_F(Cli, DenseLayersAreTakenWhereAskedFor) {
  const std::string head = "lm_head", floats = checkpoint("float");
  const auto verified = nibble_json({"verify", floats, "--dense", "--layer", head, "-M", "1", "--json"});
  EXPECT_EQ(verified["passed"], true);
  ASSERT_EQ(verified["results"].size(), 1u);
  EXPECT_EQ(verified["results"][0]["scheme"], "bf16");
  EXPECT_EQ(nibble({"verify", floats, "--layer", head}).exit_code, 2);
  EXPECT_EQ(nibble({"pack", floats, at("head.nibble"), "--layer", head}).exit_code, 2);
  const Finished packed = nibble({"pack", floats, at("head.nibble"), "--layer", head, "--dense"});
  ASSERT_EQ(packed.exit_code, 0) << packed.err;
  EXPECT_TRUE(contains(nibble({"verify", floats, "--packed", at("head.nibble")}).out, "all the same"));
  const auto inspected = nibble_json({"inspect", floats, "--dense", "--layer", head, "--explain", "--json"});
  EXPECT_EQ(inspected["modules"].size(), 1u);
  EXPECT_EQ(inspected["dense_modules"].size(), 0u);
}

TEST_F(Cli, InspectEndsWithItsWorstFinding) {
  const auto tensor = [](const std::string& name, DType dtype, std::vector<std::int64_t> shape) {
    Tensor t(dtype, shape);
    return TensorSource{name, dtype, shape, [bytes = t.bytes]() -> Result<std::vector<std::byte>> { return bytes; }};
  };
  const std::vector<TensorSource> hqq = {tensor("a.W_q", DType::u8, {8, 8}), tensor("a.scale", DType::f16, {8, 1})};
  const std::vector<TensorSource> broken = {tensor("b.qweight", DType::s32, {32, 2}), tensor("b.qzeros", DType::s32, {3, 2}),
                                            tensor("b.scales", DType::f16, {2, 16})};
  const auto inspect = [&](std::vector<TensorSource> tensors, const std::vector<TensorSource>& more) {
    tensors.insert(tensors.end(), more.begin(), more.end());
    EXPECT_TRUE(write_safetensors(at("x.safetensors"), tensors, {}, true).ok());
    return nibble({"inspect", at("x.safetensors")});
  };
  const Finished unsupported = inspect(hqq, {});
  EXPECT_EQ(unsupported.exit_code, 3);
  EXPECT_TRUE(contains(unsupported.err, "HQQ")) << unsupported.err;
  const Finished both = inspect(hqq, broken);
  EXPECT_EQ(both.exit_code, 4);
  EXPECT_TRUE(contains(both.err, "2 errors; the worst: b.qzeros is s32 [3,2]")) << both.err;
  EXPECT_EQ(inspect({}, {tensor("c.weight", DType::f32, {8, 8})}).exit_code, 0);
}

TEST_F(Cli, SmoothsWithACalibration) {
  std::vector<TensorSource> tensors;
  const auto model = Checkpoint::open(checkpoint("float"));
  ASSERT_TRUE(model.ok());
  for (const Module& module : model->modules()) {
    const std::vector<float> absmax(static_cast<std::size_t>(module.k), 2.0f);
    const auto* bytes = reinterpret_cast<const std::byte*>(absmax.data());
    tensors.push_back({module.name + ".input_absmax",
                       DType::f32,
                       {module.k},
                       [all = std::vector(bytes, bytes + 4 * module.k)]() -> Result<std::vector<std::byte>> { return all; }});
  }
  ASSERT_TRUE(write_safetensors(at("acts.safetensors"), tensors).ok());
  const Finished run = nibble({"quantize", checkpoint("float"), at("out"), "--format", "int-quantized", "--smooth", "0.5",
                               "--scheme", "s8t_s8c", "--calibration", at("acts.safetensors")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "5 smoothed")) << run.out;
  EXPECT_TRUE(contains(run.out, "2 of 7 modules do not follow a smoothed norm")) << run.out;
  const auto json = nibble_json({"inspect", at("out"), "--json"});
  for (const auto& module : json["modules"]) {
    EXPECT_EQ(module["activations"]["scheme"], "s8t");
    EXPECT_GT(module["activations"]["static"]["scale"].get<double>(), 0);
    if (contains(module["name"], "down_proj")) {
      EXPECT_EQ(module["activations"]["static"]["scale"].get<float>(), 2.0f / 127);
    }
  }
  EXPECT_TRUE(contains(nibble({"inspect", at("out")}).out, "s8t, scale 0.01575")) << nibble({"inspect", at("out")}).out;
}

TEST_F(Cli, ConvertKeepsEveryWeight) {
  ASSERT_EQ(nibble({"convert", checkpoint("gptq"), at("ct"), "--format", "compressed-tensors"}).exit_code, 0);
  ASSERT_EQ(nibble({"dequantize", checkpoint("gptq"), at("a"), "--dtype", "f32"}).exit_code, 0);
  ASSERT_EQ(nibble({"dequantize", at("ct"), at("b"), "--dtype", "f32"}).exit_code, 0);
  EXPECT_EQ(slurp(at("a/model.safetensors")), slurp(at("b/model.safetensors")));
  const auto config = nlohmann::json::parse(slurp(at("a/config.json")));
  EXPECT_FALSE(config.contains("quantization_config"));
}

TEST_F(Cli, PackWritesAFileThatInspectAndVerifyKnow) {
  const std::string awq = copy_of("awq");
  const Finished packed = nibble({"pack", awq, "--m-max", "64"});
  ASSERT_EQ(packed.exit_code, 0) << packed.err;
  EXPECT_TRUE(contains(packed.out, "7 packed weights")) << packed.out;
  const std::string file = awq + ".nibble";
  ASSERT_TRUE(std::filesystem::exists(file));

  const auto json = nibble_json({"inspect", file, "--json"});
  EXPECT_EQ(json["checkpoint"], std::filesystem::path(awq).filename().string());
  EXPECT_EQ(json["library_version"], NIBBLE_VERSION);
  EXPECT_TRUE(json["notes"].empty());
  ASSERT_EQ(json["modules"].size(), 7u);
  for (const auto& module : json["modules"]) {
    EXPECT_EQ(module["scheme"], "u4zg16");
    EXPECT_EQ(module["packed_for"]["m_max"], 64);
    EXPECT_EQ(module["packed_for"]["a_dtype"], "f32");
    EXPECT_TRUE(contains(module["layout"], "cpu_n")) << module;
  }
  EXPECT_EQ(nibble_json({"inspect", file, "--layer", "up_proj", "--json"})["modules"].size(), 1u);
  EXPECT_TRUE(contains(nibble({"inspect", file}).out, "M up to 64")) << nibble({"inspect", file}).out;

  const Finished same = nibble({"verify", awq, "--packed", file});
  EXPECT_EQ(same.exit_code, 0) << same.out << same.err;
  EXPECT_TRUE(contains(same.out, "all the same: 7 packed weights")) << same.out;

  // The same names and shapes with other numbers.
  ASSERT_EQ(nibble({"quantize", checkpoint("float"), awq, "--format", "awq", "--scheme", "u4zg16", "--clip-search", "--force"})
                .exit_code,
            0);
  const Finished stale = nibble({"inspect", file});
  EXPECT_EQ(stale.exit_code, 0) << stale.err;
  EXPECT_TRUE(contains(stale.out, "has changed since it was packed")) << stale.out;
  const Finished differs = nibble({"verify", awq, "--packed", file, "--json"});
  EXPECT_EQ(differs.exit_code, 1) << differs.err;
  EXPECT_EQ(nlohmann::json::parse(differs.out)["passed"], false);
}

TEST_F(Cli, PackForAGpuThatIsNotThere) {
  const auto json = nibble_json({"pack", checkpoint("awq"), at("gpu.nibble"), "--gpu", "h100", "--a-dtype", "f16", "--json"});
  ASSERT_EQ(json["modules"].size(), 7u);
  for (const auto& module : json["modules"]) EXPECT_EQ(module["layout"], "gpu_n64k128");
  EXPECT_EQ(nibble({"verify", checkpoint("awq"), "--packed", at("gpu.nibble")}).exit_code, 0);
  const auto plain =
      nibble_json({"pack", checkpoint("awq"), at("plain.nibble"), "--weight-layout", "plain", "--layer", "o_proj", "--json"});
  ASSERT_EQ(plain["modules"].size(), 1u);
  EXPECT_EQ(plain["modules"][0]["layout"], "plain");
}

TEST_F(Cli, ShardsOfTheSizeThatWasAsked) {
  ASSERT_EQ(nibble({"dequantize", checkpoint("gptq"), at("out"), "--max-shard-size", "8KB"}).exit_code, 0);
  const auto index = nlohmann::json::parse(slurp(at("out/model.safetensors.index.json")));
  std::set<std::string> files;
  for (const auto& file : index["weight_map"]) files.insert(file);
  EXPECT_GT(files.size(), 2u);
  for (const std::string& file : files) EXPECT_TRUE(std::filesystem::exists(at("out/" + file))) << file;
  ASSERT_EQ(nibble({"dequantize", checkpoint("gptq"), at("whole")}).exit_code, 0);
  EXPECT_EQ(nibble_json({"inspect", at("out"), "--json"})["totals"], nibble_json({"inspect", at("whole"), "--json"})["totals"]);
}

TEST_F(Cli, TransformsOfAFileGiveAFile) {
  const std::string in = checkpoint("awq") + "/model.safetensors";
  const Finished run = nibble({"dequantize", in, at("out.safetensors")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(listing(directory_), std::vector<std::string>{"out.safetensors"});
  EXPECT_EQ(nibble_json({"inspect", at("out.safetensors"), "--json"})["totals"]["quantized_modules"], 0);
}

TEST_F(Cli, ForceReplacesAnOutput) {
  const std::vector<std::string> command = {"sample", at("s"), "--shapes", "tiny", "--vocab", "64", "--dtype", "f16"};
  ASSERT_EQ(nibble(command).exit_code, 0);
  EXPECT_EQ(nibble(command).exit_code, 4);
  auto forced = command;
  forced.push_back("--force");
  EXPECT_EQ(nibble(forced).exit_code, 0);
  EXPECT_EQ(listing(directory_), std::vector<std::string>{"s"});
}

TEST_F(Cli, SamplesAreReproducible) {
  ASSERT_EQ(nibble({"sample", at("a"), "--shapes", "tiny", "--seed", "7"}).exit_code, 0);
  ASSERT_EQ(nibble({"sample", at("b"), "--shapes", "tiny", "--seed", "7"}).exit_code, 0);
  EXPECT_EQ(slurp(at("a/model.safetensors")), slurp(at("b/model.safetensors")));
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
