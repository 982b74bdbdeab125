// Faults around the library: forks, refused threads, bodies that throw, invalid sizes and environment variables, and limits on CPU time.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <new>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <thread>

#include "core/environment.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"
#include "unit/scratch.hpp"

#if defined(NIBBLE_EMULATED)
#define NIBBLE_NO_FORKS  // qemu-user has threads of its own, and fails in children of a process with several
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define NIBBLE_NO_FORKS  // its runtime does not start threads in a child
#endif
#endif

namespace nibble {
namespace {

using ::testing::HasSubstr;
using testing::random_weight;
namespace fs = std::filesystem;

/// Whether a loop calls every iteration once.
bool runs_all(Executor& executor, std::int64_t count = 100) {
  std::vector<std::atomic<int>> hits(static_cast<std::size_t>(count));
  executor.parallel_for(count, [&](std::int64_t i) { hits[static_cast<std::size_t>(i)].fetch_add(1); });
  return std::ranges::all_of(hits, [](const std::atomic<int>& hit) { return hit.load() == 1; });
}

#ifdef NIBBLE_SANITIZED
/// Nobody releases a lock of the sanitizer in a child, if a thread of the parent had it: threads that begin have its allocator's, and a
/// child checks no memory for leaks.
constexpr auto kThreadsHaveBegun = std::chrono::milliseconds(100);
bool is_child = false;
extern "C" int __lsan_is_turned_off() { return is_child ? 1 : 0; }
#endif

/// The result of a child process that runs `body` and exits by exit(): 0 when it returned true, −signal when it was killed. SIGALRM kills
/// one that hangs.
template <class Body>
int in_child(Body body) {
  std::fflush(nullptr);  // or exit() writes it again
#ifdef NIBBLE_SANITIZED
  std::this_thread::sleep_for(kThreadsHaveBegun);
#endif
  const pid_t child = fork();
  if (child == 0) {
#ifdef NIBBLE_SANITIZED
    is_child = true;
#endif
    alarm(120);
    std::exit(body());
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

#ifndef NIBBLE_NO_FORKS

constexpr int kSkipped = 77;

std::int64_t threads_of_this_process() {
  return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator());
}

TEST(Fork, AChildStartsThreadsOfItsOwnAndEnds) {
  static const auto pool = make_executor(4);  // destroyed by exit(), as the default one is
  ASSERT_TRUE(runs_all(*pool));
  ASSERT_TRUE(runs_all(default_executor()));
  EXPECT_EQ(in_child([] { return 0; }), 0);
  EXPECT_EQ(in_child([] { return threads_of_this_process() == 1 && runs_all(*pool) && threads_of_this_process() == 4 ? 0 : 1; }),
            0);
  EXPECT_EQ(in_child([] { return runs_all(default_executor()) ? 0 : 1; }), 0);
  // A grandchild, while its parent's pool runs.
  EXPECT_EQ(in_child([] { return runs_all(*pool) ? in_child([] { return runs_all(*pool) ? 0 : 1; }) : 2; }), 0);
  EXPECT_TRUE(runs_all(*pool));
}

TEST(Fork, WhileAnotherThreadHasThePool) {
  const auto pool = make_executor(4);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) EXPECT_TRUE(runs_all(*pool, 1000));
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(in_child([&] {
                return runs_all(*pool) ? 0 : 1;  // exit() does not destroy objects on this stack; the pool stays as it is
              }),
              0);
  }
  stop = true;
  busy.join();
}

TEST(Threads, OfThoseThatCannotBeHadThereAreFewer) {
  const int code = in_child([] {
    // Limits of processes and threads are not for root.
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) return kSkipped;
    const rlimit limit{3, 3};
    if (setrlimit(RLIMIT_NPROC, &limit) != 0) return kSkipped;
    const auto pool = make_executor(64);
    if (pool->threads() == 64) return kSkipped;  // there is no limit here
    if (pool->threads() < 1 || pool->threads() > 3 || pool->threads() != threads_of_this_process()) return 1;
    for (int i = 0; i < 100; ++i)
      if (!runs_all(*pool)) return 2;
    return 0;
  });
  if (code == kSkipped) GTEST_SKIP() << "the number of threads cannot be limited here";
  EXPECT_EQ(code, 0);
}

