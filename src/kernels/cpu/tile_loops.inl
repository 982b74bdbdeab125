// Included once per instruction set by tile_loops.cpp, inside that set's namespace and target region, after kLanes (floats per
// register), kRows (R), kTileM and the macros NIBBLE_TILE_M, NIBBLE_TILE_F16C (has the half conversion instruction) and
// NIBBLE_TILE_FUSED (has the byte conversion instruction) have been defined there. See tile_loops.hpp for the algorithm.

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef float VecMemory __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

constexpr int kVecs = kRows / kLanes;
constexpr int kTilesPerBlock = 16;  // 16 tiles of accumulators fit in half of L1, and amortise a decode over ≥ 32 tokens
constexpr int kTokens = kTileM * kTilesPerBlock;

inline Vec load(const float* p) { return *reinterpret_cast<const VecMemory*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<VecMemory*>(p) = v; }

inline void load_f16(const std::byte* p, float* out) {
#if NIBBLE_TILE_F16C
  for (int r = 0; r < kRows; r += 8)
    _mm256_storeu_ps(out + r, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * r))));
#else
  for (int r = 0; r < kRows; ++r) {
    f16 half;
    std::memcpy(&half, p + 2 * r, 2);
    out[r] = to_f32(half);
  }
#endif
}

/// R stored floats → f32.
inline void load_column(const std::byte* p, DType type, float* out) {
  if (type == DType::f16) {
    load_f16(p, out);
  } else if (type == DType::f32) {
    std::memcpy(out, p, kRows * sizeof(float));
  } else if (type == DType::bf16) {
    for (int r = 0; r < kRows; ++r) {
      std::uint16_t half;
      std::memcpy(&half, p + 2 * r, 2);
      const std::uint32_t word = static_cast<std::uint32_t>(half) << 16;
      std::memcpy(out + r, &word, 4);
    }
  } else if (type == DType::u8) {
    for (int r = 0; r < kRows; ++r) out[r] = static_cast<float>(static_cast<int>(p[r]));
  } else {
    for (int r = 0; r < kRows; ++r) out[r] = code_value(type, static_cast<std::uint8_t>(p[r]));
  }
}

/// Codes of `count` input channels → one byte each, [count][R].
inline void unpack(const Decoder& d, const std::uint8_t* __restrict in, int count, std::uint8_t* __restrict out) {
  if (d.geometry.bits == 4) {
    constexpr int half = kRows / 2;
    constexpr std::uint64_t nibbles = 0x0f0f0f0f0f0f0f0f;
    for (int k = 0; k < count; ++k, in += half, out += kRows)
      for (int j = 0; j < half; j += 8) {  // eight bytes, sixteen codes at a time
        std::uint64_t word;
        std::memcpy(&word, in + j, 8);
        const std::uint64_t low = word & nibbles, high = (word >> 4) & nibbles;
        std::memcpy(out + j, &low, 8);
        std::memcpy(out + half + j, &high, 8);
      }
    return;
  }
  if (d.geometry.bits == 8) {
    for (int i = 0; i < count * kRows; ++i) out[i] = in[i] ^ d.flip;
    return;
  }
  const tile::Planes planes = tile::planes(d.geometry.bits);
  for (int k = 0; k < count; ++k, out += kRows) {
    std::memset(out, 0, kRows);
    for (int p = 0; p < planes.count; ++p) {
      const int width = planes.plane[static_cast<std::size_t>(p)].width;
      const int shift = planes.plane[static_cast<std::size_t>(p)].shift;
      const int bytes = kRows * width / 8;
      for (int part = 0; part * width < 8; ++part)
        for (int j = 0; j < bytes; ++j)
          out[part * bytes + j] =
              static_cast<std::uint8_t>(out[part * bytes + j] | (((in[j] >> (part * width)) & ((1 << width) - 1)) << shift));
      in += bytes;
    }
  }
}

/// (q − z)·s for integer codes without or with integer zero points: exact but for one rounding.
inline void decode_integer(const std::uint8_t* __restrict codes, const float* __restrict zero, const float* __restrict scale,
                           int count, float* __restrict panel) {
  for (int k = 0; k < count; ++k, codes += kRows, panel += kRows)
    for (int r = 0; r < kRows; ++r) panel[r] = (static_cast<float>(static_cast<int>(codes[r])) - zero[r]) * scale[r];
}

