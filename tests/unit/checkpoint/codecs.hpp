// What the tests of codecs share: formats and schemes by name, modules written into memory, and notes as one text.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "golden/memory_module.hpp"

namespace nibble {

inline const codec::Format& format(std::string_view name) { return *codec::find_format(name); }

inline WeightScheme scheme(std::string_view name, DType scale = DType::f16) {
  auto parsed = Scheme::parse(name, scale);
  EXPECT_TRUE(parsed.ok()) << name;
  return parsed->weight;
}

inline ActScheme acts(std::string_view name) {
  auto parsed = Scheme::parse(std::string(name) + "_s8c");
  EXPECT_TRUE(parsed.ok()) << name;
  return parsed->act;
}

inline testing::MemoryModule written(std::string_view format_name, const QuantTensor& q, const ActScheme& act = {}) {
  auto module = testing::write_module(format(format_name), q, act);
  EXPECT_TRUE(module.ok()) << module.status().message();
  return module.ok() ? *std::move(module) : testing::MemoryModule{};
}

inline std::string joined(const std::vector<Note>& notes) {
  std::string text;
  for (const Note& note : notes) text += note.text + "\n";
  return text;
}

}  // namespace nibble
