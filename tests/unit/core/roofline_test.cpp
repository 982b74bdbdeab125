// The ceilings of this machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nibble/device.hpp"
#include "nibble/parallel.hpp"

namespace nibble {
namespace {

TEST(Roofline, IsMeasured) {
  auto executor = make_executor(1);
  const Roofline roofline = measure_roofline(*executor);
  EXPECT_GT(roofline.read_gbytes_per_s, 0.1);
  EXPECT_GT(roofline.f32_gflops, 0.1);
  EXPECT_EQ(roofline.threads, 1);
}

}  // namespace
}  // namespace nibble
