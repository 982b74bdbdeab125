// Codecs: write → read is the identity, and what cannot be written is refused with the reason.
// Files of other programs are in odd_files_test.cpp; tests/golden tests the values.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "codecs.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using testing::MemoryModule;
using testing::random_weight;

void expect_round_trip(std::string_view format_name, const QuantTensor& q, const ActScheme& act = {}) {
  SCOPED_TRACE(fmt::format("{} {} [{},{}] g_idx {}", format_name, q.scheme.name(), q.n, q.k, q.g_idx.size()));
  const MemoryModule m = written(format_name, q, act);
  const auto detected = m.detect();
  ASSERT_TRUE(detected.module.ok()) << detected.module.status().message();
  EXPECT_EQ(detected.format->name, format_name);
  EXPECT_EQ(detected.module->scheme, q.scheme);
  ASSERT_TRUE(detected.module->claimed);
  EXPECT_EQ(detected.module->claimed->act, act);
  EXPECT_EQ(detected.module->n, q.n);
  EXPECT_EQ(detected.module->k, q.k);
  const int b = bits(q.scheme.codes);
  if (format_name != "compressed-tensors" || 32 % b == 0) {  // others may have two layouts with this many words
    EXPECT_EQ(joined(detected.module->notes), "");
  }
  std::vector<Note> notes;
  const auto back = m.read(notes);
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_TRUE(back->validate().ok());
  EXPECT_TRUE(*back == q);
  EXPECT_EQ(joined(notes), "");
}

// --- round trips --------------------------------------------------------------------------------------------------------------

TEST(Codecs, AwqRoundTrips) {
  for (const char* name : {"u4zg16", "u4b8g16", "u4zc", "u4b8c", "u4zg80"})
    for (const std::int64_t n : {8, 24, 136})
      for (const bool bias : {false, true}) expect_round_trip("awq", random_weight(scheme(name), n, 80, 1, {.bias = bias}));
  expect_round_trip("awq", random_weight(scheme("u4zc", DType::bf16), 8, 1, 2));
}

TEST(Codecs, GptqRoundTrips) {
  for (const char* codes : {"u2b2", "u3b4", "u4b8", "u8b128"})
    for (const char* group : {"c", "g32", "g36", "g96"})  // 36 leaves a last group of 24
      for (const bool act_order : {false, true})
        for (const std::int64_t n : {32, 96})
          expect_round_trip("gptq", random_weight(scheme(std::string(codes) + group), n, 96, 3,
                                                  {.act_order = act_order && std::string_view(group) != "g96", .bias = n == 32}));
  expect_round_trip("gptq", random_weight(scheme("u4b8g8", DType::f32), 8, 8, 4));
}

TEST(Codecs, CompressedTensorsRoundTrips) {
  struct Shape {
    std::int64_t n, k;
    const char* group;
  };
  for (int bits = 2; bits <= 8; ++bits)
    for (const bool symmetric : {true, false})
      for (const Shape& shape :
           {Shape{1, 1, "c"}, {7, 33, "c"}, {33, 100, "g20"}, {5, 64, "g64"}, {3, 1000, "g8"}, {40, 31, "t"}}) {
        if (!symmetric && shape.group[0] == 't') continue;
        const std::string codes = symmetric ? fmt::format("u{}b{}", bits, 1 << (bits - 1)) : fmt::format("u{}z", bits);
        expect_round_trip("compressed-tensors", random_weight(scheme(codes + shape.group, DType::bf16), shape.n, shape.k, 5));
      }
  expect_round_trip("compressed-tensors",
                    random_weight(scheme("u4zg16", DType::f32), 9, 64, 6, {.act_order = true, .bias = true}));
}

TEST(Codecs, NibbleCodesRoundTrip) {
  for (const char* name : {"u4og32", "u4b8og128", "u4fg64", "u4oc", "u2og16", "u3zg20", "u8oc", "u8fg33", "s8g16", "s8zc", "s8ot",
                           "u4b8b8x16", "e4m3c", "e2m1g16"})
    for (const DType scale : {DType::f16, DType::bf16, DType::f32}) {
      expect_round_trip("nibble-codes", random_weight(scheme(name, scale), 9, 128, 1, {.bias = scale == DType::f16}));
      expect_round_trip("nibble-codes", random_weight(scheme(name, scale), 1, 33, 2));  // rows that end within a word
    }
}

