// quantize, convert and dequantize: whole checkpoints in, whole checkpoints or nothing out.
#include <cmath>
#include <cstring>

#include <nlohmann/json.hpp>

#include "formats/format.hpp"
#include "formats/safetensors.hpp"
#include "random_weights.hpp"
#include "unit/scratch.hpp"

namespace nibble {
namespace {

using namespace nibble::testing;

Tensor random_tensor(DType dtype, std::vector<std::int64_t> shape, std::uint64_t seed) {
  Tensor tensor(dtype, std::move(shape));
  for (std::int64_t i = 0; i < tensor.numel(); ++i)
    tensor.set(i, static_cast<float>(random_uniform(seed, static_cast<std::uint64_t>(i))) - 0.5f);
  return tensor;
}

void write(const fs::path& path, const std::vector<TensorSource>& tensors, const storage::Metadata& metadata = {}) {
  fs::create_directories(path.parent_path());
  const Status status = write_safetensors(path, tensors, metadata, true);
  ASSERT_TRUE(status.ok()) << status.message();
}

/// A small model as people have them: two shards, a tokenizer, and things that must not be carried over.
void write_model(const fs::path& directory) {
  write(directory / "model-1.safetensors",
        {source("model.embed_tokens.weight", random_tensor(DType::bf16, {10, 32}, 1)),
         source("model.a.weight", random_tensor(DType::bf16, {16, 32}, 2)),
         source("model.a.bias", random_tensor(DType::bf16, {16}, 3)),
         source("model.norm.weight", random_tensor(DType::f32, {3}, 4))},
        {{"format", "pt"}});
  write(directory / "model-2.safetensors", {source("model.b.weight", random_tensor(DType::f16, {24, 64}, 5)),
                                            source("lm_head.weight", random_tensor(DType::f32, {10, 32}, 6))});
  write_text(directory / "config.json",
             R"({"z": 1, "a": {"y": 1e-05, "x": [1, 2.5]}, "limit": [0.0, Infinity], "torch_dtype": "bfloat16"})");
  write_text(directory / "tokenizer.json", "{}");
  for (const char* name : {"model.safetensors.index.json.bak.bin", "pytorch_model.bin", ".gitattributes"})
    write_text(directory / name, "x");
  fs::create_directory(directory / "folder");
}

QuantizeCheckpointSpec groups_of_16(std::string format = "compressed-tensors") {
  QuantizeCheckpointSpec spec;
  spec.format = std::move(format);
  spec.quantize.group_size = 16;
  return spec;
}

/// A GPTQ layer from a random tensor, as its own codec writes it.
std::vector<TensorSource> encoded(std::string_view format, const std::string& module, const QuantTensor& q) {
  auto tensors = codec::find_format(format)->write(q);
  EXPECT_TRUE(tensors.ok()) << tensors.status().message();
  std::vector<TensorSource> sources;
  for (codec::EncodedTensor& t : *tensors) sources.push_back(source(module + "." + t.suffix, std::move(t.tensor)));
  return sources;
}

std::string bytes_of(const Checkpoint& checkpoint, std::string_view tensor) {
  const TensorInfo* info = checkpoint.find_tensor(tensor);
  if (info == nullptr) return "(none)";
  return {static_cast<const char*>(checkpoint.view(*info).data), info->bytes};
}

Checkpoint open(const fs::path& path) {
  auto checkpoint = Checkpoint::open(path);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  return *checkpoint;
}

TEST(Quantize, WritesACompleteCheckpoint) {
  const Scratch scratch;
  write_model(scratch / "in");
  std::uint64_t last = 0, total = 0;
  TransformOptions options;
  options.progress = [&](std::uint64_t done, std::uint64_t all, std::string_view what) {
    EXPECT_GE(done, last);
    EXPECT_FALSE(what.empty());
    last = done;
    total = all;
  };
  const auto report = quantize_checkpoint(scratch / "in", scratch / "out", groups_of_16(), options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(names_in(scratch / "out"), (std::set<std::string>{"model.safetensors", "config.json", "tokenizer.json"}));
  EXPECT_EQ(names_in(scratch.path()), (std::set<std::string>{"in", "out"}));
  EXPECT_EQ(last, total);
  EXPECT_EQ(report->bytes_in, total);
  EXPECT_LT(report->bytes_out, report->bytes_in);
  ASSERT_EQ(report->modules.size(), 2u);
  EXPECT_EQ(report->modules[0].name, "model.a");
  EXPECT_EQ(report->modules[0].scheme, "u4b8g16");
  ASSERT_TRUE(report->modules[1].error.has_value());
  EXPECT_GT(report->modules[1].error->sqnr_db, 15);

  const Checkpoint in = open(scratch / "in"), out = open(scratch / "out");
  for (const char* same : {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.a.bias"})
    EXPECT_EQ(bytes_of(in, same), bytes_of(out, same)) << same;
  EXPECT_EQ(out.find_tensor("model.a.weight"), nullptr);
  EXPECT_EQ(out.find_module("model.b")->format, "compressed-tensors");
  EXPECT_TRUE(out.find_module("model.a")->has_bias);
  EXPECT_TRUE(out.notes().empty());
  for (const TensorInfo& tensor : out.tensors())
    EXPECT_EQ(tensor.file_offset % static_cast<unsigned>(bits(tensor.dtype) / 8), 0u) << tensor.name;

  const std::string config = out.config();
  const std::size_t z = config.find("\"z\""), a = config.find("\"a\""), added = config.find("\"quantization_config\"");
  EXPECT_TRUE(z < a && a < added && added != std::string::npos) << config;
  EXPECT_NE(config.find("Infinity"), std::string::npos) << config;
  EXPECT_EQ(config.find("nibble"), std::string::npos) << config;
  const auto q = out.read(*out.find_module("model.a"));
  ASSERT_TRUE(q.ok()) << q.status().message();
  EXPECT_EQ(q->scheme.scale, DType::f16);
}

TEST(Quantize, OneFileInOneFileOut) {
  const Scratch scratch;
  write(scratch / "in.safetensors", {source("weight", random_tensor(DType::f32, {16, 32}, 1))});
  const auto report = quantize_checkpoint(scratch / "in.safetensors", scratch / "out.safetensors", groups_of_16("awq"));
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(open(scratch / "out.safetensors").modules()[0].format, "awq");
  EXPECT_NE(open(scratch / "out.safetensors").find_tensor("qweight"), nullptr);
  EXPECT_EQ(names_in(scratch.path()), (std::set<std::string>{"in.safetensors", "out.safetensors"}));
}

TEST(Quantize, RefusesWhatItCannotDo) {
  const Scratch scratch;
  write_model(scratch / "in");
  const auto quantize = [&](const QuantizeCheckpointSpec& spec) {
    return quantize_checkpoint(scratch / "in", scratch / "out", spec).status();
  };
  using enum StatusCode;
  auto spec = groups_of_16();
  spec.skip = "(";
  expect_error(quantize(spec), invalid_argument, {"\"(\"", "not a regular expression"});
  spec.skip = ".*";
  expect_error(quantize(spec), invalid_argument, {"no dense layer"});
  spec = groups_of_16();
  spec.quantize.group_size = 48;
  expect_error(quantize(spec), invalid_argument, {"model.a", "K=32", "group_size=48"});
  spec = groups_of_16("ggml");
  expect_error(quantize(spec), not_found, {"\"ggml\"", "compressed-tensors"});
  spec = groups_of_16("dense");
  expect_error(quantize(spec), unsupported, {"\"dense\"", "awq"});
  spec = groups_of_16("gptq");
  spec.quantize.symmetric = false;
  expect_error(quantize(spec), unsupported, {"model.a", "gptq", "u4zg16"});
  expect_error(quantize_checkpoint(scratch / "none", scratch / "out", groups_of_16()).status(), not_found, {"none"});
  EXPECT_EQ(names_in(scratch.path()), std::set<std::string>{"in"});

  ASSERT_TRUE(quantize(groups_of_16()).ok());
  expect_error(quantize_checkpoint(scratch / "out", scratch / "again", groups_of_16()).status(), invalid_argument,
               {"model.a", "quantized already"});
  EXPECT_EQ(names_in(scratch.path()), (std::set<std::string>{"in", "out"}));
}

TEST(Quantize, AnEmptySkipExpressionSkipsNothing) {
  const Scratch scratch;
  write_model(scratch / "in");
  auto spec = groups_of_16();
  spec.skip = "";
  const auto report = quantize_checkpoint(scratch / "in", scratch / "out", spec);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->modules.size(), 4u);
}

TEST(Transform, ProtectsWhatExists) {
  const Scratch scratch;
  write_model(scratch / "in");
  write_text(scratch / "out/notes.txt", "precious");
  const auto quantize = [&](const fs::path& out, bool overwrite) {
    return quantize_checkpoint(scratch / "in", out, groups_of_16(), {.overwrite = overwrite, .progress = {}, .executor = nullptr})
        .status();
  };
  expect_error(quantize(scratch / "out", false), StatusCode::already_exists, {"out exists", "overwrite"});
  expect_error(quantize(scratch / "out", true), StatusCode::already_exists, {"holds no *.safetensors"});
  expect_error(quantize(scratch / "out/notes.txt", true), StatusCode::already_exists, {"not a directory"});
  EXPECT_EQ(read_text(scratch / "out/notes.txt"), "precious");
  expect_error(quantize(scratch / "in", true), StatusCode::invalid_argument, {"is or contains the input"});
  expect_error(quantize(scratch / "in/../in/", true), StatusCode::invalid_argument, {"is or contains the input"});
  expect_error(quantize(scratch.path(), true), StatusCode::invalid_argument, {"is or contains the input"});

  write_text(scratch / "out/old.safetensors", "an older result");
  ASSERT_TRUE(quantize(scratch / "out/", true).ok());
  EXPECT_EQ(names_in(scratch / "out"), (std::set<std::string>{"model.safetensors", "config.json", "tokenizer.json"}));
  EXPECT_EQ(names_in(scratch.path()), (std::set<std::string>{"in", "out"}));
}

TEST(Transform, AFullDiskLeavesNothing) {
  const Scratch scratch;
  write_model(scratch / "in");
  Status status;
  {
    const FullDisk full(1024);
    status = quantize_checkpoint(scratch / "in", scratch / "out", groups_of_16()).status();
  }
  expect_error(status, StatusCode::io_error, {"cannot write", "model.safetensors", "File too large"});
  EXPECT_EQ(names_in(scratch.path()), std::set<std::string>{"in"});
}

TEST(Transform, ThrowingProgressLeavesNothing) {
  const Scratch scratch;
  write_model(scratch / "in");
  TransformOptions options;
  options.progress = [](std::uint64_t done, std::uint64_t, std::string_view) {
    if (done > 0) throw std::runtime_error("cancelled");
  };
  expect_error(quantize_checkpoint(scratch / "in", scratch / "out", groups_of_16(), options).status(), StatusCode::io_error,
               {"cancelled"});
  EXPECT_EQ(names_in(scratch.path()), std::set<std::string>{"in"});
}

TEST(Dequantize, EqualsTheDefinitionBitForBit) {
  const Scratch scratch;
  const WeightScheme zero_points{DType::u4, ZeroKind::integer, GroupShape::group(16), DType::f16};
  const WeightScheme symmetric{DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::bf16};
  const QuantTensor a = random_weight(zero_points, 24, 48, 1, {.bias = true});
  const QuantTensor b = random_weight(symmetric, 32, 64, 2, {.act_order = true});
  auto tensors = encoded("awq", "a", a);
  for (auto& t : encoded("gptq", "b", b)) tensors.push_back(t);
  tensors.push_back(source("a.k_scale", random_tensor(DType::f32, {1}, 3)));
  tensors.push_back(source("norm.weight", random_tensor(DType::f16, {5}, 4)));
  write(scratch / "in/model.safetensors", tensors);
  write_text(scratch / "in/config.json", R"({"z":0,"text_config":{"quantization_config":{"quant_method":"gptq"},"k":1},"a":2})");
  write_text(scratch / "in/quantize_config.json", "{}");

  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const auto report =
        dequantize_checkpoint(scratch / "in", scratch / "out", dtype, {.overwrite = true, .progress = {}, .executor = nullptr});
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->modules[0].scheme, name(dtype));
    const Checkpoint in = open(scratch / "in"), out = open(scratch / "out");
    EXPECT_EQ(names_in(scratch / "out"), (std::set<std::string>{"model.safetensors", "config.json"}));
    EXPECT_EQ(nlohmann::json::parse(out.config()).dump(), R"({"a":2,"text_config":{"k":1},"z":0})");
    EXPECT_EQ(out.tensors().size(), 5u);
    for (const char* same : {"a.k_scale", "norm.weight", "a.bias"}) EXPECT_EQ(bytes_of(in, same), bytes_of(out, same)) << same;
    for (const char* module : {"a", "b"}) {
      const auto q = in.read(*in.find_module(module));
      ASSERT_TRUE(q.ok());
      Tensor expected(dtype, {q->n, q->k});
      for (std::int64_t i = 0; i < expected.numel(); ++i) expected.set(i, q->value(i / q->k, i % q->k));
      const std::string bytes(reinterpret_cast<const char*>(expected.bytes.data()), expected.bytes.size());
      EXPECT_EQ(bytes_of(out, std::string(module) + ".weight"), bytes) << module;
    }
  }
  expect_error(dequantize_checkpoint(scratch / "in", scratch / "x", DType::e4m3).status(), StatusCode::invalid_argument,
               {"e4m3"});
  expect_error(dequantize_checkpoint(scratch / "out", scratch / "x", DType::f32).status(), StatusCode::invalid_argument,
               {"nothing to dequantize"});
}

TEST(Convert, IsLosslessOrRefused) {
  const Scratch scratch;
  const WeightScheme scheme{DType::u4b8, ZeroKind::none, GroupShape::group(16), DType::f16};
  const QuantTensor q = random_weight(scheme, 16, 64, 1, {.bias = true});
  write(scratch / "in/model.safetensors", encoded("gptq", "m", q));
  write_text(scratch / "in/config.json",
             R"({"quantization_config":{"quant_method":"gptq","bits":4,"group_size":16,"sym":true}})");
  ASSERT_TRUE(convert_checkpoint(scratch / "in", scratch / "ct", "compressed-tensors").ok());
  ASSERT_TRUE(convert_checkpoint(scratch / "ct", scratch / "awq", "awq").ok());
  const auto report = convert_checkpoint(scratch / "awq", scratch / "gptq", "gptq");
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->modules[0].scheme, "u4b8g16");
  EXPECT_FALSE(report->modules[0].error.has_value());
  for (const char* name : {"ct", "awq", "gptq"}) {
    const Checkpoint out = open(scratch / name);
    EXPECT_TRUE(out.notes().empty());
    const auto back = out.read(out.modules()[0]);
    ASSERT_TRUE(back.ok()) << back.status().message();
    EXPECT_EQ(*back, q) << name;
  }

