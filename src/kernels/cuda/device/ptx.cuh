// Instructions that CUDA C++ does not expose, one thin function each. Those that libcu++ has lack cache hints and cost seconds of compile
// time per file.
//
// Compute capability 7.5 has neither asynchronous copies nor arithmetic of bf16. There a copy is done when the call returns, which is one of the
// moments at which an asynchronous copy may be done, and numbers are rounded to bf16 in integers.
#pragma once

#include <cstdint>

#include "kernels/cuda/tasks/patches.hpp"

namespace nibble::cuda::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kIsTuring = true;
#else
constexpr bool kIsTuring = false;
#endif
/// Whether asynchronous copies are done at once: compute capability 7.5.
constexpr bool copies_at_once() { return kIsTuring; }

__device__ inline std::uint32_t shared_address(const void* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); }

/// Any bitwise function of three words in one instruction (LOP3), which nvcc does not always find: bit 4·a + 2·b + c of the table.
template <std::uint32_t kTable>
__device__ inline std::uint32_t lop3(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return r;
}

/// Byte i: by bits 0…2 of nibble i of `which` one of a, from the lowest on, or of b; by bit 3 its sign in all bits instead. __byte_perm
/// ignores bit 3.
__device__ inline std::uint32_t permute_signed(std::uint32_t a, std::uint32_t b, std::uint32_t which) {
  std::uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(which));
  return r;
}

/// The larger of a ≥ 0 and the magnitude of b, NaN where one is NaN.
__device__ inline float max_magnitude(float a, float b) {
  asm("{\n.reg .f32 magnitude;\nabs.f32 magnitude, %1;\nmax.NaN.f32 %0, %0, magnitude;\n}" : "+f"(a) : "f"(b));
  return a;
}

// ---- two 16-bit floats in a register, rounded once; sm_80 has no addition of bf16

namespace detail {
/// The upper half of the word: x to the nearest bf16, ties to even; the NaN that instructions give.
__device__ inline std::uint32_t rounded_to_bf16(float x) {
  const std::uint32_t bits = __float_as_uint(x);
  return x != x ? 0x7fff0000u : bits + 0x7fff + (bits >> 16 & 1);
}
}  // namespace detail

