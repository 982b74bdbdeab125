// libggml-nibble.so in ggml: products against f64 and against ggml's CPU backend, weights read back, and what is refused.
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <ggml.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr ggml_type kTypes[] = {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K};

/// The test runs once for int8 activations and once, NIBBLE_GGML_ACT_SCHEME=none, for activations as they are.
bool quantizes() {
  const char* scheme = std::getenv("NIBBLE_GGML_ACT_SCHEME");
  return scheme == nullptr || std::string_view(scheme) != "none";
}

ggml_backend_dev_t nibble_device() {
  static const ggml_backend_reg_t loaded = (setenv("NIBBLE_GGML_TYPES", "all", 1), ggml_backend_load(NIBBLE_GGML_BACKEND));
  return loaded == nullptr ? nullptr : ggml_backend_reg_dev_get(loaded, 0);
}

ggml_backend_dev_t cpu_device() {
  static const bool loaded = (ggml_backend_load_all(), true);
  return loaded ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : nullptr;
}

void set_threads(ggml_backend_t backend, int threads) {
  ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
  void* function = ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
  ASSERT_NE(function, nullptr);
  reinterpret_cast<ggml_backend_set_n_threads_t>(function)(backend, threads);
}

ggml_context_ptr make_context() { return ggml_context_ptr(ggml_init({1 << 20, nullptr, true})); }

std::vector<float> random_floats(std::int64_t count, unsigned seed, float deviation) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

/// Random weights of a type: their blocks, and what these stand for.
struct Blocks {
  Blocks(ggml_type type, std::int64_t n, std::int64_t k) : bytes(ggml_row_size(type, k) * n), values(n * k) {
    const std::vector<float> w = random_floats(n * k, 1, 0.05f);
    ggml_quantize_chunk(type, w.data(), bytes.data(), 0, n, k, nullptr);
    ggml_get_type_traits(type)->to_float(bytes.data(), values.data(), n * k);
  }
  std::vector<std::uint8_t> bytes;
  std::vector<float> values;
};

/// Which experts there are, and how many of them a token goes through, each with a row of A of its own or with the token's.
struct Experts {
  std::int64_t count, top_k;
  bool own_rows;
};

