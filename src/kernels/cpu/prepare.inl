// Included once per instruction set by prepare.cpp. See prepare.hpp for the forms.
#if NIBBLE_ISA <= NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX512

inline float element(const std::byte* row, DType type, std::int64_t i) {
  if (type == DType::f32) {
    float x;
    std::memcpy(&x, row + 4 * i, 4);
    return x;
  }
  if (!is_compute_float(type)) return code_value(type, static_cast<std::uint8_t>(row[i]));
  std::uint16_t bits;
  std::memcpy(&bits, row + 2 * i, 2);
  return type == DType::f16 ? to_f32(f16{bits}) : to_f32(bf16{bits});
}

/// Channels [k, k + count) of one row → x[0…count), zeros up to the next multiple of 16.
inline void gather(const PrepareTask& t, const std::byte* row, std::int64_t k, std::int64_t count, float* x) {
  std::int64_t i = 0;
  if (t.perm == nullptr) {
    const std::byte* from = row + k * t.width;
    if (t.type == DType::f32) {
      for (; i + kLanes <= count; i += kLanes) store(x + i, load_as_floats(from + 4 * i, DType::f32));
    } else if (t.type == DType::f16) {
      for (; i + kLanes <= count; i += kLanes) store(x + i, load_as_floats(from + 2 * i, DType::f16));
    } else if (t.type == DType::bf16) {
      for (; i + kLanes <= count; i += kLanes) store(x + i, load_as_floats(from + 2 * i, DType::bf16));
    }
    for (; i < count; ++i) x[i] = element(row, t.type, k + i);
    if (t.prescale != nullptr)
      for (i = 0; i < count; ++i) x[i] *= t.prescale[k + i];
  } else {
    for (; i < count; ++i) {
      const std::int64_t channel = t.perm[k + i];
      x[i] = element(row, t.type, channel) * (t.prescale == nullptr ? 1.0f : t.prescale[channel]);
    }
  }
  for (i = count; i % 16 != 0; ++i) x[i] = 0;
}

/// The same, but where A has them as they are wanted, no copy is made.
inline const float* gathered(const PrepareTask& t, const std::byte* row, std::int64_t k, std::int64_t count, float* x) {
  if (t.type == DType::f32 && t.perm == nullptr && t.prescale == nullptr && count % 16 == 0)
    return reinterpret_cast<const float*>(row) + k;
  gather(t, row, k, count, x);
  return x;
}

/// The bits of the largest |x|, which order like integers, NaN above infinity. `count` is rounded up to a multiple of 16.
inline std::int32_t largest_bits(const float* x, std::int64_t count) {
  Ints most{};
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Ints bits = reinterpret_cast<Ints>(load(x + i)) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  std::int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = most[i] > largest ? most[i] : largest;
  return largest;
}

struct Scaling {
  float scale;    // of one unit
  float inverse;  // what activations are multiplied by
};

inline float least_of(float a, float b) { return a < b ? a : b; }

constexpr std::int32_t kInfinityBits = 0x7f800000;

inline float from_bits(std::int32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

/// 24-bit fixed point: the power of two under which the largest magnitude just fits three signed digits, 127·2¹⁶ + 127·2⁸ + 127.
inline Scaling fixed_scaling(std::int32_t largest) {
  if (largest >= kInfinityBits) return {from_bits(0x7fc00000), 0.0f};  // no number: NaN, for the whole block
  std::int32_t exponent = largest >> 23;
  if (exponent < 24) exponent = 24;  // tiny blocks keep an absolute precision of 2⁻¹²⁶
  if (from_bits(largest) * from_bits((276 - exponent) << 23) > 8355711.0f) ++exponent;
  return {from_bits((exponent - 22) << 23), from_bits((276 - exponent) << 23)};
}

/// Makes the last `unit` bytes of `count` zeros, if they are not all there: whoever writes them next has zeros behind.
template <int unit>
inline void clear_end(std::int8_t* codes, std::int64_t count) {
  if (count % unit != 0) std::memset(codes + count / unit * unit, 0, unit);
}

/// Σ of bytes that zeros follow up to a multiple of 16.
inline std::int32_t sum_of(const std::int8_t* codes, std::int64_t count) {
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < (count + 15) / 16 * 16; ++i) sum += codes[i];
  return sum;
}

