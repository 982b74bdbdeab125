// Weights of 1 to 8 bits times 16-bit floats: what the other families share with these rows.
#pragma once

#include <span>

#include "kernels/cuda/device/stream_k.hpp"
#include "kernels/cuda/table/wgmma_cost.hpp"
#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

/// The GPU of a problem; precondition: accepts_common has accepted the problem.
GpuInfo gpu_of(const Problem& problem);
/// The workspace of a row that needs so many bytes, followed, with stream-K, by memory for the partial sums of `groups` warpgroups.
inline std::size_t with_parts(std::size_t bytes, const Kernel& self, int groups, const Problem& p) {
  if (self.tile.split != kStreamK) return bytes;
  return (bytes + 255) / 256 * 256 + stream_k_bytes(self.tile.m, groups, gpu_of(p).sms);
}
/// The end of that workspace.
inline void* end_of(std::span<std::byte> scratch) { return scratch.data() + scratch.size(); }

/// The variant of rows that multiply rows of experts, and not by one weight.
constexpr std::string_view kOfExperts = "experts";
/// Refuses one weight for such a row.
Status accepts_one_weight(const Kernel& self, const Problem& p);
/// Refuses weights whose scales change within `shortest` channels.
Status accepts_slots(const Problem& p, int shortest);
/// Refuses codes that no kernel decodes in registers.
Status accepts_decoded_codes(const Problem& p);
/// Whether scales and zeros are of the kinds for which the wgmma kernels have fast paths (constants_path).
bool has_usual_constants(const Problem& p);
/// Refuses weights that the wgmma kernels of 16-bit activations do not decode.
Status accepts_wgmma_weight(const Problem& p);

/// The CTAs that divide K of a tile, in sm_80's rows for few tiles.
constexpr int kSm80Splits[] = {2, 4, 8};
/// The variant of these rows, where others have none.
constexpr std::string_view split_variant(int split) { return split == 2 ? "split2" : split == 4 ? "split4" : "split8"; }
/// The CTAs that divide K, for a prediction: adding their sums was not measured, so on a GPU with kernels of its own, which were, what they
/// gain does not count.
int counted_ranks(int ranks, const GpuInfo& gpu);

constexpr double kLaunchUs = 1.5;  // the cost of a launch among others in a stream or graph
/// Reading the list of tiles of experts and sharing them out, which a layer's launch of wgmma kernels need not; of an H200.
constexpr double kDistributeUs = 3.0;

/// Predicted microseconds of the kernel without tensor cores, and of those for few tokens: of sm_80, of sm_90 with so many a launch.
double simt_cost_us(const GpuInfo& gpu, const Problem& problem);
double decode_sm80_cost_us(const GpuInfo& gpu, const Problem& problem);
double decode_sm90_cost_us(int tokens, const GpuInfo& gpu, const Problem& problem);
/// The family of kernels of 16-bit activations that the records of a linear layer belong to.
WgmmaFamily wna16_family(const Problem& problem);
/// The same for the decode kernels.
WgmmaFamily wna16_decode_family(const Problem& problem);
/// Predicted microseconds of sm_90's wgmma kernels of 16-bit activations.
WgmmaFeatures gemm_sm90_features(const Tile& tile, const GpuInfo& gpu, const Problem& problem);
double gemm_sm90_cost_us(const Tile& tile, const GpuInfo& gpu, const Problem& problem);
/// Of sm_80's GEMM, of whose CTAs `split` divide K of a tile.
double gemm_sm80_cost_us(int split, const GpuInfo& gpu, const Problem& problem);
/// The same of its tile for few rows of an expert.
double gemm_sm80_few_cost_us(const Tile& tile, const GpuInfo& gpu, const Problem& problem);
/// The algorithms of cuBLASLt for it, of a W that lies as it is multiplied (in_place) or is dequantized first.
Result<std::shared_ptr<const void>> configure_product(const Problem& p, bool in_place);
/// Predicted microseconds of cuBLASLt, and of the epilogue after it, where W is of the activations' type.
double product_cost_us(const GpuInfo& gpu, const Problem& problem);
/// Predicted microseconds of the dense tier.
double dense_cost_us(const GpuInfo& gpu, const Problem& problem);

}  // namespace nibble::cuda
