// Layers of experts in checkpoints: every form that they are stored in gives the same weights, and what is missing is named.
#include "nibble/expert_layer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "nibble/nibble.hpp"
#include "quantize/act_rule.hpp"
#include "unit/scratch.hpp"

namespace nibble {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr std::int64_t kExperts = 3, kHidden = 64, kBetween = 32;
constexpr const char* kLayer = "model.layers.0.mlp.experts";

/// Element [n,k] of a matrix of expert e, exact in 8 bits.
enum class Part : std::uint8_t { gate, up, down };
float element(Part part, std::int64_t e, std::int64_t n, std::int64_t k) {
  return static_cast<float>((static_cast<std::int64_t>(part) * 5 + e * 31 + n * 7 + k * 3) % 17 - 8) / 8;
}
/// Of gate and up, one below the other.
float gate_up(std::int64_t e, std::int64_t n, std::int64_t k) {
  return n < kBetween ? element(Part::gate, e, n, k) : element(Part::up, e, n - kBetween, k);
}
float bias(std::int64_t e, std::int64_t n) { return static_cast<float>(e * 64 + n) / 4; }

/// A tensor of a checkpoint with an element for each place.
TensorSource tensor(std::string name, std::vector<std::int64_t> shape,
                    const std::function<float(std::span<const std::int64_t>)>& value, DType type = DType::f32) {
  Tensor made(type, shape);
  std::vector<std::int64_t> at(shape.size());
  for (std::int64_t i = 0; i < made.numel(); ++i) {
    std::int64_t rest = i;
    for (std::size_t d = shape.size(); d-- > 0; rest /= shape[d]) at[d] = rest % shape[d];
    if (type == DType::e4m3)
      made.bytes[static_cast<std::size_t>(i)] = static_cast<std::byte>(act_rule::to_e4m3(value(at)));
    else
      made.set(i, value(at));
  }
  return {std::move(name), type, std::move(shape), [made]() -> Result<std::vector<std::byte>> { return made.bytes; }};
}

class ExpertLayers : public ::testing::Test {
 protected:
  Checkpoint checkpoint(const std::vector<TensorSource>& tensors, std::string_view config = "{}") {
    const fs::path path = scratch_.path() / std::to_string(count_++);
    const Status written = write_checkpoint(path, tensors, config);
    EXPECT_TRUE(written.ok()) << written.message();
    auto opened = Checkpoint::open(path);
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    return *std::move(opened);
  }

  /// Modules of their own.
  static std::vector<TensorSource> one_by_one(const std::array<std::string, 3>& names, const std::string& layer = kLayer) {
    std::vector<TensorSource> all;
    for (std::int64_t e = 0; e < kExperts; ++e)
      for (const Part part : {Part::gate, Part::up, Part::down}) {
        const std::vector<std::int64_t> shape =
            part == Part::down ? std::vector{kHidden, kBetween} : std::vector{kBetween, kHidden};
        all.push_back(tensor(layer + "." + std::to_string(e) + "." + names[static_cast<std::size_t>(part)] + ".weight", shape,
                             [=](auto at) { return element(part, e, at[0], at[1]); }));
      }
    return all;
  }
  static std::vector<TensorSource> rows(const std::string& layer = kLayer) {
    return {
        tensor(layer + ".gate_up_proj", {kExperts, 2 * kBetween, kHidden}, [](auto at) { return gate_up(at[0], at[1], at[2]); }),
        tensor(layer + ".down_proj", {kExperts, kHidden, kBetween},
               [](auto at) { return element(Part::down, at[0], at[1], at[2]); })};
  }
  static std::vector<TensorSource> columns() {
    const std::string layer = kLayer;
    return {
        tensor(layer + ".gate_up_proj", {kExperts, kHidden, 2 * kBetween}, [](auto at) { return gate_up(at[0], at[2], at[1]); }),
        tensor(layer + ".down_proj", {kExperts, kBetween, kHidden},
               [](auto at) { return element(Part::down, at[0], at[2], at[1]); })};
  }
  /// gpt-oss: columns, in which gate and up take turns, with biases.
  static std::vector<TensorSource> turns() {
    const std::string layer = kLayer;
    const auto row = [](std::int64_t n) { return n / 2 + n % 2 * kBetween; };
    return {tensor(layer + ".gate_up_proj", {kExperts, kHidden, 2 * kBetween},
                   [=](auto at) { return gate_up(at[0], row(at[2]), at[1]); }),
            tensor(layer + ".gate_up_proj_bias", {kExperts, 2 * kBetween}, [=](auto at) { return bias(at[0], row(at[1])); }),
            tensor(layer + ".down_proj", {kExperts, kBetween, kHidden},
                   [](auto at) { return element(Part::down, at[0], at[2], at[1]); }),
            tensor(layer + ".down_proj_bias", {kExperts, kHidden}, [](auto at) { return bias(at[0], at[1]); })};
  }

  static void expect_layer(const Checkpoint& checkpoint, bool biases = false) {
    const auto layers = expert_layers(checkpoint);
    ASSERT_EQ(layers.size(), 1u);
    EXPECT_EQ(layers[0].name, kLayer);
    ASSERT_EQ(layers[0].count, kExperts);
    for (std::int64_t e = 0; e < kExperts; ++e) {
      const auto up = read_gate_up(checkpoint, layers[0], e), down = read_down(checkpoint, layers[0], e);
      ASSERT_TRUE(up.ok()) << up.status().message();
      ASSERT_TRUE(down.ok()) << down.status().message();
      ASSERT_EQ(up->n, 2 * kBetween);
      ASSERT_EQ(up->k, kHidden);
      ASSERT_EQ(down->n, kHidden);
      EXPECT_EQ(up->bias.empty(), !biases);
      for (std::int64_t n = 0; n < up->n; ++n) {
        if (biases) {
          EXPECT_EQ(up->bias.at(n), bias(e, n));
        }
        for (std::int64_t k = 0; k < up->k; ++k) ASSERT_EQ(up->value(n, k), gate_up(e, n, k)) << e << " " << n << " " << k;
      }
      for (std::int64_t n = 0; n < down->n; ++n)
        for (std::int64_t k = 0; k < down->k; ++k)
          ASSERT_EQ(down->value(n, k), element(Part::down, e, n, k)) << e << " " << n << k;
    }
  }

