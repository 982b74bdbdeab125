// Packed weights as bytes: what survives, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>

#include "core/buffer.hpp"
#include "json/json_values.hpp"
#include "layouts/layout.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"
#include "unit/scratch.hpp"

namespace nibble {
namespace {

using testing::expect_error;
using ::testing::HasSubstr;
using testing::random_weight;

/// A copy of the packed bytes, aligned.
std::shared_ptr<Buffer> copy_of(const PackedWeight& weight) {
  auto bytes = std::make_shared<Buffer>(weight.bytes().size());
  std::memcpy(bytes->data(), weight.bytes().data(), bytes->size());
  return bytes;
}

Result<PackedWeight> again(std::string_view header, const std::shared_ptr<Buffer>& bytes) {
  return packed_from_bytes(header, bytes->span(), Backend::cpu, bytes);
}

/// The header with other JSON.
std::string with(const std::string& header, const Json& json) {
  std::string text = json.dump();
  text.resize((text.size() + kPackedPrefix + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment - kPackedPrefix, ' ');
  std::string changed = header.substr(0, kPackedPrefix) + text;
  for (std::size_t i = 0; i < 8; ++i) changed[8 + i] = static_cast<char>(changed.size() >> (8 * i) & 0xff);
  return changed;
}
Json json_of(const std::string& header) { return Json::parse(header.substr(kPackedPrefix)); }

/// The header whose JSON has another value at a place: "/scheme/codes".
std::string with(const std::string& header, const char* place, const Json& value) {
  Json json = json_of(header);
  json[Json::json_pointer(place)] = value;
  return with(header, json);
}

QuantTensor decorated() {
  QuantTensor q = random_weight({DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16}, 24, 128, 3);
  q.g_idx.resize(128);
  for (std::size_t i = 0; i < 128; ++i) q.g_idx[i] = static_cast<std::int32_t>((i * 37) % 128 / 32);
  q.bias = Tensor(DType::f32, {24});
  q.prescale = Tensor(DType::bf16, {128});
  for (std::int64_t i = 0; i < 24; ++i) q.bias.set(i, 0.1f * static_cast<float>(i));
  for (std::int64_t i = 0; i < 128; ++i) q.prescale.set(i, 1.0f + static_cast<float>(i) / 64);
  q.scale2 = 0.3f;
  q.act_limit = 7.1f;
  q.static_acts = StaticActs{0.017f, -3};
  return q;
}

TEST(PackedHeader, KeepsEveryWeightInEveryLayout) {
  for (const WeightScheme& scheme : testing::all_schemes())
    for (const LayoutInfo& layout : layouts()) {
      const QuantTensor q = random_weight(scheme, 40, 96, 1);
      const LinearSpec spec{.a_dtype = DType::bf16, .m_max = 77, .epilogue = {.out = DType::bf16}};
      const auto weight = pack(q, spec, {.layout = std::string(layout.name)});
      if (!weight) continue;  // the layout cannot hold it
      const auto header = packed_header(*weight);
      ASSERT_TRUE(header.ok()) << header.status().message();
      const auto read = again(*header, copy_of(*weight));
      ASSERT_TRUE(read.ok()) << Scheme{scheme, {}}.name() << " " << layout.name << ": " << read.status().message();
      EXPECT_EQ(std::get<LinearSpec>(read->spec()), spec);
      EXPECT_EQ(read->layout(), layout.name);
      EXPECT_EQ(*unpack(*read), q);
      EXPECT_EQ(*packed_header(*read), *header);
    }
}

TEST(PackedHeader, KeepsEveryFieldAndEveryBitOfResults) {
  const QuantTensor q = decorated();
  const LinearSpec spec{.m_max = 8, .epilogue = {.bias = true}};
  const auto weight = pack(q, LinearSpec{.m_max = 8});
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  const auto read = again(*packed_header(*weight), copy_of(*weight));
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(*unpack(*read), q);
  EXPECT_EQ(*packed_layout(*packed_header(*weight)), weight->layout());
  std::vector<float> a(3 * 128), d(3 * 24), other(3 * 24);
  std::iota(a.begin(), a.end(), -100.0f);
  const auto run = [&](const PackedWeight& w, std::vector<float>& out) {
    const auto plan = Plan::linear(w, spec);
    std::vector<std::byte> workspace(plan->workspace_bytes());
    return plan->run(w, ConstTensorView(a.data(), {3, 128}), TensorView(out.data(), {3, 24}), {}, workspace);
  };
  ASSERT_TRUE(run(*weight, d).ok());
  ASSERT_TRUE(run(*read, other).ok());
  EXPECT_EQ(d, other);
}

TEST(PackedHeader, KeepsIntegerSums) {
  const QuantTensor q = random_weight({DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, 40, 64, 5);
  const auto weight = pack(q, LinearSpec{.m_max = 8, .act_scheme = {DType::s8, GroupShape::channel(), ZeroKind::integer}});
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  const std::string header = *packed_header(*weight);
  const auto read = again(header, copy_of(*weight));
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(std::get<LinearSpec>(read->spec()), std::get<LinearSpec>(weight->spec()));
  EXPECT_EQ(read->data().channel_sums, weight->data().channel_sums);
  const std::string nan = std::string(64 * 16 - 16, '0') + std::string(16, 'f');
  expect_error(again(with(header, "/channel_sums/bytes", nan), copy_of(*weight)).status(), StatusCode::corrupt_data,
               {"channel_sums[63] is"});
  expect_error(again(with(header, "/channel_sums/bytes", "0000000000000000"), copy_of(*weight)).status(),
               StatusCode::corrupt_data, {"f64 [1], expected f64 [64]"});
  Json without = json_of(header);
  without.erase("channel_sums");
  const auto computed = again(with(header, without), copy_of(*weight));
  ASSERT_TRUE(computed.ok()) << computed.status().message();
  EXPECT_EQ(computed->data().channel_sums, weight->data().channel_sums);
}

TEST(PackedHeader, KeepsWhatAWeightWasPackedFor) {
  const auto expect_kept = [](const QuantTensor& q, const auto& spec) {
    const auto weight = pack(q, spec);
    ASSERT_TRUE(weight.ok()) << weight.status().message();
    const auto header = packed_header(*weight);
    ASSERT_TRUE(header.ok()) << header.status().message();
    const auto read = again(*header, copy_of(*weight));
    ASSERT_TRUE(read.ok()) << read.status().message();
    EXPECT_TRUE(read->spec() == PackedWeight::Spec(spec));
    EXPECT_EQ(read->paired(), weight->paired());
    EXPECT_EQ(*unpack(*read), q);
  };
  const QuantTensor q = random_weight({DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16}, 24, 128, 3);
  expect_kept(q, LinearSpec{.m_max = 8, .epilogue = {.activation = Activation::silu, .glu = true, .out = DType::f16}});
  expect_kept(q, LinearSpec{.m_max = 8, .norm = {.kind = Norm::rms, .eps = 1e-6f, .add = true}});
  QuantTensor filters = random_weight({DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, 8, 36, 5);
  filters.filter = {3, 3};
  expect_kept(filters, ConvSpec{.geometry = {.in_channels = 4, .out_channels = 8, .height = 6, .width = 6, .filter = {3, 3}}});
}

TEST(PackedHeader, RefusesWhatContradictsItself) {
  const auto weight = pack(decorated(), LinearSpec{.m_max = 8});
  ASSERT_TRUE(weight.ok());
  const std::string header = *packed_header(*weight);
  const auto bytes = copy_of(*weight);
  std::string twice = json_of(header)["perm"]["bytes"], outside = twice;
  twice.replace(8, 8, twice, 0, 8), outside.replace(0, 8, "80000000");
  const struct {
    const char* place;
    Json value;
    StatusCode code;
    const char* words;
  } cases[] = {
      {"/version", 1, StatusCode::unsupported, "version \"1\""},
      {"/layout", "cpu_n64", StatusCode::unsupported, "cpu_n64"},
      {"/layout", 3, StatusCode::corrupt_data, "is 3 where a text"},
      {"/layout_version", 9, StatusCode::unsupported, "version 9 of cpu"},
      {"/secret", 1, StatusCode::corrupt_data, "unknown key \"secret\""},
      {"/scheme/codes", "u9", StatusCode::corrupt_data, "scheme.codes is \"u9\""},
      {"/scheme/zero", "none", StatusCode::corrupt_data, "zeros are given"},
      {"/scheme/scale", "u4", StatusCode::corrupt_data, "scales of type u4"},
      {"/n", 25, StatusCode::corrupt_data, "f32 [24], expected f32 [25]"},
      {"/n", -1, StatusCode::corrupt_data, "[-1,128]"},
      {"/n", std::int64_t{1} << 40, StatusCode::corrupt_data, "1099511627776"},
      {"/n", 1e300, StatusCode::corrupt_data, "whole number"},
      {"/k", std::uint64_t{1} << 63, StatusCode::corrupt_data, "whole number"},
      {"/bytes", 1, StatusCode::corrupt_data, "has 1 bytes"},
      {"/filter", {{"h", 7}}, StatusCode::corrupt_data, "7x1"},
      {"/paired", true, StatusCode::corrupt_data, "lie in pairs"},
      {"/perm/bytes", twice, StatusCode::corrupt_data, "for the second time"},
      {"/perm/bytes", outside, StatusCode::corrupt_data, "perm[0] is 128"},
      {"/perm/bytes", "01000000", StatusCode::corrupt_data, "s32 [1], expected s32 [128]"},
      {"/perm/dtype", "f32", StatusCode::corrupt_data, "f32 [128], expected s32 [128]"},
      {"/bias", {{"dtype", "f32"}, {"bytes", "00"}}, StatusCode::corrupt_data, "bias: is not a type"},
      {"/bias", "00", StatusCode::corrupt_data, "bias: is not a type"},
      {"/bias/dtype", "u4", StatusCode::corrupt_data, "bias: is not a type"},
      {"/prescale/dtype", "s8", StatusCode::corrupt_data, "is s8, expected f32, f16 or bf16"},
      {"/prescale/bytes", std::string(512, 'x'), StatusCode::corrupt_data, "prescale: is not a type"},
      {"/static_acts/scale", -1.0, StatusCode::corrupt_data, "scale -1"},
      {"/static_acts/zero", 200, StatusCode::corrupt_data, "200"},
      {"/act_limit", 0.0, StatusCode::corrupt_data, "limit 0"},
      {"/linear/act_scheme/codes", "x9", StatusCode::corrupt_data, "x9"},
      {"/linear/accumulation", "slow", StatusCode::corrupt_data, "accumulation"},
      {"/linear/m_max", 0, StatusCode::corrupt_data, "m_max=0"},
      {"/conv", Json::object(), StatusCode::corrupt_data, "a linear layer and a convolution"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.place);
    expect_error(again(with(header, c.place, c.value), bytes).status(), c.code, {"packed weight: ", c.words});
  }
}

TEST(PackedHeader, RefusesBytesThatAreNone) {
  const auto weight = pack(decorated(), LinearSpec{.m_max = 8});
  const std::string header = *packed_header(*weight);
  const auto bytes = copy_of(*weight);
  EXPECT_EQ(again(header.substr(0, 8), bytes).status().code(), StatusCode::corrupt_data);
  EXPECT_EQ(again(header.substr(0, header.size() - 1), bytes).status().code(), StatusCode::corrupt_data);
  EXPECT_EQ(again("x" + header.substr(1), bytes).status().code(), StatusCode::corrupt_data);
  std::string no_json = header;
  no_json[kPackedPrefix] = '[';
  EXPECT_THAT(again(no_json, bytes).status().message(), HasSubstr("not valid JSON"));
  const auto fewer = packed_from_bytes(header, bytes->span().first(bytes->size() - 1), Backend::cpu, bytes);
  EXPECT_THAT(fewer.status().message(), HasSubstr("bytes, W[24,128]"));
  Buffer shifted(bytes->size() + 1);
  const auto misaligned = packed_from_bytes(header, std::as_const(shifted).span().subspan(1), Backend::cpu, bytes);
  EXPECT_EQ(misaligned.status().code(), StatusCode::invalid_argument);
  const auto there = packed_from_bytes(header, bytes->span(), Backend::cuda, bytes);
  EXPECT_EQ(there.status().code(), StatusCode::unsupported) << there.status().message();
}

TEST(WriteModule, IsTheInverseOfReadModule) {
  const QuantTensor zeros = random_weight({DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16}, 24, 128, 3);
  const QuantTensor symmetric = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16}, 24, 128, 3);
  for (const char* format : {"awq", "gptq", "compressed-tensors"}) {
    const QuantTensor& q = std::string_view(format) == "gptq" ? symmetric : zeros;
    const auto tensors = write_module(q, format);
    ASSERT_TRUE(tensors.ok()) << tensors.status().message();
    const WrittenLayer layer{"up", format, {q.scheme, {}}, false};
    const std::string head[] = {"lm_head"};
    const auto config = write_config(format, std::span(&layer, 1), head);
    ASSERT_TRUE(config.ok()) << config.status().message();
    std::vector<NamedView> named;
    for (const ModuleTensor& t : *tensors) {
      ConstTensorView view;
      view.data = t.tensor.bytes.data();
      view.dtype = t.tensor.dtype;
      view.rank = static_cast<int>(t.tensor.shape.size());
      std::int64_t stride = 1;
      for (std::size_t i = t.tensor.shape.size(); i-- > 0;) {
        view.shape[i] = t.tensor.shape[i];
        view.strides[i] = stride;
        stride *= t.tensor.shape[i];
      }
      named.push_back({t.suffix, view});
    }
    EXPECT_EQ(*read_module(named, *config), q) << format;
  }
  EXPECT_EQ(write_module(zeros, "fp8").status().code(), StatusCode::unsupported);
  EXPECT_EQ(write_module(zeros, "smoothquant").status().code(), StatusCode::not_found);
}

}  // namespace
}  // namespace nibble
