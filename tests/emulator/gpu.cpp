#include "emulator/gpu.hpp"

#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define NIBBLE_ASAN
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define NIBBLE_ASAN
#endif
#ifdef NIBBLE_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace nibble::emulator {
namespace {

constexpr int kWarpgroup = 4 * kWarp;
constexpr std::size_t kStackBytes = 256 * 1024;

struct Random {
  std::uint64_t state = 0;
  std::uint64_t next() {  // SplitMix64
    std::uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(next() % count); }
  /// True once in `of` times; 0: never.
  bool once_in(std::size_t of) { return of != 0 && below(of) == 0; }
  template <class T>
  void shuffle(std::vector<T>& v) {
    for (std::size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[below(i)]);
  }
};

/// How often something unusual happens in a launch: once in so many times, 0 for never.
struct Habits {
  std::size_t at_issue;  // asynchronous work is done when it is issued
  std::size_t at_step;   // a step of the scheduler does some that has been issued
  std::size_t lag;       // a step gives its warp another priority
  std::size_t yield;     // a thread lets others run before it synchronizes
  std::size_t diverge;   // a step lets one thread of its warp run
};
Habits habits_of(std::uint64_t seed, Random& random) {
  constexpr std::size_t kAtIssue[] = {0, 1, 4}, kAtStep[] = {0, 0, 8};
  constexpr std::size_t kLag[] = {256, 32, 4}, kYield[] = {0, 64, 8}, kDiverge[] = {0, 64, 8};
  return {kAtIssue[seed % 3], kAtStep[seed % 3], kLag[random.below(3)], kYield[random.below(3)], kDiverge[random.below(3)]};
}

/// What a thread waits for: another value of the masked word.
constexpr std::uint64_t kZero = 0, kAllBits = ~std::uint64_t{0};
struct Wait {
  const std::uint64_t* word = &kZero;
  std::uint64_t mask = 0, value = 1;
  bool over() const { return (*word & mask) != value; }
};
constexpr Wait kNothing{}, kForever{&kZero, 0, 0};

struct Cta;
struct Work {
  int group = 0;
  std::function<void()> run;
  bool last = false;  // after all that were issued before it
};
struct Thread {
  ucontext_t context{};
  std::unique_ptr<std::uint8_t[]> stack;
  void* fake_stack = nullptr;  // AddressSanitizer's
  Cta* cta = nullptr;
  int index = 0;
  bool started = false, done = false;
  const char* what = "";  // it waits for
  std::uint32_t which = 0;
  std::uint64_t cluster_generation = 0;  // of its cluster's barrier, when it arrived there
  const std::uint64_t* polled = nullptr;
  std::uint64_t seen = 0;
  bool fenced = false;
  struct {
    std::vector<Work> issued;
    int group = 0;
  } engines[kEngines];

  std::vector<Work>& issued(Engine engine) { return engines[static_cast<std::size_t>(engine)].issued; }
  bool busy() const {
    return std::any_of(std::begin(engines), std::end(engines), [](const auto& engine) { return !engine.issued.empty(); });
  }
};

struct Mbarrier {
  int arrivals = 0, pending = 0, bytes = 0;
  int maker = 0;  // thread
  bool fenced = false;
  std::uint64_t phase = 0;
};
/// Four warps, whose matrix instructions end together.
struct Warpgroup {
  int threads = 0;
  std::vector<int> came;       // threads that have committed a group
  std::uint64_t complete = 0;  // groups that all have committed
};
struct Named {
  int came = 0;
  std::uint64_t generation = 0;
};
struct Warp {
  std::uint64_t priority = 0;
  int first = 0, threads = 0;  // of the CTA's
  int left = 0;                // threads that are not at their end
  std::array<Wait, kWarp> waits;
  // The values of its lanes in this generation, and in the one before.
  int came = 0;
  std::uint64_t generation = 0;
  std::array<std::uint64_t, kWarp> values[2];

