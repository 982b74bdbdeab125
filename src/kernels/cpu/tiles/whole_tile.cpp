// One compilation of the loops over whole rows per instruction set.
#include "kernels/cpu/tiles/whole_tile.hpp"

#include <cstring>

#include "core/target.hpp"
#include "kernels/cpu/intrinsics.hpp"

namespace nibble::cpu {
namespace {

#define NIBBLE_LOOPS "kernels/cpu/tiles/whole_tile.inl"
#include "kernels/cpu/each_isa.inl"

}  // namespace

const PatchIsa kBaselinePatches{baseline::sum_pixels, baseline::conv_whole};
const DotIsa kBaselineWhole{baseline::kRows, baseline::kLanes, baseline::kTile, baseline::linear_whole};
#if defined(__x86_64__)
const PatchIsa kAvx2Patches{avx2::sum_pixels, avx2::conv_whole}, kAvx2VnniPatches{avx2vnni::sum_pixels, avx2vnni::conv_whole};
const PatchIsa kAmxPatches{amx::sum_pixels, amx::conv_whole};
const PatchIsa kAvx512Patches{avx512::sum_pixels, avx512::conv_whole},
    kAvx512VnniPatches{avx512vnni::sum_pixels, avx512vnni::conv_whole};
const DotIsa kAvx2Whole{avx2::kRows, avx2::kLanes, avx2::kTile, avx2::linear_whole};
const DotIsa kAvx2VnniWhole{avx2vnni::kRows, avx2vnni::kLanes, avx2vnni::kTile, avx2vnni::linear_whole};
const DotIsa kAvx512Whole{avx512::kRows, avx512::kLanes, avx512::kTile, avx512::linear_whole};
const DotIsa kAvx512VnniWhole{avx512vnni::kRows, avx512vnni::kLanes, avx512vnni::kTile, avx512vnni::linear_whole};
const DotIsa kAmxWhole{amx::kRows, amx::kLanes, amx::kTile, amx::linear_whole, amx::kTaskBytes, amx::kTaskTokens};
#elif defined(__aarch64__)
const PatchIsa kDotprodPatches{dotprod::sum_pixels, dotprod::conv_whole}, kI8mmPatches{i8mm::sum_pixels, i8mm::conv_whole};
const DotIsa kDotprodWhole{dotprod::kRows, dotprod::kLanes, dotprod::kTile, dotprod::linear_whole};
const DotIsa kI8mmWhole{i8mm::kRows, i8mm::kLanes, i8mm::kTile, i8mm::linear_whole};
#endif

}  // namespace nibble::cpu
