// Factors of the activations of experts. SmoothQuant: they are in the norm, in all experts and in the router, which chooses as before.
#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <functional>

#include <nlohmann/json.hpp>

#include "checkpoint/config/format.hpp"
#include "nibble/checkpoint.hpp"
#include "nibble/expert_layer.hpp"
#include "random_weights.hpp"
#include "unit/scratch.hpp"

namespace nibble {
namespace {

using namespace nibble::testing;
using ::testing::HasSubstr;

constexpr std::int64_t kExperts = 3, kHidden = 32, kBetween = 48;
const std::string kLayer = "model.layers.0.", kNorm = kLayer + "post_attention_layernorm.weight";

Tensor random_tensor(DType dtype, std::vector<std::int64_t> shape, std::uint64_t seed) {
  Tensor tensor(dtype, std::move(shape));
  for (std::int64_t i = 0; i < tensor.numel(); ++i)
    tensor.set(i, static_cast<float>(random_uniform(seed, static_cast<std::uint64_t>(i))) - 0.5f);
  return tensor;
}
/// Channel 5 is 64 times as large as the others.
Tensor outliers(std::int64_t tokens) {
  Tensor x = random_tensor(DType::f32, {tokens, kHidden}, 77);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.set(i, x.at(i) * (i % kHidden == 5 ? 64.0f : 1.0f));
  return x;
}

struct Model {
  const char* type;
  std::string block;  // "mlp."
  bool stacked = false, shared = false;
  std::vector<std::string> gate_up = {"gate_proj", "up_proj"};
  std::string down = "down_proj";
  DType router = DType::bf16;
};
const Model kModels[] = {{"mixtral", "block_sparse_moe.", false, false, {"w1", "w3"}, "w2"},
                         {.type = "qwen3_moe", .block = "mlp."},
                         {.type = "qwen3_moe", .block = "mlp.", .stacked = true},
                         {.type = "mixtral", .block = "mlp.", .stacked = true, .router = DType::f16},
                         {.type = "qwen2_moe", .block = "mlp.", .shared = true, .router = DType::f32}};

/// A layer of a model whose norms are smoothed, with attention.
void write_model(const fs::path& directory, const Model& model) {
  std::uint64_t seed = 1;
  std::vector<TensorSource> tensors;
  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape, DType type = DType::bf16) {
    tensors.push_back(source(kLayer + name, random_tensor(type, std::move(shape), seed++)));
  };
  for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"})
    add(std::string("self_attn.") + name + ".weight", {kHidden, kHidden});
  add(model.block + "gate.weight", {kExperts, kHidden}, model.router);
  if (model.stacked) {
    add(model.block + "experts.gate_up_proj", {kExperts, 2 * kBetween, kHidden});
    add(model.block + "experts.down_proj", {kExperts, kHidden, kBetween});
  }
  for (std::int64_t e = 0; !model.stacked && e < kExperts; ++e) {
    const std::string expert = model.block + "experts." + std::to_string(e) + ".";
    for (const std::string& name : model.gate_up) add(expert + name + ".weight", {kBetween, kHidden});
    add(expert + model.down + ".weight", {kHidden, kBetween});
  }
  if (model.shared) {
    for (const char* name : {"gate_proj", "up_proj"}) add(model.block + "shared_expert." + name + ".weight", {kBetween, kHidden});
    add(model.block + "shared_expert.down_proj.weight", {kHidden, kBetween});
    add(model.block + "shared_expert_gate.weight", {1, kHidden}, model.router);
  }
  for (const char* name : {"input_layernorm", "post_attention_layernorm"}) {
    Tensor weight = random_tensor(DType::bf16, {kHidden}, seed++);
    for (std::int64_t k = 0; k < kHidden; ++k) weight.set(k, 1.0f + weight.at(k));
    tensors.push_back(source(kLayer + name + ".weight", std::move(weight)));
  }
  fs::create_directories(directory);
  ASSERT_TRUE(write_safetensors(directory / "model.safetensors", tensors, {}, true).ok());
  write_text(directory / "config.json", nlohmann::json{{"model_type", model.type}, {"num_experts", kExperts}}.dump());
}

void write_inputs(const fs::path& path, const std::vector<TensorSource>& inputs) {
  ASSERT_TRUE(write_safetensors(path, inputs, {}, true).ok());
}

Tensor stored(const Checkpoint& model, const std::string& name) { return *model.load(*model.find_tensor(name)); }

QuantizeCheckpointSpec smoothed(const fs::path& calibration, const char* scheme = "s8r_s8c") {
  QuantizeCheckpointSpec spec{.format = "int-quantized", .scheme = *Scheme::parse(scheme, DType::f32)};
  spec.calibration = calibration;
  spec.smooth = 0.5;
  return spec;
}

TEST(SmoothExperts, KeepsProductsAndTheRoutersBits) {
  for (const Model& model : kModels) {
    SCOPED_TRACE(std::string(model.type) + (model.stacked ? ", stacked" : ""));
    const Scratch scratch;
    write_model(scratch / "in", model);
    // What reaches the router reaches the experts.
    write_inputs(scratch / "acts.safetensors", {source(kLayer + model.block + "gate.input", outliers(40))});
    const auto report = quantize_checkpoint(scratch / "in", scratch / "out", smoothed(scratch / "acts.safetensors"));
    ASSERT_TRUE(report.ok()) << report.status().message();
    std::int64_t count = 0;
    for (const TransformedModule& row : report->modules) count += row.smoothed;
    EXPECT_EQ(count, 2 * (kExperts + model.shared));
    const Checkpoint in = *Checkpoint::open(scratch / "in"), out = *Checkpoint::open(scratch / "out");
    const Tensor before = stored(in, kNorm), after = stored(out, kNorm);
    EXPECT_GT(before.at(5) / after.at(5), 2) << "the channel of the outliers";
    std::vector<std::string> floats{model.block + "gate"};
    if (model.shared) floats.push_back(model.block + "shared_expert_gate");
    for (const std::string& name : floats) {
      const Tensor w = stored(in, kLayer + name + ".weight"), now = stored(out, kLayer + name + ".weight");
      ASSERT_EQ(now.dtype, w.dtype);
      ASSERT_EQ(now.shape, w.shape);
      EXPECT_NE(now.bytes, w.bytes);
      for (std::int64_t i = 0; i < w.numel(); ++i)
        EXPECT_EQ(now.at(i) * after.at(i % kHidden), w.at(i) * before.at(i % kHidden)) << name << " at " << i;
    }
    const auto error = [&](const QuantTensor& was, const QuantTensor& is) {
      const Tensor x = outliers(4);
      double off = 0, all = 0;
      for (std::int64_t t = 0; t < 4; ++t)
        for (std::int64_t n = 0; n < was.n; ++n) {
          double wanted = 0, got = 0;
          for (std::int64_t k = 0; k < kHidden; ++k) {
            const auto value = static_cast<double>(x.at(t * kHidden + k));
            wanted += value * before.at(k) * was.value(n, k);
            got += value * after.at(k) * is.value(n, k);
          }
          off += (wanted - got) * (wanted - got);
          all += wanted * wanted;
        }
      return off / all;
    };
    const ExpertLayer was = expert_layers(in).at(0), is = expert_layers(out).at(0);
    for (std::int64_t e = 0; e < kExperts; ++e)
      EXPECT_LT(error(*read_gate_up(in, was, e), *read_gate_up(out, is, e)), 1e-3)
          << "a factor that is missing is of the sum's size";
    for (const char* name : {"gate_proj", "up_proj"})
      if (model.shared) {
        const std::string shared = kLayer + model.block + "shared_expert." + name;
        EXPECT_LT(error(*in.read(*in.find_module(shared)), *out.read(*out.find_module(shared))), 1e-3);
      }
  }
}

TEST(SmoothExperts, ShareOneStaticScale) {
  const Scratch scratch;
  for (const bool stacked : {false, true}) {
    write_model(scratch / "in", kModels[stacked ? 2 : 1]);
    std::vector<TensorSource> inputs{source(kLayer + "mlp.experts.1.gate_proj.input", outliers(40))};
    for (std::int64_t e = 0; e < kExperts; ++e)
      inputs.push_back(source(kLayer + "mlp.experts." + std::to_string(e) + ".down_proj.input_absmax",
                              random_tensor(DType::f32, {kBetween}, 5)));
    write_inputs(scratch / "acts.safetensors", inputs);
    auto spec = smoothed(scratch / "acts.safetensors", "s8t_s8c");
    spec.only = "experts";
    const auto report = quantize_checkpoint(scratch / "in", scratch / "out", spec, {.overwrite = true});
    ASSERT_TRUE(report.ok()) << report.status().message();
    const Checkpoint out = *Checkpoint::open(scratch / "out");
    const auto scale = [&](const char* name) {
      return out.read(*out.find_module(kLayer + "mlp.experts." + name))->static_acts->scale;
    };
    EXPECT_EQ(scale("0.gate_proj"), scale("1.gate_proj"));
    EXPECT_EQ(scale("2.up_proj"), scale("1.gate_proj"));
    EXPECT_LT(scale("1.gate_proj"), 64 * 0.5 / 127 / 4) << "of activations without an outlier";
  }
}

TEST(SmoothExperts, AreLeftWhereOneOfThemIs) {
  const Scratch scratch;
  write_model(scratch / "in", kModels[1]);
  write_inputs(scratch / "acts.safetensors",
               {source(kLayer + "mlp.gate.input", outliers(40)), source(kLayer + "self_attn.q_proj.input", outliers(40))});
  auto spec = smoothed(scratch / "acts.safetensors");
  const auto note = [&] {
    const auto report = quantize_checkpoint(scratch / "in", scratch / "out", spec, {.overwrite = true});
    EXPECT_TRUE(report.ok()) << report.status().message();
    const Checkpoint in = *Checkpoint::open(scratch / "in"), out = *Checkpoint::open(scratch / "out");
    EXPECT_EQ(stored(in, kNorm).bytes, stored(out, kNorm).bytes);
    return report.ok() ? report->notes.at(0).text : "";
  };
  spec.skip = "experts.2.up_proj";
  EXPECT_THAT(note(),
              HasSubstr("post_attention_layernorm.weight was left as it is: model.layers.0.mlp.experts.2.up_proj is not among"));
  spec.skip.clear();
  spec.all = true;  // the router, too
  EXPECT_THAT(note(), HasSubstr("model.layers.0.mlp.gate is to be quantized, and chooses experts"));
}

/// ModelOpt's pre_quant_scale: one of an expert's gate and up is run, two are not; dequantized they are in the weights.
TEST(PrescaledExperts, AreRunOrDequantized) {
  const Scratch scratch;
  std::vector<TensorSource> tensors;
  std::vector<QuantTensor> weights;
  std::vector<Tensor> factors;
  for (std::uint64_t e = 0; e < 2; ++e)
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
      const bool down = name == std::string_view("down_proj");
      const std::string module = kLayer + "mlp.experts." + std::to_string(e) + "." + name;
      const WeightScheme scheme{DType::u4b8, ZeroKind::none, GroupShape::group(16), DType::f16};
      const QuantTensor& q =
          weights.emplace_back(random_weight(scheme, down ? kHidden : kBetween, down ? kBetween : kHidden, weights.size()));
      Tensor factor = random_tensor(DType::bf16, {q.k}, e == 1 ? weights.size() : 40 + down);
      for (std::int64_t k = 0; k < q.k; ++k) factor.set(k, 1.0f + factor.at(k));
      auto encoded = *codec::find_format("compressed-tensors")->write(q);
      for (codec::EncodedTensor& t : encoded) tensors.push_back(source(module + "." + t.suffix, std::move(t.tensor)));
      tensors.push_back(source(module + ".pre_quant_scale", factors.emplace_back(std::move(factor))));
    }
  write_inputs(scratch / "in.safetensors", tensors);
  const Checkpoint in = *Checkpoint::open(scratch / "in.safetensors");
  const ExpertLayer layer = expert_layers(in).at(0);
  const auto joined = read_gate_up(in, layer, 0);
  ASSERT_TRUE(joined.ok()) << joined.status().message();
  EXPECT_FALSE(joined->prescale.empty());
  const std::string refused = read_gate_up(in, layer, 1).status().message();
  EXPECT_THAT(refused, HasSubstr("mlp.experts.1: "));
  EXPECT_THAT(refused, HasSubstr("prescale differs"));
  EXPECT_THAT(refused, HasSubstr("dequantize the checkpoint, which multiplies them into the weights, and quantize it again"));

  const auto report = dequantize_checkpoint(scratch / "in.safetensors", scratch / "out.safetensors", DType::bf16);
  ASSERT_TRUE(report.ok()) << report.status().message();
  const Checkpoint out = *Checkpoint::open(scratch / "out.safetensors");
  EXPECT_TRUE(read_gate_up(out, expert_layers(out).at(0), 1).ok());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const QuantTensor q = *out.read(out.modules()[i]);
    ASSERT_TRUE(q.prescale.empty());
    Tensor wanted(DType::bf16, {1});
    for (std::int64_t n = 0; n < q.n; ++n)
      for (std::int64_t k = 0; k < q.k; ++k) {
        wanted.set(0, weights[i].value(n, k) * factors[i].at(k));
        ASSERT_EQ(q.value(n, k), wanted.at(0)) << i << " " << n << " " << k;
      }
  }
}

}  // namespace
}  // namespace nibble