  testing::Scratch scratch_;
  int count_ = 0;
};

TEST_F(ExpertLayers, AreTheSameInEveryForm) {
  expect_layer(checkpoint(one_by_one({"gate_proj", "up_proj", "down_proj"})));
  expect_layer(checkpoint(one_by_one({"w1", "w3", "w2"})));
  expect_layer(checkpoint(rows()));
  expect_layer(checkpoint(columns()));
  expect_layer(checkpoint(turns()), true);
}

TEST_F(ExpertLayers, StoredTogetherAreModules) {
  const Checkpoint opened = checkpoint(turns());
  EXPECT_TRUE(opened.notes().empty()) << opened.notes().front().text;
  ASSERT_EQ(opened.modules().size(), 2u * kExperts);
  const Module& module = opened.modules()[3];
  EXPECT_EQ(module.name, "model.layers.0.mlp.experts.1.down_proj");
  EXPECT_EQ(module.stack, kLayer);
  EXPECT_EQ(module.n, kHidden);
  EXPECT_EQ(module.k, kBetween);
  EXPECT_TRUE(module.has_bias);
  EXPECT_EQ(module.bytes, 4u * (kHidden * kBetween + kHidden)) << "its own";
  EXPECT_THAT(module.tensors, ElementsAre("model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.down_proj_bias"));
  EXPECT_NE(*opened.digest(module), *opened.digest(opened.modules()[5]));
  EXPECT_THAT(opened.read(module, LayerPart{.end = 8}).status().message(), HasSubstr("which are read whole"));
}

/// Whether rows of gate and up take turns is the model's, and no tensor says it.
TEST_F(ExpertLayers, TakeTurnsAsTheirModelSays) {
  expect_layer(checkpoint(turns(), R"({"model_type": "gpt_oss"})"), true);
  std::vector<TensorSource> concatenated = columns();
  concatenated.push_back(
      tensor(std::string(kLayer) + ".gate_up_proj_bias", {kExperts, 2 * kBetween}, [](auto at) { return bias(at[0], at[1]); }));
  concatenated.push_back(
      tensor(std::string(kLayer) + ".down_proj_bias", {kExperts, kHidden}, [](auto at) { return bias(at[0], at[1]); }));
  const Checkpoint filter = checkpoint(concatenated, R"({"model_type": "openai_privacy_filter"})");
  EXPECT_FALSE(expert_layers(filter).at(0).interleaved);
  expect_layer(filter, true);
  const fs::path out = scratch_.path() / "apart";
  ASSERT_TRUE(
      quantize_checkpoint(filter.path(), out, {.format = "gptq", .scheme = *Scheme::parse("u8b128g32", DType::none)}).ok());
  const Checkpoint apart = *Checkpoint::open(out);
  const QuantTensor up = *read_gate_up(apart, expert_layers(apart).at(0), 1);
  for (std::int64_t n = 0; n < up.n; ++n) EXPECT_EQ(up.bias.at(n), bias(1, n));

  const Checkpoint unknown = checkpoint(turns(), R"({"model_type": "some_moe"})");
  std::vector<ModuleNote> notes;
  EXPECT_TRUE(expert_layers(unknown, &notes).empty());
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_EQ(notes[0].module, kLayer);
  const Status refused = expert_layer(unknown, kLayer).status();
  EXPECT_EQ(refused.code(), StatusCode::unsupported);
  EXPECT_THAT(refused.message(), HasSubstr("experts with biases are gpt_oss's, in which rows of gate and up take turns"));
  EXPECT_THAT(refused.message(), HasSubstr("of model_type \"some_moe\" that is not known"));
  EXPECT_FALSE(expert_layers(checkpoint(rows(), R"({"model_type": "some_moe"})")).at(0).interleaved) << "without biases";
}

/// MXFP4 by its definition, of codes in every place and exponents of every expert.
TEST_F(ExpertLayers, OfGptOssAreMxfp4) {
  const std::string layer = kLayer;
  const auto stored = [](const std::string& name, std::int64_t n, std::int64_t k) {
    return std::vector{
        tensor(
            name + "_blocks", {kExperts, n, k / 32, 16},
            [](auto at) { return static_cast<float>((at[0] * 50 + at[1] * 13 + at[2] * 7 + at[3] * 17) % 256); }, DType::u8),
        tensor(
            name + "_scales", {kExperts, n, k / 32},
            [](auto at) { return static_cast<float>(120 + (at[0] + at[1] + at[2]) % 8); }, DType::u8),
        tensor(
            name + "_bias", {kExperts, n}, [](auto at) { return bias(at[0], at[1]); }, DType::bf16)};
  };
  std::vector<TensorSource> all = stored(layer + ".gate_up_proj", 2 * kBetween, kHidden);
  for (TensorSource& source : stored(layer + ".down_proj", kHidden, kBetween)) all.push_back(std::move(source));
  const Checkpoint opened = checkpoint(all, R"({"model_type":"gpt_oss","quantization_config":{"quant_method":"mxfp4"}})");
  EXPECT_TRUE(opened.notes().empty()) << opened.notes().front().text;
  ASSERT_EQ(opened.modules().size(), 2u * kExperts);
  EXPECT_EQ(opened.modules()[0].format, "mxfp4");
  EXPECT_EQ(opened.modules()[0].scheme.name(), "e2m1g32");
  constexpr float kValues[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const auto value = [&](std::int64_t e, std::int64_t n, std::int64_t k) {
    const std::int64_t byte = (e * 50 + n * 13 + k / 32 * 7 + k % 32 / 2 * 17) % 256, code = k % 2 == 0 ? byte % 16 : byte / 16;
    const float magnitude = std::ldexp(kValues[code % 8], static_cast<int>(120 + (e + n + k / 32) % 8) - 127);
    return code < 8 ? magnitude : -magnitude;
  };
  const auto found = expert_layer(opened, kLayer);
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_TRUE(found->interleaved);
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const auto up = read_gate_up(opened, *found, e), down = read_down(opened, *found, e);
    ASSERT_TRUE(up.ok()) << up.status().message();
    ASSERT_TRUE(down.ok()) << down.status().message();
    for (std::int64_t n = 0; n < 2 * kBetween; ++n) {
      const std::int64_t row = n < kBetween ? 2 * n : 2 * (n - kBetween) + 1;
      EXPECT_EQ(up->bias.at(n), bias(e, row));
      for (std::int64_t k = 0; k < kHidden; ++k) ASSERT_EQ(up->value(n, k), value(e, row, k)) << e << " " << n << " " << k;
    }
    for (std::int64_t n = 0; n < kHidden; ++n)
      for (std::int64_t k = 0; k < kBetween; ++k) ASSERT_EQ(down->value(n, k), value(e, n, k));
  }
}

/// gpt-oss's floats become MXFP4 as gpt-oss has it: the same tensors as they are published, by the definition of the format, with its config.
TEST_F(ExpertLayers, OfGptOssAreWrittenAsMxfp4) {
  const std::string layer = kLayer;
  std::vector<TensorSource> tensors = turns();
  tensors.push_back(
      tensor("model.layers.0.self_attn.q_proj.weight", {64, 64}, [](auto at) { return element(Part::up, 0, at[0], at[1]); }));
  const Checkpoint in = checkpoint(tensors, R"({"model_type": "gpt_oss"})");
  const fs::path out = scratch_.path() / "mxfp4";
  QuantizeCheckpointSpec spec{.format = "mxfp4", .scheme = *Scheme::parse("e2m1g32", DType::none)};
  const auto report = quantize_checkpoint(in.path(), out, spec);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->modules.size(), 2u * kExperts);
  ASSERT_EQ(report->left.size(), 1u);
  EXPECT_EQ(report->left[0].name, "model.layers.0.self_attn.q_proj");
  EXPECT_THAT(report->left[0].why, HasSubstr("mxfp4 has experts that are stored together alone"));
  const Checkpoint made = *Checkpoint::open(out);
  for (const Note& note : made.notes()) ADD_FAILURE() << note.text;
  EXPECT_THAT(made.config(), HasSubstr("\"quant_method\": \"mxfp4\""));
  EXPECT_THAT(made.config(), HasSubstr("model.layers.0.self_attn.q_proj"));
  const std::pair<const char*, std::vector<std::int64_t>> shapes[] = {{".gate_up_proj_blocks", {kExperts, 2 * kBetween, 2, 16}},
                                                                      {".gate_up_proj_scales", {kExperts, 2 * kBetween, 2}},
                                                                      {".down_proj_blocks", {kExperts, kHidden, 1, 16}},
                                                                      {".down_proj_scales", {kExperts, kHidden, 1}}};
  for (const auto& [name, shape] : shapes) {
    const TensorInfo* stored = made.find_tensor(layer + name);
    ASSERT_NE(stored, nullptr) << name;
    EXPECT_EQ(stored->dtype, DType::u8);
    EXPECT_EQ(stored->shape, shape);
  }
  for (const char* name : {".gate_up_proj_bias", ".down_proj_bias"})
    EXPECT_EQ(*made.load(*made.find_tensor(layer + name)), *in.load(*in.find_tensor(layer + name))) << "in turns, as before";
  EXPECT_EQ(made.find_tensor(layer + ".gate_up_proj"), nullptr);

