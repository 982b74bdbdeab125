// The codecs against independently made numbers: format_vectors.json and the checkpoints of make_golden.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "checkpoint/io/stored_codes.hpp"
#include "golden/memory_module.hpp"
#include "layer_parts.hpp"
#include "nibble/checkpoint.hpp"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using codec::Packing;
using nlohmann::json;
using testing::differences;
using ::testing::HasSubstr;
using testing::MemoryModule;

const fs::path kFolder = fs::path(NIBBLE_SOURCE_DIR) / "tests" / "golden";

// --- format_vectors.json ------------------------------------------------------------------------------------------------------

const json& vectors() {
  static const json all = json::parse(std::ifstream(kFolder / "format_vectors.json"));
  return all;
}

/// Calls f for each number or string of a nested array, in order.
template <class F>
void for_each_leaf(const json& values, const F& f) {
  if (!values.is_array()) return f(values);
  for (const json& part : values) for_each_leaf(part, f);
}

/// ["75316420", ...] as little-endian words.
std::vector<std::byte> words(const json& hex) {
  std::vector<std::byte> bytes;
  for_each_leaf(hex, [&](const json& text) {
    const auto word = static_cast<std::uint32_t>(std::stoul(text.get<std::string>(), nullptr, 16));
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<std::byte>(word >> shift));
  });
  return bytes;
}

/// Numbers, plus `offset`, as codes.
std::vector<std::uint8_t> codes(const json& values, int offset = 0) {
  std::vector<std::uint8_t> out;
  for_each_leaf(values, [&](const json& value) { out.push_back(static_cast<std::uint8_t>(value.get<int>() + offset)); });
  return out;
}

codec::EncodedTensor word_tensor(std::string suffix, const json& hex, std::vector<std::int64_t> shape) {
  Tensor t;
  t.dtype = DType::s32;
  t.shape = std::move(shape);
  t.bytes = words(hex);
  return {std::move(suffix), std::move(t)};
}

codec::EncodedTensor constant(std::string suffix, std::vector<std::int64_t> shape, float value) {
  Tensor t(DType::f16, std::move(shape));
  for (std::int64_t i = 0; i < t.numel(); ++i) t.set(i, value);
  return {std::move(suffix), std::move(t)};
}

TEST(FormatVectors, AwqNibbleOrder) {
  const json& v = vectors()["awq_gemm_seq"];
  EXPECT_EQ(codec::pack_awq(codes(v["values"]).data(), 1, 8), words(v["words"]));
  EXPECT_EQ(codec::decode_all({"", codec::CodeOrder::awq, 4, 8, 1}, words(v["words"]).data()), codes(v["values"]));
  static_assert(codec::pack_awq_word(std::to_array<std::uint8_t>({0, 1, 2, 3, 4, 5, 6, 7}).data()) == 0x75316420u);
}

TEST(FormatVectors, AwqGemm) {
  const json& v = vectors()["awq_gemm"];
  MemoryModule m{{word_tensor("qweight", v["qweight"], {4, 2}), word_tensor("qzeros", v["qzeros"], {1, 2}),
                  constant("scales", {1, 16}, 0.5f)},
                 {}};
  std::vector<Note> notes;
  const auto q = m.read(notes);
  ASSERT_TRUE(q.ok()) << q.status().message();
  EXPECT_EQ(q->scheme.name(), "u4zc");
  EXPECT_EQ(codec::transpose(q->codes, 16, 4), codes(v["q"]));
  for (int n = 0; n < 16; ++n) EXPECT_EQ(q->value(n, 0), v["w_row0"][static_cast<std::size_t>(n)].get<float>()) << n;
  const auto written = testing::write_module(*codec::find_format("awq"), *q);
  ASSERT_TRUE(written.ok());
  for (const auto& [suffix, tensor] : written->tensors) EXPECT_EQ(tensor, *m.find(suffix)) << suffix;
}

