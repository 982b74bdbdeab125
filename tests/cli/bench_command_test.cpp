// bench on valid input: its text, its JSON and its files. Measuring itself is tested in bench_test.cpp.
#include <algorithm>

#include "cli/cli.hpp"
#include "nibble/nibble.hpp"

namespace nibble::test {
namespace {

TEST_F(Cli, BenchOfACheckpointHasAllFields) {
  const Finished run = nibble({"bench", checkpoint("awq"), "-M", "1,4", "--min-time", "0.001", "--json", at("b.json"), "--report",
                               at("r.html"), "--reference", checkpoint("float")},
                              {.environment = {"NIBBLE_COMMIT=abc123"}});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "roofline")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  EXPECT_EQ(json["schema"], 1);
  EXPECT_EQ(json["commit"], "abc123");
  EXPECT_EQ(json["date"].get<std::string>().size(), std::string("2026-01-01T00:00:00Z").size());
  EXPECT_GT(json["device"]["read_gbytes_per_s"].get<double>(), 0);
  EXPECT_TRUE(json["device"]["cpu"].is_string());
  EXPECT_GT(json["device"]["f32_gflops"].get<double>(), 0);
  EXPECT_GT(json["device"]["int8_gops"].get<double>(), 0);
  EXPECT_GE(json["device"]["bf16_gflops"].get<double>(), 0);
  EXPECT_FALSE(json.contains("regret"));
  // Seven modules of five shapes: q and o are alike, k and v, gate and up.
  EXPECT_EQ(json["results"].size(), 2u * 4u);
  for (const auto& r : json["results"]) {
    for (const char* text : {"name", "scheme", "a_dtype", "backend", "kernel", "bound", "peak"})
      EXPECT_TRUE(r[text].is_string()) << text;
    for (const char* number : {"m", "n", "k", "median_us", "gbytes_per_s", "gflops", "roofline_percent", "memory_percent",
                               "compute_percent", "ceiling_gbytes_per_s", "ceiling_gops"}) {
      EXPECT_GT(r[number].get<double>(), 0) << number;
    }
    EXPECT_EQ(r["peak"], "f32");
    EXPECT_EQ(r["round_percents"].size(), 7u);
    EXPECT_TRUE(r["bound"] == "memory" || r["bound"] == "compute");
    EXPECT_TRUE(r["baselines"].is_object());
    EXPECT_GE(r["samples"], 7);
  }
  const std::string page = slurp(at("r.html"));
  EXPECT_TRUE(contains(page, "<html") && contains(page, "</html>") && contains(page, "down_proj"));
  EXPECT_EQ(listing(directory_), (std::vector<std::string>{"b.json", "r.html"}));
}

TEST_F(Cli, BenchOfShapes) {
  spit(at("shapes.txt"), "# a comment\n48 64 first\n3 32 128 fixed\n");
  const Finished run =
      nibble({"bench", "--shapes", at("shapes.txt"), "-M", "1,2", "--scheme", "u4b8g32", "--a-dtype", "f16", "--all-kernels",
              "--no-baselines", "--min-time", "0.001", "--json", at("b.json"), "--report", at("r.html")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  std::vector<std::int64_t> rows;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  for (const auto& r : json["results"]) {
    EXPECT_EQ(r["scheme"], "u4b8g32");
    EXPECT_EQ(r["a_dtype"], "f16");
    EXPECT_TRUE(r["baselines"].empty());
    rows.push_back(r["m"]);
  }
  EXPECT_EQ(std::count(rows.begin(), rows.end(), 3) * 3, static_cast<std::ptrdiff_t>(rows.size())) << "a fixed M overrides -M";
}

/// Each layer without and with factors of its input channels; the row says which, and so are two results compared.
TEST_F(Cli, BenchOfAPrescale) {
  spit(at("shapes.txt"), "48 64 first\n32 128 second\n");
  const std::vector<std::string> command{
      "bench", "--shapes",   at("shapes.txt"), "-M",     "1,2",        "--scheme",       "u4b8g32,s8r_s8c", "--rounds",
      "2",     "--min-time", "0.001",          "--json", at("b.json"), "--no-baselines", "--prescale"};
  const Finished run = nibble(command);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "first (prescale)") && contains(run.out, "second (prescale)")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  const auto& results = json["results"];
  ASSERT_EQ(results.size(), 2u * 2u * 2u * 2u);
  for (std::size_t i = 0; i < results.size(); ++i) EXPECT_EQ(results[i].contains("prescale"), i / 2 % 2 == 1) << results[i];
  EXPECT_EQ(nibble({"bench", "--compare", at("b.json"), at("b.json"), "--fail-under", "0.99"}).exit_code, 0);
  EXPECT_TRUE(contains(nibble({"bench", "--block", "128,192,4,2,32", "--prescale"}).err, "--shapes"));
  const Finished other = nibble({"bench", "--shapes", at("shapes.txt"), "--operation", "dequantize", "--prescale"});
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_TRUE(contains(other.err, "--prescale is of products")) << other.err;
}

/// Its four products, each alone, and the block: what it moves and computes is what they do.
TEST_F(Cli, BenchOfABlock) {
  const Finished run = nibble({"bench", "--block", "128,192,4,2,32", "-M", "1,5", "--scheme", "u4zg64,s8r_s8c,s8g32_u4b8g32",
                               "--a-dtype", "f32,bf16", "--rounds", "2", "--min-time", "0.001", "--json", at("b.json")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "gate_up (glu) (rms norm)") && contains(run.out, "block: its four products")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  const auto& results = json["results"];
  ASSERT_EQ(results.size(), 5u * 3u * 2u * 2u);
  struct Expected {
    const char* name;
    std::int64_t n, k;
  };
  constexpr Expected kExpected[] = {
      {"qkv", 256, 128}, {"o", 128, 128}, {"gate_up", 384, 128}, {"down", 128, 192}, {"block", 128, 128}};
  for (std::size_t i = 0; i < results.size(); i += 5) {
    double bytes = 0, operations = 0;
    for (std::size_t j = 0; j < 5; ++j) {
      const auto& r = results[i + j];
      const double us = r["median_us"], moved = r["gbytes_per_s"].get<double>() * us, done = r["gflops"].get<double>() * us;
      EXPECT_EQ(r["name"], kExpected[j].name);
      EXPECT_EQ(r["n"], kExpected[j].n);
      EXPECT_EQ(r["k"], kExpected[j].k);
      EXPECT_EQ(r["block"]["intermediate"], 192);
      EXPECT_EQ(r.contains("norm"), j == 0 || j == 2) << r;
      EXPECT_EQ(r.contains("glu"), j == 2) << r;
      EXPECT_EQ(r["kernel"] == "", j == 4) << r;
      EXPECT_GT(r["roofline_percent"].get<double>(), 0);
      if (j == 4) {
        EXPECT_NEAR(moved, bytes, 1e-6 * bytes);
        EXPECT_NEAR(done, operations, 1e-6 * operations);
      }
      bytes += moved, operations += done;
    }
  }
  EXPECT_EQ(nibble({"bench", "--compare", at("b.json"), at("b.json"), "--fail-under", "0.99"}).exit_code, 0);
}

/// Its bytes are those of the experts that are hit, its operations those of every pair of token and expert.
TEST_F(Cli, BenchOfExperts) {
  const Finished run =
      nibble({"bench", "--moe", "12,3,128,64", "-M", "1,40", "--routing", "uniform,zipf,hot,empty", "--scheme", "u4b8g64,s8r_s8c",
              "--a-dtype", "f32,bf16", "--rounds", "2", "--min-time", "0.001", "--json", at("b.json")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "experts (hot, 3.0 hit)") && contains(run.out, "the whole layer without its router")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  const auto& results = json["results"];
  ASSERT_EQ(results.size(), 2u * 2u * 4u * 2u);
  for (const auto& r : results) {
    const auto& moe = r["moe"];
    const double us = r["median_us"], hit = moe["hit"], bytes = moe["bytes"];
    const std::int64_t tokens = r["m"];
    EXPECT_EQ(r["name"], "experts");
    EXPECT_EQ(r["n"], 128);
    EXPECT_EQ(r["k"], 128);
    EXPECT_EQ(moe["experts"], 12);
    EXPECT_EQ(moe["top_k"], 3);
    EXPECT_EQ(moe["intermediate"], 64);
    EXPECT_NEAR(r["gbytes_per_s"].get<double>() * us * 1e3, bytes, 1e-6 * bytes);
    EXPECT_NEAR(r["gflops"].get<double>() * us * 1e3, 6.0 * static_cast<double>(tokens) * 3 * 128 * 64, 1);
    EXPECT_GE(bytes / hit, 3 * 128 * 64 * (r["scheme"] == "s8r_s8c" ? 1.0 : 0.5)) << "codes alone";
    EXPECT_GT(r["roofline_percent"].get<double>(), 0);
    if (tokens == 1)
      EXPECT_EQ(hit, 3);
    else if (moe["routing"] == "uniform" || moe["routing"] == "empty")
      EXPECT_NEAR(hit, moe["routing"] == "empty" ? 11 : 12, 0.05) << "a mean: 40 tokens miss one of 12 experts once in 10⁴ calls";
    else
      EXPECT_TRUE(hit > 9 && hit <= 12) << hit;
  }
  EXPECT_EQ(nibble({"bench", "--compare", at("b.json"), at("b.json"), "--fail-under", "0.99"}).exit_code, 0);
}
TEST_F(Cli, BenchOfConvolutions) {
  spit(at("conv.txt"),
       "# a comment\n16 9x7 24 3 first stride=2 padding=1\n3 16 5 16 3 depthwise padding=1 groups=16\n"
       "96 20x30 64 1 pointwise\n");
  const auto bench = [&](const std::string& json, std::vector<std::string> more) {
    std::vector<std::string> command{"bench", "--conv", at("conv.txt"), "--min-time", "0.001", "--json", at(json)};
    command.insert(command.end(), more.begin(), more.end());
    return nibble(command);
  };
  const Finished run = bench("a.json", {"--batch", "1,2", "--a-dtype", "f16", "--image-layout", "nhwc"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "output pixels")) << run.out;
  const auto results = nlohmann::json::parse(slurp(at("a.json")))["results"];
  ASSERT_EQ(results.size(), 2u + 1u + 2u) << "a batch in the file overrides --batch";
  const auto& r = results[1];
  EXPECT_EQ(r["name"], "first");
  EXPECT_EQ(r["m"], 2 * 5 * 4);
  EXPECT_EQ(r["n"], 24);
  EXPECT_EQ(r["k"], 9 * 16);
  EXPECT_EQ(r["scheme"], "s8t_s8c");
  EXPECT_EQ(r["peak"], "int8");
  EXPECT_EQ(r["conv"]["batch"], 2);
  EXPECT_EQ(r["conv"]["stride"], (std::vector<int>{2, 2}));
  EXPECT_EQ(r["conv"]["padding"], (std::vector<int>{1, 1, 1, 1}));
  EXPECT_EQ(r["conv"]["input"], "nhwc");
  EXPECT_NEAR(r["gflops"].get<double>(), 2e-3 * 40 * 24 * 144 / r["median_us"].get<double>(), 1e-6);
  EXPECT_TRUE(r["kernel"].get<std::string>().starts_with("conv_")) << r;
  EXPECT_EQ(results[2]["conv"]["groups"], 16);
  EXPECT_EQ(results[2]["k"], 9);
  EXPECT_TRUE(results[3]["kernel"].get<std::string>().starts_with("linear_")) << "pixels are rows of a matrix";

  const Finished weights = bench("b.json", {"--scheme", "u4b8g16", "--act-scheme", "s8r", "--layer", "first|point"});
  ASSERT_EQ(weights.exit_code, 0) << weights.err;
  EXPECT_EQ(nlohmann::json::parse(slurp(at("b.json")))["results"][0]["scheme"], "s8r_u4b8g16");
  const Finished compared = nibble({"bench", "--compare", at("a.json"), at("a.json")});
  EXPECT_EQ(compared.exit_code, 0) << compared.err;
  EXPECT_TRUE(contains(compared.out, "5 results compared")) << compared.out;

  const Finished all = bench("c.json", {"--all-kernels", "--layer", "point", "--image-layout", "nhwc:nchw"});
  ASSERT_EQ(all.exit_code, 0) << all.err;
  EXPECT_EQ(nlohmann::json::parse(slurp(at("c.json")))["regret"]["choices"], 1);

  spit(at("conv.txt"), "16 9x7 24 3 first\n16 9x7 24 3 first stride=two\n");
  const Finished wrong = bench("d.json", {});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_TRUE(contains(wrong.err, "conv.txt:2: stride is 'two'; expected a whole number from 1")) << wrong.err;
  spit(at("conv.txt"), "16 9x7 24 3 first\n");
  EXPECT_EQ(bench("d.json", {"--scheme", "s8r_s8c", "--act-scheme", "s8t"}).exit_code, 2) << "which of them?";
}

TEST_F(Cli, ConvolutionsOfACheckpoint) {
  const auto tensor = [](const std::string& name, std::vector<std::int64_t> shape) {
    return TensorSource{
        .name = name, .dtype = DType::f32, .shape = shape, .produce = [shape]() -> Result<std::vector<std::byte>> {
          Tensor t(DType::f32, shape);
          for (std::int64_t i = 0; i < t.numel(); ++i) t.set(i, static_cast<float>((i * 37) % 101) / 50 - 1);
          return t.bytes;
        }};
  };
  const std::vector<TensorSource> tensors{tensor("stem.weight", {24, 16, 3, 3}), tensor("stem.bias", {24}),
                                          tensor("depthwise.weight", {24, 1, 3, 3}), tensor("pointwise.weight", {8, 24, 1, 1})};
  ASSERT_TRUE(write_safetensors(at("float.safetensors"), tensors).ok());
  EXPECT_EQ(nibble({"quantize", at("float.safetensors"), at("q.safetensors"), "--format", "int-quantized"}).exit_code, 2)
      << "convolutions are not asked for";
  const Finished quantized =
      nibble({"quantize", at("float.safetensors"), at("q.safetensors"), "--format", "int-quantized", "--convolutions"});
  ASSERT_EQ(quantized.exit_code, 0) << quantized.err;

  const Finished table = nibble({"inspect", at("q.safetensors")});
  EXPECT_TRUE(contains(table.out, "filter") && contains(table.out, "3x3")) << table.out;
  const auto inspected = nibble_json({"inspect", at("q.safetensors"), "--reference", at("float.safetensors"), "--json"});
  ASSERT_EQ(inspected["modules"].size(), 3u);
  for (const auto& module : inspected["modules"]) {
    const std::vector<int> filter = module["name"] == "pointwise" ? std::vector{1, 1} : std::vector{3, 3};
    EXPECT_EQ(module["filter"], filter);
    EXPECT_GT(module["error"]["sqnr_db"].get<double>(), 30) << "the reference is compared in the same order";
  }
  for (const std::string layout : {"nchw", "nhwc"}) {
    const auto verified = nibble_json({"verify", at("q.safetensors"), "-M", "1,2", "--image", "6x9", "--image-layout", layout,
                                       "--act-scheme", "s8r", "--json"});
    EXPECT_EQ(verified["passed"], true) << verified;
    EXPECT_EQ(verified["results"].size(), 6u);
    EXPECT_EQ(verified["results"][1]["checked"], 2 * 6 * 9 * 24);
  }
  const Finished wrong = nibble({"verify", at("q.safetensors"), "--image", "6by9"});
  EXPECT_EQ(wrong.exit_code, 2);
  EXPECT_TRUE(contains(wrong.err, "--image is '6by9'")) << wrong.err;
  const Finished bench = nibble({"bench", at("q.safetensors")});
  EXPECT_TRUE(contains(bench.err, "--conv FILE")) << bench.err;
}

TEST_F(Cli, BenchHoldsEachModeAgainstItsPeak) {
  spit(at("shapes.txt"), "48 256 first\n32 256 second\n");
  const Finished run =
      nibble({"bench", "--shapes", at("shapes.txt"), "-M", "1,2", "--scheme", "u4b8g128,s8g128_u4b8g128,s8r_s8c", "--a-dtype",
              "f32,bf16", "--no-baselines", "--min-time", "0.001", "--json", at("b.json"), "--report", at("r.html")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "Gop/s int8")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  EXPECT_EQ(json["results"].size(), 2u * 2u * 3u * 2u);
  const bool has_bf16 = json["device"]["bf16_gflops"] > 0;
  for (const auto& r : json["results"]) {
    const bool dynamic = r["scheme"] == "s8g128_u4b8g128" || r["scheme"] == "s8r_s8c";
    EXPECT_TRUE(dynamic || r["scheme"] == "u4b8g128") << r;
    EXPECT_EQ(r["peak"], dynamic ? "int8" : r["a_dtype"] == "bf16" && has_bf16 ? "bf16" : "f32") << r;
    const double best = json["device"][r["peak"] == "int8" ? "int8_gops" : r["peak"] == "bf16" ? "bf16_gflops" : "f32_gflops"];
    EXPECT_LE(r["ceiling_gops"].get<double>(), best) << "the device's ceiling is the best of all";
  }
  EXPECT_TRUE(contains(slurp(at("r.html")), "s8r_s8c × bf16"));
}

TEST_F(Cli, BenchLeavesOutWhatASchemeDoesNotFit) {
  spit(at("conv.txt"), "16 9x7 24 3 narrow\n96 5x6 64 1 pointwise\n");
  const std::vector<std::string> command{"bench", "--conv", at("conv.txt"), "--scheme", "s8g32_u4b8g32", "--min-time", "0.001"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), command.begin(), command.end());
    return nibble(more);
  };
  const Finished run = with({"--json", at("b.json")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "left out: narrow: ")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  ASSERT_EQ(json["results"].size(), 1u);
  EXPECT_EQ(json["results"][0]["name"], "pointwise");
  EXPECT_EQ(json["left_out"].size(), 1u);
  const Finished none = with({"--layer", "narrow"});
  EXPECT_EQ(none.exit_code, 3);
  EXPECT_TRUE(contains(none.err, "narrow: ")) << none.err;
}

TEST_F(Cli, BenchLeavesOutAnActivationTypeAlone) {
  spit(at("shapes.txt"), "64 128 small\n");
  const std::vector<std::string> command{"bench", "--shapes", at("shapes.txt"), "--scheme", "s8r_s8c",
                                         "-M",    "1",        "--min-time",     "0.001"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), command.begin(), command.end());
    return nibble(more);
  };
  const Finished run = with({"--a-dtype", "e4m3,f32", "--json", at("b.json")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "left out: small × e4m3: ")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  ASSERT_EQ(json["results"].size(), 1u);
  EXPECT_EQ(json["results"][0]["a_dtype"], "f32");
  const Finished none = with({"--a-dtype", "e4m3"});
  EXPECT_EQ(none.exit_code, 3);
  EXPECT_TRUE(contains(none.err, "small: ")) << none.err;
}

TEST_F(Cli, BenchTakesActivationsThatAreCodes) {
  spit(at("shapes.txt"), "96 256 some_layer\n");
  spit(at("conv.txt"), "16 9x7 24 3 some_layer padding=1\n");
  const std::string linear = "s8r_s8c,s8zr_s8c,s8g128_u4b8g128,s8zg64_u4b8g64,s8t_s8c";
  for (const std::vector<std::string>& source : std::vector<std::vector<std::string>>{
           {"--shapes", at("shapes.txt"), "-M", "3", "--a-dtype", "s8", "--scheme", linear},
           {"--shapes", at("shapes.txt"), "-M", "3", "--a-dtype", "e4m3", "--scheme", "e4m3r_e4m3c,e4m3g128_e4m3g128"},
           {"--conv", at("conv.txt"), "--a-dtype", "s8", "--scheme", "s8t_s8c,s8zt_s8c"}}) {
    std::vector<std::string> command{"bench", "--no-baselines", "--min-time", "0.001", "--json", at("b.json")};
    command.insert(command.end(), source.begin(), source.end());
    const Finished run = nibble(command);
    ASSERT_EQ(run.exit_code, 0) << run.err;
    const auto json = nlohmann::json::parse(slurp(at("b.json")));
    for (const auto& r : json["results"]) EXPECT_GT(r["median_us"], 0) << r;
  }
  const Finished floats = nibble({"bench", "--shapes", at("shapes.txt"), "--a-dtype", "s8"});
  EXPECT_TRUE(contains(floats.err, "activations of type s8")) << floats.err;
}

TEST_F(Cli, BenchOfOperationsWithoutAProduct) {
  spit(at("shapes.txt"), "40 256 a\n3 24 512 b\n");
  const auto bench = [&](const char* operation, const char* schemes) {
    const Finished run = nibble({"bench", "--shapes", at("shapes.txt"), "-M", "1,4", "--operation", operation, "--scheme",
                                 schemes, "--a-dtype", "f32,bf16", "--min-time", "0.001", "--json", at("b.json")});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_FALSE(contains(run.out, "baseline")) << run.out;
    EXPECT_EQ(nibble({"bench", "--compare", at("b.json"), at("b.json"), "--fail-under", "1"}).exit_code, 0);
    auto json = nlohmann::json::parse(slurp(at("b.json")));
    for (const auto& r : json["results"]) {
      EXPECT_EQ(r["operation"], operation);
      EXPECT_EQ(r["bound"], "memory");
      EXPECT_GT(r["memory_percent"], 0);
      EXPECT_EQ(r["compute_percent"], 0);
      EXPECT_TRUE(r["baselines"].empty());
      const double bytes = r["gbytes_per_s"].get<double>() * r["median_us"].get<double>() * 1e3;
      const double n = r["n"], k = r["k"], m = r["m"], a = r["a_dtype"] == "f32" ? 4 : 2;
      if (r["scheme"] == "s8r_s8c") {
        EXPECT_NEAR(bytes, m * k * (a + 1) + 4 * m, 1);
      } else if (r["scheme"] == "s8zg128_u4zg128") {
        EXPECT_NEAR(bytes, m * k * (a + 1) + 2 * 4 * m * k / 128, 1);
      } else {
        EXPECT_GT(bytes, n * k * (a + 0.5));
      }
    }
    return json;
  };
  // Two layers and two types, each in two orders.
  const auto dequantized = bench("dequantize", "u4zg128");
  ASSERT_EQ(dequantized["results"].size(), 8u);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(dequantized["results"][i].value("transposed", false), i % 2 == 1);
  // Two schemes and two types; the second layer has an M of its own.
  const auto quantized = bench("quantize", "s8r_s8c,s8zg128_u4zg128,u4zg128");
  EXPECT_EQ(quantized["results"].size(), 12u);
  EXPECT_TRUE(contains(quantized["left_out"][0], "does not quantize activations"));
  const Finished none = nibble({"bench", "--shapes", at("shapes.txt"), "--operation", "quantize"});
  EXPECT_TRUE(contains(none.err, "does not quantize activations")) << none.err;
}

TEST_F(Cli, BenchOfACheckpointQuantizesActivations) {
  const Finished run = nibble({"bench", checkpoint("gptq"), "-M", "2", "--layer", "k_proj", "--act-scheme", "s8r",
                               "--no-baselines", "--min-time", "0.001", "--json", at("b.json"), "--report", at("r.html")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  EXPECT_EQ(json["results"][0]["scheme"], "s8r_u4b8g16");
  EXPECT_EQ(json["results"][0]["peak"], "int8");
  EXPECT_TRUE(contains(slurp(at("r.html")), "s8r_u4b8g16"));
}

TEST_F(Cli, BenchOfAllKernelsTellsTheRegret) {
  spit(at("shapes.txt"), "64 128 a\n");
  const Finished run = nibble({"bench", "--shapes", at("shapes.txt"), "-M", "1,16", "--all-kernels", "--no-baselines",
                               "--min-time", "0.001", "--json", at("b.json")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(contains(run.out, "regret: the chosen kernel was at most")) << run.out;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  EXPECT_EQ(json["regret"]["choices"], 2);
  EXPECT_GE(json["regret"]["max_ratio"].get<double>(), json["regret"]["median_ratio"].get<double>());
  EXPECT_GE(json["regret"]["median_ratio"].get<double>(), 1);
  EXPECT_EQ(json["regret"]["worst"]["name"], "a");
  std::size_t chosen = 0;
  for (const auto& r : json["results"]) chosen += r["chosen"].get<bool>();
  EXPECT_EQ(chosen, 2u);
}

TEST_F(Cli, CompareFindsRegressions) {
  const auto result = [](double us) {
    return nlohmann::json({{"schema", 1},
                           {"results",
                            {{{"name", "a"},
                              {"m", 1},
                              {"n", 2},
                              {"k", 3},
                              {"scheme", "u4zg128"},
                              {"a_dtype", "f32"},
                              {"backend", "cpu"},
                              {"kernel", "fast"},
                              {"median_us", us}}}}})
        .dump();
  };
  spit(at("slow.json"), result(200));
  spit(at("fast.json"), result(100));
  const Finished better = nibble({"bench", "--compare", at("slow.json"), at("fast.json"), "--fail-under", "1.9"});
  EXPECT_EQ(better.exit_code, 0) << better.out << better.err;
  EXPECT_TRUE(contains(better.out, "2.000")) << better.out;
  const Finished worse = nibble({"bench", "--compare", at("fast.json"), at("slow.json"), "--fail-under", "0.9"});
  EXPECT_EQ(worse.exit_code, 1);
  EXPECT_TRUE(contains(worse.out, "regression: 0.500 is below 0.900")) << worse.out;
  EXPECT_EQ(nibble({"bench", "--compare", at("fast.json"), at("slow.json")}).exit_code, 0) << "no limit was asked for";

  nlohmann::json other = nlohmann::json::parse(result(100));
  other["results"][0]["d_dtype"] = "f16";  // files that do not say wrote the type of the activations
  spit(at("other.json"), other.dump());
  const Finished different = nibble({"bench", "--compare", at("slow.json"), at("other.json")});
  EXPECT_EQ(different.exit_code, 2);
  EXPECT_TRUE(contains(different.err, "no result in common")) << different.err;

  nlohmann::json both = nlohmann::json::parse(result(100));  // files that do not say called back to back
  both["results"].push_back(both["results"][0]);
  both["results"][0]["calls"] = "isolated";
  both["results"][1]["calls"] = "back-to-back";
  both["results"][1]["median_us"] = 50;
  spit(at("both.json"), both.dump());
  const auto matched = nibble_json({"bench", "--compare", at("slow.json"), at("both.json"), "--json"});
  ASSERT_EQ(matched["results"].size(), 1u);
  EXPECT_EQ(matched["results"][0]["speed_up"], 4);
  EXPECT_TRUE(contains(nibble({"bench", "--compare", at("both.json"), at("both.json")}).out, "a (isolated)"));
}

}  // namespace
}  // namespace nibble::test
