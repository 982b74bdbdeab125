// The findings of `inspect` about a checkpoint; the report shows the same.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "commands/added_error.hpp"
#include "commands/explain.hpp"
#include "nibble/nibble.hpp"
#include "terminal/output.hpp"

namespace nibble::cli {

struct InspectOptions {
  std::filesystem::path path;
  std::filesystem::path reference;  // a float checkpoint to measure the error against; empty: none
  std::string layer;                // pattern; empty: every module
  std::string backend = "cpu", gpu, a_dtype = "f32", accumulation = "fast";
  std::vector<std::string> activations;  // schemes whose added error is measured; a single one is also explained
  std::filesystem::path calibration;     // inputs of the layers; empty: Gaussian activations
  float outliers = 1.0f;                 // of Gaussian ones
  std::string json;                      // the value of --json
  bool explain = false;
  bool headers_only = false;
  bool summary = false;  // equal modules in one row
  bool dense = false;    // modules that are not quantized are read and judged, too
};

/// A module with the findings of reading its data.
struct InspectedModule {
  Module module;
  std::vector<Note> notes;          // of detection and of the data
  double bits_per_weight = 0;       // as stored, scales and zeros included
  std::optional<QuantError> error;  // against the reference
  std::vector<ActError> added;      // by every activation scheme
  std::optional<StaticActs> static_acts;
  std::optional<float> act_limit;
  Status readable;  // why the data could not be decoded
};

struct Inspection {
  std::filesystem::path path;
  std::vector<InspectedModule> modules;  // quantized ones, and with InspectOptions::dense all
  std::vector<Module> dense;             // the others
  std::size_t other_tensors = 0;         // neither of a quantized nor of a dense module
  std::uint64_t quantized_bytes = 0, dense_bytes = 0, other_bytes = 0;
  std::vector<Note> notes;  // about the checkpoint as a whole
  std::vector<ExpertLayer> experts;
  std::vector<ExplainedShape> shapes;
  std::optional<AddedErrorSource> added_source;  // the activations of the added errors

  bool summary = false;  // as in InspectOptions

  std::int64_t weights() const;
  double mean_bits() const;
};

/// Opens, reads and judges every module whose name matches, if quantized or asked for. A module that cannot be decoded is recorded as such.
Result<Inspection> inspect_checkpoint(const InspectOptions& options);

/// The distinct shapes of a checkpoint: what a plan depends on.
std::string shape_key(const Module& module);

/// Modules of the same name, layer numbers aside, and of the same shape and scheme as one: "layers.*.mlp.up_proj ×32", their bytes and
/// notes together, the worst of their errors.
std::vector<InspectedModule> grouped(const std::vector<InspectedModule>& modules);

/// Modules of the experts of a layer as one, likewise: "model.layers.0.mlp.experts.0…127.down_proj".
std::vector<InspectedModule> with_experts_together(const std::vector<InspectedModule>& modules);

/// The worst error among findings, ok where none is one: damaged data takes precedence over unsupported data.
Status worst_error(std::span<const ModuleNote> notes);

/// The same of opening a checkpoint: modules that are damaged, or in a format that nibble does not decode, are in its notes alone.
Status usable_whole(const Checkpoint& checkpoint);

std::string inspection_text(const Inspection& inspection, bool colour);
Json inspection_json(const Inspection& inspection);
Json notes_json(const std::vector<Note>& notes);
Json error_json(const QuantError& error);

}  // namespace nibble::cli
