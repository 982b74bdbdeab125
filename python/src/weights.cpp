// nibble._core: packed weights, in memory and in files.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>

#include "arrays.hpp"
#include "bind.hpp"
#include "calls.hpp"
#include "nibble/nibble.hpp"

namespace nibble::python {

using namespace nb::literals;

namespace {

std::vector<Explanation::Bucket> explain(Weight& weight, std::string_view a_dtype, std::int64_t m_max, std::string_view out,
                                         std::string_view act_scheme, std::string_view accumulation) {
  LinearSpec spec{.a_dtype = dtype_from(a_dtype),
                  .m_max = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(m_max, 1)))),
                  .epilogue = {.glu = weight.glu().glu},
                  .act_scheme = act_from(act_scheme),
                  .accumulation = accumulation_from(accumulation)};
  spec.epilogue.out = dtype_from(out);
  return weight.linear.get(weight.packed, spec).explain().buckets;
}

std::size_t workspace_bytes(Weight& weight, std::int64_t m, std::string_view a_dtype, std::string_view out,
                            std::string_view act_scheme, std::string_view accumulation) {
  if (m < 1 || m > kMaxSize)
    throw Failure(StatusCode::invalid_argument, "m is " + std::to_string(m) + ", expected 1 to " + std::to_string(kMaxSize));
  LinearSpec spec{.a_dtype = dtype_from(a_dtype),
                  .m_max = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(m))),
                  .act_scheme = act_from(act_scheme),
                  .accumulation = accumulation_from(accumulation)};
  spec.epilogue.out = dtype_from(out);
  return weight.linear.get(weight.packed, spec).workspace_bytes(m);
}

/// The packed bytes where they are: a NumPy array, or on a GPU an array that speaks DLPack.
nb::object bytes_of(nb::handle self) {
  const auto& weight = nb::cast<const Weight&>(self);
  const std::span<const std::byte> bytes = weight.packed.bytes();
  if (weight.packed.backend() != Backend::cuda) {
    const std::int64_t shape[] = {static_cast<std::int64_t>(bytes.size())};
    return to_numpy(bytes.data(), DType::u8, shape, self);
  }
  const std::size_t shape[] = {bytes.size()};
  auto* const data = const_cast<std::byte*>(bytes.data());
  return nb::cast(
      nb::ndarray<std::uint8_t>(data, 1, shape, self, nullptr, nb::dtype<std::uint8_t>(), nb::device::cuda::value, weight.gpu));
}

/// Lets go of an object with the interpreter's lock.
struct Release {
  void operator()(nb::object* owner) const {
    const nb::gil_scoped_acquire acquire;
    delete owner;
  }
};

/// One that was packed for a convolution is for that of a layer: in Python calls say what they run.
PackedWeight for_layers(PackedWeight weight) {
  const auto* const conv = std::get_if<ConvSpec>(&weight.spec());
  if (conv == nullptr) return weight;
  const LinearSpec spec{.a_dtype = conv->a_dtype,
                        .m_max = conv->batch_max,
                        .epilogue = conv->epilogue,
                        .act_scheme = conv->act_scheme,
                        .accumulation = conv->accumulation};
  const auto kept = std::make_shared<const PackedWeight>(std::move(weight));
  return {{kept, &kept->data()}, spec};
}

Weight weight_from_bytes(nb::bytes header, nb::handle array, bool on_gpu, bool keep) {
  const Backend memory = on_gpu ? Backend::cuda : Backend::cpu;
  const Input bytes = Input(array, "bytes").on(memory);
  const ConstTensorView& v = bytes.view;
  if (v.dtype != DType::u8 || v.rank != 1 || (v.dim(0) > 1 && v.stride(0) != 1))
    throw Failure(StatusCode::invalid_argument, "the bytes of a packed weight are a dense vector of uint8; got " +
                                                    std::string(name(v.dtype)) + " of " + std::to_string(v.rank) + " dimensions");
  const std::shared_ptr<void> owner(new nb::object(keep ? nb::borrow(array) : nb::none()), Release());
  Weight weight{.packed = for_layers(check(packed_from_bytes(
                    {static_cast<const char*>(header.data()), header.size()},
                    {static_cast<const std::byte*>(v.data), static_cast<std::size_t>(v.dim(0))}, memory, owner)))};
  if (on_gpu) weight.gpu = check(this_gpu()).ordinal;
  return weight;
}

