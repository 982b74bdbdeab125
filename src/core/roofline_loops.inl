// Included once per ISA by roofline.cpp, inside that ISA's namespace and target region.

/// Independent accumulators hide the latency of the multiply-add: 2 pipes × 4–5 clocks needs at least 10 vectors of any width.
constexpr int kAccumulators = 12;
typedef float Vector __attribute__((vector_size(kVectorBytes)));

/// Runs `rounds` × kAccumulators vector multiply-adds on registers; the value only keeps the work alive.
float multiply_adds(std::int64_t rounds, float seed) {
  Vector acc[kAccumulators];
  Vector x{}, y{};
  x += seed;
  y += seed * 0.5f;
  for (auto& a : acc) a = x;
  for (std::int64_t r = 0; r < rounds; ++r)
    for (auto& a : acc) a = a * x + y;
  Vector sum{};
  for (const auto& a : acc) sum += a;
  float total = 0;
  for (std::size_t i = 0; i < sizeof(Vector) / sizeof(float); ++i) total += sum[i];
  return total;
}

/// Sums `count` 64-byte lines.
std::uint64_t read_lines(const std::uint64_t* p, std::size_t count) {
  typedef std::uint64_t Words __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  constexpr std::size_t per_line = 64 / kVectorBytes;
  Words sum[4]{};
  const Words* w = reinterpret_cast<const Words*>(p);
  for (std::size_t i = 0; i + 4 <= count * per_line; i += 4)
    for (std::size_t j = 0; j < 4; ++j) sum[j] += w[i + j];
  sum[0] += sum[1] + sum[2] + sum[3];
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < kVectorBytes / 8; ++i) total += sum[0][i];
  return total;
}
