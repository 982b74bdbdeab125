// Four kernels; docs/kernels/cuda-dequantize.md has the measurements.
//
//   rows     [K,N] output: a lane owns the 16 output bytes of its columns in one row, without exchange between lanes
//   tile     [N,K] output: codes, zeros and scales of a tile go through shared memory while still packed (a quarter of the bytes
//            that transposing the output would move), a lane then owns 16 output bytes along K
//   gather   act-order: every row has its own scales and zeros, which a warp loads along N, where they are dense, for 8 rows at
//            once; [N,K] output crosses shared memory
//   generic  every shape, alignment and width: an element at a time, output transposed through shared memory
//
// A code becomes a number by OR-ing it into the mantissa of 1024 (half, ulp 1): two codes for one LOP3, since codes lie in both
// 16-bit halves of a word. (1024 + u) − (1024 + z) is exact in half; the product with s is one f32 multiplication, exact for 16-bit
// scales, and is then rounded once to the output type. Rows and tile are bound by memory anyway, so no case needs a faster path with its
// own proof of exactness.
#include "kernels/cuda/weights/dequantize.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/ptx.cuh"

namespace nibble::cuda {
namespace {

enum class ScaleType : int { f16, bf16, f32 };

/// The parameters of the kernels, passed by value.
struct Args {
  const std::uint32_t* qweight;
  const std::uint32_t* qzeros;
  const void* scales;
  const std::int32_t* g_idx;
  void* out;
  std::int64_t n, k, group;
  std::int64_t zero_words;  // a row of qzeros
  int bits;
  std::uint32_t zero_add;  // 1 for GPTQ v1
  ScaleType scale;
};

constexpr std::uint32_t kMagic = 0x64006400u;  // 1024 in both halves

__device__ __forceinline__ __half2 as_half2(std::uint32_t v) { return *reinterpret_cast<const __half2*>(&v); }

/// 1024 + code in both halves; `mask` is the code mask in both halves.
__device__ __forceinline__ std::uint32_t with_magic(std::uint32_t codes, std::uint32_t mask) { return (codes & mask) | kMagic; }

__device__ __forceinline__ float2 subtract(std::uint32_t code, std::uint32_t zero) {
  return __half22float2(__hsub2(as_half2(code), as_half2(zero)));
}

template <class Out>
inline constexpr int kPerVector = 16 / static_cast<int>(sizeof(Out));

template <class Out>
__device__ __forceinline__ Out convert(float v);
template <>
__device__ __forceinline__ float convert<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half convert<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 convert<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

template <class Out>
__device__ __forceinline__ std::uint32_t convert_pair(float a, float b) {
  static_assert(sizeof(Out) == 2);
  if constexpr (std::is_same_v<Out, __half>) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const std::uint32_t*>(&h);
  } else {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const std::uint32_t*>(&h);
  }
}

template <class Out>
__device__ __forceinline__ uint4 as_vector(const float (&v)[kPerVector<Out>]) {
  if constexpr (sizeof(Out) == 4)
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
  else
    return make_uint4(convert_pair<Out>(v[0], v[1]), convert_pair<Out>(v[2], v[3]), convert_pair<Out>(v[4], v[5]),
                      convert_pair<Out>(v[6], v[7]));
}

/// Evict-first: plain stores are up to 40 % slower for AWQ, most likely by pushing words that other blocks still need out of L2.
template <class Out>
__device__ __forceinline__ void store_vector(Out* p, const float (&v)[kPerVector<Out>]) {
  __stcs(reinterpret_cast<uint4*>(p), as_vector<Out>(v));
}

/// Two 16-bit scales.
__device__ __forceinline__ float2 scale_pair(std::uint32_t v, ScaleType type) {
  return type == ScaleType::f16 ? __half22float2(as_half2(v))
                                : make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

/// Count (4 or 8) scales from element `at`, which is a multiple of 4, as floats.
template <int Count>
__device__ __forceinline__ void load_scales(const void* scales, std::int64_t at, ScaleType type, float (&s)[Count]) {
  if (type == ScaleType::f32) {
    const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(scales) + at);
#pragma unroll
    for (int i = 0; i < Count / 4; ++i) {
      const float4 v = p[i];
      s[4 * i] = v.x, s[4 * i + 1] = v.y, s[4 * i + 2] = v.z, s[4 * i + 3] = v.w;
    }
    return;
  }
  const uint2* p = reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(scales) + at);
#pragma unroll
  for (int i = 0; i < Count / 4; ++i) {
    const uint2 v = p[i];
    const float2 a = scale_pair(v.x, type), b = scale_pair(v.y, type);
    s[4 * i] = a.x, s[4 * i + 1] = a.y, s[4 * i + 2] = b.x, s[4 * i + 3] = b.y;
  }
}