Weight pack_weight(const QuantTensor& q, std::string_view backend, std::string_view a_dtype, std::string_view act_scheme,
                   const std::string& layout, const std::string& kernel, std::int64_t m_max, std::string_view accumulation,
                   bool glu, OptionalFloat glu_limit, float glu_offset) {
  LinearSpec spec = packing_spec(a_dtype, act_scheme, m_max, accumulation);
  spec.epilogue.glu = glu;
  if (glu_limit) spec.epilogue.glu_limit = *glu_limit;
  spec.epilogue.glu_offset = glu_offset;
  const PackOptions options{.layout = layout, .kernel = kernel, .backend = backend_from(backend)};
  nb::gil_scoped_release release;
  return weight_of(check(pack(q, spec, options)));
}

}  // namespace

void bind_weights(nb::module_& m) {
  nb::class_<PlanCache>(
      m, "PlanCache",
      "Plans that weights share, for any number of threads: linear(x, plans=cache). Keeps up to `capacity` of them and "
      "drops the least recently used one first. A plan is for a shape, a scheme, the types and epilogue of a call, and "
      "for every number of tokens up to a power of two, not for a weight; without a cache each weight keeps its own.")
      .def(nb::init<std::size_t>(), "capacity"_a = PlanCache::kCapacity)
      .def_prop_ro(
          "hits", [](const PlanCache& c) { return c.statistics().hits; }, "Calls that got a plan that another call had made.")
      .def_prop_ro(
          "misses", [](const PlanCache& c) { return c.statistics().misses; }, "Calls that made a plan, or failed to.")
      .def(
          "__len__", [](const PlanCache& c) { return c.statistics().size; }, "How many plans are kept.")
      .def("clear", &PlanCache::clear, "Drops every plan.")
      .def("__repr__", [](const PlanCache& c) {
        const PlanCache::Statistics s = c.statistics();
        return "PlanCache(" + std::to_string(s.size) + " plans, " + std::to_string(s.hits) + " hits, " +
               std::to_string(s.misses) + " misses)";
      });
  nb::class_<Weight>(m, "PackedWeight", "A weight in the byte order its kernels stream, with the plans that ran on it.")
      .def_prop_ro("scheme", [](const Weight& w) { return w.packed.scheme().name(); })
      .def_prop_ro("scale", [](const Weight& w) { return name(w.packed.scheme().scale); })
      .def_prop_ro("n", [](const Weight& w) { return w.packed.n(); })
      .def_prop_ro("k", [](const Weight& w) { return w.packed.k(); })
      .def_prop_ro("filter", [](const Weight& w) { return Pair(w.packed.filter().h, w.packed.filter().w); })
      .def_prop_ro("layout", [](const Weight& w) { return w.packed.layout(); })
      .def_prop_ro("backend", [](const Weight& w) { return name(w.packed.backend()); })
      .def_ro("gpu", &Weight::gpu, "Which has it, of a weight on one.")
      .def_prop_ro("a_dtype", [](const Weight& w) { return name(w.spec().a_dtype); })
      .def_prop_ro("m_max", [](const Weight& w) { return w.spec().m_max; })
      .def_prop_ro("act_scheme", [](const Weight& w) { return name_of(w.spec().act_scheme); })
      .def_prop_ro("accumulation",
                   [](const Weight& w) { return w.spec().accumulation == Accumulation::precise ? "precise" : "fast"; })
      .def_prop_ro("nbytes", [](const Weight& w) { return w.packed.bytes().size(); })
      .def_prop_ro("has_bias", [](const Weight& w) { return w.packed.has_bias(); })
      .def_prop_ro("act_order", [](const Weight& w) { return w.packed.act_order(); })
      .def_prop_ro("glu", [](const Weight& w) { return std::tuple(w.glu().glu, w.glu().glu_limit, w.glu().glu_offset); })
      .def_prop_ro(
          "plans", [](const Weight& w) { return w.linear.size() + w.conv.size() + w.dequantize.size(); }, "How many are kept.")
      .def(
          "unpack", [](const Weight& w) { return check(unpack(w.packed)); }, nb::call_guard<nb::gil_scoped_release>(),
          "The QuantTensor it was packed from.")
      .def("workspace_bytes", &workspace_bytes, "m"_a, "a_dtype"_a, "out"_a, "act_scheme"_a, "accumulation"_a)
      .def("explain", &explain, "a_dtype"_a, "m_max"_a, "out"_a, "act_scheme"_a, "accumulation"_a)
      .def(
          "linear",
          [](Weight& self, nb::handle x, nb::handle bias, std::string_view activation, std::pair<float, float> clamp,
             float negative_slope, nb::handle gate, nb::handle residual, nb::handle row_scale, nb::handle col_scale,
             nb::handle a_scale, nb::handle a_zero, std::optional<std::string_view> act_scheme,
             std::optional<std::string_view> accumulation, nb::handle out_dtype, nb::handle out_scale, nb::handle out_zero,
             std::optional<std::pair<std::int32_t, std::int32_t>> out_range, nb::handle sum_bias, nb::handle out,
             nb::handle stream, std::string_view kernel, bool allow_reference, const Weight* next, nb::handle norm,
             PlanCache* plans) {
            Options options{bias,     activation, clamp,      negative_slope, gate,           residual,  row_scale, col_scale,
                            a_scale,  a_zero,     act_scheme, accumulation,   out_dtype,      out_scale, out_zero,  out_range,
                            sum_bias, out,        stream,     kernel,         allow_reference};
            options.next = next;
            options.norm = norm;
            options.plans = plans;
            return linear(self, x, options);
          },
          "x"_a.none(), "bias"_a.none(), "activation"_a, "clamp"_a, "negative_slope"_a, "gate"_a.none(), "residual"_a.none(),
          "row_scale"_a.none(), "col_scale"_a.none(), "a_scale"_a.none(), "a_zero"_a.none(), "act_scheme"_a.none(),
          "accumulation"_a.none(), "out_dtype"_a.none(), "out_scale"_a, "out_zero"_a, "out_range"_a.none(), "sum_bias"_a.none(),
          "out"_a.none(), "stream"_a.none(), "kernel"_a, "allow_reference"_a, "next"_a.none(), "norm"_a.none(), "plans"_a.none())
      .def(
          "conv",
          [](Weight& self, nb::handle x, Pair stride, std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t> padding,
             Pair dilation, std::int64_t groups, std::optional<bool> channels_last, nb::handle bias, std::string_view activation,
             std::pair<float, float> clamp, float negative_slope, nb::handle gate, nb::handle residual, nb::handle col_scale,
             nb::handle a_scale, nb::handle a_zero, std::optional<std::string_view> act_scheme,
             std::optional<std::string_view> accumulation, nb::handle out_dtype, nb::handle out_scale, nb::handle out_zero,
             std::optional<std::pair<std::int32_t, std::int32_t>> out_range, nb::handle sum_bias, nb::handle out,
             nb::handle stream, std::string_view kernel, bool allow_reference, const Weight* next, PlanCache* plans) {
            Options options{bias,     activation, clamp,      negative_slope, gate,           residual,  nb::none(), col_scale,
                            a_scale,  a_zero,     act_scheme, accumulation,   out_dtype,      out_scale, out_zero,   out_range,
                            sum_bias, out,        stream,     kernel,         allow_reference};
            options.next = next;
            options.plans = plans;
            return conv(self, x, stride, padding, dilation, groups, channels_last, options);
          },
          "x"_a.none(), "stride"_a, "padding"_a, "dilation"_a, "groups"_a, "channels_last"_a.none(), "bias"_a.none(),
          "activation"_a, "clamp"_a, "negative_slope"_a, "gate"_a.none(), "residual"_a.none(), "col_scale"_a.none(),
          "a_scale"_a.none(), "a_zero"_a.none(), "act_scheme"_a.none(), "accumulation"_a.none(), "out_dtype"_a.none(),
          "out_scale"_a, "out_zero"_a, "out_range"_a.none(), "sum_bias"_a.none(), "out"_a.none(), "stream"_a.none(), "kernel"_a,
          "allow_reference"_a, "next"_a.none(), "plans"_a.none())
      .def("dequantize", &dequantize, "out"_a, "transposed"_a, "stream"_a.none())
      .def("header",
           [](const Weight& w) {
             const std::string header = check(packed_header(w.packed));
             return nb::bytes(header.data(), header.size());
           })
      .def_prop_ro("bytes", &bytes_of)
      .def_static("from_bytes", &weight_from_bytes, "header"_a, "bytes"_a, nb::kw_only(), "gpu"_a, "keep"_a);
  m.def(
      "packed_layout",
      [](nb::bytes header) {
        return check(packed_layout({static_cast<const char*>(header.data()), header.size()}));
      },
      "header"_a, "The layout that PackedWeight.header() names.");
  m.attr("packed_prefix") = kPackedPrefix;
  m.def(
      "packed_header_size",
      [](nb::bytes prefix) {
        return check(packed_header_size({static_cast<const char*>(prefix.data()), prefix.size()}));
      },
      "prefix"_a, "Of the header that begins with these packed_prefix bytes.");
  m.def("pack", &pack_weight, "q"_a, nb::kw_only(), "backend"_a = "cpu", "a_dtype"_a = "f32", "act_scheme"_a = "",
        "layout"_a = "", "kernel"_a = "", "m_max"_a = std::int64_t{1} << 13, "accumulation"_a = "fast", "glu"_a = false,
        "glu_limit"_a = nb::none(), "glu_offset"_a = 0.0f);
}

