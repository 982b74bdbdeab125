// Sums with tokens as the 64-row operand become D.
//
//   sums of a lane ── zero points, integers' bias ── scales, bias ──▶ D's values, in the same registers ── stage ──▶ D
//
// A warp has 16 tokens of 64 and all of the pass's rows, so that its store needs no other warp. Code that runs once in a pass costs as much
// as fetching it: what few epilogues need is apart, and the common one is short and without jumps.
//
// What the epilogue needs of a pass's rows, 64 or 128, one row a thread, is loaded before the products and put into shared memory after them:
//
//   row_terms()   {scale, bias} of row 0, of row 1, …      16 bytes have what a lane needs of a unit: its rows 2t and 2t + 1
//   behind them   {Σ Ŵ, zero point} of the same rows
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

#include "kernels/cuda/device/half_out.cuh"
#include "kernels/cuda/sm90/gemm/w8a8_stages.cuh"

namespace nibble::cuda {
namespace {

/// epilogue::Element::code() of many values with one scale, without its division and conversions, which take 8 to 16 times as long as an
/// addition:
///
///   x / s     with r = fl(1/s) and q within an ulp of x/s, fl(q + r·(x − q·s)) is fl(x/s) (Markstein); fl(x·r) is made such a q by the same
///             step. Values of q beyond 2²⁰ have an end of the range as their code, and need no step
///   rounding  by adding and subtracting 1.5·2²³, behind whose lowest bit there is none
///   the code  is the lowest byte of the sum with that number
struct Requantizer {
  float scale, inverse, zero;
  epilogue::CodeRange range;

  __device__ explicit Requantizer(const epilogue::Element& e)
      : scale(e.out_scale), inverse(1.0f / scale), zero(static_cast<float>(e.out_zero)), range(e.out_range) {}
  __device__ __forceinline__ std::uint32_t code(float x) const {
    constexpr float kFar = 1 << 20, kIntegers = 12582912.0f;
    const auto step = [&](float q) { return fmaf(fmaf(-q, scale, x), inverse, q); };
    float q = __fmul_rn(x, inverse);
    q = fabsf(q) < kFar ? step(step(q)) : q < 0.0f ? -kFar : q > 0.0f ? kFar : q;
    q = __fadd_rn(__fadd_rn(__fadd_rn(q, kIntegers), -kIntegers), zero);
    if (q != q) q = 0.0f;
    q = q < range.low ? range.low : q > range.high ? range.high : q;
    return __float_as_uint(__fadd_rn(q, kIntegers)) & 0xff;
  }
};

template <class T>
struct W8A8TokenStore : W8A8Stages<T> {
  using Base = W8A8Stages<T>;
  using Base::Base, Base::p, Base::shared, Base::base, Base::warpgroup, Base::lane, Base::warp, Base::kGroups;
  using Sum = typename T::Sum;
  static constexpr bool kIntegers = std::is_same_v<Sum, std::int32_t>;
  static constexpr int kTokens = T::kTokens;
  static constexpr int kBlocks = T::kRowBlocks, kRows = kBlocks * gpu_w8::kRows;  // of a pass, at most
  static_assert(kRows <= kGroupThreads && kBlocks <= kTokenRowBlocks);
  /// A warpgroup's tokens, and the tokens of one operand.
  static constexpr int kGroupTokens = kTokens / kGroups, kPartTokens = 64, kParts = kGroupTokens / kPartTokens;
  static constexpr int kBlockSums = gpu_w8::kRows / 2;  // of 64 tokens × 64 rows, of a lane
  static constexpr int kPartSums = kBlocks * kBlockSums;
  static constexpr int kUnitSums = 4;  // of 8 rows: of tokens g, g, g + 8, g + 8 and rows 2t, 2t + 1, 2t, 2t + 1, of lane 4g + t
  using Sums = Sum[kParts * kPartSums];

  /// The tokens of a pass: rows [first(), end()) of A and D.
  using Tokens = decltype(std::declval<const Base&>().tokens_of(std::declval<const Pass&>()));
  /// The first of the warp's 16 of the first part.
  __device__ int first_token(const Tokens& tokens) const { return tokens.first() + warpgroup * kGroupTokens + warp * 16; }
  __device__ std::uint32_t warp_staging() const {
    return base + p.map.staging + warpgroup * kStagingBytes + warp * (kStagingBytes / 4);
  }
  /// Calls use(sum, i) with a lane's sums of unit `unit` of all parts: i / 2 counts tokens, i % 2 the unit's rows.
  template <class Use>
  __device__ __forceinline__ static void for_unit(Sums& acc, int unit, Use use) {
#pragma unroll
    for (int i = 0; i < kUnitSums * kParts; ++i) use(acc[i / kUnitSums * kPartSums + kUnitSums * unit + i % kUnitSums], i);
  }

