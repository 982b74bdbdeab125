// The error that quantizing activations adds, per layer and scheme.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "nibble/nibble.hpp"
#include "terminal/output.hpp"

namespace nibble::cli {

/// The schemes of "--act-scheme all", roughly from the cheapest to the most accurate.
std::vector<std::string> usual_activations();

/// The activations that layers are measured with: Gaussian, or their inputs from a calibration.
class AddedErrorSource {
 public:
  /// An empty `calibration` stands for Gaussian activations. Errors: those of Checkpoint::open.
  static Result<AddedErrorSource> open(const std::filesystem::path& calibration, float outliers);

  /// The errors of every scheme, for one module. Empty when the calibration does not have it. Errors: invalid_argument when its inputs do
  /// not fit.
  Result<std::vector<ActError>> measure(const Module& module, const QuantTensor& q, const std::vector<ActScheme>& ways) const;
  std::string describe() const;

 private:
  AddedErrorSource(std::optional<Checkpoint> inputs, float outliers) : inputs_(std::move(inputs)), outliers_(outliers) {}
  std::optional<Checkpoint> inputs_;
  float outliers_;
};

/// The errors measured for one module.
struct AddedErrors {
  std::string module;
  std::vector<ActError> errors;
};

/// A row per module, a column per scheme, the worst and the median at the end.
std::string added_error_text(const std::vector<AddedErrors>& modules, const AddedErrorSource& source, bool colour);
Json added_error_json(const std::vector<ActError>& errors);

}  // namespace nibble::cli