// --- files of packed weights --------------------------------------------------------------------------------------------------

namespace {

/// A weight of the file, in host memory or on the current GPU.
Weight load_packed(const PackedFile& file, std::string_view name, std::string_view backend) {
  const Backend memory = backend_from(backend);
  nb::gil_scoped_release release;
  PackedWeight weight = for_layers(check(file.load(name)));
  return weight_of(memory == Backend::cuda ? check(upload(weight)) : std::move(weight));
}

void save_weights(const std::string& path, const std::vector<std::pair<std::string, const Weight*>>& weights,
                  const Checkpoint* checkpoint, bool overwrite) {
  nb::gil_scoped_release release;
  std::vector<std::pair<std::string, PackedWeight>> named;
  for (const auto& [name, weight] : weights) named.emplace_back(name, weight->packed);
  check(save_packed(path, named, {.overwrite = overwrite, .checkpoint = checkpoint}));
}

std::pair<Weight, std::string> find_or_pack(const Checkpoint& checkpoint, const std::string& layer, const PackedFile* file,
                                            std::string_view backend, std::string_view a_dtype, std::string_view act_scheme,
                                            const std::string& layout, const std::string& kernel, std::int64_t m_max,
                                            std::string_view accumulation) {
  const Module* module = checkpoint.find_module(layer);
  if (module == nullptr) throw Failure(StatusCode::not_found, checkpoint.path().string() + ": no module " + layer);
  const LinearSpec spec = packing_spec(a_dtype, act_scheme, m_max, accumulation);
  const PackOptions options{.layout = layout, .kernel = kernel, .backend = backend_from(backend)};
  nb::gil_scoped_release release;
  ModuleWeight found = check(packed_weight(checkpoint, *module, spec, file, options));
  return {weight_of(std::move(found.weight)), std::move(found.packed_because)};
}

}  // namespace