/// Everything else, in double so that W is rounded once, as QuantTensor defines it.
inline void decode_general(const Decoder& d, const std::uint8_t* codes, const float* zero, const float* scale, int count,
                           float* panel) {
  const bool offset = d.zero == ZeroKind::offset;
  for (int k = 0; k < count; ++k, codes += kRows, panel += kRows)
    for (int r = 0; r < kRows; ++r) {
      const double q = d.integer_codes ? static_cast<double>(static_cast<int>(codes[r])) - static_cast<double>(d.bias)
                                       : static_cast<double>(d.table[codes[r]]);
      const double s = scale[r];
      const double z = zero[r];
      const double product = q * s;
      panel[r] = static_cast<float>(offset ? product + z : (q - z) * s);
    }
}

/// The scales and zeros of a record as floats; integer codes fold their bias into the zero.
struct Header {
  alignas(64) float scale[kRows];
  alignas(64) float zero[kRows];
  bool integer;
};

inline void read_header(const Decoder& d, const std::byte* record, Header& header) {
  load_column(record, d.scale_type, header.scale);
  std::memset(header.zero, 0, sizeof header.zero);
  if (d.zero != ZeroKind::none) load_column(record + d.geometry.scale_bytes, d.zero_type, header.zero);
  header.integer = d.integer_codes && (d.zero == ZeroKind::none || d.zero == ZeroKind::integer);
  if (header.integer)
    for (int r = 0; r < kRows; ++r) header.zero[r] += d.bias;
}

inline void decode_chunk(const Decoder& d, const Header& header, const std::byte* codes, int count, float* panel) {
  alignas(64) std::uint8_t bytes[kChunk * kRows];
  unpack(d, reinterpret_cast<const std::uint8_t*>(codes), count, bytes);
  if (header.integer) {
    decode_integer(bytes, header.zero, header.scale, count, panel);
  } else {
    decode_general(d, bytes, header.zero, header.scale, count, panel);
  }
  if (d.has_scale2)
    for (int i = 0; i < count * kRows; ++i) panel[i] *= d.scale2;
}

void decode(const Decoder& d, const std::byte* record, std::int64_t k, int count, float* panel) {
  Header header;
  read_header(d, record, header);
  decode_chunk(d, header, record + d.geometry.header_bytes + k * d.geometry.k_bytes, count, panel);
}

/// acc[height][R] += A'[height] ⊗ panel over `count` input channels. `height` is a constant at every call.
__attribute__((always_inline)) inline void multiply(int height, const float* a, const float* panel, int count, float* acc) {
  Vec c[kTileM][kVecs];
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) c[r][v] = load(acc + r * kRows + v * kLanes);
  for (int k = 0; k < count; ++k, a += height, panel += kRows) {
    Vec w[kVecs];
    for (int v = 0; v < kVecs; ++v) w[v] = load(panel + v * kLanes);
    for (int r = 0; r < height; ++r)
      for (int v = 0; v < kVecs; ++v) c[r][v] += a[r] * w[v];
  }
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) store(acc + r * kRows + v * kLanes, c[r][v]);
}

void multiply_tile(std::int64_t height, const float* a, const float* panel, int count, float* acc) {
  switch (height) {
    case 1: return multiply(1, a, panel, count, acc);
    case 2: return multiply(2, a, panel, count, acc);
#if NIBBLE_TILE_M > 2
    case 3: return multiply(3, a, panel, count, acc);
    case 4: return multiply(4, a, panel, count, acc);
    case 5: return multiply(5, a, panel, count, acc);
    case 6: return multiply(6, a, panel, count, acc);
#endif
#if NIBBLE_TILE_M > 6
    case 7: return multiply(7, a, panel, count, acc);
    case 8: return multiply(8, a, panel, count, acc);
#endif
    default: return;
  }
}

#if NIBBLE_TILE_FUSED
typedef std::int32_t Ints __attribute__((vector_size(kLanes * sizeof(float))));