/// A product of a weight in nibble's memory, and activations and a result in the CPU's.
struct Product {
  Product(ggml_type type, std::int64_t n, std::int64_t k, std::int64_t tokens, Experts experts)
      : weights(make_context()), others(make_context()) {
    w = ggml_new_tensor_3d(weights.get(), type, k, n, experts.count);
    a = ggml_new_tensor_3d(others.get(), GGML_TYPE_F32, k, experts.own_rows ? experts.top_k : 1, tokens);
    // The first ids of a row for every expert, as a router has them.
    ggml_tensor* all = ggml_new_tensor_2d(others.get(), GGML_TYPE_I32, experts.count, tokens);
    ids = ggml_view_2d(others.get(), all, experts.top_k, tokens, all->nb[1], 0);
    d = ggml_mul_mat_id(others.get(), w, a, ids);
    graph = ggml_new_graph(others.get());
    ggml_build_forward_expand(graph, d);
    std::mt19937 random(5);
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::vector<std::int32_t> order(experts.count);
      std::iota(order.begin(), order.end(), 0);
      std::ranges::shuffle(order, random);
      routing.insert(routing.end(), order.begin(), order.end());
    }
  }
  Product(ggml_type type, std::int64_t n, std::int64_t k, std::array<std::int64_t, 3> m, std::int64_t row = 0)
      : weights(make_context()), others(make_context()) {
    w = ggml_new_tensor_2d(weights.get(), type, k, n);
    ggml_tensor* whole = ggml_new_tensor_4d(others.get(), GGML_TYPE_F32, std::max(row, k), m[0], m[1], m[2]);
    a = row == 0 ? whole : ggml_view_2d(others.get(), whole, k, m[0], whole->nb[1], 0);
    d = ggml_mul_mat(others.get(), w, a);
    graph = ggml_new_graph(others.get());
    ggml_build_forward_expand(graph, d);
  }
  /// Places the weight, again if it has a place, and sets its blocks.
  void place(ggml_backend_buffer_type_t type, const std::vector<std::uint8_t>& blocks) {
    w->buffer = nullptr;
    w->data = w->extra = nullptr;
    weight_buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), type));
    ggml_backend_tensor_set(w, blocks.data(), 0, blocks.size());
    if (other_buffer != nullptr) return;
    other_buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(others.get(), ggml_backend_dev_buffer_type(cpu_device())));
    activations = random_floats(ggml_nelements(a->view_src == nullptr ? a : a->view_src), 2, 1.0f);
    ggml_backend_tensor_set(a->view_src == nullptr ? a : a->view_src, activations.data(), 0, activations.size() * sizeof(float));
    if (ids != nullptr) ggml_backend_tensor_set(ids->view_src, routing.data(), 0, routing.size() * sizeof(std::int32_t));
  }
  /// The row of A that row i of D is a product of, and the matrix.
  std::int64_t row_of(std::int64_t i) const { return ids != nullptr && a->ne[1] == 1 ? i / ids->ne[0] : i; }
  std::int64_t matrix_of(std::int64_t i) const {
    return ids == nullptr ? 0 : routing[i / ids->ne[0] * w->ne[2] + i % ids->ne[0]];
  }
  std::vector<float> run(ggml_backend_dev_t device, int threads = 2) {
    const ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    set_threads(backend.get(), threads);
    EXPECT_EQ(ggml_backend_graph_compute(backend.get(), graph), GGML_STATUS_SUCCESS);
    std::vector<float> result(ggml_nelements(d));
    ggml_backend_tensor_get(d, result.data(), 0, result.size() * sizeof(float));
    return result;
  }

  ggml_context_ptr weights, others;
  ggml_backend_buffer_ptr weight_buffer, other_buffer;
  ggml_tensor *w, *a, *d, *ids = nullptr;
  ggml_cgraph* graph;
  std::vector<float> activations;
  std::vector<std::int32_t> routing;
};

/// What a result may differ from the product of the same weights in f64.
struct Bound {
  double quantization;  // of activations, by half a step of the largest of `block` channels over 127 steps
  double rounding;      // of f32 sums
};

/// Compares both backends with f64, one output after the other.
void check(Product& product, const Blocks& blocks) {
  const std::int64_t n = product.w->ne[1], k = product.w->ne[0], m = ggml_nrows(product.d);
  const std::int64_t row = ggml_is_contiguous(product.a) ? k : static_cast<std::int64_t>(product.a->nb[1] / sizeof(float));
  ASSERT_TRUE(ggml_backend_dev_supports_op(nibble_device(), product.d));
  product.place(ggml_backend_dev_buffer_type(nibble_device()), blocks.bytes);
  ASSERT_TRUE(ggml_backend_dev_supports_op(nibble_device(), product.d));
  const std::vector<float> ours = product.run(nibble_device());
  product.place(ggml_backend_dev_buffer_type(cpu_device()), blocks.bytes);
  ASSERT_FALSE(ggml_backend_dev_supports_op(nibble_device(), product.d));
  const std::vector<float> theirs = product.run(cpu_device());

  const std::int64_t their_block = ggml_blck_size(product.w->type);
  double our_error = 0, their_error = 0;
  for (std::int64_t i = 0; i < m; ++i) {
    const float* a = product.activations.data() + product.row_of(i) * row;
    const float* matrix = blocks.values.data() + product.matrix_of(i) * n * k;
    std::vector<double> step(k), their_step(k);  // the largest error of an activation
    const auto largest = [&](std::int64_t channel, std::int64_t block) {
      double value = 0;
      for (std::int64_t c = channel / block * block; c < channel / block * block + block; ++c)
        value = std::max(value, static_cast<double>(std::abs(a[c])));
      return value;
    };
    for (std::int64_t c = 0; c < k; ++c) {
      step[c] = largest(c, 32) / 254 * (1 + 1e-6);
      // ggml rounds the scales of its blocks of 32 to f16, those of 256 not.
      their_step[c] = largest(c, their_block) * (1.0 / 254 * (1 + 1e-6) + (their_block == 32 ? std::ldexp(1.0, -11) : 0));
    }
    for (std::int64_t j = 0; j < n; ++j) {
      const float* w = matrix + j * k;
      double exact = 0, quantization = 0, their_quantization = 0, magnitude = 0;
      for (std::int64_t c = 0; c < k; ++c) {
        double widest = 0;  // of the group: scale · code and an offset, which are added apart, are at most twice as large
        for (std::int64_t g = c / 32 * 32; g < c / 32 * 32 + 32; ++g)
          widest = std::max(widest, static_cast<double>(std::abs(w[g])));
        exact += static_cast<double>(w[c]) * a[c];
        quantization += std::abs(w[c]) * step[c];
        their_quantization += std::abs(w[c]) * their_step[c];
        magnitude += 3 * widest * std::abs(a[c]);
      }
      // Two sums of K / 16 groups at most, and a few operations on each term.
      const double rounding = static_cast<double>(k / 8 + 16) * std::ldexp(1.0, -24) * magnitude;
      const double bound = (quantizes() ? quantization : 0) + rounding;
      const double ours_here = ours[i * n + j], theirs_here = theirs[i * n + j];
      ASSERT_LE(std::abs(ours_here - exact), bound) << "M = " << i << ", N = " << j << ", exactly " << exact;
      ASSERT_LE(std::abs(ours_here - theirs_here), bound + their_quantization + rounding) << "M = " << i << ", N = " << j;
      our_error += (ours_here - exact) * (ours_here - exact);
      their_error += (theirs_here - exact) * (theirs_here - exact);
    }
  }
  // At least as accurate, but for luck, which many outputs even out; without quantized activations by far.
  if (n * m >= 200) {
    EXPECT_LE(std::sqrt(our_error), (quantizes() ? 1.1 : 0.01) * std::sqrt(their_error));
  }
}