/// The rule of channels [k, end) of a token: given, known beforehand, or found by looking at all of them.
inline act_rule::Rule rule_of(const PrepareTask& t, const std::byte* row, std::int64_t m, std::int64_t k, std::int64_t end) {
  if (t.given.scale != nullptr) {
    const std::int32_t zero = t.given.zero == nullptr ? 0 : t.given.zero[m * t.given.zero_row + k / t.block * t.given.zero_block];
    return {t.given.scale[m * t.given.scale_row + k / t.block * t.given.scale_block], 0.0f, zero};
  }
  if (t.known) return act_rule::known(t.known->scale, t.known->zero);
  const bool zeros = t.form.zeros != Zeros::none;
  alignas(64) float x[kMaxSegment];
  Vec low{}, high{};
  std::int32_t largest = 0;
  for (; k < end; k += kMaxSegment) {
    const std::int64_t count = end - k < kMaxSegment ? end - k : kMaxSegment;
    const float* piece = gathered(t, row, k, count, x);
    const std::int32_t part = largest_bits(piece, count);
    largest = part > largest ? part : largest;
    for (std::int64_t i = 0; zeros && i < count; i += kLanes) {
      const Vec v = load(piece + i);
      low = v < low ? v : low;
      high = v > high ? v : high;
    }
  }
  const bool finite = largest < kInfinityBits;
  const float nan = from_bits(0x7fc00000);
  if (!zeros)
    return act_rule::symmetric(finite ? least_of(from_bits(largest), t.limit) : nan,
                               t.quantize.codes == DType::e4m3 ? act_rule::kE4m3Max : 127.0f);
  float bottom = 0, top = 0;
  for (int i = 0; i < kLanes; ++i) {
    bottom = least_of(low[i], bottom);
    top = -least_of(-high[i], -top);
  }
  return act_rule::asymmetric(finite ? -least_of(-bottom, t.limit) : nan, least_of(top, t.limit));
}

/// x[0 … count) → codes by act_rule::to_s8, zeros up to the next multiple of 16; their sum.
inline std::int32_t to_codes(const float* x, std::int64_t count, const act_rule::Rule& rule, std::int8_t* codes) {
  typedef std::int8_t Bytes __attribute__((vector_size(kLanes)));
  constexpr float kFar = 512;  // beyond it codes saturate, wherever the zero point is; and integers hold what is within
  for (std::int64_t i = 0; i < count; i += kLanes) {
    Vec scaled = load(x + i) * rule.inverse;
    scaled = scaled == scaled ? scaled : Vec{};  // a NaN is what 0 is
    scaled = scaled > -kFar ? scaled : Vec{} - kFar;
    scaled = scaled < kFar ? scaled : Vec{} + kFar;
    Ints code = to_ints(scaled) + rule.zero;
    code = code > -128 ? code : splat(-128);
    code = code < 127 ? code : splat(127);
    const Bytes bytes = __builtin_convertvector(code, Bytes);
    std::memcpy(codes + i, &bytes, kLanes);
  }
  for (std::int64_t i = count; i % 16 != 0; ++i) codes[i] = 0;
  return sum_of(codes, count);
}

void quantize(const std::byte* from, DType type, std::int64_t count, const act_rule::Rule& rule, std::int8_t* codes) {
  const PrepareTask plain{.type = type, .width = bits(type) / 8};
  alignas(64) float x[kMaxSegment];
  alignas(64) std::int8_t bytes[kMaxSegment];
  for (std::int64_t i = 0; i < count; i += kMaxSegment) {
    const std::int64_t piece = count - i < kMaxSegment ? count - i : kMaxSegment;
    to_codes(gathered(plain, from, i, piece, x), piece, rule, bytes);
    std::memcpy(codes + i, bytes, static_cast<std::size_t>(piece));
  }
}

