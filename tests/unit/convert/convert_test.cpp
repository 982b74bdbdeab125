// The config of a written checkpoint preserves what the producer's said; otherwise nothing is written.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/config/format.hpp"
#include "random_weights.hpp"
#include "unit/scratch.hpp"

namespace nibble {
namespace {

using namespace nibble::testing;
using nlohmann::json;
using enum StatusCode;

using Sources = std::vector<TensorSource>;

Scheme scheme(const char* name) { return *Scheme::parse(name, DType::f32); }

void add(Sources& tensors, std::string_view format, const std::string& module, const QuantTensor& q, const ActScheme& act = {}) {
  auto parts = codec::find_format(format)->write(q, act);
  ASSERT_TRUE(parts.ok()) << parts.status().message();
  for (codec::EncodedTensor& part : *parts) tensors.push_back(source(module + "." + part.suffix, std::move(part.tensor)));
}

void write(const fs::path& directory, const Sources& tensors, const json& quantization, json config = json::object()) {
  fs::create_directories(directory);
  const Status status = write_safetensors(directory / "model.safetensors", tensors, {}, true);
  ASSERT_TRUE(status.ok()) << status.message();
  if (!quantization.is_null()) config["quantization_config"] = quantization;
  write_text(directory / "config.json", config.dump());
}

Checkpoint open(const fs::path& path) {
  auto checkpoint = Checkpoint::open(path);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  return *checkpoint;
}

/// The quantization config of a checkpoint.
json quantization(const fs::path& directory) { return json::parse(open(directory).config())["quantization_config"]; }

/// Reads a module, which must exist.
QuantTensor read(const Checkpoint& checkpoint, const char* module) {
  const Module* found = checkpoint.find_module(module);
  EXPECT_NE(found, nullptr) << module;
  auto q = checkpoint.read(*found);
  EXPECT_TRUE(q.ok()) << q.status().message();
  return *q;
}

json ct_args(int bits, const char* type, const char* strategy, const json& more = json::object()) {
  json args{{"num_bits", bits}, {"type", type}, {"symmetric", true}, {"strategy", strategy}, {"dynamic", false}};
  args.update(more);
  return args;
}
const json kPerToken = ct_args(8, "int", "token", {{"dynamic", true}});
const json kPerTokenWithZero = ct_args(8, "int", "token", {{"dynamic", true}, {"symmetric", false}});

// --- layers without a weight of their own ---------------------------------------------------------------------------------------

TEST(TiedHeads, AreNotQuantizedByTheConfig) {
  const Scratch scratch;
  const Sources tied{source("model.embed_tokens.weight", counting(DType::bf16, {16, 32})),
                     source("model.layers.0.mlp.up_proj.weight", counting(DType::bf16, {16, 32}))};
  struct Kind {
    const char *format, *key, *scheme;
  };
  for (const Kind& kind : {Kind{"compressed-tensors", "ignore", "u4b8g32"}, Kind{"int-quantized", "ignore", "s8g32"},
                           Kind{"float-quantized", "ignore", "e4m3g32"}, Kind{"awq", "modules_to_not_convert", "u4zg32"}}) {
    const char *const format = kind.format, *const key = kind.key;
    QuantizeCheckpointSpec spec;
    spec.format = format;
    spec.scheme = *Scheme::parse(kind.scheme, DType::none);
    const auto unquantized = [&](const char* model_type, const Sources& tensors) {
      write(scratch / "in", tensors, json(), {{"model_type", model_type}, {"tie_word_embeddings", true}});
      const auto report =
          quantize_checkpoint(scratch / "in", scratch / "out", spec, {.overwrite = true, .progress = {}, .executor = nullptr});
      EXPECT_TRUE(report.ok()) << report.status().message();
      return quantization(scratch / "out")[key];
    };
    EXPECT_EQ(unquantized("llama", tied), json::array({"model.embed_tokens", "lm_head"})) << format;
    EXPECT_EQ(unquantized("whisper", tied), json::array({"model.embed_tokens", "proj_out"})) << format;
    Sources stored = tied;
    stored.push_back(source("lm_head.weight", counting(DType::bf16, {16, 32})));
    EXPECT_EQ(unquantized("llama", stored), json::array({"model.embed_tokens", "lm_head"})) << format << ": once";
  }
}

TEST(TiedHeads, OfConvertedCheckpoints) {
  const Scratch scratch;
  const QuantTensor q = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16}, 32, 64, 1);
  Sources tensors;
  add(tensors, "gptq", "model.a", q);
  write(scratch / "gptq", tensors, {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 32}, {"sym", true}});
  ASSERT_TRUE(convert_checkpoint(scratch / "gptq", scratch / "ct", "compressed-tensors").ok());
  EXPECT_EQ(quantization(scratch / "ct")["ignore"], json::array({"lm_head"}));

  // The producer's list stays, expressions too, and what they cover is not added.
  for (const auto& [ignore, after] :
       {std::pair{json::array({"re:.*vision.*", "re:.*lm_head"}), json::array({"re:.*vision.*", "re:.*lm_head"})},
        {json::array({"re:.*vision.*"}), json::array({"re:.*vision.*", "lm_head"})}}) {
    json config = quantization(scratch / "ct");
    config["ignore"] = ignore;
    write_text(scratch / "ct/config.json", json{{"quantization_config", config}}.dump());
    ASSERT_TRUE(convert_checkpoint(scratch / "ct", scratch / "again", "compressed-tensors", {.overwrite = true}).ok());
    EXPECT_EQ(quantization(scratch / "again")["ignore"], after);
  }
}

