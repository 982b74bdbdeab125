// Opening a checkpoint: files → tensors → modules, with findings.
#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <limits>
#include <unordered_set>
#include <utility>

#include "checkpoint/checkpoint_impl.hpp"
#include "checkpoint/codecs/part.hpp"
#include "checkpoint/config/act_scales.hpp"
#include "checkpoint/io/json.hpp"
#include "checkpoint/stacks.hpp"
#include "core/error.hpp"
#include "core/weight_check.hpp"
#include "nibble/device.hpp"
#include "nibble/pattern.hpp"

namespace nibble {
namespace fs = std::filesystem;
using storage::printable;
namespace {

// A module name ends at the last '.', except for parameters that have parameters of their own (bitsandbytes, quanto).
constexpr std::string_view kDeepSuffixes[] = {".weight.absmax", ".weight.quant_map", ".weight.nested_", ".weight.quant_state.",
                                              ".weight._"};

struct SplitName {
  std::string_view module, suffix;
};
SplitName split(std::string_view tensor) {
  std::size_t dot = tensor.rfind('.');
  for (const std::string_view deep : kDeepSuffixes)
    if (const std::size_t at = tensor.rfind(deep); at != std::string_view::npos) dot = at;
  if (dot == std::string_view::npos) return {"", tensor};
  return {tensor.substr(0, dot), tensor.substr(dot + 1)};
}

/// FNV-1a of 64 bits, continued from `hash`.
std::uint64_t fnv1a(std::string_view text, std::uint64_t hash = 0xcbf29ce484222325) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

/// The first run of whole components of `name` that is in `entries`: "gate" names "mlp.gate" and "mlp.gate.0", not
/// "mlp.gate_proj". Lists and models both have thousands of entries, so each run is looked up: of up to 32 components, for names may
/// be all dots.
std::string_view listed_part(std::string_view name, const std::unordered_set<std::string_view>& entries) {
  for (std::size_t begin = 0; begin < name.size();) {
    for (std::size_t end = begin, components = 0; end < name.size() && components < 32; ++components) {
      end = std::min(name.find('.', end + 1), name.size());
      if (const std::string_view part = name.substr(begin, end - begin); entries.contains(part)) return part;
    }
    const std::size_t dot = name.find('.', begin);
    begin = dot == std::string_view::npos ? name.size() : dot + 1;
  }
  return {};
}

double smallest_normal(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::bf16: return 0x1p-126;
    case DType::f16:
    case DType::e5m2: return 0x1p-14;
    case DType::e4m3: return 0x1p-6;
    default: return 0;
  }
}

/// Notes how many values of `t` (rows of `cols`) are of each odd kind, and where the first one is.
void note_odd_values(const Tensor& t, std::string_view what, std::int64_t cols, bool is_scale, std::vector<Note>& notes) {
  struct Kind {
    std::string_view text;
    Note::Severity severity;
    bool (*is)(float value, double normal);
    std::int64_t count = 0, first = 0;
  };
  using enum Note::Severity;
  std::array kinds{
      Kind{"NaN", error, [](float v, double) { return std::isnan(v); }},
      Kind{"infinite", error, [](float v, double) { return std::isinf(v); }},
      Kind{"zero", warning, [](float v, double) { return v == 0; }},
      Kind{"negative", info, [](float v, double) { return v < 0; }},  // as auto-round chooses them
      Kind{"subnormal", warning, [](float v, double normal) { return v != 0 && std::fabs(v) < normal; }},
  };
  const std::span used(kinds.data(), is_scale ? kinds.size() : 2);  // numbers other than scales may be zero or negative
  if (!is_scale && nibble::info(t.dtype).kind != DTypeKind::floating) return;  // an integer is neither
  const double normal = smallest_normal(t.dtype);
  const std::int64_t count = t.numel();
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = t.at(i);
    if (value >= normal && value <= std::numeric_limits<float>::max()) continue;  // of no kind, as nearly all are
    for (Kind& kind : used)
      if (kind.is(value, normal) && kind.count++ == 0) kind.first = i;
  }
  for (const Kind& kind : used)
    if (kind.count > 0)
      notes.push_back({kind.severity, fmt::format("{} of {} {} are {}, the first ({}) at [{},{}]", kind.count, t.numel(), what,
                                                  kind.text, t.at(kind.first), kind.first / cols, kind.first % cols)});
}

