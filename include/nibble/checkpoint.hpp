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

/// A finding about a module or a checkpoint, for a person.
struct Note {
  /// info: worth knowing; warning: likely a mistake; error: data that is broken, or that cannot be used.
  enum class Severity : std::uint8_t { info, warning, error };
  Severity severity = Severity::info;  // how much it matters
  std::string text;                    // one line, with the values
  StatusCode code = StatusCode::ok;    // of an error that is no damage: unsupported; else ok
};

/// A finding about a module; `module` is empty when it is about the whole checkpoint.
struct ModuleNote {
  std::string module;
  Note note;
};
/// Merges findings that differ only in the module and in numbers into one, "in 224 modules: ..., e.g. NAME: ..."; errors come first.
std::vector<Note> group_notes(std::span<const ModuleNote> notes);

/// One tensor as stored.
struct TensorInfo {
  std::string name;                 // "model.layers.0.mlp.down_proj.qweight"
  DType dtype = DType::none;        // of an element
  std::vector<std::int64_t> shape;  // outermost dimension first
  std::uint64_t bytes = 0;          // storage_bytes(dtype, product of shape)
  std::string file;                 // the file that holds it, relative to the checkpoint
  std::uint64_t file_offset = 0;    // of its first byte in the file
};

/// A layer: the tensors that share a module name, recognised by a format. Detection looks at names, dtypes and shapes only;
/// Checkpoint::read finds what needs the data (damaged zero points, NaN scales, ...).
struct Module {
  std::string name;                  // "model.layers.0.mlp.down_proj"
  std::string format;                // "awq", "gptq", "compressed-tensors", "int-quantized", "mxfp4", "dense"
  std::int64_t n = 0, k = 0;         // W is [N,K]
  std::optional<Extent> filter;      // of a convolution, whose weight is [N, K/(Kh·Kw), Kh, Kw]; absent: a linear layer
  WeightScheme scheme;               // as detected
  std::optional<Scheme> claimed;     // as config.json says; absent when it says nothing
  std::string other_acts;            // what config.json says about activations that no Scheme expresses; or ""
  bool act_order = false;            // has a g_idx
  bool has_bias = false;             // read() returns it with the weight
  std::vector<std::string> tensors;  // their full names
  std::uint64_t bytes = 0;           // of those tensors
  std::vector<Note> notes;           // findings that need no data
  /// Of an expert whose tensors have all experts of a layer, [E,…]: the name that these share, "model.layers.0.mlp.experts", while `name` has the
  /// expert's number behind it. Its `bytes` are its own. Else "".
  std::string stack = {};

  /// Whether its weight is. A dense one is read as it is.
  bool quantized() const { return format != "dense"; }
};

/// Some of a layer's output channels, or of its input channels.
struct LayerPart {
  enum class Of : std::uint8_t { outputs, inputs };
  Of of = Of::outputs;              // rows of W[N,K], or columns
  std::int64_t begin = 0, end = 0;  // channels [begin, end): 0 ≤ begin < end ≤ N or K
};

/// A read-only checkpoint. Files stay open and memory-mapped for its lifetime; copies share them.
class Checkpoint {
 public:
  /// `path` is a directory with *.safetensors (and config.json), or one .safetensors file.
  /// Every header is checked completely; errors name the file, tensor and byte offset.
  static Result<Checkpoint> open(const std::filesystem::path& path);

  /// The argument of open().
  const std::filesystem::path& path() const;
  /// Every stored tensor, in file order.
  std::span<const TensorInfo> tensors() const;
  /// Linear layers and convolutions, quantized or dense, in file order. Float tensors of 2 and of 4 dimensions called *.weight count
  /// as dense modules. Of experts that are stored together, gate_up_proj and down_proj of [E,…], each is a module.
  std::span<const Module> modules() const;
  /// Findings about the whole checkpoint: config contradictions, unknown quant_method, ...
  std::span<const Note> notes() const;
  /// The text of config.json ("" when there is none).
  const std::string& config() const;

  /// The tensor of that name; null when there is none.
  const TensorInfo* find_tensor(std::string_view tensor_name) const;
  /// The module of that name; null when there is none.
  const Module* find_module(std::string_view module_name) const;
  /// A view of the mapped bytes of a tensor of this checkpoint (rank ≤ 4; higher ranks are viewed as rank 1). As with every mapped
  /// file, touching a page that another program has truncated raises SIGBUS; load(), read() and the transforms return io_error instead.
  ConstTensorView view(const TensorInfo& tensor) const;
  /// The same bytes, read into memory.
  Result<Tensor> load(const TensorInfo& tensor) const;

  /// Decodes a module, on the threads of default_executor(); a dense one is returned as it is, whatever its numbers. Findings that need the
  /// data are appended to `notes`.
  Result<QuantTensor> read(const Module& module, std::vector<Note>* notes = nullptr) const;
  /// Decodes a part of one, as a layer of its own, and reads no bytes of other channels' weights. A part of the input channels has the whole
  /// bias. Errors: invalid_argument for channels that the module has not; unsupported where a stored word, group or block has channels on
  /// both sides of a boundary, for input channels in act-order, for convolutions and for experts that are stored together: read() those whole.
  Result<QuantTensor> read(const Module& module, const LayerPart& part, std::vector<Note>* notes = nullptr) const;
  /// 16 hexadecimal digits by which a changed module is noticed, wherever its files are: of the names, types and shapes of its tensors, of
  /// the first, middle and last 64 bytes of each, and of the quantization config. Not a cryptographic hash. Errors: not_found; io_error.
  Result<std::string> digest(const Module& module) const;