// --- config groups --------------------------------------------------------------------------------------------------------------

/// Three layers of one weight scheme whose activations differ: only the targets distinguish them.
void write_mixed_activations(const fs::path& directory) {
  const WeightScheme weight = scheme("s8c").weight;
  Sources tensors;
  for (const char* name : {"model.layers.0.q_proj", "model.layers.0.k_proj", "model.layers.0.o_proj"})
    add(tensors, "int-quantized", name, random_weight(weight, 16, 64, 1), scheme("s8r_s8c").act);
  tensors.push_back(source("model.layers.0.k_scale", counting(DType::f32, {1})));
  const json weights = ct_args(8, "int", "channel", {{"observer", "mse"}, {"actorder", nullptr}});
  write(directory, tensors,
        {{"quant_method", "compressed-tensors"},
         {"format", "int-quantized"},
         {"version", "0.12.2"},
         {"kv_cache_scheme", ct_args(8, "float", "tensor")},
         {"ignore", json::array({"re:.*gate$"})},
         {"config_groups",
          {{"asym", {{"targets", json::array({"re:.*k_proj"})}, {"weights", weights}, {"input_activations", kPerTokenWithZero}}},
           {"weight_only",
            {{"targets", json::array({"model.layers.0.o_proj"})}, {"weights", weights}, {"input_activations", nullptr}}},
           {"rest", {{"targets", json::array({"Linear"})}, {"weights", weights}, {"input_activations", kPerToken}}}}}});
}

TEST(ConfigGroups, TargetsTellWhichOneIsMeant) {
  const Scratch scratch;
  write_mixed_activations(scratch / "in");
  const Checkpoint in = open(scratch / "in");
  EXPECT_EQ(in.find_module("model.layers.0.q_proj")->claimed->name(), "s8r_s8c");
  EXPECT_EQ(in.find_module("model.layers.0.k_proj")->claimed->name(), "s8zr_s8c");
  EXPECT_EQ(in.find_module("model.layers.0.o_proj")->claimed->name(), "s8c");
}

TEST(ConfigGroups, AreKeptAsTheProducerWroteThem) {
  const Scratch scratch;
  write_mixed_activations(scratch / "in");
  const auto report = convert_checkpoint(scratch / "in", scratch / "out", "int-quantized");
  ASSERT_TRUE(report.ok()) << report.status().message();
  json expected = quantization(scratch / "in");
  for (const char* group : {"asym", "weight_only", "rest"}) expected["config_groups"][group]["format"] = "int-quantized";
  expected["ignore"].push_back("lm_head");
  EXPECT_EQ(quantization(scratch / "out"), expected);
  EXPECT_NE(open(scratch / "out").find_tensor("model.layers.0.k_scale"), nullptr);
}

