// The blocks in which ggml keeps quantized weights, and the schemes of nibble that hold the same numbers.
#pragma once

#include <ggml.h>
#include <nibble/nibble.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace nibble::ggml {

/// Destroys a handle of the C interface.
template <auto destroy>
struct Destroy {
  template <class T>
  void operator()(T* handle) const {
    destroy(handle);
  }
};
using QTensor = std::unique_ptr<nib_qtensor, Destroy<nib_qtensor_destroy>>;

/// Where the bits of a code begin: a byte of its block, and a bit of that.
struct Place {
  std::uint8_t byte, shift;
};

/// A type of ggml, as nibble sees it. A block is codes, and a head: everything else, contiguous.
struct Format {
  ggml_type type;
  const char* scheme;       // the same weights in nibble
  int length, bytes;        // weights and bytes of a block
  int group;                // weights that share a scale
  int head, head_bytes;     // where the head begins, and how long it is
  nib_dtype scale;          // of scales and offsets. f16: the head is one scale, and one offset where there are any
  bool offsets;             // the scheme has them
  int low_bits, high_bits;  // of a code; high_bits = 0: it is in one place
  std::array<Place, 256> low, high;
  void (*read_head)(const std::uint8_t* head, void* scales, void* offsets);  // length / group of each

  std::size_t row_bytes(std::int64_t k) const { return static_cast<std::size_t>(k / length) * static_cast<std::size_t>(bytes); }
};

/// Those that nibble can take.
std::span<const Format> formats();
/// The format of a type; null for a type whose numbers no scheme of nibble holds.
const Format* find_format(ggml_type type);

/// W[N,K] of N rows of K / length blocks, exactly. Null when nibble refuses: nib_last_error().
QTensor decode(const Format& format, std::int64_t n, std::int64_t k, const std::byte* blocks);

/// The heads of W[N,K], one after the other.
void copy_heads(const Format& format, std::int64_t n, std::int64_t k, const std::byte* blocks, std::byte* heads);

/// The inverse of decode, bit for bit. `heads` are those of copy_heads; of formats with scales in f16 they may be null. False when nibble
/// refuses: nib_last_error().
bool encode(const Format& format, const nib_qtensor* q, const std::byte* heads, std::byte* blocks);

}  // namespace nibble::ggml
