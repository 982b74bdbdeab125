// One vector register of each instruction set and the few operations the loops are written in. Included by each_isa.inl.

#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
constexpr int kLanes = 16;
constexpr int kRows = 32;  // R of the layout
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
constexpr int kLanes = 8;
constexpr int kRows = 16;
#else
constexpr int kLanes = 4;
constexpr int kRows = 16;
#endif
constexpr int kVecs = kRows / kLanes;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef std::int16_t Shorts __attribute__((vector_size(kLanes * 4)));
typedef float VecMemory __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef std::int32_t IntsMemory __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));

inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

inline Vec load(const float* p) { return *reinterpret_cast<const VecMemory*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<VecMemory*>(p) = v; }
inline Ints load_ints(const void* p) { return *static_cast<const IntsMemory*>(p); }
inline void store_ints(void* p, Ints v) { *static_cast<IntsMemory*>(p) = v; }
inline Ints splat(std::int32_t x) { return Ints{} + x; }
inline Ints load_splat(const void* p) {
  std::int32_t x;
  std::memcpy(&x, p, 4);
  return splat(x);
}
inline Vec to_floats(Ints v) { return __builtin_convertvector(v, Vec); }

/// Lanes that are `distance` apart, in each other's place: half the lanes, a quarter, …, or 1, a constant at every call.
NIBBLE_VARIANT Ints swap_lanes(int distance, Ints v) {
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
  if (distance == 8) return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  if (distance == 4) return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  if (distance == 2) return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
  if (distance == 4) return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  if (distance == 2) return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
#else
  if (distance == 2) return __builtin_shufflevector(v, v, 2, 3, 0, 1);
  return __builtin_shufflevector(v, v, 1, 0, 3, 2);
#endif
}

/// The sum of all lanes, and the largest.
inline std::int32_t sum_lanes(Ints v) {
#if defined(__aarch64__)
  return vaddvq_s32(reinterpret_cast<int32x4_t>(v));
#else
  for (int distance = kLanes / 2; distance > 0; distance /= 2) v += swap_lanes(distance, v);
  return v[0];
#endif
}
inline std::int32_t largest_lane(Ints v) {
#if defined(__aarch64__)
  return vmaxvq_s32(reinterpret_cast<int32x4_t>(v));
#else
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const Ints other = swap_lanes(distance, v);
    v = other > v ? other : v;
  }
  return v[0];
#endif
}

/// v, but no further from 0 than `far`; -far where it is NaN.
inline Vec within(Vec v, float far) {
  const Vec most = Vec{} + far;
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
  return _mm512_maskz_min_ps(0xffff, _mm512_maskz_max_ps(0xffff, v, -most), most);
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
  return _mm256_min_ps(_mm256_max_ps(v, -most), most);
#else
  v = v > -most ? v : -most;
  return v < most ? v : most;
#endif
}

/// Rounds to the nearest integer, ties to even.
inline Ints to_ints(Vec v) {
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
  return reinterpret_cast<Ints>(_mm512_maskz_cvtps_epi32(0xffff, v));
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(v));
#elif defined(__x86_64__)
  return reinterpret_cast<Ints>(_mm_cvtps_epi32(v));
#elif defined(__aarch64__)
  return reinterpret_cast<Ints>(vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(v)));
#else
  Ints out{};
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<std::int32_t>(__builtin_lrintf(v[i]));
  return out;
#endif
}

/// kLanes halves → floats.
inline Vec load_f16(const std::byte* p) {
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  float16x4_t half;
  std::memcpy(&half, p, 8);
  return reinterpret_cast<Vec>(vcvt_f32_f16(half));
#else
  Vec out{};
  for (int i = 0; i < kLanes; ++i) {
    f16 half;
    std::memcpy(&half, p + 2 * i, 2);
    out[i] = to_f32(half);
  }
  return out;
#endif
}

