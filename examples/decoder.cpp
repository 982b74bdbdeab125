// A decoder of the Llama family (Llama, Qwen2, Qwen3) on the CPU: opens a checkpoint directory, takes token ids and generates more, the
// likeliest one each time. Quantized layers run on nibble's plans, with the norms, the glu and the residuals around them.
//
// usage: decoder DIR --prompt 1,2,3 [--tokens 32] [--threads N] [--logits FILE]
#include <nibble/nibble.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace nibble;
using nlohmann::json;

namespace {

// ---- config.json -------------------------------------------------------------------------------------------------------------

Status invalid(std::string message) { return {StatusCode::invalid_argument, std::move(message)}; }
Status unsupported(std::string message) { return {StatusCode::unsupported, std::move(message)}; }

/// Puts a result where it belongs, unless it is a failure.
template <class T>
Status take(Result<T> result, T& to) {
  if (result) to = *std::move(result);
  return result.status();
}

/// What config.json says of a model.
struct Config {
  std::int64_t vocabulary = 0, hidden = 0, intermediate = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0;
  std::int64_t positions = 0;      // the most tokens of a sequence
  double norm_eps = 0;             // added to the mean square
  bool tied = false;               // the output head is the embedding
  std::vector<float> frequencies;  // [head_dim/2] radians per position
};

/// The member of that name; null where there is none.
const json& member(const json& object, const char* name) {
  static const json none;
  const auto found = object.find(name);
  return found == object.end() ? none : *found;
}

Result<double> positive(const json& object, const char* name, std::optional<double> otherwise = {}) {
  const json& value = member(object, name);
  if (value.is_null() && otherwise) return *otherwise;
  const double number = value.is_number() ? value.get<double>() : 0;
  if (number > 0 && std::isfinite(number)) return number;
  return invalid(std::string("config.json: ") + name + " is " + value.dump() + ", expected a positive number");
}

Result<std::int64_t> size(const json& object, const char* name, std::optional<std::int64_t> otherwise = {}) {
  constexpr std::int64_t most = 1 << 24;  // so that no product of two overflows
  const json& value = member(object, name);
  if (value.is_null() && otherwise) return *otherwise;
  const std::int64_t number = value.is_number_integer() ? value.get<std::int64_t>() : 0;
  if (number >= 1 && number <= most) return number;
  return invalid(std::string("config.json: ") + name + " is " + value.dump() + ", expected 1 to " + std::to_string(most));
}

/// Radians per position of each pair of channels of a head, stretched for long contexts as Llama 3 does it.
Result<std::vector<float>> rope_frequencies(const json& config, std::int64_t head_dim) {
  json rope = member(config, "rope_parameters");                 // transformers 5
  if (!rope.is_object()) rope = member(config, "rope_scaling");  // before
  if (!rope.is_object()) rope = json::object();
  const auto theta = positive(rope.contains("rope_theta") ? rope : config, "rope_theta", 10000.0);
  if (!theta) return theta.status();
  const json type = rope.contains("rope_type") ? rope["rope_type"] : member(rope, "type");
  std::vector<float> frequencies;
  for (std::int64_t i = 0; i < head_dim / 2; ++i)
    frequencies.push_back(static_cast<float>(std::pow(*theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim))));
  if (type.is_null() || type == "default") return frequencies;
  if (type != "llama3") return unsupported("config.json: RoPE of type " + type.dump() + "; this program has default and llama3");

  std::array<double, 4> parameters;
  constexpr std::array names{"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto value = positive(rope, names[i]);
    if (!value) return value.status();
    parameters[i] = *value;
  }
  const auto [factor, low, high, context] = parameters;
  if (high <= low) return invalid("config.json: high_freq_factor is not above low_freq_factor");
  for (float& frequency : frequencies) {
    const double turns = context * frequency / (2 * std::numbers::pi);  // within the original context
    const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    frequency = static_cast<float>(frequency * (kept + (1 - kept) / factor));
  }
  return frequencies;
}

