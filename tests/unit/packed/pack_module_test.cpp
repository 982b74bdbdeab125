// Packing a module of a checkpoint by blocks of rows gives what reading it and packing it does, bit for bit.
#include <gtest/gtest.h>

#include <filesystem>

#include "layouts/layout.hpp"
#include "nibble/nibble.hpp"
#include "unit/scratch.hpp"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;
using testing::Scratch;

/// The messages, without an order: read() and pack() find things in another one.
std::vector<std::string> texts(const std::vector<Note>& notes) {
  std::vector<std::string> texts;
  for (const Note& note : notes) texts.push_back(note.text);
  std::ranges::sort(texts);
  return texts;
}

/// Packs a module in every layout that takes it, by one thread and by three. Returns in how many.
int expect_same_bytes(const Checkpoint& checkpoint, const Module& module) {
  std::vector<Note> read_notes;
  const auto q = checkpoint.read(module, &read_notes);
  if (!q.ok()) {
    const auto weight = pack(checkpoint, module, LinearSpec{});
    EXPECT_EQ(weight.status().code(), q.status().code()) << weight.status().message();
    EXPECT_EQ(weight.status().message(), q.status().message());
    return 0;
  }
  int layouts = 0;
  for (const Layout* layout : layout_table()) {
    for (const int threads : {1, 3}) {
      const auto executor = make_executor(threads);
      const PackOptions options{.layout = std::string(layout->name), .executor = executor.get()};
      const auto expected = pack(*q, LinearSpec{}, options);
      std::vector<Note> notes;
      const auto weight = pack(checkpoint, module, LinearSpec{}, options, &notes);
      EXPECT_EQ(weight.ok(), expected.ok()) << layout->name << ": " << weight.status().message();
      if (!weight.ok() || !expected.ok()) {
        EXPECT_EQ(weight.status().message(), expected.status().message());
        continue;
      }
      EXPECT_TRUE(std::ranges::equal(weight->bytes(), expected->bytes())) << layout->name << ", " << threads << " threads";
      EXPECT_EQ(weight->data().channel_sums, expected->data().channel_sums) << layout->name;
      const auto back = unpack(*weight);
      EXPECT_TRUE(back.ok() && *back == *q) << layout->name;
      EXPECT_EQ(texts(notes), texts(read_notes)) << layout->name;
      ++layouts;
    }
  }
  return layouts;
}

TEST(PackModule, EveryCheckpointOfTheGoldenFilesInEveryLayout) {
  int packed = 0, checkpoints = 0;
  for (const fs::directory_entry& format : fs::directory_iterator(fs::path(NIBBLE_SOURCE_DIR) / "tests" / "golden")) {
    if (!format.is_directory()) continue;
    for (const fs::directory_entry& entry : fs::directory_iterator(format)) {
      if (!entry.is_directory()) continue;
      SCOPED_TRACE(entry.path().string());
      const auto checkpoint = Checkpoint::open(entry.path());
      ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
      ++checkpoints;
      for (const Module& module : checkpoint->modules())
        if (!module.filter) packed += expect_same_bytes(*checkpoint, module);
    }
  }
  EXPECT_GT(checkpoints, 20);
  EXPECT_GT(packed, 4 * checkpoints);
}

/// Sizes that are many blocks, the last of them partial, in every format that nibble writes.
TEST(PackModule, ManyBlocksOfEveryFormat) {
  const Scratch scratch;
  const fs::path dense = scratch / "dense.safetensors";
  Tensor w(DType::f16, {560, 1056});
  for (std::int64_t i = 0; i < w.numel(); ++i) w.set(i, static_cast<float>(i * 7919 % 113 - 50) / 64);
  ASSERT_TRUE(write_safetensors(dense, std::vector{testing::source("up.weight", std::move(w))}).ok());
  const auto floats = Checkpoint::open(dense);
  ASSERT_TRUE(floats.ok());
  EXPECT_GE(expect_same_bytes(*floats, floats->modules()[0]), 4);
  constexpr std::pair<const char*, const char*> kFormats[] = {{"awq", "u4zg32"},
                                                              {"awq", "u4b8g96"},
                                                              {"awq", "u4zc"},
                                                              {"awq", "u4zg12"},
                                                              {"gptq", "u4b8g32"},
                                                              {"gptq", "u8b128g32"},
                                                              {"gptq", "u2b2g32"},
                                                              {"gptq", "u4b8c"},
                                                              {"compressed-tensors", "u4b8g32"},
                                                              {"compressed-tensors", "u4zg96"},
                                                              {"compressed-tensors", "u3b4g32"},
                                                              {"compressed-tensors", "u8b128c"},
                                                              {"int-quantized", "s8c"},
                                                              {"float-quantized", "e4m3c"},
                                                              {"nibble-codes", "u4og32"},
                                                              {"nibble-codes", "u4zci32"},
                                                              {"fp8", "e4m3g128_e4m3b128x128"}};
  for (const auto& [format, scheme] : kFormats) {
    SCOPED_TRACE(std::string(format) + " " + scheme);
    const fs::path path = scratch / "quantized.safetensors";
    const auto made = quantize_checkpoint(dense, path, {.format = format, .scheme = *Scheme::parse(scheme)}, {.overwrite = true});
    ASSERT_TRUE(made.ok()) << made.status().message();
    const auto checkpoint = Checkpoint::open(path);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    EXPECT_GE(expect_same_bytes(*checkpoint, checkpoint->modules()[0]), 4);
  }
}