  // Each number is the nearest of its block's, whose scale is the least power of two for which 6 is large enough.
  constexpr std::array<float, 8> kValues{0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const ExpertLayer was = expert_layers(in).at(0), is = expert_layers(made).at(0);
  EXPECT_TRUE(is.interleaved);
  for (std::int64_t e = 0; e < kExperts; ++e)
    for (const bool up : {true, false}) {
      const QuantTensor before = up ? *read_gate_up(in, was, e) : *read_down(in, was, e),
                        after = up ? *read_gate_up(made, is, e) : *read_down(made, is, e);
      EXPECT_EQ(after.scheme.name(), "e2m1g32");
      EXPECT_EQ(after.bias, before.bias);
      for (std::int64_t n = 0; n < before.n; ++n)
        for (std::int64_t first = 0; first < before.k; first += 32) {
          float most = 0, scale = 0x1p-100f;
          for (std::int64_t k = first; k < first + 32; ++k) most = std::max(most, std::fabs(before.value(n, k)));
          while (6 * scale < most) scale *= 2;
          for (std::int64_t k = first; k < first + 32; ++k) {
            const float x = before.value(n, k), y = std::fabs(after.value(n, k)) / scale;
            EXPECT_NE(std::ranges::find(kValues, y), kValues.end()) << y;
            for (const float other : kValues)
              ASSERT_LE(std::fabs(std::fabs(x) / scale - y), std::fabs(std::fabs(x) / scale - other)) << n << " " << k;
            EXPECT_TRUE(y == 0 || (after.value(n, k) < 0) == (x < 0));
          }
        }
    }

  // Converted it is the same bytes; one by one only by way of floats; and no other model has it.
  const auto same = convert_checkpoint(out, scratch_.path() / "same", "mxfp4");
  ASSERT_TRUE(same.ok()) << same.status().message();
  const Checkpoint again = *Checkpoint::open(scratch_.path() / "same");
  EXPECT_EQ(again.tensors().size(), made.tensors().size());
  for (const TensorInfo& stored : made.tensors()) EXPECT_EQ(*again.load(*again.find_tensor(stored.name)), *made.load(stored));
  const fs::path never = scratch_.path() / "never";
  EXPECT_THAT(convert_checkpoint(out, never, "nibble-codes").status().message(),
              HasSubstr("mxfp4 alone holds e2m1g32 with scales of e8m0; dequantize the checkpoint, then quantize it"));
  EXPECT_THAT(quantize_checkpoint(checkpoint(rows(), R"({"model_type": "qwen3_moe"})").path(), never, spec).status().message(),
              HasSubstr("of model_type \"qwen3_moe\" no program reads them so: choose another format"));
  EXPECT_THAT(quantize_checkpoint(checkpoint(one_by_one({"w1", "w3", "w2"})).path(), never, spec).status().message(),
              HasSubstr("mxfp4 has experts that are stored together alone"));
  spec.scheme = *Scheme::parse("u4b8g32", DType::f16);
  EXPECT_THAT(quantize_checkpoint(in.path(), never, spec).status().message(), HasSubstr("mxfp4 cannot hold u4b8g32"));
  EXPECT_FALSE(fs::exists(never));
}

/// FP8 stored together: blocks or one scale of transformers' fp8, rows of them; and columns with a scale for each output of FBGEMM (Llama 4).
TEST_F(ExpertLayers, StoredTogetherInFp8) {
  const std::string layer = kLayer;
  const auto scale = [](std::int64_t e, std::int64_t i, std::int64_t j) {
    return std::ldexp(1.0f + 0.25f * static_cast<float>(e), static_cast<int>((i + 2 * j) % 5) - 2);
  };
  struct Form {
    const char* config;
    std::string suffix;
    std::int64_t n, k;  // of a block; 0: all
    bool columns;
    const char* scheme[2];  // of gate_up and down
  };
  const std::string blocks =
      R"({"quantization_config":{"quant_method":"fp8","activation_scheme":"dynamic","weight_block_size":[16,32]}})";
  const Form forms[] = {
      {blocks.c_str(), "_scale_inv", 16, 32, false, {"e4m3b16x32", "e4m3b16x32"}},
      {R"({"quantization_config":{"quant_method":"fp8","activation_scheme":"dynamic"}})",
       "_scale_inv",
       0,
       0,
       false,
       {"e4m3t", "e4m3t"}},
      {R"({"quantization_config":{"quant_method":"fbgemm_fp8","activation_scale_ub":1200.0}})",
       "_scale",
       1,
       0,
       true,
       {"e4m3c", "e4m3c"}},
  };
  for (const Form& form : forms) {
    const auto stored = [&](const std::string& name, Part part, std::int64_t n, std::int64_t k) {
      const auto value = [=](std::int64_t e, std::int64_t row, std::int64_t column) {
        return part == Part::down ? element(Part::down, e, row, column) : gate_up(e, row, column);
      };
      const std::int64_t rows = form.n == 0 ? 1 : n / form.n, cols = form.k == 0 ? 1 : k / form.k;
      // FBGEMM's scales are [E,1,N] of gate_up, [E,N,1] of down.
      const bool flat = form.columns && part != Part::down;
      return std::vector{
          tensor(
              layer + "." + name, form.columns ? std::vector{kExperts, k, n} : std::vector{kExperts, n, k},
              [=, columns = form.columns](auto at) { return columns ? value(at[0], at[2], at[1]) : value(at[0], at[1], at[2]); },
              DType::e4m3),
          tensor(layer + "." + name + form.suffix,
                 flat ? std::vector<std::int64_t>{kExperts, 1, rows} : std::vector<std::int64_t>{kExperts, rows, cols},
                 [=](auto at) { return flat ? scale(at[0], at[2], 0) : scale(at[0], at[1], at[2]); })};
    };
    std::vector<TensorSource> all = stored("gate_up_proj", Part::gate, 2 * kBetween, kHidden);
    for (TensorSource& source : stored("down_proj", Part::down, kHidden, kBetween)) all.push_back(std::move(source));
    const Checkpoint opened = checkpoint(all, form.config);
    EXPECT_TRUE(opened.notes().empty()) << opened.notes().front().text;
    ASSERT_EQ(opened.modules().size(), 2u * kExperts);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(opened.modules()[i].scheme.name(), form.scheme[i]);
      EXPECT_TRUE(opened.modules()[i].notes.empty()) << opened.modules()[i].notes.front().text;
      EXPECT_EQ(opened.modules()[i].tensors.size(), 2u);
    }
    const auto found = expert_layer(opened, kLayer);
    ASSERT_TRUE(found.ok()) << found.status().message();
    for (std::int64_t e = 0; e < kExperts; ++e) {
      const auto up = read_gate_up(opened, *found, e), down = read_down(opened, *found, e);
      ASSERT_TRUE(up.ok()) << up.status().message();
      ASSERT_TRUE(down.ok()) << down.status().message();
      const auto factor = [&](std::int64_t n, std::int64_t k) {
        return scale(e, form.n == 0 ? 0 : n / form.n, form.k == 0 ? 0 : k / form.k);
      };
      for (std::int64_t n = 0; n < 2 * kBetween; ++n)
        for (std::int64_t k = 0; k < kHidden; ++k) ASSERT_EQ(up->value(n, k), gate_up(e, n, k) * factor(n, k)) << n << " " << k;
      for (std::int64_t n = 0; n < kHidden; ++n)
        for (std::int64_t k = 0; k < kBetween; ++k) ASSERT_EQ(down->value(n, k), element(Part::down, e, n, k) * factor(n, k));
    }
    const LinearSpec first{.m_max = 4, .epilogue = {.activation = Activation::silu, .glu = true}}, second{.m_max = 4};
    const auto packed = pack_experts(opened, *found, first, second);
    ASSERT_TRUE(packed.ok()) << packed.status().message();
    for (std::int64_t e = 0; e < kExperts; ++e) {
      EXPECT_EQ(*unpack(packed->gate_up[e]), *read_gate_up(opened, *found, e));
      EXPECT_EQ(*unpack(packed->down[e]), *read_down(opened, *found, e));
    }
  }
}

