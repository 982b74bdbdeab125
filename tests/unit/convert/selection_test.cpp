// The weights that quantize selects as linear layers, for the models of transformers (list_weights.py) and further cases.
#include "convert/selection.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <map>

namespace nibble {
namespace {

using nlohmann::json;

TEST(Selection, KnowsTheLinearLayersOfTransformers) {
  std::ifstream file(NIBBLE_MODEL_WEIGHTS);
  const json data = json::parse(file);
  ASSERT_GT(data["models"].size(), 400u);
  std::map<std::string, int> seen;
  for (const auto& [model, entry] : data["models"].items()) {
    std::vector<WeightShape> weights;
    for (const json& row : entry["weights"]) {
      const int bias = row[2];
      weights.push_back({row[0], row[1][0], row[1][1], bias > 0 ? std::optional<std::int64_t>(bias) : std::nullopt, false});
    }
    const Selection selection(entry["config"], weights);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const std::string kind = entry["weights"][i][3], &name = weights[i].name;
      // Linear layers that loaders and quantizers leave in float: of one output, of one-hot positions, of streams of the model.
      const auto ends = [&](std::string_view end) { return name.ends_with(end); };
      const bool either = ends("shared_expert_gate") || ends("_bias") || ends("modality_router");
      const auto left = selection.left(weights[i]);
      // A model may have several output heads, and some are as small as other layers.
      if (either || (kind == "linear" && left && left->why.find("output head") != std::string::npos)) continue;
      ++seen[kind];
      if (kind != "head") {
        EXPECT_EQ(left.has_value(), kind != "linear") << model << " " << name << (left ? ": " + left->why : "");
      }
      if (left) {
        EXPECT_EQ(left->possible, kind != "transposed") << model << " " << name;
      }
    }
  }
  for (const char* kind : {"linear", "other", "router", "head", "transposed"}) EXPECT_GT(seen[kind], 15) << kind;
}

std::string why(const WeightShape& weight, const json& config = {}, std::vector<WeightShape> all = {}) {
  all.push_back(weight);
  const auto left = Selection(config, all).left(weight);
  return left ? left->why : "";
}

TEST(Selection, SaysWhy) {
  const std::vector<WeightShape> gpt2 = {
      {"h.0.attn.c_attn", 64, 192, 192}, {"h.0.mlp.c_proj", 256, 64, 64}, {"h.1.q_proj", 64, 64, 64}};
  EXPECT_NE(why(gpt2[0]).find("stored as [K,N]"), std::string::npos);
  EXPECT_NE(why({"h.0.attn.c_proj", 64, 64, 64}, {}, gpt2).find("beside weights that are stored as [K,N]"), std::string::npos);
  EXPECT_EQ(why(gpt2[2], {}, gpt2), "") << "a square layer of a block of its own";
  EXPECT_NE(why({"a", 64, 32, 7}).find("7 elements, not N=64"), std::string::npos);

  EXPECT_NE(why({"x", 1000, 64}, {{"text_config", {{"vocab_size", 1000}}}}).find("N=1000 is the size of the vocabulary"),
            std::string::npos);
  EXPECT_EQ(why({"x", 64, 64}, {{"vocab_size", 64}, {"hidden_size", 64}}), "") << "a size that says nothing";
  EXPECT_NE(why({"layers.3.mlp.gate", 8, 64}).find("router"), std::string::npos);
  EXPECT_EQ(why({"layers.3.mlp.gate_proj", 8, 64}), "");
  EXPECT_EQ(why({"layers.3.gateway.gate", 64, 64}), "");
  EXPECT_NE(why({"layers.3.gate", 64, 64}, {{"num_experts", 64}}).find("router"), std::string::npos);
  EXPECT_EQ(why({"embed_state", 64, 8, 64}), "") << "a bias: a linear layer, whatever it is called";

  EXPECT_EQ(why({"conv", 32, 16, 32, true}), "");
  EXPECT_NE(why({"conv", 32, 16, 16, true}).find("transposed convolution"), std::string::npos);
  EXPECT_NE(why({"decoder.upsample.0", 16, 16, std::nullopt, true}).find("transposed convolution"), std::string::npos);
  EXPECT_EQ(why({"", 16, 16}), "") << "a file of one layer";
}

}  // namespace
}  // namespace nibble
