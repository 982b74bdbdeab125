// nibble._core: the C++ API as Python objects. What makes it comfortable is Python: nibble/__init__.py; what a call costs is in calls.cpp.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "arrays.hpp"
#include "bind.hpp"
#include "calls.hpp"
#include "nibble/nibble.hpp"
#include "threads.hpp"

namespace nibble::python {

std::string name_of(const ActScheme& act) {
  if (act.codes == DType::none) return "";
  const std::string whole = Scheme{{DType::s8, ZeroKind::none, GroupShape::channel()}, act}.name();
  return whole.substr(0, whole.find('_'));
}

namespace {

using namespace nb::literals;

// --- scheme names -------------------------------------------------------------------------------------------------------------

WeightScheme weight_scheme_from(std::string_view text, DType scale = DType::f16) {
  const Scheme scheme = check(Scheme::parse(text, scale));
  if (scheme.act.codes != DType::none)
    throw Failure(StatusCode::invalid_argument,
                  "'" + std::string(text) +
                      "' says how activations are quantized too; that is for pack(act_scheme=...), a weight is " +
                      scheme.weight.name());
  return scheme.weight;
}

// --- errors -------------------------------------------------------------------------------------------------------------------

/// nibble.errors maps the names of codes to classes.
void register_errors() {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Failure& failure) {
      const nb::object classes = nb::module_::import_("nibble.errors").attr("BY_CODE");
      const std::string_view code = name(failure.status.code());
      const std::string& message = failure.status.message();
      PyErr_SetObject(classes[nb::str(code.data(), code.size())].ptr(), nb::str(message.data(), message.size()).ptr());
    }
  });
}

// --- plain values -------------------------------------------------------------------------------------------------------------

