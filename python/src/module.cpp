// nibble._core: the C++ API as Python objects, one to one. What makes it comfortable is Python: nibble/__init__.py.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "nibble/nibble.hpp"

namespace nibble::python {
namespace {

using namespace nb::literals;
using OptionalFloat = std::optional<float>;
using Pair = std::pair<std::int64_t, std::int64_t>;  // of a height and a width

// --- scheme names -------------------------------------------------------------------------------------------------------------

std::string name_of(const ActScheme& act) {
  if (act.codes == DType::none) return "";
  const std::string whole = Scheme{{DType::s8, ZeroKind::none, GroupShape::channel()}, act}.name();
  return whole.substr(0, whole.find('_'));
}

/// "s8r", or the name of a scheme that begins so; "" is no quantization.
ActScheme act_from(std::string_view text) {
  if (text.empty()) return {};
  const bool whole = text.find('_') != std::string_view::npos;
  return check(Scheme::parse(whole ? std::string(text) : std::string(text) + "_s8c")).act;
}

WeightScheme weight_scheme_from(std::string_view text, DType scale = DType::f16) {
  const Scheme scheme = check(Scheme::parse(text, scale));
  if (scheme.act.codes != DType::none)
    throw Failure(StatusCode::invalid_argument,
                  "'" + std::string(text) + "' says how activations are quantized too; that is for pack(act=...), a weight is " +
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

/// "Module(name='…', n=…)": every field, read back from Python.
template <class... Fields>
auto repr(const char* type, Fields... fields) {
  return [=](nb::handle self) {
    std::string out = std::string(type) + "(";
    const char* separator = "";
    for (const char* field : {fields...}) {
      out += std::string(separator) + field + "=" + nb::cast<std::string>(nb::repr(self.attr(field)));
      separator = ", ";
    }
    return out + ")";
  };
}

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
      .def_prop_ro("quantized", &Module::quantized, "Checkpoint.read takes it.")
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

QuantTensor make_quant_tensor(std::string_view scheme, nb::handle codes, nb::handle scales, nb::handle zeros,
                              OptionalFloat scale2, nb::handle g_idx, nb::handle prescale, nb::handle bias,
                              std::optional<std::pair<float, std::int32_t>> static_acts, OptionalFloat act_limit, Pair kernel) {
  const auto optional_copy = [](nb::handle object, const char* what, bool floats) {
    if (object.is_none()) return Tensor();
    Input input(object, what);
    return copy(floats ? std::move(input).floats() : std::move(input), what);
  };
  QuantTensor q;
  q.scales = optional_copy(scales, "scales", true);
  q.scheme = weight_scheme_from(scheme, q.scales.dtype);
  Tensor all = optional_copy(codes, "codes", false);
  if (all.shape.size() != 2 || bits(all.dtype) != 8 || all.dtype == DType::boolean)
    throw Failure(StatusCode::invalid_argument, "codes must be [N,K] of 8-bit elements, one code a byte; got " +
                                                    std::string(name(all.dtype)) + " of " + std::to_string(all.shape.size()) +
                                                    " dimensions");
  q.n = all.shape[0];
  q.k = all.shape[1];
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(all.bytes.data());
  q.codes.assign(bytes, bytes + all.bytes.size());
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
  q.kernel = {kernel.first, kernel.second};
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
             std::optional<std::pair<float, std::int32_t>> static_acts, OptionalFloat act_limit, Pair kernel) {
            new (self) QuantTensor(
                make_quant_tensor(scheme, codes, scales, zeros, scale2, g_idx, prescale, bias, static_acts, act_limit, kernel));
          },
          "scheme"_a, "codes"_a, "scales"_a, "zeros"_a = nb::none(), nb::kw_only(), "scale2"_a = nb::none(),
          "g_idx"_a = nb::none(), "prescale"_a = nb::none(), "bias"_a = nb::none(), "static_acts"_a = nb::none(),
          "act_limit"_a = nb::none(), "kernel"_a = Pair(1, 1),
          "Copies arrays of host memory: codes [N,K], one a byte; scales and zeros [rows, groups] as the scheme says; g_idx [K]; "
          "prescale [K]; bias [N]. kernel: (height, width) of a convolution, whose K is in the order kh, kw, channel. Raises "
          "InvalidArgument for what contradicts the scheme.")
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
            return to_numpy(q.codes.data(), q.scheme.codes == DType::s8 ? DType::s8 : DType::u8, shape, self);
          },
          "[N,K], one code a byte; uint8, int8 for s8.")
      .def_prop_ro(
          "scales", [](nb::handle self) { return *field(self, nb::cast<const QuantTensor&>(self).scales); }, "[rows, groups]")
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
      .def_ro("act_limit", &QuantTensor::act_limit, "Magnitudes of activations saturate there before a scale is found, or None.")
      .def_prop_ro(
          "kernel", [](const QuantTensor& q) { return Pair(q.kernel.h, q.kernel.w); },
          "(height, width) of a convolution's; (1, 1) of linear layers.")
      .def_prop_ro("bits_per_weight", &QuantTensor::bits_per_weight, "Scales and all the rest included.")
      .def(
          "__eq__", [](const QuantTensor& a, const QuantTensor& b) { return a == b; }, nb::is_operator(),
          nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__hash__", [](nb::handle self) { return reinterpret_cast<std::uintptr_t>(self.ptr()) >> 4; })
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
          [](const Checkpoint& c, nb::handle layer) {
            const std::string wanted =
                nb::cast<std::string>(nb::isinstance<Module>(layer) ? layer.attr("name") : nb::object(nb::borrow(layer)));
            const Module* module = c.find_module(wanted);
            if (module == nullptr) throw Failure(StatusCode::not_found, c.path().string() + ": no module " + wanted);
            nb::gil_scoped_release release;
            return check(c.read(*module));
          },
          "layer"_a,
          "Decodes a layer, by name or Module, into a QuantTensor. Raises NotFound, InvalidArgument for a dense one, "
          "CorruptData.")
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

// --- packed weights and plans -------------------------------------------------------------------------------------------------

/// Scratch memory of the CPU's runs: a buffer per thread, kept while it is small.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) {
    if (bytes > kKept)
      own_.reset(new std::byte[bytes]);
    else if (kept().size() < bytes)
      kept().resize(bytes);
    span_ = {bytes > kKept ? own_.get() : kept().data(), bytes};
  }
  std::span<std::byte> span() const { return span_; }

 private:
  static constexpr std::size_t kKept = 16 << 20;
  static std::vector<std::byte>& kept() {
    thread_local std::vector<std::byte> bytes;
    return bytes;
  }
  std::unique_ptr<std::byte[]> own_;
  std::span<std::byte> span_;
};

