// nibble as a backend of ggml that is loaded while running: GGML_BACKEND_PATH=libggml-nibble.so.
//
// It is an accelerator beside ggml's CPU backend, as BLAS is, with a buffer type of its own: engines offer each weight to the buffer
// types of accelerators first, and supports_op says which ones nibble multiplies. Those are packed as they are loaded, and exist once.
// Everything else, activations included, is in memory of the CPU backend, which both read and write without copies.
#include <ggml-backend-impl.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <string_view>

#include "weight.hpp"

namespace nibble::ggml {
namespace {

ggml_backend_reg* registration();
extern ggml_backend_buffer_type buffer_type;

/// How activations are quantized, "s8g32"; null: they are multiplied as they are. NIBBLE_GGML_ACT_SCHEME, read once.
const char* act_scheme = "s8g32";

/// The types of weights that nibble multiplies: NIBBLE_GGML_TYPES, read once. Those that it is about as fast with as ggml, or faster, for any number of
/// tokens, unless others are named.
std::vector<ggml_type> types = {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0};

// ---- Weights ----------------------------------------------------------------------------------------------------------------------

/// The memory of a buffer and the weights in it. What is packed touches no page of the memory.
struct Buffer {
  std::byte* memory;
  std::size_t size;
  std::vector<std::unique_ptr<Weight>> weights;
};

/// Reads NIBBLE_GGML_TYPES: "all", or names of ggml's types with commas between them. False for a name that is none of them.
bool choose_types(std::string_view names) {
  types.clear();
  for (bool more = true; more;) {
    const std::size_t comma = names.find(',');
    const std::string_view name = names.substr(0, comma);
    const std::size_t before = types.size();
    for (const Format& format : formats())
      if (name == "all" || name == ggml_type_name(format.type)) types.push_back(format.type);
    if (types.size() == before) return false;
    more = comma != std::string_view::npos;
    if (more) names.remove_prefix(comma + 1);
  }
  return true;
}

/// The limits that nibble has, and that a weight be a whole, dense matrix of a type it knows, or several of them, a layer's experts.
bool is_weight(const ggml_tensor* t) {
  return std::ranges::find(types, t->type) != types.end() && t->op == GGML_OP_NONE && t->view_src == nullptr && ggml_is_3d(t) &&
         ggml_is_contiguous(t) && !ggml_is_empty(t) && t->ne[0] <= NIB_MAX_SIZE && t->ne[1] <= NIB_MAX_SIZE &&
         t->ne[0] <= NIB_MAX_ELEMENTS / t->ne[1];
}

/// The weight that a tensor of a buffer of nibble is, or is a part of; null for other tensors.
Weight* weight_of(const ggml_tensor* t) {
  const ggml_tensor* whole = t->view_src == nullptr ? t : t->view_src;
  return whole->buffer->buft == &buffer_type ? static_cast<Weight*>(whole->extra) : nullptr;
}

/// Where in the blocks of its weight a tensor begins.
std::size_t begin_of(const ggml_tensor* t) {
  return t->view_src == nullptr
             ? 0
             : static_cast<std::size_t>(static_cast<std::byte*>(t->data) - static_cast<std::byte*>(t->view_src->data));
}

void buffer_free(ggml_backend_buffer* buffer) {
  const std::unique_ptr<Buffer> own(static_cast<Buffer*>(buffer->context));
  munmap(own->memory, own->size);
}

void* buffer_base(ggml_backend_buffer* buffer) { return static_cast<Buffer*>(buffer->context)->memory; }

ggml_status buffer_init_tensor(ggml_backend_buffer* buffer, ggml_tensor* t) try {
  if (!is_weight(t)) return GGML_STATUS_SUCCESS;
  auto& weights = static_cast<Buffer*>(buffer->context)->weights;
  weights.push_back(std::make_unique<Weight>(*t, static_cast<std::byte*>(t->data), act_scheme));
  t->extra = weights.back().get();
  return GGML_STATUS_SUCCESS;
} catch (const std::bad_alloc&) {
  return GGML_STATUS_ALLOC_FAILED;
}

void buffer_set_tensor(ggml_backend_buffer*, ggml_tensor* t, const void* data, std::size_t offset, std::size_t size) {
  if (Weight* weight = weight_of(t)) {
    weight->write(static_cast<const std::byte*>(data), begin_of(t) + offset, size);
  } else {
    std::memcpy(static_cast<std::byte*>(t->data) + offset, data, size);
  }
}

void buffer_get_tensor(ggml_backend_buffer*, const ggml_tensor* t, void* data, std::size_t offset, std::size_t size) {
  if (const Weight* weight = weight_of(t)) {
    weight->read(static_cast<std::byte*>(data), begin_of(t) + offset, size);
  } else {
    std::memcpy(data, static_cast<const std::byte*>(t->data) + offset, size);
  }
}

void buffer_memset_tensor(ggml_backend_buffer* buffer, ggml_tensor* t, std::uint8_t value, std::size_t offset, std::size_t size) {
  buffer_set_tensor(buffer, t, std::vector(size, value).data(), offset, size);
}

void buffer_clear(ggml_backend_buffer* buffer, std::uint8_t value) {
  const auto* own = static_cast<const Buffer*>(buffer->context);
  std::memset(own->memory, value, own->size);
  for (const auto& weight : own->weights) weight->load();
}

const char* buffer_type_name(ggml_backend_buffer_type*) { return "nibble"; }
std::size_t buffer_type_alignment(ggml_backend_buffer_type*) { return 64; }

ggml_backend_buffer* buffer_alloc(ggml_backend_buffer_type* type, std::size_t size) try {
  auto own = std::make_unique<Buffer>();
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    log_error("no memory for a buffer of weights", (std::to_string(size) + " bytes").c_str());
    return nullptr;
  }
  own->memory = static_cast<std::byte*>(memory);
  own->size = size;
  const ggml_backend_buffer_i functions{.free_buffer = buffer_free,
                                        .get_base = buffer_base,
                                        .init_tensor = buffer_init_tensor,
                                        .memset_tensor = buffer_memset_tensor,
                                        .set_tensor = buffer_set_tensor,
                                        .get_tensor = buffer_get_tensor,
                                        .clear = buffer_clear};
  return ggml_backend_buffer_init(type, functions, own.release(), size);
} catch (const std::bad_alloc&) {
  return nullptr;
}

// ---- Products ---------------------------------------------------------------------------------------------------------------------

/// A stream of ggml: its threads and scratch memory.
struct Backend {
  int threads = GGML_DEFAULT_N_THREADS;
  std::unique_ptr<nib_context, Destroy<nib_context_destroy>> context;  // for `threads`; null: not made yet
  std::unique_ptr<std::byte[]> workspace;
  std::size_t workspace_bytes = 0;
};

#ifdef _OPENMP
/// A loop on the threads that ggml's CPU backend uses, too: threads of another pool would run while those wait actively.
void parallel_for(void* user, std::int64_t count, nib_loop_body call, void* body) {
  const int threads = static_cast<Backend*>(user)->threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (std::int64_t i = 0; i < count; ++i) call(body, i);
}
#else
constexpr nib_parallel_for parallel_for = nullptr;
#endif

/// True when an operation is a product that nibble computes, wherever its weight will be.
bool is_product(const ggml_tensor* op) {
  const ggml_tensor *w = op->src[0], *a = op->src[1];
  if (!is_weight(w) || a->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32 || !ggml_is_contiguous(op)) return false;
  if (op->op == GGML_OP_MUL_MAT)
    return ggml_is_matrix(w) && a->nb[0] == sizeof(float) && a->nb[1] % sizeof(float) == 0 &&
           (ggml_is_matrix(a) || ggml_is_contiguous(a));
  const ggml_tensor* ids = op->src[2];  // [T,top_k]; a row of A for each token, or for each of its experts
  return w->ne[2] > 1 && ggml_is_contiguous(a) && (a->ne[1] == 1 || a->ne[1] == ids->ne[0]) && a->ne[3] == 1 &&
         ids->type == GGML_TYPE_I32 && ids->nb[0] % sizeof(std::int32_t) == 0 && ids->nb[1] % sizeof(std::int32_t) == 0 &&
         ids->ne[0] <= kMaxExpertRows;
}

/// D = A·Wᵀ; false when nibble refuses: nib_last_error().
bool multiply(const nib_context* context, const Weight& weight, const ggml_tensor* d, std::byte* workspace) {
  const ggml_tensor* a = d->src[1];
  const auto* from = static_cast<const float*>(a->data);
  auto* to = static_cast<float*>(d->data);
  const std::int64_t stride = ggml_is_contiguous(a) ? weight.k() : static_cast<std::int64_t>(a->nb[1] / sizeof(float));
  const std::int64_t rows = ggml_nrows(a);
  for (std::int64_t m = 0; m < rows; m += kMaxRows)
    if (!weight.run(context, from + m * stride, stride, std::min(kMaxRows, rows - m), to + m * weight.n(), workspace))
      return false;
  return true;
}

/// The same of the experts that d's third source names.
bool multiply_experts(const nib_context* context, const Weight& weight, const ggml_tensor* d, std::byte* workspace) {
  const ggml_tensor *a = d->src[1], *ids = d->src[2];
  const auto* from = static_cast<const float*>(a->data);
  auto* to = static_cast<float*>(d->data);
  const std::int64_t top_k = ids->ne[0], tokens = ids->ne[1], each = kMaxExpertRows / top_k;
  for (std::int64_t t = 0; t < tokens; t += each) {
    const std::int64_t count = std::min(each, tokens - t);
    nib_view view =
        nib_matrix(static_cast<const std::byte*>(ids->data) + t * static_cast<std::int64_t>(ids->nb[1]), NIB_S32, count, top_k);
    view.strides[0] = static_cast<std::int64_t>(ids->nb[1] / sizeof(std::int32_t));
    view.strides[1] = static_cast<std::int64_t>(ids->nb[0] / sizeof(std::int32_t));
    if (!weight.run_experts(context, from + t * a->ne[1] * weight.k(), count * a->ne[1], view, to + t * top_k * weight.n(),
                            workspace))
      return false;
  }
  return true;
}

/// Whether the backend has a context for its threads, and as much scratch memory as a weight needs; if not, nib_last_error().
bool is_ready(Backend& backend, const Weight& weight) {
  if (backend.context == nullptr) {
    const nib_context_desc desc{
        .struct_size = sizeof desc, .parallel_for = parallel_for, .user = &backend, .threads = backend.threads};
    nib_context* context = nullptr;
    if (nib_context_create(&desc, &context) != NIB_OK) return false;
    backend.context.reset(context);
  }
  if (backend.workspace_bytes < weight.workspace_bytes()) {
    backend.workspace = std::make_unique_for_overwrite<std::byte[]>(weight.workspace_bytes());
    backend.workspace_bytes = weight.workspace_bytes();
  }
  return true;
}

ggml_status compute(Backend& backend, const ggml_tensor* d) {
  const ggml_tensor* w = d->src[0];
  if (ggml_is_empty(d)) return GGML_STATUS_SUCCESS;
  const Weight* weight = weight_of(w);
  // A weight that had no buffer yet when the engine asked, and was placed elsewhere then, is packed for this product.
  std::unique_ptr<Weight> packed_now;
  if (weight == nullptr) {
    packed_now = std::make_unique<Weight>(*w, static_cast<std::byte*>(w->data), act_scheme);
    packed_now->load();
    weight = packed_now.get();
  }
  if (!weight->packed()) {
    log_error(w->name, "the weight is not packed; the log says why, where it was loaded");
    return GGML_STATUS_FAILED;
  }
  const auto product = d->op == GGML_OP_MUL_MAT ? multiply : multiply_experts;
  if (is_ready(backend, *weight) && product(backend.context.get(), *weight, d, backend.workspace.get()))
    return GGML_STATUS_SUCCESS;
  log_error(d->name, nib_last_error());
  return GGML_STATUS_FAILED;
}

ggml_status backend_graph_compute(ggml_backend* backend, ggml_cgraph* graph) try {
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    const ggml_tensor* node = ggml_graph_node(graph, i);
    const bool is_a_product = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
    if (!is_a_product || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) continue;  // views compute nothing
    if (const ggml_status status = compute(*static_cast<Backend*>(backend->context), node); status != GGML_STATUS_SUCCESS)
      return status;
  }
  return GGML_STATUS_SUCCESS;
} catch (const std::bad_alloc&) {
  return GGML_STATUS_ALLOC_FAILED;
}

