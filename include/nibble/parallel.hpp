// Threads: where nibble's parallel loops run. Results never depend on the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace nibble {

/// A borrowed callable `void(std::int64_t)`, the body of a loop. It neither owns nor allocates; valid during the call it is passed to.
class LoopBody {
 public:
  /// Borrows `body`, which must outlive this.
  template <class F, class = std::enable_if_t<!std::is_same_v<std::remove_cvref_t<F>, LoopBody>>>
  LoopBody(F&& body)  // NOLINT(google-explicit-constructor)
      : object_(const_cast<void*>(static_cast<const void*>(&body))),
        call_([](void* object, std::int64_t i) { (*static_cast<std::remove_reference_t<F>*>(object))(i); }) {}

  /// Calls it with iteration i.
  void operator()(std::int64_t i) const { call_(object_, i); }

 private:
  void* object_;
  void (*call_)(void*, std::int64_t);
};

/// Something that can run a loop on several threads. The default is nibble's own pool; an engine injects its own.
class Executor {
 public:
  virtual ~Executor() = default;
  /// How many threads parallel_for uses at most, the caller's included; ≥ 1.
  virtual int threads() const = 0;
  /// Calls body(i) once for every i in [0, count) and returns when all have finished. Calls may overlap in any order. A body may call
  /// parallel_for of the same executor if that is one of nibble's pools, which runs such a loop on the body's thread alone; or of another one,
  /// unless the bodies there call parallel_for of this one. When a call throws, calls that have not begun are skipped, and once the others
  /// have finished, parallel_for throws the first exception, whatever thread it was on.
  void parallel_for(std::int64_t count, LoopBody body);

 protected:
  /// The loop of parallel_for, for a body that never throws: what an executor implements.
  virtual void run(std::int64_t count, LoopBody body) = 0;
};

/// The process-wide pool: a thread for each of this_device().cores, or NIBBLE_NUM_THREADS. Its threads start with the first loop that
/// has more than one iteration. A child process after fork() has only the calling thread and starts its own in the same way.
Executor& default_executor();

/// A pool of `threads` threads, the caller's included, or of as many as the system gives: threads() says how many. A child process
/// after fork() starts its own threads with its first loop.
std::unique_ptr<Executor> make_executor(int threads);

}  // namespace nibble
