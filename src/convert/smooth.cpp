// See smooth.hpp.
#include "convert/smooth.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_set>

#include "checkpoint/config/codec_util.hpp"
#include "checkpoint/config/names.hpp"
#include "checkpoint/io/json.hpp"
#include "convert/experts.hpp"
#include "core/error.hpp"

namespace nibble {
using storage::join_name;
using storage::printable;
namespace {

/// Models whose two norms of a layer are RMSNorms with a plain weight and feed exactly the layers below.
constexpr std::string_view kModelTypes[] = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"};
constexpr std::string_view kNorms[] = {"input_layernorm.weight", "post_attention_layernorm.weight"};
constexpr std::string_view kAttention[] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
constexpr std::string_view kMlp[] = {"mlp.gate_proj", "mlp.up_proj"};
/// Of a layer of experts in the block "mlp." or "block_sparse_moe.": what reads the norm's result, by the last part of its name.
constexpr std::string_view kBlocks[] = {"mlp.", "block_sparse_moe."};
constexpr std::string_view kOfExpert[] = {"gate_proj", "up_proj", "gate_up_proj", "w1", "w3"};
constexpr std::string_view kFloats[] = {"gate", "shared_expert_gate"};

/// What multiplies the result of a norm.
struct Readers {
  std::vector<const Module*> quantized;
  std::vector<std::string> floats;  // the tensors of others, whose weights change
  std::string missing;              // the name of a module that should be there
};

/// Of the norm of that suffix behind `prefix`, "model.layers.0.".
Readers readers_of(const Checkpoint::Impl& in, std::string_view prefix, std::string_view suffix) {
  Readers found;
  const bool attention = suffix == kNorms[0];
  for (const std::string_view block : kBlocks) {
    const std::string start = fmt::format("{}{}", prefix, block);
    if (attention || !std::ranges::any_of(in.modules, [&](const Module& m) { return m.name.starts_with(start + "experts."); }))
      continue;
    for (const Module& module : in.modules) {
      if (!module.name.starts_with(start)) continue;
      const std::string_view name = std::string_view(module.name).substr(start.size());
      const std::size_t dot = name.rfind('.');
      const std::string_view last = dot == name.npos ? name : name.substr(dot + 1);
      const bool of_expert = name.starts_with("experts.") || name.starts_with("shared_expert.");
      if (of_expert && std::ranges::find(kOfExpert, last) != std::end(kOfExpert)) found.quantized.push_back(&module);
      if (std::ranges::find(kFloats, name) != std::end(kFloats)) found.floats.push_back(join_name(module.name, "weight"));
    }
    return found;
  }
  for (const std::string_view layer : attention ? std::span<const std::string_view>(kAttention) : kMlp) {
    const std::string name = fmt::format("{}{}", prefix, layer);
    const Module* module = in.find_module(name);
    if (module == nullptr) {
      found.missing = name;
      return found;
    }
    found.quantized.push_back(module);
  }
  return found;
}

constexpr double kLeastFactor = 1e-5;  // as in the source

/// The norm's suffix in the name of its weight; "" of another tensor.
std::string_view norm_suffix(std::string_view tensor) {
  const auto* suffix = std::ranges::find_if(kNorms, [&](std::string_view n) {
    return tensor.ends_with(n) && (tensor.size() == n.size() || tensor[tensor.size() - n.size() - 1] == '.');
  });
  return suffix == std::end(kNorms) ? std::string_view() : *suffix;
}

/// max(into, |w|) per column.
void raise_to_absmax(const Tensor& w, std::int64_t cols, std::vector<float>& into) {
  for (std::int64_t i = 0; i < w.numel(); i += cols) {
    for (std::int64_t k = 0; k < cols; ++k) {
      float& most = into[static_cast<std::size_t>(k)];
      most = std::max(most, std::fabs(w.at(i + k)));
    }
  }
}

/// Whether column k of the matrix times s is exact in its type.
bool is_exact(const Tensor& w, std::int64_t cols, std::int64_t k, float s) {
  Tensor one(w.dtype, {1});
  for (std::int64_t i = k; i < w.numel(); i += cols) {
    one.set(0, w.at(i) * s);
    if (one.at(0) != w.at(i) * s) return false;
  }
  return true;
}

/// s for the channels of one norm, the norm with 1/s in it, and the floats that read its result with s. The norm is rounded when it is stored, so s
/// is recomputed as norm / new norm, which keeps the product. Beside floats nothing is rounded: s is a power of two, or 1 where it would be.
std::vector<float> fold(Tensor& norm, const std::vector<float>& acts, const std::vector<float>& weights, double alpha,
                        std::span<Tensor> floats) {
  std::vector<float> factors(acts.size(), 1.0f);
  for (std::size_t k = 0; k < factors.size(); ++k) {
    if (!(acts[k] > 0.0f && weights[k] > 0.0f)) continue;
    double s = std::max(kLeastFactor, std::pow(acts[k], alpha) / std::pow(weights[k], 1.0 - alpha));
    if (!floats.empty()) s = std::exp2(std::round(std::log2(s)));
    const auto at = static_cast<std::int64_t>(k), cols = std::ssize(factors);
    const float before = norm.at(at);
    norm.set(at, static_cast<float>(before / s));
    const float factor = before / norm.at(at);
    const bool exact = static_cast<double>(factor) == s &&
                       std::ranges::all_of(floats, [&](const Tensor& w) { return is_exact(w, cols, at, factor); });
    if (!(factor > 0.0f && std::isfinite(factor)) || (!floats.empty() && !exact)) {
      norm.set(at, before);
      continue;
    }
    factors[k] = factor;
    for (Tensor& w : floats)
      for (std::int64_t i = at; i < w.numel(); i += cols) w.set(i, w.at(i) * factor);
  }
  return factors;
}

/// W[N,K] of a module that is not quantized.
Result<Tensor> floats_of(const Checkpoint::Impl& in, const Module& module) {
  if (!is_stacked(in, module)) return in.shards.load(in.tensor_index.at(join_name(module.name, "weight")));
  NIBBLE_ASSIGN_OR_RETURN(const QuantTensor q, in.read(module, nullptr, nullptr));
  Tensor w(module.scheme.codes, {q.n, q.k});
  std::memcpy(w.bytes.data(), q.codes.data(), w.bytes.size());
  return w;
}

/// The module, and where they are others those that it is written as.
std::vector<Module> all_names(const Checkpoint::Impl& in, const Module& module, const codec::Format& format) {
  std::vector<Module> names = written_modules(in, module, &format);
  if (names.front().name != module.name) names.push_back(module);
  return names;
}

/// max(into, the calibration's), by any of these names; whether it has any.
Result<bool> raise_to_inputs(const std::vector<Module>& names, const Calibration& calibration, std::vector<float>& into) {
  bool known = false;
  for (const Module& each : names) {
    NIBBLE_ASSIGN_OR_RETURN(const auto absmax, calibration.absmax(each));
    if (!absmax) continue;
    known = true;
    std::ranges::transform(into, *absmax, into.begin(), [](float a, float b) { return std::max(a, b); });
  }
  return known;
}

}  // namespace

Result<Calibration> Calibration::open(const std::filesystem::path& path) {
  NIBBLE_ASSIGN_OR_RETURN(auto file, Checkpoint::Impl::open(path));
  return Calibration(std::move(file));
}

Result<std::optional<std::vector<float>>> Calibration::absmax(const Module& module) const {
  for (const char* suffix : {"input_absmax", "input"}) {
    const std::string name = join_name(module.name, suffix);
    const auto it = file_->tensor_index.find(name);
    if (it == file_->tensor_index.end()) continue;
    const ConstTensorView view = file_->view(it->second);
    const int rank = suffix == std::string_view("input") ? 2 : 1;
    const bool fits = is_compute_float(view.dtype) && view.rank == rank && view.dim(0) >= 1 && view.dim(rank - 1) >= 1;
    const std::int64_t k =
        module.filter && fits ? view.dim(rank - 1) : module.k;  // the groups of a convolution are not known here
    if (!fits || view.dim(rank - 1) != k)
      return error(StatusCode::corrupt_data, "{}: {} is {}; expected f32, f16 or bf16 [{}{}], K={} of the module",
                   file_->path.string(), printable(name), codec::describe(view), rank == 2 ? "tokens," : "", module.k, module.k);
    NIBBLE_ASSIGN_OR_RETURN(const Tensor values, file_->shards.load(it->second));
    for (std::int64_t i = 0; i < values.numel(); ++i)
      if (!std::isfinite(values.at(i)))
        return error(StatusCode::corrupt_data, "{}: {} has {} at [{},{}]; calibrate again", file_->path.string(), printable(name),
                     values.at(i), i / k, i % k);
    std::optional<std::vector<float>> found(std::in_place, static_cast<std::size_t>(k), 0.0f);
    raise_to_absmax(values, k, *found);
    return found;
  }
  return std::optional<std::vector<float>>();
}

Result<Smoothing> plan_smoothing(const Checkpoint::Impl& in, std::span<const Module* const> selected, const codec::Format& format,
                                 const Calibration& calibration, double alpha) {
  if (std::ranges::find(kModelTypes, in.config.model_type) == std::end(kModelTypes))
    return error(
        StatusCode::unsupported,
        "{}: which layers follow which norm is not known for model_type {}, so smoothing cannot be folded; it is known for {}",
        in.path.string(), printable(in.config.model_type), fmt::join(kModelTypes, ", "));
  const std::unordered_set<const Module*> is_selected(selected.begin(), selected.end());
  Smoothing plan;
  for (std::size_t i = 0; i < in.shards.tensors.size(); ++i) {
    const std::string& name = in.shards.tensors[i].name;
    const std::string_view suffix = norm_suffix(name);
    if (suffix.empty()) continue;
    const std::string_view prefix = std::string_view(name).substr(0, name.size() - suffix.size());
    const ConstTensorView view = in.view(i);
    const Readers readers = readers_of(in, prefix, suffix);
    std::string why;
    if (!is_compute_float(view.dtype) || view.rank != 1) why = "its weight is " + codec::describe(view);
    if (in.tensor_index.contains(fmt::format("{}{}bias", prefix, suffix.substr(0, suffix.size() - 6)))) why = "it has a bias";
    if (why.empty() && !readers.missing.empty()) why = readers.missing + " is not among the modules to quantize";
    for (const Module* module : readers.quantized) {
      if (!why.empty()) break;
      if (!is_selected.contains(module))
        why = module->name + " is not among the modules to quantize";
      else if (module->k != view.dim(0))
        why = fmt::format("{} has K={}, the norm {} channels", module->name, module->k, view.dim(0));
    }
    std::vector<Tensor> floats;
    for (const std::string& tensor : readers.floats) {
      if (!why.empty()) break;
      const ConstTensorView w = in.view(in.tensor_index.at(tensor));
      const Module& module = *in.find_module(tensor.substr(0, tensor.rfind('.')));
      if (is_selected.contains(&module))
        why = module.name + " is to be quantized, and chooses experts";
      else if (!is_compute_float(w.dtype) || w.rank != 2 || w.dim(1) != view.dim(0))
        why = fmt::format("{} is {}, the norm has {} channels", tensor, codec::describe(w), view.dim(0));
      if (!why.empty()) break;
      NIBBLE_ASSIGN_OR_RETURN(Tensor loaded, in.shards.load(in.tensor_index.at(tensor)));
      floats.push_back(std::move(loaded));
    }
    const std::size_t channels = why.empty() ? static_cast<std::size_t>(view.dim(0)) : 0;
    std::vector<float> acts(channels, 0.0f), weights(channels, 0.0f);
    bool known = false;
    for (const Module* module : readers.quantized) {
      if (!why.empty()) break;
      NIBBLE_ASSIGN_OR_RETURN(const bool own, raise_to_inputs(all_names(in, *module, format), calibration, acts));
      known = known || own;
    }
    for (const std::string& tensor : readers.floats) {
      if (!why.empty()) break;
      NIBBLE_ASSIGN_OR_RETURN(const bool own,
                              raise_to_inputs({*in.find_module(tensor.substr(0, tensor.rfind('.')))}, calibration, acts));
      known = known || own;
    }
    if (why.empty() && !known) why = "the calibration has no input of the layers behind it";
    if (!why.empty()) {
      plan.notes.push_back({Note::Severity::warning, fmt::format("{} was left as it is: {}", name, why)});
      continue;
    }
    for (const Module* module : readers.quantized) {
      NIBBLE_ASSIGN_OR_RETURN(const Tensor weight, floats_of(in, *module));
      raise_to_absmax(weight, module->k, weights);
    }
    NIBBLE_ASSIGN_OR_RETURN(Tensor norm, in.shards.load(i));
    const auto factors = std::make_shared<const std::vector<float>>(fold(norm, acts, weights, alpha, floats));
    const auto inputs = std::make_shared<const std::vector<float>>(std::move(acts));
    plan.changed.emplace(name, std::move(norm));
    for (std::size_t j = 0; j < floats.size(); ++j) plan.changed.emplace(readers.floats[j], std::move(floats[j]));
    for (const Module* module : readers.quantized) {
      for (const Module& each : all_names(in, *module, format)) {
        plan.factors.emplace(each.name, factors);
        plan.absmax.emplace(each.name, inputs);
      }
    }
  }
  if (plan.changed.empty())
    return error(
        StatusCode::unsupported, "{}: no norm can be smoothed{}", in.path.string(),
        plan.notes.empty() ? ": there is no input_layernorm or post_attention_layernorm" : "; " + plan.notes.front().text);
  const auto left = std::ranges::count_if(selected, [&](const Module* m) { return !plan.factors.contains(m->name); });
  const auto first = std::ranges::find_if(selected, [&](const Module* m) { return !plan.factors.contains(m->name); });
  if (left > 0)
    plan.notes.push_back(
        {Note::Severity::info, fmt::format("{} of {} modules do not follow a smoothed norm and were quantized as they "
                                           "are, the first {}",
                                           left, selected.size(), (*first)->name)});
  return plan;
}

}  // namespace nibble
