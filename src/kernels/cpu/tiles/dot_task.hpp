// The arguments of a run of a dot-product kernel, of integers or of bf16.
#pragma once

#include <cstdint>

#include "kernels/cpu/prepare/prepare.hpp"
#include "kernels/cpu/prepare/segments.hpp"
#include "kernels/cpu/tiles/decoder.hpp"
#include "kernels/cpu/tiles/outputs.hpp"
#include "kernels/kernel.hpp"

namespace nibble::cpu {

struct DotTask {
  const Decoder* decoder;
  const std::byte* weight;
  const std::byte* activations;  // prepared for the tile's height (prepare.hpp)
  Segments segments;
  std::int64_t token_bytes;
  std::int64_t segment_header;  // bytes per token before those of a segment of bf16
  int terms;                    // of bf16 whose sum is an activation
  ZeroSums zero_sums;
  const double* channel_sums;    // PackedWeightHeader's
  const std::int32_t* sum_bias;  // of the output channels, null: none
  bool paired;
  std::int64_t tile;  // tokens of a prepared tile
  std::int64_t m;
  Outputs outputs;

  /// Borrows from all three arguments.
  DotTask(const Kernel& kernel, const StepArgs& args, const Decoder& weight_decoder)
      : DotTask(kernel, args, weight_decoder,
                ActDigits::make(args.act_scheme, args.weight->scheme, args.weight->k, args.far_zeros)) {}

 private:
  DotTask(const Kernel& kernel, const StepArgs& args, const Decoder& weight_decoder, const ActDigits& digits)
      : decoder(&weight_decoder),
        weight(args.weight->bytes.data()),
        activations(args.prepared),
        segments{args.weight->k, args.weight->group_size(), digits.piece, digits.unit},
        token_bytes(prepared_token_bytes(kernel.form, args.act_scheme, args.weight->scheme, args.weight->k)),
        segment_header(digits.halves_header()),
        terms(bf16_terms(kernel.form)),
        zero_sums(digits.zero_sums),
        channel_sums(args.weight->channel_sums.data()),
        sum_bias(args.epilogue->sum_bias ? static_cast<const std::int32_t*>(args.operands.sum_bias.data) : nullptr),
        paired(digits.paired),
        tile(prepared_tile(kernel.form, args.a.dim(0), kernel.tile.m)),
        m(args.a.dim(0)),
        outputs(kernel.isa, args) {}
};

}  // namespace nibble::cpu
