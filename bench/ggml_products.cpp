// Products of quantized weights on ggml's CPU backend and on libggml-nibble.so, in one process and by turns.
//
//   build/bin/ggml_products [THREADS] [ROUNDS] > bench/results/ggml.json
//
// Each layer has so many copies of its weight that none is in a cache when it is read again; a call is a graph of one product with each, of
// many tokens, which are bound by arithmetic, with two.
// The two backends take turns in random order, and the median of the rounds counts. Results are compared first. Weights of ggml's are packed anew
// where it has kernels for that, as llama.cpp does.
#include <fmt/format.h>
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "nibble/nibble.h"

namespace {

constexpr std::size_t kColdBytes = 192 << 20;  // of copies of a weight: more than caches hold
constexpr int kMostCopies = 64;

/// `experts` matrices W[n,k], of which a token multiplies `top_k`; one matrix that all do: 1 and 1.
struct Layer {
  const char* name;
  std::int64_t n, k, experts, top_k;
};
constexpr Layer kLayers[] = {{"Llama 3.1 8B, down", 4096, 14336, 1, 1}, {"Qwen3 30B-A3B, gate of experts", 768, 2048, 128, 8}};
constexpr ggml_type kTypes[] = {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K};
constexpr std::int64_t kTokens[] = {1, 8, 64, 512};

ggml_context_ptr make_context() { return ggml_context_ptr(ggml_init({4 << 20, nullptr, true})); }

/// Blocks of random weights; rows repeat, which no kernel sees.
std::vector<std::uint8_t> random_blocks(ggml_type type, const Layer& layer) {
  constexpr std::int64_t kRows = 64;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 0.05f);
  std::vector<float> w(static_cast<std::size_t>(kRows * layer.k));
  for (float& value : w) value = normal(random);
  const std::size_t row = ggml_row_size(type, layer.k);
  std::vector<std::uint8_t> blocks(row * static_cast<std::size_t>(layer.n * layer.experts));
  ggml_quantize_chunk(type, w.data(), blocks.data(), 0, kRows, layer.k, nullptr);
  for (std::size_t i = row * kRows; i < blocks.size(); ++i) blocks[i] = blocks[i - row * kRows];
  return blocks;
}

/// A backend with its copies of a layer's weight, and graphs of products with them.
class Side {
 public:
  Side(ggml_backend_dev_t device, ggml_type type, const Layer& layer, const std::vector<std::uint8_t>& blocks, int threads)
      : layer_(layer), backend_(ggml_backend_dev_init(device, nullptr)), weights_(make_context()) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"))(
        backend_.get(), threads);
    const auto copies = std::clamp<std::size_t>((kColdBytes + blocks.size() - 1) / blocks.size(), 1, kMostCopies);
    for (std::size_t i = 0; i < copies; ++i)
      copies_.push_back(ggml_new_tensor_3d(weights_.get(), type, layer.k, layer.n, layer.experts));
    weight_buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(weights_.get(), weight_type(device, type)));
    if (weight_buffer_ == nullptr) throw std::runtime_error("no memory for weights");
    for (ggml_tensor* w : copies_) ggml_backend_tensor_set(w, blocks.data(), 0, blocks.size());
  }

  /// The kind of memory in which a weight of the type is multiplied fastest, as llama.cpp chooses it: the first one that can, of those in which
  /// ggml packs weights anew (for AMX, or several rows side by side), then of all.
  ggml_backend_buffer_type_t weight_type(ggml_backend_dev_t device, ggml_type type) const {
    const ggml_context_ptr context = make_context();
    ggml_context* const c = context.get();
    const bool experts = layer_.experts > 1;
    ggml_tensor* const w = ggml_new_tensor_3d(c, type, layer_.k, layer_.n, layer_.experts);
    ggml_tensor* const op = experts ? ggml_mul_mat_id(c, w, ggml_new_tensor_3d(c, GGML_TYPE_F32, layer_.k, 1, 512),
                                                      ggml_new_tensor_2d(c, GGML_TYPE_I32, layer_.top_k, 512))
                                    : ggml_mul_mat(c, w, ggml_new_tensor_2d(c, GGML_TYPE_F32, layer_.k, 512));
    void* const address =
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
    if (address == nullptr) return ggml_backend_dev_buffer_type(device);
    for (auto* of = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(address)(device); of != nullptr && *of != nullptr;
         ++of) {
      const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(*of, 0));
      w->buffer = empty.get();
      if (ggml_backend_dev_supports_op(device, op)) return *of;
    }
    return ggml_backend_dev_buffer_type(device);
  }

  /// Makes the graph for so many tokens.
  void prepare(std::int64_t tokens) {
    others_ = make_context();
    ggml_context* c = others_.get();
    const bool experts = layer_.experts > 1;
    ggml_tensor* a = experts ? ggml_new_tensor_3d(c, GGML_TYPE_F32, layer_.k, 1, tokens)
                             : ggml_new_tensor_2d(c, GGML_TYPE_F32, layer_.k, tokens);
    ggml_tensor* ids = ggml_new_tensor_2d(c, GGML_TYPE_I32, layer_.top_k, tokens);
    graph_ = ggml_new_graph(c);
    count_ = tokens < 64 ? copies_.size() : std::min<std::size_t>(copies_.size(), 2);
    for (ggml_tensor* w : std::span(copies_).first(count_)) {
      d_ = experts ? ggml_mul_mat_id(c, w, a, ids) : ggml_mul_mat(c, w, a);
      ggml_build_forward_expand(graph_, d_);
    }
    other_buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(
        c, ggml_backend_dev_buffer_type(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU))));
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>(ggml_nelements(a)));
    for (float& value : values) value = normal(random);
    ggml_backend_tensor_set(a, values.data(), 0, values.size() * sizeof(float));
    std::vector<std::int32_t> chosen, all(static_cast<std::size_t>(layer_.experts));
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int32_t>(i);
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::ranges::shuffle(all, random);
      chosen.insert(chosen.end(), all.begin(), all.begin() + layer_.top_k);
    }
    ggml_backend_tensor_set(ids, chosen.data(), 0, chosen.size() * sizeof(std::int32_t));
  }

  /// Microseconds of a product.
  double run() {
    const auto begin = std::chrono::steady_clock::now();
    if (ggml_backend_graph_compute(backend_.get(), graph_) != GGML_STATUS_SUCCESS) throw std::runtime_error("a product failed");
    const std::chrono::duration<double, std::micro> us = std::chrono::steady_clock::now() - begin;
    return us.count() / static_cast<double>(count_);
  }

  std::vector<float> result() const {
    std::vector<float> values(static_cast<std::size_t>(ggml_nelements(d_)));
    ggml_backend_tensor_get(d_, values.data(), 0, values.size() * sizeof(float));
    return values;
  }

 private:
  const Layer& layer_;
  ggml_backend_ptr backend_;
  ggml_context_ptr weights_, others_;
  ggml_backend_buffer_ptr weight_buffer_, other_buffer_;
  std::vector<ggml_tensor*> copies_;
  std::size_t count_ = 0;  // of them, in the graph
  ggml_tensor* d_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// Of two results, the relative L2 distance.
