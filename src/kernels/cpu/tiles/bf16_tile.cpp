// The bf16 loops, where there is an instruction for them.
#include "kernels/cpu/tiles/bf16_tile.hpp"

#include <cstring>

#include "core/target.hpp"
#include "kernels/cpu/intrinsics.hpp"
#include "kernels/cpu/tiles/ahead.hpp"

namespace nibble::cpu {
#if defined(__x86_64__) || defined(__aarch64__)
namespace {

#define NIBBLE_LOOPS "kernels/cpu/tiles/bf16_tile.inl"
#include "kernels/cpu/each_isa.inl"

}  // namespace

#if defined(__x86_64__)
const Bf16Isa kAmxBf16{amx::kRows, amx::kLanes, amx::kTile, amx::kTokens, amx::kGroupBlocks, amx::linear};
const Bf16Isa kAvx512Bf16{avx512bf16::kRows, avx512bf16::kLanes, avx512bf16::kTile, avx512bf16::kTokens, 1, avx512bf16::linear};
#else
const Bf16Isa kNeonBf16{neonbf16::kRows, neonbf16::kLanes, neonbf16::kTile, neonbf16::kTokens, 1, neonbf16::linear};
#endif
#endif
}  // namespace nibble::cpu