/// Whether codes can be NaN: floats of 8 bits, a byte each. Smaller ones have no NaN.
bool can_be_nan(const WeightScheme& scheme) {
  return info(scheme.codes).kind == DTypeKind::floating && !scheme.is_dense() && bits(scheme.codes) == 8;
}

/// The same for codes.
void note_nan_codes(const QuantTensor& q, std::vector<Note>& notes) {
  if (!can_be_nan(q.scheme)) return;
  std::array<bool, 256> is_nan{};
  for (std::size_t code = 0; code < is_nan.size(); ++code)
    is_nan[code] = std::isnan(code_value(q.scheme.codes, static_cast<std::uint8_t>(code)));
  const auto first = std::ranges::find_if(q.codes, [&](std::uint8_t code) { return is_nan[code]; });
  const auto count = std::count_if(first, q.codes.end(), [&](std::uint8_t code) { return is_nan[code]; });
  if (count > 0) add_nan_note(q, {count, first - q.codes.begin(), *first}, notes);
}

/// The last step of every read: validates the decoded tensor, checks that scales are finite and, if the caller wants notes, searches for
/// odd values. Errors of a format name the module and get `place` as a prefix. with_codes: unless they are read later.
Result<QuantTensor> checked(Result<QuantTensor> q, std::string_view module, std::string_view place, std::vector<Note> found,
                            std::vector<Note>* out, bool with_codes = true) {
  if (!q.ok()) return place.empty() ? q.status() : q.status().with_context(place);
  if (const Status invalid = with_codes ? q->validate() : check_but_codes(*q); !invalid.ok())
    return error(StatusCode::corrupt_data, "{}: {}", module, invalid.message());
  const auto hand_over = [&](std::vector<Note>& notes) {
    if (out != nullptr) std::ranges::move(notes, std::back_inserter(*out));
  };
  std::vector<Note> of_scales;
  if (!q->scales.empty()) note_odd_values(q->scales, "scales", q->groups(), true, of_scales);
  if (const auto useless = std::ranges::find(of_scales, Note::Severity::error, &Note::severity); useless != of_scales.end()) {
    const Status status = error(StatusCode::corrupt_data, "{}: {}", module, useless->text);  // it would make its group NaN
    of_scales.erase(useless);
    hand_over(found);
    hand_over(of_scales);
    return status;
  }
  std::ranges::move(of_scales, std::back_inserter(found));
  if (out == nullptr) return q;
  if (with_codes) note_nan_codes(*q, found);
  if (!q->zeros.empty()) note_odd_values(q->zeros, "zero points", q->groups(), false, found);
  if (!q->prescale.empty()) note_odd_values(q->prescale, "activation pre-scales", q->k, false, found);
  if (!q->bias.empty()) note_odd_values(q->bias, "bias values", q->n, false, found);
  hand_over(found);
  return q;
}

/// Of dense elements; of more dimensions than a view has, as one.
ConstTensorView dense_view(const std::byte* data, DType dtype, const std::vector<std::int64_t>& shape) {
  ConstTensorView view;
  view.data = data;
  view.dtype = dtype;
  const bool fits = shape.size() <= view.shape.size();
  std::int64_t count = 1;
  for (const std::int64_t dim : shape) count *= dim;
  view.rank = fits ? static_cast<int>(shape.size()) : 1;
  if (fits)
    std::ranges::copy(shape, view.shape.begin());
  else
    view.shape[0] = count;
  std::int64_t stride = 1;
  for (auto i = static_cast<std::size_t>(view.rank); i-- > 0; stride *= view.shape[i]) view.strides[i] = stride;
  return view;
}

