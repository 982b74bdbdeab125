// im2col: a thread writes 16 bytes of the rows of four tokens, whose loads are in flight together. It reads them in pieces, as long as
// the channels of a pixel allow: 16 bytes where they are side by side and a multiple of that, one element where they are not.
//
//   channels side by side   neighbouring threads have neighbouring pieces of a row: reads and writes are contiguous
//   pixels side by side     neighbouring threads have neighbouring tokens: reads are contiguous where the stride is 1
//
// col2im: a square of 32 tokens × 32 channels is transposed in shared memory.
#include "kernels/cuda/steps/im2col.hpp"

#include <algorithm>
#include <limits>

#include "kernels/cuda/device/dependent_launch.cuh"

namespace nibble::cuda {
namespace {

constexpr int kIm2colThreads = 256;
constexpr int kIm2colVector = 16;  // bytes of a row that a thread writes
constexpr int kIm2colTokens = 4;   // of a thread

struct Im2colParams {
  Im2colTask task;
  int vectors;  // of a row
  int quads;    // threads that share the tokens: token i·quads + q is the i-th of thread q
};

/// Piece: the unsigned integer or vector that is read at once.
template <class Piece>
__global__ void __launch_bounds__(kIm2colThreads) im2col_kernel(const __grid_constant__ Im2colParams p) {
  constexpr int kBytes = static_cast<int>(sizeof(Piece)), kPieces = kIm2colVector / kBytes;
  let_successor_start();
  const Im2colTask& t = p.task;
  const int thread = static_cast<int>(blockIdx.x) * kIm2colThreads + static_cast<int>(threadIdx.x);
  if (thread >= p.vectors * p.quads) return;
  const bool pixels_first = t.a.channel != 1;
  const int vector = pixels_first ? thread / p.quads : thread % p.vectors;
  const int quad = pixels_first ? thread % p.quads : thread / p.vectors;
  const int each = kBytes / t.element;  // channels of a piece
  const PatchChannel step = patch_channel(t.patches, each);
  PatchChannel at = patch_channel(t.patches, vector * (kIm2colVector / t.element));
  Corner from[kIm2colTokens];
#pragma unroll
  for (int i = 0; i < kIm2colTokens; ++i) from[i] = corner(t.patches, t.first + min(i * p.quads + quad, t.tokens - 1));
  wait_for_predecessor();

  const std::int32_t pad = t.pads == nullptr ? t.pad : __ldcg(t.pads);
  const std::uint32_t padding = t.element == 1 ? static_cast<std::uint8_t>(pad) * 0x01010101u : 0;
  std::uint32_t words[kIm2colTokens][4];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
#pragma unroll
    for (int i = 0; i < kIm2colTokens; ++i) {
      const int pixel = pixel_under(t.patches, {0, from[i].h, from[i].w}, at);
      const std::int64_t place = from[i].image * t.a.image + pixel * t.a.pixel + at.c * t.a.channel;
      const auto* const x = reinterpret_cast<const Piece*>(static_cast<const std::uint8_t*>(t.x) + place * t.element);
      if constexpr (kBytes == 16) {
        const uint4 v = pixel < 0 ? uint4{padding, padding, padding, padding} : __ldcg(x);
        words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
      } else if constexpr (kBytes == 8) {
        const uint2 v = pixel < 0 ? uint2{padding, padding} : __ldcg(x);
        words[i][2 * j] = v.x, words[i][2 * j + 1] = v.y;
      } else {
        constexpr int kInWord = 4 / kBytes;
        const std::uint32_t v = pixel < 0 ? static_cast<Piece>(padding) : __ldcg(x);
        std::uint32_t& word = words[i][j / kInWord];
        word = j % kInWord == 0 ? v : word | v << j % kInWord * 8 * kBytes;
      }
    }
    advance(at, t.patches, step);
  }
#pragma unroll
  for (int i = 0; i < kIm2colTokens; ++i) {
    const int token = i * p.quads + quad;
    if (token >= t.tokens) continue;
    auto* const row = static_cast<std::uint8_t*>(t.rows) + token * t.pitch;
    *reinterpret_cast<uint4*>(row + vector * kIm2colVector) = {words[i][0], words[i][1], words[i][2], words[i][3]};
  }
}

constexpr int kCol2imSquare = 32, kCol2imLines = 8;

struct Col2imParams {
  Col2imTask task;
};

template <class Element>
__global__ void __launch_bounds__(kCol2imSquare* kCol2imLines) col2im_kernel(const __grid_constant__ Col2imParams p) {
  __shared__ Element square[kCol2imSquare][kCol2imSquare + 4 / sizeof(Element)];  // a column's elements are in different banks
  let_successor_start();
  const Col2imTask& t = p.task;
  const int first_token = static_cast<int>(blockIdx.x) * kCol2imSquare,
            first_channel = static_cast<int>(blockIdx.y) * kCol2imSquare;
  const int quick = static_cast<int>(threadIdx.x), line = static_cast<int>(threadIdx.y);
  wait_for_predecessor();
#pragma unroll
  for (int i = line; i < kCol2imSquare; i += kCol2imLines)
    if (first_token + i < t.tokens && first_channel + quick < t.channels)
      square[i][quick] = __ldcg(static_cast<const Element*>(t.rows) + (first_token + i) * t.pitch + first_channel + quick);
  __syncthreads();
  if (first_token + quick >= t.tokens) return;
  const int token = t.first + first_token + quick, image = token / t.pixels, pixel = token % t.pixels;
  auto* const to = static_cast<Element*>(t.images) + image * t.d.image + pixel * t.d.pixel;
#pragma unroll
  for (int i = line; i < kCol2imSquare; i += kCol2imLines)
    if (first_channel + i < t.channels) to[(first_channel + i) * t.d.channel] = square[quick][i];
}

/// The bytes that can be read at once: of the channels of a pixel, whose pieces of so many bytes are aligned.
int piece_bytes(const Im2colTask& task) {
  if (task.a.channel != 1) return task.element;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(task.x));
  const std::int64_t places = address | (task.patches.channels | task.a.pixel | task.a.image) * task.element;
  return static_cast<int>(std::min<std::int64_t>(kIm2colVector, places & -places));
}

