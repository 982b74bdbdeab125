// The 8-bit GEMM of tokens that come as 16-bit floats: their codes are made in registers, between shared memory and the tensor cores.
//
//   D[M,N] = q(A)[M,K] · Ŵᵀ[K,N]     tokens are the 64-row operand (w8a8_token_rows.cuh), here in registers; Ŵ is in shared memory
//
// Where rows are few, a product is one pass over A. A step of its own would read A, write codes, and have them read again; here A is read, and
// quantized once for every 64 or 128 rows of Ŵ. It needs a scale that is known before A is.
//
//   record of a stage = 128 tokens × 128 channels in two boxes of 64 channels, 128 bytes of a token each, swizzled by t mod 8
//                     | 64 rows × 128 channels of codes for each row block                          64 tokens are a warpgroup's
//
// Lane 4g + t of a warp has, of every 32 channels of tokens g and g + 8, channels 4t … 4t + 3 and 16 + 4t … 16 + 4t + 3: the first operand of
// wgmma's k32. A box is two such operands, and four quads of channels a token for a lane, quad j in chunk 2j + t/2:
//
//                       chunk  0   1   2   3   4   5   6   7            what lane t of four reads
//   32 channels:                                                        as words of four channels each:
//     4t … 4t + 3       t =    0 1 2 3                                  quad 0  ┐ operand 0
//     16 + 4t …                        0 1 2 3                          quad 1  ┘
//     32 + 4t …                                0 1 2 3                  quad 2  ┐ operand 1
//     48 + 4t …                                        0 1 2 3          quad 3  ┘
//
// A load of 8 bytes takes half a warp at a time, four tokens: the swizzle puts the same two chunks of tokens 2i and 2i + 1 into the same
// banks. So lanes of odd tokens read quad j ^ 2 where those of even ones read quad j, and the halves of a box change places in registers.
#pragma once

#include "kernels/cuda/device/opaque.cuh"
#include "kernels/cuda/device/wgmma8.cuh"
#include "kernels/cuda/sm90/gemm/w8a8_token_store.cuh"
#include "kernels/cuda/steps/act_vectors.cuh"

namespace nibble::cuda {
namespace {

/// Of s8 codes that become of f16 or bf16, kPassBlocks row blocks a pass.
template <DType kFloats, int kPassBlocks>
struct W8A8FloatTraits : W8A8Traits<S8, kFloatTokens, false, false, false, true> {
  static constexpr DType kType = kFloats;
  static constexpr bool kReads = true;
  static constexpr int kRowBlocks = kPassBlocks, kBoxes = 2;
  static constexpr int kActBytes = kBoxes * kTokens * kBoxBytesOfToken;
};

template <class T>
struct W8A8FloatRows : W8A8TokenStore<T> {
  using Base = W8A8TokenStore<T>;
  using Base::act, Base::records, Base::kRows, Base::stage_records, Base::kGroups, Base::kTokens, Base::kGroupTokens,
      Base::kParts;
  using Base::Base, Base::p, Base::warpgroup, Base::lane, Base::warp, Base::full, Base::release;
  using typename Base::Sums;
  static_assert(kParts == 1);

  __device__ static int active() { return kGroups; }
  __device__ void prepare(unsigned producer) const { Base::prepare(producer, active()); }
  __device__ void produce(unsigned producer) const { Base::produce(producer, kGroups); }

  // ---- codes

  static constexpr int kBoxes = T::kBoxes, kBoxBytes = kTokens * kBoxBytesOfToken;
  static constexpr int kTokensOfLane = 2, kTokenStep = 8;         // a lane's tokens g and g + 8
  static constexpr int kQuads = 4, kQuadBytes = 32;               // of a token in a box, for a lane; from a quad to the next
  static constexpr int kSteps = kQuads / 2, kHalfOfBox = kSteps;  // operands of a box; the quads of its first half

  using Quads = uint2[kTokensOfLane][kQuads];  // four 16-bit floats each, in the order in which the lane reads them
  using Operands = std::uint32_t[kSteps][4];   // codes of 32 channels each: of token g, g + 8, g, g + 8

