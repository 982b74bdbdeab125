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
    } else if (t.type == DType::e4m3) {
      for (; i + kLanes <= count; i += kLanes) store(x + i, load_as_floats(from + i, DType::e4m3));
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

/// The same, without a copy where A has them in this form.
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
  return largest_lane(most);
}

struct Scaling {
  float scale;    // of one unit
  float inverse;  // the factor of activations
};

inline float least_of(float a, float b) { return a < b ? a : b; }
inline float limited(float x, float limit) { return least_of(-least_of(-x, limit), limit); }

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

/// Zeroes the last, partial unit of `unit` bytes of `count`: the bytes written next are then followed by zeros.
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

/// `words` of 4 bytes of each row → word w of row r at out + 4·(w·room + r), four by four.
inline void lay_words(const std::byte* const* rows, std::int64_t count, std::int64_t words, std::int64_t room, std::byte* out) {
  typedef std::int32_t Four __attribute__((vector_size(16)));
  typedef std::int32_t FourMemory __attribute__((vector_size(16), aligned(1), may_alias));
  std::int64_t w = 0;
  if (room == 1) {  // one token: it is its own order
    for (; w + 4 <= words; w += 4, out += 16) std::memcpy(out, rows[0] + 4 * w, 16);
    std::memcpy(out, rows[0] + 4 * w, static_cast<std::size_t>(4 * (words - w)));
    return;
  }
  for (; w + 4 <= words; w += 4, out += 16 * room) {
    std::int64_t r = 0;
    for (; r + 4 <= count; r += 4) {
      const Four a = *reinterpret_cast<const FourMemory*>(rows[r] + 4 * w),
                 b = *reinterpret_cast<const FourMemory*>(rows[r + 1] + 4 * w),
                 c = *reinterpret_cast<const FourMemory*>(rows[r + 2] + 4 * w),
                 d = *reinterpret_cast<const FourMemory*>(rows[r + 3] + 4 * w);
      const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const Four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      std::byte* const to = out + 4 * r;
      *reinterpret_cast<FourMemory*>(to) = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
      *reinterpret_cast<FourMemory*>(to + 4 * room) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
      *reinterpret_cast<FourMemory*>(to + 8 * room) = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
      *reinterpret_cast<FourMemory*>(to + 12 * room) = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
    }
    for (; r < count; ++r)
      for (std::int64_t i = 0; i < 4; ++i) std::memcpy(out + 4 * (i * room + r), rows[r] + 4 * (w + i), 4);
  }
  for (; w < words; ++w, out += 4 * room)
    for (std::int64_t r = 0; r < count; ++r) std::memcpy(out + 4 * r, rows[r] + 4 * w, 4);
}

/// The rule with a float offset of channels [k, end) of a token, computed from all of them.
__attribute__((noinline)) act_rule::Rule offset_rule_of(const PrepareTask& t, const std::byte* row, std::int64_t k,
                                                        std::int64_t end) {
  alignas(64) float x[kMaxSegment];
  Vec low = Vec{} + act_rule::kLargest, high = -low;
  std::int32_t largest = 0;
  for (; k < end; k += kMaxSegment) {
    const std::int64_t count = end - k < kMaxSegment ? end - k : kMaxSegment;
    const float* piece = gathered(t, row, k, count, x);
    const std::int32_t part = largest_bits(piece, count);
    largest = part > largest ? part : largest;
    for (std::int64_t i = count; i % 16 != 0; ++i) x[i] = x[0];  // the padding is no part of the range
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const Vec v = load(piece + i);
      low = v < low ? v : low;
      high = v > high ? v : high;
    }
  }
  float bottom = low[0], top = high[0];
  for (int i = 1; i < kLanes; ++i) {
    bottom = least_of(low[i], bottom);
    top = -least_of(-high[i], -top);
  }
  return act_rule::with_offset(limited(bottom, t.limit), largest < kInfinityBits ? limited(top, t.limit) : from_bits(0x7fc00000));
}

