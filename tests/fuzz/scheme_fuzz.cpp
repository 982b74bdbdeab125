// Any text as a scheme: refused, or a scheme whose name is read as the same scheme.
#include "nibble/scheme.hpp"

#include "fuzz/fuzz.hpp"

using namespace nibble;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto scheme = Scheme::parse({reinterpret_cast<const char*>(data), size}, DType::bf16);
  if (!fuzz::ok(scheme.status())) return 0;
  const auto again = Scheme::parse(scheme->name(), DType::bf16);
  fuzz::require(again.ok() && *again == *scheme && !scheme->weight.describe().empty());
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  return {"u4zg128",     "u4b8g32", "s8c",    "s8r_s8c", "e4m3b128x128", "s8zg128_u4zg128",
          "e4m3t_e4m3t", "u3of64",  "u2fg16", "u4\n",    "u8b128t",      "s8og12_u4og24"};
}
