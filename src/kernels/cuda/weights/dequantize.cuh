// W as f16, bf16 or f32 from the tensors of an AWQ (gemm) or GPTQ checkpoint, on the GPU and without packing first.
//
//   W[n,k] = fl_out(fl32((u − z)·s))   with z and s of group g_idx[k], else k / group
//
// These are the bits QuantTensor::value gives once rounded to the output type (a NaN scale gives a NaN; its payload may differ).
// Plain C++: includable without the CUDA headers.
#pragma once

#include <cstdint>

#include "nibble/types.hpp"

namespace nibble::cuda {

/// The packing of the words of qweight and qzeros.
enum class CheckpointFormat : std::uint8_t {
  awq,   // qweight [K, N/8], qzeros [G, N/8]: nibbles in AWQ's order; 4 bits
  gptq,  // qweight [⌈K·b/32⌉, N], qzeros [G, ⌈N·b/32⌉]: dense streams; 2, 3, 4 or 8 bits
};

/// A quantized matrix as it lies in a checkpoint; every pointer is device memory, every tensor dense.
struct CheckpointWeight {
  CheckpointFormat format = CheckpointFormat::awq;
  int bits = 4;
  bool zeros_minus_one = false;   // GPTQ v1: qzeros holds (z − 1) mod 2^bits
  DType scale = DType::f16;       // f16, bf16 or f32
  std::int64_t n = 0, k = 0;      // W[N,K]: output and input channels
  std::int64_t group = 0;         // input channels a group; 0: all of K
  const void* qweight = nullptr;  // s32 words
  const void* qzeros = nullptr;   // s32 words
  const void* scales = nullptr;   // [G, N]
  const void* g_idx = nullptr;    // s32 [K], each in [0, G) (not checked); null: k / group
};

/// Order of the output's elements.
enum class WeightOrder : std::uint8_t {
  nk,  // [N,K], what a linear layer stores
  kn,  // [K,N], the order of the checkpoint's own rows
};

/// Why `dequantize` refuses these arguments, or null when it does not. Pointers need the alignment of their elements only. The fast
/// kernels want 16-byte aligned pointers, N % 8 == 0 and, for [N,K] output, K % 8 == 0 (f32: K % 4) and groups of at least 32 in
/// steps of 8; act-order also wants K % 8 == 0 and 16-bit scales. Everything else, 3-bit codes among it, is several times slower.
const char* dequantize_refusal(const CheckpointWeight& weight, const void* out, DType out_type);

/// Enqueues the kernel that fills `out` (N·K elements) on `stream`, a cudaStream_t. Returns a cudaError_t: 0, cudaErrorInvalidValue
/// for refused arguments, or the error of the launch. Neither allocates nor synchronises.
int dequantize(const CheckpointWeight& weight, void* out, DType out_type, WeightOrder order, void* stream);

/// The name of the kernel `dequantize` would choose: "rows", "tile", "gather" or "generic".
const char* dequantize_kernel(const CheckpointWeight& weight, const void* out, DType out_type, WeightOrder order);

}  // namespace nibble::cuda
