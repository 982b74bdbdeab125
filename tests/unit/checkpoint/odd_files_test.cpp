// Codecs on odd files: what other programs wrote, contradictions of the config, tensors that are missing, mistyped or hostile. Each is read,
// with a note, or refused with the reason.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "codecs.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using testing::MemoryModule;
using testing::random_weight;

struct Reading {
  Status status;
  std::string detect_notes, notes;
  QuantTensor q;
};
Reading read(const MemoryModule& m) {
  Reading r;
  const auto detected = m.detect();
  r.status = detected.module.status();
  if (!r.status.ok()) return r;
  r.detect_notes = joined(detected.module->notes);
  std::vector<Note> notes;
  auto q = m.read(notes);
  r.status = q.status();
  r.notes = joined(notes);
  if (q.ok()) r.q = *std::move(q);
  return r;
}

void fill_words(MemoryModule& m, std::string_view suffix, std::uint32_t word) {
  Tensor& t = *m.find(suffix);
  for (std::size_t i = 0; i < t.bytes.size(); i += 4) std::memcpy(t.bytes.data() + i, &word, 4);
}

TEST(Codecs, ConfigContradictionsAreNoted) {
  const QuantTensor q = random_weight(scheme("u4b8g32"), 32, 128, 1);
  MemoryModule m = written("gptq", q);
  m.set("bits", 8).set("group_size", 64).set("quant_method", "bitsandbytes");
  const Reading r = read(m);
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  EXPECT_TRUE(r.q == q);
  EXPECT_THAT(r.detect_notes, HasSubstr("config.json says u8b128g64, the tensors are u4b8g32"));
  EXPECT_THAT(r.detect_notes, HasSubstr("quant_method \"bitsandbytes\""));
}

TEST(Codecs, ConfigOfWrongTypesIsIgnored) {
  const QuantTensor q = random_weight(scheme("u4b8g32"), 32, 128, 1);
  for (const char* name : {"awq", "gptq", "compressed-tensors"})
    for (const json& odd : {json(), json(true), json(-1), json(1e300), json("x"), json::array({1}), json{{"x", json::array()}}}) {
      MemoryModule m = written(name, q);
      for (auto& item : m.config.json.items()) item.value() = odd;
      EXPECT_TRUE(read(m).status.ok()) << name << odd;
      m.config.json = odd;
      EXPECT_TRUE(read(m).status.ok()) << name << odd;
      m.config.json = {
          {"config_groups", {{"g", {{"weights", {{"num_bits", odd}, {"strategy", odd}}}, {"input_activations", odd}}}}},
          {"dynamic", odd}};
      EXPECT_TRUE(read(m).status.ok()) << name << odd;
    }
}

TEST(Codecs, AwqVersions) {
  const QuantTensor q = random_weight(scheme("u4zg32"), 8, 64, 1);
  MemoryModule m = written("awq", q);
  m.set("version", "exllama");  // on disk the same as gemm
  EXPECT_TRUE(read(m).q == q);
  EXPECT_THAT(read(m).detect_notes, HasSubstr("says version \"exllama\", the tensors are gemm"));
  m.find("qweight")->shape = {8, 8};  // saved after its kernel had repacked it
  EXPECT_THAT(read(m).status.message(), HasSubstr("AWQ exllama weights in the order of its kernel"));
}

TEST(Codecs, FalseSymmetryIsNotedAndKept) {
  MemoryModule m = written("awq", random_weight(scheme("u4zg32"), 8, 64, 1));
  m.set("zero_point", false);
  const Reading r = read(m);
  ASSERT_TRUE(r.status.ok());
  EXPECT_EQ(r.q.scheme.name(), "u4zg32");
  EXPECT_THAT(r.notes, HasSubstr("called symmetric, but"));
}

TEST(Codecs, GptqVersionFollowsSymmetricZeroPoints) {
  const QuantTensor q = random_weight(scheme("u4b8g32"), 32, 64, 1);
  MemoryModule v1_called_v2 = written("gptq", q);
  v1_called_v2.set("checkpoint_format", "gptq_v2");
  MemoryModule v2_called_v1 = written("gptq", q);
  fill_words(v2_called_v1, "qzeros", 0x88888888u);
  for (const MemoryModule& m : {v1_called_v2, v2_called_v1}) {
    const Reading r = read(m);
    ASSERT_TRUE(r.status.ok());
    EXPECT_TRUE(r.q == q);
    EXPECT_THAT(r.notes, HasSubstr("checkpoint_format would be"));
  }
}

TEST(Codecs, AutoRoundPackingFormats) {
  const QuantTensor q = random_weight(scheme("u4b8g32"), 32, 64, 1);
  MemoryModule m = written("gptq", q);
  m.config.json.erase("checkpoint_format");
  m.set("quant_method", "auto-round").set("packing_format", "auto_round:auto_gptq");
  EXPECT_TRUE(read(m).q == q);
  fill_words(m, "qzeros", 0x88888888u);
  m.set("packing_format", "auto_round:gptqmodel");
  EXPECT_TRUE(read(m).q == q);
  EXPECT_EQ(read(m).detect_notes + read(m).notes, "");
}