TEST(FormatVectors, GptqColumns) {
  for (const int bits : {2, 3, 4, 8}) {
    const json& v = vectors()["gptq_w" + std::to_string(bits)];
    const auto q = codes(v["q_col0"]);
    const auto packed = words(v["qweight_col0"]);
    const auto length = static_cast<std::int64_t>(q.size());
    EXPECT_EQ(codec::pack_columns(q.data(), Packing::dense, bits, length, 1), packed) << bits;
    EXPECT_EQ(codec::unpack_columns(packed.data(), Packing::dense, bits, length, 1), q) << bits;
  }
  const json& v = vectors()["gptq_p_w3_planar"];
  EXPECT_EQ(codec::pack_columns(codes(v["q"]).data(), Packing::dense, 3, 32, 1), words(v["words_continuous"]));
}

TEST(FormatVectors, GptqZeroPoints) {
  const auto read_zeros = [](const json& hex, const char* format, bool symmetric, std::vector<Note>& notes) {
    MemoryModule m{
        {word_tensor("qweight", json(8, "00000000"), {1, 8}), word_tensor("qzeros", hex, {1, 1}), constant("scales", {1, 8}, 1)},
        {}};
    m.set("checkpoint_format", format).set("sym", symmetric).set("bits", 4);
    const auto q = m.read(notes);
    EXPECT_TRUE(q.ok()) << q.status().message();
    std::vector<std::uint8_t> zeros(8, 8);
    if (q->scheme.zero == ZeroKind::integer) std::memcpy(zeros.data(), q->zeros.bytes.data(), 8);
    return zeros;
  };
  std::vector<Note> notes;
  const json& symmetric = vectors()["gptq_qzeros_sym"];
  EXPECT_EQ(read_zeros(symmetric["v1"], "gptq", true, notes), codes(symmetric["z"]));
  EXPECT_EQ(read_zeros(symmetric["v2"], "gptq_v2", true, notes), codes(symmetric["z"]));
  const json& v = vectors()["gptq_qzeros_asym_with_zero0"];
  EXPECT_EQ(read_zeros(v["v2"], "gptq_v2", false, notes), codes(v["z"]));
  EXPECT_TRUE(notes.empty());

  EXPECT_EQ(read_zeros(v["v1_masked_per_field"], "gptq", false, notes), codes(v["z"]));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_THAT(notes[0].text, HasSubstr("1 of 8 stored zero points are 15"));
  EXPECT_THAT(notes[0].text, HasSubstr("the first at group 0, column 1"));

  notes.clear();  // a borrow across fields changes other zero points, invisibly in the word
  EXPECT_NE(read_zeros(v["v1_gptqmodel_wordwise_borrow"], "gptq", false, notes), codes(v["z"]));
  EXPECT_EQ(notes.size(), 1u);

  notes.clear();
  EXPECT_NE(read_zeros(v["v1_autogptq_perfield_or"], "gptq", false, notes), codes(v["z"]));
  ASSERT_EQ(notes.size(), 2u);
  EXPECT_THAT(notes[1].text, HasSubstr("words of zero points that are likely damaged: 1;"));
}

TEST(FormatVectors, CompressedTensors) {
  for (const int bits : {4, 8}) {
    const json& v = vectors()["ct_pack_w" + std::to_string(bits)];
    const auto row = codes(v["v_row0"], 1 << (bits - 1));
    EXPECT_EQ(codec::pack_rows(row.data(), Packing::dense, bits, 1, 32), words(v["packed_row0"]));
    EXPECT_EQ(codec::unpack_rows(words(v["packed_row0"]).data(), Packing::dense, bits, 1, 32), row);
  }
  const json& v = vectors()["ct_pack_w3_AMBIGUOUS"];
  const auto row = codes(v["v"], 4);
  EXPECT_EQ(codec::words_of(Packing::dense, 3, 64), v["cols_dense"].get<int>());
  EXPECT_EQ(codec::words_of(Packing::padded, 3, 64), v["cols_legacy"].get<int>());
  EXPECT_EQ(codec::pack_rows(row.data(), Packing::dense, 3, 1, 64), words(v["dense"]));
  EXPECT_EQ(codec::pack_rows(row.data(), Packing::padded, 3, 1, 64), words(v["legacy_10perword"]));
  EXPECT_EQ(codec::unpack_rows(words(v["dense"]).data(), Packing::dense, 3, 1, 64), row);
  EXPECT_EQ(codec::unpack_rows(words(v["legacy_10perword"]).data(), Packing::padded, 3, 1, 64), row);

  const json& z = vectors()["ct_zero_point_w4"];
  EXPECT_EQ(codec::pack_columns(codes(z["zp"], 8).data(), Packing::dense, 4, 16, 1), words(z["packed_dim0"]));
}

