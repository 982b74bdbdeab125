// Verification: the shipped form of nibble's own conformance tests.
//
// A plan's result is compared with a scalar, double-precision oracle that shares no code with the kernels. Tolerances are
// derived per element from the norms of the operands and the types' rounding units, never guessed: see docs/accuracy.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nibble/parallel.hpp"
#include "nibble/plan.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// Which linear layer to try, and how.
struct VerifySpec {
  LinearSpec linear;       // linear.m_max rows are run
  std::uint64_t seed = 1;  // of the random activations and epilogue operands
  float outliers = 1.0f;   // every 256th input channel is this much larger, as a transformer's few massive ones are; finite
  std::int64_t sample_columns = 0;  // check this many evenly spread output columns; 0: all of them
  bool added_error = false;         // where linear.act_scheme says so, also measure what quantizing the activations adds
  PlanOptions plan = {};            // plan.kernel: the kernel to try
  PackOptions pack = {};            // pack.backend: where
};

/// What trying a layer found.
struct VerifyReport {
  bool passed = false;                // every output within its bound, round_trip and repeatable
  std::string kernel;                 // that ran
  std::int64_t checked = 0;           // output elements compared
  double worst_error_over_bound = 0;  // ≤ 1 when passed
  double relative_l2 = 0;             // ‖D − oracle‖ / ‖oracle‖
  std::optional<double> added_error;  // ‖D − D of the same activations as they are‖ / ‖that‖: ActError::relative_l2
  bool round_trip = false;            // unpack(pack(q)) == q
  bool repeatable = false;            // a second run gave the same bits
  std::string failure;                // where and by how much, with the seed; empty when passed
};

/// Packs `q`, runs it on seeded Gaussian activations and compares. With pack.backend, or plan.kernel, of the GPU it runs there.
/// A Status error means that nothing could be compared.
Result<VerifyReport> verify_linear(const QuantTensor& q, const VerifySpec& spec, Executor* executor = nullptr);

/// Which convolution to try, and how.
struct VerifyConvSpec {
  ConvSpec conv;                    // conv.batch_max images are run
  std::uint64_t seed = 1;           // of the random images and epilogue operands
  float outliers = 1.0f;            // as VerifySpec::outliers
  std::int64_t sample_columns = 0;  // check this many evenly spread output channels; 0: all of them
  PlanOptions plan = {};            // plan.kernel: the kernel to try
  PackOptions pack = {};            // pack.backend: where
};

/// The same for a convolution, pixel by pixel; `q.filter` is the geometry's.
Result<VerifyReport> verify_conv(const QuantTensor& q, const VerifyConvSpec& spec, Executor* executor = nullptr);

/// What goes into a layer.
struct ActErrorSpec {
  ConstTensorView inputs = {};  // [tokens,K] f32, f16 or bf16, rows dense; empty: seeded Gaussian ones
  std::int64_t tokens = 64;     // of Gaussian ones; of others no more than this many, evenly spread
  std::uint64_t seed = 1;       // of Gaussian ones
  float outliers = 1.0f;        // of Gaussian ones: as VerifySpec::outliers
};

/// What one way of quantizing activations adds to the error of a layer: D against the D of the same weights and activations that stay
/// as they are, both f32 and without epilogue.
struct ActError {
  ActScheme act_scheme;    // the mode
  Status possible;         // or why no kernel quantizes this layer's activations so
  double relative_l2 = 0;  // ‖D − D₀‖ / ‖D₀‖
  double sqnr_db = 0;      // −20·log₁₀ of it; infinite when they are the same
};

/// Measures every mode on the same activations, on the CPU, where results are those of any other kernel up to the bound of verify.
/// Errors: invalid_argument for inputs of another K; those of pack() and Plan::linear() for the weight as it is.
Result<std::vector<ActError>> activation_errors(const QuantTensor& q, std::span<const ActScheme> modes,
                                                const ActErrorSpec& spec = {}, Executor* executor = nullptr);

}  // namespace nibble