TEST(Codecs, GptqGroupIndex) {
  const QuantTensor plain = random_weight(scheme("u4b8g32"), 32, 64, 1);
  const QuantTensor ordered = random_weight(scheme("u4b8g32"), 32, 64, 1, {.act_order = true});

  MemoryModule m = written("gptq", ordered);
  EXPECT_EQ(m.config.json["desc_act"], true);
  m.set("desc_act", false);
  EXPECT_TRUE(read(m).q == ordered);
  EXPECT_THAT(read(m).notes, HasSubstr("valid act-order permutation"));

  m = written("gptq", plain);
  EXPECT_EQ(m.config.json["desc_act"], false);
  fill_words(m, "g_idx", 0);
  m.set("desc_act", true);
  Reading r = read(m);
  EXPECT_EQ(r.status.code(), StatusCode::corrupt_data);
  EXPECT_THAT(r.status.message(), HasSubstr("64 input channels into group 0, which holds 32"));
  m.set("desc_act", false);
  EXPECT_TRUE(read(m).q == plain);
  EXPECT_THAT(read(m).notes, HasSubstr("all zero"));
  m.config.json.erase("desc_act");
  EXPECT_TRUE(read(m).q == plain);

  fill_words(m, "g_idx", 77);
  EXPECT_THAT(read(m).status.message(), HasSubstr("g_idx[0] = 77 is outside [0,2)"));
  m.erase("g_idx");
  EXPECT_TRUE(read(m).q == plain);
  m.set("desc_act", true);
  EXPECT_THAT(read(m).detect_notes, HasSubstr("there is no g_idx"));

  const auto actorder = [](const MemoryModule& module) {
    return module.config.json["config_groups"]["group_0"]["weights"]["actorder"];
  };
  EXPECT_EQ(actorder(written("compressed-tensors", ordered)), "group");
  EXPECT_TRUE(actorder(written("compressed-tensors", plain)).is_null());
}

TEST(Codecs, GptqWidths) {
  MemoryModule m = written("gptq", random_weight(scheme("u3b4g32"), 32, 64, 1));
  m.set("checkpoint_format", "gptq_p");
  EXPECT_EQ(read(m).status.code(), StatusCode::unsupported);
  EXPECT_THAT(read(m).status.message(), HasSubstr("3-bit GPTQ with planar packing"));

  m = written("gptq", random_weight(scheme("u4b8c"), 8, 24, 1));  // without g_idx 3 words are 24 4-bit or 32 3-bit codes
  m.erase("g_idx");
  EXPECT_TRUE(read(m).status.ok());
  m.config = {};
  EXPECT_THAT(read(m).status.message(), HasSubstr("say which with \"bits\""));

  m = written("gptq", random_weight(scheme("u4b8g32"), 32, 64, 1));
  m.find("qzeros")->shape = {1, 8};
  EXPECT_EQ(read(m).status.code(), StatusCode::corrupt_data);
  EXPECT_THAT(read(m).status.message(), HasSubstr("m.qzeros is s32 [1,8], expected s32 [2,any]"));
}

/// Elements of a tensor of 32-bit integers as 64-bit ones.
Tensor widened(const Tensor& narrow) {
  Tensor wide(DType::s64, narrow.shape);
  for (std::int64_t i = 0; i < narrow.numel(); ++i) wide.as<std::int64_t>()[i] = narrow.as<std::int32_t>()[i];
  return wide;
}

TEST(Codecs, GIdxMayBeWideOrEmpty) {
  const QuantTensor ordered = random_weight(scheme("u4b8g32"), 32, 64, 1, {.act_order = true});
  const QuantTensor plain = random_weight(scheme("u4b8g32"), 32, 64, 1);
  for (const auto& [name, suffix] : {std::pair{"gptq", "g_idx"}, {"compressed-tensors", "weight_g_idx"}}) {
    SCOPED_TRACE(name);
    MemoryModule m = written(name, ordered);
    *m.find(suffix) = widened(*m.find(suffix));
    EXPECT_TRUE(read(m).q == ordered) << read(m).status.message();
    m.find(suffix)->as<std::int64_t>()[3] = (std::int64_t{1} << 32) + 1;  // 1 in 32 bits
    EXPECT_THAT(read(m).status.message(), HasSubstr("is outside [0,2)"));
  }
  MemoryModule m = written("gptq", plain);
  *m.find("g_idx") = Tensor(DType::s32, {0});
  EXPECT_TRUE(read(m).q == plain) << read(m).status.message();
  m = written("compressed-tensors", ordered);
  *m.find("weight_g_idx") = Tensor(DType::s32, {0});
  EXPECT_TRUE(read(m).q.g_idx.empty()) << read(m).status.message();
  EXPECT_FALSE(m.detect().module->act_order);
}

TEST(Codecs, GptqWithoutZeroPoints) {
  for (const char* codes : {"u2b2", "u4b8", "u8b128"}) {
    const QuantTensor q = random_weight(scheme(std::string(codes) + "g32"), 32, 64, 1, {.act_order = true, .bias = true});
    MemoryModule m = written("gptq", q);
    m.erase("qzeros");
    EXPECT_TRUE(read(m).q == q) << read(m).status.message();
    m.config.json.erase("sym");
    EXPECT_TRUE(read(m).q == q) << "it cannot be anything else";
    m.set("sym", false);
    EXPECT_THAT(read(m).status.message(), HasSubstr("m.qzeros is missing, and config.json says sym=false"));
  }
}

