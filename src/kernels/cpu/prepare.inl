// Included once per instruction set by prepare.cpp. See prepare.hpp for the forms.
#if NIBBLE_ISA <= NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX512

inline float element(const std::byte* row, DType type, std::int64_t i) {
  if (type == DType::f32) {
    float x;
    std::memcpy(&x, row + 4 * i, 4);
    return x;
  }
  std::uint16_t bits;
  std::memcpy(&bits, row + 2 * i, 2);
  return type == DType::f16 ? to_f32(f16{bits}) : to_f32(bf16{bits});
}

/// Channels [k, k + count) of one row → x[0…count), zeros up to the next multiple of 16.
inline void gather(const PrepareTask& t, const std::byte* row, std::int64_t k, std::int64_t count, float* x) {
  std::int64_t i = 0;
  if (t.perm == nullptr) {
    const std::int64_t width = t.type == DType::f32 ? 4 : 2;
    for (; i + kLanes <= count; i += kLanes) store(x + i, load_as_floats(row + (k + i) * width, t.type));
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

/// int8, as docs/accuracy.md defines it.
inline Scaling int8_scaling(std::int32_t largest) {
  if (largest >= kInfinityBits) return {from_bits(0x7fc00000), 0.0f};
  const float absmax = from_bits(largest);
  if (absmax < 0x1p-113f) return {0.0f, 0.0f};
  return {absmax / 127.0f, 127.0f / absmax};
}

/// The int8 scale of the block that starts at channel k of a row.
inline Scaling block_scaling(const PrepareTask& t, const std::byte* row, std::int64_t k, std::int64_t block) {
  alignas(64) float x[kMaxSegment];
  std::int32_t largest = 0;
  const std::int64_t end = k + block < t.segments.k ? k + block : t.segments.k;
  for (; k < end; k += kMaxSegment) {
    const std::int64_t count = end - k < kMaxSegment ? end - k : kMaxSegment;
    gather(t, row, k, count, x);
    const std::int32_t part = largest_bits(x, count);
    largest = part > largest ? part : largest;
  }
  return int8_scaling(largest);
}

inline std::int32_t total(const std::int32_t* units, std::int64_t count) {
  Ints sums{};
  for (std::int64_t i = 0; i < count; i += kLanes) sums += load_ints(units + i);
  std::int32_t all = 0;
  for (int i = 0; i < kLanes; ++i) all += sums[i];
  return all;
}

/// Quads of one token's digits of one segment to their places. `digits` is a constant.
__attribute__((always_inline)) inline void scatter(int digits, const std::int8_t (*bytes)[kMaxSegment], std::int64_t octets,
                                                   std::int64_t height, std::byte* out) {
  for (std::int64_t q = 0; q < 2 * octets; ++q, out += 4 * height * digits)
    for (int d = 0; d < digits; ++d) std::memcpy(out + 4 * d, bytes[d] + 4 * q, 4);
}

void digits(const PrepareTask& t, std::int64_t m) {
  const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile;
  const int count = t.form.digits;
  alignas(64) float x[kMaxSegment];
  alignas(64) std::int32_t units[kMaxSegment];
  alignas(64) std::int8_t bytes[3][kMaxSegment];
  for (std::int64_t r = 0; r < height; ++r) {
    const std::byte* row = t.a + (m + r) * t.stride;
    std::byte* out = t.out + m * t.token_bytes;
    Scaling scaling{};
    std::int64_t block_end = 0;
    for (std::int64_t k = 0; k < t.segments.k;) {
      const std::int64_t end = t.segments.end(k);
      gather(t, row, k, end - k, x);
      if (t.form.digits == 3) {
        scaling = fixed_scaling(largest_bits(x, end - k));
      } else if (k >= block_end) {
        const std::int64_t block = t.form.block == 0 ? t.segments.k : t.form.block;
        scaling = block_scaling(t, row, k, block);
        block_end = k + block;
      }

      const std::int64_t padded = (end - k + 15) / 16 * 16;
      for (std::int64_t i = 0; i < padded; i += kLanes) store_ints(units + i, to_ints(load(x + i) * scaling.inverse));
      const std::int32_t sum = total(units, end - k);
      const std::int64_t octets = tile::Geometry::octets(end - k);
      const float values[2] = {scaling.scale, static_cast<float>(sum)};
      std::memcpy(out + 4 * r, &values[0], 4);
      std::memcpy(out + 4 * (height + r), &values[1], 4);
      out += 8 * height;
      std::int32_t left = sum;
      for (int d = 0; d < count; ++d) {
        for (std::int64_t i = 0; i < padded; ++i) bytes[d][i] = static_cast<std::int8_t>(units[i]);
        std::int32_t rest = 0;  // Σ of what is left of the integers when the digit has been taken off and they have been shifted
        if (d + 1 < count) {
          for (std::int64_t i = 0; i < padded; i += kLanes) {
            const Ints unit = load_ints(units + i);
            store_ints(units + i, (unit - ((unit << 24) >> 24)) >> 8);
          }
          rest = total(units, end - k);
        }
        const std::int32_t start = -t.bias * (left - 256 * rest);
        left = rest;
        std::memcpy(out + 4 * (r * count + d), &start, 4);
      }
      out += 4 * height * count;
      if (count == 3) {
        scatter(3, bytes, octets, height, out + 12 * r);
      } else {
        scatter(1, bytes, octets, height, out + 4 * r);
      }
      out += 8 * octets * height * count;
      k = end;
    }
  }
}

void floats(const PrepareTask& t, std::int64_t m) {
  const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile;
  alignas(64) float x[kMaxSegment];
  for (std::int64_t r = 0; r < height; ++r)
    for (std::int64_t k = 0; k < t.segments.k; k += kMaxSegment) {
      const std::int64_t count = t.segments.k - k < kMaxSegment ? t.segments.k - k : kMaxSegment;
      gather(t, t.a + (m + r) * t.stride, k, count, x);
      float* out = reinterpret_cast<float*>(t.out + m * t.token_bytes) + k * height + r;
      for (std::int64_t i = 0; i < count; ++i) out[i * height] = x[i];
    }
}

/// bf16 as it is: no arithmetic, only order.
void halves(const PrepareTask& t, std::int64_t m) {
  typedef std::uint16_t Octet __attribute__((vector_size(2 * tile::kOctet)));
  const std::int64_t height = t.m - m < t.tile ? t.m - m : t.tile;
  for (std::int64_t r = 0; r < height; ++r) {
    const std::byte* row = t.a + (m + r) * t.stride;
    std::byte* out = t.out + m * t.token_bytes + 4 * r;
    for (std::int64_t k = 0, end = 0; k < t.segments.k; k = end) {
      end = t.segments.end(k);
      for (; k < end; k += tile::kOctet, out += 16 * height) {
        Octet octet{};
        if (t.perm == nullptr && k + tile::kOctet <= end) {
          std::memcpy(&octet, row + 2 * k, sizeof octet);
        } else {
          for (std::int64_t j = 0; j < tile::kOctet && k + j < end; ++j)
            std::memcpy(reinterpret_cast<char*>(&octet) + 2 * j, row + 2 * (t.perm == nullptr ? k + j : t.perm[k + j]), 2);
        }
        octet = __builtin_shufflevector(octet, octet, 0, 2, 4, 6, 1, 3, 5, 7);
        for (int pair = 0; pair < 4; ++pair)
          std::memcpy(out + 4 * pair * height, reinterpret_cast<const char*>(&octet) + 4 * pair, 4);
      }
    }
  }
}

#endif
