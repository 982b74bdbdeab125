// A layer of experts with its operands, run on the CPU or a GPU, and its definition in double precision.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/random.hpp"
#include "kernels/kernel.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"

namespace nibble::testing {

struct Sizes {
  std::int64_t experts = 6, tokens = 9, top_k = 3, k = 96, hidden = 64, n = 80;
};

inline std::vector<QuantTensor> weights_of(const WeightScheme& scheme, std::int64_t count, std::int64_t n, std::int64_t k,
                                           std::uint64_t seed, const RandomWeight& with = {}) {
  std::vector<QuantTensor> weights;
  for (std::int64_t e = 0; e < count; ++e)
    weights.push_back(random_weight(scheme, n, k, seed + 100 * static_cast<std::uint64_t>(e), with));
  return weights;
}
inline std::vector<QuantTensor> weights_of(const char* scheme, std::int64_t count, std::int64_t n, std::int64_t k,
                                           std::uint64_t seed, const RandomWeight& with = {}) {
  return weights_of(Scheme::parse(scheme)->weight, count, n, k, seed, with);
}

inline std::vector<float> random_floats(std::int64_t count, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(random_uniform(seed, i)) * 2 - 1;
  return values;
}

/// top_k experts of each token, each at most once: a walk through them from a random one on. hot: the first is expert 0 for all.
inline std::vector<std::int32_t> random_ids(const Sizes& s, std::uint64_t seed, bool hot = false) {
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const auto from =
        static_cast<std::int64_t>(random_bits(seed, static_cast<std::uint64_t>(t)) % static_cast<std::uint64_t>(s.experts));
    for (std::int64_t j = 0; j < s.top_k; ++j) ids.push_back(static_cast<std::int32_t>(((hot ? 0 : from) + j) % s.experts));
  }
  return ids;
}

/// A vector in device memory.
struct Copied {
  DeviceMemory memory;
  template <class T>
  explicit Copied(const std::vector<T>& from) : memory(*DeviceMemory::allocate(from.size() * sizeof(T))) {
    EXPECT_TRUE(copy_to_device(memory.data(), from.data(), from.size() * sizeof(T)).ok());
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(memory.data());
  }
};

inline Tensor converted(const std::vector<float>& values, DType type) {
  Tensor t(type, {std::ssize(values)});
  for (std::int64_t i = 0; i < std::ssize(values); ++i) t.set(i, values[static_cast<std::size_t>(i)]);
  return t;
}

/// A layer with its operands and memory.
struct Layer {
  Sizes s;
  LinearSpec gate_up_spec{.m_max = 64, .epilogue = {.activation = Activation::silu, .glu = true}};
  LinearSpec down_spec{.m_max = 64};
  std::vector<QuantTensor> gate_ups, downs;
  std::vector<float> x, router, residual;
  std::vector<std::int32_t> ids;

  explicit Layer(const char* scheme = "u4zg32", const Sizes& sizes = {}, bool hot = false, DType scale = DType::f16) : s(sizes) {
    const Scheme parsed = *Scheme::parse(scheme, scale);
    gate_up_spec.act_scheme = down_spec.act_scheme = parsed.act;
    gate_up_spec.m_max = down_spec.m_max = s.tokens;
    gate_ups = weights_of(parsed.weight, s.experts, 2 * s.hidden, s.k, 1, {.bias = true});
    downs = weights_of(parsed.weight, s.experts, s.n, s.hidden, 2);
    gate_up_spec.epilogue.bias = true;
    x = random_floats(s.tokens * s.k, 3);
    router = random_floats(s.tokens * s.top_k, 4);
    residual = random_floats(s.tokens * s.n, 5);
    ids = random_ids(s, 6, hot);
  }

  /// The type of x, of what lies between the products, and of the results of `down`.
  void set_type(DType type) {
    gate_up_spec.a_dtype = down_spec.a_dtype = gate_up_spec.epilogue.out = down_spec.epilogue.out = type;
    for (float& v : x) {
      Tensor one(type, {1});
      one.set(0, v);
      v = one.at(0);
    }
  }
  /// Whether the GPU's kernel takes the layer.
  bool is_taken(const Kernel& kernel) const {
    const PackOptions on_gpu{.kernel = std::string(kernel.name), .backend = Backend::cuda};
    const auto gate_up = pack_experts(gate_ups, gate_up_spec, on_gpu), down = pack_experts(downs, down_spec, on_gpu);
    if (!gate_up.ok() || !down.ok()) return false;
    const MoeSpec spec{.tokens_max = s.tokens, .top_k = s.top_k, .residual = true};
    return MoePlan::make(*gate_up, *down, spec, {.kernel = std::string(kernel.name)}).ok();
  }

  MoeOperands operands() const {
    return {.ids = ConstTensorView(ids.data(), {s.tokens, s.top_k}),
            .weights = ConstTensorView(router.data(), {s.tokens, s.top_k}),
            .residual = ConstTensorView(residual.data(), {s.tokens, s.n})};
  }

