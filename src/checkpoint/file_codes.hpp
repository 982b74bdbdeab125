// The codes of a module in its file, decoded a block of rows at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "checkpoint/io/shards.hpp"
#include "checkpoint/io/stored_codes.hpp"
#include "core/buffer.hpp"
#include "core/code_rows.hpp"
#include "nibble/checkpoint.hpp"
#include "nibble/parallel.hpp"

namespace nibble {

class FileCodes final : public CodeSource {
 public:
  /// The codes of the tensor of that index, which has stored.stored_bytes(n) bytes from byte `begin` on. Where a block needs all of them, they are read now, on
  /// the threads of `executor`. nans: of which type NaN is counted; none: of no type.
  static Result<std::unique_ptr<FileCodes>> open(const storage::Shards& shards, std::size_t tensor, std::uint64_t begin,
                                                 const codec::StoredCodes& stored, DType nans, Executor& executor);

  std::int64_t block_rows() const override { return stored_.block_rows(); }
  Result<CodeRows> read(std::int64_t begin, std::int64_t end, std::vector<std::uint8_t>& memory) const override;

  /// Of the rows that have been read: how many weights are NaN, and the first one, n·K + k, with its code.
  struct Nans {
    std::int64_t count, first;
    std::uint8_t code;
  };
  Nans nans() const { return {nan_count_, first_nan_ / 256, static_cast<std::uint8_t>(first_nan_ % 256)}; }

 private:
  FileCodes(const storage::Shards& shards, std::size_t tensor, std::uint64_t begin, const codec::StoredCodes& stored, DType nans)
      : shards_(shards), tensor_(tensor), begin_(begin), stored_(stored), nans_(nans) {}
  Status load(std::int64_t first, std::span<std::byte> to) const;
  void count_nans(const CodeRows& rows) const;

  const storage::Shards& shards_;
  std::size_t tensor_;
  std::uint64_t begin_;  // in the tensor
  codec::StoredCodes stored_;
  DType nans_;
  Buffer whole_;                                                           // unless rows are pieces of the tensor
  mutable std::atomic<std::int64_t> nan_count_{0}, first_nan_{INT64_MAX};  // the latter times 256, plus its code
};

/// A module without its codes, and the source of them, which belongs to the checkpoint: that has to live as long.
struct OpenModule {
  QuantTensor q;
  std::unique_ptr<FileCodes> codes;
};

}  // namespace nibble
