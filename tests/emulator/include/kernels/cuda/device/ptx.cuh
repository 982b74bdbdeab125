// Replaces src/kernels/cuda/device/ptx.cuh: the semantics of each instruction in C++.
#pragma once

#include <cuda.h>

#include <array>
#include <cmath>
#include <cstdint>

#include "emulator/gpu.hpp"
#include "kernels/cuda/tasks/patches.hpp"
#include "nibble/types.hpp"

namespace nibble::cuda::ptx {

using namespace emulator;

constexpr bool kIsTuring = false;  // what kernels are compiled for; which GPU it is, is known when they run
inline bool copies_at_once() { return emulator::is_turing(); }

inline std::uint32_t shared_address(const void* p) { return emulator::shared_address(p); }

template <std::uint32_t kTable>
std::uint32_t lop3(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t r = 0;
  for (std::uint32_t i = 0; i < 8; ++i)
    if ((kTable >> i & 1) != 0) r |= ((i & 4) != 0 ? a : ~a) & ((i & 2) != 0 ? b : ~b) & ((i & 1) != 0 ? c : ~c);
  return r;
}

inline std::uint32_t permute_signed(std::uint32_t a, std::uint32_t b, std::uint32_t which) {
  const std::uint32_t bytes = __byte_perm(a, b, which);
  std::uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t byte = bytes >> 8 * i & 0xff;
    r |= ((which >> 4 * i & 8) == 0 ? byte : (byte & 0x80) != 0 ? 0xffu : 0u) << 8 * i;
  }
  return r;
}

/// The larger magnitude, NaN where one is NaN.
inline float max_magnitude(float a, float b) { return a != a || b != b ? NAN : std::max(a, std::abs(b)); }

// ---- two 16-bit floats in a register

inline float half_of_pair(std::uint32_t pair, int i, f16) { return to_f32(f16{static_cast<std::uint16_t>(pair >> 16 * i)}); }
inline float half_of_pair(std::uint32_t pair, int i, bf16) { return to_f32(bf16{static_cast<std::uint16_t>(pair >> 16 * i)}); }
inline std::uint32_t to_f16x2(float low, float high) { return std::uint32_t{to_f16(high).bits} << 16 | to_f16(low).bits; }
inline std::uint32_t to_bf16x2(float low, float high) { return std::uint32_t{to_bf16(high).bits} << 16 | to_bf16(low).bits; }
/// a·b + c of both halves. The intermediate roundings are exact for weights and zero points.
template <class Half>
std::array<float, 2> fma_pair(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::array<float, 2> d;
  for (int i = 0; i < 2; ++i)
    d[static_cast<std::size_t>(i)] = static_cast<float>(std::fma(static_cast<double>(half_of_pair(a, i, Half{})),
                                                                 static_cast<double>(half_of_pair(b, i, Half{})),
                                                                 static_cast<double>(half_of_pair(c, i, Half{}))));
  return d;
}
inline std::uint32_t fma_f16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const auto d = fma_pair<f16>(a, b, c);
  return to_f16x2(d[0], d[1]);
}
inline std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const auto d = fma_pair<bf16>(a, b, c);
  return to_bf16x2(d[0], d[1]);
}
inline std::uint32_t min_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t to = 0;
  for (int half = 0; half < 2; ++half) {
    const f16 x{static_cast<std::uint16_t>(a >> 16 * half)}, y{static_cast<std::uint16_t>(b >> 16 * half)};
    to |= std::uint32_t{to_f16(std::fmin(to_f32(x), to_f32(y))).bits} << 16 * half;
  }
  return to;
}
inline std::uint32_t add_f16x2(std::uint32_t a, std::uint32_t b) { return fma_f16x2(a, 0x3c003c00u, b); }
inline std::uint32_t mul_f16x2(std::uint32_t a, std::uint32_t b) { return fma_f16x2(a, b, 0x80008000u); }

// ---- mbarrier