Result<Config> read_config(const std::string& text) {
  const json config = json::parse(text, nullptr, false);
  if (!config.is_object()) return invalid("the checkpoint has no config.json, or one that is no JSON object");
  const json& type = member(config, "model_type");
  if (type != "llama" && type != "qwen2" && type != "qwen3")
    return unsupported("config.json: model_type is " + type.dump() + "; this program runs llama, qwen2 and qwen3");
  const json& activation = member(config, "hidden_act");
  if (!activation.is_null() && activation != "silu") return unsupported("config.json: hidden_act is " + activation.dump());
  if (member(config, "use_sliding_window") == true) return unsupported("config.json: attention in a sliding window");

  Config c;
  for (const auto& [name, to] :
       std::initializer_list<std::pair<const char*, std::int64_t*>>{{"vocab_size", &c.vocabulary},
                                                                    {"hidden_size", &c.hidden},
                                                                    {"intermediate_size", &c.intermediate},
                                                                    {"num_hidden_layers", &c.layers},
                                                                    {"num_attention_heads", &c.heads},
                                                                    {"max_position_embeddings", &c.positions}})
    if (const Status status = take(size(config, name), *to); !status) return status;
  Status status = take(size(config, "num_key_value_heads", c.heads), c.kv_heads);
  if (status) status = take(size(config, "head_dim", c.hidden / c.heads), c.head_dim);
  if (status) status = take(positive(config, "rms_norm_eps", 1e-6), c.norm_eps);
  if (!status) return status;
  if (c.heads % c.kv_heads != 0 || c.head_dim < 2 || c.head_dim % 2 != 0)
    return invalid("config.json: " + std::to_string(c.heads) + " heads of " + std::to_string(c.head_dim) + " channels and " +
                   std::to_string(c.kv_heads) + " of keys and values");
  c.tied = member(config, "tie_word_embeddings") == true;
  if (status = take(rope_frequencies(config, c.head_dim), c.frequencies); !status) return status;
  return c;
}

// ---- Layers ------------------------------------------------------------------------------------------------------------------

/// Floats [rows,columns], a row a token.
struct Matrix {
  std::int64_t rows, columns;
  std::vector<float> values;

  Matrix(std::int64_t m, std::int64_t n) : rows(m), columns(n), values(static_cast<std::size_t>(m * n)) {}
  float* row(std::int64_t i) { return values.data() + i * columns; }
  const float* row(std::int64_t i) const { return values.data() + i * columns; }
  TensorView view() { return {values.data(), {rows, columns}}; }
  ConstTensorView view() const { return {values.data(), {rows, columns}}; }
};

/// What layers share while they run.
struct Runtime {
  std::unique_ptr<Executor> threads;
  PlanCache plans = PlanCache();
  std::vector<std::byte> workspace = {};
};

/// "bf16 [128,64]".
std::string text(std::string_view what, std::span<const std::int64_t> shape) {
  std::string out(what);
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i == 0 ? " [" : ",") + std::to_string(shape[i]);
  return out + "]";
}

/// A tensor of floats as it is in the checkpoint.
Result<std::shared_ptr<const Tensor>> load(const Checkpoint& checkpoint, const std::string& name,
                                           const std::vector<std::int64_t>& shape) {
  const TensorInfo* info = checkpoint.find_tensor(name);
  if (info == nullptr) return Status(StatusCode::not_found, "the checkpoint has no tensor " + name);
  if (!is_compute_float(info->dtype) || info->shape != shape)
    return invalid(name + " is " + text(nibble::name(info->dtype), info->shape) + ", config.json asks for " +
                   text("floats", shape));
  auto tensor = checkpoint.load(*info);
  if (!tensor) return tensor.status();
  return std::make_shared<const Tensor>(*std::move(tensor));
}

// docs: begin linear
/// A weight as the checkpoint has it, and its bias, which may be null.
struct Floats {
  std::shared_ptr<const Tensor> weight, bias;
};

/// Layers that read the same activations, as one: y = epilogue(norm(x)·Wᵀ + bias), with W[N,K] quantized or as floats.
struct Linear {
  LinearSpec spec;
  std::shared_ptr<const Tensor> norm = nullptr;  // [K]; null: none
  std::optional<PackedWeight> packed = {};
  std::vector<Floats> parts = {};  // where it is not packed

