#include "emulator/conformance/launchers.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/simt/conv.cu"

int nibble::emulator::conv_direct(const cuda::ConvTask& task) { return cuda::conv_direct(task, nullptr); }
int nibble::emulator::conv_direct_s8(const cuda::ConvTask& task) { return cuda::conv_direct_s8(task, nullptr); }
