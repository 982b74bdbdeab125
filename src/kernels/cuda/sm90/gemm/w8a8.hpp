// What the sm_90 8-bit GEMM's launcher (w8a8.cu) and its kernels (w8a8_kernel.cuh) agree on.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/device/stream_k.hpp"
#include "kernels/cuda/tasks/gemm_schedule.hpp"
#include "kernels/cuda/tasks/half_out.hpp"
#include "kernels/cuda/tasks/patches.hpp"
#include "kernels/cuda/tasks/w8a8.hpp"
#include "kernels/cuda/tasks/w8a8_task.hpp"
#include "quantize/act_rule.hpp"

namespace nibble::cuda {

/// What a kernel sums, and which operand has 64 rows.
struct W8A8Form {
  bool grouped = false;     // groups of channels have scales
  bool token_rows = false;  // tokens are the 64-row operand (w8a8_token_rows.cuh)
  bool floats = false;      // tokens come as 16-bit floats, whose codes the kernel makes (w8a8_float_rows.cuh)
};

/// The multiplying warpgroups of a CTA. Where tokens are the 64-row operand each has 64 tokens, or twice 64, and all rows.
NIBBLE_HOST_DEVICE constexpr int w8a8_groups(int tokens, W8A8Form form) {
  return !form.token_rows ? w8a8_groups(tokens, form.grouped) : tokens == 64 ? 1 : 2;
}
/// With the producers': registers are reallocated per warpgroup.
constexpr int w8a8_threads(const W8A8Config& c, W8A8Form form) { return 128 * (w8a8_groups(c.tokens, form) + 1); }

/// The most records whose products a precise kernel sums in tensor cores. With 256 tokens the stages of so many are read twice, and a ring
/// has four. It depends neither on M nor on the ring, because sums would differ.
constexpr int w8a8_together(const W8A8Config& c, int wanted) { return c.tokens > 128 && wanted > 2 ? 2 : wanted; }

/// The tokens of a pass that come as floats.
constexpr int kFloatTokens = 128;

/// Where the scales of tokens in groups are. rows: a group's are side by side, and bulk copies can read them.
enum class TokenScales : std::uint8_t { one, rows, scattered };

/// Offsets in a CTA's shared memory: activations of all stages, records of all stages, staging, terms of the epilogue (per warpgroup: of
/// tokens, or of rows where tokens are the 64-row operand), scales of groups (per stage), barriers. The inbox of a split pass begins at 0.
struct W8A8Map {
  int records, staging, terms, scales, barriers, total;
};
constexpr int kTokenTerms = 3, kRowTerms = 4;  // scale, zero point, sum of codes; of rows also the bias
constexpr W8A8Map w8a8_map(int stages, const W8A8Config& c, W8A8Form form) {
  constexpr int kStaging = 4 * 8 * (gpu_w8::kRows + 4) * 4;  // of a warpgroup: four units of 64 rows × 8 tokens, f32
  W8A8Map map{};
  map.records = stages * c.depth * c.tokens * gpu_w8::kChannels * (form.floats ? 2 : 1);
  const int ring = map.records + stages * c.blocks * c.depth * gpu_w8::kRecordBytes;
  const int inbox = c.split > 1 ? c.blocks * c.tokens * gpu_w8::kRows * 4 : 0;
  map.staging = ring > inbox ? ring : inbox;
  const int groups = w8a8_groups(c.tokens, form);
  const int terms = !form.token_rows ? kTokenTerms * c.tokens : form.grouped ? 0 : kRowTerms * kTokenRowBlocks * gpu_w8::kRows;
  map.terms = map.staging + groups * kStaging;
  map.scales = map.terms + groups * 4 * terms;
  map.barriers = map.scales + (form.grouped ? stages * c.depth * c.tokens * 4 : 0);
  map.total = map.barriers + 2 * 8 * stages;
  return map;
}

struct W8A8Params {
  CUtensorMap x;       // boxes of a token tile, or of patches
  CUtensorMap last_x;  // a box of the tokens of the last token tile; of experts of a part of a tile. Not of patches
  int last_tokens;
  W8A8Weight weight;
  QuantizedActs acts;
  TokenScales token_scales;  // of groups
  Divisor by_scale_blocks;   // row blocks that share a scale
  epilogue::Element epilogue;
  NextWeight next;
  Schedule schedule;
  int m;
  int first_row;  // of D and the epilogue's operands that belongs to the first row of acts
  int blocks, depth;
  int together;  // records whose products a precise kernel sums in tensor cores
  int stages;
  W8A8Map map;
  StreamK parts;     // of passes that CTAs share
  bool zero_points;  // of activations or weights
  HalfOut half;      // how D is stored
  bool floats_out;   // whether token rows store f32 as it is (W8A8TokenStore::store_floats)
  bool codes_out;    // whether token rows store codes of 8 bits, 16 at a time (W8A8TokenStore::store_codes)
  Patches patches;   // of a convolution
  int images, box_channels;
  std::int64_t image_stride, channel_stride;  // of D, whose pixels are side by side; 0: its channels are
  ExpertTiles experts;                        // of rows of experts, which `schedule` knows without the number of token tiles
  act_rule::Rule rule;                        // by which floats become codes

  NIBBLE_HOST_DEVICE int rows() const { return static_cast<int>(weight.geometry.n); }
};

using W8A8Kernel = const Launchable<W8A8Params>*;
/// The kernel for n tokens a pass; null when there is none.
W8A8Kernel w8a8_sm90_s8(int tokens, bool token_rows);
W8A8Kernel w8a8_sm90_e4m3(int tokens, bool token_rows);
W8A8Kernel w8a8_sm90_e4m3_grouped(int tokens, bool token_rows);
W8A8Kernel w8a8_sm90_e4m3_precise(int tokens);
/// The kernels for rows of experts: 16, 64 or 128 tokens.
W8A8Kernel w8a8_sm90_experts_s8(int tokens, bool token_rows);
W8A8Kernel w8a8_sm90_experts_e4m3(int tokens, bool grouped, bool token_rows);
/// The kernel for patches: 64, 128 or 256 tokens.
W8A8Kernel w8a8_sm90_patches_s8(int tokens);
W8A8Kernel w8a8_sm90_patches_e4m3(int tokens);
/// The kernel for tokens of that type, f16 or bf16, in passes of kFloatTokens: 1 or 2 row blocks a pass.
W8A8Kernel w8a8_sm90_floats(DType type, int blocks);

}  // namespace nibble::cuda