/// kLanes unsigned 16-bit or 8-bit integers, widened.
inline Ints load_u16(const std::byte* p) {
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
  return reinterpret_cast<Ints>(_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
  return reinterpret_cast<Ints>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  Ints out{};
  for (int i = 0; i < kLanes; ++i) {
    std::uint16_t x;
    std::memcpy(&x, p + 2 * i, 2);
    out[i] = x;
  }
  return out;
#endif
}
inline Ints load_u8(const std::byte* p) {
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
  return reinterpret_cast<Ints>(_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
  return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  Ints out{};
  for (int i = 0; i < kLanes; ++i) out[i] = static_cast<std::int32_t>(p[i]);
  return out;
#endif
}

/// e4m3 codes → floats. The bits of a normal code are those of the float except for the exponent's bias. A NaN has no sign.
inline Vec from_e4m3(Ints code) {
  const Ints magnitude = code & 0x7f;
  const Vec normal = reinterpret_cast<Vec>((magnitude << 20) + ((127 - 7) << 23)), tiny = to_floats(magnitude) * 0x1p-9f;
  const Ints value = reinterpret_cast<Ints>(magnitude < 8 ? tiny : normal) | ((code & 0x80) << 24);
  return reinterpret_cast<Vec>(magnitude == 0x7f ? splat(0x7fc00000) : value);
}

/// The bits of f16 numbers → floats.
inline Vec from_f16(Ints bits) {
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512 && NIBBLE_ISA <= NIBBLE_ISA_AMX
  return _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(bits)));
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
  const __m256i all = reinterpret_cast<__m256i>(bits);
  return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
#else
  const Ints sign = (bits & 0x8000) << 16, magnitude = (bits & 0x7fff) << 13;  // as to_f32() does
  const Ints finite = reinterpret_cast<Ints>(reinterpret_cast<Vec>(magnitude) * 0x1p112f);
  return reinterpret_cast<Vec>((magnitude >= 0x0f800000 ? magnitude | 0x70000000 : finite) | sign);
#endif
}

/// kLanes stored numbers of any type a header or an activation can have → floats.
inline Vec load_as_floats(const std::byte* p, DType type) {
  switch (type) {
    case DType::f32: return load(reinterpret_cast<const float*>(p));
    case DType::f16: return load_f16(p);
    case DType::bf16: return reinterpret_cast<Vec>(load_u16(p) << 16);
    case DType::u8: return to_floats(load_u8(p));
    case DType::s8: return to_floats((load_u8(p) ^ 128) - 128);
    case DType::e4m3: return from_e4m3(load_u8(p));
    case DType::e8m0: {  // an exponent; 0 is a subnormal, 255 NaN
      const Ints code = load_u8(p);
      return reinterpret_cast<Vec>(code == 0 ? splat(1 << 22) : code == 255 ? splat(0x7fc00000) : code << 23);
    }
    default: {
      Vec out{};
      for (int i = 0; i < kLanes; ++i) out[i] = code_value(type, static_cast<std::uint8_t>(p[i]));
      return out;
    }
  }
}