  bool ready() const {
    return std::any_of(waits.begin(), waits.begin() + threads, [](const Wait& wait) { return wait.over(); });
  }
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  Named barrier;
};
struct Cta {
  int index = 0, rank = 0;
  std::uint64_t priority = 0;
  Cluster* cluster = nullptr;
  std::vector<std::uint8_t> image;  // of its shared memory, while another CTA's is in its place
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::vector<Warp*> order;  // those not at their end, by priority
  std::map<std::uint32_t, Mbarrier> barriers;
  std::array<Named, 16> named;
};
struct Copy {
  Cta* to;
  std::function<void()> run;
};
/// Ends the threads of a launch that has failed.
struct Cancelled {};

std::uint64_t seed = 1, launches = 0;
std::uint8_t* memory = nullptr;  // where kernels have declared their shared memory

/// Stacks that no thread has; they are kept for the next launch.
std::vector<std::unique_ptr<std::uint8_t[]>> stacks;

struct Dimensions {
  Shape grid, cta;
  int cluster, shared_bytes;
};

class Launch {
 public:
  Launch(const Dimensions& sizes, const std::function<void()>& kernel);
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch();
  void run();

  const Dimensions dimensions;
  Random random;
  const Habits habits;
  Cta* cta = nullptr;        // whose thread runs, or whose copies
  Thread* thread = nullptr;  // that runs
  std::vector<Copy> copies;
  std::vector<Thread*> busy;  // have work, or had
  std::string failure;

  std::uint8_t* shared(Cta& of) const { return &of == placed_ || dimensions.shared_bytes == 0 ? memory : of.image.data(); }
  Warpgroup& warpgroup() const { return cta->warpgroups[static_cast<std::size_t>(thread->index / kWarpgroup)]; }
  Warp& warp() const { return cta->warps[static_cast<std::size_t>(thread->index / kWarp)]; }
  Wait& wait() const { return warp().waits[static_cast<std::size_t>(thread->index % kWarp)]; }
  /// From the thread that runs to the scheduler, and back some time.
  void leave();
  void lag(Warp& warp) {
    warp.priority = random.next();
    sort(cta->order);
  }
  [[noreturn]] void enter();
  void perform(Cta& of, const std::function<void()>& work);

 private:
  void start_ctas();
  void end_ctas();
  bool step();
  static Warp* next_warp(Cta& of);
  void run_warp(Cta& of, Warp& warp);
  void resume(Thread& next);
  bool land(bool any);
  bool land_of_threads();
  void place(Cta& next);
  [[noreturn]] void fail_deadlocked();
  template <class T>
  static void sort(std::vector<T*>& v) {
    std::sort(v.begin(), v.end(), [](const T* a, const T* b) { return a->priority > b->priority; });
  }

