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
#include <cmath>
#include <cstring>
#include <functional>
#include <system_error>
#include <tuple>

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

/// The codes and the exponents of float rows in MXFP4, [n,k/2] and [n,k/32]: the largest of 32 weights becomes 4 to 6, the largest e2m1.
struct Mxfp4 {
  std::vector<std::byte> blocks, scales;
};
constexpr std::int64_t kMxfp4Group = 32;
Mxfp4 mxfp4(const std::vector<std::byte>& rows) {
  constexpr std::array<float, 8> kValues = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  constexpr int kBias = 127, kLargest = 2;  // of e8m0; the exponent of 4
  const auto count = static_cast<std::int64_t>(rows.size() / sizeof(float)), groups = count / kMxfp4Group;
  Mxfp4 made{std::vector<std::byte>(count / 2), std::vector<std::byte>(groups)};
  default_executor().parallel_for(groups, [&](std::int64_t g) {
    std::array<float, kMxfp4Group> w{};
    std::memcpy(w.data(), rows.data() + g * sizeof w, sizeof w);
    float largest = 0x1p-100f;
    for (const float value : w) largest = std::max(largest, std::fabs(value));
    const int exponent = std::ilogb(largest) - kLargest;
    made.scales[g] = static_cast<std::byte>(exponent + kBias);
    for (std::int64_t i = 0; i < kMxfp4Group; ++i) {
      const float x = std::ldexp(std::fabs(w[i]), -exponent);
      const auto nearest = std::ranges::min_element(kValues, {}, [x](float value) { return std::fabs(value - x); });
      const int code = static_cast<int>(nearest - kValues.begin()) + (w[i] < 0 ? 8 : 0);
      made.blocks[(g * kMxfp4Group + i) / 2] |= static_cast<std::byte>(i % 2 == 0 ? code : code << 4);
    }
  });
  return made;
}

