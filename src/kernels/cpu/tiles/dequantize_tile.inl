// Included once per instruction set by dequantize_tile.cpp. See dequantize_tile.hpp for the algorithm.
#if NIBBLE_ISA <= NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX512

#include "kernels/cpu/tiles/octets.inl"

constexpr int kLine = 64;
constexpr int kPitch = kTileChannels + 32;  // a row of a tile of [N,K]: its last vector may be past the end
constexpr int kStrip = 32;                  // channels of a tile of [K,N]

/// Channels of a group that lie in a tile.
struct Span {
  std::int64_t group, first;  // first: in the group
  int count;
};
inline Span span_at(const tile::Geometry& geo, std::int64_t k, std::int64_t k_end) {
  const std::int64_t group = k / geo.group, begin = group * geo.group;
  return {group, k - begin, static_cast<int>(least(begin + geo.group, k_end) - k)};
}

/// The same of a row block.
struct Run {
  Header header;
  const std::byte* octets;
  int count;
};
inline void read_run(const DequantizeTask& t, std::int64_t block, const Span& span, Run& run) {
  const tile::Geometry& geo = t.decoder->geometry;
  const std::byte* record = t.weight + geo.record(block, span.group);
  if (t.decoder->floats == DType::none) read_header(*t.decoder, record, run.header);
  run.octets = record + geo.header_bytes + span.first / tile::kOctet * geo.octet_bytes;
  run.count = span.count;
}

/// Where a tile ends that begins at channel k. Groups of whole octets may share one.
inline std::int64_t end_of_tile(const tile::Geometry& geo, std::int64_t k, std::int64_t channels, std::int64_t k_end) {
  const std::int64_t end = least(k + channels, k_end);
  return geo.group % tile::kOctet == 0 ? end : least(end, (k / geo.group + 1) * geo.group);
}

/// How numbers of D are stored.
enum Store { kF32, kF16, kBf16, kBf16Numbers };  // the last one is faster, and loses NaNs

NIBBLE_VARIANT void store_as(Store how, std::byte* to, Vec x) {
  switch (how) {
    case kF32: return store(reinterpret_cast<float*>(to), x);
    case kF16: return store_f16(to, x);
    case kBf16: return store_bf16(to, x);
    case kBf16Numbers: return store_halves(to, to_bf16(x));
  }
}
NIBBLE_VARIANT std::int64_t width_of(Store how) { return how == kF32 ? 4 : 2; }
inline Store store_of(DType type) { return type == DType::f32 ? kF32 : type == DType::f16 ? kF16 : kBf16; }

/// Whether integers times these scales are numbers.
inline bool is_finite(const Header& h) {
  Ints bad{};
  for (int v = 0; v < kVecs; ++v) {
    const Vec scale = load(h.scale + v * kLanes);
    bad |= scale - scale != Vec{};
  }
  return sum_lanes(bad) == 0;
}

inline void store_line_past_caches(std::byte* to, const std::byte* from) {
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(load_ints(from)));
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2
  for (int i = 0; i < kLine; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), reinterpret_cast<__m256i>(load_ints(from + i)));
#elif defined(__x86_64__)
  for (int i = 0; i < kLine; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), reinterpret_cast<__m128i>(load_ints(from + i)));
#else
  std::memcpy(to, from, kLine);
#endif
}

/// A part of a row of D.
inline void write(const DequantizeTask& t, std::byte* to, const std::byte* from, std::int64_t bytes) {
  std::int64_t i = 0;
  if (t.bypass && reinterpret_cast<std::uintptr_t>(to) % kLine == 0)
    for (; i + kLine <= bytes; i += kLine) store_line_past_caches(to + i, from + i);
  std::memcpy(to + i, from + i, static_cast<std::size_t>(bytes - i));
}

/// Other threads see lines that bypassed the caches.
inline void finish_writes() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

