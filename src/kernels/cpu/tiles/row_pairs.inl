// Matrix products on AArch64, of bytes (USMMLA) and of bf16 (BFMMLA), over the layouts as they are. Included by dot_tile.inl and
// whole_tile.inl at the level i8mm, by bf16_tile.inl at neonbf16.
//
// A product takes eight channels of two output channels and of two rows of activations, and adds to 2 × 2 sums: twice as many products as a
// USDOT. Both operands come from quads, four channels of as many rows as a register has lanes; two registers are joined word by word:
//
//   codes     low   n0 k0…3 │ n1 k0…3 │ n2 k0…3 │ n3 k0…3      zip1   n0 k0…7 │ n1 k0…7       zip2   n2 k0…7 │ n3 k0…7
//             high  n0 k4…7 │ n1 k4…7 │ n2 k4…7 │ n3 k4…7
//   rows      the same: r0 … r3, one load for each quad of a prepared tile; in pixels of an image the eight bytes of a row lie together
//
//   sums[p][j] += codes (n2j, n2j+1) · rows (r2p, r2p+1)       n2j r2p │ n2j r2p+1 │ n2j+1 r2p │ n2j+1 r2p+1
//
// Codes are unsigned, so they are the first operand, and no bias of 128 is subtracted. After the last octet uzp1 and uzp2 make rows of R sums
// from these squares, with which everything else goes on. Of bf16 a word is a pair of channels, and two pairs are joined: four channels.
//
// Twelve rows × 8 output channels are 24 of 32 registers; four of codes, a pair of rows and what makes it, and a mask take the rest. The row
// block of 16 is multiplied in two passes then, whose codes are in L1. Four rows and fewer × 16 are one pass.

/// Rows of a register tile, and the squares of two of them.
constexpr int kPairRows = 12;
constexpr int kMostPairs = kPairRows / 2;

/// Whether so many rows of bytes are multiplied in pairs: the last of an odd number is one with zeros.
constexpr bool in_pairs(int rows) { return rows >= 2; }
/// Vectors of output channels of a pass.
constexpr int pass_vecs(int rows) { return rows <= 4 ? kVecs : kVecs / 2; }

inline Ints zip_low(Ints a, Ints b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline Ints zip_high(Ints a, Ints b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }

/// The first `count` words at p, zeros behind them. `count` (1 … 4) is a constant at every call.
NIBBLE_VARIANT Ints load_words(const std::byte* p, int count) {
  if (count == 4) return load_ints(p);
  const auto* words = reinterpret_cast<const std::int32_t*>(p);
  if (count == 1) return reinterpret_cast<Ints>(vld1q_lane_s32(words, vdupq_n_s32(0), 0));
  const int32x4_t two = vcombine_s32(vld1_s32(words), vdup_n_s32(0));
  return reinterpret_cast<Ints>(count == 2 ? two : vld1q_lane_s32(words + 2, two, 2));
}

/// Up to four rows of an octet, from row r on, in pairs: quad q of row r is at a + r·step + q·quad. In prepared tiles `step` is 4, in pixels
/// `quad` is; these, `rows` and `r` are constants at every call.
NIBBLE_VARIANT void load_pairs(int rows, int r, const std::byte* a, std::int64_t step, std::int64_t quad, Ints* pairs) {
  const int count = rows - r < 4 ? rows - r : 4;
  if (quad != 4) {
    const Ints low = load_words(a + 4 * r, count), high = load_words(a + quad + 4 * r, count);
    pairs[0] = zip_low(low, high);
    if (count > 2) pairs[1] = zip_high(low, high);
    return;
  }
  for (int i = 0; i < count; i += 2) {  // the quads of a row are neighbours
    const auto* row = reinterpret_cast<const std::int8_t*>(a + (r + i) * step);
    pairs[i / 2] = reinterpret_cast<Ints>(vcombine_s8(vld1_s8(row), i + 1 < count ? vld1_s8(row + step) : vdup_n_s8(0)));
  }
}

/// 2 × 2 sums, of the type that the instruction adds up: of another the compiler would copy each.
#if NIBBLE_ISA == NIBBLE_ISA_NEONBF16
typedef Vec Square;
inline Square multiply_square(Square sums, Ints codes, Ints rows) {
  return reinterpret_cast<Square>(vbfmmlaq_f32(reinterpret_cast<float32x4_t>(sums), reinterpret_cast<bfloat16x8_t>(codes),
                                               reinterpret_cast<bfloat16x8_t>(rows)));
}
#else
typedef Ints Square;
inline Square multiply_square(Square sums, Ints codes, Ints rows) {
  return reinterpret_cast<Square>(
      vusmmlaq_s32(reinterpret_cast<int32x4_t>(sums), reinterpret_cast<uint8x16_t>(codes), reinterpret_cast<int8x16_t>(rows)));
}
#endif

/// The codes of a vector of output channels in pairs.
inline void pairs_of_codes(Quads quads, Ints* codes) {
  codes[0] = zip_low(quads.low, quads.high);
  codes[1] = zip_high(quads.low, quads.high);
}

/// sums += codes · rows of an octet, or of four channels of bf16, in a pass. `rows`, and the place of quads as load_pairs says, are constants
/// at every call. Four rows are loaded at a time, in this order: all of them together would take the registers of sums.
NIBBLE_VARIANT void multiply_octet(int rows, const Ints* codes, const std::byte* a, std::int64_t step, std::int64_t quad,
                                   Square (*sums)[2 * kVecs]) {
#pragma GCC unroll 3
  for (int r = 0; r < rows; r += 4) {
    Ints pairs[2];
    load_pairs(rows, r, a, step, quad, pairs);
    for (int p = 0; p < 2 && r + 2 * p < rows; ++p)
      for (int j = 0; j < 2 * pass_vecs(rows); ++j) sums[r / 2 + p][j] = multiply_square(sums[r / 2 + p][j], codes[j], pairs[p]);
    if (rows > 8) __asm__ volatile("" ::: "memory");
  }
}

/// Sums of the pass that begins at vector `begin`: from rows of R sums to squares and back. `rows` is a constant at every call.
NIBBLE_VARIANT void squares_of(int rows, int begin, const Square (*from)[kVecs], Square (*sums)[2 * kVecs]) {
  for (int r = 0; r < rows; r += 2)
    for (int v = 0; v < pass_vecs(rows); ++v) {
      const Square one = from[r][begin + v], other = r + 1 < rows ? from[r + 1][begin + v] : Square{};
      sums[r / 2][2 * v] = __builtin_shufflevector(one, other, 0, 4, 1, 5);
      sums[r / 2][2 * v + 1] = __builtin_shufflevector(one, other, 2, 6, 3, 7);
    }
}
NIBBLE_VARIANT void rows_of(int rows, int begin, const Square (*sums)[2 * kVecs], Square (*to)[kVecs]) {
  for (int r = 0; r < rows; r += 2)
    for (int v = 0; v < pass_vecs(rows); ++v) {
      const Square first = sums[r / 2][2 * v], second = sums[r / 2][2 * v + 1];
      to[r][begin + v] = __builtin_shufflevector(first, second, 0, 2, 4, 6);
      if (r + 1 < rows) to[r + 1][begin + v] = __builtin_shufflevector(first, second, 1, 3, 5, 7);
    }
}
