// quantize, convert and dequantize: whole checkpoints in, whole checkpoints or nothing out.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "checkpoint/config/format.hpp"
#include "checkpoint/io/safetensors.hpp"
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

/// A typical small model: two shards, a tokenizer, and files that must not be copied.
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

/// The expected output.
const std::set<std::string> kWritten{"model-00001-of-00002.safetensors",
                                     "model-00002-of-00002.safetensors",
                                     "model.safetensors.index.json",
                                     "config.json",
                                     "tokenizer.json",
                                     ".nibble"};

/// Scales of the weights' type unless a test says otherwise.
WeightScheme weights(const char* scheme, DType scale = DType::none) { return Scheme::parse(scheme, scale)->weight; }

QuantizeCheckpointSpec groups_of_16(std::string format = "compressed-tensors") {
  QuantizeCheckpointSpec spec;
  spec.format = std::move(format);
  spec.scheme.weight = weights("u4b8g16");
  return spec;
}

/// A GPTQ layer from a random tensor, as its own codec writes it.
std::vector<TensorSource> encoded(std::string_view format, const std::string& module, const QuantTensor& q,
                                  const ActScheme& act = {}) {
  auto tensors = codec::find_format(format)->write(q, act);
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

/// A 3×3, a depthwise and a pointwise convolution, and a linear layer.
void write_conv_model(const fs::path& directory) {
  write(directory / "model.safetensors", {source("stem.weight", random_tensor(DType::f32, {12, 16, 3, 3}, 1)),
                                          source("stem.bias", random_tensor(DType::f32, {12}, 2)),
                                          source("depthwise.weight", random_tensor(DType::f32, {16, 1, 3, 2}, 3)),
                                          source("pointwise.weight", random_tensor(DType::f32, {8, 16, 1, 1}, 4)),
                                          source("head.weight", random_tensor(DType::f32, {8, 32}, 5))});
  write_text(directory / "config.json", "{}");
}

TEST(Quantize, ConvolutionsWhenAskedAndBackAsTheyWere) {
  const Scratch scratch;
  write_conv_model(scratch / "in");
  const Checkpoint in = open(scratch / "in");
  EXPECT_EQ(in.find_module("stem")->filter, (Extent{3, 3}));
  EXPECT_EQ(in.find_module("stem")->k, 144);
  EXPECT_EQ(in.find_module("head")->filter, std::nullopt);

  QuantizeCheckpointSpec spec = groups_of_16();
  spec.scheme.weight.scale = DType::f16;
  ASSERT_EQ(quantize_checkpoint(scratch / "in", scratch / "linear", spec)->modules.size(), 1u) << "only the linear layer";
  spec.convs = true;
  const auto without = quantize_checkpoint(scratch / "in", scratch / "some", spec);
  ASSERT_TRUE(without.ok()) << without.status().message();
  ASSERT_EQ(without->left.size(), 1u) << "depthwise rows are 6 long";
  EXPECT_EQ(without->left[0].name, "depthwise");
  EXPECT_NE(without->left[0].why.find("K=6 is not a multiple of the group size 16"), std::string::npos) << without->left[0].why;
  spec.skip = "depthwise";
  for (const bool whole_rows : {false, true}) {
    if (whole_rows) {
      spec.format = "int-quantized";
      spec.scheme.weight = weights("s8c", DType::f32);
      spec.skip = "";
    }
    const auto report = quantize_checkpoint(scratch / "in", scratch / spec.format, spec);
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->modules.size(), whole_rows ? 4u : 3u);
    for (const TransformedModule& module : report->modules) EXPECT_GT(module.error->sqnr_db, 15) << module.name;

    const Checkpoint out = open(scratch / spec.format);
    EXPECT_TRUE(out.notes().empty());
    const auto config = nlohmann::json::parse(out.config());
    const auto& targets = config["quantization_config"]["config_groups"]["group_0"]["targets"];
    EXPECT_EQ(targets, (std::vector<std::string>{"Linear", "Conv2d"}));
    for (const char* name : {"stem", "pointwise", "depthwise"}) {
      const Module* module = out.find_module(name);
      ASSERT_NE(module, nullptr) << name;
      EXPECT_EQ(module->filter, in.find_module(name)->filter);
      EXPECT_TRUE(module->notes.empty()) << module->notes.front().text;
      if (!module->quantized()) continue;
      const auto q = out.read(*module);
      ASSERT_TRUE(q.ok()) << q.status().message();
      const TensorInfo& w = *in.find_tensor(std::string(name) + ".weight");
      auto expected = quantize_conv(in.view(w), QuantizeSpec{spec.scheme.weight});
      ASSERT_TRUE(expected.ok());
      if (module->has_bias) expected->bias = q->bias;
      EXPECT_TRUE(*q == *expected) << name;
    }
    if (whole_rows) {
      EXPECT_EQ(out.find_tensor("stem.weight")->shape, (std::vector<std::int64_t>{12, 16, 3, 3}));
      EXPECT_EQ(out.find_tensor("stem.weight_scale")->shape, (std::vector<std::int64_t>{12, 1, 1, 1}));
    }

    ASSERT_TRUE(dequantize_checkpoint(scratch / spec.format, scratch / "back", DType::f32, {.overwrite = true}).ok());
    const Checkpoint back = open(scratch / "back");
    for (const char* name : {"stem.weight", "pointwise.weight"}) {
      const TensorInfo &was = *in.find_tensor(name), &is = *back.find_tensor(name);
      ASSERT_EQ(is.shape, was.shape);
      float worst = 0;
      for (std::int64_t i = 0; i < in.view(was).numel(); ++i) {
        float a = 0, b = 0;
        std::memcpy(&a, static_cast<const float*>(in.view(was).data) + i, sizeof a);
        std::memcpy(&b, static_cast<const float*>(back.view(is).data) + i, sizeof b);
        worst = std::max(worst, std::fabs(a - b));
      }
      EXPECT_LT(worst, whole_rows ? 0.003f : 0.05f) << name << ": every element is in its place";
    }
  }
  ASSERT_TRUE(convert_checkpoint(scratch / "compressed-tensors", scratch / "again", "compressed-tensors").ok());
  EXPECT_EQ(read_text(scratch / "compressed-tensors" / "model.safetensors"), read_text(scratch / "again" / "model.safetensors"));
  EXPECT_EQ(convert_checkpoint(scratch / "compressed-tensors", scratch / "out", "gptq").status().code(), StatusCode::unsupported);
  spec.format = "awq";
  spec.scheme.weight = weights("u4zg16", DType::f16);
  spec.skip = "depthwise|head";
  expect_error(quantize_checkpoint(scratch / "in", scratch / "out", spec).status(), StatusCode::unsupported,
               {"module stem: a convolution, which awq cannot hold"});
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
  EXPECT_EQ(names_in(scratch / "out"), kWritten);
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
  EXPECT_EQ(q->scheme.scale, DType::bf16) << "to which loaders of a bf16 model would round others";
  EXPECT_EQ(out.find_module("model.b")->scheme.scale, DType::f16);
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
  expect_error(quantize(spec), invalid_argument, {"'(' is not a regular expression"});
  spec.skip = ".*";
  expect_error(quantize(spec), invalid_argument, {"no dense layer"});
  spec = groups_of_16();
  spec.scheme.weight = weights("u4b8g48");
  expect_error(quantize(spec), invalid_argument, {"model.a", "K=32", "group size 48"});
  spec = groups_of_16("ggml");
  expect_error(quantize(spec), not_found, {"\"ggml\"", "compressed-tensors"});
  spec = groups_of_16("dense");
  expect_error(quantize(spec), unsupported, {"\"dense\"", "awq"});
  spec = groups_of_16("gptq");
  spec.scheme.weight = weights("u4zg16");
  expect_error(quantize(spec), unsupported, {"model.a", "gptq", "u4zg16"});
  expect_error(quantize_checkpoint(scratch / "none", scratch / "out", groups_of_16()).status(), not_found, {"none"});
  EXPECT_EQ(names_in(scratch.path()), std::set<std::string>{"in"});

  ASSERT_TRUE(quantize(groups_of_16()).ok());
  expect_error(quantize_checkpoint(scratch / "out", scratch / "again", groups_of_16()).status(), invalid_argument,
               {"model.a", "quantized already"});
  EXPECT_EQ(names_in(scratch.path()), (std::set<std::string>{"in", "out"}));
}

