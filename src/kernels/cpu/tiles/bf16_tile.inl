// Included once per instruction set by bf16_tile.cpp. See bf16_tile.hpp for the algorithm.
#if NIBBLE_ISA == NIBBLE_ISA_AVX512BF16 || NIBBLE_ISA == NIBBLE_ISA_AMX || NIBBLE_ISA == NIBBLE_ISA_NEONBF16

// A multiple of a tile. Their sums, 16 KiB (AArch64: 8), and a panel of 8 (4) share L1. AMX, whose sums are in L2, multiplies so fast that
// decoding shows: 256 tokens share a panel.
constexpr int kTokens = NIBBLE_ISA == NIBBLE_ISA_NEONBF16 ? 120 : NIBBLE_ISA == NIBBLE_ISA_AMX ? 256 : 128;
constexpr int kSegment = kMaxFixedSegment;

#include "kernels/cpu/tiles/float_codes.inl"

/// Two vectors of integers of magnitude ≤ 256 → pairs of bf16, `first` in the low halves.
inline Ints pair_of(Vec first, Vec second) {
  return reinterpret_cast<Ints>(reinterpret_cast<Words>(first) >> 16 | (reinterpret_cast<Words>(second) & 0xffff0000u));
}

/// bf16 of the integers that 5 bits of two's complement are: 0 … 15, −16 … −1.
alignas(64) constexpr std::uint16_t kSmallIntegers[32] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                          0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
                                                          0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110,
                                                          0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};

/// Zeros as pairs of 16-bit integers, when all of them are in 0 … 16, so that code − zero fits in 5 bits.
inline bool small_zeros(const Vec* zero, Ints* pairs) {
  Ints outside{};  // −1 for each that is
  for (int v = 0; v < kVecs; ++v) {
    const Ints z = to_ints(zero[v]);
    outside += (z < 0) | (z > 16);
    pairs[v] = z | z << 16;
  }
  return sum_lanes(outside) == 0;
}

/// One 4-bit octet → 4 pairs [4][R], by looking code − zero up in 32 bf16. Nibbles from the low end: channels 0 4 1 5 2 6 3 7; 16 bits
/// apart lie the pairs (0,2) (4,6) (1,3) (5,7).
#if defined(__aarch64__)
/// The bytes of the values are looked up apart: a register pair holds the low ones, another the high ones.
inline void decode_nibbles(const std::uint16_t* values, const Ints* zeros, const std::byte* octet, Ints* panel) {
  const uint8x16x2_t first = vld2q_u8(reinterpret_cast<const std::uint8_t*>(values));
  const uint8x16x2_t second = vld2q_u8(reinterpret_cast<const std::uint8_t*>(values + 16));
  const uint8x16x2_t lows = {first.val[0], second.val[0]}, highs = {first.val[1], second.val[1]};
  for (int v = 0; v < kVecs; ++v) {
    const Quads quads = load_quads(4, octet, v);
    const Bytes zero = reinterpret_cast<Bytes>(zeros[v] * 0x0101);
    for (int half = 0; half < 2; ++half) {
      const Bytes code = reinterpret_cast<Bytes>(half == 0 ? quads.low : quads.high);
      const auto index = reinterpret_cast<uint8x16_t>((code - zero) & 31);
      const Pairs pairs =
          pairs_of(reinterpret_cast<Ints>(vqtbl2q_u8(highs, index)), reinterpret_cast<Ints>(vqtbl2q_u8(lows, index)));
      panel[half * kVecs + v] = pairs.even;
      panel[(2 + half) * kVecs + v] = pairs.odd;
    }
  }
}
inline void decode_plain_nibbles(const std::uint16_t* values, const std::byte* octet, Ints* panel) {
  constexpr Ints kNone[kVecs] = {};
  decode_nibbles(values, kNone, octet, panel);
}
#else
inline Ints look_up_words(const std::uint16_t* values, Shorts index) {
  const __m512i table = _mm512_loadu_si512(values);
  return reinterpret_cast<Ints>(_mm512_maskz_permutexvar_epi16(~0u, reinterpret_cast<__m512i>(index), table));
}
inline void decode_nibbles(const std::uint16_t* values, const Ints* zeros, const std::byte* octet, Ints* panel) {
  for (int v = 0; v < kVecs; ++v) {
    const Ints word = load_ints(octet + 4 * v * kLanes);
    for (int p = 0; p < 4; ++p) {
      const Shorts index = reinterpret_cast<Shorts>((word >> (4 * p)) & 0x000f000f) - reinterpret_cast<Shorts>(zeros[v]);
      panel[p * kVecs + v] = look_up_words(values, index);
    }
  }
}
/// The same without zeros. An index is the low 5 bits of its lane, of which the highest is another code's: `values` are 16, twice.
inline void decode_plain_nibbles(const std::uint16_t* values, const std::byte* octet, Ints* panel) {
  for (int v = 0; v < kVecs; ++v) {
    const Ints word = load_ints(octet + 4 * v * kLanes);
    for (int p = 0; p < 4; ++p) panel[p * kVecs + v] = look_up_words(values, reinterpret_cast<Shorts>(word >> (4 * p)));
  }
}
#endif

