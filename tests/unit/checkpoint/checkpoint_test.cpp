// Opening checkpoints: valid ones, and every kind of damage that a directory of files can have.
#include "nibble/checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "unit/scratch.hpp"

namespace nibble {
namespace {

using namespace nibble::testing;

constexpr std::string_view kIndex = "model.safetensors.index.json";

void write(const fs::path& path, const std::vector<TensorSource>& tensors) {
  fs::create_directories(path.parent_path());
  const Status status = write_safetensors(path, tensors, {}, true);
  ASSERT_TRUE(status.ok()) << status.message();
}

/// An AWQ layer W[16,32] with two groups; zero points are 3, codes 3 or more.
std::vector<TensorSource> awq_layer(const std::string& module, Tensor scales = counting(DType::f16, {2, 16})) {
  return {source(module + ".qweight", filled(DType::s32, {32, 2}, 0x73)),
          source(module + ".qzeros", filled(DType::s32, {2, 2}, 0x33)), source(module + ".scales", std::move(scales))};
}

std::vector<TensorSource> operator+(std::vector<TensorSource> a, std::vector<TensorSource> b) {
  std::ranges::move(b, std::back_inserter(a));
  return a;
}

constexpr std::string_view kAwqConfig =
    R"({"quantization_config":{"quant_method":"awq","bits":4,"group_size":16,"zero_point":true,"version":"gemm"}})";

/// Opens, which must work, and returns all notes as lines "severity: text".
std::string notes_of(const fs::path& path) {
  const auto checkpoint = Checkpoint::open(path);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  if (!checkpoint.ok()) return {};
  std::string lines;
  const auto add = [&](const Note& note, std::string_view where) {
    static constexpr const char* kSeverity[] = {"info: ", "warning: ", "error: "};
    lines.append(kSeverity[static_cast<int>(note.severity)]).append(where).append(note.text).append("\n");
  };
  for (const Note& note : checkpoint->notes()) add(note, "");
  for (const Module& module : checkpoint->modules())
    for (const Note& note : module.notes) add(note, module.name + ": ");
  return lines;
}

void expect_note(const std::string& notes, const std::string& part) {
  EXPECT_NE(notes.find(part), std::string::npos) << part << " in:\n" << notes;
}

TEST(Checkpoint, ListsModulesAndTensors) {
  const Scratch scratch;
  write(scratch / "model.safetensors",
        awq_layer("model.layers.0.q_proj") + std::vector{source("model.embed.weight", counting(DType::bf16, {8, 4})),
                                                         source("model.norm.weight", counting(DType::f32, {4})),
                                                         source("model.layers.0.q_proj.k_scale", counting(DType::f32, {2}))});
  write_text(scratch / "config.json", kAwqConfig);
  const auto checkpoint = Checkpoint::open(scratch.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_EQ(checkpoint->path(), scratch.path());
  EXPECT_EQ(checkpoint->config(), kAwqConfig);
  EXPECT_EQ(checkpoint->tensors().size(), 6u);
  ASSERT_EQ(checkpoint->modules().size(), 2u);
  EXPECT_TRUE(checkpoint->notes().empty()) << notes_of(scratch.path());

  const Module* module = checkpoint->find_module("model.layers.0.q_proj");
  ASSERT_NE(module, nullptr);
  EXPECT_EQ(module->format, "awq");
  EXPECT_EQ(module->scheme.name(), "u4zg16");
  EXPECT_EQ(module->n, 16);
  EXPECT_EQ(module->k, 32);
  EXPECT_EQ(module->tensors.size(), 3u) << "k_scale is no part of the layer";
  EXPECT_EQ(module->bytes, 32u * 2 * 4 + 2 * 2 * 4 + 2 * 16 * 2);

  const TensorInfo* tensor = checkpoint->find_tensor("model.embed.weight");
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(tensor->file, "model.safetensors");
  const ConstTensorView view = checkpoint->view(*tensor);
  EXPECT_EQ(view.dim(1), 4);
  EXPECT_EQ(view.stride(0), 4);
  EXPECT_EQ(to_f32(static_cast<const bf16*>(view.data)[6]), 1.5f);
  EXPECT_EQ(checkpoint->find_tensor("nothing"), nullptr);
  EXPECT_EQ(checkpoint->find_module("nothing"), nullptr);
  EXPECT_TRUE(checkpoint->view({}).empty());

  const auto q = checkpoint->read(*module);
  ASSERT_TRUE(q.ok()) << q.status().message();
  EXPECT_EQ(q->value(0, 0), 0.0f);
  EXPECT_EQ(q->value(2, 0), (7 - 3) * 0.5f);
  const auto dense = checkpoint->read(*checkpoint->find_module("model.embed"));
  ASSERT_TRUE(dense.ok()) << dense.status().message();
  EXPECT_EQ(dense->scheme, WeightScheme::dense(DType::bf16));
  EXPECT_EQ((std::pair{dense->n, dense->k}), (std::pair<std::int64_t, std::int64_t>{8, 4}));
  Module foreign = *module;
  foreign.name = "elsewhere";
  expect_error(checkpoint->read(foreign).status(), StatusCode::not_found, {"elsewhere"});
}

TEST(Checkpoint, OpensOneFileWithTheConfigBesideIt) {
  const Scratch scratch;
  write(scratch / "any-name.safetensors", awq_layer("a"));
  write_text(scratch / "config.json", kAwqConfig);
  const auto checkpoint = Checkpoint::open(scratch / "any-name.safetensors");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_TRUE(checkpoint->modules()[0].claimed.has_value());
  EXPECT_EQ(checkpoint->tensors()[0].file, "any-name.safetensors");
}

TEST(Checkpoint, HighRanksAreViewedFlat) {
  const Scratch scratch;
  write(scratch / "x.safetensors", {source("a", counting(DType::f32, {1, 2, 3, 4, 5}))});
  const auto checkpoint = Checkpoint::open(scratch.path());
  ASSERT_TRUE(checkpoint.ok());
  const ConstTensorView view = checkpoint->view(checkpoint->tensors()[0]);
  EXPECT_EQ(view.rank, 1);
  EXPECT_EQ(view.numel(), 120);
}

TEST(Checkpoint, ReportsMissingThings) {
  const Scratch scratch;
  expect_error(Checkpoint::open(scratch / "none").status(), StatusCode::not_found, {"none", "does not exist"});
  expect_error(Checkpoint::open(scratch.path()).status(), StatusCode::not_found, {"holds no *.safetensors"});
  write_text(scratch / "x.safetensors", "");
  expect_error(Checkpoint::open(scratch.path()).status(), StatusCode::corrupt_data, {"x.safetensors", "0 bytes"});
}

TEST(Checkpoint, ShardsWithoutAnIndexMayNotRepeatATensor) {
  const Scratch scratch;
  write(scratch / "1.safetensors", {source("a.weight", counting(DType::f32, {2, 2}))});
  write(scratch / "2.safetensors", {source("b.weight", counting(DType::f32, {2, 2}))});
  write_text(scratch / ".hidden.safetensors", "no header");
  const auto checkpoint = Checkpoint::open(scratch.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_EQ(checkpoint->modules().size(), 2u);
  write(scratch / "3.safetensors", {source("a.weight", counting(DType::f32, {2, 2}))});
  expect_error(Checkpoint::open(scratch.path()).status(), StatusCode::corrupt_data,
               {"\"a.weight\" is in two shards", "1.safetensors", "3.safetensors"});
}

TEST(Checkpoint, TheIndexIsChecked) {
  const Scratch scratch;
  const auto with_index = [&](std::string_view map) {
    write_text(scratch / kIndex, "{\"weight_map\":" + std::string(map) + "}");
    return Checkpoint::open(scratch.path());
  };
  write(scratch / "1.safetensors", {source("a", counting(DType::f32, {2})), source("extra", counting(DType::f32, {2}))});
  write(scratch / "2.safetensors", {source("b", counting(DType::f32, {2}))});
  write(scratch / "other.safetensors", {source("a", counting(DType::f32, {2}))});

  ASSERT_TRUE(with_index(R"({"a":"1.safetensors","b":"2.safetensors"})").ok());
  expect_note(notes_of(scratch.path()), "info: \"other.safetensors\" is not in model.safetensors.index.json");
  expect_note(notes_of(scratch.path()), "names 2 of 3 tensors; the first it leaves out is \"extra\" in \"1.safetensors\"");

  using enum StatusCode;
  expect_error(with_index(R"({"a":"1.safetensors","b":"gone.safetensors"})").status(), not_found,
               {"\"gone.safetensors\"", "\"b\"", "does not exist"});
  expect_error(with_index(R"({"a":"1.safetensors","c":"2.safetensors"})").status(), corrupt_data,
               {"\"c\"", "\"2.safetensors\"", "in no shard"});
  expect_error(with_index(R"({"a":"2.safetensors","b":"2.safetensors","extra":"1.safetensors"})").status(), corrupt_data,
               {"\"a\" should be in \"2.safetensors\"", "in \"1.safetensors\""});
  expect_error(with_index(R"({"a":"../1.safetensors"})").status(), corrupt_data,
               {"\"../1.safetensors\"", "not a file of this checkpoint"});
  expect_error(with_index(R"({"a":"x/../../1.safetensors"})").status(), corrupt_data, {"not a file of this checkpoint"});
  expect_error(with_index(R"({"a":"/etc/passwd"})").status(), corrupt_data, {"\"/etc/passwd\""});
  expect_error(with_index(R"({"a":7})").status(), corrupt_data, {"\"a\" has no file name"});
  expect_error(with_index(R"({"a":"1.safetensors","a":"2.safetensors"})").status(), corrupt_data, {"\"a\" appears twice"});
  expect_error(with_index("{}").status(), corrupt_data, {"empty"});
  expect_error(with_index("7").status(), corrupt_data, {"weight_map"});
  expect_error(with_index(R"({"a")").status(), corrupt_data, {kIndex.data(), "byte 18", "not valid JSON"});
}

// A generous time limit for a linear reader on any machine: a quadratic one takes minutes.
TEST(Checkpoint, LargeHeadersAndConfigsTakeLinearTime) {
  const Scratch scratch;
  const auto begin = std::chrono::steady_clock::now();
  std::string metadata, words = "0";
  for (int i = 0; i < 200'000; ++i) metadata += (i == 0 ? "" : ",") + fmt::format("\"key {}\":\"\"", i);
  for (int i = 0; i < 500'000; ++i) words += ",NaN";
  write_text(scratch / "in/a.safetensors", raw_safetensors("{\"__metadata__\":{" + metadata + "}}", 0));
  write(scratch / "in/b.safetensors", awq_layer("a"));
  write_text(scratch / "in/config.json", R"({"x":[)" + words + R"(],"quantization_config":{"quant_method":"awq"}})");
  EXPECT_TRUE(Checkpoint::open(scratch / "in/a.safetensors").ok());
  EXPECT_TRUE(dequantize_checkpoint(scratch / "in", scratch / "out", DType::f32).ok());
  EXPECT_NE(read_text(scratch / "out/config.json").find("NaN"), std::string::npos);
  // A name of dots has as many runs of components as it has pairs of dots, each looked up in a list.
  std::string dots;
  for (int i = 0; i < 500; ++i)
    dots += fmt::format("\"{:03}{}.weight\":{{\"dtype\":\"I8\",\"shape\":[1,1],\"data_offsets\":[{},{}]}},", i,
                        std::string(1000, '.'), 3 * i, 3 * i + 1) +
            fmt::format("\"{:03}{}.weight_scale\":{{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[{},{}]}},", i,
                        std::string(1000, '.'), 3 * i + 1, 3 * i + 3);
  dots.back() = '}';
  write_text(scratch / "dots/a.safetensors", raw_safetensors("{" + dots, 1500));
  write_text(scratch / "dots/config.json", R"({"quantization_config":{"quant_method":"compressed-tensors","ignore":["x"]}})");
  EXPECT_TRUE(Checkpoint::open(scratch / "dots").ok());
#if defined(NIBBLE_SANITIZED) || defined(NIBBLE_EMULATED)
  constexpr int kSeconds = 300;
#else
  constexpr int kSeconds = 60;
#endif
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(kSeconds));
}

TEST(Checkpoint, ListsThatAreSearchedForEveryModuleAreBounded) {
  const Scratch scratch;
  write(scratch / "x.safetensors", awq_layer("a"));
  const auto refused = [&](const std::string& before, const std::string& entry, const std::string& after, int count) {
    std::string entries = R"("x":)" + entry;
    for (int i = 0; i < count; ++i) entries += fmt::format(",\"{}\":{}", i, entry);
    write_text(scratch / "config.json", R"({"quantization_config":{)" + before + entries + after + "}}");
    return Checkpoint::open(scratch.path()).status();
  };
  using enum StatusCode;
  expect_error(refused(R"("config_groups":{)", "{}", "}", 256), unsupported, {"config.json has 257 config_groups", "256"});
  expect_error(refused(R"("dynamic":{)", "{}", "}", 10000), unsupported, {"10001 entries of dynamic"});
  expect_error(refused(R"("transform_config":{"config_groups":{)", R"({"apply":[{},{}]})", "}}", 99), unsupported,
               {"300 steps of transform_config"});
  EXPECT_TRUE(refused(R"("config_groups":{)", "{}", "}", 255).ok());
}

TEST(Checkpoint, LinksMayNotLeaveIt) {
  const Scratch scratch;
  using enum StatusCode;
  write(scratch / "secret.safetensors", awq_layer("a"));
  write_text(scratch / "secret.json", R"({"auths":{"registry":"token"}})");
  write(scratch / "in/real.safetensors", awq_layer("b"));
  const auto open = [&] { return Checkpoint::open(scratch / "in").status(); };
  fs::create_symlink("real.safetensors", scratch / "in/also.bin");
  EXPECT_TRUE(open().ok());
  fs::create_symlink("../secret.safetensors", scratch / "in/x.safetensors");
  expect_error(open(), io_error, {"in/x.safetensors is a link to", "secret.safetensors", "outside the checkpoint"});
  fs::remove(scratch / "in/x.safetensors");
  fs::create_symlink(scratch / "secret.json", scratch / "in/config.json");
  expect_error(open(), io_error, {"in/config.json is a link to", "secret.json"});
  fs::remove(scratch / "in/config.json");
  fs::create_symlink("..", scratch / "in/up");
  write_text(scratch / ("in/" + std::string(kIndex)), R"({"weight_map":{"a.scales":"up/secret.safetensors"}})");
  expect_error(open(), io_error, {"in/up/secret.safetensors is a link to"});
  fs::remove(scratch / "in" / kIndex);
  fs::create_symlink(scratch / "secret.json", scratch / "in" / kIndex);
  expect_error(open(), io_error, {std::string(kIndex) + " is a link to"});
  fs::remove(scratch / "in" / kIndex);
  // The path that the user gives may be a link.
  fs::create_directory_symlink(scratch / "in", scratch / "link");
  EXPECT_TRUE(Checkpoint::open(scratch / "link").ok());
  fs::create_symlink(scratch / "in/real.safetensors", scratch / "link.safetensors");
  EXPECT_TRUE(Checkpoint::open(scratch / "link.safetensors").ok());
}

TEST(Checkpoint, TheCacheOfHuggingFaceIsMadeOfLinks) {
  const Scratch scratch;
  const std::string repository = "hub/models--org--name/", snapshot = repository + "snapshots/0123/";
  write(scratch / (repository + "blobs/1"), awq_layer("a"));
  write_text(scratch / (repository + "blobs/2"), kAwqConfig);
  write_text(scratch / "hub/models--other/blobs/3", "{}");
  fs::create_directories(scratch / (snapshot + "part"));
  fs::create_symlink("../../blobs/1", scratch / (snapshot + "model.safetensors"));
  fs::create_symlink("../../blobs/2", scratch / (snapshot + "config.json"));
  fs::create_symlink("../../../blobs/1", scratch / (snapshot + "part/model.safetensors"));
  for (const char* part : {"", "part", "model.safetensors"}) {
    const auto checkpoint = Checkpoint::open(scratch / (snapshot + part));
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  }
  fs::create_symlink("../../../models--other/blobs/3", scratch / (snapshot + "quant_config.json"));
  expect_error(Checkpoint::open(scratch / snapshot).status(), StatusCode::io_error, {"quant_config.json is a link to"});
}

TEST(Checkpoint, ConfigMustBeJson) {
  const Scratch scratch;
  write(scratch / "x.safetensors", awq_layer("a"));
  const auto open_with = [&](std::string_view text) {
    write_text(scratch / "config.json", text);
    return Checkpoint::open(scratch.path()).status();
  };
  expect_error(open_with("{\"a\": tru}"), StatusCode::corrupt_data, {"config.json", "byte 9", "not valid JSON"});
  expect_error(open_with(""), StatusCode::corrupt_data, {"config.json", "byte 0"});
  expect_error(open_with(std::string_view("{}\0{", 4)), StatusCode::corrupt_data, {"config.json", "at byte 2", "a zero byte"});
  expect_error(open_with("[1]"), StatusCode::corrupt_data, {"config.json", "array", "object is expected"});
  expect_error(open_with("{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}"), StatusCode::corrupt_data,
               {"more than 64 deep"});
  EXPECT_TRUE(open_with(R"({"time_step_limit": [0.0, Infinity], "x": [NaN, -Infinity, "NaN \" Infinity"]})").ok());
}

TEST(Checkpoint, ConfigThatContradictsTheTensorsIsNoted) {
  const Scratch scratch;
  write(scratch / "x.safetensors", awq_layer("model.a") + awq_layer("model.gate_proj"));
  const auto notes_with = [&](std::string_view text) {
    write_text(scratch / "config.json", text);
    return notes_of(scratch.path());
  };
  expect_note(notes_with(R"({"quantization_config":{"quant_method":"awq","bits":8,"group_size":16,"zero_point":true}})"),
              "warning: model.a: config.json says u8zg16, the tensors are u4zg16");
  expect_note(notes_with(R"({"quantization_config":{"quant_method":"magic\n"}})"),
              "quant_method \"magic\\n\", which nibble does not know");
  expect_note(notes_with(R"({"text_config":{"quantization_config":{"quant_method":"magic"}}})"), "quant_method \"magic\"");
  const std::string notes =
      notes_with(R"({"quantization_config":{"quant_method":"awq","modules_to_not_convert":["a","gate","re:.*",7]}})");
  expect_note(notes, "warning: model.a: config.json lists \"a\" in modules_to_not_convert, but this module is quantized");
  EXPECT_EQ(notes.find("gate_proj: config.json lists"), std::string::npos) << notes;
}

TEST(Checkpoint, IgnoredExpressionsAreMatchedWithinATime) {
  const Scratch scratch;
  write(scratch / "x.safetensors", awq_layer("model.a") + awq_layer("model.gate_proj"));
  const auto notes_with = [&](const std::string& entry) {
    write_text(scratch / "config.json",
               R"({"quantization_config":{"quant_method":"compressed-tensors","ignore":[")" + entry + R"("]}})");
    return notes_of(scratch.path());
  };
  const std::string notes = notes_with("re:.*gate.*");
  expect_note(notes, R"(warning: model.gate_proj: config.json lists "re:.*gate.*" in ignore, but this module is quantized)");
  EXPECT_EQ(notes.find("model.a: config.json lists"), std::string::npos) << notes;
  EXPECT_EQ(notes_with("re:gate").find("gate_proj: config.json lists"), std::string::npos);  // as re.match: from the beginning
  EXPECT_EQ(notes_with("re:(.*)*(.*)*x").find("config.json lists"), std::string::npos);      // never ends with std::regex
  expect_note(notes_with("re:(?!lm_head)"), "warning: config.json: ignore: '(?!lm_head)' has lookaround");
  expect_note(notes_with("re:" + std::string(20000, '(')), "groups nested more than 100 deep");
}

TEST(Checkpoint, QuantizedConfigWithoutQuantizedModulesIsNoted) {
  const Scratch scratch;
  write(scratch / "x.safetensors", {source("a.weight", counting(DType::f16, {4, 4}))});
  write_text(scratch / "config.json", kAwqConfig);
  expect_note(notes_of(scratch.path()), "config.json says the model is quantized, but no module is");
}

TEST(Checkpoint, LegacyConfigs) {
  const Scratch scratch;
  write(scratch / "x.safetensors", awq_layer("a"));
  write_text(scratch / "quant_config.json", R"({"w_bit":4,"q_group_size":16,"zero_point":true,"version":"gemm"})");
  const auto checkpoint = Checkpoint::open(scratch.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_EQ(checkpoint->modules()[0].claimed->name(), "u4zg16");
  EXPECT_EQ(notes_of(scratch.path()), "");

  write_text(scratch / "config.json", kAwqConfig);
  EXPECT_EQ(notes_of(scratch.path()), "");
  write_text(scratch / "quant_config.json", R"({"w_bit":8,"q_group_size":16})");
  expect_note(notes_of(scratch.path()), "warning: config.json says bits=4, quant_config.json says 8; config.json counts");
  write_text(scratch / "quant_config.json", "{");
  expect_error(Checkpoint::open(scratch.path()).status(), StatusCode::corrupt_data, {"quant_config.json", "byte 1"});
}

TEST(Checkpoint, BrokenModulesDoNotHideTheOthers) {
  const Scratch scratch;
  std::vector<TensorSource> wrong_shape = awq_layer("shape"), wrong_dtype = awq_layer("dtype"), empty = awq_layer("empty");
  wrong_shape[1] = source("shape.qzeros", filled(DType::s32, {3, 2}, 0));
  wrong_dtype[2] = source("dtype.scales", filled(DType::s32, {2, 16}, 0));
  empty[0] = source("empty.qweight", filled(DType::s32, {0, 2}, 0));
  write(scratch / "x.safetensors", wrong_shape + wrong_dtype + empty + awq_layer("good"));
  const auto checkpoint = Checkpoint::open(scratch.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  ASSERT_EQ(checkpoint->modules().size(), 1u);
  EXPECT_EQ(checkpoint->modules()[0].name, "good");
  const std::string notes = notes_of(scratch.path());
  expect_note(notes, "error: shape.qzeros is s32 [3,2], expected s32 [2,2]");
  expect_note(notes, "error: dtype.scales is s32 [2,16]");
  expect_note(notes, "error: empty");
}

TEST(Checkpoint, UnsupportedFormatsAreNotedOnce) {
  const Scratch scratch;
  std::vector<TensorSource> tensors;
  for (const std::string name : {"a", "b", "c"}) {
    tensors.push_back(source(name + ".weight_packed", filled(DType::u8, {4, 8}, 0)));
    tensors.push_back(source(name + ".weight_scale", filled(DType::e4m3, {4, 1}, 0)));
    tensors.push_back(source(name + ".weight_global_scale", counting(DType::f32, {1})));
  }
  write(scratch / "x.safetensors", tensors);
  const std::string notes = notes_of(scratch.path());
  expect_note(notes, "error: a: recognised but not yet supported: NVFP4");
  expect_note(notes, "(and 2 more modules)");
  EXPECT_EQ(std::ranges::count(notes, '\n'), 1);
}

TEST(Checkpoint, OddScalesAreCounted) {
  const Scratch scratch;
  Tensor scales(DType::f16, {2, 16});
  for (std::int64_t i = 0; i < scales.numel(); ++i) scales.set(i, 1.0f);
  scales.set(3, std::numeric_limits<float>::quiet_NaN());
  scales.set(16 + 3, std::numeric_limits<float>::quiet_NaN());
  scales.set(16 + 4, std::numeric_limits<float>::infinity());
  scales.set(5, 0.0f);
  scales.set(6, -2.0f);
  scales.set(16 + 7, 0x1p-20f);
  write(scratch / "x.safetensors", awq_layer("a", std::move(scales)));
  const auto checkpoint = Checkpoint::open(scratch.path());
  ASSERT_TRUE(checkpoint.ok());
  std::vector<Note> notes;
  for (std::vector<Note>* taken : {&notes, static_cast<std::vector<Note>*>(nullptr)})  // with and without notes
    expect_error(checkpoint->read(checkpoint->modules()[0], taken).status(), StatusCode::corrupt_data,
                 {"module a: 2 of 32 scales are NaN, the first (nan) at [3,0]"});
  std::string text;
  for (const Note& note : notes) {
    text += note.text + "\n";
    if (note.text.find("negative") != std::string::npos) {
      EXPECT_EQ(note.severity, Note::Severity::info) << "auto-round's";
    }
  }
  expect_note(text, "1 of 32 scales are infinite, the first (inf) at [4,1]");
  expect_note(text, "1 of 32 scales are zero, the first (0) at [5,0]");
  expect_note(text, "1 of 32 scales are negative, the first (-2) at [6,0]");
  expect_note(text, "1 of 32 scales are subnormal, the first (9.536743e-07) at [7,1]");
}

TEST(Checkpoint, ScalesThatAreNoNumbersConvertToNothing) {
  const Scratch scratch;
  Tensor scales = counting(DType::f16, {2, 16});
  scales.set(3, std::numeric_limits<float>::infinity());
  write(scratch / "in/x.safetensors", awq_layer("a", std::move(scales)));
  for (const Status& status : {dequantize_checkpoint(scratch / "in", scratch / "out", DType::f16).status(),
                               convert_checkpoint(scratch / "in", scratch / "out", "compressed-tensors").status()})
    expect_error(status, StatusCode::corrupt_data, {"module a", "1 of 32 scales are infinite"});
  EXPECT_EQ(names_in(scratch.path()), std::set<std::string>{"in"});

  write(scratch / "in/x.safetensors", awq_layer("a"));  // a zero scale is odd, not broken
  const auto report = dequantize_checkpoint(scratch / "in", scratch / "out", DType::f16);
  ASSERT_TRUE(report.ok()) << report.status().message();
  ASSERT_EQ(report->notes.size(), 1u);
  EXPECT_NE(report->notes[0].text.find("scales are zero"), std::string::npos) << report->notes[0].text;
}

TEST(Checkpoint, IntegersOfTheConfigAreChecked) {
  const Scratch scratch;
  write(scratch / "x.safetensors", awq_layer("a"));
  const auto opened = [&](const std::string& name, const std::string& text) {
    write_text(scratch / name, text);
    const Status status = Checkpoint::open(scratch.path()).status();
    fs::remove(scratch / name);
    return status;
  };
  const std::pair<const char*, const char*> bad[] = {
      {R"("bits": 33)", "bits is 33, not a number from 1 to 32"},
      {R"("bits": 0)", "bits is 0"},
      {R"("bits": -4)", "bits is -4"},
      {R"("w_bit": "4")", "w_bit is \"4\""},
      {R"("bits": true)", "bits is true"},
      {R"("group_size": 4294967424)", "group_size is 4294967424"},  // 128 in 32 bits
      {R"("group_size": 18446744073709551615)", "group_size is 18446744073709551615"},
      {R"("group_size": -2)", "group_size is -2"},
      {R"("weight_block_size": [128, 4294967424])", "weight_block_size is 4294967424"},
      {R"("config_groups": {"g": {"weights": {"num_bits": "8"}}})", "num_bits is \"8\""},
      {R"("config_groups": {"g": {"weights": {"block_structure": [0, 128]}}})", "block_structure is 0"},
      {R"("dynamic": {"x": {"bits": 300}})", "bits is 300"},
  };
  for (const auto& [text, why] : bad) {
    const std::string quantization = fmt::format(R"({{"quant_method": "awq", {}}})", text);
    const std::string config = fmt::format(R"({{"quantization_config": {}}})", quantization);
    expect_error(opened("config.json", config), StatusCode::corrupt_data, {"config.json", why});
    expect_error(opened("quant_config.json", quantization), StatusCode::corrupt_data, {"quant_config.json", why});
    expect_error(read_module({}, config).status(), StatusCode::corrupt_data, {"config", why});
  }
  for (const char* good :
       {R"("bits": 4)", R"("bits": 16)", R"("bits": 4.25)", R"("bits": null)", R"("group_size": -1)",
        R"("group_size": 2147483647)", R"("block_structure": "128x128")", R"("weight_block_size": [128, 128])"})
    EXPECT_TRUE(opened("config.json", fmt::format(R"({{"bits": 99, "quantization_config": {{{}}}}})", good)).ok()) << good;
}

TEST(Checkpoint, AMissingShardIsWarnedOfWithoutAnIndex) {
  const Scratch scratch;
  write(scratch / "model-00001-of-00003.safetensors", awq_layer("a"));
  expect_note(notes_of(scratch.path()), "warning: 1 of the 3 files \"model-*-of-00003.safetensors\" are here");
  expect_note(notes_of(scratch / "model-00001-of-00003.safetensors"), "warning: 1 of the 3 files");
  write(scratch / "model-00002-of-00003.safetensors", awq_layer("b"));
  expect_note(notes_of(scratch.path()), "warning: 2 of the 3 files");
  write(scratch / "model-00003-of-00003.safetensors", awq_layer("c"));
  EXPECT_EQ(notes_of(scratch.path()), "");
}

TEST(Checkpoint, GgufIsNamed) {
  const Scratch scratch;
  write_text(scratch / "m.gguf", "GGUF");
  for (const fs::path& path : {scratch.path(), scratch / "m.gguf"})
    expect_error(Checkpoint::open(path).status(), StatusCode::unsupported, {"m.gguf is GGUF", "safetensors"});
  write(scratch / "x.safetensors", awq_layer("a"));
  EXPECT_TRUE(Checkpoint::open(scratch.path()).ok()) << "both are there";
}

TEST(Checkpoint, NanCodesAreCounted) {
  const Scratch scratch;
  Tensor weight = filled(DType::e4m3, {4, 16}, 0x38);
  weight.bytes[2 * 16 + 7] = std::byte{0xff};
  weight.bytes[3 * 16] = std::byte{0x7f};
  write(scratch / "x.safetensors", {source("a.weight", weight), source("a.weight_scale", filled(DType::f32, {}, 0x3c))});
  const auto checkpoint = Checkpoint::open(scratch.path());
  ASSERT_TRUE(checkpoint.ok());
  std::vector<Note> notes;
  const auto q = checkpoint->read(checkpoint->modules()[0], &notes);
  ASSERT_TRUE(q.ok()) << q.status().message();
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_EQ(notes[0].severity, Note::Severity::error);
  EXPECT_EQ(notes[0].text, "2 of 64 weights are NaN, the first (code 0xff) at [2,7]");
}

TEST(Checkpoint, FormatsAreListed) {
  const auto rows = formats();
  const auto awq = std::ranges::find(rows, "awq", &FormatInfo::name);
  ASSERT_NE(awq, rows.end());
  EXPECT_TRUE(awq->can_write);
  EXPECT_EQ(rows.back().name, "dense");
}

}  // namespace
}  // namespace nibble
