#include "kernels/cpu/conv/conv_work.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/transpose.hpp"

namespace nibble::cpu {
namespace {

/// Tokens of a task: enough to amortise reading the weights from L2 or memory, few enough to keep its activations in L2.
constexpr std::int64_t kTokens = kMaxChunkTokens, kFewTokens = 48;
constexpr std::int64_t kPreparedBytes = 1 << 20;

constexpr std::size_t kLine = 64;
std::size_t round_up(std::int64_t bytes) { return (static_cast<std::size_t>(bytes) + kLine - 1) / kLine * kLine; }

}  // namespace

ConvWork::ConvWork(const Kernel& kernel, const ConvGeometry& geometry, ImageLayout input, ImageLayout output, DType act,
                   const EpilogueSpec& epilogue, const ActScheme& quantize, const WeightScheme& weight, DType zero_type,
                   bool prescales)
    : geometry_(geometry),
      depthwise_(kernel.variant == kDepthwise),
      inputs_(depthwise_ ? std::min<std::int64_t>(geometry.in_channels, kernel.tile.n) : geometry.group_inputs()),
      outputs_(depthwise_ ? kernel.tile.n : geometry.group_outputs()),
      out_height_(geometry.out_height()),
      out_width_(geometry.out_width()) {
  const std::int64_t k = geometry.k();
  // For depthwise kernels, the floats of a pixel.
  const std::int64_t token_bytes = depthwise_ ? 4 * kernel.tile.n : prepared_token_bytes(kernel.form, quantize, weight, k);
  const std::int64_t tokens = std::clamp(kPreparedBytes / token_bytes, kFewTokens, kTokens);
  const std::int64_t parts = (out_width_ + tokens - 1) / tokens;
  columns_ = (out_width_ + parts - 1) / parts;
  rows_ = parts > 1 ? 1 : std::min(out_height_, std::max<std::int64_t>(1, tokens / columns_));
  // Blocks with zero points are quantized per patch: the gathered pixels have room for a scale, but not for a zero point. So are long ones,
  // and pixels that are multiplied by a prescale first, which the preparation of patches does.
  const bool quantizes = is_compute_float(act) && quantize.codes == DType::s8 && !prescales;
  block_ = quantizes && quantize.zero == ZeroKind::none && quantize.group.k <= kMaxSegment ? quantize.group.k : 0;
  quantizes_pixels_ = quantizes && (quantize.group == GroupShape::tensor() || block_ != 0);
  // Requires one scale for the whole image, octets or rows that end inside a pixel, sums that fit 32 bits, and mostly full tiles.
  const std::int64_t unit = in_rows(kernel.form) ? kRowBytes : tile::kOctet;
  multiplies_pixels_ = kernel.variant == "whole" && quantize.group == GroupShape::tensor() && !prescales &&
                       geometry.group_inputs() % unit == 0 && k <= kMaxInt8Segment &&
                       k <= most_whole_channels(weight, zero_type, quantize);
  transposes_out_ = output == ImageLayout::nchw;
  width_ = quantizes_pixels_ ? 1 : bits(act) / 8;
  // With a filter of one element, skipped pixels are not gathered; along a row only if pixels are not contiguous.
  step_ = {geometry.filter.h == 1 ? geometry.stride.h : 1,
           geometry.filter.w == 1 && input == ImageLayout::nhwc ? geometry.stride.w : 1};
  stride_ = {geometry.stride.h / step_.h, geometry.stride.w / step_.w};
  if (in_rows(kernel.form)) {
    const PixelLines lines = pixel_lines(rows_, columns_, stride_.h * row_pixels(), stride_.w);
    multiplies_pixels_ &= 10 * rows_ * columns_ >= 6 * lines.count * lines.halves() * kRowTokens;
  } else {
    multiplies_pixels_ &= columns_ >= kernel.tile.m / 2 || geometry.filter == Extent{};
  }

  const std::int64_t pixel_bytes = inputs_ * width_, most = rows_ * columns_;
  std::size_t at = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::size_t begin = at;
    at += round_up(bytes);
    return begin;
  };
  const std::int64_t past =
      multiplies_pixels_ && in_rows(kernel.form) ? kRowTokens * stride_.w : 0;  // pixels read that belong to no token
  scratch_.pixels = take((gathered_rows(rows_) * row_pixels() + past) * pixel_bytes + kCopyBytes);
  scratch_.floats = take(quantizes_pixels_ ? row_pixels() * inputs_ * bits(act) / 8 : 0);
  scratch_.patch = take(multiplies_pixels_ ? 0 : kTogether * (k * width_ + kCopyBytes));
  scratch_.scales = take(4 * blocks() * gathered_rows(rows_) * row_pixels());
  scratch_.patch_scales = take(4 * blocks() * geometry.filter.h * geometry.filter.w);
  const std::int64_t pixels = gathered_rows(rows_) * row_pixels();
  scratch_.prepared = take(depthwise_           ? pixels * token_bytes
                           : multiplies_pixels_ ? 0
                                                : prepared_bytes(kernel.form, most, quantize, weight, k));
  scratch_.sums = take(depthwise_ ? most * token_bytes : multiplies_pixels_ ? 4 * pixels : 0);
  scratch_.panel = take(depthwise_ ? (tile::Geometry::octets(k) * tile::kOctet + 1) * token_bytes : 0);
  const std::int64_t outputs = transposes_out_ ? most * outputs_ : 0;
  scratch_.out = take(outputs * bits(epilogue.out) / 8);
  scratch_.gate = take(epilogue.gate ? 4 * outputs : 0);
  scratch_.residual = take(epilogue.residual ? 4 * outputs : 0);
  scratch_.total = at;
}

