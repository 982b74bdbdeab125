// Included once per instruction set by dot_tile.cpp. See dot_tile.hpp for the algorithm.
#if NIBBLE_ISA != NIBBLE_ISA_AVX512BF16  // which has the dot products of AVX512VNNI

// Tokens per register tile. Registers hold H·D·kVecs integer sums, H·kVecs float sums, the codes of two quads and a broadcast.
#if NIBBLE_ISA == NIBBLE_ISA_AVX512 || NIBBLE_ISA == NIBBLE_ISA_AVX512VNNI
constexpr int kFixedTile = 3;  // 18 + 6 of 32
constexpr int kInt8Tile = 6;   // 12 + 12
#elif NIBBLE_ISA == NIBBLE_ISA_DOTPROD || NIBBLE_ISA == NIBBLE_ISA_I8MM
constexpr int kFixedTile = 1;  // 12 + 4 of 32
constexpr int kInt8Tile = 4;   // 16 + 16, the float sums in L1 between segments
#else
constexpr int kFixedTile = 1;  // 6 + 2 of 16
constexpr int kInt8Tile = 4;   // 8 + 8, the float sums in L1 between segments
#endif
constexpr int kMaxTile = kInt8Tile;
constexpr int kMaxRows = 3 * kFixedTile > kInt8Tile ? 3 * kFixedTile : kInt8Tile;

/// A tall tile computes for long enough per line that the hardware's stream detection falls behind; asking for lines this far ahead
/// helps it by a tenth. A low tile is limited by the memory, and asking only takes misses away from the hardware: a tenth slower.
constexpr std::ptrdiff_t kPrefetchBytes = 2048;
constexpr int kPrefetchRows = 6;

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

/// acc[rows][R] += quad of every virtual row · codes.
__attribute__((always_inline)) inline void add_quad(int rows, const std::byte* a, const Ints* w, int bits, Ints (*acc)[kVecs]) {
  for (int r = 0; r < rows; ++r) {
    const Ints quad = load_splat(a + 4 * r);
    for (int v = 0; v < kVecs; ++v) acc[r][v] = dot4(acc[r][v], w[v], quad, bits);
  }
}

/// sum[height][R] of one row block over all of K. `bits` (4, 8; 0: any other width), `digits` and `height` are constants at every
/// call.
__attribute__((always_inline)) inline void multiply(int bits, int digits, int height, const DotTask& t, const std::byte* block,
                                                    const std::byte* a, float* out) {
  const Decoder& d = *t.decoder;
  const tile::Geometry& geo = d.geometry;
  const int rows = height * digits;
  const bool apart = rows * kVecs <= 6;  // few sums do not hide the latency of a dot product: two sets of them
  const bool subtracts = d.zero == ZeroKind::integer || d.zero == ZeroKind::real || (geo.bits != 4 && kByteBias != 0);
  const int dot_bits = bits == 4 ? 4 : 8;
  const Ints flip =
      splat(static_cast<std::int32_t>(static_cast<std::uint32_t>(bits == 8 ? d.flip ^ kByteBias : kByteBias) * 0x01010101u));
  const tile::Planes planes = tile::planes(geo.bits);
  Vec sum[kMaxTile][kVecs];
  for (int m = 0; m < height; ++m)
    for (int v = 0; v < kVecs; ++v) sum[m][v] = Vec{};

  GroupHeader header;
  const std::byte* codes = block;
  std::int64_t group_left = 0;
  for (std::int64_t k = 0, length = 0; k < geo.k; k += length) {
    if (group_left == 0) {
      group_left = geo.group < geo.k - k ? geo.group : geo.k - k;
      read_group_header(d, codes, header);
      codes += geo.header_bytes;
    }
    length = t.segments.piece < group_left ? t.segments.piece : group_left;
    group_left -= length;

    const auto* scales = reinterpret_cast<const float*>(a);
    const float* sums = scales + height;
    a += 8 * height;
    Ints acc[kMaxRows][kVecs], more[kMaxRows][kVecs];
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < kVecs; ++v) {
        acc[r][v] = load_splat(a + 4 * r);
        more[r][v] = Ints{};
      }
    a += 4 * rows;
    for (std::int64_t j = 0; j < length; j += tile::kOctet, codes += geo.octet_bytes, a += 8 * rows) {
      Ints low[kVecs], high[kVecs];
      for (int v = 0; v < kVecs; ++v) {
        const Quads quads = bits == 0 ? load_any_quads(planes, codes, v) : load_quads(bits, codes, v);
        low[v] = bits == 4 ? quads.low : quads.low ^ flip;
        high[v] = bits == 4 ? quads.high : quads.high ^ flip;
      }
      const int octet_bytes = (bits == 0 ? 8 : bits) * kRows;
      for (int line = 0; rows >= kPrefetchRows && line < octet_bytes; line += 64)
        __builtin_prefetch(codes + kPrefetchBytes + line);
      add_quad(rows, a, low, dot_bits, acc);
      add_quad(rows, a + 4 * rows, high, dot_bits, apart ? more : acc);
    }

    if (apart)
      for (int r = 0; r < rows; ++r)
        for (int v = 0; v < kVecs; ++v) acc[r][v] += more[r][v];
    Vec dot[kMaxTile][kVecs];
    for (int m = 0; m < height; ++m)
      for (int v = 0; v < kVecs; ++v)
        dot[m][v] = digits == 1 ? to_floats(acc[m][v])
                                : to_floats((acc[3 * m + 2][v] << 8) + acc[3 * m + 1][v]) * 256.0f + to_floats(acc[3 * m][v]);
    if (subtracts)
      for (int m = 0; m < height; ++m)
        for (int v = 0; v < kVecs; ++v) dot[m][v] -= header.zero[v] * sums[m];
    for (int m = 0; m < height; ++m)
      for (int v = 0; v < kVecs; ++v) sum[m][v] += (dot[m][v] * scales[m]) * header.scale[v];
    if (d.zero == ZeroKind::offset)
      for (int m = 0; m < height; ++m)
        for (int v = 0; v < kVecs; ++v) sum[m][v] += (sums[m] * scales[m]) * header.offset[v];
  }
  for (int m = 0; m < height; ++m)
    for (int v = 0; v < kVecs; ++v) store(out + m * kRows + v * kLanes, sum[m][v]);
}