TEST(Quantize, EverythingWhenAskedFor) {
  const Scratch scratch;
  write_model(scratch / "in");
  auto spec = groups_of_16();
  spec.all = true;
  const auto report = quantize_checkpoint(scratch / "in", scratch / "out", spec);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->modules.size(), 4u);
}

/// A layer of a mixture of experts, T5's tables, GPT-2's block, and layers that do not fit.
void write_mixed_model(const fs::path& directory) {
  auto weight = [seed = 0](const std::string& name, std::int64_t n, std::int64_t k) mutable {
    return source(name, random_tensor(DType::f32, {n, k}, static_cast<std::uint64_t>(++seed)));
  };
  write(directory / "model.safetensors",
        {weight("shared.weight", 40, 32), weight("layers.0.q.weight", 32, 32), weight("layers.0.mlp.gate.weight", 4, 32),
         weight("layers.0.mlp.experts.0.up_proj.weight", 64, 32), weight("layers.1.mlp.gate.weight", 4, 32),
         weight("layers.1.odd.weight", 32, 30), weight("layers.1.narrow.weight", 9, 32),
         weight("layers.0.SelfAttention.relative_attention_bias.weight", 32, 16), weight("head.weight", 48, 32),
         weight("h.0.attn.c_attn.weight", 32, 96), source("h.0.attn.c_attn.bias", random_tensor(DType::f32, {96}, 30)),
         weight("h.0.attn.c_proj.weight", 32, 32), source("h.0.attn.c_proj.bias", random_tensor(DType::f32, {32}, 31))});
  write_text(directory / "config.json", R"({"text_config": {"vocab_size": 48, "hidden_size": 32}})");
}

