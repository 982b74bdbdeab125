#include "emulator/conformance/launchers.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/wna8_experts.cu"

int nibble::emulator::linear_wna8_sm80_experts(const cuda::Wna8Task& task, int rows) {
  use_shared_memory(cuda::shared);
  return cuda::linear_wna8_sm80_experts(task, rows, nullptr);
}