class GgmlProducts : public testing::TestWithParam<ggml_type> {};
INSTANTIATE_TEST_SUITE_P(OfType, GgmlProducts, testing::ValuesIn(kTypes),
                         [](const auto& type) { return std::string(ggml_type_name(type.param)); });

TEST_P(GgmlProducts, AreWithinTheirBoundsOfF64AndOfTheCpuBackend) {
  struct Shape {
    std::int64_t n, k, m;
  };
  for (const auto& [n, k, m] : {Shape{64, 256, 1}, Shape{33, 512, 7}, Shape{1, 256, 3}, Shape{100, 768, 64}}) {
    SCOPED_TRACE(testing::Message() << "W[" << n << "," << k << "], M = " << m);
    Product product(GetParam(), n, k, {m, 1, 1});
    check(product, Blocks(GetParam(), n, k));
  }
}

TEST_P(GgmlProducts, TakeMoreRowsThanAPlanDoes) {
  Product product(GetParam(), 5, 256, {600, 1, 1});
  check(product, Blocks(GetParam(), 5, 256));
}

TEST_P(GgmlProducts, TakeBatchesOfActivations) {
  for (const std::array<std::int64_t, 3>& m : {std::array<std::int64_t, 3>{3, 2, 2}, {1, 3, 2}}) {
    Product product(GetParam(), 40, 256, m);
    if (m[0] == 1) product.a->nb[1] = sizeof(float);  // the distance of rows where there is one says nothing
    check(product, Blocks(GetParam(), 40, 256));
  }
}

TEST_P(GgmlProducts, TakeRowsThatLieApart) {
  Product product(GetParam(), 40, 256, {5, 1, 1}, 300);
  check(product, Blocks(GetParam(), 40, 256));
}

TEST_P(GgmlProducts, OfExpertsAreWithinTheirBounds) {
  struct Shape {
    std::int64_t n, k, tokens;
    Experts experts;
  };
  for (const auto& [n, k, tokens, experts] : {Shape{40, 256, 1, {8, 3, false}}, Shape{40, 256, 1, {8, 3, true}},
                                              Shape{33, 512, 9, {5, 2, false}}, Shape{33, 512, 50, {5, 2, true}}}) {
    SCOPED_TRACE(testing::Message() << experts.count << " of W[" << n << "," << k << "], " << tokens << " tokens, "
                                    << experts.top_k << (experts.own_rows ? " rows each" : " experts each"));
    Product product(GetParam(), n, k, tokens, experts);
    check(product, Blocks(GetParam(), n * experts.count, k));
  }
}