  // ---- terms of tokens and rows

  static constexpr float kNoBias = -0.0f;  // adding it changes no number
  struct Terms {
    float token_scale[2 * kParts];    // of tokens g and g + 8 of each part
    float scale = 0, bias = kNoBias;  // of the thread's row
    std::int32_t sum = 0, zero = 0;
  };
  __device__ std::uint32_t row_terms() const { return base + p.map.terms + warpgroup * (kRowTerms * 4 * kRows); }
  __device__ std::int64_t token_of(const Tokens& tokens, int i) const {
    return min(first_token(tokens) + i / 2 * kPartTokens + i % 2 * 8 + lane / 4,
               tokens.end() - 1);  // those behind the last are not stored
  }
  __device__ bool stores_codes() const { return !T::kGrouped && p.codes_out; }
  /// Of groups × 256 tokens not: a lane's sums and the scales of their products leave no registers for it.
  __device__ bool stores_floats() const { return (!T::kGrouped || kParts == 1) && p.floats_out; }
  __device__ bool adds_bias() const {
    return (p.half == HalfOut::channels || stores_codes() || stores_floats()) && p.epilogue.bias.data != nullptr;
  }
  /// What all sums of the pass's expert are multiplied by.
  __device__ float expert_scale(const Pass& pass) const {
    if constexpr (T::kExperts)
      if (p.experts.scale2 != nullptr) return __ldg(p.experts.scale2 + pass.tile.expert);
    return 1.0f;
  }
  __device__ Terms load_terms(const Pass& pass, const Tokens& tokens) const {
    Terms terms;
#pragma unroll
    for (int i = 0; i < 2 * kParts; ++i)
      terms.token_scale[i] =
          p.acts.scales == nullptr ? p.acts.scale : __ldg(p.acts.scales + token_of(tokens, i) * p.acts.scale_row);
    const int row = pass.block * gpu_w8::kRows + warp * 32 + lane;
    if (warp * 32 >= pass.blocks * gpu_w8::kRows) return terms;
    terms.scale = __ldg(this->of_pass(p.weight.scales(), pass) + row) * expert_scale(pass);  // rows past N are padding
    if (adds_bias() && row < p.rows()) terms.bias = p.epilogue.bias.at(row);
    if (kIntegers && p.zero_points) {
      terms.sum = __ldg(this->of_pass(p.weight.sums(), pass) + row);
      if (p.weight.zeros() != nullptr) terms.zero = __ldg(this->of_pass(p.weight.zeros(), pass) + row);
    }
    return terms;
  }
  /// Hands the rows' terms to the warpgroup.
  __device__ void share_terms(const Terms& terms) const {
    const std::uint32_t to = row_terms() + (warp * 32 + lane) * 8;
    ptx::named_barrier(1 + warpgroup, kGroupThreads);  // those of the pass before have been read
    if (kRows == kGroupThreads || warp * 32 < kRows) {
      ptx::store_shared8(to, {__float_as_uint(terms.scale), __float_as_uint(terms.bias)});
      if (kIntegers && p.zero_points)
        ptx::store_shared8(to + 8 * kRows, {static_cast<std::uint32_t>(terms.sum), static_cast<std::uint32_t>(terms.zero)});
    }
    ptx::named_barrier(1 + warpgroup, kGroupThreads);
  }
  /// Takes zero points out of integers and adds their bias, modulo 2³², where the result is exact.
  __device__ void finish_integers(const Pass& pass, const Tokens& tokens, Sums& acc) const {
    std::uint32_t zero[2 * kParts], codes[2 * kParts];  // of tokens
#pragma unroll
    for (int i = 0; i < 2 * kParts; ++i) {
      zero[i] = p.acts.zeros == nullptr ? p.acts.zero : p.acts.zeros[token_of(tokens, i) * p.acts.zero_row];
      codes[i] = p.acts.sums == nullptr ? 0 : p.acts.sums[token_of(tokens, i)];
    }
    const std::int32_t* const bias = p.epilogue.sum_bias;
    const auto k = static_cast<std::uint32_t>(p.weight.geometry.k);
#pragma unroll
    for (int unit = 0; unit < kPartSums / kUnitSums; ++unit) {
      const int row = unit * 8 + lane % 4 * 2, n = pass.block * gpu_w8::kRows + row;
      uint4 of_rows{};  // sum and zero point of both
      if (p.zero_points) of_rows = ptx::load_shared16(row_terms() + 8 * (kRows + row));
      const std::uint32_t factor[2] = {k * of_rows.y - of_rows.x, k * of_rows.w - of_rows.z};
      const std::uint32_t more[2] = {bias != nullptr && n < p.rows() ? bias[n] : 0u,
                                     bias != nullptr && n + 1 < p.rows() ? bias[n + 1] : 0u};
      for_unit(acc, unit, [&](Sum& sum, int i) {
        const std::uint32_t of_row = i % 2 == 0 ? of_rows.y : of_rows.w;
        sum += static_cast<Sum>(zero[i / 2] * factor[i % 2] - of_row * codes[i / 2] + more[i % 2]);
      });
    }
  }
  /// Sums become values of D, less the epilogue: fl(fl(sum · s_a) · s_w), + bias. kScaled: sums have the scales of tokens.
  template <bool kScaled>
  __device__ __forceinline__ void finish_floats(std::uint32_t terms, const float* token_scale, Sums& acc) const {
#pragma unroll
    for (int unit = 0; unit < kPartSums / kUnitSums; ++unit) {
      const uint4 of_rows = ptx::load_shared16(terms + (unit * 8 + lane % 4 * 2) * 8);
      for_unit(acc, unit, [&](Sum& sum, int i) {
        float v = static_cast<float>(sum);
        if (!kScaled) v = __fmul_rn(v, token_scale[i / 2]);
        v = __fmul_rn(v, __uint_as_float(i % 2 == 0 ? of_rows.x : of_rows.z));
        sum = bits(__fadd_rn(v, __uint_as_float(i % 2 == 0 ? of_rows.y : of_rows.w)));
      });
    }
  }
  __device__ __forceinline__ void finish(const Pass& pass, const Tokens& tokens, const Terms& terms, Sums& acc) const {
    share_terms(terms);
    if constexpr (kIntegers) {
      if (p.zero_points || p.epilogue.sum_bias != nullptr) finish_integers(pass, tokens, acc);
      if (p.epilogue.out == DType::s32) return;
    }
    finish_floats<false>(row_terms(), terms.token_scale, acc);
  }
  /// The same of groups, whose sums are scaled, where rows have scales or a bias. A warp's staging buffer holds them: there are no registers
  /// for them during the products.
  __device__ __forceinline__ void finish_groups(const Pass& pass, Sums& acc) const {
    const float of_expert = expert_scale(pass);
    if (p.weight.geometry.block_rows != 0 && !adds_bias() && of_expert == 1.0f) return;
    const int lane = opaque(this->lane);
    const std::uint32_t staging = warp_staging();
    const float* const scales = p.weight.geometry.block_rows != 0 ? nullptr : this->of_pass(p.weight.scales(), pass);
#pragma unroll 1
    for (int i = lane; i < pass.blocks * gpu_w8::kRows; i += 32) {
      const int row = pass.block * gpu_w8::kRows + i;
      const float scale = (scales == nullptr ? 1.0f : scales[row]) * of_expert;
      const float bias = adds_bias() && row < p.rows() ? p.epilogue.bias.at(row) : kNoBias;
      ptx::store_shared8(staging + i * 8, {__float_as_uint(scale), __float_as_uint(bias)});
    }
    __syncwarp();
    finish_floats<true>(staging, nullptr, acc);
    __syncwarp();
  }
  /// A value of D, or an integer of a D of s32, in the register of a sum, and back.
  __device__ static Sum bits(float v) {
    if constexpr (kIntegers)
      return __float_as_int(v);
    else
      return v;
  }
  __device__ static float value(Sum sum) {
    if constexpr (kIntegers)
      return __int_as_float(sum);
    else
      return sum;
  }

