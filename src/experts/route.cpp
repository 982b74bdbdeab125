#include "nibble/route.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/sizes.hpp"
#include "epilogue/element.hpp"
#include "experts/check.hpp"
#include "kernels/cuda/launch/launch.hpp"

namespace nibble {
namespace {

using experts::described;

constexpr float kLowest = -std::numeric_limits<float>::infinity();

/// A token's router: memory that is kept from token to token.
class Router {
 public:
  Router(const RouteSpec& spec, std::int64_t experts)
      : spec_(spec),
        scores_(static_cast<std::size_t>(experts)),
        choices_(scores_.size()),
        order_(scores_.size()),
        groups_(static_cast<std::size_t>(spec.groups)) {}

  /// Where the logits of the next token go.
  std::span<float> scores() { return scores_; }

  void route(const float* bias, std::int32_t* ids, std::int64_t id_step, float* weights, std::int64_t weight_step) {
    score();
    for (std::size_t e = 0; e < scores_.size(); ++e) {
      choices_[e] = scores_[e] + (bias == nullptr ? 0.0f : bias[e]);
      if (std::isnan(choices_[e])) choices_[e] = kLowest;
    }
    if (spec_.groups > 1) keep_groups();
    std::iota(order_.begin(), order_.end(), 0);
    std::ranges::partial_sort(order_, order_.begin() + spec_.top_k, [&](std::int32_t a, std::int32_t b) {
      const float x = choices_[static_cast<std::size_t>(a)], y = choices_[static_cast<std::size_t>(b)];
      return x != y ? x > y : a < b;
    });
    float sum = 0.0f;
    for (std::int64_t j = 0; j < spec_.top_k; ++j) sum += scores_[static_cast<std::size_t>(order_[static_cast<std::size_t>(j)])];
    for (std::int64_t j = 0; j < spec_.top_k; ++j) {
      const std::int32_t id = order_[static_cast<std::size_t>(j)];
      float weight = scores_[static_cast<std::size_t>(id)];
      if (spec_.normalize) weight = sum > 0.0f ? weight / sum : 1.0f / static_cast<float>(spec_.top_k);
      ids[j * id_step] = id;
      weights[j * weight_step] = weight * spec_.scale;
    }
  }

 private:
  /// Logits become scores.
  void score() {
    for (float& s : scores_)
      if (std::isnan(s)) s = kLowest;
    if (spec_.score == RouteScore::sigmoid) {
      for (float& s : scores_) s = 1.0f / (1.0f + std::exp(-s));
      return;
    }
    const float most = *std::ranges::max_element(scores_);
    float sum = 0.0f;
    for (float& s : scores_) sum += s = most == kLowest ? 1.0f : s == most ? 1.0f : std::exp(s - most);
    for (float& s : scores_) s /= sum;
  }

  /// Experts of other groups than the best are no choice.
  void keep_groups() {
    const std::size_t size = choices_.size() / groups_.size();
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      float best = kLowest, second = kLowest;
      for (std::size_t e = g * size; e < (g + 1) * size; ++e) {
        if (choices_[e] > best)
          second = std::exchange(best, choices_[e]);
        else
          second = std::max(second, choices_[e]);
      }
      const float sum = size > 1 ? best + second : best;
      groups_[g] = {std::isnan(sum) ? best : sum, g};  // of infinities of both signs, which have no order
    }
    std::ranges::sort(groups_,
                      [](const Group& a, const Group& b) { return a.sum != b.sum ? a.sum > b.sum : a.number < b.number; });
    for (std::size_t i = static_cast<std::size_t>(spec_.top_groups); i < groups_.size(); ++i)
      std::fill_n(choices_.begin() + static_cast<std::ptrdiff_t>(groups_[i].number * size), size, kLowest);
  }