/// The rule of channels [k, end) of a token: given, known, or computed from all of them.
inline act_rule::Rule rule_of(const PrepareTask& t, const std::byte* row, std::int64_t m, std::int64_t k, std::int64_t end) {
  if (t.given.scale != nullptr) {
    const std::int64_t zero_at = m * t.given.zero_row + k / t.block * t.given.zero_block;
    return {.scale = t.given.scale[m * t.given.scale_row + k / t.block * t.given.scale_block],
            .inverse = 0.0f,
            .zero = t.given.zero == nullptr ? 0 : t.given.zero[zero_at],
            .offset = t.given.offset == nullptr ? 0.0f : t.given.offset[zero_at]};
  }
  if (t.known) return act_rule::known(t.known->scale, t.known->zero);
  if (t.act_scheme.zero == ZeroKind::offset) return offset_rule_of(t, row, k, end);
  const bool zeros = t.digits.zero_sums != ZeroSums::none;
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
                               t.act_scheme.codes == DType::e4m3 ? act_rule::kE4m3Max : 127.0f);
  float bottom = 0, top = 0;
  for (int i = 0; i < kLanes; ++i) {
    bottom = least_of(low[i], bottom);
    top = -least_of(-high[i], -top);
  }
  return act_rule::asymmetric(finite ? -least_of(-bottom, t.limit) : nan, least_of(top, t.limit));
}

/// x[0 … count) → codes by act_rule::to_s8, zeros up to the next multiple of 16; their sum.
inline std::int32_t to_codes(const float* x, std::int64_t count, const act_rule::Rule& rule, std::int8_t* codes) {
  constexpr float kFar = 512;  // codes of larger magnitudes saturate for every zero point; smaller ones fit integers
  Ints all{};
  for (std::int64_t i = 0; i < count; i += kLanes) {
    Vec scaled = load(x + i) * rule.inverse;
    scaled = scaled == scaled ? scaled : Vec{};  // a NaN becomes 0
    Ints code = to_ints(within(scaled, kFar)) + rule.zero;
    code = code > -128 ? code : splat(-128);
    code = code < 127 ? code : splat(127);
    store_bytes(codes + i, code);
    all += code;
  }
  std::int32_t sum = sum_lanes(all);
  for (std::int64_t i = count; i % kLanes != 0; ++i) sum -= codes[i];  // of zeros after the last channel
  for (std::int64_t i = count; i % 16 != 0; ++i) codes[i] = 0;
  return sum;
}

/// x[0 … count) less `low`, into `to`.
inline const float* less(const float* x, std::int64_t count, float low, float* to) {
  for (std::int64_t i = 0; i < count; i += kLanes) store(to + i, load(x + i) - low);
  return to;
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

/// The codes of a quantized A, followed by zeros up to a multiple of 16; without a copy where A has them in this form.
inline const std::int8_t* gathered_codes(const PrepareTask& t, const std::byte* row, std::int64_t k, std::int64_t count,
                                         std::int8_t* codes) {
  if (t.perm == nullptr && count % 16 == 0 && (!t.rows || count % kRowBytes == 0))
    return reinterpret_cast<const std::int8_t*>(row) + k;
  clear_end<16>(codes, count);
  if (t.perm == nullptr) {
    std::memcpy(codes, row + k, static_cast<std::size_t>(count));
  } else {
    for (std::int64_t i = 0; i < count; ++i) codes[i] = static_cast<std::int8_t>(row[t.perm[k + i]]);
  }
  return codes;
}

/// The zero point, a float, of codes that mean code·scale + offset = (code − zero)·scale. Where codes are too small to change an offset,
/// or the scale is 0, all of the block are taken to be 0, under another scale.
struct FloatZero {
  float scale, zero;
  bool no_codes;
};
inline FloatZero float_zero(const act_rule::Rule& rule) {
  constexpr float kNegligible = 0x1p40f;  // codes are less than 2⁻³³ of the offset
  const float size = __builtin_fabsf(rule.offset);
  if (size > kNegligible * __builtin_fabsf(rule.scale)) return {size, rule.offset > 0 ? -1.0f : 1.0f, true};
  return {rule.scale, rule.scale == 0 ? 0.0f : -rule.offset / rule.scale, false};
}

/// x[0 … count) → the values of its e4m3 codes, in place: act_rule::to_e4m3, times `scale`.
inline void round_to_e4m3(float* x, std::int64_t count, const act_rule::Rule& rule, float scale) {
  typedef std::uint32_t Words __attribute__((vector_size(kLanes * 4)));
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Vec scaled = load(x + i) * rule.inverse;
    const Ints sign = reinterpret_cast<Ints>(scaled) & splat(INT32_MIN);
    Vec a = reinterpret_cast<Vec>(reinterpret_cast<Ints>(scaled) & 0x7fffffff);
    a = a > act_rule::kE4m3Max ? Vec{} + act_rule::kE4m3Max : a;
    const Words magnitude = reinterpret_cast<Words>(a);
    const Vec normal =
        reinterpret_cast<Vec>((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) & ~0xfffffu);  // three bits of fraction
    const Vec tiny = to_floats(to_ints(a * 512.0f)) * 0x1p-9f;
    const Vec rounded = a < 0x1p-6f ? tiny : a == a ? normal : a;
    store(x + i, reinterpret_cast<Vec>(reinterpret_cast<Ints>(rounded) | sign) * scale);
  }
}

