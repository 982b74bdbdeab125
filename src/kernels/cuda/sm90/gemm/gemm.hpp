// What the sm_90 GEMM's launcher (gemm.cu) and its kernels (gemm_kernel.cuh) agree on.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/device/stream_k.hpp"
#include "kernels/cuda/tasks/gemm_schedule.hpp"
#include "kernels/cuda/tasks/half_out.hpp"
#include "kernels/cuda/tasks/linear_task.hpp"
#include "kernels/cuda/tasks/patches.hpp"
#include "kernels/cuda/tasks/wna8_task.hpp"
#include "kernels/cuda/weights/record_format.cuh"

namespace nibble::cuda {

/// The values that determine the sizes of a CTA's shared memory.
struct GemmShape {
  int tokens = 128;
  bool codes = false;  // activations are s8 codes, else 16-bit floats
  int folds = 0;       // of a record of codes
  bool patches = false;
  bool offsets = false;  // of activations that are codes
  bool experts = false;  // rows of A are of experts, whose tiles seldom have as many as there is room for
  bool pairs = false;    // activations are pairs of f16 (gemm_pairs.cuh)

  NIBBLE_HOST_DEVICE constexpr int groups() const { return pairs ? pair_groups(tokens) : gemm_groups(tokens); }
  NIBBLE_HOST_DEVICE constexpr int part() const { return experts ? gemm_part(tokens, codes) : tokens; }
  /// The multiplying warpgroups and the producers': registers are reallocated per warpgroup.
  NIBBLE_HOST_DEVICE constexpr int threads() const { return 128 * (groups() + 1); }
  /// Bytes of a record's activations, and of their terms.
  NIBBLE_HOST_DEVICE constexpr int act_bytes() const { return tokens * gpu_tile::kChannels * (codes ? 1 : pairs ? 4 : 2); }
  NIBBLE_HOST_DEVICE constexpr int term_bytes() const {
    return term_tokens(tokens, experts) * (patches && folds == 1 ? 16 : folds * token_term_bytes(offsets));
  }
};

/// Offsets in a CTA's shared memory: activations of all stages, their terms, records of all stages, staging, barriers. The inbox of a
/// split pass begins at 0.
struct GemmMap {
  int terms, records, staging, barriers, total;
};
NIBBLE_HOST_DEVICE constexpr GemmMap gemm_map(int stages, GemmShape shape, int depth, int record_bytes, int split) {
  constexpr int kStaging = 4 * 8 * (gpu_tile::kRows + 4) * 4;  // of a warpgroup: four units of 64 rows × 8 tokens, f32
  const int groups = shape.groups();
  GemmMap map{};
  map.terms = stages * depth * shape.act_bytes();
  map.records = map.terms + stages * depth * shape.term_bytes();
  const int ring = (map.records + stages * groups * record_bytes + 127) / 128 * 128;
  const int inbox = split > 1 ? groups * shape.tokens * gpu_tile::kRows * 4 : 0;
  map.staging = ring > inbox ? ring : inbox;
  map.barriers = map.staging + groups * kStaging;
  map.total = map.barriers + 2 * 8 * stages;
  return map;
}

struct GemmParams {
  CUtensorMap x;       // boxes of a token tile, or of patches
  CUtensorMap last_x;  // a box of the tokens of the last token tile; of experts of a part of a tile. Not of patches
  int last_tokens;
  const std::uint8_t* records;
  RecordFormat format;
  epilogue::Element epilogue;
  NextWeight next;
  Schedule schedule;
  int m, n, k;
  int first_row;  // of D and the epilogue's operands that belongs to the first row of x
  int depth;      // warpgroups that share a row block
  int stages;
  GemmMap map;
  bool scale_after;           // operands are u − z, sums are multiplied by the scale: one group per channel
  HalfOut half;               // how D is stored
  StreamK parts;              // of passes that CTAs share
  const std::uint8_t* terms;  // of codes: wna8.hpp
  std::int64_t fold_pitch;    // bytes between folds
  const float* token_scales;  // of codes, null: they are in the terms; of pairs
  Patches patches;            // of a convolution
  int unused_tokens;          // of planar images: tokens of each after its pixels, up to a multiple of kPlanarPixels
  CUtensorMap pixel_terms;    // of its codes, instead of `terms`: 16 bytes a box
  int box_channels;           // of its codes
  int images;
  std::int64_t image_stride, channel_stride;  // of D, whose pixels are side by side; 0: its channels are
  ExpertTiles experts;                        // of rows of experts, which `schedule` knows without the number of token tiles
  int plane_records;  // of a weight for codes of images: passes go over its records again for each plane of plane_images
  int plane_images;   // images: 1 plane of them all or, of fixed point, 3 (fixed_point_acts.hpp)

