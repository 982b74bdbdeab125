#include "emulator/conformance/launchers.hpp"
#include "emulator/conformance/status.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/w8a8.cu"
#include "kernels/cuda/sm80/w8a8_experts.cu"

nibble::Status nibble::cuda::launch_w8a8_sm80(const W8A8Task& task, int split, Stream) {
  emulator::use_shared_memory(shared);
  return emulator::status_of(linear_w8a8_sm80(task, split, nullptr));
}

int nibble::emulator::linear_w8a8_sm80_experts(const cuda::W8A8Task& task, int rows) {
  use_shared_memory(cuda::shared);
  return cuda::linear_w8a8_sm80_experts(task, rows, nullptr);
}
