// A GPU for tests on machines that have none: kernels run unchanged, with other headers in place of those whose functions are single
// instructions (include/kernels/cuda). It tests indices, barriers, and whether memory is still valid when it is read asynchronously. It
// does not model time, registers, or races on memory.
//
//   cluster after cluster │ a fiber for each thread, in turn: each runs until it has to wait │ none can advance: the test fails, and says
//   who waits
//
// Bulk copies complete at once. Matrix instructions and a thread's own asynchronous copies are executed as late as allowed, when the
// thread waits for them: a stage of a ring that is released too early has other contents by then.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace nibble::emulator {

/// Few, so that small layers have several rounds.
constexpr int kMultiprocessors = 3;
/// Shared memory of a CTA: about half of a GPU's, so that short layers wrap around their rings of stages.
constexpr int kSharedBytes = 126 * 1024;
constexpr int kWarp = 32;

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

/// Runs `kernel` as every thread of every CTA, the CTAs of a cluster beside each other. Throws std::runtime_error when one does not come
/// to its end.
void run(Shape grid, Shape cta, const std::function<void()>& kernel, int cluster = 1);

/// Lets other threads run until `ready`; a deadlocked test prints `what`.
void wait_until(const std::function<bool()>& ready, const char* what, std::uint32_t which);

/// The first byte of the CTA's shared memory; addresses there are 32 bits, and nothing lies at 0.
constexpr std::uint32_t kSharedBase = 1024;
std::uint8_t* shared_memory();
/// Sets its address: kernels declare it as an array, which only their own translation unit can define.
void use_shared_memory(std::uint8_t* bytes);
inline std::uint8_t* shared_at(std::uint32_t address) { return shared_memory() + (address - kSharedBase); }
template <class T>
T load_shared(std::uint32_t address) {
  T value;
  std::memcpy(&value, shared_at(address), sizeof value);
  return value;
}
template <class T>
void store_shared(std::uint32_t address, const T& value) {
  std::memcpy(shared_at(address), &value, sizeof value);
}
/// The place of a byte of rows of 128 or 64 bytes whose chunks of 16 are swizzled.
constexpr std::uint32_t swizzled128(std::uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
constexpr std::uint32_t swizzled64(std::uint32_t address) { return address ^ (address >> 7 & 3) << 4; }

// ---- barriers

void barrier_init(std::uint32_t barrier, int arrivals);
void barrier_arrive(std::uint32_t barrier, int bytes_to_come = 0);
void barrier_bytes_came(std::uint32_t barrier, int bytes);
/// At a barrier of CTA `rank` of the cluster.
void barrier_bytes_came(int rank, std::uint32_t barrier, int bytes);
void barrier_wait(std::uint32_t barrier, std::uint32_t parity);
/// bar.sync and bar.arrive; 0 is __syncthreads'.
void named_barrier(int id, int threads);
void named_barrier_arrive(int id, int threads);

/// Of all threads of a cluster.
void cluster_arrive();
void cluster_wait();
int cluster_rank();
/// A byte of the shared memory of CTA `rank` of the cluster.
std::uint8_t* shared_of(int rank, std::uint32_t address);

/// The values of all lanes of a warp, which must call this together.
std::array<std::uint64_t, kWarp> all_lanes(std::uint64_t value);

// ---- asynchronous work: closures, called when they must be complete

enum class Engine { matrix, copies };
void issue(Engine engine, std::function<void()> work);
/// Makes a group of what the thread has issued since the last one.
void commit(Engine engine);
/// All but the thread's `pending` latest groups are done then.
void wait(Engine engine, int pending);

}  // namespace nibble::emulator
