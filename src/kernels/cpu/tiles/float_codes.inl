// Codes of e4m3 and e2m1 → bf16, which holds all of their values, four codes of a lane at a time. Included by the loops that need it, for
// instruction sets that look up bytes in a register. The two bytes of an e2m1 code are looked up; those of e4m3 are
//
//   code   s e e e │ e f f f             bf16   s, 120 + eeee, fff0000, as two bytes:
//          index of the high byte                 high = s·128 + 60 + eee        low = e f f f 0 0 0 0
//
// from code 8 on. Below are zero and the subnormals f·2⁻⁹, whose bytes are corrected by two more tables; 127 is NaN. With VBMI either byte
// is looked up at once, in a table of all magnitudes in two registers.
#if NIBBLE_ISA != NIBBLE_ISA_BASELINE || defined(__aarch64__)
#define NIBBLE_LOOKS_UP_BYTES 1

typedef std::uint8_t Bytes __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t Words __attribute__((vector_size(kLanes * 4)));

/// Sixteen bytes in every quarter of a register, or all of it.
inline Bytes byte_table(const std::uint8_t* entries) {
#if defined(__aarch64__)
  return reinterpret_cast<Bytes>(vld1q_u8(entries));
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
  return reinterpret_cast<Bytes>(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries))));
#else
  return reinterpret_cast<Bytes>(
      _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(entries))));
#endif
}

/// table[index − kFirst], and 0 for the larger indices.
#if defined(__aarch64__)
constexpr int kFirst = 0;  // the index of the table's first byte
inline Bytes look_up(Bytes table, Bytes index) {
  return reinterpret_cast<Bytes>(vqtbl1q_u8(reinterpret_cast<uint8x16_t>(table), reinterpret_cast<uint8x16_t>(index)));
}
#else
constexpr int kFirst = 0x70;  // only the low four bits count, but from 0x80 on nothing is found
inline Bytes look_up(Bytes table, Bytes index) {
#if NIBBLE_ISA == NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
  return reinterpret_cast<Bytes>(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(index)));
#else
  return reinterpret_cast<Bytes>(
      _mm512_maskz_shuffle_epi8(~0ull, reinterpret_cast<__m512i>(table), reinterpret_cast<__m512i>(index)));
#endif
}
#endif

#if !defined(__aarch64__)
/// The low byte of every half of `low`, and the high byte of every half of `high`.
inline Ints join_bytes(Ints low, Ints high) {
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
  const __m512i chooses_low = reinterpret_cast<__m512i>(splat(0x00ff00ff));
  return reinterpret_cast<Ints>(
      _mm512_ternarylogic_epi32(chooses_low, reinterpret_cast<__m512i>(low), reinterpret_cast<__m512i>(high), 0xca));
#else
  return (low & splat(0x00ff00ff)) | (high & splat(-0x00ff0100));
#endif
}
#endif

/// `bytes`, with all bits set where `size` is that of a NaN.
inline Bytes mark_nans(Bytes bytes, Bytes size) {
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
  const __mmask64 nans = _mm512_cmpeq_epi8_mask(reinterpret_cast<__m512i>(size), _mm512_set1_epi8(0x7f));
  return reinterpret_cast<Bytes>(_mm512_mask_blend_epi8(nans, reinterpret_cast<__m512i>(bytes), _mm512_set1_epi8(-1)));
#else
  return bytes | reinterpret_cast<Bytes>(size == 0x7f);
#endif
}

/// Pairs of bf16, the first one in the low half.
struct Pairs {
  Ints even;  // channels 0 and 2 of four
  Ints odd;   // 1 and 3
};

/// Of bytes.
inline Pairs pairs_of(Ints high, Ints low) {
#if defined(__aarch64__)
  const auto highs = reinterpret_cast<uint8x16_t>(high), lows = reinterpret_cast<uint8x16_t>(low);
  return {reinterpret_cast<Ints>(vtrn1q_u8(lows, highs)), reinterpret_cast<Ints>(vtrn2q_u8(lows, highs))};
#else
  typedef std::uint16_t Halves __attribute__((vector_size(kLanes * 4)));
  const Ints high_left = reinterpret_cast<Ints>(reinterpret_cast<Halves>(high) << 8);
  const Ints low_right = reinterpret_cast<Ints>(reinterpret_cast<Halves>(low) >> 8);
  return {join_bytes(low, high_left), join_bytes(low_right, high)};
#endif
}

