// A convolution as a loop of small linear layers: the work of a task, and the contents of its scratch.
//
//   for each chunk of output pixels, a rectangle of an image        tokens of one task
//     the input pixels that its patches cover → scratch             channels last, with padding, as int8 where the scale is known
//     patches of those pixels → prepared activations                the forms of prepare.hpp
//     the tile loops of the linear kernels × row blocks             dot_tile, whole_tile, bf16_tile, float_tile
//     D, through scratch where it is not channels-last
// Nothing larger than a chunk is ever stored, and convolutions support everything that the linear kernels do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/cpu/prepare/prepare.hpp"
#include "kernels/cpu/tiles/depthwise_tile.hpp"
#include "kernels/cpu/tiles/whole_tile.hpp"
#include "kernels/image.hpp"
#include "kernels/kernel.hpp"

namespace nibble::cpu {

/// A rectangle of output pixels that follow each other in their image: whole rows, or a part of one.
struct Chunk {
  std::int64_t image, row, column;  // its first pixel
  std::int64_t rows, columns;
  std::int64_t tokens() const { return rows * columns; }
};

/// The output channels of one task, and the input channels they depend on: those of a group; of a depthwise convolution, of a row block.
struct Part {
  std::int64_t inputs_begin, inputs;
  std::int64_t n_begin, n_end;
};

/// The word in the names of depthwise kernels.
constexpr std::string_view kDepthwise = "depthwise";

/// One convolution, cut into chunks for one kernel. Only arithmetic; equal for a plan and for its runs.
class ConvWork {
 public:
  ConvWork(const Kernel& kernel, const ConvGeometry& geometry, ImageLayout input, ImageLayout output, DType act,
           const EpilogueSpec& epilogue, const ActScheme& quantize, const WeightScheme& weight, DType zero_type, bool prescales);
  ConvWork(const Kernel& kernel, const Problem& p)
      : ConvWork(kernel, p.geometry, p.input, p.output, p.a_dtype, p.epilogue, p.act_scheme, p.scheme, p.zero_type,
                 p.prescales_k) {}
  ConvWork(const Kernel& kernel, const StepArgs& args)
      : ConvWork(kernel, args.conv->geometry, args.conv->input, args.conv->output, args.a.dtype, args.conv->epilogue,
                 args.conv->act_scheme, args.weight->scheme, args.weight->zero_type, !args.weight->prescale.empty()) {}

  /// The offsets of the parts of a task's scratch, in bytes.
  struct Scratch {
    std::size_t pixels, floats, patch, scales, patch_scales, prepared, sums, panel, out, gate, residual, total;
  };
  const Scratch& scratch() const { return scratch_; }

  const ConvGeometry& geometry() const { return geometry_; }
  std::int64_t out_height() const { return out_height_; }
  std::int64_t out_width() const { return out_width_; }
  std::int64_t parts() const { return depthwise_ ? (geometry_.out_channels + outputs_ - 1) / outputs_ : geometry_.groups; }
  Part part(std::int64_t i) const;
  /// The most rows, and the columns, of a chunk.
  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  /// The number of blocks of a pixel's channels, where pixels are quantized block by block; else 0.
  std::int64_t blocks() const { return block_ == 0 ? 0 : inputs_ / block_; }
  /// Whether a float A is quantized while pixels are gathered, and not patch by patch.
  bool quantizes_pixels() const { return quantizes_pixels_; }
  /// Whether patches are multiplied in place (PatchTask), without being prepared.
  bool multiplies_pixels() const { return multiplies_pixels_; }
  /// Whether D, gate and residual go through scratch.
  bool transposes_out() const { return transposes_out_; }

  /// Gathered pixels: bytes of an element, pixels of a row, and the patches in them.
  std::int64_t width() const { return width_; }
  std::int64_t row_pixels() const { return (columns_ - 1) * stride_.w + (geometry_.filter.w - 1) * geometry_.dilation.w + 1; }
  Patches patches(std::byte* scratch, const Chunk& chunk) const;
  PatchTask patch_task(const Patches& patches, const Chunk& chunk, std::byte* sums) const;
  DepthwiseTask depthwise_task(const Patches& patches, const Chunk& chunk, const Part& part) const;

  /// Gathers the inputs of `part` that a chunk covers. `codes`: their scale and zero point, where A is or becomes codes.
  void gather(const PrepareIsa& isa, const Image& a, const Chunk& chunk, const Part& part, const StaticActs& codes, float limit,
              std::byte* scratch) const;

 private:
  void gather_row(const Image& a, const Chunk& chunk, const Part& part, std::int64_t h, std::byte pad, std::byte* to) const;
  std::int64_t gathered_rows(std::int64_t rows) const {
    return (rows - 1) * stride_.h + (geometry_.filter.h - 1) * geometry_.dilation.h + 1;
  }

  ConvGeometry geometry_;
  bool depthwise_;
  std::int64_t inputs_, outputs_;  // of a part, at most; gathered pixels are so many inputs apart
  std::int64_t out_height_, out_width_, rows_, columns_, width_;
  Extent step_, stride_;  // input pixels from one gathered pixel to the next; gathered pixels from one patch to the next
  std::int64_t block_;    // channels that share a scale of pixels; 0: all of them
  bool quantizes_pixels_, multiplies_pixels_, transposes_out_;
  Scratch scratch_;
};

}  // namespace nibble::cpu