TEST(ConfigGroups, EachSaysHowItsLayersAreStored) {
  const Scratch scratch;
  Sources tensors;
  add(tensors, "int-quantized", "a", random_weight(scheme("s8c").weight, 16, 64, 1));
  write(scratch / "in", tensors, json());
  ASSERT_TRUE(convert_checkpoint(scratch / "in", scratch / "out", "int-quantized").ok());
  const json config = quantization(scratch / "out");
  EXPECT_EQ(config["config_groups"]["group_0"]["format"], "int-quantized")
      << "compressed-tensors would take weights without activations for packed ones";
  EXPECT_EQ(config["format"], "int-quantized");
}

TEST(ConfigGroups, FromOtherFormatsNameTheirModules) {
  const Scratch scratch;
  Sources tensors;
  add(tensors, "int-quantized", "a", random_weight(scheme("s8c").weight, 16, 64, 1));
  QuantTensor q = random_weight(scheme("s8c").weight, 16, 64, 2);
  q.static_acts = StaticActs{0.5f, 0};
  add(tensors, "int-quantized", "b", q, scheme("s8t_s8c").act);
  write(scratch / "in", tensors, {{"quant_method", "modelopt"}, {"quant_algo", "W8A8"}, {"kv_cache_quant_algo", "FP8"}});
  ASSERT_TRUE(convert_checkpoint(scratch / "in", scratch / "out", "int-quantized").ok());
  const json config = quantization(scratch / "out");
  EXPECT_EQ(config["config_groups"]["group_0"]["targets"], json::array({"a"}));
  EXPECT_EQ(config["config_groups"]["group_0"]["input_activations"], json());
  EXPECT_EQ(config["config_groups"]["group_1"]["targets"], json::array({"b"}));
  EXPECT_EQ(config["config_groups"]["group_1"]["input_activations"]["strategy"], "tensor");
  EXPECT_EQ(config["kv_cache_scheme"]["num_bits"], 8);
  EXPECT_EQ(config["kv_cache_scheme"]["type"], "float");
}

TEST(ConfigGroups, KeepTheKvCacheOfQuark) {
  const Scratch scratch;
  const fs::path source = fs::path(NIBBLE_SOURCE_DIR) / "tests" / "producers" / "quark" / "fp8_static_kv";
  ASSERT_TRUE(convert_checkpoint(source, scratch / "out", "float-quantized").ok());
  EXPECT_EQ(quantization(scratch / "out")["kv_cache_scheme"]["strategy"], "tensor");
  EXPECT_EQ(quantization(scratch / "out")["kv_cache_scheme"]["type"], "float");
  const Checkpoint out = open(scratch / "out");
  EXPECT_NE(out.find_tensor("model.layers.0.self_attn.k_proj.output_scale"), nullptr);
  EXPECT_EQ(out.find_module("model.layers.0.self_attn.k_proj")->claimed->name(), "e4m3t_e4m3t");
}

// --- activations ----------------------------------------------------------------------------------------------------------------

/// A 4-bit layer of compressed-tensors with these input_activations.
void write_w4(const fs::path& directory, const json& activations, const char* format = "compressed-tensors") {
  Sources tensors;
  add(tensors, format, "model.a", random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16}, 32, 64, 1));
  write(directory, tensors,
        {{"quant_method", "compressed-tensors"},
         {"config_groups",
          {{"group_0",
            {{"targets", json::array({"Linear"})},
             {"weights", ct_args(4, "int", "group", {{"group_size", 32}})},
             {"input_activations", activations}}}}}});
}

TEST(Activations, ThatNoSchemeSaysAreKeptOrRefused) {
  const Scratch scratch;
  for (const json& activations :
       {ct_args(4, "int", "token", {{"dynamic", true}}), ct_args(8, "float", "tensor", {{"dynamic", true}}),
        ct_args(8, "int", "channel"), ct_args(8, "float", "tensor_group", {{"dynamic", "local"}})}) {
    SCOPED_TRACE(activations.dump());
    write_w4(scratch / "in", activations);
    const Module module = open(scratch / "in").modules()[0];
    EXPECT_EQ(module.claimed->name(), "u4b8g32");
    EXPECT_NE(module.other_acts.find(activations["strategy"]), std::string::npos) << module.other_acts;
    ASSERT_FALSE(module.notes.empty());
    EXPECT_NE(module.notes.back().text.find("does not run"), std::string::npos) << module.notes.back().text;

    const auto report = convert_checkpoint(scratch / "in", scratch / "out", "int-quantized",
                                           {.overwrite = true, .progress = {}, .executor = nullptr});
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(quantization(scratch / "out")["config_groups"]["group_0"]["input_activations"], activations);
    for (const char* format : {"awq", "gptq"})
      expect_error(convert_checkpoint(scratch / "in", scratch / "refused", format).status(), unsupported,
                   {"no place for the quantized activations of model.a", activations["strategy"], "dequantize"});
  }
  EXPECT_FALSE(fs::exists(scratch / "refused"));
}

