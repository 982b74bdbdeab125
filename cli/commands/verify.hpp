// Verification of whole checkpoints, for `verify` and for the report.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "commands/commands.hpp"
#include "nibble/nibble.hpp"

namespace nibble::cli {

struct VerifiedLayer {
  std::string name, scheme, activations;  // "s8r"; "" where they are not quantized
  std::int64_t m = 1, n = 0, k = 0;
  VerifyReport report;
};

/// The images that convolutions are verified on.
struct VerifyImages {
  Extent size = {5, 7};
  ImageLayout layout = ImageLayout::nchw;
};

/// A convolution of a checkpoint on such images; the checkpoint has only the sizes of its weight. Filters of one channel are depthwise,
/// others have one group; stride and dilation are 1, and images are padded by half the filter.
ConvGeometry verified_geometry(const Module& module, Extent image);

/// How many experts of a layer are verified, unless told otherwise.
inline constexpr std::int64_t kSampledExperts = 4;

/// verify_linear or verify_conv for every quantized module that matches, and every M, of images for the latter; `spec` gives the rest.
/// dense: also for those that are not quantized. experts: of those of a layer, how many, which are others in each layer; 0: all.
Result<std::vector<VerifiedLayer>> verify_checkpoint(const Checkpoint& checkpoint, const Pattern& layer,
                                                     std::span<const std::int64_t> m_list, VerifySpec spec,
                                                     const AskedActivations& asked, Executor& executor,
                                                     const VerifyImages& images = {}, bool dense = false,
                                                     std::int64_t experts = kSampledExperts);

}  // namespace nibble::cli