const char* backend_name(ggml_backend*) { return "nibble"; }

void backend_free(ggml_backend* backend) {
  delete static_cast<Backend*>(backend->context);
  delete backend;
}

void backend_set_threads(ggml_backend* backend, int threads) {
  auto* own = static_cast<Backend*>(backend->context);
  if (own->threads == threads) return;
  own->threads = threads;
  own->context.reset();
}

// ---- The device -------------------------------------------------------------------------------------------------------------------

extern ggml_backend_device device, compute_device;

ggml_backend_buffer_type buffer_type{
    .iface = {.get_name = buffer_type_name, .alloc_buffer = buffer_alloc, .get_alignment = buffer_type_alignment},
    .device = &device,
    .context = nullptr};

const char* device_name(ggml_backend_device*) { return "nibble"; }
const char* device_description(ggml_backend_device*) { return "nibble: quantized linear layers on the CPU"; }
enum ggml_backend_dev_type device_type(ggml_backend_device*) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

/// None of its own: engines do not divide models by it.
void device_memory(ggml_backend_device*, std::size_t* free, std::size_t* total) { *free = *total = 0; }

void device_props(ggml_backend_device* of, ggml_backend_dev_props* props) {
  *props = {.name = device_name(of), .description = device_description(of), .type = device_type(of)};
  props->caps.mmap_support = true;
}

