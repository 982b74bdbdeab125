// Rows of activations that are codes, for kernels that load them through registers: any alignment, and any order of channels.
#pragma once

#include <cstdint>

#include "kernels/cuda/tasks/w8a8_task.hpp"

namespace nibble::cuda {

/// Codes of a load: 16 bytes.
constexpr int kRowCodes = 16;

/// Whether such loads are aligned at multiples of 16 channels.
inline bool in_code_vectors(const QuantizedActs& acts) {
  return (reinterpret_cast<std::uintptr_t>(acts.codes) | static_cast<std::uintptr_t>(acts.pitch)) % kRowCodes == 0;
}

#if NIBBLE_DEVICE_CODE

/// 16 codes of a row, from `channel` on; past K they are 0. `vectors`: in_code_vectors. `perm`: position k is channel perm[k]; null: in
/// order. Loads bypass L1, which may hold stale lines: the previous kernel may have written the codes after this one started.
__device__ inline uint4 load_codes(const QuantizedActs& acts, std::int64_t row, int channel, int k, bool vectors,
                                   const std::int32_t* perm = nullptr) {
  const std::uint8_t* const codes = static_cast<const std::uint8_t*>(acts.codes) + row * acts.pitch;
  if (vectors && perm == nullptr && channel + kRowCodes <= k) return __ldcg(reinterpret_cast<const uint4*>(codes + channel));
  std::uint32_t word[4] = {};
#pragma unroll
  for (int i = 0; i < kRowCodes; ++i)
    if (channel + i < k)
      word[i / 4] |= std::uint32_t{__ldcg(codes + (perm == nullptr ? channel + i : __ldg(perm + channel + i)))} << i % 4 * 8;
  return {word[0], word[1], word[2], word[3]};
}

#endif

}  // namespace nibble::cuda
