// Device memory in which CTAs that share passes along K (kStreamK in gemm_schedule.hpp) exchange partial sums.
//
//   parts  [CTA][warp of a multiplying warpgroup][unit of 64 rows × 8 tokens][lane]   four sums, f32 or s32
//   flags  [CTA][16]                                                                  a warp's partial sum is valid when its flag equals
//          the ticket
//
// The memory is not cleared before a launch. A ticket is unique to a launch, so that old contents do not match it; and the reader of a
// partial sum clears its flag, so that the next run of a CUDA graph, which has the same ticket, does not find it set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device/ticket.hpp"
#include "kernels/cuda/tasks/gemm_schedule.hpp"

namespace nibble::cuda {

struct StreamK {
  std::byte* parts = nullptr;
  std::uint64_t* flags = nullptr;
  std::uint64_t ticket = 0;
};

constexpr int kPartFlags = 16;  // of a CTA: four warps of up to four warpgroups

/// Bytes of a CTA's partial sums: 64 rows × `tokens` of each multiplying warpgroup.
constexpr std::size_t part_bytes(int tokens, int groups) {
  return std::size_t{4} * 64 * static_cast<std::size_t>(tokens * groups);
}

constexpr std::size_t stream_k_bytes(int tokens, int groups, int ctas) {
  const std::size_t bytes = static_cast<std::size_t>(ctas) * (part_bytes(tokens, groups) + kPartFlags * sizeof(std::uint64_t));
  return (bytes + 255) / 256 * 256;
}

/// The memory in the stream_k_bytes before `end`, which is aligned to 256.
inline StreamK stream_k(void* end, int tokens, int groups, int ctas) {
  auto* const parts = static_cast<std::byte*>(end) - stream_k_bytes(tokens, groups, ctas);
  return {.parts = parts,
          .flags = reinterpret_cast<std::uint64_t*>(parts + static_cast<std::size_t>(ctas) * part_bytes(tokens, groups)),
          .ticket = next_ticket()};
}

}  // namespace nibble::cuda
