// Checkpoint → checkpoint: quantize, convert and dequantize are one walk over the tensors with a different step per module.
#include <algorithm>
#include <cstring>
#include <exception>
#include <regex>

#include "core/error.hpp"
#include "core/row_decoder.hpp"
#include "formats/atomic_output.hpp"
#include "formats/checkpoint_impl.hpp"
#include "formats/format.hpp"
#include "formats/json.hpp"
#include "formats/names.hpp"
#include "formats/safetensors.hpp"
#include "formats/smooth.hpp"

namespace nibble {
namespace fs = std::filesystem;
using storage::join_name;
using storage::printable;
namespace {

using Modules = std::vector<const Module*>;

/// What becomes of one module.
struct Rewritten {
  std::vector<codec::EncodedTensor> tensors;
  WeightScheme scheme;
  bool act_order = false;
  TransformedModule row;
  ActScheme act = {};
};

struct Transform {
  const Checkpoint::Impl& in;
  fs::path out;
  Modules selected;  // in the order of in.modules
  std::function<Result<Rewritten>(const Module&)> rewrite;
  const codec::Format* format;  // of the output; null: not quantized
  const TransformOptions& options;
  Smoothing smoothing = {};  // other tensors that change
};

/// The output file, with every tensor at an aligned offset: those that would break the alignment of the next wait for the end.
class Output {
 public:
  explicit Output(storage::SafetensorsWriter writer) : writer_(std::move(writer)) {}

  Status add(std::string name, DType dtype, std::span<const std::int64_t> shape, std::span<const std::byte> bytes) {
    const int alignment = storage::alignment_class(dtype, bytes.size());
    if (alignment == 8) return writer_.append(name, dtype, shape, bytes);
    later_.push_back({alignment, std::move(name), dtype, {shape.begin(), shape.end()}, {bytes.begin(), bytes.end()}});
    return {};
  }
  Status finish() {
    std::ranges::stable_sort(later_, std::ranges::greater{}, &Waiting::alignment);
    for (const Waiting& t : later_) NIBBLE_RETURN_IF_ERROR(writer_.append(t.name, t.dtype, t.shape, t.bytes));
    return writer_.finish();
  }
  std::uint64_t bytes() const { return writer_.data_bytes(); }

