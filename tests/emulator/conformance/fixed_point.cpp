// f32 activations as fixed point. The convolutions of sm_80 call it themselves, as on a GPU.
#include "emulator/conformance/launchers.hpp"
#include "kernels/cuda/steps/fixed_point_acts.cu"

int nibble::emulator::fixed_point_acts(const cuda::QuantizeTask& task) { return cuda::fixed_point_acts(task, nullptr); }
