// The canonical epilogue of one output element, for kernels that hold sums in registers: a plain value that is passed to GPU kernels as a
// parameter. One source for host and device; epilogue.cpp runs the same functions over whole rows.
//
// An absent part costs a uniform branch. Products and sums are rounded one by one, as on the host. So a device gives the host's bits,
// except in activation functions: exp, tanh and erf of its own library, and contracted multiply-adds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/host_device.hpp"
#include "epilogue/activation.hpp"
#include "nibble/epilogue.hpp"
#include "nibble/types.hpp"

#if NIBBLE_DEVICE_CODE
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace nibble::epilogue {

/// A borrowed matrix, vector or images of floats; data null: absent.
struct Operand {
  const void* data = nullptr;
  DType type = DType::f32;
  std::int64_t stride = 0;              // elements between rows; of images, between pixels
  std::int64_t image = 0, channel = 1;  // of images: elements between them, and between channels

  NIBBLE_HOST_DEVICE float at(std::int64_t i) const {
    if (type == DType::f32) return static_cast<const float*>(data)[i];
#if defined(__CUDA_ARCH__)
    return type == DType::f16 ? __half2float(static_cast<const __half*>(data)[i])
                              : __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
#else
    return type == DType::f16 ? to_f32(static_cast<const f16*>(data)[i]) : to_f32(static_cast<const bf16*>(data)[i]);
#endif
  }
};

// Separately rounded: nvcc would contract a product and a sum into one fused operation.
NIBBLE_HOST_DEVICE inline float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
NIBBLE_HOST_DEVICE inline float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

/// A row of D, and the place of its column n in an operand.
struct Row {
  std::int64_t m;
  NIBBLE_HOST_DEVICE std::int64_t at(const Operand& operand, std::int64_t n) const { return m * operand.stride + n; }
};
/// The same for images: a pixel, and the place of its channel n, with the strides of each operand.
struct Pixel {
  int image, pixel;
  NIBBLE_HOST_DEVICE std::int64_t at(const Operand& operand, std::int64_t n) const {
    return image * operand.image + pixel * operand.stride + n * operand.channel;
  }
};

/// The epilogue. Sums for a D of s32, the integers of W8A8, are passed as floats of the same bits and stored as they are.
struct Element {
  float acc_scale = 1.0f;                  // on the sum, before everything else: a weight's second-level scale
  const float* act_scale = nullptr;        // of a row's activations: on its sums, next; written by a step before the kernel
  const std::int32_t* sum_bias = nullptr;  // of W8A8: the kernel adds it to the integer sums
  const float* row_scale = nullptr;
  const float* col_scale = nullptr;
  Operand bias, gate, residual;
  std::int64_t glu_half = 0;  // N/2 of a glu, else 0: then channels 2j and 2j + 1 of the sums are channels j and N/2 + j of x
  GluLimits glu_limits = {kInfinity, 0.0f};
  Activation activation = Activation::none;
  float clamp_low = 0.0f, clamp_high = 6.0f, negative_slope = 0.01f;
  DType out = DType::f32;
  float out_scale = 1.0f;  // of s8 and u8, as the next four
  std::int32_t out_zero = 0;
  CodeRange out_range = {-128.0f, 127.0f};
  const float* out_scales = nullptr;  // in place of out_scale: one, or one per channel
  bool out_scale_each = false;
  const std::int32_t* out_zeros = nullptr;  // one, in place of out_zero
  void* d = nullptr;
  std::int64_t d_stride = 0;  // elements between rows

  /// The epilogue of the rows of D from m on.
  Element from_row(std::int64_t m) const {
    const auto advance = [m](Operand& operand) {
      if (operand.data != nullptr)
        operand.data = static_cast<const std::byte*>(operand.data) + m * operand.stride * bits(operand.type) / 8;
    };
    Element rest = *this;
    rest.d = static_cast<std::byte*>(d) + m * d_stride * bits(out) / 8;
    if (act_scale != nullptr) rest.act_scale += m;
    if (row_scale != nullptr) rest.row_scale += m;
    advance(rest.gate), advance(rest.residual);
    return rest;
  }
  /// The same of kernels that give sums the scales of activations themselves: their code has no place for act_scale.
  NIBBLE_HOST_DEVICE Element without_act_scale() const {
    Element rest = *this;
    rest.act_scale = nullptr;
    return rest;
  }
  /// Whether acc_scale is the only scale.
  NIBBLE_HOST_DEVICE bool unscaled() const { return act_scale == nullptr && row_scale == nullptr && col_scale == nullptr; }
  /// Whether the epilogue is acc_scale and a store to 16-bit floats, as in most layers: store_plain suffices.
  NIBBLE_HOST_DEVICE bool plain() const {
    return unscaled() && bias.data == nullptr && activation == Activation::none && glu_half == 0 && gate.data == nullptr &&
           residual.data == nullptr && (out == DType::f16 || out == DType::bf16) && d_stride % 2 == 0 &&
           reinterpret_cast<std::uintptr_t>(d) % 4 == 0;
  }
  /// The same for a store to f32: store_plain_floats suffices.
  NIBBLE_HOST_DEVICE bool plain_floats() const {
    return unscaled() && bias.data == nullptr && activation == Activation::none && glu_half == 0 && gate.data == nullptr &&
           residual.data == nullptr && out == DType::f32 && d_stride % 2 == 0 && reinterpret_cast<std::uintptr_t>(d) % 8 == 0;
  }
#if NIBBLE_DEVICE_CODE
  /// D[m,n] and D[m,n+1] from their sums; n even.
  __device__ void store_plain(std::int64_t m, std::int64_t n, float2 acc) const {
    void* to = static_cast<std::uint16_t*>(d) + (m * d_stride + n);
    const float a = multiply(acc.x, acc_scale), b = multiply(acc.y, acc_scale);
    if (out == DType::f16)
      *static_cast<__half2*>(to) = __floats2half2_rn(a, b);
    else
      *static_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
  }
  __device__ void store_plain_floats(std::int64_t m, std::int64_t n, float2 acc) const {
    *reinterpret_cast<float2*>(static_cast<float*>(d) + (m * d_stride + n)) = {multiply(acc.x, acc_scale),
                                                                               multiply(acc.y, acc_scale)};
  }
  /// Channel n of a pixel and, where it exists, n + 1: elements `at` and `at + step` of D. The parts of the epilogue are tested once for
  /// both.
  __device__ void store_pair(std::int64_t at, std::int64_t step, const Pixel& pixel, std::int64_t n, float2 acc,
                             bool both) const {
    const std::int64_t next = both ? n + 1 : n;
    if (out == DType::s32) {
      write(at, n, acc.x);
      if (both) write(at + step, next, acc.y);
      return;
    }
    float a = multiply(acc.x, acc_scale), b = multiply(acc.y, acc_scale);
    if (col_scale != nullptr) a = multiply(a, col_scale[n]), b = multiply(b, col_scale[next]);
    if (bias.data != nullptr) a = add(a, bias.at(n)), b = add(b, bias.at(next));
    with_activation(*this, [&](auto function) { a = function(a), b = function(b); });
    if (gate.data != nullptr) a = multiply(a, gate.at(pixel.at(gate, n))), b = multiply(b, gate.at(pixel.at(gate, next)));
    if (residual.data != nullptr)
      a = add(a, residual.at(pixel.at(residual, n))), b = add(b, residual.at(pixel.at(residual, next)));
    write(at, n, a);
    if (both) write(at + step, next, b);
  }
  /// Of a glu D[m,n/2] and D[m,n/2+1] from the sums of channels n … n + 3, as far as they exist; n is a multiple of 4. channels: N.
  /// bias_first: where the bias of the row begins, in elements, where rows have different ones; so in the functions that follow.
  __device__ void store_products(std::int64_t m, std::int64_t n, float4 acc, std::int64_t channels,
                                 std::int64_t bias_first = 0) const {
    const std::int64_t j = n / 2, at = m * d_stride + j;
    const float a = product(m, j, acc.x, acc.y, bias_first);
    if (n + 2 >= channels) return write(at, j, a);
    const float b = product(m, j + 1, acc.z, acc.w, bias_first);
    if ((out == DType::f16 || out == DType::bf16) && d_stride % 2 == 0 && reinterpret_cast<std::uintptr_t>(d) % 4 == 0) {
      *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(d) + at) = halves(a, b);
    } else {
      write(at, j, a);
      write(at + 1, j + 1, b);
    }
  }
  /// The same of channels n … n + 7, all of which exist; n is a multiple of 8. The parts of the epilogue are tested once for all.
  __device__ void store_four_products(std::int64_t m, std::int64_t n, const float (&acc)[8], std::int64_t bias_first = 0) const {
    const std::int64_t j = n / 2;
    const float row = row_scale == nullptr ? 1.0f : row_scale[m];
    float gates[4], others[4];
    const auto each = [&](auto use) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        gates[i] = use(gates[i], j + i);
        others[i] = use(others[i], glu_half + j + i);
      }
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) gates[i] = multiply(acc[2 * i], acc_scale), others[i] = multiply(acc[2 * i + 1], acc_scale);
    if (act_scale != nullptr) {
      const float act = of_acts(m);
      each([&](float x, std::int64_t) { return multiply(x, act); });
    }
    if (row_scale == nullptr && col_scale == nullptr) each([&](float x, std::int64_t) { return rounded(x); });
    if (row_scale != nullptr) each([&](float x, std::int64_t) { return multiply(x, row); });
    if (col_scale != nullptr) each([&](float x, std::int64_t i) { return multiply(x, col_scale[i]); });
    if (bias.data != nullptr) each([&](float x, std::int64_t i) { return add(x, bias.at(bias_first + i)); });
    with_activation(*this, [&](auto function) {
#pragma unroll
      for (int i = 0; i < 4; ++i) gates[i] = multiply(function(glu_limits.gate(gates[i])), glu_limits.other(others[i]));
    });
    if (gate.data != nullptr)
