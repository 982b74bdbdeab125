// W as f16, bf16 or f32 from a weight packed as gpu_n64k128.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/linear_task.hpp"

namespace nibble::cuda {

/// Enqueues W → out: [N,K], or [K,N] when transposed; `stride` elements between rows. The bits QuantTensor::value gives, rounded once
/// to out_type (a NaN's payload may differ). act-order is undone: column k of W is input channel k. prescale is left out.
/// Fast when out is aligned to 16 bytes and so is its stride; [N,K] also wants channels in order.
cudaError_t dequantize_packed(const DeviceWeight& weight, void* out, DType out_type, std::int64_t stride, bool transposed,
                              cudaStream_t stream);

}  // namespace nibble::cuda
