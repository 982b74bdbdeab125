// The kernels of every GPU: weights in gpu_n64k128 and float activations (linear.cu), on the emulated GPU, the launcher and the kernels as
// they are.
#include <gtest/gtest.h>

#include "emulator/float_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) float shared[emulator::kSharedBytes / sizeof(float)];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/simt/linear.cu"

namespace nibble::cuda {
namespace {

class EmulatedSimt : public testing::TestWithParam<emulator::FloatCase> {};

TEST_P(EmulatedSimt, GivesTheSumsOfTheLayer) {
  emulator::use_shared_memory(reinterpret_cast<std::uint8_t*>(shared));
  const emulator::FloatLayer layer(GetParam());
  layer.expect_sums(
      layer.task(), [](const LinearTask& task) { return linear_simt(task, nullptr); },
      [&](int n, int k) {
        return emulator::Multiplied{layer.weight.value(n, k), 0x1p-19};
      });
}

constexpr emulator::FloatCase kCases[] = {
    {DType::f16, Codes::u4, 128, ZeroKind::none, 1, 72, 1936},
    {DType::bf16, Codes::u4, 128, ZeroKind::integer, 7, 200, 640},
    {DType::f16, Codes::u4, 32, ZeroKind::offset, 4, 72, 416},
    {DType::f16, Codes::u8, 128, ZeroKind::integer, 3, 100, 530},
    {DType::f16, Codes::u4, 64, ZeroKind::integer, 5, 72, 640, true},
    {DType::bf16, Codes::u4, 96, ZeroKind::integer, 3, 72, 672},
    {DType::f16, Codes::u8, 192, ZeroKind::offset, 2, 100, 530},
    {DType::f16, Codes::u4, 16, ZeroKind::none, 1, 72, 1936},
    {DType::bf16, Codes::u4, 8, ZeroKind::integer, 5, 72, 536},
    {DType::f16, Codes::u4, 24, ZeroKind::offset, 6, 40, 528},
    {DType::f16, Codes::u8, 48, ZeroKind::integer, 1, 72, 480},
    {DType::bf16, Codes::u8, 8, ZeroKind::none, 3, 100, 400},
    {DType::f16, Codes::e2m1, 32, ZeroKind::none, 3, 72, 640},
    {DType::bf16, Codes::e2m1, 16, ZeroKind::none, 1, 72, 528},
    {DType::f16, Codes::e4m3, 128, ZeroKind::none, 5, 100, 530},
    {DType::bf16, Codes::e4m3, 1024, ZeroKind::none, 1, 72, 1024},
};
INSTANTIATE_TEST_SUITE_P(Simt, EmulatedSimt, testing::ValuesIn(kCases),
                         [](const auto& info) { return emulator::name(info.param); });

}  // namespace
}  // namespace nibble::cuda
