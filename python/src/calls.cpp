#include "calls.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <memory>
#include <span>
#include <utility>

#include "threads.hpp"

namespace nibble::python {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

/// "[3, 256]", as Python writes it.
std::string text(std::span<const std::int64_t> shape) {
  std::string out = "[";
  for (const std::int64_t size : shape) out += (out.size() == 1 ? "" : ", ") + text(size);
  return out + "]";
}

Failure invalid(std::string message) { return {StatusCode::invalid_argument, std::move(message)}; }

template <class Void>
std::span<const std::int64_t> shape_of(const Argument<Void>& array) {
  return {array.view.shape.data(), static_cast<std::size_t>(array.view.rank)};
}

/// Whether images [B,C,H,W] lie as convolutions read them, NCHW or NHWC. The distance along a dimension of 1 means nothing.
bool are_images(const ConstTensorView& v) {
  const std::int64_t b = v.dim(0), c = v.dim(1), h = v.dim(2), w = v.dim(3);
  const std::int64_t pixel = w > 1 ? v.stride(3) : h > 1 ? v.stride(2) : c;
  const std::int64_t channel = c > 1 ? v.stride(1) : h * w;
  const bool rows_follow = h == 1 || v.stride(2) == w * pixel;
  const bool nchw =
      (h * w == 1 ? channel == 1 || c == 1 : pixel == 1 && channel >= h * w) && (b == 1 || v.stride(0) >= c * channel);
  const bool nhwc = (c == 1 || channel == 1) && pixel >= c && (b == 1 || v.stride(0) == h * w * pixel);
  return rows_follow && (nchw || nhwc);
}

std::int64_t product(std::span<const std::int64_t> sizes) {
  std::int64_t all = 1;
  for (const std::int64_t size : sizes) all *= size;
  return all;
}

/// Plans serve every M, or batch, up to a power of two.
std::int64_t bucket(std::int64_t m) { return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(m))); }

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

/// Where a call computes, in what order with the framework's other work, and who makes its results: all as the array `like` says. Its
/// GPU is the current one as long as this lives.
class Call {
 public:
  /// stream: None, or what nibble._arrays.stream_handle takes.
  Call(nb::handle like, nb::handle stream) : like_(like), kind_(kind_of(like)) {
    if (kind_.host) return;
    if (like.is_none()) throw nb::type_error("NoneType is no array");
    nb::dlpack::dltensor array;
    const bool opened = kind_.open(like, array);
    if (opened && array.device.device_type == nb::device::cpu::value) return;
    if (opened && array.device.device_type == nb::device::cuda::value) {
      gpu_ = array.device.device_id;
    } else {
      const nb::object where = kind_.framework.attr("device")(like);  // refuses other devices
      if (nb::cast<std::string_view>(nb::object(where[0])) == "cpu") return;
      gpu_ = nb::cast<int>(nb::object(where[1]));
    }
    backend_ = Backend::cuda;
    const auto handle = [](const nb::object& number) { return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(number)); };
    void* const current =
        kind_.exchange != nullptr ? kind_.current_stream(gpu_) : handle(kind_.framework.attr("current_stream")(like));
    stream_ = stream.is_none() ? current : handle(arrays_module().attr("stream_handle")(stream));
    in_order_ = stream_ == current;
    if (nb::object other = kind_.framework.attr("on_device")(like); !other.is_none()) {
      other.attr("__enter__")();
      other_gpu_ = std::move(other);
    }
  }
  ~Call() {
    if (!other_gpu_.is_valid()) return;
    try {
      other_gpu_.attr("__exit__")(nb::none(), nb::none(), nb::none());
    } catch (nb::python_error& problem) {
      problem.discard_as_unraisable("nibble: leaving a GPU");
    }
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Backend backend() const { return backend_; }
  Stream stream() const { return {stream_}; }

  Input in(nb::handle array, const char* what) const { return open<Input>(array, what); }
  /// As one matrix (dims: 2) or one vector (1): where the array is none in memory, a copy that its framework makes.
  Input in(nb::handle array, const char* what, int dims) const {
    Input opened = in(array, what).operand();
    return opened.dense(dims) || !in_order_ ? opened : copied(array, what);
  }
  /// Images [B,C,H,W], NCHW or NHWC in memory, if need be as a copy.
  Input in_images(nb::handle array, const char* what) const {
    Input opened = in(array, what).operand();
    return opened.view.rank != 4 || are_images(opened.view) || !in_order_ ? opened : copied(array, what);
  }
  /// Of an array that Python gave.
  Output out(nb::handle array, const char* what) const {
    if (!array.is_none()) kind_of(array).framework.attr("check_writable")(array);
    return open<Output>(array, what);
  }
  /// Of one that empty() made.
  Output made(const nb::object& array) const { return open<Output>(array, "the result"); }

  /// A new array of the kind of `like`, where that is.
  nb::object empty(std::span<const std::int64_t> shape, DType dtype) const {
    PyObject* const sizes = PyTuple_New(static_cast<Py_ssize_t>(shape.size()));
    if (sizes == nullptr) nb::raise_python_error();
    for (std::size_t i = 0; i < shape.size(); ++i)
      PyTuple_SetItem(sizes, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(shape[i]));
    const auto stream = reinterpret_cast<std::uintptr_t>(stream_);
    return kind_.framework.attr("empty")(nb::steal(sizes), name(dtype), like_,
                                         in_order_ ? nb::none() : nb::object(nb::int_(stream)));
  }
  /// [B,C,H,W], in memory NHWC or NCHW.
  nb::object images(std::int64_t b, std::int64_t c, std::int64_t h, std::int64_t w, DType dtype, bool channels_last) const {
    const std::int64_t nchw[] = {b, c, h, w}, nhwc[] = {b, h, w, c};
    return channels_last ? kind_.framework.attr("channels_second")(empty(nhwc, dtype)) : empty(nchw, dtype);
  }
  /// A result as the caller gets it.
  nb::object finish(nb::object array) const {
    return kind_.host || kind_.exchange != nullptr ? array : kind_.framework.attr("finish")(array);
  }

  void check_place(const Weight& weight, const char* what) const {
    if (backend_ == weight.packed.backend() && gpu_ == weight.gpu) return;
    const auto place = [](Backend backend, int gpu) { return (backend == Backend::cuda ? "cuda:" : "cpu:") + text(gpu); };
    throw invalid(std::string(what) + " is on " + place(backend_, gpu_) + ", the weight on " +
                  place(weight.packed.backend(), weight.gpu) + "; pack it there, or move " + what);
  }

 private:
  /// As it is where nothing has to wait for anything; else its framework makes it ready for the stream.
  template <class Argument>
  Argument open(nb::handle array, const char* what) const {
    if (array.is_none()) return {};
    const Kind& kind = kind_of(array);
    const bool ready = backend_ == Backend::cpu ? kind.host || kind.exchange != nullptr
                                                : in_order_ && kind.exchange != nullptr && kind.exchange == kind_.exchange;
    if (ready) return Argument(array, what).on(backend_);
    const nb::object exported = kind.framework.attr("export")(
        array, backend_ == Backend::cpu ? nb::none() : nb::object(nb::int_(reinterpret_cast<std::uintptr_t>(stream_))));
    return Argument(exported, what).on(backend_);
  }

  /// In the order of its dimensions, on the framework's current stream.
  Input copied(nb::handle array, const char* what) const {
    return in(kind_of(array).framework.attr("contiguous")(array), what).operand();
  }

  nb::handle like_;
  const Kind& kind_;
  Backend backend_ = Backend::cpu;
  int gpu_ = 0;  // on the CPU 0, as Weight::gpu
  void* stream_ = nullptr;
  bool in_order_ = true;  // the stream is the framework's current one
  nb::object other_gpu_;  // a context manager; invalid where the GPU was current already
};

