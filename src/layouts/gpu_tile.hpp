// Index maths of the GPU layout gpu_n64k128, shared by packing (host) and kernels (device). One layout serves every M.
//
// A record is 64 rows (output channels) × 128 input channels, with everything needed to turn its codes into weights, in one
// contiguous run: a pipeline stage is one linear copy, and no tensor map exists.
//
//   weight  = row tile 0 | row tile 1 | ...                  64 rows each, the last one padded with zero codes and zero scales
//   tile    = record 0 | record 1 | ...                      128 channels each, the last one padded with zero codes
//   record  = codes | slot 0 | slot 1 ...                    a slot per 128, 64, 32, 16 or 8 channels: the longest that divides a group
//   slot    = scales[64] | zeros[64]                         a longer group repeats it: of groups of 96, three slots of 32 are the same
//
// Why 64 rows: the m64 of wgmma, and the smallest tile that leaves 64 × K/128 records to balance over the SMs. Why 128 channels:
// the commonest group, so that a slot is 3 % of the record; 4 KiB of 4-bit codes make a copy long enough for full bandwidth.
//
// The codes are in the order of registers of the A operand of m16n8k16. Warp w's part of wgmma m64k16 (rows 16w … 16w+15) is the same
// fragment, so the same bytes feed mma.sync and wgmma. K stays in its natural order: ldmatrix loads activations in whole 32-channel steps,
// and TMA writes the B operand of wgmma.
//
//   codes   = vector[step][fragment 0…3][lane 0…31], 16 bytes each     step: 64 channels of 4-bit codes, 32 of 8-bit ones
//   vector  = one 4-byte word (4 bits) or two (8 bits) per m16n8k16
//
//   lane 4g+t of fragment w holds of each 16 channels (r = 16w + g):
//             channels 2t 2t+1   2t+8 2t+9
//     row r        a0            a2             each a is one register: two weights, the lower channel in the lower half
//     row r+8      a1            a3
//
//   4 bits: one word.  bits 0…3  4…7   8…11  12…15  16…19  20…23  24…27  28…31       word & 0x000f000f          → a0
//                      a0.lo a1.lo a2.lo a3.lo  a0.hi  a1.hi  a2.hi  a3.hi       (word >> 8) & 0x00f000f0   → a3, times 16
//   8 bits: two words. a0.lo a0.hi a1.lo a1.hi | a2.lo a2.hi a3.lo a3.hi
//
// Integer codes are stored unsigned, floats as they are: e2m1 in 4 bits; e4m3 and e5m2 in 8.
//
// Scales and zeros are in the order of the lanes that use them: rows g, g+8, g+16, g+24 of each half of 32 rows side by side, so that one
// 8-byte load gives a lane its four 16-bit scales of two fragments (and a 4-byte load the two of one).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.hpp"

