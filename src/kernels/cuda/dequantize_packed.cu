// A CTA takes a record apart: 64 rows × 128 channels.
//
//   1. codes, still packed, and slots, as f32, go to shared memory              16 bytes a lane; a quarter of what W would take
//   2. a lane owns 16 bytes of the output at a time, so that a warp writes whole lines:
//
//        [N,K]   V channels of a row        words of V/2 neighbouring lanes of its fragment: two codes each
//        [K,N]   V rows of a channel        words of the V lanes 4g+t, g = 0 … 7: one code each         V = 8, or 4 of f32
//
// Between fragments lie 32 bytes of nothing: fragments of the same t then stand in different banks, 8 columns of [K,N] apart.
//
// Exactness. (u − z) is a small integer, its product with s one f32 multiplication: what the definition's f64 gives once
// rounded, because f64 holds the product exactly. A zero that is no integer has no such shortcut and is computed in f64, as
// defined.
#include "kernels/cuda/dequantize_packed.hpp"

#include <limits>
#include <type_traits>

#include "kernels/cuda/fragment.cuh"

namespace nibble::cuda {
namespace {

using gpu_tile::kChannels;
using gpu_tile::kFragmentRows;
using gpu_tile::kFragments;
using gpu_tile::kRows;

constexpr int kThreads = 256;  // one 16-byte vector of 4-bit codes each
constexpr int kCtas = 4;       // an SM, at least: while one waits for its record the others write theirs
constexpr int kFragmentBytes = gpu_tile::kLanes * gpu_tile::kVectorBytes;
constexpr int kPad = 32;
constexpr int kMaxCodeBytes = kRows * kChannels;
constexpr int kMaxSlots = 4;

NIBBLE_HOST_DEVICE constexpr int padded(int offset) { return offset + offset / kFragmentBytes * kPad; }

struct Params {
  const std::uint8_t* records;
  const std::int32_t* perm;
  void* out;
  std::int64_t stride;
  gpu_tile::Geometry geometry;
  DType scale_type, zero_type;
  Zero zero;
  float zero_base, scale2;
  bool in_vectors;  // rows of `out` are aligned to 16 bytes
};

template <class Out>
inline constexpr int kPerVector = 16 / static_cast<int>(sizeof(Out));

/// A scale and what belongs to it: 2²³ + z for integer zeros, else the offset or zero.
using Slot = float2;

// --- phase 1 -----------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_record(const Params& p, const std::uint8_t* record, std::uint8_t* codes, Slot* slots) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int at = thread * 16; at < p.geometry.code_bytes(); at += kThreads * 16)
    *reinterpret_cast<uint4*>(codes + padded(at)) = __ldcs(reinterpret_cast<const uint4*>(record + at));
  for (int i = thread; i < p.geometry.slots() * kRows; i += kThreads) {
    const int slot = i / kRows, position = gpu_tile::slot_position(i % kRows);
    const std::uint8_t* const zeros = record + p.geometry.zero_offset(slot);
    Slot v;
    v.x = load_float(record + p.geometry.scale_offset(slot), position, p.scale_type);
    switch (p.zero) {
      case Zero::fixed: v.y = kMagic + p.zero_base; break;
      case Zero::integer: v.y = kMagic + (p.zero_base + static_cast<float>(zeros[position])); break;
      default: v.y = load_float(zeros, position, p.zero_type);
    }
    slots[i] = v;
  }
}

// --- a weight ----------------------------------------------------------------------------------------------------------------

/// QuantTensor::value of V codes, each with its slot: code(i), slot(i).
template <int V, class Code, class SlotOf>
__device__ __forceinline__ void weights(const Params& p, float (&w)[V], const Code& code, const SlotOf& slot) {
  if (p.zero == Zero::fixed || p.zero == Zero::integer) {
#pragma unroll
    for (int i = 0; i < V; ++i)
      w[i] = __fmul_rn(__fmul_rn(__uint_as_float(code(i) | kMagicBits) - slot(i).y, slot(i).x), p.scale2);
    return;
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const double q = __uint_as_float(code(i) | kMagicBits) - (kMagic + p.zero_base), s = slot(i).x, z = slot(i).y;
    const double v = p.zero == Zero::offset ? __dadd_rn(__dmul_rn(q, s), z) : __dmul_rn(__dadd_rn(q, -z), s);
    w[i] = __fmul_rn(__double2float_rn(v), p.scale2);
  }
}

// --- stores ------------------------------------------------------------------------------------------------------------------

template <class Out>
__device__ __forceinline__ Out convert(float v) {
  if constexpr (std::is_same_v<Out, __half>)
    return __float2half_rn(v);
  else if constexpr (std::is_same_v<Out, __nv_bfloat16>)
    return __float2bfloat16_rn(v);
  else
    return v;
}

template <class Out>
__device__ __forceinline__ void store_vector(Out* to, const float (&w)[kPerVector<Out>]) {
  alignas(16) Out v[kPerVector<Out>];
#pragma unroll
  for (int i = 0; i < kPerVector<Out>; ++i) v[i] = convert<Out>(w[i]);
  __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(v));
}

