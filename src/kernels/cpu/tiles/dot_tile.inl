// Included once per instruction set by dot_tile.cpp. See dot_tile.hpp for the algorithm.
// The levels of bf16 use the dot products of the level below.
#if NIBBLE_ISA != NIBBLE_ISA_AVX512BF16 && NIBBLE_ISA != NIBBLE_ISA_NEONBF16

/// Scales and zeros of a group: W = (code − bias − zero)·scale + offset. The bias is in the prepared activations.
struct GroupHeader {
  Vec scale[kVecs], zero[kVecs], offset[kVecs];
};

/// Not inlined: eighteen variants of the loop would each carry the conversions of every type.
__attribute__((noinline)) void read_group_header(const Decoder& d, const std::byte* record, GroupHeader& h) {
  const std::int64_t scale_step = d.geometry.scale_bytes / kVecs;
  const std::int64_t zero_step = (d.geometry.header_bytes - d.geometry.scale_bytes) / kVecs;
  const std::byte* zeros = record + d.geometry.scale_bytes;
  for (int v = 0; v < kVecs; ++v) {
    h.scale[v] = load_as_floats(record + v * scale_step, d.scale_type);
    h.zero[v] = Vec{} - static_cast<float>(d.geometry.bits != 4 ? kByteBias : 0);
    h.offset[v] = Vec{};
    if (d.zero == ZeroKind::offset) {
      h.offset[v] = load_as_floats(zeros + v * zero_step, d.zero_type);
    } else if (d.zero != ZeroKind::none) {
      h.zero[v] += load_as_floats(zeros + v * zero_step, d.zero_type);
    }
    if (d.has_scale2) {
      h.scale[v] *= d.scale2;
      h.offset[v] *= d.scale2;
    }
  }
}

/// A float in every lane, loaded from memory: if the compiler sees a scalar that is also used elsewhere, it adds a shuffle.
inline Vec splat_at(const float* p) { return reinterpret_cast<Vec>(load_splat(p)); }

/// Scales of 16 bits and no zero points, or zero points of a byte. Such headers are read in the loop: a call for each takes a seventh of the
/// time of groups of 32.
inline bool has_common_header(const Decoder& d) {
  return (d.scale_type == DType::f16 || d.scale_type == DType::bf16) && !d.has_scale2 &&
         (d.zero == ZeroKind::none || (d.zero == ZeroKind::integer && d.zero_type == DType::u8));
}
NIBBLE_VARIANT void read_common_header(int byte_bias, const Decoder& d, const std::byte* record, GroupHeader& h) {
  for (int v = 0; v < kVecs; ++v) {
    const std::byte* scales = record + 2 * v * kLanes;
    h.scale[v] = d.scale_type == DType::f16 ? load_f16(scales) : reinterpret_cast<Vec>(load_u16(scales) << 16);
    h.zero[v] = Vec{} - static_cast<float>(byte_bias);
    if (d.zero == ZeroKind::integer) h.zero[v] += to_floats(load_u8(record + d.geometry.scale_bytes + v * kLanes));
  }
}

#if NIBBLE_ISA == NIBBLE_ISA_AMX
#include "kernels/cpu/tiles/amx_segments.inl"
#else
// Tokens per register tile. Registers hold H·D·kVecs integer sums, H·kVecs float sums, the codes of two quads and a broadcast.
#if NIBBLE_ISA == NIBBLE_ISA_AVX512 || NIBBLE_ISA == NIBBLE_ISA_AVX512VNNI
constexpr int kFixedTile = 3;  // 18 + 6 of 32
constexpr int kInt8Tile = 6;   // 12 + 12
#elif NIBBLE_ISA == NIBBLE_ISA_I8MM
#include "kernels/cpu/tiles/row_pairs.inl"
constexpr int kFixedTile = kPairRows / 3, kInt8Tile = kPairRows;
#elif NIBBLE_ISA == NIBBLE_ISA_DOTPROD
constexpr int kFixedTile = 1;  // 12 + 4 of 32
constexpr int kInt8Tile = 4;   // 16 + 16, the float sums in L1 between segments
#else
constexpr int kFixedTile = 1;  // 6 + 2 of 16
constexpr int kInt8Tile = 4;   // 8 + 8, the float sums in L1 between segments
#endif
constexpr int kMaxTile = kInt8Tile;
constexpr int kMaxRows = 3 * kFixedTile > kInt8Tile ? 3 * kFixedTile : kInt8Tile;

