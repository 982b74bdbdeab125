// A weight of ggml, packed for nibble.
#pragma once

#include <vector>

#include "blocks.hpp"

namespace nibble::ggml {

/// The rows of A that a plan takes at a time: llama.cpp's default for tokens of a step; of experts, those tokens with eight experts each.
constexpr std::int64_t kMaxRows = 512, kMaxExpertRows = 8 * kMaxRows;

/// Tells ggml's log, as an error of the backend.
void log_error(const char* what, const char* reason);

/// W[N,K], or E of them, a layer's experts, which ggml reads and writes as blocks. The packed weight is the only copy: blocks are kept in
/// `memory`, which the buffer of the tensor has for them, only until they are packed, or where that failed. Reading them back is exact.
/// Immutable between writes.
class Weight {
 public:
  /// The weight of a tensor. `memory` has room for its blocks and holds the first ones. `act_scheme`: how activations are quantized; null: not.
  Weight(const ggml_tensor& tensor, std::byte* memory, const char* act_scheme)
      : format_(*find_format(tensor.type)),
        n_(tensor.ne[1]),
        k_(tensor.ne[0]),
        memory_(memory),
        act_scheme_(act_scheme),
        matrices_(static_cast<std::size_t>(tensor.ne[2])),
        heads_(matrices_.size() * matrix_heads()) {}

  std::size_t bytes() const { return matrices_.size() * matrix_bytes(); }
  /// Replaces `size` bytes of the blocks from `offset` on, and packs the matrices that they are of. What fails is in ggml's log, and packed()
  /// is false, as it is until each matrix has been written.
  void write(const std::byte* data, std::size_t offset, std::size_t size);
  /// Packs the blocks in `memory`; what fails is in ggml's log.
  void load() { write(memory_, 0, bytes()); }
  /// Copies `size` bytes of the blocks from `offset` on.
  void read(std::byte* data, std::size_t offset, std::size_t size) const;

  bool packed() const { return plan_ != nullptr || grouped_plan_ != nullptr; }
  std::int64_t n() const { return n_; }
  std::int64_t k() const { return k_; }
  /// Bytes of scratch memory of run and run_experts.
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  /// D[M,N] = A[M,K]·Wᵀ of a matrix, dense rows of D, rows of A `a_stride` floats apart. False when nibble refuses: nib_last_error().
  bool run(const nib_context* context, const float* a, std::int64_t a_stride, std::int64_t m, float* d,
           std::byte* workspace) const;
  /// D[T·top_k,N]: of each expert ids[T,top_k] the product with its token's row of A[T,K], or with its own of A[T·top_k,K]. Dense rows; false
  /// as of run.
  bool run_experts(const nib_context* context, const float* a, std::int64_t a_rows, const nib_view& ids, float* d,
                   std::byte* workspace) const;

 private:
  std::size_t matrix_bytes() const { return static_cast<std::size_t>(n_) * format_.row_bytes(k_); }
  /// Bytes of the heads that have to be kept.
  std::size_t matrix_heads() const {
    return format_.scale == NIB_F16
               ? 0
               : static_cast<std::size_t>(n_ * (k_ / format_.length)) * static_cast<std::size_t>(format_.head_bytes);
  }
  void read_matrix(std::size_t i, std::byte* blocks) const;
  bool pack(std::size_t i, const std::byte* blocks);
  bool plan();

  const Format& format_;
  std::int64_t n_, k_;
  std::byte* memory_;
  const char* act_scheme_;
  std::vector<std::unique_ptr<nib_weight, Destroy<nib_weight_destroy>>> matrices_;  // null: its blocks are in memory_
  std::unique_ptr<nib_plan, Destroy<nib_plan_destroy>> plan_;                       // of one matrix
  std::unique_ptr<nib_experts, Destroy<nib_experts_destroy>> experts_;              // the matrices, if there are several
  std::unique_ptr<nib_grouped_plan, Destroy<nib_grouped_plan_destroy>> grouped_plan_;
  std::vector<std::byte> heads_;  // of formats whose scales are products
  std::size_t workspace_bytes_ = 0;
};

}  // namespace nibble::ggml
