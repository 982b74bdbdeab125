// Checkpoints written by the programs that people use (make_fixtures.py), bit for bit as those programs read them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "nibble/checkpoint.hpp"

namespace nibble {
namespace {

namespace fs = std::filesystem;

const fs::path kFolder = fs::path(NIBBLE_SOURCE_DIR) / "tests" / "producers";
constexpr std::string_view kExpected = ".expected.safetensors";

/// The claims of the configuration of a case about its layers, for every producer that has a case of the name.
const std::map<std::string, std::string, std::less<>> kClaimed{{"w4a16_group", "u4b8g16"},
                                                               {"w4a16_asymmetric", "u4zg16"},
                                                               {"w4a16_act_order", "u4b8g16"},
                                                               {"experts_w4a16_group", "u4b8g16"},
                                                               {"experts_w4a16_asymmetric", "u4zg16"},
                                                               {"w8a16_channel", "u8b128c"},
                                                               {"w3a16", "u3zg16"},
                                                               {"w8a8", "s8r_s8c"},
                                                               {"w8a8_static", "s8zt_s8t"},
                                                               {"fp8", "e4m3r_e4m3c"},
                                                               {"fp8_static", "e4m3t_e4m3t"},
                                                               {"fp8_block", "e4m3g16_e4m3b16x16"},
                                                               {"fp8_block32", "e4m3g32_e4m3b32x32"},
                                                               {"fp8_block128", "e4m3g128_e4m3b128x128"},
                                                               {"w4a16_g128", "u4b8g128"},
                                                               {"w4a16_auto_gptq", "u4b8g32"},
                                                               {"w4a16_g32_asymmetric", "u4zg32"},
                                                               {"w2_v1", "u2b2g32"},
                                                               {"w3_v1", "u3b4g32"},
                                                               {"w4_v1", "u4b8g32"},
                                                               {"w8_v1", "u8b128g32"},
                                                               {"w4_v2_asymmetric", "u4zg32"},
                                                               {"w4_v1_act_order", "u4b8g32"},
                                                               {"fp8_static_kv", "e4m3t_e4m3t"},
                                                               {"fp8_static_custom", "e4m3t_e4m3t"},
                                                               {"fp8_weights_block128", "e4m3b128x128"},
                                                               {"w8a16", "s8c"},
                                                               {"w8a16_asymmetric", "s8zc"},
                                                               {"w8a8_smooth", "s8t_s8c"},
                                                               {"w8a8_asymmetric", "s8zt_s8zt"},
                                                               {"awq_custom", "u4zg32"},
                                                               {"modelopt/mixed", "e4m3t_e4m3t s8c"},
                                                               {"modelopt/w4a16_awq", "u4b8c"},
                                                               {"modelopt/w4a8_awq", "e4m3t_u4b8c"},
                                                               {"quark/mixed", "e4m3r_e4m3c e4m3t_e4m3t"},
                                                               {"quark/w8a8", "s8r_s8zc"},
                                                               {"quark/w8a8_static", "s8t_s8zt"}};

/// The cases that nibble refuses, and the names in the errors.
const std::map<std::string, std::string> kRefused{{"modelopt/mxfp8", "MXFP8"},
                                                  {"modelopt/nvfp4", "NVFP4 (ModelOpt, Quark)"},
                                                  {"modelopt/w4a16_nvfp4", "NVFP4 (ModelOpt, Quark)"},
                                                  {"modelopt/w4a8_mxfp4", "MXFP4 (ModelOpt, Quark)"},
                                                  {"quark/amdfp4", "AMDFP4 per group (Quark)"},
                                                  {"quark/awq_custom_order", "AWQ by Quark with another order of codes"},
                                                  {"quark/awq_custom_signed", "AWQ by Quark with signed codes"},
                                                  {"quark/e5m2", "FP8_E5M2 per tensor (Quark)"},
                                                  {"quark/mxfp4", "MXFP4 per group (Quark)"},
                                                  {"quark/mxfp6", "MXFP6_E3M2 per group (Quark)"},
                                                  {"quark/nvfp4", "NVFP4 (ModelOpt, Quark)"},
                                                  {"quark/w2a16_group", "INT2 per group (Quark)"},
                                                  {"quark/w4a16_asymmetric", "UINT4 per group (Quark)"},
                                                  {"quark/w4a16_channel", "INT4 per channel (Quark)"},
                                                  {"quark/w4a16_group", "INT4 per group (Quark)"},
                                                  {"quark/w4a8", "INT4 (Quark)"},
                                                  {"quark/w8a16_group", "INT8 per group (Quark)"},
                                                  {"quark/w8a16_unsigned", "UINT8 per channel (Quark)"}};

/// The checkpoints with expected values, or those without, which nibble refuses.
std::vector<std::string> cases(bool with_expected) {
  std::vector<std::string> list;
  for (const auto& entry : fs::recursive_directory_iterator(kFolder))
    if (fs::exists(entry.path() / "model.safetensors") &&
        fs::exists(entry.path().string() + std::string(kExpected)) == with_expected)
      list.push_back(fs::relative(entry.path(), kFolder).generic_string());
  std::ranges::sort(list);
  return list;
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::ranges::replace_if(
      name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
  return name;
}

TEST(Producers, EveryOneHasItsVersionsAndCheckpoints) {
  std::set<std::string> recorded, present, refused;
  const auto versions = nlohmann::json::parse(std::ifstream(kFolder / "versions.json"));
  for (const auto& [producer, packages] : versions.items()) recorded.insert(producer);
  for (const std::string& path : cases(true)) present.insert(path.substr(0, path.find('/')));
  EXPECT_EQ(present, recorded);
  EXPECT_FALSE(present.empty());
  for (const auto& [path, name] : kRefused) refused.insert(path);
  EXPECT_THAT(cases(false), ::testing::ElementsAreArray(refused));
}

/// compressed-tensors 0.6 left out zero points that are 0.
bool is_normal(const Note& note) {
  return note.severity == Note::Severity::info || note.text.ends_with("input_zero_point is missing: took 0");
}

class ProducerCheckpoint : public ::testing::TestWithParam<std::string> {};

TEST_P(ProducerCheckpoint, IsReadBitForBit) {
  const fs::path folder = kFolder / GetParam();
  const auto checkpoint = Checkpoint::open(folder);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  const auto expected = Checkpoint::open(folder.string() + std::string(kExpected));
  ASSERT_TRUE(expected.ok()) << expected.status().message();
  auto claimed = kClaimed.find(GetParam());
  if (claimed == kClaimed.end()) claimed = kClaimed.find(folder.filename().string());
  ASSERT_NE(claimed, kClaimed.end()) << "the case is not in kClaimed";
  for (const Note& note : checkpoint->notes()) EXPECT_EQ(note.severity, Note::Severity::info) << note.text;

  std::set<std::string> left, claims;
  for (const TensorInfo& tensor : expected->tensors()) left.insert(tensor.name);
  EXPECT_FALSE(left.empty());
  for (const Module& module : checkpoint->modules()) {
    if (module.format == "dense") continue;
    SCOPED_TRACE(module.name);
    const TensorInfo* want = expected->find_tensor(module.name);
    ASSERT_NE(want, nullptr) << "the producer did not quantize it";
    left.erase(module.name);
    for (const Note& note : module.notes) EXPECT_TRUE(is_normal(note)) << note.text;
    claims.insert(module.claimed ? module.claimed->name() : "none");

    std::vector<Note> notes;
    const auto q = checkpoint->read(module, &notes);
    ASSERT_TRUE(q.ok()) << q.status().message();
    for (const Note& note : notes) EXPECT_TRUE(is_normal(note)) << note.text;
    EXPECT_EQ(q->prescale.empty(), checkpoint->find_tensor(module.name + ".pre_quant_scale") == nullptr);
    ASSERT_EQ(want->shape, (std::vector{q->n, q->k}));
    Tensor got(want->dtype, want->shape);  // the product is exact in f32: rounded once, as the producer rounds it
    for (std::int64_t i = 0; i < got.numel(); ++i) got.set(i, q->value(i / q->k, i % q->k));
    EXPECT_EQ(std::memcmp(got.bytes.data(), expected->view(*want).data, got.bytes.size()), 0);
  }
  EXPECT_THAT(left, ::testing::IsEmpty()) << "not found in the checkpoint";
  std::string claim;
  for (const std::string& name : claims) claim += (claim.empty() ? "" : " ") + name;
  EXPECT_EQ(claim, claimed->second);
}

class RefusedCheckpoint : public ::testing::TestWithParam<std::string> {};

TEST_P(RefusedCheckpoint, IsNamed) {
  const auto checkpoint = Checkpoint::open(kFolder / GetParam());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  for (const Module& module : checkpoint->modules()) EXPECT_EQ(module.format, "dense") << module.name;
  const auto worst = std::ranges::max_element(checkpoint->notes(), {}, &Note::severity);
  ASSERT_NE(worst, checkpoint->notes().end());
  EXPECT_EQ(worst->severity, Note::Severity::error);
  EXPECT_EQ(worst->code, StatusCode::unsupported);
  EXPECT_THAT(worst->text, ::testing::HasSubstr(": recognised but not yet supported: " + kRefused.at(GetParam())));
  EXPECT_THAT(worst->text, ::testing::HasSubstr("(and 6 more modules)"));
}

INSTANTIATE_TEST_SUITE_P(Made, ProducerCheckpoint, ::testing::ValuesIn(cases(true)), test_name);
INSTANTIATE_TEST_SUITE_P(Made, RefusedCheckpoint, ::testing::ValuesIn(cases(false)), test_name);

}  // namespace
}  // namespace nibble
