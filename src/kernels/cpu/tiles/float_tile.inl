// Included once per instruction set by float_tile.cpp. See float_tile.hpp for the algorithm.
#if NIBBLE_ISA <= NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX512 || NIBBLE_ISA == NIBBLE_ISA_AVX512BF16

#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
constexpr int kTileM = 8;  // 8×2 accumulators: enough to hide 4 clocks of latency on two pipes, with half as many loads
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2
constexpr int kTileM = 6;  // 6×2 accumulators, 2 weights and a broadcast in 16 registers
#elif defined(__aarch64__)
constexpr int kTileM = 6;  // 6×4 accumulators, 4 weights and a broadcast in 32 registers
#else
constexpr int kTileM = 2;  // 2×4 accumulators, 4 weights and a broadcast in 16 registers
#endif
constexpr int kTilesPerBlock = 16;  // 16 tiles of accumulators fit in half of L1, and amortise a decode over ≥ 32 tokens
constexpr int kTokens = kTileM * kTilesPerBlock;
/// So many tokens are multiplied by values as they are decoded, without a panel: the accumulators of half a tile leave registers for
/// tables and codes.
constexpr int kFew = kTileM / 2;

#include "kernels/cpu/tiles/float_codes.inl"
#include "kernels/cpu/tiles/octets.inl"

/// An octet's panel. `rule` and `bits` are constants at every call.
NIBBLE_VARIANT void decode_octet(Rule rule, int bits, const Decoder& d, const Header& h, const std::byte* octet, float* panel) {
  const tile::Planes planes = tile::planes(d.geometry.bits);
  for (int v = 0; v < kVecs; ++v) {
    const Vec zero = load(h.zero + v * kLanes), scale = load(h.scale + v * kLanes);
    const Quads quads = load_codes(bits, planes, octet, v);
    for (int j = 0; j < tile::kOctet; ++j)
      store(panel + j * kRows + v * kLanes, value_of(rule, d, code_of(quads, j), zero, scale));
  }
}

#if NIBBLE_LOOKS_UP_BYTES
/// The same of e4m3 or e2m1, by the width of the code: their values, which are scaled after they have been added up.
NIBBLE_VARIANT void decode_values(int bits, const std::byte* octet, float* panel) {
  for (int v = 0; v < kVecs; ++v) {
    const Quads quads = load_quads(bits, octet, v);
    for (int half = 0; half < 2; ++half) {
      const Pairs pairs = values_of(bits, half == 0 ? quads.low : quads.high);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) store(panel + (4 * half + j) * kRows + v * kLanes, channel_of(pairs, j));
    }
  }
}
#endif

/// The same of a dense weight. `type` is a constant at every call.
NIBBLE_VARIANT void decode_floats(DType type, const std::byte* octet, float* panel) {
  for (int v = 0; v < kVecs; ++v)
    for (int j = 0; j < tile::kOctet; ++j) store(panel + j * kRows + v * kLanes, load_floats(type, octet, v, j));
}

/// Octets of a dense weight, as decode_chunk().
inline void decode_dense_chunk(const Decoder& d, const std::byte* octets, int count, float* panel) {
  for (int k = 0; k < count; k += tile::kOctet, octets += d.geometry.octet_bytes) {
    float* to = panel + k * kRows;
    d.floats == DType::bf16  ? decode_floats(DType::bf16, octets, to)
    : d.floats == DType::f16 ? decode_floats(DType::f16, octets, to)
                             : decode_floats(DType::f32, octets, to);
  }
}

/// Whether the panel holds the values of codes, and sums are scaled in place of weights: of e4m3 and e2m1, where bytes are looked up.
inline bool scales_sums(const Decoder& d) {
  const Rule rule = rule_of(d);
  return NIBBLE_LOOKS_UP_BYTES && d.floats == DType::none && (rule == kE4m3 || (rule == kFloat && d.geometry.bits == 4));
}

/// Whole octets, so up to 7 channels more than `count`.
inline void decode_chunk(const Decoder& d, const Header& h, const std::byte* octets, int count, float* panel) {
  if (d.floats != DType::none) return decode_dense_chunk(d, octets, count, panel);
  const Rule rule = rule_of(d);
  [[maybe_unused]] const bool values = scales_sums(d);
  for (int k = 0; k < count; k += tile::kOctet, octets += d.geometry.octet_bytes) {
    float* to = panel + k * kRows;
    prefetch_after(octets, d.geometry.octet_bytes);
#if NIBBLE_LOOKS_UP_BYTES
    if (values) {
      d.geometry.bits == 4 ? decode_values(4, octets, to) : decode_values(8, octets, to);
      continue;
    }
#endif
    if (rule == kE4m3) {
      decode_octet(kE4m3, 8, d, h, octets, to);
    } else if (rule == kFloat) {
      decode_octet(kFloat, 0, d, h, octets, to);
    } else if (rule == kReal) {
      decode_octet(kReal, 0, d, h, octets, to);
    } else if (rule == kOffset) {
      decode_octet(kOffset, 0, d, h, octets, to);
    } else if (d.geometry.bits == 4) {
      decode_octet(kInteger, 4, d, h, octets, to);
    } else if (d.geometry.bits == 8) {
      decode_octet(kInteger, 8, d, h, octets, to);
    } else {
      decode_octet(kInteger, 0, d, h, octets, to);
    }
  }
}

