#include "emulator/conformance/launchers.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/wna8.cu"
#include "kernels/cuda/sm80/wna8_floats.cu"
#include "kernels/cuda/sm80/wna8_halves.cu"

int nibble::emulator::linear_wna8_sm80(const cuda::Wna8Task& task, int split) {
  use_shared_memory(cuda::shared);
  return cuda::wna8_sm80_launcher(task)(task, split, nullptr);
}