/// An x of u8 is bits of FP8; but where its scheme has zero points, or zero points come with it, it is codes.
void take_u8(Input& x, const ActScheme& act, const Input& zero) {
  if (x.were_u8() && (act.zero == ZeroKind::integer || !zero.empty())) x.view.dtype = DType::u8;
}

/// How codes were quantized, from the shape of their scales: [1] per tensor, [M] per token, [M,G] in groups; f32 zeros are offsets. Groups
/// are those that the weight was packed for, if there are G of them, of which the last may be shorter; else all are equally long.
ActScheme act_of_codes(const Weight& weight, const Input& codes, const Input& scale, const Input& zero) {
  const DType type = codes.view.dtype;
  const std::string kind = type == DType::u8 ? "s8z"
                                             : std::string(name(type)) + (zero.empty()                    ? ""
                                                                          : zero.view.dtype == DType::f32 ? "o"
                                                                                                          : "z");
  if (scale.empty()) return act_from(kind + "t");  // the weight's static_acts; refused with the reason where it has none
  const auto dims = shape_of(codes), scales = shape_of(scale);
  const auto tokens = dims.first(dims.size() - 1);
  const std::int64_t m = product(tokens), k = weight.packed.k();
  if (product(scales) == 1) return act_from(kind + "t");
  if (std::ranges::equal(scales, tokens) || scales.size() == 1 || scales.back() == 1) return act_from(kind + "r");
  const auto rows = scales.first(scales.size() - 1);
  if (!std::ranges::equal(rows, tokens) && !(rows.size() == 1 && rows[0] == m))
    throw invalid("a_scale has shape " + text(scales) + "; x of shape " + text(dims) + " takes [1], [" + text(m) + "] or [" +
                  text(m) + ",G]");
  const std::int64_t groups = scales.back();
  const ActScheme& own = weight.spec().act_scheme;
  if (own.group.k > 0 && (k + own.group.k - 1) / own.group.k == groups) return act_from(kind + "g" + text(own.group.k));
  if (groups == 0 || k % groups != 0)
    throw invalid(text(groups) + " groups do not divide K=" + text(k) + " evenly; say act_scheme='" + kind + "gSIZE'");
  return act_from(kind + "g" + text(k / groups));
}

