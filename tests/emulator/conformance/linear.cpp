#include "emulator/conformance/launchers.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) float shared[emulator::kSharedBytes / sizeof(float)];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/simt/linear.cu"

int nibble::emulator::linear_simt(const cuda::LinearTask& task) {
  use_shared_memory(reinterpret_cast<std::uint8_t*>(cuda::shared));
  return cuda::linear_simt(task, nullptr);
}
