// Every command on bad input: the exit code, a one-line error, and no files left behind.
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include "cli/cli.hpp"
#include "nibble/nibble.hpp"

namespace nibble::test {
namespace {

namespace fs = std::filesystem;

void expect_error(const Finished& finished, int exit_code, const std::string& part) {
  EXPECT_EQ(finished.exit_code, exit_code) << finished.err;
  EXPECT_EQ(finished.err.rfind("nibble: ", 0), 0u) << finished.err;
  EXPECT_EQ(std::count(finished.err.begin(), finished.err.end(), '\n'), 1) << finished.err;
  EXPECT_NE(finished.err.find(part), std::string::npos) << "'" << part << "' is not in: " << finished.err;
}

TEST_F(Cli, ExpressionsThatNibbleDoesNotHaveExitWith3) {
  expect_error(nibble({"inspect", checkpoint("awq"), "--layer", "(?!lm_head)"}), 3, "--layer: '(?!lm_head)' has lookaround");
}

TEST_F(Cli, UsageErrorsExitWith2) {
  const std::string awq = checkpoint("awq"), out = at("out");
  const struct {
    std::vector<std::string> arguments;
    std::string part;
  } cases[] = {
      {{"frobnicate"}, "there is no command 'frobnicate'"},
      {{"inspect"}, "PATH"},
      {{"inspect", awq, "--colour"}, "--colour"},
      {{"inspect", awq, "--layer", "("}, "'(' is not a regular expression"},
      {{"inspect", awq, "--headers", "--explain"}, "--headers"},
      {{"inspect", awq, "--headers", "--act-scheme", "s8r"}, "--headers"},
      {{"inspect", awq, "--act-scheme", "s8r,s8x"}, "'s8x' is not a way to quantize activations"},
      {{"inspect", awq, "--outliers", "10"}, "--act-scheme"},
      {{"inspect", awq, "--act-scheme", "s8r", "--outliers", "10", "--calibration", awq}, "--calibration"},
      {{"verify", awq, "--layer", "[z-a]"}, "'[z-a]'"},
      {{"verify", awq, "-M", "0"}, "'0'"},
      {{"verify", awq, "--a-dtype", "f8"}, "f32, f16, bf16"},
      {{"verify", awq, "--kernel", "magic"}, "no kernel is called 'magic'"},
      {{"verify", awq, "--kernel", "linear_any_s8_any_cpu_baseline_m4n16"}, "nearest is 'linear_any_s8_any__cpu_baseline_m4n16'"},
      {{"verify", awq, "--backend", "tpu"}, "'tpu' is not one of cpu, cuda"},
      {{"verify", awq, "--kernel", "linear_any_any_any__cuda_simt_n64k128"}, "is for --backend cuda, not cpu"},
      {{"verify", awq, "--backend", "cuda", "--kernel", "linear_any_any_any__ref_baseline"}, "is for --backend cpu, not cuda"},
      {{"inspect", awq, "--backend", "cuda"}, "--explain"},
      {{"inspect", awq, "--gpu", "h200"}, "--explain"},
      {{"inspect", awq, "--explain", "--gpu", "h20"}, "h200"},
      {{"inspect", awq, "--explain", "--gpu", "h200", "--backend", "cpu"}, "--backend"},
      {{"bench", awq, "--backend", "cuda", "--report", out}, "--report shows a CPU"},
      {{"verify", awq, "--layer", "nothing_like_it"}, "no quantized module whose name matches --layer; see nibble inspect"},
      {{"verify", checkpoint("float")}, "no quantized module to verify; nibble quantize makes some"},
      {{"bench"}, "PATH or --shapes"},
      {{"bench", awq, "--layer", "nothing_like_it"}, "no quantized linear layer whose name matches --layer"},
      {{"bench", checkpoint("float")}, "no quantized linear layer to measure; nibble quantize makes some"},
      {{"bench", awq, "--scheme", "u4zg128"}, "PATH excludes --scheme"},
      {{"bench", awq, "--act-scheme", "s8x"}, "'s8x' is not a way to quantize activations"},
      {{"bench", awq, "--a-dtype", "f32,f8"}, "'f8' is not one of"},
      {{"bench", awq, "--a-dtype", "f32,bf16", "--report", out}, "one type of activations"},
      {{"bench", "--shapes", awq, "--act-scheme", "s8r"}, "--shapes excludes --act-scheme"},
      {{"bench", "--shapes", awq, "--conv", awq}, "--shapes excludes --conv"},
      {{"bench", "--block", "64,64,4,3,16"}, "4 heads cannot share 3 heads of keys and values"},
      {{"bench", "--block", "64,64,1048576,1,1048576"}, "q, k and v have 1099513724928 channels; expected at most 1073741824"},
      {{"bench", "--block", "64,64,4"}, "--block"},
      {{"bench", "--block", "64,64,4,2,0"}, "'0' is not a whole number from 1"},
      {{"bench", "--block", "64,64,4,2,16", "--glu"}, "--block"},
      {{"bench", "--block", "64,64,4,2,16", "--shapes", awq}, "--shapes excludes --block"},
      {{"bench", "--block", "64,64,4,2,16", "--calls", "chain"}, "give --backend cuda"},
      {{"bench", "--moe", "8,9,64,64"}, "a token has 9 of 8 experts; give a TOP_K up to EXPERTS"},
      {{"bench", "--moe", "8,8,64,64", "--routing", "uniform,empty"}, "so none is without one; give a smaller TOP_K"},
      {{"bench", "--moe", "8,2,64"}, "--moe"},
      {{"sample", "--seed", "-1", "OUT"}, "'-1' is not a whole number from 0"},
      {{"verify", "--seed", "-1", "DIR"}, "'-1' is not a whole number from 0"},
      {{"bench", "--moe", "8,2,0,64"}, "'0' is not a whole number from 1"},
      {{"bench", "--moe", "8,2,64,64", "--glu"}, "--moe"},
      {{"bench", "--moe", "8,2,64,64", "--routing", "zpf"},
       "'zpf' is not one of uniform, zipf, hot, empty; the nearest is 'zipf'"},
      {{"bench", "--moe", "8,2,64,64", "--block", "64,64,4,2,16"}, "--block excludes --moe"},
      {{"bench", "--moe", "8,2,64,64", "--backend", "cuda", "--calls", "chain"}, "--moe has isolated calls"},
      {{"bench", awq, "--routing", "zipf"}, "--routing requires --moe"},
      {{"bench", "--conv", awq, "-M", "4"}, "--conv excludes -M"},
      {{"bench", "--shapes", awq, "--image-layout", "nhwc"}, "--image-layout requires --conv"},
      {{"bench", "--conv", awq, "--image-layout", "hwcn"}, "'hwcn' is not one of"},
      {{"bench", awq, "--reference", awq}, "--report"},
      {{"doctor", "--measure", "--kernels"}, "--measure"},
      {{"bench", awq, "--fail-under", "0.9"}, "--compare"},
      {{"bench", awq, "--operation", "dequantize", "--all-kernels"}, "leave them out with --operation dequantize"},
      {{"bench", "--conv", awq, "--operation", "quantize"}, "excludes --"},
      {{"bench", awq, "--calls", "alone"}, "'alone' is not one of back-to-back, isolated, chain"},
      {{"bench", awq, "--calls", "back-to-back,isolated"}, "leave it out, or give --backend cuda"},
      {{"bench", awq, "--calls", "chain"}, "leave it out, or give --backend cuda"},
      {{"bench", awq, "--backend", "cuda", "--operation", "dequantize", "--calls", "chain"}, "has isolated calls"},
      {{"quantize", checkpoint("float"), out}, "--format"},
      {{"quantize", checkpoint("float"), out, "--format", "gguf"}, "'gguf' is not one of"},
      {{"quantize", checkpoint("float"), out, "--format", "awq", "--scheme", "u9zg128"}, "u9zg128"},
      {{"quantize", checkpoint("float"), out, "--format", "awq", "--skip", "*"}, "'*' is not a regular expression"},
      {{"quantize", checkpoint("float"), out, "--format", "awq", "--skip", std::string(20000, '(')}, "nested more than 100 deep"},
      {{"quantize", checkpoint("float"), out, "--format", "awq", "--skip", "(.*)*(.*)*(.*)*!", "--scheme", "u4zg100"}, "100"},
      {{"quantize", checkpoint("float"), out, "--format", "awq", "--scheme", "u4zg100"}, "100"},
      {{"quantize", checkpoint("float"), out, "--format", "float-quantized", "--scheme", "e4m3row"}, "e4m3row"},
      {{"quantize", checkpoint("float"), out, "--format", "float-quantized", "--scheme", "e4m3zc"}, "no zero points"},
      {{"quantize", checkpoint("float"), out, "--format", "float-quantized", "--clip-search"}, "clipping search"},
      {{"quantize", checkpoint("float"), out, "--format", "int-quantized", "--scheme", "s8t_s8c"}, "calibration"},
      {{"quantize", checkpoint("float"), out, "--format", "int-quantized", "--smooth", "0.5"}, "--calibration"},
      {{"quantize", checkpoint("float"), out, "--format", "int-quantized", "--smooth", "2", "--calibration", awq}, "'2'"},
      {{"dequantize", awq, out, "--dtype", "s8"}, "'s8'"},
      {{"dequantize", awq, out, "--max-shard-size", "5 apples"}, "'5 apples' is no size like 5GB"},
      {{"convert", awq, out, "--format", "awq", "--max-shard-size", "0"}, "'0' is no size"},
      {{"dequantize", awq + "/model.safetensors", out, "--max-shard-size", "5GB"}, "only a directory has shards"},
      {{"sample", out, "--shapes", "gpt-5"}, "llama-3.2-1b"},
      {{"sample", out, "--experts", "4", "--top-k", "5"}, "top_k=5 is outside 1…4, of 4 experts"},
      {{"sample", out, "--top-k", "2"}, "--top-k requires --experts"},
      {{"sample", out, "--experts", "4", "--family", "mixtrl"}, "the nearest is 'mixtral'"},
      {{"pack", awq, out, "--m-max", "0"}, "'0'"},
      {{"pack", awq, out, "--layer", "nothing"}, "--layer"},
      {{"pack", checkpoint("float"), out}, "nibble quantize"},
      {{"pack", awq, out, "--gpu", "h100", "--backend", "cpu"}, "--backend"},
      {{"verify", awq, "--packed", out, "-M", "1"}, "--packed"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.part);
    expect_error(nibble(c.arguments), 2, c.part);
  }
  EXPECT_EQ(nibble({}).exit_code, 2);
  EXPECT_TRUE(listing(directory_).empty());
}

TEST_F(Cli, SlipsGetTheNearestName) {
  const std::string awq = checkpoint("awq"), out = at("out");
  spit(at("shapes.txt"), "64 64 a\n");
  const struct {
    std::vector<std::string> arguments;
    std::string nearest;
  } cases[] = {{{"inspct", awq}, "inspect"},
               {{"bnech"}, "bench"},
               {{"--versoin"}, "--version"},
               {{"inspect", awq, "--sumary"}, "--summary"},
               {{"inspect", awq, "--lyaer=x"}, "--layer"},
               {{"quantize", checkpoint("float"), out, "--format", "compresed-tensors"}, "compressed-tensors"},
               {{"convert", awq, out, "--format", "gptqq"}, "gptq"},
               {{"verify", awq, "--a-dtype", "bf61"}, "bf16"},
               {{"verify", awq, "--act-scheme", "s8k"}, "s8r"},
               {{"verify", awq, "--kernel", "linear_any_any_any__ref_basline"}, "linear_any_any_any__ref_baseline"},
               {{"bench", "--shapes", at("shapes.txt"), "--scheme", "s8r_s8q"}, "s8r_s8c"},
               {{"sample", out, "--shapes", "llama3-8b"}, "llama-3-8b"}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.arguments.front() + " " + c.nearest);
    expect_error(nibble(c.arguments), 2, "the nearest is '" + c.nearest + "'");
  }
  for (const std::vector<std::string>& far : std::vector<std::vector<std::string>>{{"frobnicate"}, {"inspect", awq, "--colour"}})
    EXPECT_EQ(nibble(far).err.find("nearest"), std::string::npos);
}

TEST_F(Cli, WhatCannotBeExpressedExitsWith3) {
  expect_error(nibble({"convert", checkpoint("awq"), at("out"), "--format", "gptq"}), 3, "u4zg16");
  expect_error(nibble({"convert", checkpoint("gptq"), at("out"), "--format", "fp8"}), 3, "a scale per block");
  expect_error(nibble({"quantize", checkpoint("float"), at("out"), "--format", "fp8", "--scheme", "e4m3r_e4m3c"}), 3,
               "a scale per block");
  expect_error(nibble({"quantize", checkpoint("float"), at("out"), "--format", "awq", "--scheme", "s8r_u4zg16"}), 3, "s8r");
  expect_error(nibble({"quantize", checkpoint("float"), at("out"), "--format", "int-quantized", "--scheme", "s8r_s8b128x128"}), 3,
               "scales per tensor, channel or group");
  expect_error(nibble({"quantize", checkpoint("float"), at("out"), "--format", "int-quantized", "--smooth", "0.5",
                       "--calibration", checkpoint("float")}),
               3, "no norm can be smoothed");
  spit(at("shapes.txt"), "64 64 a\n");
  for (const char* scheme : {"u8r_s8c", "e5m2r_s8c"})
    expect_error(nibble({"bench", "--shapes", at("shapes.txt"), "--scheme", scheme}), 3, scheme);
  expect_error(nibble({"bench", checkpoint("awq"), "--act-scheme", "s8t"}), 3, "static_acts");  // the checkpoint has none
  expect_error(nibble({"bench", "--block", "64,64,4,2,16", "--scheme", "s8r_s8c", "--a-dtype", "s8"}), 3,
               "a norm is of float activations");
  expect_error(nibble({"bench", "--block", "64,64,4,2,16", "--scheme", "e4m3b128x128"}), 2, "end inside a block of 128");
  expect_error(nibble({"bench", "--moe", "8,2,64,64", "--scheme", "s8r_s8c", "--a-dtype", "s8"}), 2,
               "floats, of one type between them");
  EXPECT_EQ(listing(directory_), std::vector<std::string>{"shapes.txt"});
}

TEST_F(Cli, WithoutAGpuBackendCudaExitsWith3) {
  const Result<GpuInfo> gpu = this_gpu();
  if (gpu.ok()) GTEST_SKIP() << "there is a " << gpu->name;
  const std::string awq = checkpoint("awq");
  spit(at("shapes.txt"), "64 64 a\n");
  const std::vector<std::string> commands[] = {{"verify", awq},
                                               {"inspect", awq, "--explain"},
                                               {"bench", awq},
                                               {"bench", "--shapes", at("shapes.txt")},
                                               {"dequantize", awq, at("out")},
                                               {"pack", awq, at("out")}};
  for (std::vector<std::string> command : commands) {
    command.insert(command.end(), {"--backend", "cuda"});
    expect_error(nibble(command), 3, "--backend cuda: " + gpu.status().message());
  }
  EXPECT_EQ(listing(directory_), std::vector<std::string>{"shapes.txt"});
}

TEST_F(Cli, MissingFilesExitWith4) {
  expect_error(nibble({"inspect", at("nowhere")}), 4, "nowhere");
  expect_error(nibble({"verify", at("nowhere")}), 4, "nowhere");
  expect_error(nibble({"bench", "--shapes", at("nowhere")}), 4, "nowhere");
  expect_error(nibble({"bench", "--compare", at("a"), at("b")}), 4, at("a"));
  expect_error(nibble({"inspect", checkpoint("awq"), "--reference", at("nowhere")}), 4, "--reference");
  expect_error(nibble({"quantize", at("nowhere"), at("out"), "--format", "awq"}), 4, "nowhere");
  expect_error(nibble({"dequantize", checkpoint("awq"), at("no/such/place")}), 4, "place");
  expect_error(nibble({"quantize", checkpoint("float"), at("out"), "--format", "int-quantized", "--scheme", "s8t_s8c",
                       "--calibration", at("nowhere")}),
               4, "nowhere");
  EXPECT_TRUE(listing(directory_).empty());
}

TEST_F(Cli, AnExistingOutputIsNotTouched) {
  spit(at("precious"), "data");
  expect_error(nibble({"quantize", checkpoint("float"), at("precious"), "--format", "awq", "--scheme", "u4zg16"}), 4, "precious");
  expect_error(nibble({"convert", checkpoint("gptq"), at("precious"), "--format", "compressed-tensors"}), 4, "--force");
  expect_error(nibble({"dequantize", checkpoint("awq"), at("precious")}), 4, "precious");
  expect_error(nibble({"pack", checkpoint("awq"), at("precious")}), 4, "--force");
  EXPECT_EQ(slurp(at("precious")), "data");
  EXPECT_EQ(listing(directory_), std::vector<std::string>{"precious"});
}

TEST_F(Cli, PackedFilesThatDoNotFit) {
  ASSERT_EQ(nibble({"pack", checkpoint("awq"), at("awq.nibble"), "--layer", "o_proj"}).exit_code, 0);
  expect_error(nibble({"inspect", at("awq.nibble"), "--explain"}), 2, "packed weights");
  expect_error(nibble({"verify", checkpoint("awq"), "--packed", at("awq.nibble"), "--layer", "up_proj"}), 2, "--layer");
  expect_error(nibble({"verify", checkpoint("awq"), "--packed", at("nowhere")}), 4, "nowhere");
  expect_error(nibble({"pack", checkpoint("awq"), at("out"), "--weight-layout", "cpu_n99"}), 4, "cpu_n99");
  spit(at("awq.nibble"), slurp(at("awq.nibble")).substr(0, 5000));
  expect_error(nibble({"verify", checkpoint("awq"), "--packed", at("awq.nibble")}), 4, "truncated");
  EXPECT_EQ(listing(directory_), std::vector<std::string>{"awq.nibble"});
}

TEST_F(Cli, DamagedCheckpointsExitWith4) {
  const std::string path = copy_of("awq");
  const std::string file = path + "/model.safetensors", whole = slurp(file);
  const auto damaged = [&](const std::string& contents) {
    spit(file, contents);
    for (const char* command : {"inspect", "verify", "bench"}) expect_error(nibble({command, path}), 4, "model.safetensors");
    expect_error(nibble({"dequantize", path, at("out")}), 4, "model.safetensors");
  };
  damaged("");
  damaged(whole.substr(0, 7));
  damaged(whole.substr(0, 300));
  damaged(whole.substr(0, whole.size() - 1));
  damaged(std::string(8, '\xff') + whole.substr(8));
  EXPECT_EQ(listing(directory_), std::vector<std::string>{"awq"});
}

/// The file is sound, and a module is not: its scales have the shape of no format.
TEST_F(Cli, ACheckpointWithADamagedModuleDoesNotPass) {
  const std::string path = copy_of("awq"), layer = "model.layers.0.self_attn.q_proj";
  std::string file = slurp(path + "/model.safetensors");
  const std::string shape = "[16,256]";
  const std::size_t at_shape = file.find(shape, file.find("\"" + layer + ".scales\""));
  ASSERT_NE(at_shape, std::string::npos);
  spit(path + "/model.safetensors", file.replace(at_shape, shape.size(), "[64, 64]"));

  const std::string damage = layer + ": qweight s32 [256,32] and scales bf16 [64,64] fit neither";
  const Finished verified = nibble({"verify", path, "-M", "1"});
  expect_error(verified, 4, damage);
  EXPECT_TRUE(contains(verified.out, "error: " + damage)) << verified.out;
  EXPECT_TRUE(contains(verified.out, "incomplete: ") && !contains(verified.out, "all passed")) << verified.out;
  const Finished in_json = nibble({"verify", path, "-M", "1", "--json"});
  const nlohmann::json json = nlohmann::json::parse(in_json.out);
  EXPECT_FALSE(json.at("passed"));
  EXPECT_EQ(json.at("notes").size(), 1u);
  EXPECT_TRUE(json.at("results").front().at("passed"));
  expect_error(nibble({"verify", path, "--layer", layer}), 4, damage);  // nothing else is asked for
  EXPECT_EQ(nibble({"verify", path, "-M", "1", "--layer", "k_proj"}).exit_code, 0);
  expect_error(nibble({"pack", path, at("packed.nibble")}), 4, damage);
  EXPECT_EQ(listing(directory_), std::vector<std::string>{"awq"});
  EXPECT_EQ(nibble({"pack", path, at("packed.nibble"), "--layer", "k_proj"}).exit_code, 0);
}

/// What inspect calls damage of the data is none of verify's successes, even where D is NaN as it should be.
TEST_F(Cli, ABiasThatIsNoNumberDoesNotPass) {
  const std::string path = at("experts");
  const std::vector<std::string> sample{"sample", path,      "--shapes", "tiny",     "--experts",
                                        "4",      "--top-k", "2",        "--family", "gpt-oss"};
  ASSERT_EQ(nibble(sample).exit_code, 0);
  std::string file = slurp(path + "/model.safetensors");
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const nlohmann::json header = nlohmann::json::parse(file.substr(8, length));
  const nlohmann::json& bias = header.at("model.layers.0.mlp.experts.gate_up_proj_bias");
  file.replace(8 + length + bias.at("data_offsets").at(0).get<std::size_t>(), 2, "\xc0\x7f");  // of the first element, bf16
  spit(path + "/model.safetensors", file);
  for (const char* command : {"inspect", "verify"}) {
    const Finished finished = nibble({command, path});
    EXPECT_EQ(finished.exit_code, 4) << command;
    EXPECT_TRUE(contains(finished.err, "bias values are NaN")) << command << finished.err;
  }
}

TEST_F(Cli, AMissingShardIsNamed) {
  const std::string path = copy_of("awq");
  fs::rename(path + "/model.safetensors", path + "/model-00001-of-00002.safetensors");
  const nlohmann::json index = {
      {"metadata", nlohmann::json::object()},
      {"weight_map",
       {{"model.norm.weight", "model-00001-of-00002.safetensors"}, {"lm_head.weight", "model-00002-of-00002.safetensors"}}}};
  spit(path + "/model.safetensors.index.json", index.dump());
  expect_error(nibble({"inspect", path}), 4, "model-00002-of-00002.safetensors");
}

TEST_F(Cli, BenchmarkFilesAreChecked) {
  spit(at("text"), "not json");
  spit(at("other"), R"({"schema": 2, "results": []})");
  spit(at("wrong"), R"({"schema": 1, "results": [{"name": 3}]})");
  spit(at("empty"), R"({"schema": 1, "results": []})");
  spit(at("deep"), std::string(1'000'000, '[') + std::string(1'000'000, ']'));
  for (const char* name : {"text", "other", "wrong", "deep"}) {
    expect_error(nibble({"bench", "--compare", at(name), at("empty")}), 4, "is not a benchmark result of schema 1");
  }
  expect_error(nibble({"bench", "--compare", at("empty"), at("empty")}), 2, "no result in common");
  spit(at("shapes.txt"), "64 sixty-four a\n");
  expect_error(nibble({"bench", "--shapes", at("shapes.txt")}), 2, "shapes.txt:1");
}

TEST_F(Cli, AResultThatCannotBeWrittenExitsWith4) {
  expect_error(nibble({"bench", checkpoint("awq"), "-M", "1", "--min-time", "0.001", "--layer", "k_proj", "--no-baselines",
                       "--json", at("no/such/b.json")}),
               4, "b.json");
  if (fs::exists("/dev/full"))
    for (const std::vector<std::string>& command :
         {{"inspect", checkpoint("awq")}, {"--help"}, std::vector<std::string>{"bench", "--help"}})
      expect_error(nibble(command, {.stdout_to = "/dev/full"}), 4, "standard output");
}

TEST_F(Cli, AResultReplacesNothingButFiles) {
  const std::vector<std::string> bench = {"bench",  checkpoint("awq"), "-M", "1", "--min-time", "0.001", "--layer",
                                          "k_proj", "--no-baselines"};
  const auto with = [&](std::vector<std::string> options) {
    options.insert(options.begin(), bench.begin(), bench.end());
    return nibble(options);
  };
  spit(at("real.json"), "old");
  fs::create_symlink("real.json", at("link.json"));
  const Finished written = with({"--json", at("link.json"), "--report", "/dev/null"});
  EXPECT_EQ(written.exit_code, 0) << written.err;
  EXPECT_TRUE(fs::is_symlink(at("link.json")));
  EXPECT_NE(slurp(at("real.json")).find("\"schema\""), std::string::npos);
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  fs::create_directory(at("directory"));
  expect_error(with({"--json", at("directory")}), 4, "directory: it exists and is not a file");
}

TEST_F(Cli, AReaderThatWentAwayIsNoError) {
  const Finished finished = nibble({"inspect", checkpoint("awq"), "--json"}, {.closed_pipe = true});
  EXPECT_EQ(finished.exit_code, 0);
  EXPECT_EQ(finished.err, "");
  ASSERT_EQ(nibble({"quantize", checkpoint("float"), at("out"), "--format", "awq", "--scheme", "u4zg16"}, {.closed_pipe = true})
                .exit_code,
            0);
  EXPECT_EQ(nibble_json({"verify", at("out"), "--json"})["passed"], true);
}

// Whenever the signal comes, the output is there completely or not at all.
TEST_F(Cli, CtrlCLeavesNoPartialOutput) {
  for (int delay : {1, 5, 20, 60}) {
    const Finished finished =
        nibble({"quantize", checkpoint("float"), at("out"), "--format", "awq", "--scheme", "u4zg16", "--clip-search", "--force"},
               {.interrupt_after_ms = delay});
    EXPECT_TRUE(finished.exit_code == 0 || finished.exit_code == 130) << finished.exit_code << finished.err;
    const bool complete = fs::exists(at("out"));  // also when the signal ends a process that has written all of it
    if (finished.exit_code == 0 || finished.err.find("nothing was written") != std::string::npos) {
      EXPECT_EQ(complete, finished.exit_code == 0) << delay;
    }
    if (complete) {
      EXPECT_EQ(nibble({"verify", at("out")}).exit_code, 0) << delay;
    }
    fs::remove_all(at("out"));
    EXPECT_EQ(listing(directory_), std::vector<std::string>()) << delay;
  }
}

// Twice on the same command line, until it is caught while it writes.
TEST_F(Cli, ASecondCtrlCLeavesNothingEither) {
  const auto quantize = [&](int delay) {
    return nibble(
        {"quantize", checkpoint("float"), at("out"), "--format", "awq", "--scheme", "u4zg16", "--clip-search", "--force"},
        {.interrupt_after_ms = delay, .signals = 5});
  };
  int interrupted = 0;
  for (int delay = 1; delay < 200 && interrupted < 5; delay = delay * 3 / 2 + 1) {
    const Finished finished = quantize(delay);
    interrupted += finished.exit_code == 130 ? 1 : 0;
    fs::remove_all(at("out"));
    EXPECT_TRUE(listing(directory_).empty()) << delay << " ms, exit code " << finished.exit_code;
  }
}

TEST_F(Cli, IgnoredSignalsStayIgnored) {
  const auto before = std::signal(SIGHUP, SIG_IGN);  // as nohup does
  for (const int delay : {5, 20, 60})
    EXPECT_EQ(
        nibble({"quantize", checkpoint("float"), at("out"), "--format", "awq", "--scheme", "u4zg16", "--clip-search", "--force"},
               {.interrupt_after_ms = delay, .signal = SIGHUP, .signals = 3})
            .exit_code,
        0);
  std::signal(SIGHUP, before);
  EXPECT_EQ(listing(directory_), std::vector<std::string>{"out"});
}

TEST_F(Cli, AFileThatMayNotBecomeSoLargeIsAnError) {
  const std::string input = checkpoint("float");
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{8192, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const Finished finished = nibble({"quantize", input, at("out"), "--format", "awq", "--scheme", "u4zg16"});
  setrlimit(RLIMIT_FSIZE, &before);
  expect_error(finished, 4, "File too large");
  EXPECT_TRUE(listing(directory_).empty());
}

TEST_F(Cli, WhatTheEnvironmentSaysIsUnderstoodOrAnError) {
  const std::string awq = checkpoint("awq");
  const std::vector<std::string> commands[] = {{"doctor"}, {"inspect", awq}, {"verify", awq}};
  for (const auto& command : commands) {
    expect_error(nibble(command, {.environment = {"NIBBLE_ISA=avx9"}}), 2, "NIBBLE_ISA=avx9 is no level of CPUs; those are");
    expect_error(nibble(command, {.environment = {"NIBBLE_NUM_THREADS=0"}}), 2, "from 1 to 4096");
    expect_error(nibble(command, {.environment = {"NIBBLE_KERNEL=magic"}}), 2, "NIBBLE_KERNEL=magic");
  }
  EXPECT_EQ(nibble({"--help"}, {.environment = {"NIBBLE_ISA=avx9"}}).exit_code, 0);
}

// Every option that takes a fraction.
TEST_F(Cli, NumbersAreNumbers) {
  const std::string awq = checkpoint("awq"), fp = checkpoint("float");
  const std::vector<std::string> commands[] = {
      {"verify", awq, "--outliers"},
      {"inspect", awq, "--act-scheme", "s8r", "--outliers"},
      {"bench", awq, "--min-time"},
      {"bench", "--compare", awq, awq, "--fail-under"},
      {"quantize", fp, at("out"), "--format", "int-quantized", "--calibration", fp, "--smooth"}};
  for (const auto& command : commands)
    for (const char* number : {"nan", "-nan", "inf", "-inf", "1e999", "-1", "1e30", "x", ""}) {
      std::vector<std::string> arguments = command;
      arguments.back() += "=";
      arguments.back() += number;
      const Finished finished = nibble(arguments);
      EXPECT_EQ(finished.exit_code, 2) << arguments.back() << ": " << finished.err;
    }
  EXPECT_EQ(nibble({"verify", awq, "-M", "1", "--outliers", "100"}).exit_code, 0);
}

}  // namespace
}  // namespace nibble::test