ggml_backend* device_init_backend(ggml_backend_device*, const char*) {
  static ggml_guid guid = {0x6e, 0x69, 0x62, 0x62, 0x6c, 0x65, 0x4a, 0x91, 0x8f, 0x0d, 0x27, 0xc3, 0x5b, 0xe8, 0x14, 0x72};
  auto own = std::make_unique<Backend>();
  const ggml_backend_i functions{.get_name = backend_name, .free = backend_free, .graph_compute = backend_graph_compute};
  return new ggml_backend{.guid = &guid, .iface = functions, .device = &compute_device, .context = own.release()};
}

ggml_backend_buffer_type* weights_buffer_type(ggml_backend_device*) { return &buffer_type; }
ggml_backend_buffer_type* compute_buffer_type(ggml_backend_device*) { return ggml_backend_cpu_buffer_type(); }

bool device_supports_op(ggml_backend_device*, const ggml_tensor* op) {
  switch (op->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE: return true;
    case GGML_OP_MUL_MAT:
    case GGML_OP_MUL_MAT_ID: {
      const ggml_backend_buffer* buffer = op->src[0]->buffer;
      return is_product(op) && (buffer == nullptr || buffer->buft == &buffer_type);
    }
    default: return false;
  }
}

bool device_supports_buffer_type(ggml_backend_device*, ggml_backend_buffer_type* type) {
  return type == &buffer_type || ggml_backend_buft_is_host(type);
}