double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * static_cast<double>(a[i] - b[i]);
    norm += b[i] * static_cast<double>(b[i]);
  }
  return std::sqrt(difference / norm);
}

}  // namespace

int main(int argc, char** argv) try {
  nib_cpu cpu{.struct_size = sizeof cpu};
  if (nib_get_cpu(&cpu) != NIB_OK) throw std::runtime_error(nib_last_error());
  const int threads = argc > 1 ? std::atoi(argv[1]) : cpu.cores;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 7;
  ggml_backend_load_all();
  setenv("NIBBLE_GGML_TYPES", "all", 1);
  ggml_backend_reg_t nibble = ggml_backend_load(NIBBLE_GGML_BACKEND);
  ggml_backend_dev_t theirs = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (nibble == nullptr || theirs == nullptr || threads < 1 || rounds < 1)
    throw std::runtime_error("usage: ggml_products [THREADS] [ROUNDS]; it takes libggml-nibble.so and ggml's CPU backend");
  std::mt19937 random(3);
  fmt::print(
      "{{\n \"kind\": \"ggml\", \"cpu\": \"{}\", \"isa\": \"{}\", \"threads\": {}, \"nibble\": \"{}\", \"ggml\": \"{}\",\n "
      "\"results\": [",
      cpu.name, cpu.isa, threads, nib_version_string(), ggml_version());
  const char* comma = "\n";
  for (const Layer& layer : kLayers)
    for (const ggml_type type : kTypes) {
      const std::vector<std::uint8_t> blocks = random_blocks(type, layer);
      Side sides[] = {{ggml_backend_reg_dev_get(nibble, 0), type, layer, blocks, threads},
                      {theirs, type, layer, blocks, threads}};
      for (const std::int64_t tokens : kTokens) {
        for (Side& side : sides) side.prepare(tokens), side.run();
        if (const double far = distance(sides[0].result(), sides[1].result()); far > 0.02)
          throw std::runtime_error(
              fmt::format("{} {} M={}: results differ by {:.3f}", layer.name, ggml_type_name(type), tokens, far));
        std::vector<double> us[2];
        for (int round = 0; round < rounds; ++round) {
          const std::size_t first = random() % 2;
          for (const std::size_t i : {first, 1 - first}) us[i].push_back(sides[i].run());
        }
        fmt::print(
            "{}  {{\"layer\": \"{}\", \"n\": {}, \"k\": {}, \"experts\": {}, \"top_k\": {}, \"type\": \"{}\", \"tokens\": {}, "
            "\"nibble_us\": {:.1f}, "
            "\"ggml_us\": {:.1f}}}",
            comma, layer.name, layer.n, layer.k, layer.experts, layer.top_k, ggml_type_name(type), tokens, median(us[0]),
            median(us[1]));
        comma = ",\n";
        std::fflush(stdout);
        fmt::print(stderr, "{:32} {:5} {:4} tokens  nibble {:9.1f} µs, ggml {:9.1f} µs: {:.2f}×\n", layer.name,
                   ggml_type_name(type), tokens, median(us[0]), median(us[1]), median(us[1]) / median(us[0]));
      }
    }
  fmt::print("\n ]\n}}\n");
  return 0;
} catch (const std::exception& e) {
  fmt::print(stderr, "ggml_products: {}\n", e.what());
  return 1;
}
