// A CTA dequantizes pieces of the weight, one after the other: 2 or 4 records, chosen so that a warp writes 512 consecutive bytes.
//
//     [N,K]   2 records along K                       [K,N]   4 (f32: 2) tiles along N
//
//             k → 128      128                                n → 64   64   64   64
//           ┌─────────┬─────────┐                           ┌────┬────┬────┬────┐
//      n 64 │ record  │ record  │  lane: V channels    k 128│    │    │    │    │  lane: V rows of a channel
//           └─────────┴─────────┘  of rows g and g+8        └────┴────┴────┴────┘              V = 8, or 4 of f32
//
//   1. codes, still packed, scales as f32 and zeros go from registers to shared memory
//   2. the loads of the next piece start; they must complete before the CTA returns to 1
//   3. a lane takes the codes of 16-byte pieces of the output from the words of
//
//        [N,K]   V/2 neighbouring lanes of its fragment: two codes of row g and two of g+8 each
//        [K,N]   the V lanes 4g+t, g = 0 … 7: four codes each, channels 2t, 2t+1, 2t+8, 2t+9
//
// Writes are four fifths of the traffic, and memory runs at half its speed with 128 bytes at strides of a row: hence 512.
//
// Slots of 8 and 16 channels have a kernel of their own, at the end: shared memory has no room for their scales.
//
// Exactness. A code OR-ed into the mantissa of 1024 in half precision is 1024 + u, and (1024 + u) − (1024 + z) is exact; its
// product with s is one f32 multiplication: what the definition's f64 gives once rounded, because f64 holds the product exactly.
// A zero that is no integer has no such shortcut and is computed in f64, as defined.
#include "kernels/cuda/weights/dequantize_packed.hpp"

#include <limits>
#include <type_traits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/weights/float_codes.cuh"