/// The elements of a tensor that `cut` names.
Result<Tensor> load_cut(const storage::Shards& shards, std::size_t tensor, const ConstTensorView& whole, const codec::Cut& cut) {
  Tensor loaded(whole.dtype, cut.shape);
  for (std::size_t i = 0; i < cut.numbers.size(); ++i) {
    if (whole.dtype == DType::s64)
      loaded.as<std::int64_t>()[i] = cut.numbers[i];
    else
      loaded.as<std::int32_t>()[i] = static_cast<std::int32_t>(cut.numbers[i]);
  }
  if (!cut.numbers.empty() || loaded.bytes.empty()) return loaded;
  const std::int64_t pitch = whole.rank < 2 ? cut.cols : whole.numel() / whole.dim(0);
  const std::int64_t reads = cut.cols == pitch ? 1 : cut.rows;  // rows that are read whole are one piece
  const std::size_t bytes = loaded.bytes.size() / static_cast<std::size_t>(reads);
  for (std::int64_t i = 0; i < reads; ++i) {
    const auto to = std::span(loaded.bytes).subspan(static_cast<std::size_t>(i) * bytes, bytes);
    NIBBLE_RETURN_IF_ERROR(shards.load(tensor, (cut.row + i) * pitch + cut.col, to));
  }
  return loaded;
}

}  // namespace

void add_nan_note(const QuantTensor& q, const FileCodes::Nans& nans, std::vector<Note>& notes) {
  if (nans.count > 0)
    notes.push_back({Note::Severity::error, fmt::format("{} of {} weights are NaN, the first (code {:#04x}) at [{},{}]",
                                                        nans.count, q.n * q.k, nans.code, nans.first / q.k, nans.first % q.k)});
}

Result<std::shared_ptr<const Checkpoint::Impl>> Checkpoint::Impl::open(const fs::path& path) try {
  NIBBLE_RETURN_IF_ERROR(check_environment());
  auto impl = std::make_shared<Impl>();
  impl->path = path;
  NIBBLE_ASSIGN_OR_RETURN(impl->shards, storage::open_shards(path));
  std::error_code ignored;
  NIBBLE_ASSIGN_OR_RETURN(impl->config, storage::read_model_config(fs::is_directory(path, ignored) ? path : path.parent_path()));
  impl->config_digest = fnv1a(storage::dump_ascii(impl->config.quant.json));
  for (auto* found : {&impl->shards.notes, &impl->config.notes}) std::ranges::move(*found, std::back_inserter(impl->notes));
  impl->group_tensors();
  impl->detect_modules();
  impl->compare_with_config();
  return std::shared_ptr<const Impl>(std::move(impl));
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot open {}: {}", path.string(), caught().message());
}

void Checkpoint::Impl::group_tensors() {
  const std::vector<TensorInfo>& tensors = shards.tensors;
  std::vector<Group> modules_of_tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensor_index.emplace(tensors[i].name, i);
    const std::string_view module = split(tensors[i].name).module;
    const auto [it, fresh] = group_index.emplace(module, modules_of_tensors.size());
    if (fresh) modules_of_tensors.push_back({std::string(module), {}});
    modules_of_tensors[it->second].tensors.push_back(i);
  }
  for (Group& group : modules_of_tensors) {
    std::vector<Group> experts = stacked_experts(group, shards, notes);
    const auto taken = std::ranges::find_if(experts, [&](const Group& expert) { return group_index.contains(expert.name); });
    if (taken != experts.end()) {
      notes.push_back({Note::Severity::warning, fmt::format("{} is the name of a module, and of an expert in the tensors of {}",
                                                            printable(taken->name), printable(group.name))});
      experts.clear();
    }
    groups.push_back(std::move(group));
    std::ranges::move(experts, std::back_inserter(groups));
  }
  group_index.clear();  // its names belong to the groups
  for (std::size_t i = 0; i < groups.size(); ++i) group_index.emplace(groups[i].name, i);
}