Activation activation_from(std::string_view token) {
  if (const auto activation = parse_activation(token)) return *activation;
  throw Failure(StatusCode::invalid_argument,
                "'" + std::string(token) + "' is no activation; write none, relu, clamp, gelu_erf, gelu_tanh or silu");
}

Plan linear_plan(const PackedWeight& weight, std::string_view act, std::int64_t m_max, std::string_view out,
                 std::string_view quantize, bool bias, std::string_view activation, std::pair<float, float> clamp, bool gate,
                 bool residual, bool row_scale, bool col_scale, float out_scale, std::int32_t out_zero, const std::string& kernel,
                 bool allow_reference) {
  LinearSpec spec{.act = dtype_from(act), .m_max = m_max, .quantize = act_from(quantize)};
  spec.epilogue = {.row_scale = row_scale,
                   .col_scale = col_scale,
                   .bias = bias,
                   .activation = activation_from(activation),
                   .clamp_low = clamp.first,
                   .clamp_high = clamp.second,
                   .gate = gate,
                   .residual = residual,
                   .out = dtype_from(out),
                   .out_scale = out_scale,
                   .out_zero = out_zero};
  return check(Plan::linear(weight, spec, {.kernel = kernel, .allow_reference = allow_reference}));
}

Plan conv_plan(const PackedWeight& weight, std::string_view act, std::int64_t batch_max, std::string_view out, Pair size,
               Pair stride, std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> padding, Pair dilation,
               std::int64_t groups, std::int64_t channels, bool input_nhwc, bool output_nhwc, std::string_view quantize,
               bool bias, std::string_view activation, std::pair<float, float> clamp, bool gate, bool residual, bool col_scale,
               float out_scale, std::int32_t out_zero, const std::string& kernel, bool allow_reference) {
  ConvSpec spec{.input = input_nhwc ? ImageLayout::nhwc : ImageLayout::nchw,
                .output = output_nhwc ? ImageLayout::nhwc : ImageLayout::nchw,
                .act = dtype_from(act),
                .batch_max = batch_max,
                .quantize = act_from(quantize)};
  const auto [top, bottom, left, right] = padding;
  spec.geometry = {.in_channels = channels,
                   .out_channels = weight.n(),
                   .height = size.first,
                   .width = size.second,
                   .kernel = weight.kernel(),
                   .stride = {stride.first, stride.second},
                   .padding = {.top = top, .bottom = bottom, .left = left, .right = right},
                   .dilation = {dilation.first, dilation.second},
                   .groups = groups};
  spec.epilogue = {.col_scale = col_scale,
                   .bias = bias,
                   .activation = activation_from(activation),
                   .clamp_low = clamp.first,
                   .clamp_high = clamp.second,
                   .gate = gate,
                   .residual = residual,
                   .out = dtype_from(out),
                   .out_scale = out_scale,
                   .out_zero = out_zero};
  return check(Plan::conv(weight, spec, {.kernel = kernel, .allow_reference = allow_reference}));
}