/// The distance of prefetches. A tall tile computes for so long per line that the hardware prefetcher falls behind; prefetching this far
/// ahead, into L1, makes it a tenth faster. A low tile is limited by memory, and what is fastest differs between CPUs: low_tile_ahead().
constexpr std::ptrdiff_t kPrefetchBytes = 2048;
constexpr int kPrefetchRows = 6;

#include "kernels/cpu/tiles/streams.inl"
constexpr int kMostVecs = kMostStreams * kVecs;  // of row blocks side by side

/// acc[rows][R] += quad of every virtual row · codes.
NIBBLE_VARIANT void add_quad(int rows, const std::byte* a, const Ints* w, int bits, Ints (*acc)[kMostVecs]) {
  for (int r = 0; r < rows; ++r) {
    const Ints quad = load_splat(a + 4 * r);
    for (int v = 0; v < kVecs; ++v) acc[r][v] = dot4(acc[r][v], w[v], quad, bits);
  }
}

/// Σ of the codes of each segment of a row block, by which zero points of activations are multiplied: R floats per segment, of codes minus
/// their bias, or pairs {the weight's zero point, Σ}, `step` of them apart; where 0, each overwrites the last.
struct Columns {
  float* sums;  // null: activations have no zero points
  std::int64_t step;
};

/// Adds the codes of an octet.
NIBBLE_VARIANT Ints add_codes(Ints sum, Ints low, Ints high, int bits) {
  const Ints ones = splat(0x01010101);
  if (bits == 4) return dot4(sum, low + high, ones, 4);
  return dot4(dot4(sum, low, ones, 8), high, ones, 8);
}

/// Adds those codes of an octet that are of its channels [begin, end).
inline void add_some_codes(int bits, const Decoder& d, const std::byte* octet, std::int64_t begin, std::int64_t end, Ints* sum) {
  std::int8_t ones[tile::kOctet];
  for (int i = 0; i < tile::kOctet; ++i) ones[i] = i >= begin && i < end ? 1 : 0;
  const Ints low_ones = load_splat(ones), high_ones = load_splat(ones + 4);
  const Ints flip = splat(static_cast<std::int32_t>(kByteBias * 0x01010101u));
  const tile::Planes planes = tile::planes(d.geometry.bits);
  for (int v = 0; v < kVecs; ++v) {
    if (bits == 4) {
      const Quads quads = load_quads(4, octet, v);
      sum[v] = dot4(dot4(sum[v], quads.low, low_ones, 4), quads.high, high_ones, 4);
    } else {
      const Quads quads = bits == 8 ? load_quads(8, octet, v) : load_any_quads(planes, octet, v);
      sum[v] = dot4(dot4(sum[v], quads.low ^ flip, low_ones, 8), quads.high ^ flip, high_ones, 8);
    }
  }
}
/// Σ of the codes beside a segment in its first and its last octet: `before` and `behind` of them. Rare, and kept out of the registers of
/// the loop.
__attribute__((noinline)) void sum_other_codes(const Decoder& d, const std::byte* first, std::int64_t before,
                                               const std::byte* last, std::int64_t behind, Ints* sum) {
  for (int v = 0; v < kVecs; ++v) sum[v] = Ints{};
  add_some_codes(d.geometry.bits, d, first, 0, before, sum);
  add_some_codes(d.geometry.bits, d, last, tile::kOctet - behind, tile::kOctet, sum);
}