TEST(FormatVectors, ModelOptInt4) {
  const json& v = vectors()["modelopt_int4"];
  Tensor weight(DType::u8, {2, 3});
  std::size_t i = 0;
  for_each_leaf(v["weight_uint8"], [&](const json& hex) {
    weight.bytes[i++] = static_cast<std::byte>(std::stoul(hex.get<std::string>(), nullptr, 16));
  });
  const MemoryModule m{{{"weight", std::move(weight)}, constant("weight_scale", {4, 1}, 0.5f)}, {}};
  std::vector<Note> notes;
  const auto q = m.read(notes);
  ASSERT_TRUE(q.ok()) << q.status().message();
  EXPECT_EQ(q->scheme.name(), "u4b8c");
  EXPECT_EQ(q->codes, codes(v["v"], 8));
}

TEST(FormatVectors, CodeValues) {
  const auto code_of = [](const std::string& key) { return static_cast<std::uint8_t>(std::stoul(key.substr(1), nullptr, 16)); };
  for (const auto& [key, value] : vectors()["e4m3fn_checks"].items())
    EXPECT_EQ(code_value(DType::e4m3, code_of(key)), value.get<float>()) << key;
  for (const auto& [key, value] : vectors()["e8m0_checks"].items()) {
    const float got = code_value(DType::e8m0, code_of(key));
    if (value == "NaN")
      EXPECT_TRUE(std::isnan(got)) << key;
    else if (value.is_string())
      EXPECT_EQ(got, std::ldexp(1.0f, std::stoi(value.get<std::string>().substr(2)))) << key;
    else
      EXPECT_EQ(got, value.get<float>()) << key;
  }
}

// --- the checkpoints ----------------------------------------------------------------------------------------------------------

struct Case {
  const char* path;
  const char* scheme;             // after reading
  bool exact = true;              // writing gives the same bytes again
  const char* note = "";          // part of a note of reading
  const char* claimed = nullptr;  // by the config; null: the scheme, "": nothing
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.path; }