TEST(Codecs, NibbleCodesHoldConvolutions) {
  for (const char* name : {"u4og16", "u4oci16", "u4b8ci32"}) {
    const QuantTensor q = random_weight(scheme(name), 8, 9 * 32, 1, {.filter = {3, 3}});
    auto tensors = format("nibble-codes").encode_conv(q, {});
    ASSERT_TRUE(tensors.ok()) << tensors.status().message();
    const auto scales = std::ranges::find(*tensors, "weight_scale", [](const auto& tensor) { return tensor.suffix; });
    ASSERT_NE(scales, tensors->end());
    EXPECT_EQ(scales->tensor.shape, q.scales.shape);  // one for all elements
    std::vector<Note> notes;
    const auto back = MemoryModule{*std::move(tensors), {}}.read(notes);
    ASSERT_TRUE(back.ok()) << back.status().message();
    EXPECT_TRUE(*back == q) << name;
  }
}

TEST(Codecs, IntQuantizedRoundTrips) {
  for (const char* name : {"s8c", "s8t", "s8g16", "s8zc", "s8zt", "s8zg16"})
    for (const char* act : {"s8r", "s8zr", "s8g16", "s8t", "s8zt", "e4m3r"}) {
      QuantTensor q = random_weight(scheme(name, DType::f32), 9, 48, 1, {.bias = true});
      const ActScheme activations = acts(act);
      if (activations.group == GroupShape::tensor())
        q.static_acts = StaticActs{0.0625f, activations.zero == ZeroKind::none ? 0 : -128};
      expect_round_trip("int-quantized", q, activations);
    }
  expect_round_trip("int-quantized", random_weight(scheme("s8c"), 9, 48, 1));                        // W8A16
  expect_round_trip("compressed-tensors", random_weight(scheme("u4b8g16"), 9, 48, 1), acts("s8r"));  // W4A8
}

TEST(Codecs, Fp8RoundTrips) {
  for (const char* name : {"e4m3c", "e4m3t", "e4m3g16", "e4m3b8x16"})
    for (const char* act : {"e4m3r", "e4m3g16", "e4m3t", "s8r"}) {
      QuantTensor q = random_weight(scheme(name, DType::bf16), 20, 48, 1, {.bias = true});
      if (act == std::string_view("e4m3t")) q.static_acts = StaticActs{0.5f, 0};
      expect_round_trip("float-quantized", q, acts(act));
    }
  expect_round_trip("float-quantized", random_weight(scheme("e4m3b128x128", DType::f32), 8, 128, 1));  // weight-only, one block
  for (const std::int64_t n : {1, 8, 20, 256})
    for (const std::int64_t k : {1, 40, 256}) {
      expect_round_trip("fp8", random_weight(scheme("e4m3b8x16", DType::f32), n, k, 1), acts("e4m3g16"));
      expect_round_trip("fp8", random_weight(scheme("e4m3b128x128", DType::f32), n, k, 1, {.bias = true}), acts("e4m3g128"));
    }
  expect_round_trip("fp8", random_weight(scheme("e4m3g16", DType::f32), 6, 40, 1),
                    acts("e4m3g16"));  // blocks of a row, the last one short
}

TEST(Codecs, UnalignedTensorsRead) {
  const std::pair<const char*, const char*> cases[] = {{"awq", "u4b8g32"},
                                                       {"gptq", "u4b8g32"},
                                                       {"compressed-tensors", "u4b8g32"},
                                                       {"int-quantized", "s8zc"},
                                                       {"float-quantized", "e4m3b32x32"}};
  for (const auto& [name, weight] : cases) {
    const QuantTensor q = random_weight(scheme(weight), 64, 96, 7);
    const MemoryModule m = written(name, q);
    codec::ModuleTensors parts = m.views();
    std::vector<std::vector<std::byte>> moved;
    for (auto& [suffix, view] : parts.by_suffix) {
      const auto* bytes = static_cast<const std::byte*>(view.data);
      moved.emplace_back(1).insert(moved.back().end(), bytes,
                                   bytes + storage_bytes(view.dtype, static_cast<std::uint64_t>(view.numel())));
      view.data = moved.back().data() + 1;
    }
    auto module = format(name).detect(parts, m.config);
    ASSERT_TRUE(module && module->ok());
    std::vector<Note> notes;
    const auto back = format(name).read(parts, **module, m.config, notes);
    ASSERT_TRUE(back.ok());
    EXPECT_TRUE(*back == q) << name;
  }
}

