// nibble._core: loops on the threads of PyTorch.
//
// PyTorch's operators run on threads of an OpenMP library, which spin for milliseconds behind each loop while they wait for the next one. A
// second pool beside them gets half of every core. So the loops of both run on the same threads: those of `GOMP_parallel`, the entry of GNU's
// OpenMP library, which LLVM's and Intel's have, too.
#include "threads.hpp"

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace nibble::python {
namespace {

using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
using MaxThreads = int (*)();

class OpenMp final : public Executor {
 public:
  OpenMp(Parallel parallel, MaxThreads max_threads) : parallel_(parallel), max_threads_(max_threads) {}

  int threads() const override { return max_threads_(); }

 private:
  void run(std::int64_t count, LoopBody body) override {
    struct Loop {
      LoopBody body;
      std::int64_t count;
      std::atomic<std::int64_t> next = 0;
    } loop{body, count};
    const auto share = [](void* data) {
      auto& l = *static_cast<Loop*>(data);
      for (std::int64_t i; (i = l.next.fetch_add(1, std::memory_order_relaxed)) < l.count;) l.body(i);
    };
    // Always all of them: a team of another size is made anew.
    count > 1 && threads() > 1 ? parallel_(share, &loop, 0, 0) : share(&loop);
  }

  Parallel parallel_;
  MaxThreads max_threads_;
};

std::atomic<Executor*> shared{nullptr};

/// `parallel` and `max_threads`: the addresses of GOMP_parallel and omp_get_max_threads of the library that PyTorch is linked with.
void share_openmp(std::uintptr_t parallel, std::uintptr_t max_threads) {
  // A child process has none of the threads, and the library would wait for them: nibble's own pool starts anew there.
  static const bool counts_forks = pthread_atfork(nullptr, nullptr, [] { shared.store(nullptr); }) == 0;
  if (!counts_forks) return;
  static OpenMp threads(reinterpret_cast<Parallel>(parallel), reinterpret_cast<MaxThreads>(max_threads));
  shared.store(&threads);
}

}  // namespace

Executor* shared_threads() { return shared.load(std::memory_order_relaxed); }

void bind_threads(nb::module_& m) {
  using namespace nb::literals;
  m.def("share_openmp", &share_openmp, "parallel"_a, "max_threads"_a,
        "Runs the loops of calls on OpenMP's threads, by the addresses of GOMP_parallel and omp_get_max_threads.");
}

}  // namespace nibble::python