constexpr Case kCases[] = {
    {"awq/g128", "u4zg128"},
    {"awq/g64_bf16", "u4zg64"},
    {"awq/channel", "u4zc"},
    {"awq/symmetric", "u4b8g32"},
    {"gptq/v1_2bit", "u2b2g32"},
    {"gptq/v1_3bit", "u3b4g32"},
    {"gptq/v1_4bit", "u4b8g32"},
    {"gptq/v1_8bit", "u8b128g32"},
    {"gptq/v2_2bit", "u2b2g32", false},
    {"gptq/v2_3bit", "u3b4g32", false},
    {"gptq/v2_4bit", "u4b8g32", false},
    {"gptq/v2_8bit", "u8b128g32", false},
    {"gptq/v1_4bit_act_order", "u4b8g32"},
    {"gptq/v1_4bit_asymmetric", "u4zg32", false},
    {"gptq/v2_3bit_asymmetric", "u3zg32", false},
    {"gptq/v1_4bit_damaged", "u4zg32", false, "likely damaged"},
    {"gptq/v1_4bit_ragged_f32", "u4b8g32", false},
    {"compressed-tensors/4bit_symmetric_group", "u4b8g32"},
    {"compressed-tensors/4bit_symmetric_channel", "u4b8c"},
    {"compressed-tensors/4bit_asymmetric_group", "u4zg32"},
    {"compressed-tensors/4bit_asymmetric_channel", "u4zc"},
    {"compressed-tensors/8bit_symmetric_group", "u8b128g32"},
    {"compressed-tensors/8bit_symmetric_channel", "u8b128c"},
    {"compressed-tensors/8bit_asymmetric_group", "u8zg32"},
    {"compressed-tensors/8bit_asymmetric_channel", "u8zc"},
    {"compressed-tensors/4bit_act_order", "u4b8g32"},
    {"compressed-tensors/4bit_tensor_f32", "u4b8t"},
    {"compressed-tensors/3bit_dense", "u3zg32"},
    {"compressed-tensors/3bit_padded", "u3zg32", false},
    {"int-quantized/channel_dynamic", "s8c", true, "", "s8r_s8c"},
    {"int-quantized/tensor_static", "s8t", true, "", "s8t_s8t"},
    {"int-quantized/group_asymmetric_f16", "s8zg16", true, "", "s8r_s8zg16"},
    {"int-quantized/channel_static_zero", "s8c", true, "", "s8zt_s8c"},
    {"float-quantized/ct_tensor_static", "e4m3t", true, "", "e4m3t_e4m3t"},
    {"float-quantized/ct_channel_token", "e4m3c", true, "", "e4m3r_e4m3c"},
    {"float-quantized/ct_block", "e4m3b8x16", true, "", "e4m3g16_e4m3b8x16"},
    {"float-quantized/modelopt_fp8", "e4m3t", false, "", "e4m3t_e4m3t"},
    {"float-quantized/modelopt_channel", "e4m3c", false, "", "e4m3r_e4m3c"},
    {"float-quantized/modelopt_blocks", "e4m3b128x128", false},
    {"float-quantized/fbgemm", "e4m3c", false, "", "e4m3r_e4m3c"},
    {"float-quantized/hf_tensor_static", "e4m3t", false, "", "e4m3t_e4m3t"},
    {"fp8/blocks_ragged", "e4m3b8x16", true, "", "e4m3g16_e4m3b8x16"},
    {"fp8/tensor_static", "e4m3t", false, "", "e4m3t_e4m3t"},
    {"modelopt-int4/w4a16", "u4b8g32", false},
    {"modelopt-int4/w4a8", "u4b8g32", false, "", "e4m3t_u4b8g32"},
    {"nibble-codes/4bit_offsets", "u4og32", true},
    {"nibble-codes/3bit_float_zeros", "u3fg32", true},
    {"nibble-codes/4bit_image_channels", "u4oci16", true},
    {"mxfp4/gpt_oss", "e2m1g32", false, "", ""},
    {"smoothquant/int8_output", "s8t", false, "", ""},
    {"smoothquant/float_output", "s8t", false, "", ""},
};

class GoldenCheckpoint : public ::testing::TestWithParam<Case> {};
class GoldenLayout : public ::testing::TestWithParam<Case> {};  // the exact ones

TEST_P(GoldenCheckpoint, ReadsAsExpected) {
  const Case& c = GetParam();
  const auto checkpoint = Checkpoint::open(kFolder / c.path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  const auto expected = Checkpoint::open(kFolder / (std::string(c.path) + ".expected.safetensors"));
  ASSERT_TRUE(expected.ok()) << expected.status().message();
  ASSERT_EQ(checkpoint->modules().size(), 1u);
  const Module& module = checkpoint->modules()[0];
  EXPECT_EQ(module.name, "model.proj");
  EXPECT_TRUE(fs::path(c.path).parent_path() == module.format) << module.format;
  EXPECT_EQ(module.scheme.name(), c.scheme);
  EXPECT_EQ(module.claimed ? module.claimed->name() : "", c.claimed == nullptr ? c.scheme : c.claimed);
  for (const Note& note : module.notes) EXPECT_EQ(note.severity, Note::Severity::info) << note.text;
  const bool explained = module.format == "smoothquant" || checkpoint->find_tensor("model.proj.weight_scale_2") != nullptr;
  EXPECT_EQ(module.notes.size(), explained ? 1u : 0u);

  std::vector<Note> notes;
  const auto q = checkpoint->read(module, &notes);
  ASSERT_TRUE(q.ok()) << q.status().message();
  EXPECT_EQ(q->scheme, module.scheme);
  EXPECT_EQ(!q->g_idx.empty(), module.act_order);
  EXPECT_EQ(!q->bias.empty(), module.has_bias);
  std::string said;
  for (const Note& note : notes) said += note.text + "\n";
  if (*c.note != '\0')
    EXPECT_THAT(said, HasSubstr(c.note));
  else
    EXPECT_EQ(said, "");

  const TensorInfo* f32_info = expected->find_tensor("model.proj.f32");
  const TensorInfo* f16_info = expected->find_tensor("model.proj.f16");
  ASSERT_TRUE(f32_info != nullptr && f16_info != nullptr);
  ASSERT_EQ(f32_info->shape, (std::vector{q->n, q->k}));
  const auto* f32s = static_cast<const std::byte*>(expected->view(*f32_info).data);
  const auto* f16s = static_cast<const std::byte*>(expected->view(*f16_info).data);
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < q->n * q->k; ++i) {
    std::uint32_t want;
    std::uint16_t want_half;
    std::memcpy(&want, f32s + 4 * i, 4);
    std::memcpy(&want_half, f16s + 2 * i, 2);
    const float got = q->value(i / q->k, i % q->k);
    different += std::bit_cast<std::uint32_t>(got) != want || to_f16(got).bits != want_half;
  }
  EXPECT_EQ(different, 0);
}