  const std::function<void()>& kernel_;
  std::vector<int> waiting_;  // clusters
  std::vector<std::unique_ptr<Cluster>> clusters_;
  std::vector<Cta*> order_;  // of clusters_, by priority
  Cta* placed_ = nullptr;
  ucontext_t scheduler_{};
  bool cancelled_ = false;
  void* fake_stack_ = nullptr;  // AddressSanitizer's, and the scheduler's own
  const void* own_stack_ = nullptr;
  std::size_t own_bytes_ = 0;
};
Launch* now = nullptr;

[[noreturn]] void fail(const std::string& text) {
  throw std::runtime_error("block " + std::to_string(now->cta->index) +
                           (now->thread != nullptr ? ", thread " + std::to_string(now->thread->index) : "") + ": " + text);
}

void enter() { now->enter(); }

Launch::Launch(const Dimensions& sizes, const std::function<void()>& kernel)
    : dimensions(sizes), random{seed * 0x100000001b3u + launches++}, habits(habits_of(seed, random)), kernel_(kernel) {
  waiting_.resize(static_cast<std::size_t>(sizes.grid.count() / sizes.cluster));
  std::iota(waiting_.begin(), waiting_.end(), 0);
  random.shuffle(waiting_);
#ifdef NIBBLE_ASAN
  if (sizes.shared_bytes != 0)
    ASAN_POISON_MEMORY_REGION(memory + sizes.shared_bytes, static_cast<std::size_t>(kSharedBytes - sizes.shared_bytes));
#endif
  now = this;
}
Launch::~Launch() {
  // Threads of a failed launch are left by an exception, so that their objects are destroyed.
  cancelled_ = true;
  for (const auto& cluster : clusters_)
    for (const auto& of : cluster->ctas)
      for (Thread& t : of->threads)
        if (t.started && !t.done) cta = of.get(), resume(t);
#ifdef NIBBLE_ASAN
  if (dimensions.shared_bytes != 0) ASAN_UNPOISON_MEMORY_REGION(memory, kSharedBytes);
#endif
  now = nullptr;
}

void Launch::run() {
  for (;;) {
    start_ctas();
    if (clusters_.empty()) return;
    if (random.once_in(habits.at_step)) land(true);
    if (!step() && !land(false)) fail_deadlocked();
    end_ctas();
  }
}

void Launch::start_ctas() {
  const int most = dimensions.shared_bytes == 0 ? 1 : std::max(1, kMultiprocessors / dimensions.cluster);
  for (; static_cast<int>(clusters_.size()) < most && !waiting_.empty(); waiting_.pop_back()) {
    Cluster& cluster = *clusters_.emplace_back(std::make_unique<Cluster>());
    for (int rank = 0; rank < dimensions.cluster; ++rank) {
      Cta& next = *cluster.ctas.emplace_back(std::make_unique<Cta>());
      next.index = waiting_.back() * dimensions.cluster + rank, next.rank = rank, next.cluster = &cluster;
      next.priority = random.next();
      next.image.assign(static_cast<std::size_t>(dimensions.shared_bytes), 0xff);  // NaN, as what was there before may be
      next.threads.resize(static_cast<std::size_t>(dimensions.cta.count()));
      next.warps.resize((next.threads.size() + kWarp - 1) / kWarp);
      for (Thread& t : next.threads) t.index = static_cast<int>(&t - next.threads.data()), t.cta = &next;
      for (Warp& warp : next.warps) {
        warp.priority = random.next();
        warp.first = static_cast<int>(&warp - next.warps.data()) * kWarp;
        warp.threads = warp.left = std::min(kWarp, dimensions.cta.count() - warp.first);
        next.order.push_back(&warp);
      }
      sort(next.order);
      for (int left = dimensions.cta.count(); left > 0; left -= kWarpgroup)
        next.warpgroups.push_back({std::min(left, kWarpgroup), {}, 0});
      order_.push_back(&next);
    }
    sort(order_);
  }
}

/// Clusters leave together: their CTAs may read each other's shared memory, of those that have not ended.
void Launch::end_ctas() {
  for (std::size_t i = 0; i < clusters_.size(); ++i) {
    const auto& ctas = clusters_[i]->ctas;
    if (!std::all_of(ctas.begin(), ctas.end(), [](const auto& of) { return of->order.empty(); })) continue;
    const auto belongs = [&](const Cta* of) { return of->cluster == clusters_[i].get(); };
    std::erase_if(order_, belongs);
    std::erase_if(busy, [&](const Thread* t) { return belongs(t->cta); });
    if (placed_ != nullptr && belongs(placed_)) placed_ = nullptr;
    clusters_.erase(clusters_.begin() + static_cast<std::ptrdiff_t>(i));
    return;
  }
}

/// Lets the first warp that can advance run; false when none can.
bool Launch::step() {
  for (Cta* of : order_)
    if (Warp* warp = next_warp(*of); warp != nullptr) {
      if (random.once_in(habits.lag)) warp->priority = random.next(), sort(of->order);
      if (random.once_in(habits.lag * 8)) of->priority = random.next(), sort(order_);
      run_warp(*of, *warp);
      return true;
    }
  return false;
}

Warp* Launch::next_warp(Cta& of) {
  for (Warp* warp : of.order)
    if (warp->ready()) return warp;
  return nullptr;
}

void Launch::run_warp(Cta& of, Warp& warp) {
  place(of);
  cta = &of;
  const bool diverges = random.once_in(habits.diverge);
  const std::size_t count = static_cast<std::size_t>(warp.threads);
  const std::size_t first = random.below(count), step = random.once_in(2) ? 1 : count - 1;
  for (std::size_t i = 0, lane = first; i < count; ++i, lane = (lane + step) % count) {
    if (!warp.waits[lane].over()) continue;
    resume(of.threads[static_cast<std::size_t>(warp.first) + lane]);
    if (!failure.empty()) throw std::runtime_error(failure);
    if (diverges) break;
  }
  thread = nullptr;
  if (warp.left != 0) return;
  std::erase(of.order, &warp);
  if (of.order.empty() && std::any_of(copies.begin(), copies.end(), [&](const Copy& copy) { return copy.to == &of; }))
    fail("the CTA has ended while a copy into its shared memory was on its way");
}

// ---- fibers

void Launch::resume(Thread& next) {
  thread = &next;
  if (!next.started) {
    next.started = true;
    if (stacks.empty()) stacks.emplace_back(new std::uint8_t[kStackBytes]);
    next.stack = std::move(stacks.back());
    stacks.pop_back();
    getcontext(&next.context);
    next.context.uc_stack.ss_sp = next.stack.get();
    next.context.uc_stack.ss_size = kStackBytes;
    next.context.uc_link = nullptr;
    makecontext(&next.context, emulator::enter, 0);
  }
#ifdef NIBBLE_ASAN
  __sanitizer_start_switch_fiber(&fake_stack_, next.stack.get(), kStackBytes);
#endif
  swapcontext(&scheduler_, &next.context);
#ifdef NIBBLE_ASAN
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
  if (next.done) ASAN_UNPOISON_MEMORY_REGION(next.stack.get(), kStackBytes);
#endif
  if (next.done) stacks.push_back(std::move(next.stack));
}

void Launch::leave() {
  Thread& t = *thread;
#ifdef NIBBLE_ASAN
  __sanitizer_start_switch_fiber(t.done ? nullptr : &t.fake_stack, own_stack_, own_bytes_);
#endif
  swapcontext(&t.context, &scheduler_);
#ifdef NIBBLE_ASAN
  __sanitizer_finish_switch_fiber(t.fake_stack, nullptr, nullptr);
#endif
  if (cancelled_) throw Cancelled();
}

void Launch::enter() {
#ifdef NIBBLE_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &own_stack_, &own_bytes_);
#endif
  try {
    kernel_();
  } catch (const Cancelled&) {
  } catch (const std::exception& e) {
    failure = e.what();
  }
  thread->done = true;
  thread->issued(Engine::matrix).clear();  // its sums were the thread's
  wait() = kForever;
  --warp().left;
  leave();
  std::abort();
}

// ---- asynchronous work

/// Lets some asynchronous work be done; false when there is none. What barriers count comes first, if not `any`.
bool Launch::land(bool any) {
  if (copies.empty() || (any && random.once_in(2))) return land_of_threads();
  std::swap(copies[random.below(copies.size())], copies.back());
  const Copy copy = std::move(copies.back());
  copies.pop_back();
  perform(*copy.to, copy.run);
  return true;
}

bool Launch::land_of_threads() {
  while (!busy.empty()) {
    Thread*& chosen = busy[random.below(busy.size())];
    Thread& t = *chosen;
    if (!t.busy()) {
      chosen = busy.back();
      busy.pop_back();
      continue;
    }
    std::size_t engine = random.below(kEngines);
    while (t.engines[engine].issued.empty()) engine = (engine + 1) % kEngines;
    auto& issued = t.engines[engine].issued;
    std::size_t which = engine == static_cast<std::size_t>(Engine::matrix) ? 0 : random.below(issued.size());
    if (issued[which].last) which = 0;
    const Work work = std::move(issued[which]);
    issued.erase(issued.begin() + static_cast<std::ptrdiff_t>(which));
    perform(*t.cta, work.run);
    return true;
  }
  return false;
}

void Launch::perform(Cta& of, const std::function<void()>& work) {
  Cta* const before = cta;
  cta = &of;
  work();
  cta = before;
}

/// Puts a CTA's shared memory where its kernel has declared it.
void Launch::place(Cta& next) {
  if (placed_ == &next || dimensions.shared_bytes == 0) return;
  const auto bytes = static_cast<std::size_t>(dimensions.shared_bytes);
  if (placed_ != nullptr) std::memcpy(placed_->image.data(), memory, bytes);
  std::memcpy(memory, next.image.data(), bytes);
  placed_ = &next;
}

// ---- messages

/// Names the waiting threads; of neighbours that wait for the same thing, the first.
void Launch::fail_deadlocked() {
  std::string text;
  for (const auto& cluster : clusters_)
    for (const auto& of : cluster->ctas) {
      text += "block " + std::to_string(of->index) + " waits for ever:";
      std::string before;
      int named = 0;
      for (const Thread& t : of->threads) {
        const std::string what = t.done ? "" : std::string(t.what) + " " + std::to_string(t.which);
        if (!what.empty() && (t.index % kWarp == 0 || what != before) && ++named <= 12)
          text += " thread " + std::to_string(t.index) + " for " + what + ";";
        before = what;
      }
      text += "\n";
    }
  throw std::runtime_error(text);
}

// ---- what threads do

/// Lets the thread wait for another value of the masked word.
void wait_for(Wait wait, const char* what, std::uint32_t which) {
  now->thread->polled = nullptr;
  if (wait.over()) return;
  now->wait() = wait;
  now->thread->what = what, now->thread->which = which;
  now->leave();
  now->wait() = kNothing;
}

/// A place where another thread may come first.
void may_yield() {
  if (now->thread == nullptr) return;  // a copy has arrived at a barrier
  now->thread->polled = nullptr;
  if (!now->random.once_in(now->habits.yield)) return;
  now->lag(now->warp());
  now->leave();
}

void complete(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
}
/// The generation that ends when all threads have come.
std::uint64_t arrive(Named& barrier, int threads) {
  const std::uint64_t before = barrier.generation;
  if (++barrier.came == threads) barrier.came = 0, ++barrier.generation;
  return before;
}
Mbarrier& barrier_at(std::uint32_t address, Cta& cta) {
  const auto found = cta.barriers.find(address);
  if (found == cta.barriers.end()) fail("no barrier was initialised at " + std::to_string(address));
  return found->second;
}
Cta& cta_of(int rank) {
  const auto& ctas = now->cta->cluster->ctas;
  if (rank < 0 || rank >= static_cast<int>(ctas.size())) fail("the cluster has no CTA of rank " + std::to_string(rank));
  Cta& cta = *ctas[static_cast<std::size_t>(rank)];
  if (cta.order.empty()) fail("the CTA of rank " + std::to_string(rank) + " has ended");
  return cta;
}

/// Does a thread's work of the groups before `end`.
void finish(Thread& t, Engine engine, int end) {
  auto& issued = t.issued(engine);
  while (!issued.empty() && issued.front().group < end) {
    const Work work = std::move(issued.front());
    issued.erase(issued.begin());
    work.run();
  }
}

void issue(Engine engine, std::function<void()> work, bool last) {
  Thread& t = *now->thread;
  auto& issued = t.issued(engine);
  if (now->random.once_in(now->habits.at_issue) && (issued.empty() || !(last || engine == Engine::matrix))) return work();
  if (!t.busy()) now->busy.push_back(&t);
  issued.push_back({t.engines[static_cast<std::size_t>(engine)].group, std::move(work), last});
}

}  // namespace

