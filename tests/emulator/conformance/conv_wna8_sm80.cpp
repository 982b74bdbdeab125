#include "emulator/conformance/launchers.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/conv_wna8.cu"

int nibble::emulator::conv_wna8_sm80(const cuda::ConvTask& task) {
  use_shared_memory(cuda::shared);
  return cuda::conv_wna8_sm80(task, nullptr);
}