TEST_P(GoldenCheckpoint, ReadsFromMemoryToo) {
  const auto checkpoint = Checkpoint::open(kFolder / GetParam().path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  std::vector<NamedView> tensors;
  for (const TensorInfo& t : checkpoint->tensors())
    tensors.push_back({t.name.substr(t.name.rfind('.') + 1), checkpoint->view(t)});
  std::vector<Note> notes, notes_of_memory;
  const auto q = checkpoint->read(checkpoint->modules()[0], &notes);
  const auto from_memory = read_module(tensors, checkpoint->config(), &notes_of_memory);
  ASSERT_TRUE(from_memory.ok()) << from_memory.status().message();
  EXPECT_TRUE(*from_memory == *q);
  EXPECT_GE(notes_of_memory.size(), notes.size());  // what detection found is among them
}

TEST_P(GoldenCheckpoint, HalvesAreThoseOfTheWhole) {
  const auto checkpoint = Checkpoint::open(kFolder / GetParam().path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  const Module& module = checkpoint->modules()[0];
  const auto all = checkpoint->read(module);
  ASSERT_TRUE(all.ok()) << all.status().message();
  for (const bool outputs : {true, false}) {
    const LayerPart::Of of = outputs ? LayerPart::Of::outputs : LayerPart::Of::inputs;
    const std::int64_t total = outputs ? module.n : module.k;
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, total / 2}, std::pair{total / 2, total}}) {
      const auto part = checkpoint->read(module, {of, begin, end});
      if (part.status().code() == StatusCode::unsupported) {  // in layers as small as these
        EXPECT_THAT(part.status().message(), HasSubstr("whole"));
        continue;
      }
      ASSERT_TRUE(part.ok()) << part.status().message();
      EXPECT_EQ(differences(*part, *all, outputs ? begin : 0, outputs ? 0 : begin), 0) << outputs << " " << begin;
    }
  }
}

TEST(Golden, TwoChannelsOfAByteStayTogether) {
  const auto checkpoint = Checkpoint::open(kFolder / "modelopt-int4/w4a16");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  const auto part = checkpoint->read(checkpoint->modules()[0], {LayerPart::Of::outputs, 2, 5});
  EXPECT_EQ(part.status().code(), StatusCode::unsupported);
  EXPECT_THAT(part.status().message(),
              HasSubstr("model.proj.weight: channels [2,5) of 12 end within bytes of 2; cut at multiples"));
}

TEST(Golden, WhatIsNoLayerIsRefused) {
  const std::vector<std::int32_t> words(16);
  const auto code = [&](std::string_view config, const ConstTensorView& view) {
    return read_module(std::vector<NamedView>{{"qweight", view}}, config).status().code();
  };
  ConstTensorView view(words.data(), {4, 4}), gaps = view, freed = view;
  gaps.shape[1] = 2;
  freed.data = nullptr;
  EXPECT_EQ(code("", view), StatusCode::not_found);
  EXPECT_EQ(code("{", view), StatusCode::corrupt_data);
  EXPECT_EQ(code("[]", view), StatusCode::corrupt_data);
  EXPECT_EQ(code("", gaps), StatusCode::invalid_argument);
  EXPECT_EQ(code("", freed), StatusCode::invalid_argument);
}