TEST(Activations, OfOtherProducersAreNotDropped) {
  const Scratch scratch;
  const QuantTensor q = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16}, 32, 64, 1);
  Sources tensors;
  add(tensors, "gptq", "model.a", q);
  json config{{"quant_method", "auto-round"}, {"bits", 4}, {"group_size", 32}, {"sym", true}, {"act_bits", 8}};
  write(scratch / "in", tensors, config);
  for (const char* format : {"compressed-tensors", "awq"})
    expect_error(convert_checkpoint(scratch / "in", scratch / "refused", format).status(), unsupported,
                 {"model.a", "act_bits=8", "dequantize"});
  config["act_bits"] = 16;
  write(scratch / "in", tensors, config);
  EXPECT_TRUE(convert_checkpoint(scratch / "in", scratch / "out", "compressed-tensors").ok());

  tensors.clear();
  add(tensors, "float-quantized", "model.a", random_weight(scheme("e4m3c").weight, 16, 64, 1));
  write(scratch / "quark", tensors,
        {{"quant_method", "quark"},
         {"global_quant_config",
          {{"weight", {{"dtype", "fp8_e4m3"}}}, {"input_tensors", {{"dtype", "fp8_e4m3"}, {"is_dynamic", true}}}}}});
  expect_error(convert_checkpoint(scratch / "quark", scratch / "refused", "float-quantized").status(), unsupported,
               {"model.a", "input_tensors"});
  const json fp8{{"dtype", "fp8_e4m3"}, {"qscheme", "per_channel"}};
  write(scratch / "quark", tensors,
        {{"quant_method", "quark"}, {"global_quant_config", {{"weight", fp8}, {"output_tensors", fp8}}}});
  expect_error(convert_checkpoint(scratch / "quark", scratch / "refused", "float-quantized").status(), unsupported,
               {"model.a", "output_tensors"});
  EXPECT_FALSE(fs::exists(scratch / "refused"));
}

TEST(Activations, OfAutoRoundsFp8AreRead) {
  const Scratch scratch;
  Sources tensors;
  add(tensors, "fp8", "model.a", random_weight(scheme("e4m3b128x128").weight, 128, 256, 1), scheme("e4m3g128_e4m3b128x128").act);
  write(scratch / "in", tensors,
        {{"quant_method", "auto-round"},
         {"bits", 8},
         {"data_type", "fp"},
         {"group_size", {128, 128}},
         {"act_bits", 8},
         {"act_data_type", "fp"},
         {"act_group_size", 128},
         {"act_dynamic", true}});
  const Module module = open(scratch / "in").modules()[0];
  EXPECT_EQ(module.claimed->name(), "e4m3g128_e4m3b128x128");
  EXPECT_TRUE(module.notes.empty()) << module.notes[0].text;
  ASSERT_TRUE(convert_checkpoint(scratch / "in", scratch / "out", "float-quantized").ok());
  EXPECT_EQ(open(scratch / "out").modules()[0].claimed->name(), "e4m3g128_e4m3b128x128");
}

// --- codes of few bits in whole bytes -------------------------------------------------------------------------------------------

