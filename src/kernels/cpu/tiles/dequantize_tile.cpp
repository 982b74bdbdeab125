// One compilation of the loops that dequantize per instruction set.
#include "kernels/cpu/tiles/dequantize_tile.hpp"

#include <cstring>

#include "core/target.hpp"
#include "kernels/cpu/intrinsics.hpp"

namespace nibble::cpu {
namespace {

#define NIBBLE_LOOPS "kernels/cpu/tiles/dequantize_tile.inl"
#include "kernels/cpu/each_isa.inl"

}  // namespace

const DequantizeIsa kBaselineDequantize{baseline::kRows, baseline::kLanes, baseline::rows_of_n, baseline::rows_of_k};
#if defined(__x86_64__)
const DequantizeIsa kAvx2Dequantize{avx2::kRows, avx2::kLanes, avx2::rows_of_n, avx2::rows_of_k};
const DequantizeIsa kAvx512Dequantize{avx512::kRows, avx512::kLanes, avx512::rows_of_n, avx512::rows_of_k};
#endif

}  // namespace nibble::cpu