  const WeightScheme zero_points{DType::u4, ZeroKind::integer, GroupShape::group(16), DType::f16};
  write(scratch / "asym/model.safetensors", encoded("awq", "model.m", random_weight(zero_points, 16, 64, 2)));
  expect_error(convert_checkpoint(scratch / "asym", scratch / "out", "gptq").status(), StatusCode::unsupported,
               {"model.m", "gptq", "u4zg16"});
  expect_error(convert_checkpoint(scratch / "asym", scratch / "out", "nothing").status(), StatusCode::not_found, {"\"nothing\""});
  write_model(scratch / "dense");
  expect_error(convert_checkpoint(scratch / "dense", scratch / "out", "awq").status(), StatusCode::invalid_argument,
               {"nothing to convert"});
  EXPECT_FALSE(fs::exists(scratch / "out"));
}

TEST(Convert, RefusesToDropActivationScales) {
  const Scratch scratch;
  write(scratch / "in/model.safetensors",
        {source("m.weight", filled(DType::s8, {8, 16}, 3)), source("m.weight_scale", counting(DType::f32, {8, 1})),
         source("m.input_scale", counting(DType::f32, {1}))});
  expect_error(convert_checkpoint(scratch / "in", scratch / "out", "compressed-tensors").status(), StatusCode::unsupported,
               {"module m", "m.input_scale"});
  EXPECT_EQ(names_in(scratch.path()), std::set<std::string>{"in"});
}

TEST(Transform, BrokenModulesStopIt) {
  const Scratch scratch;
  const WeightScheme scheme{DType::u4b8, ZeroKind::none, GroupShape::group(16), DType::f16};
  auto tensors = encoded("gptq", "good", random_weight(scheme, 16, 64, 1));
  for (auto& t : encoded("gptq", "bad", random_weight(scheme, 16, 64, 1)))
    tensors.push_back(t.name == "bad.scales" ? source("bad.scales", filled(DType::f16, {4, 15}, 0)) : t);
  write(scratch / "in/model.safetensors", tensors);
  EXPECT_EQ(open(scratch / "in").modules().size(), 1u);
  expect_error(dequantize_checkpoint(scratch / "in", scratch / "out", DType::f16).status(), StatusCode::corrupt_data,
               {"in: bad"});
  EXPECT_EQ(names_in(scratch.path()), std::set<std::string>{"in"});
}

}  // namespace
}  // namespace nibble
