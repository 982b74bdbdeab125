// The codes of a module in its file, decoded a block at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "checkpoint/io/mapped_file.hpp"
#include "checkpoint/io/stored_codes.hpp"
#include "core/code_rows.hpp"
#include "nibble/checkpoint.hpp"

namespace nibble {

class FileCodes final : public CodeSource {
 public:
  /// The codes in the stored.stored_bytes() bytes of the file from `first_byte` on. nans: of which type NaN is counted; none: of no type.
  FileCodes(const storage::MappedFile& file, std::uint64_t first_byte, const codec::StoredCodes& stored, DType nans)
      : file_(file), first_byte_(first_byte), stored_(stored), nans_(nans) {}

  bool in_bands() const override { return stored_.in_bands(); }
  std::int64_t block() const override { return stored_.block(); }
  Result<CodeRows> read(std::int64_t begin, std::int64_t end, std::vector<std::uint8_t>& memory) const override;

  /// Of the rows that have been read: how many weights are NaN, and the first one, n·K + k, with its code.
  struct Nans {
    std::int64_t count, first;
    std::uint8_t code;
  };
  Nans nans() const { return {nan_count_, first_nan_ / 256, static_cast<std::uint8_t>(first_nan_ % 256)}; }

 private:
  void count_nans(const CodeRows& rows) const;

  const storage::MappedFile& file_;
  std::uint64_t first_byte_;
  codec::StoredCodes stored_;
  DType nans_;
  mutable std::atomic<std::int64_t> nan_count_{0}, first_nan_{INT64_MAX};  // the latter times 256, plus its code
};

/// A module without its codes, and the source of them, which belongs to the checkpoint: that has to live as long.
struct OpenModule {
  QuantTensor q;
  std::unique_ptr<FileCodes> codes;
};

}  // namespace nibble
