#include "nibble/parallel.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/environment.hpp"
#include "nibble/device.hpp"

namespace nibble {
namespace {

/// Workers spin for a while after each loop, because the next layer's loop usually follows within microseconds, once one thread has
/// prepared its activations, and waking a parked thread takes tens of microseconds. Then they park. 4000 pauses are about 50 µs.
constexpr int kSpins = 4000;
/// In between they yield the core to other threads.
constexpr int kSpinsPerYield = 256;

/// One iteration of a waiting loop.
void spin(int turn) {
  if (turn % kSpinsPerYield == kSpinsPerYield - 1) {
    std::this_thread::yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// The number of fork()s between the first process and this one. A child process has only the calling thread: locks that other threads of
/// the parent held stay locked, and those threads cannot be joined.
std::atomic<unsigned> forks{0};

/// Whether forks are counted from now on.
bool counts_forks() {
  static const bool counts = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); }) == 0;
  return counts;
}

class Team;
/// The team whose loop this thread runs a share of.
thread_local const Team* t_inside = nullptr;

/// The threads of a pool in one process.
class Team {
 public:
  ~Team() {
    for (std::jthread& worker : workers_) worker.request_stop();
    {
      const std::lock_guard lock(park_);
      stopping_ = true;
    }
    wake_.notify_all();
  }

  /// Whether its threads are those of this process.
  bool is_here() const { return born_ == forks.load(std::memory_order_relaxed); }

  /// The number of threads, the caller's included, after start().
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Starts as many workers as the system gives, unless they have been started.
  void start(int threads) {
    if (started_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(loop_);
    if (started_.load(std::memory_order_relaxed)) return;
    try {
      if (counts_forks()) workers_.reserve(static_cast<std::size_t>(threads) - 1);
      while (workers_.size() < workers_.capacity()) workers_.emplace_back([this](const std::stop_token& stop) { work(stop); });
    } catch (const std::exception&) {  // no more threads, or no memory
    }
    started_.store(true, std::memory_order_release);
  }

  void run(std::int64_t count, LoopBody body) {
    if (t_inside == this) {  // a loop within a loop
      for (std::int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    const std::lock_guard one_loop_at_a_time(loop_);
    body_ = &body;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    {
      const std::lock_guard lock(park_);  // a worker about to park sees the new loop or is woken
      gate_.fetch_add(kOpen, std::memory_order_release);
    }
    wake_.notify_all();
    run_share();
    // Closes the loop: workers that have not joined yet are skipped; they may be asleep, or another program has their core.
    gate_.fetch_add(kOpen, std::memory_order_relaxed);
    for (int turn = 0; (gate_.load(std::memory_order_acquire) & kInside) != 0; ++turn)
      turn < kSpins ? spin(turn) : std::this_thread::yield();
  }

  Team* left_behind = nullptr;  // the parent process's, whose threads do not exist here; never destroyed

 private:
  /// The gate of a loop: how many workers are inside, and above that a count that is odd while the loop is open. A worker enters by
  /// compare and exchange, so never a loop that has been closed; body_ and count_ are read only inside.
  static constexpr std::uint64_t kOpen = std::uint64_t{1} << 16, kInside = kOpen - 1;
  static bool is_open(std::uint64_t gate) { return (gate & kOpen) != 0; }

  void run_share() {
    const Team* const outer = std::exchange(t_inside, this);
    for (std::int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) (*body_)(i);
    t_inside = outer;
  }

  void work(const std::stop_token& stop) {
    std::uint64_t seen = 0;  // the count of the last loop
    for (;;) {
      const auto is_new = [&](std::uint64_t gate) { return is_open(gate) && gate / kOpen != seen; };
      std::uint64_t gate = gate_.load(std::memory_order_relaxed);
      for (int spins = 0; !is_new(gate); gate = gate_.load(std::memory_order_relaxed)) {
        if (stop.stop_requested()) return;
        if (++spins < kSpins) {
          spin(spins);
          continue;
        }
        std::unique_lock lock(park_);
        wake_.wait(lock, [&] { return stopping_ || is_new(gate_.load(std::memory_order_relaxed)); });
        if (stopping_) return;
      }
      if (!gate_.compare_exchange_strong(gate, gate + 1, std::memory_order_acquire))
        continue;  // closed, or another worker entered
      seen = gate / kOpen;
      run_share();
      gate_.fetch_sub(1, std::memory_order_release);
    }
  }

  const unsigned born_ = forks.load(std::memory_order_relaxed);
  std::mutex loop_;  // one loop at a time
  std::atomic<bool> started_{false};

  const LoopBody* body_ = nullptr;  // published by gate_
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::atomic<std::uint64_t> gate_{0};

  std::mutex park_;
  std::condition_variable wake_;
  bool stopping_ = false;

  std::vector<std::jthread> workers_;
};

class Pool final : public Executor {
 public:
  explicit Pool(int threads) : threads_(std::max(1, threads)) {}

  ~Pool() override {
    Team* const team = team_.load(std::memory_order_acquire);
    if (team != nullptr && team->is_here()) delete team;
  }

  int threads() const override { return threads_.load(std::memory_order_relaxed); }

  /// Starts the threads; the first loop does so too.
  Team& start() {
    Team* team = team_.load(std::memory_order_acquire);
    while (team == nullptr || !team->is_here()) {
      auto own = std::make_unique<Team>();
      own->left_behind = team;
      if (team_.compare_exchange_strong(team, own.get(), std::memory_order_acq_rel)) team = own.release();
    }
    team->start(threads());
    if (team->threads() != threads()) threads_.store(team->threads(), std::memory_order_relaxed);
    return *team;
  }

 private:
  void run(std::int64_t count, LoopBody body) override {
    if (threads() > 1 && count > 1) return start().run(count, body);
    for (std::int64_t i = 0; i < count; ++i) body(i);
  }

  std::atomic<int> threads_;  // the requested number, then the actual one
  std::atomic<Team*> team_{nullptr};
};

}  // namespace

void Executor::parallel_for(std::int64_t count, LoopBody body) {
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  run(count, [&](std::int64_t i) {
    if (failed.load(std::memory_order_relaxed)) return;
    try {
      body(i);
    } catch (...) {
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

Executor& default_executor() {
  static Pool pool([] {
    const auto wanted = threads_of_environment();  // check_environment() reports the error
    return wanted.ok() ? wanted->value_or(this_device().cores) : this_device().cores;
  }());
  return pool;
}

std::unique_ptr<Executor> make_executor(int threads) {
  auto pool = std::make_unique<Pool>(threads);
  if (threads > 1) pool->start();
  return pool;
}

}  // namespace nibble
