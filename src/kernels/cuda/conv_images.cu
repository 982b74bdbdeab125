// Images brought into the order that tensor cores want, channels side by side, as they are or as codes; and sums of codes.
//
//                              a square of 64 pixels × 64 channels
//   [C][H·W] or [H·W][C]  ──▶  in shared memory, pixel by pixel   ──▶  [H'·W'][C], 16 bytes of a pixel a store
//
//   Neighbouring threads read what lies side by side, pixels or channels. 256 of them have 16 elements each on their way.
//
// Codes have their padding around them, H' = top + H + bottom: there it is the code z of 0, and every element of a kernel is in the image.
// So the products of tensor cores need nothing but what those of a matrix need, exactly: I = Σ q·w − z·Σ w, where TMA's own zeros, code 0,
// would ask every pixel of the border for the sums of the weights that fall inside.
#include <limits>
#include <type_traits>

#include "kernels/cuda/conv.hpp"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/fragment.cuh"
#include "kernels/cuda/scaled_terms.cuh"

namespace nibble::cuda {
namespace {

constexpr int kSquare = 64;  // pixels, and channels
constexpr int kThreads = 256;
constexpr int kCtas = 3;  // that registers let share an SM: 24 KB of 16-bit elements on their way
constexpr int kEach = kSquare * kSquare / kThreads;

/// What is loaded, what it becomes, and what padding is.
struct AsItIs {
  using Raw = std::uint16_t;
  using Value = std::uint16_t;
  __device__ explicit AsItIs(const ConvTask&) {}
  __device__ Value value(Raw x) const { return x; }
  __device__ Value padding() const { return 0; }
};
template <DType kSource>
struct AsCode {
  using Raw =
      std::conditional_t<kSource == DType::s8, std::int8_t, std::conditional_t<kSource == DType::f32, float, std::uint16_t>>;
  using Value = std::int8_t;
  act_rule::Rule rule;
  __device__ explicit AsCode(const ConvTask& t) : rule(rule_of(t.acts)) {}
  __device__ Value value(Raw x) const {
    if constexpr (kSource == DType::s8)
      return x;
    else if constexpr (kSource == DType::f32)
      return act_rule::to_s8(x, rule);
    else
      return act_rule::to_s8(half_of(x, 0, kSource), rule);
  }
  __device__ Value padding() const { return static_cast<std::int8_t>(rule.zero); }
};

struct Bring {
  ConvTask task;
  void* to;
  int pixels, channels;  // of an image, padding and all
  int squares;           // of its pixels
};

template <class Element>
__global__ void __launch_bounds__(kThreads, kCtas) bring_kernel(const __grid_constant__ Bring b) {
  using Value = typename Element::Value;
  constexpr int kVector = 16 / static_cast<int>(sizeof(Value)), kVectors = kSquare / kVector;  // of a pixel in the square
  // An odd number of words from pixel to pixel: a column of the square is in 32 different banks.
  __shared__ __align__(16) Value square[kSquare][kSquare + 4 / sizeof(Value)];
  __shared__ std::int64_t from[kSquare];
  let_successor_start();
  const ConvTask& t = b.task;
  const int thread = static_cast<int>(threadIdx.x);
  const int image = static_cast<int>(blockIdx.x) / b.squares, first_pixel = static_cast<int>(blockIdx.x) % b.squares * kSquare;
  const int first_channel = static_cast<int>(blockIdx.y) * kSquare;
  if (thread < kSquare) from[thread] = framed(t.patches, t.a, image, first_pixel + thread);
  __syncthreads();
  wait_for_predecessor();

  const Element element(t);
  const bool channels_first = t.a.channel != 1;
  const auto place = [&](int i, int& pixel, int& channel) {  // of a thread's element i
    const int quick = thread % kSquare, slow = i * (kThreads / kSquare) + thread / kSquare;
    pixel = channels_first ? quick : slow;
    channel = channels_first ? slow : quick;
  };
  typename Element::Raw raw[kEach];  // all on their way together
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int pixel, channel;
    place(i, pixel, channel);
    raw[i] = {};
    if (from[pixel] >= 0 && first_channel + channel < b.channels)
      raw[i] = __ldcg(static_cast<const typename Element::Raw*>(t.x) + (from[pixel] + (first_channel + channel) * t.a.channel));
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int pixel, channel;
    place(i, pixel, channel);
    square[pixel][channel] = from[pixel] >= 0 ? element.value(raw[i]) : element.padding();
  }
  __syncthreads();