void Checkpoint::Impl::detect_modules() {
  const std::vector<TensorInfo>& tensors = shards.tensors;
  std::unordered_set<std::string_view> stacks;  // groups whose tensors are those of experts
  for (const Group& group : groups)
    if (group.stack) stacks.insert(group.stack->name);
  std::int64_t unsupported = 0;
  const Status* first_unsupported = nullptr;
  broken.reserve(groups.size());  // first_unsupported points into it
  for (const Group& group : groups) {
    if (!group.stack && stacks.contains(group.name)) continue;
    const codec::ModuleTensors parts = module_tensors(group);
    for (const codec::Format& format : codec::format_table()) {
      std::optional<Result<Module>> found = format.detect(parts, config.quant);
      if (!found) continue;
      if (!found->ok()) {
        broken.push_back(found->status());
        if (broken.back().code() != StatusCode::unsupported)
          notes.push_back({Note::Severity::error, broken.back().message()});
        else if (unsupported++ == 0)
          first_unsupported = &broken.back();
        break;
      }
      Module module = std::move(*found).value();
      module.name = group.name;
      if (group.stack) module.stack = group.stack->name;
      if (module.quantized()) codec::find_other_activations(parts, module, config.quant);
      for (const std::size_t i : group.tensors) {
        const std::string_view part = suffix(group, i);
        if (std::ranges::find(format.tensors, part, &codec::StoredTensor::suffix) == format.tensors.end() ||
            (part == "bias" && !module.has_bias))
          continue;
        module.tensors.push_back(tensors[i].name);
        module.bytes += bytes(group, i);
      }
      modules.push_back(std::move(module));
      break;
    }
  }
  for (std::size_t i = 0; i < modules.size(); ++i) module_index.emplace(modules[i].name, i);
  if (unsupported > 0)  // such a checkpoint has hundreds of equal ones
    notes.push_back({Note::Severity::error,
                     unsupported == 1 ? first_unsupported->message()
                                      : fmt::format("{} (and {} more modules)", first_unsupported->message(), unsupported - 1),
                     StatusCode::unsupported});
}

void Checkpoint::Impl::compare_with_config() {
  const codec::QuantConfig& quant = config.quant;
  if (quant.source.empty()) return;
  const auto text = [&](const char* key) {
    const auto it = quant.json.find(key);
    return it != quant.json.end() && it->is_string() ? it->get<std::string>() : std::string();
  };
  const std::string method = text("quant_method").empty() ? text("method") : text("quant_method");
  const bool known = std::ranges::any_of(codec::format_table(), [&](const codec::Format& format) {
    return std::ranges::find(format.methods, method) != format.methods.end();
  });
  if (!known)
    notes.push_back(
        {Note::Severity::warning, fmt::format("{} says quant_method {}, which nibble does not know; layers are recognised by "
                                              "their tensors",
                                              quant.source, printable(method))});
  if (broken.empty() && std::ranges::none_of(modules, &Module::quantized))
    notes.push_back({Note::Severity::warning, fmt::format("{} says the model is quantized, but no module is", quant.source)});
  constexpr std::string_view kIgnore = "ignore";    // of compressed-tensors, whose "re:" begins an expression for re.match
  constexpr std::size_t kMaxWork = 10'000'000'000;  // half a minute at worst
  std::size_t name_bytes = 0;
  for (const Module& module : modules) name_bytes += module.name.size();
  for (const std::string_view key : {std::string_view("modules_to_not_convert"), kIgnore, std::string_view("ignored_layers")}) {
    const auto list = quant.json.find(key);
    if (list == quant.json.end() || !list->is_array()) continue;
    std::unordered_set<std::string_view> entries;
    std::vector<std::pair<std::string_view, Pattern>> patterns;
    std::size_t steps = 0;
    for (const auto& entry : *list) {
      const std::string_view listed = entry.is_string() ? entry.get_ref<const std::string&>() : std::string_view();
      if (key != kIgnore || !listed.starts_with("re:")) {
        entries.insert(listed);
        continue;
      }
      Result<Pattern> pattern = Pattern::compile(listed.substr(3));
      if (pattern.ok())
        steps += pattern->steps(), patterns.emplace_back(listed, *std::move(pattern));
      else
        notes.push_back({Note::Severity::warning, fmt::format("{}: {}: {}", quant.source, key, pattern.status().message())});
    }
    if (steps > kMaxWork / (1 + name_bytes)) {
      notes.push_back(
          {Note::Severity::warning, fmt::format("{}: {}: its regular expressions are not compared with names: {} steps "
                                                "of expressions and {} bytes of names would take too long",
                                                quant.source, key, steps, name_bytes)});
      patterns.clear();
    }
    for (Module& module : modules) {
      if (!module.quantized()) continue;
      std::string_view found = listed_part(module.name, entries);
      for (const auto& [listed, pattern] : patterns)
        if (found.empty() && pattern.match(module.name)) found = listed;
      if (!found.empty())
        module.notes.push_back({Note::Severity::warning, fmt::format("{} lists {} in {}, but this module is quantized",
                                                                     quant.source, printable(found), key)});
    }
  }
}