ggml_backend_device make_device(ggml_backend_buffer_type* (*get_buffer_type)(ggml_backend_device*)) {
  return {.iface = {.get_name = device_name,
                    .get_description = device_description,
                    .get_memory = device_memory,
                    .get_type = device_type,
                    .get_props = device_props,
                    .init_backend = device_init_backend,
                    .get_buffer_type = get_buffer_type,
                    .supports_op = device_supports_op,
                    .supports_buft = device_supports_buffer_type},
          .reg = registration(),
          .context = nullptr};
}

/// The device that engines find: they ask it where weights go.
ggml_backend_device device = make_device(weights_buffer_type);
/// The device of its backends, which engines ask where activations go. In memory of the weights' buffer type, which is not the host's for
/// the CPU backend, every result would be copied.
ggml_backend_device compute_device = make_device(compute_buffer_type);

const char* registration_name(ggml_backend_reg*) { return "nibble"; }
std::size_t registration_devices(ggml_backend_reg*) { return 1; }
ggml_backend_device* registration_device(ggml_backend_reg*, std::size_t) { return &device; }

void* registration_function(ggml_backend_reg*, const char* name) {
  return std::string_view(name) == "ggml_backend_set_n_threads" ? reinterpret_cast<void*>(backend_set_threads) : nullptr;
}

ggml_backend_reg* registration() {
  static ggml_backend_reg value{.api_version = GGML_BACKEND_API_VERSION,
                                .iface = {.get_name = registration_name,
                                          .get_device_count = registration_devices,
                                          .get_device = registration_device,
                                          .get_proc_address = registration_function},
                                .context = nullptr};
  return &value;
}

}  // namespace
}  // namespace nibble::ggml

/// What ggml calls when it has loaded the library. Null where the backend cannot be used, with the reason in ggml's log.
extern "C" __attribute__((visibility("default"))) ggml_backend_reg* ggml_backend_init() {
  using namespace nibble::ggml;
  nib_cpu cpu{.struct_size = sizeof cpu};
  if (nib_get_cpu(&cpu) != NIB_OK) {  // the environment is not as nibble wants it
    log_error("the backend is off", nib_last_error());
    return nullptr;
  }
  if (const char* given = std::getenv("NIBBLE_GGML_ACT_SCHEME"); given != nullptr) {
    if (std::string_view(given) == "none") {
      act_scheme = nullptr;
    } else if (std::string_view(given) != "s8g32") {
      log_error("the backend is off", ("NIBBLE_GGML_ACT_SCHEME is '" + std::string(given) +
                                       "': s8g32 multiplies int8 activations, none multiplies them as they are")
                                          .c_str());
      return nullptr;
    }
  }
  if (const char* given = std::getenv("NIBBLE_GGML_TYPES"); given != nullptr && !choose_types(given)) {
    std::string known;
    for (const Format& format : formats()) known += (known.empty() ? "" : ", ") + std::string(ggml_type_name(format.type));
    log_error("the backend is off",
              ("NIBBLE_GGML_TYPES is '" + std::string(given) + "': all, or some of " + known + ", with commas").c_str());
    return nullptr;
  }
  return registration();
}
