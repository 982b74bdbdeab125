#include "experts/shares.hpp"

#include <algorithm>
#include <memory>
#include <thread>

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

void TeamMember::run(std::int64_t count, LoopBody body) {
  constexpr int kSpins = 1000;  // an iteration takes microseconds, unless its thread has lost its core
  Team::Loop& loop = team_.loops.at(loop_++);
  for (std::int64_t i; (i = loop.taken.fetch_add(1, std::memory_order_relaxed)) < count;) {
    body(i);
    loop.ended.fetch_add(1, std::memory_order_release);
  }
  for (int turn = 0; loop.ended.load(std::memory_order_acquire) < count; ++turn)
    if (turn >= kSpins) std::this_thread::yield();
}

Shares::Shares(const Sizes& sizes, int threads, std::span<const Plan* const> plans) : threads_(threads), experts_(sizes.experts) {
  // An even part of the work of all rows: at most one share for each thread has more.
  const std::int64_t even = (sizes.rows + kRowsOfReading * std::min(sizes.experts, sizes.rows)) / threads;
  small_rows_ = std::clamp<std::int64_t>(even, 1, sizes.expert_rows);
  for (const Plan* plan : plans) {
    scratch_ = std::max(scratch_, plan->workspace_bytes());
    small_bytes_ = std::max(small_bytes_, most_bytes(*plan, small_rows_));
  }
  scratch_ += static_cast<std::size_t>(sizes.expert_rows) * sizes.row_bytes;
  small_bytes_ += static_cast<std::size_t>(small_rows_) * sizes.row_bytes;
  scratch_ = std::max(scratch_, static_cast<std::size_t>(threads) * small_bytes_);
}

std::size_t Shares::workspace_bytes() const { return static_cast<std::size_t>(experts_) * sizeof(Team) + scratch_; }

std::span<Team> Shares::teams(std::size_t count, std::span<std::byte>& workspace) const {
  const std::span<Team> teams(reinterpret_cast<Team*>(workspace.data()), count);
  std::uninitialized_default_construct(teams.begin(), teams.end());
  workspace = workspace.subspan(static_cast<std::size_t>(experts_) * sizeof(Team));
  return teams;
}

}  // namespace nibble::experts
