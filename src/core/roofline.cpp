// Measures the peaks of the machine: streaming reads, and arithmetic on registers with the instructions of the best kernels on the same
// threads. Every percentage that nibble prints refers to these.
#if defined(__x86_64__)
#include <immintrin.h>
#define NIBBLE_REGISTER "v"  // the constraint of a vector register in inline assembly
#elif defined(__aarch64__)
#include <arm_neon.h>
#define NIBBLE_REGISTER "w"
#else
#define NIBBLE_REGISTER "m"
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "core/buffer.hpp"
#include "core/target.hpp"
#include "nibble/device.hpp"

namespace nibble {
namespace baseline_loops {
constexpr std::size_t kVectorBytes = 16;
#include "core/roofline_loops.inl"

#if defined(__x86_64__)  // SSE2 is always available: 8 products of 16-bit numbers an instruction
#define NIBBLE_DOTS dots
#define NIBBLE_VECTOR Ints
#define NIBBLE_DOT(acc, a, b) acc + (Ints)_mm_madd_epi16((__m128i)(a), (__m128i)(b))
#include "core/roofline_dots.inl"
constexpr int kDotOperations = 2 * kAccumulators * 8;
#else
typedef std::int16_t Halves __attribute__((vector_size(kVectorBytes)));
/// Eight products that fit 16 bits, each added to one of four sums.
inline Ints dot(Ints acc, Ints a, Ints b) {
  const Ints products = reinterpret_cast<Ints>(reinterpret_cast<Halves>(a) * reinterpret_cast<Halves>(b));
  return acc + (products >> 16) + ((products << 16) >> 16);
}
#define NIBBLE_DOTS dots
#define NIBBLE_VECTOR Ints
#define NIBBLE_DOT(acc, a, b) dot(acc, a, b)
#include "core/roofline_dots.inl"
constexpr int kDotOperations = 2 * kAccumulators * 8;
#endif
}  // namespace baseline_loops

#if defined(__x86_64__)
NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX2)
namespace avx2_loops {
constexpr std::size_t kVectorBytes = 32;
#include "core/roofline_loops.inl"
#define NIBBLE_DOTS dots
#define NIBBLE_VECTOR Ints
#define NIBBLE_DOT(acc, a, b) acc + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)(a), (__m256i)(b)), (__m256i)(b))
#include "core/roofline_dots.inl"
constexpr int kDotOperations = 2 * kAccumulators * 32;
}  // namespace avx2_loops
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX2VNNI)
namespace avx2_loops {
#define NIBBLE_DOTS vnni_dots
#define NIBBLE_VECTOR Ints
#define NIBBLE_DOT(acc, a, b) (Ints) _mm256_dpbusd_avx_epi32((__m256i)(acc), (__m256i)(a), (__m256i)(b))
#include "core/roofline_dots.inl"
}  // namespace avx2_loops
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX512)
namespace avx512_loops {
constexpr std::size_t kVectorBytes = 64;
#include "core/roofline_loops.inl"
#define NIBBLE_DOTS dots
#define NIBBLE_VECTOR Ints
#define NIBBLE_DOT(acc, a, b) acc + (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)(a), (__m512i)(b)), (__m512i)(b))
#include "core/roofline_dots.inl"
constexpr int kDotOperations = 2 * kAccumulators * 64;
}  // namespace avx512_loops
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX512VNNI)
namespace avx512_loops {
#define NIBBLE_DOTS vnni_dots
#define NIBBLE_VECTOR Ints
#define NIBBLE_DOT(acc, a, b) (Ints) _mm512_dpbusd_epi32((__m512i)(acc), (__m512i)(a), (__m512i)(b))
#include "core/roofline_dots.inl"
}  // namespace avx512_loops
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX512BF16)
namespace avx512_loops {
#define NIBBLE_DOTS bf16_dots
#define NIBBLE_VECTOR __m512
#define NIBBLE_DOT(acc, a, b) _mm512_dpbf16_ps(acc, (__m512bh)(a), (__m512bh)(b))
#include "core/roofline_dots.inl"
constexpr int kBf16Operations = 2 * kAccumulators * 32;
}  // namespace avx512_loops
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AMX)
namespace amx_loops {
#include "core/amx_tiles.inl"

/// Tiles of 16 × 16 sums hide the latency of a product, four times as long as it keeps the multipliers. The values of the operands do not
/// matter.
constexpr int kTileSums = 4;
constexpr int kInt8Operations = 2 * kTileSums * 16 * 16 * 64, kBf16Operations = kInt8Operations / 2;

std::uint32_t multiply_bytes(std::int64_t rounds, std::uint32_t seed) {
  const Tiles tiles;
  do {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  } while (--rounds > 0);
  return seed;
}

std::uint32_t multiply_halves(std::int64_t rounds, std::uint32_t seed) {
  const Tiles tiles;
  do {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  } while (--rounds > 0);
  return seed;
}
}  // namespace amx_loops
NIBBLE_TARGET_END

