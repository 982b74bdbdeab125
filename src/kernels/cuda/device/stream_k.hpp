// The memory in which CTAs that share passes along K (kStreamK in gemm_schedule.hpp) leave each other parts of sums.
//
//   parts  [CTA][warp of a multiplying warpgroup][unit of 64 rows × 8 tokens][lane]   four sums, f32 or s32
//   flags  [CTA][16]                                                                  a warp's part is there when its flag is the ticket
//
// Nobody clears the memory before a launch: a ticket is a number that no other launch has had, so that what lies there is not taken for one; and
// who has added a part takes its flag away, so that the next run of a graph, which has the same ticket, does not find it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/tasks/gemm_schedule.hpp"

namespace nibble::cuda {

struct StreamK {
  std::byte* parts = nullptr;
  std::uint64_t* flags = nullptr;
  std::uint64_t ticket = 0;
};

constexpr int kPartFlags = 16;  // of a CTA: four warps of up to four warpgroups

/// Of a CTA: 64 rows × `tokens` of each multiplying warpgroup.
constexpr std::size_t part_bytes(int tokens, int groups) {
  return std::size_t{4} * 64 * static_cast<std::size_t>(tokens * groups);
}

constexpr std::size_t stream_k_bytes(int tokens, int groups, int ctas) {
  const std::size_t bytes = static_cast<std::size_t>(ctas) * (part_bytes(tokens, groups) + kPartFlags * sizeof(std::uint64_t));
  return (bytes + 255) / 256 * 256;
}

/// In the stream_k_bytes before `end`, which is aligned to 256.
inline StreamK stream_k(void* end, int tokens, int groups, int ctas) {
  // Odd multiples of the golden ratio: numbers apart, that no sums look like.
  static std::atomic<std::uint64_t> launches{0};
  const std::uint64_t ticket = (2 * launches.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9e3779b97f4a7c15u;
  auto* const parts = static_cast<std::byte*>(end) - stream_k_bytes(tokens, groups, ctas);
  return {.parts = parts,
          .flags = reinterpret_cast<std::uint64_t*>(parts + static_cast<std::size_t>(ctas) * part_bytes(tokens, groups)),
          .ticket = ticket};
}

}  // namespace nibble::cuda