void use_seed(std::uint64_t number) { seed = number, launches = 0; }

int thread() { return now->thread->index; }
int block() { return now->cta->index; }
Shape grid() { return now->dimensions.grid; }
Shape cta() { return now->dimensions.cta; }

void run(Shape grid, Shape shape, const std::function<void()>& kernel, int cluster, int shared_bytes) {
  Launch({grid, shape, cluster, shared_bytes}, kernel).run();
}

int asked_capability() {
  static const int capability = [] {
    const char* const asked = std::getenv("NIBBLE_EMULATED_GPU");
    return asked == nullptr ? 0 : std::atoi(asked);
  }();
  return capability;
}

void use_shared_memory(std::uint8_t* bytes) { memory = bytes; }
std::uint32_t shared_address(const void* p) {
  return kSharedBase + static_cast<std::uint32_t>(static_cast<const std::uint8_t*>(p) - memory);
}
std::uint8_t* shared_at(std::uint32_t address, int bytes) {
  const auto at = static_cast<std::int32_t>(address - kSharedBase);
  if (now->dimensions.shared_bytes != 0 && (at < 0 || at > now->dimensions.shared_bytes - bytes))
    fail("its shared memory has no byte " + std::to_string(at + bytes - 1));
  return now->shared(*now->cta) + at;
}
std::uint8_t* shared_of(int rank, std::uint32_t address) { return now->shared(cta_of(rank)) + (address - kSharedBase); }

