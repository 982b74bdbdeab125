// The row and channel of each code that a lane holds (the inverse of gpu_tile::place), and codes and slots as numbers. For kernels that
// decode records of gpu_n64k128 without tensor cores.
//
//   word(block, fragment, lane) = what a lane holds of 16 channels (a block) × 16 rows (a fragment): registers a0 … a3
//   register a, half h of it    = row 16·fragment + lane/4 + 8·(a mod 2), channel 16·block + 2·(lane mod 4) + 8·(a div 2) + h
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/tasks/linear_task.hpp"
#include "layouts/gpu_tile.hpp"

namespace nibble::cuda {

constexpr int kBlocks = gpu_tile::kChannels / gpu_tile::kFragmentChannels;

NIBBLE_HOST_DEVICE constexpr int row_of(int fragment, int lane, int a) {
  return fragment * gpu_tile::kFragmentRows + lane / 4 + a % 2 * 8;
}
NIBBLE_HOST_DEVICE constexpr int channel_of(int block, int lane, int a, int half) {
  return block * gpu_tile::kFragmentChannels + lane % 4 * 2 + a / 2 * 8 + half;
}
/// Byte offset in a record of the 4-byte word with register a. 4 bits: one word for all four; 8 bits: a0 a1 | a2 a3.
NIBBLE_HOST_DEVICE constexpr int word_offset(int bits, int block, int fragment, int lane, int a) {
  const int blocks = gpu_tile::step_channels(bits) / gpu_tile::kFragmentChannels;  // of a 16-byte vector
  return gpu_tile::vector_offset(block / blocks, fragment, lane) + block % blocks * (gpu_tile::kVectorBytes / blocks) +
         (bits == 8 ? a / 2 * 4 : 0);
}
/// The lowest bit of a code in that word.
NIBBLE_HOST_DEVICE constexpr int code_shift(int bits, int a, int half) {
  return bits == 4 ? 4 * a + 16 * half : 16 * (a % 2) + 8 * half;
}

namespace detail {
constexpr bool inverts_place(int bits) {
  for (int block = 0; block < kBlocks; block += 3)
    for (int fragment = 0; fragment < gpu_tile::kFragments; ++fragment)
      for (int lane = 0; lane < gpu_tile::kLanes; lane += 3)
        for (int a = 0; a < 4; ++a)
          for (int half = 0; half < 2; ++half) {
            const gpu_tile::Place p = gpu_tile::place(bits, row_of(fragment, lane, a), channel_of(block, lane, a, half));
            const int bit = word_offset(bits, block, fragment, lane, a) * 8 + code_shift(bits, a, half);
            if (p.byte * 8 + p.shift != bit) return false;
          }
  return true;
}
static_assert(inverts_place(4) && inverts_place(8));
}  // namespace detail

/// 2²³ as an f32: its unit in the last place is 1, so that a code OR-ed into the mantissa is 2²³ + code.
constexpr std::uint32_t kMagicBits = 0x4b000000u;
constexpr float kMagic = 8388608.0f;

/// Element i of a vector of f32, f16 or bf16. The type is the same for all threads.
__device__ inline float load_float(const void* p, std::int64_t i, DType type) {
  if (type == DType::f32) return static_cast<const float*>(p)[i];
  const std::uint16_t raw = static_cast<const std::uint16_t*>(p)[i];
  return type == DType::f16 ? __half2float(__ushort_as_half(raw)) : __uint_as_float(static_cast<std::uint32_t>(raw) << 16);
}
/// The low (half 0) or high 16 bits of a word as a number.
__device__ inline float half_of(std::uint32_t word, int half, DType type) {
  const std::uint32_t raw = half != 0 ? word >> 16 : word & 0xffffu;
  return type == DType::f16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(raw))) : __uint_as_float(raw << 16);
}

}  // namespace nibble::cuda