void bind_values(nb::module_& m) {
  nb::class_<Note>(m, "Note", "Something to know about a module or a checkpoint.")
      .def_prop_ro(
          "severity",
          [](const Note& n) {
            return n.severity == Note::Severity::info ? "info" : n.severity == Note::Severity::warning ? "warning" : "error";
          },
          "\"info\", \"warning\" or \"error\"")
      .def_ro("text", &Note::text, "One line, with the values.")
      .def("__repr__", repr("Note", "severity", "text"));
  nb::class_<Module>(m, "Module", "A layer W[n,k] of a checkpoint.")
      .def_ro("name", &Module::name, "\"model.layers.0.mlp.down_proj\"")
      .def_ro("format", &Module::format, "awq, gptq, compressed-tensors, ..., dense")
      .def_prop_ro(
          "scheme", [](const Module& x) { return x.quantized() ? x.scheme.name() : std::string(name(x.scheme.codes)); },
          "As detected; of dense modules the type.")
      .def_prop_ro(
          "claimed", [](const Module& x) { return x.claimed ? std::optional(x.claimed->name()) : std::nullopt; },
          "The scheme that config.json claims, or None.")
      .def_ro("n", &Module::n, "Output channels.")
      .def_ro("k", &Module::k, "Input channels.")
      .def_ro("act_order", &Module::act_order, "It has a g_idx.")
      .def_ro("has_bias", &Module::has_bias, "It has a bias, which read() returns with the weight.")
      .def_ro("tensors", &Module::tensors, "Their full names.")
      .def_ro("bytes", &Module::bytes, "Of its tensors.")
      .def_ro("notes", &Module::notes, "Findings that need no data.")
      .def_prop_ro("quantized", &Module::quantized, "Its weight is: it is not dense.")
      .def("__repr__", repr("Module", "name", "format", "scheme", "n", "k"));
  nb::class_<QuantError>(m, "QuantError", "How far a quantized weight is from the original.")
      .def_ro("sqnr_db", &QuantError::sqnr_db, "10·log10( Σw² / Σ(w−ŵ)² ); infinite when equal.")
      .def_ro("cosine", &QuantError::cosine, "⟨w,ŵ⟩ / (‖w‖·‖ŵ‖)")
      .def_ro("max_abs", &QuantError::max_abs, "max |w−ŵ|")
      .def_ro("relative_l2", &QuantError::relative_l2, "‖w−ŵ‖ / ‖w‖")
      .def("__repr__", repr("QuantError", "sqnr_db", "cosine", "max_abs", "relative_l2"));
  nb::class_<VerifyReport>(m, "VerifyReport", "A plan's result against the double-precision oracle.")
      .def_ro("passed", &VerifyReport::passed, "Every output within its bound, round_trip and repeatable.")
      .def_ro("kernel", &VerifyReport::kernel, "The one that ran.")
      .def_ro("checked", &VerifyReport::checked, "Output elements compared.")
      .def_ro("worst_error_over_bound", &VerifyReport::worst_error_over_bound, "At most 1 when passed.")
      .def_ro("relative_l2", &VerifyReport::relative_l2, "‖D − oracle‖ / ‖oracle‖")
      .def_ro("round_trip", &VerifyReport::round_trip, "Unpacking gave the QuantTensor back.")
      .def_ro("repeatable", &VerifyReport::repeatable, "A second run gave the same bits.")
      .def_ro("failure", &VerifyReport::failure, "Where and by how much; empty when passed.")
      .def("__bool__", [](const VerifyReport& r) { return r.passed; })
      .def("__repr__", repr("VerifyReport", "passed", "kernel", "checked", "worst_error_over_bound", "failure"));
  nb::class_<KernelInfo>(m, "KernelInfo", "A row of the kernel table.")
      .def_ro("name", &KernelInfo::name, "op_out_act_weight__backend_isa_tile")
      .def_prop_ro(
          "backend", [](const KernelInfo& x) { return name(x.backend); }, "\"cpu\", \"cuda\" or \"ref\"")
      .def_prop_ro(
          "op", [](const KernelInfo& x) { return name(x.op); }, "\"linear\", \"conv\", \"dequantize\" or \"prepare\"")
      .def_ro("layout", &KernelInfo::layout, "Of the weights it reads; \"\" when it reads none.")
      .def_prop_ro(
          "isa", [](const KernelInfo& x) { return name(x.isa); }, "The least it needs: \"avx512vnni\".")
      .def_ro("summary", &KernelInfo::summary, "A line for people.")
      .def_ro("batch_invariant", &KernelInfo::batch_invariant, "The bits of a row depend neither on M nor on the other rows.")
      .def("__repr__", repr("KernelInfo", "name"));
  nb::class_<LayoutInfo>(m, "LayoutInfo", "A packed layout, with a drawing of its bytes.")
      .def_ro("name", &LayoutInfo::name, "\"cpu_n32\"")
      .def_prop_ro(
          "backend", [](const LayoutInfo& x) { return name(x.backend); }, "Whose kernels read it: \"cpu\" or \"cuda\".")
      .def_ro("drawing", &LayoutInfo::drawing, "Of its bytes, several lines.")
      .def("__repr__", repr("LayoutInfo", "name", "backend"));
  nb::class_<FormatInfo>(m, "FormatInfo", "A checkpoint format.")
      .def_ro("name", &FormatInfo::name, "\"awq\"")
      .def_ro("summary", &FormatInfo::summary, "A line for people.")
      .def_ro("can_write", &FormatInfo::can_write, "nibble quantize and convert write it.")
      .def("__repr__", repr("FormatInfo", "name", "can_write"));
  nb::class_<TransformedModule>(m, "TransformedModule", "A layer that was quantized, converted or dequantized.")
      .def_ro("name", &TransformedModule::name, "\"model.layers.0.mlp.down_proj\"")
      .def_ro("scheme", &TransformedModule::scheme, "Of the output.")
      .def_ro("error", &TransformedModule::error, "Of quantize_checkpoint: a QuantError; else None.")
      .def_ro("smoothed", &TransformedModule::smoothed, "The norm in front of it took a part of its weights.")
      .def("__repr__", repr("TransformedModule", "name", "scheme", "error", "smoothed"));
  nb::class_<TransformReport>(m, "TransformReport", "What became of a checkpoint.")
      .def_ro("modules", &TransformReport::modules, "The layers that changed.")
      .def_ro("notes", &TransformReport::notes, "What was left alone, and why.")
      .def_ro("bytes_in", &TransformReport::bytes_in, "Of all tensors of the input.")
      .def_ro("bytes_out", &TransformReport::bytes_out, "Of all tensors of the output.")
      .def("__repr__", [](const TransformReport& r) {
        return "TransformReport(" + std::to_string(r.modules.size()) + " modules, " + std::to_string(r.notes.size()) +
               " notes, " + std::to_string(r.bytes_in) + " -> " + std::to_string(r.bytes_out) + " bytes)";
      });
  using Candidate = Explanation::Candidate;
  using Bucket = Explanation::Bucket;
  nb::class_<Candidate>(m, "Candidate", "A kernel that was asked, and what it answered.")
      .def_ro("kernel", &Candidate::kernel, "Its name.")
      .def_ro("accepted", &Candidate::accepted, "It could run; else see refusal.")
      .def_ro("cost_us", &Candidate::cost_us, "Predicted microseconds, when accepted.")
      .def_ro("refusal", &Candidate::refusal, "Why not, with the values; empty when accepted.")
      .def("__repr__", repr("Candidate", "kernel", "accepted", "cost_us", "refusal"));
  nb::class_<Bucket>(m, "Bucket", "What runs for M in [m_low, m_high], and why.")
      .def_ro("m_low", &Bucket::m_low, "The least M.")
      .def_ro("m_high", &Bucket::m_high, "The greatest M, included.")
      .def_ro("steps", &Bucket::steps, "Kernels in the order they run.")
      .def_ro("cost_us", &Bucket::cost_us, "Predicted microseconds at m_high.")
      .def_ro("candidates", &Bucket::candidates, "Every kernel of the operation.")
      .def("__repr__", repr("Bucket", "m_low", "m_high", "steps", "cost_us"));
}

// --- checkpoints and weights --------------------------------------------------------------------------------------------------

std::optional<NumpyArray> field(nb::handle self, const Tensor& t) {
  if (t.empty()) return std::nullopt;
  return to_numpy(t.bytes.data(), t.dtype, t.shape, self);
}

/// TensorRT-LLM's layout of that name; nothing for other orders.
std::optional<TrtllmLayout> trtllm_layout(std::string_view order) {
  if (order == "trtllm_interleaved") return TrtllmLayout::interleaved;
  if (order == "trtllm_interleaved_fp8") return TrtllmLayout::interleaved_fp8;
  if (order == "trtllm_transposed") return TrtllmLayout::transposed;
  if (order == "trtllm_permuted") return TrtllmLayout::permuted;
  return std::nullopt;
}

