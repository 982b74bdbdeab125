// Files of packed weights: what is saved comes back, from the mapped file, and files that lie are refused.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "layouts/layout.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"
#include "unit/scratch.hpp"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;
using testing::random_weight;
using testing::Scratch;

PackedWeight packed(const QuantTensor& q, const PackedWeight::Spec& spec = LinearSpec{}, const PackOptions& options = {}) {
  auto weight = std::visit([&](const auto& s) { return pack(q, s, options); }, spec);
  EXPECT_TRUE(weight.ok()) << weight.status().message();
  return *std::move(weight);
}

PackedWeight small_weight() {
  const WeightScheme scheme{DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16};
  return packed(random_weight(scheme, 32, 64, 1, {.bias = true}), LinearSpec{}, {.layout = "cpu_n32"});
}

void expect_saved(const fs::path& path, std::string_view name, const PackedWeight& weight) {
  const std::pair<std::string, PackedWeight> weights[] = {{std::string(name), weight}};
  const Status saved = save_packed(path, weights, {.overwrite = true});
  ASSERT_TRUE(saved.ok()) << saved.message();
}

/// The header's JSON, and the bytes behind it.
std::pair<std::string, std::string> parts_of(const std::string& file) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  return {file.substr(8, length), file.substr(8 + length)};
}
std::string joined(std::string header, const std::string& data, std::size_t alignment = 64) {
  header.erase(header.find_last_not_of(' ') + 1);
  header.resize((8 + header.size() + alignment - 1) / alignment * alignment - 8, ' ');
  const std::uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

/// Replaces the only occurrence.
std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from << " in " << text;
  if (at == std::string::npos) return text;
  EXPECT_EQ(text.find(from, at + 1), std::string::npos) << from << " in " << text;
  return text.replace(at, from.size(), to);
}

TEST(PackedFile, RoundTripOfEverySchemeInEveryLayout) {
  const Scratch scratch;
  std::uint64_t seed = 0;
  std::vector<std::pair<std::string, PackedWeight>> weights;
  std::vector<QuantTensor> originals;
  for (const Layout* layout : layout_table())
    for (const WeightScheme& scheme : testing::all_schemes())
      for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {33, 129}}) {
        ++seed;
        QuantTensor q =
            random_weight(scheme, n, k, seed, {.act_order = seed % 2 == 0, .prescale = seed % 3 == 0, .bias = seed % 5 == 0});
        if (seed % 4 == 0 && !scheme.is_dense()) q.scale2 = 0.1f, q.static_acts = StaticActs{0.0625f, -3};
        if (seed % 7 == 0) q.act_limit = std::numeric_limits<float>::infinity();
        if (seed % 6 == 0 && n == 33) {
          q.filter = {3, 1};  // whose elements share the factors of channels
          for (std::int64_t i = k / 3; i < k && !q.prescale.empty(); ++i) q.prescale.set(i, q.prescale.at(i % (k / 3)));
        }
        if (!refusal(*layout, q.scheme, q.zeros.dtype, q.k).empty()) continue;
        weights.emplace_back(fmt::format("layer.{} \"{}\"", seed, scheme.name()),
                             packed(q, LinearSpec{}, {.layout = std::string(layout->name)}));
        originals.push_back(std::move(q));
      }
  const WeightScheme images{DType::u4, ZeroKind::offset, GroupShape::image_channels(16), DType::f16};
  originals.push_back(random_weight(images, 33, 3 * 48, ++seed, {.filter = {3, 1}}));
  weights.emplace_back("images", packed(originals.back(), LinearSpec{}));
  ASSERT_GT(weights.size(), 200u);
  ASSERT_TRUE(save_packed(scratch / "all.nibble", weights).ok());

  std::vector<PackedWeight> loaded;
  {
    const auto file = PackedFile::open(scratch / "all.nibble");
    ASSERT_TRUE(file.ok()) << file.status().message();
    EXPECT_EQ(file->library_version(), NIBBLE_VERSION);
    EXPECT_EQ(file->checkpoint(), "");
    ASSERT_EQ(file->modules().size(), weights.size());
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const auto& [name, weight] = weights[i];
      const PackedModule& module = file->modules()[i];
      EXPECT_EQ(module.name, name);
      EXPECT_EQ(module.layout, weight.layout());
      EXPECT_EQ(module.bytes, weight.bytes().size());
      EXPECT_EQ(module.has_bias, weight.has_bias());
      EXPECT_TRUE(module.spec == weight.spec());
      const auto back = file->load(name);
      ASSERT_TRUE(back.ok()) << back.status().message();
      EXPECT_EQ(file->load(name)->bytes().data(), back->bytes().data()) << "a copy";
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(back->bytes().data()) % 64, 0u);
      loaded.push_back(*back);
    }
  }
  for (std::size_t i = 0; i < weights.size(); ++i) {  // the weights keep the file mapped
    const PackedWeightData &before = weights[i].second.data(), &after = loaded[i].data();
    EXPECT_TRUE(std::ranges::equal(weights[i].second.bytes(), loaded[i].bytes()));
    EXPECT_EQ(before.perm, after.perm);
    EXPECT_EQ(before.prescale_f32, after.prescale_f32);
    EXPECT_EQ(before.channel_sums, after.channel_sums);
    EXPECT_EQ(loaded[i].backend(), Backend::cpu);
    EXPECT_TRUE(loaded[i].spec() == weights[i].second.spec());
    const auto q = unpack(loaded[i]);
    ASSERT_TRUE(q.ok());
    EXPECT_TRUE(*q == originals[i]) << weights[i].first;
  }
}

