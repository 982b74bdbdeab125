// inspect and verify on valid input: their text and their JSON.
#include <algorithm>

#include "cli/cli.hpp"
#include "nibble/nibble.hpp"

namespace nibble::test {
namespace {

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
                                        act == "bf16x3k32"        ? "f32"
                                        : act == "bf16x2k32"      ? "f16"
                                        : act.starts_with("bf16") ? "bf16"
                                                                  : "f32"};
    if (name.find("_whole_") != std::string::npos) continue;  // this layer has groups
    if (name.find("_any__") == std::string::npos) continue;   // of integers
    if (act == "s8" || act == "s8k64") {
      EXPECT_EQ(nibble(command).exit_code, 3) << name << " quantizes activations, which was not asked for";
      command.insert(command.end(), {"--act-scheme", "s8r"});
    }
    EXPECT_EQ(nibble_json(command)["results"][0]["kernel"], name);
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

}  // namespace
}  // namespace nibble::test