/// acc + w[0]·a[0] + … + w[3]·a[3] in every 32-bit lane; codes w, signed bytes a. `bits` (4 or 8) is how large codes are; codes of 8 bits
/// have kByteBias subtracted where the instruction takes signed bytes.
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512VNNI && NIBBLE_ISA <= NIBBLE_ISA_AMX
constexpr int kByteBias = 0;
inline Ints dot4(Ints acc, Ints w, Ints a, int) {
  return reinterpret_cast<Ints>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(acc), reinterpret_cast<__m512i>(w), reinterpret_cast<__m512i>(a)));
}
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
constexpr int kByteBias = 0;
inline Ints dot4(Ints acc, Ints w, Ints a, int) {
  return reinterpret_cast<Ints>(
      _mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(acc), reinterpret_cast<__m256i>(w), reinterpret_cast<__m256i>(a)));
}
#elif defined(__x86_64__)
constexpr int kByteBias = 0;
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
inline Ints multiply_pairs(Shorts a, Shorts b) {
  return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
inline Shorts multiply_bytes(Ints w, Ints a) {
  return reinterpret_cast<Shorts>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(w), reinterpret_cast<__m512i>(a)));
}
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2
inline Ints multiply_pairs(Shorts a, Shorts b) {
  return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
inline Shorts multiply_bytes(Ints w, Ints a) {
  return reinterpret_cast<Shorts>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(w), reinterpret_cast<__m256i>(a)));
}
#else
inline Ints multiply_pairs(Shorts a, Shorts b) {
  return reinterpret_cast<Ints>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
}
#endif
/// Channels 0 and 2, and 1 and 3, of a quad as 16-bit integers: of codes, and of signed bytes.
inline Shorts even_codes(Ints w) { return reinterpret_cast<Shorts>(w) & 0xff; }
inline Shorts odd_codes(Ints w) {
  typedef std::uint16_t Words __attribute__((vector_size(kLanes * 4)));
  return reinterpret_cast<Shorts>(reinterpret_cast<Words>(w) >> 8);
}
inline Shorts even_bytes(Ints a) { return (reinterpret_cast<Shorts>(a) << 8) >> 8; }
inline Shorts odd_bytes(Ints a) { return reinterpret_cast<Shorts>(a) >> 8; }
inline Ints dot4(Ints acc, Ints w, Ints a, int bits) {
#if NIBBLE_ISA != NIBBLE_ISA_BASELINE
  if (bits == 4) return acc + multiply_pairs(multiply_bytes(w, a), Shorts{} + std::int16_t{1});  // ≤ 2·15·128: no saturation
#else
  (void)bits;
#endif
  // 255·128·2 would saturate 16 bits.
  return acc + (multiply_pairs(even_codes(w), even_bytes(a)) + multiply_pairs(odd_codes(w), odd_bytes(a)));
}
#elif NIBBLE_ISA == NIBBLE_ISA_I8MM || NIBBLE_ISA == NIBBLE_ISA_NEONBF16
constexpr int kByteBias = 0;
inline Ints dot4(Ints acc, Ints w, Ints a, int) {
  return reinterpret_cast<Ints>(
      vusdotq_s32(reinterpret_cast<int32x4_t>(acc), reinterpret_cast<uint8x16_t>(w), reinterpret_cast<int8x16_t>(a)));
}
#elif NIBBLE_ISA == NIBBLE_ISA_DOTPROD
constexpr int kByteBias = 128;
inline Ints dot4(Ints acc, Ints w, Ints a, int) {
  return reinterpret_cast<Ints>(
      vdotq_s32(reinterpret_cast<int32x4_t>(acc), reinterpret_cast<int8x16_t>(w), reinterpret_cast<int8x16_t>(a)));
}
#elif defined(__aarch64__)
constexpr int kByteBias = 128;
inline Ints dot4(Ints acc, Ints w, Ints a, int) {
  const auto ws = reinterpret_cast<int8x16_t>(w), as = reinterpret_cast<int8x16_t>(a);
  const int16x8_t low = vmull_s8(vget_low_s8(ws), vget_low_s8(as)), high = vmull_high_s8(ws, as);
  const int32x4_t sums = vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
  return acc + reinterpret_cast<Ints>(sums);
}
#else
constexpr int kByteBias = 0;
inline Ints dot4(Ints acc, Ints w, Ints a, int) {
  for (int byte = 0; byte < 4; ++byte) acc += ((w >> (8 * byte)) & 255) * ((a << (24 - 8 * byte)) >> 24);
  return acc;
}
#endif

/// acc + w[0]·a[0] + w[1]·a[1] in every 32-bit lane; signed 16-bit halves, the lower one first.
inline Ints add_pairs(Ints acc, Ints w, Ints a) {
#if NIBBLE_ISA >= NIBBLE_ISA_AVX512VNNI && NIBBLE_ISA <= NIBBLE_ISA_AMX
  return reinterpret_cast<Ints>(
      _mm512_dpwssd_epi32(reinterpret_cast<__m512i>(acc), reinterpret_cast<__m512i>(w), reinterpret_cast<__m512i>(a)));
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
  return reinterpret_cast<Ints>(
      _mm256_dpwssd_avx_epi32(reinterpret_cast<__m256i>(acc), reinterpret_cast<__m256i>(w), reinterpret_cast<__m256i>(a)));
#elif defined(__x86_64__)
  return acc + multiply_pairs(reinterpret_cast<Shorts>(w), reinterpret_cast<Shorts>(a));
#else
  return acc + ((w << 16) >> 16) * ((a << 16) >> 16) + (w >> 16) * (a >> 16);
#endif
}

/// The codes of eight channels of kLanes rows: channel j in byte j of `low`, channel j + 4 in byte j of `high`.
struct Quads {
  Ints low, high;
};

