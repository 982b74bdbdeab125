// Codes → weights as the A operand of m16n8k16 or wgmma m64k16: W·kScaleUp, rounded once or twice to the activations' type. For
// kernels whose sums run over all of K inside the tensor cores; decode, which scales sums group by group, uses unpack.cuh instead.
//
//   operand = (u − z)·s + o                u the stored code; u − z exact, the rest one fused multiply-add
//
//   f16, 4 bits   LOP3 puts a code into the mantissa of 1024: 1024 + u. Rows g+8 keep their code 4 bits higher, 1024 + 16u: no
//                 shift. Subtracting 1024 + z, or multiplying by 1/16 and subtracting 64 + z, is exact.
//                 5 + 4 + 4 instructions for 8 weights.
//   f16, 8 bits   PRMT does: 4 + 4 + 4.
//   bf16, 4 bits  its mantissa has 7 bits: 128 + u, and three shifts: 7 + 4 + 4.
//   bf16, 8 bits  through f32 to u − 128 (unpack.cuh): 20 + 4 + 4.
//   float codes   their value (float_codes.cuh), then the product with s: 16 + 4 + 4. There are no zeros.
//
// Float zeros: the nearest integer to z is subtracted exactly, and the remainder, at most half a step, becomes part of o.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/weights/record_format.cuh"
#include "kernels/cuda/weights/unpack.cuh"
#include "layouts/gpu_tile.hpp"

namespace nibble::cuda {

/// Scales are multiplied by this, and sums divided by it: f16 keeps all bits of a scale down to 10⁻⁶ then, and |W| < 1023 fits.
template <class Act>
constexpr float kScaleUp = 64.0f;
template <>
inline constexpr float kScaleUp<__nv_bfloat16> = 1.0f;

__device__ inline std::uint32_t twice(__half x) { return __half_as_ushort(x) * 0x10001u; }
__device__ inline std::uint32_t twice(__nv_bfloat16 x) { return __bfloat16_as_ushort(x) * 0x10001u; }
template <class Act>
__device__ inline std::uint32_t twice(float x) {
  if constexpr (std::is_same_v<Act, __half>)
    return twice(__float2half_rn(x));
  else
    return twice(__float2bfloat16_rn(x));
}

template <class Act>
__device__ inline std::uint32_t add2(std::uint32_t a, std::uint32_t b) {
  if constexpr (std::is_same_v<Act, __half>)
    return ptx::add_f16x2(a, b);
  else
    return ptx::fma_bf16x2(a, 0x3f803f80u, b);  // times 1: sm_80 has no addition
}
template <class Act>
__device__ inline std::uint32_t fma2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  if constexpr (std::is_same_v<Act, __half>)
    return ptx::fma_f16x2(a, b, c);
  else
    return ptx::fma_bf16x2(a, b, c);
}
/// Codes as numbers of the activations' type: u + kMagic for rows g, u + kMagicUpper for rows g+8, times 16 with kSixteenths.
template <class Act, Codes kCodes>
struct Raised;
template <>
struct Raised<__half, Codes::u4> {
  static constexpr float kMagic = 1024.0f, kMagicUpper = 64.0f;
  static constexpr bool kSixteenths = true;  // of rows g+8
  __device__ static void unpack(std::uint32_t (&a)[4], std::uint32_t word, std::uint32_t) {
    const std::uint32_t upper = word >> 8;
    a[0] = masked_or<0x000f000fu>(word, 0x64006400u);
    a[1] = masked_or<0x00f000f0u>(word, 0x64006400u);
    a[2] = masked_or<0x000f000fu>(upper, 0x64006400u);
    a[3] = masked_or<0x00f000f0u>(upper, 0x64006400u);
  }
};
template <>
struct Raised<__half, Codes::u8> {
  static constexpr float kMagic = 1024.0f, kMagicUpper = 1024.0f;
  static constexpr bool kSixteenths = false;
  __device__ static void unpack(std::uint32_t (&a)[4], std::uint32_t word0, std::uint32_t word1) {
    a[0] = __byte_perm(word0, 0x64646464u, 0x4140);
    a[1] = __byte_perm(word0, 0x64646464u, 0x4342);
    a[2] = __byte_perm(word1, 0x64646464u, 0x4140);
    a[3] = __byte_perm(word1, 0x64646464u, 0x4342);
  }
};
template <Codes kCodes>
struct Raised<__nv_bfloat16, kCodes> {
  static constexpr float kMagic = Operand<__nv_bfloat16, kCodes>::kOffset, kMagicUpper = kMagic;
  static constexpr bool kSixteenths = false;
  __device__ static void unpack(std::uint32_t (&a)[4], std::uint32_t word0, std::uint32_t word1) {
    Operand<__nv_bfloat16, kCodes>::unpack(a, word0, word1);
  }
};
/// Floats as their values.
template <Codes kCodes>
requires(gpu_tile::are_floats(kCodes)) struct Raised<__half, kCodes> {
  static constexpr float kMagic = 0.0f, kMagicUpper = 0.0f;
  static constexpr bool kSixteenths = false;
  __device__ static void unpack(std::uint32_t (&a)[4], std::uint32_t word0, std::uint32_t word1) {
    Operand<__half, kCodes>::unpack(a, word0, word1);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = values<__half, kCodes>(a[i]);
  }
};