TEST_P(GgmlProducts, OfExpertsTakeMoreRowsThanAPlanDoes) {
  Product product(GetParam(), 3, 256, 700, {7, 6, false});
  check(product, Blocks(GetParam(), 3 * 7, 256));
}

TEST_P(GgmlProducts, HaveTheSameBitsOnAnyNumberOfThreads) {
  const Blocks blocks(GetParam(), 100, 512);
  Product product(GetParam(), 100, 512, {9, 1, 1});
  product.place(ggml_backend_dev_buffer_type(nibble_device()), blocks.bytes);
  const std::vector<float> one = product.run(nibble_device(), 1);
  for (int threads : {2, 3}) EXPECT_EQ(product.run(nibble_device(), threads), one) << threads;
}

/// As test-backend-ops has them: the backend is asked before anything is placed, and the weight is the CPU's then.
TEST_P(GgmlProducts, TakeAWeightThatIsPlacedLater) {
  const Blocks blocks(GetParam(), 40, 256);
  Product product(GetParam(), 40, 256, {5, 1, 1});
  product.place(ggml_backend_dev_buffer_type(nibble_device()), blocks.bytes);
  const std::vector<float> packed = product.run(nibble_device());
  product.place(ggml_backend_dev_buffer_type(cpu_device()), blocks.bytes);
  EXPECT_EQ(product.run(nibble_device()), packed);
}

void give_the_blocks_back(ggml_type type, std::int64_t matrices) {
  const std::int64_t n = 7, k = 512;
  const ggml_context_ptr context = make_context();
  ggml_tensor* w = ggml_new_tensor_3d(context.get(), type, k, n, matrices);
  ggml_tensor* row = ggml_view_2d(context.get(), w, k, 1, w->nb[1], 2 * w->nb[1]);
  const ggml_backend_buffer_ptr buffer(
      ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_dev_buffer_type(nibble_device())));
  std::vector<std::uint8_t> bytes(ggml_nbytes(w)), back(bytes.size());
  ggml_backend_tensor_get(w, back.data(), 0, back.size());
  EXPECT_EQ(back, bytes) << "zeros, before anything is written";

  std::mt19937 random(3);  // any bits, scales that are infinite or no numbers among them
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
  ggml_backend_tensor_set(w, bytes.data(), 0, bytes.size());
  ggml_backend_tensor_get(w, back.data(), 0, back.size());
  EXPECT_EQ(back, bytes);

  const std::size_t begin = w->nb[1] + 5, size = (matrices > 1 ? 9 : 3) * w->nb[1] + 1;  // of experts into the next one
  for (std::size_t i = begin; i < begin + size; ++i) bytes[i] ^= 0x5a;
  ggml_backend_tensor_set(w, bytes.data() + begin, begin, size);
  ggml_backend_tensor_get(w, back.data(), 0, back.size());
  EXPECT_EQ(back, bytes) << "a part is written";

  back.assign(w->nb[1] - 3, 0);
  ggml_backend_tensor_get(row, back.data(), 3, back.size());
  EXPECT_EQ(back, std::vector(bytes.begin() + 2 * w->nb[1] + 3, bytes.begin() + 3 * w->nb[1])) << "through a view";

  ggml_backend_buffer_clear(buffer.get(), 0x11);
  back.resize(bytes.size());
  ggml_backend_tensor_get(w, back.data(), 0, back.size());
  EXPECT_EQ(back, std::vector<std::uint8_t>(bytes.size(), 0x11));
}

/// Those of a matrix, and of three, the first of which is that matrix.
TEST_P(GgmlProducts, GiveTheBlocksBack) {
  for (const std::int64_t matrices : {1, 3}) {
    SCOPED_TRACE(testing::Message() << matrices << " matrices");
    give_the_blocks_back(GetParam(), matrices);
  }
}