void bind_packed_files(nb::module_& m) {
  nb::class_<PackedModule>(m, "PackedModule", "A weight in a file of packed weights.")
      .def_ro("name", &PackedModule::name, "That it was saved under.")
      .def_prop_ro(
          "scheme", [](const PackedModule& x) { return x.desc.scheme.name(); }, "\"u4zg128\"")
      .def_prop_ro(
          "n", [](const PackedModule& x) { return x.desc.n; }, "Output channels.")
      .def_prop_ro(
          "k", [](const PackedModule& x) { return x.desc.k; }, "Input channels.")
      .def_ro("layout", &PackedModule::layout, "\"cpu_n32\"")
      .def_ro("has_bias", &PackedModule::has_bias, "It has a bias of its own.")
      .def_prop_ro(
          "act_order", [](const PackedModule& x) { return x.desc.act_order; }, "Its input channels are permuted.")
      .def_ro("nbytes", &PackedModule::bytes, "Of the packed weight.")
      .def("__repr__", repr("PackedModule", "name", "scheme", "n", "k", "layout"));
  nb::class_<PackedFile>(m, "PackedFile", "Packed weights in a file, read-only and memory-mapped.")
      .def(
          "__init__",
          [](PackedFile* self, const std::string& path) {
            nb::gil_scoped_release release;
            new (self) PackedFile(check(PackedFile::open(path)));
          },
          "path"_a)
      .def_static(
          "beside",
          [](const Checkpoint& checkpoint) -> std::optional<PackedFile> {
            nb::gil_scoped_release release;
            Result<PackedFile> file = PackedFile::beside(checkpoint);
            if (file.status().code() == StatusCode::not_found) return std::nullopt;
            return check(std::move(file));
          },
          "checkpoint"_a)
      .def_prop_ro("path", [](const PackedFile& f) { return f.path().string(); })
      .def_prop_ro("library_version", [](const PackedFile& f) { return f.library_version(); })
      .def_prop_ro("checkpoint", [](const PackedFile& f) { return f.checkpoint(); })
      .def_prop_ro("modules",
                   [](const PackedFile& f) { return std::vector<PackedModule>(f.modules().begin(), f.modules().end()); })
      .def("compare",
           [](const PackedFile& f, const Checkpoint& checkpoint) {
             std::vector<std::pair<std::string, std::string>> notes;
             nb::gil_scoped_release release;
             for (const ModuleNote& note : f.compare(checkpoint)) notes.emplace_back(note.module, note.note.text);
             return notes;
           })
      .def("load", &load_packed, "name"_a, "backend"_a);
  m.def("save_packed", &save_weights, "path"_a, "weights"_a, "checkpoint"_a.none(), "overwrite"_a);
  m.def("packed_weight", &find_or_pack, "checkpoint"_a, "layer"_a, "file"_a.none(), nb::kw_only(), "backend"_a, "a_dtype"_a,
        "act_scheme"_a, "layout"_a, "kernel"_a, "m_max"_a, "accumulation"_a);
}

}  // namespace nibble::python