__device__ __forceinline__ float load_scale(const void* scales, std::int64_t at, ScaleType type) {
  if (type == ScaleType::f32) return __ldg(static_cast<const float*>(scales) + at);
  const std::uint32_t h = __ldg(static_cast<const std::uint16_t*>(scales) + at);
  return type == ScaleType::f16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(h))) : __uint_as_float(h << 16);
}

// --- rows: [K,N] --------------------------------------------------------------------------------------------------------------

constexpr int kRowsThreads = 256;
constexpr int kRowsWords = 16;  // words a lane has in flight

/// Zero points of the V columns of a lane as pairs (columns 2i, 2i + 1) of 1024 + z.
template <bool Awq, int V>
__device__ __forceinline__ void load_zeros(const Args& a, std::int64_t g, std::int64_t n, std::uint32_t (&z)[V / 2]) {
  const std::uint32_t* row = a.qzeros + g * a.zero_words;
  if constexpr (Awq) {
    const std::uint32_t word = __ldg(row + n / 8) >> (n % 8 * 2);  // columns 4…7 are nibbles 2, 6, 3, 7
#pragma unroll
    for (int i = 0; i < V / 2; ++i) z[i] = with_magic(word >> (4 * i), 0x000f000fu);
  } else {
    const std::uint32_t mask = (1u << a.bits) - 1;
    const std::int64_t bit = n * a.bits;
    const std::uint32_t low = __ldg(row + bit / 32);
    const std::uint32_t high = V * a.bits > 32 ? __ldg(row + bit / 32 + 1) : 0;
    std::uint64_t fields = ((static_cast<std::uint64_t>(high) << 32) | low) >> (bit % 32);
#pragma unroll
    for (int i = 0; i < V / 2; ++i) {
      const std::uint32_t even = (static_cast<std::uint32_t>(fields) + a.zero_add) & mask;
      const std::uint32_t odd = (static_cast<std::uint32_t>(fields >> a.bits) + a.zero_add) & mask;
      z[i] = even | odd << 16 | kMagic;
      fields >>= 2 * a.bits;
    }
  }
}

/// The group of the current row; changes for all lanes of a warp at once.
template <bool Awq, int V>
struct RowGroup {
  float s[V];
  std::uint32_t z[V / 2];
  std::int64_t g = -1, end = 0;

  __device__ __forceinline__ void at(const Args& a, std::int64_t k, std::int64_t n) {
    if (k < end) return;
    g = g < 0 ? k / a.group : g + 1;
    end = (g + 1) * a.group;
    load_scales<V>(a.scales, g * a.n + n, a.scale, s);
    load_zeros<Awq, V>(a, g, n, z);
  }
};

template <class Out, bool Awq>
__global__ void __launch_bounds__(kRowsThreads) rows_kernel(const Args a, std::int64_t n_tiles, int warp_rows) {
  constexpr int V = kPerVector<Out>;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t tile_n = blockIdx.x % n_tiles, tile_k = blockIdx.x / n_tiles;
  const std::int64_t n = (tile_n * 32 + lane) * V;
  const std::int64_t k0 = (tile_k * (kRowsThreads / 32) + warp) * warp_rows;
  if (n >= a.n || k0 >= a.k) return;
  Out* out = static_cast<Out*>(a.out) + k0 * a.n + n;
  RowGroup<Awq, V> group;

  if constexpr (Awq) {
    const std::int64_t row_words = a.n / 8;
    const std::uint32_t* in = a.qweight + k0 * row_words + n / 8;
    std::uint32_t w[kRowsWords];
#pragma unroll
    for (int j = 0; j < kRowsWords; ++j) w[j] = k0 + j < a.k ? __ldcs(in + j * row_words) : 0;
    const int shift = static_cast<int>(n % 8) * 2;
#pragma unroll
    for (int j = 0; j < kRowsWords; ++j) {
      if (k0 + j >= a.k) return;
      group.at(a, k0 + j, n);
      float v[V];
#pragma unroll
      for (int i = 0; i < V / 2; ++i) {
        const float2 d = subtract(with_magic(w[j] >> (shift + 4 * i), 0x000f000fu), group.z[i]);
        v[2 * i] = d.x * group.s[2 * i], v[2 * i + 1] = d.y * group.s[2 * i + 1];
      }
      store_vector<Out>(out + j * a.n, v);
    }
  } else {
    constexpr int kUnits = kRowsWords / V;  // rows of words
    const int bits = a.bits, per_word = 32 / bits;
    const std::uint32_t mask = ((1u << bits) - 1) * 0x00010001u;
    const std::uint32_t* in = a.qweight + k0 / per_word * a.n + n;
    const std::int64_t word_rows = (a.k + per_word - 1) / per_word - k0 / per_word;
    uint4 w[kUnits][V / 4];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < V / 4; ++i)
        if (u < word_rows) w[u][i] = __ldcs(reinterpret_cast<const uint4*>(in + u * a.n) + i);
    }
    std::int64_t k = k0;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Two columns' 16-bit halves side by side: their codes of one row are then 16 bits apart.
        std::uint32_t t[V / 2];