  struct Impl;
  /// For open().
  explicit Checkpoint(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  /// For pack().
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// A tensor of a module that is already in memory, by its name inside the module: "qweight", "weight_scale", "bias".
struct NamedView {
  std::string name;      // without the module's
  ConstTensorView view;  // host memory, dense; may be unaligned
};

/// Checkpoint::read for a layer whose tensors are in memory: recognises the format and decodes it. `config` is the
/// JSON text of the model's quantization_config, or of a config.json that has one; "" when nothing is known beyond the tensors.
/// Errors: not_found when no format knows such tensors, and those of Checkpoint::read.
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

/// Called from the calling thread during long work; `done` and `total` have the same unit, `what` is the current item.
using Progress = std::function<void(std::uint64_t done, std::uint64_t total, std::string_view what)>;

/// Options of every function that writes a checkpoint.
struct TransformOptions {
  bool overwrite = false;        // replace an existing file, or a directory in which nibble wrote every file (.nibble lists them)
  Progress progress = {};        // empty: no reports
  Executor* executor = nullptr;  // null: default_executor()
  /// dequantize_checkpoint: computes W[N,K] of a type, bit for bit QuantTensor::value rounded once. Empty: on the CPU.
  std::function<Result<Tensor>(const QuantTensor& q, DType dtype)> dequantize = {};
  /// Of a directory: the most bytes of tensors in a file; a layer that has more gets a file of its own. 0: as in the input.
  std::uint64_t max_shard_bytes = 0;
};

/// A module that a transformation changed.
struct TransformedModule {
  std::string name;                 // Module::name
  std::string scheme;               // of the output
  std::optional<QuantError> error;  // quantize: against the input
  bool smoothed = false;            // quantize: SmoothQuant's factors were folded into the norm in front of it
};
/// A float weight that quantize_checkpoint left as it is.
struct LeftModule {
  std::string name;
  std::string why;
};
/// The result of a transformation.
struct TransformReport {
  std::vector<TransformedModule> modules;     // those that changed
  std::vector<LeftModule> left;               // quantize: those left as they are
  std::vector<Note> notes;                    // why modules were left as they are, grouped; findings of reading
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
  /// SmoothQuant's α, from 0 (nothing moves from activations to weights) to 1; needs the calibration. The factors
  /// are folded into the norms of Llama-like models, so that loaders need to know nothing of them; other layers stay as they are, with
  /// a note.
  std::optional<double> smooth = {};
  bool convs = false;  // also convolutions, of weights [Co,Ci/groups,Kh,Kw]; compressed-tensors holds them, few loaders read them
  /// Regular expressions (Pattern), searched in names: the only modules to quantize (empty: every one), and those to leave alone
  /// (empty: none).
  std::string only = {}, skip = {};
  /// Also weights that are stored like linear layers but are none, or that loaders expect in float: embeddings, output heads, routers of
  /// experts. They are recognised by names, shapes, biases and the sizes in config.json. Weights stored as [K,N] are never quantized,
  /// but for experts that are stored together.
  bool all = false;
  bool dry_run = false;  // report what would be done, without errors and sizes; write nothing
};

/// Quantizes every linear layer of float weights that is not skipped. Writes a new checkpoint and leaves `in` as it is. `out`
/// appears whole or not at all: a directory when `in` is one (shards, config.json, the other small files and folders), else a single
/// file. Errors: already_exists; unsupported, with the module that the format cannot express, or with quantized tensors that would be
/// left; io_error; and those of open().
Result<TransformReport> quantize_checkpoint(const std::filesystem::path& in, const std::filesystem::path& out,
                                            const QuantizeCheckpointSpec& spec, const TransformOptions& options = {});
/// Re-encodes every quantized module in `format`, without loss or not at all; otherwise as quantize_checkpoint.
Result<TransformReport> convert_checkpoint(const std::filesystem::path& in, const std::filesystem::path& out,
                                           std::string_view format, const TransformOptions& options = {});
/// Replaces every quantized module by NAME.weight, [N,K] or a convolution's [Co,Ci/groups,Kh,Kw], of dtype f32, f16 or
/// bf16; otherwise as quantize_checkpoint.
Result<TransformReport> dequantize_checkpoint(const std::filesystem::path& in, const std::filesystem::path& out, DType dtype,
                                              const TransformOptions& options = {});

/// A tensor to be written: its description, and a function that makes its bytes.
struct TensorSource {
  std::string name;                 // unique in the file
  DType dtype = DType::none;        // one that safetensors knows
  std::vector<std::int64_t> shape;  // outermost dimension first
  /// Returns exactly storage_bytes(dtype, numel) bytes; called once, in file order.
  std::function<Result<std::vector<std::byte>>()> produce;
};

/// Writes a safetensors file under a temporary name in the same directory and renames it when complete.
/// Errors: already_exists unless `overwrite`; io_error (full disk, ...), which leaves no file behind.
Status write_safetensors(const std::filesystem::path& path, std::span<const TensorSource> tensors,
                         const std::vector<std::pair<std::string, std::string>>& metadata = {}, bool overwrite = false);

/// Writes a directory of model.safetensors, with these tensors, and config.json, with this text: whole or not at all, as
/// quantize_checkpoint does.
Status write_checkpoint(const std::filesystem::path& directory, std::span<const TensorSource> tensors, std::string_view config,
                        bool overwrite = false);

}  // namespace nibble
