// Images converted to the order that tensor cores need, channels contiguous, unchanged or quantized to codes; and sums of codes.
//
//                              a square of 64 pixels × 64 channels
//   [C][H·W] or [H·W][C]  ──▶  in shared memory, pixel by pixel   ──▶  [H'·W'][C], 16 bytes of a pixel a store
//
//   Neighbouring threads read contiguous elements, pixels or channels; 256 threads have 16 elements each in flight.
//
// This handles any strides and sizes, an element at a time, and multiplies elements by the prescale of their channel on the way. The two
// usual kinds of images use vectors:
//
//   [C][H·W] of 16-bit elements, as they are or to codes, 4 or 8 pixels at a time: ldmatrix transposes 8 pixels × 8 channels
//   [H·W][C] to codes, 16 channels at a time: no transposition
//
// Where 0 has another code z than 0, images of codes include their padding, H' = top + H + bottom: every element of a filter is then inside
// the image. So sums are corrected as those of a matrix, exactly: I = Σ q·w − z·Σ w. The zeros that TMA fills in, code 0, would need the
// sum of the weights inside the image for every pixel of the border.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/fragment.cuh"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/steps/act_vectors.cuh"
#include "kernels/cuda/steps/fixed_point_acts.hpp"
#include "kernels/cuda/steps/quantize_acts.hpp"
#include "kernels/cuda/steps/w8a8_scales.cuh"
#include "kernels/cuda/tasks/conv.hpp"

