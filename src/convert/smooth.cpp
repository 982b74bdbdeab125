// See smooth.hpp.
#include "convert/smooth.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "checkpoint/config/codec_util.hpp"
#include "checkpoint/config/names.hpp"
#include "checkpoint/io/json.hpp"
#include "core/error.hpp"

namespace nibble {
using storage::join_name;
using storage::printable;
namespace {

/// Models whose two norms of a layer are RMSNorms with a plain weight and feed exactly these layers.
constexpr std::string_view kModelTypes[] = {"llama", "mistral", "qwen2", "qwen3"};
struct Norm {
  std::string_view suffix;
  std::array<std::string_view, 3> behind;  // empty: no further layer
};
constexpr Norm kNorms[] = {
    {"input_layernorm.weight", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
    {"post_attention_layernorm.weight", {"mlp.gate_proj", "mlp.up_proj", ""}},
};

constexpr double kLeastFactor = 1e-5;  // as in the source

const Norm* find_norm(std::string_view tensor) {
  const auto* norm = std::ranges::find_if(kNorms, [&](const Norm& n) {
    return tensor.ends_with(n.suffix) && (tensor.size() == n.suffix.size() || tensor[tensor.size() - n.suffix.size() - 1] == '.');
  });
  return norm == std::end(kNorms) ? nullptr : norm;
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

/// s for the channels of one norm, and the norm with 1/s in it. The norm is rounded when it is stored, so s is recomputed as norm / new
/// norm, which keeps the product.
std::vector<float> fold(Tensor& norm, const std::vector<float>& acts, const std::vector<float>& weights, double alpha) {
  std::vector<float> factors(acts.size(), 1.0f);
  for (std::size_t k = 0; k < factors.size(); ++k) {
    if (!(acts[k] > 0.0f && weights[k] > 0.0f)) continue;
    const double s = std::max(kLeastFactor, std::pow(acts[k], alpha) / std::pow(weights[k], 1.0 - alpha));
    const auto at = static_cast<std::int64_t>(k);
    const float before = norm.at(at);
    norm.set(at, static_cast<float>(before / s));
    const float factor = before / norm.at(at);
    if (factor > 0.0f && std::isfinite(factor))
      factors[k] = factor;
    else
      norm.set(at, before);
  }
  return factors;
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

Result<Smoothing> plan_smoothing(const Checkpoint::Impl& in, std::span<const Module* const> selected,
                                 const Calibration& calibration, double alpha) {
  if (std::ranges::find(kModelTypes, in.config.model_type) == std::end(kModelTypes))
    return error(
        StatusCode::unsupported,
        "{}: which layers follow which norm is not known for model_type {}, so smoothing cannot be folded; it is known for {}",
        in.path.string(), printable(in.config.model_type), fmt::join(kModelTypes, ", "));
  Smoothing plan;
  for (std::size_t i = 0; i < in.shards.tensors.size(); ++i) {
    const std::string& name = in.shards.tensors[i].name;
    const Norm* row = find_norm(name);
    if (row == nullptr) continue;
    const std::string_view prefix = std::string_view(name).substr(0, name.size() - row->suffix.size());
    const ConstTensorView view = in.view(i);
    std::vector<const Module*> behind;
    std::string why;
    if (!is_compute_float(view.dtype) || view.rank != 1) why = "its weight is " + codec::describe(view);
    if (in.tensor_index.contains(fmt::format("{}{}bias", prefix, row->suffix.substr(0, row->suffix.size() - 6))))
      why = "it has a bias";
    std::vector<float> acts(why.empty() ? static_cast<std::size_t>(view.dim(0)) : 0, 0.0f);
    bool known = false;
    for (const std::string_view layer : row->behind) {
      if (layer.empty() || !why.empty()) continue;
      const std::string module_name = fmt::format("{}{}", prefix, layer);
      const auto at = std::ranges::find(selected, module_name, [](const Module* m) -> const std::string& { return m->name; });
      if (at == selected.end() || (*at)->k != view.dim(0)) {
        why = at == selected.end() ? module_name + " is not among the modules to quantize"
                                   : fmt::format("{} has K={}, the norm {} channels", module_name, (*at)->k, view.dim(0));
        break;
      }
      behind.push_back(*at);
      NIBBLE_ASSIGN_OR_RETURN(const auto absmax, calibration.absmax(**at));
      if (!absmax) continue;
      known = true;
      std::ranges::transform(acts, *absmax, acts.begin(), [](float a, float b) { return std::max(a, b); });
    }
    if (why.empty() && !known) why = "the calibration has no input of the layers behind it";
    if (!why.empty()) {
      plan.notes.push_back({Note::Severity::warning, fmt::format("{} was left as it is: {}", name, why)});
      continue;
    }
    std::vector<float> weights(acts.size(), 0.0f);
    for (const Module* module : behind) {
      NIBBLE_ASSIGN_OR_RETURN(const Tensor weight, in.shards.load(in.tensor_index.at(join_name(module->name, "weight"))));
      raise_to_absmax(weight, module->k, weights);
    }
    NIBBLE_ASSIGN_OR_RETURN(Tensor norm, in.shards.load(i));
    const std::vector<float> factors = fold(norm, acts, weights, alpha);
    plan.norms.emplace(name, std::move(norm));
    for (const Module* module : behind) {
      plan.factors.emplace(module->name, factors);
      plan.absmax.emplace(module->name, acts);
    }
  }
  if (plan.norms.empty())
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
