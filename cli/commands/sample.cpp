// The weights imitate trained ones where it matters to a quantizer: tails heavier than a Gaussian's, output channels of
// different size, and a few input channels far larger than the rest.
//
// Every number is a hash of (seed, tensor name, row, column), made of integer operations and IEEE multiplications only: no
// state to share between threads, and no library function that differs between platforms.
#include "commands/sample.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <system_error>

#include "nibble/checkpoint.hpp"
#include "nibble/parallel.hpp"
#include "terminal/output.hpp"

namespace nibble::cli {
namespace {

namespace fs = std::filesystem;

struct Architecture {
  std::string_view name;
  int hidden, intermediate, heads, kv_heads, head_dim;
};

constexpr std::array kArchitectures = {
    Architecture{"tiny", 256, 768, 4, 2, 64},
    Architecture{"llama-3.2-1b", 2048, 8192, 32, 8, 64},
    Architecture{"llama-3.2-3b", 3072, 8192, 24, 8, 128},
    Architecture{"llama-3-8b", 4096, 14336, 32, 8, 128},
};

constexpr float kDeviation = 0.02f;          // of a typical weight: the usual initializer_range
constexpr float kChannelSpread = 0.3f;       // of the logarithm of an output channel's deviation
constexpr std::int64_t kOutlierEvery = 256;  // one input channel in each run of so many is an outlier
constexpr float kOutlierFactor = 4.0f;

/// A Student t variable is a Gaussian whose deviation is itself random. These are the deviations at the middles of sixteen
/// equally likely intervals for five degrees of freedom, scaled to a mean square of 1. With gaussian() the kurtosis is 4.4.
constexpr std::array<float, 16> kDeviations = {1.87f, 1.43f, 1.25f, 1.14f, 1.05f, 0.99f, 0.93f, 0.88f,
                                               0.84f, 0.79f, 0.75f, 0.71f, 0.67f, 0.63f, 0.58f, 0.51f};

/// The output function of the SplitMix64 generator (Steele, Lea, Flood 2014): neighbouring inputs give unrelated outputs.
constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

constexpr std::uint64_t hash(std::string_view text) {
  std::uint64_t h = 0;
  for (char c : text) h = mix(h ^ static_cast<unsigned char>(c));
  return h;
}

/// Nearly Gaussian, deviation 1: the sum of four 15-bit uniforms, centred. Uses the low 60 bits.
constexpr float gaussian(std::uint64_t random) {
  const std::uint64_t sum = (random & 0x7fff) + (random >> 15 & 0x7fff) + (random >> 30 & 0x7fff) + (random >> 45 & 0x7fff);
  constexpr float kScale = 1.7320508f * 0x1p-15f;  // each uniform has a variance of 2^30 / 12
  return static_cast<float>(static_cast<std::int32_t>(sum) - 2 * 0x7fff) * kScale;
}

/// e^x to a few per cent for |x| ≤ 1: (1 + x/64)^64.
constexpr float exponential(float x) {
  float y = 1 + x * 0x1p-6f;
  for (int i = 0; i < 6; ++i) y *= y;
  return y;
}

template <class T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, f16>)
    return to_f16(x);
  else if constexpr (std::is_same_v<T, bf16>)
    return to_bf16(x);
  else
    return x;
}

template <class T>
std::vector<std::byte> matrix(std::uint64_t key, std::int64_t n, std::int64_t k) {
  std::vector<std::byte> bytes(n * k * sizeof(T));
  std::vector<float> columns(k, kDeviation);
  for (std::int64_t first = 0; first < k; first += kOutlierEvery) {
    const std::int64_t at = first + static_cast<std::int64_t>(mix(key + 1 + first) % kOutlierEvery);
    if (at < k) columns[at] *= kOutlierFactor;
  }
  default_executor().parallel_for(n, [&](std::int64_t row) {
    const std::uint64_t row_key = mix(key ^ mix(row));
    const float row_scale = exponential(kChannelSpread * gaussian(row_key));
    std::byte* out = bytes.data() + row * k * sizeof(T);
    for (std::int64_t col = 0; col < k; ++col) {
      const std::uint64_t random = mix(row_key + col);
      const T value = rounded<T>(gaussian(random) * kDeviations[random >> 60] * columns[col] * row_scale);
      std::memcpy(out + col * sizeof(T), &value, sizeof(T));
    }
  });
  return bytes;
}