QuantTensor make_quant_tensor(std::string_view scheme, nb::handle codes, nb::handle scales, nb::handle zeros,
                              OptionalFloat scale2, nb::handle g_idx, nb::handle prescale, nb::handle bias,
                              std::optional<std::pair<float, std::int32_t>> static_acts, OptionalFloat act_limit, Pair filter,
                              std::string_view nibble_order, std::optional<std::int64_t> k) {
  const auto optional_copy = [](nb::handle object, const char* what, bool floats) {
    if (object.is_none()) return Tensor();
    Input input(object, what);
    return copy(floats ? std::move(input).floats() : std::move(input), what);
  };
  QuantTensor q;
  q.scales = optional_copy(scales, "scales", true);
  q.scheme = weight_scheme_from(scheme, q.scales.dtype);
  const bool dense = q.scheme.is_dense();
  Tensor all = optional_copy(codes, "codes", dense);
  if (dense && (all.shape.size() != 2 || all.dtype != q.scheme.codes))
    throw Failure(StatusCode::invalid_argument, "codes of a dense weight must be " + q.scheme.name() + " [N,K]; got " +
                                                    std::string(name(all.dtype)) + " of " + std::to_string(all.shape.size()) +
                                                    " dimensions");
  if (!dense && (all.shape.size() != 2 || bits(all.dtype) != 8 || all.dtype == DType::boolean))
    throw Failure(StatusCode::invalid_argument, "codes must be [N,K] of 8-bit elements, one code a byte; got " +
                                                    std::string(name(all.dtype)) + " of " + std::to_string(all.shape.size()) +
                                                    " dimensions");
  const std::span bytes(reinterpret_cast<const std::uint8_t*>(all.bytes.data()), all.bytes.size());
  q.n = all.shape[0];
  q.k = k ? *k : nibble_order.empty() ? all.shape[1] : 2 * all.shape[1];
  if (const auto trtllm = trtllm_layout(nibble_order)) {
    const int width = bits(q.scheme.codes);
    if (q.scheme.codes != DType::u4b8 && q.scheme.codes != DType::u8b128)
      throw Failure(StatusCode::invalid_argument,
                    "codes of TensorRT-LLM are u4b8 or u8b128, the scheme is " + std::string(scheme));
    q.n = all.shape[1] * 8 / width;
    q.k = all.shape[0];
    q.codes = check(unpack_trtllm(bytes, q.n, q.k, width, *trtllm));
  } else if (nibble_order.empty()) {
    q.codes.assign(bytes.begin(), bytes.end());
  } else if (nibble_order != "low_first" && nibble_order != "high_first") {
    throw Failure(StatusCode::invalid_argument, "nibble_order is '" + std::string(nibble_order) +
                                                    "', neither low_first nor high_first, nor one of TensorRT-LLM");
  } else if (bits(q.scheme.codes) != 4) {
    throw Failure(StatusCode::invalid_argument,
                  "nibble_order is for codes of 4 bits, " + std::string(scheme) + " has " + std::to_string(bits(q.scheme.codes)));
  } else {
    q.codes =
        check(unpack_nibbles(bytes, q.n, q.k, nibble_order == "low_first" ? NibbleOrder::low_first : NibbleOrder::high_first));
  }
  q.zeros = optional_copy(zeros, "zeros", q.scheme.zero != ZeroKind::integer);
  q.prescale = optional_copy(prescale, "prescale", true);
  q.bias = optional_copy(bias, "bias", true);
  if (const Tensor order = optional_copy(g_idx, "g_idx", false); !order.empty()) {
    if (order.dtype != DType::s32 && order.dtype != DType::s64)
      throw Failure(StatusCode::invalid_argument, "g_idx is " + std::string(name(order.dtype)) + ", expected s32 or s64");
    for (std::int64_t i = 0; i < order.numel(); ++i)
      q.g_idx.push_back(order.dtype == DType::s32 ? order.as<std::int32_t>()[i]
                                                  : static_cast<std::int32_t>(order.as<std::int64_t>()[i]));
  }
  q.scale2 = scale2;
  if (static_acts) q.static_acts = StaticActs{static_acts->first, static_acts->second};
  q.act_limit = act_limit;
  q.filter = {filter.first, filter.second};
  check(q.validate());
  return q;
}

