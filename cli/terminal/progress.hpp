// A progress bar on stderr for work that takes long, and only when a person is watching.
#pragma once

#include <signal.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "nibble/checkpoint.hpp"

namespace nibble::cli {

/// Draws nothing unless stderr is a terminal and the work has gone on for half a second; wipes its line when destroyed.
class ProgressBar {
 public:
  explicit ProgressBar(std::string title);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void update(std::uint64_t done, std::uint64_t total, std::string_view what);
  /// For TransformOptions::progress. Also the place where Ctrl-C takes effect: see Interruptible.
  Progress callback();

 private:
  using Clock = std::chrono::steady_clock;
  std::string title_;
  Clock::time_point start_ = Clock::now(), drawn_{};
  bool enabled_ = false, visible_ = false;
};

/// Thrown out of a progress callback when the user pressed Ctrl-C, so that unfinished outputs are removed.
struct Interrupted {
  int signal = 0;
};

/// While one of these lives, SIGINT, SIGTERM and SIGHUP, except those that were ignored (nohup), make check() throw Interrupted: the next
/// progress callback, and every iteration of a loop on executor(). Further signals have no effect: partial outputs are being removed.
class Interruptible {
 public:
  Interruptible();
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;
  /// Throws Interrupted when a signal has arrived.
  static void check();
  /// default_executor(), whose loops end with the signal.
  Executor& executor();

 private:
  static constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace nibble::cli