/// Threads of an engine, as simple as can be.
class Engine final : public Executor {
 public:
  int threads() const override { return 1; }
  int loops = 0;

 private:
  void run(std::int64_t count, LoopBody body) override {
    ++loops;
    for (std::int64_t i = 0; i < count; ++i) body(i);
  }
};

TEST(Threads, OfAnEngineAreTheOnlyOnes) {
  EXPECT_EQ(in_child([] {
              Engine engine;
              const QuantTensor q = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32)}, 64, 64, 1);
              const auto weight = pack(q, {.executor = &engine});
              const auto plan = Plan::linear(*weight, {.m_max = 4});
              std::vector<float> a(4 * 64, 1.0f), d(4 * 64);
              std::vector<std::byte> workspace(plan->workspace_bytes());
              const Status ran =
                  plan->run(*weight, ConstTensorView(a.data(), {4, 64}), TensorView(d.data(), {4, 64}), {}, workspace, &engine);
              return ran.ok() && engine.loops >= 2 && threads_of_this_process() == 1 ? 0 : 1;
            }),
            0);
}

#endif

TEST(Threads, ABodyThatThrowsEndsAsItsException) {
  for (const int threads : {1, 2, 8}) {
    const auto pool = make_executor(threads);
    for (std::int64_t bad = 0; bad < 64; ++bad) {
      std::atomic<int> calls{0};
      try {
        pool->parallel_for(64, [&](std::int64_t i) {
          ++calls;
          if (i == bad) throw std::out_of_range(std::to_string(i));
        });
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::out_of_range& e) {
        EXPECT_EQ(e.what(), std::to_string(bad));
      }
      EXPECT_LE(calls, 64);
    }
    EXPECT_THROW(pool->parallel_for(64, [](std::int64_t) { throw 1; }), int);
    EXPECT_TRUE(runs_all(*pool));
  }
}

TEST(Threads, OfAnEngineSeeNoException) {
  class Strict final : public Executor {
   public:
    int threads() const override { return 2; }

   private:
    void run(std::int64_t count, LoopBody body) override {
      std::jthread other([&]() noexcept {
        for (std::int64_t i = 0; i < count; i += 2) body(i);
      });
      [&]() noexcept {
        for (std::int64_t i = 1; i < count; i += 2) body(i);
      }();
    }
  } engine;
  for (const std::int64_t bad : {0, 1, 6, 7})
    EXPECT_THROW(engine.parallel_for(8, [&](std::int64_t i) { i == bad ? throw std::bad_alloc() : void(); }), std::bad_alloc);
}

TEST(Threads, AnExecutorThatThrowsEndsAsAStatus) {
  class Broken final : public Executor {
   public:
    int threads() const override { return 1; }

   private:
    void run(std::int64_t, LoopBody) override { throw std::bad_alloc(); }
  } broken;
  const QuantTensor q = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32)}, 64, 64, 1);
  const std::vector<float> w(64 * 64, 1.0f);
  EXPECT_EQ(quantize(ConstTensorView(w.data(), {64, 64}), "u4b8g32", &broken).status().code(), StatusCode::io_error);
  EXPECT_EQ(pack(q, {.executor = &broken}).status().code(), StatusCode::io_error);
  EXPECT_EQ(verify_linear(q, {}, &broken).status().code(), StatusCode::io_error);
  const auto weight = pack(q);
  const auto plan = Plan::linear(*weight);
  std::vector<float> d(64);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const Status ran =
      plan->run(*weight, ConstTensorView(w.data(), {1, 64}), TensorView(d.data(), {1, 64}), {}, workspace, &broken);
  EXPECT_EQ(ran.code(), StatusCode::io_error);
  EXPECT_EQ(ran.message(), "out of memory");
}