/// sum[height][R] of each of `streams` row blocks over all of K, `kMaxTile` rows apart in `out`. `bits` (4, 8; 0: any width, and segments that
/// are not regular), `digits`, `height`, `streams` and `sums_columns` (column sums are computed, not loaded) are constants at every call;
/// except `sums_columns` for other widths, too rare for a loop of their own.
NIBBLE_VARIANT void multiply(int bits, int digits, int height, int streams, bool sums_columns, const DotTask& t,
                             const std::byte* block, const std::byte* a, Columns columns, float* out) {
  const Decoder& d = *t.decoder;
  const tile::Geometry& geo = d.geometry;
  const int rows = height * digits, vecs = streams * kVecs;  // vector v is of row block v / kVecs
  const bool apart = rows * vecs <= 6;                       // few sums do not hide the latency of a dot product: use two sets
  const bool has_columns = digits == 1 && columns.sums != nullptr, paired = has_columns && t.paired;
  const bool subtracts =
      !paired && (d.zero == ZeroKind::integer || d.zero == ZeroKind::real || (geo.bits != 4 && kByteBias != 0));
  const int dot_bits = bits == 4 ? 4 : 8;
  const int byte_bias = (bits == 0 ? geo.bits : bits) == 4 ? 0 : kByteBias;
  const Ints flip = splat(static_cast<std::int32_t>(static_cast<std::uint32_t>(byte_bias) * 0x01010101u));
  const tile::Planes planes = tile::planes(geo.bits);
  const bool into_l1 = streams > 1 || rows >= kPrefetchRows;
  const std::ptrdiff_t ahead = into_l1 ? kPrefetchBytes : low_tile_ahead();
  Vec sum[kMaxTile][kMostVecs];
  for (int m = 0; m < height; ++m)
    for (int v = 0; v < vecs; ++v) sum[m][v] = Vec{};

  GroupHeader headers[kMostStreams];
  const bool common = has_common_header(d);
  const std::byte* codes = block;
  const bool regular = bits != 0 || t.segments.regular();
  std::int64_t group_left = 0, lead = 0;
  for (std::int64_t k = 0, length = 0; k < geo.k; k += length) {
    if (group_left == 0) {
      group_left = geo.group < geo.k - k ? geo.group : geo.k - k;
      for (int s = 0; s < streams; ++s) {
        const std::byte* const record = codes + s * geo.row_block_bytes;
        common ? read_common_header(byte_bias, d, record, headers[s]) : read_group_header(d, record, headers[s]);
      }
      codes += geo.header_bytes;
    }
    length = t.segments.piece < group_left ? t.segments.piece : group_left;
    if (!regular) {
      length = t.segments.end(k) - k;
      lead = t.segments.lead(k);
    }
    group_left -= length;
    const std::byte* const first_octet = codes;

    const auto* scales = reinterpret_cast<const float*>(a);
    const float* sums = scales + height;
    a += 8 * height;
    const std::byte* zeros = a;
    if (has_columns) a += 4 * height;
    Ints column[kMostVecs];
    for (int v = 0; v < vecs; ++v) column[v] = Ints{};
    Ints acc[kMaxRows][kMostVecs], more[kMaxRows][kMostVecs];
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < vecs; ++v) {
        acc[r][v] = load_splat(a + 4 * r);
        more[r][v] = Ints{};
      }
    a += 4 * rows;
    const std::int64_t span = lead + length;  // of the segment's octets
    for (std::int64_t j = 0; j < span; j += tile::kOctet, codes += geo.octet_bytes, a += 8 * rows) {
      Ints low[kMostVecs], high[kMostVecs];
      for (int v = 0; v < vecs; ++v) {
        const std::byte* const octet = codes + v / kVecs * geo.row_block_bytes;
        const Quads quads = bits == 0 ? load_any_quads(planes, octet, v) : load_quads(bits, octet, v % kVecs);
        low[v] = bits == 4 ? quads.low : quads.low ^ flip;
        high[v] = bits == 4 ? quads.high : quads.high ^ flip;
        if (sums_columns) column[v] = add_codes(column[v], low[v], high[v], dot_bits);
        if (streams > 1)  // a vector at a time: broadcasts stay in registers, codes do not
          for (int r = 0; r < rows; ++r)
            acc[r][v] =
                dot4(dot4(acc[r][v], low[v], load_splat(a + 4 * r), dot_bits), high[v], load_splat(a + 4 * (rows + r)), dot_bits);
      }
      const int octet_bytes = (bits == 0 ? 8 : bits) * kRows;
      for (int s = 0; s < streams; ++s)
        for (int line = 0; ahead != 0 && line < octet_bytes; line += 64) {
          const std::byte* const next = codes + s * geo.row_block_bytes + ahead + line;
          into_l1 ? __builtin_prefetch(next) : __builtin_prefetch(next, 0, 2);
        }
      if (streams == 1) {
        add_quad(rows, a, low, dot_bits, acc);
        add_quad(rows, a + 4 * rows, high, dot_bits, apart ? more : acc);
      }
    }

    if (apart && streams == 1)
      for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vecs; ++v) acc[r][v] += more[r][v];
    // Codes that fill up the last octet are 0 before they are flipped.
    std::int64_t filled = (span + tile::kOctet - 1) / tile::kOctet * tile::kOctet - span;
    if (!regular) {  // the last octet is the next segment's first, too, unless the group ends
      const std::int64_t behind = group_left == 0 ? 0 : filled;
      if (behind != 0) {
        codes -= geo.octet_bytes;
        filled = 0;
      }
      if (sums_columns && !paired && lead + behind != 0) {
        Ints others[kVecs];
        sum_other_codes(d, first_octet, lead, behind != 0 ? codes : first_octet, behind, others);
        for (int v = 0; v < kVecs; ++v) column[v] -= others[v];
      }
    }
    const Ints biases = splat(static_cast<std::int32_t>(byte_bias * filled - static_cast<int>(d.bias) * length));
    for (int v = 0; sums_columns && v < vecs; ++v) {
      const Ints pair = column[v] << 16 | (to_ints(headers[v / kVecs].zero[v % kVecs]) & 0xffff);
      store(columns.sums + v * kLanes, paired ? reinterpret_cast<Vec>(pair) : to_floats(column[v] + biases));
    }
    if (paired) {
      Ints pair[kMostVecs];
      for (int v = 0; v < vecs; ++v) pair[v] = reinterpret_cast<Ints>(load(columns.sums + v * kLanes));
      for (int m = 0; m < height; ++m)
        for (int v = 0; v < vecs; ++v) acc[m][v] = add_pairs(acc[m][v], pair[v], load_splat(zeros + 4 * m));
    }
    Vec dot[kMaxTile][kMostVecs];
    for (int m = 0; m < height; ++m)
      for (int v = 0; v < vecs; ++v)
        dot[m][v] = digits == 1 ? to_floats(acc[m][v])
                                : to_floats((acc[3 * m + 2][v] << 8) + acc[3 * m + 1][v]) * 256.0f + to_floats(acc[3 * m][v]);
    if (has_columns && !paired)
      for (int v = 0; v < vecs; ++v) {
        const Vec codes_sum = load(columns.sums + v * kLanes);
        for (int m = 0; m < height; ++m) dot[m][v] -= codes_sum * splat_at(reinterpret_cast<const float*>(zeros) + m);
      }
    if (has_columns) columns.sums += columns.step;
    if (subtracts)
      for (int m = 0; m < height; ++m)
        for (int v = 0; v < vecs; ++v) dot[m][v] -= headers[v / kVecs].zero[v % kVecs] * sums[m];
    for (int m = 0; m < height; ++m)
      for (int v = 0; v < vecs; ++v) sum[m][v] += (dot[m][v] * splat_at(scales + m)) * headers[v / kVecs].scale[v % kVecs];
    if (d.zero == ZeroKind::offset)
      for (int m = 0; m < height; ++m)
        for (int v = 0; v < vecs; ++v)
          sum[m][v] += (splat_at(sums + m) * splat_at(scales + m)) * headers[v / kVecs].offset[v % kVecs];
  }
  for (int m = 0; m < height; ++m)
    for (int v = 0; v < vecs; ++v) store(out + (v / kVecs * kMaxTile + m) * kRows + v % kVecs * kLanes, sum[m][v]);
}