void run_plan(const Plan& plan, const PackedWeight& weight, nb::handle x, nb::handle out, nb::handle a_scale, nb::handle a_zero,
              nb::handle row_scale, nb::handle col_scale, nb::handle bias, nb::handle gate, nb::handle residual,
              nb::handle workspace, std::uintptr_t stream, bool images) {
  const Backend backend = weight.backend();
  const auto shaped = [&](auto array) {  // images stay [B,C,H,W]
    array = std::move(array).floats().on(backend);
    return images ? std::move(array) : std::move(array).matrix();
  };
  const Input a = shaped(Input(x, "x"));
  const Output d = shaped(Output(out, "out"));
  const Input scratch = Input(workspace, "workspace").vector().on(backend);
  Input act_scale =
      Input(a_scale, "a_scale").on(backend);  // of a tensor, of tokens however many dimensions they have, or of groups
  const bool single = act_scale.empty() || act_scale.view.numel() == 1 || act_scale.view.numel() == a.view.dim(0);
  act_scale = single ? std::move(act_scale).vector() : std::move(act_scale).matrix();
  const Input act_zero = Input(a_zero, "a_zero").vector().on(backend);
  const Input rows = Input(row_scale, "row_scale").vector().on(backend),
              cols = Input(col_scale, "col_scale").vector().on(backend);
  const Input b = Input(bias, "bias").floats().on(backend);
  const Input g = shaped(Input(gate, "gate")), r = shaped(Input(residual, "residual"));
  for (const Input* operand : {&a, &scratch, static_cast<const Input*>(&act_scale), &act_zero, &rows, &cols, &b, &g, &r})
    operand->beside(d);
  const EpilogueArgs operands{.a_scale = act_scale.view,
                              .a_zero = act_zero.view,
                              .row_scale = rows.view,
                              .col_scale = cols.view,
                              .bias = b.view,
                              .gate = g.view,
                              .residual = r.view};
  Status status;
  {
    nb::gil_scoped_release release;
    if (backend == Backend::cuda) {
      auto* const bytes = static_cast<std::byte*>(const_cast<void*>(scratch.view.data));
      const auto size = storage_bytes(scratch.view.dtype, static_cast<std::uint64_t>(scratch.empty() ? 0 : scratch.view.numel()));
      status = plan.run(weight, a.view, d.view, operands, {bytes, size}, Stream{reinterpret_cast<void*>(stream)});
    } else {
      const Scratch memory(plan.workspace_bytes());
      status = plan.run(weight, a.view, d.view, operands, memory.span());
    }
  }
  check(status);
}

