// SmoothQuant: moves the range of activations that is hard to quantize into the weights, where it costs less.
//
//   s[k] = max|x[k]|^α / max|w[k]|^(1−α)      x' = x / s      W' = W·diag(s)      x'·W'ᵀ = x·Wᵀ
//
// No checkpoint format has a place for 1/s, so it is folded into the weight of the preceding norm, and all layers after one norm share one
// s. Which layers those are depends on the model's code: it is known for some model types, others are refused. Source:
// mit-han-lab/smoothquant smoothquant/smooth.py.
//
// Before a mixture of experts they are the gate and up of all experts, of a shared one too, and what stays float: the router, and the shared
// expert's gate. W·diag(s) of these is written as well. There s are powers of two, so that norm / s and W·diag(s) are exact, and the router
// chooses the experts that it chose before, by the same bits.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/checkpoint_impl.hpp"

namespace nibble {

/// The inputs of layers: a safetensors file with, per module, NAME.input_absmax [K] or NAME.input [tokens,K]; f32, f16 or bf16.
class Calibration {
 public:
  static Result<Calibration> open(const std::filesystem::path& path);
  /// max|x[k]| of each input channel; nothing when the file has none for this module. corrupt_data: another shape, NaN, infinity.
  Result<std::optional<std::vector<float>>> absmax(const Module& module) const;

 private:
  explicit Calibration(std::shared_ptr<const Checkpoint::Impl> file) : file_(std::move(file)) {}
  std::shared_ptr<const Checkpoint::Impl> file_;
};

/// How a checkpoint is smoothed.
struct Smoothing {
  using Channels = std::shared_ptr<const std::vector<float>>;
  std::unordered_map<std::string, Channels> factors;  // s of each smoothed module, by the name it is written with
  std::unordered_map<std::string, Channels> absmax;   // of its inputs before that, over all modules that share them
  std::unordered_map<std::string, Tensor> changed;    // the new weights of norms and routers, by tensor name
  std::vector<Note> notes;                            // layers left as they are, and why
};

/// format: of the output. All or nothing per norm: it is folded when all layers behind it are in `selected` and the calibration knows their input.
/// Errors: unsupported when no norm can be folded; corrupt_data from the calibration.
Result<Smoothing> plan_smoothing(const Checkpoint::Impl& in, std::span<const Module* const> selected, const codec::Format& format,
                                 const Calibration& calibration, double alpha);

}  // namespace nibble