/// pack_experts() has the weights that read_gate_up() and read_down() give, and a layer of them runs.
TEST_F(ExpertLayers, ArePacked) {
  const LinearSpec first{.m_max = 4, .epilogue = {.activation = Activation::silu, .glu = true}}, second{.m_max = 4};
  const std::vector<float> x = [] {
    std::vector<float> values(4 * kHidden);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i * 7 % 11) / 16 - 0.25f;
    return values;
  }();
  const std::vector<std::int32_t> ids{0, 1, 2, 0, 1, 2, 2, 1};
  const std::vector<float> weights(8, 0.5f);
  std::vector<std::vector<float>> results;
  for (const auto& tensors : {one_by_one({"w1", "w3", "w2"}), rows(), columns()}) {
    const Checkpoint opened = checkpoint(tensors);
    const auto packed = pack_experts(opened, expert_layers(opened).front(), first, second);
    ASSERT_TRUE(packed.ok()) << packed.status().message();
    for (std::int64_t e = 0; e < kExperts; ++e) {
      EXPECT_EQ(*unpack(packed->gate_up[e]), *read_gate_up(opened, expert_layers(opened).front(), e));
      EXPECT_EQ(*unpack(packed->down[e]), *read_down(opened, expert_layers(opened).front(), e));
    }
    const auto plan = MoePlan::make(packed->gate_up, packed->down, {.tokens_max = 4, .top_k = 2});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    std::vector<std::byte> workspace(plan->workspace_bytes());
    std::vector<float>& d = results.emplace_back(4 * kHidden);
    const Status ran = plan->run(packed->gate_up, packed->down, ConstTensorView(x.data(), {4, kHidden}),
                                 {.ids = ConstTensorView(ids.data(), {4, 2}), .weights = ConstTensorView(weights.data(), {4, 2})},
                                 TensorView(d.data(), {4, kHidden}), workspace);
    ASSERT_TRUE(ran.ok()) << ran.message();
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
  EXPECT_NE(results[0], std::vector<float>(4 * kHidden));
}

