// A warp routes a token; lane l has experts l, l + 32, …
//
//   logits ──▶ scores[E]                softmax over all, or the sigmoid of each
//          ──▶ choices[E]               scores + bias; −∞ outside of the best groups
//          ──▶ top_k times: the best choice of the warp, which is none from then on
//
// A CTA's shared memory has both arrays of each warp, and the sums of groups, whose place the chosen experts take in the end.
#include "kernels/cuda/steps/route.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"

namespace nibble::cuda {
namespace {

constexpr std::uint32_t kAllLanes = 0xffffffffu;
constexpr int kRouteWarps = 4;
constexpr float kLowest = -std::numeric_limits<float>::infinity(), kTaken = std::numeric_limits<float>::quiet_NaN();

/// Floats of a warp.
NIBBLE_HOST_DEVICE int warp_floats(const RouteTask& t) { return 2 * t.experts + (t.groups > t.top_k ? t.groups : t.top_k); }

__device__ __forceinline__ float warp_most(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

struct Choice {
  float value;
  int expert;  // −1: none
};
/// Of equals the lower number. Values are not NaN.
__device__ __forceinline__ bool is_better(const Choice& a, const Choice& b) {
  if (a.expert < 0 || b.expert < 0) return b.expert < 0;
  return a.value != b.value ? a.value > b.value : a.expert < b.expert;
}

/// Logits become scores.
__device__ void score(const RouteTask& t, int token, int lane, float* scores) {
  float most = kLowest;
  for (int e = lane; e < t.experts; e += 32) {
    const float x = t.logits.at(token * t.logits.stride + e);
    scores[e] = std::isnan(x) ? kLowest : x;
    most = fmaxf(most, scores[e]);
  }
  if (t.sigmoid) {
    for (int e = lane; e < t.experts; e += 32) scores[e] = 1.0f / (1.0f + expf(-scores[e]));
    return;
  }
  most = warp_most(most);
  float sum = 0.0f;
  for (int e = lane; e < t.experts; e += 32) {
    scores[e] = most == kLowest || scores[e] == most ? 1.0f : expf(scores[e] - most);
    sum += scores[e];
  }
  sum = warp_sum(sum);
  for (int e = lane; e < t.experts; e += 32) scores[e] /= sum;
}

/// Experts of other groups than the best are no choice.
__device__ void keep_groups(const RouteTask& t, int lane, float* choices, float* sums) {
  const int size = t.experts / t.groups;
  for (int g = lane; g < t.groups; g += 32) {
    float best = kLowest, second = kLowest;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      second = fmaxf(second, fminf(best, choices[e]));
      best = fmaxf(best, choices[e]);
    }
    const float sum = size > 1 ? best + second : best;
    sums[g] = std::isnan(sum) ? best : sum;  // of infinities of both signs, which have no order
  }
  __syncwarp();
  for (int g = lane; g < t.groups; g += 32) {
    int before = 0;
    for (int h = 0; h < t.groups; ++h) before += sums[h] > sums[g] || (sums[h] == sums[g] && h < g);
    if (before < t.top_groups) continue;
    for (int e = g * size; e < (g + 1) * size; ++e) choices[e] = kLowest;
  }
  __syncwarp();
}

/// The best of the warp's choices. It is none any more.
__device__ int take_best(const RouteTask& t, int lane, float* choices) {
  Choice best{kLowest, -1};
  for (int e = lane; e < t.experts; e += 32) {
    const Choice own{choices[e], std::isnan(choices[e]) ? -1 : e};
    if (is_better(own, best)) best = own;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const Choice other{__shfl_xor_sync(kAllLanes, best.value, step), __shfl_xor_sync(kAllLanes, best.expert, step)};
    if (is_better(other, best)) best = other;
  }
  if (best.expert % 32 == lane) choices[best.expert] = kTaken;  // which only this lane reads
  return best.expert;
}

__global__ void __launch_bounds__(kRouteWarps * 32) route_kernel(const __grid_constant__ RouteTask t) {
  extern __shared__ float route_memory[];
  let_successor_start();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int token = static_cast<int>(blockIdx.x) * kRouteWarps + warp;
  wait_for_predecessor();
  if (token >= t.tokens) return;
  float* const scores = route_memory + warp * warp_floats(t);
  float* const choices = scores + t.experts;
  float* const sums = choices + t.experts;
  score(t, token, lane, scores);
  for (int e = lane; e < t.experts; e += 32) {
    const float choice = t.bias == nullptr ? scores[e] : scores[e] + t.bias[e];
    choices[e] = std::isnan(choice) ? kLowest : choice;
  }
  __syncwarp();
  if (t.groups > 1) keep_groups(t, lane, choices, sums);

  int* const chosen = reinterpret_cast<int*>(sums);
  float sum = 0.0f;
  for (int j = 0; j < t.top_k; ++j) {
    const int expert = take_best(t, lane, choices);
    sum += scores[expert];  // in the order of choices, by every lane
    if (lane == 0) chosen[j] = expert;
  }
  __syncwarp();
  for (int j = lane; j < t.top_k; j += 32) {
    float weight = scores[chosen[j]];
    if (t.normalize) weight = sum > 0.0f ? weight / sum : 1.0f / static_cast<float>(t.top_k);
    t.ids[token * t.id_token + j * t.id_choice] = chosen[j];
    t.weights[token * t.weight_token + j * t.weight_choice] = weight * t.scale;
  }
}

}  // namespace

cudaError_t route_tokens(const RouteTask& task, cudaStream_t stream) {
  if (task.tokens < 1 || task.experts < 1 || task.experts > kMostExperts) return cudaErrorInvalidValue;
  const int bytes = kRouteWarps * warp_floats(task) * static_cast<int>(sizeof(float));  // 48 KiB at most
  const dim3 grid(static_cast<unsigned>((task.tokens + kRouteWarps - 1) / kRouteWarps));
  return launch_dependent(route_kernel, grid, dim3(kRouteWarps * 32), bytes, stream, task);
}

}  // namespace nibble::cuda