// --- phase 2 -----------------------------------------------------------------------------------------------------------------

/// Rows of W, V channels a lane.
template <class Out>
__device__ __forceinline__ void write_rows(const Params& p, int tile, int record, const std::uint8_t* codes,
                                           const Slot* slots) {
  constexpr int V = kPerVector<Out>;
  constexpr int kAcross = kChannels / V;            // lanes of a row: a half or a whole warp
  constexpr int kRowsAtOnce = kThreads / kAcross;   // 16 or 8: of each fragment, all or those of one register
  const int thread = static_cast<int>(threadIdx.x), bits = p.geometry.bits;
  const int channel = thread % kAcross * V, row0 = thread / kAcross;
  const int t = channel % 8 / 2, high = channel % 16 / 8;  // high: registers a2 and a3
  const std::uint32_t mask = (1u << bits) - 1;
  const std::int64_t k = static_cast<std::int64_t>(record) * kChannels + channel, left = p.geometry.k - k;
  if (left <= 0) return;
  const Slot* const column = slots + channel / p.geometry.span * kRows;
  Out* const out = static_cast<Out*>(p.out);
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int h = 0; h < kFragmentRows / kRowsAtOnce; ++h) {
      const int row = f * kFragmentRows + h * kRowsAtOnce + row0, a = row % kFragmentRows / 8 + 2 * high;
      const std::int64_t n = static_cast<std::int64_t>(tile) * kRows + row;
      if (n >= p.geometry.n) return;
      std::uint32_t words[V / 2];
#pragma unroll
      for (int i = 0; i < V / 2; ++i)
        words[i] = *reinterpret_cast<const std::uint32_t*>(
            codes + padded(word_offset(bits, channel / gpu_tile::kFragmentChannels, f, row % 8 * 4 + t, a)) +
            i * gpu_tile::kVectorBytes);
      const Slot slot = column[row];
      const int low = code_shift(bits, a, 0), step = code_shift(bits, a, 1) - low;
      float w[V];
      weights<V>(
          p, w, [&](int i) { return words[i / 2] >> (low + i % 2 * step) & mask; }, [&](int) { return slot; });
      if (p.in_vectors && p.perm == nullptr && left >= V) {
        store_vector<Out>(out + n * p.stride + k, w);
      } else {
#pragma unroll
        for (int i = 0; i < V; ++i)
          if (i < left) out[n * p.stride + (p.perm != nullptr ? __ldg(p.perm + k + i) : k + i)] = convert<Out>(w[i]);
      }
    }
  }
}