TEST(Quantize, LeavesWhatIsNoLinearLayer) {
  const Scratch scratch;
  write_mixed_model(scratch / "in");
  auto spec = groups_of_16("awq");
  spec.scheme.weight = weights("u4zg16");
  spec.dry_run = true;
  const auto plan = quantize_checkpoint(scratch / "in", scratch / "out", spec);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(names_in(scratch.path()), std::set<std::string>{"in"}) << "a dry run";
  spec.dry_run = false;
  const auto report = quantize_checkpoint(scratch / "in", scratch / "out", spec);
  ASSERT_TRUE(report.ok()) << report.status().message();
  ASSERT_EQ(plan->modules.size(), report->modules.size());
  for (std::size_t i = 0; i < plan->modules.size(); ++i) {
    EXPECT_EQ(plan->modules[i].name, report->modules[i].name);
    EXPECT_EQ(plan->modules[i].scheme, report->modules[i].scheme);
  }
  const std::map<std::string, std::string> left = {{"shared", "an embedding"},
                                                   {"layers.0.mlp.gate", "a router"},
                                                   {"layers.1.mlp.gate", "a router"},
                                                   {"layers.1.odd", "K=30 is not a multiple of the group size 16"},
                                                   {"layers.1.narrow", "[9,32]: N must be a multiple of 8"},
                                                   {"layers.0.SelfAttention.relative_attention_bias", "an embedding"},
                                                   {"head", "N=48 is the size of the vocabulary"},
                                                   {"h.0.attn.c_attn", "stored as [K,N]"},
                                                   {"h.0.attn.c_proj", "beside weights that are stored as [K,N]"}};
  EXPECT_EQ(report->left.size(), left.size());
  for (const LeftModule& module : report->left) {
    ASSERT_TRUE(left.contains(module.name)) << module.name;
    EXPECT_NE(module.why.find(left.at(module.name)), std::string::npos) << module.name << ": " << module.why;
    EXPECT_EQ(bytes_of(open(scratch / "in"), module.name + ".weight"), bytes_of(open(scratch / "out"), module.name + ".weight"));
  }
  ASSERT_EQ(report->notes.size(), left.size() - 2) << "the routers are told together, and so are the embeddings";
  EXPECT_TRUE(std::ranges::any_of(report->notes, [](const Note& note) {
    return note.text.starts_with("in 2 modules, e.g. layers.0.mlp.gate: left as it is: a router");
  }));
  const Checkpoint out = open(scratch / "out");
  EXPECT_TRUE(out.notes().empty());
  for (const Module& module : out.modules()) EXPECT_EQ(module.quantized(), !left.contains(module.name)) << module.name;

  spec.all = true;  // except weights that cannot be quantized
  EXPECT_EQ(quantize_checkpoint(scratch / "in", scratch / "all", spec)->left.size(), 6u)
      << "gates have 4 rows, and 8 share a word";
  spec.only = "^layers";
  spec.skip = "expert|narrow";
  spec.all = false;
  const auto some = quantize_checkpoint(scratch / "in", scratch / "some", spec);
  ASSERT_TRUE(some.ok()) << some.status().message();
  ASSERT_EQ(some->modules.size(), 1u);
  EXPECT_EQ(some->modules[0].name, "layers.0.q");
  spec.only = "mlp.gate";
  expect_error(quantize_checkpoint(scratch / "in", scratch / "none", spec).status(), StatusCode::invalid_argument,
               {"no dense layer is left to quantize", "a router"});
  spec.only = "^h";  // GPT-2's block, and the head
  expect_error(quantize_checkpoint(scratch / "in", scratch / "none", spec).status(), StatusCode::invalid_argument,
               {"no dense layer is left to quantize; h.0.attn.c_attn: stored as [K,N]"});
  spec.only = "[";
  expect_error(quantize_checkpoint(scratch / "in", scratch / "none", spec).status(), StatusCode::invalid_argument,
               {"the only expression", "'['"});
}