Activation activation_from(std::string_view token) {
  if (const auto activation = parse_activation(token)) return *activation;
  std::string names;
  for (Activation activation : kActivations) names += std::string(name(activation)) + ", ";
  throw invalid("'" + std::string(token) + "' is no activation; write one of " + names + "relu6");
}

/// Not an array.
bool is_number(nb::handle x) { return PyFloat_Check(x.ptr()) || PyLong_Check(x.ptr()); }

bool is_code(DType dtype) { return dtype == DType::s8 || dtype == DType::u8 || dtype == DType::e4m3; }

/// The array of a result: u8 are codes, not the bits of floats.
Output result_of(Output array) {
  if (array.view.dtype == DType::u8 || array.view.dtype == DType::s32) return array;
  return std::move(array).operand();
}

/// The epilogue of a plan. `out`: the array given for the result, if there is one.
EpilogueSpec epilogue(const Weight& weight, DType act, const Options& options, const Output& out) {
  DType type = is_code(act) ? DType::f32 : act;
  if (!options.out_dtype.is_none()) {
    const nb::object token = arrays_module().attr("token")(options.out_dtype);
    type = dtype_from(nb::cast<std::string_view>(token));
    if (!is_compute_float(type) && type != DType::s8 && type != DType::u8 && type != DType::s32)
      throw Failure(StatusCode::unsupported,
                    "out_dtype is " + python_name(type) + ", which is none of float32, float16, bfloat16, int8, uint8 and int32");
  }
  if (!options.out.is_none()) {
    if (!options.out_dtype.is_none() && out.view.dtype != type)
      throw invalid("out is " + std::string(name(out.view.dtype)) + ", out_dtype says " + std::string(name(type)));
    type = out.view.dtype;
  }
  const bool own_bias = options.bias.is_none() || options.bias.is(Py_True);
  EpilogueSpec spec{.sum_bias = !options.sum_bias.is_none(),
                    .row_scale = !options.row_scale.is_none(),
                    .col_scale = !options.col_scale.is_none(),
                    .bias = own_bias ? weight.packed.has_bias() && type != DType::s32 : !options.bias.is(Py_False),
                    .activation = activation_from(options.activation),
                    .glu = weight.glu().glu,
                    .glu_limit = weight.glu().glu_limit,
                    .glu_offset = weight.glu().glu_offset,
                    .gate = !options.gate.is_none(),
                    .residual = !options.residual.is_none(),
                    .out = type};
  if (spec.activation == Activation::clamp) std::tie(spec.clamp_low, spec.clamp_high) = options.clamp;
  if (options.activation == "relu6" && (spec.clamp_low != 0 || spec.clamp_high != 6))
    throw invalid("relu6 is clamp with 0 and 6; for other bounds say activation='clamp'");
  if (spec.activation == Activation::leaky_relu) spec.negative_slope = options.negative_slope;
  if (type == DType::s8 || type == DType::u8) {
    if (is_number(options.out_scale) != is_number(options.out_zero))
      throw invalid("out_scale and out_zero are two numbers or two arrays");
    spec.out_scales = !is_number(options.out_scale);
    if (!spec.out_scales) {
      spec.out_scale = nb::cast<float>(options.out_scale);
      spec.out_zero = nb::cast<std::int32_t>(options.out_zero);
    }
    if (options.out_range) std::tie(spec.out_low, spec.out_high) = *options.out_range;
  }
  return spec;
}

/// The arrays of an epilogue, opened.
struct OperandData {
  Input a_scale, a_zero, row_scale, col_scale, bias, gate, residual, sum_bias, out_scale, out_zero, norm_weight, norm_bias;
  Output norm_residual;  // read and written
  const PackedWeight* next;
  NormSpec norm;

  OperandData(const Call& call, const Options& options, bool images)
      : a_scale(call.in(options.a_scale, "a_scale")),
        a_zero(call.in(options.a_zero, "a_zero")),
        row_scale(call.in(options.row_scale, "row_scale", 1).vector()),
        col_scale(call.in(options.col_scale, "col_scale", 1).vector()),
        gate(call.in(options.gate, "gate", images ? 0 : 2)),
        residual(call.in(options.residual, "residual", images ? 0 : 2)),
        sum_bias(call.in(options.sum_bias, "sum_bias").vector()),
        next(options.next == nullptr ? nullptr : &options.next->packed) {
    if (!is_number(options.out_scale)) out_scale = call.in(options.out_scale, "out_scale", 1).vector();
    if (!is_number(options.out_zero)) out_zero = call.in(options.out_zero, "out_zero").vector();
    if (!PyBool_Check(options.bias.ptr())) bias = call.in(options.bias, "bias", 1);
    if (options.norm.is_none()) return;
    const auto [kind, weight, eps, bias_of_norm, offset, stream] =
        nb::cast<std::tuple<std::string, nb::object, float, nb::object, float, nb::object>>(options.norm);
    norm = {.kind = kind == "rms"     ? Norm::rms
                    : kind == "layer" ? Norm::layer
                                      : Norm::none,
            .eps = eps,
            .weight_offset = offset,
            .bias = !bias_of_norm.is_none(),
            .add = !stream.is_none()};
    if (norm.kind == Norm::none) throw invalid("'" + kind + "' is no kind of norm; write rms or layer");
    norm_weight = call.in(weight, "norm.weight", 1).vector();
    norm_bias = call.in(bias_of_norm, "norm.bias", 1).vector();
    norm_residual = call.out(stream, "norm.residual").operand();
  }