void bind_tensors(nb::module_& m) {
  nb::class_<QuantTensor>(
      m, "QuantTensor",
      "A quantized weight W[n,k] in canonical form: what formats produce and layouts consume. Immutable; the "
      "arrays are read-only views of its memory.\n\n"
      "W[i,j] = f(codes[i,j]) with the scale, and zero point, of the group of j: g_idx[j] where there is one, "
      "else j // group size.")
      .def(
          "__init__",
          [](QuantTensor* self, std::string_view scheme, nb::handle codes, nb::handle scales, nb::handle zeros,
             OptionalFloat scale2, nb::handle g_idx, nb::handle prescale, nb::handle bias,
             std::optional<std::pair<float, std::int32_t>> static_acts, OptionalFloat act_limit, Pair filter,
             std::string_view nibble_order, std::optional<std::int64_t> k) {
            new (self) QuantTensor(make_quant_tensor(scheme, codes, scales, zeros, scale2, g_idx, prescale, bias, static_acts,
                                                     act_limit, filter, nibble_order, k));
          },
          "scheme"_a, "codes"_a, "scales"_a = nb::none(), "zeros"_a = nb::none(), nb::kw_only(), "scale2"_a = nb::none(),
          "g_idx"_a = nb::none(), "prescale"_a = nb::none(), "bias"_a = nb::none(), "static_acts"_a = nb::none(),
          "act_limit"_a = nb::none(), "filter"_a = Pair(1, 1), "nibble_order"_a = "", "k"_a = nb::none(),
          "Copies arrays of host memory: codes [N,K], one a byte, or the floats of a dense weight, which has no scales; scales "
          "and zeros [rows, groups] as the scheme says; g_idx [K]; "
          "prescale [K], of a filter the same [Ci] for each element; bias [N]. filter: (height, width) of a convolution, whose K "
          "is in the order kh, kw, channel.\n\n"
          "nibble_order: of codes of 4 bits with two to a byte, uint8 [N, ⌈K/2⌉]: low_first (the first one in the low half: "
          "compressed-tensors, torchao) or high_first (MNN, bitsandbytes); k: K, where it is odd. For codes as TensorRT-LLM's "
          "preprocess_weights_for_mixed_gemm lays them out, [K, N·bits/8], schemes of u4b8 or u8b128: trtllm_interleaved (for "
          "compute "
          "capability 7.5 to 8.9 and 12.0, and experts), trtllm_interleaved_fp8 (the same for FP8 activations), "
          "trtllm_transposed "
          "(9.0 by the C++ tools, 10.0), trtllm_permuted (9.0 by the Python tools of 2026).\n\n"
          "Raises InvalidArgument for what contradicts the scheme.")
      .def_prop_ro(
          "scheme", [](const QuantTensor& q) { return q.scheme.name(); }, "\"u4zg128\"")
      .def_prop_ro(
          "description", [](const QuantTensor& q) { return q.scheme.describe(); }, "The scheme as a sentence.")
      .def_ro("n", &QuantTensor::n, "Output channels.")
      .def_ro("k", &QuantTensor::k, "Input channels.")
      .def_prop_ro(
          "shape", [](const QuantTensor& q) { return std::pair(q.n, q.k); }, "n and k.")
      .def_prop_ro("groups", &QuantTensor::groups, "Groups along K.")
      .def_prop_ro(
          "group_shape", [](const QuantTensor& q) { return std::pair(q.scheme.group.n, q.scheme.group.k); },
          "(output, input) channels that share a scale; 0 is all of them.")
      .def_prop_ro(
          "codes",
          [](nb::handle self) {
            const auto& q = nb::cast<const QuantTensor&>(self);
            const std::int64_t shape[] = {q.n, q.k};
            const bool own_type = q.scheme.is_dense() || q.scheme.codes == DType::s8;
            return to_numpy(q.codes.data(), own_type ? q.scheme.codes : DType::u8, shape, self);
          },
          "[N,K], one code a byte; uint8, int8 for s8. Of a dense weight its floats, bf16 as uint16.")
      .def_prop_ro(
          "scales", [](nb::handle self) { return field(self, nb::cast<const QuantTensor&>(self).scales); },
          "[rows, groups]; None for a dense weight.")
      .def_prop_ro(
          "zeros", [](nb::handle self) { return field(self, nb::cast<const QuantTensor&>(self).zeros); },
          "[rows, groups], or None.")
      .def_prop_ro(
          "g_idx",
          [](nb::handle self) -> std::optional<NumpyArray> {
            const auto& q = nb::cast<const QuantTensor&>(self);
            const std::int64_t shape[] = {q.k};
            if (q.g_idx.empty()) return std::nullopt;
            return to_numpy(q.g_idx.data(), DType::s32, shape, self);
          },
          "[K], the group of each input channel (act-order), or None.")
      .def_prop_ro(
          "prescale", [](nb::handle self) { return field(self, nb::cast<const QuantTensor&>(self).prescale); },
          "[K], multiplies the activations, or None.")
      .def_prop_ro(
          "bias", [](nb::handle self) { return field(self, nb::cast<const QuantTensor&>(self).bias); }, "[N], or None.")
      .def_ro("scale2", &QuantTensor::scale2, "Second-level scale of the whole tensor, or None.")
      .def_prop_ro(
          "static_acts",
          [](const QuantTensor& q) {
            return q.static_acts ? std::optional(std::pair(q.static_acts->scale, q.static_acts->zero)) : std::nullopt;
          },
          "(scale, zero point) of all activations, or None.")
      .def_ro("act_limit", &QuantTensor::act_limit,
              "The largest magnitude of activations that a scale covers, beyond which codes saturate, or None.")
      .def_prop_ro(
          "filter", [](const QuantTensor& q) { return Pair(q.filter.h, q.filter.w); },
          "(height, width) of a convolution's; (1, 1) of linear layers.")
      .def_prop_ro("bits_per_weight", &QuantTensor::bits_per_weight, "Scales and all the rest included.")
      .def(
          "__eq__", [](const QuantTensor& a, const QuantTensor& b) { return a == b; }, nb::is_operator(),
          nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__hash__",
           [](const QuantTensor& q) {  // of what is cheap to look at: equal ones have equal hashes
             return std::hash<std::string>()(q.scheme.name() + ' ' + std::to_string(q.n) + ' ' + std::to_string(q.k));
           })
      .def("__repr__", [](const QuantTensor& q) {
        return "QuantTensor(" + q.scheme.name() + ", n=" + std::to_string(q.n) + ", k=" + std::to_string(q.k) + ")";
      });

  nb::class_<Checkpoint>(
      m, "Checkpoint",
      "A checkpoint directory, or one .safetensors file, read-only and memory-mapped. Nothing but headers is read "
      "until a layer is.")
      .def(
          "__init__",
          [](Checkpoint* self, const std::string& path) {
            nb::gil_scoped_release release;
            new (self) Checkpoint(check(Checkpoint::open(path)));
          },
          "path"_a)
      .def_prop_ro(
          "path", [](const Checkpoint& c) { return c.path().string(); }, "What it was opened with.")
      .def_prop_ro(
          "modules", [](const Checkpoint& c) { return std::vector<Module>(c.modules().begin(), c.modules().end()); },
          "Every linear layer, quantized or dense, in file order.")
      .def_prop_ro(
          "layers",
          [](const Checkpoint& c) {
            std::vector<Module> layers;
            for (const Module& module : c.modules())
              if (module.quantized()) layers.push_back(module);
            return layers;
          },
          "The quantized ones.")
      .def_prop_ro(
          "notes", [](const Checkpoint& c) { return std::vector<Note>(c.notes().begin(), c.notes().end()); },
          "Findings about the whole checkpoint.")
      .def_prop_ro(
          "config", [](const Checkpoint& c) { return c.config(); }, "The text of config.json, or \"\".")
      .def_prop_ro(
          "tensors",
          [](const Checkpoint& c) {
            std::vector<std::string> names;
            for (const TensorInfo& t : c.tensors()) names.push_back(t.name);
            return names;
          },
          "The names of all tensors.")
      .def(
          "read",
          [](const Checkpoint& c, nb::handle layer, std::optional<std::pair<std::int64_t, std::int64_t>> outputs,
             std::optional<std::pair<std::int64_t, std::int64_t>> inputs) {
            if (outputs && inputs) throw Failure(StatusCode::invalid_argument, "outputs or inputs, not both");
            const std::string wanted =
                nb::cast<std::string>(nb::isinstance<Module>(layer) ? layer.attr("name") : nb::object(nb::borrow(layer)));
            const Module* module = c.find_module(wanted);
            if (module == nullptr) throw Failure(StatusCode::not_found, c.path().string() + ": no module " + wanted);
            nb::gil_scoped_release release;
            if (outputs) return check(c.read(*module, LayerPart{LayerPart::Of::outputs, outputs->first, outputs->second}));
            if (inputs) return check(c.read(*module, LayerPart{LayerPart::Of::inputs, inputs->first, inputs->second}));
            return check(c.read(*module));
          },
          "layer"_a, nb::kw_only(), "outputs"_a.none() = nb::none(), "inputs"_a.none() = nb::none(),
          "Decodes a layer, by name or Module, into a QuantTensor. outputs or inputs: (begin, end), these channels alone, "
          "without reading the bytes of the others; the bias of inputs is the whole one. A dense layer is read as it is. Raises "
          "NotFound, InvalidArgument for channels that it has not, CorruptData, and Unsupported where a word, a group or a block "
          "has "
          "channels on both sides of a boundary, for inputs in act-order, and for convolutions.")
      .def(
          "tensor",
          [](nb::handle self, const std::string& tensor_name) {
            const auto& c = nb::cast<const Checkpoint&>(self);
            const TensorInfo* t = c.find_tensor(tensor_name);
            if (t == nullptr) throw Failure(StatusCode::not_found, c.path().string() + ": no tensor " + tensor_name);
            return to_numpy(c.view(*t).data, t->dtype, t->shape, self);
          },
          "name"_a, "A tensor as it is stored: a read-only NumPy view of the mapped file.")
      .def(
          "dtype",
          [](const Checkpoint& c, const std::string& tensor_name) {
            const TensorInfo* t = c.find_tensor(tensor_name);
            if (t == nullptr) throw Failure(StatusCode::not_found, c.path().string() + ": no tensor " + tensor_name);
            return name(t->dtype);
          },
          "name"_a, "The element type of a tensor, \"bf16\", which NumPy may have no name for.")
      .def("__repr__", [](const Checkpoint& c) {
        return "Checkpoint('" + c.path().string() + "', " + std::to_string(c.modules().size()) + " modules)";
      });
}