Patches ConvWork::patches(std::byte* scratch, const Chunk& chunk) const {
  const std::int64_t pixel = inputs_ * width_, line = row_pixels() * pixel;
  const bool together = geometry_.dilation.w == 1;
  return {.image = scratch + scratch_.pixels,
          .columns = chunk.columns,
          .down = stride_.h * line,
          .beside = stride_.w * pixel,
          .runs_h = geometry_.filter.h,
          .runs_w = together ? 1 : geometry_.filter.w,
          .run_down = geometry_.dilation.h * line,
          .run_beside = geometry_.dilation.w * pixel,
          .run_bytes = (together ? geometry_.filter.w : 1) * pixel,
          .row = scratch + scratch_.patch,
          .scales = block_ == 0 ? nullptr : reinterpret_cast<const float*>(scratch + scratch_.scales),
          .block = block_,
          .row_scales = reinterpret_cast<float*>(scratch + scratch_.patch_scales)};
}

PatchTask ConvWork::patch_task(const Patches& patches, const Chunk& chunk, std::byte* sums) const {
  return {.patches = &patches,
          .rows = chunk.rows,
          .pixels = gathered_rows(chunk.rows) * row_pixels(),
          .pixel_bytes = inputs_,
          .pixel_sums = reinterpret_cast<std::int32_t*>(sums),
          .row_down = stride_.h * row_pixels(),
          .pixel_step = stride_.w,
          .taps_h = geometry_.filter.h,
          .taps_w = geometry_.filter.w,
          .tap_down = geometry_.dilation.h * row_pixels(),
          .tap_beside = geometry_.dilation.w};
}

DepthwiseTask ConvWork::depthwise_task(const Patches& patches, const Chunk& chunk, const Part& part) const {
  const PatchTask task = patch_task(patches, chunk, nullptr);
  return {.patches = &patches,
          .rows = task.rows,
          .pixels = task.pixels,
          .pixel_bytes = inputs_ * width_,
          .multiplier = geometry_.group_outputs(),
          .skipped = part.n_begin - part.inputs_begin * geometry_.group_outputs(),
          .count = part.n_end - part.n_begin,
          .taps_h = task.taps_h,
          .taps_w = task.taps_w,
          .tap_down = task.tap_down,
          .tap_beside = task.tap_beside,
          .row_down = task.row_down,
          .pixel_step = task.pixel_step};
}