  /// Of tokens: [M] whatever their dimensions; of groups: [M,G].
  void shape_scales(const ActScheme& act) {
    for (Input* input : {&a_scale, &a_zero}) input->collapse(act.group.k == 0 ? 1 : 2);
  }
  Operands args() const {
    return {.a_scale = a_scale.view,
            .a_zero = a_zero.view,
            .row_scale = row_scale.view,
            .col_scale = col_scale.view,
            .bias = bias.view,
            .gate = gate.view,
            .residual = residual.view,
            .sum_bias = sum_bias.view,
            .out_scale = out_scale.view,
            .out_zero = out_zero.view,
            .norm_weight = norm_weight.view,
            .norm_bias = norm_bias.view,
            .norm_add = norm_residual.view,
            .norm_sum = norm_residual.view,
            .next = next};
  }
  void check_beside(const Output& d) const {
    for (const Input* input : {&a_scale, &a_zero, &row_scale, &col_scale, &bias, &gate, &residual, &sum_bias, &out_scale,
                               &out_zero, &norm_weight, &norm_bias})
      input->beside(d);
  }
};

void run(const Call& call, const Weight& weight, const Plan& plan, const ConstTensorView& a, const Output& d,
         const Operands& operands) {
  Status status;
  if (call.backend() == Backend::cuda) {
    const auto bytes = static_cast<std::int64_t>(plan.workspace_bytes(a.dim(0)));
    Output memory;  // goes back to the framework's allocator when this returns, to be used again behind the run on the stream
    if (bytes > 0) memory = call.made(call.empty({&bytes, 1}, DType::u8));
    const std::span workspace(static_cast<std::byte*>(memory.view.data), static_cast<std::size_t>(bytes));
    const nb::gil_scoped_release release;
    status = plan.run(weight.packed, a, d.view, operands, workspace, call.stream());
  } else {
    const nb::gil_scoped_release release;
    const Scratch memory(plan.workspace_bytes(a.dim(0)));
    status = plan.run(weight.packed, a, d.view, operands, memory.span(), shared_threads());
  }
  check(status);
}

Result<Plan> make(const PackedWeight& w, const LinearSpec& spec, const PlanOptions& o) { return Plan::linear(w, spec, o); }
Result<Plan> make(const PackedWeight& w, const ConvSpec& spec, const PlanOptions& o) { return Plan::conv(w, spec, o); }
Result<Plan> make(const PackedWeight& w, const DequantizeSpec& spec, const PlanOptions& o) {
  return Plan::dequantize(w, spec, o);
}

/// Where both would do, as of one channel, images are NCHW.
ImageLayout layout_of(const ConstTensorView& images) {
  const std::int64_t apart = images.dim(3) > 1   ? images.stride(3)
                             : images.dim(2) > 1 ? images.stride(2)
                                                 : 1;  // pixels of a channel
  return apart != 1 && (images.dim(1) == 1 || images.stride(1) == 1) ? ImageLayout::nhwc : ImageLayout::nchw;
}

}  // namespace

template <class Spec>
Plan Plans<Spec>::get(const PackedWeight& weight, const Spec& spec, std::string_view kernel, bool allow_reference) {
  for (const Entry& entry : entries_)
    if (entry.spec == spec && entry.kernel == kernel && entry.allow_reference == allow_reference) return entry.plan;
  PlanOptions options{.kernel = std::string(kernel), .allow_reference = allow_reference};
  Plan plan = [&] {
    const nb::gil_scoped_release release;
    return check(make(weight, spec, options));
  }();
  entries_.push_back({spec, std::move(options.kernel), allow_reference, plan});  // twice, if another thread was as quick: no harm
  return plan;
}

/// The plan of a call: of the cache that it was given, or of the weight.
template <class Spec>
Plan plan_of(const PackedWeight& weight, Plans<Spec>& own, const Spec& spec, const Options& options) {
  if (options.plans == nullptr) return own.get(weight, spec, options.kernel, options.allow_reference);
  const PlanOptions how{.kernel = std::string(options.kernel), .allow_reference = options.allow_reference};
  const nb::gil_scoped_release release;  // another thread may be making the plan
  if constexpr (std::is_same_v<Spec, ConvSpec>)
    return check(options.plans->conv(weight, spec, how));
  else
    return check(options.plans->linear(weight, spec, how));
}

