// The arguments of the launchers that multiply 8-bit codes by 8-bit codes: plain values, host and device.
//
//   D[m,n] = epilogue( s_a[m] · s_w[n] · Σ_k (Â[m,k] − z_a[m])·(Ŵ[n,k] − z_w[n]) )
//
// Integers: the sum I is exact, I = Σ Â·Ŵ − z_a·Σ Ŵ − z_w·Σ Â + K·z_a·z_w + sum_bias, modulo 2³². Then fl(fl(float(I)·s_a)·s_w), and the
// epilogue; or, for a D of s32, I itself.
// e4m3: s_a and s_w may be per group of 128 channels and per block; the sum of each group is scaled and added in f32. Without groups sm_90
// has a choice (`together`).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.hpp"
#include "epilogue/element.hpp"
#include "kernels/cuda/tasks/expert_tiles.hpp"
#include "kernels/cuda/tasks/next_weight.hpp"
#include "kernels/cuda/tasks/quantized_acts.hpp"
#include "layouts/gpu_w8.hpp"
#include "nibble/scheme.hpp"

namespace nibble::cuda {

/// A weight packed as gpu_w8n64k128, in device memory, aligned to 256 bytes.
struct W8A8Weight {
  const std::byte* bytes = nullptr;
  gpu_w8::Geometry geometry;

  NIBBLE_HOST_DEVICE const float* scales() const { return reinterpret_cast<const float*>(bytes + geometry.scales_offset()); }
  NIBBLE_HOST_DEVICE const std::int32_t* sums() const {
    return reinterpret_cast<const std::int32_t*>(bytes + geometry.sums_offset());
  }
  NIBBLE_HOST_DEVICE const std::int32_t* zeros() const {
    return geometry.has_zeros ? reinterpret_cast<const std::int32_t*>(bytes + geometry.zeros_offset()) : nullptr;
  }
};

/// The same with what the products leave to others: W[n, perm[k]] = (code − zero)·scale·scale2.
struct W8Weight : W8A8Weight {
  float scale2 = 1.0f;
  const std::int32_t* perm = nullptr;  // [K]: packed position k holds input channel perm[k]; null: in order
};

struct W8A8Task {
  W8A8Weight weight;
  QuantizedActs acts;
  int m = 0;
  int together = 0;             // e4m3 on sm_90: the most records that are summed in tensor cores before f32; 0: all
  epilogue::Element epilogue;   // acc_scale is the weight's scale2
  void* scratch_end = nullptr;  // memory for stream-K and split K ends here (stream_k.hpp, split_k.hpp)
  NextWeight next;
  ExpertTiles experts;  // of a grouped product, whose weight is the first expert's; without tiles: of one weight
};

/// Activations [M,K] that a kernel makes codes of itself, in device memory: W8A8Task::acts has their scale and zero point only.
struct FloatActs {
  const void* a = nullptr;
  DType type = DType::f16;  // or bf16
  std::int64_t stride = 0;  // elements between rows
};

/// Rows of a tile of experts, of the kernel of every GPU.
constexpr int kW8A8SimtExpertRows = 32;

/// The places of quantized activations in a plan's workspace: codes[M][pitch] | scales f32[G][tokens] | zeros s32[G][tokens], or offsets
/// f32 | sums s32[M]. Static activations have only codes and sums. Groups begin at multiples of 16 bytes.
struct ActMap {
  std::int64_t pitch = 0, groups = 1, tokens = 0;  // tokens: M, or up to three more
  std::size_t scales = 0, zeros = 0, sums = 0, bytes = 0;
};
constexpr ActMap act_map(const ActScheme& act, std::int64_t m, std::int64_t k) {
  constexpr std::size_t kAlignment = 256;
  const auto round_up = [](std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  ActMap map;
  map.pitch = (k + 127) / 128 * 128;
  map.groups = act.group.cols(k);
  map.tokens = (m + 3) / 4 * 4;
  const bool known = act.group == GroupShape::tensor();
  const auto rows = static_cast<std::size_t>(m);
  map.scales = round_up(rows * static_cast<std::size_t>(map.pitch));
  const std::size_t of_groups = known ? 0 : round_up(4 * static_cast<std::size_t>(map.tokens * map.groups));
  map.zeros = map.scales + of_groups;
  map.sums = map.zeros + (act.zero == ZeroKind::none ? 0 : of_groups);
  map.bytes = map.sums + round_up(4 * rows);
  return map;
}

}  // namespace nibble::cuda