constexpr int kFixedDigits = 3;

/// x[0 … count) · inverse as integers of three signed digits, digit d to digits[d]; `count` is rounded up to a multiple of 16. sums[d]: of the integers
/// without their d least significant digits.
inline void to_fixed(const float* x, std::int64_t count, float inverse, std::int8_t (*digits)[kMaxFixedSegment],
                     std::int32_t* sums) {
  Ints all[kFixedDigits] = {};
  for (std::int64_t i = 0; i < count; i += kLanes) {
    Ints left = to_ints(load(x + i) * inverse);
    for (int d = 0; d < kFixedDigits; ++d) {
      store_bytes(digits[d] + i, left);
      all[d] += left;
      left = (left + 128) >> 8;
    }
  }
  for (int d = 0; d < kFixedDigits; ++d) sums[d] = sum_lanes(all[d]);
}

/// 24-bit fixed point; of tokens [first, first + tokens) of the tile of `height` at m.
inline void fixed_of(const PrepareTask& t, std::int64_t m, std::int64_t height, std::int64_t first, std::int64_t tokens) {
  constexpr int kDigits = kFixedDigits;
  alignas(64) float x[kMaxFixedSegment];
  alignas(64) std::int8_t bytes[kTogether * kDigits][kMaxFixedSegment];
  const std::byte* rows[kTogether];
  const std::byte* digits[kTogether * kDigits];
  for (std::int64_t i = 0; i < tokens; ++i) rows[i] = t.row(m + first + i, i);
  for (std::int64_t i = 0; i < tokens * kDigits; ++i) digits[i] = reinterpret_cast<const std::byte*>(bytes[i]);
  std::byte* out = t.out + m * t.token_bytes;
  for (std::int64_t k = 0; k < t.segments.k;) {
    const std::int64_t end = t.segments.end(k), octets = tile::Geometry::octets(end - k);
    for (std::int64_t i = 0; i < tokens; ++i) {
      const std::int64_t r = first + i;
      const float* const values = gathered(t, rows[i], k, end - k, x);
      const Scaling scaling = fixed_scaling(largest_bits(values, end - k));
      std::int32_t sums[kDigits + 1] = {};
      if (scaling.inverse != 0.0f)
        to_fixed(values, end - k, scaling.inverse, bytes + i * kDigits, sums);
      else  // the scale is NaN, and so are all sums
        std::memset(bytes[i * kDigits], 0, sizeof bytes[0] * kDigits);
      const float header[2] = {scaling.scale, static_cast<float>(sums[0])};
      std::memcpy(out + 4 * r, &header[0], 4);
      std::memcpy(out + 4 * (height + r), &header[1], 4);
      for (int d = 0; d < kDigits; ++d) {
        const std::int32_t start = -t.bias * (sums[d] - 256 * sums[d + 1]);  // of the digit alone
        std::memcpy(out + 4 * (2 * height + r * kDigits + d), &start, 4);
      }
    }
    out += (8 + 4 * kDigits) * height;
    lay_words(digits, tokens * kDigits, 2 * octets, height * kDigits, out + 4 * kDigits * first);
    out += 8 * octets * height * kDigits;
    k = end;
  }
}
void fixed(const PrepareTask& t, std::int64_t m) {
  const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile, tokens = t.together(), end = t.end(height);
  for (std::int64_t r = t.begin; r < end; r += tokens) fixed_of(t, m, height, r, least(tokens, end - r));
}

