// Decode without Hopper's TMA: all warps copy chunks of K into a ring with cp.async.
//
//   CTA: one row tile, all of K or one of several equal parts of it; 8 warps, warp w takes records w, w + 8, w + 16, ...
//     chunk of K → stage of a ring: eight records, one a warp, and their x, a copy group of all threads, as far ahead as the ring is long
//   8 partial sums → shared memory → reduced in the order of the records ─┬──────────────────────────▶ epilogue, store
//                                                                        └─▶ with those of the other parts (split_k.cuh)
//
// A CTA takes its chunks one after the other, so memory is busy only if nearly every SM has a CTA: 4096 rows are 64 of them, for the 132
// SMs of an H200. There K of a row tile is divided among several.
//
// The order of every sum depends on K and the parts only, these on the weight and the GPU: a row's bits depend neither on M nor on the other rows.
#include <algorithm>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/device/split_k.cuh"
#include "kernels/cuda/tasks/decode.hpp"
#include "kernels/cuda/tasks/decode_sm80.hpp"
#include "kernels/cuda/weights/decode_record.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 32 * kDecodeWarps;
constexpr int kMaxStages = 4;  // with 3 chunks ahead 100 KB are in flight
static_assert(kDecodeWarps == kSm80ChunkRecords);
constexpr int kChunkChannels = kSm80ChunkRecords * gpu_tile::kChannels;
constexpr int kXPitch = kChunkChannels * 2 + 16;  // 8 tokens in 8 different bank groups for ldmatrix

struct Params {
  const std::uint8_t* records;
  Activations x;
  RecordFormat format;
  epilogue::Element epilogue;
  int first_token;  // of D, of this launch
  int n;
  int tile_records;
  int stages;
  SplitK split;
};

/// The ring; at the end the partial sums take its place, and the sums of the CTA.
int shared_bytes(int record_bytes, int stages, int m) {
  return std::max(stages * (kSm80ChunkRecords * record_bytes + m * kXPitch), part_bytes(m) + m * kPartPitch * 4);
}

/// Waits for all copy groups but the latest stages − 2.
__device__ inline void wait_for_oldest(int stages) {
  if (stages == 4)
    ptx::async_copy_wait<2>();
  else if (stages == 3)
    ptx::async_copy_wait<1>();
  else
    ptx::async_copy_wait<0>();
}