float quantize_block(const std::byte* from, DType type, std::int64_t count, float limit, std::int8_t* codes) {
  const PrepareTask plain{.type = type, .width = bits(type) / 8};
  alignas(64) float x[kMaxSegment];
  alignas(64) std::int8_t bytes[kMaxSegment];
  const float* piece = gathered(plain, from, 0, count, x);
  const std::int32_t largest = largest_bits(piece, count);
  const act_rule::Rule rule =
      act_rule::symmetric(largest < kInfinityBits ? least_of(from_bits(largest), limit) : from_bits(0x7fc00000), 127.0f);
  to_codes(piece, count, rule, bytes);
  std::memcpy(codes, bytes, static_cast<std::size_t>(count));
  return rule.scale;
}

/// The codes of an A that comes quantized, zeros after them; their sum.
inline std::int32_t gather_codes(const PrepareTask& t, const std::byte* row, std::int64_t k, std::int64_t count,
                                 std::int8_t* codes) {
  clear_end<16>(codes, count);
  if (t.perm == nullptr) {
    std::memcpy(codes, row + k, static_cast<std::size_t>(count));
  } else {
    for (std::int64_t i = 0; i < count; ++i) codes[i] = static_cast<std::int8_t>(row[t.perm[k + i]]);
  }
  return sum_of(codes, count);
}

/// What e4m3 codes of x[0 … count) stand for, in place: by act_rule::to_e4m3, times the scale.
inline void round_to_e4m3(float* x, std::int64_t count, const act_rule::Rule& rule) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Vec scaled = load(x + i) * rule.inverse;
    const Ints sign = reinterpret_cast<Ints>(scaled) & splat(INT32_MIN);
    Vec a = reinterpret_cast<Vec>(reinterpret_cast<Ints>(scaled) & 0x7fffffff);
    a = a > act_rule::kE4m3Max ? Vec{} + act_rule::kE4m3Max : a;
    const Ints magnitude = reinterpret_cast<Ints>(a);
    const Vec normal =
        reinterpret_cast<Vec>((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) & ~0xfffff);  // three bits of fraction
    const Vec tiny = to_floats(to_ints(a * 512.0f)) * 0x1p-9f;
    const Vec rounded = a < 0x1p-6f ? tiny : a == a ? normal : a;
    store(x + i, reinterpret_cast<Vec>(reinterpret_cast<Ints>(rounded) | sign) * rule.scale);
  }
}

inline std::int32_t total(const std::int32_t* units, std::int64_t count) {
  Ints sums{};
  for (std::int64_t i = 0; i < count; i += kLanes) sums += load_ints(units + i);
  return sum_lanes(sums);
}

void fixed(const PrepareTask& t, std::int64_t m) {
  constexpr int kDigits = 3;
  const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile;
  alignas(64) float x[kMaxFixedSegment];
  alignas(64) std::int32_t units[kMaxFixedSegment];
  alignas(64) std::int8_t bytes[kDigits][kMaxFixedSegment];
  for (std::int64_t r = 0; r < height; ++r) {
    const std::byte* row = t.row(m + r);
    std::byte* out = t.out + m * t.token_bytes;
    for (std::int64_t k = 0; k < t.segments.k;) {
      const std::int64_t end = t.segments.end(k);
      gather(t, row, k, end - k, x);
      const Scaling scaling = fixed_scaling(largest_bits(x, end - k));
      const std::int64_t padded = (end - k + 15) / 16 * 16;
      for (std::int64_t i = 0; i < padded; i += kLanes) store_ints(units + i, to_ints(load(x + i) * scaling.inverse));
      const std::int32_t sum = total(units, end - k);
      const std::int64_t octets = tile::Geometry::octets(end - k);
      const float values[2] = {scaling.scale, static_cast<float>(sum)};
      std::memcpy(out + 4 * r, &values[0], 4);
      std::memcpy(out + 4 * (height + r), &values[1], 4);
      out += 8 * height;
      std::int32_t left = sum;
      for (int d = 0; d < kDigits; ++d) {
        for (std::int64_t i = 0; i < padded; ++i) bytes[d][i] = static_cast<std::int8_t>(units[i]);
        std::int32_t rest = 0;  // Σ of what is left of the integers when the digit has been taken off and they have been shifted
        if (d + 1 < kDigits) {
          for (std::int64_t i = 0; i < padded; i += kLanes) {
            const Ints unit = load_ints(units + i);
            store_ints(units + i, (unit - ((unit << 24) >> 24)) >> 8);
          }
          rest = total(units, end - k);
        }
        const std::int32_t start = -t.bias * (left - 256 * rest);
        left = rest;
        std::memcpy(out + 4 * (r * kDigits + d), &start, 4);
      }
      out += 4 * height * kDigits;
      std::byte* quad = out + 4 * kDigits * r;
      for (std::int64_t q = 0; q < 2 * octets; ++q, quad += 4 * height * kDigits)
        for (int d = 0; d < kDigits; ++d) std::memcpy(quad + 4 * d, bytes[d] + 4 * q, 4);
      out += 8 * octets * height * kDigits;
      k = end;
    }
  }
}