TEST(Notes, OfAKindAreToldOnce) {
  using enum Note::Severity;
  const auto notes = group_notes(std::vector<ModuleNote>{{"", {warning, "the file"}},
                                                         {"a", {warning, "3 of 10 scales are zero, the first (0) at [1,2]"}},
                                                         {"b", {warning, "1 of 20 scales are zero, the first (-0) at [0,0]"}},
                                                         {"c", {error, "broken"}},
                                                         {"b", {info, "3 of 10 scales are zero"}}});
  ASSERT_EQ(notes.size(), 4u);
  EXPECT_EQ(notes[0].text, "c: broken");
  EXPECT_EQ(notes[1].text, "the file");
  EXPECT_EQ(notes[2].text, "in 2 modules, e.g. a: 3 of 10 scales are zero, the first (0) at [1,2]");
  EXPECT_EQ(notes[3].text, "b: 3 of 10 scales are zero");
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
  expect_error(quantize(scratch / "out", true), StatusCode::already_exists, {"holds \"notes.txt\", which nibble did not write"});
  expect_error(quantize(scratch / "out/notes.txt", true), StatusCode::already_exists, {"is a file, not a directory"});
  EXPECT_EQ(read_text(scratch / "out/notes.txt"), "precious");
  expect_error(quantize(scratch / "in", true), StatusCode::invalid_argument, {"is or contains the input"});
  expect_error(quantize(scratch / "in/../in/", true), StatusCode::invalid_argument, {"is or contains the input"});
  expect_error(quantize(scratch.path(), true), StatusCode::invalid_argument, {"is or contains the input"});

  fs::remove_all(scratch / "out");
  for (int i = 0; i < 2; ++i) {  // it replaces its own output
    ASSERT_TRUE(quantize(scratch / "out/", true).ok());
    EXPECT_EQ(names_in(scratch / "out"), kWritten);
    EXPECT_EQ(names_in(scratch.path()), (std::set<std::string>{"in", "out"}));
  }
  fs::create_directories(scratch / "out/empty");
  ASSERT_TRUE(quantize(scratch / "out", true).ok());
  for (const char* foreign : {"notes.txt", "deep/er/notes.txt", "other.safetensors"}) {
    write_text(scratch / "out" / foreign, "precious");
    expect_error(quantize(scratch / "out", true), StatusCode::already_exists, {foreign, "which nibble did not write"});
    EXPECT_EQ(read_text(scratch / "out" / foreign), "precious");
    fs::remove(scratch / "out" / foreign);
  }
  fs::create_symlink("../in", scratch / "out/link");
  expect_error(quantize(scratch / "out", true), StatusCode::already_exists, {"\"link\", which nibble did not write"});
  fs::remove(scratch / "out/link");
  fs::remove(scratch / "out/.nibble");
  expect_error(quantize(scratch / "out", true), StatusCode::already_exists, {"which nibble did not write"});
  write_text(scratch / "out/.nibble", "config.json\nmodel.safetensors\ntokenizer.json\n");  // a foreign file
  expect_error(quantize(scratch / "out", true), StatusCode::already_exists, {"which nibble did not write"});
}

TEST(Transform, ReplacesNothingButFilesAndDirectories) {
  const Scratch scratch;
  write_model(scratch / "in");
  write_text(scratch / "file", "precious");
  fs::create_directories(scratch / "full");
  ASSERT_EQ(::mkfifo((scratch / "pipe").c_str(), 0600), 0);
  fs::create_symlink("file", scratch / "link");
  fs::create_symlink("/dev/null", scratch / "device");
  fs::create_symlink("full", scratch / "directory");
  const auto names = names_in(scratch.path());
  for (const auto& [name, what] : std::vector<std::pair<const char*, const char*>>{{"pipe", "a named pipe"},
                                                                                   {"link", "a symbolic link"},
                                                                                   {"device", "a symbolic link"},
                                                                                   {"directory", "a symbolic link"}})
    for (const char* in : {"in", "in/model-1.safetensors"})
      expect_error(quantize_checkpoint(scratch / in, scratch / name, groups_of_16(), {.overwrite = true}).status(),
                   StatusCode::already_exists, {name, what, "choose another name"});
  for (const char* in : {"in", "in/model-1.safetensors"})
    expect_error(quantize_checkpoint(scratch / in, "/dev/null", groups_of_16(), {.overwrite = true}).status(),
                 StatusCode::already_exists, {"/dev/null exists and is a device"});
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_EQ(names_in(scratch.path()), names);
  EXPECT_EQ(read_text(scratch / "file"), "precious");
}

TEST(Transform, CopiesNoFileFromOutside) {
  const Scratch scratch;
  write_model(scratch / "in");
  write_text(scratch / "id_rsa", "secret");
  write_text(scratch / "in/vocab.txt", "a b c");
  fs::create_symlink("vocab.txt", scratch / "in/merges.txt");
  fs::create_symlink("nowhere", scratch / "in/dangling.txt");
  ASSERT_TRUE(quantize_checkpoint(scratch / "in", scratch / "out", groups_of_16()).ok());
  EXPECT_EQ(read_text(scratch / "out/merges.txt"), "a b c");
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(scratch / "out/merges.txt")));
  fs::create_symlink(scratch / "id_rsa", scratch / "in/special_tokens.json");
  expect_error(quantize_checkpoint(scratch / "in", scratch / "leak", groups_of_16()).status(), StatusCode::io_error,
               {"in/special_tokens.json is a link to", "id_rsa", "outside the checkpoint"});
  EXPECT_FALSE(fs::exists(scratch / "leak"));
}

