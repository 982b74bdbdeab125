// One compilation of the float loops per instruction set.
#include "kernels/cpu/tiles/float_tile.hpp"

#include <cstring>

#include "core/target.hpp"
#include "kernels/cpu/intrinsics.hpp"

namespace nibble::cpu {
namespace {

#define NIBBLE_LOOPS "kernels/cpu/tiles/float_tile.inl"
#include "kernels/cpu/each_isa.inl"

}  // namespace

const FloatIsa kBaselineFloat{baseline::kRows, baseline::kLanes, baseline::kTileM, baseline::kTokens,
                              baseline::kFew,  baseline::linear, baseline::decode};
#if defined(__x86_64__)
const FloatIsa kAvx2Float{avx2::kRows, avx2::kLanes, avx2::kTileM, avx2::kTokens, avx2::kFew, avx2::linear, avx2::decode};
const FloatIsa kAvx512Float{avx512::kRows, avx512::kLanes, avx512::kTileM, avx512::kTokens,
                            avx512::kFew,  avx512::linear, avx512::decode};
const FloatIsa kAvx512Bf16Float{avx512bf16::kRows, avx512bf16::kLanes, avx512bf16::kTileM, avx512bf16::kTokens,
                                avx512bf16::kFew,  avx512bf16::linear, avx512bf16::decode};
#endif

}  // namespace nibble::cpu
