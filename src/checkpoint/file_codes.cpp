#include "checkpoint/file_codes.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <mutex>
#include <span>
#include <utility>

#include "core/error.hpp"

namespace nibble {
namespace {

bool is_nan(DType type, std::uint8_t code) { return std::isnan(code_value(type, code)); }

/// The smallest code of a type that is NaN, without its sign; those above it are NaN too.
int first_nan(DType type) {
  int code = 128;
  while (code > 0 && is_nan(type, static_cast<std::uint8_t>(code - 1))) --code;
  return code;
}

}  // namespace

Result<std::unique_ptr<FileCodes>> FileCodes::open(const storage::Shards& shards, std::size_t tensor, std::uint64_t begin,
                                                   const codec::StoredCodes& stored, DType nans, Executor& executor) {
  std::unique_ptr<FileCodes> codes(new FileCodes(shards, tensor, begin, stored, nans));
  if (stored.by_rows()) return codes;
  constexpr std::size_t kPiece = kHugePage;  // of a task
  codes->whole_ = Buffer(static_cast<std::size_t>(stored.stored_bytes(stored.n)));
  const std::span<std::byte> whole = codes->whole_.span();
  std::mutex mutex;
  Status failed;
  executor.parallel_for(static_cast<std::int64_t>((whole.size() + kPiece - 1) / kPiece), [&](std::int64_t i) {
    const std::size_t first = static_cast<std::size_t>(i) * kPiece;
    Status read = codes->load(static_cast<std::int64_t>(first), whole.subspan(first, std::min(kPiece, whole.size() - first)));
    if (read.ok()) return;
    const std::lock_guard lock(mutex);
    failed = std::move(read);
  });
  NIBBLE_RETURN_IF_ERROR(failed);
  return codes;
}

Status FileCodes::load(std::int64_t first, std::span<std::byte> to) const {
  return shards_.file[tensor_]->read(shards_.tensors[tensor_].file_offset + begin_ + static_cast<std::uint64_t>(first), to);
}

Result<CodeRows> FileCodes::read(std::int64_t begin, std::int64_t end, std::vector<std::uint8_t>& memory) const {
  const std::size_t decoded = stored_.decoded_bytes(end - begin);
  const std::int64_t first = stored_.stored_bytes(begin);
  const std::size_t bytes = stored_.by_rows() ? static_cast<std::size_t>(stored_.stored_bytes(end) - first) : 0;
  if (memory.size() < decoded + bytes) memory.resize(decoded + bytes);
  const std::byte* from = whole_.data();
  if (stored_.by_rows()) {
    const std::span stored = std::as_writable_bytes(std::span(memory).subspan(decoded, bytes));
    NIBBLE_RETURN_IF_ERROR(load(first, stored));
    from = stored.data();
  }
  const CodeRows rows = stored_.decode(from, begin, end, memory.data());
  if (nans_ != DType::none) count_nans(rows);
  return rows;
}

void FileCodes::count_nans(const CodeRows& rows) const {
  const int nan = first_nan(nans_);
  for (std::int64_t n = rows.begin; n < rows.end; ++n) {
    const std::uint8_t* const row = rows.row(n);
    std::int64_t count = 0;
    for (std::int64_t k = 0; k < stored_.k; ++k) count += (row[k] & 0x7f) >= nan;
    if (count == 0) continue;
    nan_count_ += count;
    const std::uint8_t* const at = std::find_if(row, row + stored_.k, [&](std::uint8_t code) { return (code & 0x7f) >= nan; });
    const std::int64_t first = (n * stored_.k + (at - row)) * 256 + *at;
    std::int64_t seen = first_nan_;
    while (first < seen && !first_nan_.compare_exchange_weak(seen, first)) {
    }
  }
}

}  // namespace nibble