TEST(Transform, AFullDiskLeavesNothing) {
  const Scratch scratch;
  write_model(scratch / "in");
  Status status;
  {
    const FullDisk full(1024);
    status = quantize_checkpoint(scratch / "in", scratch / "out", groups_of_16()).status();
  }
  expect_error(status, StatusCode::io_error, {"cannot write", "model-00001-of-00002.safetensors", "File too large"});
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
    EXPECT_EQ(names_in(scratch / "out"), (std::set<std::string>{"model.safetensors", "config.json", ".nibble"}));
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

TEST(Convert, CarriesActivationsOrRefuses) {
  const Scratch scratch;
  const auto act = [](const char* name) { return Scheme::parse(std::string(name) + "_s8c")->act; };
  const auto make = [&](const char* directory, const char* format, const char* weight, const char* activations) {
    const WeightScheme scheme = Scheme::parse(weight, DType::f32)->weight;
    QuantTensor q = random_weight(scheme, 16, 256, 1, {.bias = true});
    if (std::string_view(activations).ends_with('t')) q.static_acts = StaticActs{0.5f, activations[2] == 'z' ? -3 : 0};
    write(scratch / directory / "model.safetensors", encoded(format, "m", q, act(activations)));
    const auto config = codec::find_format(format)->write_config({.modules = {{"m", scheme, false, act(activations)}}});
    write_text(scratch / directory / "config.json", nlohmann::json{{"quantization_config", *config}}.dump());
    return q;
  };
  const auto expect_same = [&](const char* from, const char* format, const QuantTensor& q, const std::string& scheme) {
    const std::string to = std::string(from) + "-" + format;
    const auto report = convert_checkpoint(scratch / from, scratch / to, format);
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->modules[0].scheme, scheme);
    const Checkpoint out = open(scratch / to);
    EXPECT_EQ(out.modules()[0].format, format);
    EXPECT_EQ(out.modules()[0].claimed->name(), scheme);
    EXPECT_TRUE(out.modules()[0].notes.empty());
    EXPECT_EQ(*out.read(out.modules()[0]), q);
  };
  const auto expect_refused = [&](const char* from, const char* format, const char* why) {
    expect_error(convert_checkpoint(scratch / from, scratch / "refused", format).status(), StatusCode::unsupported, {"m: ", why});
  };
  QuantTensor q = make("hf", "fp8", "e4m3b128x128", "e4m3g128");
  expect_same("hf", "float-quantized", q, "e4m3g128_e4m3b128x128");
  expect_same("hf-float-quantized", "fp8", q, "e4m3g128_e4m3b128x128");
  expect_refused("hf", "awq", "no place for the quantized activations of e4m3g128");
  q = make("w8a8", "int-quantized", "s8c", "s8zt");
  expect_same("w8a8", "int-quantized", q, "s8zt_s8c");
  expect_refused("w8a8", "fp8", "a scale per block");
  q = make("fp8", "float-quantized", "e4m3c", "e4m3t");
  expect_same("fp8", "float-quantized", q, "e4m3t_e4m3c");
  expect_refused("fp8", "fp8", "a scale per block");
  q = make("w4a8", "compressed-tensors", "u4b8g32", "s8r");
  expect_same("w4a8", "compressed-tensors", q, "s8r_u4b8g32");
  expect_refused("w4a8", "gptq", "no place for the quantized activations of s8r");

  // Without a config, a static scale is the only sign.
  q = make("file", "int-quantized", "s8c", "s8t");
  fs::rename(scratch / "file/model.safetensors", scratch / "alone.safetensors");
  ASSERT_TRUE(convert_checkpoint(scratch / "alone.safetensors", scratch / "copy.safetensors", "int-quantized").ok());
  const Checkpoint copy = open(scratch / "copy.safetensors");
  EXPECT_EQ(*copy.read(copy.modules()[0]), q);

  write(scratch / "torch-int/model.safetensors",
        {source("m.weight", filled(DType::s8, {8, 16}, 3)), source("m.a", filled(DType::f32, {}, 0x3c))});
  expect_error(convert_checkpoint(scratch / "torch-int", scratch / "refused", "int-quantized").status(), StatusCode::unsupported,
               {"module m", "quantize the original checkpoint"});
  expect_error(dequantize_checkpoint(scratch / "torch-int", scratch / "refused", DType::f16).status(), StatusCode::unsupported,
               {"module m", "scale includes those of its input and output"});
  EXPECT_FALSE(fs::exists(scratch / "refused"));
}

// --- W8A8 and SmoothQuant -----------------------------------------------------------------------------------------------------

