// What a fuzz target provides: libFuzzer's entry point, and valid inputs to start from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

/// Small inputs the target accepts, so that mutations of them reach past the first check. Bytes, not text.
std::vector<std::string> fuzz_seeds();
