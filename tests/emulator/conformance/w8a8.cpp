#include "emulator/conformance/launchers.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/simt/w8a8.cu"

int nibble::emulator::linear_w8a8_simt(const cuda::W8A8Task& task) { return cuda::linear_w8a8_simt(task, nullptr); }