/// Moves `count` codes by `lead` places; before them, and behind them up to a whole octet, is `fill`.
inline void pad_octets(std::int8_t* codes, std::int64_t lead, std::int64_t count, std::int8_t fill) {
  if (lead != 0) std::memmove(codes + lead, codes, static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < lead; ++i) codes[i] = fill;
  for (std::int64_t i = lead + count; i % tile::kOctet != 0; ++i) codes[i] = fill;
}

/// Codes [begin, begin + count) of a segment of tokens first, first + 1, ... of the tile, and the padding to whole octets or rows, to
/// their place in the form; `out` is the segment's place for codes, in a tile with room for `room` tokens. `segment` is how long it is.
inline void lay_codes(const PrepareTask& t, const std::byte* const* codes, std::int64_t first, std::int64_t tokens,
                      std::int64_t begin, std::int64_t count, std::int64_t room, std::int64_t segment, std::byte* out) {
  if (!t.rows) {
    lay_words(codes, tokens, 2 * tile::Geometry::octets(count), room, out + 4 * (begin / 4 * room + first));
    return;
  }
  const std::int64_t steps = (segment + kRowBytes - 1) / kRowBytes;
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t r = first + i;
    std::byte* to = out + ((r / kRowTokens * steps + begin / kRowBytes) * kRowTokens + r % kRowTokens) * kRowBytes;
    for (std::int64_t at = 0; at < count; at += kRowBytes, to += kRowTokens * kRowBytes)
      std::memcpy(to, codes[i] + at, kRowBytes);
  }
}

/// int8: a rule per token or block of K, then its codes, piece by piece; of tokens [first, first + tokens) of the tile of `height` at m.
inline void codes_of(const PrepareTask& t, std::int64_t m, std::int64_t height, std::int64_t first, std::int64_t tokens) {
  const std::int64_t header = t.digits.segment_header();
  const bool per_segment = t.digits.zero_sums == ZeroSums::per_segment, offsets = t.act_scheme.zero == ZeroKind::offset;
  const std::int64_t room = t.rows ? (height + kRowTokens - 1) / kRowTokens * kRowTokens : height;
  const std::int64_t step = t.rows ? kRowBytes : tile::kOctet;
  alignas(64) float x[kMaxSegment];
  alignas(64) std::int8_t bytes[kTogether][kMaxSegment];
  const std::byte* rows[kTogether];
  const std::byte* pieces[kTogether];
  act_rule::Rule rules[kTogether];
  std::int64_t sums[kTogether];
  for (std::int64_t i = 0; i < tokens; ++i) rows[i] = t.row(m + first + i, i);
  std::byte* out = t.out + m * t.token_bytes;
  std::int64_t block_end = 0;
  for (std::int64_t k = 0; k < t.segments.k;) {
    const std::int64_t end = t.segments.end(k), lead = t.segments.splits_octets() ? t.segments.lead(k) : 0;
    if (k >= block_end) {
      block_end = t.segments.k - k < t.block ? t.segments.k : k + t.block;
      for (std::int64_t i = 0; i < tokens; ++i) rules[i] = rule_of(t, rows[i], m + first + i, k, block_end);
    }
    if (k == 0 && t.digits.zero_sums == ZeroSums::per_token) {
      for (std::int64_t i = 0; i < tokens; ++i) std::memcpy(out + 4 * (first + i), &rules[i].zero, 4);
      out += 4 * room;
    }
    for (std::int64_t i = 0; i < tokens; ++i) sums[i] = 0;
    for (std::int64_t begin = k, count = 0; begin < end; begin += count) {
      const std::int64_t skipped = begin == k ? lead : 0;
      count = least(end - begin, kMaxSegment - skipped);
      for (std::int64_t i = 0; i < tokens; ++i) {
        if (t.rows) clear_end<kRowBytes>(bytes[i], count);
        const std::int8_t* piece = bytes[i];
        if (t.type == DType::s8 && offsets && float_zero(rules[i]).no_codes) {
          std::memset(bytes[i], 0, sizeof bytes[i]);
        } else if (t.type == DType::s8) {
          piece = gathered_codes(t, rows[i], begin, count, bytes[i]);
          sums[i] += sum_of(piece, count);
        } else {
          const float* values = gathered(t, rows[i], begin, count, x);
          if (offsets) values = less(values, count, rules[i].low, x);
          sums[i] += to_codes(values, count, rules[i], bytes[i]);
        }
        if (skipped != 0 || count % tile::kOctet != 0) {
          if (piece != bytes[i]) std::memcpy(bytes[i], piece, static_cast<std::size_t>(count));
          piece = bytes[i];
          pad_octets(bytes[i], skipped, count, static_cast<std::int8_t>(t.digits.paired ? rules[i].zero : 0));
        }
        pieces[i] = reinterpret_cast<const std::byte*>(piece);
      }
      lay_codes(t, pieces, first, tokens, begin == k ? 0 : begin - k + lead, skipped + count, room, lead + end - k,
                out + header * room);
    }
    for (std::int64_t i = 0; i < tokens; ++i) {
      const std::int64_t r = first + i, z = rules[i].zero, sum = sums[i] - (per_segment ? z * (end - k) : 0);
      float scale = rules[i].scale, units = static_cast<float>(sum), zero = static_cast<float>(z);
      if (offsets) {
        const FloatZero as_zero = float_zero(rules[i]);
        scale = as_zero.scale, zero = as_zero.zero;
        units = static_cast<float>(static_cast<double>(sums[i]) - static_cast<double>(zero) * static_cast<double>(end - k));
      }
      const std::int16_t pair[] = {static_cast<std::int16_t>(-sum), static_cast<std::int16_t>(-z)};
      const auto start = static_cast<std::int32_t>(-t.bias * (t.digits.paired ? sum : sums[i]));
      std::memcpy(out + 4 * r, &scale, 4);
      std::memcpy(out + 4 * (room + r), &units, 4);
      if (per_segment) std::memcpy(out + 4 * (2 * room + r), t.digits.paired ? static_cast<const void*>(pair) : &zero, 4);
      std::memcpy(out + (header - 4) * room + 4 * r, &start, 4);
    }
    out += (header + (lead + end - k + step - 1) / step * step) * room;
    k = end;
  }
}
void codes(const PrepareTask& t, std::int64_t m) {
  const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile, tokens = t.together(), end = t.end(height);
  for (std::int64_t r = t.begin; r < end; r += tokens) codes_of(t, m, height, r, least(tokens, end - r));
}

