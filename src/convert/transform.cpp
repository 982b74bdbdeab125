// Checkpoint → checkpoint: quantize, convert and dequantize are one walk over the tensors with a different step per module.
#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <map>
#include <set>
#include <unordered_set>
#include <utility>

#include "checkpoint/checkpoint_impl.hpp"
#include "checkpoint/config/ct_config.hpp"
#include "checkpoint/config/format.hpp"
#include "checkpoint/config/names.hpp"
#include "checkpoint/io/atomic_output.hpp"
#include "checkpoint/io/json.hpp"
#include "checkpoint/io/safetensors.hpp"
#include "convert/companions.hpp"
#include "convert/experts.hpp"
#include "convert/floats.hpp"
#include "convert/selection.hpp"
#include "convert/smooth.hpp"
#include "core/error.hpp"
#include "nibble/pattern.hpp"
#include "nibble/plan.hpp"
#include "quantize/quantize_rows.hpp"

namespace nibble {
namespace fs = std::filesystem;
using namespace std::string_view_literals;
using storage::join_name;
using storage::printable;
namespace {

using Modules = std::vector<const Module*>;

/// One of the modules that a module is written as.
struct Rewritten {
  std::vector<codec::EncodedTensor> tensors;
  WeightScheme scheme;
  bool act_order = false;
  TransformedModule row;  // with its name
  ActScheme act = {};
  std::string_view format = {};
};

struct Transform {
  const Checkpoint::Impl& in;
  fs::path out;
  Modules selected;  // in the order of in.modules
  std::function<Result<std::vector<Rewritten>>(const Module&)> rewrite;
  const codec::Format* format;                             // of the output; null: floats, of which experts stay together
  std::function<std::uint64_t(const Module&)> most_bytes;  // an upper bound of the output of rewrite
  const TransformOptions& options;
  Smoothing smoothing = {};            // other tensors that change
  std::vector<ModuleNote> notes = {};  // found before and by `rewrite`
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

/// compressed-tensors names a format per layer: codes that it cannot pack are stored by a related format, in bytes.
const codec::Format& format_for(const codec::Format& asked, DType codes) {
  const bool bytes = asked.name == "compressed-tensors" && (codes == DType::s8 || codes == DType::e4m3);
  return bytes ? *codec::find_format(codes == DType::s8 ? "int-quantized" : "float-quantized") : asked;
}

/// Not less than what any format takes for a layer.
std::uint64_t most_bytes(int width, const GroupShape& group, std::int64_t n, std::int64_t k) {
  const std::int64_t rows = group.rows(n), groups = group.cols(k);
  const std::int64_t codes = 4 * n * ((k * width + 31) / 32), scales = 4 * rows * groups,
                     zeros = 4 * (rows * groups + n + groups);
  return static_cast<std::uint64_t>(codes + scales + zeros + 4 * (n + k) + 64);
}

/// `out` may be neither `in` nor a directory around it: overwriting would destroy the input.
Status check_paths(const fs::path& in, const fs::path& out) {
  std::error_code failure;
  const fs::path from = fs::weakly_canonical(in, failure), to = fs::weakly_canonical(out, failure);
  const fs::path relative = from.lexically_relative(to);
  if (!failure && !relative.empty() && *relative.begin() != "..")
    return error(StatusCode::invalid_argument, "the output {} is or contains the input {}", out.string(), in.string());
  return {};
}

/// Refuses quantized tensors that belong to no module: the new config would no longer describe them.
Status check_leftovers(const Transform& t) {
  std::unordered_set<std::string_view> owned;
  for (const Module* module : t.selected) owned.insert(module->tensors.begin(), module->tensors.end());
  std::string names;
  std::size_t count = 0;
  for (const Checkpoint::Impl::Group& group : t.in.groups) {
    if (group.stack) continue;  // its tensors are those of another group
    const auto suffix = [&](std::size_t i) {
      const std::string& name = t.in.shards.tensors[i].name;
      return std::string_view(name).substr(group.name.empty() ? 0 : group.name.size() + 1);
    };
    const auto is_part = [](std::string_view name) {  // of how codes are decoded
      return name.find("scale") != name.npos || name.find("zero") != name.npos || name.find("absmax") != name.npos;
    };
    const auto is_cache = [](std::string_view name) {
      return name.size() > 1 && name[1] == '_' && "kqv"sv.find(name[0]) != "kqv"sv.npos;
    };
    const bool parts =
        std::ranges::any_of(group.tensors, [&](std::size_t i) { return is_part(suffix(i)) && !is_cache(suffix(i)); });
    for (const std::size_t i : group.tensors) {
      const TensorInfo& tensor = t.in.shards.tensors[i];
      const DTypeInfo& type = info(tensor.dtype);
      const bool narrow = type.kind == DTypeKind::floating && type.bits <= 8;
      const bool integer = type.kind == DTypeKind::sint || type.kind == DTypeKind::uint;
      const bool codes = integer && type.bits <= 32 && parts && !is_part(suffix(i));
      if ((!narrow && !codes) || owned.contains(tensor.name)) continue;
      if (++count <= 3) names += fmt::format("{}{} ({})", count == 1 ? "" : ", ", printable(tensor.name), name(tensor.dtype));
    }
  }
  if (count == 0) return {};
  return error(
      StatusCode::unsupported,
      "{}: {} {} quantized in a way that nibble cannot read, and would be left in a checkpoint whose config does not say "
      "so: {}{}; turn the checkpoint into floats with the program that made it",
      t.in.path.string(), count, count == 1 ? "tensor is" : "tensors are", names, count > 3 ? ", ..." : "");
}

/// The contents of the output's quantization_config.
codec::WrittenCheckpoint described(const Transform& t, std::vector<codec::WrittenModule> modules) {
  const bool converted = t.selected.front()->quantized();  // otherwise the old config does not mention these layers
  codec::WrittenCheckpoint written{std::move(modules), {}, {}, converted ? &t.in.config.quant : nullptr};
  for (const Module& module : t.in.modules) {
    const std::string& left = module.stack.empty() ? module.name : module.stack;  // whose experts are left together
    if (!std::ranges::binary_search(t.selected, &module) &&
        (written.not_quantized.empty() || written.not_quantized.back() != left))
      written.not_quantized.push_back(left);
  }
  for (std::string& head : storage::tied_heads(t.in.config.model_type)) {
    const bool stored = std::ranges::any_of(t.in.groups, [&](const Checkpoint::Impl::Group& group) {
      return group.name == head || group.name.ends_with("." + head);
    });
    if (!stored) written.tied_heads.push_back(std::move(head));
  }
  return written;
}

/// Reports what the config cannot express before hours of work.
Status check_config(const Transform& t) {
  if (t.format == nullptr || !t.selected.front()->quantized()) return {};
  std::vector<codec::WrittenModule> expected;
  for (const Module* selected : t.selected)
    for (const Module& module : written_modules(t.in, *selected, t.format))
      expected.push_back({module.name, module.scheme, module.act_order, module.claimed ? module.claimed->act : ActScheme{},
                          module.filter.has_value(), format_for(*t.format, module.scheme.codes).name, module.other_acts});
  return t.format->write_config(described(t, std::move(expected))).status();
}

Status write_text(const fs::path& path, std::string_view text) {
  NIBBLE_ASSIGN_OR_RETURN(auto file, storage::OutputFile::create(path, false));
  NIBBLE_RETURN_IF_ERROR(file.write_at(0, std::as_bytes(std::span(text))));
  return file.commit();
}

/// config.json of the output directory; nothing when it would be empty.
Status write_config(const Transform& t, std::vector<codec::WrittenModule> written, const fs::path& directory) {
  std::optional<Json> config;
  if (t.format != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(config, t.format->write_config(described(t, std::move(written))));
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, storage::edit_model_config(t.in.config.text, config));
  return text.empty() ? Status() : write_text(directory / "config.json", text);
}

/// Modules, or a tensor that is carried over, and the file it goes to.
struct Piece {
  Modules modules;     // one, or a matrix of all experts that stay together; none: a tensor that is carried over
  std::size_t tensor;  // the modules' first
  std::uint64_t most_bytes;
  std::size_t header_room;
  std::size_t shard = 0;
};

/// All of them in file order, with modules in place of their first old tensor.
std::vector<Piece> cut(const Transform& t, bool one_file) {
  constexpr std::size_t kMaxParts = 12;  // tensors of one encoded module, and more than their suffixes' length
  constexpr std::string_view kLongSuffix = ".weight_zero_point_or_longer";
  std::unordered_map<std::string_view, Modules> owners;  // several: experts that are stored together
  for (const Module* module : t.selected)
    for (const std::string& tensor : module->tensors) owners[tensor].push_back(module);
  std::vector<Piece> pieces;
  std::uint64_t bytes = 0;
  const auto add = [&](Piece piece) {
    for (const Module* module : piece.modules) {
      piece.most_bytes += t.most_bytes(*module);
      for (const Module& written : written_modules(t.in, *module, t.format))
        piece.header_room += kMaxParts * storage::SafetensorsWriter::header_bytes(written.name + std::string(kLongSuffix), 4);
    }
    if (!pieces.empty() && !one_file) {
      const Piece& last = pieces.back();
      const std::uint64_t most = t.options.max_shard_bytes;
      const bool full = most > 0 ? bytes + piece.most_bytes > most
                                 : t.in.shards.tensors[piece.tensor].file != t.in.shards.tensors[last.tensor].file;
      piece.shard = last.shard + (full ? 1 : 0);
      if (full) bytes = 0;
    }
    bytes += piece.most_bytes;
    pieces.push_back(std::move(piece));
  };
  for (std::size_t i = 0; i < t.in.shards.tensors.size(); ++i) {
    const TensorInfo& tensor = t.in.shards.tensors[i];
    const auto owned = owners.find(tensor.name);
    if (owned == owners.end()) {
      add({{}, i, tensor.bytes, storage::SafetensorsWriter::header_bytes(tensor.name, tensor.shape.size())});
      continue;
    }
    const Modules& modules = owned->second;
    if (tensor.name != modules.front()->tensors.front()) continue;
    if (stays_together(t.format) && is_stacked(t.in, *modules.front()))
      add({modules, i});
    else
      for (const Module* module : modules) add({{module}, i});
  }
  return pieces;
}

/// For the config.
codec::WrittenModule written_module(const Rewritten& rewritten, const Module& module) {
  return {rewritten.row.name,        rewritten.scheme, rewritten.act_order, rewritten.act,
          module.filter.has_value(), rewritten.format, module.other_acts};
}

/// The tensors of all experts, each in its place, of the matrix that their modules are.
Result<std::vector<codec::EncodedTensor>> together(const Transform& t, const Modules& experts, TransformReport& report,
                                                   std::vector<codec::WrittenModule>& written) {
  std::vector<codec::EncodedTensor> all;
  for (std::size_t e = 0; e < experts.size(); ++e) {
    NIBBLE_ASSIGN_OR_RETURN(std::vector<Rewritten> rewritten, t.rewrite(*experts[e]));
    for (std::size_t i = 0; i < rewritten.front().tensors.size(); ++i) {
      auto& [suffix, own] = rewritten.front().tensors[i];
      const Tensor stored = suffix == "weight" ? stacked_weight(t.in, *experts[e], std::move(own)) : std::move(own);
      if (e == 0) {
        std::vector<std::int64_t> shape = stored.shape;
        shape.insert(shape.begin(), std::ssize(experts));
        all.push_back({stacked_name(*experts[e], suffix), Tensor(stored.dtype, std::move(shape))});
      }
      std::ranges::copy(stored.bytes, all[i].tensor.bytes.begin() + static_cast<std::ptrdiff_t>(e * stored.bytes.size()));
    }
    written.push_back(written_module(rewritten.front(), *experts[e]));
    report.modules.push_back(std::move(rewritten.front().row));
  }
  return all;
}

std::string shard_name(std::size_t index, std::size_t count) {
  return count == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

/// Writes the tensors: a selected module's new ones in place of its first old one, all others as they are. `one_file`: into `path`;
/// else into a directory, with an index for more than one file.
Status write_tensors(const Transform& t, const fs::path& path, bool one_file, TransformReport& report,
                     std::vector<codec::WrittenModule>& written) {
  storage::Metadata metadata = t.in.shards.metadata;
  if (std::ranges::find(metadata, "format", &storage::Metadata::value_type::first) == metadata.end())
    metadata.emplace_back("format", "pt");  // Hugging Face refuses files that do not say so
  for (const TensorInfo& tensor : t.in.shards.tensors) report.bytes_in += tensor.bytes;
  const std::vector<Piece> pieces = cut(t, one_file);
  const std::size_t shards = pieces.empty() ? 1 : pieces.back().shard + 1;
  Json files = Json::object();  // of the tensors
  std::uint64_t done = 0;
  auto piece = pieces.begin();
  for (std::size_t shard = 0; shard < shards; ++shard) {
    const std::string name = shard_name(shard, shards);
    const auto end = std::find_if(piece, pieces.end(), [&](const Piece& p) { return p.shard != shard; });
    std::size_t room = 0;
    for (auto p = piece; p != end; ++p) room += p->header_room;
    NIBBLE_ASSIGN_OR_RETURN(auto writer, storage::SafetensorsWriter::create(one_file ? path : path / name, metadata, room,
                                                                            one_file && t.options.overwrite));
    Output output(std::move(writer));
    const auto add = [&](std::string tensor, DType dtype, std::span<const std::int64_t> shape, std::span<const std::byte> bytes) {
      if (shards > 1) files[tensor] = name;
      return output.add(std::move(tensor), dtype, shape, bytes);
    };
    for (; piece != end; ++piece) {
      const TensorInfo& tensor = t.in.shards.tensors[piece->tensor];
      if (t.options.progress)
        t.options.progress(done, report.bytes_in, piece->modules.empty() ? tensor.name : piece->modules.front()->name);
      for (const Module* module : piece->modules) done += module->bytes;
      if (piece->modules.empty()) {
        done += tensor.bytes;
        const auto changed = t.smoothing.changed.find(tensor.name);
        Tensor stored;
        if (changed == t.smoothing.changed.end()) {
          NIBBLE_ASSIGN_OR_RETURN(stored, t.in.shards.load(piece->tensor));
        }
        const Tensor& now = changed == t.smoothing.changed.end() ? stored : changed->second;
        NIBBLE_RETURN_IF_ERROR(add(tensor.name, tensor.dtype, tensor.shape, now.bytes));
        continue;
      }
      const Module& module = *piece->modules.front();
      if (stays_together(t.format) && is_stacked(t.in, module)) {
        NIBBLE_ASSIGN_OR_RETURN(const std::vector<codec::EncodedTensor> all, together(t, piece->modules, report, written));
        for (const auto& [name_of_all, part] : all) NIBBLE_RETURN_IF_ERROR(add(name_of_all, part.dtype, part.shape, part.bytes));
        continue;
      }
      NIBBLE_ASSIGN_OR_RETURN(std::vector<Rewritten> all, t.rewrite(module));
      for (Rewritten& rewritten : all) {
        for (const codec::EncodedTensor& part : rewritten.tensors)
          NIBBLE_RETURN_IF_ERROR(
              add(join_name(rewritten.row.name, part.suffix), part.tensor.dtype, part.tensor.shape, part.tensor.bytes));
        written.push_back(written_module(rewritten, module));
        report.modules.push_back(std::move(rewritten.row));
      }
    }
    if (t.options.progress) t.options.progress(done, report.bytes_in, one_file ? path.filename().string() : name);
    NIBBLE_RETURN_IF_ERROR(output.finish());
    report.bytes_out += output.bytes();
  }
  if (shards == 1) return {};
  const Json index{{"metadata", {{"total_size", report.bytes_out}}}, {"weight_map", std::move(files)}};
  return write_text(path / storage::kIndexName, storage::dump(index, 2) + "\n");
}

/// Loaders convert scales to the model's type.
void note_rounded_scales(const Transform& t, const std::vector<codec::WrittenModule>& written, std::vector<Note>& notes) {
  const DType model = t.in.config.dtype;
  if (t.format == nullptr || t.format->name == "fp8" || (model != DType::bf16 && model != DType::f16)) return;
  const auto rounded = [&](const codec::WrittenModule& module) {
    return module.scheme.scale != model && module.scheme.scale != DType::e8m0 &&
           (model == DType::bf16 || module.scheme.scale == DType::f32);
  };
  const auto first = std::ranges::find_if(written, rounded);
  if (first == written.end()) return;
  notes.push_back(
      {Note::Severity::info,
       fmt::format("{} of {} modules have scales that are not {}, the type of the model, to which many loaders round them; "
                   "the first is {} with {}",
                   std::ranges::count_if(written, rounded), written.size(), name(model), first->name,
                   name(first->scheme.scale))});
}

Result<TransformReport> run(const Transform& t) {
  TransformReport report;
  std::vector<codec::WrittenModule> written;
  NIBBLE_RETURN_IF_ERROR(check_paths(t.in.path, t.out));
  for (const std::string& name : storage::sweep(t.out))
    report.notes.push_back(
        {Note::Severity::info, fmt::format("removed {}, left behind by a run that was killed", printable(name))});
  NIBBLE_RETURN_IF_ERROR(check_leftovers(t));
  NIBBLE_RETURN_IF_ERROR(check_config(t));
  std::error_code ignored;
  if (!fs::is_directory(t.in.path, ignored)) {
    if (t.options.max_shard_bytes > 0)
      return error(StatusCode::invalid_argument, "{} is one file, and so is the output: only a directory has shards",
                   t.in.path.string());
    NIBBLE_RETURN_IF_ERROR(write_tensors(t, t.out, true, report, written));
    std::ranges::move(group_notes(t.notes), std::back_inserter(report.notes));
    return report;
  }
  NIBBLE_ASSIGN_OR_RETURN(auto directory, storage::OutputDirectory::create(t.out, t.options.overwrite));
  NIBBLE_RETURN_IF_ERROR(copy_companions(t.in.path, {}, directory.path(), listed_folders(t.in.path), report.notes));
  NIBBLE_RETURN_IF_ERROR(write_tensors(t, directory.path(), false, report, written));
  note_rounded_scales(t, written, report.notes);
  NIBBLE_RETURN_IF_ERROR(write_config(t, std::move(written), directory.path()));
  NIBBLE_RETURN_IF_ERROR(directory.commit());
  std::ranges::move(group_notes(t.notes), std::back_inserter(report.notes));
  return report;
}

/// Opens the input; fails if a module cannot be read: the new config would not fit it.
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

/// The notes of a checkpoint and of some of its modules, as far as they need no data.
std::vector<ModuleNote> notes_of(const Checkpoint::Impl& in, const Modules& modules) {
  std::vector<ModuleNote> notes;
  for (const Note& note : in.notes) notes.push_back({"", note});
  for (const Module* module : modules)
    for (const Note& note : module->notes) notes.push_back({module->name, note});
  return notes;
}

/// Reads a module; findings are added to `notes`.
Result<QuantTensor> read(const Checkpoint::Impl& in, const Module& module, std::vector<ModuleNote>& notes) {
  std::vector<Note> found;
  Result<QuantTensor> q = in.read(module, nullptr, &found);
  for (Note& note : found) notes.push_back({module.name, std::move(note)});
  return q;
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

Result<Rewritten> encode(const codec::Format& asked, const Module& module, const QuantTensor& q, const ActScheme& act) {
  const codec::Format& format = format_for(asked, q.scheme.codes);
  if (module.filter && format.encode_conv == nullptr)
    return error(StatusCode::unsupported,
                 "{}: a convolution, which {} cannot hold; compressed-tensors, int-quantized and nibble-codes can", module.name,
                 format.name);
  auto tensors = module.filter ? format.encode_conv(q, act) : format.write(q, act);
  if (!tensors.ok()) return tensors.status().with_context(module.name);
  return Rewritten{std::move(tensors).value(),
                   q.scheme,
                   !q.g_idx.empty(),
                   {module.name, Scheme{q.scheme, act}.name(), std::nullopt},
                   act,
                   format.name};
}

/// How a layer's activations are quantized: as its config says, else as a static scale beside it suggests.
ActScheme activations_of(const Module& module, const QuantTensor& q) {
  if (module.claimed) return module.claimed->act;
  if (!q.static_acts) return {};
  return {q.scheme.codes == DType::e4m3 ? DType::e4m3 : DType::s8, GroupShape::tensor(),
          q.static_acts->zero == 0 ? ZeroKind::none : ZeroKind::integer};
}

/// Modules in a form that the format has not. Said before hours of work.
Status check_forms(const Checkpoint::Impl& in, const Modules& modules, const codec::Format& format) {
  std::map<std::string_view, const Module*> floats;  // of a layer of experts, a module that is not quantized
  for (const Module& module : in.modules)
    if (!module.quantized() && is_stacked(in, module)) floats.emplace(module.stack, &module);
  for (const Module* module : modules)
    if (const auto other = is_stacked(in, *module) ? floats.find(module->stack) : floats.end(); other != floats.end())
      return error(
          StatusCode::unsupported,
          "{}: module {} is {}, and {} of the same experts is not quantized; dequantize the checkpoint, then quantize it",
          in.path.string(), module->name, module->scheme.name(), other->second->name);
  for (const Module* module : modules)
    if (const Status form = check_form(in, *module, format); !form.ok())
      return form.with_context(fmt::format("{}: module {}", in.path.string(), module->name));
  return {};
}

/// Of formats that are written, mxfp4 alone has exponents for scales.
Status refuse_exponents(const Checkpoint::Impl& in, const Modules& modules) {
  for (const Module* module : modules)
    if (module->scheme.scale == DType::e8m0)
      return error(StatusCode::unsupported,
                   "{}: module {}: mxfp4 alone holds {} with scales of e8m0; dequantize the "
                   "checkpoint, then quantize it",
                   in.path.string(), module->name, module->scheme.name());
  return {};
}

/// Scales that include those of the layer's input and output mean nothing in another model.
Status refuse_code_units(const Module& module) {
  if (module.format != "smoothquant") return {};
  return error(StatusCode::unsupported,
               "module {}: its scale includes those of its input and output, which are int8; quantize the "
               "original checkpoint instead",
               module.name);
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

/// The plan of quantize: the modules in order, how each is stored, and those left as they are.
struct Chosen {
  Modules modules;
  std::vector<WeightScheme> schemes;
  std::vector<LeftModule> left;
};

/// One of the patterns of a spec; nothing for "", as an empty expression would match every name.
Result<std::optional<Pattern>> compile(std::string_view what, const std::string& pattern) {
  if (pattern.empty()) return std::optional<Pattern>();
  Result<Pattern> compiled = Pattern::compile(pattern);
  if (!compiled.ok()) return compiled.status().with_context(fmt::format("the {} expression", what));
  return std::optional(*std::move(compiled));
}

WeightShape shape_of(const Checkpoint::Impl& in, const Module& module) {
  const auto bias = in.tensor_index.find(join_name(module.name, "bias"));
  WeightShape shape{module.name, module.n, module.k, std::nullopt, module.filter.has_value()};
  if (module.filter) shape.k /= module.filter->h * module.filter->w;
  if (bias != in.tensor_index.end()) shape.bias = in.view(bias->second).numel();
  return shape;
}

/// Loaders convert scales to the type of a 16-bit model, so codes are chosen for such scales. For other models f16 suffices except for the
/// scales of 8-bit codes, which are so small that f16 has few bits left.
DType scale_type(const QuantizeCheckpointSpec& spec, DType weight) {
  if (spec.format == "fp8") return DType::f32;
  if (spec.format == "mxfp4") return DType::e8m0;
  if (weight != DType::f32) return weight;
  return spec.scheme.act.codes == DType::none ? DType::f16 : DType::f32;
}

/// How the module will be stored, or why its shape does not fit. Formats depend on N modulo the codes of a word, so that N modulo 32
/// `rows` suffice for the test.
Result<WeightScheme> stored_as(const codec::Format& format, const Module& module, const QuantizeCheckpointSpec& spec,
                               std::int64_t rows) {
  if (const GroupShape group = spec.scheme.weight.group; group.n == 1 && group.k > 0 && module.k % group.k != 0)
    return error(StatusCode::invalid_argument,
                 "K={} is not a multiple of the group size {}; a divisor of K, or one scale per channel, would do", module.k,
                 group.k);
  const Tensor zeros(DType::f32, {rows, module.k});
  QuantizeSpec plain{spec.scheme.weight};
  if (plain.scheme.scale == DType::none) plain.scheme.scale = scale_type(spec, module.scheme.codes);
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor q, quantize_rows(ConstTensorView(zeros.bytes.data(), DType::f32, {rows, module.k}), plain,
                                                       module.filter.value_or(Extent{}), nullptr));
  if (spec.scheme.act.codes != DType::none && spec.scheme.act.group == GroupShape::tensor()) q.static_acts = StaticActs{1, 0};
  const Status encoded = encode(format, module, q, spec.scheme.act).status();
  if (encoded.ok()) return q.scheme;
  if (rows == module.n) return encoded;
  return stored_as(format, module, spec, module.n);  // for the real N in the error
}

/// Experts that are stored together stay so unless all matrices of their layer are chosen. Returns the name of the first that stays
/// for that, and why; or "".
std::string leave_together(const Checkpoint::Impl& in, Chosen& chosen) {
  std::map<std::string, std::string> first;  // of the layers with an expert that is left, the first one
  for (const LeftModule& left : chosen.left)
    if (const Module& module = *in.find_module(left.name); is_stacked(in, module)) first.try_emplace(module.stack, left.name);
  Chosen kept;
  std::string told;
  for (std::size_t i = 0; i < chosen.modules.size(); ++i) {
    const Module* const module = chosen.modules[i];
    const auto left = is_stacked(in, *module) ? first.find(module->stack) : first.end();
    if (left != first.end()) {
      chosen.left.push_back({module->name, fmt::format("stored together with {}, which is left as it is", left->second)});
      if (told.empty()) told = fmt::format("; {}: {}", module->name, chosen.left.back().why);
      continue;
    }
    kept.modules.push_back(module);
    kept.schemes.push_back(chosen.schemes[i]);
  }
  kept.left = std::move(chosen.left);
  chosen = std::move(kept);
  return told;
}

Result<Chosen> choose(const Checkpoint::Impl& in, const codec::Format& format, const QuantizeCheckpointSpec& spec) {
  NIBBLE_ASSIGN_OR_RETURN(const auto only, compile("only", spec.only));
  NIBBLE_ASSIGN_OR_RETURN(const auto skip, compile("skip", spec.skip));
  if (spec.scheme.weight.is_dense())
    return error(StatusCode::unsupported, "no format for quantized weights holds {}; choose a scheme of codes",
                 spec.scheme.weight.name());
  std::vector<WeightShape> shapes;
  for (const Module& module : in.modules) {
    if (module.quantized())
      return error(StatusCode::invalid_argument, "{}: module {} is quantized already ({}); dequantize or convert the checkpoint",
                   in.path.string(), module.name, module.scheme.name());
    shapes.push_back(shape_of(in, module));
  }
  const Selection selection(in.config.json, shapes);
  Chosen chosen;
  std::map<std::string, Result<WeightScheme>> asked;
  Status refused;
  std::string cannot, kept;  // the first weight that is no layer [N,K], and the first that loaders keep in float
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const Module& module = in.modules[i];
    if (module.filter && !spec.convs) continue;
    std::string why;
    if (only && !only->search(module.name)) why = "the only expression does not match its name";
    if (skip && skip->search(module.name)) why = "the skip expression matches its name";
    if (const Status form = check_form(in, module, format); why.empty() && !form.ok()) {
      why = form.message();
      if (cannot.empty()) cannot = fmt::format("; {}: {}", module.name, why);
    }
    if (const auto left = selection.left(shapes[i]); why.empty() && left && !(left->possible && spec.all)) {
      why = left->why;
      if (std::string& first = left->possible ? kept : cannot; first.empty()) first = fmt::format("; {}: {}", module.name, why);
    }
    if (why.empty()) {
      const Extent filter = module.filter.value_or(Extent{});
      const Module written = written_modules(in, module, &format).front();
      const auto [at, fresh] = asked.try_emplace(
          fmt::format("{} {} {} {} {}", name(module.scheme.codes), written.n, written.k, filter.h, filter.w), WeightScheme{});
      if (fresh) at->second = stored_as(format, written, spec, std::min(written.n, written.n % 32 + 32));
      if (at->second.ok()) {
        chosen.modules.push_back(&module);
        chosen.schemes.push_back(*at->second);
        continue;
      }
      why = at->second.status().message();
      if (const std::string context = written.name + ": "; why.starts_with(context)) why.erase(0, context.size());
      if (refused.ok()) refused = error(at->second.status().code(), "{}: module {}: {}", in.path.string(), module.name, why);
    }
    chosen.left.push_back({module.name, std::move(why)});
  }
  const std::string together = leave_together(in, chosen);
  if (cannot.empty()) cannot = together;
  if (!chosen.modules.empty()) return chosen;
  if (!refused.ok()) return refused;
  if (!kept.empty()) kept += " (--all takes it)";
  if (kept.empty() && !chosen.left.empty()) kept = fmt::format("; {}: {}", chosen.left.front().name, chosen.left.front().why);
  return error(StatusCode::invalid_argument, "{}: no dense layer is left to quantize{}", in.path.string(),
               cannot.empty() ? kept : cannot);
}

/// The report of a run that writes nothing.
Result<TransformReport> planned(const Checkpoint::Impl& in, const fs::path& out, const codec::Format& format,
                                const Chosen& chosen, const QuantizeCheckpointSpec& spec, const std::vector<ModuleNote>& notes) {
  NIBBLE_RETURN_IF_ERROR(check_paths(in.path, out));
  TransformReport report;
  for (std::size_t i = 0; i < chosen.modules.size(); ++i)
    for (const Module& written : written_modules(in, *chosen.modules[i], &format))
      report.modules.push_back({written.name, Scheme{chosen.schemes[i], spec.scheme.act}.name(), std::nullopt});
  for (const TensorInfo& tensor : in.shards.tensors) report.bytes_in += tensor.bytes;
  report.notes = group_notes(notes);
  return report;
}

/// W[N,K], each element rounded once.
Result<Tensor> dequantize(const QuantTensor& q, DType dtype, Executor& executor) {
  NIBBLE_ASSIGN_OR_RETURN(const PackedWeight weight, pack(q, {.executor = &executor}));
  NIBBLE_ASSIGN_OR_RETURN(const Plan plan, Plan::dequantize(weight, {.out = dtype}));
  Tensor w(dtype, {q.n, q.k});
  std::vector<std::byte> workspace(plan.workspace_bytes());
  NIBBLE_RETURN_IF_ERROR(plan.run(weight, {}, TensorView(w.bytes.data(), dtype, {q.n, q.k}), {}, workspace, &executor));
  return w;
}

}  // namespace

Result<TransformReport> quantize_checkpoint(const fs::path& in_path, const fs::path& out, const QuantizeCheckpointSpec& spec,
                                            const TransformOptions& options) try {
  NIBBLE_ASSIGN_OR_RETURN(const codec::Format* format, writable_format(spec.format));
  NIBBLE_ASSIGN_OR_RETURN(const auto in, open_input(in_path));
  NIBBLE_ASSIGN_OR_RETURN(Chosen chosen, choose(*in, *format, spec));
  const Modules& selected = chosen.modules;
  const bool is_static = spec.scheme.act.codes != DType::none && spec.scheme.act.group == GroupShape::tensor();
  if (spec.calibration.empty() && (spec.smooth || is_static))
    return error(StatusCode::invalid_argument, "{} needs a calibration", spec.smooth ? "smoothing" : "a static activation scale");
  if (spec.smooth && !(*spec.smooth >= 0 && *spec.smooth <= 1))
    return error(StatusCode::invalid_argument, "α={} of smoothing is outside 0…1", *spec.smooth);
  std::optional<Calibration> calibration;
  Smoothing smoothing;
  if (!spec.calibration.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(calibration, Calibration::open(spec.calibration));
    if (spec.smooth) {
      NIBBLE_ASSIGN_OR_RETURN(smoothing, plan_smoothing(*in, selected, *format, *calibration, *spec.smooth));
    }
  }
  Executor& executor = options.executor != nullptr ? *options.executor : default_executor();
  /// W [N,K] of a written module, which is the module's but for the experts of a stack.
  const auto rewrite_one = [&](const Module& module, const Module& stored, const Tensor& original,
                               Tensor bias) -> Result<Rewritten> {
    const auto factors = smoothing.factors.find(module.name);
    const std::vector<float>* s = factors == smoothing.factors.end() ? nullptr : factors->second.get();
    const Tensor smoothed = s == nullptr ? Tensor() : scaled_columns(original, *s, executor);
    const auto view = [&](const Tensor& w) { return ConstTensorView(w.bytes.data(), w.dtype, {module.n, module.k}); };
    QuantizeSpec how{spec.scheme.weight, spec.clip_search};
    if (how.scheme.scale == DType::none) how.scheme.scale = scale_type(spec, original.dtype);
    Result<QuantTensor> q =
        quantize_rows(view(s == nullptr ? original : smoothed), how, module.filter.value_or(Extent{}), options.executor);
    if (!q.ok()) return q.status().with_context(module.name);
    q->bias = std::move(bias);
    if (is_static) {
      std::optional<std::vector<float>> absmax;
      if (s != nullptr) {
        absmax = *smoothing.absmax.at(module.name);
      } else {
        NIBBLE_ASSIGN_OR_RETURN(absmax, calibration->absmax(module));
        if (!absmax && stored.name != module.name) {  // gate and up read the same
          NIBBLE_ASSIGN_OR_RETURN(absmax, calibration->absmax(stored));
        }
      }
      NIBBLE_ASSIGN_OR_RETURN(q->static_acts, static_scale(module, spec.scheme.act, absmax, s));
    }
    NIBBLE_ASSIGN_OR_RETURN(Rewritten rewritten, encode(*format, module, *q, spec.scheme.act));
    if (s != nullptr) {  // the norm multiplies by 1/s: with it the weight stands for the original
      q->prescale = Tensor(DType::f32, {module.k});
      for (std::int64_t k = 0; k < module.k; ++k) q->prescale.set(k, 1.0f / (*s)[static_cast<std::size_t>(k)]);
    }
    NIBBLE_ASSIGN_OR_RETURN(rewritten.row.error, quantization_error(view(original), *q, options.executor));
    rewritten.row.smoothed = s != nullptr;
    return rewritten;
  };
  const auto rewrite = [&](const Module& module) -> Result<std::vector<Rewritten>> {
    std::vector<Rewritten> all;
    if (!is_stacked(*in, module)) {
      const auto stored = [&](const char* suffix) {
        return in->shards.load(in->tensor_index.at(join_name(module.name, suffix)));
      };
      NIBBLE_ASSIGN_OR_RETURN(Tensor original, stored("weight"));
      if (module.filter) original = as_rows(original);
      Tensor bias;
      if (module.has_bias) {
        NIBBLE_ASSIGN_OR_RETURN(bias, stored("bias"));
      }
      NIBBLE_ASSIGN_OR_RETURN(Rewritten rewritten, rewrite_one(module, module, original, std::move(bias)));
      all.push_back(std::move(rewritten));
      return all;
    }
    NIBBLE_ASSIGN_OR_RETURN(QuantTensor floats, in->read(module, nullptr, nullptr));
    NIBBLE_ASSIGN_OR_RETURN(std::vector<QuantTensor> weights, written_weights(*in, module, std::move(floats), format));
    const std::vector<Module> written = written_modules(*in, module, format);
    for (std::size_t i = 0; i < written.size(); ++i) {
      Tensor original(module.scheme.codes, {written[i].n, written[i].k});
      std::memcpy(original.bytes.data(), weights[i].codes.data(), original.bytes.size());
      NIBBLE_ASSIGN_OR_RETURN(Rewritten rewritten, rewrite_one(written[i], module, original, std::move(weights[i].bias)));
      all.push_back(std::move(rewritten));
    }
    return all;
  };
  const auto most = [&](const Module& module) {
    std::uint64_t bytes = 0;
    for (const Module& written : written_modules(*in, module, format))
      bytes += most_bytes(bits(spec.scheme.weight.codes), spec.scheme.weight.group, written.n, written.k);
    return bytes;
  };
  std::vector<ModuleNote> notes;
  for (const Note& note : smoothing.notes) notes.push_back({"", note});
  for (const LeftModule& left : chosen.left) notes.push_back({left.name, {Note::Severity::info, "left as it is: " + left.why}});
  Result<TransformReport> report = spec.dry_run ? planned(*in, out, *format, chosen, spec, notes)
                                                : run({*in, out, selected, rewrite, format, most, options, smoothing, notes});
  if (report.ok()) report->left = std::move(chosen.left);
  return report;
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot quantize {}: {}", in_path.string(), caught().message());
}

Result<TransformReport> convert_checkpoint(const fs::path& in_path, const fs::path& out, std::string_view format_name,
                                           const TransformOptions& options) try {
  NIBBLE_ASSIGN_OR_RETURN(const codec::Format* format, writable_format(format_name));
  NIBBLE_ASSIGN_OR_RETURN(const auto in, open_input(in_path));
  Modules selected = quantized_modules(*in);
  if (selected.empty())
    return nothing_to_do(in_path, "no module is quantized, so there is nothing to convert; quantize it first");
  if (format->name != "mxfp4") NIBBLE_RETURN_IF_ERROR(refuse_exponents(*in, selected));
  NIBBLE_RETURN_IF_ERROR(check_forms(*in, selected, *format));
  Transform transform{*in, out, std::move(selected), {}, format, {}, options};
  transform.notes = notes_of(*in, transform.selected);
  transform.rewrite = [&](const Module& module) -> Result<std::vector<Rewritten>> {
    NIBBLE_RETURN_IF_ERROR(refuse_code_units(module));
    NIBBLE_ASSIGN_OR_RETURN(QuantTensor q, read(*in, module, transform.notes));
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<QuantTensor> weights, written_weights(*in, module, std::move(q), format));
    const std::vector<Module> written = written_modules(*in, module, format);
    std::vector<Rewritten> all;
    for (std::size_t i = 0; i < written.size(); ++i) {
      NIBBLE_ASSIGN_OR_RETURN(Rewritten part, encode(*format, written[i], weights[i], activations_of(module, weights[i])));
      all.push_back(std::move(part));
    }
    return all;
  };
  transform.most_bytes = [&](const Module& module) {
    const int width = format->name == "int-quantized" ? 8 : bits(module.scheme.codes);
    std::uint64_t bytes = 0;
    for (const Module& written : written_modules(*in, module, format))
      bytes += most_bytes(width, module.scheme.group, written.n, written.k);
    return bytes;
  };
  return run(transform);
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot convert {}: {}", in_path.string(), caught().message());
}

Result<TransformReport> dequantize_checkpoint(const fs::path& in_path, const fs::path& out, DType dtype,
                                              const TransformOptions& options) try {
  if (!is_compute_float(dtype))
    return error(StatusCode::invalid_argument, "cannot dequantize to {}; choose f32, f16 or bf16", name(dtype));
  NIBBLE_ASSIGN_OR_RETURN(const auto in, open_input(in_path));
  Modules selected = quantized_modules(*in);
  if (selected.empty()) return nothing_to_do(in_path, "no module is quantized, so there is nothing to dequantize");
  Executor& executor = options.executor != nullptr ? *options.executor : default_executor();
  Transform transform{*in, out, std::move(selected), {}, nullptr, {}, options};
  transform.notes = notes_of(*in, transform.selected);
  transform.rewrite = [&](const Module& module) -> Result<std::vector<Rewritten>> {
    NIBBLE_RETURN_IF_ERROR(refuse_code_units(module));
    NIBBLE_ASSIGN_OR_RETURN(QuantTensor q, read(*in, module, transform.notes));
    // (x·diag(s))·Wᵀ = x·(W·diag(s))ᵀ: rounded once, after the product.
    const Tensor prescale = std::exchange(q.prescale, Tensor());
    const DType exact = prescale.empty() ? dtype : DType::f32;
    Result<Tensor> weight = options.dequantize ? options.dequantize(q, exact) : dequantize(q, exact, executor);
    if (weight.ok() && !prescale.empty()) weight = with_prescale(*weight, prescale, dtype, executor);
    if (!weight.ok()) return weight.status().with_context(module.name);
    Rewritten rewritten{{}, q.scheme, false, {module.name, std::string(name(dtype)), std::nullopt}};
    rewritten.tensors.push_back({"weight", module.filter ? as_oihw(*weight, *module.filter) : *std::move(weight)});
    if (!q.bias.empty()) rewritten.tensors.push_back({"bias", std::move(q.bias)});
    std::vector<Rewritten> all;
    all.push_back(std::move(rewritten));
    return all;
  };
  transform.most_bytes = [&](const Module& module) {
    return static_cast<std::uint64_t>(module.n * module.k * bits(dtype) / 8 + 4 * module.n);
  };
  Result<TransformReport> report = run(transform);
  if (report.ok() && !codec::kv_cache_scheme(in->config.quant.json).is_null())
    report->notes.push_back(
        {Note::Severity::info, fmt::format("what {} says about the KV cache (kv_cache_scheme) was removed with the "
                                           "rest; its scales stay among the tensors",
                                           in->config.quant.source)});
  return report;
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot dequantize {}: {}", in_path.string(), caught().message());
}

}  // namespace nibble
