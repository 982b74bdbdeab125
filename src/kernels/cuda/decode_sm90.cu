// Decode on Hopper: a ring of records that the bulk copy engine keeps full, and warps that empty it.
//
//   cluster of S CTAs: takes row tiles c, c + C, c + 2C, ...  (C clusters, all resident: one CTA per SM)
//     CTA of rank r: records [r·R/S, (r+1)·R/S) of each of them, R = K/128; its slice of x stays in shared memory
//       producer warp: record → stage, evict-first, as far ahead as the ring is long; starts before the previous kernel has ended
//       consumer warp (half, quarter): rows 32·half … +31 of every fourth record, counted over all tiles. The stages are a multiple
//         of four, so a stage is always the same quarter's: nobody can be a whole turn of the ring ahead of a copy in flight, where
//         a barrier's parity would lie
//     tile done: 4 quarters → shared memory → summed in order → sent to the rank that owns the row (⌈64/S⌉ rows each)
//     one tile later: the owner adds the S parts in order of rank, epilogue, store
//
// Every sum has one order, which depends on (N, K, S, C) and not on M, so a row's bits depend neither on M nor on the other rows.
// What arrives from other ranks is awaited only after the next tile's records, so nobody waits for a slower neighbour in between.
#include <algorithm>

#include "kernels/cuda/decode.hpp"
#include "kernels/cuda/decode_record.cuh"
#include "kernels/cuda/ptx.cuh"