ConstTensorView Checkpoint::Impl::view(std::size_t tensor) const {
  return dense_view(shards.data[tensor], shards.tensors[tensor].dtype, shards.tensors[tensor].shape);
}

std::uint64_t Checkpoint::Impl::bytes(const Group& group, std::size_t tensor) const {
  const TensorInfo& info = shards.tensors[tensor];
  return group.stack ? stacked_element(*group.stack, info).bytes : info.bytes;
}

std::uint64_t Checkpoint::Impl::first_byte(const Group& group, std::size_t tensor) const {
  return group.stack ? stacked_element(*group.stack, shards.tensors[tensor]).first_byte : 0;
}

ConstTensorView Checkpoint::Impl::view(const Group& group, std::size_t tensor) const {
  if (!group.stack) return view(tensor);
  const TensorInfo& info = shards.tensors[tensor];
  const StackedElement own = stacked_element(*group.stack, info);
  return dense_view(shards.data[tensor] + own.first_byte, info.dtype, own.shape);
}

std::string_view Checkpoint::Impl::suffix(const Group& group, std::size_t tensor) const {
  const std::string_view name = shards.tensors[tensor].name;
  if (!group.stack) return split(name).suffix;
  return stacked_suffix(*group.stack, name);
}

codec::ModuleTensors Checkpoint::Impl::module_tensors(const Group& group) const {
  codec::ModuleTensors parts{group.name, {}};
  for (const std::size_t i : group.tensors) parts.by_suffix.emplace(suffix(group, i), view(group, i));
  return parts;
}

Result<codec::ModuleTensors> Checkpoint::Impl::load_module(const Group& group, std::vector<Tensor>& memory,
                                                           std::string_view but) const {
  codec::ModuleTensors parts = module_tensors(group);
  for (const std::size_t i : group.tensors) {
    const std::string_view part = suffix(group, i);
    if (!but.empty() && part == but) continue;
    const TensorInfo& info = shards.tensors[i];
    Tensor& loaded = memory.emplace_back(info.dtype, group.stack ? stacked_element(*group.stack, info).shape : info.shape);
    NIBBLE_RETURN_IF_ERROR(shards.file[i]->read(shards.tensors[i].file_offset + first_byte(group, i), std::span(loaded.bytes)));
    parts.by_suffix.find(part)->second.data = loaded.bytes.data();  // moving keeps the bytes in place
  }
  return parts;
}

