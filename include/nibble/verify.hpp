// Verification: the shipped form of nibble's own conformance tests.
//
// A plan's result is compared with a scalar, double-precision oracle that shares no code with the kernels. Tolerances are
// derived per element from the norms of the operands and the types' rounding units, never guessed: see docs/accuracy.md.
#pragma once

#include <cstdint>
#include <string>

#include "nibble/parallel.hpp"
#include "nibble/plan.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

struct VerifySpec {
  LinearSpec linear;                // linear.m_max rows are run
  std::uint64_t seed = 1;           // of the random activations and epilogue operands
  float outliers = 1.0f;            // every 256th input channel is this much larger, as a transformer's few massive ones are
  std::int64_t sample_columns = 0;  // check this many evenly spread output columns; 0: all of them
  PlanOptions plan = {};
  PackOptions pack = {};
};

struct VerifyReport {
  bool passed = false;
  std::string kernel;
  std::int64_t checked = 0;           // output elements compared
  double worst_error_over_bound = 0;  // ≤ 1 when passed
  double relative_l2 = 0;             // ‖D − oracle‖ / ‖oracle‖
  bool round_trip = false;            // unpack(pack(q)) == q
  bool repeatable = false;            // a second run gave the same bits
  std::string failure;                // where and by how much, with the seed; empty when passed
};

/// Packs `q`, runs it on seeded Gaussian activations and compares. With pack.backend, or plan.kernel, of the GPU it runs there. A Status error means that nothing could be compared.
Result<VerifyReport> verify_linear(const QuantTensor& q, const VerifySpec& spec, Executor* executor = nullptr);

}  // namespace nibble