TEST(Codecs, GptqOfALaterVersionIsRefused) {
  MemoryModule m = written("gptq", random_weight(scheme("u4b8g32"), 32, 64, 1));
  m.set("checkpoint_format", "gptq_v3");
  EXPECT_EQ(read(m).status.code(), StatusCode::unsupported);
  EXPECT_THAT(read(m).status.message(), HasSubstr("checkpoint_format \"gptq_v3\"; nibble reads gptq and gptq_v2"));
}

TEST(Codecs, RaggedGroupsNeedTheConfig) {
  MemoryModule m = written("gptq", random_weight(scheme("u4b8g40"), 8, 104, 1));  // 3 groups: 40, 40, 24
  EXPECT_TRUE(read(m).status.ok());
  m.config.json.erase("group_size");
  EXPECT_THAT(read(m).status.message(),
              HasSubstr("K=104 cannot be split evenly into 3 groups, and config.json has no group_size"));
}

TEST(Codecs, CompressedTensorsOddities) {
  const QuantTensor q = random_weight(scheme("u4b8g32"), 9, 64, 1, {.act_order = true});
  MemoryModule m = written("compressed-tensors", q);
  m.find("weight_g_idx")->as<std::int32_t>()[5] = -1;
  Reading r = read(m);
  ASSERT_TRUE(r.status.ok());
  EXPECT_TRUE(r.q.g_idx.empty());
  EXPECT_THAT(r.notes, HasSubstr("never set"));
  m.find("weight_g_idx")->as<std::int32_t>()[5] = 2;
  EXPECT_EQ(read(m).status.code(), StatusCode::corrupt_data);

  m.find("weight_shape")->as<std::int64_t>()[1] = std::int64_t{1} << 40;
  EXPECT_THAT(read(m).status.message(), HasSubstr("[9,1099511627776]"));

  // 7-bit codes in the old layout take as many words as 8-bit codes: only the config distinguishes them.
  m = written("compressed-tensors", random_weight(scheme("u8b128g32"), 9, 64, 1));
  EXPECT_EQ(read(m).q.scheme.name(), "u8b128g32");
  EXPECT_EQ(read(m).detect_notes, "");
  m.config.json = json::object();
  EXPECT_EQ(read(m).q.scheme.name(), "u8b128g32");
  EXPECT_THAT(read(m).detect_notes, HasSubstr("8-bit dense, 7-bit padded"));

  m.config.json["transform_config"] = {{"config_groups", {{"R3", {{"apply", json::array({{{"location", "input"}}})}}}}}};
  EXPECT_EQ(read(m).status.code(), StatusCode::unsupported);
}

TEST(Codecs, EmptyAndMistypedTensorsAreErrors) {
  struct Good {
    const char *format, *weight, *act;
  };
  for (const auto& [name, weight, act] : {Good{"awq", "u4b8g32", ""}, Good{"gptq", "u4b8g32", ""},
                                          Good{"compressed-tensors", "u4b8g32", ""}, Good{"int-quantized", "s8zc", "s8zt"},
                                          Good{"float-quantized", "e4m3b8x32", "e4m3t"}, Good{"fp8", "e4m3b8x32", "e4m3g32"}}) {
    QuantTensor q = random_weight(scheme(weight), 32, 64, 1, {.bias = *act != '\0'});
    if (std::string_view(act).ends_with('t')) q.static_acts = StaticActs{0.5f, 0};
    const MemoryModule good = written(name, q, *act == '\0' ? ActScheme{} : acts(act));
    for (std::size_t i = 0; i < good.tensors.size(); ++i) {
      const std::string& suffix = good.tensors[i].suffix;
      MemoryModule m = good;
      for (auto& dim : m.tensors[i].tensor.shape) dim = 0;
      m.tensors[i].tensor.bytes.clear();
      EXPECT_EQ(read(m).status.ok(), suffix == "g_idx") << name << " empty " << suffix;
      m = good;
      m.tensors[i].tensor = Tensor(DType::boolean, good.tensors[i].tensor.shape);
      EXPECT_FALSE(read(m).status.ok()) << name << " mistyped " << suffix;
      m = good;
      m.tensors[i].tensor = Tensor(good.tensors[i].tensor.dtype, {3});
      EXPECT_FALSE(read(m).status.ok()) << name << " reshaped " << suffix;
    }
  }
}

struct Stored {
  const char* suffix;
  DType dtype;
  std::vector<std::int64_t> shape;
};
MemoryModule stored(const std::vector<Stored>& tensors) {
  MemoryModule m;
  for (const Stored& t : tensors) m.tensors.push_back({t.suffix, Tensor(t.dtype, t.shape)});
  return m;
}

/// A whole module of zeros but for the named tensors, which have one value.
MemoryModule valued(const std::vector<Stored>& tensors, const std::vector<std::pair<const char*, float>>& values) {
  MemoryModule m = stored(tensors);
  for (const auto& [suffix, value] : values)
    for (std::int64_t i = 0; i < m.find(suffix)->numel(); ++i) m.find(suffix)->set(i, value);
  return m;
}