  NIBBLE_HOST_DEVICE int rows() const { return n; }
};

using GemmKernel = const Launchable<GemmParams>*;
/// The kernel for n tokens a pass; null when there is none.
GemmKernel gemm_sm90_f16(int tokens, const RecordFormat& format);
GemmKernel gemm_sm90_bf16(int tokens, const RecordFormat& format);
/// The kernel for patches: 64, 128 or 256 tokens.
GemmKernel gemm_sm90_patches_f16(int tokens, const RecordFormat& format);
GemmKernel gemm_sm90_patches_bf16(int tokens, const RecordFormat& format);
/// The kernel for planar (NCHW) images and pointwise filters: 64, 128 or 256 tokens; null when there is none.
GemmKernel gemm_sm90_planar_f16(int tokens, const RecordFormat& format);
GemmKernel gemm_sm90_planar_bf16(int tokens, const RecordFormat& format);
/// The kernels for rows of experts: 16, 32, 64 or 128 tokens.
GemmKernel gemm_sm90_experts_f16(int tokens, const RecordFormat& format);
GemmKernel gemm_sm90_experts_bf16(int tokens, const RecordFormat& format);
/// Parts of these four, for weights whose codes are floats.
GemmKernel gemm_sm90_f16_float_codes(int tokens, const RecordFormat& format);
GemmKernel gemm_sm90_bf16_float_codes(int tokens, const RecordFormat& format);
GemmKernel gemm_sm90_patches_f16_float_codes(int tokens, const RecordFormat& format);
GemmKernel gemm_sm90_patches_bf16_float_codes(int tokens, const RecordFormat& format);
/// The kernel for pairs of f16: 16, 32, 64 or 128 tokens; null when there is none.
GemmKernel gemm_sm90_pairs(int tokens, const RecordFormat& format);
/// A part of it, for weights whose codes are floats.
GemmKernel gemm_sm90_pairs_float_codes(int tokens, const RecordFormat& format);
/// The kernel for s8 codes, whose sums are folded every `fold` channels: 32 or 128.
GemmKernel gemm_sm90_s8(int tokens, const RecordFormat& format, int bits, int fold);
/// The same for terms without scales.
GemmKernel gemm_sm90_s8_plain(int tokens, const RecordFormat& format, int bits, int fold);
/// The same with zero points.
GemmKernel gemm_sm90_s8_zeros(int tokens, const RecordFormat& format, int bits, int fold);
/// The same with float offsets.
GemmKernel gemm_sm90_s8_offsets(int tokens, const RecordFormat& format, int bits, int fold);
/// The kernel for rows of experts, of s8 codes: 16, 64 or 128 tokens; null when there is none.
GemmKernel gemm_sm90_experts_s8(int tokens, const RecordFormat& format, int bits, int fold);
/// Those with a scale, and with zero points, for patches: 64 tokens.
GemmKernel gemm_sm90_patches_s8(int tokens, const RecordFormat& format, int bits, int fold, bool zero_points);

}  // namespace nibble::cuda
