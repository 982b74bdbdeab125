// Shared by every function of the C interface: errors as codes with a text, typed handles, structs of any version, and views that are
// checked before they are read.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/printable.hpp"
#include "nibble/nibble.h"
#include "nibble/nibble.hpp"

namespace nibble::c_api {

// ---- Errors ----

/// The text of nib_last_error().
const char* last_error_text() noexcept;
/// Records a failure as this thread's last one and returns its code.
nib_status report(const Status& status) noexcept;
/// The same for the exception that is being handled.
nib_status report_exception() noexcept;

/// Runs a function's body, which returns a Status; exceptions become a Status too.
template <class Body>
nib_status guarded(Body&& body) noexcept {
  try {
    const Status status = body();
    return status.ok() ? NIB_OK : report(status);
  } catch (...) {
    return report_exception();
  }
}

/// Ok when none of the required pointers is null; otherwise invalid_argument with the name of the first that is.
Status required(std::initializer_list<std::pair<std::string_view, const void*>> pointers);

// ---- Handles ----

#ifdef NIBBLE_CHECK_HANDLES
inline constexpr bool kCheckHandles = true;
#else
inline constexpr bool kCheckHandles = false;
#endif

/// The object behind a handle. With checked handles the shell of a destroyed handle stays, so that a later use is detected.
struct Shell {
  explicit Shell(std::uint32_t kind) : magic(kind) {}
  std::atomic<std::uint32_t> magic;
  Shell* next = nullptr;  // of the graveyard
};

inline constexpr std::uint32_t kDestroyed = 0xdeadbeef;
void bury(Shell* shell) noexcept;

/// T in a Shell. `Handle` defines kMagic and kName.
template <class Handle, class T>
struct Boxed : Shell {
  template <class... Args>
  explicit Boxed(Args&&... args) : Shell(Handle::kMagic), value(std::in_place, std::forward<Args>(args)...) {}
  std::optional<T> value;
};

/// The value behind a handle, which is checked first.
template <class Handle>
auto open(Handle* handle) -> Result<decltype(&*handle->value)> {
  using Plain = std::remove_const_t<Handle>;
  if (handle == nullptr) return error(StatusCode::invalid_argument, "the {} is NULL", Plain::kName);
  if (handle->magic.load(std::memory_order_relaxed) != Plain::kMagic)
    return error(StatusCode::invalid_argument, "this is no {}, or one that was destroyed", Plain::kName);
  return &*handle->value;
}

template <class Handle>
nib_status destroy(Handle* handle) noexcept {
  if (handle == nullptr) return NIB_OK;
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(open(handle).status());
    handle->magic.store(kDestroyed, std::memory_order_relaxed);
    if (!kCheckHandles) return delete handle, Status();
    handle->value.reset();
    return bury(handle), Status();
  });
}

/// Makes a new handle of the result of `make`, a Result<T>.
template <class Handle, class Make>
nib_status create(Handle** out, Make&& make) noexcept {
  return guarded([&]() -> Status {
    NIBBLE_RETURN_IF_ERROR(required({{"handle to be made", out}}));
    NIBBLE_ASSIGN_OR_RETURN(auto value, make());
    *out = std::make_unique<Handle>(std::move(value)).release();
    return {};
  });
}

// ---- Structs ----

Status check_size(std::string_view name, const void* given, std::size_t size, std::size_t known);

/// A copy of a caller's struct; members that an older caller does not know are zero. Null is all zeros if `optional`.
template <class T>
Result<T> read(std::string_view name, const T* given, bool optional = false) {
  T known{};
  if (given == nullptr) return optional ? Result<T>(known) : error(StatusCode::invalid_argument, "{} is NULL", name);
  std::size_t size;
  std::memcpy(&size, given, sizeof size);
  NIBBLE_RETURN_IF_ERROR(check_size(name, given, size, sizeof known));
  std::memcpy(&known, given, std::min(size, sizeof known));
  if constexpr (requires { known.reserved; })
    if (known.reserved != 0) return error(StatusCode::unsupported, "{}.reserved is {}, not 0", name, known.reserved);
  return known;
}

/// Fills the members of a caller's struct that the caller knows; struct_size stays.
template <class T>
Status write(std::string_view name, T* given, T value) {
  if (given == nullptr) return error(StatusCode::invalid_argument, "{} is NULL", name);
  std::size_t size;
  std::memcpy(&size, given, sizeof size);
  NIBBLE_RETURN_IF_ERROR(check_size(name, nullptr, size, sizeof value));
  value.struct_size = size;
  std::memset(static_cast<void*>(given), 0, size);
  std::memcpy(static_cast<void*>(given), &value, std::min(size, sizeof value));
  return {};
}

// ---- Texts ----

inline std::string_view text_or(const char* text, std::string_view otherwise) { return text == nullptr ? otherwise : text; }

/// A copy of a text for the caller; null `out`: none is made.
Status give(std::string_view text, char** out);

template <std::size_t kSize>
void copy_text(std::string_view text, char (&to)[kSize]) {
  const std::size_t length = std::min(text.size(), kSize - 1);
  std::copy_n(text.data(), length, to);
  to[length] = '\0';
}

std::string notes_text(const std::vector<Note>& notes, std::string_view about = "");

// ---- Lists ----

/// Element `index` of the list of `what` that `owner` has.
template <class T>
Result<const T*> at(std::span<const T> all, size_t index, std::string_view what, std::string_view owner) {
  if (index < all.size()) return &all[index];
  return error(StatusCode::invalid_argument, "there is no {} {}: the {} has {}", what, index, owner, all.size());
}

