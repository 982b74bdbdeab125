// The launchers of the steps around a convolution that runs as a linear layer (steps/im2col.hpp), as those of launch.hpp.
#pragma once

#include "kernels/cuda/tasks/im2col_task.hpp"
#include "nibble/cuda.hpp"
#include "nibble/status.hpp"

namespace nibble::cuda {

Status launch_im2col(const Im2colTask& task, Stream stream);
Status launch_col2im(const Col2imTask& task, Stream stream);

}  // namespace nibble::cuda