namespace nibble::cuda {
namespace {

constexpr int kSquare = 64;  // pixels, and channels
constexpr int kThreads = 256;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1000
constexpr int kCtas = 2;  // there the compiler needs more registers than 3 leave
#else
constexpr int kCtas = 3;  // that share an SM, as registers allow: 24 KB of 16-bit elements in flight
#endif
constexpr int kElements = kSquare * kSquare / kThreads;  // of a thread

/// The element type that is loaded, its conversion, which a prescale makes depend on the channel, and the value of padding.
template <class Bits>
struct AsItIs {
  using Raw = Bits;
  using Value = Bits;
  static constexpr bool kIsGeneral = false;
  __device__ explicit AsItIs(const ConvTask&) {}
  __device__ Value value(Raw x, int) const { return x; }
  __device__ Value padding() const { return 0; }
};

/// Elements of an image as f32. kGeneral: times the prescale of their channel, if any; a channel counts those of all groups.
template <DType kSource, bool kGeneral>
struct Source {
  using Raw = std::conditional_t<kSource == DType::f32, float, std::uint16_t>;
  static constexpr bool kIsGeneral = kGeneral;
  const ConvTask& t;
  __device__ float number(Raw x, int channel) const {
    float y;
    if constexpr (kSource == DType::f32)
      y = x;
    else
      y = half_of(x, 0, kSource);
    if (!kGeneral || t.prescale == nullptr) return y;
    return act_rule::multiply(y, __ldg(t.prescale + channel % t.patches.channels));
  }
};
/// 16-bit floats times their prescale, rounded to their type.
template <DType kType>
struct Prescaled : Source<kType, true> {
  using typename Source<kType, true>::Raw;
  using Value = std::uint16_t;
  __device__ explicit Prescaled(const ConvTask& t) : Source<kType, true>{t} {}
  __device__ Value value(Raw x, int channel) const {
    const float y = this->number(x, channel);
    return static_cast<Value>(kType == DType::f16 ? ptx::to_f16x2(y, 0.0f) : ptx::to_bf16x2(y, 0.0f));
  }
  __device__ Value padding() const { return 0; }
};
/// int8, or with kGeneral FP8, too.
template <DType kSource, bool kGeneral = false>
struct AsCode : Source<kSource, kGeneral> {
  using typename Source<kSource, kGeneral>::Raw;
  using Value = std::int8_t;
  act_rule::Rule rule;
  __device__ explicit AsCode(const ConvTask& t) : Source<kSource, kGeneral>{t}, rule(rule_of(t.acts)) {}
  __device__ Value value(Raw x, int channel) const {
    const float y = this->number(x, channel);
    if (kGeneral && !this->t.scaled.geometry.integers)
      return static_cast<Value>(act_rule::to_e4m3(act_rule::multiply(y, rule.inverse)));
    return static_cast<Value>(encode_s8(y, rule));
  }
  __device__ Value padding() const { return static_cast<Value>(rule.zero); }
};
/// Codes that are given.
template <>
struct AsCode<DType::s8> {
  using Raw = std::int8_t;
  using Value = std::int8_t;
  static constexpr bool kIsGeneral = false;
  act_rule::Rule rule;
  __device__ explicit AsCode(const ConvTask& t) : rule(rule_of(t.acts)) {}
  __device__ Value value(Raw x, int) const { return x; }
  __device__ Value padding() const { return static_cast<std::int8_t>(rule.zero); }
};

/// The codes of 16 elements, from `channel` on.
template <class Element>
__device__ __forceinline__ uint4 sixteen_codes(const Element& element, const typename Element::Raw* elements, int channel) {
  std::uint32_t word[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const auto code = [&](int j) {
      return static_cast<std::uint32_t>(static_cast<std::uint8_t>(element.value(elements[4 * w + j], channel + 4 * w + j)));
    };
    word[w] = __byte_perm(__byte_perm(code(0), code(1), 0x0040), __byte_perm(code(2), code(3), 0x0040), 0x5410);
  }
  return {word[0], word[1], word[2], word[3]};
}

struct ImageCopy {
  ConvTask task;
  void* to;
  int pixels, channels;  // of an image, padding and all
  int squares;           // of its pixels
};

template <class Element>
__global__ void __launch_bounds__(kThreads, Element::kIsGeneral ? 2 : kCtas) copy_kernel(const __grid_constant__ ImageCopy b) {
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
  typename Element::Raw raw[kElements];  // all in flight together
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    int pixel, channel;
    place(i, pixel, channel);
    raw[i] = {};
    if (from[pixel] >= 0 && first_channel + channel < b.channels)
      raw[i] = __ldcg(static_cast<const typename Element::Raw*>(t.x) + (from[pixel] + (first_channel + channel) * t.a.channel));
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    int pixel, channel;
    place(i, pixel, channel);
    square[pixel][channel] = from[pixel] >= 0 ? element.value(raw[i], first_channel + channel) : element.padding();
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

// ---- images of 16-bit elements whose pixels are side by side, in vectors of kVector pixels

/// A warp has 8 of the square's pixels and all of its channels. Rows of shared memory are 128 bytes, whose chunks of 16 are swizzled by the
/// row. There is no padding.
template <int kVector, class Element>
__global__ void __launch_bounds__(kThreads) transpose_kernel(const __grid_constant__ ImageCopy b) {
  constexpr int kRowBytes = kSquare * 2, kVectors = kSquare / kVector;  // of a channel's pixels
  __shared__ __align__(128) std::uint8_t channels[kSquare * kRowBytes], pixels[kSquare * kRowBytes];
  let_successor_start();
  const ConvTask& t = b.task;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int image = static_cast<int>(blockIdx.x) / b.squares, first_pixel = static_cast<int>(blockIdx.x) % b.squares * kSquare;
  const int first_channel = static_cast<int>(blockIdx.y) * kSquare;
  const auto at = [](const std::uint8_t* rows, int row, int chunk) {
    return ptx::shared_address(rows) + row * kRowBytes + (chunk ^ row % 8) * 16;
  };
  wait_for_predecessor();

  const auto* const from =
      static_cast<const std::uint16_t*>(t.x) + (image * t.a.image + first_channel * t.a.channel + first_pixel);
  constexpr int kLoads = kSquare * kVectors / kThreads;
  uint2 low[kLoads], high[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int channel = (i * kThreads + thread) / kVectors, pixel = thread % kVectors * kVector;
    low[i] = high[i] = {};
    if (first_channel + channel >= b.channels || first_pixel + pixel >= b.pixels) continue;
    if constexpr (kVector == 8) {
      const uint4 v = __ldcg(reinterpret_cast<const uint4*>(from + channel * t.a.channel + pixel));
      low[i] = {v.x, v.y}, high[i] = {v.z, v.w};
    } else {
      low[i] = __ldcg(reinterpret_cast<const uint2*>(from + channel * t.a.channel + pixel));
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int channel = (i * kThreads + thread) / kVectors, pixel = thread % kVectors * kVector;
    const std::uint32_t to = at(channels, channel, pixel / 8) + pixel % 8 * 2;
    if constexpr (kVector == 8)
      ptx::store_shared16(to, {low[i].x, low[i].y, high[i].x, high[i].y});
    else
      ptx::store_shared8(to, low[i]);
  }
  __syncthreads();

#pragma unroll
  for (int octet = 0; octet < kSquare / 8;
       octet += 4) {  // lane l says where row l mod 8 of matrix l / 8 is: a channel, then a pixel
    std::uint32_t m[4];
    ptx::load_matrices_transposed(m, at(channels, octet * 8 + lane, warp));
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::store_shared4(at(pixels, warp * 8 + lane / 4, octet + i) + lane % 4 * 4, m[i]);
  }
  __syncwarp();
  using Value = typename Element::Value;
  constexpr int kStored = 16 / static_cast<int>(sizeof(Value)), kStores = kSquare / kStored, kEach = 32 / kStores;
  Value* const to = static_cast<Value*>(b.to) + (std::int64_t{image} * b.pixels + first_pixel) * b.channels + first_channel;
#pragma unroll
  for (int i = 0; i < 8 / kEach; ++i) {
    const int pixel = warp * 8 + i * kEach + lane / kStores, channel = lane % kStores * kStored;
    if (first_pixel + pixel >= b.pixels || first_channel + channel >= b.channels) continue;
    uint4 stored;
    if constexpr (sizeof(Value) == 2) {
      stored = ptx::load_shared16(at(pixels, pixel, lane % kStores));
    } else {
      const Element element(t);
      const uint4 raw[2] = {ptx::load_shared16(at(pixels, pixel, lane % kStores * 2)),
                            ptx::load_shared16(at(pixels, pixel, lane % kStores * 2 + 1))};
      stored = sixteen_codes(element, reinterpret_cast<const std::uint16_t*>(raw), first_channel + channel);
    }
    *reinterpret_cast<uint4*>(to + std::int64_t{pixel} * b.channels + channel) = stored;
  }
}

// ---- images whose channels are side by side, to codes

constexpr int kCodes = 16;  // channels of a thread
constexpr int kPixels = 4;  // pixels of a thread

template <class Element>
__global__ void __launch_bounds__(kThreads) encode_kernel(const __grid_constant__ ImageCopy b) {
  using Raw = typename Element::Raw;
  constexpr int kQuads = sizeof(Raw);  // 16 bytes each
  __shared__ std::int64_t from[kThreads * kPixels];
  let_successor_start();
  const ConvTask& t = b.task;
  const int rows = static_cast<int>(blockDim.y), count = rows * kPixels;  // pixels of the CTA
  const int first = static_cast<int>(blockIdx.x) * count, all = t.images * b.pixels;
  for (int i = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); i < count; i += static_cast<int>(blockDim.x) * rows)
    from[i] = first + i < all ? framed(t.patches, t.a, (first + i) / b.pixels, (first + i) % b.pixels) : -1;
  __syncthreads();
  wait_for_predecessor();

  const Element element(t);
  for (int channel = static_cast<int>(threadIdx.x) * kCodes; channel < b.channels;
       channel += static_cast<int>(blockDim.x) * kCodes) {
    uint4 raw[kPixels][kQuads];
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      const std::int64_t pixel = from[i * rows + threadIdx.y];
#pragma unroll
      for (int q = 0; q < kQuads; ++q)
        raw[i][q] =
            pixel < 0 ? uint4{} : __ldcg(reinterpret_cast<const uint4*>(static_cast<const Raw*>(t.x) + pixel + channel) + q);
    }
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      const int pixel = i * rows + static_cast<int>(threadIdx.y);
      if (first + pixel >= all) continue;
      const std::uint32_t padding = static_cast<std::uint8_t>(element.padding()) * 0x01010101u;
      *reinterpret_cast<uint4*>(static_cast<std::uint8_t*>(b.to) + std::int64_t{first + pixel} * b.channels + channel) =
          from[pixel] < 0 ? uint4{padding, padding, padding, padding}
                          : sixteen_codes(element, reinterpret_cast<const Raw*>(raw[i]), channel);
    }
  }
}

// ---- launch

/// Whether vectors of so many bytes are aligned.
bool in_vectors(const ConvTask& t, std::int64_t bytes, std::int64_t element, std::int64_t extent) {
  const auto start = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(t.x));
  const std::int64_t apart = t.a.channel == 1 ? t.a.pixel : t.a.channel;
  return start % bytes == 0 && t.a.image * element % bytes == 0 && apart * element % bytes == 0 && extent * element % bytes == 0;
}

