// libFuzzer starts from the target's own seeds too: they are written into the first directory of the command line. And what makes an
// execution cheap: one thread; short stacks of allocations, which the sanitizer stores; and less freed memory that it keeps.
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "fuzz/fuzz.hpp"

extern "C" const char* __asan_default_options() { return "malloc_context_size=6:quarantine_size_mb=32"; }

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  ::setenv("NIBBLE_NUM_THREADS", "1", 0);
  for (int i = 1; i < *argc; ++i) {
    const std::filesystem::path directory = (*argv)[i];
    if (!std::filesystem::is_directory(directory)) continue;
    int number = 0;
    for (const std::string& seed : fuzz_seeds())
      std::ofstream(directory / ("seed-" + std::to_string(number++)), std::ios::binary)
          .write(seed.data(), static_cast<std::streamsize>(seed.size()));
    break;
  }
  return 0;
}
