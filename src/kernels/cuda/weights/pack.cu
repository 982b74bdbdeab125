// A CTA makes a record.
//
//   1. codes: 64 rows × 128 channels → shared memory, a warp a row, so that reads are whole lines; absent ones become zeros
//   2. a thread collects the codes of a 16-byte vector and stores it as the kernels will load it
//   3. a thread a row copies scales and zeros to their places in the slots
#include "kernels/cuda/weights/pack.hpp"

#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/fragment.cuh"

namespace nibble::cuda {
namespace {

using gpu_tile::kChannels;
using gpu_tile::kRows;

constexpr int kThreads = 256;
/// Bytes between rows in shared memory: a vector's lanes read 8 rows and 4 neighbours of each, a word apart then.
constexpr int kPitch = kChannels + 4;

struct Params {
  gpu_tile::Geometry geometry;
  const std::uint8_t* codes;
  const std::uint8_t* scales;
  const std::uint8_t* zeros;
  const std::int32_t* perm;
  std::uint8_t* records;
  std::int64_t group_n, group_k;      // 0: the whole dimension
  std::int64_t groups;                // along K
  std::uint8_t code_flip, zero_flip;  // stored unsigned
};

__device__ __forceinline__ void load_codes(const Params& p, int tile, int record, std::uint8_t* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = static_cast<int>(threadIdx.x) / 32; row < kRows; row += kThreads / 32) {
    const std::int64_t n = static_cast<std::int64_t>(tile) * kRows + row;
#pragma unroll
    for (int c = lane; c < kChannels; c += 32) {
      const std::int64_t k = static_cast<std::int64_t>(record) * kChannels + c;
      std::uint8_t code = 0;
      if (n < p.geometry.n && k < p.geometry.k)
        code = __ldg(p.codes + n * p.geometry.k + (p.perm != nullptr ? __ldg(p.perm + k) : k)) ^ p.code_flip;
      shared[row * kPitch + c] = code;
    }
  }
}

template <int kBits>
__device__ __forceinline__ void store_codes(const std::uint8_t* shared, std::uint8_t* record) {
  constexpr int kCodes = 32 / kBits;  // of a word
  constexpr int kBlocksAVector = gpu_tile::step_channels(kBits) / gpu_tile::kFragmentChannels;
  constexpr int kVectors = kRows * kChannels * kBits / 8 / gpu_tile::kVectorBytes;
  for (int v = static_cast<int>(threadIdx.x); v < kVectors; v += kThreads) {
    const int lane = v % gpu_tile::kLanes, fragment = v / gpu_tile::kLanes % gpu_tile::kFragments;
    const int step = v / gpu_tile::kLanes / gpu_tile::kFragments;
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = 0;
#pragma unroll
      for (int c = 0; c < kCodes; ++c) {  // 4 bits: all of a block; 8 bits: a0 and a1, or a2 and a3
        const int block = step * kBlocksAVector + i * kBlocksAVector / 4, half = c % 2;
        const int a = kBits == 4 ? c / 2 : i % 2 * 2 + c / 2;
        words[i] |= static_cast<std::uint32_t>(shared[row_of(fragment, lane, a) * kPitch + channel_of(block, lane, a, half)])
                    << code_shift(kBits, a, half);
      }
    }
    *reinterpret_cast<uint4*>(record + gpu_tile::vector_offset(step, fragment, lane)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

/// Copies element `from`, of 0, 1, 2 or 4 bytes, or writes zeros when it is absent.
__device__ __forceinline__ void copy_element(std::uint8_t* to, const std::uint8_t* column, std::int64_t from, int bytes,
                                             bool present) {
  switch (bytes) {
    case 1: *to = present ? column[from] : std::uint8_t{0}; break;
    case 2:
      *reinterpret_cast<std::uint16_t*>(to) = present ? reinterpret_cast<const std::uint16_t*>(column)[from] : std::uint16_t{0};
      break;
    case 4: *reinterpret_cast<std::uint32_t*>(to) = present ? reinterpret_cast<const std::uint32_t*>(column)[from] : 0u; break;
    default: break;
  }
}

__device__ __forceinline__ void store_slots(const Params& p, int tile, int record, std::uint8_t* to) {
  const gpu_tile::Geometry& geo = p.geometry;
  for (int i = static_cast<int>(threadIdx.x); i < geo.slots() * kRows; i += kThreads) {
    const int slot = i / kRows, row = i % kRows, position = gpu_tile::slot_position(row);
    const std::int64_t n = static_cast<std::int64_t>(tile) * kRows + row;
    const std::int64_t k = static_cast<std::int64_t>(record) * kChannels + slot * geo.span;
    const bool present = n < geo.n && k < geo.k;
    const std::int64_t from = (p.group_n == 0 ? 0 : n / p.group_n) * p.groups + (p.group_k == 0 ? 0 : k / p.group_k);
    std::uint8_t* const zero = to + geo.zero_offset(slot) + position * geo.zero_bytes;
    copy_element(to + geo.scale_offset(slot) + position * geo.scale_bytes, p.scales, from, geo.scale_bytes, present);
    copy_element(zero, p.zeros, from, geo.zero_bytes, present);
    if (present && p.zero_flip != 0) *zero ^= p.zero_flip;
  }
}

__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ Params p) {
  __shared__ std::uint8_t codes[kRows * kPitch];
  const int block = static_cast<int>(blockIdx.x);
  const int tile = block / p.geometry.records(), record = block % p.geometry.records();
  std::uint8_t* const to = p.records + p.geometry.record(tile, record);
  load_codes(p, tile, record, codes);
  store_slots(p, tile, record, to);
  __syncthreads();
  if (p.geometry.bits == 4)
    store_codes<4>(codes, to);
  else
    store_codes<8>(codes, to);
}

}  // namespace

cudaError_t pack_gpu_tile(const gpu_tile::Geometry& geometry, const WeightScheme& scheme, DType zero_type,
                          const std::uint8_t* codes, const void* scales, const void* zeros, const std::int32_t* perm,
                          void* records, cudaStream_t stream) {
  const std::int64_t blocks = static_cast<std::int64_t>(geometry.tiles()) * geometry.records();
  if (geometry.n < 1 || geometry.k < 1) return cudaErrorInvalidValue;
  if (blocks > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  Params p{};
  p.geometry = geometry;
  p.codes = codes;
  p.scales = static_cast<const std::uint8_t*>(scales);
  p.zeros = static_cast<const std::uint8_t*>(zeros);
  p.perm = perm;
  p.records = static_cast<std::uint8_t*>(records);
  p.group_n = scheme.group.n;
  p.group_k = scheme.group.k;
  p.groups = scheme.group.cols(geometry.k);
  p.code_flip = scheme.codes == DType::s8 ? 0x80 : 0;
  p.zero_flip = scheme.zero == ZeroKind::integer && zero_type == DType::s8 ? 0x80 : 0;
  return launch_after(pack_kernel, static_cast<unsigned>(blocks), kThreads, 0, stream, p);
}

}  // namespace nibble::cuda
