// Decode on GPUs without TMA (decode.cu), on the emulated GPU: the launcher and the kernels as they are.
#include <gtest/gtest.h>

#include "emulator/float_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/decode.cu"

namespace nibble::cuda {
namespace {

class EmulatedDecodeSm80 : public testing::TestWithParam<emulator::FloatCase> {};

TEST_P(EmulatedDecodeSm80, GivesTheSumsOfTheLayer) {
  emulator::use_shared_memory(shared);
  const emulator::FloatLayer layer(GetParam());
  layer.expect_sums(
      layer.task(), [](const LinearTask& task) { return linear_decode_sm80(task, 1, nullptr); },
      // bf16 codes are multiplied as 128 + u, and f32 sums are as much larger
      [&](int n, int k) {
        return emulator::Multiplied{layer.weight.value(n, k), layer.a_dtype == DType::bf16 ? 0x1p-15 : 0x1p-18};
      });
}

TEST_P(EmulatedDecodeSm80, GivesThemWithCtasThatDivideK) {
  emulator::use_shared_memory(shared);
  const emulator::FloatLayer layer(GetParam());
  const gpu_tile::Geometry& weight = layer.task().weight.geometry;
  const int chunks = decode_sm80_chunks(weight.records());
  for (const int split : {2, 3})  // of 1 to 8 chunks: unequal parts, and fewer chunks than CTAs
    layer.expect_split_sums(
        decode_sm80_bytes(weight.tiles(), std::min(split, chunks)),
        [&](const LinearTask& task) { return linear_decode_sm80(task, split, nullptr); },
        [&](int n, int k) {
          return emulator::Multiplied{layer.weight.value(n, k), layer.a_dtype == DType::bf16 ? 0x1p-15 : 0x1p-18};
        });
}

/// A GPU of 132 multiprocessors is filled by four CTAs of 16 row tiles, by two of 64, and without any split by 128.
TEST(DecodeSm80, DividesKWhereMultiprocessorsWouldBeIdle) {
  EXPECT_EQ(decode_sm80_ranks(16, 32, 132), 4);
  EXPECT_EQ(decode_sm80_ranks(64, 32, 132), 2);
  EXPECT_EQ(decode_sm80_ranks(64, 112, 132), 2);
  EXPECT_EQ(decode_sm80_ranks(128, 64, 132), 1);
  EXPECT_EQ(decode_sm80_ranks(448, 32, 132), 1);
  EXPECT_EQ(decode_sm80_ranks(8, 8, 132), 1);  // one chunk
}

constexpr emulator::FloatCase kCases[] = {
    {DType::f16, Codes::u4, 128, ZeroKind::none, 1, 136, 8192},
    {DType::bf16, Codes::u4, 128, ZeroKind::integer, 7, 72, 1936},
    {DType::f16, Codes::u4, 32, ZeroKind::integer, 16, 72, 1408},
    {DType::bf16, Codes::u4, 64, ZeroKind::offset, 21, 72, 640},
    {DType::f16, Codes::u4, 128, ZeroKind::integer, 3, 100, 530},
    {DType::f16, Codes::u4, 128, ZeroKind::none, 5, 72, 640, true},
    {DType::bf16, Codes::u4, 96, ZeroKind::none, 2, 72, 672},
    {DType::f16, Codes::u4, 192, ZeroKind::integer, 4, 72, 960},
    {DType::f16, Codes::u4, 16, ZeroKind::integer, 3, 72, 672},
    {DType::bf16, Codes::u4, 48, ZeroKind::offset, 12, 72, 480},
    {DType::f16, Codes::u4, 128, ZeroKind::none, 3, 72, 1152, false, true},
    {DType::bf16, Codes::e2m1, 128, ZeroKind::none, 3, 72, 1152},
    {DType::f16, Codes::e2m1, 16, ZeroKind::none, 12, 72, 672},
};
INSTANTIATE_TEST_SUITE_P(Sm80, EmulatedDecodeSm80, testing::ValuesIn(kCases),
                         [](const auto& info) { return emulator::name(info.param); });

}  // namespace
}  // namespace nibble::cuda
