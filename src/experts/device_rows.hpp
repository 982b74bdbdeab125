// Rows of experts on the GPU: how they are sorted, gathered and described to the kernels of products.
#pragma once

#include "experts/check.hpp"
#include "kernels/cuda/tasks/experts_task.hpp"
#include "nibble/experts.hpp"

namespace nibble::experts {

constexpr std::size_t kDeviceAlignment = 256;  // of the parts of a workspace
/// Bytes of so many elements, up to where the next part begins.
constexpr std::size_t part(std::size_t count, std::size_t size) { return padded(count * size, kDeviceAlignment); }
/// Elements between rows that are gathered: 16 bytes for every type of floats, as TMA asks.
constexpr std::int64_t gathered_pitch(std::int64_t k) { return (k + 7) / 8 * 8; }

/// Ok where the GPU can sort so many experts.
Status check_device_experts(std::int64_t count);

/// Whether an expert's channels are permuted or scaled, so that rows have to be gathered for it.
bool changes_channels(const PackedExperts& experts);

/// Whether rows begin at multiples of 16 bytes.
bool are_vectors(const ConstTensorView& rows);

/// Gathers `rows` rows of `from` in the order of task.source, with the channels of `experts`; the caller fills in the rest.
cuda::GatherRowsTask gathering(const PackedExperts& experts, const ConstTensorView& from, std::int64_t rows, void* to);

/// The experts of a product of tiles that sort_rows() fills.
cuda::ExpertTiles tiles_of(const PackedExperts& experts, const cuda::SortTask& sorted, const cuda::SortTask::Tiles& tiles);

}  // namespace nibble::experts