template <class Element>
cudaError_t copy_images(const ConvTask& task, void* to, cudaStream_t stream) {
  const Patches frame = padded(task.patches);
  const int pixels = frame.height * frame.width;
  const ImageCopy b{task, to, pixels, frame.channels * frame.groups, (pixels + kSquare - 1) / kSquare};
  const std::int64_t squares = std::int64_t{task.images} * b.squares;
  const dim3 grid(static_cast<unsigned>(squares), static_cast<unsigned>((b.channels + kSquare - 1) / kSquare));
  if (to == nullptr || squares < 1 || b.channels * sizeof(typename Element::Value) % 16 != 0) return cudaErrorInvalidValue;
  if (squares > std::numeric_limits<std::int32_t>::max() || grid.y > 65535) return cudaErrorInvalidConfiguration;
  constexpr bool kToCodes = sizeof(typename Element::Value) == 1 && !Element::kIsGeneral;
  constexpr bool kTransposes = sizeof(typename Element::Raw) == 2 && (kToCodes || std::is_same_v<Element, AsItIs<std::uint16_t>>);
  if constexpr (kTransposes) {
    if (task.a.pixel == 1 && pixels == task.patches.height * task.patches.width && in_vectors(task, 8, 2, pixels)) {
      const bool eights = in_vectors(task, 16, 2, pixels);
      return launch_dependent(eights ? transpose_kernel<8, Element> : transpose_kernel<4, Element>, grid, kThreads, 0, stream, b);
    }
  }
  if constexpr (kToCodes) {
    if (task.a.channel == 1 && in_vectors(task, 16, sizeof(typename Element::Raw), b.channels) &&
        std::int64_t{task.images} * pixels <= std::numeric_limits<std::int32_t>::max() / 2) {
      const int across = std::min(b.channels / kCodes, kThreads), rows = kThreads / across;
      const std::int64_t all = std::int64_t{task.images} * pixels, ctas = (all + rows * kPixels - 1) / (rows * kPixels);
      return launch_dependent(encode_kernel<Element>, static_cast<unsigned>(ctas),
                              dim3(static_cast<unsigned>(across), static_cast<unsigned>(rows)), 0, stream, b);
    }
  }
  return launch_dependent(copy_kernel<Element>, grid, kThreads, 0, stream, b);
}