// --- functions ----------------------------------------------------------------------------------------------------------------

std::vector<Explanation::Bucket> explain_tensor(const QuantTensor& q, std::string_view backend, std::string_view gpu,
                                                std::string_view a_dtype, std::int64_t m_max, std::string_view out,
                                                std::string_view act_scheme, std::string_view accumulation) {
  LinearSpec spec{.a_dtype = dtype_from(a_dtype),
                  .m_max = m_max,
                  .act_scheme = act_from(act_scheme),
                  .accumulation = accumulation_from(accumulation)};
  spec.epilogue.out = dtype_from(out);
  if (!gpu.empty()) return check(nibble::explain(describe(q), spec, check(described_gpu(gpu)))).buckets;
  return check(nibble::explain(describe(q), spec, {.backend = backend_from(backend)})).buckets;
}

/// Float weights in host memory; of a matrix whose last stride is not 1, a copy.
struct Weights {
  explicit Weights(nb::handle w) : input(Input(w, "w").operand().on(Backend::cpu)), view(input.view) {
    if (view.rank != 2 || input.dense(2)) return;
    own = copy(input, "w");
    view = ConstTensorView(own.bytes.data(), own.dtype, {own.shape[0], own.shape[1]});
  }
  Input input;
  Tensor own;
  ConstTensorView view;
};

/// quantize or quantize_conv.
using Quantize = Result<QuantTensor>(const ConstTensorView& w, const QuantizeSpec& spec, Executor* executor);

QuantTensor quantize_weight(Quantize* how, nb::handle w, std::string_view scheme, std::string_view scale, bool clip_search) {
  const WeightScheme wanted = weight_scheme_from(scheme, dtype_from(scale));
  const Weights input(w);
  const QuantizeSpec spec{wanted, clip_search};
  nb::gil_scoped_release release;
  return check(how(input.view, spec, nullptr));
}

// --- whole checkpoints --------------------------------------------------------------------------------------------------------