template <class Element>
cudaError_t launch_col2im(const Col2imTask& task, cudaStream_t stream) {
  const auto squares = [](int count) { return static_cast<unsigned>((count + kCol2imSquare - 1) / kCol2imSquare); };
  const dim3 grid(squares(task.tokens), squares(task.channels));
  if (grid.y > 65535) return cudaErrorInvalidConfiguration;
  return launch_dependent(col2im_kernel<Element>, grid, dim3(kCol2imSquare, kCol2imLines), 0, stream, Col2imParams{task});
}

}  // namespace

cudaError_t im2col(const Im2colTask& task, cudaStream_t stream) {
  if (task.tokens < 1 || task.patches.groups != 1 || task.patches.channels < 1 || task.pitch % kIm2colVector != 0)
    return cudaErrorInvalidValue;
  const std::int64_t vectors = task.pitch / kIm2colVector, quads = (task.tokens + kIm2colTokens - 1) / kIm2colTokens;
  if (vectors * quads > std::numeric_limits<std::int32_t>::max() - kIm2colThreads) return cudaErrorInvalidConfiguration;
  const Im2colParams p{task, static_cast<int>(vectors), static_cast<int>(quads)};
  const auto ctas = static_cast<unsigned>((vectors * quads + kIm2colThreads - 1) / kIm2colThreads);
  const auto launch = [&](auto kernel) { return launch_dependent(kernel, ctas, kIm2colThreads, 0, stream, p); };
  switch (piece_bytes(task)) {
    case 16: return launch(im2col_kernel<uint4>);
    case 8: return launch(im2col_kernel<uint2>);
    case 4: return launch(im2col_kernel<std::uint32_t>);
    case 2: return launch(im2col_kernel<std::uint16_t>);
    default: return launch(im2col_kernel<std::uint8_t>);
  }
}

cudaError_t col2im(const Col2imTask& task, cudaStream_t stream) {
  if (task.tokens < 1 || task.channels < 1 || task.pixels < 1) return cudaErrorInvalidValue;
  switch (task.element) {
    case 1: return launch_col2im<std::uint8_t>(task, stream);
    case 2: return launch_col2im<std::uint16_t>(task, stream);
    case 4: return launch_col2im<std::uint32_t>(task, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