/// Norm weights: near 1.
template <class T>
std::vector<std::byte> vector(std::uint64_t key, std::int64_t n) {
  std::vector<std::byte> bytes(n * sizeof(T));
  for (std::int64_t i = 0; i < n; ++i) {
    const T value = rounded<T>(1 + 0.125f * static_cast<float>(mix(key + i) % 128) * 0x1p-7f);
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

template <class T>
std::vector<std::byte> contents(std::uint64_t key, const std::vector<std::int64_t>& shape) {
  return shape.size() == 1 ? vector<T>(key, shape[0]) : matrix<T>(key, shape[0], shape[1]);
}

std::vector<TensorSource> sources(const Architecture& a, const SampleSpec& spec) {
  std::vector<TensorSource> all;
  auto add = [&](std::string name, std::vector<std::int64_t> shape) {
    const std::uint64_t key = mix(spec.seed) ^ hash(name);
    auto produce = [=, dtype = spec.dtype]() -> Result<std::vector<std::byte>> {
      if (dtype == DType::f16) return contents<f16>(key, shape);
      if (dtype == DType::bf16) return contents<bf16>(key, shape);
      return contents<float>(key, shape);
    };
    all.push_back({std::move(name), spec.dtype, std::move(shape), std::move(produce)});
  };
  const std::int64_t q = a.heads * a.head_dim, kv = a.kv_heads * a.head_dim;
  add("model.embed_tokens.weight", {spec.vocab, a.hidden});
  for (int i = 0; i < spec.layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    add(layer + "input_layernorm.weight", {a.hidden});
    add(layer + "self_attn.q_proj.weight", {q, a.hidden});
    add(layer + "self_attn.k_proj.weight", {kv, a.hidden});
    add(layer + "self_attn.v_proj.weight", {kv, a.hidden});
    add(layer + "self_attn.o_proj.weight", {a.hidden, q});
    add(layer + "post_attention_layernorm.weight", {a.hidden});
    add(layer + "mlp.gate_proj.weight", {a.intermediate, a.hidden});
    add(layer + "mlp.up_proj.weight", {a.intermediate, a.hidden});
    add(layer + "mlp.down_proj.weight", {a.hidden, a.intermediate});
  }
  add("model.norm.weight", {a.hidden});
  add("lm_head.weight", {spec.vocab, a.hidden});
  return all;
}

std::string config(const Architecture& a, const SampleSpec& spec) {
  const char* dtype = spec.dtype == DType::f16 ? "float16" : spec.dtype == DType::bf16 ? "bfloat16" : "float32";
  const Json json = {
      {"architectures", {"LlamaForCausalLM"}},
      {"model_type", "llama"},
      {"torch_dtype", dtype},
      {"hidden_size", a.hidden},
      {"intermediate_size", a.intermediate},
      {"num_hidden_layers", spec.layers},
      {"num_attention_heads", a.heads},
      {"num_key_value_heads", a.kv_heads},
      {"head_dim", a.head_dim},
      {"hidden_act", "silu"},
      {"vocab_size", spec.vocab},
      {"max_position_embeddings", 8192},
      {"rms_norm_eps", 1e-5},
      {"rope_theta", 500000.0},
      {"attention_bias", false},
      {"mlp_bias", false},
      {"tie_word_embeddings", false},
      {"bos_token_id", 0},
      {"eos_token_id", std::min(1, spec.vocab - 1)},
  };
  return json.dump(2) + "\n";
}

}  // namespace

std::vector<std::string_view> sample_shapes() {
  std::vector<std::string_view> names;
  for (const Architecture& a : kArchitectures) names.push_back(a.name);
  return names;
}

Status write_sample(const fs::path& out, const SampleSpec& spec) {
  auto bad = [](std::string text) { return Status(StatusCode::invalid_argument, std::move(text)); };
  const auto a = std::ranges::find(kArchitectures, spec.shapes, &Architecture::name);
  if (a == kArchitectures.end())
    return bad(fmt::format("no sample of shapes '{}'; there are {}", spec.shapes, fmt::join(sample_shapes(), ", ")));
  if (spec.layers < 1 || spec.layers > 1000) return bad(fmt::format("layers={} is outside 1…1000", spec.layers));
  if (spec.vocab < 1 || spec.vocab > 1 << 20) return bad(fmt::format("vocab={} is outside 1…{}", spec.vocab, 1 << 20));
  if (!is_compute_float(spec.dtype)) return bad(fmt::format("dtype {} is not f32, f16 or bf16", name(spec.dtype)));

  return write_checkpoint(out, sources(*a, spec), config(*a, spec), spec.overwrite);
}

}  // namespace nibble::cli