/// An octet's codes as bytes: channel j of row r is codes[r·kPitch + j].
inline void spread(const Quads& quads, std::uint8_t* codes) {
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
  const Ints first = __builtin_shufflevector(quads.low, quads.high, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  const Ints second = __builtin_shufflevector(quads.low, quads.high, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2
  const Ints first = __builtin_shufflevector(quads.low, quads.high, 0, 8, 1, 9, 4, 12, 5, 13);
  const Ints second = __builtin_shufflevector(quads.low, quads.high, 2, 10, 3, 11, 6, 14, 7, 15);
#else
  const Ints first = __builtin_shufflevector(quads.low, quads.high, 0, 4, 1, 5);
  const Ints second = __builtin_shufflevector(quads.low, quads.high, 2, 6, 3, 7);
#endif
  typedef std::int64_t Longs __attribute__((vector_size(kLanes * 4)));
  const Longs pairs[2] = {reinterpret_cast<Longs>(first), reinterpret_cast<Longs>(second)};
  for (int r = 0; r < kLanes; ++r) {  // of four rows, the first two are in `first`
    const std::int64_t octet = pairs[r / 2 % 2][r / 4 * 2 + r % 2];
    std::memcpy(codes + r * kPitch, &octet, sizeof octet);
  }
}

#if NIBBLE_PERMUTES
/// A row of codes of up to 4 bits, of which table[16] has the values: 16-bit numbers 32 at a time.
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
inline void look_up_halves(const std::byte* table, const std::uint8_t* codes, int count, std::byte* to) {
  const __m512i entries = _mm512_maskz_broadcast_i64x4(0xff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table)));
  for (int i = 0; i < count; i += 32) {
    const __m512i index = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
    _mm512_storeu_si512(to + 2 * i, _mm512_maskz_permutexvar_epi16(~0u, index, entries));
  }
}
#else
inline void look_up_halves(const std::byte* table, const std::uint8_t* codes, int count, std::byte* to) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table)),
                second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table + 16)), byte = _mm_set1_epi16(255);
  const __m256i low = _mm256_broadcastsi128_si256(_mm_packus_epi16(first & byte, second & byte));
  const __m256i high = _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8)));
  for (int i = 0; i < count; i += 32) {
    const __m256i next = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
    const __m256i code = _mm256_permute4x64_epi64(next, 0xd8);  // so that interleaving, in halves of a register, is in order
    const __m256i a = _mm256_shuffle_epi8(low, code), b = _mm256_shuffle_epi8(high, code);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i), _mm256_unpacklo_epi8(a, b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i + 32), _mm256_unpackhi_epi8(a, b));
  }
}
#endif

NIBBLE_VARIANT void look_up_row(Store how, const float* table, const std::uint8_t* codes, int count, std::byte* to) {
  if (how == kF32) {
    for (int i = 0; i < count; i += kLanes)
      store_as(how, to + 4 * i, look_up_16(table, load_u8(reinterpret_cast<const std::byte*>(codes + i))));
  } else {
    alignas(32) std::byte halves[32];
    for (int i = 0; i < 16; i += kLanes) store_as(how, halves + 2 * i, load(table + i));
    look_up_halves(halves, codes, count, to);
  }
}

/// Whether a table of a row's 16 values is worth while. AVX2 looks up floats no faster than it computes them.
NIBBLE_VARIANT bool uses_table(Rule rule, Store how, int bits, int count) {
  const bool faster = NIBBLE_ISA == NIBBLE_ISA_AVX512 || how != kF32 || rule == kReal || rule == kOffset;
  return faster && bits <= 4 && count >= 32;
}
#endif

/// A row of a tile of [N,K], whole vectors. `rule` and `how` are constants at every call, here and below.
NIBBLE_VARIANT void decode_row(Rule rule, Store how, const Decoder& d, const std::uint8_t* codes, float zero, float scale,
                               int count, std::byte* to) {
#if NIBBLE_PERMUTES
  if (uses_table(rule, how, d.geometry.bits, count)) {
    alignas(64) float table[16];
    Ints code{};
    for (int i = 0; i < kLanes; ++i) code[i] = i;
    for (int i = 0; i < 16; i += kLanes) store(table + i, value_of(rule, d, code + i, Vec{} + zero, Vec{} + scale));
    return look_up_row(how, table, codes, count, to);
  }
#endif
  for (int i = 0; i < count; i += kLanes) {
    const Ints code = load_u8(reinterpret_cast<const std::byte*>(codes + i));
    store_as(how, to + i * width_of(how), value_of(rule, d, code, Vec{} + zero, Vec{} + scale));
  }
}

