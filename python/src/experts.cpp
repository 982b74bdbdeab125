// nibble._core: experts, and what runs them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "calls.hpp"

namespace nibble::python {

using namespace nb::literals;

namespace {

/// Experts, each of which is a weight of its own in Python.
Experts experts_from(PackedExperts packed) {
  std::vector<nb::object> weights;
  for (std::int64_t e = 0; e < packed.count(); ++e) weights.push_back(nb::cast(weight_of(packed[e])));
  return {std::move(packed), std::move(weights)};
}

/// gate_up and down of a layer of a checkpoint.
std::pair<Experts, Experts> pack_layer(const Checkpoint& checkpoint, std::string_view layer, std::string_view backend,
                                       std::string_view a_dtype, std::string_view act_scheme, const std::string& layout,
                                       const std::string& kernel, std::int64_t m_max, std::string_view accumulation,
                                       OptionalFloat glu_limit, float glu_offset) {
  const LinearSpec down = packing_spec(a_dtype, act_scheme, m_max, accumulation);
  LinearSpec gate_up = down;
  gate_up.epilogue.glu = true;
  if (glu_limit) gate_up.epilogue.glu_limit = *glu_limit;
  gate_up.epilogue.glu_offset = glu_offset;
  const PackOptions options{.layout = layout, .kernel = kernel, .backend = backend_from(backend)};
  PackedExpertLayer packed = [&] {
    const nb::gil_scoped_release release;
    return check(pack_experts(checkpoint, check(expert_layer(checkpoint, layer)), gate_up, down, options));
  }();
  return {experts_from(std::move(packed.gate_up)), experts_from(std::move(packed.down))};
}

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<Experts>(m, "PackedExperts", "Packed weights of the same sizes, scheme and layout.")
      .def(
          "__init__",
          [](Experts* self, const std::vector<nb::object>& weights) {
            std::vector<PackedWeight> packed;
            for (const nb::object& weight : weights) packed.push_back(nb::cast<const Weight&>(weight).packed);
            new (self) Experts{check(experts_of(std::move(packed))), weights};
          },
          "weights"_a)
      .def("__len__", [](const Experts& e) { return e.packed.count(); })
      .def_prop_ro("weights", [](const Experts& e) { return e.weights; })
      .def_prop_ro("n", [](const Experts& e) { return e.packed.n(); })
      .def_prop_ro("k", [](const Experts& e) { return e.packed.k(); })
      .def_prop_ro("nbytes", [](const Experts& e) { return e.packed.nbytes(); });
  nb::class_<ExpertLayer>(m, "ExpertLayer", "The experts of a layer in a checkpoint.")
      .def_ro("name", &ExpertLayer::name, "Expert e has the modules name.e.gate_up[i] and name.e.down.")
      .def_ro("count", &ExpertLayer::count, "Experts 0 ... count - 1.")
      .def_ro("gate_up", &ExpertLayer::gate_up, "The gate and up, or the one matrix of both.")
      .def_ro("down", &ExpertLayer::down)
      .def_ro("interleaved", &ExpertLayer::interleaved,
              "Whether rows of gate and up take turns in the one matrix, the gate's first (gpt-oss).")
      .def("__repr__", [](const ExpertLayer& layer) {
        return "ExpertLayer(name='" + layer.name + "', count=" + std::to_string(layer.count) + ")";
      });
  m.def(
      "expert_layers",
      [](const Checkpoint& checkpoint) {
        const nb::gil_scoped_release release;
        return expert_layers(checkpoint);
      },
      "checkpoint"_a, "All layers of experts, in file order.");
  m.def("pack_expert_layer", &pack_layer, "checkpoint"_a, "layer"_a, nb::kw_only(), "backend"_a, "a_dtype"_a, "act_scheme"_a,
        "layout"_a, "kernel"_a, "m_max"_a, "accumulation"_a, "glu_limit"_a.none(), "glu_offset"_a);
  m.def("moe", &moe, "gate_up"_a, "down"_a, "x"_a, "ids"_a, "weights"_a, "activation"_a, "residual"_a.none(),
        "out_dtype"_a.none(), "out"_a.none(), "kernel"_a);
  m.def(
      "grouped",
      [](Experts& experts, nb::handle x, nb::handle offsets, nb::handle counts, nb::handle rows, nb::handle ids,
         nb::handle a_scale, nb::handle a_zero, std::optional<std::string_view> act_scheme, std::string_view activation,
         nb::handle row_scale, nb::handle gate, nb::handle residual, nb::handle out_dtype, nb::handle out, nb::handle stream,
         std::string_view kernel) {
        const nb::float_ one(1.0);
        const nb::int_ zero(0);
        const Options options{.bias = nb::none(),
                              .activation = activation,
                              .clamp = {0.0f, 6.0f},
                              .negative_slope = 0.01f,
                              .gate = gate,
                              .residual = residual,
                              .row_scale = row_scale,
                              .col_scale = nb::none(),
                              .a_scale = a_scale,
                              .a_zero = a_zero,
                              .act_scheme = act_scheme,
                              .accumulation = {},
                              .out_dtype = out_dtype,
                              .out_scale = one,
                              .out_zero = zero,
                              .out_range = {},
                              .sum_bias = nb::none(),
                              .out = out,
                              .stream = stream,
                              .kernel = kernel,
                              .allow_reference = true};
        return grouped(experts, x, offsets, counts, rows, ids, options);
      },
      "experts"_a, "x"_a, "offsets"_a.none(), "counts"_a.none(), "rows"_a.none(), "ids"_a.none(), "a_scale"_a.none(),
      "a_zero"_a.none(), "act_scheme"_a.none(), "activation"_a, "row_scale"_a.none(), "gate"_a.none(), "residual"_a.none(),
      "out_dtype"_a.none(), "out"_a.none(), "stream"_a.none(), "kernel"_a);
  m.def(
      "route",
      [](nb::handle logits, nb::handle bias, std::int64_t top_k, std::string_view score, bool normalize, std::int64_t groups,
         std::int64_t top_groups, float scale, nb::handle stream) {
        if (score != "softmax" && score != "sigmoid")
          throw Failure(StatusCode::invalid_argument, "'" + std::string(score) + "' is no score; write softmax or sigmoid");
        return route(logits, bias,
                     {.top_k = top_k,
                      .score = score == "softmax" ? RouteScore::softmax : RouteScore::sigmoid,
                      .normalize = normalize,
                      .groups = groups,
                      .top_groups = top_groups,
                      .scale = scale},
                     stream);
      },
      "logits"_a, "bias"_a.none(), "top_k"_a, "score"_a, "normalize"_a, "groups"_a, "top_groups"_a, "scale"_a, "stream"_a.none());
}

}  // namespace nibble::python