/// The header of a record: zeros there for a dense weight, which has none.
inline Header header_of(const Decoder& d, const std::byte* record) {
  Header header{};
  if (d.floats == DType::none) read_header(d, record, header);
  return header;
}

void decode(const Decoder& d, const std::byte* record, std::int64_t k, int count, float* panel) {
  const Header header = header_of(d, record);
  decode_chunk(d, header, record + d.geometry.header_bytes + k / tile::kOctet * d.geometry.octet_bytes, count, panel);
  for (int i = 0; scales_sums(d) && i < count; ++i)
    for (int r = 0; r < kRows; r += kLanes) {
      float* const w = panel + i * kRows + r;
      store(w, load(w) * load(header.scale + r) * d.scale2);
    }
}

/// acc[height][R] += scale ∘ sums of a chunk. `height` is a constant at every call.
NIBBLE_VARIANT void add_chunk(int height, const Vec (*sums)[kVecs], const float* scale, float* acc) {
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) {
      float* const to = acc + r * kRows + v * kLanes;
      store(to, load(to) + sums[r][v] * load(scale + v * kLanes));
    }
}

/// acc[height][R] += scale ∘ (A'[height] ⊗ panel) over `count` input channels. `height` is a constant at every call. Prefetches the next
/// tile's activations, `next` floats further on: pieces of 2 KiB are too short for the hardware to see a stream, and may be in L3.
NIBBLE_VARIANT void multiply(int height, const float* a, const float* panel, int count, std::int64_t next, const float* scale,
                             float* acc) {
  Vec c[kTileM][kVecs];
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) c[r][v] = Vec{};
  const float* const end = panel + count * kRows;
  do {  // count > 0; where the loop may be skipped, GCC keeps sums in memory
    Vec w[kVecs];
    for (int v = 0; v < kVecs; ++v) w[v] = load(panel + v * kLanes);
    for (int r = 0; r < height; ++r)
      for (int v = 0; v < kVecs; ++v) c[r][v] += a[r] * w[v];
    __builtin_prefetch(a + next);
    a += height;
    panel += kRows;
  } while (panel != end);
  add_chunk(height, c, scale, acc);
}

/// Not inlined: values that the caller keeps in registers would cost accumulators.
__attribute__((noinline)) void multiply_tile(std::int64_t height, const float* a, const float* panel, int count,
                                             std::int64_t next, const float* scale, float* acc) {
  switch (height) {  // the compiler drops cases above kTileM
    case 1: return multiply(1, a, panel, count, next, scale, acc);
    case 2: return multiply(2, a, panel, count, next, scale, acc);
    case 3: return kTileM >= 3 ? multiply(3, a, panel, count, next, scale, acc) : void();
    case 4: return kTileM >= 4 ? multiply(4, a, panel, count, next, scale, acc) : void();
    case 5: return kTileM >= 5 ? multiply(5, a, panel, count, next, scale, acc) : void();
    case 6: return kTileM >= 6 ? multiply(6, a, panel, count, next, scale, acc) : void();
    case 7: return kTileM >= 7 ? multiply(7, a, panel, count, next, scale, acc) : void();
    case 8: return kTileM >= 8 ? multiply(8, a, panel, count, next, scale, acc) : void();
    default: return;
  }
}

#if NIBBLE_LOOKS_UP_BYTES
/// multiply() of whole octets of codes, whose values are multiplied as they are decoded. `bits` and `height` are constants at every call.
NIBBLE_VARIANT void multiply_values(int bits, int height, const float* a, const std::byte* octets, int count, const float* scale,
                                    float* acc) {
  const std::int64_t octet_bytes = std::int64_t{kRows} * bits;
  Vec c[kTileM][kVecs];
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) c[r][v] = Vec{};
  for (int k = 0; k < count; k += tile::kOctet, a += tile::kOctet * height, octets += octet_bytes) {
    prefetch_after(octets, octet_bytes);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const Quads quads = load_quads(bits, octets, v);
      for (int half = 0; half < 2; ++half) {
        const Pairs pairs = values_of(bits, half == 0 ? quads.low : quads.high);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const Vec w = channel_of(pairs, j);
          for (int r = 0; r < height; ++r) c[r][v] += a[(4 * half + j) * height + r] * w;
        }
      }
    }
  }
  add_chunk(height, c, scale, acc);
}