/// Of all experts, one after the other: their codes, or their exponents.
std::vector<std::byte> mxfp4_of_experts(std::uint64_t key, std::int64_t experts, std::int64_t n, std::int64_t k, bool scales) {
  std::vector<std::byte> all;
  for (std::int64_t e = 0; e < experts; ++e) {
    const Mxfp4 made = mxfp4(matrix<float>(mix(key + e), n, k));
    const std::vector<std::byte>& part = scales ? made.scales : made.blocks;
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

/// [n,k] → [k,n].
std::vector<std::byte> transposed(const std::vector<std::byte>& rows, std::int64_t n, std::int64_t k) {
  const std::size_t size = rows.size() / static_cast<std::size_t>(n * k);
  std::vector<std::byte> columns(rows.size());
  for (std::int64_t row = 0; row < n; ++row)
    for (std::int64_t col = 0; col < k; ++col)
      std::memcpy(columns.data() + (col * n + row) * size, rows.data() + (row * k + col) * size, size);
  return columns;
}

/// Of all experts, one after the other: rows [n,k], or columns [k,n].
template <class T>
std::vector<std::byte> matrices(std::uint64_t key, std::int64_t experts, std::int64_t n, std::int64_t k, bool columns) {
  std::vector<std::byte> all;
  for (std::int64_t e = 0; e < experts; ++e) {
    std::vector<std::byte> own = matrix<T>(mix(key + e), n, k);
    if (columns) own = transposed(own, n, k);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

template <class T>
std::vector<std::byte> contents(std::uint64_t key, const std::vector<std::int64_t>& shape) {
  return shape.size() == 1 ? vector<T>(key, shape[0]) : matrix<T>(key, shape[0], shape[1]);
}

/// The channels between the matrices of an expert: a token's experts have those of the dense layer together, in runs of 64.
std::int64_t expert_channels(const Architecture& a, const SampleSpec& spec) {
  constexpr int kRun = 64;
  return std::max(kRun, a.intermediate / spec.top_k / kRun * kRun);
}

/// The tensors of a checkpoint, which get their numbers when they are written.
class Sources {
 public:
  explicit Sources(const SampleSpec& spec) : spec_(spec) {}

  void add(std::string name, const std::vector<std::int64_t>& shape) {
    const std::uint64_t key = key_of(name);
    add(std::move(name), spec_.dtype, shape, [=, dtype = spec_.dtype] {
      if (dtype == DType::f16) return contents<f16>(key, shape);
      if (dtype == DType::bf16) return contents<bf16>(key, shape);
      return contents<float>(key, shape);
    });
  }
  /// Experts that are stored together: [n,k] of each, or as columns [k,n].
  void add_stack(std::string name, std::int64_t experts, std::int64_t n, std::int64_t k, bool columns) {
    const std::uint64_t key = key_of(name);
    add(std::move(name), spec_.dtype, columns ? std::vector{experts, k, n} : std::vector{experts, n, k},
        [=, dtype = spec_.dtype] {
          if (dtype == DType::f16) return matrices<f16>(key, experts, n, k, columns);
          if (dtype == DType::bf16) return matrices<bf16>(key, experts, n, k, columns);
          return matrices<float>(key, experts, n, k, columns);
        });
  }
  /// name_blocks, name_scales and name_bias of experts [n,k].
  void add_mxfp4(const std::string& name, std::int64_t experts, std::int64_t n, std::int64_t k) {
    const std::uint64_t key = key_of(name);
    const std::int64_t groups = k / kMxfp4Group;
    for (const bool scales : {false, true})
      add(name + (scales ? "_scales" : "_blocks"), DType::u8,
          scales ? std::vector{experts, n, groups} : std::vector{experts, n, groups, kMxfp4Group / 2},
          [=] { return mxfp4_of_experts(key, experts, n, k, scales); });
    add(name + "_bias", {experts, n});
  }
  std::vector<TensorSource> take() { return std::move(all_); }

 private:
  std::uint64_t key_of(std::string_view name) const { return mix(spec_.seed) ^ hash(name); }
  void add(std::string name, DType type, std::vector<std::int64_t> shape, std::function<std::vector<std::byte>()> make) {
    all_.push_back({std::move(name), type, std::move(shape),
                    [make = std::move(make)]() -> Result<std::vector<std::byte>> { return make(); }});
  }

  const SampleSpec& spec_;
  std::vector<TensorSource> all_;
};

void add_feed_forward(Sources& all, const std::string& layer, const Architecture& a, const SampleSpec& spec) {
  if (spec.experts == 0) {
    all.add(layer + "mlp.gate_proj.weight", {a.intermediate, a.hidden});
    all.add(layer + "mlp.up_proj.weight", {a.intermediate, a.hidden});
    all.add(layer + "mlp.down_proj.weight", {a.hidden, a.intermediate});
    return;
  }
  const std::int64_t between = expert_channels(a, spec);
  if (spec.family == "gpt-oss") {
    all.add(layer + "mlp.router.weight", {spec.experts, a.hidden});
    all.add(layer + "mlp.router.bias", {spec.experts});
    all.add_mxfp4(layer + "mlp.experts.gate_up_proj", spec.experts, 2 * between, a.hidden);
    all.add_mxfp4(layer + "mlp.experts.down_proj", spec.experts, a.hidden, between);
    return;
  }
  const bool mixtral = spec.family == "mixtral", llama4 = spec.family == "llama4";
  const std::string block = layer + (mixtral ? "block_sparse_moe." : llama4 ? "feed_forward." : "mlp.");
  all.add(block + (llama4 ? "router.weight" : "gate.weight"), {spec.experts, a.hidden});
  if (llama4 || spec.family == "qwen3-moe-fused") {
    all.add_stack(block + "experts.gate_up_proj", spec.experts, 2 * between, a.hidden, llama4);
    all.add_stack(block + "experts.down_proj", spec.experts, a.hidden, between, llama4);
    for (const auto& [name, n, k] : {std::tuple("gate_proj", between, std::int64_t{a.hidden}),
                                     {"up_proj", between, a.hidden},
                                     {"down_proj", std::int64_t{a.hidden}, between}})
      if (llama4) all.add(fmt::format("{}shared_expert.{}.weight", block, name), {n, k});
    return;
  }
  for (int e = 0; e < spec.experts; ++e) {
    const std::string expert = fmt::format("{}experts.{}.", block, e);
    all.add(expert + (mixtral ? "w1" : "gate_proj") + ".weight", {between, a.hidden});
    all.add(expert + (mixtral ? "w3" : "up_proj") + ".weight", {between, a.hidden});
    all.add(expert + (mixtral ? "w2" : "down_proj") + ".weight", {a.hidden, between});
  }
}

std::vector<TensorSource> sources(const Architecture& a, const SampleSpec& spec) {
  Sources all(spec);
  const std::int64_t q = a.heads * a.head_dim, kv = a.kv_heads * a.head_dim;
  const bool gpt_oss = spec.experts > 0 && spec.family == "gpt-oss";
  all.add("model.embed_tokens.weight", {spec.vocab, a.hidden});
  for (int i = 0; i < spec.layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    all.add(layer + "input_layernorm.weight", {a.hidden});
    for (const auto& [name, n, k] : {std::tuple("q_proj", q, std::int64_t{a.hidden}),
                                     {"k_proj", kv, a.hidden},
                                     {"v_proj", kv, a.hidden},
                                     {"o_proj", std::int64_t{a.hidden}, q}}) {
      all.add(fmt::format("{}self_attn.{}.weight", layer, name), {n, k});
      if (gpt_oss) all.add(fmt::format("{}self_attn.{}.bias", layer, name), {n});
    }
    if (gpt_oss) all.add(layer + "self_attn.sinks", {a.heads});
    if (spec.experts > 0 && spec.family.starts_with("qwen3-moe"))
      for (const char* norm : {"q_norm", "k_norm"}) all.add(fmt::format("{}self_attn.{}.weight", layer, norm), {a.head_dim});
    all.add(layer + "post_attention_layernorm.weight", {a.hidden});
    add_feed_forward(all, layer, a, spec);
  }
  all.add("model.norm.weight", {a.hidden});
  all.add("lm_head.weight", {spec.vocab, a.hidden});
  return all.take();
}

/// What a configuration says about experts.
void add_experts(Json& json, const Architecture& a, const SampleSpec& spec) {
  const std::int64_t between = expert_channels(a, spec);
  const bool qwen = spec.family.starts_with("qwen3-moe"), mixtral = spec.family == "mixtral", llama4 = spec.family == "llama4";
  json["architectures"] = {qwen      ? "Qwen3MoeForCausalLM"
                           : mixtral ? "MixtralForCausalLM"
                           : llama4  ? "Llama4ForCausalLM"
                                     : "GptOssForCausalLM"};
  json["model_type"] = qwen ? "qwen3_moe" : mixtral ? "mixtral" : llama4 ? "llama4_text" : "gpt_oss";
  json[qwen ? "num_experts" : "num_local_experts"] = spec.experts;
  json["num_experts_per_tok"] = spec.top_k;
  json[qwen ? "moe_intermediate_size" : "intermediate_size"] = between;
  if (qwen) {
    json["decoder_sparse_step"] = 1;
    json["mlp_only_layers"] = Json::array();
    json["norm_topk_prob"] = true;
  } else if (llama4) {
    json["interleave_moe_layer_step"] = 1;
    json["intermediate_size_mlp"] = a.intermediate;
    json["use_qk_norm"] = false;
  } else if (!mixtral) {
    json["attention_bias"] = true;
    json["swiglu_limit"] = 7.0;
    json["quantization_config"] = {
        {"quant_method", "mxfp4"},
        {"modules_to_not_convert", {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"}}};
  }
}

std::string config(const Architecture& a, const SampleSpec& spec) {
  const char* dtype = spec.dtype == DType::f16 ? "float16" : spec.dtype == DType::bf16 ? "bfloat16" : "float32";
  Json json = {
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
  if (spec.experts > 0) add_experts(json, a, spec);
  return json.dump(2) + "\n";
}

}  // namespace

std::vector<std::string_view> sample_shapes() {
  std::vector<std::string_view> names;
  for (const Architecture& a : kArchitectures) names.push_back(a.name);
  return names;
}

std::vector<std::string_view> sample_families() { return {"mixtral", "qwen3-moe", "qwen3-moe-fused", "llama4", "gpt-oss"}; }

Status write_sample(const fs::path& out, const SampleSpec& spec) {
  auto bad = [](std::string text) { return Status(StatusCode::invalid_argument, std::move(text)); };
  const auto a = std::ranges::find(kArchitectures, spec.shapes, &Architecture::name);
  if (a == kArchitectures.end())
    return bad(fmt::format("no sample of shapes '{}'; there are {}", spec.shapes, fmt::join(sample_shapes(), ", ")));
  if (spec.layers < 1 || spec.layers > 1000) return bad(fmt::format("layers={} is outside 1…1000", spec.layers));
  if (spec.vocab < 1 || spec.vocab > 1 << 20) return bad(fmt::format("vocab={} is outside 1…{}", spec.vocab, 1 << 20));
  if (!is_compute_float(spec.dtype)) return bad(fmt::format("dtype {} is not f32, f16 or bf16", name(spec.dtype)));
  if (spec.experts < 0 || spec.experts > 4096) return bad(fmt::format("experts={} is outside 0…4096", spec.experts));
  if (spec.experts > 0 && (spec.top_k < 1 || spec.top_k > spec.experts))
    return bad(fmt::format("top_k={} is outside 1…{}, of {} experts", spec.top_k, spec.experts, spec.experts));
  const auto families = sample_families();
  if (std::ranges::find(families, spec.family) == families.end())
    return bad(fmt::format("no experts of the family '{}'; there are {}", spec.family, fmt::join(families, ", ")));

  return write_checkpoint(out, sources(*a, spec), config(*a, spec), spec.overwrite);
}

}  // namespace nibble::cli