namespace nibble::cuda {
namespace {

using gpu_tile::kChannels;
using gpu_tile::kFragmentChannels;
using gpu_tile::kFragmentRows;
using gpu_tile::kRows;
using gpu_tile::kVectorBytes;

constexpr int kLanes = gpu_tile::kLanes;
constexpr int kThreadsAnSm = 1024;  // at 64 registers; what the smallest SM holds
constexpr int kFragmentBytes = kLanes * kVectorBytes;
constexpr int kMaxSlots = 4;
constexpr int kSlotCells = kMaxSlots * kRows;  // of a record

/// Fragments of the same t stand in different banks.
constexpr int kPad = 32;
NIBBLE_HOST_DEVICE constexpr int padded(int offset) { return offset + offset / kFragmentBytes * kPad; }

template <class Out>
inline constexpr int kPerVector = kVectorBytes / static_cast<int>(sizeof(Out));

/// The compile-time case: kReal means zeros that are no integers.
template <class Out_, Codes kCodes_, bool kTransposed_, bool kReal_>
struct Config {
  using Out = Out_;
  static constexpr Codes kCodes = kCodes_;
  static constexpr int kBits = gpu_tile::bits(kCodes);
  static constexpr bool kTransposed = kTransposed_, kReal = kReal_;
  static constexpr int V = kPerVector<Out>;
  static constexpr int kParts = kTransposed ? V / 2 : 2;  // records of a piece
  static constexpr int kThreads = 128 * kParts;
  static constexpr int kCtas = kThreadsAnSm / kThreads;
  static constexpr int kCodeBytes = kRows * kChannels * kBits / 8;
  static constexpr int kVectors = kCodeBytes / kVectorBytes * kParts / kThreads;  // a thread: 2 or 4
  static constexpr int kCells = kSlotCells * kParts / kThreads;                   // a thread: 2, unused where groups are long
  /// Whether the next piece's loads start before this one is written. 8-bit codes would take 16 more registers; there, other CTAs of the
  /// SM overlap instead.
  static constexpr bool kAhead = kBits == 4;
  static constexpr int kPitch = padded(kCodeBytes) + kVectorBytes;  // of records; 16 bytes: other banks
};

struct Params {
  const std::uint8_t* records;
  const std::int32_t* perm;
  void* out;
  std::int64_t stride;
  int n, k;
  std::int64_t part_bytes, down_bytes;  // from a record of a piece to the next, and to the one below in `out`
  int slots, slot_bytes, zeros_offset;  // of a record; of a slot
  int block_shift;                      // block >> this: its slot
  Codes codes;
  DType scale_type, zero_type;
  ZeroKind zero;
  float zero_base, scale2;
  int pieces, across, along;  // pieces in all and side by side along the rows of `out`; records there
  bool in_vectors;            // rows of `out` are aligned to 16 bytes
};

/// A piece: `count` records, the first of them number `along` in the direction of the rows of `out` and `down` across them.
struct Piece {
  int along, down, count;
};
/// Neighbouring CTAs continue each other's rows of the output.
template <class C>
__device__ __forceinline__ Piece piece(const Params& p, int index) {
  const int along = index % p.across * C::kParts;
  return {along, index / p.across, min(C::kParts, p.along - along)};
}

template <class C>
struct Shared {
  alignas(16) std::uint8_t codes[C::kParts * C::kPitch];
  /// Scales and zeros by (part, slot, row). A zero is the pair (1024 + z, 1024 + z) in half precision, or an f32 when it is no integer.
  alignas(16) float scales[C::kParts * kSlotCells];
  alignas(16) std::uint32_t zeros[C::kParts * kSlotCells];
};

// --- pairs of codes ----------------------------------------------------------------------------------------------------------

/// 1024 in half precision: its unit in the last place is 1, so that a code of up to 8 bits OR-ed into the mantissa is 1024 + code.
constexpr float kHalfMagic = 1024.0f;
constexpr std::uint32_t kHalfMagicBits = 0x64006400u;

/// Both codes of a pair, which are the bits of `mask` in `a`: 1024 + u each, by one LOP3, or the values of floats.
template <Codes kCodes>
__device__ __forceinline__ std::uint32_t as_halves(std::uint32_t a, std::uint32_t mask) {
  if constexpr (gpu_tile::are_floats(kCodes))
    return values<__half, kCodes>(placed<__half, kCodes>(a << (16 - gpu_tile::bits(kCodes))));
  else
    return (a & mask) | kHalfMagicBits;
}
__device__ __forceinline__ __half2 as_half2(std::uint32_t v) { return *reinterpret_cast<const __half2*>(&v); }
/// An integer of up to 11 bits as a pair.
__device__ __forceinline__ std::uint32_t twice(float v) {
  return static_cast<std::uint32_t>(__half_as_ushort(__float2half_rn(v))) * 0x00010001u;
}

// --- phases 1 and 2 ----------------------------------------------------------------------------------------------------------

/// A thread's share of a piece, in flight to shared memory.
template <class C>
struct InFlight {
  uint4 codes[C::kVectors];
  std::uint32_t scales[C::kCells], zeros[C::kCells];  // as stored
};

__device__ __forceinline__ std::uint32_t load_bits(const std::uint8_t* p, int i, DType type) {
  if (type == DType::f32) return __ldcs(reinterpret_cast<const std::uint32_t*>(p) + i);
  return __ldcs(reinterpret_cast<const std::uint16_t*>(p) + i);
}
__device__ __forceinline__ float number(std::uint32_t bits, DType type) {
  return type == DType::f32 ? __uint_as_float(bits) : half_of(bits, 0, type);
}

template <class C>
__device__ __forceinline__ void load(const Params& p, const Piece& piece, InFlight<C>& v) {
  constexpr int kPartVectors = C::kCodeBytes / kVectorBytes;
  const int thread = static_cast<int>(threadIdx.x);
  const std::uint8_t* const first = p.records + piece.along * p.part_bytes + piece.down * p.down_bytes;
#pragma unroll
  for (int i = 0; i < C::kVectors; ++i) {
    const int at = thread + i * C::kThreads, part = at / kPartVectors;
    v.codes[i] = make_uint4(0, 0, 0, 0);
    if (part < piece.count) v.codes[i] = __ldcs(reinterpret_cast<const uint4*>(first + part * p.part_bytes) + at % kPartVectors);
  }
#pragma unroll
  for (int i = 0; i < C::kCells; ++i) {
    const int at = thread + i * C::kThreads, part = at / kSlotCells, slot = at % kSlotCells / kRows;
    v.scales[i] = v.zeros[i] = 0;
    if (part >= piece.count || slot >= p.slots) continue;
    const std::uint8_t* const scales = first + part * p.part_bytes + (C::kCodeBytes + slot * p.slot_bytes);
    const std::uint8_t* const zeros = scales + p.zeros_offset;
    const int position = gpu_tile::slot_position(at % kRows);
    v.scales[i] = load_bits(scales, position, p.scale_type);
    if constexpr (C::kReal)
      v.zeros[i] = load_bits(zeros, position, p.zero_type);
    else if (p.zero == ZeroKind::integer)
      v.zeros[i] = __ldcs(zeros + position);
  }
}

template <class C>
__device__ __forceinline__ void keep(const Params& p, const InFlight<C>& v, Shared<C>& shared) {
  constexpr int kPartVectors = C::kCodeBytes / kVectorBytes;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < C::kVectors; ++i) {
    const int at = thread + i * C::kThreads;
    *reinterpret_cast<uint4*>(shared.codes + at / kPartVectors * C::kPitch + padded(at % kPartVectors * kVectorBytes)) =
        v.codes[i];
  }
#pragma unroll
  for (int i = 0; i < C::kCells; ++i) {
    const int at = thread + i * C::kThreads;
    if (at % kSlotCells / kRows >= p.slots) continue;
    shared.scales[at] = number(v.scales[i], p.scale_type);
    if constexpr (C::kReal)
      shared.zeros[at] = __float_as_uint(number(v.zeros[i], p.zero_type));
    else
      shared.zeros[at] = twice(kHalfMagic + (p.zero_base + static_cast<float>(v.zeros[i])));
  }
}

// --- weights -----------------------------------------------------------------------------------------------------------------

/// QuantTensor::value of a code whose zero is no integer; `code` is u − zero_base.
__device__ __forceinline__ float real_value(const Params& p, double code, double scale, double zero) {
  const double v =
      p.zero == ZeroKind::offset ? __dadd_rn(__dmul_rn(code, scale), zero) : __dmul_rn(__dadd_rn(code, -zero), scale);
  return __fmul_rn(__double2float_rn(v), p.scale2);
}
/// The same of a code whose zero has been subtracted.
__device__ __forceinline__ float value(const Params& p, float code, float scale) {
  return __fmul_rn(__fmul_rn(code, scale), p.scale2);
}

/// QuantTensor::value of two codes, as 1024 + u each, or as floats. `minus` is a pair as well, for integers: 1024 + z, or 1024 + zero_base
/// for real zeros.
template <class C>
__device__ __forceinline__ float2 weights(const Params& p, std::uint32_t codes, std::uint32_t minus, float2 scale, float2 zero) {
  const float2 q = __half22float2(gpu_tile::are_floats(C::kCodes) ? as_half2(codes) : __hsub2(as_half2(codes), as_half2(minus)));
  if constexpr (C::kReal)
    return make_float2(real_value(p, q.x, scale.x, zero.x), real_value(p, q.y, scale.y, zero.y));
  else
    return make_float2(value(p, q.x, scale.x), value(p, q.y, scale.y));
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

// --- phase 3 -----------------------------------------------------------------------------------------------------------------

/// Rows of W, V channels of rows g and g+8 a lane.
template <class C>
__device__ __forceinline__ void write_rows(const Params& p, const Piece& piece, const Shared<C>& shared) {
  using Out = typename C::Out;
  constexpr int V = C::V, kBits = C::kBits;
  constexpr int kAcross = C::kParts * kChannels / V;  // lanes of a row: one or two warps
  constexpr int kAtOnce = C::kThreads / kAcross;      // values of g: 8 or 4
  const int thread = static_cast<int>(threadIdx.x), g0 = thread / kAcross;
  const int part = thread % kAcross * V / kChannels, channel = thread % kAcross * V % kChannels;
  const int t = channel % 8 / 2, high = channel % 16 / 8;  // high: registers a2 and a3
  const int k = (piece.along + part) * kChannels + channel, left = p.k - k;
  if (left <= 0) return;
  const std::uint8_t* const words =
      shared.codes + part * C::kPitch + padded(word_offset(kBits, channel / kFragmentChannels, 0, t, 2 * high));
  const int column = part * kSlotCells + (channel / kFragmentChannels >> p.block_shift) * kRows;
  const std::uint32_t base = C::kReal ? twice(kHalfMagic + p.zero_base) : 0;
  const bool in_vectors = p.in_vectors && p.perm == nullptr && left >= V;
  const int n0 = piece.down * kRows;
  Out* const out = static_cast<Out*>(p.out);
#pragma unroll 1  // registers hold the next piece
  for (int unit = 0; unit < kRows / 2; unit += kAtOnce) {
    const int fragment = unit / 8, g = unit % 8 + g0;
    std::uint32_t word[V / 2];
#pragma unroll
    for (int i = 0; i < V / 2; ++i)
      word[i] =
          *reinterpret_cast<const std::uint32_t*>(words + fragment * (kFragmentBytes + kPad) + (g * 4 + i) * kVectorBytes) >>
          (kBits == 4 ? 8 * high : 0);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = fragment * kFragmentRows + 8 * upper + g;
      const int n = n0 + row;
      if (n >= p.n) break;
      const float s = shared.scales[column + row];
      const std::uint32_t zero = shared.zeros[column + row];
      const float z = __uint_as_float(zero);  // when real
      float w[V];
#pragma unroll
      for (int i = 0; i < V / 2; ++i) {
        std::uint32_t codes;
        if constexpr (kBits == 4)
          codes = as_halves<C::kCodes>(word[i] >> 4 * upper, 0x000f000fu);
        else if constexpr (gpu_tile::are_floats(C::kCodes))
          codes = as_halves<C::kCodes>(__byte_perm(word[i], 0, upper != 0 ? 0x4342 : 0x4140), 0x00ff00ffu);
        else  // the byte of kHalfMagicBits above a code
          codes = __byte_perm(word[i], kHalfMagicBits, upper != 0 ? 0x5352 : 0x5150);
        const float2 two = weights<C>(p, codes, C::kReal ? base : zero, make_float2(s, s), make_float2(z, z));
        w[2 * i] = two.x, w[2 * i + 1] = two.y;
      }
      if (in_vectors) {
        store_vector<Out>(out + (n * p.stride + k), w);
      } else {
#pragma unroll
        for (int i = 0; i < V; ++i)
          if (i < left) out[n * p.stride + (p.perm != nullptr ? __ldg(p.perm + k + i) : k + i)] = convert<Out>(w[i]);
      }
    }
  }
}

/// Columns of W, V rows of channels 2t, 2t+1, 2t+8 and 2t+9 a lane.
template <class C>
__device__ __forceinline__ void write_columns(const Params& p, const Piece& piece, const Shared<C>& shared) {
  using Out = typename C::Out;
  constexpr int V = C::V, kBits = C::kBits;
  constexpr int kAtOnce = C::kThreads / kLanes / kBlocks;  // values of t: 2 or 1
  static_assert(C::kParts * kRows == V * kLanes);          // a warp writes a channel
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  const int part = lane * V / kRows, row = lane * V % kRows, block = warp % kBlocks;
  const int upper = row % kFragmentRows / 8;  // registers a1 and a3
  const int n = (piece.along + part) * kRows + row, left = p.n - n;
  if (left <= 0) return;
  const int column = part * kSlotCells + (block >> p.block_shift) * kRows + row;
  float s[V], z[V];  // z: when real
  std::uint32_t minus[V / 2];
#pragma unroll
  for (int i = 0; i < V; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(shared.scales + column + i);
    const uint4 zeros = *reinterpret_cast<const uint4*>(shared.zeros + column + i);
    s[i] = four.x, s[i + 1] = four.y, s[i + 2] = four.z, s[i + 3] = four.w;
    z[i] = __uint_as_float(zeros.x), z[i + 1] = __uint_as_float(zeros.y);
    z[i + 2] = __uint_as_float(zeros.z), z[i + 3] = __uint_as_float(zeros.w);
    minus[i / 2] = C::kReal ? twice(kHalfMagic + p.zero_base) : __byte_perm(zeros.x, zeros.y, 0x5410);
    minus[i / 2 + 1] = C::kReal ? minus[i / 2] : __byte_perm(zeros.z, zeros.w, 0x5410);
  }
  const bool in_vectors = p.in_vectors && left >= V;
  Out* const out = static_cast<Out*>(p.out) + n;
#pragma unroll 1
  for (int t = warp / kBlocks; t < 4; t += kAtOnce) {
    const std::uint8_t* const words =
        shared.codes + part * C::kPitch + padded(word_offset(kBits, block, row / kFragmentRows, row % 8 * 4 + t, upper));
    std::uint32_t word[V];
#pragma unroll(kBits == 4 ? 2 : 1)
    for (int high = 0; high < 2; ++high) {
      if (high == 0 || kBits == 8) {
#pragma unroll
        for (int i = 0; i < V; ++i)
          word[i] = *reinterpret_cast<const std::uint32_t*>(words + i * 4 * kVectorBytes + (kBits == 8 ? 4 * high : 0)) >>
                    code_shift(kBits, upper, 0);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = channel_of(block, t, 2 * high, half);
        const int position = piece.down * kChannels + channel;
        if (position >= p.k) continue;
        constexpr std::uint32_t kMask = kBits == 4 ? 0x000f000fu : 0x00ff00ffu;
        const int byte = code_shift(kBits, kBits == 4 ? 2 * high : 0, half) / 8;
        const unsigned both = static_cast<unsigned>(byte | (byte + 4) << 8);  // of two rows, 16 bits apart
        float w[V];
#pragma unroll
        for (int i = 0; i < V / 2; ++i) {
          const std::uint32_t codes = as_halves<C::kCodes>(__byte_perm(word[2 * i], word[2 * i + 1], both), kMask);
          const float2 two =
              weights<C>(p, codes, minus[i], make_float2(s[2 * i], s[2 * i + 1]), make_float2(z[2 * i], z[2 * i + 1]));
          w[2 * i] = two.x, w[2 * i + 1] = two.y;
        }
        Out* const to = out + (p.perm != nullptr ? __ldg(p.perm + position) : position) * p.stride;
        if (in_vectors) {
          store_vector<Out>(to, w);
        } else {
#pragma unroll
          for (int i = 0; i < V; ++i)
            if (i < left) to[i] = convert<Out>(w[i]);
        }
      }
    }
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kPromisedThreads = 768;  // pairs of f16 and bf16 take up to 80 registers there: with fewer they spill
#else
constexpr int kPromisedThreads = kThreadsAnSm;
#endif
/// f64 needs more registers: no limit.
template <class C>
inline constexpr int kLeastCtas = C::kReal ? 1 : kPromisedThreads / C::kThreads;

template <class C>
__global__ void __launch_bounds__(C::kThreads, kLeastCtas<C>) dequantize_packed_kernel(const __grid_constant__ Params p) {
  __shared__ Shared<C> shared;
  int index = static_cast<int>(blockIdx.x);
  InFlight<C> v;
  load<C>(p, piece<C>(p, index), v);
  for (;;) {
    keep<C>(p, v, shared);
    __syncthreads();
    const Piece now = piece<C>(p, index);
    index += static_cast<int>(gridDim.x);
    if (C::kAhead && index < p.pieces) load<C>(p, piece<C>(p, index), v);
    if constexpr (C::kTransposed)
      write_columns<C>(p, now, shared);
    else
      write_rows<C>(p, now, shared);
    if (index >= p.pieces) return;
    if (!C::kAhead) load<C>(p, piece<C>(p, index), v);
    __syncthreads();
  }
}

// --- slots of 8 and 16 channels ------------------------------------------------------------------------------------------------
//
// A CTA dequantizes a record, a thread 8 channels of a row at a time, with one scale and one zero. Neighbouring threads have the next
// channels of a row, or, transposed, the next rows of a channel.

constexpr int kOctet = 8;
constexpr int kShortThreads = 256;

template <class Out>
__global__ void __launch_bounds__(kShortThreads)
    dequantize_short_kernel(const __grid_constant__ Params p, gpu_tile::Geometry geo, bool transposed) {
  constexpr int kOctets = kChannels / kOctet;
  const int index = static_cast<int>(blockIdx.x), across = transposed ? geo.tiles() : geo.records();
  const int tile = transposed ? index % across : index / across, number = transposed ? index / across : index % across;
  const std::uint8_t* const record = p.records + geo.record(tile, number);
  const bool is_real = p.zero == ZeroKind::offset || p.zero == ZeroKind::real;
  Out* const out = static_cast<Out*>(p.out);
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kOctets; i += kShortThreads) {
    const int row = transposed ? i % kRows : i / kOctets, first = (transposed ? i / kRows : i % kOctets) * kOctet;
    const int n = tile * kRows + row, k = number * kChannels + first, left = min(p.k - k, kOctet);
    if (n >= p.n) continue;
    const int slot = first / geo.span, position = gpu_tile::slot_position(row);
    const float scale = load_float(record + geo.scale_offset(slot), position, p.scale_type);
    const std::uint8_t* const zeros = record + geo.zero_offset(slot);
    const float zero = is_real                       ? load_float(zeros, position, p.zero_type)
                       : p.zero == ZeroKind::integer ? static_cast<float>(zeros[position])
                                                     : 0.0f;
    alignas(16) Out w[kOctet];
    const int fragment = row / kFragmentRows, a = row % kFragmentRows / 8 + first % kFragmentChannels / kOctet * 2;  // register a
    const std::uint8_t* const words =
        record + word_offset(geo.bits, first / kFragmentChannels, fragment, row % 8 * 4, a);  // of four neighbouring lanes
#pragma unroll
    for (int c = 0; c < kOctet; ++c) {
      const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(words + c / 2 * kVectorBytes);
      const std::uint32_t bits = word >> code_shift(geo.bits, a, c % 2) & ((1u << geo.bits) - 1);
      const float code = code_number(p.codes, bits, p.zero_base);
      w[c] = convert<Out>(is_real ? real_value(p, code, scale, zero) : value(p, code - zero, scale));
    }
    if (!transposed && p.in_vectors && p.perm == nullptr && left == kOctet) {
#pragma unroll
      for (int v = 0; v < kOctet; v += kPerVector<Out>)
        __stcs(reinterpret_cast<uint4*>(out + (n * p.stride + k + v)), *reinterpret_cast<const uint4*>(w + v));
    } else {
#pragma unroll
      for (int c = 0; c < kOctet; ++c) {
        if (c >= left) continue;
        const int channel = p.perm != nullptr ? __ldg(p.perm + k + c) : k + c;
        out[transposed ? channel * p.stride + n : n * p.stride + channel] = w[c];
      }
    }
  }
}

// --- launch ------------------------------------------------------------------------------------------------------------------

/// Whether all rows of `out` begin at multiples of 16 bytes, so many elements.
bool is_aligned(const Params& p, int elements) {
  return reinterpret_cast<std::uintptr_t>(p.out) % kVectorBytes == 0 && p.stride % elements == 0;
}

template <class C>
cudaError_t launch(Params& p, const gpu_tile::Geometry& geometry, cudaStream_t stream) {
  p.along = C::kTransposed ? geometry.tiles() : geometry.records();
  p.part_bytes = C::kTransposed ? geometry.record(1, 0) : geometry.record(0, 1);
  p.down_bytes = C::kTransposed ? geometry.record(0, 1) : geometry.record(1, 0);
  p.across = (p.along + C::kParts - 1) / C::kParts;
  const std::int64_t pieces = std::int64_t{p.across} * (C::kTransposed ? geometry.records() : geometry.tiles());
  int device = 0, sms = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
  const int ctas = sms * C::kCtas;
  if (pieces > std::numeric_limits<std::int32_t>::max() - ctas) return cudaErrorInvalidConfiguration;
  p.pieces = static_cast<int>(pieces);
  p.in_vectors = is_aligned(p, C::V);
  return launch_after(dequantize_packed_kernel<C>, static_cast<unsigned>(pieces < ctas ? pieces : ctas), C::kThreads, 0, stream,
                      p);
}

template <class Out, Codes kCodes>
cudaError_t launch(Params& p, const gpu_tile::Geometry& geometry, bool transposed, cudaStream_t stream) {
  if constexpr (!gpu_tile::are_floats(kCodes))
    if (p.zero == ZeroKind::offset || p.zero == ZeroKind::real)
      return transposed ? launch<Config<Out, kCodes, true, true>>(p, geometry, stream)
                        : launch<Config<Out, kCodes, false, true>>(p, geometry, stream);
  return transposed ? launch<Config<Out, kCodes, true, false>>(p, geometry, stream)
                    : launch<Config<Out, kCodes, false, false>>(p, geometry, stream);
}

template <class Out>
cudaError_t launch_short(Params& p, const gpu_tile::Geometry& geometry, bool transposed, cudaStream_t stream) {
  const std::int64_t records = std::int64_t{geometry.tiles()} * geometry.records();
  if (records > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  p.in_vectors = is_aligned(p, kPerVector<Out>);
  return launch_after(dequantize_short_kernel<Out>, static_cast<unsigned>(records), kShortThreads, 0, stream, p, geometry,
                      transposed);
}

template <class Out>
cudaError_t launch(Params& p, const gpu_tile::Geometry& geometry, bool transposed, cudaStream_t stream) {
  if (geometry.slots() > kMaxSlots) return launch_short<Out>(p, geometry, transposed, stream);
  switch (p.codes) {
    case Codes::u4: return launch<Out, Codes::u4>(p, geometry, transposed, stream);
    case Codes::u8: return launch<Out, Codes::u8>(p, geometry, transposed, stream);
    case Codes::e2m1: return launch<Out, Codes::e2m1>(p, geometry, transposed, stream);
    case Codes::e4m3: return launch<Out, Codes::e4m3>(p, geometry, transposed, stream);
    case Codes::e5m2: return launch<Out, Codes::e5m2>(p, geometry, transposed, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t dequantize_packed(const DeviceWeight& weight, void* out, DType out_type, std::int64_t stride, bool transposed,
                              cudaStream_t stream) {
  const gpu_tile::Geometry& geo = weight.geometry;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 1024;  // rounded up to pieces they are ints still
  if (geo.n < 1 || geo.k < 1 || geo.n > kMost || geo.k > kMost) return cudaErrorInvalidValue;
  Params p{};
  p.records = static_cast<const std::uint8_t*>(weight.records);
  p.perm = weight.perm;
  p.out = out;
  p.stride = stride;
  p.n = static_cast<int>(geo.n);
  p.k = static_cast<int>(geo.k);
  p.slots = geo.slots();
  p.slot_bytes = geo.slot_bytes();
  p.zeros_offset = geo.zero_offset(0) - geo.scale_offset(0);
  p.block_shift = geo.span == 32 ? 1 : geo.span == 64 ? 2 : 3;
  p.codes = weight.codes;
  p.scale_type = weight.scale_type;
  p.zero_type = weight.zero_type;
  p.zero = weight.zero;
  p.zero_base = weight.zero_base;
  p.scale2 = weight.scale2;
  switch (out_type) {
    case DType::f32: return launch<float>(p, geo, transposed, stream);
    case DType::f16: return launch<__half>(p, geo, transposed, stream);
    case DType::bf16: return launch<__nv_bfloat16>(p, geo, transposed, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
