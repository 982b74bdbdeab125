// Included once per instruction set by whole_tile.cpp. See whole_tile.hpp for the algorithm.
#if NIBBLE_ISA != NIBBLE_ISA_AVX512BF16  // which has the dot products of AVX512VNNI

// Tokens per register tile: H·kVecs sums, the codes of a quad of channels and a broadcast.
#if NIBBLE_ISA == NIBBLE_ISA_AVX512 || NIBBLE_ISA == NIBBLE_ISA_AVX512VNNI
constexpr int kTile = 12;  // 24 of 32
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
constexpr int kTile = 6;  // 12 of 16
#else
constexpr int kTile = 4;  // 16 of 32 on AArch64; 8 of 16 on AVX2, whose dot products need registers in between
#endif

/// A tile from this height on asks for lines this far ahead; see dot_tile.inl.
constexpr std::ptrdiff_t kPrefetchBytes = 2048;
constexpr int kPrefetchRows = 6;

/// acc[rows][R] += quad of every token · codes.
__attribute__((always_inline)) inline void add_quad(int height, const std::byte* a, const Ints* w, int bits, Ints (*acc)[kVecs]) {
  for (int r = 0; r < height; ++r) {
    const Ints quad = load_splat(a + 4 * r);
    for (int v = 0; v < kVecs; ++v) acc[r][v] = dot4(acc[r][v], w[v], quad, bits);
  }
}

/// acc[height][R] = start + Σ q·code over `octets` octets; `a` begins with the starts. `bits` (4 or 8) and `height` are constants at
/// every call.
__attribute__((always_inline)) inline void sum(int bits, int height, const Decoder& d, const std::byte* codes, const std::byte* a,
                                               std::int64_t octets, std::int32_t* out) {
  const bool apart = height * kVecs <= 6;  // few sums do not hide the latency of a dot product: two sets of them
  const Ints flip =
      splat(static_cast<std::int32_t>(static_cast<std::uint32_t>(bits == 8 ? d.flip ^ kByteBias : kByteBias) * 0x01010101u));
  Ints acc[kTile][kVecs], more[kTile][kVecs];
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) {
      acc[r][v] = load_splat(a + 4 * r);
      more[r][v] = Ints{};
    }
  a += 4 * height;
  constexpr int kLine = 64;
  const int octet_bytes = bits * kRows;
  for (; octets > 0; --octets, codes += octet_bytes, a += 8 * height) {
    Ints low[kVecs], high[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      const Quads quads = load_quads(bits, codes, v);
      low[v] = bits == 4 ? quads.low : quads.low ^ flip;
      high[v] = bits == 4 ? quads.high : quads.high ^ flip;
    }
    for (int line = 0; height >= kPrefetchRows && line < octet_bytes; line += kLine)
      __builtin_prefetch(codes + kPrefetchBytes + line);
    add_quad(height, a, low, bits, acc);
    add_quad(height, a + 4 * height, high, bits, apart ? more : acc);
  }
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) store_ints(out + r * kRows + v * kLanes, apart ? acc[r][v] + more[r][v] : acc[r][v]);
}

__attribute__((always_inline)) inline void sum_height(int bits, int height, const Decoder& d, const std::byte* codes,
                                                      const std::byte* a, std::int64_t octets, std::int32_t* out) {
  switch (height) {  // cases above kTile vanish
    case 1: return sum(bits, 1, d, codes, a, octets, out);
    case 2: return sum(bits, 2, d, codes, a, octets, out);
    case 3: return sum(bits, 3, d, codes, a, octets, out);
    case 4: return sum(bits, 4, d, codes, a, octets, out);
    case 5: return kTile >= 5 ? sum(bits, 5, d, codes, a, octets, out) : void();
    case 6: return kTile >= 6 ? sum(bits, 6, d, codes, a, octets, out) : void();
    case 7: return kTile >= 7 ? sum(bits, 7, d, codes, a, octets, out) : void();
    case 8: return kTile >= 8 ? sum(bits, 8, d, codes, a, octets, out) : void();
    case 9: return kTile >= 9 ? sum(bits, 9, d, codes, a, octets, out) : void();
    case 10: return kTile >= 10 ? sum(bits, 10, d, codes, a, octets, out) : void();
    case 11: return kTile >= 11 ? sum(bits, 11, d, codes, a, octets, out) : void();
    case 12: return kTile >= 12 ? sum(bits, 12, d, codes, a, octets, out) : void();
    default: return;
  }
}

/// Not inlined: what the caller keeps in registers would cost sums.
__attribute__((noinline)) void sum_tile(int height, const Decoder& d, const std::byte* codes, const std::byte* a,
                                        std::int64_t octets, std::int32_t* out) {
  return d.geometry.bits == 4 ? sum_height(4, height, d, codes, a, octets, out) : sum_height(8, height, d, codes, a, octets, out);
}

/// Scales and zeros of a row block.
struct Channels {
  alignas(64) float scale[kRows];
  alignas(64) float zero[kRows];  // integers, of the codes less their bias
};

