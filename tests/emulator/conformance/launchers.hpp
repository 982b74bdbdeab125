// The launchers of the kernels of every GPU, and of sm_80's for floats, for codes, for experts and for convolutions, on the emulated GPU: each in a translation unit with the shared memory that its kernels declare.
#pragma once

#include "kernels/cuda/launch/launch.hpp"

namespace nibble::emulator {

/// They return a cudaError_t.
int linear_simt(const cuda::LinearTask& task);
int linear_dense_simt(const cuda::DenseTask& task);
int dequantize_dense(const cuda::DenseWeight& weight, void* out, DType type, std::int64_t stride, bool transposed);
int linear_w8a8_simt(const cuda::W8A8Task& task);
int linear_codes_simt(const cuda::CodesTask& task);
int conv_direct(const cuda::ConvTask& task);
int conv_direct_s8(const cuda::ConvTask& task);
int conv_gemm_sm80(const cuda::ConvTask& task);
int conv_w8a8_sm80(const cuda::ConvTask& task);
int conv_wna8_sm80(const cuda::ConvTask& task);
int quantize_acts(const cuda::QuantizeTask& task);
int quantize_patches(const cuda::QuantizeTask& task, const cuda::PatchRows& patches);
int decode_acts(const cuda::QuantizedActs& acts, DType type, const std::int32_t* perm, std::int64_t m, std::int64_t k, float* x);
int code_halves(const cuda::CodeHalves& task);
int recode_acts(const RecodeTask& task);
int fixed_point_acts(const cuda::QuantizeTask& task);
int epilogue_rows(const epilogue::Element& epilogue, const cuda::StoredSums& sums, std::int64_t m, int n);
int sort_rows(const cuda::SortTask& task);
int gather_expert_rows(const cuda::GatherRowsTask& task);
int combine_rows(const cuda::CombineTask& task);
int linear_decode_sm80(const cuda::LinearTask& task, int split);
int linear_gemm_sm80(const cuda::LinearTask& task, int split);
int linear_gemm_sm80_experts(const cuda::LinearTask& task, int rows);
int linear_w8a8_sm80_experts(const cuda::W8A8Task& task, int rows);
int linear_wna8_sm80(const cuda::Wna8Task& task, int split);
int linear_wna8_sm80_experts(const cuda::Wna8Task& task, int rows);
int norm_rows(const NormTask& task);
int norm_codes(const NormTask& task, const cuda::QuantizeTask& codes);
int sum_codes(const cuda::QuantizedActs& acts, std::int64_t m, std::int64_t k, std::int32_t* sums);
int dequantize_w8(const cuda::W8Weight& weight, void* out, DType type, std::int64_t stride, bool transposed);
int dequantize_packed(const cuda::DeviceWeight& weight, void* out, DType type, std::int64_t stride, bool transposed);
int pack_gpu_tile(const gpu_tile::Geometry& geometry, const WeightScheme& scheme, DType zero_type,
                  const cuda::CanonicalArrays& arrays, void* records);

}  // namespace nibble::emulator
