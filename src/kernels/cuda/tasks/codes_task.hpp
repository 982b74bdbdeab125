// The arguments of the launchers that multiply activations that are codes by a weight in gpu_n64k128, on every GPU: plain values, host and
// device.
#pragma once

#include "epilogue/element.hpp"
#include "kernels/cuda/tasks/linear_task.hpp"
#include "kernels/cuda/tasks/patches.hpp"
#include "kernels/cuda/tasks/w8a8_task.hpp"

namespace nibble::cuda {

/// s8 codes times integer codes. Of a convolution, tokens are output pixels and their codes the rows of patches: token t of group g is row
/// t·groups + g of the codes, scales and zeros.
struct CodesTask {
  DeviceWeight weight;  // `perm` is of codes in the caller's order of channels, else null; a prescale is not read
  QuantizedActs acts;
  int m = 0;           // tokens
  bool whole = false;  // a token and an output channel have one scale each (sums_whole_rows): integers are summed over all of K
  epilogue::Element epilogue;

  int groups = 1, group_outputs = 0;  // of a convolution; 0: all outputs
  int pixels = 0;                     // of an output image; 0: D is a matrix
  int first = 0;                      // the output pixel of all images that token 0 is
  ImageStrides d;
  ExpertTiles experts;  // of a grouped product, of tiles of kSimtExpertRows; without tiles: of one weight
};

/// The most channels for which 32 bits hold a lane's sums over all of K: of so many, each of 16 warps has a sixteenth, and each of a
/// row's four lanes a fourth of that, 2¹⁶ products of 2¹⁴ at most.
constexpr std::int64_t kMostWholeChannels = std::int64_t{1} << 22;

}  // namespace nibble::cuda