Part ConvWork::part(std::int64_t i) const {
  const std::int64_t begin = i * outputs_, end = std::min(begin + outputs_, geometry_.out_channels),
                     each = geometry_.group_outputs();
  if (!depthwise_) return {i * inputs_, inputs_, begin, end};
  return {begin / each, (end - 1) / each - begin / each + 1, begin, end};
}

/// One row of pixels, of input row h, as A has them.
void ConvWork::gather_row(const Image& a, const Chunk& chunk, const Part& part, std::int64_t h, std::byte pad,
                          std::byte* to) const {
  const std::int64_t pixel = inputs_ * a.width();
  const std::int64_t count = (chunk.columns - 1) * stride_.w + (geometry_.filter.w - 1) * geometry_.dilation.w + 1;
  const std::int64_t w0 = chunk.column * geometry_.stride.w - geometry_.padding.left;
  // Pixels [begin, end) of the row are in the image.
  const std::int64_t begin = std::clamp<std::int64_t>((-w0 + step_.w - 1) / step_.w, 0, count);
  const std::int64_t inside = geometry_.width - w0;  // up to the edge of the image
  const std::int64_t end = h < 0 || h >= geometry_.height ? begin : std::clamp((inside + step_.w - 1) / step_.w, begin, count);
  std::memset(to, static_cast<int>(pad), static_cast<std::size_t>(begin * pixel));
  std::memset(to + end * pixel, static_cast<int>(pad), static_cast<std::size_t>((count - end) * pixel));
  if (begin == end) return;
  to += begin * pixel;
  const std::byte* from = a.at(chunk.image, h * geometry_.width + w0 + begin * step_.w, part.inputs_begin);
  if (!a.channels_last()) {
    transpose(static_cast<int>(a.width()), from, a.channel * a.width(), part.inputs, end - begin, to, pixel);
  } else if (a.pixel == part.inputs && inputs_ == part.inputs && step_.w == 1) {
    std::memcpy(to, from, static_cast<std::size_t>((end - begin) * pixel));
  } else {
    for (std::int64_t i = 0; i < end - begin; ++i)
      std::memcpy(to + i * pixel, from + i * step_.w * a.pixel * a.width(), static_cast<std::size_t>(part.inputs * a.width()));
  }
}

void ConvWork::gather(const PrepareIsa& isa, const Image& a, const Chunk& chunk, const Part& part, const StaticActs& codes,
                      float limit, std::byte* scratch) const {
  const std::int64_t elements = row_pixels() * inputs_;
  const std::int64_t count = ((chunk.columns - 1) * stride_.w + (geometry_.filter.w - 1) * geometry_.dilation.w + 1) * inputs_;
  const std::byte pad = a.dtype == DType::s8 ? static_cast<std::byte>(codes.zero) : std::byte{0};
  const std::int64_t h0 = chunk.row * geometry_.stride.h - geometry_.padding.top;
  for (std::int64_t i = 0; i < gathered_rows(chunk.rows); ++i) {
    std::byte* pixels = scratch + scratch_.pixels + i * elements * width_;
    std::byte* row = quantizes_pixels_ ? scratch + scratch_.floats : pixels;
    gather_row(a, chunk, part, h0 + i * step_.h, pad, row);
    auto* bytes = reinterpret_cast<std::int8_t*>(pixels);
    if (block_ != 0) {
      float* scales = reinterpret_cast<float*>(scratch + scratch_.scales) + i * elements / block_;
      for (std::int64_t at = 0; at < count; at += block_)
        scales[at / block_] = isa.quantize_block(row + at * a.width(), a.dtype, block_, limit, bytes + at);
    } else if (quantizes_pixels_) {
      isa.quantize(row, a.dtype, count, act_rule::known(codes.scale, codes.zero), bytes);
    }
  }
}

}  // namespace nibble::cpu