inline void barrier_init(std::uint32_t barrier, int arrivals) { emulator::barrier_init(barrier, arrivals); }
inline void barrier_init_fence() { emulator::barrier_init_fence(); }
inline void barrier_arrive(std::uint32_t barrier) { emulator::barrier_arrive(barrier); }
inline void barrier_arrive_expect(std::uint32_t barrier, int bytes) { emulator::barrier_arrive(barrier, bytes); }
inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) { emulator::barrier_wait(barrier, parity); }
inline bool barrier_is_past(std::uint32_t barrier, std::uint32_t parity) { return emulator::barrier_is_past(barrier, parity); }
inline void barrier_wait_cluster(std::uint32_t barrier, std::uint32_t parity) { emulator::barrier_wait(barrier, parity); }
inline void named_barrier(int id, int threads) { emulator::named_barrier(id, threads); }
inline void named_barrier_arrive(int id, int threads) { emulator::named_barrier_arrive(id, threads); }

// ---- flags in device memory

inline std::uint64_t load_acquire(const std::uint64_t* flag) { return poll(flag); }
inline void store_release(std::uint64_t* flag, std::uint64_t value) { *flag = value; }
inline void add_release(std::uint64_t* counter, std::uint64_t value) { *counter += value; }
inline void fence_for_copies() {}
inline std::uint64_t compare_and_swap(std::uint64_t* at, std::uint64_t expected, std::uint64_t value) {
  const std::uint64_t found = *at;
  if (found == expected) *at = value;
  return found;
}

// ---- device memory

inline void store16_if(bool wanted, void* to, uint4 v) {
  if (wanted) *static_cast<uint4*>(to) = v;
}

/// Time passes only while threads wait: this one does not.
inline void barrier_wait_briefly(std::uint32_t, std::uint32_t, unsigned) {}

inline bool elected() { return threadIdx.x % 32 == 0; }

// ---- copies

inline void prefetch_tensor_map(const CUtensorMap*) {}
inline std::uint64_t evict_first() { return 0; }
inline std::uint64_t evict_last() { return 0; }
/// What lands later: the copy of `bytes` bytes that `copy` makes, counted by `barrier`.
template <class Copy>
void land(std::uint32_t barrier, int bytes, Copy copy) {
  copy_to(emulator::cluster_rank(), [=] {
    copy();
    barrier_bytes_came(barrier, bytes);
  });
}
inline void bulk_copy(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier, std::uint64_t) {
  land(barrier, bytes, [=] { std::memcpy(shared_at(to, bytes), from, static_cast<std::size_t>(bytes)); });
}
inline void prefetch_l2(const void* from, int) { emulator::asked_in_l2.insert(from); }
inline void load_box(std::uint32_t to, const CUtensorMap* map, int column, int row, int plane, std::uint32_t barrier,
                     std::uint64_t) {
  land(barrier, map->box_rows * map->box_bytes, [=, map = *map] {
    for (int r = 0; r < map.box_rows; ++r)
      for (int b = 0; b < map.box_bytes; b += map.element) {
        const int at = column * map.element + b;
        std::uint8_t* const place = shared_at(swizzled128(to + static_cast<std::uint32_t>(r * map.box_bytes + b)));
        const auto bytes = static_cast<std::size_t>(map.element);
        if (row + r < map.m && at < map.row_bytes && (plane == 0 || plane < map.images))
          std::memcpy(place, map.bytes + (plane * map.plane_pitch + (row + r) * map.pitch + at), bytes);
        else
          std::memset(place, 0, bytes);
      }
  });
}
inline void load_box(std::uint32_t to, const CUtensorMap* map, int column, int row, std::uint32_t barrier, std::uint64_t policy) {
  load_box(to, map, column, row, 0, barrier, policy);
}
inline void load_patches(std::uint32_t to, const CUtensorMap* map, const PatchBox& box, std::uint32_t barrier, std::uint64_t) {
  land(barrier, map->box_rows * map->box_bytes, [=, map = *map] {
    int image = box.image, h = box.h, w = box.w;
    for (int pixel = 0; pixel < map.box_rows; ++pixel) {
      const int y = h + box.down, x = w + box.right;
      const bool inside = image < map.images && y >= 0 && y < map.height && x >= 0 && x < map.width;
      for (int b = 0; b < map.box_bytes; ++b) {
        const std::uint32_t at = to + static_cast<std::uint32_t>(pixel * map.box_bytes + b);
        const std::uint32_t place = map.box_bytes == 128 ? swizzled128(at) : map.box_bytes == 64 ? swizzled64(at) : at;
        *shared_at(place) =
            inside ? map.bytes[((std::int64_t{image} * map.height + y) * map.width + x) * map.pitch + box.c * map.element + b]
                   : std::uint8_t{0};
      }
      w += map.stride_w;
      if (w > map.last_w) w = map.lower_w, h += map.stride_h;
      if (h > map.last_h) h = map.lower_h, ++image;
    }
  });
}
template <class Copy>
void issue_copy(Copy copy) {
  if (copies_at_once())
    copy();
  else
    issue(Engine::copies, copy);
}
inline void async_copy16(std::uint32_t to, const void* from, int bytes) {
  issue_copy([=] {
    std::memset(shared_at(to, 16), 0, 16);
    std::memcpy(shared_at(to), from, static_cast<std::size_t>(bytes));
  });
}
inline void async_copy16(std::uint32_t to, const void* from) { async_copy16(to, from, 16); }
inline void async_copy4(std::uint32_t to, const void* from) {
  issue_copy([=] { std::memcpy(shared_at(to, 4), from, 4); });
}
inline void async_copy_commit() { commit(Engine::copies); }
template <int kPending>
void async_copy_wait() {
  wait(Engine::copies, kPending);
}
inline void async_copy_wait_all() {
  async_copy_commit();
  async_copy_wait<0>();
}
inline void barrier_arrive_after_copies(std::uint32_t barrier) {
  issue_after_copies([=] { emulator::barrier_arrive(barrier); });
}

