// Decode with online quantized activations on sm_90 (wna8_decode.cu), on the emulated GPU: the launcher and the kernels as they are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "emulator/float_layer.hpp"
#include "emulator/memory.hpp"
#include "emulator/ring_memory.hpp"
#include "kernels/cuda/sm90/decode/wna8_decode.cu"
#include "kernels/cuda/table/decode_cost.hpp"
#include "kernels/cuda/tasks/decode.hpp"

namespace nibble::cuda {
namespace {

struct Case {
  emulator::FloatCase layer;
  int act_group;  // 0: a scale a token
  int tokens;     // of a launch
};

std::string name(const Case& c) { return fmt::format("{}_acts{}_tokens{}", emulator::name(c.layer), c.act_group, c.tokens); }

class EmulatedWna8Decode : public testing::TestWithParam<Case> {};

TEST_P(EmulatedWna8Decode, GivesTheSumsOfTheLayer) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  emulator::FloatLayer layer(c.layer);
  layer.make_integers(c.act_group == 0 ? c.layer.k : c.act_group);
  const emulator::NextMemory next;
  layer.expect_sums(
      layer.task(),
      [&](const LinearTask& task) {
        const bool whole = c.layer.zeros != ZeroKind::offset && gpu_tile::span(c.layer.group) == gpu_tile::kChannels &&
                           (c.act_group == 0 || c.act_group >= gpu_tile::kChannels);
        const Wna8DecodeTask online{.weight = task.weight,
                                    .acts = {.a = task.x,
                                             .type = DType::f16,
                                             .a_stride = task.x_stride,
                                             .m = c.layer.m,
                                             .k = c.layer.k,
                                             .group = c.act_group},
                                    .fold = whole ? gpu_tile::kChannels : 32,
                                    .epilogue = task.epilogue,
                                    .next = next.weight()};
        RingRoom room;
        if (const cudaError_t e = ring_room_sm90(room)) return e;
        const Result<DecodeConfig> config =
            configure_decode(online.weight.geometry, gpu_tile::kChannels / online.fold, room, {.tokens = c.tokens});
        return config.ok() ? linear_wna8_decode_sm90(online, *config, nullptr) : cudaErrorInvalidConfiguration;
      },
      [&](int n, int k) {
        return emulator::Multiplied{layer.weight.value(n, k), 0x1p-19};
      });
  next.expect_asked();
}

// Scales of a token that ranks of a cluster find together, of blocks, of blocks that are half of a neighbour's.
constexpr auto kNone = ZeroKind::none, kInteger = ZeroKind::integer, kOffset = ZeroKind::offset;
constexpr Case kCases[] = {
    {{DType::f16, Codes::u4, 128, kNone, 1, 264, 4096}, 128, 1}, {{DType::f16, Codes::u4, 128, kInteger, 7, 200, 1936}, 128, 8},
    {{DType::f16, Codes::u4, 128, kNone, 1, 136, 4096}, 0, 1},   {{DType::f16, Codes::u4, 128, kInteger, 5, 136, 8192}, 0, 8},
    {{DType::f16, Codes::u4, 128, kNone, 3, 72, 2816}, 256, 8},  {{DType::f16, Codes::u4, 32, kInteger, 2, 72, 1408}, 32, 8},
    {{DType::f16, Codes::u4, 64, kOffset, 4, 100, 1024}, 64, 8}, {{DType::f16, Codes::u8, 128, kInteger, 6, 72, 784}, 128, 8},
    {{DType::f16, Codes::u8, 128, kNone, 8, 72, 1152}, 0, 8},    {{DType::f16, Codes::u4, 128, kNone, 11, 136, 1280}, 128, 8},
    {{DType::f16, Codes::u4, 96, kInteger, 3, 72, 1056}, 32, 8}, {{DType::f16, Codes::u4, 192, kNone, 2, 72, 1344}, 0, 8},
};
INSTANTIATE_TEST_SUITE_P(Decode, EmulatedWna8Decode, testing::ValuesIn(kCases),
                         [](const auto& info) { return name(info.param); });

}  // namespace
}  // namespace nibble::cuda
