// Octets of codes (layouts/tile.hpp) → floats, for every scheme. Included by the loops of an instruction set that need them.

/// The ways from code, zero and scale to W. Each rounds once, as QuantTensor defines W.
enum Rule {
  kInteger,  // (code − zero)·scale in f32, where integers are exact; without scale2, which few of them have
  kE4m3,     // value·scale in f32
  kFloat,    // the same, of other float codes
  kReal,     // (value − zero)·scale in double: the rest, float zeros among them
  kOffset,   // value·scale + zero in double
};

/// The scales and zeros of a record as floats; integer codes fold their bias into an integer zero.
struct Header {
  alignas(64) float scale[kRows];
  alignas(64) float zero[kRows];
};

inline Rule rule_of(const Decoder& d) {
  if (d.zero == ZeroKind::offset) return kOffset;
  if (d.integer_codes && d.zero != ZeroKind::real && !d.has_scale2) return kInteger;
  if (d.integer_codes || d.zero != ZeroKind::none) return kReal;
  return d.e4m3_codes ? kE4m3 : kFloat;
}

inline void read_header(const Decoder& d, const std::byte* record, Header& header) {
  const std::int64_t scale_step = d.geometry.scale_bytes / kVecs;
  const std::int64_t zero_step = (d.geometry.header_bytes - d.geometry.scale_bytes) / kVecs;
  const bool folds = rule_of(d) == kInteger;
  for (int v = 0; v < kVecs; ++v) {
    store(header.scale + v * kLanes, load_as_floats(record + v * scale_step, d.scale_type));
    Vec zero{};
    if (d.zero != ZeroKind::none) zero = load_as_floats(record + d.geometry.scale_bytes + v * zero_step, d.zero_type);
    if (folds) zero += d.bias;
    store(header.zero + v * kLanes, zero);
  }
}

/// table[code] of 16 entries, in registers.
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
#define NIBBLE_PERMUTES 1
inline Vec look_up_16(const float* table, Ints code) {
  return _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(code), load(table));
}
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2
#define NIBBLE_PERMUTES 1
inline Vec look_up_16(const float* table, Ints code) {
  const __m256i index = reinterpret_cast<__m256i>(code);
  const Vec low = _mm256_permutevar8x32_ps(load(table), index), high = _mm256_permutevar8x32_ps(load(table + 8), index);
  return _mm256_blendv_ps(low, high, reinterpret_cast<Vec>(code << 28));  // by bit 3
}
#else
#define NIBBLE_PERMUTES 0
#endif

/// The values of float codes.
inline Vec look_up(const Decoder& d, Ints code) {
#if NIBBLE_PERMUTES
  if (d.geometry.bits == 4) return look_up_16(d.table.data(), code);
#endif
  Vec out{};
  for (int i = 0; i < kLanes; ++i) out[i] = d.table[static_cast<std::size_t>(code[i])];
  return out;
}

/// Half of the lanes in double, and back.
typedef double Doubles __attribute__((vector_size(kLanes * 4)));
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
inline Doubles lower(Vec x) { return _mm512_maskz_cvtps_pd(0xff, __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7)); }
inline Doubles upper(Vec x) { return _mm512_maskz_cvtps_pd(0xff, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15)); }
inline Vec to_floats(Doubles low, Doubles high) {
  const __m256 a = _mm512_maskz_cvtpd_ps(0xff, low), b = _mm512_maskz_cvtpd_ps(0xff, high);
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2
inline Doubles lower(Vec x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
inline Doubles upper(Vec x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
inline Vec to_floats(Doubles low, Doubles high) { return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low)); }
#else
inline Doubles lower(Vec x) { return Doubles{x[0], x[1]}; }
inline Doubles upper(Vec x) { return Doubles{x[2], x[3]}; }
inline Vec to_floats(Doubles low, Doubles high) {
  return Vec{static_cast<float>(low[0]), static_cast<float>(low[1]), static_cast<float>(high[0]), static_cast<float>(high[1])};
}
#endif

NIBBLE_VARIANT Doubles value_in_double(Rule rule, Doubles q, Doubles zero, Doubles scale) {
  return rule == kOffset ? q * scale + zero : (q - zero) * scale;
}
/// In double, so that W is rounded once.
NIBBLE_VARIANT Vec value_in_double(Rule rule, const Decoder& d, Ints code, Vec zero, Vec scale) {
  const Vec q = d.integer_codes ? to_floats(code) - d.bias : look_up(d, code);
  return to_floats(value_in_double(rule, lower(q), lower(zero), lower(scale)),
                   value_in_double(rule, upper(q), upper(zero), upper(scale)));
}

/// W of kLanes codes. `rule` is a constant at every call.
NIBBLE_VARIANT Vec value_of(Rule rule, const Decoder& d, Ints code, Vec zero, Vec scale) {
  if (rule == kInteger) return (to_floats(code) - zero) * scale;
  if (rule == kE4m3) return from_e4m3(code) * scale * d.scale2;  // 1 without a second scale
  if (rule == kFloat) return look_up(d, code) * scale * d.scale2;
  return value_in_double(rule, d, code, zero, scale) * d.scale2;
}

/// Channel j of vector v of a dense octet. `type` is a constant at every call.
NIBBLE_VARIANT Vec load_floats(DType type, const std::byte* octet, int v, int j) {
  if (type == DType::f32) return load(reinterpret_cast<const float*>(octet + tile::float_place(kRows, 32, v * kLanes, j)));
  const std::byte* const pairs = octet + tile::float_place(kRows, 16, v * kLanes, j) - j / 2 % 2 * 2;
  const Ints pair = load_ints(pairs);
  const bool second = j / 2 % 2 == 1;
  if (type == DType::bf16) return reinterpret_cast<Vec>(second ? pair & splat(-65536) : pair << 16);
  return from_f16(second ? (pair >> 16) & 0xffff : pair & 0xffff);
}

/// Vector v of an octet. `bits` (4, 8; 0: any width) is a constant at every call.
NIBBLE_VARIANT Quads load_codes(int bits, const tile::Planes& planes, const std::byte* octet, int v) {
  return bits == 0 ? load_any_quads(planes, octet, v) : load_quads(bits, octet, v);
}

/// Channel j of them.
NIBBLE_VARIANT Ints code_of(const Quads& quads, int j) { return ((j < 4 ? quads.low : quads.high) >> (8 * (j % 4))) & 255; }
