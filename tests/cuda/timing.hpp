// Calls of CUDA and nibble, and timing, for the programs of this directory.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "nibble/status.hpp"

namespace nibble::cuda {

inline void require(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(3);
}
#define REQUIRE(call) ::nibble::cuda::require((call), #call)

inline void must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(3);
}
template <class T>
T must(Result<T> result) {
  must(result.status());
  return std::move(result).value();
}

/// Copies of the inputs, so that none is in L2 (60 MB) when it is read again.
constexpr double kColdBytes = 400e6;
inline int copies_of(double bytes) { return std::max(2, static_cast<int>(std::ceil(kColdBytes / bytes))); }

/// µs of each of the `copies` calls that a CUDA graph makes: events around `replays` of it, the median of 7. Before them it runs for `settle_ms`:
/// the clock of a GPU at its power limit depends on the last tenths of a second, which must be the work that is timed.
inline double time_us(int copies, const std::function<void(int, cudaStream_t)>& launch, int replays = 10,
                      double settle_ms = 0.0) {
  constexpr int kRounds = 7;
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  launch(0, stream);  // loads the module
  REQUIRE(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < copies; ++i) launch(i, stream);
  REQUIRE(cudaStreamEndCapture(stream, &graph));
  REQUIRE(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin = nullptr, end = nullptr;
  REQUIRE(cudaEventCreate(&begin));
  REQUIRE(cudaEventCreate(&end));
  const auto start = std::chrono::steady_clock::now();
  const auto settled = [&] {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() >= settle_ms;
  };
  do {
    for (int i = 0; i < 3; ++i) REQUIRE(cudaGraphLaunch(exec, stream));
    REQUIRE(cudaStreamSynchronize(stream));
  } while (!settled());
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    REQUIRE(cudaEventRecord(begin, stream));
    for (int i = 0; i < replays; ++i) REQUIRE(cudaGraphLaunch(exec, stream));
    REQUIRE(cudaEventRecord(end, stream));
    REQUIRE(cudaEventSynchronize(end));
    float ms = 0;
    REQUIRE(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(static_cast<double>(ms) * 1e3 / (replays * copies));
  }
  std::ranges::sort(times);
  REQUIRE(cudaEventDestroy(begin));
  REQUIRE(cudaEventDestroy(end));
  REQUIRE(cudaGraphExecDestroy(exec));
  REQUIRE(cudaGraphDestroy(graph));
  REQUIRE(cudaStreamDestroy(stream));
  return times[kRounds / 2];
}

}  // namespace nibble::cuda