TEST(FewBitsInBytes, AreWhatTheConfigSays) {
  const Scratch scratch;
  for (const char* name : {"s8r_u4b8g32", "s8r_u3b4g32", "s8r_u4zc", "e4m3r_u4b8g32"}) {
    SCOPED_TRACE(name);
    const Scheme both = scheme(name);
    const QuantTensor q = random_weight(both.weight, 32, 64, 1);
    Sources packed;
    add(packed, "compressed-tensors", "model.a", q, both.act);
    const auto config =
        codec::find_format("compressed-tensors")->write_config({.modules = {{"model.a", both.weight, false, both.act}}});
    write(scratch / "packed", packed, *config);
    const TransformOptions options{.overwrite = true, .progress = {}, .executor = nullptr};
    ASSERT_TRUE(convert_checkpoint(scratch / "packed", scratch / "bytes", "int-quantized", options).ok());

    const Checkpoint bytes = open(scratch / "bytes");
    const TensorInfo& codes = *bytes.find_tensor("model.a.weight");
    EXPECT_EQ(codes.dtype, DType::s8);
    const auto* stored = static_cast<const std::int8_t*>(bytes.view(codes).data);
    const float zero = q.zeros.empty() ? 0.0f : q.zeros.at(0);
    const float scale = q.scales.at(0), bias = static_cast<float>(1 << (bits(q.scheme.codes) - 1));
    EXPECT_EQ((static_cast<float>(stored[5]) + (q.zeros.empty() ? 0.0f : bias) - zero) * scale, q.value(0, 5))
        << "the byte is the signed code";
    EXPECT_EQ(bytes.modules()[0].claimed->name(), name);
    EXPECT_EQ(bytes.modules()[0].scheme.name(), both.weight.name());
    EXPECT_TRUE(bytes.modules()[0].notes.empty());
    EXPECT_EQ(read(bytes, "model.a"), q);
    EXPECT_EQ(quantization(scratch / "bytes")["config_groups"]["group_0"]["weights"]["num_bits"], bits(both.weight.codes));

    ASSERT_TRUE(convert_checkpoint(scratch / "bytes", scratch / "back", "compressed-tensors", options).ok());
    EXPECT_EQ(open(scratch / "back").modules()[0].format, "compressed-tensors");
    EXPECT_EQ(open(scratch / "back").modules()[0].claimed->name(), name);
    EXPECT_EQ(read(open(scratch / "back"), "model.a"), q);
  }
  Sources wide;
  add(wide, "int-quantized", "model.a", random_weight(scheme("s8c").weight, 16, 64, 1));
  write(scratch / "wide", wide,
        {{"config_groups", {{"group_0", {{"targets", json::array({"Linear"})}, {"weights", ct_args(4, "int", "channel")}}}}}});
  const Checkpoint damaged = open(scratch / "wide");
  expect_error(damaged.read(damaged.modules()[0]).status(), corrupt_data, {"model.a.weight", "num_bits=4", "-8 to 7"});
}

// --- several formats in one checkpoint ------------------------------------------------------------------------------------------

TEST(MixedPrecision, EachLayerInTheFormOfItsCodes) {
  const Scratch scratch;
  const QuantTensor four = random_weight(scheme("u4b8g32").weight, 32, 64, 1),
                    ragged = random_weight(scheme("e4m3b32x48").weight, 40, 64, 2),
                    eight = random_weight(scheme("s8c").weight, 16, 64, 3);
  Sources tensors;
  add(tensors, "compressed-tensors", "a", four);
  add(tensors, "float-quantized", "b", ragged, scheme("e4m3g48_e4m3b32x48").act);
  add(tensors, "int-quantized", "c", eight, scheme("s8r_s8c").act);
  const json groups{{"four",
                     {{"targets", json::array({"a"})},
                      {"weights", ct_args(4, "int", "group", {{"group_size", 32}})},
                      {"format", "pack-quantized"}}},
                    {"ragged",
                     {{"targets", json::array({"b"})},
                      {"weights", ct_args(8, "float", "block", {{"block_structure", {32, 48}}})},
                      {"input_activations", ct_args(8, "float", "group", {{"group_size", 48}, {"dynamic", true}})},
                      {"format", "float-quantized"}}},
                    {"eight",
                     {{"targets", json::array({"c"})},
                      {"weights", ct_args(8, "int", "channel")},
                      {"input_activations", kPerToken},
                      {"format", "int-quantized"}}}};
  write(scratch / "in", tensors,
        {{"quant_method", "compressed-tensors"}, {"format", "mixed-precision"}, {"config_groups", groups}});
  const auto report = convert_checkpoint(scratch / "in", scratch / "out", "compressed-tensors");
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(quantization(scratch / "out")["config_groups"], groups);
  EXPECT_EQ(quantization(scratch / "out")["format"], "mixed-precision");
  const Checkpoint out = open(scratch / "out");
  EXPECT_EQ(read(out, "a"), four);
  EXPECT_EQ(read(out, "b"), ragged);
  EXPECT_EQ(read(out, "c"), eight);
  EXPECT_EQ(out.find_module("b")->claimed->name(), "e4m3g48_e4m3b32x48");
  expect_error(convert_checkpoint(scratch / "in", scratch / "refused", "float-quantized").status(), unsupported,
               {"a", "codes are e4m3"});
}

