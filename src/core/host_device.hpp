// Marks functions that CPU code and GPU kernels share.
#pragma once

#if defined(__CUDACC__)
#define NIBBLE_HOST_DEVICE __host__ __device__
#else
#define NIBBLE_HOST_DEVICE
#endif

/// Whether the compiler accepts device code: nvcc does, and the compiler of the emulated GPU in tests/emulator.
#if defined(__CUDACC__) || defined(NIBBLE_EMULATOR)
#define NIBBLE_DEVICE_CODE 1
#else
#define NIBBLE_DEVICE_CODE 0
#endif
