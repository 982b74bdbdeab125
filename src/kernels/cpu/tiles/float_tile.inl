// Included once per instruction set by float_tile.cpp. See float_tile.hpp for the algorithm.
#if NIBBLE_ISA <= NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX512

#if NIBBLE_ISA == NIBBLE_ISA_AVX512
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
/// The same of e4m3 or e2m1, by the width of the code. `second`: whether there is a second-level scale. Both are constants at every call.
NIBBLE_VARIANT void decode_pairs(int bits, bool second, const Decoder& d, const Header& h, const std::byte* octet, float* panel) {
  for (int v = 0; v < kVecs; ++v) {
    const Vec scale = load(h.scale + v * kLanes);
    const Quads quads = load_quads(bits, octet, v);
    for (int half = 0; half < 2; ++half) {
      const Ints quad = half == 0 ? quads.low : quads.high;
      const Pairs pairs = bits == 4 ? from_e2m1_quad(quad) : from_e4m3_quad(quad);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const Vec w = channel_of(pairs, j) * scale;
        store(panel + (4 * half + j) * kRows + v * kLanes, second ? w * d.scale2 : w);
      }
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

/// Whole octets, so up to 7 channels more than `count`.
inline void decode_chunk(const Decoder& d, const Header& h, const std::byte* octets, int count, float* panel) {
  if (d.floats != DType::none) return decode_dense_chunk(d, octets, count, panel);
  const Rule rule = rule_of(d);
  for (int k = 0; k < count; k += tile::kOctet, octets += d.geometry.octet_bytes) {
    float* to = panel + k * kRows;
    prefetch_after(octets, d.geometry.octet_bytes);
#if NIBBLE_LOOKS_UP_BYTES
    if (rule == kE4m3) {
      d.has_scale2 ? decode_pairs(8, true, d, h, octets, to) : decode_pairs(8, false, d, h, octets, to);
      continue;
    }
    if (rule == kFloat && d.geometry.bits == 4) {
      d.has_scale2 ? decode_pairs(4, true, d, h, octets, to) : decode_pairs(4, false, d, h, octets, to);
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

void decode(const Decoder& d, const std::byte* record, std::int64_t k, int count, float* panel) {
  Header header;
  if (d.floats == DType::none) read_header(d, record, header);
  decode_chunk(d, header, record + d.geometry.header_bytes + k / tile::kOctet * d.geometry.octet_bytes, count, panel);
}

/// acc[height][R] += A'[height] ⊗ panel over `count` input channels. `height` is a constant at every call.
NIBBLE_VARIANT void multiply(int height, const float* a, const float* panel, int count, float* acc) {
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

/// Not inlined: values that the caller keeps in registers would cost accumulators.
__attribute__((noinline)) void multiply_tile(std::int64_t height, const float* a, const float* panel, int count, float* acc) {
  switch (height) {  // the compiler drops cases above kTileM
    case 1: return multiply(1, a, panel, count, acc);
    case 2: return multiply(2, a, panel, count, acc);
    case 3: return kTileM >= 3 ? multiply(3, a, panel, count, acc) : void();
    case 4: return kTileM >= 4 ? multiply(4, a, panel, count, acc) : void();
    case 5: return kTileM >= 5 ? multiply(5, a, panel, count, acc) : void();
    case 6: return kTileM >= 6 ? multiply(6, a, panel, count, acc) : void();
    case 7: return kTileM >= 7 ? multiply(7, a, panel, count, acc) : void();
    case 8: return kTileM >= 8 ? multiply(8, a, panel, count, acc) : void();
    default: return;
  }
}

void linear(const FloatTask& task, std::int64_t block, std::int64_t m_begin) {
  const Decoder& d = *task.decoder;
  const tile::Geometry& geo = d.geometry;
  const std::int64_t m_end = m_begin + kTokens < task.m ? m_begin + kTokens : task.m;
  alignas(64) float acc[kTokens * kRows];
  alignas(64) float panel[kChunk * kRows];
  std::memset(acc, 0, static_cast<std::size_t>(m_end - m_begin) * kRows * sizeof(float));

  for (std::int64_t g = 0; g < geo.groups(); ++g) {
    const std::byte* record = task.weight + geo.record(block, g);
    Header header;
    if (d.floats == DType::none) read_header(d, record, header);
    const std::int64_t k_begin = g * geo.group;
    const std::int64_t k_end = k_begin + geo.group < geo.k ? k_begin + geo.group : geo.k;
    const std::byte* octets = record + geo.header_bytes;
    for (std::int64_t k = k_begin; k < k_end; k += kChunk) {
      const int count = static_cast<int>(k_end - k < kChunk ? k_end - k : kChunk);
      const std::byte* chunk = octets + (k - k_begin) / tile::kOctet * geo.octet_bytes;
      if (d.floats != DType::f32) decode_chunk(d, header, chunk, count, panel);
      const float* const w =
          d.floats == DType::f32 ? reinterpret_cast<const float*>(chunk) : panel;  // a dense f32 octet is its panel
      for (std::int64_t m = m_begin; m < m_end; m += kTileM) {
        const std::int64_t height = task.m - m < kTileM ? task.m - m : kTileM;
        multiply_tile(height, task.activations + m * geo.k + k * height, w, count, acc + (m - m_begin) * kRows);
      }
    }
  }

  task.outputs.store(acc, block, m_begin, m_end - m_begin);
}

#undef NIBBLE_PERMUTES
#undef NIBBLE_LOOKS_UP_BYTES
#endif
