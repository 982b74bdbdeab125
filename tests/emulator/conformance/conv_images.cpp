// Images for the convolutions of sm_80: they call it themselves, as on a GPU.
#include "emulator/conformance/launchers.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/steps/conv_images.cu"