  Status run(const Matrix& x, Matrix& y, Runtime& runtime, const Matrix* residual = nullptr) const {
    if (!packed) return run_dense(x, y, runtime, residual), Status();
    LinearSpec now = spec;
    now.m_max = x.rows;
    const auto plan = runtime.plans.linear(*packed, now, {.threads = runtime.threads->threads()});
    if (!plan) return plan.status();
    Operands operands;
    if (norm != nullptr) operands.norm_weight = {norm->bytes.data(), norm->dtype, {norm->numel()}};
    if (residual != nullptr) operands.residual = residual->view();
    runtime.workspace.resize(std::max(runtime.workspace.size(), plan->workspace_bytes(x.rows)));
    return plan->run(*packed, x.view(), y.view(), operands, runtime.workspace, runtime.threads.get());
  }

  void run_dense(Matrix x, Matrix& y, Runtime& runtime, const Matrix* residual) const;
};

/// A module of the checkpoint, and how many rows its weight has.
struct Part {
  std::string name;
  std::int64_t rows;
};

/// The parts' weights one below the other; `linear` says what stands around them.
Result<Linear> load_linear(const Checkpoint& checkpoint, const std::vector<Part>& parts, std::int64_t k, Linear linear,
                           Runtime& runtime) {
  std::vector<QuantTensor> quantized;
  for (const auto& [name, rows] : parts) {
    const Module* module = checkpoint.find_module(name);
    if (module == nullptr || !module->quantized()) continue;
    auto part = checkpoint.read(*module);
    if (!part) return part.status();
    if (part->n != rows || part->k != k)
      return invalid(name + " is " + text("W", std::array{part->n, part->k}) + ", config.json asks for " +
                     text("W", std::array{rows, k}));
    quantized.push_back(*std::move(part));
  }
  for (const auto& [name, rows] : quantized.empty() ? parts : std::vector<Part>()) {
    Floats& part = linear.parts.emplace_back();
    Status status = take(load(checkpoint, name + ".weight", {rows, k}), part.weight);
    if (status && checkpoint.find_tensor(name + ".bias") != nullptr)
      status = take(load(checkpoint, name + ".bias", {rows}), part.bias);
    if (!status) return status;
  }
  if (quantized.empty()) return linear;
  if (quantized.size() < parts.size())
    return unsupported(parts.front().name + " and those that read the same activations: some are quantized, some are not");
  const auto joined = join(quantized);
  if (!joined) return joined.status().with_context(parts.front().name);
  linear.spec.epilogue.bias = !joined->bias.empty();
  auto packed = pack(*joined, linear.spec, {.executor = runtime.threads.get()});
  if (!packed) return packed.status();
  linear.packed = *std::move(packed);
  return linear;
}
// docs: end linear

/// x·w, in several sums that a compiler adds up side by side.
template <class T>
float dot(const float* x, const T* w, std::int64_t k) {
  std::array<float, 16> sums{};
  std::int64_t i = 0;
  for (; i + 16 <= k; i += 16)
    for (std::int64_t j = 0; j < 16; ++j) sums[static_cast<std::size_t>(j)] += x[i + j] * to_f32(w[i + j]);
  for (; i < k; ++i) sums[0] += x[i] * to_f32(w[i]);
  float sum = 0;
  for (const float each : sums) sum += each;
  return sum;
}

float dot(const float* x, const Tensor& w, std::int64_t row, std::int64_t k) {
  if (w.dtype == DType::f32) return dot(x, w.as<float>() + row * k, k);
  if (w.dtype == DType::f16) return dot(x, w.as<f16>() + row * k, k);
  return dot(x, w.as<bf16>() + row * k, k);
}

/// Divides each of `runs` runs of weight.numel() values, a row or its heads, by its root mean square, and multiplies it by the weight.
void normalize(float* x, std::int64_t runs, const Tensor& weight, double eps) {
  const std::int64_t width = weight.numel();
  for (const float* const end = x + runs * width; x < end; x += width) {
    double squares = 0;
    for (std::int64_t i = 0; i < width; ++i) squares += x[i] * x[i];
    const auto scale = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(width) + eps));
    for (std::int64_t i = 0; i < width; ++i) x[i] *= scale * weight.at(i);
  }
}