/// The same for any zeros, and for 8-bit octets, through floats. `bits` (4 or 8) is a constant at every call.
NIBBLE_VARIANT void decode_octet(int bits, const Vec* zero, const std::byte* octet, Ints* panel) {
  for (int v = 0; v < kVecs; ++v) {
    const Ints low = load_ints(octet + 4 * v * kLanes);
    const Ints high = bits == 4 ? low : load_ints(octet + 4 * (kRows + v * kLanes));
    for (int p = 0; p < 4; ++p) {
      const Ints word = bits == 4 ? low >> (4 * p) : (p % 2 == 0 ? low : high) >> (8 * (p / 2));
      const int mask = bits == 4 ? 15 : 255;
      panel[p * kVecs + v] = pair_of(to_floats(word & mask) - zero[v], to_floats((word >> 16) & mask) - zero[v]);
    }
  }
}

/// One octet of e4m3.
inline void decode_e4m3(const std::byte* octet, Ints* panel) {
  for (int v = 0; v < kVecs; ++v) {
    const Pairs low = from_e4m3_quad(load_ints(octet + 4 * v * kLanes));
    const Pairs high = from_e4m3_quad(load_ints(octet + 4 * (kRows + v * kLanes)));
    panel[0 * kVecs + v] = low.even;
    panel[1 * kVecs + v] = high.even;
    panel[2 * kVecs + v] = low.odd;
    panel[3 * kVecs + v] = high.odd;
  }
}

/// What 4-bit codes are looked up in: where the weight has no zero points the values of the 16 codes, twice, or else kSmallIntegers, by
/// code − zero.
struct Lookup {
  alignas(64) std::uint16_t values[32];
  bool plain;

  explicit Lookup(const Decoder& d)
      : plain(d.geometry.bits == 4 && d.floats == DType::none && d.zero == ZeroKind::none && (!d.integer_codes || d.bias <= 16)) {
    std::memcpy(values, kSmallIntegers, sizeof values);
    for (int i = 0; plain && i < 32; ++i) {
      const int code = i % 16;
      if (d.integer_codes)
        values[i] = kSmallIntegers[(code - static_cast<int>(d.bias)) & 31];
      else
        std::memcpy(&values[i], reinterpret_cast<const char*>(&d.table[static_cast<std::size_t>(code)]) + 2, 2);
    }
  }
};

/// The scales of a segment's group, and what is subtracted from its codes.
struct Header {
  Vec scale[kVecs], zero[kVecs];
  Ints zeros[kVecs];  // the same as pairs of integers, where codes minus them are looked up
  bool looks_up;
};

inline void read_header(const Decoder& d, const Lookup& lookup, const std::byte* record, Header& header) {
  const tile::Geometry& geo = d.geometry;
  for (int v = 0; v < kVecs; ++v) {
    header.scale[v] = load_as_floats(record + v * geo.scale_bytes / kVecs, d.scale_type) * d.scale2;
    header.zero[v] = Vec{} + d.bias;
    if (d.zero != ZeroKind::none)
      header.zero[v] += load_as_floats(record + geo.scale_bytes + v * (geo.header_bytes - geo.scale_bytes) / kVecs, d.zero_type);
  }
  header.looks_up = !lookup.plain && d.integer_codes && geo.bits == 4 && small_zeros(header.zero, header.zeros);
}

/// Where the codes of channels from k on begin, in a row block.
inline const std::byte* codes_at(const tile::Geometry& geo, const std::byte* weight, std::int64_t block, std::int64_t k) {
  return weight + geo.record(block, k / geo.group) + geo.header_bytes + k % geo.group / tile::kOctet * geo.octet_bytes;
}

/// `octets` of codes as pairs [R], zeros behind them up to `pairs`. `prefetches` is a constant at every call.
NIBBLE_VARIANT void decode_octets(bool prefetches, const Decoder& d, const Lookup& lookup, const Header& header,
                                  const std::byte* codes, std::int64_t octets, std::int64_t pairs, Ints* panel) {
  const std::int64_t octet_bytes = d.geometry.octet_bytes;
  for (std::int64_t o = 0; o < octets; ++o, codes += octet_bytes, panel += 4 * kVecs) {
    if (prefetches) prefetch_after(codes, octet_bytes);
    if (lookup.plain) {
      decode_plain_nibbles(lookup.values, codes, panel);
    } else if (header.looks_up) {
      decode_nibbles(lookup.values, header.zeros, codes, panel);
    } else if (d.e4m3_codes) {
      decode_e4m3(codes, panel);
    } else if (d.geometry.bits == 4) {
      decode_octet(4, header.zero, codes, panel);
    } else {
      decode_octet(8, header.zero, codes, panel);
    }
  }
  for (std::int64_t i = 0; i < (pairs - 4 * octets) * kVecs; ++i) panel[i] = Ints{};
}

