// Which kernel runs for which M, its predicted time, and the answers of the other kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nibble/nibble.hpp"
#include "terminal/output.hpp"

namespace nibble::cli {

/// The planner's prediction for one mode of a layer.
struct ModeCost {
  std::string mode;             // "weight-only", "s8g128", "dense f32"
  std::vector<std::int64_t> m;  // one prediction for each
  std::vector<double> us;
};

/// One (N, K, scheme) that occurs in a checkpoint, and the planner's explanation.
struct ExplainedShape {
  std::int64_t n = 0, k = 0;
  std::string scheme;
  bool act_order = false, bias = false;
  std::size_t modules = 0;      // how many have this shape
  std::string layout;           // the one that pack() chooses
  std::vector<ModeCost> modes;  // weight-only first; those that have a kernel
  Explanation explanation;      // candidates of other layouts are judged as if the weight were packed for them
};

/// The question that is asked for every weight.
struct KernelQuestion {
  Backend backend = Backend::cpu;
  DType a_dtype = DType::f32;
  ActScheme act_scheme;
  Accumulation accumulation = Accumulation::fast;
  bool bias = false;                // the layer has one
  std::optional<Roofline> machine;  // the CPU as it was measured
  std::optional<GpuInfo> gpu;       // of the backend cuda: one that need not be there
};

/// Asks the planner; nothing is packed. Buckets are split where the choice changes and at a few round values of M; their costs are at
/// m_high.
Result<ExplainedShape> explain_shape(const WeightDesc& weight, const KernelQuestion& question);

std::string explained_text(const ExplainedShape& shape, bool colour);
Json explained_json(const ExplainedShape& shape);

}  // namespace nibble::cli
