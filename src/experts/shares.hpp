// The rows of experts as work for threads.
//
//   rows in the order of experts    │ expert 0 │ 2 │      expert 5       │7│    experts without rows have no share
//                                   ├──────────┼───┼─────────────────────┼─┤
//   threads                          side by side     one after the other, each by all threads
//
// A share that takes longer than an even part of all work is divided among all threads; the others run side by side, a thread each, so that
// each core reads a weight of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>

#include "nibble/parallel.hpp"
#include "nibble/plan.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble::experts {

/// Rows [first, first + rows) of the sorted order are expert `expert`'s.
struct Share {
  std::int64_t expert = 0, first = 0, rows = 0;
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

  /// Of all tasks.
  std::size_t workspace_bytes() const { return workspace_; }

  /// Calls task(share, executor, scratch memory) for each share. Returns the first error; the other shares may have run.
  template <class Task>
  Status run(std::span<const Share> shares, std::span<std::byte> workspace, Executor& executor, Task task) const;

 private:
  bool runs_alone(const Share& share, std::span<const Share> all, int threads) const;

  int threads_ = 1;              // that run shares side by side, at most
  std::int64_t small_rows_ = 0;  // of a share that runs beside others, at most
  std::size_t small_bytes_ = 0;  // of its scratch memory
  std::size_t workspace_ = 0;
};

/// Runs loops on the calling thread.
class OneThread final : public Executor {
 public:
  int threads() const override { return 1; }

 protected:
  void run(std::int64_t count, LoopBody body) override {
    for (std::int64_t i = 0; i < count; ++i) body(i);
  }
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
  const int threads = executor.threads() < threads_ ? executor.threads() : threads_;
  std::int64_t beside = 0;
  for (const Share& share : shares) {
    if (!runs_alone(share, shares, threads))
      ++beside;
    else if (Status status = task(share, executor, workspace); !status.ok())
      return status;
  }
  if (beside == 0) return {};
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  Status first;
  executor.parallel_for(beside < threads ? beside : threads, [&](std::int64_t worker) {
    OneThread alone;
    const std::span<std::byte> own = workspace.subspan(static_cast<std::size_t>(worker) * small_bytes_, small_bytes_);
    for (std::size_t i = next++; i < shares.size(); i = next++) {
      if (runs_alone(shares[i], shares, threads)) continue;
      Status status = task(shares[i], alone, own);
      if (status.ok()) continue;
      const std::lock_guard lock(mutex);
      if (first.ok()) first = std::move(status);
    }
  });
  return first;
}

}  // namespace nibble::experts