/// Channels [k, k + 8·octets) of a row block as pairs [R], zeros behind them up to `pairs`: in `panel`, or where the octets of a dense weight
/// lie. And the header of their group.
__attribute__((noinline)) const std::byte* fill(const Decoder& d, const Lookup& lookup, const std::byte* weight,
                                                std::int64_t block, std::int64_t k, std::int64_t octets, std::int64_t pairs,
                                                Header& header, Ints* panel) {
  const tile::Geometry& geo = d.geometry;
  const std::byte* const codes = codes_at(geo, weight, block, k);
  if (d.floats != DType::none) {
    for (int v = 0; v < kVecs; ++v) header.scale[v] = Vec{} + 1.0f;
    if (pairs == 4 * octets) return codes;
    std::memcpy(panel, codes, static_cast<std::size_t>(octets * geo.octet_bytes));
    std::memset(panel + 4 * octets * kVecs, 0, static_cast<std::size_t>((pairs - 4 * octets) * kVecs) * sizeof(Ints));
  } else {
    read_header(d, lookup, weight + geo.record(block, k / geo.group), header);
    decode_octets(NIBBLE_ISA != NIBBLE_ISA_AMX, d, lookup, header, codes, octets, pairs, panel);
  }
  return reinterpret_cast<const std::byte*>(panel);
}

/// The scales of tokens, with which a segment of a tile of FP8 activations begins.
inline const float* token_scales(const DotTask& t, const std::byte* segment) {
  return t.segment_header == 0 ? nullptr : reinterpret_cast<const float*>(segment);
}

#if NIBBLE_ISA == NIBBLE_ISA_NEONBF16
#include "kernels/cpu/tiles/row_pairs.inl"

constexpr int kTile = kPairRows;
static_assert(kTokens % kTile == 0);

/// multiply() of two channels at a time, below, in pairs of tokens and four channels.
NIBBLE_VARIANT void multiply(int height, const std::byte* a, const Ints* panel, std::int64_t pairs, const Vec* scale,
                             const float* tokens, std::int64_t next, float* sum) {
  for (int begin = 0; begin < kVecs; begin += pass_vecs(height)) {
    Vec squares[kMostPairs][2 * kVecs], acc[kTile][kVecs];
    for (int p = 0; p < (height + 1) / 2; ++p)
      for (int j = 0; j < 2 * pass_vecs(height); ++j) squares[p][j] = Vec{};
    const std::byte* row = a;
    const Ints* words = panel + begin;
    for (std::int64_t p = 0; p < pairs; p += 2, row += 8 * height, words += 2 * kVecs) {
      if (begin == 0) __builtin_prefetch(row + next);
      Ints codes[2 * kVecs];
      for (int v = 0; v < pass_vecs(height); ++v)
        pairs_of_codes({load_ints(words + v), load_ints(words + kVecs + v)}, codes + 2 * v);
      multiply_octet(height, codes, row, 4, 4 * height, squares);
    }
    rows_of(height, begin, squares, acc);
    for (int m = 0; m < height; ++m)
      for (int v = begin; v < begin + pass_vecs(height); ++v) {
        float* to = sum + m * kRows + v * kLanes;
        store(to, load(to) + (tokens == nullptr ? acc[m][v] : acc[m][v] * tokens[m]) * scale[v]);
      }
  }
}
#elif NIBBLE_ISA == NIBBLE_ISA_AVX512BF16
constexpr int kTile = 8;  // 8×2 accumulators: each pair of vector loads serves 16 dot products

inline Vec dot2(Vec acc, Ints w, Ints a) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(a));
}

