// Routing: which experts a token goes through, from the scores of a router.
#pragma once

#include <cstdint>

#include "nibble/device.hpp"
#include "nibble/parallel.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// How logits become scores.
enum class RouteScore : std::uint8_t {
  softmax,  // over all experts: Mixtral, Qwen3, and with `normalize` gpt-oss
  sigmoid   // of each: DeepSeek-V3
};

/// The rule of a router.
struct RouteSpec {
  std::int64_t top_k = 1;  // experts of a token, 1 … those of the groups that are kept
  RouteScore score = RouteScore::softmax;
  bool normalize = true;  // weights are divided by their sum
  /// Experts form that many equal groups, of which the best top_groups are kept: those whose two best choices have the largest sum (DeepSeek-V3).
  std::int64_t groups = 1, top_groups = 1;
  float scale = 1.0f;  // multiplies all weights, last
};

/// Chooses the top_k experts of each token, the best first, of equals the lower number. A choice is made by score + bias, and weights are
/// scores without it.
/// logits: f32, f16 or bf16 [T,E]; NaN counts as −∞. bias: f32 [E]; absent: none. ids: s32 [T,top_k]; weights: f32 [T,top_k].
/// Errors: invalid_argument with the values that do not fit.
Status route(const ConstTensorView& logits, const ConstTensorView& bias, const RouteSpec& spec, const TensorView& ids,
             const TensorView& weights, Executor* executor = nullptr);
/// The same on the GPU, of up to 1024 experts: all views are device memory, and the work is enqueued on `stream`. Errors: those above, and
/// unsupported for more experts or without a GPU of compute capability 7.5 or later.
Status route(const ConstTensorView& logits, const ConstTensorView& bias, const RouteSpec& spec, const TensorView& ids,
             const TensorView& weights, Stream stream);

}  // namespace nibble