/// Floats as they are, or rounded to what their FP8 codes stand for; of tokens [first, first + tokens) of the tile of `height` at m.
inline void floats_of(const PrepareTask& t, std::int64_t m, std::int64_t height, std::int64_t first, std::int64_t tokens) {
  constexpr std::int64_t kPiece = 128;
  const bool quantizes = t.act_scheme.codes != DType::none;
  alignas(64) float x[kTogether][kPiece];
  const std::byte* rows[kTogether];
  const std::byte* pieces[kTogether];
  act_rule::Rule rules[kTogether];
  for (std::int64_t i = 0; i < tokens; ++i) rows[i] = t.row(m + first + i, i);
  std::byte* const out = t.out + m * t.token_bytes + 4 * first;
  std::int64_t block_end = 0;
  for (std::int64_t k = 0, end = 0; k < t.segments.k; k = end) {
    end = t.segments.k - k < kPiece ? t.segments.k : k + kPiece;
    if (quantizes) {
      if (k >= block_end) {
        block_end = t.segments.k - k < t.block ? t.segments.k : k + t.block;
        for (std::int64_t i = 0; i < tokens; ++i) rules[i] = rule_of(t, rows[i], m + first + i, k, block_end);
      }
      end = end < block_end ? end : block_end;
    }
    const std::int64_t count = end - k;
    for (std::int64_t i = 0; i < tokens; ++i) {
      if (quantizes) {
        gather(t, rows[i], k, count, x[i]);
        if (t.given.scale == nullptr) round_to_e4m3(x[i], count, rules[i], rules[i].scale);
        for (std::int64_t j = 0; t.given.scale != nullptr && j < count; ++j) x[i][j] *= rules[i].scale;
        pieces[i] = reinterpret_cast<const std::byte*>(x[i]);
      } else {
        pieces[i] = reinterpret_cast<const std::byte*>(gathered(t, rows[i], k, count, x[i]));
      }
    }
    lay_words(pieces, tokens, count, height, out + 4 * k * height);
  }
}
void floats(const PrepareTask& t, std::int64_t m) {
  const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile, tokens = t.together(), end = t.end(height);
  for (std::int64_t r = t.begin; r < end; r += tokens) floats_of(t, m, height, r, least(tokens, end - r));
}