inline Pairs from_e2m1_quad(Ints codes) {  // 0 ½ 1 1½ 2 3 4 6
  alignas(16) static constexpr std::uint8_t kHigh[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                                         0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
  alignas(16) static constexpr std::uint8_t kLow[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0,
                                                        0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
  const Bytes code = reinterpret_cast<Bytes>(codes);
  return pairs_of(reinterpret_cast<Ints>(look_up(byte_table(kHigh), code)),
                  reinterpret_cast<Ints>(look_up(byte_table(kLow), code)));
}

#if NIBBLE_ISA == NIBBLE_ISA_AVX512BF16 || NIBBLE_ISA == NIBBLE_ISA_AMX
/// The bf16 numbers of codes 0 … 127, their bytes apart.
struct E4m3Bytes {
  alignas(64) std::uint8_t high[128];
  alignas(64) std::uint8_t low[128];

  constexpr E4m3Bytes() : high{}, low{} {
    constexpr std::uint16_t kSmall[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // f·2⁻⁹
    for (int code = 0; code < 128; ++code) {
      const int bits = code < 8 ? kSmall[code] : code == 127 ? 0x7fff : 0x3c00 + 16 * code;
      high[code] = static_cast<std::uint8_t>(bits >> 8);
      low[code] = static_cast<std::uint8_t>(bits);
    }
  }
};
constexpr E4m3Bytes kE4m3Bytes;

/// table[code], without the sign.
inline Ints look_up_128(const std::uint8_t* table, Ints codes) {
  return reinterpret_cast<Ints>(
      _mm512_permutex2var_epi8(_mm512_load_si512(table), reinterpret_cast<__m512i>(codes), _mm512_load_si512(table + 64)));
}

inline Pairs from_e4m3_quad(Ints codes) {
  return pairs_of(look_up_128(kE4m3Bytes.high, codes) | (codes & splat(-0x7f7f7f80)), look_up_128(kE4m3Bytes.low, codes));
}
#else
inline Pairs from_e4m3_quad(Ints codes) {
  alignas(16) static constexpr std::uint8_t kHigh[16] = {60, 61, 62, 63, 64, 65, 66, 67, 188, 189, 190, 191, 192, 193, 194, 195};
  // f·2⁻⁹ of f = 0 … 7 is 0000 3b00 3b80 3bc0 3c00 3c20 3c40 3c60, by the rule above it would be 3c00 3c10 3c20 … 3c70.
  alignas(16) static constexpr std::uint8_t kSmallHigh[16] = {0x3c, 0x07, 0x07, 0x07, 0, 0, 0, 0};
  alignas(16) static constexpr std::uint8_t kSmallLow[16] = {0, 0x10, 0xa0, 0xf0, 0x40, 0x70, 0x20, 0x10};
  const Bytes size = reinterpret_cast<Bytes>(codes) & 0x7f, small = size + kFirst;
  const Bytes nibble = reinterpret_cast<Bytes>(reinterpret_cast<Words>(codes) >> 4) & 0x0f;
  const Bytes first = look_up(byte_table(kHigh), nibble) ^ look_up(byte_table(kSmallHigh), small);
  const Bytes second = (reinterpret_cast<Bytes>(codes << 4) & 0xf0) ^ look_up(byte_table(kSmallLow), small);
  return pairs_of(reinterpret_cast<Ints>(mark_nans(first, size)), reinterpret_cast<Ints>(second));
}
#endif

/// Of the codes of four channels. `bits` is a constant at every call: 4 of e2m1, 8 of e4m3.
NIBBLE_VARIANT Pairs values_of(int bits, Ints codes) { return bits == 4 ? from_e2m1_quad(codes) : from_e4m3_quad(codes); }

/// Channel j of four as floats. `j` is a constant at every call.
NIBBLE_VARIANT Vec channel_of(const Pairs& pairs, int j) {
  const Ints pair = j % 2 == 0 ? pairs.even : pairs.odd;
  return reinterpret_cast<Vec>(j < 2 ? pair << 16 : pair & splat(-65536));
}
#else
#define NIBBLE_LOOKS_UP_BYTES 0
#endif
