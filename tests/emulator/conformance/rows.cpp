// Kernels whose arrays in shared memory are static here.
#include "emulator/conformance/launchers.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/steps/epilogue_rows.cu"
#include "kernels/cuda/steps/norm_rows.cu"

namespace nibble::emulator {

int epilogue_rows(const epilogue::Element& epilogue, const cuda::StoredSums& sums, std::int64_t m, int n) {
  return cuda::epilogue_rows(epilogue, sums, m, n, nullptr);
}
int norm_rows(const NormTask& task) { return cuda::norm_rows(task, nullptr); }
int norm_codes(const NormTask& task, const cuda::QuantizeTask& codes) { return cuda::norm_codes(task, codes, nullptr); }

}  // namespace nibble::emulator
