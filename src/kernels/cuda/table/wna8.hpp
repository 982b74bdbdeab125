// Rows of the kernel table that multiply int8 activations, quantized while running or given as codes, with weights in the layout
// gpu_n64k128.
#pragma once

#include "kernels/cuda/table/wgmma_cost.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/tasks/gemm_schedule.hpp"
#include "kernels/cuda/tasks/quantize_task.hpp"
#include "kernels/kernel.hpp"
#include "layouts/gpu_tile.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

/// Channels whose products are summed as integers: a whole record where they share a scale on both sides, and the weight is of a common
/// kind (16-bit scales, zeros that are bytes or in the middle of the codes); else 32, or 16 where scales change more often.
int online_fold(const ActScheme& act, const WeightScheme& weight);

/// The quantization rule of a step, or the scales and zero points of codes that are given; the caller adds A, its size and the outputs.
QuantizeTask online_rule(const StepArgs& args);

/// Refuses weights that are not of integers, or whose scales change within a fold.
Status accepts_wna8_weight(const Problem& problem);
/// Whether activations are int8 codes, made while running or given, in groups that the kernels support.
Status accepts_wna8(const Problem& problem);

/// Refuses folds of 16 channels: half of what a matrix instruction of bytes multiplies.
Status accepts_whole_steps(const Problem& problem);

/// The family of kernels that the records of a linear layer belong to.
WgmmaFamily wna8_family(const Problem& problem);
/// Predicted microseconds of sm_90's tiles, the quantizer apart; family: an online one.
WgmmaFeatures wna8_sm90_features(const Tile& tile, const GpuInfo& gpu, const Problem& p, WgmmaFamily family);
double wna8_sm90_cost_us(const Tile& tile, const GpuInfo& gpu, const Problem& p, WgmmaFamily family);
/// The same of sm_80's kernel.
double wna8_sm80_cost_us(const GpuInfo& gpu, const Problem& problem);
/// With a CTA's tokens, 16 or 64, and the CTAs that divide K of a tile.
double wna8_sm80_cost_us(const GpuInfo& gpu, const Problem& problem, int tokens, int split = 1);

/// The same for the rows that quantize by themselves: a known scale is not looked for.
WgmmaFamily wna8_decode_family(const Problem& problem);
/// Predicted microseconds of these rows, `tokens` a launch.
double wna8_decode_cost_us(int tokens, const GpuInfo& gpu, const Problem& problem);

}  // namespace nibble::cuda