TEST(GgmlBackend, IsAnAcceleratorWithMemoryOfItsOwnForWeights) {
  EXPECT_EQ(ggml_backend_dev_type(nibble_device()), GGML_BACKEND_DEVICE_TYPE_ACCEL);
  EXPECT_STREQ(ggml_backend_dev_name(nibble_device()), "nibble");
  EXPECT_FALSE(ggml_backend_buft_is_host(ggml_backend_dev_buffer_type(nibble_device())));
  const ggml_backend_ptr backend(ggml_backend_dev_init(nibble_device(), nullptr));
  EXPECT_EQ(ggml_backend_get_default_buffer_type(backend.get()), ggml_backend_cpu_buffer_type());
}

TEST(GgmlBackend, RefusesWhatItDoesNotMultiply) {
  const ggml_context_ptr context = make_context();
  ggml_context* c = context.get();
  const auto supports = [](ggml_tensor* op) { return ggml_backend_dev_supports_op(nibble_device(), op); };
  const auto tensor = [&](ggml_type type, std::int64_t k, std::int64_t n, std::int64_t b = 1) {
    return ggml_new_tensor_3d(c, type, k, n, b);
  };
  ggml_tensor* w = tensor(GGML_TYPE_Q4_0, 64, 48);
  ggml_tensor* a = tensor(GGML_TYPE_F32, 64, 4);
  EXPECT_TRUE(supports(ggml_mul_mat(c, w, a)));
  for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_IQ4_NL, GGML_TYPE_MXFP4})
    EXPECT_FALSE(supports(ggml_mul_mat(c, tensor(type, 64, 48), a))) << ggml_type_name(type);
  EXPECT_FALSE(supports(ggml_mul_mat(c, tensor(GGML_TYPE_Q4_0, 64, 48, 2), tensor(GGML_TYPE_F32, 64, 4, 2))))
      << "weights in batches";
  ggml_tensor* experts = tensor(GGML_TYPE_Q4_0, 64, 48, 6);
  ggml_tensor* ids = ggml_new_tensor_2d(c, GGML_TYPE_I32, 4, 3);
  EXPECT_TRUE(supports(ggml_mul_mat_id(c, experts, tensor(GGML_TYPE_F32, 64, 4, 3), ids)));
  EXPECT_FALSE(supports(ggml_mul_mat_id(c, experts, tensor(GGML_TYPE_F32, 64, 2, 3), ids))) << "rows for every other expert";
  EXPECT_FALSE(supports(ggml_mul_mat_id(c, tensor(GGML_TYPE_F32, 64, 48, 6), tensor(GGML_TYPE_F32, 64, 4, 3), ids)))
      << "f32 experts";
  EXPECT_FALSE(supports(ggml_mul_mat(c, w, tensor(GGML_TYPE_F16, 64, 4)))) << "f16 activations";
  EXPECT_FALSE(supports(ggml_mul_mat(c, w, ggml_permute(c, tensor(GGML_TYPE_F32, 64, 4, 2), 0, 2, 1, 3)))) << "permuted batches";
  EXPECT_FALSE(supports(ggml_mul_mat(c, ggml_view_2d(c, w, 64, 8, w->nb[1], 0), a))) << "a part of a weight";
  EXPECT_FALSE(supports(ggml_mul_mat(c, ggml_cast(c, tensor(GGML_TYPE_F32, 64, 48), GGML_TYPE_Q8_0), a))) << "a computed weight";
  EXPECT_FALSE(supports(ggml_get_rows(c, w, ggml_new_tensor_1d(c, GGML_TYPE_I32, 3))));
  EXPECT_FALSE(supports(ggml_add(c, a, a)));
}