#elif defined(__aarch64__) && !defined(__clang__)  // clang's arm_neon.h has these only for a whole file
#define NIBBLE_ARM_LOOPS
NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_DOTPROD)
namespace dotprod_loops {
using baseline_loops::kAccumulators;
#define NIBBLE_DOTS dots
#define NIBBLE_VECTOR int32x4_t
#define NIBBLE_DOT(acc, a, b) vdotq_s32(acc, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b))
#include "core/roofline_dots.inl"
constexpr int kDotOperations = 2 * kAccumulators * 16;
}  // namespace dotprod_loops
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_I8MM)
namespace i8mm_loops {
using baseline_loops::kAccumulators;
#define NIBBLE_DOTS dots
#define NIBBLE_VECTOR int32x4_t
#define NIBBLE_DOT(acc, a, b) vmmlaq_s32(acc, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b))
#include "core/roofline_dots.inl"
constexpr int kDotOperations = 2 * kAccumulators * 32;
}  // namespace i8mm_loops
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_NEONBF16)
namespace neonbf16_loops {
using baseline_loops::kAccumulators;
#define NIBBLE_DOTS dots
#define NIBBLE_VECTOR float32x4_t
#define NIBBLE_DOT(acc, a, b) vbfmmlaq_f32(acc, reinterpret_cast<bfloat16x8_t>(a), reinterpret_cast<bfloat16x8_t>(b))
#include "core/roofline_dots.inl"
constexpr int kDotOperations = 2 * kAccumulators * 16;
}  // namespace neonbf16_loops
NIBBLE_TARGET_END
#endif

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// A loop on registers, and the operations of one of its rounds.
struct ArithmeticLoop {
  std::uint32_t (*run)(std::int64_t rounds, std::uint32_t seed) = nullptr;  // null: no instruction for it
  int operations_per_round = 0;
};

ArithmeticLoop f32_loop() {
#if defined(__x86_64__)
  if (this_device().has(Isa::avx512)) return {avx512_loops::multiply_adds, avx512_loops::kF32Operations};
  if (this_device().has(Isa::avx2)) return {avx2_loops::multiply_adds, avx2_loops::kF32Operations};
#endif
  return {baseline_loops::multiply_adds, baseline_loops::kF32Operations};
}

ArithmeticLoop bf16_loop() {
#if defined(__x86_64__)
  if (this_device().has(Isa::amx)) return {amx_loops::multiply_halves, amx_loops::kBf16Operations};
  if (this_device().has(Isa::avx512bf16)) return {avx512_loops::bf16_dots, avx512_loops::kBf16Operations};
#elif defined(NIBBLE_ARM_LOOPS)
  if (this_device().has(Isa::neonbf16)) return {neonbf16_loops::dots, neonbf16_loops::kDotOperations};
#endif
  return {};
}

ArithmeticLoop int8_loop() {
  [[maybe_unused]] const DeviceInfo& device = this_device();
#if defined(__x86_64__)
  if (device.has(Isa::amx)) return {amx_loops::multiply_bytes, amx_loops::kInt8Operations};
  if (device.has(Isa::avx512vnni)) return {avx512_loops::vnni_dots, avx512_loops::kDotOperations};
  if (device.has(Isa::avx2vnni) && !device.has(Isa::avx512)) return {avx2_loops::vnni_dots, avx2_loops::kDotOperations};
  if (device.has(Isa::avx512)) return {avx512_loops::dots, avx512_loops::kDotOperations};
  if (device.has(Isa::avx2)) return {avx2_loops::dots, avx2_loops::kDotOperations};
#elif defined(NIBBLE_ARM_LOOPS)
  if (device.has(Isa::i8mm)) return {i8mm_loops::dots, i8mm_loops::kDotOperations};
  if (device.has(Isa::dotprod)) return {dotprod_loops::dots, dotprod_loops::kDotOperations};
#endif
  return {baseline_loops::dots, baseline_loops::kDotOperations};
}

