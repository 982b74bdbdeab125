// Segments: the pieces of K that the dot-product kernels accumulate in integers before scales are applied.
//
// A segment never crosses a group of the weight, nor a block of activations that share a scale, and is at most kMaxSegment long,
// so that sums of int8 products stay within 32 bits and local buffers have a fixed size. All but the last of a group are
// multiples of an octet.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layouts/tile.hpp"
#include "nibble/scheme.hpp"

namespace nibble::cpu {

constexpr std::int64_t kMaxSegment = 512;
/// Of 24-bit fixed-point activations: the high digit's sum times 256 has to fit in 32 bits with room for the middle digit's.
constexpr std::int64_t kMaxFixedSegment = 128;

/// How activations become bytes: `digits` signed bytes each, least significant first, and a scale per block.
struct ActForm {
  int digits = 3;          // 3: fixed point, 23 bits and a sign under a power of two; 1: int8, absmax / 127
  std::int64_t block = 0;  // of int8: channels that share a scale; 0: the whole row. Fixed point has one per segment
  std::int64_t piece = kMaxFixedSegment;

  /// The form that a scheme's activations take against weights with groups of `group` channels out of k.
  static ActForm make(const ActScheme& act, std::int64_t group, std::int64_t k) {
    const bool fixed = act.codes == DType::none;
    ActForm form;
    form.digits = fixed ? 3 : 1;
    form.piece = std::min(group, fixed ? kMaxFixedSegment : kMaxSegment);
    if (!fixed && act.group.k != 0 && act.group.k < k) {
      form.block = act.group.k;
      form.piece = std::min<std::int64_t>(form.piece, act.group.k);
    }
    return form;
  }
};

/// Walks the segments of one row.
struct Segments {
  std::int64_t k, group, piece;

  /// Where the segment that begins at `begin` ends.
  std::int64_t end(std::int64_t begin) const {
    const std::int64_t group_end = (begin / group + 1) * group;
    return std::min({k, group_end, begin + piece - (begin % group) % piece});
  }
};

/// Bytes that one token's prepared activations take: `header` bytes per segment, and `width` bytes for every channel of its octets.
inline std::int64_t token_bytes(const Segments& segments, int header, int width) {
  std::int64_t bytes = 0;
  for (std::int64_t begin = 0; begin < segments.k;) {
    const std::int64_t end = segments.end(begin);
    bytes += header + width * tile::kOctet * tile::Geometry::octets(end - begin);
    begin = end;
  }
  return bytes;
}

}  // namespace nibble::cpu
