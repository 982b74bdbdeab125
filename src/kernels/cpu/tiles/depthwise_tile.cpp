// One compilation of the depthwise loops per vector width.
#include "kernels/cpu/tiles/depthwise_tile.hpp"

#include <cstring>

#include "core/target.hpp"
#include "kernels/cpu/intrinsics.hpp"
#include "layouts/tile.hpp"

namespace nibble::cpu {
namespace {

#define NIBBLE_LOOPS "kernels/cpu/tiles/depthwise_tile.inl"
#include "kernels/cpu/each_isa.inl"

}  // namespace

const DepthwiseIsa kBaselineDepthwise{baseline::multiply};
#if defined(__x86_64__)
const DepthwiseIsa kAvx2Depthwise{avx2::multiply}, kAvx512Depthwise{avx512::multiply};
#endif

}  // namespace nibble::cpu