/// The constants that turn a lane's codes of one group into weights, each twice in a register: [0] of row g, [1] of row g+8 of a fragment.
struct RowConstants {
  std::uint32_t minus[2];   // −(kMagic + z)
  std::uint32_t scale[2];   // s·kScaleUp
  std::uint32_t offset[2];  // o·kScaleUp
};

/// Two numbers of a column of a slot, those of rows g and g+8 of a fragment, as stored; f32 takes both words.
__device__ __forceinline__ uint2 load_stored_pair(std::uint32_t column, int position, DType type) {
  if (type == DType::f32) return ptx::load_shared8(column + position * 4);
  return {ptx::load_shared4(column + position * 2), 0u};
}
__device__ __forceinline__ float2 numbers_of(const uint2& pair, DType type) {
  if (type == DType::f32) return {__uint_as_float(pair.x), __uint_as_float(pair.y)};
  if (type == DType::f16) return __half22float2(reinterpret_cast<const __half2&>(pair.x));
  return {__uint_as_float(pair.x << 16), __uint_as_float(pair.x & 0xffff0000u)};
}
__device__ inline float2 load_row_pair(std::uint32_t column, int position, DType type) {
  return numbers_of(load_stored_pair(column, position, type), type);
}

/// The position of a lane's pair of rows in a column of a slot.
__device__ inline int row_pair_position(int fragment, int lane) { return fragment / 2 * 32 + lane / 4 * 4 + fragment % 2 * 2; }

/// A lane's two scales and two zeros of a group as stored, of any type, loaded long before use.
struct AnyConstants {
  uint2 scales, zeros;
};
/// `slot` is the shared-memory address of a group's slot, `position` from row_pair_position.
template <Codes kCodes>
__device__ __forceinline__ AnyConstants load_any(const RecordFormat& format, std::uint32_t slot, int position) {
  AnyConstants raw{load_stored_pair(slot, position, format.scale_type), {}};
  const std::uint32_t zeros = slot + format.zeros_offset;
  if (gpu_tile::are_floats(kCodes) || format.zero == ZeroKind::none) return raw;
  if (format.zero == ZeroKind::integer)
    raw.zeros.x = ptx::load_shared2(zeros + position);
  else
    raw.zeros = load_stored_pair(zeros, position, format.zero_type);
  return raw;
}
/// Two numbers of 16 bits, and two floats, each twice in a register.
__device__ __forceinline__ void twice(std::uint32_t (&to)[2], std::uint32_t pair) {
  to[0] = __byte_perm(pair, 0, 0x1010);
  to[1] = __byte_perm(pair, 0, 0x3232);
}
template <class Act>
__device__ __forceinline__ void twice(std::uint32_t (&to)[2], float low, float high) {
  twice(to, std::is_same_v<Act, __half> ? ptx::to_f16x2(low, high) : ptx::to_bf16x2(low, high));
}
/// Offsets that one fused multiply-add of the activations' type adds without rounding them first.
NIBBLE_HOST_DEVICE inline bool has_exact_offsets(const RecordFormat& f, DType act) {
  return f.zero == ZeroKind::offset && f.zero_type == act && f.scale_type == act;
}
template <class Act>
inline constexpr DType kActType = std::is_same_v<Act, __half> ? DType::f16 : DType::bf16;

