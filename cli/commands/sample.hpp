// Sample checkpoints: random weights in the shape of a real model, to try nibble without downloading one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "nibble/status.hpp"
#include "nibble/types.hpp"

namespace nibble::cli {

struct SampleSpec {
  std::string shapes = "llama-3.2-1b";  // one of sample_shapes()
  int layers = 1;
  std::uint64_t seed = 1;
  DType dtype = DType::bf16;  // f32, f16 or bf16
  int vocab = 1024;
  int experts = 0;                   // in place of each feed-forward layer; 0: none
  int top_k = 2;                     // of a token
  std::string family = "qwen3-moe";  // whose names and configuration experts have: one of sample_families()
  bool overwrite = false;            // replace an existing checkpoint
};

std::vector<std::string_view> sample_shapes();
std::vector<std::string_view> sample_families();

/// Writes the directory `out` with config.json and model.safetensors, whole or not at all. The bytes depend on the spec only,
/// not on the machine or the number of threads; a layer is the same whatever `layers` and `vocab` are.
/// Errors: invalid_argument, already_exists, io_error.
Status write_sample(const std::filesystem::path& out, const SampleSpec& spec);

}  // namespace nibble::cli