template <Known kKnown, int kTiles, class Act, Codes kCodes>
__global__ void __launch_bounds__(kThreads, 1) decode_sm80_kernel(const __grid_constant__ Params p) {
  if constexpr (ptx::kIsTuring) return;  // two stages of 4-bit records do not fit into the 64 KiB of compute capability 7.5
  extern __shared__ __align__(128) std::uint8_t shared[];
  const std::uint32_t base = ptx::shared_address(shared);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int tile = static_cast<int>(blockIdx.x) / p.split.ranks, rank = static_cast<int>(blockIdx.x) % p.split.ranks;
  const RecordRun run = records_of(rank, p.split.ranks, p.tile_records, kSm80ChunkRecords);
  const int chunk_bytes = kSm80ChunkRecords * p.format.bytes;
  const int stage_bytes = chunk_bytes + p.x.m * kXPitch;  // records, then x
  const std::uint8_t* records = p.records + (std::int64_t{tile} * p.tile_records + run.first) * p.format.bytes;
  const int chunks = (run.count + kSm80ChunkRecords - 1) / kSm80ChunkRecords;

  const auto request = [&](int chunk, int stage) {
    if (chunk < chunks) {
      const std::uint8_t* from = records + static_cast<std::int64_t>(chunk) * chunk_bytes;
      const int bytes = min(kSm80ChunkRecords, run.count - chunk * kSm80ChunkRecords) * p.format.bytes;
      const std::uint32_t to = base + stage * stage_bytes;
      for (int at = threadIdx.x * 16; at < bytes; at += kThreads * 16) ptx::async_copy16(to + at, from + at, 16);
      const int channel = run.first * gpu_tile::kChannels + chunk * kChunkChannels;
      stage_activations(p.x, channel, kChunkChannels, to + chunk_bytes, kXPitch, threadIdx.x, kThreads);
    }
    ptx::async_copy_commit();
  };

  std::uint32_t x_tile[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
    x_tile[t] = chunk_bytes + min(8 * t + lane % 8, p.x.m - 1) * kXPitch + warp * gpu_tile::kChannels * 2 + lane / 8 * 16;

  Sums<kTiles> acc = {};
  for (int s = 0; s < p.stages - 1; ++s) request(s, s);
  for (int chunk = 0, stage = 0; chunk < chunks; ++chunk) {
    wait_for_oldest(p.stages);
    __syncthreads();  // all copies are complete, and all threads have read the stage that is filled next
    request(chunk + p.stages - 1, stage == 0 ? p.stages - 1 : stage - 1);
    const std::uint32_t from = base + stage * stage_bytes;
    if (chunk * kSm80ChunkRecords + warp < run.count) {
      std::uint32_t x[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) x[t] = from + x_tile[t];
      multiply_record<kKnown, kTiles, Act, kCodes>(p.format, from + warp * p.format.bytes, x, acc);
    }
    stage = stage + 1 == p.stages ? 0 : stage + 1;
  }
  ptx::async_copy_wait<0>();
  __syncthreads();

  float* parts = reinterpret_cast<float*>(shared);
  write_part<kTiles>(parts, warp, p.x.m, p.x.m, acc);
  __syncthreads();
  float* const sums = parts + part_bytes(p.x.m) / 4;
  const int row = 2 * lane;
  if (p.split.ranks > 1) {
    for (int token = warp; token < p.x.m; token += kDecodeWarps)
      *reinterpret_cast<float2*>(sums + token * kPartPitch + row) = sum_parts<Act, kCodes>(parts, p.x.m, token, row);
    __syncthreads();
    if (!add_ranks<kThreads, gpu_tile::kRows, kPartPitch, kDecodeTokens>(p.split, tile, rank, p.x.m, sums)) return;
  }
  for (int token = warp; token < p.x.m; token += kDecodeWarps) {
    const float2 sum = p.split.ranks > 1 ? *reinterpret_cast<const float2*>(sums + token * kPartPitch + row)
                                         : sum_parts<Act, kCodes>(parts, p.x.m, token, row);
    p.epilogue.store_two(p.first_token + token, tile * gpu_tile::kRows + row, sum.x, sum.y, p.n);
  }
}

using Kernel = const Launchable<Params>*;

template <class Act, Codes kCodes>
Kernel kernel_for(int m, int span) {
  if (span == 16)
    return m <= 8 ? &kLaunchable<decode_sm80_kernel<Known::groups_of_16, 1, Act, kCodes>>
                  : &kLaunchable<decode_sm80_kernel<Known::groups_of_16, 2, Act, kCodes>>;
  return m <= 8 ? &kLaunchable<decode_sm80_kernel<Known::nothing, 1, Act, kCodes>>
                : &kLaunchable<decode_sm80_kernel<Known::nothing, 2, Act, kCodes>>;
}
/// Null: there is none.
template <class Act>
Kernel kernel_for(Codes codes, int m, int span) {
  switch (codes) {
    case Codes::u4: return kernel_for<Act, Codes::u4>(m, span);
    case Codes::u8: return kernel_for<Act, Codes::u8>(m, span);
    case Codes::e2m1: return kernel_for<Act, Codes::e2m1>(m, span);
    case Codes::e4m3: return kernel_for<Act, Codes::e4m3>(m, span);
    case Codes::e5m2: break;
  }
  return nullptr;
}

}  // namespace

cudaError_t linear_decode_sm80(const LinearTask& task, int split, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || split < 1 || split > kMostSplitRanks ||
      (task.a_dtype != DType::f16 && task.a_dtype != DType::bf16))
    return cudaErrorInvalidValue;
  int device = 0, most = 0;
  if (const cudaError_t e = most_shared(device, most)) return e;
  Params p{};
  p.records = static_cast<const std::uint8_t*>(task.weight.records);
  p.format = record_format(task.weight);
  p.epilogue = task.epilogue;
  p.n = static_cast<int>(geo.n);
  p.tile_records = geo.records();
  const int chunks = decode_sm80_chunks(geo.records()), ranks = std::min(split, chunks);
  const int most_stages = std::clamp((chunks + ranks - 1) / ranks, 2, kMaxStages);
  int tokens = std::min(task.m, kDecodeTokens);
  for (;; tokens = (tokens + 1) / 2) {
    p.stages = most_stages;
    while (p.stages > 2 && shared_bytes(p.format.bytes, p.stages, tokens) > most) --p.stages;
    if (shared_bytes(p.format.bytes, p.stages, tokens) <= most) break;
    if (tokens == 1) return cudaErrorInvalidConfiguration;
  }
  const int smem = shared_bytes(p.format.bytes, p.stages, tokens);
  for (int done = 0; done < task.m; done += tokens) {
    const int m = std::min(tokens, task.m - done);
    p.first_token = done;
    p.x = activations(task, done, m);
    p.split = split_k(task.scratch_end, ranks, geo.tiles(), gpu_tile::kRows, kDecodeTokens);
    const Kernel kernel = task.a_dtype == DType::bf16 ? kernel_for<__nv_bfloat16>(task.weight.codes, m, geo.span)
                                                      : kernel_for<__half>(task.weight.codes, m, geo.span);
    if (kernel == nullptr) return cudaErrorInvalidValue;
    if (const cudaError_t e = kernel->allow_all_shared()) return e;
    if (const cudaError_t e = launch_after(kernel->kernel, static_cast<unsigned>(geo.tiles() * ranks), kThreads, smem, stream, p))
      return e;
  }
  return cudaSuccess;
}

}  // namespace nibble::cuda
