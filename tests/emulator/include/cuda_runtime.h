// The same as cuda_runtime_api.h: kernels are launched with cudaLaunchKernelEx.
#pragma once

#include <cuda_runtime_api.h>
