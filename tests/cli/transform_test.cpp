// The commands that write on valid input: quantize, convert, dequantize, pack and sample.
#include "cli/cli.hpp"
#include "nibble/nibble.hpp"

namespace nibble::test {
namespace {

TEST_F(Cli, QuantizeTellsTheErrorOfEachModule) {
  const Finished run = nibble({"quantize", checkpoint("float"), at("out"), "--format", "gptq", "--scheme", "u8b128c",
                               "--clip-search", "--scale-dtype", "f16", "--skip", "embed|lm_head|q_proj"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "6 modules quantized")) << run.out;
  EXPECT_TRUE(contains(run.out, "SQNR")) << run.out;
  const auto json = nibble_json({"inspect", at("out"), "--json"});
  for (const auto& module : json["modules"]) EXPECT_EQ(module["scheme"], "u8b128c");
}

TEST_F(Cli, FloatOffsetsSurviveAFile) {
  const Finished run = nibble({"quantize", checkpoint("float"), at("offsets"), "--format", "nibble-codes", "--scheme", "u4og16"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto json = nibble_json({"inspect", at("offsets"), "--json", "--reference", checkpoint("float")});
  for (const auto& module : json["modules"]) {
    EXPECT_EQ(module["format"], "nibble-codes");
    EXPECT_EQ(module["scheme"], "u4og16");
    EXPECT_EQ(module["notes"].size(), 0u) << module;
    EXPECT_GT(module["error"]["sqnr_db"].get<double>(), 20);
  }
  EXPECT_TRUE(nibble_json({"verify", at("offsets"), "--json", "-M", "2"})["passed"]);
  ASSERT_EQ(nibble({"pack", at("offsets"), at("offsets.nibble")}).exit_code, 0);
  EXPECT_EQ(nibble({"verify", at("offsets"), "--packed", at("offsets.nibble")}).exit_code, 0);
  const Finished refused = nibble({"convert", at("offsets"), at("out"), "--format", "gptq"});
  EXPECT_EQ(refused.exit_code, 3);
  EXPECT_TRUE(contains(refused.err, "nibble-codes holds floats")) << refused.err;
  ASSERT_EQ(nibble({"convert", checkpoint("awq"), at("out"), "--format", "nibble-codes"}).exit_code, 0);
  EXPECT_EQ(nibble_json({"inspect", at("out"), "--json"})["modules"][0]["scheme"], "u4zg16");
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

/// Checkpoints of experts through the commands. Those that are stored together are quantized one by one, and dequantized together.
TEST_F(Cli, Experts) {
  const auto sample = [&](const std::string& family) {
    const std::string out = at(family);
    EXPECT_EQ(nibble({"sample", out, "--shapes", "tiny", "--experts", "6", "--top-k", "2", "--family", family, "--vocab", "64"})
                  .exit_code,
              0);
    return out;
  };
  for (const std::string family : {"mixtral", "qwen3-moe", "qwen3-moe-fused", "llama4"}) {
    const bool mixtral = family == "mixtral", llama4 = family == "llama4";
    const std::string down = mixtral ? "w2" : "down_proj", block = mixtral ? "block_sparse_moe" : llama4 ? "feed_forward" : "mlp";
    const std::size_t others = llama4 ? 4 + 3 : 4;  // of attention, and of the shared expert
    const std::string quantized = at(family + "-awq");
    const Finished run = nibble({"quantize", sample(family), quantized, "--format", "awq", "--scheme", "u4zg64"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    EXPECT_TRUE(contains(run.out, "router of experts")) << run.out;
    const Finished inspected = nibble({"inspect", quantized});
    EXPECT_EQ(inspected.exit_code, 0) << inspected.err;
    EXPECT_TRUE(contains(inspected.out, "model.layers.0." + block + ".experts.0…5." + down + " ")) << inspected.out;
    EXPECT_TRUE(contains(inspected.out, "experts: 1 layer of 6: ")) << inspected.out;
    EXPECT_FALSE(contains(inspected.out, "experts.3.")) << inspected.out;
    const auto json = nibble_json({"inspect", quantized, "--json"});
    EXPECT_EQ(json["experts"][0]["count"], 6);
    EXPECT_EQ(json["experts"][0]["down"], down);
    EXPECT_EQ(json["totals"]["quantized_modules"], others + 6 * 3);
    EXPECT_EQ(nibble_json({"verify", quantized, "-M", "1", "--experts", "2", "--json"})["results"].size(), others + 2 * 3);
    EXPECT_EQ(nibble_json({"verify", quantized, "-M", "1", "--experts", "0", "--json"})["results"].size(), others + 6 * 3);
    EXPECT_TRUE(contains(nibble({"verify", quantized, "-M", "1"}).out, "up to 4 of each layer; --experts 0 verifies all"));
    EXPECT_EQ(nibble_json({"verify", quantized, "-M", "1", "--layer", "experts.3." + down, "--json"})["results"].size(), 1u);
    ASSERT_EQ(nibble({"pack", quantized, at(family + ".nibble")}).exit_code, 0);
    EXPECT_EQ(nibble({"verify", quantized, "--packed", at(family + ".nibble")}).exit_code, 0);
  }
  const std::string together = sample("gpt-oss");
  const Finished inspected = nibble({"inspect", together});
  EXPECT_EQ(inspected.exit_code, 0) << inspected.err;
  EXPECT_TRUE(contains(inspected.out, "model.layers.0.mlp.experts.0…5.gate_up_proj  mxfp4")) << inspected.out;
  EXPECT_TRUE(contains(inspected.out, "gate_up_proj, down_proj, rows of gate and up in turns")) << inspected.out;
  EXPECT_EQ(nibble_json({"verify", together, "-M", "1,3", "--json"})["results"].size(), 2u * 4 * 2);
  ASSERT_EQ(nibble({"pack", together, at("gpt-oss.nibble")}).exit_code, 0);
  EXPECT_EQ(nibble({"verify", together, "--packed", at("gpt-oss.nibble")}).exit_code, 0);
  for (const std::vector<std::string>& command : {std::vector<std::string>{"convert", together, at("out"), "--format", "gptq"},
                                                  {"quantize", together, at("out"), "--format", "gptq"}}) {
    const Finished refused = nibble(command);
    EXPECT_NE(refused.exit_code, 0) << refused.out;
    EXPECT_TRUE(contains(refused.err, "model.layers.0.mlp.experts.0.g") && contains(refused.err, "dequantize")) << refused.err;
  }
  EXPECT_FALSE(std::filesystem::exists(at("out")));

  // gpt-oss by way of floats: the floats of all experts in one tensor, [E,K,N]; then one by one.
  ASSERT_EQ(nibble({"dequantize", together, at("floats"), "--dtype", "bf16"}).exit_code, 0);
  EXPECT_TRUE(contains(nibble({"inspect", at("floats")}).out, "gate_up_proj, down_proj, rows of gate and up in turns"));
  EXPECT_EQ(nibble_json({"inspect", at("floats"), "--json"})["experts"][0]["count"], 6);
  const Finished again = nibble({"quantize", at("floats"), at("again"), "--format", "gptq", "--scheme", "u4b8g64"});
  ASSERT_EQ(again.exit_code, 0) << again.err;
  const Finished apart = nibble({"inspect", at("again")});
  EXPECT_TRUE(contains(apart.out, "model.layers.0.mlp.experts.0…5.up_proj ")) << apart.out;
  EXPECT_TRUE(contains(apart.out, "experts: 1 layer of 6: gate_proj, up_proj, down_proj")) << apart.out;
  EXPECT_EQ(nibble({"verify", at("again"), "-M", "1"}).exit_code, 0);

  // And together again, as they came.
  const Finished written = nibble({"quantize", at("floats"), at("mxfp4"), "--format", "mxfp4"});
  ASSERT_EQ(written.exit_code, 0) << written.err;
  EXPECT_TRUE(contains(nibble({"inspect", at("mxfp4")}).out, "model.layers.0.mlp.experts.0…5.gate_up_proj  mxfp4"));
  EXPECT_EQ(nibble_json({"verify", at("mxfp4"), "-M", "1,3", "--json"})["results"].size(), 2u * 4 * 2);
}

TEST_F(Cli, SamplesAreReproducible) {
  ASSERT_EQ(nibble({"sample", at("a"), "--shapes", "tiny", "--seed", "7"}).exit_code, 0);
  ASSERT_EQ(nibble({"sample", at("b"), "--shapes", "tiny", "--seed", "7"}).exit_code, 0);
  EXPECT_EQ(slurp(at("a/model.safetensors")), slurp(at("b/model.safetensors")));
}

}  // namespace
}  // namespace nibble::test
