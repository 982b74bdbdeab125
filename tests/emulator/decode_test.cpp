// Decode of weights in gpu_n64k128 by sm_90's kernel (decode.cu), on the emulated GPU: the launcher and the kernels as they are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "emulator/expert_rows.hpp"
#include "emulator/float_layer.hpp"
#include "emulator/memory.hpp"
#include "emulator/ring_memory.hpp"
#include "kernels/cuda/sm90/decode/decode.cu"
#include "kernels/cuda/sm90/decode/decode_experts.cu"
#include "kernels/cuda/sm90/decode/decode_float_codes.cu"
#include "kernels/cuda/table/decode_cost.hpp"

namespace nibble::cuda {

alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what the ring's kernels declare extern

namespace {

struct Case {
  emulator::FloatCase layer;
  int tokens, split;  // of a launch; of a cluster
};

std::string name(const Case& c) { return fmt::format("{}_tokens{}_split{}", emulator::name(c.layer), c.tokens, c.split); }

/// bf16 codes are multiplied as 128 + u, and f32 sums are as much larger.
emulator::Multiplied multiplied(const emulator::TileWeight& weight, DType act, int n, int k) {
  return {weight.value(n, k), act == DType::bf16 ? 0x1p-15 : 0x1p-18};
}

class EmulatedDecode : public testing::TestWithParam<Case> {};

TEST_P(EmulatedDecode, GivesTheSumsOfTheLayer) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  const emulator::FloatLayer layer(c.layer);
  const emulator::NextMemory next;
  LinearTask of_layer = layer.task();
  of_layer.next = next.weight();
  layer.expect_sums(
      of_layer,
      [&](const LinearTask& task) {
        RingRoom room;
        if (const cudaError_t e = ring_room_sm90(room)) return e;
        const Result<DecodeConfig> config =
            configure_decode(task.weight.geometry, 0, room, {.tokens = c.tokens, .split = c.split});
        return config.ok() ? linear_decode_sm90(task, *config, nullptr) : cudaErrorInvalidConfiguration;
      },
      [&](int n, int k) { return multiplied(layer.weight, layer.a_dtype, n, k); });
  next.expect_asked();
}

// Row tiles and channels with tails, more tiles than clusters, more records than the ring has stages, more tokens than a launch.
constexpr auto kNone = ZeroKind::none, kInteger = ZeroKind::integer, kOffset = ZeroKind::offset;
constexpr Case kCases[] = {
    {{DType::f16, Codes::u4, 128, kNone, 1, 264, 4096}, 1, 1},
    {{DType::bf16, Codes::u4, 128, kInteger, 7, 328, 1936}, 8, 1},
    {{DType::f16, Codes::u4, 128, kInteger, 16, 200, 1024}, 16, 1},
    {{DType::f16, Codes::u4, 128, kNone, 3, 200, 2048}, 8, 2},
    {{DType::bf16, Codes::u4, 128, kNone, 5, 136, 4096}, 8, 3},
    {{DType::f16, Codes::u4, 128, kInteger, 8, 520, 8192}, 8, 8},
    {{DType::f16, Codes::u4, 32, kInteger, 2, 72, 1408}, 8, 1},
    {{DType::bf16, Codes::u4, 64, kOffset, 9, 72, 640}, 16, 2},
    {{DType::f16, Codes::u8, 128, kNone, 1, 100, 1536}, 1, 1},
    {{DType::bf16, Codes::u8, 128, kInteger, 6, 136, 784}, 8, 1},
    {{DType::f16, Codes::u4, 128, kInteger, 4, 72, 640, true}, 8, 1},
    {{DType::f16, Codes::u4, 128, kNone, 11, 72, 530}, 8, 1},
    {{DType::f16, Codes::u4, 96, kInteger, 2, 136, 1056}, 8, 1},
    {{DType::bf16, Codes::u4, 192, kNone, 9, 72, 1536}, 16, 2},
    {{DType::f16, Codes::e4m3, 128, kNone, 1, 136, 1936}, 1, 1},
    {{DType::bf16, Codes::e4m3, 2048, kNone, 7, 72, 2048}, 8, 2},
    {{DType::f16, Codes::e2m1, 16, kNone, 3, 72, 1408}, 8, 1},
    {{DType::bf16, Codes::e2m1, 32, kNone, 9, 136, 640}, 8, 1},
    {{DType::f16, Codes::u4, 16, kInteger, 1, 136, 1056}, 1, 1},
    {{DType::bf16, Codes::u8, 48, kOffset, 12, 72, 960}, 16, 2},
    {{DType::f16, Codes::u4, 128, kInteger, 1, 136, 1024, false, true}, 1, 1},
    {{DType::bf16, Codes::u4, 128, kNone, 7, 328, 4096, false, true}, 8, 1},
    {{DType::f16, Codes::u8, 128, kInteger, 12, 136, 3072, false, true}, 8, 3},
    {{DType::f16, Codes::u4, 128, kInteger, 20, 72, 640, false, true}, 16, 1},
    {{DType::bf16, Codes::u4, 128, kNone, 7, 72, 652, true, true}, 8, 2},
};
INSTANTIATE_TEST_SUITE_P(Decode, EmulatedDecode, testing::ValuesIn(kCases), [](const auto& info) { return name(info.param); });

// ---- rows of experts

struct RingExpertCase {
  emulator::ExpertCase experts;
  int ctas;
};

class EmulatedDecodeExperts : public testing::TestWithParam<RingExpertCase> {};

TEST_P(EmulatedDecodeExperts, GivesTheSumsOfEachExpert) {
  const emulator::ExpertCase& experts = GetParam().experts;
  const int ctas = GetParam().ctas;
  emulator::use_shared_memory(shared);
  emulator::expect_sums_of_experts(
      experts,
      [&](const LinearTask& task) {
        RingRoom room;
        if (const cudaError_t e = ring_room_sm90(room)) return e;
        room.bytes -= kFewTilesBytes;
        Result<DecodeConfig> config = configure_decode(task.weight.geometry, 0, room, {.tokens = experts.tokens, .split = 1});
        if (!config.ok()) return cudaErrorInvalidConfiguration;
        config->grid = ctas;
        return linear_decode_sm90(task, *config, nullptr);
      },
      [&](const emulator::TileWeight& weight, int n, int k) { return multiplied(weight, experts.layer.a_dtype, n, k); }, true);
}

// More tiles than CTAs and fewer, tiles that several CTAs share, more records than the ring has stages, channels past K.
const RingExpertCase kExpertCases[] = {
    {{{DType::f16, Codes::u4, 128, kNone, 0, 200, 1424}, 8, {3, 0, 20, 1, 0, 8}}, 3},
    {{{DType::bf16, Codes::u4, 128, kInteger, 0, 136, 2048}, 8, {1, 1, 0, 7}}, 2},
    {{{DType::bf16, Codes::u4, 32, kNone, 0, 72, 416}, 8, {9, 2, 0, 16}}, 20},
    {{{DType::f16, Codes::u4, 64, kOffset, 0, 264, 640}, 8, {2, 30}}, 4},
    {{{DType::f16, Codes::u4, 16, kInteger, 0, 72, 1056}, 8, {5, 2}}, 1},
    {{{DType::bf16, Codes::u8, 128, kNone, 0, 72, 1536}, 8, {4, 0, 12}}, 3},
    {{{DType::bf16, Codes::e4m3, 128, kNone, 0, 136, 384}, 8, {1, 13, 2}}, 2},
    {{{DType::f16, Codes::e2m1, 32, kNone, 0, 136, 416}, 8, {2, 17, 0, 3}}, 5},
    {{{DType::bf16, Codes::e2m1, 16, kNone, 0, 72, 1408}, 8, {8, 1}}, 2},
    {{{DType::bf16, Codes::u4, 128, kNone, 0, 136, 4096}, 4, {1, 5, 0, 1}}, 3},
    {{{DType::bf16, Codes::u4, 128, kInteger, 0, 136, 1536}, 8, {0, 9, 1, 0, 1}}, 4},
    {{{DType::f16, Codes::u4, 128, kNone, 0, 72, 256}, 8, {0, 0}}, 2},  // no rows at all
};
INSTANTIATE_TEST_SUITE_P(Decode, EmulatedDecodeExperts, testing::ValuesIn(kExpertCases), [](const auto& info) {
  return fmt::format("{}_ctas{}", emulator::name(info.param.experts), info.param.ctas);
});

}  // namespace
}  // namespace nibble::cuda
