// Included once per instruction set by bf16_tile.cpp. See bf16_tile.hpp for the algorithm.
#if NIBBLE_ISA == NIBBLE_ISA_AVX512BF16

constexpr int kTile = 8;                 // 8×2 accumulators: each pair of vector loads serves 16 dot products
constexpr int kTokens = 16 * kTile;      // their sums, 16 KiB, and a panel of 8 KiB share L1
constexpr int kSegment = kMaxFixedSegment;

inline Vec dot2(Vec acc, Ints w, Ints a) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(a));
}

/// Two vectors of integers of magnitude ≤ 256 → pairs of bf16, `first` in the low halves.
inline Ints pair_of(Vec first, Vec second) {
  typedef std::uint32_t Words __attribute__((vector_size(kLanes * 4)));
  return reinterpret_cast<Ints>(reinterpret_cast<Words>(first) >> 16 | (reinterpret_cast<Words>(second) & 0xffff0000u));
}

/// One octet → 4 pairs [4][R]. `bits` (4 or 8) is a constant at every call.
__attribute__((always_inline)) inline void decode_octet(int bits, int flip, const Vec* zero, const std::byte* octet, Ints* panel) {
  for (int v = 0; v < kVecs; ++v) {
    const Ints low = load_ints(octet + 4 * v * kLanes);
    if (bits == 4) {  // nibbles from the low end: channels 0 4 1 5 2 6 3 7; pairs (0,2) (4,6) (1,3) (5,7)
      for (int p = 0; p < 4; ++p)
        panel[p * kVecs + v] =
            pair_of(to_floats((low >> (4 * p)) & 15) - zero[v], to_floats((low >> (4 * p + 16)) & 15) - zero[v]);
    } else {
      const Ints high = load_ints(octet + 4 * (kRows + v * kLanes));
      for (int p = 0; p < 4; ++p) {
        const Ints word = (p % 2 == 0 ? low : high) >> (8 * (p / 2));
        panel[p * kVecs + v] =
            pair_of(to_floats((word & 255) ^ flip) - zero[v], to_floats(((word >> 16) & 255) ^ flip) - zero[v]);
      }
    }
  }
}

/// sum[height][R] += scale ∘ (A'[height] · panel) over `pairs` pairs of channels. `height` is a constant at every call.
__attribute__((always_inline)) inline void multiply(int height, const std::byte* a, const Ints* panel, std::int64_t pairs,
                                                    const Vec* scale, float* sum) {
  Vec acc[kTile][kVecs];
  for (int m = 0; m < height; ++m)
    for (int v = 0; v < kVecs; ++v) acc[m][v] = Vec{};
  for (std::int64_t p = 0; p < pairs; ++p, a += 4 * height, panel += kVecs)
    for (int m = 0; m < height; ++m) {
      const Ints pair = load_splat(a + 4 * m);
      for (int v = 0; v < kVecs; ++v) acc[m][v] = dot2(acc[m][v], panel[v], pair);
    }
  for (int m = 0; m < height; ++m)
    for (int v = 0; v < kVecs; ++v) {
      float* to = sum + m * kRows + v * kLanes;
      store(to, load(to) + acc[m][v] * scale[v]);
    }
}

void multiply_tile(std::int64_t height, const std::byte* a, const Ints* panel, std::int64_t pairs, const Vec* scale, float* sum) {
  switch (height) {
    case 1: return multiply(1, a, panel, pairs, scale, sum);
    case 2: return multiply(2, a, panel, pairs, scale, sum);
    case 3: return multiply(3, a, panel, pairs, scale, sum);
    case 4: return multiply(4, a, panel, pairs, scale, sum);
    case 5: return multiply(5, a, panel, pairs, scale, sum);
    case 6: return multiply(6, a, panel, pairs, scale, sum);
    case 7: return multiply(7, a, panel, pairs, scale, sum);
    case 8: return multiply(8, a, panel, pairs, scale, sum);
    default: return;
  }
}

void linear(const Bf16Task& t, std::int64_t block, std::int64_t m_begin) {
  const Decoder& d = *t.decoder;
  const tile::Geometry& geo = d.geometry;
  const std::int64_t m_end = m_begin + kTokens < t.m ? m_begin + kTokens : t.m;
  alignas(64) float sum[kTokens * kRows];
  alignas(64) Ints panel[kSegment / 2 * kVecs];
  std::memset(sum, 0, static_cast<std::size_t>(m_end - m_begin) * kRows * sizeof(float));

  Vec scale[kVecs], zero[kVecs];
  const std::byte* codes = nullptr;
  std::int64_t offset = 0;  // bytes of a token's prepared activations before this segment
  for (std::int64_t k = 0; k < t.segments.k;) {
    const std::int64_t end = t.segments.end(k);
    if (k % geo.group == 0) {
      codes = t.weight + geo.record(block, k / geo.group);
      for (int v = 0; v < kVecs; ++v) {
        scale[v] = load_as_floats(codes + v * geo.scale_bytes / kVecs, d.scale_type) * d.scale2;
        zero[v] = Vec{} + d.bias;
        if (d.zero != ZeroKind::none)
          zero[v] += load_as_floats(codes + geo.scale_bytes + v * (geo.header_bytes - geo.scale_bytes) / kVecs, d.zero_type);
      }
      codes += geo.header_bytes;
    }
    const std::int64_t octets = tile::Geometry::octets(end - k);
    for (std::int64_t o = 0; o < octets; ++o, codes += geo.octet_bytes) {
      if (geo.bits == 4) {
        decode_octet(4, 0, zero, codes, panel + o * 4 * kVecs);
      } else {
        decode_octet(8, d.flip, zero, codes, panel + o * 4 * kVecs);
      }
    }
    for (std::int64_t m = m_begin; m < m_end; m += kTile) {
      const std::int64_t height = t.m - m < kTile ? t.m - m : kTile;
      multiply_tile(height, t.activations + m * t.token_bytes + offset * height, panel, 4 * octets, scale,
                    sum + (m - m_begin) * kRows);
    }
    offset += 16 * octets;
    k = end;
  }

  const std::int64_t n0 = block * kRows;
  const std::int64_t columns = geo.n - n0 < kRows ? geo.n - n0 : kRows;
  for (std::int64_t m = m_begin; m < m_end; ++m)
    epilogue::store_row(*t.epilogue, *t.operands, sum + (m - m_begin) * kRows, m, n0, columns, *t.d);
}

#endif
