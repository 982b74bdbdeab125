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
  std::function<bool()> ready;  // whether its wait is over; empty: it may run
  const char* what = "";
  std::uint32_t which = 0;
  std::uint32_t cluster_generation = 0;  // of its cluster's barrier, when it arrived there
  struct Queue {
    std::vector<std::function<void()>> open;                 // what is not committed
    std::deque<std::vector<std::function<void()>>> running;  // groups
  };
  std::array<Queue, 2> engines;
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
  int index = 0, rank = 0, threads = 0, current = 0;
  Shape grid, shape;
  std::vector<std::uint8_t> image;  // of its shared memory, while another CTA of the cluster has it
  std::vector<Fiber> fibers;
  ucontext_t scheduler{};
  std::map<std::uint32_t, Mbarrier> barriers;
  std::array<Named, 16> named;
  std::vector<Lanes> warps;
  const std::function<void()>* kernel = nullptr;
  std::string failure;
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  Named barrier;
};

Cluster* cluster = nullptr;
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
Mbarrier& barrier_at(std::uint32_t address, Cta& cta) {
  const auto found = cta.barriers.find(address);
  if (found == cta.barriers.end()) fail("no barrier was initialised at " + std::to_string(address));
  return found->second;
}

/// Lets every thread of a CTA run until it waits.
struct Round {
  bool moved = false, left = false;  // whether a thread advanced; whether one is not at its end
};
Round run_round(Cta& cta) {
  Round round;
  running = &cta;
  const bool alone = cluster->ctas.size() == 1;
  if (!alone && memory != nullptr) std::memcpy(memory, cta.image.data(), kSharedBytes);
  for (cta.current = 0; cta.current < cta.threads; ++cta.current) {
    Fiber& fiber = self();
    if (fiber.done) continue;
    round.left = true;
    if (fiber.ready && !fiber.ready()) continue;
    fiber.ready = nullptr;
    round.moved = true;
    swapcontext(&cta.scheduler, &fiber.context);
    if (!cta.failure.empty()) throw std::runtime_error(cta.failure);
  }
  if (!alone && memory != nullptr) std::memcpy(cta.image.data(), memory, kSharedBytes);
  return round;
}

/// The waiting threads; of neighbours that wait for the same thing, the first.
std::string who_waits(const Cta& cta) {
  std::string text = "block " + std::to_string(cta.index) + " waits for ever:";
  const auto waits_for = [&](int i) {
    const Fiber& fiber = cta.fibers[static_cast<std::size_t>(i)];
    return fiber.done ? std::string() : std::string(fiber.what) + " " + std::to_string(fiber.which);
  };
  int named = 0;
  for (int i = 0; i < cta.threads && named < 12; ++i) {
    const std::string what = waits_for(i);
    if (what.empty() || (i % kWarp != 0 && waits_for(i - 1) == what)) continue;
    text += " thread " + std::to_string(i) + " for " + what + ";";
    ++named;
  }
  return text;
}

void run_cluster() {
  for (;;) {
    Round all;
    for (const auto& cta : cluster->ctas) {
      const Round round = run_round(*cta);
      all.moved |= round.moved, all.left |= round.left;
    }
    if (!all.left) return;
    if (all.moved) continue;
    std::string text;
    for (const auto& cta : cluster->ctas) text += who_waits(*cta) + "\n";
    throw std::runtime_error(text);
  }
}

}  // namespace

int thread() { return running->current; }
int block() { return running->index; }
Shape grid() { return running->grid; }
Shape cta() { return running->shape; }
std::uint8_t* shared_memory() { return memory; }
void use_shared_memory(std::uint8_t* bytes) { memory = bytes; }