/// Runs a transform without the interpreter's lock. `progress`: None, or called with (done, total, what). What it raises, and Ctrl-C, end
/// the transform, which leaves nothing behind then.
template <class Run>
TransformReport transform(bool overwrite, nb::handle progress, Run&& run) {
  TransformOptions options{.overwrite = overwrite};
  std::exception_ptr raised;  // the library makes a status of what is thrown through it
  options.progress = [progress, &raised](std::uint64_t done, std::uint64_t total, std::string_view what) {
    const nb::gil_scoped_acquire acquire;
    try {
      if (PyErr_CheckSignals() != 0) nb::raise_python_error();
      if (!progress.is_none()) progress(done, total, what);
    } catch (...) {
      raised = std::current_exception();
      throw;
    }
  };
  const nb::gil_scoped_release release;
  Result<TransformReport> report = run(options);
  if (raised) std::rethrow_exception(raised);
  return check(std::move(report));
}

TransformReport quantize_files(const std::string& in, const std::string& out, std::string_view scheme, const std::string& format,
                               std::string_view scale, bool clip_search, const std::string& calibration,
                               std::optional<double> smooth, bool conv, const std::string& only, const std::string& skip,
                               bool all, bool dry_run, bool overwrite, nb::handle progress) {
  const Scheme wanted = check(Scheme::parse(scheme, scale.empty() ? DType::f32 : dtype_from(scale)));
  QuantizeCheckpointSpec spec{.format = format,
                              .scheme = wanted,
                              .clip_search = clip_search,
                              .calibration = calibration,
                              .smooth = smooth,
                              .convs = conv,
                              .only = only,
                              .skip = skip,
                              .all = all,
                              .dry_run = dry_run};
  if (scale.empty()) spec.scheme.weight.scale = DType::none;  // that of the weights
  return transform(overwrite, progress, [&](const TransformOptions& how) { return quantize_checkpoint(in, out, spec, how); });
}

TransformReport convert_files(const std::string& in, const std::string& out, const std::string& format, bool overwrite,
                              nb::handle progress) {
  return transform(overwrite, progress, [&](const TransformOptions& how) { return convert_checkpoint(in, out, format, how); });
}

TransformReport dequantize_files(const std::string& in, const std::string& out, std::string_view dtype, bool overwrite,
                                 nb::handle progress) {
  const DType type = dtype_from(dtype);
  return transform(overwrite, progress, [&](const TransformOptions& how) { return dequantize_checkpoint(in, out, type, how); });
}

/// A tensor, or (bits, type) for a type that its framework has no name for.
QuantTensor decode_module(const nb::dict& tensors, std::string_view config) {
  std::vector<Input> keep;
  std::vector<NamedView> named;
  for (const auto [key, value] : tensors) {
    std::string suffix = nb::cast<std::string>(key);
    const bool typed = nb::isinstance<nb::tuple>(value) && nb::len(value) == 2;
    keep.push_back(Input(typed ? nb::object(value[0]) : nb::borrow(value), suffix.c_str()).on(Backend::cpu));
    ConstTensorView view = keep.back().view;
    if (view.dtype == DType::u16) view.dtype = DType::bf16;  // no format has integers of that kind
    if (typed) {
      const DType type = dtype_from(nb::cast<std::string>(nb::object(value[1])));
      if (bits(type) != bits(view.dtype))
        throw Failure(StatusCode::invalid_argument, suffix + " has elements of " + std::to_string(bits(view.dtype)) + " bits, " +
                                                        std::string(name(type)) + " has " + std::to_string(bits(type)));
      view.dtype = type;
    }
    named.push_back({std::move(suffix), view});
  }
  nb::gil_scoped_release release;
  return check(read_module(named, config));
}

/// {suffix: (dtype, shape, uint8 bytes)}
nb::dict encode_module(const QuantTensor& q, std::string_view format, std::string_view act_scheme) {
  const ActScheme act = act_from(act_scheme);
  const std::vector<ModuleTensor> tensors = [&] {
    const nb::gil_scoped_release release;
    return check(write_module(q, format, act));
  }();
  nb::dict out;
  for (const ModuleTensor& t : tensors)
    out[nb::str(t.suffix.c_str())] =
        nb::make_tuple(name(t.tensor.dtype), t.tensor.shape,
                       nb::bytes(reinterpret_cast<const char*>(t.tensor.bytes.data()), t.tensor.bytes.size()));
  return out;
}

/// layers: (name, format, scheme, act_order) each.
std::string encode_config(std::string_view format,
                          const std::vector<std::tuple<std::string, std::string, std::string, bool>>& layers,
                          const std::vector<std::string>& not_quantized) {
  std::vector<WrittenLayer> written;
  for (const auto& [layer, own, scheme, act_order] : layers)
    written.push_back({layer, own, check(Scheme::parse(scheme)), act_order});
  return check(write_config(format, written, not_quantized));
}

