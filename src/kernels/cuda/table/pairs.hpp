// f32 activations as pairs of f16: what benchmarks know of these rows.
#pragma once

#include "kernels/cuda/table/wgmma_cost.hpp"
#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

/// Of sm_90's kernels that multiply pairs of f16.
WgmmaFeatures pairs_sm90_features(const Tile& tile, const GpuInfo& gpu, const Problem& problem);

}  // namespace nibble::cuda