void barrier_init(std::uint32_t barrier, int arrivals) { now->cta->barriers[barrier] = {arrivals, arrivals, 0, thread()}; }
void barrier_init_fence() {
  for (auto& [address, barrier] : now->cta->barriers) barrier.fenced |= barrier.maker == thread();
}
void barrier_arrive(std::uint32_t barrier, int bytes_to_come) {
  may_yield();
  Mbarrier& b = barrier_at(barrier, *now->cta);
  if (b.pending == 0) fail("one arrival too many at barrier " + std::to_string(barrier));
  b.bytes += bytes_to_come;
  --b.pending;
  complete(b);
}
void barrier_bytes_came(std::uint32_t barrier, int bytes) { barrier_bytes_came(now->cta->rank, barrier, bytes); }
void barrier_bytes_came(int rank, std::uint32_t barrier, int bytes) {
  Mbarrier& b = barrier_at(barrier, cta_of(rank));
  if (!b.fenced) fail("bytes came at barrier " + std::to_string(barrier) + " without a fence after its initialisation");
  b.bytes -= bytes;  // below 0 until they are announced
  complete(b);
}
void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  may_yield();
  wait_for({&barrier_at(barrier, *now->cta).phase, 1, parity}, "mbarrier", barrier);
}
bool barrier_is_past(std::uint32_t barrier, std::uint32_t parity) {
  may_yield();
  return (barrier_at(barrier, *now->cta).phase & 1) != parity;
}