#pragma unroll
        for (int i = 0; i < V / 4; ++i) {
          t[2 * i] = __byte_perm(w[u][i].x, w[u][i].y, half == 0 ? 0x5410 : 0x7632);
          t[2 * i + 1] = __byte_perm(w[u][i].z, w[u][i].w, half == 0 ? 0x5410 : 0x7632);
        }
        for (int j = 0; j < per_word / 2; ++j, ++k, out += a.n) {
          if (k >= a.k) return;
          group.at(a, k, n);
          float v[V];
#pragma unroll
          for (int i = 0; i < V / 2; ++i) {
            const float2 d = subtract(with_magic(t[i], mask), group.z[i]);
            v[2 * i] = d.x * group.s[2 * i], v[2 * i + 1] = d.y * group.s[2 * i + 1];
            t[i] >>= bits;
          }
          store_vector<Out>(out, v);
        }
      }
    }
  }
}

// --- tile: [N,K] --------------------------------------------------------------------------------------------------------------

constexpr int kTileN = 128;
constexpr int kStrip = 4;          // 1: 2 % slower from AWQ; 2, 8 and 16: within 1 %
constexpr int kTileThreads = 128;  // a warp owns 32 channels and all of the tile's K
constexpr int kMinTileGroup = 32;

template <class Out>
inline constexpr int kTileK = 32 * kPerVector<Out>;
/// Groups a tile can touch: its first may begin before it.
template <class Out>
inline constexpr int kTileGroups = (kTileK<Out> - 1) / kMinTileGroup + 2;

__device__ __forceinline__ void copy_async16(void* shared, const void* global) {
  ptx::async_copy16(ptx::shared_address(shared), global);
}
__device__ __forceinline__ void copy_async4(void* shared, const void* global) {
  ptx::async_copy4(ptx::shared_address(shared), global);
}

/// The place of 16-byte chunk `c` (of 4) of row `row` of AWQ words: lane l reads rows V·l + j, so l picks both the chunk and which of two
/// neighbouring rows, and 8 lanes meet 8 different bank groups.
template <int V>
__device__ __forceinline__ int awq_chunk(int row, int c) {
  const int l = row / V;
  return (row ^ ((l >> 2) & 1)) * 4 + (c ^ (l & 3));
}