ArithmeticLoop loop_of(Ceiling ceiling) {
  switch (ceiling) {
    case Ceiling::f32: return f32_loop();
    case Ceiling::bf16: return bf16_loop();
    case Ceiling::int8: return int8_loop();
    case Ceiling::read:
    case Ceiling::f16: break;  // no kernel of the CPU multiplies f16
  }
  return {};
}

using ReadLoop = std::uint64_t (*)(const std::uint64_t*, std::size_t lines);

std::span<const ReadLoop> read_loops() {
#if defined(__x86_64__)
  if (this_device().has(Isa::avx512)) return avx512_loops::kReadLoops;
  if (this_device().has(Isa::avx2)) return avx2_loops::kReadLoops;
#endif
  return baseline_loops::kReadLoops;
}

/// The length of a pass: about that of a layer, so that interruptions of the machine spoil as many passes of a probe as runs of a layer,
/// and the median ignores both.
constexpr double kPassSeconds = 0.5e-3;
constexpr std::size_t kLine = 64;
constexpr std::int64_t kChunksPerThread = 4;
constexpr std::size_t kChunkBytes = std::size_t{4} << 20;
constexpr std::size_t kChunkUnit = std::size_t{4} << 10;

}  // namespace

std::string_view name(Ceiling ceiling) {
  switch (ceiling) {
    case Ceiling::read: return "read";
    case Ceiling::f32: return "f32";
    case Ceiling::bf16: return "bf16";
    case Ceiling::int8: return "int8";
    case Ceiling::f16: return "f16";
  }
  return "unknown";
}

struct RooflineProbe::Impl {
  explicit Impl(Executor& e) : executor(e), threads(std::max(1, e.threads())) {}

  Executor& executor;
  const int threads;
  std::int64_t rounds[kAllCeilings.size()] = {};  // of a pass; 0: not known yet
  Buffer memory;                                  // read cyclically, a part per pass
  std::size_t chunk_bytes = 0, next_chunk = 0;
  ReadLoop read_loop = nullptr;  // the fastest here
  std::atomic<std::uint64_t> sink{0};

  /// Seconds one pass takes.
  double arithmetic_pass(const ArithmeticLoop& loop, std::int64_t pass_rounds) {
    const auto start = Clock::now();
    executor.parallel_for(threads, [&](std::int64_t i) {
      sink.fetch_add(loop.run(pass_rounds, static_cast<std::uint32_t>(i)), std::memory_order_relaxed);
    });
    return seconds_since(start);
  }

  double arithmetic(Ceiling ceiling, double seconds) {
    const ArithmeticLoop loop = loop_of(ceiling);
    if (loop.run == nullptr) return 0;
    std::int64_t& pass_rounds = rounds[static_cast<std::size_t>(ceiling)];
    if (pass_rounds == 0) {
      pass_rounds = 1000;
      while (arithmetic_pass(loop, pass_rounds) < kPassSeconds) pass_rounds *= 2;
    }
    const double operations = static_cast<double>(pass_rounds) * loop.operations_per_round * threads;
    return operations / 1e9 / median_pass(seconds, [&] { return arithmetic_pass(loop, pass_rounds); });
  }

  double read_pass(ReadLoop loop) {
    const std::size_t chunks_here = static_cast<std::size_t>(kChunksPerThread * threads);
    if ((next_chunk + chunks_here) * chunk_bytes > memory.size()) next_chunk = 0;
    const std::byte* first = memory.data() + next_chunk * chunk_bytes;
    next_chunk += chunks_here;
    const auto start = Clock::now();
    executor.parallel_for(static_cast<std::int64_t>(chunks_here), [&](std::int64_t i) {
      const auto* words = reinterpret_cast<const std::uint64_t*>(first + static_cast<std::size_t>(i) * chunk_bytes);
      sink.fetch_add(loop(words, chunk_bytes / kLine), std::memory_order_relaxed);
    });
    return seconds_since(start);
  }