// --- refusals to write --------------------------------------------------------------------------------------------------------

void expect_refusal(std::string_view format_name, const QuantTensor& q, std::string_view why, const ActScheme& act = {}) {
  const auto result = format(format_name).write(q, act);
  ASSERT_FALSE(result.ok()) << format_name << " wrote " << q.scheme.name();
  EXPECT_EQ(result.status().code(), StatusCode::unsupported);
  EXPECT_THAT(result.status().message(), HasSubstr(std::string(why)));
}

TEST(Codecs, NibbleCodesRefuse) {
  const auto refused = [](auto change) {
    MemoryModule m = written("nibble-codes", random_weight(scheme("u4og32"), 8, 64, 1));
    change(m);
    std::vector<Note> notes;
    const auto q = m.read(notes);
    EXPECT_EQ(q.status().code(), StatusCode::corrupt_data) << q.status().message();
    return std::string(q.status().message());
  };
  const auto name = [](MemoryModule& m, std::string_view text) {
    Tensor& t = *m.find("weight_scheme");
    t = Tensor(DType::u8, {static_cast<std::int64_t>(text.size())});
    std::memcpy(t.bytes.data(), text.data(), text.size());
  };
  EXPECT_THAT(refused([](MemoryModule& m) { m.erase("weight_offset"); }), HasSubstr("weight_offset"));
  EXPECT_THAT(refused([](MemoryModule& m) { m.erase("weight_shape"); }), HasSubstr("weight_shape"));
  EXPECT_THAT(refused([](MemoryModule& m) { m.find("weight_scale")->shape = {4, 4}; }), HasSubstr("weight_scale"));
  EXPECT_THAT(refused([&](MemoryModule& m) { name(m, "u5og32"); }), HasSubstr("weight_codes"));
  EXPECT_THAT(refused([&](MemoryModule& m) { name(m, "u4g32"); }), HasSubstr("says u4g32, which has none"));
  for (const std::string& text : {std::string("f16"), std::string("s8r_u4og32"), std::string("u4o\n"), std::string(999, 'u')})
    EXPECT_THAT(refused([&](MemoryModule& m) { name(m, text); }), HasSubstr("expected the scheme of a quantized weight")) << text;
  MemoryModule wide = written("nibble-codes", random_weight(scheme("u4zg32"), 8, 64, 1));
  wide.find("weight_zero")->bytes[3] = std::byte{16};
  std::vector<Note> notes;
  EXPECT_THAT(wide.read(notes).status().message(), HasSubstr("element 3 is 16, which does not fit in the 4 bits of u4zg32"));
  expect_refusal("nibble-codes", random_weight(scheme("u4og32"), 8, 64, 1, {.act_order = true}), "no act-order");
  expect_refusal("nibble-codes", random_weight(scheme("u4og32"), 8, 64, 1, {.prescale = true}), "pre-scale");
  expect_refusal("awq", random_weight(scheme("u4og32"), 8, 64, 1), "nibble-codes holds floats");
  expect_refusal("gptq", random_weight(scheme("u4b8ci32"), 8, 64, 1), "nibble-codes holds scales that all elements");
}