/// Of a graph with other operations the scheduler gives it the products alone, and results need no copies.
TEST(GgmlBackend, SharesAGraphWithTheCpuBackend) {
  const std::int64_t n = 64, k = 256, m = 5;
  const Blocks blocks(GGML_TYPE_Q4_0, n, k);
  const ggml_context_ptr weights = make_context(), context = make_context();
  ggml_tensor* w = ggml_new_tensor_2d(weights.get(), GGML_TYPE_Q4_0, k, n);
  const ggml_backend_buffer_ptr buffer(
      ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), ggml_backend_dev_buffer_type(nibble_device())));
  ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  ggml_backend_tensor_set(w, blocks.bytes.data(), 0, blocks.bytes.size());

  ggml_tensor* a = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, k, m);
  ggml_set_input(a);
  ggml_tensor* product = ggml_mul_mat(context.get(), w, ggml_scale(context.get(), a, 2.0f));
  ggml_tensor* d = ggml_relu(context.get(), product);
  ggml_set_output(product);
  ggml_cgraph* graph = ggml_new_graph(context.get());
  ggml_build_forward_expand(graph, d);
  const ggml_backend_ptr ours(ggml_backend_dev_init(nibble_device(), nullptr)),
      theirs(ggml_backend_dev_init(cpu_device(), nullptr));
  ggml_backend_t backends[] = {ours.get(), theirs.get()};
  const ggml_backend_sched_ptr scheduler(ggml_backend_sched_new(backends, nullptr, 2, GGML_DEFAULT_GRAPH_SIZE, false, true));
  ASSERT_TRUE(ggml_backend_sched_alloc_graph(scheduler.get(), graph));
  EXPECT_EQ(ggml_backend_sched_get_tensor_backend(scheduler.get(), product), ours.get());
  EXPECT_EQ(ggml_backend_sched_get_tensor_backend(scheduler.get(), d), theirs.get());
  EXPECT_EQ(ggml_backend_sched_get_n_splits(scheduler.get()), 3);
  EXPECT_TRUE(ggml_backend_buffer_is_host(product->buffer));
  const std::vector<float> activations = random_floats(k * m, 2, 1.0f);
  ggml_backend_tensor_set(a, activations.data(), 0, activations.size() * sizeof(float));
  ASSERT_EQ(ggml_backend_sched_graph_compute(scheduler.get(), graph), GGML_STATUS_SUCCESS);

  std::vector<float> before(n * m), after(n * m);
  ggml_backend_tensor_get(product, before.data(), 0, before.size() * sizeof(float));
  ggml_backend_tensor_get(d, after.data(), 0, after.size() * sizeof(float));
  for (std::int64_t i = 0; i < n * m; ++i) {
    double exact = 0, magnitude = 0;
    for (std::int64_t c = 0; c < k; ++c) {
      const double term = 2.0 * blocks.values[i % n * k + c] * activations[i / n * k + c];
      exact += term;
      magnitude += std::abs(term);
    }
    ASSERT_NEAR(before[i], exact, 0.05 * magnitude);
    ASSERT_EQ(after[i], std::max(before[i], 0.0f));
  }
}

