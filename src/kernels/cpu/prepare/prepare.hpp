// Prepared activations: A[M,K] in the forms that kernels read, permuted into the packed weight's order of input channels
// and multiplied by its prescale, in tiles of T tokens (the main kernel's tile.m). Tile t holds tokens tT … tT+H−1, H = min(T, M−tT),
// and starts at byte tT · token_bytes of its form.
//
//   f32    activations, or what their FP8 codes stand for: element (token r, channel k) at k·H + r, the T activations of one k are
//          consecutive floats. An f32 row of M = 1 is its own prepared form, unless it has to be permuted, scaled or quantized.
//   s8x3   24-bit fixed point, and s8: int8. For each segment of K (segments.hpp), with D = 3 or 1 digits:
//            scale f32[H] | Σ of the integers f32[H] | zero f32[H] | −bias·Σ of each digit s32[H·D] | octets
//          octet = channels 0…3, then channels 4…7, each: for each token, for each digit, 4 bytes: the digit of 4 channels
//          The zeros are there only where activations have zero points, and Σ is of q − zero then, the Σ of digits of q. Most are
//          pairs s16[2] in place of an f32 (ActDigits::paired), −Σ(q − zero) and −zero, and both Σ are of q − zero. A float offset is
//          a zero point that is no integer: q·scale + offset = (q + offset / scale)·scale. For kernels over all
//          of K a tile begins with its zeros instead, s32[H], and sums are of q.
//   s8k64  int8 for tiles of AMX: as s8, with room for a multiple of 16 tokens, the unused part is not written, and in place of the
//          octets, for each 16 tokens, for each 64 channels, zeros after the last: for each token, 64 bytes
//   bf16   octets of each segment; of FP8 activations their codes as bf16, and before each segment the scales, f32[H]
//          octet = 4 pairs of channels (0,2) (4,6) (1,3) (5,7), each: for each token, 2 bf16
//   bf16k32  the same for tiles of AMX: for each segment, for each 16 tokens, for each 32 channels, zeros after the last: for each token,
//          64 bytes, 4 octets in that order; scales with room for a multiple of 16 tokens
//   bf16x2k32, bf16x3k32  floats as sums of two or three bf16, exactly: the upper half of the float, then that of what is left, and the rest.
//          An f16 takes two, an f32, or what a prescale makes of any type, three. For each 32 channels, for each term, rows as above
//
// The last octet of a group is padded with zeros, beside pairs with the zero point; so are places of channels of another segment. Tiles of
// int8 are as even as possible: with T = 12, 13 tokens are tiles of 7 and 6; with T = 32, in steps of 16, 72 are 32, 32 and 8.
#pragma once

#include <limits>
#include <optional>

#include "kernels/cpu/prepare/segments.hpp"
#include "kernels/kernel.hpp"
#include "quantize/act_rule.hpp"

namespace nibble::cpu {

/// The forms that hold int8.
constexpr bool is_int8(ActForm form) { return form == ActForm::s8 || form == ActForm::s8k64; }
/// The forms that hold rows for AMX.
constexpr bool in_rows(ActForm form) {
  return form == ActForm::s8k64 || form == ActForm::bf16k32 || form == ActForm::bf16x2k32 || form == ActForm::bf16x3k32;
}
/// Of a form of bf16: how many terms an activation is the sum of; else 0.
constexpr int bf16_terms(ActForm form) {
  switch (form) {
    case ActForm::bf16:
    case ActForm::bf16k32: return 1;
    case ActForm::bf16x2k32: return 2;
    case ActForm::bf16x3k32: return 3;
    default: return 0;
  }
}

/// The height of int8 tiles: the fewest tiles of at most `tile` tokens, as even as possible.
inline std::int64_t even_tile(std::int64_t m, std::int64_t tile) {
  const std::int64_t tiles = (m + tile - 1) / tile;
  return (m + tiles - 1) / tiles;
}

/// A tile register of AMX: rows of this many bytes, of so many tokens.
constexpr std::int64_t kRowBytes = 64, kRowTokens = 16;
/// The multiple of tokens that a form has room for.
constexpr std::int64_t token_room(ActForm form) { return in_rows(form) ? kRowTokens : 1; }

/// The height of the tiles that m tokens are prepared in for a kernel of tiles of `tile`.
inline std::int64_t prepared_tile(ActForm form, std::int64_t m, std::int64_t tile) {
  if (!is_int8(form)) return tile;
  const std::int64_t room = token_room(form);
  return (even_tile(m, tile) + room - 1) / room * room;
}

/// Bytes of m tokens in a form.
std::int64_t prepared_bytes(ActForm form, std::int64_t m, const ActScheme& quantize, const WeightScheme& weight, std::int64_t k);
/// Bytes per token of a form.
std::int64_t prepared_token_bytes(ActForm form, const ActScheme& quantize, const WeightScheme& weight, std::int64_t k);

/// Scales and zero points that come with an A of codes. A step of 0: one for all.
struct GivenRules {
  const float* scale = nullptr;
  std::int64_t scale_row = 0, scale_block = 0;
  const std::int32_t* zero = nullptr;  // null: 0
  const float* offset = nullptr;       // in place of zero points
  std::int64_t zero_row = 0, zero_block = 0;
};

/// Tokens that are prepared together, so that a tile is written 16 bytes at a time, 4 bytes per token. A dozen lose most of the gain of
/// four: the prefetcher does not follow so many rows.
constexpr std::int64_t kTogether = 4;

/// Runs of a patch are copied in pieces of so many bytes: up to that much past the pixels is read, and past the row written.
constexpr std::int64_t kCopyBytes = 16;

/// Tokens that are patches of a channels-last image. A patch is `runs_h` × `runs_w` runs of bytes; distances are in bytes.
struct Patches {
  const std::byte* image;     // where the first token's patch begins
  std::int64_t columns;       // tokens of an output row
  std::int64_t down, beside;  // from a token to the one below and to the next one
  std::int64_t runs_h, runs_w;
  std::int64_t run_down, run_beside;  // from a run to the one below and to the next one
  std::int64_t run_bytes;
  std::byte* row;  // buffers for kTogether patches, each as long as its runs and kCopyBytes