  Value* const to = static_cast<Value*>(b.to) + (std::int64_t{image} * b.pixels + first_pixel) * b.channels + first_channel;
#pragma unroll
  for (int i = thread; i < kSquare * kVectors; i += kThreads) {
    const int pixel = i / kVectors, channel = i % kVectors * kVector;
    if (first_pixel + pixel >= b.pixels || first_channel + channel >= b.channels) continue;
    const auto* words = reinterpret_cast<const std::uint32_t*>(&square[pixel][channel]);
    *reinterpret_cast<uint4*>(to + std::int64_t{pixel} * b.channels + channel) = {words[0], words[1], words[2], words[3]};
  }
}

template <class Element>
cudaError_t bring(const ConvTask& task, void* to, cudaStream_t stream) {
  const Patches frame = padded(task.patches);
  const int pixels = frame.height * frame.width;
  const Bring b{task, to, pixels, frame.channels * frame.groups, (pixels + kSquare - 1) / kSquare};
  const std::int64_t squares = std::int64_t{task.images} * b.squares;
  const dim3 grid(static_cast<unsigned>(squares), static_cast<unsigned>((b.channels + kSquare - 1) / kSquare));
  if (to == nullptr || squares < 1 || b.channels * sizeof(typename Element::Value) % 16 != 0) return cudaErrorInvalidValue;
  if (squares > std::numeric_limits<std::int32_t>::max() || grid.y > 65535) return cudaErrorInvalidConfiguration;
  return launch_dependent(bring_kernel<Element>, grid, kThreads, 0, stream, b);
}

// ---- sums of the codes of patches, for weights with zero points

constexpr int kSumWarps = 8;

struct Summands {
  const std::uint8_t* x;  // [B,H,W,C], channels side by side, pixels `pitch` bytes apart
  std::int64_t pitch;
  Patches patches;
  int tokens;
  std::int32_t* sums;
};
/// A warp an output pixel, a lane 16 channels at a time.
__global__ void __launch_bounds__(32 * kSumWarps) sum_patches_kernel(const __grid_constant__ Summands s) {
  let_successor_start();
  const Patches& p = s.patches;
  const int token = static_cast<int>(blockIdx.x) * kSumWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  wait_for_predecessor();
  if (token >= s.tokens) return;
  const Corner from = corner(p, token);
  const int vectors = p.channels / 16;  // of a pixel
  std::int32_t sum = 0;
#pragma unroll 1
  for (int i = lane; i < p.kernel_h * p.kernel_w * vectors; i += 32) {
    const int pixel = pixel_under(p, from, patch_channel(p, i * 16));
    if (pixel < 0) continue;
    const int4 codes = __ldcg(reinterpret_cast<const int4*>(s.x + pixel * s.pitch) + i % vectors);
    constexpr std::int32_t kOnes = 0x01010101;
    sum = __dp4a(codes.x, kOnes, __dp4a(codes.y, kOnes, __dp4a(codes.z, kOnes, __dp4a(codes.w, kOnes, sum))));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) s.sums[token] = sum;
}

}  // namespace

cudaError_t channels_last(const ConvTask& task, void* to, cudaStream_t stream) {
  ConvTask bare = task;  // TMA knows padding that is 0
  bare.patches.top = bare.patches.bottom = bare.patches.left = bare.patches.right = 0;
  return bring<AsItIs>(bare, to, stream);
}
cudaError_t codes_last(const ConvTask& task, void* to, cudaStream_t stream) {
  switch (task.act) {
    case DType::s8: return bring<AsCode<DType::s8>>(task, to, stream);
    case DType::f16: return bring<AsCode<DType::f16>>(task, to, stream);
    case DType::bf16: return bring<AsCode<DType::bf16>>(task, to, stream);
    case DType::f32: return bring<AsCode<DType::f32>>(task, to, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t sum_patches(const Patches& patches, int images, const void* x, std::int64_t pitch, std::int32_t* sums,
                        cudaStream_t stream) {
  const std::int64_t tokens = std::int64_t{images} * patches.pixels();
  if (sums == nullptr || tokens < 1 || tokens > std::numeric_limits<std::int32_t>::max() || patches.groups != 1 ||
      patches.channels % 16 != 0)
    return cudaErrorInvalidValue;
  const Summands s{static_cast<const std::uint8_t*>(x), pitch, patches, static_cast<int>(tokens), sums};
  const dim3 grid(static_cast<unsigned>((tokens + kSumWarps - 1) / kSumWarps));
  return launch_dependent(sum_patches_kernel, grid, 32 * kSumWarps, 0, stream, s);
}

}  // namespace nibble::cuda
