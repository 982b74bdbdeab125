// Packed weights in device memory: packing, upload, download, and the form that kernels take.
#pragma once

#include "kernels/cuda/tasks/linear_task.hpp"
#include "layouts/layout.hpp"
#include "nibble/cuda.hpp"
#include "nibble/plan.hpp"
#include "nibble/tensor.hpp"

namespace nibble::cuda {

/// Device memory as a packed weight owns it.
Buffer as_buffer(DeviceMemory memory);

/// Fills packed.bytes and packed.device; the rest of `packed` is set, its layout one of the GPU. Arranges the bytes on the GPU where
/// it can: one core packs 0.2 GB/s, the GPU as fast as the codes get there.
Status pack(const QuantTensor& q, PackedWeightData& packed, Executor& executor);

/// Fills packed.device: copies of what kernels read of the header.
Status copy_parts(PackedWeightData& packed);

/// The same weight with its bytes in host memory.
Result<PackedWeightData> download(const PackedWeightData& packed);

/// The arguments of kernels for a weight in device memory.
DeviceWeight device_weight(const PackedWeightData& packed);
/// What kernels ask for of the weight of the next call (Operands::next); nothing of null.
NextWeight next_weight(const PackedWeight* next);

}  // namespace nibble::cuda