namespace nibble::gpu_tile {

constexpr int kRows = 64;
constexpr int kChannels = 128;
constexpr int kFragmentRows = 16;
constexpr int kFragmentChannels = 16;
constexpr int kFragments = kRows / kFragmentRows;
constexpr int kLanes = 32;
constexpr int kVectorBytes = 16;
constexpr int kShortestSpan = 8;  // channels of a slot: of a k16, registers a0 and a1, or a2 and a3

/// What a stored code is.
enum class Codes : std::uint8_t { u4, u8, e2m1, e4m3, e5m2 };
NIBBLE_HOST_DEVICE constexpr int bits(Codes codes) { return codes == Codes::u4 || codes == Codes::e2m1 ? 4 : 8; }
NIBBLE_HOST_DEVICE constexpr bool are_floats(Codes codes) { return codes > Codes::u8; }
/// Integers of 4 or 8 bits.
NIBBLE_HOST_DEVICE constexpr Codes integers(int bits) { return bits == 4 ? Codes::u4 : Codes::u8; }

/// Channels of one 16-byte vector per lane.
NIBBLE_HOST_DEVICE constexpr int step_channels(int bits) { return kVectorBytes * 8 / bits * kLanes / kFragmentRows; }
/// The offset of a lane's vector in a record.
NIBBLE_HOST_DEVICE constexpr int vector_offset(int step, int fragment, int lane) {
  return ((step * kFragments + fragment) * kLanes + lane) * kVectorBytes;
}

/// The place of the code of (row, channel) in a record: byte and bit.
struct Place {
  int byte;
  int shift;
};
NIBBLE_HOST_DEVICE constexpr Place place(int bits, int row, int channel) {
  const int r = row % kFragmentRows;
  const int c = channel % kFragmentChannels;
  const int lane = (r % 8) * 4 + (c % 8) / 2;
  const int a = r / 8 + 2 * (c / 8);  // register a0 … a3
  const int half = c % 2;
  const int mma = channel % step_channels(bits) / kFragmentChannels;
  const int vector = vector_offset(channel / step_channels(bits), row / kFragmentRows, lane);
  if (bits == 4) {
    const int nibble = a + 4 * half;
    return {vector + 4 * mma + nibble / 2, nibble % 2 * 4};
  }
  return {vector + 8 * mma + 2 * a + half, 0};
}

/// The channel at `position` of 16 where both operands are bytes: the order of a word's even nibbles read as bytes (code_fragment.cuh).
/// Activations are permuted to it when they are quantized.
NIBBLE_HOST_DEVICE constexpr int interleaved(int position) { return position / 4 * 2 + position % 2 * 8 + position % 4 / 2; }

/// The position of the row's scale (or zero) among the 64 of its slot.
NIBBLE_HOST_DEVICE constexpr int slot_position(int row) { return row / 32 * 32 + row % 8 * 4 + row % 32 / 8; }

/// Channels of a slot, of weights whose groups have so many channels (0: all of K). A group that kShortestSpan does not divide is all of K.
NIBBLE_HOST_DEVICE constexpr int span(std::int64_t group) {
  for (int channels = kChannels; channels >= kShortestSpan; channels /= 2)
    if (group % channels == 0) return channels;
  return kChannels;
}

/// Sizes and offsets of one weight.
struct Geometry {
  std::int64_t n = 0, k = 0;
  int bits = 4;         // of a stored code: 4 or 8
  int span = 128;       // channels of a record that share a slot: 8, 16, 32, 64 or 128
  int scale_bytes = 2;  // of one scale
  int zero_bytes = 0;   // of one zero or offset; 0: none

  NIBBLE_HOST_DEVICE constexpr int code_bytes() const { return kRows * kChannels * bits / 8; }
  NIBBLE_HOST_DEVICE constexpr int slots() const { return kChannels / span; }
  NIBBLE_HOST_DEVICE constexpr int slot_bytes() const { return kRows * (scale_bytes + zero_bytes); }
  NIBBLE_HOST_DEVICE constexpr int scale_offset(int slot) const { return code_bytes() + slot * slot_bytes(); }
  NIBBLE_HOST_DEVICE constexpr int zero_offset(int slot) const { return scale_offset(slot) + kRows * scale_bytes; }
  NIBBLE_HOST_DEVICE constexpr int record_bytes() const { return code_bytes() + slots() * slot_bytes(); }
  NIBBLE_HOST_DEVICE constexpr int tiles() const { return static_cast<int>((n + kRows - 1) / kRows); }
  NIBBLE_HOST_DEVICE constexpr int records() const { return static_cast<int>((k + kChannels - 1) / kChannels); }  // per tile
  NIBBLE_HOST_DEVICE constexpr std::int64_t record(int tile, int record) const {
    return (std::int64_t{tile} * records() + record) * record_bytes();
  }
  NIBBLE_HOST_DEVICE constexpr std::int64_t total_bytes() const { return record(tiles(), 0); }
};

// Stages are copied by bulk copies, in multiples of 16 bytes.
static_assert(Geometry{.zero_bytes = 1}.record_bytes() % 16 == 0);

}  // namespace nibble::gpu_tile

#if !defined(__CUDACC__)
#include <string>

#include "nibble/scheme.hpp"
#include "nibble/tensor.hpp"

namespace nibble::gpu_tile {

/// How codes of a type are stored: integers of up to 4 bits as u4, wider ones as u8, unsigned; floats as they are.
Codes stored_codes(DType codes);
/// Bits a code takes in this layout: 4 for codes of up to 4 bits, else 8.
int stored_bits(DType codes);
/// How scales of a type are stored. 8-bit ones become 16-bit ones, exactly: e4m3 f16, e8m0 bf16.
DType stored_scale(DType scale);
Tensor stored_scales(const Tensor& scales);
/// The number subtracted from a stored, unsigned integer zero to get its value, like code_bias() of a code: 128 for s8.
int zero_bias(DType zeros);
/// Why this layout cannot hold such a weight; empty when it can.
std::string refusal(const WeightScheme& scheme, DType zero_type, std::int64_t k);
Geometry geometry(const WeightScheme& scheme, DType zero_type, std::int64_t n, std::int64_t k);

}  // namespace nibble::gpu_tile
#endif
