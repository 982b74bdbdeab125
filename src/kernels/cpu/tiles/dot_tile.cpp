// One compilation of the dot-product loops per instruction set.
#include "kernels/cpu/tiles/dot_tile.hpp"

#include <cstring>
#include <type_traits>

#include "core/target.hpp"
#include "kernels/cpu/intrinsics.hpp"
#include "kernels/cpu/tiles/ahead.hpp"

namespace nibble::cpu {
namespace {

#define NIBBLE_LOOPS "kernels/cpu/tiles/dot_tile.inl"
#include "kernels/cpu/each_isa.inl"

}  // namespace

const DotIsa kBaselineFixed{baseline::kRows, baseline::kLanes, baseline::kFixedTile, baseline::linear_fixed};
const DotIsa kBaselineInt8{baseline::kRows, baseline::kLanes, baseline::kInt8Tile, baseline::linear_int8};
#if defined(__x86_64__)
const DotIsa kAvx2Fixed{avx2::kRows, avx2::kLanes, avx2::kFixedTile, avx2::linear_fixed};
const DotIsa kAvx2Int8{avx2::kRows, avx2::kLanes, avx2::kInt8Tile, avx2::linear_int8};
const DotIsa kAvx2VnniFixed{avx2vnni::kRows, avx2vnni::kLanes, avx2vnni::kFixedTile, avx2vnni::linear_fixed};
const DotIsa kAvx2VnniInt8{avx2vnni::kRows, avx2vnni::kLanes, avx2vnni::kInt8Tile, avx2vnni::linear_int8};
const DotIsa kAvx512Fixed{avx512::kRows, avx512::kLanes, avx512::kFixedTile, avx512::linear_fixed};
const DotIsa kAvx512Int8{avx512::kRows, avx512::kLanes, avx512::kInt8Tile, avx512::linear_int8};
const DotIsa kAvx512VnniFixed{avx512vnni::kRows, avx512vnni::kLanes, avx512vnni::kFixedTile, avx512vnni::linear_fixed};
const DotIsa kAvx512VnniInt8{avx512vnni::kRows, avx512vnni::kLanes, avx512vnni::kInt8Tile, avx512vnni::linear_int8};
const DotIsa kAmxInt8{amx::kRows, amx::kLanes, amx::kInt8Tile, amx::linear_int8, amx::kTaskBytes, amx::kTaskTokens};
#elif defined(__aarch64__)
const DotIsa kDotprodFixed{dotprod::kRows, dotprod::kLanes, dotprod::kFixedTile, dotprod::linear_fixed};
const DotIsa kDotprodInt8{dotprod::kRows, dotprod::kLanes, dotprod::kInt8Tile, dotprod::linear_int8};
const DotIsa kI8mmFixed{i8mm::kRows, i8mm::kLanes, i8mm::kFixedTile, i8mm::linear_fixed};
const DotIsa kI8mmInt8{i8mm::kRows, i8mm::kLanes, i8mm::kInt8Tile, i8mm::linear_int8};
#endif

}  // namespace nibble::cpu