/// The same by the width of the code.
NIBBLE_VARIANT void multiply_codes(int height, const Decoder& d, const float* a, const std::byte* octets, int count,
                                   const float* scale, float* acc) {
  d.geometry.bits == 4 ? multiply_values(4, height, a, octets, count, scale, acc)
                       : multiply_values(8, height, a, octets, count, scale, acc);
}

__attribute__((noinline)) void multiply_few(std::int64_t height, const Decoder& d, const float* a, const std::byte* octets,
                                            int count, const float* scale, float* acc) {
  switch (height) {  // the compiler drops cases above kFew
    case 1: return multiply_codes(1, d, a, octets, count, scale, acc);
    case 2: return multiply_codes(2, d, a, octets, count, scale, acc);
    case 3: return multiply_codes(3, d, a, octets, count, scale, acc);
    case 4: return kFew >= 4 ? multiply_codes(4, d, a, octets, count, scale, acc) : void();
    default: return;
  }
}
#endif

/// D[m_begin, m_end) of `count` row blocks from `block` on, which take turns chunk by chunk: as many streams of weights, where there is more
/// than one.
void linear_blocks(const FloatTask& task, std::int64_t block, std::int64_t count, std::int64_t m_begin, std::int64_t m_end) {
  const Decoder& d = *task.decoder;
  const tile::Geometry& geo = d.geometry;
  const std::int64_t tokens = m_end - m_begin;
  const bool scales = scales_sums(d);
  alignas(64) float acc[kTokens * kRows];  // [count][tokens][R]
  alignas(64) float panel[kChunk * kRows];
  alignas(64) float scale[kMostStreams][kRows];  // of sums
  Header headers[kMostStreams];
  std::memset(acc, 0, static_cast<std::size_t>(count * tokens) * kRows * sizeof(float));

  // Weights that are scaled in the panel need no sums of their own group: short groups share a chunk.
  const bool share = !scales && geo.group < kChunk && kChunk % geo.group == 0 && geo.group % tile::kOctet == 0;
  for (std::int64_t i = 0; i < count; ++i)
    for (int r = 0; r < kRows; ++r) scale[i][r] = 1.0f;

  std::int64_t g = 0, in_group = 0;  // where the chunk begins
  for (std::int64_t k = 0; k < geo.k;) {
    const auto channels = static_cast<int>(least(kChunk, least(geo.k - k, share ? kChunk : geo.group - in_group)));
    const bool few = NIBBLE_LOOKS_UP_BYTES && scales && tokens <= kFew && channels % tile::kOctet == 0;
    for (std::int64_t i = 0; i < count; ++i) {
      float* const sums = acc + i * tokens * kRows;
      const std::byte* codes = nullptr;  // of the chunk, part of a group; or of the last of several groups
      std::int64_t group = g, at = in_group;
      for (int c = 0, part = 0; c < channels; c += part, ++group, at = 0) {
        part = static_cast<int>(least(channels - c, geo.group - at));
        const std::byte* const record = task.weight + geo.record(block + i, group);
        codes = record + geo.header_bytes + at / tile::kOctet * geo.octet_bytes;
        if (at == 0) {
          headers[i] = header_of(d, record);
          for (int r = 0; scales && r < kRows; ++r) scale[i][r] = headers[i].scale[r] * d.scale2;
        }
        if (d.floats != DType::f32 && !few) decode_chunk(d, headers[i], codes, part, panel + c * kRows);
      }
#if NIBBLE_LOOKS_UP_BYTES
      if (few) {
        multiply_few(tokens, d, task.activations + m_begin * geo.k + k * tokens, codes, channels, scale[i], sums);
        continue;
      }
#endif
      const float* const w =
          d.floats == DType::f32 ? reinterpret_cast<const float*>(codes) : panel;  // a dense f32 octet is its panel
      for (std::int64_t m = m_begin; m < m_end; m += kTileM) {
        const std::int64_t height = least(task.m - m, kTileM), next = m + kTileM < m_end ? kTileM * geo.k : 0;
        multiply_tile(height, task.activations + m * geo.k + k * height, w, channels, next, scale[i],
                      sums + (m - m_begin) * kRows);
      }
    }
    k += channels;
    in_group += channels;
    for (; in_group >= geo.group; in_group -= geo.group) ++g;
  }
  for (std::int64_t i = 0; i < count; ++i) task.outputs.store(acc + i * tokens * kRows, block + i, m_begin, tokens);
}

void linear(const FloatTask& task, std::int64_t block_begin, std::int64_t block_end, std::int64_t m_begin) {
  const std::int64_t m_end = m_begin + kTokens < task.m ? m_begin + kTokens : task.m;
  const std::int64_t most = m_end - m_begin <= kTileM && reads_in_streams() ? kMostStreams : 1;
  for (std::int64_t block = block_begin, count = 1; block < block_end; block += count) {
    count = most <= block_end - block ? most : 1;
    linear_blocks(task, block, count, m_begin, m_end);
  }
}

#undef NIBBLE_PERMUTES
#undef NIBBLE_LOOKS_UP_BYTES
#endif