  __device__ bool is_odd() const { return lane / 4 % 2 != 0; }
  /// The lane's place of its token g in a box: in quad 0, or of odd tokens in quad 2.
  __device__ std::uint32_t quad_place() const {
    const int g = lane / 4, t = lane % 4, token = warpgroup * kGroupTokens + warp * 16 + g;
    const int chunk = (t / 2 + (is_odd() ? 2 * kHalfOfBox : 0)) ^ g;
    return token * kBoxBytesOfToken + chunk * 16 + t % 2 * 8;
  }
  /// Reads the lane's part of a record. Chunks are swizzled, so that the next quad is found by an exclusive or.
  __device__ __forceinline__ static void read(Quads (&quads)[kBoxes], std::uint32_t place) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad)
#pragma unroll
        for (int i = 0; i < kTokensOfLane; ++i)
          quads[box][i][quad] =
              ptx::load_shared8((place ^ quad * kQuadBytes) + box * kBoxBytes + i * kTokenStep * kBoxBytesOfToken);
  }
  __device__ __forceinline__ void quantize(Operands& operands, const Quads& quads) const {
    std::uint32_t codes[kTokensOfLane][kQuads];
#pragma unroll
    for (int i = 0; i < kTokensOfLane; ++i)
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const uint2& v = quads[i][quad];
        const float x[4] = {half_of(v.x, 0, T::kType), half_of(v.x, 1, T::kType), half_of(v.y, 0, T::kType),
                            half_of(v.y, 1, T::kType)};
        codes[i][quad] = encode_four_s8(x, p.rule);
      }
    const bool odd = is_odd();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int i = word % kTokensOfLane, quad = 2 * step + word / kTokensOfLane;
        operands[step][word] = odd ? codes[i][quad ^ kHalfOfBox] : codes[i][quad];
      }
  }

  // ---- a pass

  /// Adds the products of the warpgroup's tokens and the pass's rows, over all channels, in tensor cores. While those of a box run, the codes
  /// of the next are made; registers of a box are written again when its products are complete.
  template <class LookAhead>
  __device__ __forceinline__ void multiply(const Pass& pass, Cursor& from, Sums& acc, LookAhead look_ahead) const {
    const std::uint32_t first_place = act(0) + quad_place(), first_rows = wgmma_operand_low(records(0));
    const std::uint32_t stage_rows = stage_records() * (gpu_w8::kRecordBytes / 16);
    Operands operands[kBoxes];
    int previous = -1;  // the stage whose last products may be running
    int left = pass.records();
    do {  // at least one record: if ptxas sees a path without a product it does not overlap them
      ptx::barrier_wait(full(from.stage), from.parity);
      Quads quads[kBoxes];
      read(quads, first_place + from.stage * T::kActBytes);
      const std::uint32_t rows = first_rows + from.stage * stage_rows;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        quantize(operands[box], quads[box]);
#pragma unroll
        for (auto& operand : operands[box]) pin(operand);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          WgmmaS8<kRows>::add(acc, operands[box][step], wgmma_operand(rows + 2 * (box * kSteps + step)));
        wgmma_commit();
        wgmma_wait<1>();
        if (box == 0 && previous >= 0) release(previous);
      }
      previous = from.stage;
      from.advance(p.stages);
    } while (--left > 0);
    look_ahead();
    wgmma_wait_for(acc);
    release(previous);
  }

  static constexpr bool kLooksAhead = true;
  template <class LookAhead>
  __device__ __forceinline__ void consume(const Pass& pass, Cursor& from, LookAhead look_ahead) const {
    Sums acc = {};
    const auto tokens = this->tokens_of(pass);
    const auto terms = this->load_terms(pass, tokens);
    multiply(pass, from, acc, look_ahead);
    this->finish(pass, tokens, terms, acc);
    this->store_tokens(pass, tokens, acc);
  }
};

}  // namespace
}  // namespace nibble::cuda