TEST_P(GoldenLayout, IsWrittenByteForByte) {
  const Case& c = GetParam();
  const auto checkpoint = Checkpoint::open(kFolder / c.path);
  ASSERT_TRUE(checkpoint.ok());
  const Module& module = checkpoint->modules()[0];
  const auto q = checkpoint->read(module);
  ASSERT_TRUE(q.ok());
  const codec::Format& format = *codec::find_format(module.format);
  const auto tensors = module.filter ? format.encode_conv(*q, module.claimed->act) : format.write(*q, module.claimed->act);
  ASSERT_TRUE(tensors.ok()) << tensors.status().message();
  EXPECT_EQ(tensors->size(), module.tensors.size());
  for (const auto& [suffix, tensor] : *tensors) {
    const TensorInfo* stored = checkpoint->find_tensor(module.name + "." + suffix);
    ASSERT_NE(stored, nullptr) << suffix;
    EXPECT_EQ(tensor.dtype, stored->dtype) << suffix;
    EXPECT_EQ(tensor.shape, stored->shape) << suffix;
    ASSERT_EQ(tensor.bytes.size(), stored->bytes) << suffix;
    EXPECT_EQ(std::memcmp(tensor.bytes.data(), checkpoint->view(*stored).data, tensor.bytes.size()), 0) << suffix;
  }
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  std::string name = info.param.path;
  for (char& ch : name)
    if (ch == '/' || ch == '-') ch = '_';
  return name;
}
INSTANTIATE_TEST_SUITE_P(All, GoldenCheckpoint, ::testing::ValuesIn(kCases), case_name);

std::vector<Case> exact_cases() {
  std::vector<Case> cases;
  for (const Case& c : kCases)
    if (c.exact) cases.push_back(c);
  return cases;
}
INSTANTIATE_TEST_SUITE_P(All, GoldenLayout, ::testing::ValuesIn(exact_cases()), case_name);

TEST(Golden, EveryFolderIsTested) {
  std::set<std::string> listed, present;
  for (const Case& c : kCases) listed.insert(c.path);
  for (const auto& entry : fs::recursive_directory_iterator(kFolder))
    if (entry.path().filename() == "model.safetensors")
      present.insert(entry.path().parent_path().lexically_relative(kFolder).string());
  EXPECT_EQ(listed, present);
}

TEST(Golden, ActivationsAreRead) {
  const auto read = [](const char* path) {
    const auto checkpoint = Checkpoint::open(kFolder / path);
    const auto q = checkpoint->read(checkpoint->modules()[0]);
    EXPECT_TRUE(q.ok()) << q.status().message();
    return *q;
  };
  EXPECT_FALSE(read("int-quantized/channel_dynamic").static_acts);
  EXPECT_EQ(read("int-quantized/tensor_static").static_acts, (StaticActs{0.0625f, 0}));
  EXPECT_EQ(read("int-quantized/channel_static_zero").static_acts, (StaticActs{0.0625f, -7}));
  for (const char* path : {"float-quantized/ct_tensor_static", "float-quantized/modelopt_fp8", "float-quantized/hf_tensor_static",
                           "fp8/tensor_static"})
    EXPECT_EQ(read(path).static_acts, (StaticActs{0.015625f, 0})) << path;
  const QuantTensor w4a8 = read("modelopt-int4/w4a8"), w4a16 = read("modelopt-int4/w4a16");
  EXPECT_EQ(w4a8.static_acts, (StaticActs{0.015625f, 0}));
  EXPECT_FALSE(w4a16.static_acts);
  for (const QuantTensor& q : {w4a8, w4a16}) EXPECT_EQ(q.prescale.shape, std::vector{q.k});
  EXPECT_EQ(read("float-quantized/fbgemm").act_limit, 1200.0f);
  EXPECT_FALSE(read("float-quantized/modelopt_channel").act_limit);

  const QuantTensor codes = read("smoothquant/int8_output"), floats = read("smoothquant/float_output");
  EXPECT_EQ(codes.static_acts, StaticActs{});
  EXPECT_EQ(codes.bias.at(0), 0.5f * std::nearbyint(codes.bias.at(0) * 2));  // halves: b is 0.5
  EXPECT_EQ(floats.static_acts, StaticActs{});
  EXPECT_FALSE(floats.bias.empty());
}

}  // namespace
}  // namespace nibble