namespace nibble::cuda {
namespace {

constexpr int kHalves = gpu_tile::kRows / kWarpRows;  // 32 rows a warp: half the ldmatrix traffic of 16, at 16 sums a token tile
constexpr int kQuarters = 4;  // 8 were no faster (docs/kernels/cuda-decode.md) and leave no registers for a second CTA
constexpr int kConsumerWarps = kHalves * kQuarters;  // 2 per scheduler hide a record's chain of 8 dependent products
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + 32;
constexpr int kMaxSplit = 8;  // the largest portable cluster

/// Floats between tokens in the partial sums: 68 ≡ 4 mod 32 puts a fragment's 8 rows × 4 token pairs into 32 different banks.
constexpr int kPartPitch = gpu_tile::kRows + 4;
/// Floats per token of the parts that arrive: S · ⌈64/S⌉ at most.
constexpr int kInboxPitch = gpu_tile::kRows + kMaxSplit;

struct Params {
  const std::uint8_t* records;
  const void* x;
  std::int64_t x_stride;
  int m, n, k;
  int tiles, tile_records;
  int record_bytes;
  int stages;
  int x_pitch;  // bytes between tokens
  int split;
  RecordFormat format;
  DecodeEpilogue epilogue;
};

/// Shared memory of a CTA, in this order.
struct SharedMap {
  int x, part, inbox, barriers, total;
};
__host__ __device__ constexpr int align128(int bytes) { return (bytes + 127) / 128 * 128; }
__host__ __device__ constexpr SharedMap shared_map(int stages, int record_bytes, int m, int x_pitch, int token_tiles) {
  SharedMap s{};
  s.x = align128(stages * record_bytes);
  s.part = align128(s.x + m * x_pitch);
  s.inbox = s.part + kQuarters * 8 * token_tiles * kPartPitch * 4;
  s.barriers = s.inbox + 2 * 8 * token_tiles * kInboxPitch * 4;
  s.total = s.barriers + (2 * stages + 2) * 8;
  return s;
}

/// A place in the ring and the parity of its current use.
struct Cursor {
  int stage;
  std::uint32_t parity;
  __device__ static Cursor at(int record, int stages) {
    return {record % stages, static_cast<std::uint32_t>(record / stages & 1)};
  }
  __device__ void advance(int records, int stages) {
    stage += records;
    while (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

/// Two where the registers allow it, so that the next kernel's CTA can start its ring.
template <int kTiles, int kBits>
constexpr int kCtasPerSm = kTiles == 1 || (kTiles == 2 && kBits == 4) ? 2 : 1;

template <int kTiles, class Act, int kBits>
__global__ void __launch_bounds__(kThreads, kCtasPerSm<kTiles, kBits>) decode_sm90_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const SharedMap map = shared_map(p.stages, p.record_bytes, p.m, p.x_pitch, kTiles);
  const std::uint32_t base = ptx::shared_address(shared);
  const auto full = [&](int stage) { return base + map.barriers + 8 * stage; };
  const auto empty = [&](int stage) { return base + map.barriers + 8 * (p.stages + stage); };
  const auto inbox_full = [&](int buffer) { return base + map.barriers + 8 * (2 * p.stages + buffer); };

  const int rank = p.split == 1 ? 0 : ptx::cluster_rank();
  const int clusters = gridDim.x / p.split;
  const int first_tile = blockIdx.x / p.split;
  const int first_record = rank * p.tile_records / p.split;
  const int slice = (rank + 1) * p.tile_records / p.split - first_record;  // records of a tile that are this CTA's
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  ptx::let_dependents_start();
  if (threadIdx.x == kConsumers) {
    for (int s = 0; s < p.stages; ++s) {
      ptx::barrier_init(full(s), 1);
      ptx::barrier_init(empty(s), kHalves);
    }
    ptx::barrier_init(inbox_full(0), 1);
    ptx::barrier_init(inbox_full(1), 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (p.split > 1) ptx::cluster_arrive();  // awaited before the first word to another CTA

  if (warp == kConsumerWarps) {
    if (lane == 0) {
      const std::uint64_t policy = ptx::evict_first();
      Cursor to{0, 1};  // an unused stage counts as emptied
      for (int tile = first_tile; tile < p.tiles; tile += clusters) {
        const std::uint8_t* from = p.records + (static_cast<std::int64_t>(tile) * p.tile_records + first_record) * p.record_bytes;
        for (int r = 0; r < slice; ++r, from += p.record_bytes) {
          ptx::barrier_wait(empty(to.stage), to.parity);
          ptx::barrier_arrive_expect(full(to.stage), p.record_bytes);
          ptx::bulk_copy(base + to.stage * p.record_bytes, from, p.record_bytes, full(to.stage), policy);
          to.advance(1, p.stages);
        }
      }
    }
    if (p.split > 1) ptx::cluster_wait();
    return;
  }

  ptx::wait_for_predecessors();
  stage_activations(p.x, p.x_stride, p.m, p.k, first_record * gpu_tile::kChannels, slice * gpu_tile::kChannels, base + map.x,
                    p.x_pitch, threadIdx.x, kConsumers);
  ptx::async_copy_wait<0>();
  ptx::named_barrier(1, kConsumers);
  if (p.split > 1) ptx::cluster_wait();

  const int half = warp % kHalves;
  const int quarter = warp / kHalves;
  std::uint32_t x_tile[kTiles];  // lane l: row l mod 8, channels 8·(l div 8) …; tokens past M repeat the last one
#pragma unroll
  for (int t = 0; t < kTiles; ++t) x_tile[t] = base + map.x + min(8 * t + lane % 8, p.m - 1) * p.x_pitch + lane / 8 * 16;

  float* part = reinterpret_cast<float*>(shared + map.part);
  const float* inbox = reinterpret_cast<const float*>(shared + map.inbox);
  const int inbox_floats = 8 * kTiles * kInboxPitch;
  const int rank_rows = (gpu_tile::kRows + p.split - 1) / p.split;
  const int own_rows = max(0, min(rank_rows, gpu_tile::kRows - rank * rank_rows));

  const auto write_part = [&](const Sums<kTiles>& acc) {
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
  };
  const auto sum_of_quarters = [&](int token, int row) {
    float sum = part[token * kPartPitch + row];
#pragma unroll
    for (int q = 1; q < kQuarters; ++q) sum += part[(q * 8 * kTiles + token) * kPartPitch + row];
    return sum;
  };
  const auto send_part = [&](int buffer) {
    if (threadIdx.x == 0) ptx::barrier_arrive_expect(inbox_full(buffer), p.split * p.m * own_rows * 4);
    for (int e = threadIdx.x; e < p.m * gpu_tile::kRows; e += kConsumers) {
      const int token = e / gpu_tile::kRows, row = e % gpu_tile::kRows;
      const int owner = row / rank_rows;
      const int at = buffer * inbox_floats + (rank * p.m + token) * rank_rows + row % rank_rows;
      ptx::send(ptx::map_to_rank(base + map.inbox + at * 4, owner), sum_of_quarters(token, row),
                ptx::map_to_rank(inbox_full(buffer), owner));
    }
  };
  const auto finish = [&](int tile, int buffer, std::uint32_t parity) {
    ptx::barrier_wait_cluster(inbox_full(buffer), parity);
    for (int e = threadIdx.x; e < p.m * rank_rows; e += kConsumers) {
      const int own = e % rank_rows;
      const int row = tile * gpu_tile::kRows + rank * rank_rows + own;
      if (own >= own_rows || row >= p.n) continue;
      float sum = 0.0f;
      for (int r = 0; r < p.split; ++r) sum += inbox[buffer * inbox_floats + r * p.m * rank_rows + e];
      p.epilogue.store(e / rank_rows, row, sum);
    }
  };
  const auto store_part = [&](int tile) {
    for (int e = threadIdx.x; e < p.m * gpu_tile::kRows; e += kConsumers) {
      const int row = tile * gpu_tile::kRows + e % gpu_tile::kRows;
      if (row < p.n) p.epilogue.store(e / gpu_tile::kRows, row, sum_of_quarters(e / gpu_tile::kRows, e % gpu_tile::kRows));
    }
  };

  Unpack<Act, kBits> fixed;
  fixed.set(p.format.zero_base, p.format.zero_base);
  int turn = 0;  // tiles done
  for (int tile = first_tile; tile < p.tiles; tile += clusters, ++turn) {
    Sums<kTiles> acc = {};
    const int first = (quarter + kQuarters - turn * slice % kQuarters) % kQuarters;
    Cursor from = Cursor::at(turn * slice + first, p.stages);
    std::uint32_t x[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) x[t] = x_tile[t] + first * gpu_tile::kChannels * 2;
    for (int r = first; r < slice; r += kQuarters) {
      ptx::barrier_wait(full(from.stage), from.parity);
      multiply_record<kTiles, Act, kBits>(p.format, fixed, base + from.stage * p.record_bytes, x, half, acc);
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(empty(from.stage));
      from.advance(kQuarters, p.stages);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) x[t] += kQuarters * gpu_tile::kChannels * 2;
    }

    write_part(acc);
    ptx::named_barrier(1, kConsumers);
    if (p.split == 1) {
      store_part(tile);
    } else {
      // The buffer of turn − 2 is free: every rank emptied it before it sent turn − 1, which has arrived here once finish returns.
      if (turn > 0) finish(tile - clusters, (turn - 1) & 1, (turn - 1) >> 1 & 1);
      send_part(turn & 1);
    }
    ptx::named_barrier(1, kConsumers);  // the parts have been read
  }
  if (p.split > 1 && turn > 0) finish(first_tile + (turn - 1) * clusters, (turn - 1) & 1, (turn - 1) >> 1 & 1);
}

using Kernel = void (*)(Params);

template <class Act, int kBits>
Kernel kernel_for(int token_tiles) {
  switch (token_tiles) {
    case 1: return decode_sm90_kernel<1, Act, kBits>;
    case 2: return decode_sm90_kernel<2, Act, kBits>;
    default: return decode_sm90_kernel<4, Act, kBits>;
  }
}

int token_tiles(int m) { return m <= 8 ? 1 : m <= 16 ? 2 : 4; }

Kernel kernel_for(const DecodeTask& task) {
  const int tiles = token_tiles(task.m);
  const bool four = task.weight.geometry.bits == 4;
  if (task.act == Float::bf16) return four ? kernel_for<__nv_bfloat16, 4>(tiles) : kernel_for<__nv_bfloat16, 8>(tiles);
  return four ? kernel_for<__half, 4>(tiles) : kernel_for<__half, 8>(tiles);
}

/// Bytes between tokens of a CTA's slice of x: 16 more than a multiple of 128, so that ldmatrix finds 8 tokens in 8 different bank
/// groups.
int x_pitch(int records, int split) { return (records + split - 1) / split * gpu_tile::kChannels * 2 + 16; }

constexpr int kReserved = 1024;           // of every CTA, by the driver
constexpr int kSharedPerSm = 228 * 1024;  // sm_90
constexpr int kMostShared = kSharedPerSm - kReserved;
constexpr int kHalfShared = kSharedPerSm / 2 - kReserved;
/// A ring of this size keeps a memory pipe full: 34 B/ns per SM × 1 µs, and a margin for the reduction between tiles.
constexpr int kEnoughRing = 48 * 1024;
constexpr int kLeastRing = 24 * 1024;
constexpr int kGridOfAllSms = 128;
/// Channels of a slice whose x still fits beside a ring at M = 16. More tokens of a longer slice take two launches.
constexpr int kSliceChannels = 4864;
/// What a row tile costs beside its records, in records: warps waiting for the slowest, the sums, and the cluster's.
constexpr double kTileCost = 3.0, kSplitTileCost = 6.0;

struct LaunchShape {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2];
  LaunchShape(int grid, int split, int smem, cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(split), 1, 1};
    config.gridDim = dim3(static_cast<unsigned>(grid));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = static_cast<std::size_t>(smem);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
  }
};

/// Clusters that can be resident with one CTA per SM.
cudaError_t resident_clusters(Kernel kernel, int split, int& clusters) {
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared)) return e;
  LaunchShape shape(split, split, kMostShared, nullptr);
  return cudaOccupancyMaxActiveClusters(&clusters, kernel, &shape.config);
}

}  // namespace