#if NIBBLE_ISA == NIBBLE_ISA_I8MM
#include "kernels/cpu/tiles/pair_segments.inl"
#endif

/// multiply() with these constants. A function of its own: one that holds all of them takes twice as long to compile.
template <int kBits, int kDigits, int kHeight, bool kStreams, bool kSums>
__attribute__((noinline)) void multiply_as(const DotTask& t, const std::byte* block, const std::byte* a, Columns columns,
                                           float* out) {
  multiply(kBits, kDigits, kHeight, kStreams ? streams_of(kHeight * kDigits) : 1, kSums, t, block, a, columns, out);
}

template <int kBits, int kDigits, bool kStreams, bool kSums>
void multiply_height(int height, const DotTask& t, const std::byte* block, const std::byte* a, Columns columns, float* out) {
  constexpr int kTile = NIBBLE_ISA == NIBBLE_ISA_I8MM ? 1 : kDigits == 1 ? kInt8Tile : kFixedTile;
  const auto multiply_rows = [&]<int kHeight>(std::integral_constant<int, kHeight>) {
    if constexpr (kHeight <= kTile && kStreams <= (streams_of(kHeight * kDigits) > 1))
      multiply_as<kBits, kDigits, kHeight, kStreams, kSums>(t, block, a, columns, out);
  };
  switch (height) {
    case 1: return multiply_rows(std::integral_constant<int, 1>{});
    case 2: return multiply_rows(std::integral_constant<int, 2>{});
    case 3: return multiply_rows(std::integral_constant<int, 3>{});
    case 4: return multiply_rows(std::integral_constant<int, 4>{});
    case 5: return multiply_rows(std::integral_constant<int, 5>{});
    case 6: return multiply_rows(std::integral_constant<int, 6>{});
    default: return;
  }
}

