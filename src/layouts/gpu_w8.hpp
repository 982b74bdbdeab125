// Index maths of the GPU layout gpu_w8n64k128: a byte a code, for tensor cores that multiply bytes. One layout serves every M.
//
//   weight = row tile 0 | row tile 1 | ... | scales | sums | zeros      64 rows a tile, the last one padded with zero codes
//   tile   = record 0 | record 1 | ...                                 128 channels each, the last one padded with zero codes
//   record = row 0 | row 1 | ... | row 63                              128 bytes a row
//   row    = chunk 0 ^ (row mod 8) | chunk 1 ^ (row mod 8) | ...        16 channels a chunk
//
// A record is the A operand of four wgmma m64k32, in the 128-byte swizzle of shared memory: a linear copy writes it, without a tensor map.
// ldmatrix reads the same bytes for mma.sync without bank conflicts.
//
// Codes are two's complement or e4m3. Unsigned codes have the middle of their range subtracted, 8 of 4 bits and 128 of 8, and so have their
// zeros. Codes of 4 bits take a byte, too: twice the memory of gpu_n64k128, and nothing to convert. Scales are f32:
//
//   per tensor, per channel   scales[N]            the tensor's repeated
//   per block of n×128        scales[N/n][K/128]   n a multiple of 64
//   sums s32[N]               of a row's codes, the factor of zero points of activations; integer codes only
//   zeros s32[N]              of asymmetric weights
//
// N is rounded up to whole tiles everywhere but in blocks of scales.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.hpp"

namespace nibble::gpu_w8 {

constexpr int kRows = 64;
constexpr int kChannels = 128;
constexpr int kRecordBytes = kRows * kChannels;
constexpr int kChunk = 16;  // channels

/// The place of the code of (row, channel) in a record.
NIBBLE_HOST_DEVICE constexpr int place(int row, int channel) {
  return row * kChannels + ((channel / kChunk) ^ (row % 8)) * kChunk + channel % kChunk;
}

/// Sizes and offsets of one weight.
struct Geometry {
  std::int64_t n = 0, k = 0;
  bool integers = true;  // else e4m3
  bool has_zeros = false;
  int block_rows = 0;  // of a block of scales; 0: a scale per row

  NIBBLE_HOST_DEVICE constexpr int tiles() const { return static_cast<int>((n + kRows - 1) / kRows); }
  NIBBLE_HOST_DEVICE constexpr int records() const { return static_cast<int>((k + kChannels - 1) / kChannels); }  // per tile
  NIBBLE_HOST_DEVICE constexpr std::int64_t padded_rows() const { return std::int64_t{tiles()} * kRows; }
  NIBBLE_HOST_DEVICE constexpr std::int64_t record(int tile, int record) const {
    return (std::int64_t{tile} * records() + record) * kRecordBytes;
  }
  NIBBLE_HOST_DEVICE constexpr std::int64_t scale_count() const {
    return block_rows == 0 ? padded_rows() : (n + block_rows - 1) / block_rows * records();
  }
  NIBBLE_HOST_DEVICE constexpr std::int64_t scales_offset() const { return record(tiles(), 0); }
  NIBBLE_HOST_DEVICE constexpr std::int64_t sums_offset() const { return scales_offset() + 4 * scale_count(); }
  NIBBLE_HOST_DEVICE constexpr std::int64_t zeros_offset() const { return sums_offset() + (integers ? 4 * padded_rows() : 0); }
  NIBBLE_HOST_DEVICE constexpr std::int64_t total_bytes() const { return zeros_offset() + (has_zeros ? 4 * padded_rows() : 0); }
};

}  // namespace nibble::gpu_w8

#if !defined(__CUDACC__)
#include <string>

#include "nibble/scheme.hpp"

namespace nibble::gpu_w8 {

/// Why this layout cannot hold such a weight; empty when it can.
std::string refusal(const WeightScheme& scheme, DType zero_type, std::int64_t k);
Geometry geometry(const WeightScheme& scheme, std::int64_t n, std::int64_t k);

}  // namespace nibble::gpu_w8
#endif