const char* const kLayer = "model.layers.0.";
const std::pair<const char*, std::int64_t> kLayers[] = {{"self_attn.q_proj", 32}, {"self_attn.k_proj", 16},
                                                        {"self_attn.v_proj", 16}, {"self_attn.o_proj", 32},
                                                        {"mlp.gate_proj", 48},    {"mlp.up_proj", 48}};

/// One layer of a Llama with K=32, and its inputs: channel 5 is 64 times as large as the others.
void write_llama(const fs::path& directory, const char* model_type = "llama", DType norm = DType::bf16) {
  std::vector<TensorSource> tensors;
  for (const auto& [name, n] : kLayers)
    tensors.push_back(
        source(std::string(kLayer) + name + ".weight", random_tensor(DType::bf16, {n, 32}, static_cast<std::uint64_t>(n))));
  for (const char* name : {"input_layernorm", "post_attention_layernorm"}) {
    Tensor weight = random_tensor(norm, {32}, 9);
    for (std::int64_t k = 0; k < 32; ++k) weight.set(k, 1.0f + weight.at(k));
    tensors.push_back(source(std::string(kLayer) + name + ".weight", std::move(weight)));
  }
  write(directory / "model.safetensors", tensors);
  write_text(directory / "config.json", nlohmann::json{{"model_type", model_type}}.dump());
}
Tensor outliers(std::vector<std::int64_t> shape, DType dtype = DType::f32) {
  Tensor x = random_tensor(dtype, std::move(shape), 77);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.set(i, x.at(i) * (i % 32 == 5 ? 64.0f : 1.0f));
  return x;
}
void write_calibration(const fs::path& path) {
  write(path, {source(std::string(kLayer) + "self_attn.q_proj.input", outliers({40, 32}, DType::f16)),
               source(std::string(kLayer) + "self_attn.o_proj.input_absmax", filled(DType::f32, {32}, 0x3f)),
               source(std::string(kLayer) + "mlp.up_proj.input", outliers({40, 32})), source("other.input", outliers({1, 32}))});
}
QuantizeCheckpointSpec w8a8(const char* format = "int-quantized", const char* scheme = "s8r_s8c") {
  const Scheme parsed = *Scheme::parse(scheme, DType::f32);
  QuantizeCheckpointSpec spec;
  spec.format = format;
  spec.scheme = parsed;
  return spec;
}

TEST(QuantizeW8A8, WritesWhatTheConfigSays) {
  const Scratch scratch;
  write_model(scratch / "in");
  struct Kind {
    const char *format, *scheme, *strategy;
  };
  for (const auto& [format, scheme, strategy] :
       {Kind{"int-quantized", "s8r_s8c", "channel"}, Kind{"int-quantized", "s8r_s8t", "tensor"},
        Kind{"int-quantized", "s8r_s8g16", "group"}, Kind{"float-quantized", "e4m3r_e4m3c", "channel"},
        Kind{"float-quantized", "e4m3r_e4m3t", "tensor"}, Kind{"float-quantized", "e4m3g32_e4m3b32x32", "block"},
        Kind{"fp8", "e4m3g128_e4m3b128x128", ""}}) {
    SCOPED_TRACE(scheme);
    const auto report = quantize_checkpoint(scratch / "in", scratch / "out", w8a8(format, scheme),
                                            {.overwrite = true, .progress = {}, .executor = nullptr});
    ASSERT_TRUE(report.ok()) << report.status().message();
    for (const Note& note : report->notes) EXPECT_EQ(note.severity, Note::Severity::info) << note.text;
    ASSERT_EQ(report->modules.size(), 2u);
    const Checkpoint in = open(scratch / "in"), out = open(scratch / "out");
    EXPECT_TRUE(out.notes().empty());
    for (const TransformedModule& row : report->modules) {
      EXPECT_EQ(row.scheme, scheme);
      EXPECT_FALSE(row.smoothed);
      EXPECT_GT(row.error->sqnr_db, 25);
      const Module& module = *out.find_module(row.name);
      EXPECT_EQ(module.format, format);
      EXPECT_EQ(module.claimed->name(), scheme);
      EXPECT_TRUE(module.notes.empty()) << module.notes[0].text;
      std::vector<Note> notes;
      const auto q = out.read(module, &notes);
      ASSERT_TRUE(q.ok()) << q.status().message();
      EXPECT_TRUE(notes.empty()) << notes[0].text;
      const TensorInfo& weight = *in.find_tensor(row.name + ".weight");
      EXPECT_EQ(quantization_error(in.view(weight), *q)->sqnr_db, row.error->sqnr_db);
    }
    EXPECT_NE(out.config().find(strategy), std::string::npos);
  }
  auto spec = w8a8("fp8", "e4m3r_e4m3c");
  expect_error(quantize_checkpoint(scratch / "in", scratch / "x", spec).status(), StatusCode::unsupported,
               {"model.a", "float-quantized holds others"});
  spec = w8a8("awq", "s8r_s8c");
  expect_error(quantize_checkpoint(scratch / "in", scratch / "x", spec).status(), StatusCode::unsupported,
               {"model.a", "s8r_s8c"});
  spec = w8a8("int-quantized", "s8t_s8c");
  expect_error(quantize_checkpoint(scratch / "in", scratch / "x", spec).status(), StatusCode::invalid_argument,
               {"a static activation scale needs a calibration"});
  spec = w8a8("int-quantized", "s8r_s8g48");
  expect_error(quantize_checkpoint(scratch / "in", scratch / "x", spec).status(), StatusCode::invalid_argument,
               {"group size 48"});
  EXPECT_FALSE(fs::exists(scratch / "x"));
}