void read_channels(const Decoder& d, const std::byte* record, Channels& channels) {
  const std::int64_t scale_step = d.geometry.scale_bytes / kVecs;
  const std::int64_t zero_step = (d.geometry.header_bytes - d.geometry.scale_bytes) / kVecs;
  for (int v = 0; v < kVecs; ++v) {
    store(channels.scale + v * kLanes, load_as_floats(record + v * scale_step, d.scale_type));
    Vec zero = Vec{} - static_cast<float>(d.geometry.bits != 4 ? kByteBias : 0);
    if (d.zero != ZeroKind::none) zero += load_as_floats(record + d.geometry.scale_bytes + v * zero_step, d.zero_type);
    store(channels.zero + v * kLanes, zero);
  }
}

float float_at(const std::byte* p) {
  float x;
  std::memcpy(&x, p, 4);
  return x;
}

/// Σ q·(q_w − z_w) of every token and channel of a tile; q of the activations as they are stored. `a` is past the tile's zero points.
void sum_exactly(const DotTask& t, std::int64_t height, const std::byte* codes, const std::byte* a, const Channels& channels,
                 double* total) {
  alignas(64) std::int32_t acc[kTile * kRows];
  for (std::int64_t i = 0; i < height * kRows; ++i) total[i] = 0;
  for (std::int64_t k = 0, end = 0; k < t.segments.k; k = end) {
    end = t.segments.end(k);
    const std::int64_t octets = tile::Geometry::octets(end - k);
    sum_tile(static_cast<int>(height), *t.decoder, codes, a + 8 * height, octets, acc);
    for (std::int64_t r = 0; r < height; ++r) {
      const double units = float_at(a + 4 * (height + r));
      for (std::int64_t i = r * kRows; i < (r + 1) * kRows; ++i)
        total[i] += static_cast<double>(acc[i]) - static_cast<double>(channels.zero[i - r * kRows]) * units;
    }
    codes += octets * t.decoder->geometry.octet_bytes;
    a += (12 + 8 * octets) * height;
  }
}

/// x = fl( fl( x·s_a ) · s_w ) [· scale2].
void apply_scales(const Decoder& d, float token, const Channels& channels, float* x) {
  for (int v = 0; v < kVecs; ++v) {
    Vec y = (load(x + v * kLanes) * token) * load(channels.scale + v * kLanes);
    if (d.has_scale2) y *= d.scale2;
    store(x + v * kLanes, y);
  }
}

/// A tile of tokens and a row block, up to the epilogue. `columns`: the Σ(q_w − z_w), where activations have zero points.
void multiply(const DotTask& t, std::int64_t height, const std::byte* record, const std::byte* a, const Channels& channels,
              const double* columns, float* out) {
  const Decoder& d = *t.decoder;
  const std::byte* codes = record + d.geometry.header_bytes;
  const bool zero_points = t.zeros != Zeros::none;
  const std::byte* zeros = a;
  if (zero_points) a += 4 * height;
  if (zero_points || d.zero != ZeroKind::none || (kByteBias != 0 && d.geometry.bits != 4) || t.segments.k > t.segments.piece) {
    alignas(64) double total[kTile * kRows];
    sum_exactly(t, height, codes, a, channels, total);
    for (std::int64_t r = 0; r < height; ++r) {
      std::int32_t zero = 0;
      if (zero_points) std::memcpy(&zero, zeros + 4 * r, 4);
      for (std::int64_t i = 0; i < kRows; ++i)
        out[r * kRows + i] = static_cast<float>(zero == 0 ? total[r * kRows + i] : total[r * kRows + i] - zero * columns[i]);
    }
  } else {  // one sum of 32 bits is all there is
    alignas(64) std::int32_t acc[kTile * kRows];
    sum_tile(static_cast<int>(height), d, codes, a + 8 * height, tile::Geometry::octets(t.segments.k), acc);
    for (std::int64_t i = 0; i < height * kRows; i += kLanes) store(out + i, to_floats(load_ints(acc + i)));
  }
  for (std::int64_t r = 0; r < height; ++r) apply_scales(d, float_at(a + 4 * r), channels, out + r * kRows);
}

/// Tiles of tokens outside, row blocks inside, as in dot_tile.inl.
void linear_whole(const DotTask& t, std::int64_t block_begin, std::int64_t block_end, std::int64_t m_begin, std::int64_t m_end) {
  const Decoder& d = *t.decoder;
  const tile::Geometry& geo = d.geometry;
  Channels channels[kMaxTaskBlocks];
  alignas(64) double columns[kMaxTaskBlocks * kRows];
  alignas(64) float out[kTile * kRows];
  for (std::int64_t i = 0; i < block_end - block_begin; ++i) {
    const std::byte* record = t.weight + geo.record(block_begin + i, 0);
    read_channels(d, record, channels[i]);
    if (t.zeros != Zeros::none) sum_exactly(t, 1, record + geo.header_bytes, t.ones() + 4, channels[i], columns + i * kRows);
  }
  for (std::int64_t m = m_begin; m < m_end; m += t.tile) {
    const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile;
    for (std::int64_t i = 0; i < block_end - block_begin; ++i) {
      const std::int64_t n0 = (block_begin + i) * kRows;
      multiply(t, height, t.weight + geo.record(block_begin + i, 0), t.activations + m * t.token_bytes, channels[i],
               columns + i * kRows, out);
      const std::int64_t count = geo.n - n0 < kRows ? geo.n - n0 : kRows;
      for (std::int64_t r = 0; r < height; ++r)
        epilogue::store_row(*t.epilogue, *t.operands, out + r * kRows, m + r, n0, count, *t.d);
    }
  }
}

#endif
