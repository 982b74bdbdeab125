#include "emulator/gpu.hpp"

#include <ucontext.h>

#include <deque>
#include <map>
#include <memory>
#include <stdexcept>

namespace nibble::emulator {
namespace {

constexpr std::size_t kStackBytes = 256 * 1024;

struct Fiber {
  ucontext_t context{};
  bool done = false;
  std::function<bool()> ready;  // of what it waits for; empty: it may run
  const char* what = "";
  std::uint32_t which = 0;
  std::vector<std::function<void()>> open;                 // matrix instructions that are not committed
  std::deque<std::vector<std::function<void()>>> running;  // groups of them
};

struct Mbarrier {
  int arrivals = 0, pending = 0, bytes = 0;
  std::uint32_t phase = 0;
};
struct Named {
  int came = 0;
  std::uint32_t generation = 0;
};
struct Lanes {
  int came = 0;
  std::uint32_t generation = 0;
  std::array<std::uint64_t, kWarp> values[2];  // of this generation, and of the one before
};

struct Cta {
  int index = 0, threads = 0, current = 0;
  Shape grid, shape;
  std::vector<Fiber> fibers;
  ucontext_t scheduler{};
  std::map<std::uint32_t, Mbarrier> barriers;
  std::array<Named, 16> named;
  std::vector<Lanes> warps;
  const std::function<void()>* kernel = nullptr;
  std::string failure;
};

Cta* running = nullptr;
std::uint8_t* memory = nullptr;

Fiber& self() { return running->fibers[static_cast<std::size_t>(running->current)]; }

void enter() {
  try {
    (*running->kernel)();
  } catch (const std::exception& e) {
    running->failure = e.what();
  }
  self().done = true;
  swapcontext(&self().context, &running->scheduler);
}

void begin(ucontext_t& context, std::uint8_t* stack) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
}

[[noreturn]] void fail(const std::string& text) {
  throw std::runtime_error("block " + std::to_string(block()) + ", thread " + std::to_string(thread()) + ": " + text);
}

void complete(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
}
Mbarrier& barrier_at(std::uint32_t address) {
  const auto found = running->barriers.find(address);
  if (found == running->barriers.end()) fail("no barrier was initialised at " + std::to_string(address));
  return found->second;
}

void run_cta() {
  for (;;) {
    bool moved = false, left = false;
    for (running->current = 0; running->current < running->threads; ++running->current) {
      Fiber& fiber = self();
      if (fiber.done) continue;
      left = true;
      if (fiber.ready && !fiber.ready()) continue;
      fiber.ready = nullptr;
      moved = true;
      swapcontext(&running->scheduler, &fiber.context);
      if (!running->failure.empty()) throw std::runtime_error(running->failure);
    }
    if (!left) return;
    if (moved) continue;
    std::string text = "block " + std::to_string(running->index) + " waits for ever:";
    int named = 0;
    for (int i = 0; i < running->threads && named < 12; ++i) {
      const Fiber& fiber = running->fibers[static_cast<std::size_t>(i)];
      if (fiber.done || (i % kWarp != 0 && !running->fibers[static_cast<std::size_t>(i - 1)].done &&
                         running->fibers[static_cast<std::size_t>(i - 1)].which == fiber.which))
        continue;
      text += " thread " + std::to_string(i) + " for " + fiber.what + " " + std::to_string(fiber.which) + ";";
      ++named;
    }
    throw std::runtime_error(text);
  }
}

}  // namespace

int thread() { return running->current; }
int block() { return running->index; }
int threads() { return running->threads; }
Shape grid() { return running->grid; }
Shape cta() { return running->shape; }
std::uint8_t* shared_memory() { return memory; }
void use_shared_memory(std::uint8_t* bytes) { memory = bytes; }

void run(Shape grid, Shape shape, const std::function<void()>& kernel) {
  const int threads = shape.count();
  std::vector<std::unique_ptr<std::uint8_t[]>> stacks;
  for (int i = 0; i < threads; ++i) stacks.push_back(std::make_unique<std::uint8_t[]>(kStackBytes));
  for (int index = 0; index < grid.count(); ++index) {
    Cta next;
    next.index = index, next.grid = grid, next.shape = shape, next.threads = threads, next.kernel = &kernel;
    next.fibers.resize(static_cast<std::size_t>(threads));
    next.warps.resize(static_cast<std::size_t>((threads + kWarp - 1) / kWarp));
    running = &next;
    if (memory != nullptr) std::memset(memory, 0xff, kSharedBytes);  // NaN, as what was there before may be
    for (int i = 0; i < threads; ++i) {
      const auto at = static_cast<std::size_t>(i);
      begin(next.fibers[at].context, stacks[at].get());
    }
    run_cta();
  }
  running = nullptr;
}

void wait_until(const std::function<bool()>& ready, const char* what, std::uint32_t which) {
  if (ready()) return;
  Fiber& fiber = self();
  fiber.ready = ready, fiber.what = what, fiber.which = which;
  swapcontext(&fiber.context, &running->scheduler);
}

void barrier_init(std::uint32_t barrier, int arrivals) { running->barriers[barrier] = {arrivals, arrivals, 0, 0}; }
void barrier_arrive(std::uint32_t barrier, int bytes_to_come) {
  Mbarrier& b = barrier_at(barrier);
  if (b.pending == 0) fail("one arrival too many at barrier " + std::to_string(barrier));
  b.bytes += bytes_to_come;
  --b.pending;
  complete(b);
}
void barrier_bytes_came(std::uint32_t barrier, int bytes) {
  Mbarrier& b = barrier_at(barrier);
  b.bytes -= bytes;
  complete(b);
}
void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  const Mbarrier& b = barrier_at(barrier);
  wait_until([&b, parity] { return (b.phase & 1) != parity; }, "mbarrier", barrier);
}

void named_barrier_arrive(int id, int threads) {
  Named& barrier = running->named.at(static_cast<std::size_t>(id));
  if (++barrier.came < threads) return;
  barrier.came = 0;
  ++barrier.generation;
}
void named_barrier(int id, int threads) {
  const Named& barrier = running->named.at(static_cast<std::size_t>(id));
  const std::uint32_t before = barrier.generation;
  named_barrier_arrive(id, threads);
  wait_until([&barrier, before] { return barrier.generation != before; }, "named barrier", static_cast<std::uint32_t>(id));
}

std::array<std::uint64_t, kWarp> all_lanes(std::uint64_t value) {
  Lanes& warp = running->warps[static_cast<std::size_t>(thread() / kWarp)];
  const std::uint32_t before = warp.generation;
  warp.values[before % 2][static_cast<std::size_t>(thread() % kWarp)] = value;
  if (++warp.came == kWarp) warp.came = 0, ++warp.generation;
  wait_until([&warp, before] { return warp.generation != before; }, "the lanes of its warp", 0);
  return warp.values[before % 2];
}

void matrix_issue(std::function<void()> instruction) { self().open.push_back(std::move(instruction)); }
void matrix_commit() {
  self().running.push_back(std::move(self().open));
  self().open.clear();
}
void matrix_wait(int pending) {
  auto& running = self().running;
  for (; running.size() > static_cast<std::size_t>(pending); running.pop_front())
    for (const auto& instruction : running.front()) instruction();
}

}  // namespace nibble::emulator
