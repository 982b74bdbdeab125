// Kernels whose arrays in shared memory are static here.
#include "emulator/conformance/launchers.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/steps/quantize_acts.cu"
#include "kernels/cuda/steps/quantize_blocks.cu"
#include "quantize/act_rule.hpp"

std::uint16_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t, __nv_fp8_interpretation_t) {
  using nibble::act_rule::to_e4m3;
  return static_cast<std::uint16_t>(to_e4m3(v.y) << 8 | to_e4m3(v.x));
}

namespace nibble::emulator {

int quantize_acts(const cuda::QuantizeTask& task) { return cuda::quantize_acts(task, nullptr); }
int quantize_patches(const cuda::QuantizeTask& task, const cuda::PatchRows& patches) {
  return cuda::quantize_blocks(task, patches, nullptr);
}
int sum_codes(const cuda::QuantizedActs& acts, std::int64_t m, std::int64_t k, std::int32_t* sums) {
  return cuda::sum_codes(acts.codes, acts.pitch, m, k, sums, nullptr);
}

}  // namespace nibble::emulator
