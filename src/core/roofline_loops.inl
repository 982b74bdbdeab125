// Included once per vector width by roofline.cpp, inside that width's namespace and target region.

/// Independent accumulators hide the latency of a multiply-add: 2 pipes × 4–6 clocks needs at least 12 vectors of any width.
/// Every loop over them is unrolled completely, which is what keeps them in registers.
constexpr int kAccumulators = 12;
constexpr int kF32Operations = 2 * kAccumulators * static_cast<int>(kVectorBytes / 4);
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t Ints __attribute__((vector_size(kVectorBytes)));

#define NIBBLE_DOTS multiply_adds
#define NIBBLE_VECTOR Floats
#define NIBBLE_DOT(acc, a, b) (acc) + (a) * (b)
#include "core/roofline_dots.inl"

/// Sums `count` 64-byte lines, a multiple of 4·kStreams, as kStreams streams side by side. kAheadBytes > 0: prefetches this far ahead, into L1,
/// or with `kPastCaches` around the outer ones.
template <std::size_t kStreams, std::size_t kAheadBytes, bool kPastCaches>
std::uint64_t read_lines(const std::uint64_t* p, std::size_t count) {
  typedef std::uint64_t Words __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
  constexpr std::size_t kPerLine = 64 / kVectorBytes, kAhead = kAheadBytes / 8;
  Words sum[8]{};
  for (std::size_t line = 0; line < count / kStreams; line += 4) {
#pragma GCC unroll 4
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
#pragma GCC unroll 4
      for (std::size_t i = 0; i < 4; ++i) {
        const std::uint64_t* at = p + (stream * (count / kStreams) + line + i) * 8;
        if (kAhead != 0) __builtin_prefetch(at + kAhead, 0, kPastCaches ? 0 : 3);
#pragma GCC unroll 4
        for (std::size_t j = 0; j < kPerLine; ++j)
          sum[(4 * stream + i) % 8] += *reinterpret_cast<const Words*>(at + j * kVectorBytes / 8);
      }
    }
  }
#pragma GCC unroll 7
  for (std::size_t i = 1; i < 8; ++i) sum[0] += sum[i];
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < kVectorBytes / 8; ++i) total += sum[0][i];
  return total;
}

/// How a memory is read fastest differs: software prefetches around the caches gain a tenth on Zen 4, and halve the bandwidth of Sapphire
/// Rapids, which reads four streams fastest. The probe takes the loop that is fastest where it runs.
constexpr std::uint64_t (*kReadLoops[])(const std::uint64_t*, std::size_t) = {
    read_lines<1, 0, false>, read_lines<4, 0, false>, read_lines<4, 1024, false>, read_lines<2, 2048, true>};
