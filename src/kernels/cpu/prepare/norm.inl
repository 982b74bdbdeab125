// Included once per instruction set by norm.cpp: y of a token, kBlock channels at a time.
#if NIBBLE_ISA <= NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX512

inline std::int64_t width_of(DType type) { return type == DType::f32 ? 4 : 2; }
inline const std::byte* row_of(const void* data, DType type, std::int64_t row, std::int64_t stride) {
  return static_cast<const std::byte*>(data) + row * stride * width_of(type);
}
inline std::byte* row_of(void* data, DType type, std::int64_t row, std::int64_t stride) {
  return static_cast<std::byte*>(data) + row * stride * width_of(type);
}

/// Channels [first, first + count) of a row, and zeros up to the next multiple of kLanes.
inline void load_block(const std::byte* row, DType type, std::int64_t first, std::int64_t count, float* x) {
  const std::int64_t width = width_of(type);
  const std::byte* const from = row + first * width;
  std::int64_t i = 0;
  if (type == DType::f32)
    for (; i + kLanes <= count; i += kLanes) store(x + i, load_as_floats(from + 4 * i, DType::f32));
  else if (type == DType::f16)
    for (; i + kLanes <= count; i += kLanes) store(x + i, load_as_floats(from + 2 * i, DType::f16));
  else
    for (; i + kLanes <= count; i += kLanes) store(x + i, load_as_floats(from + 2 * i, DType::bf16));
  if (i == count) return;
  alignas(64) std::byte rest[4 * kLanes] = {};
  std::memcpy(rest, from + i * width, static_cast<std::size_t>((count - i) * width));
  store(x + i, load_as_floats(rest, type));
}

inline void store_lanes(std::byte* to, DType type, Vec x) {
  if (type == DType::f32)
    store(reinterpret_cast<float*>(to), x);
  else if (type == DType::f16)
    store_f16(to, x);
  else
    store_bf16(to, x);
}
inline void store_block(const float* x, std::byte* row, DType type, std::int64_t first, std::int64_t count) {
  const std::int64_t width = width_of(type);
  std::byte* const to = row + first * width;
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_lanes(to + i * width, type, load(x + i));
  if (i == count) return;
  alignas(64) std::byte rest[4 * kLanes];
  store_lanes(rest, type, load(x + i));
  std::memcpy(to + i * width, rest, static_cast<std::size_t>((count - i) * width));
}

/// x of a token, which is read once for each sum over it and once for the result.
class Row {
 public:
  /// Stores the sum where there is a place for it, which may be that of an operand: from then on x is read from there.
  Row(const NormTask& t, std::int64_t m) : t_(t), a_(row_of(t.a, t.type, m, t.a_stride)) {
    if (t.add == nullptr) return;
    add_ = row_of(t.add, t.add_type, m, t.add_stride);
    if (t.sum == nullptr) return;
    std::byte* const sum = row_of(t.sum, t.type, m, t.sum_stride);
    alignas(64) float x[kBlock];
    for (std::int64_t first = 0; first < t.k; first += kBlock) store_block(x, sum, t.type, first, load_x(first, x));
    a_ = sum;
    add_ = nullptr;
  }

  /// x from channel `first` on; how many there are.
  std::int64_t load_x(std::int64_t first, float* x) const {
    const std::int64_t count = least(kBlock, t_.k - first);
    load_block(a_, t_.type, first, count, x);
    if (add_ == nullptr) return count;
    alignas(64) float more[kBlock];
    load_block(add_, t_.add_type, first, count, more);
    for (std::int64_t i = 0; i < count; i += kLanes) {
      alignas(64) std::byte stored[4 * kLanes];  // x has the precision of A
      store_lanes(stored, t_.type, load(x + i) + load(more + i));
      store(x + i, load_as_floats(stored, t_.type));
    }
    return count;
  }

  /// Σ (x − mean)², or Σ x, in eight parts, which are added in a fixed order: every instruction set gives the same bits.
  double sum(bool squares, double mean) const {
    constexpr int kWide = kLanes == 16 ? 8 : kLanes / 2, kVectors = kParts / kWide;
    typedef float Floats __attribute__((vector_size(4 * kWide), aligned(4), may_alias));
    typedef double Doubles __attribute__((vector_size(8 * kWide)));
    alignas(64) float x[kBlock];
    Doubles parts[kVectors] = {};
    for (std::int64_t first = 0; first < t_.k; first += kBlock) {
      const std::int64_t count = load_x(first, x);
      std::int64_t i = 0;
      for (; i + kParts <= count; i += kParts)
        for (int v = 0; v < kVectors; ++v) {
          const Doubles from_mean = __builtin_convertvector(*reinterpret_cast<const Floats*>(x + i + v * kWide), Doubles) - mean;
          parts[v] += squares ? from_mean * from_mean : from_mean;
        }
      for (int j = 0; i + j < count; ++j) {
        const double from_mean = static_cast<double>(x[i + j]) - mean;
        parts[j / kWide][j % kWide] += squares ? from_mean * from_mean : from_mean;
      }
    }
    double sum = 0;
    for (int j = 0; j < kParts; ++j) sum += parts[j / kWide][j % kWide];
    return sum;
  }

 private:
  const NormTask& t_;
  const std::byte* a_;
  const std::byte* add_ = nullptr;
};

void normalize(const NormTask& t, std::int64_t m) {
  const Row row(t, m);
  const auto k = static_cast<double>(t.k);
  const double mean = t.spec.kind == Norm::layer ? row.sum(false, 0.0) / k : 0.0;
  const double variance = row.sum(true, mean) / k;
  const auto scale = static_cast<float>(1.0 / __builtin_sqrt(variance + static_cast<double>(t.spec.eps)));
  const auto center = static_cast<float>(mean);
  std::byte* const y = row_of(t.y, t.type, m, t.y_stride);
  alignas(64) float x[kBlock], weight[kBlock], bias[kBlock];
  for (std::int64_t first = 0; first < t.k; first += kBlock) {
    const std::int64_t count = row.load_x(first, x);
    load_block(static_cast<const std::byte*>(t.weight), t.weight_type, first, count, weight);
    if (t.bias != nullptr) load_block(static_cast<const std::byte*>(t.bias), t.bias_type, first, count, bias);
    for (std::int64_t i = 0; i < count; i += kLanes) {
      const Vec scaled = (load(x + i) - center) * scale * (load(weight + i) + t.spec.weight_offset);
      store(x + i, t.bias == nullptr ? scaled : scaled + load(bias + i));
    }
    store_block(x, y, t.type, first, count);
  }
}

#endif