/// Every form that experts are stored together in becomes the same modules, one by one: those of the same experts that were so already.
TEST_F(ExpertLayers, StoredTogetherAreQuantizedOneByOne) {
  const auto quantized = [&](const Checkpoint& in, const std::string& format, const char* scheme) {
    const fs::path out = scratch_.path() / ("out" + std::to_string(count_++));
    const auto report = quantize_checkpoint(in.path(), out, {.format = format, .scheme = *Scheme::parse(scheme, DType::none)});
    EXPECT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->modules.size(), 3u * kExperts);
    EXPECT_TRUE(report->left.empty());
    return *Checkpoint::open(out);
  };
  const struct {
    const char *format, *scheme;
  } formats[] = {{"compressed-tensors", "u4b8g32"}, {"gptq", "u4b8g32"}, {"awq", "u4zg32"}, {"fp8", "e4m3g32_e4m3b32x32"}};
  for (const auto& [format, scheme] : formats) {
    SCOPED_TRACE(format);
    const Checkpoint want = quantized(checkpoint(one_by_one({"gate_proj", "up_proj", "down_proj"})), format, scheme);
    for (const auto& stacked : {rows(), columns(), turns()}) {
      const bool biases = stacked.size() > 2;
      const Checkpoint out = quantized(checkpoint(stacked), format, scheme);
      for (const Note& note : out.notes()) ADD_FAILURE() << note.text;
      ASSERT_EQ(out.modules().size(), want.modules().size());
      for (const Module& module : want.modules()) {
        const Module* found = out.find_module(module.name);
        ASSERT_NE(found, nullptr) << module.name;
        EXPECT_TRUE(found->stack.empty());
        EXPECT_EQ(found->has_bias, biases);
        QuantTensor q = *out.read(*found);
        q.bias = Tensor();
        EXPECT_EQ(q, *want.read(module)) << module.name;
      }
      const auto layers = expert_layers(out);
      ASSERT_EQ(layers.size(), 1u);
      EXPECT_FALSE(layers[0].interleaved) << "rows of gate and up are apart";
      const QuantTensor up = *read_gate_up(out, layers[0], 2), down = *read_down(out, layers[0], 2);
      for (std::int64_t n = 0; biases && n < up.n; ++n) EXPECT_EQ(up.bias.at(n), bias(2, n));
      for (std::int64_t n = 0; biases && n < down.n; ++n) EXPECT_EQ(down.bias.at(n), bias(2, n));
    }
  }
  const Checkpoint mixtral = quantized(checkpoint(rows(), R"({"model_type": "mixtral"})"), "gptq", "u4b8g32");
  EXPECT_EQ(expert_layers(mixtral)[0].gate_up, (std::vector<std::string>{"w1", "w3"}));
  const Checkpoint others = quantized(checkpoint(rows()), "gptq", "u4b8g32");
  for (const auto& [one, other] : {std::pair(".1.w1", ".1.gate_proj"), {".1.w3", ".1.up_proj"}, {".1.w2", ".1.down_proj"}})
    EXPECT_EQ(*mixtral.read(*mixtral.find_module(kLayer + std::string(one))),
              *others.read(*others.find_module(kLayer + std::string(other))));
}