  const std::byte* begin(std::int64_t m) const { return image + m / columns * down + m % columns * beside; }
  /// All channels of token m in order, in place `slot` of kTogether.
  const std::byte* gather(std::int64_t m, std::int64_t slot) const;
  /// Scales per block of channels of int8 pixels; those of a pixel are contiguous and gathered like its bytes. Null: none.
  const float* scales = nullptr;
  std::int64_t block = 0;       // bytes that share one
  float* row_scales = nullptr;  // buffer for the scales of one token
};

/// The arguments of preparing tokens, plain values.
struct PrepareTask {
  const std::byte* a;  // row 0 of A
  DType type;
  std::int64_t width;   // bytes of an element
  std::int64_t stride;  // bytes between rows
  std::int64_t m;
  const std::int32_t* perm;  // null: in order
  const float* prescale;     // null: none
  Segments segments;
  ActDigits digits;
  ActScheme act_scheme;
  std::int64_t block;               // channels that share a rule (act_rule.hpp)
  std::optional<StaticActs> known;  // the rule of all activations, where it is known
  float limit;                      // the largest magnitude that a scale covers; infinity: no limit
  GivenRules given;                 // the rules of codes
  int bias;                         // of the weight's codes
  std::int64_t token_bytes;
  std::int64_t tile;  // T
  bool rows;          // for AMX
  int terms;          // of a form of bf16
  std::byte* out;
  const Patches* patches = nullptr;                                          // null: tokens are the rows of A
  std::int64_t begin = 0, count = std::numeric_limits<std::int64_t>::max();  // of each tile these tokens, as far as it has them

  /// The channels of a token, one after the other, until the next call with this slot.
  const std::byte* row(std::int64_t token, std::int64_t slot) const {
    return patches == nullptr ? a + token * stride : patches->gather(token, slot);
  }
  /// The end of those tokens in a tile of so many.
  std::int64_t end(std::int64_t height) const { return count < height - begin ? begin + count : height; }
  /// How many tokens can be prepared side by side.
  std::int64_t together() const { return patches != nullptr && patches->scales != nullptr ? 1 : kTogether; }
};

/// The functions of one instruction set: each prepares the tile of tokens that begins at token m.
struct PrepareIsa {
  void (*floats)(const PrepareTask& task, std::int64_t m);
  void (*fixed)(const PrepareTask& task, std::int64_t m);
  void (*codes)(const PrepareTask& task, std::int64_t m);
  void (*halves)(const PrepareTask& task, std::int64_t m);
  /// x[0 … count) of f32, f16 or bf16 → codes by act_rule::to_s8.
  void (*quantize)(const std::byte* x, DType type, std::int64_t count, const act_rule::Rule& rule, std::int8_t* codes);
  /// One block of at most kMaxSegment channels → codes by a rule of its own, symmetric; magnitudes saturate at `limit` first. Its scale.
  float (*quantize_block)(const std::byte* x, DType type, std::int64_t count, float limit, std::int8_t* codes);

  auto of(ActForm form) const {
    return form == ActForm::f32 ? floats : bf16_terms(form) != 0 ? halves : is_int8(form) ? codes : fixed;
  }
};

/// The loops that go with a kernel for `main`.
const PrepareIsa& prepare_isa(Isa main);

/// The arguments of preparing args.a in `form` for tiles of `tile` tokens.
PrepareTask prepare_task(ActForm form, const StepArgs& args, int tile);

}  // namespace nibble::cpu