/// sum[height][R] += scale ∘ (A'[height] · panel) over `pairs` pairs of channels, also times the scales of tokens unless that is null.
/// `height` is a constant at every call. Prefetches the next tile's activations, which begin `next` bytes further on: pieces of 2 KiB are
/// too short for the hardware to see a stream, and may be in L3.
NIBBLE_VARIANT void multiply(int height, const std::byte* a, const Ints* panel, std::int64_t pairs, const Vec* scale,
                             const float* tokens, std::int64_t next, float* sum) {
  Vec acc[kTile][kVecs];
  for (int m = 0; m < height; ++m)
    for (int v = 0; v < kVecs; ++v) acc[m][v] = Vec{};
  for (std::int64_t p = 0; p < pairs; ++p, a += 4 * height, panel += kVecs) {
    __builtin_prefetch(a + next);
    for (int m = 0; m < height; ++m) {
      const Ints pair = load_splat(a + 4 * m);
      for (int v = 0; v < kVecs; ++v) acc[m][v] = dot2(acc[m][v], load_ints(panel + v), pair);
    }
  }
  for (int m = 0; tokens != nullptr && m < height; ++m)
    for (int v = 0; v < kVecs; ++v) acc[m][v] *= tokens[m];
  for (int m = 0; m < height; ++m)
    for (int v = 0; v < kVecs; ++v) {
      float* to = sum + m * kRows + v * kLanes;
      store(to, load(to) + acc[m][v] * scale[v]);
    }
}
#endif

#if NIBBLE_ISA != NIBBLE_ISA_AMX
/// Not inlined: values that the caller keeps in registers would cost accumulators.
__attribute__((noinline)) void multiply_tile(std::int64_t height, const std::byte* a, const Ints* panel, std::int64_t pairs,
                                             const Vec* scale, const float* tokens, std::int64_t next, float* sum) {
  switch (height) {
    case 1: return multiply(1, a, panel, pairs, scale, tokens, next, sum);
    case 2: return multiply(2, a, panel, pairs, scale, tokens, next, sum);
    case 3: return multiply(3, a, panel, pairs, scale, tokens, next, sum);
    case 4: return multiply(4, a, panel, pairs, scale, tokens, next, sum);
    case 5: return multiply(5, a, panel, pairs, scale, tokens, next, sum);
    case 6: return multiply(6, a, panel, pairs, scale, tokens, next, sum);
    case 7: return multiply(7, a, panel, pairs, scale, tokens, next, sum);
    case 8: return multiply(8, a, panel, pairs, scale, tokens, next, sum);
    case 9: return kTile >= 9 ? multiply(9, a, panel, pairs, scale, tokens, next, sum) : void();
    case 10: return kTile >= 10 ? multiply(10, a, panel, pairs, scale, tokens, next, sum) : void();
    case 11: return kTile >= 11 ? multiply(11, a, panel, pairs, scale, tokens, next, sum) : void();
    case 12: return kTile >= 12 ? multiply(12, a, panel, pairs, scale, tokens, next, sum) : void();
    default: return;
  }
}

/// sum[tokens m_begin … m_end][R] += scale ∘ (A' · panel), a segment whose activations begin `offset` bytes per token into the tiles.
inline void multiply_segment(const DotTask& t, std::int64_t m_begin, std::int64_t m_end, std::int64_t offset, const Ints* panel,
                             std::int64_t octets, const Vec* scale, float* sum) {
  for (std::int64_t m = m_begin; m < m_end; m += kTile) {
    const std::int64_t height = least(t.m - m, kTile);
    const std::byte* a = t.activations + m * t.token_bytes + offset * height;
    multiply_tile(height, a + t.segment_header * height, panel, 4 * octets, scale, token_scales(t, a), kTile * t.token_bytes,
                  sum + (m - m_begin) * kRows);
  }
}
void linear_block(const DotTask& t, const Lookup& lookup, std::int64_t block, std::int64_t m_begin, std::int64_t m_end) {
  alignas(64) float sum[kTokens * kRows];
  alignas(64) Ints panel[kSegment / 2 * kVecs];
  std::memset(sum, 0, static_cast<std::size_t>(m_end - m_begin) * kRows * sizeof(float));
  std::int64_t offset = 0;  // bytes of a token's prepared activations before this segment
  for (std::int64_t k = 0, end = 0; k < t.segments.k; k = end) {
    end = t.segments.end(k);
    const std::int64_t octets = tile::Geometry::octets(end - k);
    Header header;
    const std::byte* weights = fill(*t.decoder, lookup, t.weight, block, k, octets, 4 * octets, header, panel);
    multiply_segment(t, m_begin, m_end, offset, reinterpret_cast<const Ints*>(weights), octets, header.scale, sum);
    offset += t.segment_header + 16 * octets;
  }
  t.outputs.store(sum, block, m_begin, m_end - m_begin);
}

void linear(const DotTask& t, std::int64_t block_begin, std::int64_t block_end, std::int64_t m_begin) {
  const std::int64_t m_end = m_begin + kTokens < t.m ? m_begin + kTokens : t.m;
  const Lookup lookup(*t.decoder);
  for (std::int64_t block = block_begin; block < block_end; ++block) linear_block(t, lookup, block, m_begin, m_end);
}
#else
#include "kernels/cpu/tiles/amx_halves.inl"
#endif

#undef NIBBLE_LOOKS_UP_BYTES
#endif