/// A layer of experts that are stored together is written one by one, or left as it is.
TEST_F(ExpertLayers, StoredTogetherAreLeftTogether) {
  std::vector<TensorSource> tensors = rows();
  tensors.push_back(
      tensor("model.layers.0.self_attn.q_proj.weight", {64, 64}, [](auto at) { return element(Part::up, 0, at[0], at[1]); }));
  const Checkpoint opened = checkpoint(tensors);
  const auto scheme = [](const char* name) { return *Scheme::parse(name, DType::none); };
  const struct {
    QuantizeCheckpointSpec spec;
    const char *first, *then;  // why the first module is left, and the next one that could be quantized
  } cases[] = {
      {{.scheme = scheme("u4b8g64")},
       "K=32 is not a multiple of the group size 64",
       "stored together with model.layers.0.mlp.experts.0.down_proj"},
      {{.scheme = scheme("u4b8g32"), .skip = "experts.1.gate"},
       "the skip expression",
       "stored together with model.layers.0.mlp.experts.1.gate_up_proj"},
  };
  for (const auto& [spec, first, then] : cases) {
    SCOPED_TRACE(first);
    const fs::path out = scratch_.path() / ("out" + std::to_string(count_++));
    const auto report = quantize_checkpoint(opened.path(), out, spec);
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->modules.size(), 1u);
    ASSERT_EQ(report->left.size(), 2u * kExperts);
    EXPECT_THAT(report->left.front().why, HasSubstr(first));
    EXPECT_THAT(report->left.back().why, HasSubstr(then));
    const auto written = Checkpoint::open(out);
    ASSERT_TRUE(written.ok()) << written.status().message();
    for (const TensorInfo& stored : opened.tensors())
      if (stored.shape.size() == 3) {
        EXPECT_EQ(*written->load(*written->find_tensor(stored.name)), *opened.load(stored));
      }
    expect_layer(*written);
    const std::string& config = written->config();
    const std::size_t at = config.find(kLayer);
    EXPECT_TRUE(at != config.npos && config.find(kLayer, at + 1) == config.npos)
        << "in the list of layers to ignore, once: " << config;
  }
  const Status parted =
      quantize_checkpoint(opened.path(), scratch_.path() / "never", {.scheme = scheme("u4b8g32"), .only = "gate_up"}).status();
  EXPECT_EQ(parted.code(), StatusCode::invalid_argument);
  EXPECT_THAT(parted.message(), HasSubstr("experts.0.gate_up_proj: stored together with model.layers.0.mlp.experts.0.down_proj"));
  std::vector<TensorSource> twice = rows();
  twice.push_back(tensor(std::string(kLayer) + ".1.up_proj.weight", {kBetween, kHidden}, [](auto) { return 1.0f; }));
  const auto taken = quantize_checkpoint(checkpoint(twice).path(), scratch_.path() / "once", {.scheme = scheme("u4b8g32")});
  ASSERT_TRUE(taken.ok()) << taken.status().message();
  EXPECT_EQ(taken->modules.size(), 1u) << "the module of its own";
  ASSERT_EQ(taken->left.size(), 2u * kExperts);
  EXPECT_THAT(taken->left.front().why, HasSubstr("it would be model.layers.0.mlp.experts.1.up_proj, which is there already"));
  const Checkpoint biased = checkpoint(turns(), R"({"model_type": "some_moe"})");
  const Status unknown = quantize_checkpoint(biased.path(), scratch_.path() / "never", {.scheme = scheme("u4b8g32")}).status();
  EXPECT_EQ(unknown.code(), StatusCode::invalid_argument);
  EXPECT_THAT(unknown.message(), HasSubstr("of model_type \"some_moe\" that is not known"));
  EXPECT_FALSE(fs::exists(scratch_.path() / "never"));
}

/// A calibration names what an expert reads by the matrix as it is stored, or as it is written. Shards are cut between experts.
TEST_F(ExpertLayers, StoredTogetherAreCalibratedAndCutIntoShards) {
  const Checkpoint in = checkpoint(rows());
  std::vector<TensorSource> inputs;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const std::string expert = std::string(kLayer) + "." + std::to_string(e);
    inputs.push_back(
        tensor(expert + ".gate_up_proj.input_absmax", {kHidden}, [=](auto) { return 448.0f * static_cast<float>(e + 1); }));
    inputs.push_back(tensor(expert + ".down_proj.input_absmax", {kBetween}, [](auto) { return 448.0f / 2; }));
  }
  inputs.push_back(tensor(std::string(kLayer) + ".1.up_proj.input_absmax", {kHidden}, [](auto) { return 448.0f * 8; }));
  const fs::path calibration = scratch_.path() / "inputs.safetensors", out = scratch_.path() / "out";
  ASSERT_TRUE(write_safetensors(calibration, inputs).ok());
  const auto report = quantize_checkpoint(
      in.path(), out,
      {.format = "float-quantized", .scheme = *Scheme::parse("e4m3t_e4m3c", DType::none), .calibration = calibration},
      {.max_shard_bytes = 3 * kBetween * kHidden});
  ASSERT_TRUE(report.ok()) << report.status().message();
  const auto written = Checkpoint::open(out);
  ASSERT_TRUE(written.ok()) << written.status().message();
  const auto scale = [&](const std::string& name) {
    return written->read(*written->find_module(std::string(kLayer) + "." + name))->static_acts->scale;
  };
  EXPECT_EQ(scale("0.gate_proj"), 1);
  EXPECT_EQ(scale("0.up_proj"), 1);
  EXPECT_EQ(scale("1.gate_proj"), 2);
  EXPECT_EQ(scale("1.up_proj"), 8) << "by its own name";
  EXPECT_EQ(scale("2.gate_proj"), 3);
  EXPECT_EQ(scale("2.down_proj"), 0.5f);
  std::set<std::string> shards;
  for (const TensorInfo& stored : written->tensors()) shards.insert(stored.file);
  EXPECT_GE(shards.size(), 3u);
  EXPECT_EQ(expert_layers(*written).front().count, kExperts);
}