template class Plans<LinearSpec>;
template class Plans<ConvSpec>;
template class Plans<DequantizeSpec>;

ActScheme act_from(std::string_view text) {
  if (text.empty()) return {};
  const bool whole = text.find('_') != std::string_view::npos;
  return check(Scheme::parse(whole ? std::string(text) : std::string(text) + "_s8c")).act;
}

Accumulation accumulation_from(std::string_view text) {
  if (text == "fast") return Accumulation::fast;
  if (text == "precise") return Accumulation::precise;
  throw invalid("'" + std::string(text) + "' is no accumulation; write fast or precise");
}

Backend backend_from(std::string_view name) {
  if (name == "cpu") return Backend::cpu;
  if (name == "cuda") return Backend::cuda;
  throw Failure(StatusCode::invalid_argument, "'" + std::string(name) + "' is no backend; write cpu or cuda");
}

LinearSpec packing_spec(std::string_view a_dtype, std::string_view act_scheme, std::int64_t m_max,
                        std::string_view accumulation) {
  LinearSpec spec{.a_dtype = dtype_from(a_dtype),
                  .m_max = m_max,
                  .act_scheme = act_from(act_scheme),
                  .accumulation = accumulation_from(accumulation)};
  if (is_compute_float(spec.a_dtype)) spec.epilogue.out = spec.a_dtype;  // as linear() answers
  return spec;
}

Weight weight_of(PackedWeight packed) {
  Weight weight{.packed = std::move(packed)};
  if (weight.packed.backend() == Backend::cuda) weight.gpu = check(this_gpu()).ordinal;
  return weight;
}

namespace {

/// What is asked of a product of x with `weight`, less how many rows it has. Codes in x, and operands that are its scales and zero points, take
/// the form that plans know.
LinearSpec spec_of(const Weight& weight, Input& a, const Options& options, OperandData& operands, const Output& d) {
  const ActScheme asked = options.act_scheme ? act_from(*options.act_scheme) : weight.spec().act_scheme;
  take_u8(a, asked, operands.a_zero);
  const DType act = a.view.dtype;
  LinearSpec spec{.a_dtype = act,
                  .epilogue = epilogue(weight, act, options, d),
                  .act_scheme = asked,
                  .accumulation = options.accumulation ? accumulation_from(*options.accumulation) : weight.spec().accumulation,
                  .norm = operands.norm};
  if (!options.act_scheme && is_code(act)) spec.act_scheme = act_of_codes(weight, a, operands.a_scale, operands.a_zero);
  operands.shape_scales(spec.act_scheme);
  return spec;
}

}  // namespace

nb::object linear(Weight& weight, nb::handle x, const Options& options) {
  const Call call(x, options.stream);
  call.check_place(weight, "x");
  Input a = call.in(x, "x", 2);
  const std::int64_t n = weight.packed.n(), k = weight.packed.k();
  std::vector<std::int64_t> dims(shape_of(a).begin(), shape_of(a).end());
  if (dims.empty() || dims.back() != k)
    throw invalid("x has shape " + text(dims) + ", the weight W[" + text(n) + "," + text(k) + "] takes [..., " + text(k) + "]");
  Output d = result_of(call.out(options.out, "out"));
  OperandData operands(call, options, false);
  LinearSpec spec = spec_of(weight, a, options, operands, d);
  const std::int64_t m = product(std::span(dims).first(dims.size() - 1));
  spec.m_max = bucket(m);
  dims.back() = spec.epilogue.columns(n);
  nb::object result = nb::borrow(options.out);
  if (result.is_none()) {
    result = call.empty(dims, spec.epilogue.out);
    d = result_of(call.made(result));
  }
  if (m > 0) {
    a.collapse(2);
    d.collapse(2);
    operands.gate.collapse(2);
    operands.residual.collapse(2);
    operands.norm_residual.collapse(2);
    a.beside(d);
    operands.norm_residual.beside(a);
    operands.check_beside(d);
    const Plan plan = plan_of(weight.packed, weight.linear, spec, options);
    run(call, weight, plan, a.view, d, operands.args());
  }
  return options.out.is_none() ? call.finish(std::move(result)) : result;
}

