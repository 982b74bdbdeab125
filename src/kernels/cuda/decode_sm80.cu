// Decode without Hopper's copy engine: every warp streams its own records through a private cp.async ring. Runs from sm_80 on.
//
//   CTA: one row tile, all of K; x comes chunk by chunk into shared memory
//     for each chunk of K (kChunkRecords records): x → shared memory, all threads
//       warp (half, quarter): rows 32·half … +31 of the chunk's records number quarter, quarter + 4, ...
//         record half → ring stage, two records ahead; waits for its own copies only
//   4 quarters → shared memory → summed in order, epilogue, store
//
// The order of every sum depends on (N, K) only: a row's bits depend neither on M nor on the other rows.
#include <algorithm>

#include "kernels/cuda/decode.hpp"
#include "kernels/cuda/decode_record.cuh"
#include "kernels/cuda/ptx.cuh"

namespace nibble::cuda {
namespace {

constexpr int kHalves = gpu_tile::kRows / kWarpRows;
constexpr int kQuarters = 4;
constexpr int kThreads = 32 * kHalves * kQuarters;
constexpr int kPartPitch = gpu_tile::kRows + 4;  // see decode_sm90.cu
/// Records per ring: 4 of 4 quarters ahead are 16 × 4 KiB in flight per CTA.
constexpr int kStages = 3;
/// Records whose x is in shared memory at a time: 16 KB at 8 tokens.
constexpr int kChunkRecords = 8;
constexpr int kXPitch = kChunkRecords * gpu_tile::kChannels * 2 + 16;

struct Params {
  const std::uint8_t* records;
  const void* x;
  std::int64_t x_stride;
  int m, n, k;
  int tile_records;
  int record_bytes;
  RecordFormat format;
  DecodeEpilogue epilogue;
};

/// Ring of every quarter, x, and over both of them at the end the partial sums.
int shared_bytes(const Params& p, int token_tiles) {
  const int ring = kQuarters * kStages * p.record_bytes;
  return std::max(ring + p.m * kXPitch, kQuarters * 8 * token_tiles * kPartPitch * 4);
}

template <int kTiles, class Act, int kBits>
__global__ void __launch_bounds__(kThreads, 1) decode_sm80_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int half = warp % kHalves;
  const int quarter = warp / kHalves;
  const int tile = blockIdx.x;
  const std::uint32_t ring = base + quarter * kStages * p.record_bytes;
  const std::uint32_t x_base = base + kQuarters * kStages * p.record_bytes;
  const std::uint8_t* tile_records = p.records + static_cast<std::int64_t>(tile) * p.tile_records * p.record_bytes;

  // The two warps of a quarter share its records: each copies half of the bytes and meets the other at a barrier of their own.
  const auto request = [&](int record) {
    if (record < p.tile_records) {
      const std::uint8_t* from = tile_records + static_cast<std::int64_t>(record) * p.record_bytes;
      const std::uint32_t to = ring + record / kQuarters % kStages * p.record_bytes;
      for (int at = (half * 32 + lane) * 16; at < p.record_bytes; at += 64 * 16) ptx::async_copy16(to + at, from + at, 16);
    }
    ptx::async_copy_commit();
  };
  const auto meet = [&] { ptx::named_barrier(1 + quarter, 64); };

  std::uint32_t x_tile[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) x_tile[t] = x_base + min(8 * t + lane % 8, p.m - 1) * kXPitch + lane / 8 * 16;

  Unpack<Act, kBits> fixed;
  fixed.set(p.format.zero_base, p.format.zero_base);
  Sums<kTiles> acc = {};
  for (int s = 0; s < kStages - 1; ++s) request(quarter + s * kQuarters);
  for (int chunk = 0; chunk < p.tile_records; chunk += kChunkRecords) {
    const int records = min(kChunkRecords, p.tile_records - chunk);
    __syncthreads();  // the last chunk's x has been read
    stage_activations(p.x, p.x_stride, p.m, p.k, chunk * gpu_tile::kChannels, records * gpu_tile::kChannels, x_base, kXPitch,
                      threadIdx.x, kThreads);
    ptx::async_copy_wait<0>();
    __syncthreads();
    for (int r = quarter; r < records; r += kQuarters) {
      ptx::async_copy_wait<kStages - 2>();
      meet();  // both halves of this record have landed, and both warps have left the stage that is filled next
      request(chunk + r + (kStages - 1) * kQuarters);
      std::uint32_t x[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) x[t] = x_tile[t] + r * gpu_tile::kChannels * 2;
      multiply_record<kTiles, Act, kBits>(p.format, fixed, ring + (chunk + r) / kQuarters % kStages * p.record_bytes, x, half,
                                          acc);
    }
  }
  ptx::async_copy_wait<0>();
  __syncthreads();

  float* part = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int f = 0; f < kWarpFragments; ++f)
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * t + lane % 4 * 2 + i % 2;
        const int row = half * kWarpRows + f * gpu_tile::kFragmentRows + lane / 4 + i / 2 * 8;
        part[(quarter * 8 * kTiles + token) * kPartPitch + row] = acc[f][t][i];
      }
  __syncthreads();
  for (int e = threadIdx.x; e < p.m * gpu_tile::kRows; e += kThreads) {
    const int token = e / gpu_tile::kRows, row = e % gpu_tile::kRows;
    float sum = part[token * kPartPitch + row];
#pragma unroll
    for (int q = 1; q < kQuarters; ++q) sum += part[(q * 8 * kTiles + token) * kPartPitch + row];
    if (tile * gpu_tile::kRows + row < p.n) p.epilogue.store(token, tile * gpu_tile::kRows + row, sum);
  }
}

using Kernel = void (*)(Params);

template <class Act, int kBits>
Kernel kernel_for(int m) {
  if (m <= 8) return decode_sm80_kernel<1, Act, kBits>;
  if (m <= 16) return decode_sm80_kernel<2, Act, kBits>;
  return decode_sm80_kernel<4, Act, kBits>;
}

}  // namespace

cudaError_t decode_sm80(const DecodeTask& task, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || task.m > kDecodeMaxTokens || geo.n < 1 || geo.k < 1 || task.act == Float::f32) return cudaErrorInvalidValue;
  Params p{};
  p.records = static_cast<const std::uint8_t*>(task.weight.records);
  p.x = task.x;
  p.x_stride = task.x_stride;
  p.m = task.m;
  p.n = static_cast<int>(geo.n);
  p.k = static_cast<int>(geo.k);
  p.tile_records = geo.records();
  p.record_bytes = geo.record_bytes();
  p.format = record_format(task.weight);
  p.epilogue = decode_epilogue(task);
  const bool four = geo.bits == 4;
  const Kernel kernel = task.act == Float::bf16
                            ? (four ? kernel_for<__nv_bfloat16, 4>(task.m) : kernel_for<__nv_bfloat16, 8>(task.m))
                            : (four ? kernel_for<__half, 4>(task.m) : kernel_for<__half, 8>(task.m));
  const int smem = shared_bytes(p, task.m <= 8 ? 1 : task.m <= 16 ? 2 : 4);
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem)) return e;
  kernel<<<static_cast<unsigned>(geo.tiles()), kThreads, static_cast<std::size_t>(smem), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace nibble::cuda
