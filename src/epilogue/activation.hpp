// The scalar functions of the canonical epilogue, for host and device. Adding an activation: a struct here, a value in Activation, a line
// in with_activation, a line in the oracle.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.hpp"
#include "nibble/epilogue.hpp"

namespace nibble::epilogue {

struct Identity {
  NIBBLE_HOST_DEVICE float operator()(float x) const { return x; }
};
struct Relu {  // of NaN it is NaN, of −0 it is −0
  NIBBLE_HOST_DEVICE float operator()(float x) const { return x < 0.0f ? 0.0f : x; }
};
struct Clamp {
  float low, high;
  NIBBLE_HOST_DEVICE float operator()(float x) const { return x < low ? low : x > high ? high : x; }
};
struct GeluErf {
  NIBBLE_HOST_DEVICE float operator()(float x) const { return 0.5f * x * (1.0f + std::erf(x * 0.70710678f)); }
};
struct GeluTanh {  // 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))
  NIBBLE_HOST_DEVICE float operator()(float x) const {
    return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
  }
};
struct Silu {
  NIBBLE_HOST_DEVICE float operator()(float x) const { return x / (1.0f + std::exp(-x)); }
};

/// Calls use(function) with the function that `activation` names.
template <class Use>
NIBBLE_HOST_DEVICE inline void with_activation(Activation activation, float clamp_low, float clamp_high, const Use& use) {
  switch (activation) {
    case Activation::none: return use(Identity{});
    case Activation::relu: return use(Relu{});
    case Activation::clamp: return use(Clamp{clamp_low, clamp_high});
    case Activation::gelu_erf: return use(GeluErf{});
    case Activation::gelu_tanh: return use(GeluTanh{});
    case Activation::silu: return use(Silu{});
  }
}

/// A NaN becomes 0, as in a saturating conversion, where a cast would be undefined behaviour.
NIBBLE_HOST_DEVICE inline std::int8_t quantize(float x, float scale, std::int32_t zero) {
  const float q = std::nearbyint(x / scale) + static_cast<float>(zero);
  if (q != q) return 0;
  return static_cast<std::int8_t>(q < -128.0f ? -128.0f : q > 127.0f ? 127.0f : q);
}

}  // namespace nibble::epilogue