/// The output of a layer for the calibration's rows: the norm, then W; both as floats.
std::vector<double> through(const Checkpoint& model, const std::string& norm, const std::string& module, const Tensor& x) {
  const auto tensor = [&](const std::string& name) {
    const TensorInfo& info = *model.find_tensor(name);
    Tensor t(info.dtype, info.shape);
    std::memcpy(t.bytes.data(), model.view(info).data, t.bytes.size());
    return t;
  };
  const Tensor gain = tensor(kLayer + norm + ".weight");
  const Module& m = *model.find_module(kLayer + module);
  std::function<double(std::int64_t, std::int64_t)> weight;
  if (m.quantized()) {
    weight = [q = *model.read(m)](std::int64_t n, std::int64_t k) { return q.value(n, k); };
  } else {
    weight = [w = tensor(m.name + ".weight"), k_total = m.k](std::int64_t n, std::int64_t k) { return w.at(n * k_total + k); };
  }
  std::vector<double> y;
  for (std::int64_t t = 0; t < x.shape[0]; ++t)
    for (std::int64_t n = 0; n < m.n; ++n) {
      double sum = 0;
      for (std::int64_t k = 0; k < m.k; ++k) sum += static_cast<double>(x.at(t * m.k + k)) * gain.at(k) * weight(n, k);
      y.push_back(sum);
    }
  return y;
}

TEST(Smooth, FoldsIntoTheNormsAndKeepsTheProduct) {
  const Scratch scratch;
  write_calibration(scratch / "acts.safetensors");
  for (const DType norm : {DType::f32, DType::bf16, DType::f16}) {
    SCOPED_TRACE(name(norm));
    write_llama(scratch / "in", "llama", norm);
    auto spec = w8a8();
    spec.calibration = scratch / "acts.safetensors";
    spec.smooth = 0.5;
    const auto report =
        quantize_checkpoint(scratch / "in", scratch / "out", spec, {.overwrite = true, .progress = {}, .executor = nullptr});
    ASSERT_TRUE(report.ok()) << report.status().message();
    for (const TransformedModule& row : report->modules)
      EXPECT_EQ(row.smoothed, row.name.find("o_proj") == std::string::npos) << row.name;
    ASSERT_EQ(report->notes.size(), 1u);
    EXPECT_EQ(
        report->notes[0].text,
        "1 of 6 modules do not follow a smoothed norm and were quantized as they are, the first model.layers.0.self_attn.o_proj");
    const Checkpoint in = open(scratch / "in"), out = open(scratch / "out");
    for (const char* norm_name : {"input_layernorm", "post_attention_layernorm"}) {
      const std::string name = std::string(kLayer) + norm_name + ".weight";
      EXPECT_NE(bytes_of(in, name), bytes_of(out, name));
      EXPECT_EQ(in.find_tensor(name)->dtype, out.find_tensor(name)->dtype);
    }
    const Tensor x = outliers({4, 32});
    for (const auto& [norm_name, module] :
         {std::pair{"input_layernorm", "self_attn.k_proj"}, {"post_attention_layernorm", "mlp.up_proj"}}) {
      const auto before = through(in, norm_name, module, x), after = through(out, norm_name, module, x);
      double error = 0, signal = 0;
      for (std::size_t i = 0; i < before.size(); ++i) {
        error += (before[i] - after[i]) * (before[i] - after[i]);
        signal += before[i] * before[i];
      }
      EXPECT_LT(error, 1e-3 * signal) << module;  // 8-bit weights; a factor that went missing would be of the signal's size
      // The report's error is of what the layer multiplies, 1/s included.
      EXPECT_GT(report->modules[1].error->sqnr_db, 30);
    }
  }
}

