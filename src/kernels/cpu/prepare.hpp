// Prepared activations: A[M,K] of any float type as the kernels read it, permuted into the packed weight's order of input channels
// and multiplied by its prescale, in tiles of T tokens (the main kernel's tile.m). Tile t holds tokens tT … tT+H−1, H = min(T, M−tT),
// and starts at byte tT · token_bytes of its form.
//
//   f32    element (token r, channel k) at k·H + r: the T activations of one k are consecutive floats. An f32 row of M = 1 is its
//          own prepared form, unless it has to be permuted or scaled.
//   s8x3   24-bit fixed point, and s8: int8. For each segment of K (segments.hpp), with D = 3 or 1 digits:
//            scale f32[H] | Σ of the integers f32[H] | −bias·Σ of each digit s32[H·D] | octets
//          octet = channels 0…3, then channels 4…7, each: for each token, for each digit, 4 bytes: the digit of 4 channels
//   bf16   octets of each segment
//          octet = 4 pairs of channels (0,2) (4,6) (1,3) (5,7), each: for each token, 2 bf16
//
// The last octet of a group is padded with zeros.
#pragma once

#include "kernels/cpu/segments.hpp"
#include "kernels/kernel.hpp"

namespace nibble::cpu {

/// Whether a kernel that reads `form` needs the prepare step for this problem.
inline bool needs_prepare(std::string_view form, const Problem& p) {
  return form != "f32" || p.m > 1 || p.act != DType::f32 || p.permutes_k || p.prescales_k;
}

/// Bytes per token of a form.
std::int64_t prepared_token_bytes(std::string_view form, const ActScheme& quantize, std::int64_t group, std::int64_t k);

/// What preparing some tokens needs, in plain values.
struct PrepareTask {
  const std::byte* a;  // row 0 of A
  DType type;
  std::int64_t stride;  // bytes between rows
  std::int64_t m;
  const std::int32_t* perm;  // null: in order
  const float* prescale;     // null: none
  Segments segments;
  ActForm form;
  int bias;  // of the weight's codes
  std::int64_t token_bytes;
  std::int64_t tile;  // T
  std::byte* out;
};

/// What one instruction set offers: prepares the tile of tokens that begins at token m.
struct PrepareIsa {
  void (*floats)(const PrepareTask& task, std::int64_t m);
  void (*digits)(const PrepareTask& task, std::int64_t m);
  void (*halves)(const PrepareTask& task, std::int64_t m);
};

}  // namespace nibble::cpu
