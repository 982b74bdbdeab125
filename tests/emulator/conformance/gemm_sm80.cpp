#include "emulator/conformance/launchers.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/gemm.cu"

int nibble::emulator::linear_gemm_sm80(const cuda::LinearTask& task, int split) {
  use_shared_memory(cuda::shared);
  return cuda::linear_gemm_sm80(task, split, nullptr);
}
