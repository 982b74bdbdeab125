// Checkpoints: Hugging Face style directories and single files, opened, understood and written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nibble/parallel.hpp"
#include "nibble/quantize.hpp"
#include "nibble/scheme.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// Something `inspect` should tell the user about a module or a checkpoint.
struct Note {
  /// info: worth knowing; warning: likely a mistake; error: data that is broken, or that cannot be used.
  enum class Severity : std::uint8_t { info, warning, error };
  Severity severity = Severity::info;  // how much it matters
  std::string text;                    // one line, with the values
  StatusCode code = StatusCode::ok;    // of an error that is not about damage: unsupported
};

/// A finding about a module; `module` is empty when it is about the whole checkpoint.
struct ModuleNote {
  std::string module;
  Note note;
};
/// The same finding about many modules is told once, "in 224 modules: ..., e.g. NAME: ...", whatever its numbers; errors first.
std::vector<Note> group_notes(std::span<const ModuleNote> notes);

/// One tensor as stored.
struct TensorInfo {
  std::string name;                 // "model.layers.0.mlp.down_proj.qweight"
  DType dtype = DType::none;        // of an element
  std::vector<std::int64_t> shape;  // outermost dimension first
  std::uint64_t bytes = 0;          // storage_bytes(dtype, product of shape)
  std::string file;                 // the shard it lives in, relative to the checkpoint
  std::uint64_t file_offset = 0;    // of its first byte
};

/// A layer: the tensors that share a module name, recognised by a format. Detection looks at names, dtypes and shapes only;
/// what needs the data (damaged zero points, NaN scales, ...) is found by Checkpoint::read.
struct Module {
  std::string name;                  // "model.layers.0.mlp.down_proj"
  std::string format;                // "awq", "gptq", "compressed-tensors", "int-quantized", "dense"
  std::int64_t n = 0, k = 0;         // W is [N,K]
  std::optional<Extent> filter;      // of a convolution, whose weight is [N, K/(Kh·Kw), Kh, Kw]; absent: a linear layer
  WeightScheme scheme;               // as detected; dense: codes is the float type
  std::optional<Scheme> claimed;     // as config.json says, when it does
  std::string other_acts;            // what config.json says about activations and no Scheme can; "": nothing
  bool act_order = false;            // has a g_idx
  bool has_bias = false;             // which read() returns with the weight
  std::vector<std::string> tensors;  // full names
  std::uint64_t bytes = 0;           // of those tensors
  std::vector<Note> notes;           // findings that need no data

  /// Whether Checkpoint::read takes it.
  bool quantized() const { return format != "dense"; }
};

/// A read-only checkpoint. Files stay open and memory-mapped for its lifetime; copies share them.
class Checkpoint {
 public:
  /// `path` is a directory with *.safetensors (and config.json), or one .safetensors file.
  /// Every header is checked completely; errors name the file, tensor and byte offset.
  static Result<Checkpoint> open(const std::filesystem::path& path);

  /// What open() was given.
  const std::filesystem::path& path() const;
  /// Every stored tensor, in file order.
  std::span<const TensorInfo> tensors() const;
  /// Linear layers and convolutions, quantized or dense, in file order. Float tensors of 2 and of 4 dimensions called *.weight count
  /// as dense modules.
  std::span<const Module> modules() const;
  /// Findings about the whole checkpoint: config contradictions, unknown quant_method, ...
  std::span<const Note> notes() const;
  /// The text of config.json ("" when there is none).
  const std::string& config() const;

  /// Null when there is none of that name.
  const TensorInfo* find_tensor(std::string_view tensor_name) const;
  /// Null when there is none of that name.
  const Module* find_module(std::string_view module_name) const;
  /// A view of the mapped bytes of a tensor of this checkpoint (rank ≤ 4; higher ranks are viewed as rank 1). As with every mapped
  /// file, touching what another program has cut off raises SIGBUS; load(), read() and the transforms return io_error instead.
  ConstTensorView view(const TensorInfo& tensor) const;
  /// The same bytes, read into memory.
  Result<Tensor> load(const TensorInfo& tensor) const;

  /// Decodes a quantized module. Findings that needed the data are appended to `notes`.
  Result<QuantTensor> read(const Module& module, std::vector<Note>* notes = nullptr) const;