cudaError_t configure_decode_sm90(const DecodeTask& task, DecodeConfig& config) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || task.m > kDecodeMaxTokens || geo.n < 1 || geo.k < 1 || task.act == Float::f32) return cudaErrorInvalidValue;
  const int tiles = geo.tiles(), records = geo.records();

  // The split does not depend on M: the sums of a row do depend on it. Rounds of tiles × records of a slice is what the busiest
  // CTA reads; a small constant per tile stands for the reduction.
  const Kernel kernel = kernel_for(task);
  double best = 0;
  int chosen = 0, clusters = 0;
  for (int split = 1; split <= kMaxSplit; ++split) {
    if (config.split != 0 && split != config.split) continue;
    const int slice = (records + split - 1) / split;
    if (config.split == 0 && split < kMaxSplit && slice * gpu_tile::kChannels > kSliceChannels) continue;
    int resident = 0;
    if (const cudaError_t e = resident_clusters(kernel, split, resident)) return e;
    if (resident < 1) continue;
    const int rounds = (tiles + resident - 1) / resident;
    const double cost = rounds * (slice + (split > 1 ? kSplitTileCost : kTileCost));
    if (chosen == 0 || cost < best) {
      best = cost;
      chosen = split;
      clusters = std::min(tiles, resident);
    }
  }
  if (chosen == 0) return cudaErrorInvalidConfiguration;
  config.split = chosen;
  if (config.grid == 0) config.grid = clusters * chosen;

  const int pitch = x_pitch(records, chosen);
  const auto stages_in = [&](int bytes, int m) {
    const auto total = [&](int stages) { return shared_map(stages, geo.record_bytes(), m, pitch, token_tiles(m)).total; };
    int stages = (bytes - total(0)) / geo.record_bytes();
    while (stages > 0 && total(stages) > bytes) --stages;
    return std::max(stages, 0) / kQuarters * kQuarters;
  };
  if (config.tokens == 0) config.tokens = task.m;
  if (config.stages == 0) {
    for (;; config.tokens = (config.tokens + 1) / 2) {
      // Half an SM's shared memory lets the next kernel's ring fill while this one computes. Measured: a gain for pairs that
      // cover the GPU, a loss elsewhere, because two CTAs of the next kernel then share an SM that this one left idle.
      const bool half = chosen == 2 && config.grid >= kGridOfAllSms;
      config.stages = stages_in(config.smem != 0 ? config.smem : half ? kHalfShared : kMostShared, config.tokens);
      if (config.smem == 0 && half && config.stages * geo.record_bytes() < kEnoughRing)
        config.stages = stages_in(kMostShared, config.tokens);
      if (config.stages * geo.record_bytes() >= kLeastRing) break;
      if (config.tokens == 1) return cudaErrorInvalidConfiguration;
    }
  }
  config.smem = shared_map(config.stages, geo.record_bytes(), config.tokens, pitch, token_tiles(config.tokens)).total;
  return cudaSuccess;
}

