// The C interface: the library, its tables, threads, the machine.
#include <cstdlib>

#include "c_api/common.hpp"

using namespace nibble;

namespace nibble::c_api {
namespace {

/// The engine's threads.
class CallbackExecutor final : public Executor {
 public:
  explicit CallbackExecutor(const nib_context_desc& desc)
      : run_(desc.parallel_for), user_(desc.user), threads_(std::max(1, desc.threads)) {}
  int threads() const override { return threads_; }

 private:
  void run(std::int64_t count, LoopBody body) override {
    run_(
        user_, count, [](void* of, std::int64_t i) { (*static_cast<LoopBody*>(of))(i); }, &body);
  }

  nib_parallel_for run_;
  void* user_;
  int threads_;
};

}  // namespace
}  // namespace nibble::c_api

using namespace nibble::c_api;

uint32_t nib_abi_version() { return NIB_ABI_VERSION; }

const char* nib_version_string() { return NIBBLE_VERSION; }

const char* nib_last_error() { return last_error_text(); }

const char* nib_status_name(nib_status status) {
  // Names are literals, which end in NUL.
  return status < NIB_OK || status > NIB_INTERNAL ? "unknown" : name(static_cast<StatusCode>(status)).data();
}

const char* nib_dtype_name(nib_dtype dtype) {
  return dtype < NIB_NONE || dtype > NIB_C64 ? nullptr : name(static_cast<DType>(dtype)).data();
}

nib_dtype nib_dtype_parse(const char* text) {
  const auto parsed = text == nullptr ? std::nullopt : parse_dtype(text);
  return static_cast<nib_dtype>(parsed.value_or(DType::none));
}

void nib_text_free(char* text) { std::free(text); }

nib_status nib_kernels(char** text) {
  return guarded([&] {
    std::string lines;
    for (const KernelInfo& k : kernels())
      lines += fmt::format("{}\t{}\t{}\t{}\t{}\t{}\t{}\n", k.name, name(k.backend), name(k.op), k.layout, name(k.isa),
                           k.batch_invariant ? "batch_invariant" : "", k.summary);
    return give(lines, text);
  });
}

nib_status nib_layouts(char** text) {
  return guarded([&] {
    std::string lines;
    for (const LayoutInfo& l : layouts()) {
      lines += fmt::format("{}\t{}\n", l.name, name(l.backend));
      for (std::string_view rest = l.drawing; !rest.empty();) {
        const std::size_t end = rest.find('\n');
        lines += fmt::format("  {}\n", rest.substr(0, end));
        rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
      }
    }
    return give(lines, text);
  });
}

nib_status nib_formats(char** text) {
  return guarded([&] {
    std::string lines;
    for (const FormatInfo& f : formats())
      lines += fmt::format("{}\t{}\t{}\n", f.name, f.can_write ? "read+write" : "read", f.summary);
    return give(lines, text);
  });
}

nib_status nib_context_create(const nib_context_desc* given, nib_context** context) {
  return create(context, [&]() -> Result<Threads> {
    NIBBLE_RETURN_IF_ERROR(nibble::check_environment());
    NIBBLE_ASSIGN_OR_RETURN(const nib_context_desc desc, read("nib_context_desc", given, true));
    if (desc.threads < 0 || desc.threads > 4096)
      return error(StatusCode::invalid_argument, "nib_context_desc.threads={} is outside [0, 4096]", desc.threads);
    Threads threads;
    if (desc.parallel_for != nullptr)
      threads.own = std::make_unique<CallbackExecutor>(desc);
    else if (desc.threads != 0)
      threads.own = make_executor(desc.threads);
    return threads;
  });
}

nib_status nib_context_destroy(nib_context* context) { return destroy(context); }

nib_status nib_get_cpu(nib_cpu* cpu) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(check_environment());
    const DeviceInfo& device = this_device();
    nib_cpu out{};
    copy_text(device.cpu_name, out.name);
    copy_text(name(device.isa), out.isa);
    out.l1d_bytes = device.l1d_bytes;
    out.l2_bytes = device.l2_bytes;
    out.l3_bytes = device.l3_bytes;
    out.memory_bytes = device.memory_bytes;
    out.cores = device.cores;
    return write("nib_cpu", cpu, out);
  });
}

nib_status nib_get_gpu(nib_gpu* gpu) {
  return guarded([&]() -> Status {
    NIBBLE_ASSIGN_OR_RETURN(const GpuInfo device, this_gpu());
    nib_gpu out{};
    copy_text(device.name, out.name);
    for (const Isa isa : kAllIsas)
      if (backend(isa) == Backend::cuda && device.has(isa)) copy_text(name(isa), out.isa);
    out.l2_bytes = device.l2_bytes;
    out.memory_bytes = device.memory_bytes;
    out.read_gbytes_per_s = device.read_gbytes_per_s;
    out.ordinal = device.ordinal;
    out.compute_capability = device.compute_capability;
    out.multiprocessors = device.sms;
    return write("nib_gpu", gpu, out);
  });
}

nib_status nib_measure_roofline(const nib_context* context, nib_roofline* roofline) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(check_environment());
    NIBBLE_ASSIGN_OR_RETURN(Executor * threads, executor(context));
    const Roofline measured = measure_roofline(threads != nullptr ? *threads : default_executor());
    nib_roofline out{};
    out.read_gbytes_per_s = measured.read_gbytes_per_s;
    out.f32_gflops = measured.f32_gflops;
    out.bf16_gflops = measured.bf16_gflops;
    out.int8_gops = measured.int8_gops;
    out.threads = measured.threads;
    return write("nib_roofline", roofline, out);
  });
}

nib_status nib_gpu_memory_create(size_t bytes, nib_gpu_memory** memory) {
  return create(memory, [&] { return DeviceMemory::allocate(bytes); });
}

nib_status nib_gpu_memory_data(const nib_gpu_memory* memory, void** data) {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"place for the data's address", data}}));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory* value, open(memory));
    *data = value->data();
    return {};
  });
}

nib_status nib_gpu_memory_destroy(nib_gpu_memory* memory) { return destroy(memory); }

nib_status nib_copy_to_gpu(void* to, const void* from, size_t bytes, void* stream) {
  return guarded([&]() -> Status {
    if (bytes != 0) NIBBLE_RETURN_IF_ERROR(required({{"destination", to}, {"source", from}}));
    return copy_to_device(to, from, bytes, Stream{stream});
  });
}

nib_status nib_copy_from_gpu(void* to, const void* from, size_t bytes, void* stream) {
  return guarded([&]() -> Status {
    if (bytes != 0) NIBBLE_RETURN_IF_ERROR(required({{"destination", to}, {"source", from}}));
    return copy_from_device(to, from, bytes, Stream{stream});
  });
}

nib_status nib_synchronize(void* stream) {
  return guarded([&] { return synchronize(Stream{stream}); });
}