// ---- sums of the codes of patches, for weights with zero points

constexpr int kSumWarps = 8;

struct Summands {
  const std::uint8_t* x;  // [B,H,W,C], channels side by side, pixels `pitch` bytes apart
  std::int64_t pitch;
  Patches patches;
  int tokens;
  std::int32_t* sums;  // [groups][tokens]
};
/// A warp an output pixel of a group, a lane 16 channels at a time.
__global__ void __launch_bounds__(32 * kSumWarps) sum_patches_kernel(const __grid_constant__ Summands s) {
  let_successor_start();
  const Patches& p = s.patches;
  const int token = static_cast<int>(blockIdx.x) * kSumWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  wait_for_predecessor();
  if (token >= s.tokens) return;
  const Corner from = corner(p, token);
  const int vectors = p.channels / 16;  // of a pixel and group
  const std::uint8_t* const x = s.x + blockIdx.y * p.channels;
  std::int32_t sum = 0;
#pragma unroll 1
  for (int i = lane; i < p.filter_h * p.filter_w * vectors; i += 32) {
    const int pixel = pixel_under(p, from, patch_channel(p, i * 16));
    if (pixel < 0) continue;
    const int4 codes = __ldcg(reinterpret_cast<const int4*>(x + pixel * s.pitch) + i % vectors);
    constexpr std::int32_t kOnes = 0x01010101;
    sum = __dp4a(codes.x, kOnes, __dp4a(codes.y, kOnes, __dp4a(codes.z, kOnes, __dp4a(codes.w, kOnes, sum))));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) s.sums[std::int64_t{blockIdx.y} * s.tokens + token] = sum;
}