  struct Group {
    float sum = 0.0f;
    std::size_t number = 0;
  };
  const RouteSpec& spec_;
  std::vector<float> scores_, choices_;
  std::vector<std::int32_t> order_;
  std::vector<Group> groups_;
};

Status check(const RouteSpec& spec, std::int64_t experts) {
  if (spec.groups < 1 || experts % spec.groups != 0 || spec.top_groups < 1 || spec.top_groups > spec.groups)
    return error(StatusCode::invalid_argument,
                 "groups={} and top_groups={}: {} experts form equal groups, of which some are kept", spec.groups,
                 spec.top_groups, experts);
  if (const std::int64_t kept = experts / spec.groups * spec.top_groups; spec.top_k < 1 || spec.top_k > kept)
    return error(StatusCode::invalid_argument, "top_k={} is outside [1, {}], the experts that are kept", spec.top_k, kept);
  if (!std::isfinite(spec.scale)) return error(StatusCode::invalid_argument, "scale={} is not finite", spec.scale);
  return {};
}

/// What every way to route asks of its operands.
Status check(const ConstTensorView& logits, const ConstTensorView& bias, const RouteSpec& spec, const TensorView& ids,
             const TensorView& weights) {
  if (logits.empty() || logits.rank != 2 || !is_compute_float(logits.dtype) || logits.dim(0) < 1 || logits.stride(1) != 1)
    return error(StatusCode::invalid_argument, "logits must be f32, f16 or bf16 [T,E] with a last stride of 1, got {}",
                 described(logits));
  const std::int64_t tokens = logits.dim(0), experts = logits.dim(1);
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"T", tokens}, {"E", experts}}));
  NIBBLE_RETURN_IF_ERROR(check(spec, experts));
  if (!bias.empty() && (bias.dtype != DType::f32 || bias.rank != 1 || bias.dim(0) != experts || bias.stride(0) != 1))
    return error(StatusCode::invalid_argument, "bias must be f32 [{}] with a stride of 1, got {}", experts, described(bias));
  const auto shaped = [&](const TensorView& v, DType type) {
    return !v.empty() && v.dtype == type && v.rank == 2 && v.dim(0) == tokens && v.dim(1) == spec.top_k;
  };
  if (!shaped(ids, DType::s32) || !shaped(weights, DType::f32))
    return error(StatusCode::invalid_argument, "ids must be s32 and weights f32, both [{},{}]; got {} and {}", tokens, spec.top_k,
                 described(ids), described(weights));
  return {};
}

}  // namespace

Status route(const ConstTensorView& logits, const ConstTensorView& bias, const RouteSpec& spec, const TensorView& ids,
             const TensorView& weights, Executor* executor) try {
  NIBBLE_RETURN_IF_ERROR(check(logits, bias, spec, ids, weights));
  const std::int64_t tokens = logits.dim(0), experts = logits.dim(1);
  Executor& threads = executor != nullptr ? *executor : default_executor();
  constexpr std::int64_t kTokens = 64;  // of a task, which share a router's memory
  threads.parallel_for((tokens + kTokens - 1) / kTokens, [&](std::int64_t task) {
    Router router(spec, experts);
    for (std::int64_t t = task * kTokens; t < std::min(tokens, (task + 1) * kTokens); ++t) {
      const epilogue::Operand row{.data = logits.data, .type = logits.dtype};
      for (std::int64_t e = 0; e < experts; ++e) router.scores()[static_cast<std::size_t>(e)] = row.at(t * logits.stride(0) + e);
      router.route(static_cast<const float*>(bias.data), static_cast<std::int32_t*>(ids.data) + t * ids.stride(0), ids.stride(1),
                   static_cast<float*>(weights.data) + t * weights.stride(0), weights.stride(1));
    }
  });
  return {};
} catch (...) {
  return caught();
}

Status route(const ConstTensorView& logits, const ConstTensorView& bias, const RouteSpec& spec, const TensorView& ids,
             const TensorView& weights, Stream stream) try {
  NIBBLE_RETURN_IF_ERROR(check(logits, bias, spec, ids, weights));
  if (logits.dim(1) > cuda::kMostExperts)
    return error(StatusCode::unsupported, "{} experts: the GPU routes up to {}; route them in host memory", logits.dim(1),
                 cuda::kMostExperts);
  const auto i = [](std::int64_t x) { return static_cast<int>(x); };
  return cuda::launch_route({.logits = {.data = logits.data, .type = logits.dtype, .stride = logits.stride(0)},
                             .bias = static_cast<const float*>(bias.data),
                             .tokens = i(logits.dim(0)),
                             .experts = i(logits.dim(1)),
                             .top_k = i(spec.top_k),
                             .groups = i(spec.groups),
                             .top_groups = i(spec.top_groups),
                             .sigmoid = spec.score == RouteScore::sigmoid,
                             .normalize = spec.normalize,
                             .scale = spec.scale,
                             .ids = static_cast<std::int32_t*>(ids.data),
                             .id_token = ids.stride(0),
                             .id_choice = ids.stride(1),
                             .weights = static_cast<float*>(weights.data),
                             .weight_token = weights.stride(0),
                             .weight_choice = weights.stride(1)},
                            stream);
} catch (...) {
  return caught();
}

}  // namespace nibble
