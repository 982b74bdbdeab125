#include "experts/shares.hpp"

#include <algorithm>

#include "core/buffer.hpp"

namespace nibble::experts {
namespace {

/// Reading an expert's weight takes a core about as long as multiplying it by so many rows.
constexpr std::int64_t kRowsOfReading = 8;

/// The most scratch memory of a plan's runs of up to `rows` rows.
std::size_t most_bytes(const Plan& plan, std::int64_t rows) {
  std::size_t most = 0;
  for (const Explanation::Bucket& bucket : plan.explain().buckets)
    if (bucket.m_low <= rows) most = std::max(most, plan.workspace_bytes(std::min(bucket.m_high, rows)));
  return (most + Buffer::kAlignment - 1) / Buffer::kAlignment * Buffer::kAlignment;
}

}  // namespace

Shares::Shares(const Sizes& sizes, int threads, std::span<const Plan* const> plans) : threads_(threads) {
  // With an even part of the work of all rows, the most that runs_alone() leaves.
  const std::int64_t even = (sizes.rows + kRowsOfReading * std::min(sizes.experts, sizes.rows)) / threads;
  small_rows_ = std::min(sizes.expert_rows, even);
  for (const Plan* plan : plans) {
    workspace_ = std::max(workspace_, plan->workspace_bytes());
    small_bytes_ = std::max(small_bytes_, most_bytes(*plan, small_rows_));
  }
  workspace_ += static_cast<std::size_t>(sizes.expert_rows) * sizes.row_bytes;
  small_bytes_ += static_cast<std::size_t>(small_rows_) * sizes.row_bytes;
  workspace_ = std::max(workspace_, static_cast<std::size_t>(threads) * small_bytes_);
}

bool Shares::runs_alone(const Share& share, std::span<const Share> all, int threads) const {
  const std::int64_t each = kRowsOfReading * static_cast<std::int64_t>(all.size());
  const std::int64_t rows = all.back().first + all.back().rows - all.front().first;
  if (threads == 1 || share.rows > small_rows_) return true;
  return static_cast<std::int64_t>(all.size()) < 2 * threads || (share.rows + kRowsOfReading) * threads > rows + each;
}

}  // namespace nibble::experts
