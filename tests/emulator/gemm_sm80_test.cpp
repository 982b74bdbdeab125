// The sm_80 GEMM of weights in gpu_n64k128 and 16-bit activations (gemm_kernel.cuh), on the emulated GPU: the
// launchers and the kernels as they are.
#include <gtest/gtest.h>

#include "emulator/float_layer.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/gemm.cu"

namespace nibble::cuda {
namespace {

class EmulatedGemmSm80 : public testing::TestWithParam<emulator::FloatCase> {};

TEST_P(EmulatedGemmSm80, GivesTheSumsOfTheLayer) {
  emulator::use_shared_memory(shared);
  const emulator::FloatLayer layer(GetParam());
  layer.expect_sums(
      layer.task(), [](const LinearTask& task) { return linear_gemm_sm80(task, nullptr); },
      [&](int n, int k) { return emulator::rounded_weight(layer.weight, layer.a_dtype, n, k); });
}

// Tiles of every shape; few multiprocessors choose the one with the fewest cycles.
constexpr emulator::FloatCase kCases[] = {
    {DType::f16, Codes::u4, 128, ZeroKind::none, 17, 72, 1424},
    {DType::bf16, Codes::u4, 128, ZeroKind::integer, 40, 200, 640},
    {DType::f16, Codes::u4, 128, ZeroKind::none, 70, 328, 528},
    {DType::f16, Codes::u4, 128, ZeroKind::integer, 130, 520, 384},
    {DType::f16, Codes::u4, 32, ZeroKind::integer, 33, 72, 416},
    {DType::bf16, Codes::u4, 64, ZeroKind::offset, 20, 100, 640},
    {DType::f16, Codes::u4, 1024, ZeroKind::integer, 40, 72, 1024},
    {DType::f16, Codes::u8, 128, ZeroKind::integer, 33, 136, 784},
    {DType::bf16, Codes::u8, 128, ZeroKind::none, 64, 72, 530},
    {DType::f16, Codes::u4, 128, ZeroKind::integer, 20, 72, 640, true},
    {DType::f16, Codes::u4, 96, ZeroKind::integer, 18, 72, 672},
    {DType::bf16, Codes::u4, 192, ZeroKind::none, 40, 72, 960},
    {DType::f16, Codes::u4, 128, ZeroKind::integer, 20, 72, 640, false, true},
    {DType::bf16, Codes::u4, 128, ZeroKind::none, 18, 72, 532, true, true},
    {DType::f16, Codes::e4m3, 128, ZeroKind::none, 20, 136, 640},
    {DType::bf16, Codes::e2m1, 32, ZeroKind::none, 70, 72, 416},
};
INSTANTIATE_TEST_SUITE_P(Sm80, EmulatedGemmSm80, testing::ValuesIn(kCases),
                         [](const auto& info) { return emulator::name(info.param); });

}  // namespace
}  // namespace nibble::cuda
