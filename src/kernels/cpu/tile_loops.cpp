// One compilation of the generic algorithm per instruction set, each in its namespace and target region.
#include "kernels/cpu/tile_loops.hpp"

#include <cstring>

#include "core/target.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nibble::cpu {

Decoder::Decoder(const PackedWeightData& packed, int rows)
    : geometry(tile::geometry(rows, packed.scheme, packed.zero_type, packed.n, packed.k)),
      scale_type(packed.scheme.scale),
      zero_type(packed.zero_type),
      zero(packed.scheme.zero),
      integer_codes(info(packed.scheme.codes).kind != DTypeKind::floating),
      flip(packed.scheme.codes == DType::s8 ? 0x80 : 0),
      bias(packed.scheme.codes == DType::s8 ? 128.0f : static_cast<float>(info(packed.scheme.codes).bias)),
      has_scale2(packed.scale2.has_value()),
      scale2(packed.scale2.value_or(1.0f)),
      multiplies_unpacked(cpu::multiplies_unpacked(packed.scheme) && !has_scale2) {
  if (!integer_codes)
    for (int code = 0; code < 256; ++code)
      table[static_cast<std::size_t>(code)] = code_value(packed.scheme.codes, static_cast<std::uint8_t>(code));
}

namespace baseline {
constexpr int kLanes = 4;
constexpr int kRows = 16;
constexpr int kTileM = 2;  // 2×4 accumulators, 4 weights and a broadcast in 16 registers
#define NIBBLE_TILE_M 2
#define NIBBLE_TILE_F16C 0
#define NIBBLE_TILE_FUSED 0
#include "kernels/cpu/tile_loops.inl"
#undef NIBBLE_TILE_M
#undef NIBBLE_TILE_F16C
#undef NIBBLE_TILE_FUSED
}  // namespace baseline
const TileIsa kBaselineTile{baseline::kRows, baseline::kTileM, baseline::kTokens, baseline::linear, baseline::decode};

#if defined(__x86_64__)
NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX2)
namespace avx2 {
constexpr int kLanes = 8;
constexpr int kRows = 16;
constexpr int kTileM = 6;  // 6×2 accumulators, 2 weights and a broadcast in 16 registers
#define NIBBLE_TILE_M 6
#define NIBBLE_TILE_F16C 1
#define NIBBLE_TILE_FUSED 1
#include "kernels/cpu/tile_loops.inl"
#undef NIBBLE_TILE_M
#undef NIBBLE_TILE_F16C
#undef NIBBLE_TILE_FUSED
}  // namespace avx2
NIBBLE_TARGET_END
const TileIsa kAvx2Tile{avx2::kRows, avx2::kTileM, avx2::kTokens, avx2::linear, avx2::decode};

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX512)
namespace avx512 {
constexpr int kLanes = 16;
constexpr int kRows = 32;
constexpr int kTileM = 8;  // 8×2 accumulators: enough to hide 4 clocks of latency on two pipes, with half as many loads
#define NIBBLE_TILE_M 8
#define NIBBLE_TILE_F16C 1
#define NIBBLE_TILE_FUSED 1
#include "kernels/cpu/tile_loops.inl"
#undef NIBBLE_TILE_M
#undef NIBBLE_TILE_F16C
#undef NIBBLE_TILE_FUSED
}  // namespace avx512
NIBBLE_TARGET_END
const TileIsa kAvx512Tile{avx512::kRows, avx512::kTileM, avx512::kTokens, avx512::linear, avx512::decode};
#endif

}  // namespace nibble::cpu