cudaError_t sum_patches(const CodeImages& images, std::int64_t tokens, std::int32_t* sums, cudaStream_t stream) {
  const Patches& p = images.patches;
  if (p.groups > 65535) return cudaErrorInvalidConfiguration;  // of a grid
  const Summands s{static_cast<const std::uint8_t*>(images.x), images.pitch, p, static_cast<int>(tokens), sums};
  const dim3 grid(static_cast<unsigned>((tokens + kSumWarps - 1) / kSumWarps), static_cast<unsigned>(p.groups));
  return launch_dependent(sum_patches_kernel, grid, 32 * kSumWarps, 0, stream, s);
}

/// Whether padding, if any, is code 0.
bool pads_with_zeros(const ConvTask& task) {
  const Patches& p = task.patches;
  return (p.top | p.bottom | p.left | p.right) == 0 || (task.acts.zeros == nullptr && task.acts.zero == 0);
}
/// Channels side by side, pixels at multiples of 16 bytes, and padding that need not be stored.
bool readable(const ConvTask& task) {
  const Patches& p = task.patches;
  return bits(task.a_dtype) == 8 && pads_with_zeros(task) && task.a.channel == 1 &&
         task.a.image == task.a.pixel * p.height * p.width && task.a.pixel % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(task.x) % 16 == 0;
}

template <DType kSource>
cudaError_t codes_last_of(const ConvTask& task, void* to, cudaStream_t stream) {
  return task.prescale == nullptr && task.scaled.geometry.integers ? copy_images<AsCode<kSource>>(task, to, stream)
                                                                   : copy_images<AsCode<kSource, true>>(task, to, stream);
}
cudaError_t codes_last(const ConvTask& task, void* to, cudaStream_t stream) {
  switch (task.a_dtype) {
    case DType::s8:
    case DType::e4m3: return copy_images<AsCode<DType::s8>>(task, to, stream);
    case DType::f16: return codes_last_of<DType::f16>(task, to, stream);
    case DType::bf16: return codes_last_of<DType::bf16>(task, to, stream);
    case DType::f32: return codes_last_of<DType::f32>(task, to, stream);
    default: return cudaErrorInvalidValue;
  }
}

ConvTask without_padding(ConvTask task) {
  task.patches.top = task.patches.bottom = task.patches.left = task.patches.right = 0;
  return task;
}

}  // namespace

cudaError_t channels_last(const ConvTask& task, void* to, cudaStream_t stream) {
  const ConvTask bare = without_padding(task);  // TMA can only pad with 0
  if (task.a_dtype == DType::f32) return copy_images<AsItIs<std::uint32_t>>(bare, to, stream);
  if (task.a_dtype == DType::s8) return copy_images<AsCode<DType::s8>>(bare, to, stream);
  if (task.prescale == nullptr) return copy_images<AsItIs<std::uint16_t>>(bare, to, stream);
  return task.a_dtype == DType::f16 ? copy_images<Prescaled<DType::f16>>(bare, to, stream)
                                    : copy_images<Prescaled<DType::bf16>>(bare, to, stream);
}

