#include "kernels/cpu/prepare.hpp"

#include <algorithm>
#include <array>

#include "kernels/cpu/cpu.hpp"

namespace nibble::cpu {
namespace {

/// Tokens [0, height) of `a`, starting at `a_row`, into one tile.
template <class T>
void prepare_tile(const T* a_row, std::int64_t stride, std::int64_t height, const PackedWeightData& weight, const float* prescale,
                  float* out) {
  for (std::int64_t i = 0; i < weight.k; ++i) {
    const std::int64_t k = weight.perm.empty() ? i : weight.perm[static_cast<std::size_t>(i)];
    const float scale = prescale == nullptr ? 1.0f : prescale[k];
    for (std::int64_t r = 0; r < height; ++r) out[i * height + r] = to_f32(a_row[r * stride + k]) * scale;
  }
}

template <class T>
void prepare(const StepArgs& args) {
  const PackedWeightData& weight = *args.weight;
  const float* prescale = weight.prescale_f32.empty() ? nullptr : weight.prescale_f32.data();
  const std::int64_t m = args.a.dim(0);
  const std::int64_t tiles = (m + args.prepare_tile - 1) / args.prepare_tile;
  args.executor->parallel_for(tiles, [&](std::int64_t t) {
    const std::int64_t row = t * args.prepare_tile;
    prepare_tile(static_cast<const T*>(args.a.data) + row * args.a.stride(0), args.a.stride(0),
                 std::min<std::int64_t>(args.prepare_tile, m - row), weight, prescale,
                 static_cast<float*>(args.d.data) + row * weight.k);
  });
}

void run(const Kernel&, const StepArgs& args) {
  switch (args.a.dtype) {
    case DType::f16: return prepare<f16>(args);
    case DType::bf16: return prepare<bf16>(args);
    default: return prepare<float>(args);
  }
}

double cost_us(const Kernel&, const Problem& p) {
  constexpr double kNanosecondsPerElement = 0.8;  // an estimate; it decides nothing, there is one such kernel
  return 1e-3 * kNanosecondsPerElement * static_cast<double>(p.m) * static_cast<double>(p.k) / p.threads;
}

constexpr std::array kKernels{
    Kernel{.name = "prepare_f32_any_none__cpu_baseline",
           .backend = Backend::cpu,
           .isa = Isa::baseline,
           .op = Op::prepare,
           .out = "f32",
           .act = "any",
           .weight = "none",
           .layout = "",
           .tile = {},
           .prepared = false,
           .summary = "activations to f32 token tiles, in the packed weight's order and scale",
           .accepts = accepts_common,
           .cost_us = cost_us,
           .run = run},
};

}  // namespace

std::span<const Kernel> prepare_kernels() { return kKernels; }

}  // namespace nibble::cpu