nb::object conv(Weight& weight, nb::handle x, Pair stride,
                std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> padding, Pair dilation, std::int64_t groups,
                std::optional<bool> channels_last, const Options& options) {
  const Call call(x, options.stream);
  call.check_place(weight, "x");
  Input a = call.in_images(x, "x");
  const auto dims = shape_of(a);
  if (dims.size() != 4) throw invalid("x has shape " + text(dims) + ", a convolution takes images [B, C, H, W]");
  const Extent filter = weight.packed.filter();
  const std::int64_t n = weight.packed.n(), k = weight.packed.k(), elements = filter.h * filter.w;
  if (dims[1] * elements != k * groups)
    throw invalid("x has shape " + text(dims) + " and groups=" + text(groups) + ", the weight W[" + text(n) + "," + text(k) +
                  "] has a filter of " + text(filter.h) + "x" + text(filter.w) + " and takes " + text(k * groups / elements) +
                  " channels");
  Output d = result_of(call.out(options.out, "out"));
  OperandData operands(call, options, true);
  const ActScheme asked = options.act_scheme ? act_from(*options.act_scheme) : weight.spec().act_scheme;
  take_u8(a, asked, operands.a_zero);
  const DType act = a.view.dtype;
  const auto [top, bottom, left, right] = padding;
  ConvSpec spec{.geometry = {.in_channels = dims[1],
                             .out_channels = n,
                             .height = dims[2],
                             .width = dims[3],
                             .filter = filter,
                             .stride = {stride.first, stride.second},
                             .padding = {.top = top, .bottom = bottom, .left = left, .right = right},
                             .dilation = {dilation.first, dilation.second},
                             .groups = groups},
                .input = layout_of(a.view),
                .a_dtype = act,
                .batch_max = bucket(dims[0]),
                .epilogue = epilogue(weight, act, options, d),
                .act_scheme = asked,
                .accumulation = options.accumulation ? accumulation_from(*options.accumulation) : weight.spec().accumulation};
  spec.output = spec.input;
  if (d.view.rank == 4)
    spec.output = layout_of(d.view);
  else if (channels_last)
    spec.output = *channels_last ? ImageLayout::nhwc : ImageLayout::nchw;
  if (!options.act_scheme && is_code(act))
    spec.act_scheme =
        act == DType::u8 ? act_from("s8zt") : act_from(std::string(name(act)) + (operands.a_zero.empty() ? "t" : "zt"));
  operands.shape_scales(spec.act_scheme);
  const Plan plan = plan_of(weight.packed, weight.conv, spec, options);
  nb::object result = nb::borrow(options.out);
  if (result.is_none()) {
    result = call.images(dims[0], n, spec.geometry.out_height(), spec.geometry.out_width(), spec.epilogue.out,
                         spec.output == ImageLayout::nhwc);
    d = result_of(call.made(result));
  }
  if (dims[0] > 0) {
    a.beside(d);
    operands.check_beside(d);
    run(call, weight, plan, a.view, d, operands.args());
  }
  return options.out.is_none() ? call.finish(std::move(result)) : result;
}

nb::object moe(Experts& gate_up, const Experts& down, nb::handle x, nb::handle ids, nb::handle weights,
               std::string_view activation, nb::handle residual, nb::handle out_dtype, nb::handle out, std::string_view kernel) {
  const Call call(x, nb::none());
  for (const Experts* experts : {&std::as_const(gate_up), &down})
    call.check_place(nb::cast<const Weight&>(experts->weights.front()), "x");
  Input a = call.in(x, "x", 2);
  std::vector<std::int64_t> dims(shape_of(a).begin(), shape_of(a).end());
  if (dims.size() < 2 || dims.back() != gate_up.packed.k())
    throw invalid("x has shape " + text(dims) + ", the experts take [..., " + text(gate_up.packed.k()) + "]");
  Input chosen = call.in(ids, "ids"), factors = call.in(weights, "weights", 2), added = call.in(residual, "residual", 2);
  a.collapse(2), chosen.collapse(2), factors.collapse(2), added.collapse(2);
  const std::int64_t tokens = product(std::span(dims).first(dims.size() - 1));
  DType type = a.view.dtype;
  if (!out_dtype.is_none()) type = dtype_from(nb::cast<std::string_view>(nb::object(arrays_module().attr("token")(out_dtype))));
  dims.back() = down.packed.n();
  nb::object result = nb::borrow(out);
  if (result.is_none()) result = call.empty(dims, type);
  Output d = out.is_none() ? call.made(result) : call.out(out, "out");
  if (tokens == 0) return result;
  if (chosen.empty() || chosen.view.rank != 2) throw invalid("ids must be int32 [" + text(tokens) + ",top_k]");
  LinearSpec first = gate_up.packed.spec(), second = down.packed.spec();
  first.a_dtype = first.epilogue.out = second.a_dtype = a.view.dtype;
  second.epilogue.out = type;
  first.epilogue.activation = activation_from(activation);
  first.m_max = second.m_max = bucket(tokens);
  const MoeSpec spec{.tokens_max = bucket(tokens), .top_k = chosen.view.dim(1), .residual = !added.empty(), .out = type};
  d = result_of(std::move(d));
  d.collapse(2);
  const void* const other = &down.packed[0].data();
  auto found = std::ranges::find_if(gate_up.plans, [&](const Experts::Entry& e) {
    return e.down == other && e.gate_up_spec == first && e.down_spec == second && e.spec == spec && e.kernel == kernel;
  });
  if (found == gate_up.plans.end()) {
    const PlanOptions options{.kernel = std::string(kernel)};
    MoePlan plan = check(MoePlan::make(gate_up.packed, first, down.packed, second, spec, options));
    gate_up.plans.push_back({other, first, second, spec, options.kernel, std::move(plan)});
    found = std::prev(gate_up.plans.end());
  }
  const MoePlan plan = found->plan;
  const MoeOperands operands{.ids = chosen.view, .weights = factors.view, .residual = added.view};
  Status status;
  if (call.backend() == Backend::cuda) {
    for (const Input* each : {&chosen, &factors, &added}) each->beside(d);
    a.beside(d);
    const auto bytes = static_cast<std::int64_t>(plan.workspace_bytes());
    const Output memory = call.made(call.empty({&bytes, 1}, DType::u8));
    const std::span workspace(static_cast<std::byte*>(memory.view.data), static_cast<std::size_t>(bytes));
    const nb::gil_scoped_release release;
    status = plan.run(gate_up.packed, down.packed, a.view, operands, d.view, workspace, call.stream());
  } else {
    const nb::gil_scoped_release release;
    const Scratch memory(plan.workspace_bytes());
    status = plan.run(gate_up.packed, down.packed, a.view, operands, d.view, memory.span(), shared_threads());
  }
  check(status);
  return out.is_none() ? call.finish(std::move(result)) : result;
}

