// The activation functions of the canonical epilogue. Adding one: a struct here, a value in Activation, a line in the oracle.
#pragma once

#include <cmath>

namespace nibble::epilogue {

struct Identity {
  float operator()(float x) const { return x; }
};
struct Relu {
  float operator()(float x) const { return x > 0.0f ? x : 0.0f; }
};
struct Clamp {
  float low, high;
  float operator()(float x) const { return x < low ? low : x > high ? high : x; }
};
struct GeluErf {
  float operator()(float x) const { return 0.5f * x * (1.0f + std::erf(x * 0.70710678f)); }
};
struct GeluTanh {  // 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))
  float operator()(float x) const { return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x))); }
};
struct Silu {
  float operator()(float x) const { return x / (1.0f + std::exp(-x)); }
};

}  // namespace nibble::epilogue