/// Codes [begin, begin + count) of a segment of token r, and what pads them to whole octets or rows, to where the form has them; `out` is
/// the segment's place for codes, in a tile with room for `room` tokens. `segment` is how long it is.
inline void lay_codes(const PrepareTask& t, const std::int8_t* codes, std::int64_t begin, std::int64_t count, std::int64_t r,
                      std::int64_t room, std::int64_t segment, std::byte* out) {
  if (!t.rows) {
    out += 4 * (begin / 4 * room + r);
    for (std::int64_t q = 0; q < 2 * tile::Geometry::octets(count); ++q, out += 4 * room) std::memcpy(out, codes + 4 * q, 4);
    return;
  }
  const std::int64_t steps = (segment + kRowBytes - 1) / kRowBytes, first = begin / kRowBytes;
  out += ((r / kRowTokens * steps + first) * kRowTokens + r % kRowTokens) * kRowBytes;
  for (std::int64_t i = 0; i < count; i += kRowBytes, out += kRowTokens * kRowBytes) std::memcpy(out, codes + i, kRowBytes);
}

/// int8: a rule per token or block of K, then its codes, piece by piece.
void codes(const PrepareTask& t, std::int64_t m) {
  const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile;
  const std::int64_t header = t.form.segment_header();
  const bool per_segment = t.form.zeros == Zeros::per_segment;
  const std::int64_t room = t.rows ? (height + kRowTokens - 1) / kRowTokens * kRowTokens : height;
  const std::int64_t step = t.rows ? kRowBytes : tile::kOctet;
  alignas(64) float x[kMaxSegment];
  alignas(64) std::int8_t bytes[kMaxSegment];
  for (std::int64_t r = 0; r < height; ++r) {
    const std::byte* row = t.row(m + r);
    std::byte* out = t.out + m * t.token_bytes;
    act_rule::Rule rule;
    std::int64_t block_end = 0;
    for (std::int64_t k = 0; k < t.segments.k;) {
      const std::int64_t end = t.segments.end(k);
      if (k >= block_end) {
        block_end = t.segments.k - k < t.block ? t.segments.k : k + t.block;
        rule = rule_of(t, row, m + r, k, block_end);
      }
      if (k == 0 && t.form.zeros == Zeros::per_token) {
        std::memcpy(out + 4 * r, &rule.zero, 4);
        out += 4 * room;
      }
      std::int64_t sum = 0;
      for (std::int64_t begin = k; begin < end; begin += kMaxSegment) {
        const std::int64_t count = end - begin < kMaxSegment ? end - begin : kMaxSegment;
        if (t.rows) clear_end<kRowBytes>(bytes, count);
        if (t.type == DType::s8) {
          sum += gather_codes(t, row, begin, count, bytes);
        } else {
          sum += to_codes(gathered(t, row, begin, count, x), count, rule, bytes);
        }
        for (std::int64_t i = count; per_segment && i % tile::kOctet != 0; ++i) bytes[i] = static_cast<std::int8_t>(rule.zero);
        lay_codes(t, bytes, begin - k, count, r, room, end - k, out + header * room);
      }
      if (per_segment) sum -= rule.zero * (end - k);
      const auto units = static_cast<float>(sum), zero = static_cast<float>(rule.zero);
      const auto start = static_cast<std::int32_t>(-t.bias * sum);
      std::memcpy(out + 4 * r, &rule.scale, 4);
      std::memcpy(out + 4 * (room + r), &units, 4);
      if (per_segment) std::memcpy(out + 4 * (2 * room + r), &zero, 4);
      std::memcpy(out + (header - 4) * room + 4 * r, &start, 4);
      out += (header + (end - k + step - 1) / step * step) * room;
      k = end;
    }
  }
}