nb::object grouped(Experts& experts, nb::handle x, nb::handle offsets, nb::handle counts, nb::handle rows, nb::handle ids,
                   const Options& options) {
  const Call call(x, options.stream);
  const auto& first = nb::cast<const Weight&>(experts.weights.front());
  call.check_place(first, "x");
  const bool padded = !counts.is_none(), by_ids = !ids.is_none();
  Input a = call.in(x, "x", 2), chosen = call.in(ids, "ids");
  std::vector<std::int64_t> dims(shape_of(a).begin(), shape_of(a).end());
  if (by_ids) {
    const std::span<const std::int64_t> pairs = shape_of(chosen);  // [..., top_k]
    const auto leads = [&](std::size_t count) {
      return dims.size() == count + 1 && std::ranges::equal(pairs.first(count), std::span(dims).first(count));
    };
    if (pairs.empty() || dims.empty() || dims.back() != experts.packed.k() || !(leads(pairs.size() - 1) || leads(pairs.size())))
      throw invalid("x has shape " + text(dims) + " and ids " + text(pairs) + "; the experts take x [..., " +
                    text(experts.packed.k()) + "] or [..., top_k, " + text(experts.packed.k()) + "] with ids [..., top_k]");
    dims.assign(pairs.begin(), pairs.end());
    dims.push_back(0);  // columns, which follow
    a.collapse(2), chosen.collapse(2);
  } else if (dims.size() != (padded ? 3 : 2) || dims.back() != experts.packed.k())
    throw invalid("x has shape " + text(dims) + "; the experts take " + (padded ? "[E, R, " : "[R, ") + text(experts.packed.k()) +
                  (padded ? "] with counts" : "] with offsets, [E, R, K] with counts, [..., K] with ids"));
  Output d = result_of(call.out(options.out, "out"));
  OperandData operands(call, options, false);
  LinearSpec spec = spec_of(first, a, options, operands, d);
  const Input begins = call.in(offsets, "offsets"), numbers = call.in(counts, "counts"), places = call.in(rows, "rows");
  if (places.view.rank == 1) dims[0] = places.view.dim(0);
  dims.back() = spec.epilogue.columns(experts.packed.n());
  const std::int64_t all = product(std::span(dims).first(dims.size() - 1));
  spec.m_max = bucket(all);
  nb::object result = nb::borrow(options.out);
  if (result.is_none()) {
    result = call.empty(dims, spec.epilogue.out);
    d = result_of(call.made(result));
  }
  if (all == 0) return options.out.is_none() ? call.finish(std::move(result)) : result;
  if (by_ids) d.collapse(2);
  operands.gate.collapse(2);
  operands.residual.collapse(2);
  auto found = std::ranges::find_if(
      experts.products, [&](const Experts::Product& known) { return known.spec == spec && known.kernel == options.kernel; });
  if (found == experts.products.end()) {
    const PlanOptions how{.kernel = std::string(options.kernel)};
    GroupedPlan made = check(GroupedPlan::make(experts.packed, spec, how));
    found = experts.products.insert(experts.products.end(), {spec, how.kernel, std::move(made)});
  }
  const GroupedPlan plan = found->plan;
  const ExpertRows which{.offsets = begins.view, .counts = numbers.view, .rows = places.view, .ids = chosen.view};
  const std::size_t needed = by_ids ? plan.ids_workspace_bytes() : plan.workspace_bytes();
  Status status;
  if (call.backend() == Backend::cuda) {
    for (const Input* each : {&std::as_const(a), &begins, &numbers, &places, &std::as_const(chosen)}) each->beside(d);
    operands.check_beside(d);
    const auto bytes = static_cast<std::int64_t>(needed);
    const Output memory = call.made(call.empty({&bytes, 1}, DType::u8));
    const std::span workspace(static_cast<std::byte*>(memory.view.data), static_cast<std::size_t>(bytes));
    const nb::gil_scoped_release release;
    status = plan.run(experts.packed, a.view, which, d.view, operands.args(), workspace, call.stream());
  } else {
    const nb::gil_scoped_release release;
    const Scratch memory(needed);
    status = plan.run(experts.packed, a.view, which, d.view, operands.args(), memory.span(), shared_threads());
  }
  check(status);
  return options.out.is_none() ? call.finish(std::move(result)) : result;
}

