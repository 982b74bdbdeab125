// The steps around a convolution that runs as a linear layer: a token per output pixel.
//
//   images ──im2col──▶ patches [tokens, Kh·Kw·Ci] ──linear──▶ D [tokens, Co]  ──col2im──▶ images
//                                                              in images with channels last, rows lie where they belong
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/im2col_task.hpp"

namespace nibble::cuda {

/// Any geometry of one group, any strides and alignment of images.
cudaError_t im2col(const Im2colTask& task, cudaStream_t stream);
cudaError_t col2im(const Col2imTask& task, cudaStream_t stream);

}  // namespace nibble::cuda