TEST(PackedFile, PlansGiveTheSameBits) {
  const Scratch scratch;
  constexpr std::int64_t m = 5, n = 70, k = 256;
  const QuantTensor q = random_weight({DType::u4, ZeroKind::integer, GroupShape::group(64), DType::f16}, n, k, 3,
                                      {.act_order = true, .prescale = true, .bias = true});
  for (const ActScheme& act : {ActScheme{}, ActScheme{DType::s8, GroupShape::channel()}}) {
    const PackedWeight weight = packed(q, LinearSpec{.m_max = m, .epilogue = {.bias = true}, .act_scheme = act});
    expect_saved(scratch / "w.nibble", "w", weight);
    const auto loaded = PackedFile::open(scratch / "w.nibble")->load("w");
    ASSERT_TRUE(loaded.ok());
    const Tensor a = testing::counting(DType::f32, {m, k});
    Tensor d[2] = {Tensor(DType::f32, {m, n}), Tensor(DType::f32, {m, n})};
    for (int i = 0; i < 2; ++i) {
      const PackedWeight& w = i == 0 ? weight : *loaded;
      const auto plan = Plan::linear(w);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      std::vector<std::byte> workspace(plan->workspace_bytes());
      const Status ran =
          plan->run(w, ConstTensorView(a.as<float>(), {m, k}), TensorView(d[i].as<float>(), {m, n}), {}, workspace);
      ASSERT_TRUE(ran.ok()) << ran.message();
    }
    EXPECT_EQ(d[0].bytes, d[1].bytes);
  }
}