 private:
  struct Waiting {
    int alignment;
    std::string name;
    DType dtype;
    std::vector<std::int64_t> shape;
    std::vector<std::byte> bytes;
  };
  storage::SafetensorsWriter writer_;
  std::vector<Waiting> later_;
};

/// `out` may be neither `in` nor a directory around it: overwriting would destroy the input.
Status check_paths(const fs::path& in, const fs::path& out) {
  std::error_code failure;
  const fs::path from = fs::weakly_canonical(in, failure), to = fs::weakly_canonical(out, failure);
  const fs::path relative = from.lexically_relative(to);
  if (!failure && !relative.empty() && *relative.begin() != "..")
    return error(StatusCode::invalid_argument, "the output {} is or contains the input {}", out.string(), in.string());
  return {};
}

/// Tokenizer, generation settings, license, ...: whatever is neither weights nor a description of the old weights.
bool is_companion(const fs::path& file) {
  static constexpr std::string_view kWeights[] = {".safetensors", ".bin", ".pt",      ".pth", ".ckpt",
                                                  ".gguf",        ".h5",  ".msgpack", ".onnx"};
  const std::string name = file.filename().string();
  return name != "config.json" && !name.starts_with('.') && !name.ends_with(".index.json") &&
         std::ranges::find(kWeights, file.extension().string()) == std::end(kWeights) &&
         std::ranges::find(storage::legacy_config_names(), name) == storage::legacy_config_names().end();
}

Status copy_companions(const fs::path& from, const fs::path& to) {
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string> names, storage::names_in(from));
  std::error_code failure;
  for (const std::string& name : names) {
    std::error_code dangling;  // a link to nowhere is no reason to stop
    if (!fs::is_regular_file(from / name, dangling) || !is_companion(from / name)) continue;
    if (!fs::copy_file(from / name, to / name, failure)) break;
  }
  if (failure) return error(StatusCode::io_error, "cannot copy the files of {}: {}", from.string(), failure.message());
  return {};
}

/// config.json of the output directory, unless there is nothing to say.
Status write_config(const Transform& t, const std::vector<codec::WrittenModule>& written, const fs::path& directory) {
  std::optional<nlohmann::json> config;
  if (t.format != nullptr) {
    std::vector<std::string> others;
    for (const Module& module : t.in.modules)
      if (!std::ranges::binary_search(t.selected, &module)) others.push_back(module.name);
    NIBBLE_ASSIGN_OR_RETURN(config, t.format->write_config(written, others));
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, storage::edit_model_config(t.in.config.text, config));
  if (text.empty()) return {};
  NIBBLE_ASSIGN_OR_RETURN(auto file, storage::OutputFile::create(directory / "config.json", false));
  NIBBLE_RETURN_IF_ERROR(file.write_at(0, std::as_bytes(std::span(text))));
  return file.commit();
}

/// Writes the tensors: a selected module's new ones in place of its first old one, all others as they are.
Status write_tensors(const Transform& t, const fs::path& file, bool overwrite, TransformReport& report,
                     std::vector<codec::WrittenModule>& written) {
  constexpr std::size_t kMaxParts = 12;  // tensors of one encoded module, and more than their suffixes' length
  constexpr std::string_view kLongSuffix = ".weight_zero_point_or_longer";
  storage::Metadata metadata = t.in.shards.metadata;
  if (std::ranges::find(metadata, "format", &storage::Metadata::value_type::first) == metadata.end())
    metadata.emplace_back("format", "pt");  // Hugging Face refuses files that do not say so
  std::unordered_map<std::string_view, const Module*> owner;
  std::size_t header_room = 0;
  for (const Module* module : t.selected) {
    for (const std::string& tensor : module->tensors) owner.emplace(tensor, module);
    header_room += kMaxParts * storage::SafetensorsWriter::header_bytes(module->name + std::string(kLongSuffix), 4);
  }
  for (const TensorInfo& tensor : t.in.shards.tensors) {
    report.bytes_in += tensor.bytes;
    if (!owner.contains(tensor.name)) header_room += storage::SafetensorsWriter::header_bytes(tensor.name, tensor.shape.size());
  }
  NIBBLE_ASSIGN_OR_RETURN(auto writer, storage::SafetensorsWriter::create(file, metadata, header_room, overwrite));
  Output output(std::move(writer));
  std::uint64_t done = 0;
  for (std::size_t i = 0; i < t.in.shards.tensors.size(); ++i) {
    const TensorInfo& tensor = t.in.shards.tensors[i];
    const auto it = owner.find(tensor.name);
    const Module* module = it == owner.end() ? nullptr : it->second;
    if (t.options.progress) t.options.progress(done, report.bytes_in, module == nullptr ? tensor.name : module->name);
    done += tensor.bytes;
    if (module == nullptr) {
      const auto norm = t.smoothing.norms.find(tensor.name);
      Tensor stored;
      if (norm == t.smoothing.norms.end()) {
        NIBBLE_ASSIGN_OR_RETURN(stored, t.in.shards.load(i));
      }
      const Tensor& written_now = norm == t.smoothing.norms.end() ? stored : norm->second;
      NIBBLE_RETURN_IF_ERROR(output.add(tensor.name, tensor.dtype, tensor.shape, written_now.bytes));
    } else if (tensor.name == module->tensors.front()) {
      NIBBLE_ASSIGN_OR_RETURN(Rewritten rewritten, t.rewrite(*module));
      for (const codec::EncodedTensor& part : rewritten.tensors)
        NIBBLE_RETURN_IF_ERROR(
            output.add(join_name(module->name, part.suffix), part.tensor.dtype, part.tensor.shape, part.tensor.bytes));
      written.push_back({module->name, rewritten.scheme, rewritten.act_order, rewritten.act, module->kernel.has_value()});
      report.modules.push_back(std::move(rewritten.row));
    }
  }
  if (t.options.progress) t.options.progress(done, report.bytes_in, file.filename().string());
  NIBBLE_RETURN_IF_ERROR(output.finish());
  report.bytes_out = output.bytes();
  return {};
}

Result<TransformReport> run(const Transform& t) {
  TransformReport report;
  report.notes = t.smoothing.notes;
  std::vector<codec::WrittenModule> written;
  NIBBLE_RETURN_IF_ERROR(check_paths(t.in.path, t.out));
  for (const std::string& name : storage::sweep(t.out))
    report.notes.push_back(
        {Note::Severity::info, fmt::format("removed {}, left behind by a run that was killed", printable(name))});
  std::error_code ignored;
  if (!fs::is_directory(t.in.path, ignored)) {
    NIBBLE_RETURN_IF_ERROR(write_tensors(t, t.out, t.options.overwrite, report, written));
    return report;
  }
  NIBBLE_ASSIGN_OR_RETURN(auto directory, storage::OutputDirectory::create(t.out, t.options.overwrite));
  NIBBLE_RETURN_IF_ERROR(write_tensors(t, directory.path() / "model.safetensors", false, report, written));
  NIBBLE_RETURN_IF_ERROR(write_config(t, written, directory.path()));
  NIBBLE_RETURN_IF_ERROR(copy_companions(t.in.path, directory.path()));
  NIBBLE_RETURN_IF_ERROR(directory.commit());
  return report;
}

/// Opens the input; a module that cannot be read must not pass through unnoticed under a config that no longer fits it.
Result<std::shared_ptr<const Checkpoint::Impl>> open_input(const fs::path& path) {
  NIBBLE_ASSIGN_OR_RETURN(auto in, Checkpoint::Impl::open(path));
  if (!in->broken.empty()) return in->broken.front().with_context(path.string());
  return in;
}

Result<const codec::Format*> writable_format(std::string_view name) {
  const codec::Format* format = codec::find_format(name);
  if (format != nullptr && format->can_write) return format;
  std::vector<std::string_view> names;
  for (const codec::Format& row : codec::format_table())
    if (row.can_write) names.push_back(row.name);
  return error(format == nullptr ? StatusCode::not_found : StatusCode::unsupported, "{} format {}; nibble writes {}",
               format == nullptr ? "there is no" : "nibble does not write the", printable(name), fmt::join(names, ", "));
}

Modules quantized_modules(const Checkpoint::Impl& in) {
  Modules found;
  for (const Module& module : in.modules)
    if (module.quantized()) found.push_back(&module);
  return found;
}

Status nothing_to_do(const fs::path& path, std::string_view what) {
  return error(StatusCode::invalid_argument, "{}: {}", path.string(), what);
}

Result<Rewritten> encode(const codec::Format& format, const Module& module, const QuantTensor& q, const ActScheme& act) {
  if (module.kernel && format.encode_conv == nullptr)
    return error(StatusCode::unsupported,
                 "module {} is a convolution, which {} cannot hold; compressed-tensors and int-quantized can", module.name,
                 format.name);
  auto tensors = module.kernel ? format.encode_conv(q, act) : format.write(q, act);
  if (!tensors.ok()) return tensors.status().with_context(module.name);
  return Rewritten{
      std::move(tensors).value(), q.scheme, !q.g_idx.empty(), {module.name, Scheme{q.scheme, act}.name(), std::nullopt}, act};
}

/// How a layer's activations are quantized: as its config says, else as a static scale beside it suggests.
ActScheme activations_of(const Module& module, const QuantTensor& q) {
  if (module.claimed) return module.claimed->act;
  if (!q.static_acts) return {};
  return {q.scheme.codes == DType::e4m3 ? DType::e4m3 : DType::s8, GroupShape::tensor(),
          q.static_acts->zero == 0 ? ZeroKind::none : ZeroKind::integer};
}

/// Rows in the order kh, kw, ci as [Co,Ci/groups,Kh,Kw].
Tensor as_oihw(const Tensor& rows, Extent kernel) {
  const std::int64_t elements = kernel.h * kernel.w, k = rows.shape[1], channels = k / elements;
  const auto width = static_cast<std::size_t>(bits(rows.dtype) / 8);
  Tensor out(rows.dtype, {rows.shape[0], channels, kernel.h, kernel.w});
  std::byte* to = out.bytes.data();
  for (std::int64_t n = 0; n < rows.shape[0]; ++n)
    for (std::int64_t c = 0; c < channels; ++c)
      for (std::int64_t e = 0; e < elements; ++e, to += width)
        std::memcpy(to, rows.bytes.data() + static_cast<std::size_t>(n * k + e * channels + c) * width, width);
  return out;
}

/// The inverse, of a stored tensor.
Tensor as_rows(const Tensor& w) {
  const std::int64_t elements = w.shape[2] * w.shape[3], channels = w.shape[1];
  const auto width = static_cast<std::size_t>(bits(w.dtype) / 8);
  Tensor out(w.dtype, {w.shape[0], elements * channels});
  std::byte* to = out.bytes.data();
  for (std::int64_t n = 0; n < w.shape[0]; ++n)
    for (std::int64_t e = 0; e < elements; ++e)
      for (std::int64_t c = 0; c < channels; ++c, to += width)
        std::memcpy(to, w.bytes.data() + static_cast<std::size_t>((n * channels + c) * elements + e) * width, width);
  return out;
}

/// Scales that include those of the layer's input and output mean nothing in another model.
Status refuse_code_units(const Module& module) {
  if (module.format != "smoothquant") return {};
  return error(StatusCode::unsupported,
               "module {}: its scale includes those of its input and output, which are int8; quantize the "
               "original checkpoint instead",
               module.name);
}

/// W·diag(s).
Tensor scaled_columns(const Tensor& w, const std::vector<float>& s, Executor& executor) {
  Tensor out(DType::f32, w.shape);
  const std::int64_t cols = w.shape[1];
  executor.parallel_for(w.shape[0], [&](std::int64_t n) {
    for (std::int64_t k = 0; k < cols; ++k) out.as<float>()[n * cols + k] = w.at(n * cols + k) * s[static_cast<std::size_t>(k)];
  });
  return out;
}

/// The scale with which the largest activation becomes the largest code.
Result<StaticActs> static_scale(const Module& module, const ActScheme& act, const std::optional<std::vector<float>>& absmax,
                                const std::vector<float>* s) {
  if (!absmax)
    return error(StatusCode::invalid_argument,
                 "module {}: the calibration has no {}, which a static scale needs; skip the module, or "
                 "quantize activations while running",
                 module.name, join_name(module.name, "input_absmax"));
  float most = 0;
  for (std::size_t k = 0; k < absmax->size(); ++k) most = std::max(most, (*absmax)[k] / (s == nullptr ? 1.0f : (*s)[k]));
  const float scale = most / (act.codes == DType::e4m3 ? 448.0f : 127.0f);
  if (scale > 0.0f) return StaticActs{scale, 0};
  return error(StatusCode::invalid_argument, "module {}: the calibration says that its input is always 0", module.name);
}

/// W, each element rounded once to T.
template <class T>
void dequantize_rows(const QuantTensor& q, T (*round)(float), T* out, Executor& executor) {
  constexpr std::int64_t kRowsPerTask = 16;  // to share the buffer of a row
  const RowDecoder decoder(q);
  executor.parallel_for((q.n + kRowsPerTask - 1) / kRowsPerTask, [&](std::int64_t task) {
    std::vector<float> row(static_cast<std::size_t>(q.k));
    for (std::int64_t n = task * kRowsPerTask; n < std::min(q.n, (task + 1) * kRowsPerTask); ++n) {
      decoder.decode(n, row.data());
      std::ranges::transform(row, out + n * q.k, round);
    }
  });
}

Tensor dequantize(const QuantTensor& q, DType dtype, Executor& executor) {
  Tensor out(dtype, {q.n, q.k});
  if (dtype == DType::f16)
    dequantize_rows<f16>(q, to_f16, out.as<f16>(), executor);
  else if (dtype == DType::bf16)
    dequantize_rows<bf16>(q, to_bf16, out.as<bf16>(), executor);
  else
    dequantize_rows<float>(q, to_f32, out.as<float>(), executor);
  return out;
}

}  // namespace

