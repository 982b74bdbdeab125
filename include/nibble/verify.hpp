// Verification: nibble's conformance tests as functions.
//
// A plan's result is compared with a scalar, double-precision oracle that shares no code with the kernels. Tolerances are
// derived per element from the norms of the operands and the rounding units of the types: see docs/accuracy.md.
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

/// The linear layer to verify, and how.
struct VerifySpec {
  LinearSpec linear;                // linear.m_max rows are run
  std::uint64_t seed = 1;           // of the random activations and epilogue operands
  float outliers = 1.0f;            // every 256th input channel is this many times larger, like outliers of a transformer; finite
  std::int64_t sample_columns = 0;  // check this many evenly spread output columns; 0: all of them
  bool added_error = false;         // also measure the error that linear.act_scheme adds
  PlanOptions plan = {};            // plan.kernel: the kernel to verify; empty: the cheapest
  PackOptions pack = {};            // pack.backend: where to run
};

/// The result of verifying a layer.
struct VerifyReport {
  bool passed = false;                // every output within its bound, round_trip and repeatable
  std::string kernel;                 // the kernel that ran
  std::int64_t checked = 0;           // output elements compared
  double worst_error_over_bound = 0;  // ≤ 1 when passed
  double relative_l2 = 0;             // ‖D − oracle‖ / ‖oracle‖
  std::optional<double> added_error;  // of quantizing the activations: ActError::relative_l2
  bool round_trip = false;            // unpack(pack(q)) == q
  bool repeatable = false;            // a second run gave the same bits
  std::string failure;                // where and by how much, with the seed; empty when passed
};

/// Packs `q`, runs it on seeded Gaussian activations and compares. It runs on the GPU if pack.backend or plan.kernel is the GPU's.
/// A Status error means that nothing was compared.
Result<VerifyReport> verify_linear(const QuantTensor& q, const VerifySpec& spec, Executor* executor = nullptr);

/// The convolution to verify, and how.
struct VerifyConvSpec {
  ConvSpec conv;                    // conv.batch_max images are run
  std::uint64_t seed = 1;           // of the random images and epilogue operands
  float outliers = 1.0f;            // as VerifySpec::outliers
  std::int64_t sample_columns = 0;  // check this many evenly spread output channels; 0: all of them
  PlanOptions plan = {};            // plan.kernel: the kernel to verify; empty: the cheapest
  PackOptions pack = {};            // pack.backend: where to run
};

/// The same for a convolution; conv.geometry.filter must be q.filter.
Result<VerifyReport> verify_conv(const QuantTensor& q, const VerifyConvSpec& spec, Executor* executor = nullptr);

/// The activations on which activation_errors() measures.
struct ActErrorSpec {
  ConstTensorView inputs = {};  // [tokens,K] f32, f16 or bf16, last stride 1; empty: Gaussian, from `seed`
  std::int64_t tokens = 64;     // how many Gaussian tokens; of `inputs` at most so many, evenly spread
  std::uint64_t seed = 1;       // of Gaussian activations
  float outliers = 1.0f;        // of Gaussian activations: as VerifySpec::outliers
};

/// The error that quantizing activations by one scheme adds to a layer: D against D₀, the same product with unquantized activations,
/// both f32 and without epilogue.
struct ActError {
  ActScheme act_scheme;    // the scheme
  Status possible;         // ok, or why no kernel quantizes this layer's activations by it
  double relative_l2 = 0;  // ‖D − D₀‖ / ‖D₀‖
  double sqnr_db = 0;      // −20·log₁₀(relative_l2); infinite when D = D₀
};

/// Measures every scheme of `modes` on the same activations, on the CPU; other kernels agree within the bounds of verification.
/// Errors: invalid_argument for inputs of another K; those of pack() and Plan::linear() for unquantized activations.
Result<std::vector<ActError>> activation_errors(const QuantTensor& q, std::span<const ActScheme> modes,
                                                const ActErrorSpec& spec = {}, Executor* executor = nullptr);

}  // namespace nibble
