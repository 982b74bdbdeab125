// Decode with online quantized activations on sm_90 (online_decode_sm90.cu), on the emulated GPU: the launcher and the kernels as they are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "emulator/float_layer.hpp"
#include "emulator/ring_memory.hpp"
#include "kernels/cuda/online_decode_sm90.cu"

namespace nibble::cuda {
namespace {

using emulator::TileZeros;

struct Case {
  int bits, group;
  TileZeros zeros;
  int act_group;  // 0: a scale a token
  int m, n, k;
  int tokens;  // of a launch
};

std::string name(const Case& c) {
  const char* const zeros[] = {"", "_zeros", "_offsets"};
  return fmt::format("u{}g{}{}_acts{}_m{}_n{}_k{}_tokens{}", c.bits, c.group, zeros[static_cast<int>(c.zeros)], c.act_group, c.m,
                     c.n, c.k, c.tokens);
}

class EmulatedOnlineDecode : public testing::TestWithParam<Case> {};

TEST_P(EmulatedOnlineDecode, GivesTheSumsOfTheLayer) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  emulator::FloatLayer layer({DType::f16, c.bits, c.group, c.zeros, c.m, c.n, c.k});
  layer.make_integers(c.act_group == 0 ? c.k : c.act_group);
  layer.expect_sums(
      layer.task(),
      [&](const LinearTask& task) {
        const bool whole = c.zeros != TileZeros::offset && c.group >= gpu_tile::kChannels &&
                           (c.act_group == 0 || c.act_group >= gpu_tile::kChannels);
        const OnlineDecodeTask online{
            .weight = task.weight,
            .acts = {.a = task.x, .type = DType::f16, .a_stride = task.x_stride, .m = c.m, .k = c.k, .group = c.act_group},
            .fold = whole ? gpu_tile::kChannels : 32,
            .epilogue = task.epilogue};
        return linear_online_decode_sm90(online, c.tokens, nullptr);
      },
      [&](int n, int k) {
        return emulator::Multiplied{layer.weight.value(n, k), 0x1p-19};
      });
}

// Scales of a token that ranks of a cluster find together, of blocks, of blocks that are half of a neighbour's.
constexpr auto kNone = TileZeros::none, kInteger = TileZeros::integer, kOffset = TileZeros::offset;
constexpr Case kCases[] = {
    {4, 128, kNone, 128, 1, 264, 4096, 1},  {4, 128, kInteger, 128, 7, 200, 1936, 8}, {4, 128, kNone, 0, 1, 136, 4096, 1},
    {4, 128, kInteger, 0, 5, 136, 8192, 8}, {4, 128, kNone, 256, 3, 72, 2816, 8},     {4, 32, kInteger, 32, 2, 72, 1408, 8},
    {4, 64, kOffset, 64, 4, 100, 1024, 8},  {8, 128, kInteger, 128, 6, 72, 784, 8},   {8, 128, kNone, 0, 8, 72, 1152, 8},
    {4, 128, kNone, 128, 11, 136, 1280, 8},
};
INSTANTIATE_TEST_SUITE_P(Decode, EmulatedOnlineDecode, testing::ValuesIn(kCases),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace nibble::cuda