/// An environment variable, for as long as this lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, 1);
  }
  ~Variable() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

TEST(Environment, WhatIsNotUnderstoodIsAnError) {
  const QuantTensor q = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32)}, 64, 64, 1);
  const auto weight = pack(q);
  ASSERT_TRUE(weight.ok());
  const std::vector<float> w(64 * 64, 1.0f);
  const struct {
    const char *name, *value, *says;
  } cases[] = {{"NIBBLE_ISA", "avx9", "NIBBLE_ISA=avx9 is no level of CPUs; those are baseline, avx2"},
               {"NIBBLE_ISA", "sm90", "NIBBLE_ISA=sm90"},
               {"NIBBLE_ISA", "AVX2", "NIBBLE_ISA=AVX2"},
               {"NIBBLE_NUM_THREADS", "0", "NIBBLE_NUM_THREADS=0 is not a whole number from 1 to 4096"},
               {"NIBBLE_NUM_THREADS", "4097", "from 1 to 4096"},
               {"NIBBLE_NUM_THREADS", "-1", "NIBBLE_NUM_THREADS=-1"},
               {"NIBBLE_NUM_THREADS", "4 ", "NIBBLE_NUM_THREADS=4 "},
               {"NIBBLE_NUM_THREADS", "two", "NIBBLE_NUM_THREADS=two"},
               {"NIBBLE_NUM_THREADS", "99999999999999999999", "NIBBLE_NUM_THREADS=99999999999999999999"},
               {"NIBBLE_KERNEL", "magic", "NIBBLE_KERNEL=magic is not in the kernel table"}};
  for (const auto& [name, value, says] : cases) {
    const Variable set(name, value);
    const Status found[] = {check_environment(),
                            pack(q).status(),
                            Plan::linear(*weight).status(),
                            Plan::dequantize(*weight, {}).status(),
                            quantize(ConstTensorView(w.data(), {64, 64}), QuantizeSpec{}).status(),
                            verify_linear(q, {}).status(),
                            Checkpoint::open("no such directory").status()};
    for (const Status& status : found) {
      EXPECT_EQ(status.code(), StatusCode::invalid_argument) << name << "=" << value << ": " << status.message();
      EXPECT_THAT(status.message(), HasSubstr(says));
    }
  }
  for (const auto& [name, value] : {std::pair{"NIBBLE_ISA", ""},
                                    {"NIBBLE_ISA", "baseline"},
                                    {"NIBBLE_ISA", "amx"},  // if the machine has it
                                    {"NIBBLE_NUM_THREADS", ""},
                                    {"NIBBLE_NUM_THREADS", "1"},
                                    {"NIBBLE_NUM_THREADS", "4096"},
                                    {"NIBBLE_KERNEL", ""}}) {
    const Variable set(name, value);
    EXPECT_TRUE(check_environment().ok()) << name << "=" << value;
  }
}