// --- what is undecidable --------------------------------------------------------------------------------------------------------

TEST(Leftovers, QuantizedTensorsOfNoModuleStopIt) {
  const Scratch scratch;
  struct Case {
    const char *codes, *scale;
    DType dtype;
  };
  for (const auto& [codes, scale, dtype] :
       {Case{"model.experts.gate_up_proj", "model.experts.gate_up_proj_scale_inv", DType::e4m3},
        Case{"model.x.kernel", "model.x.other", DType::e5m2}, Case{"model.b.data", "model.b.data_scale", DType::s8},
        Case{"model.b.codes", "model.b.codes_scale", DType::s32}}) {
    SCOPED_TRACE(codes);
    Sources tensors;
    add(tensors, "compressed-tensors", "model.a", random_weight(scheme("u4b8g32").weight, 32, 64, 1));
    tensors.push_back(source(codes, filled(dtype, {4, 16}, 1)));
    tensors.push_back(source(scale, counting(DType::f32, {4})));
    write(scratch / "in", tensors, json());
    for (const Status& status : {dequantize_checkpoint(scratch / "in", scratch / "refused", DType::f16).status(),
                                 convert_checkpoint(scratch / "in", scratch / "refused", "compressed-tensors").status()})
      expect_error(status, unsupported, {codes, std::string(name(dtype)), "1 tensor is", "the program that made it"});

    tensors.erase(tensors.begin(), tensors.end() - 2);
    tensors.push_back(source("model.c.weight", counting(DType::f16, {16, 128})));
    write(scratch / "float", tensors, json());
    expect_error(quantize_checkpoint(scratch / "float", scratch / "refused", {}).status(), unsupported, {codes});
  }
  EXPECT_FALSE(fs::exists(scratch / "refused"));

  // Masks, positions and the scales of a KV cache are none.
  Sources tensors;
  add(tensors, "compressed-tensors", "model.attn", random_weight(scheme("u4b8g32").weight, 32, 64, 1));
  for (const auto& [name, dtype] :
       {std::pair{"model.attn.mask", DType::u8}, {"model.position_ids", DType::s64}, {"model.h.mask", DType::s32}})
    tensors.push_back(source(name, filled(dtype, {1, 8}, 1)));
  for (const char* name : {"model.h.k_scale", "model.h.v_scale"}) tensors.push_back(source(name, counting(DType::f32, {1})));
  tensors.push_back(source("model.h.k_zero_point", filled(DType::s8, {1}, 0)));
  tensors.erase(std::ranges::find(tensors, "model.attn.mask", &TensorSource::name));
  write(scratch / "in", tensors, json());
  EXPECT_TRUE(dequantize_checkpoint(scratch / "in", scratch / "out", DType::f16).ok());
}

TEST(KvCache, IsSaidOrRefused) {
  const Scratch scratch;
  write_w4(scratch / "in", nullptr);
  json config = quantization(scratch / "in");
  config["kv_cache_scheme"] = ct_args(8, "float", "tensor");
  write_text(scratch / "in/config.json", json{{"quantization_config", config}}.dump());
  ASSERT_TRUE(convert_checkpoint(scratch / "in", scratch / "out", "int-quantized").ok());
  EXPECT_EQ(quantization(scratch / "out")["kv_cache_scheme"], config["kv_cache_scheme"]);
  for (const char* format : {"awq", "gptq"})
    expect_error(convert_checkpoint(scratch / "in", scratch / "refused", format).status(), unsupported,
                 {format, "KV cache", "compressed-tensors"});
  const auto report = dequantize_checkpoint(scratch / "in", scratch / "float", DType::f16);
  ASSERT_TRUE(report.ok());
  ASSERT_EQ(report->notes.size(), 1u);
  EXPECT_NE(report->notes[0].text.find("kv_cache_scheme"), std::string::npos);
}