TEST(Codecs, ScalesOfFp8TellTheirBlocks) {
  const auto group = [](const char* suffix, std::vector<std::int64_t> shape, json config, std::int64_t n, std::int64_t k) {
    MemoryModule m = valued({{"weight", DType::e4m3, {n, k}}, {suffix, DType::f32, std::move(shape)}}, {{suffix, 1.0f}});
    m.config.json = std::move(config);
    if (!m.config.json.empty()) m.config.source = "config.json";
    const Reading r = read(m);
    return r.status.ok() ? r.q.scheme.name() : r.status.message();
  };
  const json none = json::object(), blocks = {{"quant_method", "fp8"}, {"weight_block_size", {64, 32}}};
  EXPECT_EQ(group("weight_scale", {}, none, 8, 64), "e4m3t");
  EXPECT_EQ(group("weight_scale", {1, 1}, none, 8, 64), "e4m3t");
  EXPECT_EQ(group("weight_scale_inv", {1, 1}, none, 8, 64), "e4m3b128x128");
  EXPECT_EQ(group("weight_scale_inv", {1, 1}, {{"quant_method", "fp8"}}, 8, 64), "e4m3t");
  EXPECT_EQ(group("weight_scale", {8}, none, 8, 64), "e4m3c");
  EXPECT_EQ(group("weight_scale", {8, 4}, none, 8, 64), "e4m3g16");
  EXPECT_EQ(group("weight_scale", {2, 1, 3, 1}, none, 200, 300), "e4m3b128x128");
  EXPECT_EQ(group("weight_scale_inv", {2, 3}, none, 200, 300), "e4m3b128x128");
  EXPECT_EQ(group("weight_scale_inv", {3, 7}, blocks, 130, 200), "e4m3b64x32");
  EXPECT_EQ(group("weight_scale_inv", {2, 4}, none, 64, 64), "e4m3b32x16");  // evenly
  EXPECT_THAT(group("weight_scale_inv", {3, 7}, blocks, 130, 300),
              HasSubstr("m.weight_scale_inv is f32 [3,7]; W[130,300] cannot be cut into that many blocks, 64×32 of config.json"));
  EXPECT_THAT(group("weight_scale", {1, 2, 3, 1}, none, 200, 300), HasSubstr("expected a float"));
  for (const json& wild : {json{0, 128}, json{-1, 128}, json{1LL << 40, 128}, json{"128", 128}, json{128}})
    EXPECT_EQ(group("weight_scale_inv", {2, 3}, {{"quant_method", "fp8"}, {"weight_block_size", wild}}, 200, 300), "e4m3b128x128")
        << wild;
}

TEST(Codecs, Fp8ZeroPointsMustBeZero) {
  MemoryModule m =
      valued({{"weight", DType::e4m3, {8, 64}}, {"weight_scale", DType::f32, {8, 1}}, {"weight_zero_point", DType::e4m3, {8, 1}}},
             {{"weight_scale", 1.0f}});
  EXPECT_TRUE(read(m).status.ok());
  m.find("weight_zero_point")->bytes[3] = std::byte{1};
  EXPECT_EQ(read(m).status.code(), StatusCode::unsupported);
  EXPECT_THAT(read(m).status.message(), HasSubstr("m.weight_zero_point is not all zero"));
}

