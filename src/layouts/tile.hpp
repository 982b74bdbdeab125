// Index maths of the CPU tile layouts, shared by packing and kernels.
//
// Rows (output channels) are taken R at a time, because a vector register holds R outputs: the kernel broadcasts an activation
// and multiplies it with the R weights of one k. Everything the R rows need of one group lies in one contiguous record, and a
// row block is a contiguous run of records, so a core streams its share of the weight from front to back.
//
//   row block b (rows bR … bR+R−1, the last one padded with zero codes)
//   ├─ record of group 0 ─┬─ record of group 1 ─┬─ ...
//   │ scales[R] zeros[R] codes[k of the group][R]│
//
// The R codes of one k are stored as bit planes of width 4, 2 and 1, each plane dense, so that any code width from 1 to 8 bits
// unpacks with whole-vector shifts and masks, and takes exactly R·bits/8 bytes:
//
//   plane of width w: R·w/8 bytes; byte j holds rows j, j + R·w/8, j + 2·R·w/8, ... from its low bits up
//   bits 4, R 16:  byte j = row j | row j+8 << 4            bits 3: a plane of width 2 (low bits), then one of width 1
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "nibble/scheme.hpp"
#include "nibble/types.hpp"

namespace nibble::tile {

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

/// Bytes of the R codes of one k.
constexpr std::int64_t code_bytes(int rows, int bits) { return rows * bits / 8; }

/// Where row r's bits of a plane live among the plane's bytes.
struct BitPlace {
  std::int64_t byte;
  int shift;
};
constexpr BitPlace place(int rows, int width, int r) {
  const int per_part = rows * width / 8;
  return {r % per_part, (r / per_part) * width};
}

/// Sizes and offsets of one weight's records.
struct Geometry {
  int rows;                       // R
  int bits;                       // of a code
  std::int64_t n, k, group;       // group: input channels per record (K when per channel)
  std::int64_t scale_bytes = 0;   // of the R scales at the front of a record
  std::int64_t header_bytes = 0;  // scales and zeros
  std::int64_t k_bytes = 0;       // of the R codes of one k
  std::int64_t row_block_bytes = 0;

  constexpr Geometry(int r, const WeightScheme& scheme, DType zero_type, std::int64_t n_total, std::int64_t k_total,
                     int code_bits, int scale_bits, int zero_bits)
      : rows(r), bits(code_bits), n(n_total), k(k_total), group(scheme.group.k == 0 ? k_total : scheme.group.k) {
    scale_bytes = rows * scale_bits / 8;
    header_bytes = scale_bytes + (zero_type == DType::none ? 0 : rows * zero_bits / 8);
    k_bytes = code_bytes(rows, bits);
    row_block_bytes = groups() * header_bytes + k * k_bytes;
  }

  constexpr std::int64_t groups() const { return (k + group - 1) / group; }
  constexpr std::int64_t row_blocks() const { return (n + rows - 1) / rows; }
  /// Of the record of row block b and group g.
  constexpr std::int64_t record(std::int64_t b, std::int64_t g) const {
    return b * row_block_bytes + g * (header_bytes + group * k_bytes);
  }
  constexpr std::int64_t total_bytes() const { return row_blocks() * row_block_bytes; }
};

inline Geometry geometry(int rows, const WeightScheme& scheme, DType zero_type, std::int64_t n, std::int64_t k) {
  return {rows, scheme, zero_type, n, k, nibble::bits(scheme.codes), nibble::bits(scheme.scale), nibble::bits(zero_type)};
}

}  // namespace nibble::tile
