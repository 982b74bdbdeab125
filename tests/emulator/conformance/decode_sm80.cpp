#include "emulator/conformance/launchers.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/sm80/decode.cu"

int nibble::emulator::linear_decode_sm80(const cuda::LinearTask& task, int split) {
  use_shared_memory(cuda::shared);
  return cuda::linear_decode_sm80(task, split, nullptr);
}