template <class Out, bool Awq>
__global__ void __launch_bounds__(kTileThreads) tile_kernel(const Args a, std::int64_t k_tiles, int code_bytes) {
  constexpr int V = kPerVector<Out>;
  extern __shared__ uint4 shared[];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // Blocks walk K within strips of kStrip tiles of N: those share 128-byte lines of AWQ words, and neighbours in K extend the same
  // output rows.
  const std::int64_t n_tiles = (a.n + kTileN - 1) / kTileN, strip = blockIdx.x / (k_tiles * kStrip),
                     at = blockIdx.x - strip * k_tiles * kStrip;
  const std::int64_t width = min(static_cast<std::int64_t>(kStrip), n_tiles - strip * kStrip);
  const std::int64_t k0 = at / width * kTileK<Out>, n0 = (strip * kStrip + at % width) * kTileN;
  const int tile_k = static_cast<int>(min(static_cast<std::int64_t>(kTileK<Out>), a.k - k0));
  const int tile_n = static_cast<int>(min(static_cast<std::int64_t>(kTileN), a.n - n0));
  const int bits = Awq ? 4 : a.bits;

  const std::int64_t g0 = k0 / a.group;
  const int groups = static_cast<int>((k0 + tile_k - 1) / a.group - g0) + 1;
  const int scale_bytes = a.scale == ScaleType::f32 ? 4 : 2;
  uint4* const codes = shared;
  std::byte* const scales = reinterpret_cast<std::byte*>(shared) + code_bytes;
  std::uint32_t* const zeros = reinterpret_cast<std::uint32_t*>(scales + kTileGroups<Out> * kTileN * scale_bytes);
  constexpr int kZeroStride = Awq ? kTileN / 8 : kTileN / 4;  // words; 8-bit zero points are the widest

  // Everything the tile needs, in flight at once.
  if constexpr (Awq) {
    const std::int64_t row_words = a.n / 8;
    const std::uint32_t* in = a.qweight + k0 * row_words + n0 / 8;
    if (a.n % 32 == 0) {
      for (int i = thread; i < tile_k * 4; i += kTileThreads) {
        const int row = i / 4, c = i % 4;
        if (c * 32 < tile_n) copy_async16(codes + awq_chunk<V>(row, c), in + row * row_words + c * 4);
      }
    } else {  // rows of words are only 4-byte aligned
      for (int i = thread; i < tile_k * 16; i += kTileThreads) {
        const int row = i / 16, c = i % 16;
        if (c * 8 < tile_n)
          copy_async4(reinterpret_cast<std::uint32_t*>(codes + awq_chunk<V>(row, c / 4)) + c % 4, in + row * row_words + c);
      }
    }
  } else {
    const int rows = (tile_k * bits + 31) / 32, swizzle = V * bits == 64 ? 1 : 0;
    const std::uint32_t* in = a.qweight + k0 * bits / 32 * a.n + n0;
    for (int i = thread; i < rows * (kTileN / 4); i += kTileThreads) {
      const int row = i / (kTileN / 4), c = i % (kTileN / 4);
      if (c * 4 < tile_n) copy_async16(codes + row * (kTileN / 4) + (c ^ ((row >> swizzle) & 7)), in + row * a.n + c * 4);
    }
  }
  const int scale_chunks = kTileN * scale_bytes / 16;
  for (int i = thread; i < groups * scale_chunks; i += kTileThreads) {
    const int g = i / scale_chunks, c = i % scale_chunks;
    if (c * 16 / scale_bytes < tile_n)
      copy_async16(scales + i * 16, static_cast<const std::byte*>(a.scales) + ((g0 + g) * a.n + n0) * scale_bytes + c * 16);
  }
  const int zero_words = (tile_n * bits + 31) / 32;
  for (int i = thread; i < groups * kZeroStride; i += kTileThreads) {
    const int g = i / kZeroStride, c = i % kZeroStride;
    if (c < zero_words) copy_async4(zeros + i, a.qzeros + (g0 + g) * a.zero_words + n0 * bits / 32 + c);
  }
  ptx::async_copy_wait_all();
  __syncthreads();

  const std::int64_t k = k0 + lane * V;
  if (k >= a.k) return;
  const int g = static_cast<int>(k / a.group - g0);
  Out* out = static_cast<Out*>(a.out) + (n0 + warp * 32) * a.k + k;

  if constexpr (Awq) {
    std::uint32_t w[V][4];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const uint4 v = codes[awq_chunk<V>(lane * V + j, warp)];
      w[j][0] = v.x, w[j][1] = v.y, w[j][2] = v.z, w[j][3] = v.w;
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int n = warp * 32 + q * 8;
      if (n >= tile_n) return;
      const std::uint32_t zero = zeros[g * kZeroStride + n / 8];
      float s[8];
      load_scales<8>(scales, g * kTileN + n, a.scale, s);
#pragma unroll
      for (int i = 0; i < 4; ++i, out += 2 * a.k) {
        const std::uint32_t z = with_magic(zero >> (4 * i), 0x000f000fu);
        float even[V], odd[V];
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float2 d = subtract(with_magic(w[j][q] >> (4 * i), 0x000f000fu), z);
          even[j] = d.x * s[2 * i], odd[j] = d.y * s[2 * i + 1];
        }
        store_vector<Out>(out, even);
        store_vector<Out>(out + a.k, odd);
      }
    }
  } else {
    const std::uint32_t code_mask = (1u << bits) - 1, mask = code_mask * 0x00010001u;
    const int field = V * bits;  // bits of this lane's codes of one channel: 8, 16, 32 or 64
    const int row = lane * field / 32, shift = lane * field % 32, swizzle = field == 64 ? 1 : 0;
    const int chunk_row = row * (kTileN / 4), flip = (row >> swizzle) & 7;
    for (int c = warp * 8; c < warp * 8 + 8; ++c) {
      const int n = c * 4;
      if (n >= tile_n) return;
      const uint4 low4 = codes[chunk_row + (c ^ flip)];
      const uint4 high4 = field == 64 ? codes[chunk_row + kTileN / 4 + (c ^ flip)] : low4;
      const std::uint32_t low[4] = {low4.x, low4.y, low4.z, low4.w}, high[4] = {high4.x, high4.y, high4.z, high4.w};
      std::uint32_t zero = zeros[g * kZeroStride + n * bits / 32] >> (n * bits % 32);
      float s[4];
      load_scales<4>(scales, g * kTileN + n, a.scale, s);
#pragma unroll
      for (int m = 0; m < 4; ++m, out += a.k, zero >>= bits % 32) {
        const std::uint32_t z = ((zero + a.zero_add) & code_mask) * 0x00010001u | kMagic;
        // h[i] gets codes i and i + V/2, whatever the width: any pairing is free, as the floats are paired again when packed.
        std::uint32_t h[V / 2];
        if (field == 64) {
          const std::uint32_t t[2] = {__byte_perm(low[m], high[m], 0x5410), __byte_perm(low[m], high[m], 0x7632)};
#pragma unroll
          for (int i = 0; i < V / 2; ++i) h[i] = t[i / 2 % 2] >> (8 * (i % 2));
        } else {
          std::uint32_t t = low[m] >> shift;
          if (field < 32) t = (t & ((1u << field) - 1)) | t << (16 - field / 2);
#pragma unroll
          for (int i = 0; i < V / 2; ++i) h[i] = t >> (i * bits);
        }
        float v[V];
#pragma unroll
        for (int i = 0; i < V / 2; ++i) {
          const float2 d = subtract(with_magic(h[i], mask), z);
          v[i] = d.x * s[m], v[i + V / 2] = d.y * s[m];
        }
        store_vector<Out>(out, v);
      }
    }
  }
}