/// The part of the constants that is the same in every record, of zeros in the middle of the codes and of offsets.
template <class Act, Codes kCodes>
__device__ __forceinline__ void fixed_zeros(RowConstants& c, const RecordFormat& format) {
  using Numbers = Raised<Act, kCodes>;
  twice<Act>(c.minus, -(Numbers::kMagic + format.zero_base), -(Numbers::kMagicUpper + format.zero_base));
}
/// Two numbers of the activations' type, times kScaleUp.
template <class Act>
__device__ __forceinline__ std::uint32_t scaled_up(std::uint32_t pair) {
  constexpr std::uint32_t kUp = 0x54005400u;  // 64
  return std::is_same_v<Act, __half> ? ptx::mul_f16x2(pair, kUp) : pair;
}
/// Scales and exact offsets, two rows each, as constants.
template <class Act>
__device__ __forceinline__ void make_offsets(RowConstants& c, std::uint32_t scales, std::uint32_t offsets) {
  twice(c.scale, scaled_up<Act>(scales));
  twice(c.offset, scaled_up<Act>(offsets));
}
/// Scales and float zeros, two rows each, as constants, in the arithmetic of their type where its mantissa is long enough.
template <class Act, Codes kCodes>
__device__ __forceinline__ void make_float_zeros(RowConstants& c, const RecordFormat& format, std::uint32_t scales,
                                                 std::uint32_t zeros, bool scale_after) {
  using Numbers = Raised<Act, kCodes>;
  const std::uint32_t scale = scale_after ? kOnes<Act> : scaled_up<Act>(scales);
  const float minus[2] = {-(Numbers::kMagic + format.zero_base), -(Numbers::kMagicUpper + format.zero_base)};
  std::uint32_t subtracted, rest;  // −(kMagic + the nearest integer to z), exact; that integer less z
  if constexpr (std::is_same_v<Act, __half>) {
    // From 1024 to 2047 numbers are integers: adding 1536 rounds −512 … 511. Beyond 384 the rest grows instead.
    constexpr std::uint32_t kRounds = 0x66006600u, kRoundsBack = 0xe600e600u, kMost = 0x5e005e00u, kMinusOne = 0xbc00bc00u;
    const std::uint32_t whole = ptx::add_f16x2(ptx::add_f16x2(ptx::min_f16x2(zeros, kMost), kRounds), kRoundsBack);
    rest = ptx::fma_f16x2(zeros, kMinusOne, whole);
    subtracted = ptx::fma_f16x2(whole, kMinusOne, ptx::to_f16x2(minus[0], minus[1]));
  } else {
    constexpr float kReach = 64.0f, kRounds = 0x1.8p23f;  // u − z is exact so far
    const float2 z = numbers_of({zeros, 0}, DType::bf16);
    const auto whole = [](float of) { return (fminf(fmaxf(of, -kReach), kReach) + kRounds) - kRounds; };
    const float low = whole(z.x), high = whole(z.y);
    rest = ptx::to_bf16x2(low - z.x, high - z.y);
    subtracted = ptx::to_bf16x2(minus[0] - low, minus[1] - high);
  }
  twice(c.minus, subtracted);
  twice(c.scale, scale);
  twice(c.offset, fma2<Act>(rest, scale, 0x80008000u));  // + −0: the product
}

/// With `scale_after` the operand is u − z, and the caller multiplies sums by the scale; else by 1 / kScaleUp.
template <class Act, Codes kCodes>
__device__ __forceinline__ void make_constants(RowConstants& c, const RecordFormat& format, const AnyConstants& raw,
                                               bool scale_after) {
  using Numbers = Raised<Act, kCodes>;
  if (!gpu_tile::are_floats(kCodes) && has_exact_offsets(format, kActType<Act>)) {
    fixed_zeros<Act, kCodes>(c, format);
    return make_offsets<Act>(c, raw.scales.x, raw.zeros.x);
  }
  const float2 scale = numbers_of(raw.scales, format.scale_type);
  float z[2] = {format.zero_base, format.zero_base}, o[2] = {0.0f, 0.0f};
  if (!gpu_tile::are_floats(kCodes) && format.zero == ZeroKind::integer) {
    z[0] += static_cast<float>(raw.zeros.x & 0xffu);
    z[1] += static_cast<float>(raw.zeros.x >> 8);
  } else if (!gpu_tile::are_floats(kCodes) && format.zero != ZeroKind::none) {
    const float2 v = numbers_of(raw.zeros, format.zero_type);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float value = i == 0 ? v.x : v.y, s = i == 0 ? scale.x : scale.y;
      // W = (u − base)·s + value or (u − base − value)·s; in steps of s, the value's nearest integer within the codes' reach.
      const float steps = format.zero == ZeroKind::real ? value : s != 0.0f ? -value / s : 0.0f;
      constexpr float kReach = gpu_tile::bits(kCodes) == 4 ? 64.0f : 128.0f;  // as far as u − z is exact
      const float whole = rintf(fminf(fmaxf(steps, -kReach), kReach));
      z[i] += whole;
      if (scale_after)
        o[i] = whole - steps;  // in units of s; not for offsets, which a scale of 0 would erase
      else
        o[i] = (format.zero == ZeroKind::real ? (whole - steps) * s : fmaf(whole, s, value)) * kScaleUp<Act>;
    }
  }
  c.minus[0] = twice<Act>(-(Numbers::kMagic + z[0]));
  c.minus[1] = twice<Act>(-(Numbers::kMagicUpper + z[1]));
  c.scale[0] = twice<Act>(scale_after ? 1.0f : scale.x * kScaleUp<Act>);
  c.scale[1] = twice<Act>(scale_after ? 1.0f : scale.y * kScaleUp<Act>);
  c.offset[0] = twice<Act>(o[0]);
  c.offset[1] = twice<Act>(o[1]);
}

