// The launchers behind declarations that need no CUDA: launch.cpp calls them (dense.cpp those of the dense tier), no_cuda.cpp
// stands in for it in a build without NIBBLE_CUDA. So the rows of the kernel table are the same in every build.
//
// All enqueue on `stream` and return; errors are internal with CUDA's message, or unsupported without CUDA.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cuda/launch/dense.hpp"
#include "kernels/cuda/tasks/codes_task.hpp"
#include "kernels/cuda/tasks/conv_task.hpp"
#include "kernels/cuda/tasks/decode_config.hpp"
#include "kernels/cuda/tasks/dense_task.hpp"
#include "kernels/cuda/tasks/experts_task.hpp"
#include "kernels/cuda/tasks/linear_task.hpp"
#include "kernels/cuda/tasks/pair_task.hpp"
#include "kernels/cuda/tasks/quantize_task.hpp"
#include "kernels/cuda/tasks/stored_sums.hpp"
#include "kernels/cuda/tasks/w8a8_task.hpp"
#include "kernels/cuda/tasks/wna8_task.hpp"
#include "kernels/norm_task.hpp"
#include "kernels/recode_task.hpp"
#include "nibble/cuda.hpp"
#include "nibble/scheme.hpp"
#include "nibble/status.hpp"

namespace nibble::cuda {

/// Enqueues a copy within device memory on the default stream.
Status copy_on_device(void* to, const void* from, std::size_t bytes);
/// The steps around grouped products; see steps/experts.hpp.
Status launch_route(const RouteTask& task, Stream stream);
Status launch_sort_rows(const SortTask& task, Stream stream);
Status launch_gather_expert_rows(const GatherRowsTask& task, Stream stream);
Status launch_combine_rows(const CombineTask& task, Stream stream);
/// The room of the current GPU for the decode kernels of sm_90.
Result<RingRoom> ring_room();
/// config.tokens rows at a time; more rows take several launches.
Status launch_linear_sm90(const LinearTask& task, const DecodeConfig& config, Stream stream);
Status launch_decode_joined_sm90(const LinearTask& first, const DecodeConfig& config, const LinearTask& second,
                                 const DecodeConfig& second_config, Stream stream);
Status launch_linear_sm80(const LinearTask& task, int split, Stream stream);
/// The ordinal of the current device.
Result<int> current_device();
/// `tokens` of a pass, `depth` warpgroups and `split` CTAs that share K; see gemm.hpp.
Status launch_linear_wgmma(const LinearTask& task, int tokens, int depth, int split, Stream stream);
/// The same with activations that have been quantized; see wna8.hpp.
Status launch_wna8_sm80(const Wna8Task& task, int split, Stream stream);
/// Of rows of experts, in tiles of up to `rows`: kSm80ExpertRows (expert_tiles.hpp).
Status launch_gemm_sm80_experts(const LinearTask& task, int rows, Stream stream);
Status launch_w8a8_sm80_experts(const W8A8Task& task, int rows, Stream stream);
Status launch_wna8_sm80_experts(const Wna8Task& task, int rows, Stream stream);
Status launch_wna8_sm90(const Wna8Task& task, int tokens, int depth, int split, Stream stream);
Status launch_pairs_sm90(const PairTask& task, int tokens, int depth, int split, Stream stream);
/// The same from float activations, for few rows: config.tokens (8) at a time.
Status launch_wna8_decode_sm90(const Wna8DecodeTask& task, const DecodeConfig& config, Stream stream);
/// Convolutions: conv.hpp. Pixels of channels-last images of 16-bit floats begin at multiples of 16 bytes (Kernel::reads).
Status launch_conv_sm90(const ConvTask& task, int tokens, int depth, int split, Stream stream);
Status launch_conv_sm80(const ConvTask& task, Stream stream);
Status launch_conv_w8a8_sm90(const ConvTask& task, int tokens, int blocks, int split, Stream stream);
Status launch_conv_wna8_sm90(const ConvTask& task, int tokens, int split, Stream stream);
Status launch_conv_wna8_sm80(const ConvTask& task, Stream stream);
Status launch_conv_w8a8_sm80(const ConvTask& task, Stream stream);
Status launch_conv_direct(const ConvTask& task, Stream stream);
Status launch_conv_direct_s8(const ConvTask& task, Stream stream);
Status launch_gemm_sm80(const LinearTask& task, int split, Stream stream);
Status launch_linear_simt(const LinearTask& task, Stream stream);
/// Asks cuBLASLt for algorithms, on the current GPU.
Result<std::shared_ptr<const DenseConfig>> configure_dense(const DenseSpec& spec);
/// task.a_dtype is f16 or bf16, task.scratch laid out by dense_scratch() (dense.hpp). Prescale is ignored.
Status launch_linear_dense(const LinearTask& task, const DenseConfig& config, Stream stream);
/// The same of a weight that is dense already, of task.a_dtype, which may be f32; its scratch is that of DenseSpec::in_place.
Status launch_dense_weight(const DenseTask& task, const DenseConfig& config, Stream stream);
/// Dense weights on every GPU (tasks/dense.hpp).
Status launch_dense_simt(const DenseTask& task, Stream stream);
/// Ok if the dense tier's library can be loaded; otherwise unsupported with what is missing.
Status dense_runs_here();

/// Quantizes activations; also writes the scales, sums and terms that the task asks for.
Status launch_quantize_acts(const QuantizeTask& task, Stream stream);
/// f32 activations as 24-bit fixed point, three rows of codes each (fixed_point_acts.hpp).
Status launch_fixed_point_acts(const QuantizeTask& task, Stream stream);
/// f32 activations as pairs of f16 (pair_acts.hpp).
Status launch_pair_acts(const QuantizeTask& task, Stream stream);
/// The epilogue of sums in memory (epilogue_rows.hpp).
Status launch_epilogue_rows(const epilogue::Element& epilogue, const StoredSums& sums, std::int64_t m, int n, Stream stream);
/// Codes of the patches of images; neither sums nor terms.
Status launch_quantize_patches(const QuantizeTask& task, const PatchRows& patches, Stream stream);
/// x[M,K] = what the codes stand for (decode_acts.hpp).
Status launch_decode_acts(const QuantizedActs& acts, DType type, const std::int32_t* perm, std::int64_t m, std::int64_t k,
                          float* x, Stream stream);
/// FP8 codes → f16 numbers, and scales (decode_acts.hpp).
Status launch_code_halves(const CodeHalves& task, Stream stream);
/// u8 codes → s8 codes, and zero points.
Status launch_recode_acts(const RecodeTask& task, Stream stream);
/// RMSNorm or LayerNorm of activations (norm_rows.hpp).
Status launch_norm_rows(const NormTask& task, Stream stream);
/// The same, quantized.
Status launch_norm_codes(const NormTask& task, const QuantizeTask& codes, Stream stream);
/// sums[m] = Σ codes[m,k] of s8 activations that were given as codes, [M,K].
Status launch_sum_codes(const QuantizedActs& acts, std::int64_t m, std::int64_t k, std::int32_t* sums, Stream stream);
/// 8-bit codes times 8-bit codes.
Status launch_w8a8_simt(const W8A8Task& task, Stream stream);
Status launch_w8a8_sm80(const W8A8Task& task, int split, Stream stream);
/// int8 activations times integer codes in gpu_n64k128, on every GPU.
Status launch_codes_simt(const CodesTask& task, Stream stream);
/// `tokens` of a pass, its `blocks` of 64 rows, `depth` warpgroups and `split` CTAs that share K; see w8a8.hpp.
Status launch_w8a8_sm90(const W8A8Task& task, int tokens, int blocks, int depth, int split, Stream stream);
/// Of activations that become codes on the way.
Status launch_w8a8_sm90_floats(const W8A8Task& task, const FloatActs& floats, int blocks, Stream stream);

/// W → `out` [N,K] or (transposed) [K,N] of f32, f16 or bf16, rows `out_stride` elements apart.
Status launch_dequantize(const DeviceWeight& weight, void* out, DType out_type, std::int64_t out_stride, bool transposed,
                         Stream stream);

/// The same of a weight in gpu_w8n64k128.
Status launch_dequantize_w8(const W8Weight& weight, void* out, DType out_type, std::int64_t out_stride, bool transposed,
                            Stream stream);

/// The same of a dense weight.
Status launch_dequantize_dense(const DenseWeight& weight, void* out, DType out_type, std::int64_t out_stride, bool transposed,
                               Stream stream);

/// The canonical arrays of a QuantTensor, in device memory.
struct CanonicalArrays {
  const std::uint8_t* codes = nullptr;  // [N,K]
  const void* scales = nullptr;
  const void* zeros = nullptr;         // null: none
  const std::int32_t* perm = nullptr;  // [K]; null: in order
};
/// Fills `records` with the bytes that kGpuTileLayout.pack makes of the same weight.
Status launch_pack(const gpu_tile::Geometry& geometry, const WeightScheme& scheme, DType zero_type, const CanonicalArrays& from,
                   void* records, Stream stream);

}  // namespace nibble::cuda
