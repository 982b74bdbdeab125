// libFuzzer starts from the target's own seeds too: they are written into the first directory of the command line.
#include <filesystem>
#include <fstream>

#include "fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
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