__device__ inline std::uint32_t add_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
/// The lesser of each two; where one is a NaN the other.
__device__ inline std::uint32_t min_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ inline std::uint32_t mul_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ inline std::uint32_t fma_f16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
/// From 8.0 on: 7.5 has no products of bf16, for which a kernel would need it.
__device__ inline std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d = 0;
  if constexpr (!kIsTuring) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ inline std::uint32_t to_f16x2(float low, float high) {
  std::uint32_t d;
  if constexpr (kIsTuring)
    asm("{\n.reg .f16 l, h;\ncvt.rn.f16.f32 l, %1;\ncvt.rn.f16.f32 h, %2;\nmov.b32 %0, {l, h};\n}"
        : "=r"(d)
        : "f"(low), "f"(high));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ inline std::uint32_t to_bf16x2(float low, float high) {
  std::uint32_t d;
  if constexpr (kIsTuring)
    d = __byte_perm(detail::rounded_to_bf16(low), detail::rounded_to_bf16(high), 0x7632);
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// ---- mbarrier

__device__ inline void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to the copy engine and to the other CTAs of the cluster.
__device__ inline void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive_expect(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Waits until the phase of that parity is complete.
__device__ inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
/// Whether it is, without waiting.
__device__ inline bool barrier_is_past(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t is;
  asm volatile("{.reg .pred past; mbarrier.test_wait.parity.shared::cta.b64 past, [%1], %2; selp.u32 %0, 1, 0, past;}"
               : "=r"(is)
               : "r"(barrier), "r"(parity)
               : "memory");
  return is != 0;
}
/// Waits for the phase, but not for longer than so many clocks.
__device__ inline void barrier_wait_briefly(std::uint32_t barrier, std::uint32_t parity, unsigned clocks) {
  const auto now = [] { return static_cast<unsigned>(clock64()); };
  const unsigned begin = now();
  while (!barrier_is_past(barrier, parity) && now() - begin < clocks) continue;
}
/// The same for a phase that other CTAs of the cluster complete.
__device__ inline void barrier_wait_cluster(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again_%=:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again_%=;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}
/// bar.sync among `threads` threads of the CTA that use this id.
__device__ inline void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
/// Arrives at the barrier without waiting.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Whether this is the lane that works alone for its converged warp. The compiler knows that there is one: what the lane computes stays in
/// uniform registers, where copies need it. Behind `lane == 0` each copy is a loop over lanes.
__device__ inline bool elected() {
  std::uint32_t is;
  asm volatile("{.reg .pred is; elect.sync _|is, 0xffffffff; selp.b32 %0, 1, 0, is;}" : "=r"(is));
  return is != 0;
}

// ---- flags in device memory

__device__ inline std::uint64_t load_acquire(const std::uint64_t* flag) {
  std::uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
__device__ inline void store_release(std::uint64_t* flag, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

/// Releases what this CTA wrote before a barrier, too.
__device__ inline void add_release(std::uint64_t* counter, std::uint64_t value) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(counter), "l"(value) : "memory");
}

/// Orders what this thread has stored, and what it reads by now of what others stored, before bulk copies that are started after it.
__device__ inline void fence_for_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

/// Stores `value` if it finds `expected`; returns what it found. Releases what this CTA wrote before a barrier, and acquires what other CTAs
/// released, for this CTA after a barrier.
__device__ inline std::uint64_t compare_and_swap(std::uint64_t* at, std::uint64_t expected, std::uint64_t value) {
  std::uint64_t found;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(found) : "l"(at), "l"(expected), "l"(value) : "memory");
  return found;
}

// ---- device memory

/// 16 bytes, if `wanted`: one instruction, without a jump. A uint4 that is assigned may become four stores of 4 bytes.
__device__ inline void store16_if(bool wanted, void* to, uint4 v) {
  asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %0, 0; @wanted st.global.v4.b32 [%1], {%2,%3,%4,%5};}" ::"r"(
                   static_cast<int>(wanted)),
               "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// ---- shared memory

__device__ inline uint4 load_shared16(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ inline uint2 load_shared8(std::uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ inline std::uint32_t load_shared4(std::uint32_t address) {
  std::uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ inline std::uint32_t load_shared2(std::uint32_t address) {
  std::uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}
__device__ inline void store_shared1(std::uint32_t address, std::uint32_t low_byte) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(low_byte) : "memory");
}
__device__ inline void store_shared2(std::uint32_t address, std::uint32_t low_half) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<std::uint16_t>(low_half)) : "memory");
}
__device__ inline void store_shared4(std::uint32_t address, std::uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ inline void store_shared8(std::uint32_t address, uint2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
__device__ inline void store_shared16(std::uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// ---- copies

/// Weights are read once: they must not push activations out of L2.
__device__ inline std::uint64_t evict_first() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
/// Activations are read by every CTA.
__device__ inline std::uint64_t evict_last() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
/// `bytes` (a multiple of 16) from global to shared memory through the bulk copy engine, counted by `barrier`.
__device__ inline void bulk_copy(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
/// Asks for `bytes` (a multiple of 16) in L2. No barrier counts them.
__device__ inline void prefetch_l2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
/// A 2-D box of a tensor map at (column, row); elements outside become zero. The copy is counted by `barrier`.
__device__ inline void load_box(std::uint32_t to, const void* map, int column, int row, std::uint32_t barrier,
                                std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], "
      "%5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}
/// The same of a 3-D box.
__device__ inline void load_box(std::uint32_t to, const void* map, int column, int row, int plane, std::uint32_t barrier,
                                std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], "
      "[%5], %6;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(plane), "r"(barrier), "l"(policy)
      : "memory");
}
/// A box of as many channels and pixels as the map says, in steps of its strides; elements outside become zero (tensor_map.hpp).
__device__ inline void load_patches(std::uint32_t to, const void* map, const PatchBox& box, std::uint32_t barrier,
                                    std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8}, %9;" ::"r"(to),
      "l"(map), "r"(box.c), "r"(box.w), "r"(box.h), "r"(box.image), "r"(barrier), "h"(static_cast<std::uint16_t>(box.right)),
      "h"(static_cast<std::uint16_t>(box.down)), "l"(policy)
      : "memory");
}
/// async_copy16 of compute capability 7.5: a part of the 16 bytes is read in pieces, no byte past the last.
__device__ inline void copy16_at_once(std::uint32_t to, const void* from, int bytes) {
  uint4 v{};
  asm volatile("{.reg .pred whole; setp.eq.s32 whole, %5, 16; @whole ld.global.cg.v4.b32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(from), "r"(bytes));
  store_shared16(to, v);
  const auto* const at = static_cast<const std::uint8_t*>(from);
  if ((bytes & 8) != 0) store_shared8(to, __ldcg(reinterpret_cast<const uint2*>(at)));
  if ((bytes & 4) != 0) store_shared4(to + (bytes & 8), __ldcg(reinterpret_cast<const std::uint32_t*>(at + (bytes & 8))));
  if ((bytes & 2) != 0) store_shared2(to + (bytes & 12), __ldcg(reinterpret_cast<const std::uint16_t*>(at + (bytes & 12))));
  if ((bytes & 1) != 0) store_shared1(to + (bytes & 14), __ldcg(at + (bytes & 14)));
}
/// 16 bytes from global to shared memory; the first `bytes` of them are read, the others become zero.
__device__ inline void async_copy16(std::uint32_t to, const void* from, int bytes) {
  if constexpr (kIsTuring)
    copy16_at_once(to, from, bytes);
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void async_copy16(std::uint32_t to, const void* from) {
  if constexpr (kIsTuring)
    copy16_at_once(to, from, 16);
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/// Four bytes from global to shared memory.
__device__ inline void async_copy4(std::uint32_t to, const void* from) {
  if constexpr (kIsTuring)
    store_shared4(to, __ldcg(static_cast<const std::uint32_t*>(from)));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
/// Arrives at a barrier once the asynchronous copies that this thread has issued are complete; it is one of the arrivals that the barrier
/// expects.
__device__ inline void barrier_arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void async_copy_commit() {
  if constexpr (!kIsTuring) asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ inline void async_copy_wait() {
  if constexpr (!kIsTuring) asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
/// Waits for all copies of the thread, committed or not.
__device__ inline void async_copy_wait_all() {
  if constexpr (!kIsTuring) asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---- matrices in shared memory

/// Four 8×8 matrices of 16-bit elements; lane l gives the address of row l mod 8 of matrix l div 8.
__device__ inline void load_matrices(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}
/// The same, each transposed.
__device__ inline void load_matrices_transposed(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

/// Two 8×8 matrices of 16-bit elements: a lane's registers hold two neighbours of a row, or of a column if transposed; lane l < 16 gives
/// the address of row l mod 8 of matrix l / 8.
template <bool kTransposed>
__device__ inline void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b) {
  if constexpr (kTransposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

/// Four of them, each lane giving the address of row l mod 8 of matrix l / 8.
__device__ inline void store_four_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                           std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ---- matrix products of compute capability 7.5 and later; registers as in mma_parts.cuh

/// D[16,8] += A[16,8] · B[8,8] of f16.
__device__ inline void mma_m16n8k8(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}
/// D[8,8] += A[8,16] · B[16,8] of s8.
__device__ inline void mma_m8n8k16(std::int32_t& d0, std::int32_t& d1, std::uint32_t a, std::uint32_t b) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};" : "+r"(d0), "+r"(d1) : "r"(a), "r"(b));
}

// ---- clusters

__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
/// The address of `address` in the shared memory of CTA `rank` of the cluster.
__device__ inline std::uint32_t map_to_rank(std::uint32_t address, int rank) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
/// Writes into another CTA's shared memory; visible there after a barrier of the cluster.
__device__ inline void store_remote16(std::uint32_t to, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
/// Writes two floats into another CTA's shared memory; a barrier of that CTA counts the 8 bytes.
__device__ inline void send(std::uint32_t to, float2 value, std::uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(to),
               "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(barrier)
               : "memory");
}

// ---- registers, moved between the warpgroups of a CTA; all warps of a warpgroup must execute these

template <int kLeft>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLeft));
}
template <int kWanted>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kWanted));
}

/// Asks for a tensor map, which the first copy would otherwise wait for.
__device__ inline void prefetch_tensor_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ---- programmatic dependent launch

/// The next kernel of the stream may start now; it must wait before it touches what this one writes.
__device__ inline void let_dependents_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
/// Waits until the kernels before this one have finished and their writes are visible.
__device__ inline void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace nibble::cuda::ptx
