// The bar is one line that is redrawn at most ten times a second.
#include "terminal/progress.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

using namespace std::chrono_literals;

volatile sig_atomic_t g_signal = 0;
void remember_signal(int number) { g_signal = number; }

class InterruptibleExecutor final : public Executor {
 public:
  int threads() const override { return default_executor().threads(); }

 private:
  void run(std::int64_t count, LoopBody body) override {
    default_executor().parallel_for(count, [&](std::int64_t i) {
      if (g_signal == 0) body(i);
    });
    Interruptible::check();
  }
};

int terminal_columns() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string bar(double fraction, int width) {
  const int filled = static_cast<int>(fraction * width);
  std::string text;
  for (int i = 0; i < width; ++i) text += i < filled ? "█" : "░";
  return text;
}

// Shortens from the left: the end of a module name is more specific than its beginning.
std::string fit(std::string text, int columns) {
  while (display_width(text) > columns && !text.empty()) text.erase(0, 1);
  return text;
}

}  // namespace

ProgressBar::ProgressBar(std::string title) : title_(std::move(title)) {
  const char* term = std::getenv("TERM");
  enabled_ = isatty(STDERR_FILENO) != 0 && term != nullptr && std::string_view(term) != "dumb";
}

ProgressBar::~ProgressBar() {
  if (visible_) std::fputs("\r\033[K", stderr);
}

void ProgressBar::update(std::uint64_t done, std::uint64_t total, std::string_view what) {
  const auto now = Clock::now();
  if (!enabled_ || total == 0 || now - start_ < 500ms || now - drawn_ < 100ms) return;
  drawn_ = now;
  visible_ = true;
  const double fraction = std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const std::string left = fraction > 0.02 ? fmt::format("{:.0f} s left", elapsed * (1 - fraction) / fraction) : "";
  std::string line = fmt::format("{} {} {:3.0f} %  {:<10}  ", title_, bar(fraction, 20), 100 * fraction, left);
  line += fit(printable(what), terminal_columns() - 1 - display_width(line));
  fmt::print(stderr, "\r{}\033[K", line);
  std::fflush(stderr);
}

Progress ProgressBar::callback() {
  return [this](std::uint64_t done, std::uint64_t total, std::string_view what) {
    Interruptible::check();
    update(done, total, what);
  };
}

Interruptible::Interruptible() {
  struct sigaction action {};
  action.sa_handler = remember_signal;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

Interruptible::~Interruptible() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
}

Executor& Interruptible::executor() {
  static InterruptibleExecutor executor;
  return executor;
}

void Interruptible::check() {
  if (g_signal != 0) throw Interrupted{g_signal};
}

}  // namespace nibble::cli