Result<codec::ModuleTensors> Checkpoint::Impl::load_part(const Module& module, const codec::Format& format, const LayerPart& part,
                                                         std::vector<Tensor>& memory) const {
  const std::int64_t channels = part.of == LayerPart::Of::outputs ? module.n : module.k;
  if (part.begin < 0 || part.begin >= part.end || part.end > channels)
    return error(StatusCode::invalid_argument, "module {} has no {} channels [{},{}): there are {}", module.name,
                 part.of == LayerPart::Of::outputs ? "output" : "input", part.begin, part.end, channels);
  if (module.filter) return error(StatusCode::unsupported, "module {} is a convolution, which is read whole", module.name);
  if (!module.stack.empty())
    return error(StatusCode::unsupported, "module {} is one of the experts in the tensors of {}, which are read whole",
                 module.name, module.stack);
  const Group& group = groups[group_index.at(module.name)];
  codec::ModuleTensors parts{group.name, {}, true};
  for (const std::size_t i : group.tensors) {
    const std::string_view suffix = split(shards.tensors[i].name).suffix;
    const auto stored = std::ranges::find(format.tensors, suffix, &codec::StoredTensor::suffix);
    if (stored == format.tensors.end()) continue;
    ConstTensorView whole = view(i);
    Tensor index;
    if (stored->axes.size() == 1 && stored->axes[0] == codec::Axis::group_of_k) {  // its elements say whether there are parts
      NIBBLE_ASSIGN_OR_RETURN(index, shards.load(i));
      whole.data = index.bytes.data();
    }
    NIBBLE_ASSIGN_OR_RETURN(const codec::Cut cut, codec::cut(*stored, whole, module, part));
    NIBBLE_ASSIGN_OR_RETURN(Tensor loaded, load_cut(shards, i, whole, cut));
    const Tensor& kept = memory.emplace_back(std::move(loaded));  // moving keeps the bytes in place
    parts.by_suffix.emplace(suffix, dense_view(kept.bytes.data(), kept.dtype, kept.shape));
  }
  return parts;
}

const Module* Checkpoint::Impl::find_module(std::string_view module_name) const {
  const auto it = module_index.find(module_name);
  return it == module_index.end() ? nullptr : &modules[it->second];
}

Result<Checkpoint::Impl::Found> Checkpoint::Impl::find(const Module& module) const {
  const Module* own = find_module(module.name);
  if (own == nullptr || own->format != module.format)
    return error(StatusCode::not_found, "{}: no {} module {}", path.string(), module.format, printable(module.name));
  const codec::Format* format = codec::find_format(own->format);
  if (format == nullptr)
    return error(StatusCode::internal, "{}: module {} is of the unknown format {}", path.string(), own->name, own->format);
  return Found{*own, *format};
}

Result<QuantTensor> Checkpoint::Impl::read(const Module& module, const LayerPart* part, std::vector<Note>* out) const {
  NIBBLE_ASSIGN_OR_RETURN(const Found own, find(module));
  std::vector<Note> found;
  std::vector<Tensor> memory;
  NIBBLE_ASSIGN_OR_RETURN(const codec::ModuleTensors parts, part == nullptr
                                                                ? load_module(groups[group_index.at(own.module.name)], memory)
                                                                : load_part(own.module, own.format, *part, memory));
  Result<QuantTensor> q = own.format.read(parts, own.module, config.quant, found);
  if (const GroupShape& group = own.module.scheme.group;  // a part with a single group may look as if it had no groups
      q.ok() && group.rows(q->n) == q->scheme.group.rows(q->n) && group.cols(q->k) == q->scheme.group.cols(q->k))
    q->scheme.group = group;
  return checked(std::move(q), fmt::format("{}: module {}", path.string(), own.module.name), path.string(), std::move(found),
                 out);
}