/// The index of `found` in the list; not_found when it is null.
template <class T>
Status index_of(std::span<const T> all, const T* found, const char* name, std::string_view what, std::string_view owner,
                size_t* index) {
  if (found == nullptr) return error(StatusCode::not_found, "the {} has no {} called '{}'", owner, what, shown(name));
  *index = static_cast<size_t>(found - all.data());
  return {};
}

// ---- Values ----

/// A type by number; 0 means `otherwise`.
Result<DType> dtype(std::string_view what, nib_dtype number, DType otherwise = DType::none);
/// The scheme of weights called `text`.
Result<WeightScheme> weight_scheme(const char* text, DType scale);
/// The scheme of activations called `text`; null: none.
Result<ActScheme> act_scheme(const char* text);
Result<Backend> backend(nib_backend number);
Result<QuantizeSpec> quantize_spec(const nib_quantize_desc* desc);
Result<ImageLayout> image_layout(std::string_view what, nib_image_layout number);
Result<Accumulation> accumulation(std::string_view what, nib_accumulation number);

/// A view whose type, shape, strides and alignment are sound. A null pointer, or null data, is an absent one.
Result<TensorView> view(std::string_view what, const nib_view* v, bool aligned = true);
nib_view view(const ConstTensorView& v);

struct Threads {
  std::unique_ptr<Executor> own;
};
/// The threads of a context; null: the process-wide pool, which is null here too.
Result<Executor*> executor(const nib_context* context);

// ---- Plans ----

Result<PackOptions> pack_options(const nib_pack_desc& desc);
Result<LinearSpec> linear_spec(const nib_linear_desc* given);
/// The linear layers that a weight is packed for.
Result<LinearSpec> packed_linear_spec(const nib_pack_desc& desc);
Result<PlanOptions> plan_options(const nib_plan_options* given);
std::string explanation_text(const Explanation& explanation);

/// What a run reads beside A.
Result<Operands> plan_operands(const nib_operands& operands);
Result<std::span<std::byte>> scratch_memory(void* workspace, size_t bytes);
/// Ok when a run in host memory has no stream.
Status without_stream(const void* stream);

}  // namespace nibble::c_api

// The handles. A magic number is its name in ASCII.
struct nib_context : nibble::c_api::Boxed<nib_context, nibble::c_api::Threads> {
  static constexpr std::uint32_t kMagic = 0x4e435458;  // NCTX
  static constexpr std::string_view kName = "nib_context";
  using Boxed::Boxed;
};

struct nib_checkpoint : nibble::c_api::Boxed<nib_checkpoint, nibble::Checkpoint> {
  static constexpr std::uint32_t kMagic = 0x4e43484b;  // NCHK
  static constexpr std::string_view kName = "nib_checkpoint";
  using Boxed::Boxed;
};

namespace nibble::c_api {
/// A QuantTensor with its scheme's name, which descriptions point to.
struct NamedTensor {
  NamedTensor(QuantTensor made) : q(std::move(made)), scheme(q.scheme.name()) {}  // NOLINT(google-explicit-constructor)
  QuantTensor q;
  std::string scheme;
};
}  // namespace nibble::c_api

struct nib_qtensor : nibble::c_api::Boxed<nib_qtensor, nibble::c_api::NamedTensor> {
  static constexpr std::uint32_t kMagic = 0x4e51544e;  // NQTN
  static constexpr std::string_view kName = "nib_qtensor";
  using Boxed::Boxed;
};

struct nib_weight : nibble::c_api::Boxed<nib_weight, nibble::PackedWeight> {
  static constexpr std::uint32_t kMagic = 0x4e574754;  // NWGT
  static constexpr std::string_view kName = "nib_weight";
  using Boxed::Boxed;
};

struct nib_packed_file : nibble::c_api::Boxed<nib_packed_file, nibble::PackedFile> {
  static constexpr std::uint32_t kMagic = 0x4e504b46;  // NPKF
  static constexpr std::string_view kName = "nib_packed_file";
  using Boxed::Boxed;
};

struct nib_plan : nibble::c_api::Boxed<nib_plan, nibble::Plan> {
  static constexpr std::uint32_t kMagic = 0x4e504c4e;  // NPLN
  static constexpr std::string_view kName = "nib_plan";
  using Boxed::Boxed;
};

struct nib_plan_cache : nibble::c_api::Boxed<nib_plan_cache, nibble::PlanCache> {
  static constexpr std::uint32_t kMagic = 0x4e504c43;  // NPLC
  static constexpr std::string_view kName = "nib_plan_cache";
  using Boxed::Boxed;
};

struct nib_experts : nibble::c_api::Boxed<nib_experts, nibble::PackedExperts> {
  static constexpr std::uint32_t kMagic = 0x4e455850;  // NEXP
  static constexpr std::string_view kName = "nib_experts";
  using Boxed::Boxed;
};

struct nib_grouped_plan : nibble::c_api::Boxed<nib_grouped_plan, nibble::GroupedPlan> {
  static constexpr std::uint32_t kMagic = 0x4e475250;  // NGRP
  static constexpr std::string_view kName = "nib_grouped_plan";
  using Boxed::Boxed;
};

struct nib_moe_plan : nibble::c_api::Boxed<nib_moe_plan, nibble::MoePlan> {
  static constexpr std::uint32_t kMagic = 0x4e4d4f45;  // NMOE
  static constexpr std::string_view kName = "nib_moe_plan";
  using Boxed::Boxed;
};

struct nib_gpu_memory : nibble::c_api::Boxed<nib_gpu_memory, nibble::DeviceMemory> {
  static constexpr std::uint32_t kMagic = 0x4e47504d;  // NGPM
  static constexpr std::string_view kName = "nib_gpu_memory";
  using Boxed::Boxed;
};