TEST(Codecs, WriteRefusesWhatItCannotHold) {
  expect_refusal("awq", random_weight(scheme("u4zg32"), 12, 64, 1), "N must be a multiple of 8");
  expect_refusal("awq", random_weight(scheme("u4zg48"), 8, 64, 1), "K must be a multiple of the group size");
  expect_refusal("awq", random_weight(scheme("u8b128g32"), 8, 64, 1), "4-bit codes");
  expect_refusal("awq", random_weight(scheme("u4b8t"), 8, 64, 1), "per output channel");
  expect_refusal("awq", random_weight(scheme("u4b8g32"), 8, 64, 1, {.act_order = true}), "no act-order");
  expect_refusal("awq", random_weight(scheme("u4b8g32"), 8, 64, 1, {.prescale = true}), "pre-scale");
  expect_refusal("awq", random_weight(scheme("u4b8g32", DType::f32), 8, 64, 1), "is no f16");
  expect_refusal("gptq", random_weight(scheme("u4zg32"), 32, 64, 1), "symmetric codes");
  expect_refusal("gptq", random_weight(scheme("u5b16g32"), 32, 64, 1), "2, 3, 4 or 8 bits");
  expect_refusal("gptq", random_weight(scheme("u3b4g32"), 8, 64, 1), "multiples of 32");
  expect_refusal("int-quantized", random_weight(scheme("u4b8g32"), 8, 64, 1, {.act_order = true}), "no act-order");
  expect_refusal("compressed-tensors", random_weight(scheme("u4b8g48"), 8, 64, 1), "multiple of the group size");
  expect_refusal("compressed-tensors", random_weight(scheme("u4zt"), 8, 64, 1), "zero points are per channel or per group");
  expect_refusal("compressed-tensors", random_weight(scheme("u4og32"), 8, 64, 1), "zero points are integers");
  expect_refusal("compressed-tensors", random_weight(scheme("s8c"), 8, 64, 1), "codes are uX");
  expect_refusal("compressed-tensors", random_weight(scheme("u4b8b8x32"), 8, 64, 1), "per group of input channels");

  QuantTensor wide = random_weight(scheme("u4zg32"), 8, 64, 1);
  wide.zeros.set(3, 16);
  expect_refusal("awq", wide, "zero point 16 does not fit in 4 bits");
  EXPECT_EQ(format("gptq").write({}).status().code(), StatusCode::invalid_argument);
  EXPECT_FALSE(format("gptq").write_config({.modules = {{"a", scheme("u4b8g32")}, {"b", scheme("u8b128g32")}}}).ok());
}

TEST(Codecs, WriteRefusesActivationsItCannotHold) {
  expect_refusal("awq", random_weight(scheme("u4zg32"), 8, 64, 1), "no place for the quantized activations of s8r_u4zg32",
                 acts("s8r"));
  QuantTensor q = random_weight(scheme("u4b8g32"), 32, 64, 1);
  q.static_acts = StaticActs{0.5f, 0};
  expect_refusal("gptq", q, "no place for the quantized activations of scale 0.5");
  expect_refusal("compressed-tensors", q, "have a scale, but are not quantized");
  q.static_acts->zero = 3;
  expect_refusal("compressed-tensors", q, "must be 0", acts("s8t"));

  q = random_weight(scheme("s8c"), 8, 64, 1);
  expect_refusal("int-quantized", q, "the static scale of its activations is missing", acts("s8t"));
  expect_refusal("int-quantized", random_weight(scheme("s8b8x32"), 8, 64, 1), "per tensor, channel or group");
  expect_refusal("int-quantized", random_weight(scheme("e4m3c"), 8, 64, 1), "codes are s8");
  expect_refusal("float-quantized", q, "codes are e4m3");
  expect_refusal("float-quantized", random_weight(scheme("e4m3g48"), 8, 64, 1), "multiple of the group size");

  q = random_weight(scheme("e4m3b8x32", DType::f32), 8, 64, 1);
  expect_refusal("fp8", q, "(e4m3g32)");
  expect_refusal("fp8", q, "(e4m3g32)", acts("e4m3g16"));
  expect_refusal("fp8", random_weight(scheme("e4m3c"), 8, 64, 1), "a scale per block", acts("e4m3r"));
  q.act_limit = 1200.0f;
  expect_refusal("float-quantized", q, "the limit 1200", acts("e4m3r"));
}

TEST(Codecs, AwqNarrowsExactF32Scales) {
  QuantTensor q = random_weight(scheme("u4zg32", DType::f32), 8, 64, 1, {.exact = true});
  std::vector<Note> notes;
  const auto back = written("awq", q).read(notes);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->scales.dtype, DType::f16);
  EXPECT_EQ(back->value(3, 40), q.value(3, 40));
}

TEST(Codecs, CompressedTensorsConfigNamesModulesOfSeveralSchemes) {
  const auto config =
      format("compressed-tensors")
          .write_config({.modules = {{"a", scheme("u4b8g32")}, {"b", scheme("u8zc")}}, .not_quantized = {"lm_head"}});
  ASSERT_TRUE(config.ok());
  EXPECT_EQ((*config)["config_groups"]["group_0"]["targets"], Json::array({"a"}));
  EXPECT_EQ((*config)["config_groups"]["group_1"]["weights"]["strategy"], "channel");
  EXPECT_EQ((*config)["ignore"], Json::array({"lm_head"}));
}

}  // namespace
}  // namespace nibble
