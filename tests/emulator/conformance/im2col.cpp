// Kernels whose arrays in shared memory are static here.
#include "kernels/cuda/launch/im2col.hpp"
#include "emulator/conformance/launchers.hpp"
#include "emulator/conformance/status.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/steps/im2col.cu"

namespace nibble::cuda {

Status launch_im2col(const Im2colTask& task, Stream) { return emulator::status_of(im2col(task, nullptr)); }
Status launch_col2im(const Col2imTask& task, Stream) { return emulator::status_of(col2im(task, nullptr)); }

}  // namespace nibble::cuda