#pragma unroll
      for (int i = 0; i < 4; ++i) gates[i] = multiply(gates[i], gate.at(m * gate.stride + j + i));
    if (residual.data != nullptr)
#pragma unroll
      for (int i = 0; i < 4; ++i) gates[i] = add(gates[i], residual.at(m * residual.stride + j + i));
    const std::int64_t at = m * d_stride + j;
    if ((out == DType::f16 || out == DType::bf16) && d_stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(d) % 8 == 0) {
      *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(d) + at) = {halves(gates[0], gates[1]), halves(gates[2], gates[3])};
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) write(at + i, j + i, gates[i]);
    }
  }
  /// D[m,n] … D[m,n+7] from their sums, without a glu; n is a multiple of 8. The parts of the epilogue are tested once for all.
  __device__ void store_eight(std::int64_t m, std::int64_t n, float (&v)[8], std::int64_t bias_first = 0) const {
    if (out == DType::s32) return write_eight(m * d_stride + n, n, v);
    const auto each = [&](auto use) {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = use(v[i], i);
    };
    const auto combine = [&](const Operand& operand, std::int64_t first, auto use) {
      if (operand.type == DType::f32)
        each([&](float x, int i) { return use(x, static_cast<const float*>(operand.data)[first + i]); });
      else
        each([&](float x, int i) { return use(x, operand.at(first + i)); });
    };
    each([&](float x, int) { return multiply(x, acc_scale); });
    if (act_scale != nullptr) {
      const float scale = of_acts(m);
      each([&](float x, int) { return multiply(x, scale); });
    }
    if (row_scale != nullptr) {
      const float scale = row_scale[m];
      each([&](float x, int) { return multiply(x, scale); });
    }
    if (col_scale != nullptr) each([&](float x, int i) { return multiply(x, col_scale[n + i]); });
    const auto product = [](float a, float b) { return multiply(a, b); };
    const auto sum = [](float a, float b) { return add(a, b); };
    if (bias.data != nullptr) combine(bias, bias_first + n, sum);
    with_activation(*this, [&](auto function) { each([&](float x, int) { return function(x); }); });
    if (gate.data != nullptr) combine(gate, m * gate.stride + n, product);
    if (residual.data != nullptr) combine(residual, m * residual.stride + n, sum);
    write_eight(m * d_stride + n, n, v);
  }
