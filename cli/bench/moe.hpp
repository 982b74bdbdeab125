// A layer of experts, as an engine runs it: one plan, from the ids that a router chose to the weighted sum.
//
//   x [T,hidden] ──gate_up of its experts, silu, glu──▶ [T·top_k, intermediate] ──down──▶ Σ_j weights[t,j] · … = D [T,hidden]
//
// The router is not a part: each call has ids of its own, drawn by one of the routings.
#pragma once

#include "bench/core.hpp"

namespace nibble::cli {

/// A layer to measure.
struct MoeCase {
  MoeShape shape;
  Scheme scheme;
  /// A weight [N,K] of the scheme, whose products are about as large as their activations.
  std::function<Result<QuantTensor>(std::int64_t n, std::int64_t k, std::uint64_t seed)> weight;
  std::vector<std::int64_t> m;  // tokens
  std::vector<Routing> routings;
};

/// The experts of each of `tokens` tokens, [T,top_k]: drawn without repetition, with the probabilities of the routing.
std::vector<std::int32_t> routed(Routing routing, const MoeShape& shape, std::int64_t tokens, std::uint64_t seed);

/// Measures the layer for each activation type, routing and number of tokens. The results of some tokens are first compared with those in
/// double precision. `step` is called before each measurement with a description.
/// Errors: internal where results differ; unsupported where no type of activations can be measured.
Result<LayerBench> bench_moe(const MoeCase& layer, const BenchSpec& spec, BenchMachine& machine,
                             const std::function<void(const std::string&)>& step);

}  // namespace nibble::cli
