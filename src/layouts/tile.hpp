// Index maths of the CPU tile layouts, shared by packing and kernels.
//
// Rows (output channels) are taken R at a time, because a vector register holds one 32-bit lane per row. Everything the R rows
// need of one group lies in one contiguous record, and a row block is a contiguous run of records, so a core streams its share
// of the weight from front to back.
//
//   row block b (rows bR … bR+R−1, the last one padded with zero codes)
//   ├─ record of group 0 ─┬─ record of group 1 ─┬─ ...
//   │ scales[R] zeros[R] octets[group / 8]      │
//
// An octet is 8 input channels (the last one of a group padded with zero codes). A 4-bit octet of a row is one 32-bit word; the
// R words stand side by side, so that a vector load reads 8 channels of as many rows as it has lanes:
//
//            bits 0…3  4…7  8…11 12…15 16…19 20…23 24…27 28…31
//   word r:       k0   k4    k1    k5    k2    k6    k3    k7
//
//   & 0x0f0f0f0f        → bytes k0 k1 k2 k3: an operand of a 4-byte dot product (VPDPBUSD, SDOT)      >> 4: k4 k5 k6 k7
//   as 16-bit halves    → shifts by 0, 4, 8, 12 give the pairs (k0,k2) (k4,k6) (k1,k3) (k5,k7) of a bf16 dot product
//   >> 4i & 15          → one channel of every row: an operand of a float multiply-add
//
// A dense octet of 16-bit floats is four words a row, each a pair of channels, the first one in the low half; the R words of a pair stand
// side by side. These are the pairs of the nibbles above, operands of a bf16 dot product as they lie: (k0,k2) (k4,k6) (k1,k3) (k5,k7).
// One of f32 is k0 of all rows, then k1 of all rows, …, k7.
//
// Other widths are bit planes of width 8, 4, 2 and 1, low bits first. A plane of width w holds w bytes per row and octet; channel
// j sits in byte j mod w, at bit (j div w)·w, the rows side by side. An 8-bit plane is two halves of 4 channels, each 4 bytes per
// row, for the same dot products, which take them unsigned: s8 is stored as code + 128.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "nibble/scheme.hpp"
#include "nibble/types.hpp"

namespace nibble::tile {

/// Input channels per octet.
constexpr int kOctet = 8;

/// One bit plane: its width and the position of its bits in the code.
struct Plane {
  int width;
  int shift;
};
struct Planes {
  std::array<Plane, 4> plane{};
  int count = 0;
};

/// 8 → {8}; 5 → {4,1}; 3 → {2,1}: low bits first.
constexpr Planes planes(int bits) {
  Planes p;
  int shift = 0;
  for (int width : {8, 4, 2, 1}) {
    if (width > bits - shift) continue;
    p.plane[static_cast<std::size_t>(p.count++)] = {width, shift};
    shift += width;
  }
  return p;
}

/// The place of channel j (0…7) of row r in a plane of an octet: byte and bit.
struct BitPlace {
  int byte;
  int shift;
};
constexpr BitPlace place(int rows, int width, int r, int j) {
  if (width == 8) return {(j / 4) * 4 * rows + 4 * r + j % 4, 0};
  return {r * width + j % width, (j / width) * width};
}

/// The byte of channel j (0…7) of row r in an octet of 16-bit floats or f32.
constexpr int float_place(int rows, int bits, int r, int j) {
  if (bits == 32) return 4 * (j * rows + r);
  const int pair = j % 2 * 2 + j / 4;
  return 4 * (pair * rows + r) + j / 2 % 2 * 2;
}

/// Sizes and offsets of one weight's records.
struct Geometry {
  int rows;                       // R
  int bits;                       // of a code
  std::int64_t n, k, group;       // group: input channels per record (K when per channel)
  std::int64_t scale_bytes = 0;   // of the R scales at the front of a record
  std::int64_t header_bytes = 0;  // scales and zeros
  std::int64_t octet_bytes = 0;   // of the R rows of one octet
  std::int64_t record_bytes = 0;  // of a whole group
  std::int64_t row_block_bytes = 0;

  constexpr Geometry(int r, const WeightScheme& scheme, DType zero_type, std::int64_t n_total, std::int64_t k_total,
                     int code_bits, int scale_bits, int zero_bits)
      : rows(r), bits(code_bits), n(n_total), k(k_total), group(scheme.group.k == 0 ? k_total : scheme.group.k) {
    scale_bytes = rows * scale_bits / 8;
    header_bytes = scale_bytes + (zero_type == DType::none ? 0 : rows * zero_bits / 8);
    octet_bytes = std::int64_t{rows} * bits;
    record_bytes = header_bytes + octets(group) * octet_bytes;
    row_block_bytes = (groups() - 1) * record_bytes + header_bytes + octets(k - (groups() - 1) * group) * octet_bytes;
  }

  static constexpr std::int64_t octets(std::int64_t channels) { return (channels + kOctet - 1) / kOctet; }
  constexpr std::int64_t groups() const { return (k + group - 1) / group; }
  constexpr std::int64_t row_blocks() const { return (n + rows - 1) / rows; }
  /// The offset of the record of row block b and group g.
  constexpr std::int64_t record(std::int64_t b, std::int64_t g) const { return b * row_block_bytes + g * record_bytes; }
  constexpr std::int64_t total_bytes() const { return row_blocks() * row_block_bytes; }
};

inline Geometry geometry(int rows, const WeightScheme& scheme, DType zero_type, std::int64_t n, std::int64_t k) {
  return {rows, scheme, zero_type, n, k, nibble::bits(scheme.codes), nibble::bits(scheme.scale), nibble::bits(zero_type)};
}

}  // namespace nibble::tile
