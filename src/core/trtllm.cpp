// Codes as TensorRT-LLM's preprocess_weights_for_mixed_gemm lays them out, back to rows.
//
//   source   signed codes [K,N]
//   1.  rows of every 32 (4 bits; of 8 bits every 16) in the order of the fragments of a matrix instruction
//   2.  columns one after the other, [N,K]
//   3.  of every 64 rows, 4 columns (8 bits: 2) side by side: what a CTA's slice of K needs is contiguous
//   4.  unsigned, and of every 8 codes (8 bits: 4) those at even places first, so that one mask takes both halves of a register
//
// `interleaved` has all four steps, `permuted` all but the third, `transposed` the second only.
#include <array>

#include "core/error.hpp"
#include "core/sizes.hpp"
#include "nibble/tensor.hpp"

namespace nibble {
namespace {

constexpr std::int64_t kTileRows = 64;

/// What the steps do to codes of a width.
struct Steps {
  std::span<const std::uint8_t> rows;    // the row that comes to each place
  std::int64_t columns;                  // side by side
  std::span<const std::uint8_t> places;  // the code that comes to each place
};

constexpr std::array<std::uint8_t, 32> kRows4{0, 1, 8,  9,  16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27,
                                              4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31};
constexpr std::array<std::uint8_t, 32> kRows4Fp8{0, 1, 2,  3,  16, 17, 18, 19, 4,  5,  6,  7,  20, 21, 22, 23,
                                                 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
constexpr std::array<std::uint8_t, 16> kRows8{0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
constexpr std::array<std::uint8_t, 8> kPlaces4{0, 2, 4, 6, 1, 3, 5, 7};
constexpr std::array<std::uint8_t, 4> kPlaces8{0, 2, 1, 3};

Steps steps_of(int bits, TrtllmLayout layout) {
  if (bits == 8) return {kRows8, 2, kPlaces8};
  return {layout == TrtllmLayout::interleaved_fp8 ? kRows4Fp8 : kRows4, 4, kPlaces4};
}

}  // namespace

Result<std::vector<std::uint8_t>> unpack_trtllm(std::span<const std::uint8_t> bytes, std::int64_t n, std::int64_t k, int bits,
                                                TrtllmLayout layout) try {
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"N", n}, {"K", k}}));
  if (bits != 4 && bits != 8) return error(StatusCode::invalid_argument, "codes of {} bits; TensorRT-LLM has 4 and 8", bits);
  if (layout == TrtllmLayout::interleaved_fp8 && bits != 4)
    return error(StatusCode::invalid_argument, "codes of 8 bits beside FP8 activations; TensorRT-LLM has 4 bits there");
  const Steps steps = steps_of(bits, layout);
  const bool moves = layout != TrtllmLayout::transposed;
  const std::int64_t columns = moves && layout != TrtllmLayout::permuted ? steps.columns : 1;
  if (moves && (k % kTileRows != 0 || n % columns != 0))
    return error(StatusCode::invalid_argument, "W[{},{}]: this layout has K in multiples of {} and N of {}", n, k, kTileRows,
                 columns);
  if (bytes.size() != static_cast<std::size_t>(n * k * bits / 8) || n * k * bits % 8 != 0)
    return error(StatusCode::invalid_argument, "{} bytes for the codes of W[{},{}], {} bits each: that takes {}", bytes.size(), n,
                 k, bits, (n * k * bits + 7) / 8);

  std::vector<std::uint8_t> codes(static_cast<std::size_t>(n * k));
  const auto rows = static_cast<std::int64_t>(steps.rows.size()), places = static_cast<std::int64_t>(steps.places.size());
  const int flip = moves ? 0 : 1 << (bits - 1);  // codes that are still signed
  for (std::int64_t column = 0; column < n; ++column)
    for (std::int64_t i = 0; i < k; ++i) {  // in the order of the column
      const std::int64_t first =
          column / columns * columns * k + i / kTileRows * kTileRows * columns + column % columns * kTileRows;
      const std::int64_t at = columns == 1 ? column * k + i : first + i % kTileRows;
      const std::uint8_t byte = bytes[static_cast<std::size_t>(at * bits / 8)];
      const int code = bits == 8 ? byte : byte >> (at % 2 * 4) & 15;
      const std::int64_t in_order = moves ? i / places * places + steps.places[static_cast<std::size_t>(i % places)] : i;
      const std::int64_t row = moves ? in_order / rows * rows + steps.rows[static_cast<std::size_t>(in_order % rows)] : i;
      codes[static_cast<std::size_t>(column * k + row)] = static_cast<std::uint8_t>(code ^ flip);
    }
  return codes;
} catch (...) {
  return caught();
}

}  // namespace nibble
