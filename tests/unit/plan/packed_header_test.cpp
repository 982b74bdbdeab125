// Packed weights as bytes: what survives, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>

#include "core/buffer.hpp"
#include "json/json_values.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

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

/// The header whose JSON has another member.
std::string with(const std::string& header, const char* key, const Json& value) {
  Json json = Json::parse(header.substr(kPackedPrefix));
  json[key] = value;
  std::string text = json.dump();
  text.resize((text.size() + kPackedPrefix + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment - kPackedPrefix, ' ');
  std::string changed = header.substr(0, kPackedPrefix) + text;
  for (std::size_t i = 0; i < 8; ++i) changed[8 + i] = static_cast<char>(changed.size() >> (8 * i) & 0xff);
  return changed;
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
  EXPECT_THAT(again(with(header, "channel_sums", {1, 2}), copy_of(*weight)).status().message(),
              HasSubstr("40 integers channel_sums"));
}

TEST(PackedHeader, RefusesWhatContradictsItself) {
  const auto weight = pack(decorated(), LinearSpec{.m_max = 8});
  ASSERT_TRUE(weight.ok());
  const std::string header = *packed_header(*weight);
  const auto bytes = copy_of(*weight);
  Json twice = Json::parse(header.substr(kPackedPrefix))["perm"];
  twice[1] = twice[0];
  const struct {
    const char* key;
    Json value;
    StatusCode code;
    const char* words;
  } cases[] = {
      {"version", 2, StatusCode::unsupported, "version 2"},
      {"layout", "cpu_n64", StatusCode::unsupported, "cpu_n64"},
      {"layout", 3, StatusCode::corrupt_data, "no text layout"},
      {"scheme", "u9", StatusCode::corrupt_data, "u9"},
      {"scheme", "s8r_u4zg32", StatusCode::corrupt_data, "s8r_u4zg32"},
      {"scheme", "u4b8g32", StatusCode::corrupt_data, "zero points of u8"},
      {"scale", "u4", StatusCode::corrupt_data, "no weight"},
      {"n", 25, StatusCode::corrupt_data, "25 elements of"},
      {"n", -1, StatusCode::corrupt_data, "W[-1,128]"},
      {"n", std::int64_t{1} << 40, StatusCode::corrupt_data, "is no weight"},
      {"n", 1e300, StatusCode::corrupt_data, "no integer"},
      {"k", std::uint64_t{1} << 63, StatusCode::corrupt_data, "no integer"},
      {"filter", {7, 1}, StatusCode::corrupt_data, "7x1"},
      {"perm", twice, StatusCode::corrupt_data, "order of its input channels"},
      {"perm", {1, 2}, StatusCode::corrupt_data, "128 integers perm"},
      {"bias", {{"dtype", "f32"}, {"bytes", "00"}}, StatusCode::corrupt_data, "24 elements"},
      {"bias", "00", StatusCode::corrupt_data, "no tensor"},
      {"prescale", {{"dtype", "s8"}, {"bytes", std::string(256, '0')}}, StatusCode::corrupt_data, "128 elements"},
      {"prescale", {{"dtype", "f16"}, {"bytes", std::string(512, 'x')}}, StatusCode::corrupt_data, "128 elements"},
      {"act_scale", -1.0, StatusCode::corrupt_data, "scale -1"},
      {"act_zero", 200, StatusCode::corrupt_data, "200"},
      {"act_limit", 0.0, StatusCode::corrupt_data, "limit 0"},
      {"act_scheme", "x9", StatusCode::corrupt_data, "x9"},
      {"accumulation", "slow", StatusCode::corrupt_data, "accumulation"},
      {"m_max", 0, StatusCode::corrupt_data, "m_max=0"},
  };
  for (const auto& c : cases) {
    const Status status = again(with(header, c.key, c.value), bytes).status();
    EXPECT_EQ(status.code(), c.code) << c.key << " " << c.value << ": " << status.message();
    EXPECT_THAT(status.message(), HasSubstr(c.words)) << c.key;
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
  EXPECT_THAT(again(no_json, bytes).status().message(), HasSubstr("no JSON object"));
  const auto fewer = packed_from_bytes(header, bytes->span().first(bytes->size() - 1), Backend::cpu, bytes);
  EXPECT_THAT(fewer.status().message(), HasSubstr("bytes, W[24,128]"));
  Buffer shifted(bytes->size() + 1);
  const auto misaligned = packed_from_bytes(header, std::as_const(shifted).span().subspan(1), Backend::cpu, bytes);
  EXPECT_EQ(misaligned.status().code(), StatusCode::invalid_argument);
  const auto there = packed_from_bytes(header, bytes->span(), Backend::cuda, bytes);
  EXPECT_EQ(there.status().code(), StatusCode::unsupported) << there.status().message();
}

TEST(PackedHeader, IsForLinearLayers) {
  QuantTensor q = random_weight({DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, 8, 36, 5);
  q.filter = {3, 3};
  const ConvSpec spec{.geometry = {.in_channels = 4, .out_channels = 8, .height = 6, .width = 6, .filter = {3, 3}}};
  const auto weight = pack(q, spec);
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  EXPECT_EQ(packed_header(*weight).status().code(), StatusCode::unsupported);
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