cudaError_t code_pixels(const ConvTask& task, PixelCodes& codes, cudaStream_t stream) {
  const Patches& patches = task.patches;
  const std::int64_t in_image = std::int64_t{patches.height} * patches.width, pixels = task.images * in_image;
  const std::int64_t channels = std::int64_t{patches.channels} * patches.groups;
  if (pixels < 1 || (patches.groups != 1 && task.prescale != nullptr) || (task.fold != gpu_tile::kChannels && task.fold != 32) ||
      patches.channels % task.fold != 0 || (task.fixed_point && task.a_dtype != DType::f32))
    return cudaErrorInvalidValue;

  const std::int64_t element = task.a_dtype == DType::f32 ? 4 : task.a_dtype == DType::s8 ? 1 : 2;
  const bool reorders = task.a.channel != 1;
  const int planes = task.fixed_point ? kDigitPlanes : 1;
  const Wna8ImageMap map = wna8_image_map(task.fold, planes * pixels, channels, reorders ? pixels * channels * element : 0);
  auto* const scratch = static_cast<std::byte*>(task.scratch);
  if (reorders) {
    ConvTask unscaled = task;  // the quantizer multiplies by the prescale
    unscaled.prescale = nullptr;
    if (const cudaError_t e = channels_last(unscaled, scratch + map.image, stream)) return e;
  }
  codes = {scratch, scratch + map.terms, map.term_row * 8, planes};

  // A row of the quantizer is a pixel. Contiguous pixels without a prescale are quantized as one row, if it has at most so many channels
  // (quantize_acts.cu).
  constexpr std::int64_t kMostChannels = std::int64_t{1} << 28;
  QuantizeTask quantize = task.online;
  quantize.prescale = task.prescale;
  quantize.type = task.a_dtype;
  quantize.pitch = channels;
  quantize.fold = task.fold;
  quantize.term_row = map.term_row, quantize.term_fold = map.term_fold;
  if (task.fixed_point) quantize.digit_codes = pixels * channels, quantize.digit_terms = pixels * map.term_row;
  const std::int64_t pixel = reorders ? channels : task.a.pixel, image = reorders ? in_image * pixel : task.a.image;
  const bool evenly = task.images == 1 || image == in_image * pixel;  // else images have gaps between them
  const bool one = evenly && pixel == channels && pixels * pixel <= kMostChannels && task.prescale == nullptr;
  const int parts = evenly ? 1 : task.images;
  for (int i = 0; i < parts; ++i) {
    quantize.a = (reorders ? scratch + map.image : static_cast<const std::byte*>(task.x)) + i * image * element;
    quantize.codes = scratch + i * in_image * channels;
    quantize.terms = scratch + map.terms + i * in_image * map.term_row * 8;
    quantize.m = one ? 1 : pixels / parts;
    quantize.k = quantize.columns = one ? pixels * pixel : channels;
    quantize.a_stride = one ? quantize.k : pixel;
    if (const cudaError_t e = task.fixed_point ? fixed_point_acts(quantize, stream) : quantize_acts(quantize, stream)) return e;
  }
  return cudaSuccess;
}

cudaError_t code_images(const ConvTask& task, CodeImages& images, cudaStream_t stream) {
  const std::int64_t tokens = std::int64_t{task.images} * task.patches.pixels();
  if (tokens < 1 || tokens > std::numeric_limits<std::int32_t>::max() || task.patches.channels % 16 != 0)
    return cudaErrorInvalidValue;
  images = {task.x, task.a.pixel, task.patches, nullptr};
  if (!readable(task)) {
    const bool zeros = pads_with_zeros(task);
    if (const cudaError_t e = codes_last(zeros ? without_padding(task) : task, task.scratch, stream)) return e;
    images = {task.scratch, std::int64_t{task.patches.channels} * task.patches.groups,
              zeros ? task.patches : padded(task.patches), nullptr};
  }
  if (!task.scaled.geometry.has_zeros) return cudaSuccess;
  if (task.scratch == nullptr) return cudaErrorInvalidValue;
  const CodesMap map = codes_map(task.patches, task.images, true);
  auto* const sums = reinterpret_cast<std::int32_t*>(static_cast<std::byte*>(task.scratch) + map.sums);
  images.sums = sums;
  return sum_patches(images, tokens, sums, stream);
}

}  // namespace nibble::cuda
