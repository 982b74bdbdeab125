#include "emulator/conformance/launchers.hpp"

namespace nibble::cuda {
namespace {
alignas(1024) int sort_memory[emulator::kSharedBytes / sizeof(int)];  // what kernels declare extern
}
}  // namespace nibble::cuda

#include "kernels/cuda/steps/experts.cu"

namespace nibble::emulator {

int sort_rows(const cuda::SortTask& task) {
  use_shared_memory(reinterpret_cast<std::uint8_t*>(cuda::sort_memory));
  return cuda::sort_rows(task, nullptr);
}
int gather_expert_rows(const cuda::GatherRowsTask& task) { return cuda::gather_expert_rows(task, nullptr); }
int combine_rows(const cuda::CombineTask& task) { return cuda::combine_rows(task, nullptr); }

}  // namespace nibble::emulator