// ---- shared memory

inline uint4 load_shared16(std::uint32_t address) { return load_shared<uint4>(address); }
inline uint2 load_shared8(std::uint32_t address) { return load_shared<uint2>(address); }
inline std::uint32_t load_shared4(std::uint32_t address) { return load_shared<std::uint32_t>(address); }
inline std::uint32_t load_shared2(std::uint32_t address) { return load_shared<std::uint16_t>(address); }
inline void store_shared2(std::uint32_t address, std::uint32_t low_half) {
  store_shared(address, static_cast<std::uint16_t>(low_half));
}
inline void store_shared4(std::uint32_t address, std::uint32_t v) { store_shared(address, v); }
inline void store_shared8(std::uint32_t address, uint2 v) { store_shared(address, v); }
inline void store_shared16(std::uint32_t address, uint4 v) { store_shared(address, v); }

/// A lane's two elements of each of four matrices, neighbours in row lane / 4 or, transposed, in a column.
template <bool kTransposed>
void load_four_matrices(std::uint32_t (&m)[4], std::uint32_t address) {
  const auto rows = all_lanes(address);
  const auto lane = static_cast<std::size_t>(thread() % 32), g = lane / 4, t = lane % 4;
  for (std::size_t matrix = 0; matrix < 4; ++matrix) {
    m[matrix] = 0;
    for (std::size_t i = 0; i < 2; ++i) {
      const std::size_t row = kTransposed ? 2 * t + i : g, column = kTransposed ? g : 2 * t + i;
      const auto at = static_cast<std::uint32_t>(rows[matrix * 8 + row] + 2 * column);
      m[matrix] |= std::uint32_t{load_shared<std::uint16_t>(at)} << 16 * i;
    }
  }
}
inline void load_matrices(std::uint32_t (&m)[4], std::uint32_t address) { load_four_matrices<false>(m, address); }
inline void load_matrices_transposed(std::uint32_t (&m)[4], std::uint32_t address) { load_four_matrices<true>(m, address); }

