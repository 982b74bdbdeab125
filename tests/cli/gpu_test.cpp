// The commands with --backend cuda, on machines with a GPU; errors_test.cpp has the errors without one.
#include <map>

#include "cli/cli.hpp"
#include "nibble/nibble.hpp"

namespace nibble::test {
namespace {

class CliGpu : public Cli {
 protected:
  void SetUp() override {
    Cli::SetUp();
    if (const Status gpu = runs_here(Isa::simt); !gpu.ok()) GTEST_SKIP() << gpu.message();
  }

  std::string quantized() const {
    const Finished made =
        nibble({"quantize", checkpoint("float"), at("awq"), "--format", "awq", "--scheme", "u4zg128", "--force"});
    EXPECT_EQ(made.exit_code, 0) << made.err;
    return at("awq");
  }
};

TEST_F(CliGpu, VerifiesThere) {
  const auto json = nibble_json({"verify", quantized(), "--backend", "cuda", "--a-dtype", "f16", "-M", "1,16,33", "--json"});
  EXPECT_EQ(json["backend"], "cuda");
  ASSERT_FALSE(json["results"].empty());
  for (const auto& result : json["results"])
    EXPECT_NE(result["kernel"].get<std::string>().find("__cuda_"), std::string::npos) << result;
}

TEST_F(CliGpu, ExplainsWhatRunsThere) {
  const auto json = nibble_json({"inspect", quantized(), "--backend", "cuda", "--a-dtype", "f16", "--explain", "--json"});
  ASSERT_FALSE(json["shapes"].empty());
  for (const auto& shape : json["shapes"]) {
    EXPECT_EQ(shape["layout"], "gpu_n64k128");
    for (const auto& bucket : shape["buckets"]) EXPECT_GT(bucket["predicted_us"].get<double>(), 0);
  }
}

TEST_F(CliGpu, DequantizesToTheSameBits) {
  const std::string awq = quantized();
  for (const char* backend : {"cpu", "cuda"})
    ASSERT_EQ(nibble({"dequantize", awq, at(backend), "--dtype", "bf16", "--backend", backend}).exit_code, 0) << backend;
  EXPECT_EQ(slurp(at("cpu") + "/model.safetensors"), slurp(at("cuda") + "/model.safetensors"));
}

TEST_F(CliGpu, BenchMeasuresEveryKernel) {
  spit(at("shapes.txt"), "1024 1024 a\n");
  const Finished run = nibble({"bench", "--backend", "cuda", "--shapes", at("shapes.txt"), "-M", "1,8", "--scheme", "u4b8g128",
                               "--a-dtype", "f16", "--all-kernels", "--min-time", "0.01", "--json", at("b.json")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto json = nlohmann::json::parse(slurp(at("b.json")));
  EXPECT_EQ(json["device"]["gpu"], this_gpu()->name);
  EXPECT_GT(json["device"]["read_gbytes_per_s"].get<double>(), 0);
  EXPECT_EQ(json["regret"]["choices"], 2);
  for (const auto& r : json["results"]) {
    EXPECT_EQ(r["backend"], "cuda");
    EXPECT_GT(r["median_us"].get<double>(), 0);
    EXPECT_GT(r["memory_percent"].get<double>(), 0);
    EXPECT_LT(r["memory_percent"].get<double>(), 110);
  }
  EXPECT_EQ(nibble({"bench", "--compare", at("b.json"), at("b.json"), "--fail-under", "0.99"}).exit_code, 0);
}

/// What runs between isolated calls is subtracted: they take longer than calls that overlap, not several times as long. Those of a chain
/// take less than isolated ones on Hopper: part of their weight is in L2.
TEST_F(CliGpu, BenchMeasuresAllWaysOfCalling) {
  spit(at("shapes.txt"), "4096 4096 a\n");
  const auto json = nibble_json({"bench", "--backend", "cuda", "--shapes", at("shapes.txt"), "-M", "1", "--scheme", "u4b8g128",
                                 "--a-dtype", "f16", "--calls", "back-to-back,isolated,chain", "--min-time", "0.02", "--json"});
  ASSERT_EQ(json["results"].size(), 3u);
  const auto& together = json["results"][0];
  const auto& alone = json["results"][1];
  EXPECT_EQ(together["calls"], "back-to-back");
  EXPECT_EQ(alone["calls"], "isolated");
  EXPECT_GT(alone["median_us"].get<double>(), 0.5 * together["median_us"].get<double>());
  EXPECT_LT(alone["median_us"].get<double>(), 4 * together["median_us"].get<double>());
  EXPECT_EQ(together["baselines"].size(), alone["baselines"].size());
  const auto& told = json["results"][2];
  EXPECT_EQ(told["calls"], "chain");
  EXPECT_LT(told["median_us"].get<double>(), 1.1 * alone["median_us"].get<double>());
}

/// A block in all ways of calling, its products with norms, glu and residuals. Calls that follow each other in one are no slower than alone.
TEST_F(CliGpu, BenchMeasuresABlock) {
  const auto json = nibble_json({"bench", "--backend", "cuda", "--block", "1024,2048,8,2,128", "-M", "1,32", "--scheme",
                                 "u4b8g128,s8r_s8c,e4m3g128_e4m3b128x128", "--a-dtype", "f16", "--calls",
                                 "back-to-back,isolated,chain", "--min-time", "0.01", "--json"});
  ASSERT_EQ(json["results"].size(), 5u * 2u * 3u * 3u);
  double alone = 0;
  for (const auto& r : json["results"]) {
    EXPECT_EQ(r["backend"], "cuda");
    if (r["name"] != "block") {
      alone += r["median_us"].get<double>();
      continue;
    }
    EXPECT_LT(r["median_us"].get<double>(), 1.3 * alone) << r;
    alone = 0;
  }
}

/// A layer of experts, of few and of many tokens: no calls take less time than the bandwidth allows for the experts that they read.
TEST_F(CliGpu, BenchMeasuresExperts) {
  const auto json = nibble_json({"bench", "--backend", "cuda", "--moe", "64,4,1024,512", "-M", "1,64", "--routing",
                                 "uniform,zipf,hot,empty", "--scheme", "u4b8g128,s8r_s8c,e4m3g128_e4m3b128x128", "--a-dtype",
                                 "bf16", "--calls", "back-to-back,isolated", "--min-time", "0.01", "--json"});
  ASSERT_EQ(json["results"].size(), 3u * 4u * 2u * 2u);
  for (const auto& r : json["results"]) {
    EXPECT_EQ(r["backend"], "cuda");
    if (r["calls"] == "back-to-back") {
      EXPECT_LT(r["memory_percent"].get<double>(), 110) << r;
    }
  }
}

/// Layers of 8-bit codes on both sides next to cuBLASLt's product of the codes, whatever the output's type is.
TEST_F(CliGpu, BenchComparesCodesWithCublasLt) {
  spit(at("shapes.txt"), "1024 2048 a\n");
  for (const char* out : {"f16", "bf16", "s8"}) {
    const auto json = nibble_json({"bench", "--backend", "cuda", "--shapes", at("shapes.txt"), "-M", "1,64", "--scheme",
                                   "s8r_s8c,e4m3r_e4m3c", "--a-dtype", "s8,e4m3", "--out", out, "--min-time", "0.01", "--json"});
    if (json["device"]["f16_gflops"] == 0) GTEST_SKIP() << json["baseline"];
    ASSERT_EQ(json["results"].size(), 4u);
    for (const auto& r : json["results"]) {
      const std::string type = r["a_dtype"];
      const bool has = type == "s8" || std::string_view(out) != "s8";  // cuBLASLt writes no s8 of e4m3
      EXPECT_EQ(r["baselines"].contains("cublaslt_" + type) || r.contains("baselines_left_out"), has) << r;
    }
  }
}

/// Writing W and quantizing activations: bound by memory, and not faster than it.
TEST_F(CliGpu, BenchMeasuresWhatIsBoundByMemory) {
  spit(at("shapes.txt"), "4096 4096 a\n");
  const auto bench = [&](const char* operation, const char* schemes) {
    return nibble_json({"bench", "--backend", "cuda", "--shapes", at("shapes.txt"), "-M", "2048", "--operation", operation,
                        "--scheme", schemes, "--a-dtype", "bf16", "--min-time", "0.02", "--json"})["results"];
  };
  std::map<std::string, int> kernels;
  for (const auto& r : bench("dequantize", "u4zg128,u8b128g128")) {
    ++kernels[r["layout"]];
    EXPECT_EQ(r["operation"], "dequantize");
    EXPECT_GT(r["memory_percent"], 20) << r;
    EXPECT_LT(r["memory_percent"], 110) << r;
  }
  EXPECT_EQ(kernels, (std::map<std::string, int>{{"gpu_n64k128", 4}, {"awq", 2}, {"gptq", 4}, {"gptq_act_order", 4}}));
  const auto quantized = bench("quantize", "s8r_s8c,s8zr_s8c,s8t_s8c,e4m3r_e4m3c,e4m3g128_e4m3b128x128");
  EXPECT_EQ(quantized.size(), 5u);
  for (const auto& r : quantized) {
    EXPECT_EQ(r["d_dtype"], r["scheme"].get<std::string>().starts_with("s8") ? "s8" : "e4m3");
    EXPECT_GT(r["memory_percent"], 20) << r;
    EXPECT_LT(r["memory_percent"], 110) << r;
  }
}

}  // namespace
}  // namespace nibble::test
