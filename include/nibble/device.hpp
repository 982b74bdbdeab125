// The machine nibble runs on: instruction sets, caches, and its measured roofline.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "nibble/parallel.hpp"
#include "nibble/status.hpp"

namespace nibble {

/// Where a kernel runs and memory is; `reference` is the reference kernel, on the CPU.
enum class Backend : std::uint8_t { reference, cpu, cuda };
/// "ref", "cpu", "cuda".
std::string_view name(Backend backend);

/// Instruction-set levels, of CPUs and of GPUs. Each one includes its parent:
///
///   baseline ─┬─ avx2 ─┬─ avx2vnni                          baseline: whatever the compiler targets by default;
///             │        └─ avx512 ── avx512vnni ── avx512bf16 ── amx    on AArch64 that includes NEON
///             └─ dotprod ── i8mm ── neonbf16        avx512bf16: VBMI, too; amx: int8 and bf16 tiles, where the system
///                                                   lets the process use them
///
///   simt ── sm80 ── sm90       simt: every GPU this build has code for; sm80: matrix instructions of warps, compute
///                              capability 7.5 (no bf16), 8.x, 9.0, 10.x and 12.x; sm90: 9.0, whose code runs on nothing else
enum class Isa : std::uint8_t {
  baseline,
  avx2,
  avx2vnni,
  avx512,
  avx512vnni,
  avx512bf16,
  amx,
  dotprod,
  i8mm,
  neonbf16,
  simt,
  sm80,
  sm90
};
/// Every level, parents first.
inline constexpr std::array kAllIsas{Isa::baseline,   Isa::avx2, Isa::avx2vnni, Isa::avx512, Isa::avx512vnni,
                                     Isa::avx512bf16, Isa::amx,  Isa::dotprod,  Isa::i8mm,   Isa::neonbf16,
                                     Isa::simt,       Isa::sm80, Isa::sm90};
/// "avx512vnni".
std::string_view name(Isa isa);
/// The level below; baseline and simt are their own parents.
Isa parent(Isa isa);
/// The backend of a level: Backend::cpu or Backend::cuda.
constexpr Backend backend(Isa isa) { return isa < Isa::simt ? Backend::cpu : Backend::cuda; }
/// Ok if this machine, or the GPU that is current in the calling thread, runs kernels of that level. Otherwise unsupported with the
/// reason: "needs sm90: built without CUDA (NIBBLE_CUDA=ON)", "needs sm90, this NVIDIA A100 offers sm80".
Status runs_here(Isa isa);

/// A CUDA stream, a cudaStream_t, without CUDA's headers.
struct Stream {
  void* handle = nullptr;  // null: the default stream
};

/// The CPU: the properties that choices depend on.
struct DeviceInfo {
  std::string cpu_name;               // "AMD EPYC 9654"
  int cores = 1;                      // that this process may use: its affinity mask, or the quota of its control groups
  Isa isa = Isa::baseline;            // the best level this machine has; NIBBLE_ISA=name leaves only that level and its parents
  std::uint32_t isas = 1;             // bit i: it has level i (Isa); levels of CPUs only
  std::int64_t l1d_bytes = 32 << 10;  // per core
  std::int64_t l2_bytes = 1 << 20;    // per core
  std::int64_t l3_bytes = 0;          // shared; 0 when there is none or it is unknown
  std::int64_t memory_bytes = 0;      // in all, free or not

  /// Whether kernels of that level run here; NIBBLE_ISA may forbid them.
  bool has(Isa level) const { return (isas >> static_cast<int>(level) & 1) != 0; }
};

/// This machine's CPU; queried once, then cached.
const DeviceInfo& this_device();

/// Ok if each of these is unset or valid: NIBBLE_ISA, a level of CPUs; NIBBLE_NUM_THREADS, 1 … 4096; NIBBLE_KERNEL, a row of the kernel
/// table. Otherwise invalid_argument with the value and what is allowed. Every call that depends on them checks this first: quantize,
/// pack, plans, Checkpoint::open and functions of their results.
Status check_environment();

/// A bound on the speed of a layer: read bandwidth, or the peak of one kind of arithmetic.
enum class Ceiling : std::uint8_t { read, f32, bf16, int8, f16 };
/// Every ceiling, in the order a Roofline holds them.
inline constexpr std::array kAllCeilings{Ceiling::read, Ceiling::f32, Ceiling::bf16, Ceiling::int8, Ceiling::f16};
/// "read", "f32", "int8".
std::string_view name(Ceiling ceiling);

/// The measured peak rates of this machine with `threads` threads.
struct Roofline {
  int threads = 1;               // that took part in the measurement
  double read_gbytes_per_s = 0;  // streaming reads of a buffer far larger than the last-level cache
  double f32_gflops = 0;         // fused multiply-adds (2 operations each) on registers, by the best ISA
  double bf16_gflops = 0;        // bf16 dot products accumulated in f32; 0 when the CPU has no instruction for them
  double int8_gops = 0;          // u8·s8 dot products accumulated in s32, by the best ISA
  double f16_gflops = 0;         // f16 products accumulated in f32, of GPUs; 0 for CPUs

  /// The field of a ceiling: GB/s, GFLOP/s or Gop/s.
  double& operator[](Ceiling ceiling);
  /// The same, to read.
  double operator[](Ceiling ceiling) const;
};

/// Short measurements of one ceiling at a time. On a shared machine the ceilings change with the load: measure one beside each run of a
/// benchmark. One thread at a time may use a probe.
class RooflineProbe {
 public:
  /// `executor` must outlive the probe.
  explicit RooflineProbe(Executor& executor);
  ~RooflineProbe();
  RooflineProbe(RooflineProbe&&) noexcept;
  RooflineProbe& operator=(RooflineProbe&&) noexcept;

  /// Measures for about `seconds` (at least four passes of half a millisecond) and returns the median pass: GB/s for
  /// Ceiling::read, 10⁹ operations per second for the others, 0 where the CPU has no instruction. The first measurement of
  /// the memory allocates a buffer of at least 256 MB and keeps it; 0 when that fails.
  double measure(Ceiling ceiling, double seconds);
  /// The best of several measurements of each ceiling; takes half a second. Throws what measure() throws.
  Roofline roofline();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// RooflineProbe(executor).roofline(); takes less than a second.
Roofline measure_roofline(Executor& executor);

}  // namespace nibble
