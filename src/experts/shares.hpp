// The rows of experts as work for threads.
//
//   rows in the order of experts   │ expert 0 │ 2 │      expert 5       │7│     experts without rows have no share
//
//   thread 0   ├── expert 0 ──┤├── expert 7 ──┤├ 5 ┤
//   thread 1   ├──────────── expert 5 ─────────────┤     a thread that finds no share to begin joins one under way
//   thread 2   ├─── expert 2 ───┤├─────── 5 ───────┤
//
// A task of a share runs on each of its threads. What it computes outside of its loops, every one of them computes, and writes to memory that
// is its own; the iterations of each loop are divided as threads come for them, and a loop ends for all when its last iteration has. So no thread
// waits for one that has not come, each core reads a weight of its own while there are enough of them, and all cores end together.
// A share of more rows than the scratch memory of a thread is for runs before the others, by all threads.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>

#include "nibble/parallel.hpp"
#include "nibble/plan.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble::experts {

/// The most loops of a task: a gather and five steps of each of two plans.
constexpr std::size_t kMostLoops = 12;

/// The threads of a share: the iterations of its loops, in order, that have been taken and that have ended.
struct alignas(64) Team {
  struct Loop {
    std::atomic<std::int64_t> taken = 0, ended = 0;
  };
  std::array<Loop, kMostLoops> loops;
  std::atomic<const std::byte*> scratch = nullptr;  // once the share has begun
  std::atomic<bool> done = false;
};

/// Rows [first, first + rows) of the sorted order are expert `expert`'s.
struct Share {
  std::int64_t expert = 0, first = 0, rows = 0;
};

/// What a member of a team runs loops on: every member runs the same ones in the same order.
class TeamMember final : public Executor {
 public:
  /// threads: that may come at most.
  TeamMember(Team& team, int threads) : team_(team), threads_(threads) {}
  int threads() const override { return threads_; }

 protected:
  void run(std::int64_t count, LoopBody body) override;

 private:
  Team& team_;
  std::size_t loop_ = 0;
  int threads_;
};

/// The order in which shares run, and the scratch memory for it.
class Shares {
 public:
  Shares() = default;
  /// Of how many rows there are, and of what a task needs.
  struct Sizes {
    std::int64_t experts;
    std::int64_t rows;         // of all experts
    std::int64_t expert_rows;  // the most of one
    std::size_t row_bytes;     // of scratch memory that a task has for each of its rows beside the plans', whole cache lines
  };
  /// By up to so many threads, with these plans of an expert's rows.
  Shares(const Sizes& sizes, int threads, std::span<const Plan* const> plans);

  /// Of all tasks, and of the teams.
  std::size_t workspace_bytes() const;

  /// Calls task(share, executor, scratch memory) for each share, on several threads at once, which write outside of the executor's loops to
  /// memory of their own only. Returns the first error; the other shares may have run.
  template <class Task>
  Status run(std::span<const Share> shares, std::span<std::byte> workspace, Executor& executor, Task task) const;

 private:
  std::span<Team> teams(std::size_t count, std::span<std::byte>& workspace) const;

  int threads_ = 1;  // that have scratch memory
  std::int64_t experts_ = 0;
  std::int64_t small_rows_ = 0;  // of a share that runs beside others, at most
  std::size_t small_bytes_ = 0;  // of its scratch memory
  std::size_t scratch_ = 0;      // of all threads
};

/// Rows [first, first + count) of a matrix or vector; of an absent one nothing.
template <class View>
View rows_of(const View& view, std::int64_t first, std::int64_t count) {
  if (view.empty()) return view;
  View part = view;
  using Byte = std::conditional_t<std::is_same_v<View, TensorView>, std::byte, const std::byte>;
  part.data = static_cast<Byte*>(view.data) + first * view.stride(0) * bits(view.dtype) / 8;
  part.shape[0] = count;
  return part;
}

template <class Task>
Status Shares::run(std::span<const Share> shares, std::span<std::byte> workspace, Executor& executor, Task task) const {
  const std::span<Team> teams = this->teams(shares.size(), workspace);
  const int threads = std::min(executor.threads(), threads_);
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i].rows <= small_rows_) continue;
    NIBBLE_RETURN_IF_ERROR(task(shares[i], executor, workspace));
    teams[i].done = true;
  }
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  Status first;
  executor.parallel_for(threads, [&](std::int64_t worker) {
    const auto work_on = [&](std::size_t i, const std::byte* scratch) {
      TeamMember member(teams[i], threads);
      const auto at = static_cast<std::size_t>(scratch - workspace.data());
      Status status = task(shares[i], member, workspace.subspan(at, small_bytes_));
      teams[i].done.store(true, std::memory_order_relaxed);
      if (status.ok()) return;
      const std::lock_guard lock(mutex);
      if (first.ok()) first = std::move(status);
    };
    const std::byte* const own = workspace.data() + static_cast<std::size_t>(worker) * small_bytes_;
    for (std::size_t i = next++; i < shares.size(); i = next++) {
      if (teams[i].done.load(std::memory_order_relaxed)) continue;
      teams[i].scratch.store(own, std::memory_order_release);
      work_on(i, own);
    }
    for (std::size_t j = 0; j < shares.size(); ++j) {
      const std::size_t i = (static_cast<std::size_t>(worker) + j) % shares.size();
      const std::byte* const scratch = teams[i].scratch.load(std::memory_order_acquire);
      if (scratch != nullptr && !teams[i].done.load(std::memory_order_relaxed)) work_on(i, scratch);
    }
  });
  return first;
}

}  // namespace nibble::experts