  /// Eight passes, and at least four times the last-level cache: little of it is still cached from the previous round.
  void allocate() {
    const DeviceInfo& device = this_device();
    const std::size_t chunks = static_cast<std::size_t>(8 * kChunksPerThread * threads);
    std::size_t bytes = std::max({std::size_t{256} << 20, static_cast<std::size_t>(4 * device.l3_bytes), chunks * kChunkBytes});
    if (device.memory_bytes > 0) bytes = std::min(bytes, static_cast<std::size_t>(device.memory_bytes / 8));
    chunk_bytes = std::min(kChunkBytes, std::max(kChunkUnit, bytes / chunks / kChunkUnit * kChunkUnit));
    const std::size_t count = std::max(chunks, bytes / chunk_bytes);
    memory = Buffer(count * chunk_bytes);
    executor.parallel_for(static_cast<std::int64_t>(count), [&](std::int64_t i) {
      std::memset(memory.data() + static_cast<std::size_t>(i) * chunk_bytes, 1, chunk_bytes);
    });
  }

  /// The loops take turns, and each is as good as its best round: a disturbance of one round does not decide.
  ReadLoop fastest_loop() {
    constexpr int kRounds = 5;
    constexpr double kSeconds = 4 * kPassSeconds;
    const std::span<const ReadLoop> loops = read_loops();
    std::vector<double> best(loops.size(), std::numeric_limits<double>::infinity());
    for (int round = 0; round < kRounds; ++round)
      for (std::size_t i = 0; i < loops.size(); ++i)
        best[i] = std::min(best[i], median_pass(kSeconds, [&] { return read_pass(loops[i]); }));
    return loops[static_cast<std::size_t>(std::ranges::min_element(best) - best.begin())];
  }

  double read(double seconds) {
    try {
      if (memory.size() == 0) allocate();
      if (read_loop == nullptr) read_loop = fastest_loop();
    } catch (const std::bad_alloc&) {
      return 0;
    }
    const double bytes = static_cast<double>(chunk_bytes) * static_cast<double>(kChunksPerThread) * threads;
    return bytes / 1e9 / median_pass(seconds, [&] { return read_pass(read_loop); });
  }

  /// One pass to wake the threads up, then as many as the time allows.
  template <class Pass>
  static double median_pass(double seconds, Pass&& pass) {
    pass();
    std::vector<double> times;
    double spent = 0;
    do {
      times.push_back(pass());
      spent += times.back();
    } while (spent < seconds || times.size() < 3);
    return median(times);
  }
};

RooflineProbe::RooflineProbe(Executor& executor) : impl_(std::make_unique<Impl>(executor)) {}
RooflineProbe::~RooflineProbe() = default;
RooflineProbe::RooflineProbe(RooflineProbe&&) noexcept = default;
RooflineProbe& RooflineProbe::operator=(RooflineProbe&&) noexcept = default;

double RooflineProbe::measure(Ceiling ceiling, double seconds) {
  return ceiling == Ceiling::read ? impl_->read(seconds) : impl_->arithmetic(ceiling, seconds);
}

double& Roofline::operator[](Ceiling ceiling) {
  switch (ceiling) {
    case Ceiling::read: return read_gbytes_per_s;
    case Ceiling::f32: return f32_gflops;
    case Ceiling::bf16: return bf16_gflops;
    case Ceiling::f16: return f16_gflops;
    case Ceiling::int8: break;
  }
  return int8_gops;
}

double Roofline::operator[](Ceiling ceiling) const { return const_cast<Roofline&>(*this)[ceiling]; }

Roofline RooflineProbe::roofline() {
  Roofline best;
  best.threads = impl_->threads;
  // Interleaved, so that one disturbance does not affect all measurements of one ceiling.
  for (int turn = 0; turn < 6; ++turn)
    for (Ceiling ceiling : kAllCeilings)
      best[ceiling] = std::max(best[ceiling], measure(ceiling, ceiling == Ceiling::read ? 0.04 : 0.02));
  return best;
}

Roofline measure_roofline(Executor& executor) { return RooflineProbe(executor).roofline(); }

}  // namespace nibble