/// Straight from a checkpoint's tensors in device memory, without packing. g_idx is not taken: its values cannot be checked there.
void dequantize_tensors(std::string_view format, int width, bool zeros_minus_one, nb::handle qweight, nb::handle qzeros,
                        nb::handle scales, nb::handle out, bool transposed, std::uintptr_t stream) {
  const bool awq = format == "awq";
  if (!awq && format != "gptq")
    throw Failure(StatusCode::invalid_argument, "'" + std::string(format) + "' is neither awq nor gptq");
  if (width < 2 || width > 8) throw Failure(StatusCode::invalid_argument, "codes of " + std::to_string(width) + " bits");
  const Input w = Input(qweight, "qweight").matrix().on(Backend::cuda), z = Input(qzeros, "qzeros").matrix().on(Backend::cuda);
  const Input s = Input(scales, "scales").matrix().on(Backend::cuda);
  const Output d = Output(out, "out").matrix().on(Backend::cuda);
  for (const Input* input : {&w, &z, &s}) input->beside(d);
  const std::int64_t n = s.view.dim(1), k = transposed ? d.view.dim(0) : d.view.dim(1), groups = s.view.dim(0);
  const auto words = [&](std::int64_t count) { return (count * width + 31) / 32; };
  const auto expect = [](const Input& input, const char* what, std::int64_t rows, std::int64_t cols) {
    const ConstTensorView& v = input.view;
    if (v.dtype != DType::s32 || v.dim(0) != rows || v.dim(1) != cols || v.stride(1) != 1 || v.stride(0) != cols)
      throw Failure(StatusCode::invalid_argument, std::string(what) + " must be dense s32 [" + std::to_string(rows) + "," +
                                                      std::to_string(cols) + "], got " + std::string(name(v.dtype)) + " [" +
                                                      std::to_string(v.dim(0)) + "," + std::to_string(v.dim(1)) + "]");
  };
  if (awq && (width != 4 || n % 8 != 0)) throw Failure(StatusCode::invalid_argument, "AWQ has 4 bits and N in multiples of 8");
  awq ? expect(w, "qweight", k, n / 8) : expect(w, "qweight", words(k), n);
  expect(z, "qzeros", groups, words(n));
  if (groups < 1 || k % groups != 0 || s.view.stride(1) != 1 || s.view.stride(0) != n)
    throw Failure(StatusCode::invalid_argument,
                  "scales must be dense [G,N] with G a divisor of K=" + std::to_string(k) + ", G is " + std::to_string(groups));
  const CheckpointTensors tensors{.format = awq ? CheckpointTensors::Format::awq : CheckpointTensors::Format::gptq,
                                  .bits = width,
                                  .zeros_minus_one = zeros_minus_one,
                                  .scale = s.view.dtype,
                                  .n = n,
                                  .k = k,
                                  .group = k / groups,
                                  .qweight = w.view.data,
                                  .qzeros = z.view.data,
                                  .scales = s.view.data};
  nb::gil_scoped_release release;
  check(dequantize(tensors, d.view, transposed, Stream{reinterpret_cast<void*>(stream)}));
}

VerifyReport verify(const QuantTensor& q, std::string_view a_dtype, std::int64_t m, std::string_view out,
                    std::string_view act_scheme, std::string_view backend, const std::string& kernel, std::uint64_t seed,
                    std::int64_t sample_columns, std::string_view accumulation) {
  VerifySpec spec{.linear = {.a_dtype = dtype_from(a_dtype),
                             .m_max = m,
                             .epilogue = {.out = dtype_from(out)},
                             .act_scheme = act_from(act_scheme),
                             .accumulation = accumulation_from(accumulation)},
                  .seed = seed,
                  .sample_columns = sample_columns};
  spec.plan.kernel = spec.pack.kernel = kernel;
  spec.pack.backend = backend_from(backend);
  return check(verify_linear(q, spec));
}

VerifyReport verify_images(const QuantTensor& q, std::pair<std::int64_t, std::int64_t> image, Pair stride,
                           std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> padding, Pair dilation,
                           std::int64_t groups, bool channels_last, std::string_view a_dtype, std::int64_t batch,
                           std::string_view out, std::string_view act_scheme, std::string_view backend, const std::string& kernel,
                           std::uint64_t seed, std::int64_t sample_columns, std::string_view accumulation) {
  const auto [top, bottom, left, right] = padding;
  const ImageLayout layout = channels_last ? ImageLayout::nhwc : ImageLayout::nchw;
  VerifyConvSpec spec{
      .conv = {.geometry = {.in_channels = q.k / (q.filter.h * q.filter.w) * std::clamp<std::int64_t>(groups, 1, 1 << 30),
                            .out_channels = q.n,
                            .height = image.first,
                            .width = image.second,
                            .filter = q.filter,
                            .stride = {stride.first, stride.second},
                            .padding = {.top = top, .bottom = bottom, .left = left, .right = right},
                            .dilation = {dilation.first, dilation.second},
                            .groups = groups},
               .input = layout,
               .output = layout,
               .a_dtype = dtype_from(a_dtype),
               .batch_max = batch,
               .epilogue = {.out = dtype_from(out)},
               .act_scheme = act_from(act_scheme),
               .accumulation = accumulation_from(accumulation)},
      .seed = seed,
      .sample_columns = sample_columns};
  spec.plan.kernel = spec.pack.kernel = kernel;
  spec.pack.backend = backend_from(backend);
  return check(verify_conv(q, spec));
}

nb::dict device() {
  check(check_environment());
  const DeviceInfo& d = this_device();
  nb::list isas;
  for (const Isa isa : kAllIsas)
    if (d.has(isa)) isas.append(name(isa));
  nb::dict out;
  out["cpu"] = d.cpu_name;
  out["cores"] = d.cores;
  out["threads"] = (shared_threads() != nullptr ? *shared_threads() : default_executor()).threads();
  out["isa"] = name(d.isa);
  out["isas"] = isas;
  out["l1d_bytes"] = d.l1d_bytes;
  out["l2_bytes"] = d.l2_bytes;
  out["l3_bytes"] = d.l3_bytes;
  out["memory_bytes"] = d.memory_bytes;
  return out;
}

