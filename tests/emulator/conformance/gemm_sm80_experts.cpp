#include "emulator/conformance/launchers.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/gemm_experts.cu"

int nibble::emulator::linear_gemm_sm80_experts(const cuda::LinearTask& task, int rows) {
  use_shared_memory(cuda::shared);
  return cuda::linear_gemm_sm80_experts(task, rows, nullptr);
}
