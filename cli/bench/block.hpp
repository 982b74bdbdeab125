// The linear half of a decoder's block, as an engine runs it: four plans, one after the other.
//
//   x ──RMSNorm──▶ qkv    mixed ──▶ o ── + x ──▶ h ──RMSNorm──▶ gate_up ── silu, glu ──▶ inner ──▶ down ── + h ──▶ y
//
// Attention, which makes mixed of qkv, is not a part: o reads values of its own.
#pragma once

#include "bench/core.hpp"

namespace nibble::cli {

/// A block to measure.
struct BlockCase {
  BlockShape shape;
  Scheme scheme;
  /// A weight [N,K] of the scheme, whose products are about as large as their activations.
  std::function<Result<QuantTensor>(std::int64_t n, std::int64_t k, std::uint64_t seed)> weight;
  std::vector<std::int64_t> m;
};

/// Measures the four products, each alone, and the whole block, for each activation type and each of its M. The results of the block are
/// first compared with those in double precision. `step` is called before each measurement with a description.
/// Errors: internal where results differ; unsupported where no type of activations can be measured.
Result<LayerBench> bench_block(const BlockCase& block, const BenchSpec& spec, BenchMachine& machine,
                               const std::function<void(const std::string&)>& step);

}  // namespace nibble::cli