  /// In memory of the current GPU; which kernel both products have, if that is forced.
  std::vector<float> run_on_gpu(const std::string& kernel = {}) const {
    const PackOptions on_gpu{.kernel = kernel, .backend = Backend::cuda};
    const auto gate_up = pack_experts(gate_ups, gate_up_spec, on_gpu), down = pack_experts(downs, down_spec, on_gpu);
    EXPECT_TRUE(gate_up.ok()) << gate_up.status().message();
    EXPECT_TRUE(down.ok()) << down.status().message();
    if (!gate_up.ok() || !down.ok()) return {};
    const auto plan =
        MoePlan::make(*gate_up, *down, {.tokens_max = s.tokens, .top_k = s.top_k, .residual = true}, {.kernel = kernel});
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    if (!plan.ok()) return {};
    const Tensor typed = converted(x, gate_up_spec.a_dtype);
    const Copied a(typed.bytes), e(ids), w(router), r(residual);
    std::vector<float> d(static_cast<std::size_t>(s.tokens * s.n), NAN);
    const Copied to(d), workspace(std::vector<std::byte>(plan->workspace_bytes() + 1, std::byte{0xff}));
    const MoeOperands operands{.ids = ConstTensorView(e.as<std::int32_t>(), {s.tokens, s.top_k}),
                               .weights = ConstTensorView(w.as<float>(), {s.tokens, s.top_k}),
                               .residual = ConstTensorView(r.as<float>(), {s.tokens, s.n})};
    const Status status =
        plan->run(*gate_up, *down, ConstTensorView(a.memory.data(), gate_up_spec.a_dtype, {s.tokens, s.k}), operands,
                  TensorView(to.as<float>(), {s.tokens, s.n}), {workspace.memory.data() + 1, plan->workspace_bytes()}, Stream{});
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(copy_from_device(d.data(), to.memory.data(), d.size() * sizeof(float)).ok());
    return d;
  }

  std::vector<float> run(Executor* executor = nullptr, const PlanOptions& options = {}) const {
    const auto gate_up = pack_experts(gate_ups, gate_up_spec), down = pack_experts(downs, down_spec);
    EXPECT_TRUE(gate_up.ok()) << gate_up.status().message();
    EXPECT_TRUE(down.ok()) << down.status().message();
    const auto plan = MoePlan::make(*gate_up, *down, {.tokens_max = s.tokens, .top_k = s.top_k, .residual = true}, options);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    if (!plan.ok()) return {};
    std::vector<std::byte> workspace(plan->workspace_bytes() + 1);
    std::vector<float> d(static_cast<std::size_t>(s.tokens * s.n), NAN);
    const Status status = plan->run(*gate_up, *down, ConstTensorView(x.data(), {s.tokens, s.k}), operands(),
                                    TensorView(d.data(), {s.tokens, s.n}), std::span(workspace).subspan(1), executor);
    EXPECT_TRUE(status.ok()) << status.message();
    return d;
  }

  /// By the definition, in double precision.
  std::vector<double> expected() const {
    std::vector<double> d(residual.begin(), residual.end());
    const auto product = [](const QuantTensor& q, const std::vector<double>& a, std::int64_t n) {
      double sum = q.bias.empty() ? 0.0 : static_cast<double>(q.bias.at(n));
      for (std::int64_t k = 0; k < q.k; ++k) sum += a[static_cast<std::size_t>(k)] * static_cast<double>(q.value(n, k));
      return sum;
    };
    for (std::int64_t t = 0; t < s.tokens; ++t)
      for (std::int64_t j = 0; j < s.top_k; ++j) {
        const std::int32_t id = ids[static_cast<std::size_t>(t * s.top_k + j)];
        if (id < 0) continue;
        const QuantTensor& gate_up = gate_ups[static_cast<std::size_t>(id)];
        const QuantTensor& down = downs[static_cast<std::size_t>(id)];
        const std::vector<double> a(x.begin() + t * s.k, x.begin() + (t + 1) * s.k);
        std::vector<double> hidden;
        for (std::int64_t i = 0; i < s.hidden; ++i) {
          const double gate = product(gate_up, a, i);
          hidden.push_back(gate / (1 + std::exp(-gate)) * product(gate_up, a, s.hidden + i));
        }
        const auto weight = static_cast<double>(router[static_cast<std::size_t>(t * s.top_k + j)]);
        for (std::int64_t n = 0; n < s.n; ++n) d[static_cast<std::size_t>(t * s.n + n)] += weight * product(down, hidden, n);
      }
    return d;
  }
};

inline double distance(const std::vector<float>& got, const std::vector<double>& wanted) {
  EXPECT_EQ(got.size(), wanted.size());
  double off = 0, all = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    off += std::pow(static_cast<double>(got[i]) - wanted[i], 2);
    all += std::pow(wanted[i], 2);
  }
  return std::sqrt(off / all);
}

}  // namespace nibble::testing