Result<std::optional<OpenModule>> Checkpoint::Impl::open_module(const Module& module, std::vector<Note>* out) const {
  NIBBLE_ASSIGN_OR_RETURN(const Found own, find(module));
  const Group& group = groups[group_index.at(own.module.name)];
  if (own.format.codes == nullptr) return std::optional<OpenModule>();
  const auto stored = own.format.codes(module_tensors(group), own.module, config.quant);
  if (!stored) return std::optional<OpenModule>();
  const auto tensor = std::ranges::find(group.tensors, stored->suffix, [&](std::size_t i) { return suffix(group, i); });
  if (tensor == group.tensors.end() || bytes(group, *tensor) != static_cast<std::uint64_t>(stored->stored_bytes()))
    return error(StatusCode::internal, "{}: module {} has no {} bytes of codes", path.string(), own.module.name,
                 stored->stored_bytes());
  std::vector<Note> found;
  std::vector<Tensor> memory;
  NIBBLE_ASSIGN_OR_RETURN(codec::ModuleTensors parts, load_module(group, memory, stored->suffix));
  parts.without_codes = true;
  Result<QuantTensor> read = own.format.read(parts, own.module, config.quant, found);
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor q, checked(std::move(read), fmt::format("{}: module {}", path.string(), own.module.name),
                                                 path.string(), std::move(found), out, false));
  const DType nans = out != nullptr && can_be_nan(q.scheme) ? q.scheme.codes : DType::none;
  const std::uint64_t first = shards.tensors[*tensor].file_offset + first_byte(group, *tensor);
  auto codes = std::make_unique<FileCodes>(*shards.file[*tensor], first, *stored, nans);
  return std::optional(OpenModule{std::move(q), std::move(codes)});
}

Result<std::string> Checkpoint::Impl::digest(const Module& module) const {
  const auto own = group_index.find(module.name);
  if (find_module(module.name) == nullptr || own == group_index.end())
    return error(StatusCode::not_found, "{}: no module {}", path.string(), printable(module.name));
  std::uint64_t hash = config_digest;
  const Group& group = groups[own->second];
  if (group.stack) hash = fnv1a(fmt::format("expert {}\n", group.stack->expert), hash);
  for (const std::size_t i : group.tensors) {
    const TensorInfo& tensor = shards.tensors[i];
    const std::uint64_t all = bytes(group, i), first = tensor.file_offset + first_byte(group, i);
    hash = fnv1a(fmt::format("{} {} [{}]\n", tensor.name, name(tensor.dtype), fmt::join(tensor.shape, ",")), hash);
    const std::uint64_t length = std::min<std::uint64_t>(all, 64);
    for (const std::uint64_t begin : {std::uint64_t{0}, (all - length) / 2, all - length}) {
      std::string sample(length, '\0');
      NIBBLE_RETURN_IF_ERROR(shards.file[i]->read(first + begin, std::as_writable_bytes(std::span(sample))));
      hash = fnv1a(sample, hash);
    }
  }
  return fmt::format("{:016x}", hash);
}

Result<Checkpoint> Checkpoint::open(const fs::path& path) {
  NIBBLE_ASSIGN_OR_RETURN(auto impl, Impl::open(path));
  return Checkpoint(std::move(impl));
}

const fs::path& Checkpoint::path() const { return impl_->path; }
std::span<const TensorInfo> Checkpoint::tensors() const { return impl_->shards.tensors; }
std::span<const Module> Checkpoint::modules() const { return impl_->modules; }
std::span<const Note> Checkpoint::notes() const { return impl_->notes; }
const std::string& Checkpoint::config() const { return impl_->config.text; }

const TensorInfo* Checkpoint::find_tensor(std::string_view tensor_name) const {
  const auto it = impl_->tensor_index.find(tensor_name);
  return it == impl_->tensor_index.end() ? nullptr : &impl_->shards.tensors[it->second];
}

const Module* Checkpoint::find_module(std::string_view module_name) const { return impl_->find_module(module_name); }

ConstTensorView Checkpoint::view(const TensorInfo& tensor) const {
  const auto it = impl_->tensor_index.find(tensor.name);
  return it == impl_->tensor_index.end() ? ConstTensorView() : impl_->view(it->second);
}

Result<Tensor> Checkpoint::load(const TensorInfo& tensor) const try {
  const auto it = impl_->tensor_index.find(tensor.name);
  if (it != impl_->tensor_index.end()) return impl_->shards.load(it->second);
  return error(StatusCode::not_found, "{}: no tensor {}", path().string(), printable(tensor.name));
} catch (...) {
  return caught();
}

