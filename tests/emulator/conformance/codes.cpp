#include "emulator/conformance/launchers.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/simt/codes.cu"
#include "kernels/cuda/steps/decode_acts.cu"
#include "kernels/cuda/steps/recode_acts.cu"

namespace nibble::emulator {

int linear_codes_simt(const cuda::CodesTask& task) {
  use_shared_memory(cuda::shared);
  return cuda::linear_codes_simt(task, nullptr);
}
int decode_acts(const cuda::QuantizedActs& acts, DType type, const std::int32_t* perm, std::int64_t m, std::int64_t k, float* x) {
  use_shared_memory(cuda::shared);
  return cuda::decode_acts(acts, type, perm, m, static_cast<int>(k), x, nullptr);
}
int code_halves(const cuda::CodeHalves& task) {
  use_shared_memory(cuda::shared);
  return cuda::code_halves(task, nullptr);
}
int recode_acts(const RecodeTask& task) {
  use_shared_memory(cuda::shared);
  return cuda::recode_acts(task, nullptr);
}

}  // namespace nibble::emulator
