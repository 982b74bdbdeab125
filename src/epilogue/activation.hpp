// The scalar functions of the canonical epilogue, for host and device. Adding an activation: a value in Activation and kActivations, a line
// in with_activation, a line in the oracle; and a struct here, unless one of them is the same function with other constants. A GPU kernel
// has the code of each struct at every place where it stores.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/host_device.hpp"
#include "nibble/epilogue.hpp"

namespace nibble::epilogue {

struct Identity {
  NIBBLE_HOST_DEVICE float operator()(float x) const { return x; }
};
struct Clamp {  // of NaN it is NaN; of −0 it is −0 where low is 0
  float low, high;
  NIBBLE_HOST_DEVICE float operator()(float x) const { return x < low ? low : x > high ? high : x; }
};
struct GeluErf {
  NIBBLE_HOST_DEVICE float operator()(float x) const { return 0.5f * x * (1.0f + std::erf(x * 0.70710678f)); }
};
struct Tanh {  // tanh(x), or gelu: 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))
  bool gelu;
  NIBBLE_HOST_DEVICE float operator()(float x) const {
    const float t = std::tanh(gelu ? 0.79788456f * (x + 0.044715f * x * x * x) : x);
    return gelu ? 0.5f * x * (1.0f + t) : t;
  }
};
/// exp(x) for 1 + exp(x), to 2u, where only that counts: exp(−87) for all below, infinity from 88.4 on. Without branches and calls, for a float
/// or a vector of them (Bits: as many u32), in place: part of its caller, whose instructions it takes. exp(x) = 2ⁿ·exp(r) with r = x − n·ln 2 in ±0.35, exact by ln 2 in two parts; the polynomial is
/// that of Cephes.
template <class Floats, class Bits>
[[gnu::always_inline]] inline void exp_in_sum(Floats& x) {
  const Floats least = Floats{} - 87.0f, most = Floats{} + 89.0f;
  x = x < least ? least : x;
  x = x > most ? most : x;
  constexpr float kRound = 0x1.8p23f;  // added, it leaves the nearest whole number in the lowest bits
  const Floats shifted = x * 1.44269504f + kRound, n = shifted - kRound;
  const Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  Bits exponent;
  std::memcpy(&exponent, &shifted, sizeof shifted);
  exponent = (exponent + 127u) << 23;  // of 2ⁿ; the shift drops the bits of kRound
  Floats power;
  std::memcpy(&power, &exponent, sizeof power);
  x = (p * r * r + r + 1.0f) * power;
}
struct Sigmoid {  // 1 / (1 + exp(−β·x)), or that times x
  float beta;
  bool times_x;
  NIBBLE_HOST_DEVICE float operator()(float x) const {
#if defined(__CUDA_ARCH__)
    // The fast exp is off by a multiple of x·2⁻²⁴, which is large only where the sigmoid is small: times x it stays within the bound of
    // verification. It takes a third of the instructions.
    if (times_x) return __fdividef(x, 1.0f + __expf(-beta * x));
    return 1.0f / (1.0f + std::exp(-beta * x));
#else
    float power = -beta * x;
    exp_in_sum<float, std::uint32_t>(power);
    return (times_x ? x : 1.0f) / (1.0f + power);
#endif
  }
};
constexpr bool is_sigmoid(Activation activation) {
  return activation == Activation::silu || activation == Activation::sigmoid || activation == Activation::quick_gelu;
}
/// Of those.
NIBBLE_HOST_DEVICE inline Sigmoid sigmoid_of(Activation activation) {
  return {activation == Activation::quick_gelu ? 1.702f : 1.0f, activation != Activation::sigmoid};
}
struct HardSwish {  // x·min(max(x + 3, 0), 6)/6
  NIBBLE_HOST_DEVICE float operator()(float x) const {
    const float share = x * 0.16666667f + 0.5f, above = share > 0.0f ? share : 0.0f;
    return x * (above < 1.0f ? above : 1.0f);
  }
};
struct LeakyRelu {
  float slope;
  NIBBLE_HOST_DEVICE float operator()(float x) const { return x < 0.0f ? x * slope : x; }
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// The factors of a gated linear unit before the activation function of the first; NaN stays NaN.
struct GluLimits {
  float limit, offset;
  NIBBLE_HOST_DEVICE float gate(float x) const { return x > limit ? limit : x; }
  NIBBLE_HOST_DEVICE float other(float x) const { return (x < -limit ? -limit : x > limit ? limit : x) + offset; }
};

/// Calls use(function) with the function of `spec`, an EpilogueSpec or what has its members.
template <class Spec, class Use>
NIBBLE_HOST_DEVICE inline void with_activation(const Spec& spec, const Use& use) {
  const Activation activation = spec.activation;
  switch (activation) {
    case Activation::none: return use(Identity{});
    case Activation::relu:
    case Activation::clamp: {
      const bool clamp = activation == Activation::clamp;
      return use(Clamp{clamp ? spec.clamp_low : 0.0f, clamp ? spec.clamp_high : kInfinity});
    }
    case Activation::gelu_erf: return use(GeluErf{});
    case Activation::gelu_tanh:
    case Activation::tanh: return use(Tanh{activation == Activation::gelu_tanh});
    case Activation::silu:
    case Activation::sigmoid:
    case Activation::quick_gelu: return use(sigmoid_of(activation));
    case Activation::hardswish: return use(HardSwish{});
    case Activation::leaky_relu: return use(LeakyRelu{spec.negative_slope});
  }
}

/// The codes that a D of s8 or u8 may have: whole numbers.
struct CodeRange {
  float low, high;
};
inline CodeRange code_range(const EpilogueSpec& spec) {
  const std::int32_t low = spec.out == DType::u8 ? 0 : -128, high = low + 255;
  return {static_cast<float>(spec.out_low > low ? spec.out_low : low),
          static_cast<float>(spec.out_high < high ? spec.out_high : high)};
}

/// A code. A NaN becomes 0, as in a saturating conversion, where a cast would be undefined behaviour.
NIBBLE_HOST_DEVICE inline std::int32_t quantize(float x, float scale, std::int32_t zero, CodeRange range) {
  float q = std::nearbyint(x / scale) + static_cast<float>(zero);
  if (q != q) q = 0.0f;
  return static_cast<std::int32_t>(q < range.low ? range.low : q > range.high ? range.high : q);
}

}  // namespace nibble::epilogue