/// Vector v of an octet of 4-bit or 8-bit codes. `bits` is a constant at every call.
NIBBLE_VARIANT Quads load_quads(int bits, const std::byte* octet, int v) {
  const Ints word = load_ints(octet + 4 * v * kLanes);
  if (bits == 8) return {word, load_ints(octet + 4 * (kRows + v * kLanes))};
  return {word & 0x0f0f0f0f, (word >> 4) & 0x0f0f0f0f};
}

/// Vector v of an octet of any width: plane by plane (layouts/tile.hpp), each spread over the bytes and put in its place.
inline Quads load_any_quads(const tile::Planes& planes, const std::byte* octet, int v) {
  Quads all{Ints{}, Ints{}};
  for (int p = 0; p < planes.count; ++p) {
    const auto [width, shift] = planes.plane[static_cast<std::size_t>(p)];
    Quads part;
    if (width == 8) {
      part = load_quads(8, octet, v);
    } else if (width == 4) {
      part = load_quads(4, octet, v);
    } else if (width == 2) {  // bytes k0 k2 k4 k6 and k1 k3 k5 k7, from the low bits up
      const Ints word = load_u16(octet + 2 * v * kLanes), rest = word >> 4;
      part = {(word & 0x0303) | ((word & 0x0c0c) << 14), (rest & 0x0303) | ((rest & 0x0c0c) << 14)};
    } else {  // bit j is channel j: the sum of copies that are 7 bits apart has it in bit 8j
      const Ints word = load_u8(octet + v * kLanes);
      part = {((word & 15) * 0x00204081) & 0x01010101, ((word >> 4) * 0x00204081) & 0x01010101};
    }
    all.low |= part.low << shift;
    all.high |= part.high << shift;
    octet += kRows * width;
  }
  return all;
}

typedef std::uint32_t Unsigned __attribute__((vector_size(kLanes * 4)));

/// kLanes words below 2¹⁶ as halves.
inline void store_halves(std::byte* to, Unsigned x) {
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(x)));
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2
  const __m256i all = reinterpret_cast<__m256i>(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
#else
  typedef std::uint16_t Halves __attribute__((vector_size(kLanes * 2)));
  const Halves halves = __builtin_convertvector(x, Halves);
  std::memcpy(to, &halves, sizeof halves);
#endif
}

/// The low byte of every lane.
inline void store_bytes(void* to, Ints v) {
#if NIBBLE_ISA == NIBBLE_ISA_AVX2
  const __m256i low = _mm256_set1_epi32(0x0c080400), all = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(v), low);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to),
                   _mm_unpacklo_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
#else
  typedef std::int8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes bytes = __builtin_convertvector(v, Bytes);
  std::memcpy(to, &bytes, sizeof bytes);
#endif
}

/// kLanes floats → 16-bit floats, rounded to nearest even.
inline void store_f16(std::byte* to, Vec x) {
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT));
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  const float16x4_t half = vcvt_f16_f32(reinterpret_cast<float32x4_t>(x));
  std::memcpy(to, &half, 8);
#else
  // to_f16() of every lane: adding ½ rounds what is subnormal.
  const Ints word = reinterpret_cast<Ints>(x), a = word & 0x7fffffff;
  const Ints normal = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
  const Ints tiny = reinterpret_cast<Ints>(reinterpret_cast<Vec>(a) + 0.5f) - 0x3f000000;
  Ints half = a < 0x38800000 ? tiny : normal;
  half = a >= 0x477ff000 ? splat(0x7c00) : half;
  half = (a > 0x7f800000 ? splat(0x7e00) : half) | ((word >> 16) & 0x8000);
  store_halves(to, reinterpret_cast<Unsigned>(half));
#endif
}

/// The bits of bf16 numbers, rounded to nearest even, of floats that are numbers.
inline Unsigned to_bf16(Vec x) {
  const Unsigned word = reinterpret_cast<Unsigned>(x);
  return (word + 0x7fff + ((word >> 16) & 1)) >> 16;
}

inline void store_bf16(std::byte* to, Vec x) {
  const Unsigned quiet = (reinterpret_cast<Unsigned>(x) >> 16) | 0x40;
  store_halves(to, x == x ? to_bf16(x) : quiet);
}