/// Columns of W, V rows a lane.
template <class Out>
__device__ __forceinline__ void write_columns(const Params& p, int tile, int record, const std::uint8_t* codes,
                                              const Slot* slots) {
  constexpr int V = kPerVector<Out>;
  constexpr int kAcross = kRows / V;                   // lanes of a channel
  constexpr int kChannelsAtOnce = kThreads / kAcross;  // 32 or 16
  const int thread = static_cast<int>(threadIdx.x), bits = p.geometry.bits;
  const int row = thread % kAcross * V, channel0 = thread / kAcross;
  const int a = row % kFragmentRows / 8 + channel0 % 16 / 8 * 2, lane = row % 8 * 4 + channel0 % 8 / 2;
  const int shift = code_shift(bits, a, channel0 % 2);
  const std::uint32_t mask = (1u << bits) - 1;
  const std::int64_t n = static_cast<std::int64_t>(tile) * kRows + row, left = p.geometry.n - n;
  if (left <= 0) return;
  Slot slot[V];
#pragma unroll 1  // as many loads are in flight as registers allow
  for (int j = 0; j < kChannels / kChannelsAtOnce; ++j) {
    const int channel = j * kChannelsAtOnce + channel0;
    const std::int64_t position = static_cast<std::int64_t>(record) * kChannels + channel;
    if (position >= p.geometry.k) return;
    if (j == 0 || p.geometry.span < kChannels) {
#pragma unroll
      for (int i = 0; i < V; ++i) slot[i] = slots[channel / p.geometry.span * kRows + row + i];
    }
    const std::uint8_t* const first =
        codes + padded(word_offset(bits, channel / gpu_tile::kFragmentChannels, row / kFragmentRows, lane, a));
    const auto code = [&](int i) {
      return *reinterpret_cast<const std::uint32_t*>(first + i * 4 * gpu_tile::kVectorBytes) >> shift & mask;
    };
    float w[V];
    weights<V>(p, w, code, [&](int i) { return slot[i]; });
    const std::int64_t k = p.perm != nullptr ? __ldg(p.perm + position) : position;
    Out* const to = static_cast<Out*>(p.out) + k * p.stride + n;
    if (p.in_vectors && left >= V) {
      store_vector<Out>(to, w);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (i < left) to[i] = convert<Out>(w[i]);
    }
  }
}

/// Neighbouring CTAs continue each other's rows of the output.
template <class Out, bool kTransposed>
__global__ void __launch_bounds__(kThreads, kCtas) dequantize_packed_kernel(const __grid_constant__ Params p) {
  __shared__ __align__(16) std::uint8_t codes[padded(kMaxCodeBytes)];
  __shared__ Slot slots[kMaxSlots * kRows];
  const int block = static_cast<int>(blockIdx.x);
  const int tile = kTransposed ? block % p.geometry.tiles() : block / p.geometry.records();
  const int record = kTransposed ? block / p.geometry.tiles() : block % p.geometry.records();
  load_record(p, p.records + p.geometry.record(tile, record), codes, slots);
  __syncthreads();
  if constexpr (kTransposed)
    write_columns<Out>(p, tile, record, codes, slots);
  else
    write_rows<Out>(p, tile, record, codes, slots);
}

// --- launch ------------------------------------------------------------------------------------------------------------------

template <class Out>
cudaError_t launch(Params& p, bool transposed, cudaStream_t stream) {
  const std::int64_t blocks = static_cast<std::int64_t>(p.geometry.tiles()) * p.geometry.records();
  if (blocks > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  p.in_vectors = reinterpret_cast<std::uintptr_t>(p.out) % 16 == 0 && p.stride % kPerVector<Out> == 0;
  const auto kernel = transposed ? dequantize_packed_kernel<Out, true> : dequantize_packed_kernel<Out, false>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t dequantize_packed(const DeviceWeight& weight, void* out, DType out_type, std::int64_t stride, bool transposed,
                              cudaStream_t stream) {
  const gpu_tile::Geometry& geo = weight.geometry;
  if (geo.n < 1 || geo.k < 1) return cudaErrorInvalidValue;
  Params p{};
  p.records = static_cast<const std::uint8_t*>(weight.records);
  p.perm = weight.perm;
  p.out = out;
  p.stride = stride;
  p.geometry = geo;
  p.scale_type = weight.scale_type;
  p.zero_type = weight.zero_type;
  p.zero = weight.zero;
  p.zero_base = weight.zero_base;
  p.scale2 = weight.scale2;
  switch (out_type) {
    case DType::f32: return launch<float>(p, transposed, stream);
    case DType::f16: return launch<__half>(p, transposed, stream);
    case DType::bf16: return launch<__nv_bfloat16>(p, transposed, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