// ---- The same without branches, for nearly all checkpoints: 16-bit scales, zeros or offsets of the same type.

/// How a kernel reads a record's scales and zeros.
enum class ConstantsPath {
  fixed_zeros,    // groups of 128 or more, zeros in the middle of the codes
  integer_zeros,  // the same groups, zeros of their own
  fine_groups,    // slots of 32 and 64 channels, of either kind; of codes that are floats, bf16 scales
  groups_of_16,   // slots of 16 channels, of either kind
  groups_of_8,    // slots of 8 channels, of either kind: of a fragment, registers a0 and a1 belong to one, a2 and a3 to the next
  exact_offsets,  // offsets and scales of the activations' type
  float_zeros,    // zeros and scales of the activations' type, slots of 32 channels or more
  float_codes,    // groups of 128 or more, scales of any type, codes that are floats
  any,            // AnyConstants, for every other kind in slots of 32 channels or more
};
/// Channels after which constants change, where they change within a record; shorter slots than these there are none. 0: they do not.
NIBBLE_HOST_DEVICE constexpr int channels_of_set(ConstantsPath path) {
  switch (path) {
    case ConstantsPath::groups_of_8: return 8;
    case ConstantsPath::groups_of_16:
    case ConstantsPath::exact_offsets: return 16;
    case ConstantsPath::fine_groups:
    case ConstantsPath::float_zeros:
    case ConstantsPath::any: return 32;
    default: return 0;
  }
}

inline ConstantsPath constants_path(const RecordFormat& f, DType act) {
  if (gpu_tile::are_floats(f.codes) && f.span == gpu_tile::kChannels) return ConstantsPath::float_codes;
  if (gpu_tile::are_floats(f.codes) && f.span > 16)
    return f.scale_type == DType::bf16 ? ConstantsPath::fine_groups : ConstantsPath::any;
  if (f.codes == Codes::u4 && f.zero > ZeroKind::integer && f.zero_type == act && f.scale_type == act)
    return f.zero == ZeroKind::offset ? ConstantsPath::exact_offsets : ConstantsPath::float_zeros;
  if (f.scale_type == DType::f32 || f.zero > ZeroKind::integer) return ConstantsPath::any;
  if (act == DType::f16 && f.scale_type != DType::f16) return ConstantsPath::any;
  if (f.span < 32) return f.span == 16 ? ConstantsPath::groups_of_16 : ConstantsPath::groups_of_8;
  if (f.span != gpu_tile::kChannels) return ConstantsPath::fine_groups;
  return f.zero == ZeroKind::none ? ConstantsPath::fixed_zeros : ConstantsPath::integer_zeros;
}