#endif

  /// D[m,n] from its sum; without a glu.
  NIBBLE_HOST_DEVICE void store(std::int64_t m, std::int64_t n, float acc, std::int64_t bias_first = 0) const {
    store_at(m * d_stride + n, Row{m}, n, acc, bias_first);
  }
  /// D[m,n] and D[m,n+1], where they exist, from their sums, of a glu D[m,n/2]; n even. channels: N.
  NIBBLE_HOST_DEVICE void store_two(std::int64_t m, std::int64_t n, float first, float second, std::int64_t channels) const {
    if (n >= channels) return;
    if (glu_half != 0) return write(m * d_stride + n / 2, n / 2, product(m, n / 2, first, second));
    store(m, n, first);
    if (n + 1 < channels) store(m, n + 1, second);
  }
  /// Channel n of a row, or of a pixel of images, which have neither act_scale nor row_scale: element `at` of D.
  template <class Where>
  NIBBLE_HOST_DEVICE void store_at(std::int64_t at, const Where& where, std::int64_t n, float acc,
                                   std::int64_t bias_first = 0) const {
    if (out == DType::s32) return write(at, n, acc);
    acc = multiply(acc, acc_scale);
    if constexpr (std::is_same_v<Where, Row>) {
      if (act_scale != nullptr) acc = multiply(acc, of_acts(where.m));
      if (row_scale != nullptr) acc = multiply(acc, row_scale[where.m]);
    }
    if (col_scale != nullptr) acc = multiply(acc, col_scale[n]);
    if (bias.data != nullptr) acc = add(acc, bias.at(bias_first + n));
    with_activation(*this, [&acc](auto function) { acc = function(acc); });
    if (gate.data != nullptr) acc = multiply(acc, gate.at(where.at(gate, n)));
    if (residual.data != nullptr) acc = add(acc, residual.at(where.at(residual, n)));
    write(at, n, acc);
  }

 private:
  /// act_scale of a row, past L1, which may hold stale lines: the step may have written it after this kernel started.
  NIBBLE_HOST_DEVICE float of_acts(std::int64_t m) const {
#if defined(__CUDA_ARCH__)
    return __ldcg(act_scale + m);
#else
    return act_scale[m];
#endif
  }
  /// x in the precision of D where that is f16 or bf16 (EpilogueSpec::factor_type).
  NIBBLE_HOST_DEVICE float rounded(float x) const {
#if defined(__CUDA_ARCH__)
    if (out == DType::f16) return __half2float(__float2half_rn(x));
    if (out == DType::bf16) return __bfloat162float(__float2bfloat16_rn(x));
#else
    if (out == DType::f16) return to_f32(to_f16(x));
    if (out == DType::bf16) return to_f32(to_bf16(x));
#endif
    return x;
  }
  /// D[m,j] of a glu from its two sums.
  NIBBLE_HOST_DEVICE float product(std::int64_t m, std::int64_t j, float first, float second, std::int64_t bias_first = 0) const {
    const auto x = [&](float acc, std::int64_t n) {
      acc = multiply(acc, acc_scale);
      if (act_scale != nullptr) acc = multiply(acc, of_acts(m));
      if (row_scale == nullptr && col_scale == nullptr) acc = rounded(acc);
      if (row_scale != nullptr) acc = multiply(acc, row_scale[m]);
      if (col_scale != nullptr) acc = multiply(acc, col_scale[n]);
      return bias.data == nullptr ? acc : add(acc, bias.at(bias_first + n));
    };
    float value = glu_limits.gate(x(first, j));
    with_activation(*this, [&value](auto function) { value = function(value); });
    value = multiply(value, glu_limits.other(x(second, glu_half + j)));
    if (gate.data != nullptr) value = multiply(value, gate.at(m * gate.stride + j));
    return residual.data == nullptr ? value : add(value, residual.at(m * residual.stride + j));
  }
  /// The code of a value of channel n.
  NIBBLE_HOST_DEVICE std::int32_t code(std::int64_t n, float x) const {
    const float scale = out_scales == nullptr ? out_scale : out_scales[out_scale_each ? n : 0];
    return quantize(x, scale, out_zeros == nullptr ? out_zero : *out_zeros, out_range);
  }