  // ---- the store

  __device__ void store_tokens(const Pass& pass, const Tokens& tokens, const Sums& acc) const {
    if (stores_codes())
      store_codes(pass, tokens, acc);
    else if (stores_floats())
      store_floats(pass, tokens, acc);
    else if (p.half != HalfOut::channels)
      store_words(pass, tokens, acc);
    else if (p.epilogue.out == DType::f16)
      store_halves<__half2>(pass, tokens, acc);
    else
      store_halves<__nv_bfloat162>(pass, tokens, acc);
  }
  /// As f32, out of registers: a lane's two rows of a unit are 8 bytes, and four lanes write the 32 of a token that memory takes at a time.
  __device__ __forceinline__ void store_floats(const Pass& pass, const Tokens& tokens, const Sums& acc) const {
    const int lane = opaque(this->lane), row = pass.block * gpu_w8::kRows + lane % 4 * 2, token = first_token(tokens) + lane / 4;
    const int rows = min(p.rows(), (pass.block + pass.blocks) * gpu_w8::kRows) - row;
    float* const first = static_cast<float*>(p.epilogue.d) + (p.first_row + token) * p.epilogue.d_stride + row;
#pragma unroll
    for (int i = 0; i < 2 * kParts; ++i) {  // tokens g and g + 8 of each part
      const int further = i / 2 * kPartTokens + i % 2 * 8;
      float* const d = first + further * p.epilogue.d_stride;
#pragma unroll
      for (int unit = 0; unit < kPartSums / kUnitSums; ++unit) {
        const Sum* v = acc + i / 2 * kPartSums + kUnitSums * unit + i % 2 * 2;
        if (token + further < tokens.end() && unit * 8 < rows)
          *reinterpret_cast<float2*>(d + unit * 8) = {value(v[0]), value(v[1])};
      }
    }
  }
  /// 16 tokens × 64 rows at a time as 16-bit floats: token t is 128 bytes in shared memory, chunk c of 8 rows at c ^ (t mod 8). Eight lanes
  /// then store a token, four tokens at a time.
  template <class Pair>
  __device__ __forceinline__ void store_halves(const Pass& pass, const Tokens& tokens, const Sums& acc) const {
    constexpr unsigned kTokenBytes = gpu_w8::kRows * 2;
    const auto lane = static_cast<unsigned>(opaque(this->lane));
    const std::uint32_t staging = warp_staging(), to = staging + lane % 16 * kTokenBytes + (lane / 16 ^ lane % 8) * 16;
    const unsigned token = lane / 8, chunk = lane % 8;
    const std::uint32_t from = staging + token * kTokenBytes + (chunk ^ token) * 16;
    const int row = pass.block * gpu_w8::kRows + static_cast<int>(chunk) * 8;
    const bool in_block[kTokenRowBlocks] = {row<p.rows(), pass.blocks> 1 && row + gpu_w8::kRows < p.rows()};
    const int left = tokens.end() - first_token(tokens) - static_cast<int>(token);
    const std::int64_t pitch = p.epilogue.d_stride * 2, first = p.first_row + first_token(tokens) + static_cast<int>(token);
    std::byte* d = static_cast<std::byte*>(p.epilogue.d) + first * pitch + row * 2;
#pragma unroll
    for (int part = 0; part < kParts; ++part, d += kPartTokens * pitch)
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int unit = 0; unit < kBlockSums / kUnitSums; unit += 2) {
          const Sum* v = acc + (part * kBlocks + block) * kBlockSums + kUnitSums * unit;
          ptx::store_four_matrices(to ^ unit * 16, pair<Pair>(v[0], v[1]), pair<Pair>(v[2], v[3]), pair<Pair>(v[4], v[5]),
                                   pair<Pair>(v[6], v[7]));
        }
        __syncwarp();
        std::byte* at = d + block * kTokenBytes;
#pragma unroll
        for (unsigned i = 0; i < 16; i += 4, at += 4 * pitch)  // chunk ^ (token + i) mod 8: token is below 4
          ptx::store16_if(in_block[block] && static_cast<int>(part * kPartTokens + i) < left, at,
                          ptx::load_shared16((from ^ i % 8 * 16) + i * kTokenBytes));
        __syncwarp();  // before the buffer is written again
      }
  }
  /// 16 tokens × all rows at a time as codes of 8 bits, in the same form: a lane's two rows of a unit are two bytes of a token. Four lanes
  /// write the eight of a token, and eight tokens are in different chunks of 16 rows. Eight lanes then store a token.
  __device__ void store_codes(const Pass& pass, const Tokens& tokens, const Sums& acc) const {
    constexpr int kTokenBytes = 128, kChunkRows = 16;  // in shared memory, of 64 rows, too
    static_assert(kRows <= kTokenBytes);
    const auto lane = static_cast<unsigned>(opaque(this->lane));
    const int first_row = pass.block * gpu_w8::kRows;
    const unsigned g = lane / 4, row = lane % 4 * 2;  // of a unit
    const std::uint32_t staging = warp_staging(), to = staging + g * kTokenBytes + row;
    const unsigned token = lane / 8, chunk = lane % 8;
    const std::uint32_t from = staging + token * kTokenBytes + (chunk ^ token) * 16;
    const int in_pass = static_cast<int>(chunk) * kChunkRows;
    const bool exists = in_pass < kRows && first_row + in_pass < p.rows();
    const int left = tokens.end() - first_token(tokens) - static_cast<int>(token);
    const std::int64_t first = p.first_row + first_token(tokens) + static_cast<int>(token), pitch = p.epilogue.d_stride;
    std::byte* d = static_cast<std::byte*>(p.epilogue.d) + first * pitch + first_row + in_pass;
    const Requantizer requantizer(p.epilogue);
#pragma unroll
    for (int part = 0; part < kParts; ++part, d += kPartTokens * pitch) {
#pragma unroll
      for (unsigned unit = 0; unit < kPartSums / kUnitSums; ++unit) {
        const Sum* v = acc + part * kPartSums + kUnitSums * unit;
        const std::uint32_t at = to + (unit / 2 ^ g) * 16 + unit % 2 * 8;
        ptx::store_shared2(at, requantizer.code(value(v[0])) | requantizer.code(value(v[1])) << 8);
        ptx::store_shared2(at + 8 * kTokenBytes, requantizer.code(value(v[2])) | requantizer.code(value(v[3])) << 8);
      }
      __syncwarp();
      std::byte* at = d;
#pragma unroll
      for (unsigned i = 0; i < 16; i += 4, at += 4 * pitch)  // chunk ^ (token + i) mod 8: token is below 4
        ptx::store16_if(exists && static_cast<int>(part * kPartTokens + i) < left, at,
                        ptx::load_shared16((from ^ i % 8 * 16) + i * kTokenBytes));
      __syncwarp();  // before the buffer is written again
    }
  }
  template <class Pair>
  __device__ static std::uint32_t pair(Sum low, Sum high) {
    Pair both;
    if constexpr (std::is_same_v<Pair, __half2>)
      both = __floats2half2_rn(value(low), value(high));
    else
      both = __floats2bfloat162_rn(value(low), value(high));
    return reinterpret_cast<const std::uint32_t&>(both);
  }
  /// Any D through the whole epilogue, 8 tokens at a time: g, then g + 8. A run-time loop, for a single copy of the code; registers are
  /// indexed at compile time.
  __device__ void store_words(const Pass& pass, const Tokens& tokens, const Sums& acc) const {
    const int lane = opaque(this->lane);
    float* const staging = reinterpret_cast<float*>(shared + (warp_staging() - base));
    constexpr int kRounds = 2 * kBlocks;  // of a part
#pragma unroll 1
    for (int round = 0; round < kRounds * kParts; ++round) {
      const int token = first_token(tokens) + round / kRounds * kPartTokens + round % 2 * 8, block = round / 2 % kBlocks;
      if (block >= pass.blocks || token >= tokens.end()) continue;
#pragma unroll
      for (int i = 0; i < kRounds * kParts; ++i) {
        if (i != round) continue;
#pragma unroll
        for (int unit = 0; unit < kBlockSums / kUnitSums; ++unit) {
          const Sum* v = acc + i / 2 * kBlockSums + kUnitSums * unit + i % 2 * 2;
          *reinterpret_cast<float2*>(staging + lane / 4 * kStagePitch + unit * 8 + lane % 4 * 2) = {value(v[0]), value(v[1])};
        }
      }
      __syncwarp();
#pragma unroll 1
      for (int t = lane / 8; t < 8; t += 4)
        if (token + t < tokens.end())
          store_rows(p.epilogue.without_act_scale(), p.first_row + token + t, (pass.block + block) * gpu_w8::kRows + lane % 8 * 8,
                     p.rows(), staging + t * kStagePitch + lane % 8 * 8);
      __syncwarp();
    }
  }
};

}  // namespace
}  // namespace nibble::cuda