// --- files ----------------------------------------------------------------------------------------------------------------------

TEST(Shards, AreKeptOrCut) {
  const Scratch scratch;
  fs::create_directories(scratch / "in");
  for (int i = 0; i < 3; ++i) {
    Sources tensors;
    for (int j = 0; j < 2; ++j)
      tensors.push_back(source(fmt::format("model.layers.{}.weight", 2 * i + j), counting(DType::f32, {64, 128})));
    ASSERT_TRUE(write_safetensors(scratch / fmt::format("in/part-{}.safetensors", i), tensors).ok());
  }
  const auto files_of = [&](const char* directory) {
    std::map<std::string, std::uint64_t> bytes;
    const Checkpoint checkpoint = open(scratch / directory);
    for (const TensorInfo& tensor : checkpoint.tensors()) bytes[tensor.file] += tensor.bytes;
    const json index = json::parse(read_text(scratch / directory / "model.safetensors.index.json"));
    std::uint64_t total = 0;
    for (const auto& [file, size] : bytes) total += size;
    EXPECT_EQ(index["metadata"]["total_size"], total);
    EXPECT_EQ(index["weight_map"].size(), checkpoint.tensors().size());
    EXPECT_TRUE(checkpoint.notes().empty());
    return bytes;
  };
  QuantizeCheckpointSpec spec;
  ASSERT_TRUE(quantize_checkpoint(scratch / "in", scratch / "kept", spec).ok());
  EXPECT_EQ(files_of("kept").size(), 3u);
  EXPECT_TRUE(files_of("kept").contains("model-00002-of-00003.safetensors"));

  // A layer of 64×128 in 4 bits takes 4 KiB and its scales; in floats 32 KiB.
  ASSERT_TRUE(quantize_checkpoint(scratch / "in", scratch / "cut", spec, {.max_shard_bytes = 20'000}).ok());
  EXPECT_EQ(files_of("cut").size(), 2u);
  for (const auto& [file, size] : files_of("cut")) EXPECT_LE(size, 20'000u) << file;
  ASSERT_TRUE(dequantize_checkpoint(scratch / "cut", scratch / "floats", DType::f32, {.max_shard_bytes = 1}).ok());
  EXPECT_EQ(files_of("floats").size(), 6u) << "a layer is never cut";
  ASSERT_TRUE(convert_checkpoint(scratch / "cut", scratch / "one", "compressed-tensors", {.max_shard_bytes = 1 << 30}).ok());
  EXPECT_TRUE(fs::exists(scratch / "one/model.safetensors"));
  EXPECT_FALSE(fs::exists(scratch / "one/model.safetensors.index.json"));
  expect_error(convert_checkpoint(scratch / "one/model.safetensors", scratch / "file.safetensors", "compressed-tensors",
                                  {.max_shard_bytes = 1 << 30})
                   .status(),
               invalid_argument, {"one file"});
}

TEST(Folders, OfTheModelAreCopied) {
  const Scratch scratch;
  write(scratch / "in", {source("a.weight", counting(DType::f32, {64, 128}))}, json());
  write_text(scratch / "in/modules.json", R"([{"idx":0,"path":""},{"idx":1,"path":"1_Pooling"},{"idx":2,"path":"2_Dense"}])");
  for (const char* name : {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "extra/deep/notes.txt",
                           "onnx/model.onnx", "onnx/config.json", ".cache/x.json", "empty/.keep"})
    write_text(scratch / "in" / name, name);
  const auto report = quantize_checkpoint(scratch / "in", scratch / "out", {});
  ASSERT_TRUE(report.ok()) << report.status().message();
  for (const char* name : {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "extra/deep/notes.txt"})
    EXPECT_EQ(read_text(scratch / "out" / name), name);
  for (const char* name : {"onnx", ".cache", "empty"}) EXPECT_FALSE(fs::exists(scratch / "out" / name)) << name;
  ASSERT_EQ(report->notes.size(), 1u);
  EXPECT_EQ(report->notes[0].text, R"("onnx" was not copied: it holds weights, "onnx/model.onnx")");
}

}  // namespace
}  // namespace nibble
