// What the machine can do at best, by measurement: streaming reads and register-only multiply-adds, with the same threads and
// instruction set the kernels use. Every percentage nibble prints is of these.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/target.hpp"
#include "nibble/device.hpp"

namespace nibble {
namespace baseline_loops {
constexpr std::size_t kVectorBytes = 16;
#include "core/roofline_loops.inl"
}  // namespace baseline_loops

#if defined(__x86_64__)
NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX2)
namespace avx2_loops {
constexpr std::size_t kVectorBytes = 32;
#include "core/roofline_loops.inl"
}  // namespace avx2_loops
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX512)
namespace avx512_loops {
constexpr std::size_t kVectorBytes = 64;
#include "core/roofline_loops.inl"
}  // namespace avx512_loops
NIBBLE_TARGET_END
#endif

namespace {

struct Loops {
  float (*multiply_adds)(std::int64_t, float) = baseline_loops::multiply_adds;
  std::uint64_t (*read_lines)(const std::uint64_t*, std::size_t) = baseline_loops::read_lines;
  int flops_per_round = 2 * baseline_loops::kAccumulators * static_cast<int>(baseline_loops::kVectorBytes / 4);
};

Loops loops_for(Isa isa) {
  Loops loops;
#if defined(__x86_64__)
  if (isa == Isa::avx2 || isa == Isa::avx2vnni)
    loops = {avx2_loops::multiply_adds, avx2_loops::read_lines,
             2 * avx2_loops::kAccumulators * static_cast<int>(avx2_loops::kVectorBytes / 4)};
  if (isa == Isa::avx512 || isa == Isa::avx512vnni || isa == Isa::avx512bf16)
    loops = {avx512_loops::multiply_adds, avx512_loops::read_lines,
             2 * avx512_loops::kAccumulators * static_cast<int>(avx512_loops::kVectorBytes / 4)};
#else
  (void)isa;
#endif
  return loops;
}

template <class Body>
double best_seconds(int repetitions, Body&& body) {
  double best = 1e30;
  for (int i = 0; i < repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace

Roofline measure_roofline(Executor& executor) {
  const int threads = executor.threads();
  const Loops loops = loops_for(this_device().isa);
  Roofline roofline;
  roofline.threads = threads;
  std::atomic<std::uint64_t> sink{0};

  constexpr std::int64_t kRounds = 4'000'000;  // about 10 ms
  const double compute = best_seconds(5, [&] {
    executor.parallel_for(threads, [&](std::int64_t i) {
      const float value = loops.multiply_adds(kRounds, 1e-3f * static_cast<float>(i));
      std::uint32_t word;
      std::memcpy(&word, &value, 4);
      sink.fetch_add(word, std::memory_order_relaxed);
    });
  });
  roofline.f32_gflops = static_cast<double>(kRounds) * loops.flops_per_round * threads / compute / 1e9;

  // Four times the last-level cache, so that at most a quarter of a pass can be left over from the one before.
  const std::size_t lines = std::max<std::size_t>(256u << 20, static_cast<std::size_t>(4 * this_device().l3_bytes)) / 64;
  const std::int64_t chunks = 16LL * threads;
  const std::size_t per_chunk = lines / static_cast<std::size_t>(chunks);
  std::vector<std::uint64_t> buffer(lines * 8, 1);
  const double memory = best_seconds(4, [&] {
    executor.parallel_for(chunks, [&](std::int64_t i) {
      const std::uint64_t* chunk = buffer.data() + static_cast<std::size_t>(i) * per_chunk * 8;
      sink.fetch_add(loops.read_lines(chunk, per_chunk), std::memory_order_relaxed);
    });
  });
  roofline.read_gbytes_per_s = static_cast<double>(per_chunk) * static_cast<double>(chunks) * 64 / memory / 1e9;
  return roofline;
}

}  // namespace nibble