/// Adapters put float weights where the layer's weight is, and some models look rows of a weight up.
TEST(GgmlBackend, LeavesOtherOperationsOnItsMemoryToTheCpuBackend) {
  const std::int64_t n = 48, k = 64, m = 3;
  const Blocks blocks(GGML_TYPE_Q8_0, n, k);
  const std::vector<float> floats = random_floats(n * k, 4, 1.0f), activations = random_floats(m * k, 2, 1.0f);
  const ggml_context_ptr weights = make_context(), context = make_context();
  ggml_tensor* quantized = ggml_new_tensor_2d(weights.get(), GGML_TYPE_Q8_0, k, n);
  ggml_tensor* plain = ggml_new_tensor_2d(weights.get(), GGML_TYPE_F32, k, n);
  const ggml_backend_buffer_ptr buffer(
      ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), ggml_backend_dev_buffer_type(nibble_device())));
  ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  ggml_backend_tensor_set(quantized, blocks.bytes.data(), 0, blocks.bytes.size());
  ggml_backend_tensor_set(plain, floats.data(), 0, floats.size() * sizeof(float));

  ggml_tensor* a = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, k, m);
  ggml_tensor* row = ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, 1);
  ggml_set_input(a);
  ggml_set_input(row);
  ggml_tensor* product = ggml_mul_mat(context.get(), plain, a);
  ggml_tensor* looked_up = ggml_get_rows(context.get(), quantized, row);
  ggml_set_output(product);
  ggml_set_output(looked_up);
  ggml_cgraph* graph = ggml_new_graph(context.get());
  ggml_build_forward_expand(graph, product);
  ggml_build_forward_expand(graph, looked_up);
  const ggml_backend_ptr ours(ggml_backend_dev_init(nibble_device(), nullptr)),
      theirs(ggml_backend_dev_init(cpu_device(), nullptr));
  ggml_backend_t backends[] = {ours.get(), theirs.get()};
  const ggml_backend_sched_ptr scheduler(ggml_backend_sched_new(backends, nullptr, 2, GGML_DEFAULT_GRAPH_SIZE, false, true));
  ASSERT_TRUE(ggml_backend_sched_alloc_graph(scheduler.get(), graph));
  ggml_backend_tensor_set(a, activations.data(), 0, activations.size() * sizeof(float));
  const std::int32_t which = 7;
  ggml_backend_tensor_set(row, &which, 0, sizeof which);
  ASSERT_EQ(ggml_backend_sched_graph_compute(scheduler.get(), graph), GGML_STATUS_SUCCESS);

  std::vector<float> result(n * m), values(k);
  ggml_backend_tensor_get(product, result.data(), 0, result.size() * sizeof(float));
  ggml_backend_tensor_get(looked_up, values.data(), 0, values.size() * sizeof(float));
  for (std::int64_t i = 0; i < n * m; ++i) {
    double exact = 0, magnitude = 0;
    for (std::int64_t c = 0; c < k; ++c) {
      const double term = static_cast<double>(floats[i % n * k + c]) * activations[i / n * k + c];
      exact += term;
      magnitude += std::abs(term);
    }
    ASSERT_NEAR(result[i], exact, static_cast<double>(k) * std::ldexp(1.0, -24) * magnitude);
  }
  EXPECT_EQ(values, std::vector(blocks.values.begin() + which * k, blocks.values.begin() + (which + 1) * k));
}

TEST(GgmlBackend, TakesTheTypesThatAreNamed) {
  const auto takes = [](const char* names, std::vector<ggml_type> expected) {
    names != nullptr ? setenv("NIBBLE_GGML_TYPES", names, 1) : unsetenv("NIBBLE_GGML_TYPES");
    const ggml_backend_dev_t device = ggml_backend_reg_dev_get(ggml_backend_load(NIBBLE_GGML_BACKEND), 0);
    const ggml_context_ptr c = make_context();
    std::vector<ggml_type> taken;
    for (const ggml_type type : kTypes) {
      ggml_tensor* product =
          ggml_mul_mat(c.get(), ggml_new_tensor_2d(c.get(), type, 256, 8), ggml_new_tensor_2d(c.get(), GGML_TYPE_F32, 256, 1));
      if (ggml_backend_dev_supports_op(device, product)) taken.push_back(type);
    }
    std::exit(taken == expected ? 0 : 1);
  };
  // Each in a process that has not loaded the backend.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(takes(nullptr, {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0}), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(takes("q5_0,q4_K", {GGML_TYPE_Q5_0, GGML_TYPE_Q4_K}), testing::ExitedWithCode(0), "");
}

TEST(GgmlBackend, IsOffWhereTheEnvironmentIsWrong) {
  const auto refused = [](const char* name, const char* value) {
    setenv(name, value, 1);
    std::exit(ggml_backend_load(NIBBLE_GGML_BACKEND) == nullptr ? 0 : 1);
  };
  EXPECT_EXIT(refused("NIBBLE_GGML_ACT_SCHEME", "s4"), testing::ExitedWithCode(0),
              "NIBBLE_GGML_ACT_SCHEME is 's4': s8g32 multiplies");
  EXPECT_EXIT(refused("NIBBLE_GGML_TYPES", "q4_0,q3_K"), testing::ExitedWithCode(0),
              "NIBBLE_GGML_TYPES is 'q4_0,q3_K': all, or some of q4_0, q4_1, ");
  EXPECT_EXIT(refused("NIBBLE_ISA", "sse9"), testing::ExitedWithCode(0), "the backend is off: .*sse9");
}

}  // namespace
