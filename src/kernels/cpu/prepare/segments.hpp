// Segments: the pieces of K that the dot-product kernels accumulate in integers before scales are applied.
//
// A segment never crosses a group of the weight, nor a block of activations that share a scale, and is so short that its sums stay
// within 32 bits. All but the last of a group or block are multiples of an octet. Where blocks that are no multiples of an octet divide
// groups, an octet belongs to two segments: the second begins with `lead` channels of the first, for which activations are 0.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/kernel.hpp"
#include "layouts/tile.hpp"
#include "nibble/scheme.hpp"

namespace nibble::cpu {

/// Activations are prepared in pieces of at most so many channels, in local buffers.
constexpr std::int64_t kMaxSegment = 512;
/// The longest segment of int8 activations: 2¹⁵ products of a signed byte and an unsigned one, up to 128·255·2¹⁵ < 2³⁰, and the correction
/// for the bias of the codes, up to 128·128·2¹⁵, fit 32 bits together.
constexpr std::int64_t kMaxInt8Segment = 1 << 15;
/// The longest segment of int8 activations with zero points: (q_a − z_a)·c with a code c of 8 bits is at most 255·255, and 256 of them,
/// minus the correction for the bias of the codes, are integers that an f32 holds.
constexpr std::int64_t kMaxZeroSegment = 256;
/// The longest segment in which Σ(q_a − z_a) and Σc, at most 128·255, fit 16 bits, and the corrections for the zero points of both sides
/// are one dot product of pairs.
constexpr std::int64_t kMaxPairedSegment = 128;
/// The longest segment of 24-bit fixed-point activations: the high digit's sum times 256 has to fit in 32 bits with room for the middle
/// digit's.
constexpr std::int64_t kMaxFixedSegment = 128;

/// The sums that the zero points of int8 activations are subtracted from.
enum class ZeroSums : std::uint8_t {
  none,
  per_token,    // over all of K: once a token
  per_segment,  // over a segment: beside its scale
};

/// How activations become bytes: `digits` signed bytes each, least significant first, and a scale per block.
struct ActDigits {
  int digits = 3;          // 3: fixed point, 23 bits and a sign under a power of two; 1: int8, absmax / 127
  std::int64_t block = 0;  // of int8: channels that share a scale; 0: the whole row. Fixed point has one per segment
  ZeroSums zero_sums = ZeroSums::none;
  bool fp8 = false;     // codes are floats: as bf16 with a scale per segment, or as f32 times the scale
  bool paired = false;  // zeros per segment are subtracted together with the weight's, which are none or integers
  std::int64_t piece = kMaxFixedSegment;
  std::int64_t unit = 0;  // channels that share all scales: those of a group of the weight, or of a block that divides it

  /// The form that a scheme's activations take against a weight of k input channels. `far_zeros`: some zero points are outside
  /// −128 … 127, which pairs do not hold.
  static ActDigits make(const ActScheme& act, const WeightScheme& weight, std::int64_t k, bool far_zeros = false) {
    const std::int64_t group = weight.group.k == 0 ? k : weight.group.k;
    ActDigits form;
    form.unit = act.group.k == 0 ? group : std::min<std::int64_t>(group, act.group.k);
    if (act.codes == DType::none) {
      form.piece = std::min(group, kMaxFixedSegment);
      return form;
    }
    form.digits = 1;
    form.fp8 = act.codes == DType::e4m3;
    if (act.zero != ZeroKind::none) form.zero_sums = sums_whole_rows(weight, act) ? ZeroSums::per_token : ZeroSums::per_segment;
    form.piece = std::min(
        group, act.zero == ZeroKind::integer && form.zero_sums == ZeroSums::per_segment ? kMaxZeroSegment : kMaxInt8Segment);
    if (form.fp8) form.piece = std::min(group, kMaxFixedSegment);
    if (act.group.k != 0 && act.group.k < k) {
      form.block = act.group.k;
      form.piece = std::min(form.piece, form.unit);
    }
    form.paired = act.zero == ZeroKind::integer && !far_zeros && form.zero_sums == ZeroSums::per_segment &&
                  form.piece + form.beside(group) <= kMaxPairedSegment &&
                  (weight.zero == ZeroKind::none || weight.zero == ZeroKind::integer);
    return form;
  }
  /// The most channels of other segments in the octets of a segment.
  std::int64_t beside(std::int64_t group) const { return unit < group && unit % tile::kOctet != 0 ? 2 * (tile::kOctet - 1) : 0; }
  /// Bytes per token that a tile begins with, and per token and segment before the octets.
  int token_header() const { return zero_sums == ZeroSums::per_token ? 4 : 0; }
  int halves_header() const { return fp8 ? 4 : 0; }  // of a form of bf16
  int segment_header() const { return 8 + 4 * digits + (zero_sums == ZeroSums::per_segment ? 4 : 0); }
};

/// Walks the segments of one row.
struct Segments {
  std::int64_t k, group, piece, unit;

  /// The end of the segment that begins at `begin`.
  std::int64_t end(std::int64_t begin) const {
    const std::int64_t unit_end = (begin / unit + 1) * unit;
    return std::min({k, unit_end, begin + piece - (begin % unit) % piece});
  }
  std::int64_t count() const {
    const auto pieces = [this](std::int64_t channels) { return (channels + piece - 1) / piece; };
    return k / unit * pieces(unit) + pieces(k % unit);
  }
  /// Whether pieces of a group, one after the other, are the segments.
  bool regular() const { return unit == group || (unit % piece == 0 && !splits_octets()); }
  /// Whether octets can belong to two segments.
  bool splits_octets() const { return unit < group && unit % tile::kOctet != 0; }
  /// Channels before `begin` in the octet that a segment begins with.
  std::int64_t lead(std::int64_t begin) const { return begin % group % tile::kOctet; }
};

/// Bytes that one token's prepared activations take: `header` bytes per segment, and `width` bytes for every channel, in
/// multiples of `step` channels.
inline std::int64_t token_bytes(const Segments& segments, int header, int width, std::int64_t step = tile::kOctet) {
  const auto padded = [step](std::int64_t channels) { return (channels + step - 1) / step * step; };
  if (!segments.splits_octets()) {  // units are all alike but for the last
    const auto of_unit = [&](std::int64_t channels) {
      const std::int64_t pieces = channels / segments.piece, rest = channels % segments.piece;
      return (pieces + (rest != 0)) * header + width * (pieces * padded(segments.piece) + padded(rest));
    };
    return segments.k / segments.unit * of_unit(segments.unit) + of_unit(segments.k % segments.unit);
  }
  std::int64_t bytes = 0;
  for (std::int64_t begin = 0; begin < segments.k;) {
    const std::int64_t end = segments.end(begin);
    bytes += header + width * padded(segments.lead(begin) + end - begin);
    begin = end;
  }
  return bytes;
}

}  // namespace nibble::cpu
