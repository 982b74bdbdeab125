// int8 activations times the integer codes of gpu_n64k128 on every GPU (codes.cu), on the emulated one: the launcher and the kernels as they
// are.
#include <gtest/gtest.h>

#include "emulator/codes_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/simt/codes.cu"

namespace nibble::cuda {
namespace {

class EmulatedCodes : public testing::TestWithParam<emulator::CodesCase> {};

TEST_P(EmulatedCodes, GivesTheSumsOfTheLayer) {
  emulator::use_shared_memory(shared);
  const emulator::CodesLayer layer(GetParam());
  layer.expect_sums([](const CodesTask& task) { return linear_codes_simt(task, nullptr); });
}

constexpr ZeroKind kNone = ZeroKind::none, kZeros = ZeroKind::integer, kOffsets = ZeroKind::offset;

// Folds of 128, 64 and 32; slots of 16 and 8; blocks below, equal to and above the groups, that end within a word; tails of K, rows and
// tokens; one token, few, many; act-order; exact sums.
constexpr emulator::CodesCase kCases[] = {
    {4, 128, kNone, 0, kNone, 1, 72, 1936},
    {4, 128, kZeros, 128, kNone, 7, 200, 640},
    {4, 128, kZeros, 32, kZeros, 5, 72, 400},
    {4, 64, kOffsets, 0, kOffsets, 6, 40, 530},
    {4, 32, kZeros, 64, kOffsets, 4, 72, 416},
    {8, 128, kZeros, 256, kZeros, 9, 100, 2700},
    {8, 96, kOffsets, 96, kOffsets, 3, 72, 672},
    {4, 16, kNone, 0, kNone, 1, 72, 1936},
    {4, 8, kZeros, 8, kZeros, 5, 72, 536},
    {4, 48, kOffsets, 24, kNone, 6, 40, 528},
    {8, 40, kZeros, 20, kOffsets, 5, 40, 203},
    {4, 24, kZeros, 3, kZeros, 3, 37, 203},
    {4, 1403, kZeros, 100, kOffsets, 6, 37, 1403},
    {4, 32, kZeros, 0, kZeros, 5, 72, 416, true},
    {4, 1040, kZeros, 0, kZeros, 9, 72, 1040, false, true},
    {8, 2700, kNone, 0, kNone, 40, 200, 2700, false, true},
    {8, 203, kZeros, 0, kZeros, 3, 5, 203, true, true},
    {4, 7, kNone, 0, kZeros, 1, 1, 7, false, true},
};
INSTANTIATE_TEST_SUITE_P(Simt, EmulatedCodes, testing::ValuesIn(kCases),
                         [](const auto& info) { return emulator::name(info.param); });

}  // namespace
}  // namespace nibble::cuda
