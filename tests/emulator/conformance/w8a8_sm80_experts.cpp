#include "emulator/conformance/launchers.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/w8a8_experts.cu"

int nibble::emulator::linear_w8a8_sm80_experts(const cuda::W8A8Task& task, int rows) {
  use_shared_memory(cuda::shared);
  return cuda::linear_w8a8_sm80_experts(task, rows, nullptr);
}