  struct Impl;
  /// What open() ends with.
  explicit Checkpoint(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

/// A tensor of a module that is already in memory, by its name inside the module: "qweight", "weight_scale", "bias".
struct NamedView {
  std::string name;      // without the module's
  ConstTensorView view;  // host memory, dense; may be unaligned
};

/// What Checkpoint::read does, for a layer that somebody else has loaded: recognises its format and decodes it. `config` is the
/// JSON text of the model's quantization_config, or of a config.json that has one; "" when nothing is known beyond the tensors.
/// Errors: not_found when no format knows such tensors, unsupported when they are not quantized, and those of Checkpoint::read.
Result<QuantTensor> read_module(std::span<const NamedView> tensors, std::string_view config = {},
                                std::vector<Note>* notes = nullptr);

/// A row of the format table.
struct FormatInfo {
  std::string_view name;     // Module::format, QuantizeCheckpointSpec::format
  std::string_view summary;  // a line for people
  bool can_write = false;    // quantize_checkpoint and convert_checkpoint write it
};
/// All formats of this build, in the order they are tried.
std::vector<FormatInfo> formats();

/// Called with (done, total, what) from the calling thread while something long runs.
using Progress = std::function<void(std::uint64_t done, std::uint64_t total, std::string_view what)>;

/// How a checkpoint is written, whatever is written.
struct TransformOptions {
  bool overwrite = false;        // replace an existing file, or a directory in which nibble wrote every file (.nibble lists them)
  Progress progress = {};        // empty: nobody watches
  Executor* executor = nullptr;  // null: default_executor()
  /// dequantize_checkpoint: how a weight becomes W[N,K] of a type, bit for bit what QuantTensor::value says. Empty: on the CPU.
  std::function<Result<Tensor>(const QuantTensor& q, DType dtype)> dequantize = {};
  /// Of a directory: no file holds more bytes of tensors, but for a single layer that has more. 0: as the input is cut.
  std::uint64_t max_shard_bytes = 0;
};

/// What happened to each module, for a table.
struct TransformedModule {
  std::string name;                 // Module::name
  std::string scheme;               // of the output
  std::optional<QuantError> error;  // quantize: against the input
  bool smoothed = false;            // quantize: the norm in front of it took a part of its weights
};
/// A float weight that quantize left as it is.
struct LeftModule {
  std::string name;
  std::string why;
};
/// What a transformation did.
struct TransformReport {
  std::vector<TransformedModule> modules;     // the ones changed
  std::vector<LeftModule> left;               // quantize: the ones left alone
  std::vector<Note> notes;                    // what was left alone, and why, many of a kind told once; what reading found
  std::uint64_t bytes_in = 0, bytes_out = 0;  // of all tensors
};

/// What quantize_checkpoint writes.
struct QuantizeCheckpointSpec {
  std::string format = "compressed-tensors";  // one with can_write
  /// Of every weight that is not skipped, and how layers are to quantize their activations, whose scales per tensor are found in the
  /// calibration. Scales of type none have that of 16-bit weights, to which loaders would round others; for f32 weights what suits the
  /// format.
  Scheme scheme = {{DType::u4b8, ZeroKind::none, GroupShape::group(128), DType::none}};
  bool clip_search = false;  // as QuantizeSpec has it
  /// What went into layers: a safetensors file with NAME.input_absmax [K] or NAME.input [tokens,K] of modules.
  std::filesystem::path calibration = {};
  /// SmoothQuant's α, from 0 (nothing moves from activations to weights) to 1; needs the calibration. Norms of Llama-like models
  /// absorb the factors, which every loader of the format understands; other layers stay as they are, and a note says so.
  std::optional<double> smooth = {};
  bool convs =
      false;  // also convolutions, of weights [Co,Ci/groups,Kh,Kw]: formats of compressed-tensors hold them, few loaders do
  /// Regular expressions (Pattern), searched in names: the only modules to quantize (empty: every one), and those to leave alone
  /// (empty: none).
  std::string only = {}, skip = {};
  /// Also what is stored like a linear layer and is none, or is one that loaders keep in float: embeddings, output heads, routers of
  /// experts. Names, shapes, biases and the sizes in config.json tell them. Weights stored as [K,N] stay in any case.
  bool all = false;
  bool dry_run = false;  // the report says what would be done, without errors and sizes; nothing is written
};

/// Each of these writes a new checkpoint and leaves `in` alone. `out` appears whole or not at all: a directory when `in` is
/// one (shards, config.json, the other small files and folders), else a single file. Errors: already_exists, unsupported
/// (with the module that cannot be expressed, or quantized tensors that would be left), io_error, and everything open() reports.
Result<TransformReport> quantize_checkpoint(const std::filesystem::path& in, const std::filesystem::path& out,
                                            const QuantizeCheckpointSpec& spec, const TransformOptions& options = {});
/// Re-encodes every quantized module in `format`, without loss or not at all.
Result<TransformReport> convert_checkpoint(const std::filesystem::path& in, const std::filesystem::path& out,
                                           std::string_view format, const TransformOptions& options = {});
/// Replaces every quantized module by NAME.weight, [N,K] or a convolution's [Co,Ci/groups,Kh,Kw]; dtype f32, f16 or bf16.
Result<TransformReport> dequantize_checkpoint(const std::filesystem::path& in, const std::filesystem::path& out, DType dtype,
                                              const TransformOptions& options = {});

/// A tensor to be written: its description, and where its bytes come from when its turn comes.
struct TensorSource {
  std::string name;                 // unique in the file
  DType dtype = DType::none;        // of those that safetensors knows
  std::vector<std::int64_t> shape;  // outermost dimension first
  /// Returns exactly storage_bytes(dtype, numel) bytes; called once, in file order.
  std::function<Result<std::vector<std::byte>>()> produce;
};

/// Writes a safetensors file under a temporary name in the same directory and renames it when complete.
/// Errors: already_exists unless `overwrite`; io_error (full disk, ...), nothing is left behind then.
Status write_safetensors(const std::filesystem::path& path, std::span<const TensorSource> tensors,
                         const std::vector<std::pair<std::string, std::string>>& metadata = {}, bool overwrite = false);

/// Writes a directory of model.safetensors, with these tensors, and config.json, with this text: whole or not at all, as
/// quantize_checkpoint does.
Status write_checkpoint(const std::filesystem::path& directory, std::span<const TensorSource> tensors, std::string_view config,
                        bool overwrite = false);

}  // namespace nibble