cudaError_t decode_sm90(const DecodeTask& task, const DecodeConfig& config, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  Params p{};
  p.records = static_cast<const std::uint8_t*>(task.weight.records);
  p.x_stride = task.x_stride;
  p.n = static_cast<int>(geo.n);
  p.k = static_cast<int>(geo.k);
  p.tiles = geo.tiles();
  p.tile_records = geo.records();
  p.record_bytes = geo.record_bytes();
  p.stages = config.stages;
  p.x_pitch = x_pitch(geo.records(), config.split);
  p.split = config.split;
  p.format = record_format(task.weight);
  p.epilogue = decode_epilogue(task);
  LaunchShape shape(config.grid, config.split, config.smem, stream);
  for (int done = 0; done < task.m; done += config.tokens) {
    DecodeTask part = task;
    part.m = std::min(config.tokens, task.m - done);
    p.m = part.m;
    p.x = static_cast<const std::uint16_t*>(task.x) + done * task.x_stride;
    p.epilogue.d = static_cast<std::uint8_t*>(task.d) + done * task.d_stride * (task.out == Float::f32 ? 4 : 2);
    if (const cudaError_t e = cudaLaunchKernelEx(&shape.config, kernel_for(part), p)) return e;
  }
  return cudaSuccess;
}

}  // namespace nibble::cuda
