// A weight of ggml, packed for nibble.
#pragma once

#include <vector>

#include "blocks.hpp"

namespace nibble::ggml {

/// The rows of A that a plan takes at a time: llama.cpp's default for tokens of a step.
constexpr std::int64_t kMaxRows = 512;

/// Tells ggml's log, as an error of the backend.
void log_error(const char* what, const char* reason);

/// W[N,K], which ggml reads and writes as blocks. The packed weight is the only copy: blocks are kept in `memory`, which the buffer of
/// the tensor has for them, only until they are packed, or where that failed. Reading them back is exact. Immutable between writes.
class Weight {
 public:
  /// `memory` has room for the blocks and holds the first ones. `act_scheme`: how activations are quantized; null: not.
  Weight(const Format& format, std::int64_t n, std::int64_t k, std::byte* memory, const char* act_scheme)
      : format_(format), n_(n), k_(k), memory_(memory), act_scheme_(act_scheme) {}

  std::size_t bytes() const { return static_cast<std::size_t>(n_) * format_.row_bytes(k_); }
  /// Replaces `size` bytes of the blocks from `offset` on, and packs the weight. What fails is in ggml's log, and packed() is false.
  void write(const std::byte* data, std::size_t offset, std::size_t size);
  /// Packs the blocks in `memory`; what fails is in ggml's log.
  void load() { write(memory_, 0, bytes()); }
  /// Copies `size` bytes of the blocks from `offset` on.
  void read(std::byte* data, std::size_t offset, std::size_t size) const;

  bool packed() const { return plan_ != nullptr; }
  std::int64_t n() const { return n_; }
  std::int64_t k() const { return k_; }
  /// Bytes of scratch memory of run.
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  /// D[M,N] = A[M,K]·Wᵀ, dense rows of D, rows of A `a_stride` floats apart. False when nibble refuses: nib_last_error().
  bool run(const nib_context* context, const float* a, std::int64_t a_stride, std::int64_t m, float* d,
           std::byte* workspace) const;

 private:
  bool pack(const std::byte* blocks);

  const Format& format_;
  std::int64_t n_, k_;
  std::byte* memory_;
  const char* act_scheme_;
  std::unique_ptr<nib_weight, Destroy<nib_weight_destroy>> weight_;
  std::unique_ptr<nib_plan, Destroy<nib_plan_destroy>> plan_;
  std::vector<std::byte> heads_;  // of formats whose scales are products
  std::size_t workspace_bytes_ = 0;
};

}  // namespace nibble::ggml