TEST(Codecs, ActivationsThatCannotBe) {
  const std::vector<Stored> tensors = {{"weight", DType::s8, {8, 16}},
                                       {"weight_scale", DType::f32, {8, 1}},
                                       {"input_scale", DType::f32, {1}},
                                       {"input_zero_point", DType::s8, {1}}};
  const auto with = [&](float scale, float zero) {
    return valued(tensors, {{"weight_scale", 1.0f}, {"input_scale", scale}, {"input_zero_point", zero}});
  };
  EXPECT_EQ(read(with(0.5f, -128)).q.static_acts, (StaticActs{0.5f, -128}));
  EXPECT_THAT(read(with(0.5f, 3)).detect_notes, HasSubstr("input_scale is present"));
  for (const float bad : {0.0f, -1.0f, INFINITY, NAN}) {
    const Reading r = read(with(bad, 0));
    EXPECT_TRUE(r.status.ok()) << r.status.message();
    EXPECT_FALSE(r.q.static_acts);
    EXPECT_THAT(r.notes, HasSubstr("not a positive number"));
  }
  MemoryModule m = with(0.5f, 0);
  *m.find("input_zero_point") = Tensor(DType::f32, {});
  m.find("input_zero_point")->set(0, 0.25f);
  EXPECT_THAT(read(m).notes, HasSubstr("input_zero_point is 0.25, not a whole number"));
  m = with(0.5f, 0);
  m.find("input_scale")->shape = {};
  EXPECT_TRUE(read(m).status.ok());
  *m.find("input_scale") = Tensor(DType::f32, {2});
  EXPECT_THAT(read(m).status.message(), HasSubstr("m.input_scale is f32 [2], expected f16|bf16|f32 [1]"));
  *m.find("input_scale") = Tensor(DType::f32, {0});
  EXPECT_EQ(read(m).status.code(), StatusCode::corrupt_data);

  m = with(0.5f, 7);
  const json int8 = {{"num_bits", 8}, {"type", "int"}, {"symmetric", true}, {"strategy", "channel"}, {"dynamic", false}};
  json act = {{"num_bits", 8}, {"type", "int"}, {"symmetric", true}, {"strategy", "tensor"}, {"dynamic", false}};
  const auto configure = [&] {
    m.config.json = {{"config_groups", {{"group_0", {{"weights", int8}, {"input_activations", act}}}}}};
    return read(m);
  };
  EXPECT_THAT(configure().notes, HasSubstr("input_zero_point is 7, but activations are called symmetric"));
  act["symmetric"] = false;
  EXPECT_EQ(configure().notes + configure().detect_notes, "");
  EXPECT_EQ(m.detect().module->claimed->name(), "s8zt_s8c");
  act["dynamic"] = true;
  act["strategy"] = "token";
  EXPECT_EQ((configure(), m.detect().module->claimed->name()), "s8zr_s8c");
  EXPECT_THAT(configure().detect_notes, HasSubstr("says s8zr_s8c, but input_scale is present"));
  m.erase("input_zero_point");
  act["dynamic"] = false;
  act["strategy"] = "tensor";
  EXPECT_THAT(configure().detect_notes, HasSubstr("input_zero_point is missing"));
  act["type"] = "float";
  EXPECT_EQ((configure(), m.detect().module->claimed->name()), "e4m3t_s8c");

  m = valued({{"weight", DType::s8, {8, 16}}, {"weight_scale", DType::f32, {8}}, {"pre_quant_scale", DType::bf16, {16}}},
             {{"weight_scale", 1.0f}, {"pre_quant_scale", 0.5f}});
  EXPECT_EQ(read(m).q.prescale.at(15), 0.5f);
  m.find("pre_quant_scale")->shape = {8};
  EXPECT_EQ(read(m).status.code(), StatusCode::corrupt_data);
  m.find("weight")->shape = {8, 8, 1, 2};  // a filter of two elements, which share the factors of 8 channels
  ASSERT_TRUE(read(m).status.ok()) << read(m).status.message();
  EXPECT_EQ(read(m).q.prescale.shape, (std::vector<std::int64_t>{16}));
  EXPECT_EQ(read(m).q.prescale.at(15), 0.5f);
}

TEST(Codecs, Fp8ConfigsThatContradict) {
  MemoryModule m = valued({{"weight", DType::e4m3, {8, 16}}, {"weight_scale", DType::f32, {8, 1}}}, {{"weight_scale", 1.0f}});
  m.config = {json{{"quant_method", "fbgemm_fp8"}, {"activation_scale_ub", -3}}, "config.json"};
  EXPECT_THAT(read(m).notes, HasSubstr("activation_scale_ub=-3, which is no limit"));
  EXPECT_FALSE(read(m).q.act_limit);
  m.set("activation_scale_ub", 50);
  EXPECT_EQ(read(m).q.act_limit, 50.0f);
  m.set("activation_scale_ub", "many");
  EXPECT_FALSE(read(m).q.act_limit);
  m.set("quant_method", "awq");
  EXPECT_THAT(read(m).detect_notes, HasSubstr("quant_method \"awq\", the tensors are float-quantized"));
  m.set("quant_method", "fp8").set("activation_scheme", "static");
  EXPECT_THAT(read(m).detect_notes, HasSubstr("says e4m3t, the tensors are e4m3c"));
  EXPECT_THAT(read(m).detect_notes, HasSubstr("but input_scale is missing"));
  m.config.json = {{"quant_method", "modelopt"},
                   {"quantization", {{"quant_algo", "MIXED_PRECISION"}, {"quantized_layers", {{"m", {{"quant_algo", "fp8"}}}}}}}};
  EXPECT_EQ(m.detect().module->claimed->name(), "e4m3t_e4m3t");
}