/// Dequantized experts stay together, in the order of the model's floats; what they are worth does not change. Converted ones are one by one.
TEST_F(ExpertLayers, StoredTogetherAreDequantizedTogether) {
  const std::string layer = kLayer;
  const auto eights = [](float value) { return value * 8; };  // whole numbers, exact in e4m3
  const auto fp8 = [&](bool columns) {
    std::vector<TensorSource> all;
    for (const auto& [name, n, k] :
         {std::tuple("gate_up_proj", 2 * kBetween, kHidden), std::tuple("down_proj", kHidden, kBetween)}) {
      const bool up = name == std::string_view("gate_up_proj");
      all.push_back(tensor(
          layer + "." + name, columns ? std::vector{kExperts, k, n} : std::vector{kExperts, n, k},
          [=](auto at) {
            const std::int64_t row = at[columns ? 2 : 1], col = at[columns ? 1 : 2];
            return eights(up ? gate_up(at[0], row, col) : element(Part::down, at[0], row, col));
          },
          DType::e4m3));
      all.push_back(columns ? tensor(layer + "." + name + "_scale",
                                     up ? std::vector{kExperts, std::int64_t{1}, n} : std::vector{kExperts, n, std::int64_t{1}},
                                     [](auto) { return 0.125f; })
                            : tensor(layer + "." + name + "_scale_inv", {kExperts, n / 16, k / 16}, [](auto) { return 0.125f; }));
    }
    return all;
  };
  for (const bool columns : {false, true}) {
    const Checkpoint in = checkpoint(fp8(columns), columns ? "{}" : R"({"quantization_config": {"quant_method": "fp8",
        "activation_scheme": "dynamic", "weight_block_size": [16, 16]}})");
    expect_layer(in);
    const fs::path floats = scratch_.path() / ("floats" + std::to_string(columns)), converted = floats.string() + "-converted";
    const auto report = dequantize_checkpoint(in.path(), floats, DType::bf16);
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->modules.size(), 2u * kExperts);
    const auto out = Checkpoint::open(floats);
    ASSERT_TRUE(out.ok()) << out.status().message();
    EXPECT_EQ(out->tensors().size(), 2u);
    EXPECT_EQ(out->find_tensor(layer + ".gate_up_proj")->shape, in.find_tensor(layer + ".gate_up_proj")->shape);
    EXPECT_EQ(out->modules().front().stack, layer);
    expect_layer(*out);
    const auto one = convert_checkpoint(in.path(), converted, columns ? "float-quantized" : "fp8");
    ASSERT_TRUE(one.ok()) << one.status().message();
    EXPECT_EQ(one->modules.size(), 3u * kExperts);
    const auto apart = Checkpoint::open(converted);
    ASSERT_TRUE(apart.ok()) << apart.status().message();
    EXPECT_NE(apart->find_module(layer + ".2.up_proj"), nullptr);
    expect_layer(*apart);
  }
  // One matrix in FP8 and one in floats are not one layer of a format.
  std::vector<TensorSource> half = rows();
  half.front() = fp8(false).front();
  half.push_back(fp8(false)[1]);
  const Checkpoint mixed = checkpoint(half);
  const Status unequal = convert_checkpoint(mixed.path(), scratch_.path() / "never", "float-quantized").status();
  EXPECT_EQ(unequal.code(), StatusCode::unsupported);
  EXPECT_THAT(unequal.message(), HasSubstr("and model.layers.0.mlp.experts.0.down_proj of the same experts is not quantized"));
  ASSERT_TRUE(dequantize_checkpoint(mixed.path(), scratch_.path() / "equal", DType::f32).ok());
  expect_layer(*Checkpoint::open(scratch_.path() / "equal"));

  // A block of 48 rows has some of the gate and some of up.
  std::vector<TensorSource> tensors = fp8(false);
  tensors[1] = tensor(layer + ".gate_up_proj_scale_inv", {kExperts, 2, 1}, [](auto) { return 0.125f; });
  tensors[3] = tensor(layer + ".down_proj_scale_inv", {kExperts, 2, 1}, [](auto) { return 0.125f; });
  const Checkpoint in = checkpoint(tensors, R"({"quantization_config": {"quant_method": "fp8", "weight_block_size": [48, 64]}})");
  const Status refused = convert_checkpoint(in.path(), scratch_.path() / "never", "fp8").status();
  EXPECT_EQ(refused.code(), StatusCode::unsupported);
  EXPECT_THAT(refused.message(),
              HasSubstr("gate and up, of 32 rows each, cannot be written one by one: blocks of 48 rows share a scale; "
                        "dequantize the checkpoint"));
  ASSERT_TRUE(dequantize_checkpoint(in.path(), scratch_.path() / "always", DType::f32).ok());
  expect_layer(*Checkpoint::open(scratch_.path() / "always"));
}

TEST_F(ExpertLayers, WithoutAMatrixAreNamed) {
  std::vector<TensorSource> tensors = one_by_one({"gate_proj", "up_proj", "down_proj"});
  std::erase_if(tensors, [](const TensorSource& t) { return t.name.ends_with("1.up_proj.weight"); });
  const Checkpoint lacks = checkpoint(tensors);
  std::vector<ModuleNote> notes;
  EXPECT_TRUE(expert_layers(lacks, &notes).empty());
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_THAT(notes[0].note.text, HasSubstr("expert 1 of 3 has no up_proj"));
  EXPECT_THAT(expert_layer(lacks, kLayer).status().message(), HasSubstr("expert 1 of 3 has no up_proj"));
  std::erase_if(tensors, [](const TensorSource& t) { return t.name.ends_with("up_proj.weight"); });
  EXPECT_THAT(expert_layer(checkpoint(tensors), kLayer).status().message(),
              HasSubstr("its experts have down_proj, gate_proj; expected gate_proj, up_proj and down_proj, or w1"));
  EXPECT_THAT(expert_layer(checkpoint(rows()), "model.layers.1.mlp.experts").status().message(),
              HasSubstr("has no layer of experts model.layers.1.mlp.experts; it has model.layers.0.mlp.experts"));
  const Checkpoint whole = checkpoint(rows());
  EXPECT_EQ(read_down(whole, expert_layers(whole).front(), kExperts).status().code(), StatusCode::not_found);
}