void bind_plans(nb::module_& m) {
  nb::class_<PackedWeight>(m, "PackedWeight",
                           "A weight in the byte order its kernels stream. Immutable; share it between threads.")
      .def_prop_ro("scheme", [](const PackedWeight& w) { return w.scheme().name(); })
      .def_prop_ro("n", &PackedWeight::n)
      .def_prop_ro("k", &PackedWeight::k)
      .def_prop_ro("kernel", [](const PackedWeight& w) { return Pair(w.kernel().h, w.kernel().w); })
      .def_prop_ro("layout", &PackedWeight::layout)
      .def_prop_ro("backend", [](const PackedWeight& w) { return name(w.backend()); })
      .def_prop_ro("nbytes", [](const PackedWeight& w) { return w.bytes().size(); })
      .def_prop_ro("has_bias", &PackedWeight::has_bias)
      .def_prop_ro("act_order", &PackedWeight::act_order)
      .def(
          "unpack", [](const PackedWeight& w) { return check(unpack(w)); }, nb::call_guard<nb::gil_scoped_release>(),
          "The QuantTensor it was packed from.");
  nb::class_<Plan>(m, "Plan", "Which kernels run, in which order, for every M up to m_max. Immutable; share it between threads.")
      .def_static("linear", &linear_plan, "weight"_a, nb::kw_only(), "act"_a, "m_max"_a, "out"_a, "quantize"_a = "",
                  "bias"_a = false, "activation"_a = "none", "clamp"_a = std::pair(0.0f, 6.0f), "gate"_a = false,
                  "residual"_a = false, "row_scale"_a = false, "col_scale"_a = false, "out_scale"_a = 1.0f, "out_zero"_a = 0,
                  "kernel"_a = "", "allow_reference"_a = true, nb::call_guard<nb::gil_scoped_release>(),
                  "For D[M,N] = epilogue(A[M,K] · Wᵀ), M up to m_max. act, out: types of A and D. quantize: \"s8r\" and the "
                  "like, how A is "
                  "quantized while running. Raises Unsupported with every kernel's reason.")
      .def_static("conv", &conv_plan, "weight"_a, nb::kw_only(), "act"_a, "batch_max"_a, "out"_a, "size"_a, "stride"_a,
                  "padding"_a, "dilation"_a, "groups"_a, "channels"_a, "input_nhwc"_a = false, "output_nhwc"_a = false,
                  "quantize"_a = "", "bias"_a = false, "activation"_a = "none", "clamp"_a = std::pair(0.0f, 6.0f),
                  "gate"_a = false, "residual"_a = false, "col_scale"_a = false, "out_scale"_a = 1.0f, "out_zero"_a = 0,
                  "kernel"_a = "", "allow_reference"_a = true, nb::call_guard<nb::gil_scoped_release>(),
                  "size: (height, width) of an image. padding: (top, bottom, left, right).")
      .def_static(
          "dequantize",
          [](const PackedWeight& weight, std::string_view out, bool transposed, const std::string& kernel) {
            return check(Plan::dequantize(weight, {.out = dtype_from(out), .transposed = transposed}, {.kernel = kernel}));
          },
          "weight"_a, nb::kw_only(), "out"_a, "transposed"_a = false, "kernel"_a = "", nb::call_guard<nb::gil_scoped_release>(),
          "For W itself, [N,K] or transposed, rounded once to `out`: f32, f16 or bf16.")
      .def_prop_ro("workspace_bytes", &Plan::workspace_bytes, "Bytes of scratch memory a run needs, for the largest M.")
      .def("kernel", &Plan::kernel, "m"_a = 1, "The main kernel for this M.")
      .def(
          "explain", [](const Plan& p) { return p.explain().buckets; },
          "Per range of M: what runs, what was asked, what it answered.")
      .def(
          "run", &run_plan, "weight"_a, "x"_a.none(), "out"_a, nb::kw_only(), "a_scale"_a = nb::none(), "a_zero"_a = nb::none(),
          "row_scale"_a = nb::none(), "col_scale"_a = nb::none(), "bias"_a = nb::none(), "gate"_a = nb::none(),
          "residual"_a = nb::none(), "workspace"_a = nb::none(), "stream"_a = 0, "images"_a = false,
          "Runs on arrays that are all there already. Of a weight in device memory: enqueues on `stream`, a cudaStream_t, with a "
          "workspace of workspace_bytes, and returns; the arrays must live until the stream is done. images: of a convolution.");
}

// --- functions ----------------------------------------------------------------------------------------------------------------

PackedWeight pack_weight(const QuantTensor& q, std::string_view backend, std::string_view act, const std::string& layout,
                         const std::string& kernel, std::int64_t m_max) {
  PackOptions options{.layout = layout, .m_max = m_max, .kernel = kernel, .quantize = act_from(act)};
  if (backend != "cpu" && backend != "cuda")
    throw Failure(StatusCode::invalid_argument, "'" + std::string(backend) + "' is no backend; write cpu or cuda");
  options.backend = backend == "cuda" ? Backend::cuda : Backend::cpu;
  nb::gil_scoped_release release;
  return check(pack(q, options));
}

/// `how` is quantize or quantize_conv.
QuantTensor quantize_weight(decltype(quantize)* how, nb::handle w, std::string_view scheme, std::string_view scale,
                            bool clip_search) {
  const WeightScheme wanted = weight_scheme_from(scheme, dtype_from(scale));
  const Input input = Input(w, "w").floats().on(Backend::cpu);
  QuantizeSpec spec{.bits = bits(wanted.codes),
                    .symmetric = wanted.zero == ZeroKind::none,
                    .scale = wanted.scale,
                    .clip_search = clip_search,
                    .group = wanted.group};
  if (wanted.codes == DType::s8 || wanted.codes == DType::e4m3) spec.codes = wanted.codes;
  nb::gil_scoped_release release;
  QuantTensor q = check(how(input.view, spec, nullptr));
  if (q.scheme != wanted)
    throw Failure(StatusCode::unsupported,
                  "floats are not quantized to " + wanted.name() + "; the nearest is " + q.scheme.name());
  return q;
}