TEST(Codecs, ModelOptInt4) {
  const auto layer = [](std::vector<std::int64_t> weight, std::vector<std::int64_t> scale, const char* algorithm,
                        DType scales = DType::f32) {
    MemoryModule m = valued({{"weight", DType::u8, std::move(weight)}, {"weight_scale", scales, std::move(scale)}},
                            {{"weight", 0x87}, {"weight_scale", 0.5f}});
    m.config = {json{{"quant_method", "modelopt"}, {"quantization", {{"quant_algo", algorithm}}}}, "config.json"};
    return m;
  };
  const auto add = [](MemoryModule& m, const char* suffix, Tensor t, float value) {
    for (std::int64_t i = 0; i < t.numel(); ++i) t.set(i, value);
    m.tensors.push_back({suffix, std::move(t)});
  };
  const auto claimed = [](const MemoryModule& m) { return m.detect().module->claimed->name(); };
  MemoryModule m = layer({4, 64}, {8, 2}, "W4A16_AWQ");
  EXPECT_EQ(m.detect().format->name, "modelopt-int4");
  Reading r = read(m);
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  EXPECT_EQ(r.q.scheme.name(), "u4b8g32");
  EXPECT_EQ(r.q.value(6, 63), 3.5f);
  EXPECT_EQ(r.q.value(7, 0), -4.0f);
  EXPECT_EQ(claimed(m), "u4b8g32") << "the config does not say which groups";
  EXPECT_EQ(r.detect_notes + r.notes, "");

  m.config.json["quantization"]["group_size"] = 64;
  EXPECT_THAT(read(m).detect_notes, HasSubstr("config.json says u4b8g64, the tensors are u4b8g32"));
  m.config.json["quantization"] = {{"quant_algo", "MIXED_PRECISION"},
                                   {"quantized_layers", {{"m", {{"quant_algo", "W4A8_AWQ"}, {"group_size", 32}}}}}};
  EXPECT_EQ(claimed(m), "e4m3t_u4b8g32");
  EXPECT_THAT(read(m).detect_notes, HasSubstr("says e4m3t_u4b8g32, but input_scale is missing"));
  EXPECT_THAT(read(m).detect_notes, HasSubstr("says w4a8_awq, but weight_scale_2 is missing"));
  add(m, "input_scale", Tensor(DType::f32, {}), 0.25f);
  add(m, "weight_scale_2", Tensor(DType::f32, {1}), 0.125f);
  add(m, "pre_quant_scale", Tensor(DType::bf16, {64}), 2.0f);
  r = read(m);
  EXPECT_THAT(r.detect_notes, HasSubstr("rounds these weights to e4m3 in steps of weight_scale_2"));
  EXPECT_EQ(r.q.static_acts, (StaticActs{0.25f, 0}));
  EXPECT_EQ(r.q.prescale.at(63), 2.0f);
  EXPECT_EQ(r.q.value(7, 0), -4.0f) << "weight_scale_2 does not multiply W";
  m.config.json = json::object();
  EXPECT_THAT(read(m).detect_notes, HasSubstr("input_scale is present"));
  m.set("quant_method", "awq");
  EXPECT_THAT(read(m).detect_notes, HasSubstr("quant_method \"awq\", the tensors are modelopt-int4"));

  const auto error = [](const MemoryModule& broken) {
    const Status status = broken.detect().module.status();
    EXPECT_EQ(status.code(), StatusCode::corrupt_data) << status.message();
    return status.message();
  };
  for (auto& [suffix, tensor] : m.tensors) {
    if (suffix != "pre_quant_scale" && !suffix.starts_with("weight_scale_2")) continue;
    const Tensor good = std::exchange(tensor, Tensor(DType::f32, {63}));
    EXPECT_THAT(error(m), HasSubstr("m." + suffix + " is f32 [63], expected f16|bf16|f32 ["));
    tensor = good;
  }
  EXPECT_THAT(
      error(layer({4, 64}, {7, 2}, "W4A16_AWQ")),
      HasSubstr("m.weight_scale is f32 [7,2], expected f16|bf16|f32 [8,groups] beside the weight u8 [4,64], which has two "
                "output channels a byte"));
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{}, {8}, {9, 2}, {8, 0}, {2, 8}, {8, 65}, {8, 2, 1}})
    EXPECT_THAT(error(layer({4, 64}, shape, "W4A16_AWQ")), HasSubstr("expected f16|bf16|f32 [8,groups]"));
  EXPECT_THAT(error(layer({4, 64}, {8, 2}, "W4A16_AWQ", DType::s8)), HasSubstr("m.weight_scale is s8 [8,2]"));
  EXPECT_THAT(error(layer({4}, {8, 2}, "W4A16_AWQ")), HasSubstr("m.weight is u8 [4], expected u8 [any,any]"));
  EXPECT_THAT(error(layer({4, 64}, {8, 3}, "W4A16_AWQ")), HasSubstr("K=64 cannot be split evenly into 3 groups"));
  m = layer({4, 200}, {8, 2}, "W4A16_AWQ");
  EXPECT_EQ(read(m).q.scheme.name(), "u4b8g100");
  m.config.json["quantization"]["group_size"] = 128;
  EXPECT_THAT(error(m), HasSubstr("K=200 is no multiple of group_size=128 in config.json"));
  m = layer({4, 64}, {8, 1}, "W4A16_AWQ");
  m.config.json["quantization"]["group_size"] = 128;
  EXPECT_TRUE(read(m).status.ok()) << "a group that is longer than the row";
  m.erase("weight_scale");
  EXPECT_THAT(error(m), HasSubstr("m.weight_scale is missing"));
}