nb::tuple route(nb::handle logits, nb::handle bias, const RouteSpec& spec, nb::handle stream) {
  const Call call(logits, stream);
  Input scores = call.in(logits, "logits", 2);
  std::vector<std::int64_t> dims(shape_of(scores).begin(), shape_of(scores).end());
  if (dims.empty()) throw invalid("logits have no dimension; they are [..., E]");
  scores.collapse(2);
  const Input offsets = call.in(bias, "bias", 1).vector();
  offsets.beside(scores);
  dims.back() = spec.top_k;
  nb::object ids = call.empty(dims, DType::s32), weights = call.empty(dims, DType::f32);
  Output id = call.made(ids), weight = call.made(weights);
  id.collapse(2), weight.collapse(2);
  if (product(std::span(dims).first(dims.size() - 1)) > 0) {
    const nb::gil_scoped_release release;
    check(call.backend() == Backend::cuda
              ? nibble::route(scores.view, offsets.view, spec, id.view, weight.view, call.stream())
              : nibble::route(scores.view, offsets.view, spec, id.view, weight.view, shared_threads()));
  }
  return nb::make_tuple(call.finish(std::move(ids)), call.finish(std::move(weights)));
}

void dequantize(Weight& weight, nb::handle out, bool transposed, nb::handle stream) {
  const Call call(out, stream);
  call.check_place(weight, "out");
  const Output d = call.out(out, "out").operand().matrix();
  const Plan plan = weight.dequantize.get(weight.packed, {.out = d.view.dtype, .transposed = transposed});
  run(call, weight, plan, {}, d, {});
}

nb::tuple quantize_activations(nb::handle x, std::string_view scheme, OptionalFloat scale, std::int32_t zero, OptionalFloat limit,
                               nb::handle prescale, nb::handle codes, nb::handle scales, nb::handle zeros, nb::handle stream) {
  const ActScheme act = act_from(scheme);
  const Call call(x, stream);
  Input a = call.in(x, "x", 2);
  const auto dims = shape_of(a);
  if (dims.empty()) throw invalid("x has no dimension; activations are [..., K]");
  const bool known = act.group == GroupShape::tensor();
  if (known && !scale) throw invalid(std::string(scheme) + ": a scale per tensor has to be known beforehand; pass scale=");
  std::vector<std::int64_t> per_scale(dims.begin(), dims.end() - 1);  // the shape of scales and zeros
  const std::int64_t m = product(per_scale);
  if (act.group.k != 0) per_scale.push_back((dims.back() + act.group.k - 1) / act.group.k);

  std::vector<nb::object> results;
  const auto output = [&](nb::handle given, const char* what, bool wanted, std::span<const std::int64_t> shape, DType dtype) {
    const bool made = given.is_none() && wanted;
    results.push_back(made ? call.empty(shape, dtype) : nb::borrow(given));
    return made ? call.made(results.back()) : call.out(given, what);
  };
  const DType type = act.codes == DType::e4m3 ? DType::e4m3 : DType::s8;  // other codes are refused below
  Output c = output(codes, "codes", true, dims, type).floats();
  Output s = output(scales, "scales", !known, per_scale, DType::f32);
  const DType zero_type = act.zero == ZeroKind::offset ? DType::f32 : DType::s32;
  Output z = output(zeros, "zeros", !known && act.zero != ZeroKind::none, per_scale, zero_type);
  const Input p = call.in(prescale, "prescale");
  if (m > 0) {
    a.collapse(2);
    c.collapse(2);
    for (Output* each : {&s, &z}) each->collapse(act.group.k == 0 ? 1 : 2);
    for (const Output* each : {&c, &s, &z}) each->beside(a);
    p.beside(a);
    ActOptions options{.prescale = p.view, .limit = limit};
    if (known) options.known = StaticActs{*scale, zero};
    const ActOutputs out{.codes = c.view, .scales = s.view, .zeros = z.view};
    const nb::gil_scoped_release release;
    check(call.backend() == Backend::cuda ? nibble::quantize_activations(a.view, act, out, options, call.stream())
                                          : nibble::quantize_activations(a.view, act, out, options, shared_threads()));
  }
  const nb::handle given[] = {codes, scales, zeros};
  for (std::size_t i = 0; i < results.size(); ++i)
    if (given[i].is_none() && !results[i].is_none()) results[i] = call.finish(results[i]);
  return nb::make_tuple(results[0], results[1], results[2]);
}

}  // namespace nibble::python