TEST(Environment, QuotasOfControlGroups) {
  const testing::Scratch root;
  const auto put = [&](const char* path, const char* text) { testing::write_text(root / path, text); };
  EXPECT_EQ(cpu_quota(root.path()), std::nullopt);

  // Version 2: the least of a group's and its parents'.
  put("proc/self/cgroup", "0::/user.slice/job.scope\n");
  put("proc/self/mountinfo",
      "24 1 0:22 / /proc rw - proc proc rw\n"
      "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  EXPECT_EQ(cpu_quota(root.path()), std::nullopt);
  put("sys/fs/cgroup/user.slice/job.scope/cpu.max", "max 100000\n");
  EXPECT_EQ(cpu_quota(root.path()), std::nullopt);
  put("sys/fs/cgroup/user.slice/cpu.max", "350000 100000\n");
  EXPECT_EQ(cpu_quota(root.path()), 3.5);
  put("sys/fs/cgroup/user.slice/job.scope/cpu.max", "50000 100000\n");
  EXPECT_EQ(cpu_quota(root.path()), 0.5);
  EXPECT_EQ(usable_cores(root.path()), 1);
  put("sys/fs/cgroup/cpu.max", "20000 100000\n");
  EXPECT_EQ(cpu_quota(root.path()), 0.2);

  // Version 1, in a container: its group is where the hierarchy is mounted.
  put("proc/self/cgroup", "12:memory:/docker/1a2b\n4:cpu,cpuacct:/docker/1a2b\n0::/docker/1a2b\n");
  put("proc/self/mountinfo",
      "36 35 0:31 /docker/1a2b /cgroup1/memory rw - cgroup cgroup rw,memory\n"
      "37 35 0:32 /docker/1a2b /cgroup1/cpu,cpuacct rw master:9 - cgroup cgroup rw,cpu,cpuacct\n");
  put("cgroup1/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  put("cgroup1/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpu_quota(root.path()), std::nullopt);
  put("cgroup1/cpu,cpuacct/cpu.cfs_quota_us", "200000\n");
  EXPECT_EQ(cpu_quota(root.path()), 2.0);
  // Only "cpu" limits time.
  put("proc/self/mountinfo", "37 35 0:32 / /cgroup1/cpuset rw - cgroup cgroup rw,cpuset\n");
  EXPECT_EQ(cpu_quota(root.path()), std::nullopt);
  put("proc/self/mountinfo", "37 35\n - cgroup2\n\n");
  EXPECT_EQ(cpu_quota(root.path()), std::nullopt);
}

TEST(Environment, CoresAreNoMoreThanTheMaskAllows) {
  EXPECT_EQ(in_child([] {
              cpu_set_t one;
              CPU_ZERO(&one);
              for (int i = 0; i < CPU_SETSIZE; ++i) {
                CPU_SET(i, &one);
                if (sched_setaffinity(0, sizeof one, &one) == 0) break;
                CPU_ZERO(&one);
              }
              return usable_cores() == 1 ? 0 : 1;
            }),
            0);
}

/// A checkpoint of `layers` float layers [16,64].
void write_floats(const fs::path& directory, int layers) {
  fs::create_directories(directory);
  testing::write_text(directory / "config.json", "{}");
  std::vector<TensorSource> tensors;
  for (int i = 0; i < layers; ++i)
    tensors.push_back({fmt::format("layers.{}.weight", i), DType::f32, {16, 64}, [] {
                         std::vector<float> w(16 * 64, 0.5f);
                         const auto bytes = std::as_bytes(std::span(w));
                         return std::vector<std::byte>(bytes.begin(), bytes.end());
                       }});
  ASSERT_TRUE(write_safetensors(directory / "model.safetensors", tensors).ok());
}

TEST(Files, CutOffWhileInUse) {
  const testing::Scratch scratch;
  const fs::path in = scratch / "in", file = in / "model.safetensors";
  const auto cut = [&] { fs::resize_file(file, 4096); };
  write_floats(in, 20);
  ASSERT_TRUE(quantize_checkpoint(in, scratch / "coded", {.scheme = *Scheme::parse("u4b8g32", DType::none)}).ok());

  const auto opened = Checkpoint::open(in);
  ASSERT_TRUE(opened.ok());
  cut();
  const Status read = opened->load(opened->tensors().back()).status();
  EXPECT_EQ(read.code(), StatusCode::io_error);
  EXPECT_THAT(read.message(), HasSubstr("model.safetensors: it ends at byte"));

  for (const std::string what : {"quantize", "convert", "dequantize"}) {
    fs::remove_all(in);
    if (what == "quantize")
      write_floats(in, 20);
    else
      fs::copy(scratch / "coded", in);
    int calls = 0;
    const TransformOptions options{.progress = [&](std::uint64_t, std::uint64_t, std::string_view) {
      if (++calls == 2) cut();
    }};
    const auto done = what == "quantize"
                          ? quantize_checkpoint(in, scratch / "out", {.scheme = *Scheme::parse("u4b8g32", DType::none)}, options)
                      : what == "convert" ? convert_checkpoint(in, scratch / "out", "gptq", options)
                                          : dequantize_checkpoint(in, scratch / "out", DType::f16, options);
    EXPECT_EQ(done.status().code(), StatusCode::io_error) << what << ": " << done.status().message();
    EXPECT_THAT(done.status().message(), HasSubstr(file.string()));
    EXPECT_EQ(testing::names_in(scratch.path()), (std::set<std::string>{"in", "coded"}));
  }

  fs::remove_all(in);
  fs::copy(scratch / "coded", in);
  const auto coded = Checkpoint::open(in);
  ASSERT_TRUE(coded.ok());
  cut();
  EXPECT_EQ(coded->read(coded->modules().back()).status().code(), StatusCode::io_error);
}

TEST(Files, WhatKilledRunsLeftBehindIsRemoved) {
  const testing::Scratch scratch;
  write_floats(scratch / "in", 2);
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  waitpid(gone, nullptr, 0);
  const std::string stale = fmt::format(".out.partial-{}-0", gone), stale_file = fmt::format(".out.partial-{}-1", gone),
                    others = fmt::format(".other.partial-{}-0", gone), own = fmt::format(".out.partial-{}-7", getpid()),
                    locked = fmt::format(".out.partial-{}-2", gone);
  testing::write_text(scratch / stale / "model.safetensors", "half of it");
  for (const std::string& name : {stale_file, others, own, locked, std::string(".out.partial-x-0"), std::string(".out.partial")})
    testing::write_text(scratch / name, "");
  const int lock = open((scratch / locked).c_str(), O_RDONLY);  // as a run in another container has it
  ASSERT_EQ(flock(lock, LOCK_EX), 0);
  const auto report = quantize_checkpoint(scratch / "in", scratch / "out", {.scheme = *Scheme::parse("u4b8g32", DType::none)});
  close(lock);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(testing::names_in(scratch.path()),
            (std::set<std::string>{"in", "out", others, own, locked, ".out.partial-x-0", ".out.partial"}));
  std::string notes;
  for (const Note& note : report->notes) notes += note.text + "\n";
  EXPECT_THAT(notes, HasSubstr(stale));
  EXPECT_THAT(notes, HasSubstr(stale_file));
}

/// Sizes that arithmetic breaks on, and some that are fine.
class Extremes {
 public:
  std::int64_t operator()() {
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max(), kLeast = std::numeric_limits<std::int64_t>::min();
    constexpr std::int64_t kSizes[] = {1,
                                       1,
                                       1,
                                       2,
                                       3,
                                       7,
                                       64,
                                       1 << 15,
                                       1 << 20,
                                       kMaxSize,
                                       kMaxSize + 1,
                                       kMaxSize - 1,
                                       kMaxSize * 2,
                                       kMaxElements,
                                       kMost / 2,
                                       kMost - 1,
                                       kMost,
                                       0,
                                       -1,
                                       kLeast,
                                       kLeast + 1,
                                       kMost / 3,
                                       1LL << 62,
                                       -(1LL << 62),
                                       1LL << 32,
                                       (1LL << 32) + 1};
    return kSizes[random_() % std::size(kSizes)];
  }
  /// Mostly a good one.
  std::int64_t operator()(std::int64_t usual) { return random_() % 3 == 0 ? (*this)() : usual; }

 private:
  std::mt19937_64 random_{1};
};

TEST(Sizes, OfPlansAreCheckedBeforeTheyAreUsed) {
  Extremes any;
  const auto weight = pack(random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32)}, 64, 64, 1));
  ASSERT_TRUE(weight.ok());
  for (int i = 0; i < 200; ++i) {
    const LinearSpec spec{.m_max = any()};
    const auto plan = Plan::linear(*weight, spec, {.threads = 2});
    const bool good = spec.m_max >= 1 && spec.m_max <= kMaxSize;
    EXPECT_EQ(plan.ok(), good) << spec.m_max;
    if (!plan.ok()) {
      EXPECT_EQ(plan.status().code(), StatusCode::invalid_argument);
      EXPECT_THAT(plan.status().message(), HasSubstr(fmt::format("m_max={} is outside [1, {}]", spec.m_max, kMaxSize)));
    } else {
      EXPECT_LT(plan->workspace_bytes(), std::size_t{1} << 60);
      EXPECT_FALSE(plan->kernel(any()).empty());
    }
    const std::int64_t m_max = any();
    EXPECT_EQ(
        pack(random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32)}, 8, 32, 1), LinearSpec{.m_max = m_max}).ok(),
        m_max >= 1 && m_max <= kMaxSize)
        << m_max;
  }
  EXPECT_EQ(Plan::linear(*weight, {}, {.threads = 4097}).status().code(), StatusCode::invalid_argument);
  EXPECT_EQ(Plan::linear(*weight, {}, {.threads = -1}).status().code(), StatusCode::invalid_argument);
}

