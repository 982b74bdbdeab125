// Convolutions: the sizes of a layer, and the specification of a plan for it.
//
//   D[B,Co,Oh,Ow] = epilogue( conv2d(A[B,Ci,H,W], W[Co,Ci/groups,Kh,Kw]) )
//
//   auto weight = nibble::pack(*nibble::quantize_conv(kernel, "u4b8g64"));
//   auto plan   = nibble::Plan::conv(*weight, {.geometry = {.in_channels = 64, .out_channels = 64, .height = 56, .width = 56,
//                                                           .filter = {3, 3}, .padding = {1, 1, 1, 1}}});
//   plan->run(*weight, a, d, {}, workspace);
//
// A convolution is defined as the linear layer on patches: token (b, oh, ow) is the row of Kh·Kw·Ci/groups activations that the filter
// covers there, in the order kh, kw, ci; padding counts as 0. docs/accuracy.md promises the same of convolutions as of linear layers.
#pragma once

#include <cstdint>
#include <string_view>

#include "nibble/epilogue.hpp"
#include "nibble/scheme.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"
#include "nibble/types.hpp"

namespace nibble {

/// Rows and columns of zeros around an image.
struct Padding {
  std::int64_t top = 0, bottom = 0, left = 0, right = 0;  // pixels
  friend constexpr bool operator==(const Padding&, const Padding&) = default;
};

/// The sizes of a convolution, all of them in elements and at most kMaxSize.
struct ConvGeometry {
  std::int64_t in_channels = 1, out_channels = 1;  // of all groups together
  std::int64_t height = 1, width = 1;              // of an input image
  Extent filter = {};                              // Kh × Kw
  Extent stride = {};                              // input pixels from one output pixel to the next
  Padding padding = {};                            // around the input
  Extent dilation = {};                            // input pixels between elements of the filter; 1: neighbours
  std::int64_t groups = 1;                         // divides both numbers of channels; in_channels: depthwise

  /// ⌊(padded height − dilation·(Kh − 1) − 1) / stride⌋ + 1; 0 where the filter does not fit.
  std::int64_t out_height() const;
  /// The same of the width.
  std::int64_t out_width() const;
  /// Input channels of a group.
  std::int64_t group_inputs() const { return in_channels / groups; }
  /// Output channels of a group.
  std::int64_t group_outputs() const { return out_channels / groups; }
  /// The length of a row of W: Kh·Kw·Ci/groups.
  std::int64_t k() const { return filter.h * filter.w * group_inputs(); }
  /// Whether each output pixel depends on one input pixel at the same place: a 1×1 filter, no stride, padding or groups.
  bool pointwise() const { return filter == Extent{} && stride == Extent{} && padding == Padding{} && groups == 1; }

  /// Ok, or invalid_argument with the values and the size of the output that they give.
  Status validate() const;
  friend bool operator==(const ConvGeometry&, const ConvGeometry&) = default;
};

/// Where the elements of an image [B,C,H,W] lie.
///   nchw  pixels of a channel side by side: strides of W 1, of H W; channels (but of 1×1 images) and images at any distance
///   nhwc  channels of a pixel side by side: stride of C 1; pixels evenly spaced through all images, C apart or more
enum class ImageLayout : std::uint8_t { nchw, nhwc };
/// "nchw", "nhwc".
std::string_view name(ImageLayout layout);

/// The specification of a convolution: for pack(), explain() and Plan::conv().
struct ConvSpec {
  ConvGeometry geometry = {};                                         // its filter and channels are the weight's
  ImageLayout input = ImageLayout::nchw, output = ImageLayout::nchw;  // of A; of D, gate and residual
  /// Of A: f32, f16 or bf16; s8: A comes quantized per tensor, as `act_scheme` says ("s8t", "s8zt"); u8: the same with a zero point
  /// ("s8zt"), of codes in 0 … 255.
  DType a_dtype = DType::f32;
  /// The plan serves every B in [1, batch_max]: B·Oh·Ow at most kMaxSize; A with its padding, its patches and D at most kMaxElements.
  std::int64_t batch_max = 1;
  EpilogueSpec epilogue = {};  // without row_scale; gate and residual are [B,Co,Oh,Ow]
  /// As LinearSpec::act_scheme. {1,0} is a scale per patch; group.k divides Ci/groups, so that a group lies inside one pixel.
  ActScheme act_scheme = {};
  Accumulation accumulation = Accumulation::fast;  // of FP8 codes

  friend bool operator==(const ConvSpec&, const ConvSpec&) = default;
};

}  // namespace nibble