TEST_F(ExpertLayers, ThatDifferAreNotPacked) {
  std::vector<TensorSource> tensors = one_by_one({"gate_proj", "up_proj", "down_proj"});
  tensors.back() = tensor(tensors.back().name, {kHidden, kBetween + 1}, [](auto) { return 1.0f; });
  const Checkpoint opened = checkpoint(tensors);
  const auto packed = pack_experts(opened, expert_layers(opened).front(), {}, {});
  EXPECT_EQ(packed.status().code(), StatusCode::invalid_argument);
  EXPECT_THAT(packed.status().message(), HasSubstr("down_proj of experts 0 and 2 differ: W is [64,32] and [64,33]"));
}

TEST_F(ExpertLayers, OfShapesThatDoNotFitAreNone) {
  const auto one = [](auto) { return 1.0f; };
  const std::string layer = kLayer;
  const auto ct = [&](std::vector<std::int64_t> packed, std::vector<std::int64_t> down, std::array<std::int64_t, 3> sizes) {
    std::vector<std::byte> bytes(sizeof sizes);
    std::memcpy(bytes.data(), sizes.data(), sizeof sizes);
    const auto words = [](const std::string& name, const std::vector<std::int64_t>& shape) {
      const Tensor zeros(DType::s32, shape);
      return TensorSource{name, DType::s32, shape, [zeros]() -> Result<std::vector<std::byte>> { return zeros.bytes; }};
    };
    return std::vector{words(layer + ".gate_up_proj_packed", packed), words(layer + ".down_proj_packed", down),
                       tensor(layer + ".gate_up_proj_scale", {2, 64, 2}, [](auto) { return 1.0f; }),
                       tensor(layer + ".down_proj_scale", {2, 32, 2}, [](auto) { return 1.0f; }),
                       TensorSource{layer + ".gate_up_proj_shape", DType::s64, {3}, [bytes]() -> Result<std::vector<std::byte>> {
                                      return bytes;
                                    }}};
  };
  // Outputs of gate_up and blocks of its inputs, and those of down.
  const auto mxfp4 = [&](std::int64_t n, std::int64_t k, std::int64_t down_n, std::int64_t down_k) {
    return std::vector{tensor(layer + ".gate_up_proj_blocks", {2, n, k, 16}, one, DType::u8),
                       tensor(layer + ".gate_up_proj_scales", {2, n, k}, one, DType::u8),
                       tensor(layer + ".down_proj_blocks", {2, down_n, down_k, 16}, one, DType::u8),
                       tensor(layer + ".down_proj_scales", {2, down_n, down_k}, one, DType::u8)};
  };
  EXPECT_EQ(expert_layers(checkpoint(mxfp4(64, 2, 64, 1), R"({"model_type": "gpt_oss"})")).size(), 1u) << "which belong together";
  const struct {
    std::vector<TensorSource> tensors;
    const char* part;
  } cases[] = {
      {{tensor(layer + ".gate_up_proj", {2, 64, 64}, one), tensor(layer + ".down_proj", {2, 64, 64}, one)},
       "do not belong to each other"},
      {{tensor(layer + ".gate_up_proj", {2, 64, 16}, one), tensor(layer + ".down_proj", {3, 16, 32}, one)},
       "is not of 2 experts"},
      {{tensor(layer + ".gate_up_proj", {0, 64, 16}, one), tensor(layer + ".down_proj", {0, 16, 32}, one)}, "of 1…4096 experts"},
      {{tensor(layer + ".gate_up_proj", {5000, 2, 1}, one), tensor(layer + ".down_proj", {5000, 1, 1}, one)},
       "of 1…4096 experts"},
      {{tensor(layer + ".gate_up_proj", {2, 64, 16}, one, DType::u8), tensor(layer + ".down_proj", {2, 16, 32}, one, DType::u8)},
       "in a form that nibble cannot read"},
      {{tensor(layer + ".gate_up_proj", {2, 64, 16}, one, DType::e4m3),
        tensor(layer + ".down_proj", {2, 16, 32}, one, DType::e4m3)},
       "in a form that nibble cannot read"},
      {{tensor(layer + ".gate_up_proj", {2, 64, 16}, one), tensor(layer + ".down_proj", {2, 16, 32}, one),
        tensor(layer + ".1.down_proj.weight", {16, 32}, one)},
       "is the name of a module, and of an expert"},
      {ct({2, 64, 8}, {2, 48, 8}, {2, 64, 64}), "do not belong to each other: gate_up has twice"},
      {mxfp4(64, 2, 64, 2), "do not belong to each other: gate_up has twice"},
      {mxfp4(64, 2, 32, 1), "do not belong to each other: gate_up has twice"},
      {mxfp4(96, 2, 64, 1), "do not belong to each other: gate_up has twice"},
      {ct({2, 64, 8}, {2, 64, 4}, {3, 64, 64}), "gate_up_proj_shape\" s64 [3] is not of 2 experts"},
      {ct({2, 64, 8}, {3, 64, 4}, {2, 64, 64}), "is not of 2 experts"},
  };
  for (const auto& c : cases) {
    const Checkpoint opened = checkpoint(c.tensors);
    // Of MXFP4 there is a second: the tensors as they are, which are no modules.
    const bool mxfp4_too = c.tensors.front().name.ends_with("_blocks");
    ASSERT_EQ(opened.notes().size(), mxfp4_too ? 2u : 1u) << c.part;
    EXPECT_THAT(opened.notes()[0].text, HasSubstr(c.part));
    EXPECT_EQ(opened.notes()[0].severity, Note::Severity::warning);
    for (const Module& module : opened.modules()) EXPECT_TRUE(module.stack.empty()) << module.name;
  }
}

}  // namespace
}  // namespace nibble