TEST(Sizes, OfConvolutionsAreCheckedBeforeTheyAreUsed) {
  Extremes any;
  QuantTensor q = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32)}, 8, 3 * 3 * 32, 1);
  q.filter = {3, 3};
  const auto weight = pack(q);
  ASSERT_TRUE(weight.ok());
  int planned = 0;
  for (int i = 0; i < 3000; ++i) {
    const ConvSpec spec{.geometry = {.in_channels = any(32),
                                     .out_channels = any(8),
                                     .height = any(20),
                                     .width = any(20),
                                     .filter = {any(3), any(3)},
                                     .stride = {any(1), any(1)},
                                     .padding = {any(1), any(1), any(1), any(1)},
                                     .dilation = {any(1), any(1)},
                                     .groups = any(1)},
                        .batch_max = any(1)};
    const auto plan = Plan::conv(*weight, spec, {.threads = 2});
    if (!plan.ok()) {
      EXPECT_NE(plan.status().code(), StatusCode::internal) << plan.status().message();
      continue;
    }
    ++planned;
    EXPECT_LT(plan->workspace_bytes(), std::size_t{1} << 60);
    EXPECT_FALSE(plan->kernel(any()).empty());
  }
  EXPECT_GT(planned, 10);
}

TEST(Sizes, OfMatricesAreChecked) {
  QuantTensor q = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32)}, 8, 32, 1);
  q.n = kMaxSize + 1;
  EXPECT_THAT(q.validate().message(), HasSubstr("N=1073741825 is outside [1, 1073741824]"));
  q.n = q.k = kMaxSize;
  EXPECT_THAT(q.validate().message(), HasSubstr("W would have 1073741824·1073741824 elements; 70368744177664 at most"));
  float one = 1;
  for (const std::int64_t size : {kMaxSize + 1, std::numeric_limits<std::int64_t>::max()}) {
    ConstTensorView w(&one, {1, 1});
    w.shape[0] = size;
    EXPECT_EQ(quantize(w, QuantizeSpec{}).status().code(), StatusCode::invalid_argument);
    ConstTensorView kernel(&one, {1, 1, 1, 1});
    kernel.shape = {size, size, size, size};
    EXPECT_EQ(quantize_conv(kernel, QuantizeSpec{}).status().code(), StatusCode::invalid_argument);
  }
}

TEST(Sizes, OutliersAreFinite) {
  const QuantTensor q = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32)}, 8, 32, 1);
  for (const float factor : {NAN, INFINITY, -INFINITY, 0.0f, -1.0f})
    EXPECT_EQ(verify_linear(q, {.outliers = factor}).status().code(), StatusCode::invalid_argument) << factor;
}

}  // namespace
}  // namespace nibble