void Linear::run_dense(Matrix x, Matrix& y, Runtime& runtime, const Matrix* residual) const {
  for (std::int64_t m = 0; norm != nullptr && m < x.rows; ++m) normalize(x.row(m), 1, *norm, spec.norm.eps);
  runtime.threads->parallel_for(y.columns, [&](std::int64_t column) {
    const auto product = [&](std::int64_t m, std::int64_t n) {
      auto part = parts.begin();
      while (n >= part->weight->shape[0]) n -= part++->weight->shape[0];
      return dot(x.row(m), *part->weight, n, x.columns) + (part->bias != nullptr ? part->bias->at(n) : 0);
    };
    for (std::int64_t m = 0; m < y.rows; ++m) {
      float value = product(m, column);
      if (spec.epilogue.glu) value = value / (1 + std::exp(-value)) * product(m, column + y.columns);
      y.row(m)[column] = residual != nullptr ? value + residual->row(m)[column] : value;
    }
  });
}

/// Rotates heads, one after the other, by the position of their token: channels i and i + head_dim/2 are a pair.
void rotate(float* x, std::int64_t heads, std::int64_t position, const std::vector<float>& frequencies) {
  const auto half = static_cast<std::int64_t>(frequencies.size());
  for (std::int64_t i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * frequencies[static_cast<std::size_t>(i)];
    const float cosine = std::cos(angle), sine = std::sin(angle);
    for (float* head = x; head < x + heads * 2 * half; head += 2 * half) {
      const float a = head[i], b = head[i + half];
      head[i] = a * cosine - b * sine;
      head[i + half] = b * cosine + a * sine;
    }
  }
}

// ---- The model ---------------------------------------------------------------------------------------------------------------

/// A layer of the decoder, and the keys and values of the tokens so far.
struct Block {
  Linear qkv, o, gate_up, down;
  std::shared_ptr<const Tensor> q_norm = nullptr, k_norm = nullptr;  // [head_dim], of Qwen3; else null
  std::vector<float> keys = {}, values = {};                         // [positions, kv_heads·head_dim]
};

class Decoder {
 public:
  static Result<Decoder> open(const char* directory, int threads);

  const Config& config() const { return config_; }
  /// Reads tokens that follow those of earlier calls; the logits of the one to come.
  Result<std::vector<float>> read(std::span<const std::int64_t> tokens);

 private:
  /// Of the queries of the last tokens, over keys and values of all tokens up to each.
  void attend(Matrix& qkv, Block& block, Matrix& y);

  Config config_;
  Runtime runtime_;
  std::shared_ptr<const Tensor> embedding_;
  Linear head_ = {};
  std::vector<Block> blocks_;
  std::int64_t position_ = 0;  // of the next token
};

Result<Decoder> Decoder::open(const char* directory, int threads) {
  const auto checkpoint = Checkpoint::open(directory);
  if (!checkpoint) return checkpoint.status();
  const auto config = read_config(checkpoint->config());
  if (!config) return config.status();

  Decoder model;
  const Config& c = model.config_ = *config;
  model.runtime_.threads = make_executor(threads);
  const std::int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  const auto load_norm = [&](const std::string& name, std::int64_t n) { return load(*checkpoint, name + ".weight", {n}); };
  const auto load_layer = [&](const std::vector<Part>& parts, std::int64_t k, const LinearSpec& spec, const std::string& norm,
                              Linear& to) -> Status {
    Linear linear{.spec = spec};
    linear.spec.m_max = 512;  // of a prompt
    linear.spec.norm = {.kind = norm.empty() ? Norm::none : Norm::rms, .eps = static_cast<float>(c.norm_eps)};
    const Status status = take(load_linear(*checkpoint, parts, k, std::move(linear), model.runtime_), to);
    return status && !norm.empty() ? take(load_norm(norm, k), to.norm) : status;
  };
  const LinearSpec plain, swiglu{.epilogue = {.activation = Activation::silu, .glu = true}}, adds{.epilogue = {.residual = true}};
  for (std::int64_t i = 0; i < c.layers; ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".", attention = prefix + "self_attn.";
    Block block;
    const std::vector<Part> qkv{{attention + "q_proj", q}, {attention + "k_proj", kv}, {attention + "v_proj", kv}};
    const std::vector<Part> gate_up{{prefix + "mlp.gate_proj", c.intermediate}, {prefix + "mlp.up_proj", c.intermediate}};
    Status status = load_layer(qkv, c.hidden, plain, prefix + "input_layernorm", block.qkv);
    if (status) status = load_layer({{attention + "o_proj", c.hidden}}, q, adds, "", block.o);
    if (status) status = load_layer(gate_up, c.hidden, swiglu, prefix + "post_attention_layernorm", block.gate_up);
    if (status) status = load_layer({{prefix + "mlp.down_proj", c.hidden}}, c.intermediate, adds, "", block.down);
    if (status && checkpoint->find_tensor(attention + "q_norm.weight") != nullptr) {
      status = take(load_norm(attention + "q_norm", c.head_dim), block.q_norm);
      if (status) status = take(load_norm(attention + "k_norm", c.head_dim), block.k_norm);
    }
    if (!status) return status;
    model.blocks_.push_back(std::move(block));
  }
  const std::string embedding = "model.embed_tokens", head = c.tied ? embedding : "lm_head";
  Status status = load_layer({{head, c.vocabulary}}, c.hidden, plain, "model.norm", model.head_);
  if (status && c.tied && !model.head_.packed)
    model.embedding_ = model.head_.parts.front().weight;
  else if (status)
    status = take(load(*checkpoint, embedding + ".weight", {c.vocabulary, c.hidden}), model.embedding_);
  if (!status) return status;
  return model;
}