void quantize_acts(nb::handle x, std::string_view scheme, nb::handle codes, nb::handle scales, nb::handle zeros, nb::handle sums,
                   nb::handle prescale, OptionalFloat limit, std::optional<std::pair<float, std::int32_t>> known, bool cuda,
                   std::uintptr_t stream) {
  const Backend backend = cuda ? Backend::cuda : Backend::cpu;
  const ActScheme act = act_from(scheme);
  const Input a = Input(x, "x").floats().matrix().on(backend), pre = Input(prescale, "prescale").on(backend);
  const Output c = Output(codes, "codes").floats().matrix().on(backend);
  Output s = Output(scales, "scales").on(backend);
  s = act.group.k == 0 ? std::move(s).vector() : std::move(s).matrix();
  const Output z = Output(zeros, "zeros").vector().on(backend), t = Output(sums, "sums").vector().on(backend);
  for (const Output* output : {&c, static_cast<const Output*>(&s), &z, &t}) output->beside(a);
  pre.beside(a);
  ActOptions options{.prescale = pre.view, .limit = limit};
  if (known) options.known = StaticActs{known->first, known->second};
  const ActOutputs out{.codes = c.view, .scales = s.view, .zeros = z.view, .sums = t.view};
  nb::gil_scoped_release release;
  check(cuda ? quantize_activations(a.view, act, out, options, Stream{reinterpret_cast<void*>(stream)})
             : quantize_activations(a.view, act, out, options));
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

VerifyReport verify(const QuantTensor& q, std::string_view act, std::int64_t m, std::string_view out, std::string_view quantize,
                    std::string_view backend, const std::string& kernel, std::uint64_t seed, std::int64_t sample_columns) {
  VerifySpec spec{
      .linear = {.act = dtype_from(act), .m_max = m, .epilogue = {.out = dtype_from(out)}, .quantize = act_from(quantize)},
      .seed = seed,
      .sample_columns = sample_columns};
  spec.plan.kernel = spec.pack.kernel = kernel;
  spec.pack.backend = backend == "cuda" ? Backend::cuda : Backend::cpu;
  spec.pack.m_max = m;
  spec.pack.quantize = spec.linear.quantize;
  return check(verify_linear(q, spec));
}

nb::dict device() {
  const DeviceInfo& d = this_device();
  nb::list isas;
  for (const Isa isa : kAllIsas)
    if (d.has(isa)) isas.append(name(isa));
  nb::dict out;
  out["cpu"] = d.cpu_name;
  out["cores"] = d.cores;
  out["threads"] = default_executor().threads();
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
  m.def("pack", &pack_weight, "q"_a, nb::kw_only(), "backend"_a = "cpu", "act"_a = "", "layout"_a = "", "kernel"_a = "",
        "m_max"_a = std::int64_t{1} << 13);
  for (const auto& [function, how] : {std::pair("quantize", &quantize), std::pair("quantize_conv", &quantize_conv)})
    m.def(
        function,
        [how = how](nb::handle w, std::string_view scheme, std::string_view scale, bool clip_search) {
          return quantize_weight(how, w, scheme, scale, clip_search);
        },
        "w"_a, nb::kw_only(), "scheme"_a, "scale"_a = "f16", "clip_search"_a = false);
  m.def(
      "quantization_error",
      [](nb::handle w, const QuantTensor& q) {
        const Input input = Input(w, "w").floats().on(Backend::cpu);
        nb::gil_scoped_release release;
        return check(quantization_error(input.view, q));
      },
      "w"_a, "q"_a, "How far q is from w [N,K], f32, f16 or bf16.");
  m.def("quantize_activations", &quantize_acts, "x"_a, nb::kw_only(), "scheme"_a, "codes"_a, "scales"_a = nb::none(),
        "zeros"_a = nb::none(), "sums"_a = nb::none(), "prescale"_a = nb::none(), "limit"_a = nb::none(), "known"_a = nb::none(),
        "cuda"_a = false, "stream"_a = 0);
  m.def("read_module", &decode_module, "tensors"_a, "config"_a = "");
  m.def("dequantize_tensors", &dequantize_tensors, nb::kw_only(), "format"_a, "bits"_a, "zeros_minus_one"_a, "qweight"_a,
        "qzeros"_a, "scales"_a, "out"_a, "transposed"_a, "stream"_a = 0);
  m.def("verify", &verify, "q"_a, nb::kw_only(), "act"_a = "f32", "m"_a = 4, "out"_a = "f32", "quantize"_a = "",
        "backend"_a = "cpu", "kernel"_a = "", "seed"_a = 1, "sample_columns"_a = 0, nb::call_guard<nb::gil_scoped_release>());
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
  bind_plans(m);
  bind_functions(m);
}
