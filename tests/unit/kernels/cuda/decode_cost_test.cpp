// The launches that are chosen for layers of the surveys: what was measured, and the bits of their results, depend on them.
#include "kernels/cuda/table/decode_cost.hpp"

#include <gtest/gtest.h>

#include <string>

#include "fmt/format.h"

namespace nibble::cuda {
namespace {

/// The room of an H100, which is an H200's too.
constexpr RingRoom kRoom{.bytes = 232448, .clusters = {0, 132, 66, 39, 30, 22, 17, 15, 15}};

struct Chosen {
  int tokens, split, grid, stages;
};
struct Case {
  int n, k, bits, span, folds, tokens;
  Chosen chosen;
};
constexpr Case kCases[] = {
    {4096, 4096, 4, 128, 0, 1, {1, 1, 64, 6}},     {4096, 14336, 4, 128, 0, 1, {1, 2, 128, 2}},
    {5120, 13824, 4, 128, 0, 1, {1, 4, 120, 6}},   {10240, 8192, 4, 128, 0, 1, {1, 2, 132, 3}},
    {57344, 8192, 4, 128, 0, 1, {1, 1, 132, 6}},   {4096, 4096, 4, 128, 0, 8, {8, 1, 64, 3}},
    {4096, 14336, 4, 128, 0, 8, {8, 5, 110, 4}},   {5120, 13824, 4, 128, 0, 8, {8, 4, 120, 3}},
    {8192, 28672, 4, 128, 0, 8, {8, 8, 120, 3}},   {24576, 1536, 4, 128, 0, 8, {8, 1, 132, 5}},
    {3584, 18944, 4, 128, 0, 16, {16, 8, 120, 3}}, {8192, 28672, 4, 128, 0, 16, {16, 8, 120, 1}},
    {12288, 6144, 4, 128, 0, 16, {16, 3, 117, 3}}, {28672, 4096, 4, 128, 0, 16, {16, 2, 132, 3}},
    {5120, 13824, 4, 64, 0, 1, {1, 1, 80, 5}},     {10240, 8192, 4, 64, 0, 1, {1, 2, 132, 2}},
    {4096, 7168, 4, 64, 0, 16, {16, 5, 110, 3}},   {8192, 8192, 8, 128, 0, 8, {8, 2, 132, 1}},
    {8192, 28672, 8, 128, 0, 16, {8, 8, 120, 1}},  {1024, 524288, 4, 128, 0, 16, {1, 6, 96, 1}},
    {3584, 18944, 4, 128, 1, 1, {1, 8, 120, 6}},   {4096, 4096, 4, 128, 1, 1, {1, 1, 64, 6}},
    {4096, 7168, 4, 128, 1, 8, {8, 5, 110, 5}},    {8192, 28672, 4, 128, 1, 8, {8, 8, 120, 4}},
    {28672, 4096, 4, 128, 1, 8, {8, 1, 132, 4}},   {4096, 14336, 4, 32, 4, 1, {1, 1, 64, 5}},
    {4096, 7168, 4, 32, 4, 8, {8, 1, 64, 3}},      {5120, 13824, 4, 32, 4, 8, {8, 8, 120, 4}},
};

TEST(DecodeConfig, IsTheMeasuredOne) {
  for (const Case& c : kCases) {
    const std::string where =
        fmt::format("N={} K={}, {} bits, {} channels, {} folds, {} tokens", c.n, c.k, c.bits, c.span, c.folds, c.tokens);
    const Result<DecodeConfig> config =
        configure_decode({.n = c.n, .k = c.k, .bits = c.bits, .span = c.span}, c.folds, kRoom, {.tokens = c.tokens});
    ASSERT_TRUE(config.ok()) << where << ": " << config.status().message();
    EXPECT_EQ(config->tokens, c.chosen.tokens) << where;
    EXPECT_EQ(config->split, c.chosen.split) << where;
    EXPECT_EQ(config->grid, c.chosen.grid) << where;
    EXPECT_EQ(config->stages, c.chosen.stages) << where;
    EXPECT_LE(config->smem, kRoom.bytes) << where;
  }
}

TEST(DecodeConfig, RefusesWhatDoesNotFit) {
  const RingRoom small{.bytes = 16384, .clusters = kRoom.clusters};
  EXPECT_EQ(configure_decode({.n = 4096, .k = 4096}, 0, small, {}).status().code(), StatusCode::unsupported);
  EXPECT_EQ(configure_decode({.n = 4096, .k = 4096}, 0, {.bytes = kRoom.bytes}, {}).status().code(), StatusCode::unsupported);
}

}  // namespace
}  // namespace nibble::cuda