/// kLanes unsigned bytes at the low end of a register → floats.
inline Vec widen(__m128i bytes) {
#if NIBBLE_TILE_M > 6  // zero-masked with a full mask: GCC 12 warns of the undefined source of the plain form (its bug 105593)
  return __builtin_convertvector(reinterpret_cast<Ints>(_mm512_maskz_cvtepu8_epi32(0xffff, bytes)), Vec);
#else
  return __builtin_convertvector(reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(bytes)), Vec);
#endif
}

inline __m128i load_bytes(const std::uint8_t* p) {
  return kLanes == 16 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                      : _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}

/// One token and integer codes of 4 or 8 bits: codes go from memory to multiply-adds in registers, without bytes or a panel in
/// between. The same roundings in the same order as decode_integer() and multiply(), so the result has the same bits.
inline void multiply_one(const Decoder& d, const Header& header, const std::byte* codes, const float* a, std::int64_t count,
                         float* acc) {
  static_assert(kVecs == 2);
  const Vec z0 = load(header.zero), z1 = load(header.zero + kLanes);
  const Vec s0 = load(header.scale), s1 = load(header.scale + kLanes);
  Vec c0 = load(acc), c1 = load(acc + kLanes);
  const auto* in = reinterpret_cast<const std::uint8_t*>(codes);
  if (d.geometry.bits == 4) {
    const __m128i nibbles = _mm_set1_epi8(15);
    for (std::int64_t k = 0; k < count; ++k, in += kRows / 2) {
      const __m128i pair = load_bytes(in);
      c0 += a[k] * ((widen(_mm_and_si128(pair, nibbles)) - z0) * s0);
      c1 += a[k] * ((widen(_mm_and_si128(_mm_srli_epi16(pair, 4), nibbles)) - z1) * s1);
    }
  } else {
    const __m128i flip = _mm_set1_epi8(static_cast<char>(d.flip));
    for (std::int64_t k = 0; k < count; ++k, in += kRows) {
      c0 += a[k] * ((widen(_mm_xor_si128(load_bytes(in), flip)) - z0) * s0);
      c1 += a[k] * ((widen(_mm_xor_si128(load_bytes(in + kLanes), flip)) - z1) * s1);
    }
  }
  store(acc, c0);
  store(acc + kLanes, c1);
}
#endif

void linear(const LinearTask& task, std::int64_t block, std::int64_t m_begin) {
  const Decoder& d = *task.decoder;
  const tile::Geometry& geo = d.geometry;
  const std::int64_t m_end = m_begin + kTokens < task.m ? m_begin + kTokens : task.m;
  alignas(64) float acc[kTokens * kRows];
  alignas(64) float panel[kChunk * kRows];
  std::memset(acc, 0, static_cast<std::size_t>(m_end - m_begin) * kRows * sizeof(float));

  for (std::int64_t g = 0; g < geo.groups(); ++g) {
    const std::byte* record = task.weight + geo.record(block, g);
    Header header;
    read_header(d, record, header);
    const std::int64_t k_begin = g * geo.group;
    const std::int64_t k_end = k_begin + geo.group < geo.k ? k_begin + geo.group : geo.k;
    const std::byte* codes = record + geo.header_bytes;
#if NIBBLE_TILE_FUSED
    if (m_end - m_begin == 1 && d.multiplies_unpacked) {
      multiply_one(d, header, codes, task.activations + m_begin * geo.k + k_begin, k_end - k_begin, acc);
      continue;
    }
#endif
    for (std::int64_t k = k_begin; k < k_end; k += kChunk) {
      const int count = static_cast<int>(k_end - k < kChunk ? k_end - k : kChunk);
      decode_chunk(d, header, codes + (k - k_begin) * geo.k_bytes, count, panel);
      for (std::int64_t m = m_begin; m < m_end; m += kTileM) {
        const std::int64_t height = task.m - m < kTileM ? task.m - m : kTileM;
        multiply_tile(height, task.activations + m * geo.k + k * height, panel, count, acc + (m - m_begin) * kRows);
      }
    }
  }

  const std::int64_t n0 = block * kRows;
  const std::int64_t columns = geo.n - n0 < kRows ? geo.n - n0 : kRows;
  for (std::int64_t m = m_begin; m < m_end; ++m)
    epilogue::store_row(*task.epilogue, *task.operands, acc + (m - m_begin) * kRows, m, n0, columns, *task.d);
}