TEST(Smooth, EvensOutTheActivations) {
  const Scratch scratch;
  write_llama(scratch / "in");
  write_calibration(scratch / "acts.safetensors");
  auto spec = w8a8("int-quantized", "s8t_s8c");
  spec.calibration = scratch / "acts.safetensors";
  spec.skip = "gate_proj";  // its norm is left alone then, and up_proj with it
  const auto scale = [&](const char* module) {
    const auto report =
        quantize_checkpoint(scratch / "in", scratch / "out", spec, {.overwrite = true, .progress = {}, .executor = nullptr});
    EXPECT_TRUE(report.ok()) << report.status().message();
    const Checkpoint out = open(scratch / "out");
    return out.read(*out.find_module(std::string(kLayer) + module))->static_acts->scale;
  };
  spec.skip += "|k_proj|v_proj";
  const float rough = scale("self_attn.q_proj");
  float most = 0;
  const Tensor x = outliers({40, 32}, DType::f16);
  for (std::int64_t i = 0; i < x.numel(); ++i) most = std::max(most, std::fabs(x.at(i)));
  EXPECT_EQ(rough, most / 127);
  spec.skip = "gate_proj";
  spec.smooth = 0.5;
  const float smooth = scale("self_attn.v_proj");
  EXPECT_LT(smooth, rough / 4);
  EXPECT_EQ(scale("self_attn.q_proj"), smooth);  // one input, one scale
  spec.format = "float-quantized";
  spec.scheme.weight.codes = spec.scheme.act.codes = DType::e4m3;
  EXPECT_FLOAT_EQ(scale("self_attn.q_proj") * 448, smooth * 127);

  const auto report = quantize_checkpoint(scratch / "in", scratch / "again", spec);
  ASSERT_TRUE(report.ok());
  ASSERT_EQ(report->notes.size(), 3u) << "the norm, what follows none, and what was skipped";
  EXPECT_EQ(report->notes[0].text,
            "model.layers.0.post_attention_layernorm.weight was left as it is: model.layers.0.mlp.gate_proj is not among the "
            "modules to "
            "quantize");
  const std::string norm = std::string(kLayer) + "post_attention_layernorm.weight";
  EXPECT_EQ(bytes_of(open(scratch / "in"), norm), bytes_of(open(scratch / "again"), norm));
}

TEST(Smooth, RefusesWhatItCannotFold) {
  const Scratch scratch;
  write_llama(scratch / "in");
  write_calibration(scratch / "acts.safetensors");
  auto spec = w8a8();
  spec.smooth = 0.5;
  const auto quantize = [&] { return quantize_checkpoint(scratch / "in", scratch / "out", spec).status(); };
  using enum StatusCode;
  expect_error(quantize(), invalid_argument, {"smoothing needs a calibration"});
  spec.calibration = scratch / "none.safetensors";
  expect_error(quantize(), not_found, {"none.safetensors"});
  spec.calibration = scratch / "acts.safetensors";
  for (const double alpha : {-0.1, 1.5, static_cast<double>(NAN)}) {
    spec.smooth = alpha;
    expect_error(quantize(), invalid_argument, {"outside 0…1"});
  }
  spec.smooth = 0.5;
  const std::string q = std::string(kLayer) + "self_attn.q_proj";
  const auto with = [&](std::string name, Tensor tensor) {
    write(scratch / "bad.safetensors", {source(std::move(name), std::move(tensor))});
    spec.calibration = scratch / "bad.safetensors";
    return quantize();
  };
  expect_error(with(q + ".input_absmax", outliers({31})), corrupt_data, {"q_proj.input_absmax", "f32 [31]", "K=32"});
  expect_error(with(q + ".input_absmax", outliers({1, 32})), corrupt_data, {"f32 [1,32]"});
  expect_error(with(q + ".input", outliers({32})), corrupt_data, {"tokens,32"});
  expect_error(with(q + ".input", Tensor(DType::f32, {0, 32})), corrupt_data, {"f32 [0,32]"});
  expect_error(with(q + ".input", filled(DType::s32, {2, 32}, 1)), corrupt_data, {"s32 [2,32]"});
  Tensor x = outliers({3, 32});
  x.set(40, NAN);
  expect_error(with(q + ".input", x), corrupt_data, {"has nan at [1,8]"});
  expect_error(with("model.other.input", outliers({3, 32})), unsupported,
               {"no norm can be smoothed", "calibration has no input"});

  spec.calibration = scratch / "acts.safetensors";
  spec.scheme.act = Scheme::parse("s8t_s8c")->act;
  write(scratch / "bad.safetensors", {source(q + ".input", outliers({3, 32})),
                                      source(std::string(kLayer) + "mlp.up_proj.input", filled(DType::f32, {1, 32}, 0))});
  spec.calibration = scratch / "bad.safetensors";
  expect_error(quantize(), invalid_argument, {"o_proj", "input_absmax", "which a static scale needs"});
  spec.skip = "o_proj";
  expect_error(quantize(), invalid_argument, {"its input is always 0"});
  write_llama(scratch / "in", "gemma2");  // its norms multiply by 1 + weight, and feed other layers
  expect_error(quantize(), unsupported, {"model_type \"gemma2\"", "llama, mistral"});
  fs::remove(scratch / "in/config.json");
  expect_error(quantize(), unsupported, {"model_type \"\""});
  EXPECT_FALSE(fs::exists(scratch / "out"));
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