TEST(Codecs, QuarkConfigs) {
  MemoryModule m = valued({{"weight", DType::s8, {8, 16}}, {"weight_scale", DType::bf16, {8}}}, {{"weight_scale", 1.0f}});
  const auto tensor = [](const char* dtype, const char* scheme, bool dynamic, int axis = 1) {
    return json{{"dtype", dtype}, {"qscheme", scheme}, {"is_dynamic", dynamic}, {"symmetric", true}, {"ch_axis", axis}};
  };
  const auto claimed = [&]() -> std::string {
    const auto module = m.detect().module;
    if (!module.ok()) return module.status().message();
    return module->claimed ? module->claimed->name() : "none";
  };
  const json weight = tensor("int8", "per_channel", false, 0), token = tensor("int8", "per_channel", true);
  const json other = {{"weight", weight}, {"input_tensors", json()}};
  m.config = {json{{"quant_method", "quark"}, {"global_quant_config", {{"weight", weight}, {"input_tensors", token}}}},
              "config.json"};
  EXPECT_EQ(claimed(), "s8r_s8c");
  m.set("layer_quant_config", {{"n", other}, {"?x", other}});
  EXPECT_EQ(claimed(), "s8r_s8c") << "no pattern matches the whole of the name, m";
  m.set("layer_quant_config", {{"*", other}});
  EXPECT_EQ(claimed(), "s8c");
  m.set("layer_quant_config", {{"[a-z]", other}});
  EXPECT_EQ(claimed(), "none") << "nibble does not know such patterns";
  m.set("layer_quant_config", {{std::string(2000, '*'), other}});
  EXPECT_EQ(claimed(), "none") << "too much to compare with";
  m.set("layer_quant_config", json::object()).set("layer_type_quant_config", {{"Linear", other}});
  EXPECT_EQ(claimed(), "none");
  m.set("layer_type_quant_config", json::object());
  for (const json& input :
       {tensor("int8", "per_tensor", true), tensor("int8", "per_channel", false), tensor("int4", "per_tensor", false)}) {
    m.set("global_quant_config", {{"weight", weight}, {"input_tensors", input}});
    EXPECT_EQ(claimed(), "none") << input;
  }
  m.set("global_quant_config", {{"weight", tensor("int8", "per_channel", false)}});
  EXPECT_THAT(claimed(), HasSubstr("not yet supported: INT8 per channel (Quark)")) << "of the weight's columns";
  m.set("global_quant_config", {{"weight", tensor("int8", "per_group", false)}});
  *m.find("weight_scale") = Tensor(DType::bf16, {8, 16});  // which would pass for [N,groups]
  EXPECT_THAT(claimed(), HasSubstr("not yet supported: INT8 per group (Quark)"));
  m.set("global_quant_config", {{"weight", tensor("in\nt8", "per_group", false)}});
  EXPECT_THAT(claimed(), HasSubstr("not yet supported: int8"));
}

TEST(Codecs, SmoothQuantKeepsItsUnits) {
  MemoryModule m =
      valued({{"weight", DType::s8, {4, 16}}, {"a", DType::f32, {}}, {"b", DType::f32, {1}}, {"bias", DType::s8, {1, 4}}},
             {{"weight", -3.0f}, {"a", 0.25f}, {"b", 0.5f}, {"bias", -7.0f}});
  const Reading r = read(m);
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  EXPECT_THAT(r.detect_notes, HasSubstr("the product of the scales"));
  EXPECT_EQ(r.q.value(3, 15), -0.75f);
  EXPECT_EQ(r.q.bias.at(3), -3.5f);
  EXPECT_EQ(r.q.static_acts, (StaticActs{1.0f, 0}));
  m.erase("b");
  EXPECT_THAT(read(m).status.message(), HasSubstr("m.b is missing"));
  *m.find("bias") = Tensor(DType::f32, {4});
  EXPECT_TRUE(read(m).status.ok());
  *m.find("bias") = Tensor(DType::f32, {5});
  EXPECT_THAT(read(m).status.message(), HasSubstr("m.bias is f32 [5]"));
  m.erase("bias");
  EXPECT_TRUE(read(m).q.bias.empty());
  *m.find("a") = Tensor(DType::f32, {4});
  EXPECT_THAT(read(m).status.message(), HasSubstr("m.a is f32 [4]"));
}