typedef std::uint16_t HalfOctet __attribute__((vector_size(2 * tile::kOctet)));

/// Channels [k, end) of a row of bf16, at most an octet; zeros after the last.
inline HalfOctet halves_at(const PrepareTask& t, const std::byte* row, std::int64_t k, std::int64_t end) {
  HalfOctet octet{};
  if (t.perm == nullptr && k + tile::kOctet <= end) {
    std::memcpy(&octet, row + 2 * k, sizeof octet);
    return octet;
  }
  for (std::int64_t j = 0; j < tile::kOctet && k + j < end; ++j)
    std::memcpy(reinterpret_cast<char*>(&octet) + 2 * j, row + 2 * (t.perm == nullptr ? k + j : t.perm[k + j]), 2);
  return octet;
}

/// Eight floats that are bf16.
inline HalfOctet halves_of_floats(const float* x) {
  typedef std::uint32_t Eight __attribute__((vector_size(4 * tile::kOctet)));
  Eight bits;
  std::memcpy(&bits, x, sizeof bits);
  return __builtin_convertvector(bits >> 16, HalfOctet);
}

/// A row of 32 floats as sums of `terms` bf16, each term in a row of its own, kRowTokens rows behind the one before: the upper half of a float, then
/// that of what is left. Octets in the order of pairs. An infinity leaves nothing; NaN leaves NaN, whatever its upper half is. `terms` is a
/// constant at every call.
NIBBLE_VARIANT void split_row(int terms, const float* x, std::byte* row) {
  constexpr int kFloats = 16;
  typedef float Floats __attribute__((vector_size(4 * kFloats)));
  typedef std::uint32_t Bits __attribute__((vector_size(4 * kFloats)));
  typedef std::uint16_t Halves __attribute__((vector_size(2 * kFloats)));
  for (std::int64_t i = 0; i < kRowBytes / 2; i += kFloats) {
    Floats rest;
    std::memcpy(&rest, x + i, sizeof rest);
    for (int term = 0; term < terms; ++term) {
      const Bits top = reinterpret_cast<Bits>(rest) & 0xffff0000u;
      const Halves halves = __builtin_convertvector(top >> 16, Halves);
      const Halves pairs = __builtin_shufflevector(halves, halves, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
      std::memcpy(row + term * kRowTokens * kRowBytes + 2 * i, &pairs, sizeof pairs);
      const Floats left = rest - reinterpret_cast<Floats>(top);
      rest = term == 0 ? (rest == reinterpret_cast<Floats>(top) ? Floats{} : left) : left;
    }
  }
}

/// Floats as sums of bf16, or bf16 itself, in rows. Of tokens [first, first + tokens) of the tile of `height` at m. `terms` is a constant at every call.
NIBBLE_VARIANT void sums_of(int terms, const PrepareTask& t, std::int64_t m, std::int64_t height, std::int64_t first,
                            std::int64_t tokens) {
  constexpr std::int64_t kRowChannels = kRowBytes / 2;
  const std::int64_t room = (height + kRowTokens - 1) / kRowTokens * kRowTokens;
  alignas(64) float x[kMaxFixedSegment + kRowChannels];
  const std::byte* rows[kTogether];
  for (std::int64_t i = 0; i < tokens; ++i) rows[i] = t.row(m + first + i, i);
  std::byte* out = t.out + m * t.token_bytes;
  for (std::int64_t k = 0, end = 0; k < t.segments.k; k = end) {
    end = t.segments.end(k);
    const std::int64_t count = end - k, steps = (count + kRowChannels - 1) / kRowChannels;
    for (std::int64_t i = 0; i < tokens; ++i) {
      const float* from = count % kRowChannels == 0 ? gathered(t, rows[i], k, count, x) : x;
      if (count % kRowChannels != 0) {
        gather(t, rows[i], k, count, x);
        std::memset(x + count, 0, static_cast<std::size_t>(steps * kRowChannels - count) * sizeof(float));
      }
      const std::int64_t r = first + i;
      std::byte* row = out + (r / kRowTokens * steps * terms * kRowTokens + r % kRowTokens) * kRowBytes;
      for (std::int64_t s = 0; s < steps; ++s, row += terms * kRowTokens * kRowBytes)
        split_row(terms, from + s * kRowChannels, row);
    }
    out += steps * terms * kRowBytes * room;
  }
}

/// bf16 as it is, which is not in rows: no arithmetic, only order; or FP8 codes as bf16 behind their scale. Of tokens [first, first + tokens) of the tile of
/// `height` at m.
inline void halves_of(const PrepareTask& t, std::int64_t m, std::int64_t height, std::int64_t first, std::int64_t tokens) {
  constexpr std::int64_t kOctetBytes = sizeof(HalfOctet), kRowOctets = kRowBytes / kOctetBytes;
  const std::int64_t room = t.rows ? (height + kRowTokens - 1) / kRowTokens * kRowTokens : height;
  const std::int64_t header = t.digits.halves_header();
  alignas(64) float x[kMaxFixedSegment + 16];
  alignas(64) std::byte octets_of[kTogether][2 * kMaxFixedSegment];
  const std::byte* rows[kTogether];
  const std::byte* pieces[kTogether];
  act_rule::Rule rules[kTogether];
  for (std::int64_t i = 0; i < tokens; ++i) {
    rows[i] = t.row(m + first + i, i);
    pieces[i] = octets_of[i];
  }
  std::byte* out = t.out + m * t.token_bytes;
  std::int64_t block_end = 0;
  for (std::int64_t k = 0, end = 0; k < t.segments.k; k = end) {
    end = t.segments.end(k);
    std::int64_t octets = tile::Geometry::octets(end - k);
    if (t.rows) octets = (octets + kRowOctets - 1) / kRowOctets * kRowOctets;
    const bool begins_block = t.digits.fp8 && k >= block_end;
    if (begins_block) block_end = t.segments.k - k < t.block ? t.segments.k : k + t.block;
    for (std::int64_t i = 0; i < tokens; ++i) {
      if (begins_block) rules[i] = rule_of(t, rows[i], m + first + i, k, block_end);
      if (t.digits.fp8) {
        std::memcpy(out + 4 * (first + i), &rules[i].scale, 4);
        gather(t, rows[i], k, end - k, x);
        if (t.given.scale == nullptr) round_to_e4m3(x, end - k, rules[i], 1.0f);
        for (std::int64_t j = end - k; j < octets * tile::kOctet; ++j) x[j] = 0;
      }
      for (std::int64_t o = 0; o < octets; ++o) {
        const HalfOctet octet =
            t.digits.fp8 ? halves_of_floats(x + o * tile::kOctet) : halves_at(t, rows[i], k + o * tile::kOctet, end);
        const HalfOctet pairs = __builtin_shufflevector(octet, octet, 0, 2, 4, 6, 1, 3, 5, 7);
        std::memcpy(octets_of[i] + o * kOctetBytes, &pairs, sizeof pairs);
      }
    }
    out += header * room;
    if (t.rows) {
      for (std::int64_t i = 0; i < tokens; ++i)
        for (std::int64_t o = 0; o < octets; o += kRowOctets) {
          const std::int64_t r = first + i, at = (r / kRowTokens * octets + o) / kRowOctets * kRowTokens + r % kRowTokens;
          std::memcpy(out + at * kRowBytes, octets_of[i] + o * kOctetBytes, kRowBytes);
        }
    } else {
      lay_words(pieces, tokens, octets * kOctetBytes / 4, room, out + 4 * first);
    }
    out += kOctetBytes * octets * room;
  }
}
void halves(const PrepareTask& t, std::int64_t m) {
  const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile, tokens = t.together(), end = t.end(height);
  for (std::int64_t r = t.begin; r < end; r += tokens) {
    const std::int64_t count = least(tokens, end - r);
    if (!t.rows || t.digits.fp8)
      halves_of(t, m, height, r, count);
    else if (t.terms == 1)
      sums_of(1, t, m, height, r, count);
    else if (t.terms == 2)
      sums_of(2, t, m, height, r, count);
    else
      sums_of(3, t, m, height, r, count);
  }
}

#endif