/// A lane's two scales and two zeros or offsets of a group, as stored, loaded long before use; ConstantsPath::float_codes: two scales as
/// f32.
struct RawConstants {
  std::uint32_t scales, zeros;
};
template <ConstantsPath kPath>
__device__ __forceinline__ RawConstants load_raw(const RecordFormat& format, std::uint32_t slot, int position) {
  if constexpr (kPath == ConstantsPath::float_codes) {
    const float2 scale = load_row_pair(slot, position, format.scale_type);
    return {__float_as_uint(scale.x), __float_as_uint(scale.y)};
  } else {
    constexpr bool kShort =
        kPath == ConstantsPath::fine_groups || kPath == ConstantsPath::groups_of_16 || kPath == ConstantsPath::groups_of_8;
    const bool has_zeros = kPath == ConstantsPath::integer_zeros || (kShort && format.zero == ZeroKind::integer);
    if constexpr (kPath == ConstantsPath::exact_offsets || kPath == ConstantsPath::float_zeros)
      return {ptx::load_shared4(slot + position * 2), ptx::load_shared4(slot + format.zeros_offset + position * 2)};
    return {ptx::load_shared4(slot + position * 2), has_zeros ? ptx::load_shared2(slot + format.zeros_offset + position) : 0u};
  }
}
/// A lane's two scales as numbers.
template <ConstantsPath kPath>
__device__ __forceinline__ float2 scales_of(const RawConstants& raw, const RecordFormat& format) {
  if constexpr (kPath == ConstantsPath::float_codes) return {__uint_as_float(raw.scales), __uint_as_float(raw.zeros)};
  if (format.scale_type == DType::f16) return __half22float2(reinterpret_cast<const __half2&>(raw.scales));
  return {__uint_as_float(raw.scales << 16), __uint_as_float(raw.scales & 0xffff0000u)};
}
template <ConstantsPath kPath, class Act, Codes kCodes>
__device__ __forceinline__ void make_constants(RowConstants& c, const RecordFormat& format, const RawConstants& raw,
                                               bool scale_after) {
  using Numbers = Raised<Act, kCodes>;
  if constexpr (kPath == ConstantsPath::exact_offsets) return make_offsets<Act>(c, raw.scales, raw.zeros);
  if constexpr (kPath == ConstantsPath::float_zeros)
    return make_float_zeros<Act, kCodes>(c, format, raw.scales, raw.zeros, scale_after);
  c.offset[0] = c.offset[1] = 0;
  constexpr bool kBf16Scales = gpu_tile::are_floats(kCodes) && kPath == ConstantsPath::fine_groups;  // e8m0's among them
  if constexpr (kPath == ConstantsPath::float_codes || kBf16Scales) {
    const float2 scale = kBf16Scales ? numbers_of({raw.scales, 0}, DType::bf16) : scales_of<kPath>(raw, format);
    twice<Act>(c.scale, scale_after ? 1.0f : scale.x * kScaleUp<Act>, scale_after ? 1.0f : scale.y * kScaleUp<Act>);
  } else {
    std::uint32_t scales;
    if constexpr (std::is_same_v<Act, __half>) {
      scales = scaled_up<Act>(raw.scales);
    } else {
      const float2 halves = __half22float2(reinterpret_cast<const __half2&>(raw.scales));
      scales = format.scale_type == DType::bf16 ? raw.scales : ptx::to_bf16x2(halves.x, halves.y);
    }
    if (scale_after) scales = kOnes<Act>;
    twice(c.scale, scales);
  }
  if constexpr (kPath != ConstantsPath::fixed_zeros && !gpu_tile::are_floats(kCodes)) {
    // 2²³ | z is the float 2²³ + z; what is added is exact too.
    const float z0 = __uint_as_float(__byte_perm(raw.zeros, 0x4b000000u, 0x7440));
    const float z1 = __uint_as_float(__byte_perm(raw.zeros, 0x4b000000u, 0x7441));
    twice<Act>(c.minus, (0x1p23f - Numbers::kMagic - format.zero_base) - z0,
               (0x1p23f - Numbers::kMagicUpper - format.zero_base) - z1);
  }
}

/// The 16 channels number `index` of a lane's 16-byte vector as u − z, of floats their values; index is a constant once unrolled. The
/// constants are those of the first eight channels and of the last eight, which most paths share.
template <class Act, Codes kCodes>
__device__ __forceinline__ void numbers(std::uint32_t (&a)[4], const uint4& v, int index, const RowConstants& first,
                                        const RowConstants& last) {
  using Numbers = Raised<Act, kCodes>;
  if constexpr (gpu_tile::bits(kCodes) == 4)
    Numbers::unpack(a, index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w, 0);
  else
    Numbers::unpack(a, index == 0 ? v.x : v.z, index == 0 ? v.y : v.w);
  if constexpr (!gpu_tile::are_floats(kCodes)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t minus = (i < 2 ? first : last).minus[i % 2];
      a[i] = Numbers::kSixteenths && i % 2 == 1 ? fma2<Act>(a[i], 0x2c002c00u, minus) : add2<Act>(a[i], minus);
    }
  }
}

/// The same as weights.
template <class Act, Codes kCodes>
__device__ __forceinline__ void weights(std::uint32_t (&a)[4], const uint4& v, int index, const RowConstants& first,
                                        const RowConstants& last) {
  numbers<Act, kCodes>(a, v, index, first, last);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const RowConstants& c = i < 2 ? first : last;
    a[i] = fma2<Act>(a[i], c.scale[i % 2], c.offset[i % 2]);
  }
}

}  // namespace nibble::cuda