Result<QuantTensor> Checkpoint::read(const Module& module, std::vector<Note>* notes) const try {
  return impl_->read(module, nullptr, notes);
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot read module {}: {}", module.name, caught().message());
}

Result<QuantTensor> Checkpoint::read(const Module& module, const LayerPart& part, std::vector<Note>* notes) const try {
  return impl_->read(module, &part, notes);
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot read module {}: {}", module.name, caught().message());
}

Result<std::string> Checkpoint::digest(const Module& module) const try { return impl_->digest(module); } catch (...) {
  return caught();
}

Result<QuantTensor> read_module(std::span<const NamedView> tensors, std::string_view config_text, std::vector<Note>* notes) try {
  codec::QuantConfig config;
  if (!config_text.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(config, storage::parse_quant_config(config_text));
  }
  codec::ModuleTensors parts{"the layer", {}};
  std::string names;
  for (const NamedView& tensor : tensors) {
    const std::string name = storage::printable(tensor.name);
    if (tensor.view.empty() && tensor.view.numel() > 0) return error(StatusCode::invalid_argument, "tensor {} has no data", name);
    std::int64_t dense = 1;
    for (int i = tensor.view.rank; i-- > 0; dense *= tensor.view.dim(i))
      if (tensor.view.dim(i) > 1 && tensor.view.stride(i) != dense)
        return error(StatusCode::invalid_argument, "tensor {} is not dense: dimension {} has a stride of {}, not {}", name, i,
                     tensor.view.stride(i), dense);
    if (!parts.by_suffix.emplace(tensor.name, tensor.view).second)
      return error(StatusCode::invalid_argument, "there are two tensors called {}", name);
    names += (names.empty() ? "" : ", ") + name;
  }
  for (const codec::Format& format : codec::format_table()) {
    const std::optional<Result<Module>> found = format.detect(parts, config);
    if (!found) continue;
    if (!found->ok()) return found->status();
    std::vector<Note> findings = (*found)->notes;
    Result<QuantTensor> q = format.read(parts, **found, config, findings);
    return checked(std::move(q), "the layer", {}, std::move(findings), notes);
  }
  return error(StatusCode::not_found, "no format has a layer of these tensors: {}", names.empty() ? "none" : names);
} catch (const std::exception&) {
  return error(StatusCode::io_error, "cannot read the layer: {}", caught().message());
}

std::vector<Note> group_notes(std::span<const ModuleNote> notes) {
  struct Group {
    const ModuleNote* first;
    std::size_t count = 0;
  };
  std::vector<Group> groups;
  std::unordered_map<std::string, std::size_t> index;
  for (const ModuleNote& n : notes) {
    std::string key = fmt::format("{}{}", static_cast<int>(n.note.severity), n.module.empty() ? "" : "m");
    for (const char c : n.note.text) {  // numbers differ from module to module, and so do their signs and fractions
      const bool number = (c >= '0' && c <= '9') || c == '-' || c == '.';
      if (!number || key.back() != '#') key += number ? '#' : c;
    }
    const auto [at, fresh] = index.try_emplace(std::move(key), groups.size());
    if (fresh) groups.push_back({&n});
    ++groups[at->second].count;
  }
  std::ranges::stable_sort(groups,
                           [](const Group& a, const Group& b) { return a.first->note.severity > b.first->note.severity; });
  std::vector<Note> told;
  for (const Group& group : groups) {
    Note note = group.first->note;
    if (group.count == 1 && !group.first->module.empty()) note.text = fmt::format("{}: {}", group.first->module, note.text);
    if (group.count > 1)
      note.text = group.first->module.empty()
                      ? fmt::format("{} (and {} more)", note.text, group.count - 1)
                      : fmt::format("in {} modules, e.g. {}: {}", group.count, group.first->module, note.text);
    told.push_back(std::move(note));
  }
  return told;
}

std::vector<FormatInfo> formats() {
  std::vector<FormatInfo> rows;
  for (const codec::Format& format : codec::format_table()) rows.push_back({format.name, format.summary, format.can_write});
  return rows;
}

}  // namespace nibble
