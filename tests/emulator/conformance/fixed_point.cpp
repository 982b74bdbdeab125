// f32 activations as fixed point, for the convolutions of sm_80: they call it themselves, as on a GPU.
#include "emulator/conformance/launchers.hpp"

#include "kernels/cuda/steps/fixed_point_acts.cu"