template <bool kTransposed, std::size_t kMatrices>
void store_some_matrices(std::uint32_t address, const std::array<std::uint32_t, kMatrices>& values) {
  const auto rows = all_lanes(address);
  const auto lane = static_cast<std::size_t>(thread() % 32), g = lane / 4, t = lane % 4;
  for (std::size_t matrix = 0; matrix < kMatrices; ++matrix)
    for (std::size_t i = 0; i < 2; ++i) {
      const auto element = static_cast<std::uint16_t>(values[matrix] >> 16 * i);
      const std::size_t row = kTransposed ? 2 * t + i : g, column = kTransposed ? g : 2 * t + i;
      store_shared(static_cast<std::uint32_t>(rows[matrix * 8 + row] + 2 * column), element);
    }
}
template <bool kTransposed>
void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b) {
  store_some_matrices<kTransposed, 2>(address, {a, b});
}
inline void store_four_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  store_some_matrices<false, 4>(address, {a, b, c, d});
}

// ---- matrix products of compute capability 7.5, done at once

/// A lane 4g + t has two numbers, or four codes, of row g of A and, in a1, of row g + 8; of column g of B; sums of columns 2t and 2t + 1.
inline void mma_m16n8k8(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
  const auto rows = all_lanes(std::uint64_t{a1} << 32 | a0), columns = all_lanes(b);
  const auto lane = static_cast<std::size_t>(thread() % 32), g = lane / 4, t = lane % 4;
  const auto number = [](std::uint64_t pair, std::size_t i) {
    return half_of_pair(static_cast<std::uint32_t>(pair), static_cast<int>(i), f16{});
  };
  for (std::size_t i = 0; i < 4; ++i)
    for (std::size_t k = 0; k < 8; ++k)
      d[i] =
          std::fma(number(rows[4 * g + k / 2] >> 32 * (i / 2), k % 2), number(columns[4 * (2 * t + i % 2) + k / 2], k % 2), d[i]);
}
inline void mma_m8n8k16(std::int32_t& d0, std::int32_t& d1, std::uint32_t a, std::uint32_t b) {
  const auto rows = all_lanes(a), columns = all_lanes(b);
  const auto lane = static_cast<std::size_t>(thread() % 32), g = lane / 4, t = lane % 4;
  const auto code = [](std::uint64_t word, std::size_t i) { return static_cast<std::int8_t>(word >> 8 * i); };
  for (std::size_t k = 0; k < 16; ++k) {
    const std::int8_t row = code(rows[4 * g + k / 4], k % 4);
    d0 += row * code(columns[4 * (2 * t) + k / 4], k % 4);
    d1 += row * code(columns[4 * (2 * t + 1) + k / 4], k % 4);
  }
}

// ---- clusters: the upper byte of an address is a rank

inline void cluster_arrive() { emulator::cluster_arrive(); }
inline void cluster_wait() { emulator::cluster_wait(); }
inline int cluster_rank() { return emulator::cluster_rank(); }
inline std::uint32_t map_to_rank(std::uint32_t address, int rank) { return address | static_cast<std::uint32_t>(rank) << 24; }
inline void store_remote16(std::uint32_t to, float4 v) {
  issue(Engine::remote, [=] { std::memcpy(shared_of(static_cast<int>(to >> 24), to & 0xffffff), &v, sizeof v); });
}
inline void send(std::uint32_t to, float2 value, std::uint32_t barrier) {
  const auto rank = static_cast<int>(to >> 24);
  copy_to(rank, [=] {
    std::memcpy(shared_at(to & 0xffffff), &value, sizeof value);
    barrier_bytes_came(barrier & 0xffffff, sizeof value);
  });
}

// ---- registers, and launches: nothing depends on them

template <int kLeft>
void give_registers() {}
template <int kWanted>
void take_registers() {}
inline void let_dependents_start() {}
inline void wait_for_predecessors() {}

}  // namespace nibble::cuda::ptx
