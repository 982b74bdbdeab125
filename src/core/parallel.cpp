#include "nibble/parallel.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "nibble/device.hpp"

namespace nibble {
namespace {

/// Workers spin for a while after each loop, because the next layer's loop usually follows within microseconds − after one thread
/// has prepared its activations − and waking a parked thread takes tens of them. Then they park. 4000 pauses are about 50 µs.
constexpr int kSpins = 4000;
/// In between they offer the core to whoever else wants it.
constexpr int kSpinsPerYield = 256;

/// One turn of a waiting loop.
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

class Pool final : public Executor {
 public:
  explicit Pool(int threads) : threads_(std::max(1, threads)) {
    for (int i = 1; i < threads_; ++i) workers_.emplace_back([this](const std::stop_token& stop) { work(stop); });
  }

  ~Pool() override {
    for (std::jthread& worker : workers_) worker.request_stop();
    {
      const std::lock_guard lock(park_);
      stopping_ = true;
    }
    wake_.notify_all();
  }

  int threads() const override { return threads_; }

  void parallel_for(std::int64_t count, LoopBody body) override {
    if (threads_ == 1 || count <= 1) {
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
    // Whoever has not come by now is not waited for: it may be asleep, or its core another program's.
    gate_.fetch_add(kOpen, std::memory_order_relaxed);
    for (int turn = 0; (gate_.load(std::memory_order_acquire) & kInside) != 0; ++turn)
      turn < kSpins ? spin(turn) : std::this_thread::yield();
  }

 private:
  /// The gate of a loop: how many workers are inside, and above that a count that is odd while the loop is open. A worker goes in
  /// by compare and exchange, so never into a loop that has been closed; body_ and count_ are read inside only.
  static constexpr std::uint64_t kOpen = std::uint64_t{1} << 16, kInside = kOpen - 1;
  static bool is_open(std::uint64_t gate) { return (gate & kOpen) != 0; }

  void run_share() {
    for (;;) {
      const std::int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= count_) return;
      (*body_)(i);
    }
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
      if (!gate_.compare_exchange_strong(gate, gate + 1, std::memory_order_acquire)) continue;  // closed, or another went in
      seen = gate / kOpen;
      run_share();
      gate_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int threads_;
  std::mutex loop_;  // one parallel_for at a time

  const LoopBody* body_ = nullptr;  // published by gate_
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::atomic<std::uint64_t> gate_{0};

  std::mutex park_;
  std::condition_variable wake_;
  bool stopping_ = false;

  std::vector<std::jthread> workers_;
};

int default_threads() {
  if (const char* text = std::getenv("NIBBLE_NUM_THREADS")) {
    const int n = std::atoi(text);
    if (n >= 1 && n <= 4096) return n;
  }
  return this_device().cores;
}

}  // namespace

Executor& default_executor() {
  static Pool pool(default_threads());
  return pool;
}

std::unique_ptr<Executor> make_executor(int threads) { return std::make_unique<Pool>(threads); }

}  // namespace nibble