Result<std::vector<float>> Decoder::read(std::span<const std::int64_t> tokens) {
  const Config& c = config_;
  const auto m = static_cast<std::int64_t>(tokens.size());
  if (m == 0) return invalid("no token to read");
  if (m > c.positions - position_)
    return invalid("more than the " + std::to_string(c.positions) + " tokens of max_position_embeddings");
  Matrix x(m, c.hidden), h(m, c.hidden), qkv(m, (c.heads + 2 * c.kv_heads) * c.head_dim), mixed(m, c.heads * c.head_dim),
      gated(m, c.intermediate);
  for (std::int64_t i = 0; i < m; ++i) {
    const std::int64_t token = tokens[static_cast<std::size_t>(i)];
    if (token < 0 || token >= c.vocabulary)
      return invalid("token " + std::to_string(token) + " of a vocabulary of " + std::to_string(c.vocabulary));
    for (std::int64_t j = 0; j < c.hidden; ++j) x.row(i)[j] = embedding_->at(token * c.hidden + j);
  }
  // docs: begin blocks
  for (Block& block : blocks_) {
    if (const Status status = block.qkv.run(x, qkv, runtime_); !status) return status;
    attend(qkv, block, mixed);
    if (const Status status = block.o.run(mixed, h, runtime_, &x); !status) return status;
    if (const Status status = block.gate_up.run(h, gated, runtime_); !status) return status;
    if (const Status status = block.down.run(gated, x, runtime_, &h); !status) return status;
  }
  // docs: end blocks
  position_ += m;
  Matrix last(1, c.hidden), logits(1, c.vocabulary);
  std::copy_n(x.row(m - 1), c.hidden, last.row(0));
  if (const Status status = head_.run(last, logits, runtime_); !status) return status;
  return std::move(logits.values);
}

void Decoder::attend(Matrix& qkv, Block& block, Matrix& y) {
  const std::int64_t head = config_.head_dim, stride = config_.kv_heads * head, sharing = config_.heads / config_.kv_heads;
  for (std::int64_t m = 0; m < qkv.rows; ++m) {
    float *const q = qkv.row(m), *const k = q + config_.heads * head, *const v = k + stride;
    if (block.q_norm != nullptr) {
      normalize(q, config_.heads, *block.q_norm, config_.norm_eps);
      normalize(k, config_.kv_heads, *block.k_norm, config_.norm_eps);
    }
    rotate(q, config_.heads + config_.kv_heads, position_ + m, config_.frequencies);
    block.keys.insert(block.keys.end(), k, v);
    block.values.insert(block.values.end(), v, v + stride);
  }
  const float scale = 1 / std::sqrt(static_cast<float>(head));
  runtime_.threads->parallel_for(config_.heads, [&](std::int64_t h) {
    const float* const keys = block.keys.data() + h / sharing * head;
    const float* const values = block.values.data() + h / sharing * head;
    std::vector<float> weights;
    for (std::int64_t m = 0; m < qkv.rows; ++m) {
      weights.resize(static_cast<std::size_t>(position_ + m + 1));
      std::int64_t t = 0;
      for (float& weight : weights) weight = scale * dot(qkv.row(m) + h * head, keys + t++ * stride, head);
      const float largest = *std::ranges::max_element(weights);
      float total = 0;
      for (float& weight : weights) total += weight = std::exp(weight - largest);
      float* const out = y.row(m) + h * head;
      std::fill_n(out, head, 0.0f);
      t = 0;
      for (const float weight : weights) {
        const float* const value = values + t++ * stride;
        for (std::int64_t i = 0; i < head; ++i) out[i] += weight / total * value[i];
      }
    }
  });
}