__attribute__((noinline)) void load_other_codes(const Decoder& d, const std::byte* octet, int v, Quads& quads) {
  quads = load_any_quads(tile::planes(d.geometry.bits), octet, v);
}

/// Vector v of octet `octet` of a run.
NIBBLE_VARIANT Quads codes_at(const Decoder& d, const Run& run, int octet, int v) {
  const std::byte* at = run.octets + octet * d.geometry.octet_bytes;
  if (d.geometry.bits == 4) return load_quads(4, at, v);
  if (d.geometry.bits == 8) return load_quads(8, at, v);
  Quads quads;
  load_other_codes(d, at, v, quads);
  return quads;
}

/// A run as rows of a tile of [N,K].
NIBBLE_VARIANT void decode_rows(Rule rule, Store how, const DequantizeTask& t, const Run& run, std::byte* tile) {
  const Decoder& d = *t.decoder;
  alignas(64) std::uint8_t codes[kRows * kPitch];
  for (int v = 0; v < kVecs; ++v)
    for (int k = 0; k < run.count; k += tile::kOctet)
      spread(codes_at(d, run, k / tile::kOctet, v), codes + v * kLanes * kPitch + k);
  for (int r = 0; r < kRows; ++r)
    decode_row(rule, how, d, codes + r * kPitch, run.header.zero[r], run.header.scale[r], run.count,
               tile + r * kPitch * width_of(how));
}

/// A run as columns of a tile of [K,N], whole octets.
NIBBLE_VARIANT void decode_columns(Rule rule, Store how, const DequantizeTask& t, const Run& run, std::byte* tile) {
  const Decoder& d = *t.decoder;
  for (int v = 0; v < kVecs; ++v) {
    const Vec zero = load(run.header.zero + v * kLanes), scale = load(run.header.scale + v * kLanes);
    std::byte* to = tile + v * kLanes * width_of(how);
    for (int k = 0; k < run.count; k += tile::kOctet) {
      const Quads quads = codes_at(d, run, k / tile::kOctet, v);
#pragma GCC unroll 8
      for (int j = 0; j < tile::kOctet; ++j, to += kRowBytes)
        store_as(how, to, value_of(rule, d, code_of(quads, j), zero, scale));
    }
  }
}

/// A run of a dense weight, in either order. `type` and `how` are constants at every call.
NIBBLE_VARIANT void copy_as(bool rows, DType type, Store how, const DequantizeTask& t, const Run& run, std::byte* tile) {
  const std::int64_t width = width_of(how);
  alignas(64) std::byte column[kLanes * 4];
  for (int k = 0; k < run.count; ++k) {
    const std::byte* const octet = run.octets + k / tile::kOctet * t.decoder->geometry.octet_bytes;
    for (int v = 0; v < kVecs; ++v) {
      const Vec floats = load_floats(type, octet, v, k % tile::kOctet);
      if (!rows) {
        store_as(how, tile + k * kRowBytes + v * kLanes * width, floats);
        continue;
      }
      store_as(how, column, floats);
      for (std::int64_t r = 0; r < kLanes; ++r)
        std::memcpy(tile + ((v * kLanes + r) * kPitch + k) * width, column + r * width, static_cast<std::size_t>(width));
    }
  }
}
NIBBLE_VARIANT void copy_as(bool rows, Store how, const DequantizeTask& t, const Run& run, std::byte* tile) {
  switch (t.decoder->floats) {
    case DType::f16: return copy_as(rows, DType::f16, how, t, run, tile);
    case DType::bf16: return copy_as(rows, DType::bf16, how, t, run, tile);
    default: return copy_as(rows, DType::f32, how, t, run, tile);
  }
}
NIBBLE_VARIANT void copy(bool rows, const DequantizeTask& t, const Run& run, std::byte* tile) {
  switch (store_of(t.type)) {
    case kF32: return copy_as(rows, kF32, t, run, tile);
    case kF16: return copy_as(rows, kF16, t, run, tile);
    default: return copy_as(rows, kBf16, t, run, tile);
  }
}

