// Runs every test with several seeds: GoogleTest's --gtest_repeat is their number, NIBBLE_EMULATOR_SEED the first.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "emulator/gpu.hpp"

namespace {

constexpr int kSeeds = 3;  // copies land at once, at any time, and as late as possible (use_seed)

class Seeds : public testing::EmptyTestEventListener {
 public:
  explicit Seeds(unsigned long long first) : first_(first) {}
  void OnTestIterationStart(const testing::UnitTest&, int iteration) override {
    seed_ = first_ + static_cast<unsigned long long>(iteration);
  }
  void OnTestStart(const testing::TestInfo&) override { nibble::emulator::use_seed(seed_); }
  void OnTestEnd(const testing::TestInfo& test) override {
    if (test.result()->Failed())
      std::printf("Again: NIBBLE_EMULATOR_SEED=%llu emulator_test --gtest_filter='%s.%s'\n", seed_, test.test_suite_name(),
                  test.name());
  }

 private:
  unsigned long long first_, seed_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const char* const given = std::getenv("NIBBLE_EMULATOR_SEED");
  GTEST_FLAG_SET(repeat, given == nullptr ? kSeeds : 1);
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new Seeds(given == nullptr ? 1 : std::strtoull(given, nullptr, 10)));
  return RUN_ALL_TESTS();
}
