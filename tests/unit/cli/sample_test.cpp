// Sample checkpoints: complete, the same everywhere, shaped like trained weights, and never half-written.
#include "commands/sample.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "nibble/checkpoint.hpp"
#include "nibble/expert_layer.hpp"

namespace nibble::cli {
namespace {

namespace fs = std::filesystem;

class Sample : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() /
           (std::string("nibble_sample_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(dir_);
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  static std::string read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  /// The files in dir_: nothing temporary may be left.
  std::vector<std::string> entries() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(dir_)) names.push_back(entry.path().filename());
    return names;
  }

  fs::path dir_;
  SampleSpec tiny_{.shapes = "tiny", .layers = 2, .vocab = 100};
};

struct Header {
  nlohmann::json json;
  std::string data;
};

Header split(const std::string& file) {
  std::uint64_t size = 0;
  std::memcpy(&size, file.data(), 8);
  return {nlohmann::json::parse(file.substr(8, size)), file.substr(8 + size)};
}

std::string tensor(const Header& h, const std::string& name) {
  const auto& offsets = h.json.at(name).at("data_offsets");
  const std::size_t begin = offsets[0], end = offsets[1];
  return h.data.substr(begin, end - begin);
}

std::vector<float> bf16_tensor(const Header& h, const std::string& name) {
  const std::string bytes = tensor(h, name);
  std::vector<float> values;
  for (std::size_t at = 0; at < bytes.size(); at += 2) {
    bf16 b;
    std::memcpy(&b, bytes.data() + at, 2);
    values.push_back(to_f32(b));
  }
  return values;
}

TEST_F(Sample, HasTheTensorsOfALlama) {
  const Status status = write_sample(dir_ / "out", tiny_);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_THAT(entries(), testing::ElementsAre("out"));
  const auto config = nlohmann::json::parse(read(dir_ / "out/config.json"));
  EXPECT_EQ(config.at("architectures").at(0), "LlamaForCausalLM");
  EXPECT_EQ(config.at("num_hidden_layers"), 2);
  EXPECT_EQ(config.at("torch_dtype"), "bfloat16");
  const Header h = split(read(dir_ / "out/model.safetensors"));
  auto shape = [&](const std::string& name) { return h.json.at(name).at("shape").get<std::vector<int>>(); };
  EXPECT_EQ(h.json.size(), 1 + 1 + 2 * 9 + 2u);  // metadata, embedding, layers, norm and head
  EXPECT_EQ(shape("model.embed_tokens.weight"), (std::vector{100, 256}));
  EXPECT_EQ(shape("model.layers.1.self_attn.k_proj.weight"), (std::vector{128, 256}));
  EXPECT_EQ(shape("model.layers.1.mlp.down_proj.weight"), (std::vector{256, 768}));
  EXPECT_EQ(shape("model.norm.weight"), std::vector{256});
  EXPECT_EQ(shape("lm_head.weight"), (std::vector{100, 256}));
}

TEST_F(Sample, OpensAsACheckpoint) {
  ASSERT_TRUE(write_sample(dir_ / "out", tiny_).ok());
  const auto checkpoint = Checkpoint::open(dir_ / "out");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  const Module* module = checkpoint->find_module("model.layers.0.mlp.gate_proj");
  ASSERT_NE(module, nullptr);
  EXPECT_EQ(module->n, 768);
  EXPECT_EQ(module->k, 256);
}

TEST_F(Sample, WeightsLookTrained) {
  ASSERT_TRUE(write_sample(dir_ / "out", tiny_).ok());
  const Header h = split(read(dir_ / "out/model.safetensors"));
  const std::vector<float> w = bf16_tensor(h, "model.layers.0.mlp.gate_proj.weight");
  const std::size_t n = 768, k = 256;
  std::vector<double> column(k), row(n);
  double second = 0, fourth = 0;
  for (std::size_t i = 0; i < w.size(); ++i) {
    const double square = static_cast<double>(w[i]) * static_cast<double>(w[i]);
    column[i % k] += square;
    row[i / k] += square;
    second += square / static_cast<double>(w.size());
    fourth += square * square / static_cast<double>(w.size());
  }
  EXPECT_NEAR(std::sqrt(second), 0.02, 0.005);
  EXPECT_GT(fourth / (second * second), 4);  // a Gaussian has 3
  std::ranges::sort(column);
  std::ranges::sort(row);
  EXPECT_GT(column.back(), 8 * column[k / 2]);  // an outlier channel, 4 times as large
  EXPECT_LT(column[k - 2], 2 * column[k / 2]);  // only one in 256
  EXPECT_GT(row[n * 9 / 10], 2 * row[n / 10]);  // e^(2·2·1.28·0.3) is 4.6
}

// The hashes pin the bytes: another platform, compiler or number of threads must not change them.
TEST_F(Sample, HasExpertsOfEachFamily) {
  for (const std::string_view family : sample_families()) {
    SampleSpec spec = tiny_;
    spec.experts = 3, spec.top_k = 2, spec.family = family, spec.overwrite = true;
    const Status written = write_sample(dir_ / "out", spec);
    ASSERT_TRUE(written.ok()) << written.message();
    const auto checkpoint = Checkpoint::open(dir_ / "out");
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    EXPECT_TRUE(checkpoint->notes().empty()) << family << ": " << checkpoint->notes().front().text;
    const auto layers = expert_layers(*checkpoint);
    ASSERT_EQ(layers.size(), 2u) << family;
    EXPECT_EQ(layers[1].name, family == "mixtral"  ? "model.layers.1.block_sparse_moe.experts"
                              : family == "llama4" ? "model.layers.1.feed_forward.experts"
                                                   : "model.layers.1.mlp.experts");
    const bool together = family != "mixtral" && family != "qwen3-moe";
    EXPECT_EQ(checkpoint->find_module(layers[1].name + ".0." + layers[1].down)->stack, together ? layers[1].name : "") << family;
    EXPECT_EQ(layers[1].count, 3);
    EXPECT_EQ(layers[1].interleaved, family == "gpt-oss");
    const auto up = read_gate_up(*checkpoint, layers[1], 2), down = read_down(*checkpoint, layers[1], 2);
    ASSERT_TRUE(up.ok() && down.ok());
    EXPECT_EQ(up->n, 2 * 384) << "of 768 channels, for the two experts of a token";
    EXPECT_EQ(up->k, 256);
    EXPECT_EQ(down->n, 256);
    EXPECT_EQ(down->k, 384);
    double squares = 0;
    for (std::int64_t n = 0; n < up->n; ++n)
      for (std::int64_t k = 0; k < up->k; ++k) squares += std::pow(up->value(n, k), 2);
    EXPECT_NEAR(std::sqrt(squares / static_cast<double>(up->n * up->k)), 0.02, 0.004) << family;
    const auto config = nlohmann::json::parse(read(dir_ / "out/config.json"));
    EXPECT_EQ(config.at(family.starts_with("qwen3-moe") ? "num_experts" : "num_local_experts"), 3);
    EXPECT_EQ(config.at("num_experts_per_tok"), 2);
    EXPECT_EQ(config.contains("quantization_config"), family == "gpt-oss");
  }
}

TEST_F(Sample, SameBytesEverywhere) {
  auto digest = [&](DType dtype) {
    SampleSpec spec = tiny_;
    spec.dtype = dtype;
    spec.overwrite = true;
    EXPECT_TRUE(write_sample(dir_ / "out", spec).ok());
    std::uint64_t h = 14695981039346656037u;  // FNV-1a
    const Header header = split(read(dir_ / "out/model.safetensors"));
    for (const char* name : {"model.layers.1.mlp.down_proj.weight", "model.norm.weight"})
      for (unsigned char c : tensor(header, name)) h = (h ^ c) * 1099511628211u;
    return h;
  };
  EXPECT_EQ(digest(DType::bf16), 9049782227580561946u);
  EXPECT_EQ(digest(DType::f16), 724544385920533779u);
  EXPECT_EQ(digest(DType::f32), 8395789684919596482u);
}

TEST_F(Sample, LayersDoNotDependOnTheirNumber) {
  ASSERT_TRUE(write_sample(dir_ / "two", tiny_).ok());
  tiny_.layers = 1;
  tiny_.vocab = 50;
  ASSERT_TRUE(write_sample(dir_ / "one", tiny_).ok());
  tiny_.seed = 2;
  ASSERT_TRUE(write_sample(dir_ / "other", tiny_).ok());
  const std::string name = "model.layers.0.self_attn.q_proj.weight";
  const auto two = bf16_tensor(split(read(dir_ / "two/model.safetensors")), name);
  EXPECT_EQ(bf16_tensor(split(read(dir_ / "one/model.safetensors")), name), two);
  EXPECT_NE(bf16_tensor(split(read(dir_ / "other/model.safetensors")), name), two);
}

TEST_F(Sample, ReplacesOnlyItsOwnAndOnlyWhenAsked) {
  ASSERT_TRUE(write_sample(dir_ / "out", tiny_).ok());
  EXPECT_EQ(write_sample(dir_ / "out", tiny_).code(), StatusCode::already_exists);
  tiny_.layers = 1;
  tiny_.overwrite = true;
  ASSERT_TRUE(write_sample(dir_ / "out/", tiny_).ok());
  EXPECT_EQ(nlohmann::json::parse(read(dir_ / "out/config.json")).at("num_hidden_layers"), 1);
  fs::create_directories(dir_ / "photos");
  std::ofstream(dir_ / "photos/cat.jpg") << "meow";
  EXPECT_EQ(write_sample(dir_ / "photos", tiny_).code(), StatusCode::already_exists);
  EXPECT_EQ(read(dir_ / "photos/cat.jpg"), "meow");
  std::ofstream(dir_ / "file") << "text";
  EXPECT_EQ(write_sample(dir_ / "file", tiny_).code(), StatusCode::already_exists);
  EXPECT_THAT(entries(), testing::UnorderedElementsAre("out", "photos", "file"));
  EXPECT_EQ(write_sample(dir_ / "file/below", tiny_).code(), StatusCode::io_error);
}

TEST_F(Sample, RefusesBadSpecs) {
  auto refused = [&](SampleSpec spec) {
    const Status status = write_sample(dir_ / "out", spec);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_TRUE(fs::is_empty(dir_));
    return status.message();
  };
  EXPECT_THAT(refused({.shapes = "gpt-9"}), testing::HasSubstr("no sample of shapes 'gpt-9'; there are tiny, llama-3.2-1b"));
  EXPECT_THAT(refused({.layers = 0}), testing::HasSubstr("layers=0"));
  EXPECT_THAT(refused({.dtype = DType::s8}), testing::HasSubstr("s8"));
  EXPECT_THAT(refused({.vocab = 0}), testing::HasSubstr("vocab=0"));
}

}  // namespace
}  // namespace nibble::cli