Result<TransformReport> quantize_checkpoint(const fs::path& in_path, const fs::path& out, const QuantizeCheckpointSpec& spec,
                                            const TransformOptions& options) try {
  NIBBLE_ASSIGN_OR_RETURN(const codec::Format* format, writable_format(spec.format));
  std::optional<std::regex> skip;
  try {
    if (!spec.skip.empty()) skip.emplace(spec.skip, std::regex::ECMAScript);  // an empty expression would match every name
  } catch (const std::regex_error& e) {
    return error(StatusCode::invalid_argument, "the skip expression {} is not a regular expression: {}", printable(spec.skip),
                 e.what());
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto in, open_input(in_path));
  Modules selected;
  for (const Module& module : in->modules) {
    if (module.quantized())
      return error(StatusCode::invalid_argument, "{}: module {} is quantized already ({}); dequantize or convert the checkpoint",
                   in_path.string(), module.name, module.scheme.name());
    if (module.kernel && !spec.convs) continue;
    if (!is_compute_float(module.scheme.codes) || (skip && std::regex_search(module.name, *skip))) continue;
    if (const GroupShape shape = spec.quantize.shape(); shape.n == 1 && shape.k > 0 && module.k % shape.k != 0)
      return error(StatusCode::invalid_argument,
                   "module {}: K={} is not a multiple of group_size={}; skip it, or use a group size that divides K (0: one "
                   "group per channel)",
                   module.name, module.k, shape.k);
    selected.push_back(&module);
  }
  if (selected.empty()) return nothing_to_do(in_path, "no dense layer is left to quantize after the skip expression");
  const bool is_static = spec.act.codes != DType::none && spec.act.group == GroupShape::tensor();
  if (spec.calibration.empty() && (spec.smooth || is_static))
    return error(StatusCode::invalid_argument, "{} needs a calibration", spec.smooth ? "smoothing" : "a static activation scale");
  if (spec.smooth && !(*spec.smooth >= 0 && *spec.smooth <= 1))
    return error(StatusCode::invalid_argument, "α={} of smoothing is outside 0…1", *spec.smooth);
  std::optional<Calibration> calibration;
  Smoothing smoothing;
  if (!spec.calibration.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(calibration, Calibration::open(spec.calibration));
    if (spec.smooth) {
      NIBBLE_ASSIGN_OR_RETURN(smoothing, plan_smoothing(*in, selected, *calibration, *spec.smooth));
    }
  }
  Executor& executor = options.executor != nullptr ? *options.executor : default_executor();
  const auto rewrite = [&](const Module& module) -> Result<Rewritten> {
    const auto factors = smoothing.factors.find(module.name);
    const std::vector<float>* s = factors == smoothing.factors.end() ? nullptr : &factors->second;
    const auto stored = [&](const char* suffix) { return in->shards.load(in->tensor_index.at(join_name(module.name, suffix))); };
    NIBBLE_ASSIGN_OR_RETURN(Tensor original, stored("weight"));
    if (module.kernel) original = as_rows(original);
    const Tensor smoothed = s == nullptr ? Tensor() : scaled_columns(original, *s, executor);
    const auto view = [&](const Tensor& w) { return ConstTensorView(w.bytes.data(), w.dtype, {module.n, module.k}); };
    Result<QuantTensor> q = quantize(view(s == nullptr ? original : smoothed), spec.quantize, options.executor);
    if (!q.ok()) return q.status().with_context(module.name);
    q->kernel = module.kernel.value_or(Extent{});
    if (module.has_bias) {
      NIBBLE_ASSIGN_OR_RETURN(q->bias, stored("bias"));
    }
    if (is_static) {
      std::optional<std::vector<float>> absmax;
      if (s != nullptr) {
        absmax = smoothing.absmax.at(module.name);
      } else {
        NIBBLE_ASSIGN_OR_RETURN(absmax, calibration->absmax(module));
      }
      NIBBLE_ASSIGN_OR_RETURN(q->static_acts, static_scale(module, spec.act, absmax, s));
    }
    NIBBLE_ASSIGN_OR_RETURN(Rewritten rewritten, encode(*format, module, *q, spec.act));
    if (s != nullptr) {  // the norm multiplies by 1/s: with it the weight stands for the original
      q->prescale = Tensor(DType::f32, {module.k});
      for (std::int64_t k = 0; k < module.k; ++k) q->prescale.set(k, 1.0f / (*s)[static_cast<std::size_t>(k)]);
    }
    NIBBLE_ASSIGN_OR_RETURN(rewritten.row.error, quantization_error(view(original), *q, options.executor));
    rewritten.row.smoothed = s != nullptr;
    return rewritten;
  };
  return run({*in, out, std::move(selected), rewrite, format, options, smoothing});
} catch (const std::exception& e) {
  return error(StatusCode::io_error, "cannot quantize {}: {}", in_path.string(), e.what());
}