void run(Shape grid, Shape shape, const std::function<void()>& kernel, int cluster_ctas) {
  const int threads = shape.count();
  std::vector<std::unique_ptr<std::uint8_t[]>> stacks;
  for (int i = 0; i < threads * cluster_ctas; ++i) stacks.push_back(std::make_unique<std::uint8_t[]>(kStackBytes));
  for (int first = 0; first < grid.count(); first += cluster_ctas) {
    Cluster next;
    if (memory != nullptr) std::memset(memory, 0xff, kSharedBytes);  // NaN, as what was there before may be
    for (int rank = 0; rank < cluster_ctas; ++rank) {
      auto cta = std::make_unique<Cta>();
      cta->index = first + rank, cta->rank = rank, cta->grid = grid, cta->shape = shape, cta->threads = threads;
      cta->kernel = &kernel;
      cta->fibers.resize(static_cast<std::size_t>(threads));
      cta->warps.resize(static_cast<std::size_t>((threads + kWarp - 1) / kWarp));
      cta->image.assign(cluster_ctas > 1 ? kSharedBytes : 0, 0xff);
      for (int i = 0; i < threads; ++i)
        begin(cta->fibers[static_cast<std::size_t>(i)].context, stacks[static_cast<std::size_t>(rank * threads + i)].get());
      next.ctas.push_back(std::move(cta));
    }
    cluster = &next;
    run_cluster();
  }
  running = nullptr, cluster = nullptr;
}

void wait_until(const std::function<bool()>& ready, const char* what, std::uint32_t which) {
  if (ready()) return;
  Fiber& fiber = self();
  fiber.ready = ready, fiber.what = what, fiber.which = which;
  swapcontext(&fiber.context, &running->scheduler);
}

void barrier_init(std::uint32_t barrier, int arrivals) { running->barriers[barrier] = {arrivals, arrivals, 0, 0}; }
void barrier_arrive(std::uint32_t barrier, int bytes_to_come) {
  Mbarrier& b = barrier_at(barrier, *running);
  if (b.pending == 0) fail("one arrival too many at barrier " + std::to_string(barrier));
  b.bytes += bytes_to_come;
  --b.pending;
  complete(b);
}
void barrier_bytes_came(std::uint32_t barrier, int bytes) { barrier_bytes_came(running->rank, barrier, bytes); }
void barrier_bytes_came(int rank, std::uint32_t barrier, int bytes) {
  Mbarrier& b = barrier_at(barrier, *cluster->ctas.at(static_cast<std::size_t>(rank)));
  b.bytes -= bytes;  // below 0 until they are announced
  complete(b);
}
void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  const Mbarrier& b = barrier_at(barrier, *running);
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

void cluster_arrive() {
  Named& barrier = cluster->barrier;
  self().cluster_generation = barrier.generation;
  if (++barrier.came < static_cast<int>(cluster->ctas.size()) * running->threads) return;
  barrier.came = 0;
  ++barrier.generation;
}
void cluster_wait() {
  const std::uint32_t before = self().cluster_generation;
  wait_until([before] { return cluster->barrier.generation != before; }, "the cluster's barrier", 0);
}
int cluster_rank() { return running->rank; }
std::uint8_t* shared_of(int rank, std::uint32_t address) {
  return rank == running->rank ? shared_at(address)
                               : cluster->ctas.at(static_cast<std::size_t>(rank))->image.data() + (address - kSharedBase);
}

std::array<std::uint64_t, kWarp> all_lanes(std::uint64_t value) {
  Lanes& warp = running->warps[static_cast<std::size_t>(thread() / kWarp)];
  const std::uint32_t before = warp.generation;
  warp.values[before % 2][static_cast<std::size_t>(thread() % kWarp)] = value;
  if (++warp.came == kWarp) warp.came = 0, ++warp.generation;
  wait_until([&warp, before] { return warp.generation != before; }, "the lanes of its warp", 0);
  return warp.values[before % 2];
}

void issue(Engine engine, std::function<void()> work) {
  self().engines[static_cast<std::size_t>(engine)].open.push_back(std::move(work));
}
void commit(Engine engine) {
  auto& queue = self().engines[static_cast<std::size_t>(engine)];
  queue.running.push_back(std::move(queue.open));
  queue.open.clear();
}
void wait(Engine engine, int pending) {
  auto& running = self().engines[static_cast<std::size_t>(engine)].running;
  for (; running.size() > static_cast<std::size_t>(pending); running.pop_front())
    for (const auto& work : running.front()) work();
}

}  // namespace nibble::emulator