// --- gather: act-order --------------------------------------------------------------------------------------------------------

// A block takes its tile in steps along K, so that L1 still has groups of the first step. 8 rows of K and 4 channels a lane:
//
//           [K,N]                                 [N,K]
//   step    64 rows × 128 channels, 8 rows a warp     128 rows × 64 channels, 16 rows a warp
//   steps   2                                         2 (f32: 1): then the tile has 512 bytes of each output row
//
// 512 bytes in a row of each write: with 128 of them (64 rows a tile) it was 4 % slower.
constexpr int kGatherThreads = 256;
template <bool Transposed>
inline constexpr int kGatherLanes = Transposed ? 16 : 32;  // along N
template <bool Transposed>
inline constexpr int kGatherN = 4 * kGatherLanes<Transposed>;
template <bool Transposed>
inline constexpr int kGatherK = 8 * kGatherThreads / kGatherLanes<Transposed>;
template <class Out, bool Transposed>
inline constexpr int kGatherSteps = Transposed ? kPerVector<Out> / 4 : 2;

/// Two neighbouring fields of `x` as a pair, 16 bits apart; x has no other bits.
__device__ __forceinline__ std::uint32_t spread_pair(std::uint32_t x, int bits) { return x | x << (16 - bits); }

// The loads wait for g_idx and then for L1 or L2, so warps are what counts: the most blocks an SM takes without spills.
template <class Out, bool Transposed>
__global__ void __launch_bounds__(kGatherThreads, Transposed ? 3 : 4) gather_kernel(const Args a, std::int64_t k_blocks) {
  constexpr int V = kPerVector<Out>, kLanes = kGatherLanes<Transposed>, kN = kGatherN<Transposed>, kK = kGatherK<Transposed>;
  constexpr int kSteps = kGatherSteps<Out, Transposed>, kChunks = kSteps * kK / V;  // 16-byte chunks a row of the tile
  __shared__ uint4 tile[Transposed ? kN * kChunks : 1];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, octet = thread / kLanes;  // octet: of rows
  const std::int64_t n0 = blockIdx.x / k_blocks * kN, n = n0 + lane * 4, k0 = blockIdx.x % k_blocks * (kSteps * kK);
  const int bits = a.bits;
  const std::uint32_t code_mask = (1u << bits) - 1, mask = code_mask * 0x00010001u, pair_mask = (1u << 2 * bits) - 1;
  const std::uint32_t add = a.zero_add * 0x00010001u;
  const std::uint32_t* const zeros = a.qzeros + n * bits / 32;
  const int zero_shift = static_cast<int>(n * bits % 32);
  const std::uint16_t* const scales = static_cast<const std::uint16_t*>(a.scales) + n;
  const int row_scales = static_cast<int>(a.n), zero_words = static_cast<int>(a.zero_words);  // 32-bit factors: one instruction
  Out* const out = static_cast<Out*>(a.out);

#pragma unroll 1  // one step fills the registers with loads in flight
  for (int step = 0; step < kSteps; ++step) {
    const std::int64_t k = k0 + step * kK + octet * 8;
    if (n < a.n && k < a.k) {
      int group[8];
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const int4 g = __ldg(reinterpret_cast<const int4*>(a.g_idx + k + j));
        group[j] = g.x, group[j + 1] = g.y, group[j + 2] = g.z, group[j + 3] = g.w;
      }
      // Codes of columns (0, 1) and (2, 3) side by side, row j in the low bits of each half.
      const std::uint32_t* in = a.qweight + k * bits / 32 * a.n + n;
      const uint4 w0 = __ldcs(reinterpret_cast<const uint4*>(in));
      std::uint32_t code[8][2];
      if (bits == 8) {
        const uint4 w1 = __ldcs(reinterpret_cast<const uint4*>(in + a.n));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint4 w = j < 4 ? w0 : w1;
          const unsigned half = j % 4 < 2 ? 0x5410 : 0x7632;
          code[j][0] = __byte_perm(w.x, w.y, half) >> (8 * (j % 2)), code[j][1] = __byte_perm(w.z, w.w, half) >> (8 * (j % 2));
        }
      } else if (bits == 4) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const unsigned half = j < 4 ? 0x5410 : 0x7632;
          code[j][0] = __byte_perm(w0.x, w0.y, half) >> (4 * (j % 4)),
          code[j][1] = __byte_perm(w0.z, w0.w, half) >> (4 * (j % 4));
        }
      } else {
        const unsigned half = k % 16 == 0 ? 0x5410 : 0x7632;
#pragma unroll
        for (int j = 0; j < 8; ++j)
          code[j][0] = __byte_perm(w0.x, w0.y, half) >> (2 * j), code[j][1] = __byte_perm(w0.z, w0.w, half) >> (2 * j);
      }
      std::uint32_t zero[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) zero[j] = __ldg(zeros + static_cast<std::int64_t>(group[j]) * zero_words);
      uint2 scale[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        scale[j] = __ldg(reinterpret_cast<const uint2*>(scales + static_cast<std::int64_t>(group[j]) * row_scales));
#pragma unroll
      for (int part = 0; part < 8 / V; ++part) {
        float v[4][V];
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const int j = part * V + i;
          const float2 s01 = scale_pair(scale[j].x, a.scale), s23 = scale_pair(scale[j].y, a.scale);
          const std::uint32_t z = zero[j] >> zero_shift;
          const std::uint32_t z01 = with_magic((spread_pair(z & pair_mask, bits) & mask) + add, mask);
          const std::uint32_t z23 = with_magic((spread_pair((z >> 2 * bits) & pair_mask, bits) & mask) + add, mask);
          const float2 d01 = subtract(with_magic(code[j][0], mask), z01), d23 = subtract(with_magic(code[j][1], mask), z23);
          v[0][i] = d01.x * s01.x, v[1][i] = d01.y * s01.y, v[2][i] = d23.x * s23.x, v[3][i] = d23.y * s23.y;
        }
        if constexpr (Transposed) {
          const int chunk =
              ((step * kK + octet * 8) / V + part) ^ (lane & 7);  // lanes differ in n / 4, which picks the bank group
#pragma unroll
          for (int m = 0; m < 4; ++m) tile[(lane * 4 + m) * kChunks + chunk] = as_vector<Out>(v[m]);
        } else {
#pragma unroll
          for (int i = 0; i < V; ++i) {
            Out* row = out + (k + part * V + i) * a.n + n;
            if constexpr (sizeof(Out) == 4)
              __stcs(reinterpret_cast<float4*>(row), make_float4(v[0][i], v[1][i], v[2][i], v[3][i]));
            else
              __stcs(reinterpret_cast<uint2*>(row),
                     make_uint2(convert_pair<Out>(v[0][i], v[1][i]), convert_pair<Out>(v[2][i], v[3][i])));
          }
        }
      }
    }
  }
  if constexpr (Transposed) {
    __syncthreads();
    for (int i = thread; i < kN * kChunks; i += kGatherThreads) {
      const int row = i / kChunks, c = i % kChunks;
      if (n0 + row < a.n && k0 + c * V < a.k)
        __stcs(reinterpret_cast<uint4*>(out + (n0 + row) * a.k + k0) + c, tile[row * kChunks + (c ^ (row / 4 & 7))]);
    }
  }
}