#if NIBBLE_DEVICE_CODE
  /// Two numbers in the 16-bit type of D.
  __device__ std::uint32_t halves(float low, float high) const {
    if (out == DType::f16) {
      const __half2 pair = __floats2half2_rn(low, high);
      return reinterpret_cast<const std::uint32_t&>(pair);
    }
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
  /// Elements i … i + 7 of D, channels n … n + 7.
  __device__ void write_eight(std::int64_t i, std::int64_t n, const float (&v)[8]) const {
    if (d_stride % 8 != 0 || reinterpret_cast<std::uintptr_t>(d) % 16 != 0) {
#pragma unroll
      for (int j = 0; j < 8; ++j) write(i + j, n + j, v[j]);
      return;
    }
    switch (out) {
      case DType::f32:
      case DType::s32: {
        auto* const to = reinterpret_cast<float4*>(static_cast<float*>(d) + i);
        to[0] = {v[0], v[1], v[2], v[3]};
        to[1] = {v[4], v[5], v[6], v[7]};
        break;
      }
      case DType::f16:
      case DType::bf16: {
        std::uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] = halves(v[2 * j], v[2 * j + 1]);
        *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(d) + i) = {word[0], word[1], word[2], word[3]};
        break;
      }
      default: {
        std::uint32_t word[2] = {};
#pragma unroll
        for (int j = 0; j < 8; ++j) word[j / 4] |= (static_cast<std::uint32_t>(code(n + j, v[j])) & 0xff) << j % 4 * 8;
        *reinterpret_cast<uint2*>(static_cast<std::int8_t*>(d) + i) = {word[0], word[1]};
      }
    }
  }
#endif
  /// Element i of D, of channel n.
  NIBBLE_HOST_DEVICE void write(std::int64_t i, std::int64_t n, float x) const {
    switch (out) {
      case DType::f32:
      case DType::s32: static_cast<float*>(d)[i] = x; break;
#if defined(__CUDA_ARCH__)
      case DType::f16: static_cast<__half*>(d)[i] = __float2half_rn(x); break;
      case DType::bf16: static_cast<__nv_bfloat16*>(d)[i] = __float2bfloat16_rn(x); break;
#else
      case DType::f16: static_cast<f16*>(d)[i] = to_f16(x); break;
      case DType::bf16: static_cast<bf16*>(d)[i] = to_bf16(x); break;
#endif
      default: static_cast<std::uint8_t*>(d)[i] = static_cast<std::uint8_t>(code(n, x));
    }
  }
};

/// The epilogue of D in the form that kernels take. Precondition: check_args has accepted the operands.
Element element(const EpilogueSpec& spec, const Operands& args, const TensorView& d, float acc_scale);

}  // namespace nibble::epilogue