template <int kDigits, bool kStreams, bool kSums>
void multiply_bits(int height, const DotTask& t, const std::byte* block, const std::byte* a, Columns columns, float* out) {
  switch (t.segments.regular() ? t.decoder->geometry.bits : 0) {
    case 4: return multiply_height<4, kDigits, kStreams, kSums>(height, t, block, a, columns, out);
    case 8: return multiply_height<8, kDigits, kStreams, kSums>(height, t, block, a, columns, out);
    default: return multiply_height<0, kDigits, false, kSums>(height, t, block, a, columns, out);
  }
}

template <int kDigits>
void multiply_any(int height, bool streams, bool sums_columns, const DotTask& t, const std::byte* block, const std::byte* a,
                  Columns columns, float* out) {
#if NIBBLE_ISA == NIBBLE_ISA_I8MM
  if (in_pairs(kDigits * height)) return multiply_in_pairs(kDigits, height, sums_columns, t, block, a, columns, out);
#endif
  constexpr bool kMaySum = kDigits == 1;
  if (kMaySum && sums_columns)
    return streams ? multiply_bits<kDigits, true, kMaySum>(height, t, block, a, columns, out)
                   : multiply_bits<kDigits, false, kMaySum>(height, t, block, a, columns, out);
  streams ? multiply_bits<kDigits, true, false>(height, t, block, a, columns, out)
          : multiply_bits<kDigits, false, false>(height, t, block, a, columns, out);
}

/// Tiles of tokens outside, row blocks inside: the activations of a tile stay in L1 and L2 while the row blocks of the task, which fit in
/// L2 together, are multiplied. With zero points the first tile also computes the column sums; where `columns` has room the other tiles
/// reuse them.
template <int kDigits>
void linear(const DotTask& t, std::int64_t block_begin, std::int64_t block_end, std::int64_t m_begin, std::int64_t m_end,
            float* columns) {
  const tile::Geometry& geo = t.decoder->geometry;
  const std::int64_t block_floats = t.segments.count() * kRows;
  const bool single = m_end - m_begin <= t.tile;
  const bool kept = !single && (block_end - block_begin) * block_floats <= kColumnFloats;
  const bool narrow = t.segments.regular() && (geo.bits == 4 || geo.bits == 8);
  const int most = single && narrow && reads_in_streams() ? streams_of(static_cast<int>(m_end - m_begin) * kDigits) : 1;
  alignas(64) float out[kMostStreams * kMaxTile * kRows];
  for (std::int64_t m = m_begin; m < m_end; m += t.tile) {
    const int height = static_cast<int>(t.m - m < t.tile ? t.m - m : t.tile);
    const std::byte* a = t.activations + m * t.token_bytes;
    for (std::int64_t block = block_begin, count = 1; block < block_end; block += count) {
      count = most <= block_end - block ? most : 1;
      const std::byte* record = t.weight + geo.record(block, 0);
      Columns sums{columns, 0};
      if (kept && columns != nullptr) sums = {columns + (block - block_begin) * block_floats, kRows};
      multiply_any<kDigits>(height, count > 1, columns != nullptr && (m == m_begin || !kept), t, record, a, sums, out);
      for (std::int64_t i = 0; i < count; ++i) t.outputs.store(out + i * kMaxTile * kRows, block + i, m, height);
    }
  }
}

void linear_fixed(const DotTask& t, std::int64_t block, std::int64_t block_end, std::int64_t m, std::int64_t m_end) {
  linear<3>(t, block, block_end, m, m_end, nullptr);
}

__attribute__((noinline)) void int8_tiles(const DotTask& t, std::int64_t block, std::int64_t block_end, std::int64_t m,
                                          std::int64_t m_end, float* columns) {
  linear<1>(t, block, block_end, m, m_end, columns);
}
__attribute__((noinline)) void int8_tiles_with_zeros(const DotTask& t, std::int64_t block, std::int64_t block_end, std::int64_t m,
                                                     std::int64_t m_end) {
  alignas(64) float columns[kColumnFloats];
  int8_tiles(t, block, block_end, m, m_end, columns);
}
void linear_int8(const DotTask& t, std::int64_t block, std::int64_t block_end, std::int64_t m, std::int64_t m_end) {
  if (t.zero_sums == ZeroSums::none) return int8_tiles(t, block, block_end, m, m_end, nullptr);
  int8_tiles_with_zeros(t, block, block_end, m, m_end);
}

#endif
#endif