/// Channels of a group come from all bands.
TEST(PackModule, ActOrderOverManyBlocks) {
  const Scratch scratch;
  QuantTensor q;
  q.scheme = {DType::u4b8, ZeroKind::none, GroupShape::group(64), DType::f16};
  q.n = 512;
  q.k = 4096;
  for (std::int64_t i = 0; i < q.n * q.k; ++i) q.codes.push_back(static_cast<std::uint8_t>(i * 7919 % 113 % 16));
  q.scales = Tensor(DType::f16, {q.n, q.groups()});
  for (std::int64_t i = 0; i < q.scales.numel(); ++i) q.scales.set(i, static_cast<float>(1 + i % 7) / 8);
  for (std::int64_t k = 0; k < q.k; ++k) q.g_idx.push_back(static_cast<std::int32_t>(k * 5 % q.groups()));
  ASSERT_TRUE(q.validate().ok()) << q.validate().message();
  const auto written = write_module(q, "gptq");
  ASSERT_TRUE(written.ok()) << written.status().message();
  std::vector<TensorSource> sources;
  for (const ModuleTensor& t : *written) sources.push_back(testing::source("up." + t.suffix, t.tensor));
  const fs::path path = scratch / "act_order.safetensors";
  ASSERT_TRUE(write_safetensors(path, sources).ok());
  const auto checkpoint = Checkpoint::open(path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_GE(expect_same_bytes(*checkpoint, checkpoint->modules()[0]), 4);
}

TEST(PackModule, PairsOfRowsAreThoseOfPack) {
  const auto checkpoint = Checkpoint::open(fs::path(NIBBLE_SOURCE_DIR) / "tests/golden/compressed-tensors/4bit_asymmetric_group");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  const Module& module = checkpoint->modules()[0];
  ASSERT_EQ(module.n % 2, 0);
  LinearSpec spec{.m_max = 4};
  spec.epilogue.glu = true;
  const auto q = checkpoint->read(module);
  ASSERT_TRUE(q.ok());
  const auto expected = pack(*q, spec), weight = pack(*checkpoint, module, spec);
  ASSERT_TRUE(weight.ok() && expected.ok()) << weight.status().message();
  EXPECT_TRUE(weight->paired());
  EXPECT_TRUE(std::ranges::equal(weight->bytes(), expected->bytes()));
}

TEST(PackModule, TruncatedFilesAndOtherCheckpointsAreErrors) {
  const Scratch scratch;
  for (const char* golden : {"awq", "gptq", "compressed-tensors", "int-quantized"}) {
    const fs::path folder = fs::directory_iterator(fs::path(NIBBLE_SOURCE_DIR) / "tests/golden" / golden)->path();
    const fs::path from = fs::is_directory(folder) ? folder : folder.parent_path() / folder.stem().stem();
    const fs::path to = scratch / golden;
    fs::copy(from, to, fs::copy_options::recursive);
    const auto checkpoint = Checkpoint::open(to);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    fs::resize_file(to / "model.safetensors", 8);
    const auto weight = pack(*checkpoint, checkpoint->modules()[0], LinearSpec{});
    expect_error(weight.status(), StatusCode::io_error, {"model.safetensors", "ends at byte"});
    Module other = checkpoint->modules()[0];
    other.name = "another";
    expect_error(pack(*checkpoint, other, LinearSpec{}).status(), StatusCode::not_found, {"another"});
  }
}

}  // namespace
}  // namespace nibble
