// The arguments of the launcher of products with online quantized activations (wna8.hpp), and their places in a plan's workspace.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/tasks/linear_task.hpp"
#include "kernels/cuda/tasks/quantize_task.hpp"
#include "kernels/cuda/tasks/split_k.hpp"

namespace nibble::cuda {

/// A term of activations with zero points: Σ(a − z) of a fold's channels, 24 bits, above z, 8 bits. Without zero points it is s_a·Σa, a float.
NIBBLE_HOST_DEVICE constexpr std::uint32_t zero_term(std::int32_t sum, std::int32_t zero) {
  return static_cast<std::uint32_t>(sum) << 8 | (static_cast<std::uint32_t>(zero) & 0xffu);
}
NIBBLE_HOST_DEVICE constexpr std::int32_t term_sum(std::uint32_t term) { return static_cast<std::int32_t>(term) >> 8; }
NIBBLE_HOST_DEVICE constexpr std::int32_t term_zero(std::uint32_t term) { return static_cast<std::int32_t>(term << 24) >> 24; }

/// Bytes of a token's terms of a fold: two floats, with float offsets three.
NIBBLE_HOST_DEVICE constexpr int token_term_bytes(bool offsets) { return offsets ? 12 : 8; }

/// The tokens whose terms a CTA of so many tokens reads. Terms lie in pairs of tokens: with the rows of an expert, which begin at any row,
/// come the other ones of their first and last pair.
NIBBLE_HOST_DEVICE constexpr int term_tokens(int tokens, bool experts) { return experts ? tokens + 2 : tokens; }

struct Wna8Task {
  DeviceWeight weight;
  int m = 0;
  const void* codes = nullptr;          // [M,K] s8, interleaved, z past K; rows begin at multiples of 16 bytes
  std::int64_t pitch = 0;               // bytes between rows, a multiple of 128: K and what follows it
  const void* terms = nullptr;          // [pitch / fold][term_pitch / 2]: of two tokens s_a, s_a', second, second', third, third'
  std::int64_t term_pitch = 0;          // tokens, a multiple of 128
  int fold = 128;                       // channels: 128, 32 or 16
  ZeroKind zero = ZeroKind::none;       // of activations; what terms are follows from it (wna8.hpp)
  const float* token_scales = nullptr;  // [term_pitch]: a token's s_a, where it is the same in all of K; 1 in its terms then
  void* scratch_end = nullptr;          // memory for stream-K and split K ends here (stream_k.hpp, split_k.hpp)
  epilogue::Element epilogue;
  NextWeight next;
  ExpertTiles experts;  // of a grouped product, whose weight is the first expert's; without tiles: of one weight
};

/// The tokens of a CTA of sm_80's kernel, and the memory in which the sums of CTAs that divide K meet.
constexpr int wna8_sm80_tokens(std::int64_t m) { return m <= kSm80ExpertRows.few ? kSm80ExpertRows.few : kSm80ExpertRows.many; }
constexpr std::size_t wna8_sm80_bytes(std::int64_t m, std::int64_t n, int ranks) {
  const std::int64_t launched = std::min<std::int64_t>(m, split_k_tokens(n, ranks));
  const int tokens = wna8_sm80_tokens(launched);
  const std::int64_t tiles = (n + gpu_tile::kRows - 1) / gpu_tile::kRows * ((launched + tokens - 1) / tokens);
  return split_k_bytes(ranks, tiles, gpu_tile::kRows, tokens);
}

/// The same for the decode kernel, which quantizes by itself: it does not use acts.codes, scales, zeros, sums and terms.
struct Wna8DecodeTask {
  DeviceWeight weight;
  QuantizeTask acts;
  int fold = 128;
  epilogue::Element epilogue;
  NextWeight next;
};

/// The places of quantized activations in a plan's workspace: codes [M][pitch] | terms [folds][term_pitch] | tokens' scales f32
/// [term_pitch].
struct Wna8Map {
  std::int64_t pitch = 0, folds = 0, term_pitch = 0;
  std::size_t terms = 0, scales = 0, bytes = 0;
};
constexpr Wna8Map wna8_map(int fold, ZeroKind zero, std::int64_t m, std::int64_t k, bool experts = false) {
  constexpr int kMostTokens = 128;  // of a pass, which reads the terms of all of them; that of an expert's rows from any pair on
  const auto round_up = [](std::int64_t count, std::int64_t to) { return (count + to - 1) / to * to; };
  Wna8Map map;
  map.pitch = round_up(k, gpu_tile::kChannels);
  map.folds = map.pitch / fold;
  map.term_pitch = round_up(experts ? m + term_tokens(kMostTokens, true) : m, kMostTokens);
  map.terms = static_cast<std::size_t>(round_up(m * map.pitch, 256));
  map.scales = map.terms + static_cast<std::size_t>(token_term_bytes(zero == ZeroKind::offset) * map.folds * map.term_pitch);
  map.bytes = map.scales + 4 * static_cast<std::size_t>(map.term_pitch);
  return map;
}

/// Images of codes that are one of f32: the bytes of its fixed-point numbers.
constexpr int kDigitPlanes = 3;

/// The same of the pixels of images, channels side by side: codes [B·H·W][C] | terms float2 [B·H·W][C / fold][spread] | and, where channels are
/// not side by side in A, A as it is with channels last. The terms of a TMA box are 16 bytes of a pixel: two folds of 32 channels, or one
/// of 128 and 8 unused bytes. Of fixed point, codes and terms are those of kDigitPlanes · B images.
struct Wna8ImageMap {
  std::int64_t term_fold = 0, term_row = 0;  // float2 between folds, between pixels
  std::size_t terms = 0, image = 0, bytes = 0;
};
constexpr Wna8ImageMap wna8_image_map(int fold, std::int64_t pixels, std::int64_t channels, std::int64_t reordered_bytes) {
  const auto round_up = [](std::int64_t bytes) { return static_cast<std::size_t>((bytes + 255) / 256 * 256); };
  Wna8ImageMap map;
  map.term_fold = fold == gpu_tile::kChannels ? 2 : 1;
  map.term_row = channels / fold * map.term_fold;
  map.terms = round_up(pixels * channels);
  map.image = map.terms + round_up(pixels * map.term_row * 8);
  map.bytes = map.image + round_up(reordered_bytes);
  return map;
}

}  // namespace nibble::cuda