TEST(Codecs, KnownButUnsupportedFormatsAreNamed) {
  const std::pair<MemoryModule, const char*> cases[] = {
      {stored({{"qweight", DType::s32, {64, 16}}, {"qzeros", DType::s32, {64, 1}}, {"scales", DType::f16, {64, 8}}}), "AWQ gemv"},
      {stored({{"qweight", DType::s16, {16, 128}}, {"qzeros", DType::f16, {8, 64}}, {"scales", DType::f16, {8, 64}}}),
       "AWQ gemv_fast"},
      {stored({{"qweight", DType::s32, {8, 128}}, {"scales", DType::f16, {1, 64}}}), "Marlin"},
      {stored({{"qweight", DType::s32, {64, 16}}, {"qzeros", DType::s32, {2, 16}}, {"scales", DType::f16, {2, 64}}}),
       "AWQ of 8 bits"},
      {stored({{"qweight", DType::s32, {64, 4}}, {"qzeros", DType::s32, {2, 4}}, {"scales", DType::f16, {2, 64}}}),
       "AWQ of 2 bits"},
      {stored({{"qweight", DType::s32, {64, 6}}, {"qzeros", DType::s32, {2, 6}}, {"scales", DType::f16, {2, 64}}}),
       "AWQ of 3 bits"},
      {stored({{"weight._data", DType::u8, {32, 64}}, {"weight._scale", DType::f16, {64, 1}}}), "quanto"},
      {stored({{"weight", DType::s32, {64, 8}}, {"weight_scale", DType::f32, {64, 1}}}), "INT4 (Quark)"},
      {stored({{"weight", DType::u8, {64, 32}}, {"weight_scale", DType::u8, {64, 2}}}), "MXFP4 (ModelOpt, Quark)"},
      {stored({{"weight", DType::e4m3, {64, 64}}, {"weight_scale_inv", DType::e8m0, {1, 1}}}), "E8M0 scales"},
      {stored({{"weight", DType::e4m3, {64, 64}}, {"weight_scale", DType::u8, {64, 2}}}), "MXFP8"},
      {stored({{"weight", DType::e4m3, {64, 64}}, {"scale", DType::f32, {1}}}), "without weight_scale"},
      {stored({{"weight_packed", DType::u8, {64, 32}},
               {"weight_scale", DType::e4m3, {64, 4}},
               {"weight_global_scale", DType::f32, {1}}}),
       "NVFP4 (compressed-tensors)"},
      {stored({{"weight", DType::u8, {64, 32}}, {"weight_scale", DType::e4m3, {64, 4}}, {"weight_scale_2", DType::f32, {}}}),
       "NVFP4 (ModelOpt, Quark)"},
      {stored({{"weight", DType::u8, {64, 64}}, {"weight_scale", DType::f32, {64, 1}}}), "unsigned bytes with scales"},
      {stored({{"weight", DType::u8, {4, 32, 64}}, {"weight_scale", DType::f16, {4, 64, 1}}}), "stacked experts of ModelOpt"},
      {stored({{"gate_up_proj_blocks", DType::u8, {2, 4, 2, 16}}, {"gate_up_proj_scales", DType::u8, {2, 4, 2}}}), "gpt-oss"},
      {stored({{"weight", DType::u8, {2048, 1}}, {"weight.absmax", DType::f32, {64}}}), "bitsandbytes"},
      {stored({{"weight", DType::s8, {64, 64}}, {"SCB", DType::f32, {64}}}), "LLM.int8"},
      {stored({{"W_q", DType::u8, {64, 64}}, {"scale", DType::f16, {64, 1}}, {"zero", DType::f16, {64, 1}}}), "HQQ"},
      {stored({{"_weight_qdata", DType::s8, {64, 32}}, {"_weight_scale", DType::bf16, {2, 64}}}), "torchao"},
  };
  for (const auto& [m, what] : cases) {
    const Status status = m.detect().module.status();
    EXPECT_EQ(status.code(), StatusCode::unsupported) << what;
    EXPECT_THAT(status.message(), HasSubstr("recognised but not yet supported"));
    EXPECT_THAT(status.message(), HasSubstr(what));
  }
}

TEST(Codecs, DenseConvolutionsAreRowsOfTheirFilter) {
  MemoryModule m = stored({{"weight", DType::f16, {2, 3, 2, 1}}});
  for (std::int64_t i = 0; i < 12; ++i) m.find("weight")->set(i, static_cast<float>(i));
  const Reading r = read(m);
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  EXPECT_EQ(r.q.filter, (Extent{2, 1}));
  for (std::int64_t co = 0; co < 2; ++co)
    for (std::int64_t ci = 0; ci < 3; ++ci)
      for (std::int64_t h = 0; h < 2; ++h) EXPECT_EQ(r.q.value(co, h * 3 + ci), static_cast<float>(co * 6 + ci * 2 + h));
}

TEST(Codecs, DenseModules) {
  MemoryModule m = stored({{"weight", DType::bf16, {6, 10}}, {"bias", DType::bf16, {6}}});
  const auto detected = m.detect();
  ASSERT_TRUE(detected.module.ok());
  EXPECT_EQ(detected.format->name, "dense");
  EXPECT_EQ(detected.module->scheme.codes, DType::bf16);
  EXPECT_TRUE(detected.module->has_bias);
  for (std::int64_t i = 0; i < 60; ++i) m.find("weight")->set(i, 0.25f * static_cast<float>(i) - 7);
  m.find("weight")->set(13, std::numeric_limits<float>::quiet_NaN());
  m.find("bias")->set(2, 3.0f);
  const Reading r = read(m);
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  EXPECT_EQ(r.q.scheme, WeightScheme::dense(DType::bf16));
  EXPECT_EQ(std::memcmp(r.q.codes.data(), m.find("weight")->bytes.data(), 120), 0) << "a change of bits";
  EXPECT_EQ(r.q.bias.at(2), 3.0f);
  EXPECT_TRUE(std::isnan(r.q.value(1, 3)));
  EXPECT_EQ(stored({{"weight", DType::f32, {6}}}).detect().format, nullptr);
  EXPECT_EQ(stored({{"weight", DType::f32, {6, 0}}}).detect().format, nullptr);
}

TEST(Codecs, ADenseBiasOfAnotherShapeIsAnError) {
  for (const auto& [bias, type] :
       {std::pair<std::vector<std::int64_t>, DType>{{10}, DType::f32}, {{1, 6}, DType::f32}, {{6}, DType::s32}}) {
    MemoryModule m = stored({{"weight", DType::f32, {6, 10}}, {"bias", type, bias}});
    const Reading r = read(m);
    EXPECT_EQ(r.status.code(), StatusCode::corrupt_data);
    EXPECT_THAT(r.status.message(), HasSubstr("[6,10], whose bias is f16, bf16 or f32 [6]"));
    EXPECT_THAT(r.status.message(), HasSubstr("has to be transposed"));
  }
}

}  // namespace
}  // namespace nibble
