// Threads: where nibble's parallel loops run. Results never depend on the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace nibble {

/// A borrowed callable `void(std::int64_t)`: what a loop runs. Never owns, never allocates; valid during the call it is passed to.
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
  /// Calls body(i) once for every i in [0, count) and returns when all have finished. `body` does not throw.
  /// Calls may overlap in any order; a body may not call parallel_for of the same executor.
  virtual void parallel_for(std::int64_t count, LoopBody body) = 0;
};

/// The process-wide pool: one thread per core the process may run on, or NIBBLE_NUM_THREADS. Created on first use.
Executor& default_executor();

/// A pool of exactly `threads` threads (the caller's included). Throws std::system_error if threads cannot be created.
std::unique_ptr<Executor> make_executor(int threads);

}  // namespace nibble