nb::dict gpu() {
  const GpuInfo g = check(this_gpu());
  nb::dict out;
  out["name"] = g.name;
  out["ordinal"] = g.ordinal;
  out["compute_capability"] = g.compute_capability;
  out["sms"] = g.sms;
  out["l2_bytes"] = g.l2_bytes;
  out["memory_bytes"] = g.memory_bytes;
  return out;
}

nb::dict roofline() {
  check(check_environment());
  const Roofline r = [] {
    nb::gil_scoped_release release;
    return measure_roofline(default_executor());
  }();
  nb::dict out;
  out["read_gbytes_per_s"] = r.read_gbytes_per_s;
  out["f32_gflops"] = r.f32_gflops;
  out["bf16_gflops"] = r.bf16_gflops;
  out["int8_gops"] = r.int8_gops;
  return out;
}

void bind_functions(nb::module_& m) {
  m.def(
      "join",
      [](const std::vector<const QuantTensor*>& parts) {
        std::vector<QuantTensor> copies;
        for (const QuantTensor* part : parts) copies.push_back(*part);
        return check(join(copies));
      },
      "parts"_a);
  for (const auto& [function, how] :
       std::initializer_list<std::pair<const char*, Quantize*>>{{"quantize", &quantize}, {"quantize_conv", &quantize_conv}})
    m.def(
        function,
        [how = how](nb::handle w, std::string_view scheme, std::string_view scale, bool clip_search) {
          return quantize_weight(how, w, scheme, scale, clip_search);
        },
        "w"_a, nb::kw_only(), "scheme"_a, "scale"_a = "f16", "clip_search"_a = false);
  m.def(
      "quantization_error",
      [](nb::handle w, const QuantTensor& q) {
        const Weights input(w);
        nb::gil_scoped_release release;
        return check(quantization_error(input.view, q));
      },
      "w"_a, "q"_a, "How far q is from w [N,K], f32, f16 or bf16.");
  m.def("explain", &explain_tensor, "q"_a, nb::kw_only(), "backend"_a, "gpu"_a, "a_dtype"_a, "m_max"_a, "out"_a, "act_scheme"_a,
        "accumulation"_a);
  m.def("quantize_activations", &quantize_activations, "x"_a.none(), nb::kw_only(), "scheme"_a, "scale"_a.none(), "zero"_a,
        "limit"_a.none(), "prescale"_a.none(), "codes"_a.none(), "scales"_a.none(), "zeros"_a.none(), "stream"_a.none());
  m.def("quantize_checkpoint", &quantize_files, "source"_a, "target"_a, nb::kw_only(), "scheme"_a, "format"_a, "scale"_a,
        "clip_search"_a, "calibration"_a, "smooth"_a.none(), "conv"_a, "only"_a, "skip"_a, "all"_a, "dry_run"_a, "overwrite"_a,
        "progress"_a.none());
  m.def("convert_checkpoint", &convert_files, "source"_a, "target"_a, nb::kw_only(), "format"_a, "overwrite"_a,
        "progress"_a.none());
  m.def("dequantize_checkpoint", &dequantize_files, "source"_a, "target"_a, nb::kw_only(), "dtype"_a, "overwrite"_a,
        "progress"_a.none());
  m.def("read_module", &decode_module, "tensors"_a, "config"_a = "");
  m.def("write_module", &encode_module, "q"_a, "format"_a, "act_scheme"_a = "");
  m.def("write_config", &encode_config, "format"_a, "layers"_a, "not_quantized"_a);
  m.def("dequantize_tensors", &dequantize_tensors, nb::kw_only(), "format"_a, "bits"_a, "zeros_minus_one"_a, "qweight"_a,
        "qzeros"_a, "scales"_a, "out"_a, "transposed"_a, "stream"_a = 0);
  m.def("verify", &verify, "q"_a, nb::kw_only(), "a_dtype"_a = "f32", "m"_a = 4, "out"_a = "f32", "act_scheme"_a = "",
        "backend"_a = "cpu", "kernel"_a = "", "seed"_a = 1, "sample_columns"_a = 0, "accumulation"_a = "fast",
        nb::call_guard<nb::gil_scoped_release>());
  m.def("verify_conv", &verify_images, "q"_a, nb::kw_only(), "image"_a, "stride"_a, "padding"_a, "dilation"_a, "groups"_a,
        "channels_last"_a, "a_dtype"_a, "batch"_a, "out"_a, "act_scheme"_a, "backend"_a, "kernel"_a, "seed"_a, "sample_columns"_a,
        "accumulation"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "act_scheme", [](std::string_view text) { return name_of(act_from(text)); }, "text"_a,
      "\"s8r_u4g128\" → \"s8r\"; \"\" stays. Raises InvalidArgument.");
  m.def(
      "synchronize", [](std::uintptr_t stream) { check(synchronize(Stream{reinterpret_cast<void*>(stream)})); }, "stream"_a = 0,
      nb::call_guard<nb::gil_scoped_release>(), "Waits for all that was enqueued on a CUDA stream.");
  m.def("kernels", &kernels, "The kernels of this build, best-loved first, the reference last.");
  m.def("layouts", &layouts, "The packed layouts of this build.");
  m.def("formats", &formats, "The checkpoint formats that are read.");
  m.def("device", &device);
  m.def("gpu", &gpu);
  m.def("roofline", &roofline);
}

}  // namespace
}  // namespace nibble::python

NB_MODULE(_core, m) {
  using namespace nibble::python;
  m.attr("version") = NIBBLE_VERSION;
  register_errors();
  bind_values(m);
  bind_tensors(m);
  bind_weights(m);
  bind_experts(m);
  bind_packed_files(m);
  bind_functions(m);
  bind_threads(m);
}