// ---- The program -------------------------------------------------------------------------------------------------------------

struct Arguments {
  const char* directory = nullptr;
  std::vector<std::int64_t> prompt;
  std::int64_t tokens = 32;
  std::int64_t threads = 0;  // 0: one for each core
  const char* logits = nullptr;
};

/// "1,2,3": nothing where there is anything else.
std::optional<std::vector<std::int64_t>> numbers(const char* text) {
  std::vector<std::int64_t> all;
  for (const char* const end = text + std::strlen(text);; ++text) {
    const auto [after, failure] = std::from_chars(text, end, all.emplace_back());
    if (failure != std::errc() || (after != end && *after != ',')) return std::nullopt;
    if (after == end) return all;
    text = after;
  }
}

std::optional<Arguments> parse(std::span<char* const> words) {
  Arguments arguments;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string option = words[i];
    if (!option.starts_with("--")) {
      if (std::exchange(arguments.directory, words[i]) != nullptr) return std::nullopt;
      continue;
    }
    if (++i == words.size()) return std::nullopt;
    const auto values = numbers(words[i]);
    const bool one = values && values->size() == 1 && values->front() >= 1;
    if (option == "--logits")
      arguments.logits = words[i];
    else if (option == "--prompt" && values)
      arguments.prompt = *values;
    else if (option == "--tokens" && one)
      arguments.tokens = values->front();
    else if (option == "--threads" && one && values->front() <= 4096)
      arguments.threads = values->front();
    else
      return std::nullopt;
  }
  if (arguments.directory == nullptr || arguments.prompt.empty()) return std::nullopt;
  return arguments;
}

Status write_logits(const char* path, const std::vector<float>& logits) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path, "w"), &std::fclose);
  bool written = file != nullptr;
  for (const float logit : logits) written = written && std::fprintf(file.get(), "%.9g\n", static_cast<double>(logit)) > 0;
  if (written && std::fflush(file.get()) == 0) return {};
  return {StatusCode::io_error, std::string("cannot write ") + path};
}

Status generate(const Arguments& arguments) {
  const int threads = arguments.threads != 0 ? static_cast<int>(arguments.threads) : default_executor().threads();
  auto model = Decoder::open(arguments.directory, threads);
  if (!model) return model.status();
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::vector<std::int64_t> unread = arguments.prompt, generated;
  std::vector<float> logits;
  Clock::time_point read;  // when the prompt had been
  while (static_cast<std::int64_t>(generated.size()) < arguments.tokens) {
    auto next = model->read(unread);
    if (!next) return next.status();
    logits = *std::move(next);
    if (generated.empty()) read = Clock::now();
    unread = {std::ranges::max_element(logits) - logits.begin()};
    generated.push_back(unread.front());
    std::printf("%s%lld", generated.size() == 1 ? "" : ",", static_cast<long long>(unread.front()));
    std::fflush(stdout);
  }
  const auto rate = [](std::size_t tokens, Clock::duration time) {
    return static_cast<double>(tokens) / std::chrono::duration<double>(time).count();
  };
  std::printf("\nprompt: %zu tokens, %.1f tokens/s", arguments.prompt.size(), rate(arguments.prompt.size(), read - start));
  if (generated.size() > 1)
    std::printf("; then %zu tokens, %.1f tokens/s", generated.size() - 1, rate(generated.size() - 1, Clock::now() - read));
  std::printf("\n");
  return arguments.logits == nullptr ? Status() : write_logits(arguments.logits, logits);
}

}  // namespace

int main(int argc, char** argv) try {
  const auto arguments = parse({argv + 1, argv + argc});
  if (!arguments) {
    std::fprintf(stderr, "usage: %s DIR --prompt 1,2,3 [--tokens 32] [--threads N] [--logits FILE]\n", argv[0]);
    return 2;
  }
  const Status status = generate(*arguments);
  if (!status) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status ? 0 : 1;
} catch (const std::exception& failure) {  // of the standard library: no memory
  std::fprintf(stderr, "%s\n", failure.what());
  return 1;
}