// --- generic ------------------------------------------------------------------------------------------------------------------

constexpr int kGenericK = 64;
constexpr int kGenericN = 32;
constexpr int kGenericThreads = 256;

template <class Out, bool Transposed>
__global__ void __launch_bounds__(kGenericThreads) generic_kernel(const Args a, std::int64_t k_tiles, bool awq) {
  constexpr int kRows = kGenericK / (kGenericThreads / 32);
  constexpr int kPad = 4 / static_cast<int>(sizeof(Out));  // an odd number of words a row: no bank conflicts
  __shared__ Out tile[Transposed ? kGenericN : 1][kGenericK + kPad];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t k0 = blockIdx.x % k_tiles * kGenericK, n0 = blockIdx.x / k_tiles * kGenericN;
  const std::int64_t n = n0 + lane;
  Out* const out = static_cast<Out*>(a.out);

  if (n < a.n) {
    const int bits = a.bits;
    const std::uint32_t mask = (1u << bits) - 1;
    const auto field = [&](const std::uint32_t* words, std::int64_t stride, std::int64_t at) {  // `at` in a dense stream
      const std::int64_t bit = at * bits;
      const int shift = static_cast<int>(bit % 32);
      std::uint32_t v = __ldg(words + bit / 32 * stride) >> shift;
      if (shift + bits > 32) v |= __ldg(words + (bit / 32 + 1) * stride) << (32 - shift);
      return v & mask;
    };
    const auto awq_field = [&](const std::uint32_t* row) {
      const int j = static_cast<int>(n % 8);
      return (__ldg(row + n / 8) >> (4 * (j / 2 + j % 2 * 4))) & 15u;
    };
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int row = warp * kRows + j;
      const std::int64_t k = k0 + row;
      if (k >= a.k) break;
      const std::int64_t g = a.g_idx != nullptr ? __ldg(a.g_idx + k) : k / a.group;
      const std::uint32_t u = awq ? awq_field(a.qweight + k * a.zero_words) : field(a.qweight + n, a.n, k);
      const std::uint32_t* zero_row = a.qzeros + g * a.zero_words;
      const std::uint32_t z = awq ? awq_field(zero_row) : (field(zero_row, 1, n) + a.zero_add) & mask;
      const float s = load_scale(a.scales, g * a.n + n, a.scale);
      const Out v = convert<Out>(static_cast<float>(static_cast<int>(u) - static_cast<int>(z)) * s);
      if constexpr (Transposed)
        tile[lane][row] = v;
      else
        out[k * a.n + n] = v;
    }
  }
  if constexpr (Transposed) {
    __syncthreads();
    for (int r = warp; r < kGenericN && n0 + r < a.n; r += kGenericThreads / 32)
      for (int c = lane; c < kGenericK && k0 + c < a.k; c += 32) out[(n0 + r) * a.k + k0 + c] = tile[r][c];
  }
}

