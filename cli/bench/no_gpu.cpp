// gpu.cpp in a build without CUDA.
#include "bench/core.hpp"

namespace nibble::cli {

Result<std::unique_ptr<BenchMachine>> gpu_machine(Executor&) { return this_gpu().status(); }

}  // namespace nibble::cli