NIBBLE_VARIANT void decode_as(bool rows, Rule rule, Store how, const DequantizeTask& t, const Run& run, std::byte* tile) {
  if (rows)
    decode_rows(rule, how, t, run, tile);
  else
    decode_columns(rule, how, t, run, tile);
}
NIBBLE_VARIANT void decode_by(bool rows, Rule rule, const DequantizeTask& t, const Run& run, std::byte* tile) {
  switch (store_of(t.type)) {
    case kF32: return decode_as(rows, rule, kF32, t, run, tile);
    case kF16: return decode_as(rows, rule, kF16, t, run, tile);
    default:
      if (rule == kInteger && is_finite(run.header)) return decode_as(rows, rule, kBf16Numbers, t, run, tile);
      return decode_as(rows, rule, kBf16, t, run, tile);
  }
}
/// Rules that take longer than a test of the type have one copy for all types.
NIBBLE_VARIANT void decode(bool rows, const DequantizeTask& t, const Run& run, std::byte* tile) {
  if (t.decoder->floats != DType::none) return copy(rows, t, run, tile);
  switch (rule_of(*t.decoder)) {
    case kInteger: return decode_by(rows, kInteger, t, run, tile);
    case kE4m3: return decode_by(rows, kE4m3, t, run, tile);
    case kFloat: return decode_as(rows, kFloat, store_of(t.type), t, run, tile);
    case kReal: return decode_as(rows, kReal, store_of(t.type), t, run, tile);
    case kOffset: return decode_as(rows, kOffset, store_of(t.type), t, run, tile);
  }
}

/// Channels k … k_end of a row of D, in the order of act-order.
inline void scatter(const DequantizeTask& t, std::byte* row, const std::byte* from, std::int64_t k, std::int64_t k_end) {
  const std::int64_t width = width_of(store_of(t.type));
  for (; k < k_end; ++k, from += width) std::memcpy(row + t.perm[k] * width, from, static_cast<std::size_t>(width));
}

void rows_of_n(const DequantizeTask& t, const DequantizeRange& range) {
  alignas(64) std::byte tile[kRows * kPitch * 4];
  const tile::Geometry& geo = t.decoder->geometry;
  const std::int64_t width = width_of(store_of(t.type));
  Run run;
  for (std::int64_t block = range.block; block < range.block_end; ++block)
    for (std::int64_t k = range.k, end; k < range.k_end; k = end) {
      end = end_of_tile(geo, k, kTileChannels, range.k_end);
      for (std::int64_t at = k; at < end; at += run.count) {
        read_run(t, block, span_at(geo, at, end), run);
        decode(true, t, run, tile + (at - k) * width);
      }
      const std::int64_t live = least(kRows, geo.n - block * kRows);
      for (std::int64_t r = 0; r < live; ++r) {
        std::byte* row = t.d + (block * kRows + r) * t.stride;
        if (t.perm == nullptr)
          write(t, row + k * width, tile + r * kPitch * width, (end - k) * width);
        else
          scatter(t, row, tile + r * kPitch * width, k, end);
      }
    }
  finish_writes();
}

void rows_of_k(const DequantizeTask& t, const DequantizeRange& range) {
  alignas(64) std::byte tile[kStrip * kRowBytes];
  const tile::Geometry& geo = t.decoder->geometry;
  const std::int64_t width = width_of(store_of(t.type)), n = range.block * kRows, n_end = least(geo.n, range.block_end * kRows);
  Run run;
  for (std::int64_t k = range.k, end; k < range.k_end; k = end) {
    end = end_of_tile(geo, k, kStrip, range.k_end);
    for (std::int64_t at = k; at < end; at += run.count) {
      const Span span = span_at(geo, at, end);
      for (std::int64_t block = range.block; block < range.block_end; ++block) {
        read_run(t, block, span, run);
        decode(false, t, run, tile + (at - k) * kRowBytes + (block - range.block) * kRows * width);
      }
    }
    for (std::int64_t i = k; i < end; ++i)
      write(t, t.d + (t.perm == nullptr ? i : t.perm[i]) * t.stride + n * width, tile + (i - k) * kRowBytes, (n_end - n) * width);
  }
  finish_writes();
}

#undef NIBBLE_PERMUTES
#endif