Result<TransformReport> convert_checkpoint(const fs::path& in_path, const fs::path& out, std::string_view format_name,
                                           const TransformOptions& options) try {
  NIBBLE_ASSIGN_OR_RETURN(const codec::Format* format, writable_format(format_name));
  NIBBLE_ASSIGN_OR_RETURN(const auto in, open_input(in_path));
  Modules selected = quantized_modules(*in);
  if (selected.empty()) return nothing_to_do(in_path, "no module is quantized, so there is nothing to convert");
  const auto rewrite = [&](const Module& module) -> Result<Rewritten> {
    NIBBLE_RETURN_IF_ERROR(refuse_code_units(module));
    NIBBLE_ASSIGN_OR_RETURN(const QuantTensor q, in->read(module, nullptr));
    return encode(*format, module, q, activations_of(module, q));
  };
  return run({*in, out, std::move(selected), rewrite, format, options});
} catch (const std::exception& e) {
  return error(StatusCode::io_error, "cannot convert {}: {}", in_path.string(), e.what());
}

Result<TransformReport> dequantize_checkpoint(const fs::path& in_path, const fs::path& out, DType dtype,
                                              const TransformOptions& options) try {
  if (!is_compute_float(dtype))
    return error(StatusCode::invalid_argument, "cannot dequantize to {}; choose f32, f16 or bf16", name(dtype));
  NIBBLE_ASSIGN_OR_RETURN(const auto in, open_input(in_path));
  Modules selected = quantized_modules(*in);
  if (selected.empty()) return nothing_to_do(in_path, "no module is quantized, so there is nothing to dequantize");
  Executor& executor = options.executor != nullptr ? *options.executor : default_executor();
  const auto rewrite = [&](const Module& module) -> Result<Rewritten> {
    NIBBLE_RETURN_IF_ERROR(refuse_code_units(module));
    NIBBLE_ASSIGN_OR_RETURN(QuantTensor q, in->read(module, nullptr));
    if (!q.prescale.empty())
      return error(StatusCode::unsupported,
                   "module {}: its activations are scaled per input channel first; a weight alone cannot express that",
                   module.name);
    Result<Tensor> weight = options.dequantize ? options.dequantize(q, dtype) : dequantize(q, dtype, executor);
    if (!weight.ok()) return weight.status().with_context(module.name);
    Rewritten rewritten{{}, q.scheme, false, {module.name, std::string(name(dtype)), std::nullopt}};
    rewritten.tensors.push_back({"weight", module.kernel ? as_oihw(*weight, *module.kernel) : *std::move(weight)});
    if (!q.bias.empty()) rewritten.tensors.push_back({"bias", std::move(q.bias)});
    return rewritten;
  };
  return run({*in, out, std::move(selected), rewrite, nullptr, options});
} catch (const std::exception& e) {
  return error(StatusCode::io_error, "cannot dequantize {}: {}", in_path.string(), e.what());
}

}  // namespace nibble
