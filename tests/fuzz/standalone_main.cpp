// Runs a fuzz target without libFuzzer: every seed, then a fixed sequence of mutations of the seeds.
//
//   fuzz_NAME [MUTATIONS [CORPUS]]   the same inputs on every run; files of the directory CORPUS are seeds too
//   fuzz_NAME FILE...                these inputs only, to reproduce a finding
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/fuzz.hpp"

namespace {

/// splitmix64: short, good enough, and the same on every platform, unlike the standard's distributions.
struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(next() % bound); }
};

void run(const std::string& input) { LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size()); }

/// One small change: most random ones would only exercise the first check of a parser.
void mutate(std::string& input, const std::vector<std::string>& seeds, Random& random) {
  static const std::string kTokens[] = {"{",    "}",      "[", "]", ",", ":", "\"", "0", "-1", "1e9", "18446744073709551615",
                                        "null", "\\u0000"};
  const std::size_t at = random.below(input.size() + 1);
  switch (random.below(8)) {
    case 0: input.resize(at); break;
    case 1: input.insert(at, 1, static_cast<char>(random.next())); break;
    case 2: input.erase(at, 1 + random.below(8)); break;
    case 3: input.insert(at, kTokens[random.below(std::size(kTokens))]); break;
    case 4: {  // repeat a piece of itself: duplicate keys, wrong counts
      const std::string piece = input.substr(at, 1 + random.below(64));
      input.insert(random.below(input.size() + 1), piece);
      break;
    }
    case 5: {  // cross with another seed
      const std::string& other = seeds[random.below(seeds.size())];
      input = input.substr(0, at) + other.substr(std::min(at, other.size()));
      break;
    }
    case 6:  // change a digit
      if (const std::size_t digit = input.find_first_of("0123456789", at); digit != std::string::npos)
        input[digit] = static_cast<char>('0' + random.below(10));
      break;
    default:
      if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << random.below(8)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  const auto read = [](const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string{std::istreambuf_iterator<char>(file), {}};
  };
  char* end = nullptr;
  const long mutations = argc > 1 ? std::strtol(argv[1], &end, 10) : 20000;
  if (argc > 1 && *end != '\0') {
    for (int i = 1; i < argc; ++i) run(read(argv[i]));
    return 0;
  }
  std::vector<std::string> seeds = fuzz_seeds();
  if (argc > 2) {
    std::vector<fs::path> found(fs::directory_iterator(argv[2]), {});
    std::ranges::sort(found);
    for (const fs::path& path : found) seeds.push_back(read(path));
  }
  for (const std::string& seed : seeds) run(seed);
  Random random{1};
  for (long i = 0; i < mutations; ++i) {
    std::string input = seeds[random.below(seeds.size())];
    for (std::size_t count = 1 + random.below(4); count > 0; --count) mutate(input, seeds, random);
    run(input);
  }
  std::printf("%zu seeds and %ld mutations\n", seeds.size(), mutations);
  return 0;
}
