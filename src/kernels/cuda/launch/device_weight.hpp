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

/// Fills packed.bytes and packed.device of gpu_n64k128 from all codes of the weight, which are bytes; the rest of `packed` is set. The GPU
/// arranges them as fast as they get there; one core packs 0.2 GB/s.
Status pack(const QuantTensor& q, const CodeRows& codes, PackedWeightData& packed);
/// Moves packed.bytes from the host to the device and fills packed.device.
Status move_to_device(PackedWeightData& packed);

/// Fills packed.device: copies of what kernels read of the header.
Status copy_parts(PackedWeightData& packed);

/// The same weight with its bytes in host memory.
Result<PackedWeightData> download(const PackedWeightData& packed);

/// The arguments of kernels for a weight in device memory.
DeviceWeight device_weight(const PackedWeightData& packed);
/// What kernels ask for of the weight of the next call (Operands::next); nothing of null.
NextWeight next_weight(const PackedWeight* next);

}  // namespace nibble::cuda