TEST(PackedFile, KeepsEveryMemberOfASpecification) {
  const Scratch scratch;
  const EpilogueSpec epilogue{.row_scale = false,
                              .col_scale = true,
                              .bias = true,
                              .activation = Activation::leaky_relu,
                              .clamp_low = -std::numeric_limits<float>::max(),
                              .clamp_high = std::numeric_limits<float>::infinity(),
                              .negative_slope = 0.1f,
                              .gate = true,
                              .residual = true,
                              .out = DType::s8,
                              .out_scale = 1.17549435e-38f,
                              .out_zero = -128,
                              .out_scales = false,
                              .out_low = -100,
                              .out_high = 100};
  QuantTensor q = random_weight({DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, 32, 36, 1);
  const LinearSpec linear{.a_dtype = DType::bf16,
                          .m_max = 1000,
                          .epilogue = epilogue,
                          .act_scheme = {DType::s8, GroupShape::channel(), ZeroKind::integer},
                          .accumulation = Accumulation::precise};
  expect_saved(scratch / "linear", "w", packed(q, linear));
  EXPECT_TRUE(PackedFile::open(scratch / "linear")->modules()[0].spec == PackedWeight::Spec(linear));

  q.filter = {3, 3};
  const ConvSpec conv{.geometry = {.in_channels = 8,
                                   .out_channels = 32,
                                   .height = 1000,
                                   .width = 1001,
                                   .filter = {3, 3},
                                   .stride = {2, 3},
                                   .padding = {1, 2, 3, 4},
                                   .dilation = {5, 6},
                                   .groups = 2},
                      .input = ImageLayout::nhwc,
                      .output = ImageLayout::nhwc,
                      .a_dtype = DType::f16,
                      .batch_max = 7,
                      .epilogue = epilogue,
                      .act_scheme = {DType::s8, GroupShape::group(4), ZeroKind::none},
                      .accumulation = Accumulation::precise};
  expect_saved(scratch / "conv", std::string(1000, '"'), packed(q, conv));
  const auto file = PackedFile::open(scratch / "conv");
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_TRUE(file->modules()[0].spec == PackedWeight::Spec(conv));
  EXPECT_EQ(file->modules()[0].desc.filter, (Extent{3, 3}));
}

TEST(PackedFile, IsASafetensorsFile) {
  const Scratch scratch;
  expect_saved(scratch / "w.safetensors", "layer", small_weight());
  const auto checkpoint = Checkpoint::open(scratch / "w.safetensors");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  const TensorInfo* bytes = checkpoint->find_tensor("layer.packed");
  ASSERT_NE(bytes, nullptr);
  EXPECT_EQ(bytes->dtype, DType::u8);
  EXPECT_EQ(bytes->file_offset % 64, 0u);
  EXPECT_NE(checkpoint->find_tensor("layer.bias"), nullptr);
  EXPECT_TRUE(PackedFile::recognises(scratch / "w.safetensors"));
  EXPECT_FALSE(PackedFile::recognises(scratch / "absent"));
}

TEST(PackedFile, RefusesFilesThatLie) {
  const Scratch scratch;
  const fs::path path = scratch / "w.nibble";
  expect_saved(path, "w", small_weight());
  const std::string good = testing::read_text(path);
  const auto [header, data] = parts_of(good);
  const struct {
    std::string_view from, to;  // in the header
    StatusCode code;
    std::vector<std::string> message;
  } cases[] = {
      {R"("format":"nibble-packed",)", "", StatusCode::corrupt_data, {"no file of packed weights", "nibble pack"}},
      {R"("format_version":"1")",
       R"("format_version":"2")",
       StatusCode::unsupported,
       {"version \"2\"", "reads 1", "pack it again"}},
      {R"(\"layout\":\"cpu_n32\")", R"(\"layout\":\"cpu_n64\")", StatusCode::unsupported, {"cpu_n64", "pack it again"}},
      {R"(\"layout_version\":1)", R"(\"layout_version\":2)", StatusCode::unsupported, {"version 2 of cpu_n32", "version 1"}},
      {R"(\"layout_version\":1,)", "", StatusCode::corrupt_data, {"module \"w\": has no layout_version"}},
      {R"(\"layout\":\"cpu_n32\")", R"(\"layout\":\"gpu_w8n64k128\")", StatusCode::corrupt_data, {"cannot hold it"}},
      {R"(\"n\":32)", R"(\"n\":33)", StatusCode::corrupt_data, {"bytes", "W[33,64]"}},
      {R"(\"n\":32)", R"(\"n\":-32)", StatusCode::corrupt_data, {"[-32,64]"}},
      {R"(\"n\":32)", R"(\"n\":1073741824)", StatusCode::corrupt_data, {"W[1073741824,64]"}},
      {R"(\"n\":32)", R"(\"n\":18446744073709551615)", StatusCode::corrupt_data, {"n is 18446744073709551615", "whole number"}},
      {R"(\"n\":32)", R"(\"n\":\"32\")", StatusCode::corrupt_data, {"n is \"32\""}},
      {R"(\"n\":32)", R"(\"n\":32,\"secret\":1)", StatusCode::corrupt_data, {"unknown key \"secret\""}},
      {R"(\"n\":32)", R"(\"n\":32,\"n\":32)", StatusCode::corrupt_data, {"appears twice"}},
      {R"(\"codes\":\"u4b8\")", R"(\"codes\":\"u4b9\")", StatusCode::corrupt_data, {"scheme.codes is \"u4b9\""}},
      {R"(\"codes\":\"u4b8\")", R"(\"codes\":\"u8b128\")", StatusCode::corrupt_data, {"bytes", "u8b128g32"}},
      {R"(\"k\":32,\"n\":1)", R"(\"k\":-32,\"n\":1)", StatusCode::corrupt_data, {"negative"}},
      {R"(\"linear\":{})", R"(\"linear\":{\"a_dtype\":\"u8\"})", StatusCode::corrupt_data, {"what it was packed for"}},
      {R"(\"linear\":{})", R"(\"linear\":{\"m_max\":0})", StatusCode::corrupt_data, {"m_max=0"}},
      {R"(\"linear\":{})", R"(\"linear\":{\"epilogue\":{\"out\":\"u4\"}})", StatusCode::corrupt_data, {"u4"}},
      {R"(\"linear\":{})", R"(\"linear\":[])", StatusCode::corrupt_data, {"linear", "an object"}},
      {R"(\"linear\":{})", R"(\"conv\":{},\"linear\":{})", StatusCode::corrupt_data, {"a linear layer and a convolution"}},
      {R"(,\"linear\":{})", "", StatusCode::corrupt_data, {"neither"}},
      {R"({\"w\":{)", R"({\"v\":{)", StatusCode::corrupt_data, {"there is no tensor \"v.packed\""}},
      {R"("modules":"{)", R"("modules":"[)", StatusCode::corrupt_data, {"not valid JSON"}},
      {R"("w.bias":{"dtype":"F16","shape":[32])",
       R"("w.bias":{"dtype":"F16","shape":[16,2])",
       StatusCode::corrupt_data,
       {"w.bias", "[16,2]"}},
      {R"("w.bias":{"dtype":"F16")", R"("w.bias":{"dtype":"I16")", StatusCode::corrupt_data, {"w.bias", "s16"}},
      {R"("w.bias")", R"("w.perm")", StatusCode::corrupt_data, {"w.perm", "f16"}},
      {R"("w.bias")", R"("w.channel_sums")", StatusCode::corrupt_data, {"channel_sums"}},
      {R"("w.bias")", R"("x.bias")", StatusCode::corrupt_data, {"1 of its 2 tensors"}},
  };
  for (const auto& [from, to, code, message] : cases) {
    SCOPED_TRACE(fmt::format("{} -> {}", from, to));
    testing::write_text(path, joined(replaced(header, from, to), data));
    expect_error(PackedFile::open(path).status(), code, message);
  }
  for (std::size_t length = 0; length < good.size(); length += 97) {
    testing::write_text(path, good.substr(0, length));
    expect_error(PackedFile::open(path).status(), StatusCode::corrupt_data, {path.string()});
  }
  std::string shifted = header;
  while ((8 + shifted.size()) % 64 != 8) shifted += ' ';
  const std::uint64_t length = shifted.size();
  testing::write_text(path, std::string(reinterpret_cast<const char*>(&length), 8) + shifted + data);
  expect_error(PackedFile::open(path).status(), StatusCode::corrupt_data, {"w.packed", "multiple of 64"});
}

TEST(PackedFile, ChecksSmallTensorsWhenItLoads) {
  const Scratch scratch;
  const fs::path path = scratch / "w.nibble";
  const auto with = [&](const PackedWeight& weight, std::string_view tensor, const void* bytes, std::size_t size) {
    expect_saved(path, "w", weight);
    const auto opened = Checkpoint::open(path);  // which finds the tensor
    const std::uint64_t offset = opened->find_tensor(tensor)->file_offset;
    std::string file = testing::read_text(path);
    std::memcpy(file.data() + offset, bytes, size);
    testing::write_text(path, file);
    return PackedFile::open(path)->load("w").status();
  };
  const PackedWeight ordered =
      packed(random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f16}, 32, 64, 1, {.act_order = true}));
  const std::int32_t outside = 64, negative = -1, twice = ordered.data().perm[1];
  expect_error(with(ordered, "w.perm", &outside, 4), StatusCode::corrupt_data, {"perm[0] is 64", "[0,64)"});
  expect_error(with(ordered, "w.perm", &negative, 4), StatusCode::corrupt_data, {"perm[0] is -1"});
  expect_error(with(ordered, "w.perm", &twice, 4), StatusCode::corrupt_data, {"second time"});
  const PackedWeight whole = packed(random_weight({DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, 32, 64, 1));
  for (const double sum : {1e300, 0.5, std::numeric_limits<double>::quiet_NaN(), -32769.0})
    expect_error(with(whole, "w.channel_sums", &sum, 8), StatusCode::corrupt_data, {"channel_sums[0]"});
}

TEST(PackedFile, HoldsTheLargestSums) {
  const Scratch scratch;
  QuantTensor q = random_weight({DType::u8, ZeroKind::integer, GroupShape::channel(), DType::f32}, 32, 64, 1);
  std::ranges::fill(q.codes, 255);
  q.zeros = testing::filled(DType::s8, {32, 1}, 0x80);  // -128
  expect_saved(scratch / "w.nibble", "w", packed(q));
  const auto loaded = PackedFile::open(scratch / "w.nibble")->load("w");
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(loaded->data().channel_sums[0], 64.0 * (255 + 128));
}

TEST(PackedFile, SaysThatItWasTruncated) {
  const Scratch scratch;
  expect_saved(scratch / "w.nibble", "w", small_weight());
  const auto file = PackedFile::open(scratch / "w.nibble");
  ASSERT_TRUE(file.ok());
  fs::resize_file(scratch / "w.nibble", 4096);
  expect_error(file->load("w").status(), StatusCode::io_error, {"w.nibble", "ends at byte"});
  expect_error(file->load("v").status(), StatusCode::not_found, {"\"v\""});
}

TEST(PackedFileWriter, WritesAllOrNothing) {
  const Scratch scratch;
  const fs::path path = scratch / "w.nibble";
  const PackedWeight weight = small_weight();
  const std::string names[] = {"a", "b"}, twice[] = {"a", "a"}, tab[] = {"a\tb"}, longest[] = {std::string(1001, 'x')};
  expect_error(PackedFileWriter::create(path, twice).status(), StatusCode::invalid_argument, {"two weights", "\"a\""});
  expect_error(PackedFileWriter::create(path, tab).status(), StatusCode::invalid_argument, {"control"});
  expect_error(PackedFileWriter::create(path, longest).status(), StatusCode::invalid_argument, {"1001 bytes"});
  {
    auto writer = PackedFileWriter::create(path, names);
    ASSERT_TRUE(writer.ok()) << writer.status().message();
    EXPECT_TRUE(writer->add("a", weight).ok());
    expect_error(writer->add("a", weight), StatusCode::invalid_argument, {"before"});
    expect_error(writer->add("c", weight), StatusCode::invalid_argument, {"\"c\""});
    expect_error(writer->finish(), StatusCode::invalid_argument, {"\"b\" was not added"});
  }
  EXPECT_TRUE(testing::names_in(scratch.path()).empty());
  {
    const testing::FullDisk full(16 << 10);
    const std::pair<std::string, PackedWeight> weights[] = {
        {"w", packed(random_weight({DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, 256, 256, 1))}};
    EXPECT_EQ(save_packed(path, weights).code(), StatusCode::io_error);
  }
  EXPECT_TRUE(testing::names_in(scratch.path()).empty());
  EXPECT_TRUE(save_packed(path, {}).ok());  // a file of no weights
  EXPECT_TRUE(PackedFile::open(path)->modules().empty());
  expect_error(save_packed(path, {}), StatusCode::already_exists, {"w.nibble"});
  EXPECT_TRUE(save_packed(path, {}, {.overwrite = true}).ok());
}

/// A checkpoint of two quantized layers.
void write_model(const fs::path& path, float scale) {
  const auto layer = [&](const char* name) {
    Tensor w(DType::f16, {32, 256});
    for (std::int64_t i = 0; i < w.numel(); ++i) w.set(i, scale * static_cast<float>(i % 113 - 50) / 64);
    return testing::source(name, std::move(w));
  };
  const fs::path dense = path.parent_path() / "dense.safetensors";
  ASSERT_TRUE(write_safetensors(dense, std::vector{layer("up.weight"), layer("down.weight")}, {}, true).ok());
  const auto made = quantize_checkpoint(dense, path, {.scheme = *Scheme::parse("u4zg128")}, {.overwrite = true});
  ASSERT_TRUE(made.ok()) << made.status().message();
}

TEST(PackedWeightOf, ComesFromTheFileWhileTheCheckpointIsTheSame) {
  const Scratch scratch;
  const fs::path path = scratch / "model.safetensors";
  write_model(path, 1.0f);
  auto checkpoint = Checkpoint::open(path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_EQ(packed_path(path), scratch / "model.nibble");
  EXPECT_EQ(packed_path(scratch / "model/"), scratch / "model.nibble");
  expect_error(PackedFile::beside(*checkpoint).status(), StatusCode::not_found, {"model.nibble"});

  const LinearSpec spec{.m_max = 64};
  const Module& up = *checkpoint->find_module("up");
  auto weight = packed_weight(*checkpoint, up, spec, nullptr);
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  EXPECT_EQ(weight->packed_because, "there is no packed file");
  const std::pair<std::string, PackedWeight> weights[] = {{"up", weight->weight}};
  ASSERT_TRUE(save_packed(scratch / "model.nibble", weights, {.checkpoint = &*checkpoint}).ok());

  std::vector<ModuleNote> notes;
  const auto file = PackedFile::beside(*checkpoint, &notes);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_TRUE(notes.empty());
  EXPECT_EQ(file->checkpoint(), "model.safetensors");
  EXPECT_EQ(file->find("up")->source, *checkpoint->digest(up));
  EXPECT_EQ(file->find("down"), nullptr);

  // For a specification with the same layout, too; the weight remembers the one that was asked for.
  const LinearSpec other{.m_max = 32, .epilogue = {.activation = Activation::silu}};
  for (const LinearSpec& asked : {spec, other}) {
    const auto found = packed_weight(*checkpoint, up, asked, &*file);
    ASSERT_TRUE(found.ok()) << found.status().message();
    EXPECT_EQ(found->packed_because, "");
    EXPECT_EQ(found->weight.bytes().data(), file->load("up")->bytes().data());
    EXPECT_TRUE(found->weight.spec() == PackedWeight::Spec(asked));
  }
  const auto down = packed_weight(*checkpoint, *checkpoint->find_module("down"), spec, &*file);
  ASSERT_TRUE(down.ok());
  EXPECT_THAT(down->packed_because, ::testing::HasSubstr("does not have it"));
  const auto plain = packed_weight(*checkpoint, up, spec, &*file, {.layout = "plain"});
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->weight.layout(), "plain");
  EXPECT_THAT(plain->packed_because, ::testing::HasSubstr("layout"));

  write_model(path, 2.0f);  // the same names and shapes, other numbers
  checkpoint = Checkpoint::open(path);
  const auto changed = packed_weight(*checkpoint, *checkpoint->find_module("up"), spec, &*file);
  ASSERT_TRUE(changed.ok());
  EXPECT_THAT(changed->packed_because, ::testing::HasSubstr("changed"));
  EXPECT_TRUE(*unpack(changed->weight) == *checkpoint->read(*checkpoint->find_module("up")));
  ASSERT_TRUE(PackedFile::beside(*checkpoint, &notes).ok());
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_EQ(notes[0].module, "up");
  EXPECT_THAT(notes[0].note.text, ::testing::HasSubstr("has changed"));
}

TEST(PackedWeightOf, IsNotAPartOfTheLayer) {
  const Scratch scratch;
  write_model(scratch / "model.safetensors", 1.0f);
  const auto checkpoint = Checkpoint::open(scratch / "model.safetensors");
  const Module& up = *checkpoint->find_module("up");
  const auto part = checkpoint->read(up, {LayerPart::Of::outputs, 0, 16});
  ASSERT_TRUE(part.ok()) << part.status().message();
  const std::pair<std::string, PackedWeight> weights[] = {{"up", packed(*part)}};
  ASSERT_TRUE(save_packed(scratch / "model.nibble", weights, {.checkpoint = &*checkpoint}).ok());
  const auto file = PackedFile::beside(*checkpoint);
  const auto weight = packed_weight(*checkpoint, up, LinearSpec{}, &*file);
  ASSERT_TRUE(weight.ok());
  EXPECT_EQ(weight->weight.n(), 32);
  EXPECT_THAT(weight->packed_because, ::testing::HasSubstr("W[16,256]"));
}

TEST(PackedWeightOf, IsNotTakenFromAFileWithoutASource) {
  const Scratch scratch;
  const fs::path path = scratch / "model.safetensors";
  write_model(path, 1.0f);
  const auto checkpoint = Checkpoint::open(path);
  const Module& up = *checkpoint->find_module("up");
  expect_saved(scratch / "model.nibble", "up", packed(*checkpoint->read(up)));
  const auto file = PackedFile::beside(*checkpoint);
  const auto weight = packed_weight(*checkpoint, up, LinearSpec{}, &*file);
  ASSERT_TRUE(weight.ok());
  EXPECT_THAT(weight->packed_because, ::testing::HasSubstr("does not say"));
}

TEST(Download, OfAWeightInHostMemoryIsTheWeight) {
  const PackedWeight weight = small_weight();
  EXPECT_EQ(download(weight)->bytes().data(), weight.bytes().data());
}

}  // namespace
}  // namespace nibble