__attribute__((always_inline)) inline void multiply_height(int bits, int digits, int height, const DotTask& t,
                                                           const std::byte* block, const std::byte* a, float* out) {
  const int tile = digits == 1 ? kInt8Tile : kFixedTile;  // a constant: the cases above it vanish
  switch (height) {
    case 1: return multiply(bits, digits, 1, t, block, a, out);
    case 2:
      if (tile >= 2) multiply(bits, digits, 2, t, block, a, out);
      return;
    case 3:
      if (tile >= 3) multiply(bits, digits, 3, t, block, a, out);
      return;
    case 4:
      if (tile >= 4) multiply(bits, digits, 4, t, block, a, out);
      return;
    case 5:
      if (tile >= 5) multiply(bits, digits, 5, t, block, a, out);
      return;
    case 6:
      if (tile >= 6) multiply(bits, digits, 6, t, block, a, out);
      return;
    default: return;
  }
}

__attribute__((always_inline)) inline void multiply_any(int digits, int height, const DotTask& t, const std::byte* block,
                                                        const std::byte* a, float* out) {
  switch (t.decoder->geometry.bits) {
    case 4: return multiply_height(4, digits, height, t, block, a, out);
    case 8: return multiply_height(8, digits, height, t, block, a, out);
    default: return multiply_height(0, digits, height, t, block, a, out);
  }
}

/// D = Σ(q − z)·s·W = Σ q·s·W − z·s·ΣW: the second half, for one tile of one row block. `columns` are the ΣW, `a` a tile.
void subtract_zeros(std::int64_t height, const std::byte* a, const float* columns, float* out) {
  for (std::int64_t r = 0; r < height; ++r) {
    std::int32_t zero;
    float scale;
    std::memcpy(&zero, a + 4 * r, 4);
    std::memcpy(&scale, a + 4 * (height + r), 4);
    const float shift = static_cast<float>(zero) * scale;
    for (int i = 0; i < kRows; ++i) out[r * kRows + i] -= shift * columns[i];
  }
}

/// Tiles of tokens outside, row blocks inside: the activations of a tile stay in L1 and L2 while the row blocks of the task, which
/// fit in L2 together, go by.
__attribute__((always_inline)) inline void linear(int digits, const DotTask& t, std::int64_t block_begin, std::int64_t block_end,
                                                  std::int64_t m_begin, std::int64_t m_end) {
  const tile::Geometry& geo = t.decoder->geometry;
  const std::int64_t before = t.zeros ? 4 : 0;  // bytes per token that a tile begins with
  alignas(64) float out[kMaxTile * kRows], columns[kMaxTaskBlocks * kRows];
  for (std::int64_t block = block_begin; t.zeros && block < block_end; ++block)
    multiply_any(digits, 1, t, t.weight + geo.record(block, 0), t.ones() + before, columns + (block - block_begin) * kRows);
  for (std::int64_t m = m_begin; m < m_end; m += t.tile) {
    const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile;
    const std::byte* a = t.activations + m * t.token_bytes;
    for (std::int64_t block = block_begin; block < block_end; ++block) {
      multiply_any(digits, static_cast<int>(height), t, t.weight + geo.record(block, 0), a + before * height, out);
      if (t.zeros) subtract_zeros(height, a, columns + (block - block_begin) * kRows, out);
      t.outputs.store(out, block, m, height);
    }
  }
}

void linear_fixed(const DotTask& t, std::int64_t block, std::int64_t block_end, std::int64_t m, std::int64_t m_end) {
  linear(3, t, block, block_end, m, m_end);
}
void linear_int8(const DotTask& t, std::int64_t block, std::int64_t block_end, std::int64_t m, std::int64_t m_end) {
  linear(1, t, block, block_end, m, m_end);
}

#endif