/// Floats as they are, or rounded to what their FP8 codes stand for.
void floats(const PrepareTask& t, std::int64_t m) {
  const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile;
  const bool quantizes = t.quantize.codes != DType::none;
  alignas(64) float x[kMaxSegment];
  for (std::int64_t r = 0; r < height; ++r) {
    const std::byte* row = t.row(m + r);
    act_rule::Rule rule;
    std::int64_t block_end = 0;
    for (std::int64_t k = 0, end = 0; k < t.segments.k; k = end) {
      end = t.segments.k - k < kMaxSegment ? t.segments.k : k + kMaxSegment;
      if (quantizes) {
        if (k >= block_end) {
          block_end = t.segments.k - k < t.block ? t.segments.k : k + t.block;
          rule = rule_of(t, row, m + r, k, block_end);
        }
        end = end < block_end ? end : block_end;
      }
      const std::int64_t count = end - k;
      gather(t, row, k, count, x);
      if (quantizes && t.given.scale == nullptr) round_to_e4m3(x, count, rule);
      for (std::int64_t i = 0; t.given.scale != nullptr && i < count; ++i) x[i] *= rule.scale;
      float* out = reinterpret_cast<float*>(t.out + m * t.token_bytes) + k * height + r;
      for (std::int64_t i = 0; i < count; ++i) out[i * height] = x[i];
    }
  }
}

/// bf16 as it is: no arithmetic, only order.
void halves(const PrepareTask& t, std::int64_t m) {
  typedef std::uint16_t Octet __attribute__((vector_size(2 * tile::kOctet)));
  constexpr std::int64_t kRowOctets = kRowBytes / static_cast<std::int64_t>(sizeof(Octet));
  const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile;
  const std::int64_t room = t.rows ? (height + kRowTokens - 1) / kRowTokens * kRowTokens : height;
  for (std::int64_t r = 0; r < height; ++r) {
    const std::byte* row = t.row(m + r);
    std::byte* out = t.out + m * t.token_bytes;
    for (std::int64_t k = 0, end = 0; k < t.segments.k; k = end) {
      end = t.segments.end(k);
      std::int64_t octets = tile::Geometry::octets(end - k);
      if (t.rows) octets = (octets + kRowOctets - 1) / kRowOctets * kRowOctets;
      for (std::int64_t o = 0; o < octets; ++o) {
        const std::int64_t first = k + o * tile::kOctet;
        Octet octet{};
        if (t.perm == nullptr && first + tile::kOctet <= end) {
          std::memcpy(&octet, row + 2 * first, sizeof octet);
        } else {
          for (std::int64_t j = 0; j < tile::kOctet && first + j < end; ++j)
            std::memcpy(reinterpret_cast<char*>(&octet) + 2 * j, row + 2 * (t.perm == nullptr ? first + j : t.perm[first + j]),
                        2);
        }
        octet = __builtin_shufflevector(octet, octet, 0, 2, 4, 6, 1, 3, 5, 7);
        if (t.rows) {
          const std::int64_t at = (r / kRowTokens * octets / kRowOctets + o / kRowOctets) * kRowTokens + r % kRowTokens;
          std::memcpy(out + at * kRowBytes + o % kRowOctets * static_cast<std::int64_t>(sizeof octet), &octet, sizeof octet);
        } else {
          for (int pair = 0; pair < 4; ++pair)
            std::memcpy(out + 4 * ((4 * o + pair) * room + r), reinterpret_cast<const char*>(&octet) + 4 * pair, 4);
        }
      }
      out += 16 * octets * room;
    }
  }
}

#endif