void named_barrier_arrive(int id, int threads) {
  may_yield();
  arrive(now->cta->named.at(static_cast<std::size_t>(id)), threads);
}
void named_barrier(int id, int threads) {
  may_yield();
  Named& barrier = now->cta->named.at(static_cast<std::size_t>(id));
  wait_for({&barrier.generation, kAllBits, arrive(barrier, threads)}, "named barrier", static_cast<std::uint32_t>(id));
}

void cluster_arrive() {
  may_yield();
  commit(Engine::remote);
  wait(Engine::remote, 0);
  Cluster& cluster = *now->cta->cluster;
  now->thread->cluster_generation = arrive(cluster.barrier, static_cast<int>(cluster.ctas.size()) * now->dimensions.cta.count());
}
void cluster_wait() {
  wait_for({&now->cta->cluster->barrier.generation, kAllBits, now->thread->cluster_generation}, "the cluster's barrier", 0);
}
int cluster_rank() { return now->cta->rank; }

std::array<std::uint64_t, kWarp> all_lanes(std::uint64_t value) {
  Warp& warp = now->warp();
  const std::uint64_t before = warp.generation;
  warp.values[before % 2][static_cast<std::size_t>(thread() % kWarp)] = value;
  if (++warp.came == kWarp) warp.came = 0, ++warp.generation;
  wait_for({&warp.generation, kAllBits, before}, "the lanes of its warp", 0);
  return warp.values[before % 2];
}

std::uint64_t poll(const std::uint64_t* flag) {
  Thread& t = *now->thread;
  if (t.polled == flag) wait_for({flag, kAllBits, t.seen}, "a flag", 0);
  t.polled = flag;
  return t.seen = *flag;
}

void issue(Engine engine, std::function<void()> work) {
  if (engine == Engine::matrix && !now->thread->fenced) fail("a matrix instruction without a fence");
  issue(engine, std::move(work), false);
}
void issue_after_copies(std::function<void()> work) { issue(Engine::copies, std::move(work), true); }
void commit(Engine engine) {
  const auto group = static_cast<std::size_t>(now->thread->engines[static_cast<std::size_t>(engine)].group++);
  if (engine != Engine::matrix) return;
  Warpgroup& warpgroup = now->warpgroup();
  if (warpgroup.came.size() <= group) warpgroup.came.resize(group + 1);
  if (++warpgroup.came[group] == warpgroup.threads) ++warpgroup.complete;
}
void wait(Engine engine, int pending) {
  Thread& t = *now->thread;
  const int end = t.engines[static_cast<std::size_t>(engine)].group - pending;
  if (engine != Engine::matrix) return finish(t, engine, end);
  const std::uint64_t& complete = now->warpgroup().complete;
  while (end > 0 && complete < static_cast<std::uint64_t>(end))
    wait_for({&complete, kAllBits, complete}, "the matrix instructions of its warpgroup", 0);
  const int first = t.index / kWarpgroup * kWarpgroup;
  for (int i = first; i < first + now->warpgroup().threads; ++i)
    finish(now->cta->threads[static_cast<std::size_t>(i)], engine, end);
  t.fenced = false;
}
void matrix_fence() { now->thread->fenced = true; }

void copy_to(int rank, std::function<void()> work) {
  may_yield();
  if (now->random.once_in(now->habits.at_issue)) return now->perform(cta_of(rank), work);
  now->copies.push_back({&cta_of(rank), std::move(work)});
}

}  // namespace nibble::emulator
