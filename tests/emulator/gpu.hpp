// A GPU for tests on machines that have none: kernels run unchanged, with other headers in place of those whose functions are single
// instructions (include/kernels/cuda). It tests indices, barriers, asynchronous copies and the order of threads. It does not model time or
// registers. README.md describes it.
//
//   CTAs in a random order, as many beside each other as there are multiprocessors │ a fiber for each thread │ the scheduler lets a warp
//   run until its threads wait, then another, by random priorities │ nothing can advance: the test fails, and says who waits
//
// Everything that is asynchronous on a GPU takes place at a random moment between its issue and the latest one that is allowed. A seed
// determines all of it.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace nibble::emulator {

/// Few, so that small layers have several rounds.
constexpr int kMultiprocessors = 3;
/// Shared memory of a CTA: less than a GPU's, so that short layers wrap around their rings, and as much as two stages of 128 tokens take.
constexpr int kSharedBytes = 184 * 1024;
/// The compute capability, 75 or 80, that NIBBLE_EMULATED_GPU in the environment asks for; 0: it asks for none, and kernels of all are tested.
int asked_capability();
/// Of 7.5: copies are done at once, products are made of parts (mma_parts.cuh), and a CTA has less shared memory.
inline bool is_turing() { return asked_capability() == 75; }
inline int most_shared_bytes() { return is_turing() ? 64 * 1024 : kSharedBytes; }
constexpr int kWarp = 32;

/// Determines the order of threads, and when copies land, in the launches that follow. Copies land as late as possible if it is a multiple
/// of 3, at once for the number after that, else at any time.
void use_seed(std::uint64_t seed);

/// Of the thread that runs, and of its CTA.
int thread();
int block();

/// Threads of a CTA in x, or CTAs of a grid: number i is (i mod x, i div x).
struct Shape {
  int x = 1, y = 1;
  int count() const { return x * y; }
};
Shape grid();
Shape cta();

/// Runs `kernel` as every thread of every CTA. CTAs have `shared_bytes` of shared memory; without any, they run one after the other,
/// because memory that is declared in a kernel is the same for all of them. Throws std::runtime_error when one does not come to its end.
void run(Shape grid, Shape cta, const std::function<void()>& kernel, int cluster = 1, int shared_bytes = kSharedBytes);

// ---- shared memory: addresses are 32 bits, and nothing lies at 0

constexpr std::uint32_t kSharedBase = 1024;
/// Sets where it begins: kernels declare it as an array, which only their own translation unit can define. With shared memory that is
/// declared in kernels, an address from which theirs are less than 2 GiB away.
void use_shared_memory(std::uint8_t* bytes);
std::uint32_t shared_address(const void* p);
/// `bytes` bytes from an address of the CTA that runs on.
std::uint8_t* shared_at(std::uint32_t address, int bytes = 1);
/// The byte at an address of CTA `rank` of the cluster.
std::uint8_t* shared_of(int rank, std::uint32_t address);
template <class T>
T load_shared(std::uint32_t address) {
  T value;
  std::memcpy(&value, shared_at(address, sizeof value), sizeof value);
  return value;
}
template <class T>
void store_shared(std::uint32_t address, const T& value) {
  std::memcpy(shared_at(address, sizeof value), &value, sizeof value);
}
/// The place of a byte of rows of 128 or 64 bytes whose chunks of 16 are swizzled.
constexpr std::uint32_t swizzled128(std::uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
constexpr std::uint32_t swizzled64(std::uint32_t address) { return address ^ (address >> 7 & 3) << 4; }

// ---- L2

/// The addresses that were asked for.
inline std::set<const void*> asked_in_l2;

// ---- barriers

void barrier_init(std::uint32_t barrier, int arrivals);
/// Of the barriers that the thread has initialised: copies and other CTAs may use them then.
void barrier_init_fence();
void barrier_arrive(std::uint32_t barrier, int bytes_to_come = 0);
/// At a barrier of the CTA, or of CTA `rank` of the cluster.
void barrier_bytes_came(std::uint32_t barrier, int bytes);
void barrier_bytes_came(int rank, std::uint32_t barrier, int bytes);
void barrier_wait(std::uint32_t barrier, std::uint32_t parity);
bool barrier_is_past(std::uint32_t barrier, std::uint32_t parity);
/// bar.sync and bar.arrive; 0 is __syncthreads'.
void named_barrier(int id, int threads);
void named_barrier_arrive(int id, int threads);

/// Of all threads of a cluster.
void cluster_arrive();
void cluster_wait();
int cluster_rank();

/// The values of all lanes of a warp, which must call this together.
std::array<std::uint64_t, kWarp> all_lanes(std::uint64_t value);

/// The value of a flag in device memory. A thread that reads the same value again waits until it is another.
std::uint64_t poll(const std::uint64_t* flag);

// ---- asynchronous work: closures that are called at some time

/// What a thread waits for itself: `remote` stores into other CTAs' shared memory are done when it arrives at the cluster's barrier.
enum class Engine { matrix, copies, remote };
constexpr int kEngines = 3;
void issue(Engine engine, std::function<void()> work);
/// After all copies that the thread has issued.
void issue_after_copies(std::function<void()> work);
/// Makes a group of what the thread has issued since the last one.
void commit(Engine engine);
/// All but the thread's `pending` latest groups are done then.
void wait(Engine engine, int pending);
/// wgmma.fence: registers may be operands. Matrix instructions need one after the thread's last wait.
void matrix_fence();

/// A copy into CTA `rank` of the cluster that no thread waits for, but a barrier counts.
void copy_to(int rank, std::function<void()> work);

}  // namespace nibble::emulator