// --- choice and launch --------------------------------------------------------------------------------------------------------

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
bool aligned(const void* p, std::uintptr_t to) { return reinterpret_cast<std::uintptr_t>(p) % to == 0; }

std::int64_t group_of(const CheckpointWeight& w) { return w.group == 0 ? w.k : w.group; }

enum class Kernel { rows, tile, gather, generic };

Kernel choose(const CheckpointWeight& w, const void* out, DType out_type, WeightOrder order) {
  const std::int64_t vector = out_type == DType::f32 ? 4 : 8;
  const bool vectors = aligned(w.qweight, 16) && aligned(w.scales, 16) && aligned(out, 16) && w.n % 8 == 0;
  if (!vectors || w.bits == 3) return Kernel::generic;
  if (w.g_idx != nullptr) return w.k % 8 == 0 && w.scale != DType::f32 && aligned(w.g_idx, 16) ? Kernel::gather : Kernel::generic;
  if (order == WeightOrder::kn) return Kernel::rows;
  const std::int64_t group = group_of(w);
  const bool groups = group == w.k || (group >= kMinTileGroup && group % vector == 0);
  return groups && w.k % vector == 0 ? Kernel::tile : Kernel::generic;
}

template <class Out>
cudaError_t launch(const Args& a, Kernel kernel, bool awq, bool transposed, cudaStream_t stream) {
  const auto grid = [](std::int64_t blocks) { return static_cast<unsigned>(blocks); };
  switch (kernel) {
    case Kernel::rows: {
      const int warp_rows = awq ? kRowsWords : kRowsWords / kPerVector<Out> * (32 / a.bits);
      const std::int64_t n_tiles = ceil_div(a.n, 32 * kPerVector<Out>);
      const std::int64_t blocks = n_tiles * ceil_div(a.k, kRowsThreads / 32 * warp_rows);
      if (blocks > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
      return awq ? launch_after(rows_kernel<Out, true>, grid(blocks), kRowsThreads, 0, stream, a, n_tiles, warp_rows)
                 : launch_after(rows_kernel<Out, false>, grid(blocks), kRowsThreads, 0, stream, a, n_tiles, warp_rows);
    }
    case Kernel::tile: {
      const std::int64_t k_tiles = ceil_div(a.k, kTileK<Out>), blocks = k_tiles * ceil_div(a.n, kTileN);
      if (blocks > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
      const int code_bytes = kTileK<Out> * kTileN * a.bits / 8;
      const int scale_bytes = kTileGroups<Out> * kTileN * (a.scale == ScaleType::f32 ? 4 : 2);
      const int zero_bytes = kTileGroups<Out> * (awq ? kTileN / 2 : kTileN);
      const int bytes = code_bytes + scale_bytes + zero_bytes;
      return awq ? launch_after(tile_kernel<Out, true>, grid(blocks), kTileThreads, bytes, stream, a, k_tiles, code_bytes)
                 : launch_after(tile_kernel<Out, false>, grid(blocks), kTileThreads, bytes, stream, a, k_tiles, code_bytes);
    }
    case Kernel::gather: {
      const std::int64_t k_blocks = transposed ? ceil_div(a.k, kGatherK<true> * kGatherSteps<Out, true>)
                                               : ceil_div(a.k, kGatherK<false> * kGatherSteps<Out, false>);
      const std::int64_t blocks = k_blocks * ceil_div(a.n, transposed ? kGatherN<true> : kGatherN<false>);
      if (blocks > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
      return transposed ? launch_after(gather_kernel<Out, true>, grid(blocks), kGatherThreads, 0, stream, a, k_blocks)
                        : launch_after(gather_kernel<Out, false>, grid(blocks), kGatherThreads, 0, stream, a, k_blocks);
    }
    case Kernel::generic: {
      const std::int64_t k_tiles = ceil_div(a.k, kGenericK), blocks = k_tiles * ceil_div(a.n, kGenericN);
      if (blocks > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
      return transposed ? launch_after(generic_kernel<Out, true>, grid(blocks), kGenericThreads, 0, stream, a, k_tiles, awq)
                        : launch_after(generic_kernel<Out, false>, grid(blocks), kGenericThreads, 0, stream, a, k_tiles, awq);
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace

const char* dequantize_refusal(const CheckpointWeight& w, const void* out, DType out_type) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (w.n < 1 || w.k < 1 || w.n > kMax || w.k > kMax) return "N and K must be from 1 to 2^31 - 1";
  if (w.group < 0) return "the group size must be positive, or 0 for one group";
  if (w.qweight == nullptr || w.qzeros == nullptr || w.scales == nullptr || out == nullptr)
    return "qweight, qzeros, scales and out must not be null";
  if (w.scale != DType::f16 && w.scale != DType::bf16 && w.scale != DType::f32) return "scales must be f16, bf16 or f32";
  if (!is_compute_float(out_type)) return "the output must be f16, bf16 or f32";
  if (w.format == CheckpointFormat::awq) {
    if (w.bits != 4) return "AWQ has 4-bit codes";
    if (w.n % 8 != 0) return "AWQ has eight output channels a word: N must be a multiple of 8";
    if (w.g_idx != nullptr || w.zeros_minus_one) return "AWQ has neither act-order nor zero points stored less one";
  } else if (w.bits != 2 && w.bits != 3 && w.bits != 4 && w.bits != 8) {
    return "GPTQ has 2, 3, 4 or 8-bit codes";
  }
  if (!aligned(w.qweight, 4) || !aligned(w.qzeros, 4) || !aligned(w.g_idx, 4)) return "words must be 4-byte aligned";
  const auto element = [](DType t) { return static_cast<std::uintptr_t>(t == DType::f32 ? 4 : 2); };
  if (!aligned(w.scales, element(w.scale)) || !aligned(out, element(out_type)))
    return "scales and out must be aligned to elements";
  return nullptr;
}

const char* dequantize_kernel(const CheckpointWeight& w, const void* out, DType out_type, WeightOrder order) {
  switch (choose(w, out, out_type, order)) {
    case Kernel::rows: return "rows";
    case Kernel::tile: return "tile";
    case Kernel::gather: return "gather";
    default: return "generic";
  }
}

int dequantize(const CheckpointWeight& w, void* out, DType out_type, WeightOrder order, void* stream) {
  if (dequantize_refusal(w, out, out_type) != nullptr) return cudaErrorInvalidValue;
  const bool awq = w.format == CheckpointFormat::awq;
  const ScaleType scale = w.scale == DType::f16 ? ScaleType::f16 : w.scale == DType::bf16 ? ScaleType::bf16 : ScaleType::f32;
  const Args a{static_cast<const std::uint32_t*>(w.qweight),
               static_cast<const std::uint32_t*>(w.qzeros),
               w.scales,
               static_cast<const std::int32_t*>(w.g_idx),
               out,
               w.n,
               w.k,
               group_of(w),
               ceil_div(w.n * w.bits, 32),
               w.bits,
               w.zeros_minus_one ? 1u : 0u,
               scale};
  const Kernel kernel = choose(w, out, out_type, order);
  const bool transposed = order == WeightOrder::nk;
  const auto s = static_cast<cudaStream_t>(stream);
  switch (out_type) {
    case DType::f16: return launch<__half>(a, kernel, awq, transposed, s);
    case DType::bf16: return launch<__nv_bfloat16>(a, kernel, awq, transposed, s);
    default: return launch<float>(a, kernel, awq, transposed, s);
  }
}

}  // namespace nibble::cuda
