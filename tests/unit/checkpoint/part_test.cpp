// Checkpoint::read of a part: the numbers of the whole, from the part's bytes alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <string>

#include "checkpoint/config/format.hpp"
#include "layer_parts.hpp"
#include "random_weights.hpp"
#include "unit/scratch.hpp"

namespace nibble {
namespace {

using namespace nibble::testing;
using ::testing::HasSubstr;
using Of = LayerPart::Of;

constexpr std::int64_t kN = 256, kK = 512;

/// A checkpoint of the layer "proj".
Checkpoint written(const Scratch& scratch, std::string_view format, const QuantTensor& q, const ActScheme& act = {},
                   std::string_view config = {}) {
  auto tensors = codec::find_format(format)->write(q, act);
  EXPECT_TRUE(tensors.ok()) << tensors.status().message();
  std::vector<TensorSource> sources;
  for (codec::EncodedTensor& t : *tensors) sources.push_back(source("proj." + t.suffix, std::move(t.tensor)));
  EXPECT_TRUE(write_safetensors(scratch / "model.safetensors", sources, {}, true).ok());
  if (!config.empty()) write_text(scratch / "config.json", config);
  auto checkpoint = Checkpoint::open(scratch.path());
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  return *checkpoint;
}

QuantTensor layer(const char* scheme, bool act_order = false) {
  const WeightScheme weight = Scheme::parse(scheme, DType::f16)->weight;
  QuantTensor q = random_weight(weight, kN, kK, 7);
  q.bias = Tensor(DType::f16, {kN});
  for (std::int64_t n = 0; n < kN; ++n) q.bias.set(n, static_cast<float>(n));
  if (act_order)
    for (std::int64_t k = 0; k < kK; ++k) q.g_idx.push_back(static_cast<std::int32_t>(k % (kK / weight.group.k)));
  return q;
}

std::string error_of(const Checkpoint& checkpoint, const LayerPart& part, StatusCode code) {
  const Status status = checkpoint.read(checkpoint.modules()[0], part).status();
  EXPECT_EQ(status.code(), code) << status.message();
  return status.message();
}

struct Case {
  const char *format, *scheme, *act, *config;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.format << " " << c.scheme; }

class Parts : public ::testing::TestWithParam<Case> {};

TEST_P(Parts, AreThoseOfTheWhole) {
  const Case& c = GetParam();
  const Scratch scratch;
  const ActScheme act = *c.act == '\0' ? ActScheme{} : Scheme::parse(c.act + std::string("_") + c.scheme)->act;
  const Checkpoint checkpoint = written(scratch, c.format, layer(c.scheme), act, c.config);
  ASSERT_EQ(checkpoint.modules().size(), 1u);
  const Module& module = checkpoint.modules()[0];
  EXPECT_EQ(module.format, c.format);
  const auto all = checkpoint.read(module);
  ASSERT_TRUE(all.ok()) << all.status().message();
  for (const Of of : {Of::outputs, Of::inputs})
    for (const int parts : {1, 2, 4})
      for (int i = 0; i < parts; ++i) {
        const std::int64_t each = (of == Of::outputs ? kN : kK) / parts;
        const auto part = checkpoint.read(module, {of, i * each, (i + 1) * each});
        ASSERT_TRUE(part.ok()) << part.status().message();
        EXPECT_EQ(of == Of::outputs ? part->n : part->k, each);
        EXPECT_EQ(part->scheme.codes, all->scheme.codes);
        EXPECT_EQ(part->scheme.group, all->scheme.group);
        EXPECT_EQ(differences(*part, *all, of == Of::outputs ? i * each : 0, of == Of::inputs ? i * each : 0), 0)
            << (of == Of::outputs ? "outputs " : "inputs ") << i << " of " << parts;
      }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, Parts,
    ::testing::Values(
        Case{"awq", "u4zg128", "", R"({"quantization_config":{"quant_method":"awq","bits":4,"group_size":128}})"},
        Case{"gptq", "u4b8g128", "", R"({"quantization_config":{"quant_method":"gptq","bits":4,"group_size":128,"sym":true}})"},
        Case{"gptq", "u8b128g64", "", ""}, Case{"gptq", "u2b2g32", "", ""}, Case{"compressed-tensors", "u4b8g128", "", ""},
        Case{"compressed-tensors", "u4zg32", "", ""}, Case{"compressed-tensors", "u8b128c", "", ""},
        Case{"int-quantized", "s8c", "s8r", ""}, Case{"int-quantized", "s8t", "s8r", ""},
        Case{"int-quantized", "s8zg128", "", ""}, Case{"float-quantized", "e4m3c", "e4m3r", ""},
        Case{"float-quantized", "e4m3g128", "", ""}, Case{"nibble-codes", "u4og128", "", ""},
        Case{"fp8", "e4m3b64x128", "e4m3g128", R"({"quantization_config":{"quant_method":"fp8","weight_block_size":[64,128]}})"}),
    [](const auto& test) {
      std::string name = test.param.format + std::string("_") + test.param.scheme;
      for (char& c : name)
        if (c == '-') c = '_';
      return name;
    });

TEST(Part, EndsAtWordsAndGroups) {
  const Scratch scratch;
  const Checkpoint awq = written(scratch, "awq", layer("u4zg128"));
  EXPECT_THAT(error_of(awq, {Of::outputs, 0, 4}, StatusCode::unsupported), HasSubstr("words of 8"));
  EXPECT_THAT(error_of(awq, {Of::inputs, 64, 128}, StatusCode::unsupported), HasSubstr("groups of 128"));
  const Scratch another;
  const Checkpoint fp8 = written(another, "fp8", layer("e4m3b128x128"), ActScheme{DType::e4m3, GroupShape::group(128)});
  EXPECT_THAT(error_of(fp8, {Of::outputs, 64, 128}, StatusCode::unsupported), HasSubstr("groups of 128"));
}

TEST(Part, IsInTheLayer) {
  const Scratch scratch;
  const Checkpoint checkpoint = written(scratch, "int-quantized", layer("s8c"));
  for (const LayerPart& part : {LayerPart{Of::outputs, -8, 8}, LayerPart{Of::outputs, 8, 8}, LayerPart{Of::outputs, 0, kN + 1},
                                LayerPart{Of::inputs, 0, kK + 1}, LayerPart{Of::inputs, kK, kK + 8}})
    EXPECT_THAT(error_of(checkpoint, part, StatusCode::invalid_argument), HasSubstr("channels"));
}

TEST(Part, OfInputsInActOrderThereIsNone) {
  constexpr const char* kConfig =
      R"({"quantization_config":{"quant_method":"gptq","bits":4,"group_size":128,"desc_act":true,"sym":true}})";
  const Scratch scratch, plain;
  const Checkpoint ordered = written(scratch, "gptq", layer("u4b8g128", true), {}, kConfig);
  EXPECT_THAT(error_of(ordered, {Of::inputs, 0, 128}, StatusCode::unsupported), HasSubstr("act-order"));
  const auto all = ordered.read(ordered.modules()[0]), part = ordered.read(ordered.modules()[0], {Of::outputs, 64, 128});
  ASSERT_TRUE(part.ok()) << part.status().message();
  EXPECT_EQ(differences(*part, *all, 64, 0), 0);
  // Whatever the config says: the elements decide, as they do for the whole layer.
  const Checkpoint unclaimed = written(plain, "gptq", layer("u4b8g128", true), {},
                                       R"({"quantization_config":{"quant_method":"gptq","bits":4,"group_size":128,"sym":true}})");
  EXPECT_THAT(error_of(unclaimed, {Of::inputs, 0, 128}, StatusCode::unsupported), HasSubstr("act-order"));
}

/// A layer whose zero points contradict its config: v1 or v2 is decided by all of them.
TEST(Part, GuessesNoVersion) {
  const Scratch scratch;
  const Checkpoint checkpoint = written(
      scratch, "gptq", layer("u4b8g128"), {},
      R"({"quantization_config":{"quant_method":"gptq","bits":4,"group_size":128,"sym":true,"checkpoint_format":"gptq_v2"}})");
  ASSERT_TRUE(checkpoint.read(checkpoint.modules()[0]).ok());
  EXPECT_THAT(error_of(checkpoint, {Of::outputs, 0, 128}, StatusCode::unsupported), HasSubstr("v1 or v2"));
}

std::int64_t bytes_read() {
  std::ifstream file("/proc/self/io");
  std::string key;
  std::int64_t value = -1;
  file >> key >> value;  // rchar
  return value;
}

TEST(Part, ReadsNoOtherBytes) {
  if (bytes_read() < 0) GTEST_SKIP() << "/proc/self/io counts what a process reads; it is not there";
  default_executor().parallel_for(2, [](std::int64_t) {});  // the first loop reads what the system says of its cores
  for (const char* format : {"int-quantized", "gptq"}) {
    const Scratch scratch;
    const bool bytes = format[0] == 'i';
    const Checkpoint checkpoint = written(scratch, format, layer(bytes ? "s8c" : "u4b8g128"));
    const Module& module = checkpoint.modules()[0];
    const std::int64_t codes = kN * kK / (bytes ? 1 : 2);
    for (const Of of : {Of::outputs, Of::inputs}) {
      const std::int64_t before = bytes_read(), quarter = (of == Of::outputs ? kN : kK) / 4;
      ASSERT_TRUE(checkpoint.read(module, {of, quarter, 2 * quarter}).ok());
      EXPECT_LT(bytes_read() - before, codes / 4 + codes / 8) << format << ": codes of all are " << codes;
    }
  }
}

}  // namespace
}  // namespace nibble
